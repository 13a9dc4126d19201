"""Calibration errors from bins: accuracy is compared with confidence among samples of nearly the same confidence.

Top-label errors take ``(confidence, correct)``: the largest probability of each row and whether that class was right.
The classwise error takes ``(probs, labels)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from smartlib.arrays import as_confidence_and_correct, as_count, as_labels, as_probabilities, row_chunks

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
    n_bins = as_count(n_bins, "n_bins")
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


def expected_calibration_error(
    confidence: Any, correct: Any, n_bins: int = N_BINS, binning: str = "width", norm: str = "l1"
) -> float:
    """ECE: mean over samples of |accuracy - confidence| of their bin. With binning="mass" it is AdaECE.

    Args:
        confidence, correct, n_bins, binning: as for :func:`reliability_bins`.
        norm: how the gaps of the bins are joined, each with the share of the samples in its bin: "l1" their mean
            absolute value; "l2" the root of their mean square (RMSCE); "max" the largest of a non-empty bin (MCE),
            which one sample in a bin can decide.

    Returns:
        The error in [0, 1]; l1 <= l2 <= max.

    Raises:
        ValueError: bad arrays or settings.

    Source: Naeini et al. 2015 (ECE, MCE), Guo et al. 2017; AdaECE: Mukhoti et al. 2020; RMSCE: Nguyen and O'Connor
        2015.

    >>> round(expected_calibration_error([0.95, 1.0], [1, 0]), 12)
    0.475
    >>> round(expected_calibration_error([0.95, 0.3], [1, 0], norm="max"), 12)
    0.3
    """
    f, a = as_confidence_and_correct(confidence, correct)
    index = bin_index(f, bin_edges(f, n_bins, binning))
    if norm == "l1":
        return float(np.abs(np.bincount(index, a - f, n_bins)).sum() / len(f))
    if norm == "l2":
        return float(np.sqrt(mean_square_gap(index, f, a, n_bins)))
    if norm == "max":
        return float(np.nanmax(np.abs(reliability_bins(f, a, n_bins, binning).gap)))
    raise ValueError(f'norm must be "l1", "l2" or "max", got {norm!r}')


def mean_square_gap(index: np.ndarray, f: np.ndarray, a: np.ndarray, n_bins: int) -> float:
    """Mean over samples of (accuracy - confidence)^2 of their bin, whose number is in ``index``."""
    count = np.bincount(index, minlength=n_bins)
    total = np.bincount(index, a - f, n_bins)
    return float((total**2 / np.maximum(count, 1)).sum() / len(f))


def debiased_ece(confidence: Any, correct: Any, n_bins: int = N_BINS) -> float:
    """The l2 calibration error in bins of equal mass, with the noise of the bins' accuracies taken off.

    Chance alone moves the accuracy a_b of a bin of n_b samples by a variance that a_b (1 - a_b) / (n_b - 1) estimates
    without bias. It is subtracted from each squared gap; what is left estimates the squared error of the population in
    these bins. A negative total counts as 0. A bin with a single sample does not tell its variance and adds nothing;
    with such bins only, the result is 0.

    Args:
        confidence, correct, n_bins: as for :func:`reliability_bins`.

    Returns:
        The root of the debiased square, in [0, 1]. Compare it with ``expected_calibration_error(..., binning="mass",
        norm="l2")``, not with the ECE.

    Raises:
        ValueError: bad arrays or settings.

    Source: Kumar, Liang and Ma 2019, debiased plug-in estimator. (Their library offers an l1 form as well, corrected
        by simulated normal noise; it is not here.)

    >>> round(debiased_ece([0.9, 0.9, 0.9, 0.9], [1, 0, 0, 0], n_bins=1), 4)  # .65^2 - (1/4)(3/4)/3 = .36
    0.6
    """
    f, a = as_confidence_and_correct(confidence, correct)
    index = bin_index(f, bin_edges(f, n_bins, "mass"))
    return float(np.sqrt(max(debiased_square(index, f, a, n_bins), 0.0)))


def debiased_square(index: np.ndarray, f: np.ndarray, a: np.ndarray, n_bins: int) -> float:
    """The square that :func:`debiased_ece` takes the root of; it may be negative."""
    count, hits = np.bincount(index, minlength=n_bins), np.bincount(index, a, n_bins)
    total = np.bincount(index, a - f, n_bins)
    told = count > 1
    count, hits, total = count[told], hits[told], total[told]
    # n_b (gap^2 - variance), with n_b a_b (1 - a_b) = hits (count - hits) / count.
    return float(((total**2 - hits * (count - hits) / (count - 1)) / count).sum() / len(f))


def sweep_ece(confidence: Any, correct: Any) -> float:
    """ECE with the largest number of equal-mass bins up to which the accuracies of the bins never fall.

    The sweep tries 1, 2, 3, ... bins and stops before the first number at which a bin has a lower accuracy than the one
    below it. The i-th smallest of n confidences, counted from 0, belongs to bin floor(i b / n) of b; equal confidences
    go together, into the bin of the first of them. Empty bins are passed over.

    Args:
        confidence: (N,) in [0, 1].
        correct: (N,) of 0 and 1.

    Returns:
        The error in [0, 1], with mean absolute gaps as in the ECE.

    Raises:
        ValueError: bad arrays.

    Source: Roelofs et al. 2022, equal-mass ECE_sweep, with p = 1.

    >>> round(sweep_ece([0.2, 0.4, 0.6, 0.8], [0, 1, 0, 1]), 12)  # two bins 1/2, 1/2; three bins would be 1/2, 0, 1
    0.2
    """
    return sweep_of(*as_confidence_and_correct(confidence, correct))


def sweep_of(f: np.ndarray, a: np.ndarray) -> float:
    """:func:`sweep_ece` of checked arrays."""
    n, order = len(f), np.argsort(f, kind="stable")
    f, a = f[order], a[order]
    hits = np.concatenate([[0.0], np.cumsum(a)])
    residual = np.concatenate([[0.0], np.cumsum(a - f)])
    end_of_ties = np.searchsorted(f, f, side="right")

    def is_monotone(edges: np.ndarray) -> bool:
        edges = edges[np.concatenate([[True], edges[1:] > edges[:-1]])]
        accuracy = np.diff(hits[edges]) / np.diff(edges)
        return bool((accuracy[1:] >= accuracy[:-1]).all())

    def edges_of(n_bins: int, first: int, last: int) -> np.ndarray:
        """Ranks at which the bins first .. last begin, and the one at which the last of them ends."""
        upper = end_of_ties[(np.arange(first, last + 2) * n - 1) // n_bins]
        return upper if first else np.concatenate([[0], upper[1:]])

    n_bins = 1
    if is_monotone(np.concatenate([[0], end_of_ties])):  # then so is every coarser binning
        n_bins = n
    else:
        # Bins below the first right sample have accuracy 0 and those above the last wrong one 1: no need to look.
        inner = [np.searchsorted(f, f[np.flatnonzero(a == value)[rank]]) for value, rank in ((1, 0), (0, -1))]
        while is_monotone(edges_of(n_bins + 1, *(int(i) * (n_bins + 1) // n for i in inner))):
            n_bins += 1
    return float(np.abs(np.diff(residual[edges_of(n_bins, 0, n_bins - 1)])).sum() / n)


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
    return classwise_ece_of(p, as_labels(labels, *p.shape), as_count(n_bins, "n_bins"))


def classwise_ece_of(p: np.ndarray, y: np.ndarray, n_bins: int) -> float:
    n, k = p.shape
    edges, gap = np.arange(n_bins + 1) / n_bins, np.zeros(k * n_bins)
    for rows in row_chunks(n, k):
        cell = bin_index(p[rows], edges) + n_bins * np.arange(k)
        gap -= np.bincount(cell.ravel(), p[rows].ravel(), k * n_bins)
        gap += np.bincount(cell[np.arange(len(cell)), y[rows]], minlength=k * n_bins)
    return float(np.abs(gap).sum() / (n * k))
