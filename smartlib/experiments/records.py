"""Finished work, kept as rows of a small table, so that it is done once.

A task has a key made of everything that decides its result: data, the library's sources that it uses, settings, seeds.
Its result is one row of ``records/<name>.csv`` in the folder of the figures; until a run is over, one line of
``<name>.journal`` beside it, written as soon as it is there. A task whose key has a row is not run again, so that an
interrupted run resumes, a fresh clone draws in minutes, and changed code never shows stale numbers. A random two per
cent of the rows that are used are computed again and compared: nobody has to believe a table. ``SMARTLIB_FORCE=1`` runs
all. Where tasks run, `smartlib.experiments.workers` says.

Another processor rounds differently, and few results feel it: one sample on the edge of a bin, a fit that has not
converged. So one in ten of the rows that are compared may differ by more than `CHECK_TOLERANCE`, which is said, but by
no more than `OUTLIER_TOLERANCE`. On the processors tried, one row in a thousand does.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import math
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
from tqdm.auto import tqdm

import smartlib
from smartlib.experiments.outputs import figures_folder
from smartlib.experiments.workers import compute

# Fractions, or nats; of numbers above 1, relative. The first is below any digit shown.
CHECK_TOLERANCE, OUTLIER_TOLERANCE = 2e-4, 0.05


@dataclass(frozen=True)
class Task:
    """Work that gives one record.

    Args:
        key: from :func:`task_key`.
        identity: columns that say what the record is about; they name it in messages, and a record of the same identity
            under an older key is replaced.
        run: computes the other columns; other processes must be able to receive it (a partial of a module's function).
    """

    key: str
    identity: dict
    run: Callable[[], dict]


def task_key(arrays: Iterable[np.ndarray], sources: Iterable[str], settings: list) -> str:
    """Sixteen hex digits of a hash of all that decides a result.

    Args:
        arrays: the data. sources: files of the library, relative to the package. settings: anything that JSON can hold.
    """
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    for name in sources:
        digest.update((Path(smartlib.__file__).parent / name).read_bytes())
    digest.update(json.dumps(settings, sort_keys=True).encode())
    return digest.hexdigest()[:16]


@cache
def sources_of(*modules: str) -> tuple[str, ...]:
    """The files of modules of the library and of all that they import from it, relative to the package.

    A package passes names on and counts for nothing: name the modules themselves.

    >>> sources_of("calibrators.scaling")
    ('arrays.py', 'calibrators/base.py', 'calibrators/scaling.py', 'toplabel.py')
    """
    package = Path(smartlib.__file__).parent
    waiting, found = list(modules), set()
    while waiting:
        name = waiting.pop().replace(".", "/") + ".py"
        if name in found or not (package / name).is_file():
            continue
        found.add(name)
        for node in ast.walk(ast.parse((package / name).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("smartlib"):
                home = node.module.removeprefix("smartlib").removeprefix(".")
                # What is imported may itself be a module.
                waiting += [home, *(f"{home}.{alias.name}".removeprefix(".") for alias in node.names)]
    return tuple(sorted(found))


def run_tasks(
    tasks: Sequence[Task], name: str, *, is_checked: Callable[[str, dict], bool] = lambda column, identity: True
) -> pd.DataFrame:
    """The records of the tasks, computed where they are missing, on all cores or on a cluster.

    Args:
        tasks: what to run; keys are distinct.
        name: of the file of records: ``<profile>`` or ``<profile>_<experiment>``.
        is_checked: whether a column of numbers is compared when the record of an identity is computed again.

    Returns:
        One row per task, in their order: key, identity, results; an empty table where there is no task.

    Raises:
        RuntimeError: records that were computed again came out differently; or workers of a cluster run other sources.

    Warns:
        UserWarning: a few of them did, by little.

    Source: ours.
    """
    if not tasks:  # not every profile has every experiment
        return pd.DataFrame()
    path = figures_folder() / "records" / f"{name}.csv"
    journal = path.with_suffix(".journal")
    known = {row["key"]: row for row in _read(path).to_dict("records")} if path.is_file() else {}
    finished = _read_journal(journal)  # by a run that was killed
    known |= finished
    # A forced run that was killed goes on where it stopped.
    trusted = finished if os.environ.get("SMARTLIB_FORCE") == "1" else known
    reused = {task.key for task in tasks if task.key in trusted}
    checked = (
        set(np.random.default_rng().choice(sorted(reused), math.ceil(len(reused) / 50), replace=False))
        if reused
        else set()
    )
    waiting = [task for task in tasks if task.key not in reused or task.key in checked]
    new = len(finished)
    outliers: list[str] = []
    progress = tqdm(compute(waiting), desc=name, total=len(waiting), disable=len(reused) == len(tasks))
    try:
        for task, result in progress:
            found = {"key": task.key} | task.identity | result
            if task.key in checked:
                outliers += _compare(found, known[task.key], task.identity, is_checked)
                if len(outliers) > len(checked) // 10:
                    raise RuntimeError(f"{outliers[0]}; run with SMARTLIB_FORCE=1 to renew it")
            else:
                _append(journal, found)
                known[task.key] = found
                new += 1
    finally:
        if new:
            _write(path, known, tasks)
            journal.unlink(missing_ok=True)
    if outliers:
        among = f"{len(outliers)} of {len(checked)} records that were computed again differ more than by rounding"
        warnings.warn(f"{name}: {among}; {'; '.join(outliers)}", stacklevel=2)
    # Read back, so that a record shows the same digits whether it is new or old.
    table = _read(path)
    return table.iloc[pd.Index(table["key"]).get_indexer([task.key for task in tasks])].reset_index(drop=True)


def read_records(name: str) -> pd.DataFrame:
    """All records of a file, for instance those of another profile that are shown as "recorded"."""
    return _read(figures_folder() / "records" / f"{name}.csv")


def _read(path: Path) -> pd.DataFrame:
    # A key may happen to have no letter.
    return pd.read_csv(path, keep_default_na=False, na_values=[""], dtype={"key": str})


def _append(journal: Path, record: dict) -> None:
    """Keep a finished record at once, as a line of its own: the table is written when all are there."""
    journal.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(record, default=float)
    with journal.open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def _read_journal(journal: Path) -> dict[str, dict]:
    """Records by key; a last line that was cut short is left out."""
    if not journal.is_file():
        return {}
    *lines, cut = journal.read_text(encoding="utf-8").split("\n")
    if cut:
        # Else the next record would be written behind it.
        journal.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return {record["key"]: record for record in map(json.loads, lines)}


def _write(path: Path, known: dict[str, dict], tasks: Sequence[Task]) -> None:
    """Replace the file of records; records of these tasks under an older key are dropped."""
    position = {task.key: i for i, task in enumerate(tasks)}
    columns = list(tasks[0].identity)
    current = {tuple(str(task.identity[c]) for c in columns) for task in tasks}
    kept = [
        row for key, row in known.items()
        if key in position or tuple(str(row.get(c)) for c in columns) not in current
    ]  # fmt: skip
    # In the order of the tasks, however many runs it took.
    table = pd.DataFrame(sorted(kept, key=lambda row: position.get(row["key"], len(tasks))))
    buffer = io.StringIO()
    table.to_csv(buffer, index=False, float_format="%.8g", lineterminator="\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(buffer.getvalue(), encoding="utf-8")
    os.replace(partial, path)


def _compare(found: dict, record: dict, identity: dict, is_checked: Callable[[str, dict], bool]) -> list[str]:
    """What is to be said of a record that came out differently; empty where it did not.

    Raises:
        RuntimeError: it differs by more than rounding ever explains.
    """
    worst, text = 0.0, ""
    for name, value in found.items():
        if isinstance(value, float) and name not in identity and is_checked(name, identity):
            # A NaN on one side alone differs without bounds.
            off = abs(value - record[name]) / max(1, abs(record[name]))
            off = math.inf if math.isnan(off) and not (math.isnan(value) and math.isnan(record[name])) else off
            if off > max(worst, CHECK_TOLERANCE):
                worst = off
                text = (
                    f"the record of {', '.join(str(v) for v in identity.values())} says {name} = {record[name]:.6g}, "
                    f"but computing it again gives {value:.6g}"
                )
    if worst > OUTLIER_TOLERANCE:
        raise RuntimeError(f"{text}; run with SMARTLIB_FORCE=1 to renew it")
    return [text] if text else []
