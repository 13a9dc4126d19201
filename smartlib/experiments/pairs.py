"""Which methods are best on a model: all are compared on the same resampled test sets, and the outcome is kept.

The lowest measured value names no winner, for the next test set might name another. What can be named is a set that
holds the truly best method with a stated confidence (Gupta 1965). A method is left out of it when it is above some
other one by more than chance explains, where "chance" allows for its being compared with all of them at once (Hsu
1984). The test sets are resampled once for all methods, so that differences are paired.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pandas as pd

from smartlib.calibrators import create
from smartlib.calibrators.base import scaled_softmax
from smartlib.experiments.cells import Cell, load
from smartlib.experiments.grid import module_of, unchecked_metrics
from smartlib.experiments.records import Task, run_tasks, sources_of, task_key
from smartlib.metrics import TOP_LABEL_ERRORS, top_label
from smartlib.resampling import top_label_statistic
from smartlib.scores import brier_losses, log_losses

METRICS = ("ece", "adaece", "smce", "nll", "brier")
# The methods among which the paper says that SMART has the lowest error (claim C6).
CLAIMED = ("ts", "pts", "cts", "spline", "gc", "procal", "fc", "smart")
N_RESAMPLES = 300
LEVEL = 0.95
_LOSSES = {"nll": log_losses, "brier": brier_losses}
_PARTS = ("behind", "behind_claimed", "vs_smart", "vs_smart_low", "vs_smart_high")


def paired_table(cells: Sequence[Cell], name: str) -> pd.DataFrame:
    """Paired comparisons of all methods of each bundle, computed where they are missing.

    Args:
        cells: which methods, on all validation samples; "smart" among those of each bundle.
        name: of the file of records.

    Returns:
        One row per bundle, metric and method: ``behind``, by how much the metric is at least above that of some other
        method (:func:`behind_the_best`; the set of the best has those that are not above 0), and ``behind_claimed``,
        the same among ``CLAIMED``, NaN for the others; ``vs_smart`` with ``_low`` and ``_high``, the difference from
        SMART with its 95 % interval, as by `smartlib.compare`.

    Source: ours.
    """
    tasks, methods = [], {}
    for bundle in dict.fromkeys(cell.bundle for cell in cells):
        own = tuple(cell for cell in cells if cell.bundle == bundle)
        methods[bundle] = [cell.method for cell in own]
        modules = {module_of(cell.calibrator) for cell in own if cell.calibrator}
        sources = [*sources_of("metrics", "resampling", "calibrators.scaling", *modules), "experiments/pairs.py"]
        what = [[cell.method, cell.calibrator, json.dumps(cell.settings, sort_keys=True)] for cell in own]
        # One task for all metrics, because fits take longer than comparisons.
        key = task_key([], sources, [load(bundle).sha256, what])
        tasks.append(Task(key, {"bundle": bundle}, partial(_run, own)))
    return pd.DataFrame(
        {"bundle": record["bundle"], "metric": metric, "method": method}
        | {part: record.get(f"{metric}_{method}_{part}", np.nan) for part in _PARTS}
        for record in run_tasks(tasks, name, is_checked=_is_checked).to_dict("records")
        for metric in METRICS
        for method in methods[record["bundle"]]
    )


def _is_checked(column: str, identity: dict) -> bool:
    metric, method, *_ = column.split("_")
    return metric not in unchecked_metrics(method)


def _run(cells: Sequence[Cell]) -> dict:
    """The flat record of one bundle: ``<metric>_<method>_<part>``."""
    statistics = [_statistics(cell) for cell in cells]
    return {
        f"{metric}_{name}": value
        for metric in METRICS
        for name, value in _compared(cells, metric, [own[metric] for own in statistics]).items()
    }


def _compared(cells: Sequence[Cell], metric: str, statistics: Sequence[Callable]) -> dict:
    """The comparisons by one metric: ``<method>_<part>``."""
    methods = [cell.method for cell in cells]
    n, rng = len(load(cells[0].bundle).test.labels), np.random.default_rng(0)
    samples = [np.arange(n), *(rng.integers(n, size=n) for _ in range(N_RESAMPLES))]
    values = np.array([[statistic(rows) for statistic in statistics] for rows in samples])
    observed, resampled = values[0], values[1:]
    claimed = [i for i, method in enumerate(methods) if method in CLAIMED]
    record = {f"{method}_behind": x for method, x in zip(methods, behind_the_best(observed, resampled), strict=True)}
    for i, behind in zip(claimed, behind_the_best(observed[claimed], resampled[:, claimed]), strict=True):
        record[f"{methods[i]}_behind_claimed"] = behind
    smart = methods.index("smart")
    for i, method in enumerate(methods):
        difference, drawn = observed[i] - observed[smart], resampled[:, i] - resampled[:, smart]
        for part, x in zip(_PARTS[2:], (difference, *_interval(metric, difference, drawn)), strict=True):
            record[f"{method}_{part}"] = x
    return {name: float(value) for name, value in record.items()}


def behind_the_best(observed: np.ndarray, resampled: np.ndarray) -> np.ndarray:
    """By how much each method is at least above some other one. Where that is above 0, it is not the best.

    For method i the differences from all others get lower bounds that hold together: standard errors, the critical
    value and the bias are those of the bootstrap. As in `smartlib.compare`, the bound is the lower one of the basic and
    of the percentile kind, which differ where chance adds to an error, and its level is 97.5 %, the lower end of a 95 %
    interval. The truly best one is left out in at most one sample in forty; others may stay in although they are worse.

    Args:
        observed: (M,) metric of each method, lower is better.
        resampled: (B, M) the same on B resamples, paired.

    Returns:
        (M,) largest lower bound of method minus another; 0 where there is no other method.

    Source: Hsu 1984, the critical value by the bootstrap.

    >>> noise = np.random.default_rng(0).normal(size=(400, 3)) * 0.01
    >>> behind = behind_the_best(np.array([0.10, 0.11, 0.20]), np.array([0.10, 0.11, 0.20]) + noise)
    >>> (behind > 0).tolist()
    [False, False, True]
    """
    behind = np.zeros(len(observed))
    for i in range(len(observed)):
        others = np.arange(len(observed)) != i
        if not others.any():
            continue
        difference = observed[i] - observed[others]
        drawn = resampled[:, [i]] - resampled[:, others]
        mean, error = drawn.mean(axis=0), drawn.std(axis=0)
        # Two methods may predict the same; their difference is then 0 in every sample.
        scale = np.where(error > 1e-12, error, 1.0)
        critical = np.quantile(((drawn - mean) / scale).max(axis=1), (1 + LEVEL) / 2)
        behind[i] = (np.minimum(mean, 2 * difference - mean) - critical * error).max()
    return behind


def _statistics(cell: Cell) -> dict:
    """For each metric its value as a function of the rows that are in the sample."""
    bundle = load(cell.bundle)
    val, test = bundle.val, bundle.test
    if cell.method == "uncalibrated":
        probs = scaled_softmax(test.logits, 1.0)
    else:
        with warnings.catch_warnings():
            # The main experiment counts them.
            warnings.simplefilter("ignore")
            calibrator = create(cell.calibrator, **cell.settings)
            calibrator.fit(val.logits, val.labels, features=val.features, head=bundle.head)
            probs = calibrator.predict_proba(test.logits, features=test.features)
    confidence, correct = top_label(probs, test.labels)
    return {metric: _statistic(metric, confidence, correct, probs, test.labels) for metric in METRICS}


def _statistic(metric: str, confidence: np.ndarray, correct: np.ndarray, probs: np.ndarray, labels: np.ndarray):
    if metric in TOP_LABEL_ERRORS:
        statistic = top_label_statistic(metric, confidence)
        return lambda rows: statistic(rows, correct[rows])
    losses = _LOSSES[metric](probs, labels)
    return lambda rows: float(losses[rows].mean())


def _interval(metric: str, difference: float, drawn: np.ndarray) -> tuple[float, float]:
    """As `smartlib.compare` makes it, from (B,) resampled differences."""
    percentile = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    low, high = 2 * difference - percentile[::-1]
    return (min(low, percentile[0]), max(high, percentile[1])) if metric in TOP_LABEL_ERRORS else (low, high)
