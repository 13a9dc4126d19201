"""The Fashion-MNIST images that the shipped models are trained on.

Fashion-MNIST (Xiao, Rasul, Vollgraf 2017, arXiv 1708.07747; MIT licence): 70,000 grey images of
28 x 28 pixels, ten kinds of clothing. Only training needs the images; everything else in the
companion starts from logits.
"""

from __future__ import annotations

import gzip
import hashlib
import os
from pathlib import Path

import numpy as np

# Where the Debian package `dataset-fashion-mnist` installs the four files.
DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")

# md5 of the decompressed files, so that any mirror and any compression will do.
MD5 = {
    "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
    "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
    "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
    "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
}


def read_idx(path: str | os.PathLike) -> np.ndarray:
    """Read one array of unsigned bytes in the idx format, gzip-compressed or plain.

    The format: two zero bytes, 0x08 for unsigned bytes, the number of axes, then the length of each
    axis as a big-endian 32-bit integer, then the data.

    Args:
        path: the file; a name ending in ``.gz`` is decompressed.

    Returns:
        uint8 array of the shape that the header gives.

    Raises:
        ValueError: the header is not that of an idx file of bytes, or the data are cut short.

    Source: Y. LeCun's description of the MNIST files.
    """
    path = Path(path)
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as file:
            content = file.read()
    except (EOFError, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is truncated or is not a gzip file: {error}") from None
    if len(content) < 4 or content[:3] != b"\x00\x00\x08" or len(content) < 4 + 4 * content[3]:
        raise ValueError(f"{path} is not an idx file of unsigned bytes (starts with {content[:4]!r})")
    n_axes = content[3]
    start = 4 + 4 * n_axes
    shape = tuple(int(length) for length in np.frombuffer(content[4:start], dtype=">u4"))
    expected = int(np.prod(shape, dtype=np.int64))
    if len(content) - start != expected:
        raise ValueError(
            f"{path} is truncated or damaged: shape {shape} needs {expected} bytes, found {len(content) - start}"
        )
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)


def load_images(
    folder: str | os.PathLike | None = None, *, check: bool = True
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Load the images and labels of Fashion-MNIST.

    Looked for in ``folder`` if given; else in the Debian package's folder; else downloaded once by
    torchvision into ``~/.cache/smartlib``.

    Args:
        folder: a folder with the four idx files, plain or ``.gz``.
        check: compare the md5 of the (decompressed) files with the published ones.

    Returns:
        ``train_images (60000, 28, 28) uint8, train_labels (60000,) int64, test_images, test_labels``.

    Raises:
        FileNotFoundError: a file is missing from ``folder``.
        ValueError: a file is damaged or is not the published one.
    """
    if folder is None:
        folder = DEBIAN_FOLDER if DEBIAN_FOLDER.is_dir() else _download()
    folder = Path(folder)
    arrays = {}
    for name, md5 in MD5.items():
        path = next((p for p in (folder / f"{name}.gz", folder / name) if p.is_file()), None)
        if path is None:
            raise FileNotFoundError(
                f"neither {name}.gz nor {name} is in {folder}; install the Debian package dataset-fashion-mnist, "
                "or give the folder that holds the four idx files"
            )
        arrays[name] = read_idx(path)
        if check:
            header = _idx_header(arrays[name].shape)
            found = hashlib.md5(header + arrays[name].tobytes()).hexdigest()
            if found != md5:
                raise ValueError(f"{path} is not the published file: md5 {found}, expected {md5}")
    return (
        arrays["train-images-idx3-ubyte"],
        arrays["train-labels-idx1-ubyte"].astype(np.int64),
        arrays["t10k-images-idx3-ubyte"],
        arrays["t10k-labels-idx1-ubyte"].astype(np.int64),
    )


def _idx_header(shape: tuple[int, ...]) -> bytes:
    return bytes([0, 0, 8, len(shape)]) + np.asarray(shape, dtype=">i4").tobytes()


def _download() -> Path:
    from torchvision.datasets import FashionMNIST

    root = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "smartlib"
    FashionMNIST(root, train=True, download=True)
    return root / "FashionMNIST" / "raw"
