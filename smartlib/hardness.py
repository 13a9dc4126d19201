"""How hard a sample is, as its logits tell: the signals from which a temperature can be learned.

The paper takes the margin; the others are what an ablation compares it with (notebook 09).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from smartlib.arrays import as_logits, like, row_chunks
from smartlib.toplabel import confidence_of, margin_of

SIGNALS = ("margin", "max_logit", "confidence", "entropy", "energy", "soft_tail_margin")
# tau of the soft-tail margin: a class that trails the second by one logit unit counts e^-5 = 0.7 % of it.
SHARPNESS = 5.0


def hardness(logits: Any, signal: str = "margin") -> Any:
    """One number per sample that says how hard it is.

    | signal | value | a harder sample has | changed by a constant added to a row |
    |---|---|---|---|
    | margin | z(1) - z(2), logit units; inf where only one logit is finite | less | no |
    | max_logit | z(1), logit units | less | yes |
    | confidence | max_k softmax(z)_k, in [1/K, 1] | less | no |
    | entropy | of softmax(z), nats, in [0, log K] | more | no |
    | energy | -log sum_k exp(z_k), logit units | more | yes |
    | soft_tail_margin | z(1) - (1/tau) log sum_{k >= 2} exp(tau z(k)), tau = 5, logit units; inf as the margin | less | no |

    Where only differences of logits were kept, as in z - max z or in log-probabilities, the maximum logit and the
    energy have lost what they measure: the maximum of z - max z is 0 in every row.

    Args:
        logits: (N, K).
        signal: one of ``SIGNALS``.

    Returns:
        (N,) float64, finite but for the two margins, of the input's kind and device.

    Raises:
        ValueError: bad logits (see :func:`smartlib.arrays.as_logits`), or an unknown signal.

    Source: margin: paper; maximum logit: Hendrycks et al. 2022, confidence: Hendrycks and Gimpel 2017, energy (with this
        sign): Liu et al. 2020, entropy: standard; soft-tail margin: ours, a margin over all runners-up at once.

    >>> hardness([[3.0, 1.0, 1.0], [0.0, 0.0, -np.inf]])
    array([2., 0.])
    >>> hardness([[3.0, 1.0, 1.0], [0.0, 0.0, -np.inf]], "soft_tail_margin").round(3)
    array([1.861, 0.   ])
    """  # noqa: E501
    return like(hardness_of(as_logits(logits), check_signal(signal)), logits)


def check_signal(signal: Any) -> str:
    """The name of a signal; raises ValueError for an unknown one."""
    if signal not in SIGNALS:
        raise ValueError(f"signal must be one of {', '.join(map(repr, SIGNALS))}, got {signal!r}")
    return signal


def hardness_of(z: np.ndarray, signal: str) -> np.ndarray:
    """:func:`hardness` of checked logits."""
    if signal == "margin":
        return margin_of(z)
    if signal == "max_logit":
        return z.max(axis=1).astype(np.float64)
    if signal == "confidence":
        return confidence_of(z, 1.0)
    rule = {"entropy": _entropy, "energy": _energy, "soft_tail_margin": _soft_tail_margin}[signal]
    return np.concatenate([rule(z[rows].astype(np.float64)) for rows in row_chunks(*z.shape)])


def _entropy(z: np.ndarray) -> np.ndarray:
    """log S + sum_k w_k g_k / S, where w_k = exp(-g_k), g_k = z(1) - z_k, and S is their sum."""
    gaps = np.minimum(z.max(axis=1, keepdims=True) - z, 700.0)  # exp(-700) is the last normal number
    weights = np.exp(-gaps)
    total = weights.sum(axis=1)
    return np.log(total) + (weights * gaps).sum(axis=1) / total


def _energy(z: np.ndarray) -> np.ndarray:
    top = z.max(axis=1)
    return -(top + np.log(np.exp(z - top[:, None]).sum(axis=1)))


def _soft_tail_margin(z: np.ndarray) -> np.ndarray:
    first = z.argmax(axis=1)[:, None]
    top = np.take_along_axis(z, first, axis=1)[:, 0]
    np.put_along_axis(z, first, -np.inf, axis=1)
    second = z.max(axis=1)
    finite = np.where(np.isfinite(second), second, 0.0)
    with np.errstate(over="ignore", divide="ignore"):  # tau times a huge gap; the logarithm of an empty sum
        return top - finite - np.log(np.exp(SHARPNESS * (z - finite[:, None])).sum(axis=1)) / SHARPNESS
