"""Quality against the amount of validation data."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.ticker import FixedLocator, LogLocator, NullFormatter

from smartlib.plots.style import NOISE_COLOUR, colour, label, marker

NATURAL_UNITS = ("nll", "brier")
# Lower ends of the groups of validation sets with similar numbers of errors; the last is open.
ERROR_GROUPS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
# Fewer validation sets than this say nothing about a group.
MIN_SETS = 5


def size_plot(
    records: pd.DataFrame,
    metric: str,
    *,
    methods: Sequence[str] = ("ts", "smart"),
    title: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """A metric against the validation size for one bundle: median and 10 to 90 % band over the subsets.

    The dashed line is the uncalibrated model, the grey area what a perfectly calibrated model would measure (95 %).

    Args:
        records: of one bundle, with columns method, n_val, <metric> and, where there is a noise floor,
            <metric>_floor_q95 (fractions; NLL and Brier score as they are).
        metric: column to draw; calibration errors are shown in percent.
        methods: which are drawn, the last on top.
        title: of the Axes.
        ax: where to draw; a new figure if None.

    Returns:
        The Axes.

    Source: ours.
    """
    if ax is None:
        _, ax = plt.subplots()
    scale = _scale(metric)
    for method in methods:
        groups = records[records["method"] == method].groupby("n_val")[metric]
        middle = scale * groups.median()
        ax.fill_between(middle.index, scale * groups.quantile(0.1), scale * groups.quantile(0.9), color=colour(method),
                        alpha=0.18, linewidth=0)  # fmt: skip
        ax.plot(middle.index, middle, color=colour(method), marker=marker(method), markersize=3, label=label(method))
    for value in records.loc[records["method"] == "uncalibrated", metric].iloc[:1]:
        ax.axhline(scale * value, color=colour("uncalibrated"), linestyle="--", linewidth=1, label="uncalibrated")
    floor = records.get(f"{metric}_floor_q95", pd.Series(dtype=float)).dropna()
    if len(floor):
        ax.axhspan(0, scale * floor.iloc[0], color=NOISE_COLOUR, alpha=0.45, linewidth=0, label="noise floor (95 %)")
    ax.set(xscale="log", xlabel="validation samples", ylabel=_axis_label(metric), title=title or "")
    if metric not in NATURAL_UNITS:
        ax.set_ylim(bottom=0)
    elif metric == "nll":  # one bad validation set may cost a hundred times what a good one does
        ax.set_yscale("log")
        low, high = ax.get_ylim()
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 3) if high > 20 * low else (1, 2, 3, 5, 7)))
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_formatter(NullFormatter())
    ticks = [10, 100, 1000, 10000]
    ax.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    ax.xaxis.set_minor_formatter(NullFormatter())
    return ax


def difference_plot(
    pairs: pd.DataFrame,
    metric: str,
    error_rate: pd.Series,
    *,
    by: str = "n_val",
    title: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Median paired difference against the size of the validation set or the number of errors in it.

    One line per bundle, the darker the more errors its model makes. Where numbers of errors decide, the lines lie
    together over errors and apart over sizes.

    Args:
        pairs: paired differences with columns bundle, n_val, n_val_errors and ``metric`` (fractions, nats), one row per
            validation set.
        metric: column to draw; calibration errors are shown in percentage points.
        error_rate: by bundle, a fraction.
        by: "n_val" or "n_val_errors"; numbers of errors are grouped by powers of two, and groups of fewer than five
            validation sets are left out.
        title: of the Axes.
        ax: where to draw; a new figure if None.

    Returns:
        The Axes. Its first collection has the colours of the lines, for a colour bar in percent.

    Raises:
        ValueError: ``by`` is neither of the two.

    Source: ours.
    """
    if by not in ("n_val", "n_val_errors"):
        raise ValueError(f'by must be "n_val" or "n_val_errors", got {by!r}')
    if ax is None:
        _, ax = plt.subplots()
    palette = plt.get_cmap("viridis_r")
    # The palest end of the palette is left out: it could not be seen on white.
    shades = Normalize(100 * error_rate.min() - 0.25 * np.ptp(100 * error_rate), 100 * error_rate.max())
    ax.scatter([], [], c=[], cmap=palette, norm=shades)
    groups = pairs[by] if by == "n_val" else pd.Series(np.digitize(pairs[by], ERROR_GROUPS) - 1, pairs.index)
    for bundle, rows in pairs.groupby("bundle", sort=False):
        grouped = rows.groupby(groups[rows.index])[metric].agg(["median", "size"])
        if by == "n_val_errors":
            grouped = grouped[grouped["size"] >= MIN_SETS]
        ax.plot(grouped.index, _scale(metric) * grouped["median"], color=palette(shades(100 * error_rate[bundle])),
                marker="o", markersize=3, linewidth=1.2, label=bundle)  # fmt: skip
    ax.axhline(0, color="black", linewidth=0.8)
    if by == "n_val":
        ax.set(xscale="log", xlabel="validation samples")
    else:
        ends = [*ERROR_GROUPS[1:], np.inf]
        names = [
            f"{low}" if high - low == 1 else f"≥ {low}" if np.isinf(high) else f"{low}–{high - 1}"
            for low, high in zip(ERROR_GROUPS, ends, strict=True)
        ]
        ax.set_xticks(range(len(names)), names, rotation=45, ha="right", rotation_mode="anchor")
        ax.set_xlabel("errors among the validation samples")
    unit = {"nll": " (nats)", "brier": ""}.get(metric, " (points)")
    ax.set(ylabel=f"{label(metric)}, difference{unit}", title=title or "")
    # Linear near zero, where it is decided which method is better; the differences of small sets are far larger.
    linear, *others = (0.01, 0.1, 1, 10) if metric in NATURAL_UNITS else (0.5, 1, 2, 4, 8)
    ax.set_yscale("symlog", linthresh=linear, linscale=0.7)
    ticks = [linear / 2, linear, *others]
    ax.yaxis.set_major_locator(FixedLocator([-tick for tick in ticks] + [0] + ticks))
    ax.yaxis.set_major_formatter("{x:g}")
    return ax


def _scale(metric: str) -> float:
    return 1.0 if metric in NATURAL_UNITS else 100.0


def _axis_label(metric: str) -> str:
    return label(metric) + {"nll": " (nats)", "brier": ""}.get(metric, " (%)")
