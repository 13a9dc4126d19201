"""Quick forms of the top-label calibration errors, for simulations that measure thousands of samples.

What depends on the confidences alone (bins, grid, bandwidth) is prepared once and kept for all resamples of them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from smartlib.binned_errors import N_BINS, bin_edges, bin_index, debiased_square, mean_square_gap, sweep_of
from smartlib.kernel_errors import kde_statistic, smece_of
from smartlib.smce import smce_of

Statistic = Callable[[np.ndarray, np.ndarray], float]


def top_label_statistic(metric: str, f: np.ndarray) -> Statistic:
    """A quick form of a top-label metric on resampled rows of the confidences ``f``.

    The bins are those of ``f``. The result maps ``(rows (n,), correct (n,))`` to the metric of (f[rows], correct). Of
    the debiased ECE it is the root with the sign of the square, so that nothing is cut off at 0.
    """
    if metric == "smce":
        return lambda rows, correct: smce_of(f[rows], correct)
    if metric == "smece":
        return lambda rows, correct: smece_of(f[rows], correct)
    if metric == "sweep_ece":
        return lambda rows, correct: sweep_of(f[rows], correct)
    if metric == "kde_ece":
        return kde_statistic(f)
    index = bin_index(f, bin_edges(f, N_BINS, "mass" if metric in ("adaece", "debiased_ece") else "width"))
    if metric == "rmsce":
        return lambda rows, correct: float(np.sqrt(mean_square_gap(index[rows], f[rows], correct, N_BINS)))
    if metric == "debiased_ece":

        def signed_root(rows: np.ndarray, correct: np.ndarray) -> float:
            square = debiased_square(index[rows], f[rows], correct, N_BINS)
            return float(np.copysign(np.sqrt(abs(square)), square))

        return signed_root
    from smartlib._resampling_kernel import binned_gaps  # here, because it imports numba

    if metric == "mce":

        def largest(rows: np.ndarray, correct: np.ndarray) -> float:
            count, gap = binned_gaps(index, f, rows, correct, N_BINS)
            return float(np.abs(gap[count > 0] / count[count > 0]).max())

        return largest
    return lambda rows, correct: float(np.abs(binned_gaps(index, f, rows, correct, N_BINS)[1]).sum() / len(rows))


def population_statistic(metric: str, f: np.ndarray) -> Statistic:
    """What a top-label metric estimates, as a function of ``(rows, true accuracy (n,))``: no labels, so no noise.

    For most it is the metric itself, with accuracies in the place of labels. The debiased ECE estimates the error in
    its bins before noise. The sweep and the kernel density, whose bins and bandwidth shrink as samples are added,
    estimate the mean |accuracy - confidence|; with a biased estimate the interval may lie beside the measured value.
    """
    if metric in ("sweep_ece", "kde_ece"):
        return lambda rows, accuracy: float(np.abs(accuracy - f[rows]).mean())
    if metric == "debiased_ece":
        index = bin_index(f, bin_edges(f, N_BINS, "mass"))
        return lambda rows, accuracy: float(np.sqrt(mean_square_gap(index[rows], f[rows], accuracy, N_BINS)))
    return top_label_statistic(metric, f)
