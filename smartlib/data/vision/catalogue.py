"""Which data sets and networks profile ``paper`` has, and where they lie.

``paper.json`` lists them. Another file of the same form takes its place where ``SMARTLIB_CATALOGUE`` names one: so own
images and networks come into the notebooks.

    {"data sets": {"birds": {"layout": "folders", "folder": "/data/birds/val", "n_classes": 200, "validation": 0.5}},
     "models": {"birds/mine": {"from": "timm", "name": "resnet50", "checkpoint": "/data/mine.pth", "n_classes": 200}}}

Images are looked for below ``SMARTLIB_IMAGES_DIR``, logits are kept below ``SMARTLIB_LOGITS_DIR``; both default to the
user's cache.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

LAYOUTS = ("cifar", "cifar-c", "imagenet", "imagenet-c", "synsets", "numbered", "folders", "list")


@dataclass(frozen=True)
class Job:
    """The images of one data set (of one condition of it) through one network.

    Args:
        dataset: a name of the catalogue. model: the part of a network's name behind its family.
        condition: "" or, of corrupted copies, such as ``fog-5``.
    """

    dataset: str
    model: str
    condition: str = ""

    @property
    def network(self) -> dict:
        """What `smartlib.data.vision.models.load_network` needs."""
        return catalogue()["models"][f"{family(self.dataset)}/{self.model}"]

    @property
    def folder(self) -> Path:
        """Where the logits of this job lie, or will lie."""
        return logits_folder() / self.dataset / self.model / self.condition

    def __str__(self) -> str:
        return f"{self.dataset}/{self.model}{'@' if self.condition else ''}{self.condition}"


def catalogue() -> dict:
    """The data sets, models and corruptions.

    Raises:
        ValueError: the file that SMARTLIB_CATALOGUE names is not there, or is not of this form; says what is missing.
    """
    given = os.environ.get("SMARTLIB_CATALOGUE")
    path = Path(given) if given else Path(__file__).with_name("paper.json")
    if not path.is_file():
        raise ValueError(f"SMARTLIB_CATALOGUE names {path}, which is not there")
    found = {"corruptions": []} | json.loads(path.read_text(encoding="utf-8"))
    for name, entry in found.get("data sets", {}).items():
        if missing := [key for key in ("layout", "folder", "n_classes") if key not in entry]:
            raise ValueError(f"{path}: data set {name!r} lacks {missing}")
        if entry["layout"] not in LAYOUTS:
            raise ValueError(
                f"{path}: data set {name!r} has the layout {entry['layout']!r}; known: {', '.join(LAYOUTS)}"
            )
    if not found.get("data sets") or not found.get("models"):
        raise ValueError(f"{path} must name 'data sets' and 'models'")
    return found


def family(dataset: str) -> str:
    """What the names of a data set's models begin with: ``imagenet`` for ImageNet-Sketch."""
    return catalogue()["data sets"][dataset].get("models", dataset)


def conditions(dataset: str) -> tuple[str, ...]:
    """The conditions of corrupted copies; a single "" for a data set that has none."""
    found = catalogue()
    severities = found["data sets"][dataset].get("severities", ())
    return tuple(f"{name}-{severity}" for severity in severities for name in found["corruptions"]) or ("",)


def jobs(dataset: str | None = None, model: str | None = None) -> Iterator[Job]:
    """What there is to extract: data set by data set, of it condition by condition, of that all networks.

    Args:
        dataset: only this one. model: only this one, named without its family.

    Raises:
        ValueError: a name that the catalogue does not have.
    """
    found = catalogue()
    if dataset and dataset not in found["data sets"]:
        raise ValueError(f"unknown data set {dataset!r}; known: {', '.join(found['data sets'])}")
    if model and not any(name.endswith(f"/{model}") for name in found["models"]):
        raise ValueError(f"unknown model {model!r}; known: {', '.join(found['models'])}")
    for name in [dataset] if dataset else found["data sets"]:
        own = [key.partition("/")[2] for key in found["models"] if key.partition("/")[0] == family(name)]
        for condition in conditions(name):
            yield from (Job(name, key, condition) for key in own if model in (None, key))


def images_folder() -> Path:
    """The folder that the data sets' folders lie in."""
    return _folder("SMARTLIB_IMAGES_DIR", "images")


def logits_folder() -> Path:
    """The folder that extracted logits lie in."""
    return _folder("SMARTLIB_LOGITS_DIR", "logits")


def _folder(variable: str, name: str) -> Path:
    if given := os.environ.get(variable):
        return Path(given)
    import pooch

    return Path(pooch.os_cache("smartlib")) / name


def place_of(dataset: str) -> Path:
    """Where the images of a data set are looked for."""
    return images_folder() / catalogue()["data sets"][dataset]["folder"]


def is_there(dataset: str) -> bool:
    """Whether the images of a data set lie in their folder; they are not looked at one by one."""
    entry = catalogue()["data sets"][dataset]
    place = place_of(dataset)
    if entry["layout"] == "cifar":
        place = place / {10: "cifar-10-batches-py", 100: "cifar-100-python"}[entry["n_classes"]]
    return (
        place.is_dir() and any(place.iterdir()) and ("list" not in entry or (images_folder() / entry["list"]).is_file())
    )


def open_source(dataset: str, condition: str = "", *, download: bool = True):
    """The images of a data set.

    Args:
        dataset: a name of the catalogue. condition: of corrupted copies.
        download: fetch what is missing and openly available, checked against the published checksum.

    Returns:
        A source, see `smartlib.data.vision.sources`.

    Raises:
        ValueError: the images are missing and cannot be downloaded (says what to do), or are not what they should be.
        ConnectionError: a download failed.
        PermissionError: the licence must be accepted first; says where.
    """
    # Imported here: a plan needs no torch.
    from smartlib.data.vision import sources

    entry, place = catalogue()["data sets"][dataset], place_of(dataset)
    n_classes = entry["n_classes"]
    if not is_there(dataset):
        if not download or entry.get("download") != "torchvision":
            if not download or "archives" not in entry:
                return _stream_or_say(dataset, entry, place)
            _download_archives(entry, place)
    if entry["layout"] in ("cifar-c", "imagenet-c"):
        corruption, _, severity = condition.rpartition("-")
        read = sources.imagenet_c if entry["layout"] == "imagenet-c" else partial(_cifar_c, n_classes)
        return read(place, corruption, int(severity))
    match entry["layout"]:
        case "cifar":
            try:
                return sources.cifar(place, n_classes, download=download)
            except OSError as error:
                raise ConnectionError(
                    f"{entry.get('title', dataset)} could not be downloaded to {place} ({error})"
                ) from error
        case "imagenet":
            return sources.imagenet(place)
        case "synsets":
            return sources.image_folder(place, sources.imagenet_synsets())
        case "numbered":
            return sources.numbered_folders(place, n_classes)
        case "list":
            return sources.image_list(place, images_folder() / entry["list"], n_classes)
    return sources.image_folder(place, entry.get("classes"))


def _cifar_c(n_classes: int, place: Path, corruption: str, severity: int):
    from smartlib.data.vision import sources

    return sources.cifar_c(place, n_classes, corruption, severity)


def _stream_or_say(dataset: str, entry: dict, place: Path):
    from smartlib.data.vision.sources import Stream

    if "stream" in entry:
        return Stream(n_classes=entry["n_classes"], n=entry.get("images"), **entry["stream"])
    raise ValueError(
        f"{dataset}: no images in {place}; put them there (licence: {entry.get('licence', 'not stated')}), or set "
        "SMARTLIB_IMAGES_DIR to the folder that holds them"
    )


def _download_archives(entry: dict, place: Path) -> None:
    """Fetch and unpack the archives of a data set into the folder that its own folder lies in."""
    import pooch

    for archive in entry["archives"]:
        # ImageNet-C's archives have no common folder, the others have that of the data set.
        target = place if len(entry["archives"]) > 1 else place.parent
        try:
            pooch.retrieve(
                archive["url"], known_hash=archive.get("checksum"), path=images_folder() / "archives",
                fname=archive["url"].rpartition("/")[2], processor=pooch.Untar(extract_dir=str(target.resolve())),
                downloader=pooch.HTTPDownloader(progressbar=True, timeout=(5, 60)),
            )  # fmt: skip
        except OSError as error:
            raise ConnectionError(f"{archive['url']} could not be downloaded ({error})") from error
