"""The shipped models' arrays: written once after training, read by ``load("fashion/<model>")``.

Storage keeps what calibration is about and little else. Logits are stored as float16 gaps
``z - max z`` with the maxima in float32: a gap's error is relative to the gap, so small margins stay
sharp, where float16 logits would turn margins below 0.005 into ties.

``shipped/<data set>/<model>`` is a bundle; ``shipped/shift/`` holds the logits of shifted images, ``shipped/boundary/``
the distances of test images to the decision boundary.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from smartlib.data.bundles import Bundle, Head, Split
from smartlib.data.readers import read_npz

SHIPPED_FOLDER = Path(__file__).parent / "shipped"

DATASETS = ("fashion", "fashion-pairs")


@dataclass(frozen=True)
class Boundary:
    """How far some test images of a model are from its decision boundary.

    Args:
        rows: (N,) int64, indices into the test split of the model's bundle.
        distance: (N,) float64, the L2 norm of the smallest change found that leaves the region of the predicted class,
            pixels being in [0, 1]; NaN where none was found.
        other: (N,) int64, the class across, -1 where none was found.
    """

    rows: np.ndarray
    distance: np.ndarray
    other: np.ndarray


def names() -> tuple[str, ...]:
    """The names of the shipped bundles, sorted."""
    return tuple(f"{dataset}/{stem}" for dataset in DATASETS for stem in _stems(SHIPPED_FOLDER / dataset))


def shifted_names() -> tuple[str, ...]:
    """The models whose logits of shifted images are shipped."""
    return tuple(stem.replace("_", "/") for stem in _stems(SHIPPED_FOLDER / "shift"))


def boundary_names() -> tuple[str, ...]:
    """The models whose distances to the decision boundary are shipped."""
    return tuple(stem.replace("_", "/") for stem in _stems(SHIPPED_FOLDER / "boundary"))


def save_arrays(folder: str | os.PathLike, name: str, arrays: dict[str, np.ndarray], provenance: dict) -> None:
    """Write one model's arrays to ``<folder>/<name>.npz`` and what is known of them to ``.json``.

    Each file is replaced as a whole. The same arrays give the same bytes.

    Args:
        folder: for instance ``SHIPPED_FOLDER``.
        name: ``"fashion/<model>"``.
        arrays: for ``val`` and ``test``: ``*_logits (N, K)`` float32, ``*_labels (N,)`` int64, and where calibrators
            that need them shall run ``*_features (N, D)`` float32; ``head_weight (K, D)``, ``head_bias (K,)`` float32.
        provenance: written to the json file, with the sha256 of each stored array and of the npz file.

    Raises:
        ValueError: a value does not fit its storage type, or an arg max would change; says which and where.

    Source: ours.
    """
    stored = {}
    for split in ("val", "test"):
        stored |= _pack_split(split, arrays[f"{split}_logits"], arrays[f"{split}_labels"])
        if f"{split}_features" in arrays:
            stored[f"{split}_features"] = _cast(arrays[f"{split}_features"], np.float16, f"{split}_features")
    for key in ("head_weight", "head_bias"):
        stored[key] = _cast(arrays[key], np.float32, key)
    write_archive(Path(folder) / f"{name}.npz", stored, provenance)


def save_shifted(
    folder: str | os.PathLike, name: str, shifted: dict[str, dict[str, tuple[np.ndarray, np.ndarray]]], provenance: dict
) -> None:
    """Write a model's logits of shifted images to ``<folder>/shift/``.

    Args:
        folder: for instance ``SHIPPED_FOLDER``. name: of the model's bundle.
        shifted: by condition (``"gaussian-noise-3"``) and split (``"test"``, perhaps ``"val"``): logits (N, K) float32
            and labels (N,) int64.
        provenance: written to the json file beside.

    Raises:
        ValueError: as of :func:`save_arrays`.
    """
    stored = {}
    for condition, splits in shifted.items():
        for split, (logits, labels) in splits.items():
            stored |= _pack_split(f"{condition}_{split}", logits, labels)
    path = Path(folder) / "shift" / f"{name.replace('/', '_')}.npz"
    write_archive(path, stored, provenance | {"conditions": list(shifted)})


def save_boundary(folder: str | os.PathLike, name: str, boundary: Boundary, provenance: dict) -> None:
    """Write a model's distances to the decision boundary to ``<folder>/boundary/``.

    Args:
        folder: for instance ``SHIPPED_FOLDER``. name: of the model's bundle.
        boundary: rows and distances, the classes in -1..32767.
        provenance: written to the json file beside.

    Raises:
        ValueError: arrays of different lengths, or a distance that is negative or infinite.
    """
    rows, distance, other = boundary.rows, boundary.distance, boundary.other
    if not len(rows) == len(distance) == len(other):
        raise ValueError(
            f"rows, distance and other must be of one length, got {len(rows)}, {len(distance)}, {len(other)}"
        )
    bad = np.flatnonzero((distance < 0) | np.isinf(distance))
    if bad.size:
        raise ValueError(f"distance[{bad[0]}] is {distance[bad[0]]}; it must be a length, or NaN where none was found")
    stored = {
        "rows": np.asarray(rows, dtype=np.int32),
        "distance": np.asarray(distance, dtype=np.float32),
        "other": np.asarray(other, dtype=np.int16),
    }
    write_archive(Path(folder) / "boundary" / f"{name.replace('/', '_')}.npz", stored, provenance)


def write_archive(path: Path, stored: dict[str, np.ndarray], provenance: dict) -> None:
    """Write arrays as npz and what is known of them, with checksums, as json beside it."""
    # numpy dates every member of the archive 1980, so the bytes depend on the arrays alone.
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **stored)
    record = provenance | {
        "sha256": _sha256(buffer.getvalue()),
        "arrays_sha256": {key: _sha256(array.tobytes()) for key, array in stored.items()},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    _replace(path, buffer.getvalue())
    _replace(path.with_suffix(".json"), (json.dumps(record, indent=1) + "\n").encode())


def read_archive(path: Path) -> tuple[dict[str, np.ndarray], dict]:
    """Read what :func:`write_archive` wrote.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the npz file is not the one that the json file describes, or has other keys.
    """
    provenance = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    found = _sha256(path.read_bytes())
    if found != provenance["sha256"]:
        raise ValueError(
            f"{path} is damaged, truncated or not the file that {path.with_suffix('.json').name} describes: "
            f"sha256 {found}, expected {provenance['sha256']}; install the package again or run `make zoo`"
        )
    return read_npz(path, tuple(provenance["arrays_sha256"])), provenance


def load_shipped(name: str, folder: str | os.PathLike = SHIPPED_FOLDER) -> Bundle:
    """Load what ``save_arrays`` wrote.

    Args:
        name: ``"fashion/<model>"``.
        folder: the folder it was written to.

    Returns:
        The bundle: logits in float64 as maximum + gap (so that a margin of 1e-7 survives), labels int64,
        features and head float32.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the npz file is not the one that the json file describes, or has other keys.
    """
    stored, provenance = read_archive(Path(folder) / f"{name}.npz")
    val, test = (
        Split(*_unpack_split(stored, split), features=_float32(stored.get(f"{split}_features")))
        for split in ("val", "test")
    )
    return Bundle(name, val, test, Head(stored["head_weight"], stored["head_bias"]), provenance)


def load_boundary(name: str, folder: str | os.PathLike = SHIPPED_FOLDER) -> Boundary:
    """Load what ``save_boundary`` wrote.

    Args:
        name: one of :func:`boundary_names`. folder: the folder it was written to.

    Raises:
        FileNotFoundError, ValueError: as of :func:`read_archive`.
    """
    stored, _ = read_archive(Path(folder) / "boundary" / f"{name.replace('/', '_')}.npz")
    return Boundary(
        stored["rows"].astype(np.int64), stored["distance"].astype(np.float64), stored["other"].astype(np.int64)
    )


@lru_cache(maxsize=2)
def load_shifted(name: str, folder: str | os.PathLike = SHIPPED_FOLDER) -> dict[str, dict[str, Split]]:
    """Load what ``save_shifted`` wrote.

    Args:
        name: one of :func:`shifted_names`. folder: the folder it was written to.

    Returns:
        By condition and split name.

    Raises:
        FileNotFoundError, ValueError: as of :func:`read_archive`.
    """
    stored, provenance = read_archive(Path(folder) / "shift" / f"{name.replace('/', '_')}.npz")
    return {
        condition: {
            split: Split(*_unpack_split(stored, f"{condition}_{split}"))
            for split in ("val", "test")
            if f"{condition}_{split}_labels" in stored
        }
        for condition in provenance["conditions"]
    }


def _stems(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.npz"))


def _pack_split(prefix: str, logits: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
    gaps, maximum = _pack_logits(logits, f"{prefix}_logits")
    packed = _cast(labels, np.uint8 if logits.shape[1] <= 256 else np.uint16, f"{prefix}_labels")
    return {f"{prefix}_gaps": gaps, f"{prefix}_max": maximum, f"{prefix}_labels": packed}


def _unpack_split(stored: dict[str, np.ndarray], prefix: str) -> tuple[np.ndarray, np.ndarray]:
    """(N, K) float64 logits and (N,) int64 labels."""
    logits = _unpack_logits(stored[f"{prefix}_gaps"], stored[f"{prefix}_max"])
    return logits, stored[f"{prefix}_labels"].astype(np.int64)


def _float32(features: np.ndarray | None) -> np.ndarray | None:
    return None if features is None else features.astype(np.float32)


def _pack_logits(logits: np.ndarray, key: str) -> tuple[np.ndarray, np.ndarray]:
    """(N, K) float32 -> gaps to the row's maximum (N, K) float16, maxima (N,) float32."""
    maximum = _cast(logits.max(axis=1), np.float32, f"the row maxima of {key}")
    exact = logits.astype(np.float64) - maximum.astype(np.float64)[:, None]
    gaps = _cast(exact, np.float16, f"the gaps of {key}")
    # A gap too small for float16 would become a tie, which may move the arg max to a lower index.
    gaps[(gaps == 0) & (exact < 0)] = -np.finfo(np.float16).smallest_subnormal
    moved = np.flatnonzero(_unpack_logits(gaps, maximum).argmax(axis=1) != logits.argmax(axis=1))
    if moved.size:
        raise ValueError(f"storing {key} would change the arg max of {moved.size} rows, the first is row {moved[0]}")
    return gaps, maximum


def _unpack_logits(gaps: np.ndarray, maximum: np.ndarray) -> np.ndarray:
    """(N, K) float64."""
    return maximum.astype(np.float64)[:, None] + gaps.astype(np.float64)


def _cast(array: np.ndarray, dtype: type, key: str) -> np.ndarray:
    """``array`` in a narrower type; a value that does not fit it is an error."""
    limits = np.finfo(dtype) if np.issubdtype(dtype, np.floating) else np.iinfo(dtype)
    outside = np.argwhere(~((array >= limits.min) & (array <= limits.max)))  # a NaN is neither
    if len(outside):
        where = tuple(map(int, outside[0]))
        raise ValueError(f"{key} at {where} is {array[where]}, which does not fit {np.dtype(dtype)}")
    return np.ascontiguousarray(array, dtype=dtype)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _replace(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees the old one or the new one, never a part."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(content)
    os.replace(temporary, path)
