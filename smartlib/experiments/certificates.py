"""The bounds on the smooth calibration error of every model after SMART, over a grid of settings, kept as records."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import lru_cache, partial

import numpy as np
import pandas as pd

from smartlib.bounds import certificate_grid
from smartlib.calibrators import SMART, CalibrationWarning
from smartlib.calibrators.base import scaled_softmax
from smartlib.data import load
from smartlib.experiments.records import Task, run_tasks, sources_of, task_key
from smartlib.metrics import expected_calibration_error, top_label

N_BINS = (5, 10, 15, 30, 60)
BANDWIDTHS = (0.01, 0.02, 0.05, 0.1)
DELTAS = (1e-3, 1e-2)


def certificate_table(bundles: Sequence[str], profile: str) -> pd.DataFrame:
    """The terms of the bounds on smCE, for SMART fitted on the validation split and judged on the test split.

    Args:
        bundles: names for `smartlib.load`.
        profile: the records are kept in ``records/<profile>_certificates.csv``.

    Returns:
        One row per bundle, number of bins M, bandwidth lambda and delta: ``bundle``, the columns of
        `smartlib.bounds.certificate_grid`, ``n``, and ``ece`` with ``uncalibrated_ece`` for scale.

    Source: ours.
    """
    tasks = []
    for name in bundles:
        bundle = load(name)
        arrays = [array for split in (bundle.val, bundle.test) for array in (split.logits, split.labels)]
        sources = [*sources_of("metrics", "calibrators.smart", "bounds"), "experiments/certificates.py"]
        for n_bins in N_BINS:
            for bandwidth in BANDWIDTHS:
                for delta in DELTAS:
                    setting = {"bundle": name, "n_bins": n_bins, "bandwidth": bandwidth, "delta": delta}
                    key = task_key(arrays, sources, [setting])
                    tasks.append(Task(key, setting, partial(_terms, name, setting)))
    return run_tasks(tasks, f"{profile}_certificates")


@lru_cache(maxsize=8)
def _confidences(name: str) -> tuple[np.ndarray, np.ndarray, float]:
    """Confidence and correctness on the test split after SMART, and the ECE before it."""
    bundle = load(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)
        smart = SMART().fit(bundle.val.logits, bundle.val.labels)
        probs = smart.predict_proba(bundle.test.logits)
    before = expected_calibration_error(*top_label(scaled_softmax(bundle.test.logits, 1.0), bundle.test.labels))
    return *top_label(probs, bundle.test.labels), before


def _terms(name: str, setting: dict) -> dict:
    confidence, correct, before = _confidences(name)
    (row,) = certificate_grid(
        confidence, correct, n_bins=[setting["n_bins"]], bandwidths=[setting["bandwidth"]], deltas=[setting["delta"]]
    ).to_dict("records")
    scale = {"n": len(correct), "ece": expected_calibration_error(confidence, correct), "uncalibrated_ece": before}
    return {name: value for name, value in row.items() if name not in setting} | scale
