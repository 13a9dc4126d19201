"""One cell of an experiment: fit a calibrator on validation samples of a bundle, judge it on the test split.

What this file does decides every record, and is a part of their keys; how cells are run is in
`smartlib.experiments.grid`.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from sklearn.exceptions import ConvergenceWarning

from smartlib.calibrators import CalibrationWarning, TemperatureScaling, create
from smartlib.calibrators.base import scaled_softmax
from smartlib.comparison import compare
from smartlib.data import Bundle, Split
from smartlib.data import load as load_bundle
from smartlib.metrics import evaluate

N_RESAMPLES = 200
COMPARED = ("ece", "adaece", "smce", "nll", "brier")

# A worker process meets the same few bundles again and again.
load = lru_cache(maxsize=4)(load_bundle)


@dataclass(frozen=True)
class Cell:
    """One cell of an experiment.

    Args:
        bundle: name for `smartlib.load`.
        method: "uncalibrated" or the name under which tables and figures show the method.
        calibrator: registered name of the calibrator; "" for uncalibrated.
        settings: its constructor arguments.
        val_size: use only so many validation samples, drawn without replacement; None for all of them.
        split_seed: of that draw. Of one seed, a smaller draw is a part of a larger one.
        n_resamples: for intervals, noise floors and paired differences; 0 computes none of them.
    """

    bundle: str
    method: str
    calibrator: str = ""
    settings: dict = field(default_factory=dict, hash=False)
    val_size: int | None = None
    split_seed: int = 0
    n_resamples: int = N_RESAMPLES


def run_cell(cell: Cell) -> dict:
    """Fit on validation samples, predict and judge on the test split.

    Returns:
        A flat record: ``n_val``, ``n_val_errors`` (wrong predictions among them), that of `smartlib.evaluate`,
        ``kept_predictions`` (share), with ``n_resamples`` also ``<metric>_vs_ts`` with ``_low`` and ``_high`` (paired
        difference from temperature scaling fitted on the same samples), ``n_warnings`` of the fit, and what the
        calibrator reports of it (temperature, objective, iterations).

    Raises:
        ValueError: ``val_size`` is larger than the validation split.
    """
    bundle = load(cell.bundle)
    val, test = draw(bundle, cell.val_size, cell.split_seed), bundle.test
    record = {"n_val": len(val.labels), "n_val_errors": int((val.logits.argmax(axis=1) != val.labels).sum())}
    details: dict = {"n_warnings": 0}
    with warnings.catch_warnings(record=True) as caught:
        # A doubtful fit is a result here, and is counted.
        warnings.simplefilter("ignore")
        if cell.n_resamples:
            baseline = TemperatureScaling().fit(val.logits, val.labels).predict_proba(test.logits)
        for category in (CalibrationWarning, ConvergenceWarning):
            warnings.simplefilter("always", category)
        if cell.method == "uncalibrated":
            probs = scaled_softmax(test.logits, 1.0)
        else:
            calibrator = create(cell.calibrator, **cell.settings)
            calibrator.fit(val.logits, val.labels, features=val.features, head=bundle.head)
            details["n_warnings"] = len(caught)
            probs = calibrator.predict_proba(test.logits, features=test.features)
            for name in ("temperature_", "objective_", "n_iter_", "converged_"):
                if hasattr(calibrator, name):
                    details[name.removesuffix("_")] = getattr(calibrator, name)
    record |= evaluate(probs, test.labels, n_resamples=cell.n_resamples).to_dict()
    record["kept_predictions"] = float(np.mean(probs.argmax(axis=1) == test.logits.argmax(axis=1)))
    for metric in COMPARED if cell.n_resamples else ():
        difference = compare(probs, baseline, test.labels, metric, n_resamples=cell.n_resamples)
        record[f"{metric}_vs_ts"] = difference.difference
        record[f"{metric}_vs_ts_low"], record[f"{metric}_vs_ts_high"] = difference.low, difference.high
    return record | details


def draw(bundle: Bundle, size: int | None, seed: int) -> Split:
    """So many validation samples of a bundle.

    Args:
        bundle: the bundle. size: how many, or None for all in their order. seed: of the draw.

    Returns:
        A split.

    Raises:
        ValueError: there are not so many.
    """
    val = bundle.val
    if size is None:
        return val
    if not 1 <= size <= len(val.labels):
        raise ValueError(f"val_size must be between 1 and {len(val.labels)}, all that {bundle.name} has; got {size}")
    rows = np.random.default_rng(seed).permutation(len(val.labels))[:size]
    return Split(val.logits[rows], val.labels[rows], None if val.features is None else val.features[rows])
