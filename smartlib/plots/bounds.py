"""Proposition 1 as a picture: the temperatures that a margin allows, and where those of real rows lie among them."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm

from smartlib.arrays import to_numpy
from smartlib.plots.style import FREE_COLOURS, NOISE_COLOUR, colour
from smartlib.toplabel import confidence as confidence_at
from smartlib.toplabel import temperature_at_confidence, temperature_interval

_INTERVAL_COLOUR = colour("smart")


def proposition_plot(gaps: Any, confidence: float, *, title: str | None = None, ax: Axes | None = None) -> Axes:
    """Confidence against temperature for rows with one margin, between the two curves that enclose all such rows.

    The temperatures at which the enclosing curves pass ``confidence`` are the ends of the interval, marked on the T
    axis; the dots are where the rows themselves pass it.

    Args:
        gaps: (R, K - 1) gaps of up to three rows, ascending, logit units, all with the same first gap.
        confidence: c in (1/K, 1).
        title: of the Axes.
        ax: where to draw; a new figure if None.

    Returns:
        The Axes.

    Raises:
        ValueError: rows of different margins; otherwise as :func:`smartlib.toplabel.temperature_interval`.

    Source: ours (the picture); paper, Proposition 1.
    """
    g = to_numpy(gaps, "gaps").astype(np.float64)
    if np.ptp(g[:, 0]) > 0:
        raise ValueError(f"all rows must have the same margin, got {np.unique(g[:, 0])}")
    m, k = g[0, 0], g.shape[1] + 1
    lower, upper = (float(end) for end in temperature_interval(m, confidence, k))
    t_max = 1.6 * (upper if np.isfinite(upper) else 4 * lower)
    if ax is None:
        _, ax = plt.subplots()
    t = np.linspace(t_max / 500, t_max, 500)
    tied = 1 / (1 + (k - 1) * np.exp(-m / t))
    alone = 1 / (1 + np.exp(-m / t))
    ax.fill_between(t, tied, alone, color=NOISE_COLOUR, alpha=0.3, linewidth=0)
    ax.plot(t, alone, color="black", label="classes below the second vanish")
    ax.plot(t, tied, color="black", linestyle="--", label="all runners-up tie")
    rows = np.column_stack([np.zeros(len(g)), -g])
    for row, row_colour in zip(rows, FREE_COLOURS, strict=False):
        ax.plot(t, confidence_at(np.tile(row, (len(t), 1)), t), color=row_colour, linewidth=1.2)
    ax.axhline(confidence, color=_INTERVAL_COLOUR, linewidth=0.9, linestyle=":")
    ax.text(t_max, confidence, f"c = {confidence:g} ", color=_INTERVAL_COLOUR, ha="right", va="bottom", fontsize=8)
    right = min(upper, t_max)
    ax.vlines([end for end in (lower, upper) if np.isfinite(end)], 0, confidence, color=_INTERVAL_COLOUR, linewidth=0.9)
    ax.plot([lower, right], [0, 0], color=_INTERVAL_COLOUR, linewidth=5, solid_capstyle="butt", clip_on=False)
    if np.isinf(upper):
        ax.plot(t_max, 0, marker=">", color=_INTERVAL_COLOUR, markersize=9, clip_on=False)
    t_star = temperature_at_confidence(rows, confidence)
    seen = t_star <= t_max
    ax.scatter(t_star[seen], np.full(seen.sum(), confidence), s=22, zorder=4,
               color=np.array(FREE_COLOURS)[: len(rows)][seen])  # fmt: skip
    ax.set(xlim=(0, t_max), ylim=(0, 1.02), xlabel="temperature T", ylabel="confidence c(T)", title=title or "")
    return ax


def temperature_band(
    margin: Any,
    temperature: Any,
    confidence: float,
    n_classes: int,
    *,
    third_gap: Any = None,
    title: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """T* of many rows against their margin, between the two lines of Proposition 1.

    Args:
        margin: (N,) logit units.
        temperature: (N,) T*, the temperature at which each row has ``confidence``; nan is left out.
        confidence: c in (1/2, 1).
        n_classes: K.
        third_gap: (N,) g_3 = z(1) - z(3), that of the third class, logit units; colours the dots by g_3 / m, from 1 to
            4 and more.
        title: of the Axes.
        ax: where to draw; a new figure if None.

    Returns:
        The Axes. Its last collection is the dots, for a colour bar.

    Source: ours (the picture); paper, Proposition 1.
    """
    m, t = to_numpy(margin, "margin").astype(np.float64), to_numpy(temperature, "temperature").astype(np.float64)
    kept = np.isfinite(t)
    if ax is None:
        _, ax = plt.subplots()
    ends = np.array([0, 1.03 * m[kept].max()])
    lower, upper = (ends * float(slope) for slope in temperature_interval(1.0, confidence, n_classes))
    ax.fill_between(ends, lower, upper, color=NOISE_COLOUR, alpha=0.3, linewidth=0)
    ax.plot(ends, upper, color="black", linewidth=1.2, label="m / logit(c)")
    ax.plot(ends, lower, color="black", linewidth=1.2, linestyle="--", label="m / (logit(c) + log(K−1))")
    shade = {"color": colour("ts")}
    if third_gap is not None:
        ratio = to_numpy(third_gap, "third_gap").astype(np.float64)[kept] / np.maximum(m[kept], 1e-12)
        shade = {"c": np.clip(ratio, 1, 4), "norm": LogNorm(1, 4), "cmap": "viridis"}
    # Thousands of dots as vectors would make the file slow to open.
    ax.scatter(m[kept], t[kept], s=2.5, linewidth=0, rasterized=True, **shade)
    ax.set(xlim=(0, ends[1]), ylim=(0, upper[1]), xlabel="margin m (logit units)", title=title or "")
    ax.set_ylabel(f"T* at confidence {confidence:g}")
    return ax
