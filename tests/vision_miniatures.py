"""Small data sets laid out exactly like the published ones, and a small network with a checkpoint."""

import hashlib
import io
import json
import pickle
import struct
from pathlib import Path

import numpy as np
import timm
import torch
from PIL import Image
from scipy.io import savemat

# Three synsets of ImageNet-1K, with their numbers in the order of a model's outputs.
SYNSETS = {"n01440764": 0, "n01443537": 1, "n15075141": 999}


class Python2Pickler(pickle._Pickler):
    """Writes bytes as Python 2 wrote its strings: the batches of CIFAR are of that time."""

    dispatch = pickle._Pickler.dispatch | {
        bytes: lambda self, value: (self.write(b"T" + struct.pack("<i", len(value)) + value), self.memoize(value))
    }


def python2_pickle(value: object) -> bytes:
    file = io.BytesIO()
    Python2Pickler(file, protocol=2).dump(value)
    return file.getvalue()


def jpeg(seed: int, size=(40, 32)) -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize(size).save(file, "JPEG", quality=90)
    return file.getvalue()


def put(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def cifar(folder: Path, n: int, monkeypatch, n_classes: int = 10) -> np.ndarray:
    """The test batch of CIFAR in the format of its authors, read by torchvision, which is told its checksum."""
    from torchvision.datasets import CIFAR10, CIFAR100

    kind, key = {10: (CIFAR10, b"labels"), 100: (CIFAR100, b"fine_labels")}[n_classes]
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (n, 3072), dtype=np.uint8), rng.integers(n_classes, size=n)
    base = folder / kind.base_folder
    file = "test_batch" if n_classes == 10 else "test"
    content = python2_pickle({b"data": images, key: labels.tolist(), b"batch_label": b"testing batch 1 of 1"})
    put(base / file, content)
    names = [f"class {k}".encode() for k in range(n_classes)]
    meta = python2_pickle({b"label_names": names, b"fine_label_names": names})
    put(base / kind.meta["filename"], meta)
    monkeypatch.setattr(kind, "test_list", [[file, hashlib.md5(content).hexdigest()]])
    monkeypatch.setattr(kind, "meta", kind.meta | {"md5": hashlib.md5(meta).hexdigest()})
    monkeypatch.setattr(kind, "train_list", [])
    return labels


def cifar_c(folder: Path, labels: np.ndarray, corruption: str) -> None:
    n = len(labels)
    folder.mkdir(parents=True, exist_ok=True)
    images = np.random.default_rng(1).integers(0, 256, (5 * n, 32, 32, 3), dtype=np.uint8)
    np.save(folder / f"{corruption}.npy", images)
    np.save(folder / "labels.npy", np.tile(labels, 5))


def imagenet_names(n: int) -> list[tuple[str, str]]:
    """File name and synset of each validation image."""
    drawn = np.random.default_rng(2).choice(list(SYNSETS), n)
    return [(f"ILSVRC2012_val_{i:08d}.JPEG", synset) for i, synset in enumerate(drawn, 1)]


def imagenet_folders(folder: Path, n: int, seed: int = 0) -> Path:
    for i, (name, synset) in enumerate(imagenet_names(n)):
        put(folder / synset / name, jpeg(1000 * seed + i))
    return folder


def imagenet_flat(folder: Path, n: int) -> Path:
    """The original flat folder, with the development kit beside it, whose numbers are not those of the outputs."""
    numbers = {synset: 490 - k for k, synset in enumerate(SYNSETS)}
    for i, (name, _) in enumerate(imagenet_names(n)):
        put(folder / name, jpeg(i))
    data = folder.parent / "ILSVRC2012_devkit_t12" / "data"
    truth = "\n".join(str(numbers[synset]) for _, synset in imagenet_names(n))
    put(data / "ILSVRC2012_validation_ground_truth.txt", f"{truth}\n".encode())
    kind = [("ILSVRC2012_ID", "O"), ("WNID", "O"), ("words", "O"), ("num_children", "O")]
    rows = np.array([(number, synset, "words", 0) for synset, number in numbers.items()], dtype=kind)
    savemat(data / "meta.mat", {"synsets": rows[:, None]})
    return folder


def checkpoint(path: Path, n_classes: int, name: str = "test_resnet") -> dict:
    """A network of timm with random weights in a file, as a catalogue names it."""
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=n_classes)
    with torch.no_grad():
        model.get_classifier().weight.mul_(20)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), path)
    return {"from": "timm", "name": name, "checkpoint": str(path), "n_classes": n_classes, "size": 32}


def catalogue(path: Path, datasets: dict, models: dict, corruptions=()) -> Path:
    return put(path, json.dumps({"data sets": datasets, "models": models, "corruptions": list(corruptions)}).encode())
