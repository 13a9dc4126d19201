"""Cost as pictures: how it grows with the data, and what quality it buys."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from scipy.optimize import isotonic_regression

from smartlib.plots.style import NOISE_COLOUR, colour, label, marker

HIGHLIGHTED = ("ts", "smart", "smart-adam", "cts", "gc")
_AXIS_LABELS = {"n": "validation samples N", "classes": "classes K"}
_FONT_SIZE = 7.5
_REST_COLOUR = "0.45"


def growth_plot(
    costs: pd.DataFrame,
    along: str,
    *,
    column: str = "fit_seconds",
    highlighted: Collection[str] = HIGHLIGHTED,
    title: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Seconds of each calibrator against the size of the data, on two logarithmic axes; a name at each line's end.

    A line ends where larger sizes were left out. The dotted line in the corner has slope 1: seconds in
    proportion to the size.

    Args:
        costs: rows of one series, with columns ``what``, ``along`` and ``column``; nan is left out.
        along: "n" (samples) or "classes".
        column: what is drawn, seconds.
        highlighted: the calibrators in colour; the others are grey.
        title: of the Axes.
        ax: where to draw; a new figure if None.

    Returns:
        The Axes.

    Source: ours.
    """
    if ax is None:
        _, ax = plt.subplots(figsize=(5.5, 4.4))
    series = {what: rows.sort_values(along) for what, rows in costs.dropna(subset=[column]).groupby("what", sort=False)}
    for what, rows in series.items():
        looks = {"color": NOISE_COLOUR, "linewidth": 0.9, "zorder": 2}
        if what in highlighted:
            looks = {"color": colour(what), "marker": marker(what), "markersize": 3.5, "zorder": 3}
        ax.plot(rows[along], rows[column], **looks)
    ax.set(xscale="log", yscale="log", title=title or "", xlabel=_AXIS_LABELS[along], ylabel="seconds")
    low, high = ax.get_xlim()
    bottom = 1.3 * ax.get_ylim()[0]
    ax.plot([high / 4, high], [bottom, 4 * bottom], color="black", linestyle=":", linewidth=1.1)
    ax.text(high, 4 * bottom, " in proportion", fontsize=_FONT_SIZE, va="center")
    ends = {what: (float(rows[along].iloc[-1]), float(rows[column].iloc[-1])) for what, rows in series.items()}
    y_low, y_high = np.log10(ax.get_ylim())
    last = costs[along].max()
    for x in sorted({x for x, _ in ends.values()}):
        here = [what for what in ends if ends[what][0] == x]
        heights = spread_out(np.log10([ends[what][1] for what in here]), 0.033 * (y_high - y_low))
        # Beside the end of a line; above it where other lines go on to the right.
        place = {"xytext": (5, 0), "va": "center"} if x == last else {"xytext": (0, 4), "ha": "center"}
        for what, y in zip(here, heights, strict=True):
            ax.annotate(label(what), (x, 10**y), textcoords="offset points", fontsize=_FONT_SIZE, zorder=4,
                        color="black" if what in highlighted else _REST_COLOUR, **place)  # fmt: skip
    ax.set_xlim(low, high * (high / low) ** 0.42)  # room for the names
    ax.grid(which="minor", visible=False)
    return ax


def cost_quality_plot(table: pd.DataFrame, metric: str, *, title: str | None = None, ax: Axes | None = None) -> Axes:
    """A calibration error or score against the seconds of the fit: one mark with its 95 % interval per method.

    Args:
        table: columns method, seconds, <metric>, <metric>_low, <metric>_high and, where there is a noise floor,
            <metric>_floor_q95; fractions (NLL and Brier score as they are).
        metric: column to draw; calibration errors are shown in percent.
        title: of the Axes.
        ax: where to draw; a new figure if None.

    Returns:
        The Axes, whose marks have labels for a legend, the quickest first.

    Source: ours.
    """
    if ax is None:
        _, ax = plt.subplots()
    scale, unit = {"nll": (1.0, " (nats)"), "brier": (1.0, "")}.get(metric, (100.0, " (%)"))
    for row in table.sort_values("seconds", kind="stable").to_dict("records"):
        x, y, low, high = row["seconds"], *(scale * row[f"{metric}{end}"] for end in ("", "_low", "_high"))
        ax.plot([x, x], [low, high], color=colour(row["method"]), linewidth=1, alpha=0.6)
        ax.plot(x, y, marker(row["method"]), color=colour(row["method"]), markersize=6, markeredgecolor="black",
                markeredgewidth=0.5, linestyle="", label=label(row["method"]))  # fmt: skip
    ax.set_xscale("log")
    if f"{metric}_floor_q95" in table and table[f"{metric}_floor_q95"].notna().any():
        floor = scale * table[f"{metric}_floor_q95"].mean()
        ax.axhspan(0, floor, color=NOISE_COLOUR, alpha=0.45, linewidth=0, zorder=0, label="noise floor (95 %)")
        ax.set_ylim(bottom=0)
    ax.set(xlabel="seconds of the fit", ylabel=label(metric) + unit, title=title or "")
    return ax


def spread_out(values: Sequence[float], gap: float) -> np.ndarray:
    """Values moved apart as little as possible (least squares), so that no two are nearer than a gap; same order.

    >>> spread_out([1.0, 1.0, 5.0], 1.0)
    array([0.5, 1.5, 5. ])
    """
    values = np.asarray(values, dtype=float)
    order = np.argsort(values, kind="stable")
    steps = gap * np.arange(len(values))
    result = np.empty_like(values)
    result[order] = isotonic_regression(values[order] - steps).x + steps
    return result
