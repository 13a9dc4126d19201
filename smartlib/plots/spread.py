"""What the choice of the validation samples does to a metric, beside what the choice of the test samples does."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from smartlib.plots.style import NOISE_COLOUR, colour, label, marker


def validation_spread_plot(
    records: pd.DataFrame, metric: str, *, upper: float | None = None, ax: Axes | None = None
) -> Axes:
    """One row per method: small marks for fits on parts of the validation split, a large one for the fit on all of it.

    The grey bar is the 95 % interval of the latter, which is about the test samples.

    Args:
        records: of one bundle, from `smartlib.experiments.grid.run_cells`, as fractions (NLL and Brier score as they
            are); val_size "all" marks the fits on all samples.
        metric: column to draw.
        upper: end of the axis, in the unit of the axis; what lies beyond is not drawn.
        ax: where to draw; a new figure if None.

    Returns:
        The Axes.

    Source: ours.
    """
    scale = 1.0 if metric in ("nll", "brier") else 100.0
    methods = list(dict.fromkeys(records["method"]))
    if ax is None:
        _, ax = plt.subplots(figsize=(4.5, 0.8 + 0.2 * len(methods)))
    whole = records["val_size"].astype(str) == "all"
    for y, method in enumerate(methods):
        own = records["method"] == method
        (row,) = records[own & whole].to_dict("records")
        parts = scale * records.loc[own & ~whole, metric].to_numpy()
        ax.plot([scale * row[f"{metric}_low"], scale * row[f"{metric}_high"]], [y, y], color=NOISE_COLOUR, linewidth=5,
                solid_capstyle="butt", label="95 % interval (test samples)" if y == 0 else None)  # fmt: skip
        ax.plot(parts, np.full(len(parts), y), marker(method), color=colour(method), markersize=3, alpha=0.6,
                markeredgewidth=0)  # fmt: skip
        ax.plot(scale * row[metric], y, marker(method), color=colour(method), markersize=6, markeredgecolor="black",
                markeredgewidth=0.7)  # fmt: skip
    ax.set_yticks(range(len(methods)), [label(method) for method in methods], fontsize=8)
    ax.set_ylim(len(methods) - 0.4, -0.6)
    ax.set_xlim(0 if scale == 100 and metric != "accuracy" else None, upper)
    ax.set_xlabel(f"{label(metric)} ({'%' if scale == 100 else 'nats' if metric == 'nll' else 'score'})")
    ax.grid(axis="y", visible=False)
    return ax
