"""One metric of several methods on several models, with intervals and noise floors."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes

from smartlib.plots.style import NOISE_COLOUR, colour, label


def interval_plot(
    table: pd.DataFrame, metric: str, *, reported: Mapping[tuple[str, str], float] | None = None, ax: Axes | None = None
) -> Axes:
    """Dots with 95 % intervals, one group of rows per bundle, one row per method; the noise floor as a grey bar.

    Args:
        table: tidy records with columns bundle, method, <metric>, <metric>_low, <metric>_high and, where there is a
            noise floor, <metric>_floor_q95; fractions (NLL and Brier score as they are).
        metric: column to draw; calibration errors and accuracy are shown in percent.
        reported: values that others reported, by (bundle, method), as fractions, drawn as open diamonds.
        ax: where to draw; a new figure if None.

    Returns:
        The Axes.

    Source: ours.
    """
    scale = 1.0 if metric in ("nll", "brier") else 100.0
    bundles, methods = list(dict.fromkeys(table["bundle"])), list(dict.fromkeys(table["method"]))
    if ax is None:
        _, ax = plt.subplots(figsize=(5.5, 0.45 + 0.26 * len(bundles) * (len(methods) + 1)))
    step = len(methods) + 1
    for i, bundle in enumerate(bundles):
        rows = table[table["bundle"] == bundle].set_index("method")
        if f"{metric}_floor_q95" in rows:
            floor = scale * rows[f"{metric}_floor_q95"].mean()
            ax.fill_betweenx([i * step - 0.6, i * step + len(methods) - 0.4], 0, floor, color=NOISE_COLOUR, alpha=0.45,
                             linewidth=0, label="noise floor (95 %)" if i == 0 else None)  # fmt: skip
        for j, method in enumerate(methods):
            if method not in rows.index:
                continue
            y = i * step + j
            row = rows.loc[method]
            ax.plot([scale * row[f"{metric}_low"], scale * row[f"{metric}_high"]], [y, y], color=colour(method))
            ax.plot(scale * row[metric], y, "o", color=colour(method), label=label(method) if i == 0 else None)
            if reported and (bundle, method) in reported:
                seen = "reported" in ax.get_legend_handles_labels()[1]
                ax.plot(scale * reported[bundle, method], y, "D", markerfacecolor="none", markeredgecolor="black",
                        markersize=5, label=None if seen else "reported")  # fmt: skip
    ax.set_yticks([i * step + (len(methods) - 1) / 2 for i in range(len(bundles))], bundles)
    ax.set_ylim(len(bundles) * step - 0.6, -0.9)
    if scale == 100 and metric != "accuracy":
        ax.set_xlim(left=0)
    ax.set_xlabel(f"{label(metric)} ({'%' if scale == 100 else 'nats' if metric == 'nll' else 'score'})")
    ax.grid(axis="y", visible=False)
    ax.legend(loc="best")
    return ax
