"""Labelled images in a fixed order, read from the layouts in which data sets are published.

A source is a torch data set of ``(PIL image, label)`` with ``labels`` and an ``identity``, a hash of what it consists
of. Row i is the same image on every machine, so that rows can be cut into shards and drawn into splits.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError
from torch.utils.data import Dataset, IterableDataset

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff")
# Per corruption and severity of CIFAR-C.
CIFAR_TEST = 10_000


class CorruptImageError(ValueError):
    """An image that cannot be decoded; the message names it."""


class Files(Dataset):
    """Image files.

    Args:
        paths: (N,) of the files. labels: (N,) int64. n_classes: K. root: the folder that names in messages and the
            identity are relative to.

    Raises:
        ValueError: no file, or a label outside 0..K-1.
    """

    def __init__(self, paths: Sequence[Path], labels: Sequence[int], n_classes: int, root: Path):
        self.paths, self.root, self.n_classes = list(paths), Path(root), n_classes
        self.labels = _checked(labels, n_classes, root)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, row: int) -> tuple[Image.Image, int]:
        try:
            with Image.open(self.paths[row]) as image:
                # Converting decodes: a truncated file is found here. It also unites grey, CMYK and palette images.
                return image.convert("RGB"), int(self.labels[row])
        except (OSError, SyntaxError, ValueError, UnidentifiedImageError) as error:
            raise CorruptImageError(f"{self.paths[row]} cannot be decoded: {error}") from error

    @cached_property
    def identity(self) -> str:
        """A hash of names, sizes and labels."""
        rows = (f"{path.relative_to(self.root).as_posix()} {path.stat().st_size}" for path in self.paths)
        return _hash(rows, self.labels)


class Arrays(Dataset):
    """Images in an array, which may be a memory map.

    Args:
        images: (N, H, W, 3) uint8. labels: (N,). n_classes: K. name: what messages call it.

    Raises:
        ValueError: another shape or type, or a label outside 0..K-1.
    """

    def __init__(self, images: np.ndarray, labels: Sequence[int], n_classes: int, name: str = "array"):
        if images.ndim != 4 or images.shape[-1] != 3 or images.dtype != np.uint8:
            raise ValueError(f"{name}: expected images (N, H, W, 3) of uint8, found {images.shape} of {images.dtype}")
        if len(images) != len(labels):
            raise ValueError(f"{name}: {len(images)} images but {len(labels)} labels")
        self.images, self.name, self.n_classes = images, name, n_classes
        self.labels = _checked(labels, n_classes, name)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, row: int) -> tuple[Image.Image, int]:
        return Image.fromarray(np.asarray(self.images[row])), int(self.labels[row])

    @cached_property
    def identity(self) -> str:
        """A hash of pixels and labels."""
        rows = (hashlib.sha256(image.tobytes()).hexdigest() for image in self.images)
        return _hash(rows, self.labels)


class Stream(IterableDataset):
    """A data set of the Hugging Face hub (or of local parquet files) that is read as it arrives, never stored.

    Args:
        path, split, revision, data_files: as of ``datasets.load_dataset``. Name a revision: a branch may move.
        n: number of rows; by default what the hub says.
        n_classes: K. columns: names of the image and of the label.

    Raises:
        ImportError: the package datasets is missing.
        PermissionError: the data set asks for a licence to be accepted first; says where.
        ValueError: neither the hub nor ``n`` says how many rows there are, or a column is missing.
    """

    def __init__(
        self, path: str, n_classes: int, *, split: str = "validation", revision: str | None = None,
        data_files: str | Sequence[str] | None = None, n: int | None = None,
        columns: tuple[str, str] = ("image", "label"), workers: int = 4,
    ):  # fmt: skip
        try:
            import datasets
        except ImportError as error:
            raise ImportError("streaming needs the package datasets: run `pip install datasets`") from error
        self.path, self.revision, self.n_classes, self.workers = path, revision, n_classes, workers
        self.columns = columns
        try:
            stream = datasets.load_dataset(path, split=split, revision=revision, data_files=data_files, streaming=True)
        except Exception as error:  # what a gated data set raises depends on the version of the library
            if any(word in f"{type(error).__name__} {error}".lower() for word in ("gated", "401", "403", "authent")):
                raise PermissionError(
                    f"{path} asks for its licence to be accepted: open https://huggingface.co/datasets/{path}, accept "
                    "the terms, then log in here with `hf auth login` (or set HF_TOKEN)"
                ) from error
            raise
        missing = [name for name in columns if stream.column_names and name not in stream.column_names]
        if missing:
            raise ValueError(f"{path} has no column {missing[0]!r}; columns: {', '.join(stream.column_names)}")
        # Bytes are decoded by threads of ours, several at a time and in order.
        self.stream = stream.cast_column(columns[0], datasets.Image(decode=False))
        splits = stream.info.splits or {}
        self.n = n or (splits[split].num_examples if split in splits else None)
        if not self.n:
            raise ValueError(f"{path} does not say how many rows its split {split!r} has: give n")

    def __len__(self) -> int:
        return self.n

    def rows(self, start: int, stop: int) -> Iterator[tuple[int, Image.Image | CorruptImageError, int]]:
        """``(row, image, label)`` of a range of rows, in order; an image that cannot be decoded comes as its error."""
        records = enumerate(self.stream.skip(start).take(stop - start), start)
        with ThreadPoolExecutor(self.workers) as pool:
            waiting = [pool.submit(self._decode, *item) for item in islice(records, 4 * self.workers)]
            while waiting:
                yield waiting.pop(0).result()
                waiting += [pool.submit(self._decode, *item) for item in islice(records, 1)]

    def __iter__(self) -> Iterator[tuple[Image.Image | CorruptImageError, int]]:
        for _, image, label in self.rows(0, self.n):
            yield image, label

    def _decode(self, row: int, record: dict) -> tuple[int, Image.Image | CorruptImageError, int]:
        import io

        image, label = record[self.columns[0]], int(record[self.columns[1]])
        if not 0 <= label < self.n_classes:
            raise ValueError(f"{self.path} row {row}: label {label} is outside 0..{self.n_classes - 1}")
        try:
            content = image["bytes"] if image["bytes"] is not None else Path(image["path"]).read_bytes()
            with Image.open(io.BytesIO(content)) as opened:
                return row, opened.convert("RGB"), label
        except (OSError, SyntaxError, ValueError, UnidentifiedImageError) as error:
            return row, CorruptImageError(f"{self.path} row {row} cannot be decoded: {error}"), label

    @property
    def identity(self) -> str:
        """A hash of where the rows come from; the hub's revision stands for their content."""
        return _hash([self.path, str(self.revision), str(self.n)], np.empty(0, np.int64))


def cifar(folder: str | os.PathLike, n_classes: int, *, download: bool = False) -> Arrays:
    """The 10,000 test images of CIFAR-10 or CIFAR-100, as torchvision reads (and downloads) them.

    Args:
        folder: that holds ``cifar-10-batches-py`` or ``cifar-100-python``. n_classes: 10 or 100.
        download: fetch the archive where it is missing.

    Raises:
        ValueError: the batches are not there, or not those whose checksum torchvision knows.

    Source: Krizhevsky 2009.
    """
    from torchvision.datasets import CIFAR10, CIFAR100

    kind = {10: CIFAR10, 100: CIFAR100}[n_classes]
    try:
        data = kind(str(folder), train=False, download=download)
    except RuntimeError as error:
        raise ValueError(
            f"{Path(folder) / kind.base_folder}: the batches of CIFAR-{n_classes} are missing, or one of them does not "
            f"have the published checksum ({error}); remove that folder and let it be downloaded again"
        ) from error
    return Arrays(data.data, data.targets, n_classes, f"CIFAR-{n_classes}")


def cifar_c(folder: str | os.PathLike, n_classes: int, corruption: str, severity: int) -> Arrays:
    """One corruption of CIFAR-10-C or CIFAR-100-C: 10,000 rows of ``<corruption>.npy``, those of a severity of 1 to 5.

    Args:
        folder: with ``labels.npy`` and one file per corruption, images of severity 1 first.

    Raises:
        ValueError: a file is missing (the message lists what is there), or its length is not five times the labels'.

    Source: Hendrycks and Dietterich 2019; the images are the test images of CIFAR in their order.
    """
    folder = Path(folder)
    path = folder / f"{corruption}.npy"
    if not path.is_file():
        there = sorted(path.stem for path in folder.glob("*.npy") if path.stem != "labels")
        raise ValueError(f"{path} is missing; corruptions there: {', '.join(there) or 'none'}")
    images, labels = np.load(path, mmap_mode="r"), np.load(folder / "labels.npy")
    if len(images) != len(labels) or len(labels) % 5:
        raise ValueError(f"{path} has {len(images)} images for {len(labels)} labels; expected five severities of both")
    n = len(labels) // 5
    rows = slice((severity - 1) * n, severity * n)
    return Arrays(images[rows], labels[rows], n_classes, f"{path.name}, severity {severity}")


def image_folder(folder: str | os.PathLike, classes: Sequence[str] | None = None) -> Files:
    """One folder of images per class.

    Args:
        folder: holds the class folders. classes: their names in the order of the model's outputs, of which some may be
            missing on disk; by default the sorted names of the folders that are there.

    Raises:
        ValueError: the folder is missing or holds no class folder, one that ``classes`` does not have, or no image.
    """
    folder = Path(folder)
    found = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    if not found:
        raise ValueError(f"{folder} holds no folders of images, one per class")
    classes = list(classes or found)
    number = {name: k for k, name in enumerate(classes)}
    unknown = [name for name in found if name not in number]
    if unknown:
        raise ValueError(f"{folder / unknown[0]} is not one of the {len(classes)} classes of the model, such as "
                         f"{', '.join(classes[:3])}")  # fmt: skip
    paths = [path for name in found for path in sorted((folder / name).rglob("*")) if path.suffix.lower() in SUFFIXES]
    labels = [number[path.relative_to(folder).parts[0]] for path in paths]
    return Files(paths, labels, len(classes), folder)


def imagenet_synsets() -> list[str]:
    """The synsets of ImageNet-1K in the order of a model's outputs: sorted."""
    from timm.data import ImageNetInfo

    return ImageNetInfo().label_names()


def imagenet(folder: str | os.PathLike) -> Files:
    """The ImageNet validation images, in class folders or flat with the development kit.

    Args:
        folder: either one folder per synset; or the original flat folder ``ILSVRC2012_val_*.JPEG``, with
            ``ILSVRC2012_devkit_t12`` inside or beside it.

    Returns:
        The images in the order of their file names: the same rows for both layouts, and for ImageNet-C.

    Raises:
        ValueError: neither of the two; or the ground truth does not have as many lines as there are images.

    Source: Russakovsky et al. 2015.
    """
    folder = Path(folder)
    flat = sorted(folder.glob("ILSVRC2012_val_*.JPEG"))
    if not flat:
        return _by_name(image_folder(folder, imagenet_synsets()))
    kits = [base / "ILSVRC2012_devkit_t12" / "data" for base in (folder, folder.parent)]
    kit = next((kit for kit in kits if kit.is_dir()), None)
    if kit is None:
        raise ValueError(
            f"{folder} holds images without class folders; their labels are in the development kit: put "
            "ILSVRC2012_devkit_t12 beside it"
        )
    from scipy.io import loadmat

    # The kit counts classes from 1 in an order of its own; the first thousand synsets are those without children.
    meta = loadmat(kit / "meta.mat", squeeze_me=True)["synsets"]
    synset = {int(record["ILSVRC2012_ID"]): str(record["WNID"]) for record in np.atleast_1d(meta)}
    truth = np.loadtxt(kit / "ILSVRC2012_validation_ground_truth.txt", dtype=int, ndmin=1)
    numbers = np.array([int(path.stem.rsplit("_", 1)[1]) for path in flat])
    if numbers.max() > len(truth):
        raise ValueError(
            f"{flat[numbers.argmax()].name} has no line in the ground truth, which has {len(truth)} lines; is the "
            "development kit that of another year?"
        )
    order = {name: k for k, name in enumerate(imagenet_synsets())}
    labels = [order[synset[truth[number - 1]]] for number in numbers]
    return Files(flat, labels, 1000, folder)


def imagenet_c(folder: str | os.PathLike, corruption: str, severity: int) -> Files:
    """One corruption of ImageNet-C: ``<corruption>/<severity>/<synset>/*.JPEG``.

    Args:
        folder: with one folder per corruption, or with the folders of the archives (``blur``, ``noise``, ...) around
            them.

    Returns:
        The images in the order of their file names, that of :func:`imagenet`.

    Raises:
        ValueError: the corruption or the severity is not there.

    Source: Hendrycks and Dietterich 2019.
    """
    folder = Path(folder)
    places = [place / str(severity) for place in (folder / corruption, *sorted(folder.glob(f"*/{corruption}")))]
    place = next((place for place in places if place.is_dir()), None)
    if place is None:
        there = sorted({path.parent.name for path in (*folder.glob("*/[1-5]"), *folder.glob("*/*/[1-5]"))})
        raise ValueError(f"{places[0]} is missing; corruptions there: {', '.join(there) or 'none'}")
    return _by_name(image_folder(place, imagenet_synsets()))


def numbered_folders(folder: str | os.PathLike, n_classes: int = 1000) -> Files:
    """Class folders that are called 0, 1, 2, ..., as ImageNet-V2 has them: 10 is class 10, not the second one.

    Source: Recht et al. 2019.
    """
    return image_folder(folder, [str(k) for k in range(n_classes)])


def image_list(folder: str | os.PathLike, path: str | os.PathLike, n_classes: int = 1000) -> Files:
    """Images named by a text file with lines ``path label``, as ImageNet-LT has them.

    Args:
        folder: that the paths are relative to. A path whose folders are not there is looked for by its last part, so
            that ``val/n01440764/ILSVRC2012_val_00000293.JPEG`` is also found in a flat folder.
        path: the text file.

    Raises:
        ValueError: a line is not of this form, or an image is missing; says which.

    Source: Liu et al. 2019.
    """
    folder, paths, labels = Path(folder), [], []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        name, _, label = line.strip().rpartition(" ")
        if not name or not label.isdigit():
            raise ValueError(f"{path} line {number}: expected 'path label', found {line!r}")
        last = Path(name).name
        places = [folder / name, folder / last, folder / Path(name).parent.name / last, folder / "val" / last]
        place = next((place for place in places if place.is_file()), None)
        if place is None:
            raise ValueError(f"{path} line {number}: {places[0]} is missing")
        paths.append(place)
        labels.append(int(label))
    return Files(paths, labels, n_classes, folder)


def _by_name(source: Files) -> Files:
    """The same images in the order of their file names."""
    order = sorted(range(len(source)), key=lambda i: (source.paths[i].name, source.paths[i]))
    return Files([source.paths[i] for i in order], source.labels[order], source.n_classes, source.root)


def _checked(labels: Sequence[int], n_classes: int, name: object) -> np.ndarray:
    array = np.asarray(labels, dtype=np.int64)
    if array.size == 0:
        raise ValueError(f"{name} holds no images ({', '.join(SUFFIXES)})")
    bad = np.flatnonzero((array < 0) | (array >= n_classes))
    if bad.size:
        raise ValueError(f"{name}: label {array[bad[0]]} of image {bad[0]} is outside 0..{n_classes - 1}")
    return array


def _hash(rows: Iterator[str] | Sequence[str], labels: np.ndarray) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(f"{row}\0".encode())
    digest.update(np.ascontiguousarray(labels).tobytes())
    return digest.hexdigest()
