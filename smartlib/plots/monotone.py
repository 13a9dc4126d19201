"""The picture of the exact smooth calibration error: cumulative residual and its best monotone fit."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from smartlib.arrays import as_confidence_and_correct
from smartlib.plots.style import NOISE_COLOUR, colour


def monotone_fit(confidence: Any, correct: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cumulative residual S and its best monotone fit D, as in formula (*) of :mod:`smartlib.smce`.

    The fit is found by pooling neighbouring steps at their weighted median, in O(n^2): slower than the library's
    exact smCE and independent of it.

    Args:
        confidence: (N,) in [0, 1].
        correct: (N,) of 0 and 1.

    Returns:
        ``(v, S, D)``, each (m,), at the m distinct confidences v. S_i = (1/n) sum of (A - f) over the samples with
        f <= v_i, with its sign changed where the total S_m is negative. 0 <= D_1 <= ... <= D_m = S_m, and
        smCE = S_m + sum_i (v_{i+1} - v_i) |S_i - D_i|.

    Raises:
        ValueError: bad arrays.

    Source: ours; pooling: Robertson and Wright 1980.

    >>> v, s, d = monotone_fit([0.2, 0.5, 0.8], [1, 0, 1])
    >>> s.round(3).tolist(), d.round(3).tolist()
    ([0.267, 0.1, 0.167], [0.1, 0.1, 0.167])
    """
    f, a = as_confidence_and_correct(confidence, correct)
    v, group = np.unique(f, return_inverse=True)
    s = np.cumsum(np.bincount(group, weights=a - f)) / len(f)
    s = -s if s[-1] < 0 else s
    gaps = np.diff(v)
    blocks: list[list[int]] = []
    for i in range(len(gaps)):
        blocks.append([i])
        while len(blocks) > 1 and _median(s, gaps, blocks[-2]) > _median(s, gaps, blocks[-1]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    d = s.copy()
    for block in blocks:
        d[block] = np.clip(_median(s, gaps, block), 0, s[-1])
    return v, s, d


def _median(values: np.ndarray, weights: np.ndarray, members: list[int]) -> float:
    """The lower weighted median."""
    order = np.array(members)[np.argsort(values[members])]
    total = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(total, total[-1] / 2)])


def monotone_plot(confidence: Any, correct: Any, *, ax: Axes | None = None) -> Axes:
    """Cumulative residual, its best monotone fit, and the area between them: smCE = last value + area.

    Args:
        confidence: (N,) in [0, 1].
        correct: (N,) of 0 and 1.
        ax: where to draw; a new figure if None.

    Returns:
        The Axes.

    Raises:
        ValueError: bad arrays.

    Source: ours.
    """
    v, s, d = monotone_fit(confidence, correct)
    if ax is None:
        _, ax = plt.subplots()
    edges = np.concatenate([[0.0], v, [1.0]])
    curve, fit = (np.concatenate([[0.0], y, y[-1:]]) for y in (s, d))
    ax.fill_between(edges, curve, fit, step="post", color=NOISE_COLOUR, alpha=0.6, linewidth=0, label="area")
    ax.step(edges, curve, where="post", color=colour("ts"), label="cumulative residual S")
    ax.step(edges, fit, where="post", color=colour("smart"), linestyle="--", label="best monotone fit D")
    ax.axhline(0, color="black", linewidth=0.6)
    ax.set(xlabel="confidence", ylabel="cumulative residual (fraction)", xlim=(0, 1))
    return ax
