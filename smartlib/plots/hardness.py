"""Pictures of notebook 08: distance to the boundary, its correlations, gaps by group, and many-way ties."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm

from smartlib.plots.style import COLOURS, FREE_COLOURS, NOISE_COLOUR, colour, label

_MARKERS = ("o", "s", "D", "^", "v", "P")


def distance_plot(
    signal: np.ndarray, distance: np.ndarray, *, n_groups: int = 10, title: str | None = None, ax: Axes | None = None
) -> Axes:
    """Density of samples over a signal and the distance to the boundary, with the quartiles along the signal.

    Args:
        signal: (N,), for instance margins, logit units. distance: (N,), L2 norm; NaN is left out.
        n_groups: groups of equal size along the signal, of which the median and the quartiles are drawn.
        title: of the Axes. ax: where to draw; a new figure if None.

    Returns:
        The Axes.

    Source: ours.
    """
    if ax is None:
        _, ax = plt.subplots(figsize=(3.6, 3.0))
    found = np.isfinite(distance)
    order = np.argsort(signal[found], kind="stable")
    x, y = signal[found][order], distance[found][order]
    # Counts on a logarithmic scale that begins below 1, so that a single sample is not drawn in white.
    ax.hexbin(x, y, gridsize=32, mincnt=1, cmap="Greys", norm=LogNorm(vmin=0.25), linewidths=0.1)
    groups = [(np.median(a), *np.quantile(b, [0.25, 0.5, 0.75]))
              for a, b in zip(np.array_split(x, n_groups), np.array_split(y, n_groups), strict=True)]  # fmt: skip
    centre, low, median, high = np.array(groups).T
    ax.fill_between(centre, low, high, color=colour("smart"), alpha=0.25, linewidth=0, label="middle half")
    ax.plot(centre, median, "o-", color=colour("smart"), label="median")
    ax.set(xlabel="margin z(1) − z(2)  (logit units)", ylabel="distance to the boundary\n(L2, pixels in [0, 1])",
           title=title or "")  # fmt: skip
    ax.set_xlim(left=0)
    ax.set_ylim(bottom=0)
    return ax


def correlation_plot(table: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Rank correlations with 95 % intervals: one group of rows per model, one row per signal.

    Args:
        table: columns bundle, signal, value, low, high.
        ax: where to draw; a new figure if None.

    Returns:
        The Axes.

    Source: ours.
    """
    bundles, signals = list(dict.fromkeys(table["bundle"])), list(dict.fromkeys(table["signal"]))
    if ax is None:
        _, ax = plt.subplots(figsize=(5.5, 0.7 + 0.12 * len(bundles) * (len(signals) + 1)))
    step = len(signals) + 1
    for j, signal in enumerate(signals):
        rows = table[table["signal"] == signal].set_index("bundle").loc[bundles]
        y = np.arange(len(bundles)) * step + j
        bars = np.abs(rows[["low", "high"]].to_numpy().T - rows["value"].to_numpy())
        ax.errorbar(rows["value"], y, xerr=bars, fmt=_MARKERS[j % len(_MARKERS)], linewidth=1.4,
                    color=FREE_COLOURS[j % len(FREE_COLOURS)], label=signal.replace("_", " "))  # fmt: skip
    ax.set_yticks(np.arange(len(bundles)) * step + (len(signals) - 1) / 2, bundles)
    ax.set_ylim(len(bundles) * step - 1, -1)
    ax.grid(axis="y", visible=False)
    ax.set_xlabel("rank correlation with the distance (Spearman)")
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5), title="signal, by which\neasier is larger")
    return ax


def gap_plot(
    tables: Mapping[str, pd.DataFrame], *, xlabel: str, title: str | None = None, ax: Axes | None = None
) -> Axes:
    """Accuracy minus confidence by group, with intervals; above zero a group is under-confident.

    Args:
        tables: by method or other name, of `smartlib.experiments.hardness_study.group_gaps`; one x position per group.
        xlabel: what the groups are. title: of the Axes. ax: where to draw; a new figure if None.

    Returns:
        The Axes.

    Source: ours.
    """
    if ax is None:
        _, ax = plt.subplots(figsize=(3.6, 3.0))
    free = iter(FREE_COLOURS)
    for j, (name, table) in enumerate(tables.items()):
        gap, ends = 100 * table["gap"].to_numpy(), 100 * table[["low", "high"]].to_numpy().T
        x = table["group"].to_numpy() + 1 + 0.18 * (j - (len(tables) - 1) / 2)
        ax.errorbar(x, gap, yerr=np.abs(ends - gap), fmt=_MARKERS[j % len(_MARKERS)], linewidth=1.2, markersize=4,
                    color=colour(name) if name in COLOURS else next(free), label=label(name))  # fmt: skip
    ax.axhline(0, color="black", linewidth=0.8)
    groups = sorted({int(group) + 1 for table in tables.values() for group in table["group"]})
    ax.set_xticks(groups)
    ax.grid(axis="x", visible=False)
    ax.set(xlabel=xlabel, ylabel="accuracy − confidence (points)", title=title or "")
    return ax


def ties_plot(
    temperatures: Mapping[str, np.ndarray], margins: np.ndarray, many: np.ndarray, true: tuple[float, float],
    *, n_groups: int = 12, ax: Axes | None = None,
) -> Axes:  # fmt: skip
    """The temperatures that methods give to rows with few and with many rivals, along the margin.

    Args:
        temperatures: by method, (N,) temperatures. margins: (N,), logit units. many: (N,) bool, the kind of each row.
        true: the temperatures of the two kinds, few rivals first.
        n_groups: groups of equal size along the margin, of which the median is drawn.
        ax: where to draw; a new figure if None.

    Returns:
        The Axes.

    Source: ours.
    """
    if ax is None:
        _, ax = plt.subplots(figsize=(5.5, 3.2))
    kinds = (("few", ~many, "-", true[0]), ("many", many, "--", true[1]))
    for kind, _, line, value in kinds:
        ax.axhline(value, color=NOISE_COLOUR, linestyle=line, linewidth=3, label=f"truth, {kind} rivals")
    free = iter(FREE_COLOURS)
    for name, values in temperatures.items():
        shown = colour(name) if name in COLOURS else next(free)
        for kind, rows, line, _ in kinds:
            order = np.argsort(margins[rows], kind="stable")
            parts = [np.array_split(x[rows][order], n_groups) for x in (margins, values)]
            x, y = ([np.median(part) for part in split] for split in parts)
            ax.plot(x, y, line, color=shown, marker="o", markersize=3, label=f"{label(name)}, {kind} rivals")
    ax.set(xlabel="margin z(1) − z(2)  (logit units)", ylabel="temperature T")
    ax.set_xlim(left=0)
    ax.set_ylim(bottom=0)
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return ax
