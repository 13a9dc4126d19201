"""A metric against the strength of a shift: one line per method, the range over several kinds of shift as a band."""

from __future__ import annotations

from collections.abc import Iterable

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes

from smartlib.plots.style import NOISE_COLOUR, colour, label, marker


def severity_plot(
    table: pd.DataFrame,
    metric: str,
    *,
    x: str = "severity",
    banded: Iterable[str] = (),
    ax: Axes | None = None,
) -> Axes:
    """Draw the mean of a metric over all records of a strength, one line per method; the noise floor in grey.

    Args:
        table: columns ``method``, ``x``, the metric as a fraction (NLL and Brier score as they are) and, where records
            have one, ``<metric>_floor_q95``: the mean over the methods is drawn.
        metric: column to draw; calibration errors and accuracy are shown in percent.
        x: column of the strength.
        banded: methods whose range (least to largest) is drawn as a band.
        ax: where to draw; a new figure if None.

    Returns:
        The Axes.

    Source: ours, after Ovadia et al. 2019 (figure of shift intensity).
    """
    if ax is None:
        _, ax = plt.subplots(figsize=(3.4, 2.6))
    scale = 1.0 if metric in ("nll", "brier") else 100.0
    floors = table.groupby(x)[f"{metric}_floor_q95"].mean().dropna() if f"{metric}_floor_q95" in table else ()
    if len(floors):
        ax.fill_between(floors.index, 0, scale * floors, color=NOISE_COLOUR, alpha=0.45, linewidth=0,
                        label="noise floor (95 %)")  # fmt: skip
    for method in table["method"].unique():
        groups = scale * table[table["method"] == method].groupby(x)[metric].agg(["mean", "min", "max"])
        ax.plot(groups.index, groups["mean"], marker=marker(method), color=colour(method), label=label(method))
        if method in banded:
            ax.fill_between(groups.index, groups["min"], groups["max"], color=colour(method), alpha=0.2, linewidth=0)
    ax.set_xlabel(x)
    ax.set_ylabel(f"{label(metric)} ({'%' if scale == 100 else 'nats' if metric == 'nll' else 'score'})")
    return ax
