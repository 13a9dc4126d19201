"""The top-label view of logits: predicted class, gaps, margin, confidence, and the temperatures a margin allows.

With sorted logits z(1) >= z(2) >= ... >= z(K), gaps g_k = z(1) - z(k), and temperature T,

    c(T) = max_k softmax(z / T)_k = 1 / (1 + sum_{k >= 2} exp(-g_k / T)).

The margin is m = g_2. Notebook 01 derives what m says about T.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from smartlib.arrays import as_logits, like, row_chunks, to_numpy


def predicted_class(logits: Any) -> Any:
    """Predicted class of each row: the lowest index that attains the largest logit.

    Args:
        logits: (N, K).

    Returns:
        (N,) int64, of the input's kind and device.

    Raises:
        ValueError: see :func:`smartlib.arrays.as_logits`.

    Source: ours (a convention).

    >>> predicted_class([[1, 1, 0]])
    array([0])
    """
    return like(as_logits(logits).argmax(axis=1), logits)


def margin(logits: Any) -> Any:
    """Margin m = z(1) - z(2) between the two largest logits.

    Args:
        logits: (N, K).

    Returns:
        (N,) float64 in logit units, >= 0, of the input's kind and device; 0 for a tie, inf where only one logit is
        finite.

    Raises:
        ValueError: see :func:`smartlib.arrays.as_logits`.

    Source: paper, the input of SMART.

    >>> margin([[3.0, 1.0, 2.5], [0.0, 0.0, -1.0]])
    array([0.5, 0. ])
    """
    return like(margin_of(as_logits(logits)), logits)


def margin_of(z: np.ndarray) -> np.ndarray:
    """:func:`margin` of checked logits."""
    result = np.empty(len(z))
    for rows in row_chunks(*z.shape):
        top_two = np.partition(z[rows], z.shape[1] - 2, axis=1)[:, -2:].astype(np.float64)
        result[rows] = top_two[:, 1] - top_two[:, 0]
    return result


def confidence(logits: Any, temperature: Any = 1.0) -> Any:
    """Top-label confidence c(T) of each row.

    Args:
        logits: (N, K).
        temperature: scalar or (N,), > 0, dimensionless.

    Returns:
        (N,) float64 in [1/K, 1], of the input's kind and device.

    Raises:
        ValueError: bad logits (see :func:`smartlib.arrays.as_logits`) or a temperature that is not positive.

    Source: standard.

    >>> confidence([[0.0, 0.0], [np.log(3), 0.0]])
    array([0.5 , 0.75])
    """
    z = as_logits(logits)
    return like(confidence_of(z, _as_temperature(temperature, len(z))), logits)


def confidence_of(z: np.ndarray, t: np.ndarray | float) -> np.ndarray:
    """:func:`confidence` of checked logits at checked temperatures."""
    t = np.broadcast_to(t, len(z))
    result = np.empty(len(z))
    for rows in row_chunks(*z.shape):
        gaps = z[rows].astype(np.float64) - z[rows].max(axis=1, keepdims=True)
        with np.errstate(over="ignore"):  # a gap of 100 at T = 1e-307 is infinite, and its exponential rightly 0
            result[rows] = 1.0 / np.exp(gaps / t[rows, None]).sum(axis=1)
    return result


def gaps(logits: Any) -> Any:
    """Gaps g_k = z(1) - z(k) of the sorted logits, k = 2 .. K.

    Args:
        logits: (N, K).

    Returns:
        (N, K - 1) float64 in logit units, each row ascending, the first column the margin; inf for a logit of -inf. Of
        the input's kind and device.

    Raises:
        ValueError: see :func:`smartlib.arrays.as_logits`.

    Source: standard.

    >>> gaps([[3.0, 1.0, 2.5]])
    array([[0.5, 2. ]])
    """
    return like(gaps_of(as_logits(logits)), logits)


def gaps_of(z: np.ndarray) -> np.ndarray:
    """:func:`gaps` of checked logits."""
    descending = np.sort(z, axis=1)[:, ::-1].astype(np.float64)
    return descending[:, :1] - descending[:, 1:]


def log_odds(logits: Any, temperature: Any = 1.0) -> Any:
    """Log-odds log(c / (1 - c)) of the top-label confidence c(T), exact also where c rounds to 1.

    In terms of the gaps it is -log sum_{k >= 2} exp(-g_k / T), so that no 1 - c is ever formed.

    Args:
        logits: (N, K).
        temperature: scalar or (N,), > 0, dimensionless.

    Returns:
        (N,) float64, at least -log(K - 1); inf where only one logit is finite. Of the input's kind and device.

    Raises:
        ValueError: bad logits (see :func:`smartlib.arrays.as_logits`) or a temperature that is not positive.

    Source: ours.

    >>> log_odds([[100.0, 0.0], [0.0, 0.0]])
    array([100.,   0.])
    """
    z = as_logits(logits)
    t = _as_temperature(temperature, len(z))
    result = np.empty(len(z))
    for rows in row_chunks(*z.shape):
        g = gaps_of(z[rows])
        with np.errstate(invalid="ignore", over="ignore"):  # inf - inf where a single logit is finite; tiny T
            tail = np.log1p(np.exp((g[:, :1] - g[:, 1:]) / t[rows, None]).sum(axis=1))
            result[rows] = np.where(np.isinf(g[:, 0]), np.inf, g[:, 0] / t[rows] - tail)
    return like(result, logits)


def temperature_interval(margin: Any, confidence: Any = None, n_classes: int = 2, *, log_odds: Any = None) -> tuple:
    """The temperatures at which a row with this margin can have this confidence (Proposition 1).

    For m > 0 and 1/K < c < 1 exactly one T* has c(T*) = c, and

        m / (logit(c) + log(K-1)) <= T* <= m / logit(c)     if c > 1/2,
        m / (logit(c) + log(K-1)) <= T* <  inf              if 1/K < c <= 1/2 (and K > 2).

    The lower end is attained when all runners-up tie, the upper one when all classes below the second vanish.

    Args:
        margin: scalar or (N,), >= 0, logit units.
        confidence: scalar or (N,), in (1/K, 1). Give ``log_odds`` instead where it is known: 1 - c loses digits near 1.
        n_classes: K >= 2.
        log_odds: log(c / (1 - c)), instead of ``confidence``.

    Returns:
        ``(lower, upper)``, dimensionless, broadcast over the inputs; upper is inf where c <= 1/2 and K > 2.
        (nan, nan) where no temperature can do it: with a margin of 0, a tie, c(T) <= 1/2 at every T; with an infinite
        margin c(T) = 1.

    Raises:
        ValueError: a negative margin, a confidence outside (1/K, 1), log-odds outside (-log(K-1), inf), K < 2, or not
            exactly one of ``confidence`` and ``log_odds``.

    Source: paper, Proposition 1.

    >>> low, high = temperature_interval(2.0, 0.9, n_classes=10)
    >>> round(float(low), 3), round(float(high), 3)
    (0.455, 0.91)
    """
    odds = _as_log_odds(confidence, log_odds, n_classes)
    m = to_numpy(margin, "margin").astype(np.float64)
    if not np.all(m >= 0):
        raise ValueError(f"margin must not be negative, got {m[~(m >= 0)].flat[0]}")
    m, odds = np.broadcast_arrays(m, odds)
    possible = np.isfinite(m) & ((m > 0) | (odds <= 0))
    with np.errstate(divide="ignore", invalid="ignore"):
        lower = np.where(possible, m / (odds + np.log(n_classes - 1)), np.nan)
        upper = np.where(possible, np.where(odds > 0, m / odds, np.inf), np.nan)
    return like(lower, margin), like(upper, margin)


def refined_temperature_interval(
    gaps: Any, confidence: Any = None, n_classes: int = 2, *, log_odds: Any = None
) -> tuple:
    """The temperatures that are left when more than the margin is known: the gaps g_2 <= ... <= g_j (Proposition 1c).

    The classes below the j-th have gaps between g_j and infinity. T* therefore lies between the roots in T of

        sum_{k=2..j} exp(-g_k / T) + (K - j) exp(-g_j / T) = (1 - c) / c     (lower end: they all tie with the j-th),
        sum_{k=2..j} exp(-g_k / T)                         = (1 - c) / c     (upper end: they all vanish).

    j = 2 is Proposition 1, the intervals are nested as j grows, and j = K is the point T*.

    Args:
        gaps: (N, j - 1) smallest gaps of each row, ascending, logit units (the first columns of :func:`gaps`).
        confidence: scalar or (N,), in (1/K, 1), or ``log_odds`` instead (see :func:`temperature_interval`).
        n_classes: K >= j.
        log_odds: log(c / (1 - c)), instead of ``confidence``.

    Returns:
        ``(lower, upper)``, each (N,), dimensionless. The upper end is inf where j - 1 <= (1 - c) / c. (nan, nan) where
        no row with these gaps reaches c at any temperature.

    Raises:
        ValueError: gaps that are negative, not ascending, or more than K - 1; otherwise as
            :func:`temperature_interval`.

    Source: ours, Proposition 1c.

    >>> low, high = refined_temperature_interval([[1.0, 3.0]], 0.9, n_classes=10)
    >>> print(round(float(low[0]), 3), round(float(high[0]), 3))
    0.439 0.453
    """
    g = to_numpy(gaps, "gaps").astype(np.float64)
    if g.ndim != 2 or not 1 <= g.shape[1] <= n_classes - 1:
        raise ValueError(f"gaps must have shape (N, j - 1) with 1 <= j - 1 <= K - 1 = {n_classes - 1}, got {g.shape}")
    if not (np.all(g[:, 0] >= 0) and np.all(g[:, 1:] >= g[:, :-1])):
        raise ValueError("gaps must not be negative and must ascend along each row; see smartlib.toplabel.gaps")
    target = np.broadcast_to(-_as_log_odds(confidence, log_odds, n_classes), len(g))
    n_last = np.ones(g.shape[1])
    n_last[-1] += n_classes - 1 - g.shape[1]
    lower, upper = np.empty(len(g)), np.empty(len(g))
    for rows in row_chunks(*g.shape):
        lower[rows] = _root(g[rows], n_last, target[rows])
        upper[rows] = _root(g[rows], np.ones(g.shape[1]), target[rows])
    # Where even the classes that tie with the j-th leave too little (lower is inf), or the known ones are too much
    # already (upper is 0), no temperature is left.
    none = np.isinf(lower) | (upper == 0)
    return tuple(like(np.where(none, np.nan, end), gaps) for end in (lower, upper))


def temperature_at_confidence(logits: Any, confidence: Any = None, *, log_odds: Any = None) -> Any:
    """The temperature T* at which each row has the given confidence, c(T*) = c.

    Args:
        logits: (N, K).
        confidence: scalar or (N,), in (1/K, 1), or ``log_odds`` instead (see :func:`temperature_interval`).
        log_odds: log(c / (1 - c)), instead of ``confidence``.

    Returns:
        (N,) float64, dimensionless, of the input's kind and device; nan where no temperature does it (a tie at the top,
        or too few finite logits) or every one does (two tied logits, no other finite, c = 1/2).

    Raises:
        ValueError: bad logits, or as :func:`temperature_interval`.

    Source: ours; T* is unique by Proposition 1.

    >>> t = temperature_at_confidence([[3.0, 1.0, 0.0]], 0.6)
    >>> print(round(float(confidence([[3.0, 1.0, 0.0]], t)[0]), 6))
    0.6
    """
    z = as_logits(logits)
    target = np.broadcast_to(-_as_log_odds(confidence, log_odds, z.shape[1]), len(z))
    result = np.empty(len(z))
    for rows in row_chunks(*z.shape):
        g = gaps_of(z[rows])
        result[rows] = _root(g, np.ones(g.shape[1]), target[rows])
    return like(np.where(np.isinf(result) | (result == 0), np.nan, result), logits)


def _root(g: np.ndarray, count: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The T at which log sum_k count_k exp(-g_k / T) = target: (N,) for gaps (N, J), counts (J,) and targets (N,).

    0 where the sum exceeds the target at every T, inf where it stays below. In s = 1/T the left side is convex and
    falls, so that Newton's method from the left climbs to the root without a step too far.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        exists = np.where(np.isfinite(g), count, 0.0).sum(axis=1), np.where(g == 0, count, 0.0).sum(axis=1)
        result = np.where(target >= np.log(exists[0]), np.inf, 0.0)
        active = np.flatnonzero((target < np.log(exists[0])) & (target > np.log(exists[1])))
        # One term alone reaches the target at -target / g_2, and the sum is larger.
        s = np.where(g[active, 0] > 0, np.maximum(-target[active] / g[active, 0], 0.0), 0.0)
    while active.size:
        gap = np.where(np.isfinite(g[active]), g[active], g[active, :1])  # any finite number: its weight is 0
        weight = np.where(np.isfinite(g[active]), count * np.exp((gap[:, :1] - gap) * s[:, None]), 0.0)
        total = weight.sum(axis=1)
        value = np.log(total) - gap[:, 0] * s
        step = (value - target[active]) * total / (weight * gap).sum(axis=1)
        s += np.maximum(step, 0.0)  # back only by rounding, which next to s = 0 may lead below it
        done = ~(step > 1e-15 * s)
        result[active[done]] = 1.0 / s[done]
        active, s = active[~done], s[~done]
    return result


def _as_temperature(temperature: Any, n: int) -> np.ndarray:
    t = np.broadcast_to(to_numpy(temperature, "temperature").astype(np.float64), n)
    valid = (t > 0) & np.isfinite(t)
    if not valid.all():
        raise ValueError(f"temperature must be positive and finite, got {t[~valid][0]}")
    return t


def _as_log_odds(confidence: Any, log_odds: Any, n_classes: int) -> np.ndarray:
    """The checked log-odds of whichever of the two is given."""
    if (confidence is None) == (log_odds is None):
        raise ValueError("give exactly one of confidence and log_odds")
    if n_classes < 2:
        raise ValueError(f"n_classes must be at least 2, got {n_classes}")
    lowest = -np.log(n_classes - 1)
    if log_odds is None:
        c = to_numpy(confidence, "confidence").astype(np.float64)
        valid = (c > 1 / n_classes) & (c < 1)
        if not np.all(valid):
            value = np.atleast_1d(c)[~np.atleast_1d(valid)][0]
            raise ValueError(f"confidence must lie in (1/K, 1) = ({1 / n_classes:.4g}, 1), got {value}")
        # The ratio rounds 1/t to the odds of exactly t - 1, where log(c) - log1p(-c) is off by a last digit, and that
        # digit decides whether an end is infinite. It also may round a c just above 1/K to the end of the range.
        return np.maximum(-np.log((1 - c) / c), np.nextafter(lowest, np.inf))
    odds = to_numpy(log_odds, "log_odds").astype(np.float64)
    valid = (odds > lowest) & (odds < np.inf)
    if not np.all(valid):
        value = np.atleast_1d(odds)[~np.atleast_1d(valid)][0]
        raise ValueError(f"log_odds must exceed -log(K-1) = {lowest:.4g} and be finite, got {value}")
    return odds
