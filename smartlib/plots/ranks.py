"""Many methods on many models: average ranks with the critical difference, and the table of values as a picture."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from smartlib.plots.style import colour, label, marker


def groups_within(average_ranks: pd.Series, distance: float) -> list[tuple[str, ...]]:
    """The largest groups of neighbouring methods whose average ranks differ by no more than a distance.

    Args:
        average_ranks: indexed by method.
        distance: for instance `smartlib.experiments.ranks.critical_difference`.

    Returns:
        Groups of two and more methods, the lowest ranks first; none lies within another.

    >>> groups_within(pd.Series({"a": 1.0, "b": 1.5, "c": 2.5, "d": 4.0}), 1.2)
    [('a', 'b'), ('b', 'c')]
    """
    ordered = average_ranks.sort_values(kind="stable")
    values, groups, reached = ordered.to_numpy(), [], 0
    for first in range(len(values)):
        end = int(np.searchsorted(values, values[first] + distance, side="right"))
        if end > reached and end - first > 1:
            groups.append(tuple(ordered.index[first:end]))
            reached = end
    return groups


def critical_difference_diagram(average_ranks: pd.Series, distance: float, *, ax: Axes | None = None) -> Axes:
    """Average ranks on a line; bars join the methods that the test cannot tell apart.

    Args:
        average_ranks: indexed by method; 1 is the best.
        distance: the critical difference of average ranks.
        ax: where to draw; a new figure if None.

    Returns:
        The Axes.

    Source: Demšar 2006.
    """
    ordered = average_ranks.sort_values(kind="stable")
    groups = groups_within(ordered, distance)
    n_left = (len(ordered) + 1) // 2
    low, high = int(np.floor(ordered.min())), int(np.ceil(ordered.max()))
    if ax is None:
        _, ax = plt.subplots(figsize=(6.6, 0.9 + 0.22 * n_left + 0.12 * len(groups)))
    bars = 0.55 * len(groups)
    for i, group in enumerate(groups):
        ends = ordered[[group[0], group[-1]]] + [-0.06, 0.06]
        ax.plot(ends, [-0.5 - 0.55 * i] * 2, color="black", linewidth=3, solid_capstyle="butt")
    for i, (method, rank) in enumerate(ordered.items()):
        left = i < n_left
        y = -1.0 - bars - (i if left else len(ordered) - 1 - i)
        x = low - 0.25 if left else high + 0.25
        ax.plot([rank, rank, x], [0, y, y], color=colour(method), linewidth=1.0, clip_on=False)
        ax.plot(rank, 0, marker(method), color=colour(method), clip_on=False, zorder=3)
        text = f"{label(method)}  {rank:.1f}" if left else f"{rank:.1f}  {label(method)}"
        ax.text(x, y, text + " " if left else " " + text, ha="right" if left else "left", va="center", fontsize=8)
    ax.plot([low, low + distance], [1.7, 1.7], color="black", linewidth=1.2, marker="|", markersize=6)
    ax.text(low + distance / 2, 1.9, f"critical difference {distance:.1f}", ha="center", va="bottom", fontsize=8)
    ax.text(high, 1.9, "average rank (1 is best)", ha="right", va="bottom", fontsize=8)
    ax.set(ylim=(-1.6 - bars - (n_left - 1), 2.8), xlim=(low, max(high, low + distance)))
    ax.set_xticks(range(low, high + 1))
    ax.xaxis.tick_top()
    ax.spines[["left", "bottom"]].set_visible(False)
    ax.spines["top"].set(visible=True, position=("data", 0), bounds=(low, high))
    ax.tick_params(axis="x", length=4, labelsize=8)
    ax.yaxis.set_visible(False)
    ax.grid(False)
    return ax


def method_matrix(values: pd.DataFrame, best: pd.DataFrame, metric: str, *, ax: Axes | None = None) -> Axes:
    """One metric of every method on every model: shaded by how much of the error without calibration is left.

    White is the lowest value of a model, the darkest shade as much as without calibration, or more. Values in bold with
    a frame are those of the set of the best.

    Args:
        values: methods by models, as fractions (NLL and Brier score as they are); empty cells are left out. One of the
            methods is "uncalibrated".
        best: of the same shape, True where a method cannot be told from the best.
        metric: decides units and title.
        ax: where to draw; a new figure if None.

    Returns:
        The Axes.

    Source: ours.
    """
    scale, digits = (1.0, 3) if metric in ("nll", "brier") else (100.0, 2)
    n_methods, n_models = values.shape
    if ax is None:
        _, ax = plt.subplots(figsize=(1.7 + 0.56 * n_models, 1.0 + 0.2 * n_methods))
    lowest = values.min()
    span = (values.loc["uncalibrated"] - lowest).clip(lower=1e-12)
    left = ((values - lowest) / span).clip(0, 1)
    ax.imshow(left, cmap="Greys", vmin=0, vmax=1.6, aspect="auto", interpolation="nearest")
    for i, method in enumerate(values.index):
        for j, model in enumerate(values.columns):
            if np.isnan(values.loc[method, model]):
                continue
            chosen = bool(best.loc[method, model])
            ax.text(j, i, f"{scale * values.loc[method, model]:.{digits}f}", ha="center", va="center", fontsize=7,
                    fontweight="bold" if chosen else "normal",
                    color="white" if left.loc[method, model] > 0.75 else "black")  # fmt: skip
            if chosen:
                ax.add_patch(plt.Rectangle((j - 0.46, i - 0.42), 0.92, 0.84, fill=False, edgecolor=colour("smart"),
                                           linewidth=1.0))  # fmt: skip
    ax.set_xticks(range(n_models), values.columns, rotation=30, ha="left", rotation_mode="anchor", fontsize=7)
    ax.set_yticks(range(n_methods), [label(method) for method in values.index], fontsize=8)
    ax.xaxis.tick_top()
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.grid(False)
    unit = {"nll": "nats", "brier": "score"}.get(metric, "%")
    ax.set_xlabel(f"{label(metric)} ({unit}); framed: not distinguishable from the best", fontsize=8)
    return ax
