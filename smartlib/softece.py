"""Charbonnier-SoftECE, the objective of SMART, and the certificate that it gives for the smooth calibration error.

With bin centres mu_b = (b - 1/2) / M, soft weights w_b(v) proportional to exp(-(v - mu_b)^2 / (2 lambda^2)) that sum to
one over b, and the Charbonnier function phi_delta(r) = sqrt(r^2 + delta^2), the objective for confidences f and
correctness A is

    H(f) = sum_b E[w_b(f)] * phi_delta( E[w_b(f) (A - f)] / E[w_b(f)] ).

Notebook 03 derives the bounds; `certificate` evaluates their terms on a sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from smartlib.arrays import as_confidence_and_correct, as_count, row_chunks
from smartlib.smce import smooth_calibration_error

N_BINS = 15
BANDWIDTH = 0.05
DELTA = 1e-3


def bin_centres(n_bins: int) -> np.ndarray:
    """Centres (b - 1/2) / M of the soft bins, (M,)."""
    return (np.arange(n_bins) + 0.5) / n_bins


def soft_weights(v: np.ndarray, n_bins: int, bandwidth: float) -> np.ndarray:
    """Soft-bin weights w_b(v): (N, M), each row sums to one. ``v`` is (N,) in [0, 1]."""
    centres = bin_centres(n_bins)
    # One row per bin while computing: sums over the bins are then sums of long vectors, twice as fast.
    square = np.subtract(v, centres[:, None])
    np.square(square, out=square)
    # Relative to the nearest centre, since a narrow kernel would underflow in every bin. (A solver's trial step may
    # make v NaN; fmax turns that into an index, and the weights are NaN.)
    square -= (v - centres[np.fmin(np.fmax(v * n_bins, 0), n_bins - 1).astype(int)]) ** 2
    square /= -2 * bandwidth**2
    weights = np.exp(square, out=square)
    weights /= weights.sum(axis=0)
    return weights.T


def soft_ece(
    confidence: Any, correct: Any, n_bins: int = N_BINS, bandwidth: float = BANDWIDTH, delta: float = DELTA
) -> float:
    """Charbonnier-SoftECE H_{lambda, delta} of a sample.

    Args:
        confidence: (N,) in [0, 1].
        correct: (N,) of 0 and 1.
        n_bins: M >= 1, number of soft bins.
        bandwidth: lambda > 0, standard deviation of the Gaussian kernel, in units of confidence.
        delta: smoothing of the absolute value, >= 0; 0 gives the plain SoftECE.

    Returns:
        H, a fraction; at least ``delta``.

    Raises:
        ValueError: bad arrays, or a setting outside its range.

    Source: paper, the objective of SMART.

    >>> round(soft_ece([0.9, 0.9], [1, 0], delta=0.0), 6)
    0.4
    """
    f, a = as_confidence_and_correct(confidence, correct)
    mass, gap = _soft_bins(f, a, *check_settings(n_bins, bandwidth, delta)[:2])
    return _charbonnier(mass, gap, delta)


def soft_ece_and_gradient(
    f: np.ndarray, a: np.ndarray, n_bins: int = N_BINS, bandwidth: float = BANDWIDTH, delta: float = DELTA
) -> tuple[float, np.ndarray]:
    """H and its derivative with respect to each confidence, for the solvers; arrays are taken as checked.

    With p_b = E[w_b] and s_b = E[w_b (A - f)], bin b contributes sqrt(s_b^2 + delta^2 p_b^2) =: r_b, so that

        dH/df_i = (1/N) sum_b [ (s_b / r_b) ((A_i - f_i) w_b'(f_i) - w_b(f_i)) + (delta^2 p_b / r_b) w_b'(f_i) ],
        w_b'(v) = w_b(v) (mu_b - sum_c w_c(v) mu_c) / lambda^2.

    Returns:
        ``(H, dH/df)``: a float and (N,).
    """
    n = len(f)
    w = soft_weights(f, n_bins, bandwidth)
    residual = a - f
    p, s = w.mean(axis=0), residual @ w / n
    r = np.sqrt(s**2 + (delta * p) ** 2)
    safe = np.where(r > 0, r, 1.0)
    along_s, along_p = s / safe, delta**2 * p / safe
    centres = bin_centres(n_bins)
    # sum_b c_b w_b' = (sum_b c_b mu_b w_b - mean centre * sum_b c_b w_b) / lambda^2, so w' is never formed.
    projected = w @ np.stack([centres, along_s, along_p, centres * along_s, centres * along_p], axis=1)
    mean_centre, ws, wp, wms, wmp = projected.T
    slope = (residual * (wms - mean_centre * ws) + (wmp - mean_centre * wp)) / bandwidth**2
    return float(r.sum()), (slope - ws) / n


@dataclass(frozen=True)
class Certificate:
    """The terms of the upper bounds on the smooth calibration error of a sample, all fractions.

    smce <= bound <= soft_ece + kernel_error <= paper_bound.
    """

    smce: float
    """Exact smooth calibration error."""
    soft_ece: float
    """H_{lambda, delta}."""
    kernel_error: float
    """B_lambda = sup_v sum_b w_b(v) |v - mu_b|."""
    bound: float
    """H_{lambda, 0} + E[|A - f| beta_lambda(f)] (Theorem 3', ours)."""
    paper_bound: float
    """H_{lambda, delta} + 2 B_lambda (Theorem 3, paper)."""


def certificate(
    confidence: Any, correct: Any, n_bins: int = N_BINS, bandwidth: float = BANDWIDTH, delta: float = DELTA
) -> Certificate:
    """Upper bounds on the smooth calibration error of a sample, and its exact value.

    Args:
        confidence, correct, n_bins, bandwidth, delta: as for :func:`soft_ece`.

    Returns:
        :class:`Certificate`.

    Raises:
        ValueError: as for :func:`soft_ece`.

    Source: paper, Theorem 3 (``paper_bound``); ours, Theorem 3' (``bound``).

    >>> c = certificate([0.7, 0.8, 0.9, 0.6], [1, 1, 1, 0])
    >>> c.smce <= c.bound <= c.paper_bound
    True
    """
    f, a = as_confidence_and_correct(confidence, correct)
    n_bins, bandwidth, delta = check_settings(n_bins, bandwidth, delta)
    mass, gap = _soft_bins(f, a, n_bins, bandwidth)
    h, sup = _charbonnier(mass, gap, delta), kernel_error(n_bins, bandwidth)
    local = np.concatenate([_kernel_distance(f[rows], n_bins, bandwidth) for rows in row_chunks(len(f), n_bins)])
    return Certificate(
        smce=smooth_calibration_error(f, a),
        soft_ece=h,
        kernel_error=sup,
        bound=_charbonnier(mass, gap, 0.0) + float(np.mean(np.abs(a - f) * local)),
        paper_bound=h + 2 * sup,
    )


def kernel_error(n_bins: int = N_BINS, bandwidth: float = BANDWIDTH) -> float:
    """B_lambda = sup over v in [0, 1] of beta_lambda(v) = sum_b w_b(v) |v - mu_b|, to 1e-9.

    It grows with the bandwidth and tends to 1/(2M) as the bandwidth goes to 0.

    Source: paper (Theorem 3).

    >>> round(kernel_error(15, 0.05), 4)
    0.0435
    """
    from scipy.optimize import minimize_scalar

    grid = np.linspace(0, 1, 40 * n_bins + 1)
    best = int(np.argmax(_kernel_distance(grid, n_bins, bandwidth)))
    low, high = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    fine = minimize_scalar(
        lambda v: -_kernel_distance(np.array([v]), n_bins, bandwidth)[0], bounds=(low, high), method="bounded",
        options={"xatol": 1e-12},
    )  # fmt: skip
    return float(max(-fine.fun, _kernel_distance(grid[[best]], n_bins, bandwidth)[0]))


def _kernel_distance(v: np.ndarray, n_bins: int, bandwidth: float) -> np.ndarray:
    """beta_lambda(v) = sum_b w_b(v) |v - mu_b|, (N,)."""
    return (soft_weights(v, n_bins, bandwidth) * np.abs(v[:, None] - bin_centres(n_bins))).sum(axis=1)


def _soft_bins(f: np.ndarray, a: np.ndarray, n_bins: int, bandwidth: float) -> tuple[np.ndarray, np.ndarray]:
    """E[w_b] and E[w_b (A - f)], each (M,), in bounded memory."""
    mass, gap = np.zeros(n_bins), np.zeros(n_bins)
    for rows in row_chunks(len(f), n_bins):
        w = soft_weights(f[rows], n_bins, bandwidth)
        mass += w.sum(axis=0)
        gap += (a[rows] - f[rows]) @ w
    return mass / len(f), gap / len(f)


def _charbonnier(mass: np.ndarray, gap: np.ndarray, delta: float) -> float:
    """sum_b mass_b phi_delta(gap_b / mass_b) = sum_b sqrt(gap_b^2 + delta^2 mass_b^2): no division by an empty bin."""
    return float(np.hypot(gap, delta * mass).sum())


def check_settings(n_bins: Any, bandwidth: float, delta: float) -> tuple[int, float, float]:
    """The three settings as int, float, float; raises ValueError where one is outside its range."""
    if not (np.isfinite(bandwidth) and bandwidth > 0):
        raise ValueError(f"bandwidth must be positive and finite, got {bandwidth!r}")
    if not (np.isfinite(delta) and delta >= 0):
        raise ValueError(f"delta must be non-negative and finite, got {delta!r}")
    return as_count(n_bins, "n_bins"), float(bandwidth), float(delta)
