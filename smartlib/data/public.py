"""Public logits of CIFAR-10 and CIFAR-100 models: found in a folder or downloaded once, and checked.

``public.json`` lists the files with their public address, sha256, licence and format. None of them is
part of this package.
"""

from __future__ import annotations

import hashlib
import json
import os
from functools import cache
from pathlib import Path

import numpy as np

from smartlib.arrays import log_probabilities
from smartlib.data.bundles import Bundle, Split
from smartlib.data.readers import read_npz, read_numpy_pickle, read_torch

FOLDER_VARIABLE = "SMARTLIB_DATA_DIR"

# The files of each bundle: two (validation, test), or one that holds everything.
FILES = {
    "public/cifar10-resnet50-ce": ("cifar10_resnet50_ce_val.pt", "cifar10_resnet50_ce_test.pt"),
    "public/cifar10-resnet50-focal": ("cifar10_resnet50_focal_val.pt", "cifar10_resnet50_focal_test.pt"),
    "public/cifar10-densenet40": ("cifar10_densenet40.p",),
    "public/cifar10-wideresnet-16-4": ("cifar10_wideresnet-16-4.npz",),
    "public/cifar100-wideresnet-16-4": ("cifar100_wideresnet-16-4.npz",),
    "public/cifar100-densenet-bc-100": ("cifar100_densenet-bc-100.npz",),
}

# For the sets that come without a validation split.
N_VALIDATION = 5_000
SPLIT_SEED = 0


def names() -> tuple[str, ...]:
    """The names of the public bundles."""
    return tuple(FILES)


@cache
def manifest() -> dict[str, dict]:
    """What is known of each public file, by file name: sha256, url, licence, dataset, model, ..."""
    entries = json.loads(Path(__file__).with_name("public.json").read_text(encoding="utf-8"))
    return {entry["file"]: entry for entry in entries}


def fetch(file: str) -> Path:
    """The path of a public file: in the folder that SMARTLIB_DATA_DIR names, else downloaded once.

    Args:
        file: a file name of the manifest.

    Returns:
        The path of a file with the expected sha256.

    Raises:
        ValueError: the file name is unknown, or the file found has another sha256.
        ConnectionError: the file is not at hand and could not be downloaded.

    Source: ours; the files are those of the repositories in the manifest.
    """
    if file not in manifest():
        raise ValueError(f"unknown public file {file!r}; known: {', '.join(manifest())}")
    entry = manifest()[file]
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder and (local := Path(folder) / file).is_file():
        found = hashlib.sha256(local.read_bytes()).hexdigest()
        if found != entry["sha256"]:
            raise ValueError(
                f"{local} is damaged or not the published file: sha256 {found}, expected {entry['sha256']}; "
                f"remove it or take it from {entry['url']}"
            )
        return local
    return _download(entry)


def load_public(name: str) -> Bundle:
    """Load the public logits of one model.

    Args:
        name: one of ``names()``.

    Returns:
        The bundle, without features and head: logits as published (float32), or the logarithm of the
        published probabilities (float64). Where no validation split was published, 5,000 rows of the test
        set, drawn with seed 0, are the validation split and the others the test split.

    Raises:
        ValueError: the name is unknown, or a file is not the published one.
        ConnectionError: a file is not at hand and could not be downloaded.

    Source: the repositories in the manifest.
    """
    if name not in FILES:
        raise ValueError(f"unknown public bundle {name!r}; known: {', '.join(FILES)}")
    entries = [manifest()[file] for file in FILES[name]]
    paths = [fetch(file) for file in FILES[name]]
    match paths[0].suffix:
        case ".pt":
            val, test = (Split(*read_torch(path)) for path in paths)
            how = "validation and test split as published"
        case ".p":
            val, test = (Split(logits, labels[:, 0]) for logits, labels in read_numpy_pickle(paths[0]))
            how = "validation and test split as published"
        case ".npz":
            arrays = read_npz(paths[0], ("predictions", "ground_truth"))
            logits, labels = log_probabilities(arrays["predictions"]), arrays["ground_truth"]
            chosen, others = _draw_validation(len(labels))
            val, test = Split(logits[chosen], labels[chosen]), Split(logits[others], labels[others])
            how = (
                f"{len(chosen)} of the {len(labels)} published test rows drawn with seed {SPLIT_SEED} as validation, "
                f"the other {len(others)} are the test split; logits are the logarithms of published probabilities"
            )
    provenance = {
        "name": name,
        "dataset": entries[0]["dataset"],
        "model": entries[0]["model"],
        "training": entries[0].get("training", "not stated"),
        "licence": entries[0]["licence"],
        "split": how,
        "files": [{key: entry[key] for key in ("file", "sha256", "url")} for entry in entries],
    }
    return Bundle(name, val, test, provenance=provenance)


def _draw_validation(n: int) -> tuple[np.ndarray, np.ndarray]:
    """``(validation indices, test indices)``, each sorted."""
    order = np.random.default_rng(SPLIT_SEED).permutation(n)
    return np.sort(order[:N_VALIDATION]), np.sort(order[N_VALIDATION:])


def _download(entry: dict) -> Path:
    """The file in the user's cache, downloaded if it is not there with the right sha256."""
    import pooch

    try:
        path = pooch.retrieve(
            entry["url"],
            known_hash=f"sha256:{entry['sha256']}",
            fname=entry["file"],
            path=pooch.os_cache("smartlib"),
            downloader=pooch.HTTPDownloader(timeout=(5, 30)),  # seconds to connect, seconds of silence
        )
    except OSError as error:  # what requests raises for every kind of failure
        raise ConnectionError(
            f"{entry['file']} is not at hand and could not be downloaded from {entry['url']} ({error}). "
            f"Without a network, download it elsewhere under this name into a folder and set {FOLDER_VARIABLE} to it."
        ) from error
    return Path(path)
