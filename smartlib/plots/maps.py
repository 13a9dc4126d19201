"""The learned map from margin to temperature."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import seaborn as sns
from matplotlib.axes import Axes

from smartlib.arrays import to_numpy
from smartlib.plots.style import NOISE_COLOUR, colour


def temperature_map(
    smart: Any, margins: Any, *, temperature: float | None = None, title: str | None = None, ax: Axes | None = None
) -> Axes:
    """T(m) of a fitted SMART over the histogram of margins.

    Args:
        smart: a fitted `SMART`.
        margins: (N,) margins, logit units; the histogram is drawn from them, and T over their range.
        temperature: the temperature of temperature scaling, drawn as a line for comparison.
        title: of the Axes.
        ax: where to draw; a new figure if None.

    Returns:
        The Axes.

    Raises:
        sklearn.exceptions.NotFittedError: ``smart`` was not fitted.

    Source: paper (the map); ours (the picture).
    """
    m = to_numpy(margins, "margins")
    m = m[np.isfinite(m)]
    if ax is None:
        _, ax = plt.subplots()
    grid = np.linspace(0, np.quantile(m, 0.999), 400)
    histogram = ax.twinx()
    sns.histplot(x=m[m <= grid[-1]], bins=50, ax=histogram, color=NOISE_COLOUR, linewidth=0, alpha=0.6)
    histogram.set_ylabel("samples", color="#7F7F7F")
    histogram.tick_params(axis="y", colors="#7F7F7F")
    histogram.grid(False)
    histogram.spines["right"].set_visible(False)
    ax.set_zorder(histogram.get_zorder() + 1)
    ax.patch.set_visible(False)
    ax.plot(grid, smart.temperature_map(grid), color=colour("smart"), label="SMART: T(m)")
    if temperature is not None:
        ax.axhline(temperature, color=colour("ts"), linestyle="--", linewidth=1.2, label="temperature scaling: T")
    ax.set(
        xlabel="margin m = z(1) − z(2)  (logit units)", ylabel="temperature T", xlim=(0, grid[-1]), title=title or ""
    )
    ax.set_ylim(0, 1.15 * ax.get_ylim()[1])
    ax.legend(loc="lower left")
    return ax
