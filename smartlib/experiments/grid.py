"""The cells of the main experiment: a cell is a bundle and a calibrator with its settings, and gives one record.

Records are kept as `smartlib.experiments.records` says, in ``records/<profile>.csv``.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, partial

import numpy as np
import pandas as pd

from smartlib.calibrators import CalibrationWarning, TemperatureScaling, create
from smartlib.calibrators.base import scaled_softmax
from smartlib.data import Bundle, load
from smartlib.experiments.records import Task, run_tasks, sources_of, task_key
from smartlib.metrics import evaluate
from smartlib.uncertainty import compare

N_RESAMPLES = 200
COMPARED = ("ece", "smce", "nll")


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
    bundle = cache(load)
    tasks = [
        Task(
            cell_key(cell, bundle(cell.bundle)),
            {"bundle": cell.bundle, "method": cell.method, "settings": json.dumps(cell.settings, sort_keys=True)},
            partial(run_cell, cell, bundle(cell.bundle)),
        )
        for cell in cells
    ]
    return run_tasks(tasks, profile, is_checked=_is_checked)


def run_cell(cell: Cell, bundle: Bundle) -> dict:
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
    return record | details


def cell_key(cell: Cell, bundle: Bundle) -> str:
    """The key of a cell's record."""
    arrays = [array for split in (bundle.val, bundle.test) for array in (split.logits, split.labels)]
    modules = [] if cell.method == "uncalibrated" else [module_of(cell.calibrator)]
    what = [cell.bundle, cell.method, cell.calibrator, cell.settings, cell.n_resamples]
    return task_key(arrays, sources_of("metrics", "calibrators.scaling", *modules), what)


def module_of(calibrator: str) -> str:
    """The module of a calibrator, within the package.

    >>> module_of("smart")
    'calibrators.smart'
    """
    return type(create(calibrator)).__module__.removeprefix("smartlib.")


def _is_checked(column: str) -> bool:
    # One sample in a bin decides the MCE, and the end point of a solver may differ where the objective is flat.
    return column not in ("objective", "temperature") and column.split("_")[0] != "mce"
