"""Cost as pictures: how it grows with the data, and what quality it buys."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from scipy.optimize import isotonic_regression

from smartlib.plots.style import NOISE_COLOUR, colour, label

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
        shown = what in highlighted
        ax.plot(rows[along], rows[column], color=colour(what) if shown else NOISE_COLOUR, marker="o" if shown else None,
                markersize=3, linewidth=1.6 if shown else 0.9, zorder=3 if shown else 2)  # fmt: skip
    ax.set(xscale="log", yscale="log", title=title or "", xlabel=_AXIS_LABELS[along], ylabel="seconds")
    low, high = ax.get_xlim()
    bottom = 1.3 * ax.get_ylim()[0]
    ax.plot([high / 4, high], [bottom, 4 * bottom], color="black", linestyle=":", linewidth=1.1)
    ax.text(high, 4 * bottom, " in proportion", fontsize=_FONT_SIZE, va="center")
    ends = {what: (float(rows[along].iloc[-1]), float(rows[column].iloc[-1])) for what, rows in series.items()}
    y_low, y_high = np.log10(ax.get_ylim())
    gap = 0.033 * (y_high - y_low)
    for x in {x for x, _ in ends.values()}:
        here = [what for what in ends if ends[what][0] == x]
        for what, y in zip(here, spread_out(np.log10([ends[what][1] for what in here]), gap), strict=True):
            shown = what in highlighted
            ax.annotate(label(what), (x, 10**y), (4, 0), textcoords="offset points", va="center", fontsize=_FONT_SIZE,
                        color=colour(what) if shown else _REST_COLOUR, annotation_clip=False)  # fmt: skip
    ax.set_xlim(low, high * (high / low) ** 0.28)  # room for the names
    ax.grid(which="minor", visible=False)
    return ax


def cost_quality_plot(
    table: pd.DataFrame,
    metric: str,
    *,
    highlighted: Collection[str] = HIGHLIGHTED,
    title: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """A calibration error or score against the seconds of the fit, one named dot with its 95 % interval per method.

    Args:
        table: columns method, seconds, <metric>, <metric>_low, <metric>_high and, where there is a noise floor,
            <metric>_floor_q95; fractions (NLL and Brier score as they are).
        metric: column to draw; calibration errors are shown in percent.
        highlighted: the methods in colour; the others are grey.
        title: of the Axes.
        ax: where to draw; a new figure if None.

    Returns:
        The Axes.

    Source: ours.
    """
    if ax is None:
        _, ax = plt.subplots(figsize=(5.5, 3.8))
    scale, unit = {"nll": (1.0, " (nats)"), "brier": (1.0, "")}.get(metric, (100.0, " (%)"))
    x = table["seconds"].to_numpy(float)
    y, low, high = (scale * table[f"{metric}{end}"].to_numpy(float) for end in ("", "_low", "_high"))
    colours = [colour(method) if method in highlighted else _REST_COLOUR for method in table["method"]]
    ax.vlines(x, low, high, color=colours, linewidth=0.8, alpha=0.45)
    ax.scatter(x, y, color=colours, s=16, zorder=3)
    ax.set_xscale("log")
    ax.set_xlim(x.min() / 2, x.max() * 4)
    if f"{metric}_floor_q95" in table and table[f"{metric}_floor_q95"].notna().any():
        floor = scale * table[f"{metric}_floor_q95"].mean()
        ax.axhspan(0, floor, color=NOISE_COLOUR, alpha=0.45, linewidth=0, zorder=0)
        ax.text(x.min() / 2, floor, " noise floor (95 %)", fontsize=_FONT_SIZE, va="top", color=_REST_COLOUR)
        ax.set_ylim(bottom=0)
    ax.set(xlabel="seconds of the fit", ylabel=label(metric) + unit, title=title or "")
    ax.grid(which="minor", visible=False)
    _name_dots(ax, x, y, [label(method) for method in table["method"]], colours)
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


def _name_dots(ax: Axes, x: np.ndarray, y: np.ndarray, names: Sequence[str], colours: Sequence[str]) -> None:
    """Write each name where it covers no dot and no earlier name: beside, above or below its dot, or else farther."""
    ax.figure.draw_without_rendering()  # settles the scales
    dots = ax.transData.transform(np.column_stack([x, y])) * 72 / ax.figure.dpi
    height = 1.1 * _FONT_SIZE
    taken = [(px - 3, py - 3, px + 3, py + 3) for px, py in dots]
    for at_x, at_y, (px, py), name, shade in zip(x, y, dots, names, colours, strict=True):
        width = 0.58 * _FONT_SIZE * len(name)
        offsets = [(side * dx, dy) for dy in (0, 6, -6, 12, -12, 18, -18, 26, -26) for side, dx in ((1, 5), (-1, 5))]
        boxes = [
            (px + dx - (dx < 0) * width, py + dy - height / 2, px + dx + (dx > 0) * width, py + dy + height / 2)
            for dx, dy in offsets
        ]
        free = [not any(_overlap(box, other) for other in taken) for box in boxes]
        best = free.index(True) if True in free else 0
        taken.append(boxes[best])
        dx, dy = offsets[best]
        ax.annotate(name, (at_x, at_y), (dx, dy),
                    textcoords="offset points", fontsize=_FONT_SIZE, color=shade, va="center",
                    ha="left" if dx > 0 else "right")  # fmt: skip


def _overlap(a: tuple, b: tuple) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
