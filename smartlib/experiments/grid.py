"""Run cells of an experiment, once each: a cell is a bundle and a calibrator with its settings.

Every finished cell is one row of ``records/<profile>.csv`` in the folder of the figures, written atomically, under a
key made of everything that decides the result: the data, the library's sources that it uses, and the settings, seeds
among them. A cell whose key has a record is not run again, so that an interrupted run resumes, a fresh clone draws
in minutes, and a changed calibrator never shows stale numbers. A random two per cent of the records that are used
are run again and compared: nobody has to believe a table. ``SMARTLIB_FORCE=1`` runs all.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
from tqdm.auto import tqdm

import smartlib
from smartlib.calibrators import CalibrationWarning, TemperatureScaling, create
from smartlib.calibrators.base import scaled_softmax
from smartlib.data import Bundle, load
from smartlib.experiments.outputs import figures_folder
from smartlib.metrics import evaluate
from smartlib.uncertainty import compare

N_RESAMPLES = 200
COMPARED = ("ece", "smce", "nll")
# A record is checked within this (fractions, nats): below any digit shown, above the rounding of another processor.
CHECK_TOLERANCE = 2e-4

_CORE = ("arrays.py", "toplabel.py", "softece.py", "smce.py", "_smce_kernel.py", "metrics.py", "uncertainty.py",
         "calibrators/base.py", "calibrators/scaling.py")  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One cell of an experiment.

    Args:
        bundle: name for `smartlib.load`.
        method: "uncalibrated" or the name under which tables and figures show the method.
        calibrator: registered name of the calibrator; "" for uncalibrated.
        settings: its constructor arguments.
        n_resamples: for intervals, noise floors and paired differences; 0 computes none of them.
    """

    bundle: str
    method: str
    calibrator: str = ""
    settings: dict = field(default_factory=dict, hash=False)
    n_resamples: int = N_RESAMPLES


def run_cells(cells: Sequence[Cell], profile: str) -> pd.DataFrame:
    """The records of the cells, computed where they are missing.

    Args:
        cells: what to run.
        profile: names the file of records.

    Returns:
        One row per cell, in their order: key, bundle, method, settings (JSON), the flat record of
        `smartlib.evaluate`, ``kept_predictions``, ``<metric>_vs_ts`` with ``_low`` and ``_high`` (paired difference
        from temperature scaling; ECE, smCE, NLL), and what the fit reports (temperature, objective, iterations).

    Raises:
        RuntimeError: a record that was run again came out differently.

    Source: ours.
    """
    path = figures_folder() / "records" / f"{profile}.csv"
    records = pd.read_csv(path, keep_default_na=False, na_values=[""]) if path.is_file() else pd.DataFrame()
    known = {row["key"]: row for row in records.to_dict("records")}
    force = os.environ.get("SMARTLIB_FORCE") == "1"
    bundles: dict[str, Bundle] = {}

    def bundle(name: str) -> Bundle:
        if name not in bundles:
            bundles[name] = load(name)
        return bundles[name]

    keys = [cell_key(cell, bundle(cell.bundle)) for cell in cells]
    reused = [i for i, key in enumerate(keys) if key in known and not force]
    checked = (
        set(np.random.default_rng().choice(reused, math.ceil(len(reused) / 50), replace=False)) if reused else set()
    )
    for i in tqdm(range(len(cells)), desc="cells", disable=len(reused) == len(cells)):
        if i in checked:
            _check(run_cell(cells[i], bundle(cells[i].bundle), keys[i]), known[keys[i]])
        elif i not in reused:
            known[keys[i]] = run_cell(cells[i], bundle(cells[i].bundle), keys[i])
            _write(path, known, cells, keys)
    # Read back, so that a record shows the same digits whether it is new or old.
    table = pd.read_csv(path, keep_default_na=False, na_values=[""]).set_index("key").loc[keys].reset_index()
    return table


def run_cell(cell: Cell, bundle: Bundle, key: str = "") -> dict:
    """Fit on the validation split, predict and judge on the test split; one flat record."""
    test = bundle.test
    baseline = TemperatureScaling().fit(bundle.val.logits, bundle.val.labels).predict_proba(test.logits)
    details = {}
    if cell.method == "uncalibrated":
        probs = scaled_softmax(test.logits, 1.0)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CalibrationWarning)  # counted in the record below
            calibrator = create(cell.calibrator, **cell.settings)
            calibrator.fit(bundle.val.logits, bundle.val.labels, features=bundle.val.features, head=bundle.head)
            probs = calibrator.predict_proba(test.logits, features=test.features)
        for name in ("temperature_", "objective_", "n_iter_", "converged_", "n_errors_"):
            if hasattr(calibrator, name):
                details[name.removesuffix("_")] = getattr(calibrator, name)
    record = evaluate(probs, test.labels, n_resamples=cell.n_resamples).to_dict()
    record["kept_predictions"] = float(np.mean(probs.argmax(axis=1) == test.logits.argmax(axis=1)))
    for metric in COMPARED if cell.n_resamples else ():
        difference = compare(probs, baseline, test.labels, metric, n_resamples=cell.n_resamples)
        record[f"{metric}_vs_ts"] = difference.difference
        record[f"{metric}_vs_ts_low"], record[f"{metric}_vs_ts_high"] = difference.low, difference.high
    settings = json.dumps(cell.settings, sort_keys=True)
    return {"key": key, "bundle": cell.bundle, "method": cell.method, "settings": settings} | record | details


def cell_key(cell: Cell, bundle: Bundle) -> str:
    """Sixteen hex digits of a hash of all that decides a cell's result."""
    digest = hashlib.sha256()
    for split in (bundle.val, bundle.test):
        for array in (split.logits, split.labels):
            digest.update(np.ascontiguousarray(array).tobytes())
    sources = [*_CORE, *([] if cell.method == "uncalibrated" else [_source_of(cell.calibrator)])]
    for name in sources:
        digest.update((Path(smartlib.__file__).parent / name).read_bytes())
    what = [cell.bundle, cell.method, cell.calibrator, cell.settings, cell.n_resamples]
    digest.update(json.dumps(what, sort_keys=True).encode())
    return digest.hexdigest()[:16]


def _source_of(calibrator: str) -> str:
    """The file of a calibrator, relative to the package."""
    return type(create(calibrator)).__module__.removeprefix("smartlib.").replace(".", "/") + ".py"


def _write(path: Path, known: dict[str, dict], cells: Sequence[Cell], keys: Sequence[str]) -> None:
    """Replace the file of records; records of these cells under an older key are dropped."""
    current = {_identity(cell.bundle, cell.method, json.dumps(cell.settings, sort_keys=True)) for cell in cells}
    kept = [
        row for key, row in known.items()
        if key in keys or _identity(row["bundle"], row["method"], row["settings"]) not in current
    ]  # fmt: skip
    # In the order of the cells, however many runs it took.
    table = pd.DataFrame(sorted(kept, key=lambda row: keys.index(row["key"]) if row["key"] in keys else len(keys)))
    buffer = io.StringIO()
    table.to_csv(buffer, index=False, float_format="%.8g", lineterminator="\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(buffer.getvalue(), encoding="utf-8")
    os.replace(partial, path)


def _identity(bundle: str, method: str, settings: str) -> str:
    return f"{bundle} {method} {settings}"


def _check(found: dict, record: dict) -> None:
    for name, value in found.items():
        if isinstance(value, float) and name not in ("objective", "temperature") and name.split("_")[0] != "mce":
            if not abs(value - record[name]) <= CHECK_TOLERANCE:
                raise RuntimeError(
                    f"the record of {record['bundle']}, {record['method']} {record['settings']} says {name} = "
                    f"{record[name]:.6g}, but running it again gives {value:.6g}; run with SMARTLIB_FORCE=1 to renew it"
                )
