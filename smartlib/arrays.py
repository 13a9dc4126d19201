"""Checks and conversions of logits, probabilities, confidences and labels.

Every public function passes its input through here, and this is the only file that raises for bad
arrays. Accepted everywhere: numpy arrays of any layout and byte order, memory maps, torch tensors on any
device, pandas objects (by position) and nested lists. Inputs are never modified.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

# How far a row of probabilities may be from summing to one: float16 softmax rows of a thousand classes are off by 1e-3.
_SUM_TOLERANCE = 2e-3
# Rows that are handled at once where an (N, K) temporary is needed: 2**22 float64 numbers are 32 MiB.
_CHUNK_NUMBERS = 2**22


def is_torch(array: Any) -> bool:
    """Whether ``array`` is a torch tensor; does not import torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def to_numpy(array: Any, name: str = "array") -> np.ndarray:
    """Convert to a numpy array in native byte order without changing the input.

    Args:
        array: numpy array, torch tensor (any device, with or without gradient), pandas object or nested list.
        name: what to call it in an error.

    Returns:
        numpy array; bool, integer or floating. bfloat16 becomes float32.

    Raises:
        ValueError: it does not form a rectangular array of numbers.
    """
    if is_torch(array):
        import torch

        array = array.detach()
        if array.dtype == torch.bfloat16:  # numpy has no bfloat16
            array = array.float()
        return array.cpu().resolve_conj().resolve_neg().numpy()
    try:
        result = np.asarray(array)
    except ValueError as error:
        raise ValueError(f"{name} is not a rectangular array: {error}") from None
    if result.dtype == object:
        try:  # pandas objects with mixed or nullable columns
            result = result.astype(np.float64)
        except (TypeError, ValueError):
            raise ValueError(f"{name} holds objects that are not numbers (dtype object)") from None
    if result.dtype.kind not in "biuf":
        raise ValueError(f"{name} must hold real numbers, got dtype {result.dtype}")
    if not result.dtype.isnative:
        result = result.astype(result.dtype.newbyteorder("="))
    return result


def like(result: np.ndarray, original: Any) -> Any:
    """Return ``result`` as a torch tensor on the device of ``original`` if that is one, else as it is."""
    if not is_torch(original):
        return result
    import torch

    # Not ascontiguousarray, which would make a scalar one-dimensional.
    return torch.from_numpy(np.asarray(result, order="C")).to(original.device)


def row_chunks(n: int, k: int) -> Iterator[slice]:
    """Slices over ``n`` rows such that ``k`` numbers per row stay within a fixed memory."""
    step = max(1, _CHUNK_NUMBERS // max(k, 1))
    for start in range(0, n, step):
        yield slice(start, min(start + step, n))


def as_logits(logits: Any, *, from_probs: bool = False, name: str = "logits") -> np.ndarray:
    """Check logits and bring them to float32 or float64.

    Args:
        logits: (N, K), N >= 1, K >= 2. ``-inf`` marks a class that cannot be; each row needs a finite entry.
        from_probs: the rows are probabilities; their logarithm is taken (see :func:`log_probabilities`).
        name: what to call the array in an error.

    Returns:
        (N, K) float32 where the input is float32 or narrower floating point, float64 otherwise. Not a copy
        where none is needed.

    Raises:
        ValueError: wrong shape, no rows, one column, NaN, +inf, or a row of -inf only (with its row number).

    Warns:
        UserWarning: every row looks like the output of a softmax and ``from_probs`` is False.

    Source: ours.

    >>> as_logits([[2, 0], [0, 2]])
    array([[2., 0.],
           [0., 2.]])
    """
    if from_probs:
        return log_probabilities(logits)
    array = to_numpy(logits, name)
    _check_matrix(array, name)
    if array.dtype.kind != "f":
        array = array.astype(np.float64)
    elif array.dtype.itemsize < 4:
        array = array.astype(np.float32)
    elif array.dtype.itemsize > 8:
        array = array.astype(np.float64)
    n, k = array.shape
    looks_like_probabilities = True
    for rows in row_chunks(n, k):
        chunk = array[rows]
        top = chunk.max(axis=1)  # NaN wins a maximum, so this one pass finds every bad row
        bad = ~np.isfinite(top)
        if bad.any():
            row = int(np.flatnonzero(bad)[0])
            value = "NaN" if np.isnan(top[row]) else "+inf" if top[row] > 0 else "only -inf"
            raise ValueError(f"{name} row {rows.start + row} holds {value}; every row needs a finite largest entry")
        if looks_like_probabilities:
            looks_like_probabilities = bool(
                top.max() <= 1 + _SUM_TOLERANCE
                and chunk.min() >= 0
                and np.all(np.abs(chunk.sum(axis=1, dtype=np.float64) - 1) < _SUM_TOLERANCE)
            )
    if looks_like_probabilities:
        warnings.warn(
            f"every row of {name} is non-negative and sums to one, like the output of a softmax. If these are "
            "probabilities, pass from_probs=True (or take smartlib.arrays.log_probabilities first); "
            "calibrating them as logits gives wrong temperatures.",
            UserWarning,
            stacklevel=3,
        )
    return array


def log_probabilities(probs: Any) -> np.ndarray:
    """Logits of a softmax output: the logarithm, with exact zeros handled.

    A zero in a softmax output is a number that underflowed. It is replaced by the smallest normal number of
    the input's type (1.2e-38 for float32), so that every logit is finite.

    Args:
        probs: (N, K) rows that are non-negative and sum to one.

    Returns:
        (N, K) float64 log-probabilities.

    Raises:
        ValueError: see :func:`as_probabilities`.

    Source: ours.

    >>> log_probabilities([[0.5, 0.5, 0.0]]).round(3).tolist()
    [[-0.693, -0.693, -708.396]]
    """
    array = to_numpy(probs, "probs")
    tiny = np.finfo(array.dtype if array.dtype.kind == "f" else np.float64).tiny
    return np.log(np.maximum(as_probabilities(array).astype(np.float64, copy=False), float(tiny)))


def as_probabilities(probs: Any, name: str = "probs") -> np.ndarray:
    """Check rows of probabilities.

    Args:
        probs: (N, K), N >= 1, K >= 2.
        name: what to call the array in an error.

    Returns:
        (N, K) float32 or float64.

    Raises:
        ValueError: wrong shape, NaN, a negative entry, or a row that does not sum to one within 2e-3 (with its row
            number): these are probably logits.

    Source: ours.
    """
    array = to_numpy(probs, name)
    _check_matrix(array, name)
    if array.dtype.kind != "f" or array.dtype.itemsize > 8:
        array = array.astype(np.float64)
    elif array.dtype.itemsize < 4:
        array = array.astype(np.float32)
    n, k = array.shape
    for rows in row_chunks(n, k):
        chunk = array[rows]
        total = chunk.sum(axis=1, dtype=np.float64)
        bad = ~((np.abs(total - 1) < _SUM_TOLERANCE) & (chunk.min(axis=1) >= 0))
        if bad.any():
            row = int(np.flatnonzero(bad)[0])
            raise ValueError(
                f"{name} row {rows.start + row} is not a probability vector (smallest entry {chunk[row].min():.6g}, "
                f"sum {total[row]:.6g}); if these are logits, apply a softmax or a calibrator's predict_proba first"
            )
    return array


def as_labels(labels: Any, n: int, n_classes: int) -> np.ndarray:
    """Check class labels.

    The rule: an array of n whole numbers in 0 .. K-1, as integers, booleans or floats without a fractional
    part, of shape (n,) or (n, 1). Pandas objects are read by position; their index is ignored.

    Args:
        labels: (n,) or (n, 1).
        n: the number of rows that they belong to.
        n_classes: K.

    Returns:
        (n,) int64.

    Raises:
        ValueError: another shape (one-hot rows among them), a fraction, NaN, or a value outside 0 .. K-1, with the
            offending value and row.

    Source: ours.

    >>> as_labels([[0.0], [2.0]], n=2, n_classes=3)
    array([0, 2])
    """
    array = to_numpy(labels, "labels")
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1:
        hint = "; one-hot rows: pass labels.argmax(axis=1)" if array.ndim == 2 else ""
        raise ValueError(f"labels must have shape (N,) or (N, 1), got {array.shape}{hint}")
    if len(array) != n:
        raise ValueError(f"{len(array)} labels for {n} rows of logits or probabilities")
    if array.dtype.kind == "f":
        bad = np.flatnonzero(~(np.floor(array) == array))  # NaN and inf - inf compare unequal
        bad = bad if bad.size else np.flatnonzero(np.isinf(array))
        if bad.size:
            raise ValueError(f"label {array[bad[0]]} in row {bad[0]} is not a whole number")
    bad = np.flatnonzero((array < 0) | (array >= n_classes)) if array.dtype.kind != "b" else np.empty(0, int)
    if bad.size:
        raise ValueError(
            f"label {array[bad[0]]} in row {bad[0]} is outside 0 .. {n_classes - 1}, the classes of the logits"
        )
    return array.astype(np.int64)


def as_confidence_and_correct(confidence: Any, correct: Any) -> tuple[np.ndarray, np.ndarray]:
    """Check top-label confidences and whether each prediction was right.

    Args:
        confidence: (N,) in [0, 1]; an excess of 1e-6 (rounding in float32) is clipped.
        correct: (N,) of 0 and 1, or bool.

    Returns:
        Both as (N,) float64.

    Raises:
        ValueError: other shapes, N = 0, NaN, a confidence outside [0, 1] or a value of ``correct`` that is neither
            0 nor 1, with the value and its row.

    Source: ours.
    """
    f = as_confidence(confidence)
    a = to_numpy(correct, "correct")
    if a.ndim == 2 and a.shape[1] == 1:
        a = a[:, 0]
    if a.shape != f.shape:
        raise ValueError(f"confidence has shape {f.shape} but correct has shape {a.shape}; both must be (N,)")
    bad = np.flatnonzero((a != 0) & (a != 1))
    if bad.size:
        raise ValueError(f"correct must hold 0 and 1 only, found {a[bad[0]]} in row {bad[0]}")
    return f, a.astype(np.float64)


def as_confidence(confidence: Any) -> np.ndarray:
    """Check (N,) confidences in [0, 1]; returns float64. Raises ValueError as :func:`as_confidence_and_correct`."""
    f = to_numpy(confidence, "confidence").astype(np.float64)
    if f.ndim == 2 and f.shape[1] == 1:
        f = f[:, 0]
    if f.ndim != 1:
        raise ValueError(f"confidence must have shape (N,), got {f.shape}; for (N, K) probabilities take the maximum")
    if len(f) == 0:
        raise ValueError("confidence is empty: at least one sample is needed")
    bad = np.flatnonzero(~((f >= 0) & (f <= 1 + 1e-6)))
    if bad.size:
        raise ValueError(f"confidence {f[bad[0]]} in row {bad[0]} is outside [0, 1]")
    return np.minimum(f, 1.0)


def as_features(features: Any, n: int) -> np.ndarray:
    """Check the penultimate features of n samples.

    Args:
        features: (n, D), D >= 1, finite.
        n: the number of rows of logits that they belong to.

    Returns:
        (n, D) float32 where the input is float32 or narrower floating point, float64 otherwise.

    Raises:
        ValueError: wrong shape, or a value that is not finite, with its row.

    Source: ours.

    >>> as_features([[1, 2]], n=1)
    array([[1., 2.]])
    """
    array = to_numpy(features, "features")
    if array.ndim != 2 or array.shape[1] == 0:
        raise ValueError(f"features must have shape (N, D), one row per sample; got {array.shape}")
    if len(array) != n:
        raise ValueError(f"{len(array)} rows of features for {n} rows of logits")
    array = array.astype(
        np.float32 if array.dtype.kind == "f" and array.dtype.itemsize <= 4 else np.float64, copy=False
    )
    for rows in row_chunks(*array.shape):
        bad = np.flatnonzero(~np.isfinite(array[rows]).all(axis=1))
        if bad.size:
            raise ValueError(f"features row {rows.start + bad[0]} holds a value that is not finite")
    return array


def as_head(head: Any, n_classes: int, n_features: int) -> tuple[np.ndarray, np.ndarray]:
    """Check a classifier's last layer, logits = features @ weight.T + bias.

    Args:
        head: anything with ``weight`` and ``bias`` (`smartlib.data.Head`, `torch.nn.Linear`), or a pair of the two.
        n_classes: K. n_features: D.

    Returns:
        ``(weight, bias)``: (K, D) and (K,) float64.

    Raises:
        ValueError: neither of these, another shape, or a value that is not finite.

    Source: ours.

    >>> as_head(([[1, 2]] * 3, [0, 0, 1]), n_classes=3, n_features=2)[1]
    array([0., 0., 1.])
    """
    if hasattr(head, "weight"):
        weight, bias = head.weight, getattr(head, "bias", None)
    elif isinstance(head, tuple | list) and len(head) == 2:
        weight, bias = head
    else:
        raise ValueError(f"head must have weight (K, D) and bias (K,), or be a pair of them; got {type(head).__name__}")
    weight = to_numpy(weight, "head weight").astype(np.float64)
    bias = np.zeros(n_classes) if bias is None else to_numpy(bias, "head bias").astype(np.float64)  # Linear(bias=False)
    if weight.shape != (n_classes, n_features) or bias.shape != (n_classes,):
        raise ValueError(
            f"head has weight {weight.shape} and bias {bias.shape}; expected ({n_classes}, {n_features}) and "
            f"({n_classes},), from the columns of logits and features"
        )
    if not (np.isfinite(weight).all() and np.isfinite(bias).all()):
        raise ValueError("head holds a value that is not finite")
    return weight, bias


def check_label_logits(logits: np.ndarray, labels: np.ndarray) -> None:
    """Raise ValueError where the logit of a sample's own label is -inf: its likelihood is zero whatever T is."""
    bad = np.flatnonzero(np.isneginf(logits[np.arange(len(labels)), labels]))
    if bad.size:
        raise ValueError(
            f"row {bad[0]}: the logit of its own label {labels[bad[0]]} is -inf, so the label is impossible under the "
            "model; remove the row or give the class a finite logit"
        )


def as_count(value: Any, name: str) -> int:
    """Check a setting that is a whole number of at least 1; raises ValueError with its name otherwise."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
    return int(value)


def _check_matrix(array: np.ndarray, name: str) -> None:
    if array.ndim != 2:
        raise ValueError(
            f"{name} must have shape (N, K), one row per sample and one column per class; got {array.shape}"
        )
    if array.shape[0] == 0:
        raise ValueError(f"{name} has no rows (shape {array.shape}): at least one sample is needed")
    if array.shape[1] < 2:
        raise ValueError(
            f"{name} has {array.shape[1]} column(s): at least two classes are needed, shape (N, K), K >= 2"
        )
