"""What every source of logits is turned into: a bundle of a validation and a test split."""

from __future__ import annotations

import difflib
import hashlib
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np


@dataclass(frozen=True, eq=False)
class Split:
    """One split of a data set, as a model sees it. The arrays are read-only.

    Args:
        logits: (N, K) float.
        labels: (N,) int64, the true classes.
        features: (N, D) float, the input of the model's last layer, or None.

    Raises:
        ValueError: the shapes do not fit each other.
    """

    logits: np.ndarray
    labels: np.ndarray
    features: np.ndarray | None = None

    def __post_init__(self):
        if self.logits.ndim != 2 or self.labels.shape != self.logits.shape[:1]:
            raise ValueError(
                f"expected logits (N, K) and labels (N,), found shapes {self.logits.shape} and {self.labels.shape}"
            )
        if self.features is not None and (self.features.ndim != 2 or len(self.features) != len(self.labels)):
            raise ValueError(f"expected features ({len(self.labels)}, D), found shape {self.features.shape}")
        _freeze(self)

    def __repr__(self) -> str:
        n, k = self.logits.shape
        features = "" if self.features is None else f", features ({n}, {self.features.shape[1]})"
        return f"Split(logits ({n}, {k}) {self.logits.dtype}, labels ({n},){features})"


@dataclass(frozen=True, eq=False)
class Head:
    """The last linear layer of a model: ``logits = features @ weight.T + bias``. The arrays are read-only.

    Args:
        weight: (K, D) float.
        bias: (K,) float.
    """

    weight: np.ndarray
    bias: np.ndarray

    def __post_init__(self):
        _freeze(self)

    def __repr__(self) -> str:
        return f"Head(weight {self.weight.shape}, bias {self.bias.shape})"


@dataclass(frozen=True, eq=False)
class Bundle:
    """The logits of one model on one data set: calibrators are fitted on ``val`` and judged on ``test``.

    Args:
        name: the name that ``load`` knows it by.
        val: the validation split.
        test: the test split.
        head: the model's last layer, or None.
        provenance: where the arrays come from: data set, model, licence, checksums, how the split was made.
    """

    name: str
    val: Split
    test: Split
    head: Head | None = None
    provenance: dict = field(default_factory=dict)

    @cached_property
    def sha256(self) -> str:
        """A hash of all arrays: what a result that was computed from them depends on."""
        digest = hashlib.sha256()
        for record in (self.val, self.test, self.head):
            for key, array in vars(record).items() if record is not None else ():
                digest.update(f"{key} {None if array is None else (array.shape, str(array.dtype))}\0".encode())
                digest.update(b"" if array is None else np.ascontiguousarray(array).data)
        return digest.hexdigest()

    @property
    def n_classes(self) -> int:
        """The number of classes, K."""
        return self.test.logits.shape[1]

    def __repr__(self) -> str:
        return (
            f"Bundle({self.name!r}, {self.n_classes} classes, val={self.val!r}, test={self.test!r}, head={self.head!r})"
        )


def names() -> tuple[str, ...]:
    """The names that ``load`` knows: the shipped models first, then the public ones, then what was extracted here.

    >>> "public/cifar10-resnet50-ce" in names()
    True
    """
    # Imported here because these make bundles, and so import this file.
    from smartlib.data import public, zoo
    from smartlib.data.vision import bundles as extracted

    return zoo.names() + public.names() + extracted.names()


def load(name: str) -> Bundle:
    """Load a bundle by name.

    Args:
        name: ``"fashion/<model>"`` and ``"fashion-pairs/<model>"`` are shipped with the package;
            ``"public/<data set>-<model>"`` is looked up in the folder SMARTLIB_DATA_DIR or downloaded once;
            ``"imagenet/resnet50"`` and the like were extracted on this machine (`smartlib.data.vision`).
            ``names()`` lists them. With ``@`` and a variant behind it: other splits of the same model, shifted,
            long-tailed or drawn again, as `smartlib.data.variants` says; variants can follow each other.

    Returns:
        The bundle.

    Raises:
        ValueError: the name is unknown, or a file is not what its checksum says.
        ConnectionError: a public file is neither at hand nor to be downloaded.
    """
    from smartlib.data import public, zoo
    from smartlib.data.variants import make_variant
    from smartlib.data.vision import bundles as extracted

    model, at, variant = str(name).rpartition("@")
    if at:
        return make_variant(load(model), variant)
    if name in zoo.names():
        return zoo.load_shipped(name)
    if name in public.names():
        return public.load_public(name)
    if name in extracted.names():
        return extracted.load_extracted(name)
    known = names()
    closest_first = difflib.get_close_matches(str(name), known, n=len(known), cutoff=0)
    raise ValueError(f"unknown bundle {name!r}; known, closest first: {', '.join(closest_first)}")


def _freeze(record: Split | Head) -> None:
    """Replace the arrays of a record by read-only views; the caller's own arrays stay as they are."""
    for key, array in vars(record).items():
        if array is not None:
            view = array.view()
            view.flags.writeable = False
            object.__setattr__(record, key, view)
