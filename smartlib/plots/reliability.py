"""Reliability diagrams with what is needed to read them: how many samples, and how much is noise."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter
from scipy.stats import binom

from smartlib.arrays import as_confidence_and_correct
from smartlib.metrics import N_BINS, expected_calibration_error, reliability_bins
from smartlib.plots.style import NOISE_COLOUR, colour


def reliability_diagram(
    confidence: Any,
    correct: Any,
    *,
    n_bins: int = N_BINS,
    method: str = "uncalibrated",
    title: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Accuracy against confidence per bin, with a noise band and the density of the confidences above.

    The grey band of a bin holds the accuracy of a perfectly calibrated classifier in 95 % of all samples of
    that size. Only what leaves the band is evidence of miscalibration. Empty bins draw nothing.

    Args:
        confidence: (N,) in [0, 1].
        correct: (N,) of 0 and 1.
        n_bins: bins of equal width.
        method: decides the colour.
        title: of the Axes.
        ax: where to draw; a new figure if None.

    Returns:
        The Axes of the diagram.

    Raises:
        ValueError: bad arrays or settings.

    Source: Guo et al. 2017; band: Bröcker and Smith 2007; density strip: after Błasiok and Nakkiran 2023.
    """
    f, a = as_confidence_and_correct(confidence, correct)
    bins = reliability_bins(f, a, n_bins)
    if ax is None:
        _, ax = plt.subplots(figsize=(3.6, 3.9))
    filled = bins.count > 0
    count, mean, accuracy = bins.count[filled], bins.confidence[filled], bins.accuracy[filled]
    low, high = (binom.ppf(q, count, np.clip(mean, 0, 1)) / count for q in (0.025, 0.975))
    width = np.diff(bins.edges)[filled]
    left = bins.edges[:-1][filled]
    ax.bar(left, high - low, width, bottom=low, align="edge", color=NOISE_COLOUR, alpha=0.55, linewidth=0,
           label="95 % of calibrated samples")  # fmt: skip
    ax.plot([0, 1], [0, 1], color="black", linewidth=0.8, linestyle=":")
    ax.vlines(mean, mean, accuracy, color=colour(method), linewidth=1.2)
    ax.scatter(mean, accuracy, s=16, color=colour(method), zorder=3, clip_on=False, label="accuracy of the bin")
    ax.set(xlim=(0, 1), ylim=(0, 1), xlabel="confidence", ylabel="accuracy", aspect="equal")
    ax.xaxis.set_major_formatter(PercentFormatter(1.0))
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    ax.text(0.04, 0.96, f"ECE {100 * expected_calibration_error(f, a, n_bins):.2f} %", transform=ax.transAxes,
            va="top", fontsize=9, color=colour(method), fontweight="bold")  # fmt: skip

    strip = ax.inset_axes((0, 1.06, 1, 0.13), sharex=ax)
    strip.hist(f, bins=np.linspace(0, 1, 61), color=colour(method), alpha=0.8)
    strip.set_yscale("log")
    strip.tick_params(labelbottom=False, labelsize=6)
    strip.grid(False)
    strip.set_ylabel("count", fontsize=6)
    strip.minorticks_off()
    if title:
        strip.set_title(title)
    return ax
