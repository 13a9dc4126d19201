"""What the literature measures about predicted probabilities, as fractions (tables print percent).

Top-label metrics take ``(confidence, correct)``: the largest probability of each row and whether that class was
right. Metrics of the whole distribution take ``(probs, labels)``. `evaluate` computes all of them at once.
Intervals and the noise floor are in `smartlib.uncertainty`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from smartlib.arrays import as_confidence_and_correct, as_labels, as_n_bins, as_probabilities, row_chunks
from smartlib.smce import smooth_calibration_error

N_BINS = 15


@dataclass(frozen=True)
class Bins:
    """Per-bin data of a reliability diagram; M bins. Empty bins have count 0 and NaN means."""

    edges: np.ndarray
    """(M + 1,) bin edges; a bin is (lo, hi], the first one closed."""
    count: np.ndarray
    """(M,) number of samples; sums to N."""
    confidence: np.ndarray
    """(M,) mean confidence."""
    accuracy: np.ndarray
    """(M,) share of correct predictions."""

    @property
    def gap(self) -> np.ndarray:
        """(M,) accuracy minus confidence; NaN where the bin is empty."""
        return self.accuracy - self.confidence


def bin_edges(confidence: np.ndarray, n_bins: int, binning: str) -> np.ndarray:
    """Edges of ``n_bins`` bins: of equal width on [0, 1], or of equal mass (quantiles of the confidences).

    Raises:
        ValueError: ``n_bins`` is not a whole number >= 1, or ``binning`` is neither "width" nor "mass".
    """
    n_bins = as_n_bins(n_bins)
    if binning == "width":
        # linspace gives 7/15 = 0.4666...7, which excludes float64(7/15); arange / n_bins divides correctly rounded.
        return np.arange(n_bins + 1) / n_bins
    if binning == "mass":
        order = np.sort(confidence)
        edges = np.interp(np.linspace(0, len(order), n_bins + 1), np.arange(len(order)), order)
        edges[0], edges[-1] = 0.0, 1.0
        return edges
    raise ValueError(f'binning must be "width" or "mass", got {binning!r}')


def bin_index(values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Index of the bin (lo, hi] that holds each value; 0.0 goes to the first bin, ties of edges to the lower bin."""
    return np.searchsorted(edges[1:-1], values, side="left")


def reliability_bins(confidence: Any, correct: Any, n_bins: int = N_BINS, binning: str = "width") -> Bins:
    """Count, mean confidence and accuracy per bin.

    Args:
        confidence: (N,) in [0, 1].
        correct: (N,) of 0 and 1.
        n_bins: M >= 1.
        binning: "width" (equal width on [0, 1]) or "mass" (equal numbers of samples; ties stay together).

    Returns:
        :class:`Bins`.

    Raises:
        ValueError: bad arrays or settings.

    Source: DeGroot and Fienberg 1983; Guo et al. 2017.

    >>> reliability_bins([0.95, 1.0], [1, 0], n_bins=2).count
    array([0, 2])
    """
    f, a = as_confidence_and_correct(confidence, correct)
    edges = bin_edges(f, n_bins, binning)
    index = bin_index(f, edges)
    count = np.bincount(index, minlength=n_bins)
    with np.errstate(invalid="ignore"):
        mean_confidence = np.bincount(index, f, n_bins) / count
        accuracy = np.bincount(index, a, n_bins) / count
    return Bins(edges, count, mean_confidence, accuracy)


def expected_calibration_error(confidence: Any, correct: Any, n_bins: int = N_BINS, binning: str = "width") -> float:
    """ECE: mean over samples of |accuracy - confidence| of their bin. With binning="mass" it is AdaECE.

    Args:
        confidence, correct, n_bins, binning: as for :func:`reliability_bins`.

    Returns:
        ECE in [0, 1].

    Raises:
        ValueError: bad arrays or settings.

    Source: Naeini et al. 2015, Guo et al. 2017; AdaECE: Mukhoti et al. 2020.

    >>> round(expected_calibration_error([0.95, 1.0], [1, 0]), 12)
    0.475
    """
    f, a = as_confidence_and_correct(confidence, correct)
    index = bin_index(f, bin_edges(f, n_bins, binning))
    return float(np.abs(np.bincount(index, a - f, n_bins)).sum() / len(f))


def maximum_calibration_error(confidence: Any, correct: Any, n_bins: int = N_BINS, binning: str = "width") -> float:
    """MCE: the largest |accuracy - confidence| of a non-empty bin. One sample in a bin can decide it.

    Args, Raises: as for :func:`reliability_bins`.

    Returns:
        MCE in [0, 1].

    Source: Naeini et al. 2015.

    >>> round(maximum_calibration_error([0.95, 0.3], [1, 0]), 12)
    0.3
    """
    return float(np.nanmax(np.abs(reliability_bins(confidence, correct, n_bins, binning).gap)))


def classwise_ece(probs: Any, labels: Any, n_bins: int = N_BINS) -> float:
    """Classwise ECE: the ECE of each class's probability against "the label is that class", averaged over all K.

    Args:
        probs: (N, K) rows that sum to one.
        labels: (N,).
        n_bins: M >= 1, of equal width.

    Returns:
        Mean over the K classes (some papers print the sum, K times as much).

    Raises:
        ValueError: bad arrays or settings.

    Source: Kull et al. 2019.

    >>> round(classwise_ece([[0.8, 0.2], [0.6, 0.4]], [0, 0], n_bins=1), 12)
    0.3
    """
    p = as_probabilities(probs)
    return _classwise_ece(p, as_labels(labels, *p.shape), as_n_bins(n_bins))


def _classwise_ece(p: np.ndarray, y: np.ndarray, n_bins: int) -> float:
    n, k = p.shape
    edges, gap = np.arange(n_bins + 1) / n_bins, np.zeros(k * n_bins)
    for rows in row_chunks(n, k):
        cell = bin_index(p[rows], edges) + n_bins * np.arange(k)
        gap -= np.bincount(cell.ravel(), p[rows].ravel(), k * n_bins)
        gap += np.bincount(cell[np.arange(len(cell)), y[rows]], minlength=k * n_bins)
    return float(np.abs(gap).sum() / (n * k))


def negative_log_likelihood(probs: Any, labels: Any) -> float:
    """Mean of -log p_label, in nats; a probability of exactly 0 counts as the smallest normal number of its type.

    Args:
        probs: (N, K). labels: (N,).

    Returns:
        NLL >= 0.

    Raises:
        ValueError: bad arrays.

    Source: standard proper score.

    >>> round(negative_log_likelihood([[0.5, 0.5]], [0]), 4)
    0.6931
    """
    p = as_probabilities(probs)
    return float(log_losses(p, as_labels(labels, *p.shape)).mean())


def log_losses(p: np.ndarray, y: np.ndarray) -> np.ndarray:
    own = p[np.arange(len(p)), y]
    return -np.log(np.maximum(own, np.finfo(p.dtype).tiny).astype(np.float64))


def brier_score(probs: Any, labels: Any) -> float:
    """Mean of sum_k (p_k - y_k)^2, between 0 and 2 (some papers print half of it).

    Args:
        probs: (N, K). labels: (N,).

    Returns:
        Brier score.

    Raises:
        ValueError: bad arrays.

    Source: Brier 1950.

    >>> brier_score([[0.5, 0.5]], [0])
    0.5
    """
    p = as_probabilities(probs)
    return float(brier_losses(p, as_labels(labels, *p.shape)).mean())


def brier_losses(p: np.ndarray, y: np.ndarray) -> np.ndarray:
    result = np.empty(len(p))
    for rows in row_chunks(*p.shape):
        difference = p[rows].astype(np.float64)
        difference[np.arange(len(difference)), y[rows]] -= 1.0
        result[rows] = (difference**2).sum(axis=1)
    return result


# Display order everywhere; "lower is better" holds for all but accuracy.
METRICS = ("accuracy", "ece", "adaece", "cwece", "mce", "smce", "nll", "brier")


@dataclass(frozen=True)
class Evaluation:
    """All metrics of one set of predictions, as fractions (NLL in nats)."""

    n: int
    accuracy: float
    ece: float
    adaece: float
    cwece: float
    mce: float
    smce: float
    nll: float
    brier: float
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    """95 % interval of each metric; empty when no resampling was asked for."""
    noise_floor: dict[str, tuple[float, float]] = field(default_factory=dict)
    """(mean, 95th percentile) of each calibration metric if the predictions were perfectly calibrated."""

    def to_dict(self) -> dict[str, float]:
        """One flat, tidy record: ece, ece_low, ece_high, ece_floor, ece_floor_q95, ..."""
        flat = asdict(self)
        intervals, floors = flat.pop("intervals"), flat.pop("noise_floor")
        for name, (low, high) in intervals.items():
            flat[f"{name}_low"], flat[f"{name}_high"] = low, high
        for name, (mean, q95) in floors.items():
            flat[f"{name}_floor"], flat[f"{name}_floor_q95"] = mean, q95
        return flat


def evaluate(probs: Any, labels: Any, *, n_resamples: int = 0, seed: int = 0) -> Evaluation:
    """Compute every metric; with ``n_resamples`` also 95 % intervals and noise floors.

    Args:
        probs: (N, K) rows that sum to one.
        labels: (N,).
        n_resamples: simulations per interval and per noise floor; 0 computes none. 200 give intervals good to a
            tenth of their width.
        seed: of the simulations.

    Returns:
        :class:`Evaluation`.

    Raises:
        ValueError: bad arrays.

    Source: see each metric; intervals: `smartlib.uncertainty`.

    >>> record = evaluate([[0.8, 0.2], [0.3, 0.7]], [0, 0])
    >>> record.accuracy, record.n, round(record.ece, 4)
    (0.5, 2, 0.45)
    """
    p = as_probabilities(probs)
    y = as_labels(labels, *p.shape)
    confidence, correct = top_label(p, y)
    intervals, floors = {}, {}
    if n_resamples:
        from smartlib.uncertainty import intervals_and_floors

        intervals, floors = intervals_and_floors(p, y, n_resamples=n_resamples, seed=seed)
    return Evaluation(
        n=len(p),
        accuracy=float(correct.mean()),
        ece=expected_calibration_error(confidence, correct),
        adaece=expected_calibration_error(confidence, correct, binning="mass"),
        cwece=_classwise_ece(p, y, N_BINS),
        mce=maximum_calibration_error(confidence, correct),
        smce=smooth_calibration_error(confidence, correct),
        nll=float(log_losses(p, y).mean()),
        brier=float(brier_losses(p, y).mean()),
        intervals=intervals,
        noise_floor=floors,
    )


def top_label(probs: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``(confidence, correct)`` of checked probabilities and labels, both (N,) float64; ties go to the lowest class."""
    predicted = probs.argmax(axis=1)
    confidence = probs[np.arange(len(probs)), predicted].astype(np.float64)
    return np.minimum(confidence, 1.0), (predicted == labels).astype(np.float64)
