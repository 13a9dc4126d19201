"""Scores of predicted probabilities: proper scores, what they consist of, and how well confidence ranks.

Proper scores take ``(probs, labels)``; the ranking takes ``(confidence, correct)``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from smartlib.arrays import as_confidence_and_correct, as_labels, as_probabilities, row_chunks


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


def brier_decomposition(probs: Any, labels: Any) -> tuple[float, float]:
    """The Brier score as calibration plus refinement: what recalibrating each class would gain, and what would be left.

    For each class, its probability is recalibrated on the sample itself by isotonic regression of "the label is that
    class". Refinement is the squared error that is left, calibration the difference from the squared error before,
    both summed over the classes. (The recalibrated probabilities of a sample need not sum to one.)

    The regression is fitted to the very labels that it is judged by, so that calibration is biased upwards and
    refinement downwards, the more so the more classes there are: a perfectly calibrated model measures a calibration
    above 0. Compare it with `smartlib.noise_floor`.

    Args:
        probs: (N, K). labels: (N,).

    Returns:
        ``(calibration, refinement)``, both >= 0; their sum is :func:`brier_score`, exactly.

    Raises:
        ValueError: bad arrays.

    Source: Dimitriadis, Gneiting and Jordan 2021 (CORP, for one event); here one class against the rest, summed.

    >>> calibration, refinement = brier_decomposition([[0.8, 0.2], [0.8, 0.2]], [0, 1])  # recalibrated: 1/2, 1/2
    >>> round(calibration, 12), round(refinement, 12)
    (0.18, 0.5)
    """
    p = as_probabilities(probs)
    y = as_labels(labels, *p.shape)
    return brier_parts(p, y, float(brier_losses(p, y).mean()))


def brier_parts(p: np.ndarray, y: np.ndarray, brier: float) -> tuple[float, float]:
    """:func:`brier_decomposition` of checked arrays and their Brier score."""
    refinement = sum(PooledClass(p[:, k]).squared_error(y == k) for k in range(p.shape[1])) / len(p)
    calibration = max(brier - refinement, 0.0)
    # One of the two is at least half the sum, so one of the two subtractions has no rounding, nor has the sum then.
    return calibration, brier - calibration


class PooledClass:
    """Isotonic regression on one class's probabilities (N,), sorted once for any number of outcomes."""

    def __init__(self, p: np.ndarray):
        self.order = np.argsort(p, kind="stable")
        ordered = p[self.order]
        self.first = np.flatnonzero(np.concatenate([[True], ordered[1:] > ordered[:-1]]))
        self.count = np.diff(self.first, append=len(p))

    def squared_error(self, hit: np.ndarray) -> float:
        """sum_i (hit_i - r_i)^2 for the best non-decreasing r, the same for equal probabilities; hit is (N,) bool."""
        from scipy.optimize import isotonic_regression

        rate = np.add.reduceat(hit[self.order].astype(np.float64), self.first) / self.count
        r = isotonic_regression(rate, weights=self.count).x
        # Within a block of equal r this is n r (1 - r), since r is the mean of its outcomes.
        return float((self.count * r * (1 - r)).sum())


def confidence_auroc(confidence: Any, correct: Any) -> float:
    """AUROC of confidence against correctness: how often a right sample has a higher confidence than a wrong one.

    Over all pairs of a right and a wrong sample; equal confidences count half. It measures ranking, not calibration.
    Where all samples are right, or all wrong, there is no pair: .5, as for a confidence that says nothing.

    Args:
        confidence: (N,) in [0, 1].
        correct: (N,) of 0 and 1.

    Returns:
        AUROC in [0, 1]; higher is better.

    Raises:
        ValueError: bad arrays.

    Source: standard (Hendrycks and Gimpel 2017 for confidence against correctness).

    >>> confidence_auroc([0.9, 0.8, 0.7], [1, 0, 1])
    0.5
    """
    return auroc_of(*as_confidence_and_correct(confidence, correct))


def auroc_of(f: np.ndarray, a: np.ndarray) -> float:
    """:func:`confidence_auroc` of checked arrays."""
    from scipy.stats import rankdata

    right = a == 1
    n_right, n_wrong = int(right.sum()), int((~right).sum())
    if n_right == 0 or n_wrong == 0:
        return 0.5
    return float((rankdata(f)[right].sum() - n_right * (n_right + 1) / 2) / (n_right * n_wrong))
