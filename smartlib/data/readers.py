"""Readers of published logits files that run no code a file may carry.

A pickle is a program: loading one calls whatever functions it names. The readers here know the few
names that plain arrays need and refuse every other name before anything of it runs.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Sequence

import numpy as np


def read_torch(path: str | os.PathLike) -> tuple[np.ndarray, np.ndarray]:
    """Read a file by ``torch.save`` that holds a tuple ``(logits, labels)``, saved on whatever device.

    Args:
        path: the file.

    Returns:
        ``logits (N, K)`` and ``labels``, numpy arrays of the types that were saved (bfloat16, which numpy
        does not have, becomes float32).

    Raises:
        ValueError: the file asks for more than tensors (it is refused, and says what it asked for), is
            truncated, or holds something else than a pair of tensors.

    Source: ours; the format is that of the public CIFAR-10 ResNet-50 logits.
    """
    import torch

    with open(path, "rb") as file:
        try:
            content = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged file raises almost anything, from KeyError to RuntimeError
            asked = re.search(r"GLOBAL (\S+)", str(error))
            if asked:  # torch's own message advises to load it regardless: not passed on
                raise ValueError(
                    f"{path} was refused: beside tensors it asks for {asked[1]}, which could run code; "
                    "save it again as a tuple of two tensors (logits, labels)"
                ) from None
            raise ValueError(f"{path} is not a readable torch file; truncated or damaged? ({error!r})") from error
    if not (isinstance(content, tuple | list) and len(content) == 2 and all(map(torch.is_tensor, content))):
        found = list(content) if isinstance(content, dict) else type(content).__name__
        raise ValueError(f"{path} holds {found}, expected a tuple of two tensors (logits, labels)")
    logits, labels = (tensor.detach() for tensor in content)
    if logits.dtype == torch.bfloat16:
        logits = logits.float()
    return logits.numpy(), labels.numpy()


def read_numpy_pickle(path: str | os.PathLike) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Read a pickle of numpy arrays ``((val logits, val labels), (test logits, test labels))``.

    Args:
        path: the file; pickle protocol 3 or 4.

    Returns:
        ``((val logits, val labels), (test logits, test labels))``, in the machine's byte order.

    Raises:
        ValueError: the file asks for more than plain arrays of numbers (it is refused, and says what it
            asked for), is truncated, or is nested in another way.

    Source: ours; the format is that of github.com/markus93/NN_calibration.
    """
    with open(path, "rb") as file:
        try:
            content = _ArrayUnpickler(file).load()
        except Exception as error:  # a damaged pickle raises almost anything
            raise ValueError(f"{path} is not a readable pickle of plain numpy arrays: {error}") from error
    match content:
        case [[_Array(), _Array()], [_Array(), _Array()]]:
            (val_logits, val_labels), (test_logits, test_labels) = content
            return (val_logits.array, val_labels.array), (test_logits.array, test_labels.array)
    raise ValueError(
        f"{path} holds {_outline(content)}, expected ((val logits, val labels), (test logits, test labels))"
    )


def read_npz(path: str | os.PathLike, keys: Sequence[str]) -> dict[str, np.ndarray]:
    """Read named arrays from an npz archive.

    Args:
        path: the file.
        keys: the names that it must have; others are not read.

    Returns:
        ``{key: array}`` in the order of ``keys``, in the machine's byte order.

    Raises:
        ValueError: a key is missing (the message lists those found), the file is truncated or no npz
            archive, or an array holds pickled objects.

    Source: ours; the format is numpy's.
    """
    with open(path, "rb") as file:
        try:
            with np.load(file, allow_pickle=False) as archive:
                found = archive.files
                arrays = {key: _native(archive[key]) for key in keys if key in found}
        except Exception as error:  # BadZipFile, EOFError, zlib.error, ValueError, ...
            raise ValueError(
                f"{path} is not a readable npz file of plain arrays; truncated, damaged or of another format? ({error})"
            ) from error
    missing = [key for key in keys if key not in arrays]
    if missing:
        raise ValueError(f"{path} lacks {missing}: keys found {sorted(found)}, expected {list(keys)}")
    return arrays


def _native(array: np.ndarray) -> np.ndarray:
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _outline(content: object) -> str:
    """The nesting of tuples and arrays in words, for an error message."""
    if isinstance(content, tuple | list):
        return f"({', '.join(_outline(item) for item in content[:4])}{', ...' if len(content) > 4 else ''})"
    return f"array {content.array.shape}" if isinstance(content, _Array) else type(content).__name__


# What stands in for numpy inside a pickle. Numpy's own functions are not used even where they would run no
# foreign code: they believe a file that misstates a dtype's size or flags, and then read outside of it.


class _Dtype:
    """In place of ``numpy.dtype``: a type of plain numbers."""

    def __init__(self, code, align=False, copy=True):
        if not re.fullmatch(r"[biuf]\d{1,2}", str(code)):
            raise pickle.UnpicklingError(f"it holds an array of dtype {code!r}; only plain numbers are read")
        self.dtype = np.dtype(code)

    def __setstate__(self, state):
        self.dtype = self.dtype.newbyteorder(state[1])


class _Array:
    """In place of the function that makes an empty ``numpy.ndarray``: the array comes with the state."""

    def __init__(self, subtype, shape, code):
        self.array = np.empty(0)

    def __setstate__(self, state):
        _, shape, dtype, is_fortran, content = state
        self.array = _native(np.frombuffer(content, dtype.dtype).reshape(shape, order="F" if is_fortran else "C"))


_KNOWN = {
    ("numpy", "dtype"): _Dtype,
    ("numpy", "ndarray"): "ndarray",  # only ever the argument of _reconstruct; a string cannot be called
    ("numpy.core.multiarray", "_reconstruct"): _Array,  # numpy 1
    ("numpy._core.multiarray", "_reconstruct"): _Array,  # numpy 2
}


class _ArrayUnpickler(pickle.Unpickler):
    """An unpickler for which nothing exists but arrays of numbers."""

    def find_class(self, module, name):
        if (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which could run code, and was refused")
        return _KNOWN[module, name]
