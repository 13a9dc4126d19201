"""Extracted logits as bundles: ``load("imagenet/resnet50")``, and with corrupted images ``@clean:fog-5``.

A share of the images that the catalogue names is drawn as validation split, 20 % of ImageNet; the others are the test
split. It is drawn by row, and the corrupted copies of a data set have its rows: an image that was in the validation
split is in none of the test splits, however corrupted.
"""

from __future__ import annotations

import numpy as np

from smartlib.data.bundles import Bundle, Head, Split
from smartlib.data.vision import shards
from smartlib.data.vision.catalogue import Job, catalogue, conditions, jobs

SPLIT_SEED = 0


def names() -> tuple[str, ...]:
    """The bundles whose extraction is finished."""
    found = catalogue()["data sets"]
    return tuple(str(job) for job in jobs() if "of" not in found[job.dataset] and shards.read_manifest(job.folder))


def shifted(name: str) -> dict[str, Job]:
    """The conditions of a bundle whose extraction is finished, each with where it comes from."""
    dataset, _, model = name.partition("/")
    found = {}
    for other, entry in catalogue()["data sets"].items():
        if entry.get("of") == dataset:
            own = {condition: Job(other, model, condition) for condition in conditions(other)}
            found |= {condition: job for condition, job in own.items() if shards.read_manifest(job.folder)}
    return found


def load_extracted(name: str) -> Bundle:
    """A bundle from shards.

    Args:
        name: one of :func:`names`.

    Raises:
        ValueError: a shard is missing or damaged.

    Source: ours.
    """
    dataset, _, model = name.partition("/")
    job = Job(dataset, model)
    manifest = shards.read_manifest(job.folder)
    val, test = _halves(job)
    head = None
    if (path := job.folder / "head.safetensors").is_file():
        head = Head(**shards.unpack(path.read_bytes()))
    provenance = manifest["about"] | {
        "name": name,
        "split": f"{len(val.labels)} of {manifest['rows']} images drawn with seed {SPLIT_SEED} as validation",
        "network": manifest["network"], "network_sha256": manifest["network_sha256"],
        "precision": manifest["precision"], "skipped": len(manifest["skipped"]),
        "files": [{"file": record["file"], "sha256": record["sha256"]} for record in manifest["shards"]],
    }  # fmt: skip
    return Bundle(name, val, test, head, provenance)


def load_condition(name: str, condition: str) -> dict[str, Split]:
    """Validation and test split of a bundle's corrupted images.

    Raises:
        ValueError: there are none of this condition; or the clean images were streamed, in an order of their own.
    """
    known = shifted(name)
    if condition not in known:
        raise ValueError(f"{name} has no images {condition!r}; extracted: {', '.join(known) or 'none'}")
    dataset, _, model = name.partition("/")
    if shards.read_manifest(Job(dataset, model).folder)["about"].get("source") == "stream":
        raise ValueError(f"{name} was streamed: its rows are not in the order of the corrupted images")
    return dict(zip(("val", "test"), _halves(known[condition]), strict=True))


def _halves(job: Job) -> tuple[Split, Split]:
    entry = catalogue()["data sets"][job.dataset]
    share = catalogue()["data sets"][entry.get("of", job.dataset)].get("validation", 0.5)
    n = shards.read_manifest(job.folder)["images"]
    in_val = np.zeros(n, dtype=bool)
    in_val[np.random.default_rng(SPLIT_SEED).permutation(n)[: round(share * n)]] = True
    arrays = shards.read_shards(job.folder)
    chosen = in_val[arrays["rows"]]
    features = arrays.get("features")
    return tuple(
        Split(arrays["logits"][rows], arrays["labels"][rows], None if features is None else features[rows])
        for rows in (chosen, ~chosen)
    )
