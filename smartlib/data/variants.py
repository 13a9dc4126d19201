"""Other splits of a bundle: shifted images, long-tailed classes, one half of the validation samples held out.

``load("fashion/resnet@A:B")`` takes the validation split A and the test split B of a model, where each is

* ``clean``: the split as it is;
* ``long-tailed-R``: a subset of it in which class k is rarer than class 0 by R^(k / (K - 1)), `long_tailed`;
* a condition of shifted images, such as ``gaussian-noise-3`` (severity 1 to 5) or ``sketch``, that were shipped or
  extracted.

``load("fashion/resnet@held-out")`` halves the validation samples at random and gives the second half as the test split:
for choices and ablations, which must not see test samples.

``load("imagenet/resnet50@resplit-1")`` draws the validation split again, with seed 1, from all samples of both splits.
"""

from __future__ import annotations

import re

import numpy as np

from smartlib.data.bundles import Bundle, Split

_HALVING_SEED = 0


def make_variant(bundle: Bundle, variant: str) -> Bundle:
    """The bundle with other splits.

    Args:
        bundle: a bundle as it is. variant: what stands behind the @ of a name, see above.

    Returns:
        A bundle whose name tells the variant.

    Raises:
        ValueError: an unknown variant; the message lists the known ones.

    Source: ours.
    """
    name = f"{bundle.name}@{variant}"
    if variant == "held-out":
        order = np.random.default_rng(_HALVING_SEED).permutation(len(bundle.val.labels))
        first, second = np.array_split(order, 2)
        return Bundle(name, _rows(bundle.val, first), _rows(bundle.val, second), bundle.head, bundle.provenance)
    if match := re.fullmatch(r"resplit-(\d+)", variant):
        both = _joined(bundle.val, bundle.test)
        order = np.random.default_rng(int(match[1])).permutation(len(both.labels))
        first, second = np.split(order, [len(bundle.val.labels)])
        return Bundle(name, _rows(both, first), _rows(both, second), bundle.head, bundle.provenance)
    val, colon, test = variant.partition(":")
    if not colon:
        raise ValueError(
            f"{name}: {variant!r} is none of 'held-out', 'resplit-SEED' and VALIDATION:TEST, such as 'clean:sketch'"
        )
    return Bundle(name, _split(bundle, "val", val), _split(bundle, "test", test), bundle.head, bundle.provenance)


def long_tailed(labels: np.ndarray, ratio: float) -> np.ndarray:
    """The samples of an exponentially imbalanced subset: of class k the first N_k, where N_k falls from class to class.

    Class 0 keeps as many as the rarest class has, the last class 1 / ratio of that (Cui et al. 2019, arXiv 1901.05555).

    Args:
        labels: (N,) int64, classes 0..K-1, K >= 2. ratio: >= 1, the largest class divided by the smallest.

    Returns:
        Sorted indices.

    >>> np.bincount(np.repeat([0, 1, 2], 100)[long_tailed(np.repeat([0, 1, 2], 100), 100)])
    array([100,  10,   1])
    """
    counts = np.bincount(labels)
    kept = counts.min() * float(ratio) ** (-np.arange(len(counts)) / (len(counts) - 1))
    rows = [np.flatnonzero(labels == k)[: max(1, round(n))] for k, n in enumerate(kept)]
    return np.sort(np.concatenate(rows))


def _split(bundle: Bundle, which: str, kind: str) -> Split:
    split = getattr(bundle, which)
    if kind == "clean":
        return split
    if match := re.fullmatch(r"long-tailed-(\d+)", kind):
        return _rows(split, long_tailed(split.labels, int(match[1])))
    from smartlib.data.vision import bundles as extracted
    from smartlib.data.zoo import load_shifted, shifted_names

    known = ["clean", "long-tailed-RATIO"]
    if bundle.name in shifted_names():
        shifted = load_shifted(bundle.name)
        if which in shifted.get(kind, {}):
            return shifted[kind][which]
        known += [condition for condition in shifted if which in shifted[condition]]
    elif bundle.name in extracted.names():
        conditions = extracted.shifted(bundle.name)
        if kind in conditions:
            return extracted.load_condition(bundle.name, kind)[which]
        known += list(conditions)
    raise ValueError(f"{bundle.name} has no {which} split {kind!r}; known: {', '.join(known)}")


def _joined(first: Split, second: Split) -> Split:
    features = None if first.features is None else np.concatenate([first.features, second.features])
    logits = np.concatenate([first.logits, second.logits])
    return Split(logits, np.concatenate([first.labels, second.labels]), features)


def _rows(split: Split, rows: np.ndarray) -> Split:
    return Split(split.logits[rows], split.labels[rows], None if split.features is None else split.features[rows])
