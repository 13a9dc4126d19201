"""What the literature measures about predicted probabilities, as fractions (tables print percent).

Top-label metrics take ``(confidence, correct)``: the largest probability of each row and whether that class was
right. Metrics of the whole distribution take ``(probs, labels)``. `evaluate` computes those that are asked for at once.
Intervals and the noise floor are in `smartlib.uncertainty`.

| name in `evaluate` | function | what it is |
|---|---|---|
| accuracy | | share of right predictions |
| ece, adaece, mce | `expected_calibration_error` | mean gap of bins of equal width, of equal mass; the largest gap |
| rmsce | `expected_calibration_error`, norm="l2" | root mean square gap, equal width |
| cwece | `classwise_ece` | mean over the classes of the ECE of each |
| smce | `smooth_calibration_error` | exact smooth calibration error |
| debiased_ece | `debiased_ece` | root mean square gap, equal mass, without the part that is noise |
| sweep_ece | `sweep_ece` | mean gap with as many bins as keep the accuracies rising |
| kde_ece | `kde_ece` | mean gap from kernel density estimates |
| smece | `smece` | SmoothECE, a kernel as wide as the result |
| nll, brier | `negative_log_likelihood`, `brier_score` | proper scores |
| brier_calibration, brier_refinement | `brier_decomposition` | the two parts of the Brier score |
| | `proximity_informed_ece` | mean gap of bins by confidence and by proximity, which needs features |
| auroc | `confidence_auroc` | how well confidence tells right from wrong |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from smartlib.arrays import as_labels, as_probabilities
from smartlib.binned_errors import (
    N_BINS,
    Bins,
    bin_edges,
    bin_index,
    classwise_ece,
    classwise_ece_of,
    debiased_ece,
    expected_calibration_error,
    reliability_bins,
    sweep_ece,
)
from smartlib.kernel_errors import kde_ece, smece
from smartlib.proximity import proximity_informed_ece
from smartlib.scores import (
    brier_decomposition,
    brier_losses,
    brier_parts,
    brier_score,
    confidence_auroc,
    log_losses,
    negative_log_likelihood,
)
from smartlib.smce import smooth_calibration_error

__all__ = [
    "ALL_METRICS",
    "METRICS",
    "N_BINS",
    "TOP_LABEL_ERRORS",
    "Bins",
    "Evaluation",
    "bin_edges",
    "bin_index",
    "brier_decomposition",
    "brier_score",
    "classwise_ece",
    "confidence_auroc",
    "debiased_ece",
    "evaluate",
    "expected_calibration_error",
    "kde_ece",
    "negative_log_likelihood",
    "proximity_informed_ece",
    "reliability_bins",
    "smece",
    "smooth_calibration_error",
    "sweep_ece",
    "top_label",
]

# Display order everywhere; "lower is better" holds for all but accuracy and auroc.
METRICS = ("accuracy", "ece", "adaece", "cwece", "mce", "smce", "nll", "brier")
ALL_METRICS = (
    *METRICS,
    "rmsce",
    "debiased_ece",
    "sweep_ece",
    "kde_ece",
    "smece",
    "brier_calibration",
    "brier_refinement",
    "auroc",
)
# The calibration errors of the top label, as functions of (confidence, correct).
TOP_LABEL_ERRORS = {
    "ece": expected_calibration_error,
    "adaece": partial(expected_calibration_error, binning="mass"),
    "mce": partial(expected_calibration_error, norm="max"),
    "smce": smooth_calibration_error,
    "rmsce": partial(expected_calibration_error, norm="l2"),
    "debiased_ece": debiased_ece,
    "sweep_ece": sweep_ece,
    "kde_ece": kde_ece,
    "smece": smece,
}


@dataclass(frozen=True, repr=False)
class Evaluation:
    """Metrics of one set of predictions, as fractions (NLL in nats); each is an attribute: ``record.ece``."""

    n: int
    """Number of samples."""
    values: dict[str, float]
    """The metrics that were asked for."""
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    """95 % interval of what each metric estimates, where there is one; empty when no resampling was asked for."""
    noise_floor: dict[str, tuple[float, float]] = field(default_factory=dict)
    """(mean, 95th percentile) of each calibration metric if the predictions were perfectly calibrated."""

    def __getattr__(self, name: str) -> float:
        if name in ALL_METRICS:
            if name in self.values:
                return self.values[name]
            raise AttributeError(f"{name} was not computed; pass metrics=[{name!r}, ...] or metrics='all' to evaluate")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        shown = [f"n={self.n}"]
        for name, value in self.values.items():
            low_and_high = self.intervals.get(name)
            shown.append(f"{name}={value:.4g}" + (" [{:.4g}, {:.4g}]".format(*low_and_high) if low_and_high else ""))
        return f"Evaluation({', '.join(shown)})"

    def to_dict(self) -> dict[str, float]:
        """One flat, tidy record: n, ece, ..., ece_low, ece_high, ..., ece_floor, ece_floor_q95, ..."""
        flat = {"n": self.n} | self.values
        for name, (low, high) in self.intervals.items():
            flat[f"{name}_low"], flat[f"{name}_high"] = low, high
        for name, (mean, q95) in self.noise_floor.items():
            flat[f"{name}_floor"], flat[f"{name}_floor_q95"] = mean, q95
        return flat


def evaluate(
    probs: Any, labels: Any, *, metrics: str | Sequence[str] = METRICS, n_resamples: int = 0, seed: int = 0
) -> Evaluation:
    """Compute metrics; with ``n_resamples`` also 95 % intervals and noise floors.

    Args:
        probs: (N, K) rows that sum to one.
        labels: (N,).
        metrics: names out of ``ALL_METRICS``, in the order wanted, or "all".
        n_resamples: simulations per interval and per noise floor; 0 computes none. 200 give intervals good to a
            tenth of their width. The two parts of the Brier score have no interval (see `smartlib.uncertainty`).
        seed: of the simulations.

    Returns:
        :class:`Evaluation`.

    Raises:
        ValueError: bad arrays, or a metric that is not known.

    Source: see each metric; intervals: `smartlib.uncertainty`.

    >>> record = evaluate([[0.8, 0.2], [0.3, 0.7]], [0, 0])
    >>> record.accuracy, record.n, round(record.ece, 4)
    (0.5, 2, 0.45)
    >>> evaluate([[0.8, 0.2], [0.3, 0.7]], [0, 0], metrics=["brier", "auroc"])
    Evaluation(n=2, brier=0.53, auroc=1)
    """
    names = _as_metrics(metrics)
    p = as_probabilities(probs)
    y = as_labels(labels, *p.shape)
    confidence, correct = top_label(p, y)
    intervals, floors = {}, {}
    if n_resamples:
        from smartlib.uncertainty import intervals_and_floors

        intervals, floors = intervals_and_floors(p, y, metrics=names, n_resamples=n_resamples, seed=seed)
    values = {name: error(confidence, correct) for name, error in TOP_LABEL_ERRORS.items() if name in names}
    if "accuracy" in names:
        values["accuracy"] = float(correct.mean())
    if "cwece" in names:
        values["cwece"] = classwise_ece_of(p, y, N_BINS)
    if "nll" in names:
        values["nll"] = float(log_losses(p, y).mean())
    if "auroc" in names:
        values["auroc"] = confidence_auroc(confidence, correct)
    if any(name.startswith("brier") for name in names):
        values["brier"] = float(brier_losses(p, y).mean())
    if "brier_calibration" in names or "brier_refinement" in names:
        values["brier_calibration"], values["brier_refinement"] = brier_parts(p, y, values["brier"])
    return Evaluation(len(p), {name: values[name] for name in names}, intervals, floors)


def _as_metrics(metrics: str | Sequence[str]) -> tuple[str, ...]:
    """The names asked for, each once; raises ValueError where one is unknown."""
    known = ", ".join(ALL_METRICS)
    if isinstance(metrics, str):
        if metrics != "all":
            raise ValueError(f'metrics must be "all" or a sequence of names, got {metrics!r}; known: {known}')
        return ALL_METRICS
    names = tuple(dict.fromkeys(metrics))
    for name in names:
        if name not in ALL_METRICS:
            raise ValueError(f"unknown metric {name!r}; known: {known}")
    return names


def top_label(probs: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``(confidence, correct)`` of checked probabilities and labels, both (N,) float64; ties go to the lowest class."""
    predicted = probs.argmax(axis=1)
    confidence = probs[np.arange(len(probs)), predicted].astype(np.float64)
    return np.minimum(confidence, 1.0), (predicted == labels).astype(np.float64)
