"""Logits and features of many images, in shards that are written once: a killed extraction loses one of them at most.

A folder holds ``shard-00000.safetensors`` and so on, beside each a small ``.json`` that says which rows it has and its
sha256, and, when all are there, ``manifest.json``. Each file appears under its name only when it is complete.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np

MANIFEST = "manifest.json"
# So many images are lost at most when a run is killed.
SHARD_ROWS = 2_000


def write_shard(
    folder: Path, index: int, key: str, span: tuple[int, int], arrays: dict[str, np.ndarray], **more
) -> None:
    """Write a shard and then its record.

    Args:
        folder: of the shards; made where it is missing. index: of the shard.
        key: says what was computed; a shard of another key is not reused.
        span: first row and the one behind the last row that this shard is about.
        arrays: of equal length. more: what else the record says.

    Raises:
        OSError: the disk is full; says how much was to be written, and leaves nothing behind.
    """
    content = pack(arrays)
    path = _path(folder, index)
    write_file(path, content)
    record = {"key": key, "start": span[0], "stop": span[1], "rows": len(next(iter(arrays.values())))}
    record |= {"sha256": hashlib.sha256(content).hexdigest(), **more}
    write_file(path.with_suffix(".json"), json.dumps(record).encode())


def read_record(folder: Path, index: int, key: str, span: tuple[int, int]) -> dict | None:
    """The record of a shard that is there, whole, and of this key and span; else None: it must be computed."""
    path = _path(folder, index)
    try:
        record = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        content = path.read_bytes()
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    wanted = {"key": key, "start": span[0], "stop": span[1], "sha256": hashlib.sha256(content).hexdigest()}
    return record if wanted.items() <= record.items() else None


def write_manifest(folder: Path, records: Iterable[dict], **more) -> None:
    """Say that all shards are there: their records, and what was extracted."""
    shards = [{"file": _path(folder, index).name} | record for index, record in enumerate(records)]
    more["rows"] = sum(record["rows"] for record in shards)
    write_file(folder / MANIFEST, json.dumps(more | {"shards": shards}, indent=1).encode())


def read_manifest(folder: Path) -> dict | None:
    """What was extracted into a folder, or None where that is not finished."""
    path = folder / MANIFEST
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def read_shards(folder: Path) -> dict[str, np.ndarray]:
    """All shards of a finished extraction, joined.

    Raises:
        ValueError: a shard is missing or damaged, or the number of rows is not that of the manifest.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        raise ValueError(f"{folder} holds no finished extraction ({MANIFEST} is missing)")
    parts = []
    for record in manifest["shards"]:
        path = folder / record["file"]
        content = path.read_bytes() if path.is_file() else b""
        if hashlib.sha256(content).hexdigest() != record["sha256"]:
            raise ValueError(f"{path} is missing or damaged; remove {folder / MANIFEST} and extract again")
        parts.append(unpack(content))
    arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    if any(len(array) != manifest["rows"] for array in arrays.values()):
        raise ValueError(f"{folder} holds {len(arrays['labels'])} rows, but its manifest says {manifest['rows']}")
    return arrays


def pack(arrays: dict[str, np.ndarray]) -> bytes:
    """Named arrays as the content of a safetensors file."""
    # Imported here: who loads shipped logits needs no safetensors.
    from safetensors.numpy import save

    return save(arrays)


def unpack(content: bytes) -> dict[str, np.ndarray]:
    """The arrays of a safetensors file."""
    from safetensors.numpy import load

    return load(content)


def check_space(folder: Path, n_bytes: int) -> None:
    """Say before the work whether its result will fit.

    Raises:
        OSError: the disk has not so much room.
    """
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < n_bytes:
        needed = f"the result takes {n_bytes / 1e9:.2f} GB, but there is room for {free / 1e9:.2f} GB"
        raise OSError(errno.ENOSPC, needed, str(folder))


def write_file(path: Path, content: bytes) -> None:
    """Write a file that appears under its name only when it is complete.

    Raises:
        OSError: the disk is full, or whatever else ends the writing.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Several processes may write the same file, each under a name of its own.
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        if error.errno == errno.ENOSPC:
            needed = f"no room for {len(content) / 1e6:.1f} MB; what was finished stays: make room and start again"
            raise OSError(errno.ENOSPC, needed, str(path)) from error
        raise


def _path(folder: Path, index: int) -> Path:
    return folder / f"shard-{index:05d}.safetensors"
