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
    t = np.broadcast_to(to_numpy(temperature, "temperature").astype(np.float64), len(z))
    valid = (t > 0) & np.isfinite(t)
    if not valid.all():
        raise ValueError(f"temperature must be positive and finite, got {t[~valid][0]}")
    return like(confidence_of(z, t), logits)


def confidence_of(z: np.ndarray, t: np.ndarray | float) -> np.ndarray:
    """:func:`confidence` of checked logits at checked temperatures."""
    t = np.broadcast_to(t, len(z))
    result = np.empty(len(z))
    for rows in row_chunks(*z.shape):
        gaps = z[rows].astype(np.float64) - z[rows].max(axis=1, keepdims=True)
        result[rows] = 1.0 / np.exp(gaps / t[rows, None]).sum(axis=1)
    return result


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
        A margin of 0 gives (nan, nan): a t-fold tie has c(T) <= 1/t at every T.

    Raises:
        ValueError: a negative margin, a confidence outside (1/K, 1), K < 2, or not exactly one of
            ``confidence`` and ``log_odds``.

    Source: paper, Proposition 1.

    >>> low, high = temperature_interval(2.0, 0.9, n_classes=10)
    >>> round(float(low), 3), round(float(high), 3)
    (0.455, 0.91)
    """
    if (confidence is None) == (log_odds is None):
        raise ValueError("give exactly one of confidence and log_odds")
    if n_classes < 2:
        raise ValueError(f"n_classes must be at least 2, got {n_classes}")
    m = to_numpy(margin, "margin").astype(np.float64)
    if not np.all(m >= 0):
        raise ValueError(f"margin must not be negative, got {m[~(m >= 0)].flat[0]}")
    if log_odds is None:
        c = to_numpy(confidence, "confidence").astype(np.float64)
        if not np.all((c > 1 / n_classes) & (c < 1)):
            value = np.atleast_1d(c)[~((np.atleast_1d(c) > 1 / n_classes) & (np.atleast_1d(c) < 1))][0]
            raise ValueError(f"confidence must lie in (1/K, 1) = ({1 / n_classes:.4g}, 1), got {value}")
        odds = np.log(c) - np.log1p(-c)
    else:
        odds = to_numpy(log_odds, "log_odds").astype(np.float64)
        if not np.all(odds > -np.log(n_classes - 1)):
            raise ValueError(f"log_odds must exceed -log(K-1) = {-np.log(n_classes - 1):.4g}, got {odds.min()}")
    m, odds = np.broadcast_arrays(m, odds)
    with np.errstate(divide="ignore", invalid="ignore"):
        lower = np.where(m > 0, m / (odds + np.log(n_classes - 1)), np.nan)
        upper = np.where(m > 0, np.where(odds > 0, m / odds, np.inf), np.nan)
    return like(lower, margin), like(upper, margin)
