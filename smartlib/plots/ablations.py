"""What notebook 09 draws: differences from a default, a metric over a grid of settings, and bands of learned maps."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from smartlib.plots.style import FREE_COLOURS, colour, label

# Models are told apart by these too, without colour vision.
_MARKERS = "os^vD"
# No method; the default SMART has its own colour.
_MODEL_COLOURS = FREE_COLOURS[1:]
# Perceptually uniform, and the same with any common colour vision deficiency.
COLOUR_MAP = "cividis"


def difference_plot(table: pd.DataFrame, metric: str, *, ax: Axes | None = None) -> Axes:
    """Differences of variants from a default with their 95 % intervals: a row per variant, a mark per model.

    Args:
        table: columns ``model, variant, metric, difference, low, high`` (fractions; NLL and Brier score as they are)
            and ``verdict``: marks of those that are "undecided" are hollow.
        metric: rows of the table to draw; calibration errors are shown in percentage points.
        ax: where to draw; a new figure if None.

    Returns:
        The Axes, variants from top to bottom in the order of the table.

    Source: ours.
    """
    rows = table[table["metric"] == metric]
    variants, models = list(dict.fromkeys(rows["variant"])), list(dict.fromkeys(table["model"]))
    if ax is None:
        _, ax = plt.subplots(figsize=(3.4, 0.7 + 0.4 * len(variants)))
    scale = 1.0 if metric in ("nll", "brier") else 100.0
    ax.axvline(0, color=colour("smart"), linewidth=1)
    for i, model in enumerate(models):
        part = rows[rows["model"] == model]
        y = np.array([variants.index(variant) for variant in part["variant"]]) + 0.22 * (i - (len(models) - 1) / 2)
        look = _MODEL_COLOURS[i % len(_MODEL_COLOURS)]
        ax.hlines(y, scale * part["low"], scale * part["high"], color=look, linewidth=1.3)
        undecided = (part["verdict"] == "undecided").to_numpy()
        ax.scatter(
            scale * part["difference"], y, marker=_MARKERS[i % len(_MARKERS)], s=22, label=model, zorder=3,
            edgecolors=look, linewidths=1.2, facecolors=np.where(undecided, "white", look),
        )  # fmt: skip
    ax.set_yticks(range(len(variants)), variants)
    ax.set_ylim(len(variants) - 0.45, -0.55)
    ax.grid(axis="y", visible=False)
    ax.xaxis.set_major_locator(MaxNLocator(4))
    ax.set_xlabel(f"Δ {label(metric)} ({'points' if scale == 100 else 'nats' if metric == 'nll' else 'score'})")
    return ax


def settings_map(
    table: pd.DataFrame, metric: str, limits: tuple[float, float], *, default: tuple[float, float] | None = None,
    ax: Axes | None = None,
) -> Axes:  # fmt: skip
    """A metric over lambda (down) and delta (across), its value in each cell.

    Args:
        table: columns ``bandwidth``, ``delta`` and the metric as a fraction (NLL and Brier score as they are), one row
            per cell.
        metric: column to draw; calibration errors are shown in percent.
        limits: the values at the ends of the colour scale, in the unit of the table; several maps may share them.
        default: (lambda, delta) of a cell that is framed.
        ax: where to draw; a new figure if None.

    Returns:
        The Axes.

    Source: ours.
    """
    if ax is None:
        _, ax = plt.subplots(figsize=(2.0, 2.2))
    natural = metric in ("nll", "brier")
    cells = (1.0 if natural else 100.0) * table.pivot(index="bandwidth", columns="delta", values=metric)
    low, high = ((1.0 if natural else 100.0) * limit for limit in limits)
    sns.heatmap(
        cells, vmin=low, vmax=high, cmap=COLOUR_MAP, cbar=False, annot=True, fmt=".3f" if natural else ".2f",
        annot_kws={"size": 6.5}, linewidths=0.5, ax=ax,
        xticklabels=[np.format_float_scientific(delta, trim="-", exp_digits=1) for delta in cells.columns],
        yticklabels=[f"{bandwidth:g}" for bandwidth in cells.index],
    )  # fmt: skip
    if default is not None:
        corner = (cells.columns.get_loc(default[1]), cells.index.get_loc(default[0]))
        ax.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=colour("smart"), linewidth=1.6, clip_on=False))
    ax.tick_params(length=0, labelsize=7)
    ax.tick_params(rotation=0)
    ax.set(xlabel="δ", ylabel="λ")
    return ax


def map_band_plot(table: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Learned maps T(m) of several variants: the median over fits, and the range over them as a band.

    Args:
        table: columns ``variant``; ``margin``, logit units; ``median, low, high`` of T, dimensionless.
        ax: where to draw; a new figure if None.

    Returns:
        The Axes; "SMART" has its own colour.

    Source: ours.
    """
    if ax is None:
        _, ax = plt.subplots(figsize=(3.4, 2.6))
    others = iter(zip(_MODEL_COLOURS, ("--", "-.", ":", (0, (5, 1, 1, 1, 1, 1))), strict=False))
    for variant, rows in table.groupby("variant", sort=False):
        look, dashes = (colour("smart"), "-") if variant == "SMART" else next(others)
        ax.fill_between(rows["margin"], rows["low"], rows["high"], color=look, alpha=0.15, linewidth=0)
        ax.plot(rows["margin"], rows["median"], color=look, linestyle=dashes, label=variant)
    ax.set(xlabel="margin m (logit units)", ylabel="temperature T", xlim=(0, table["margin"].max()))
    return ax
