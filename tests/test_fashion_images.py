"""Reading the idx files of Fashion-MNIST."""

from __future__ import annotations

import gzip
import hashlib

import numpy as np
import pytest

from smartlib.data import fashion_images
from smartlib.data.fashion_images import load_images, read_idx


def idx(array):
    """The bytes of an idx file."""
    return bytes([0, 0, 8, array.ndim]) + np.asarray(array.shape, dtype=">i4").tobytes() + array.tobytes()


@pytest.fixture
def contents():
    """Four files like the published ones, with 6 training and 4 test images of 28 x 28."""
    rng = np.random.default_rng(0)
    return {
        f"{part}-{kind}": idx(rng.integers(0, limit, (n, *shape), dtype=np.uint8))
        for part, n in (("train", 6), ("t10k", 4))
        for kind, limit, shape in (("images-idx3-ubyte", 256, (28, 28)), ("labels-idx1-ubyte", 10, ()))
    }


def write(folder, contents, *, compress):
    for name, content in contents.items():
        (folder / f"{name}.gz" if compress else folder / name).write_bytes(
            gzip.compress(content) if compress else content
        )


def test_read_idx(tmp_path):
    array = np.arange(2 * 3 * 300, dtype=np.uint8).reshape(2, 3, 300)
    (tmp_path / "plain").write_bytes(idx(array))
    (tmp_path / "packed.gz").write_bytes(gzip.compress(idx(array)))
    for name in ("plain", "packed.gz"):
        assert np.array_equal(read_idx(tmp_path / name), array)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not an idx file"),
        (b"P5 28 28", "is not an idx file"),
        (b"\x00\x00\x0d\x01\x00\x00\x00\x01" + bytes(4), "is not an idx file of unsigned bytes"),  # floats
        (idx(np.zeros((4, 5), np.uint8))[:-1], r"truncated or damaged: shape \(4, 5\) needs 20 bytes, found 19"),
        (idx(np.zeros((4, 5), np.uint8)) + b"\x00", r"truncated or damaged: .* found 21"),
    ],
)
def test_read_idx_rejects(tmp_path, content, message):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_idx(tmp_path / "file")


@pytest.mark.parametrize("compress", [True, False])
def test_load_images(tmp_path, contents, compress):
    write(tmp_path, contents, compress=compress)
    train_images, train_labels, test_images, test_labels = load_images(tmp_path, check=False)
    assert (train_images.shape, test_images.shape) == ((6, 28, 28), (4, 28, 28))
    assert train_images.dtype == test_images.dtype == np.uint8
    assert train_labels.dtype == test_labels.dtype == np.int64
    assert train_labels.tolist() == list(contents["train-labels-idx1-ubyte"][8:])


def test_load_images_checks_the_md5_of_the_decompressed_files(tmp_path, contents, monkeypatch):
    write(tmp_path, contents, compress=True)
    with pytest.raises(
        ValueError, match=r"train-images-idx3-ubyte\.gz is not the published file: md5 .*, expected f4a8"
    ):
        load_images(tmp_path)
    md5 = {name: hashlib.md5(contents[name]).hexdigest() for name in fashion_images.MD5}
    monkeypatch.setattr(fashion_images, "MD5", md5)
    assert len(load_images(tmp_path)[0]) == 6


def test_load_images_names_the_missing_file(tmp_path, contents):
    write(tmp_path, contents, compress=False)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(FileNotFoundError, match=r"neither t10k-labels-idx1-ubyte\.gz nor .* is in .*Debian package"):
        load_images(tmp_path, check=False)


@pytest.mark.skipif(not fashion_images.DEBIAN_FOLDER.is_dir(), reason="dataset-fashion-mnist is not installed")
def test_the_published_images():
    train_images, train_labels, test_images, test_labels = load_images()
    assert (train_images.shape, test_images.shape) == ((60_000, 28, 28), (10_000, 28, 28))
    assert np.bincount(train_labels).tolist() == [6_000] * 10
    assert np.bincount(test_labels).tolist() == [1_000] * 10
