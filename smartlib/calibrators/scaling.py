"""Temperature scaling: one temperature for all samples, by maximum likelihood."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.optimize import brentq

from smartlib.arrays import row_chunks
from smartlib.calibrators.base import TemperatureCalibrator, warn
from smartlib.toplabel import margin_of

# The temperature is searched within this factor of the logits' own scales, so that multiplying all logits by a
# constant multiplies the temperature by it.
_SEARCH_FACTOR = 1e3
# A gap like this comes from a mask, -inf or the lowest number of float64.
_MASKED = 1e300


class TemperatureScaling(TemperatureCalibrator):
    """Temperature scaling: the T that minimises the NLL of softmax(z / T) on the validation data.

    The NLL is convex in s = 1/T, so that T is the root of a monotone function, found by Brent's method in log s
    between bounds that follow the scale of the logits. There is no starting value and no learning rate.

    Attributes after fit:
        temperature_: T > 0.
        bound_hit_: "lower", "upper" or None; with a bound hit the data do not determine T.
        converged_: True; Brent's method always ends.

    Source: Guo et al. 2017; the bracketed solver is standard numerics.

    >>> logits = np.array([[2.0, 0.0], [0.0, 2.0], [0.0, 2.0], [2.0, 0.0]])
    >>> ts = TemperatureScaling().fit(logits, [0, 1, 1, 1])        # three of four right: c(T) must be 3/4
    >>> bool(abs(ts.temperature_ - 2 / np.log(3)) < 1e-9)
    True
    """

    registry_name = "ts"
    n_parameters = 1
    learned = ("temperature_",)

    def _fit(self, z: np.ndarray, y: np.ndarray, *, features: Any, head: Any) -> None:
        self.temperature_, self.bound_hit_ = nll_temperature(z, y)
        self.converged_ = True

    def _temperatures(self, z: np.ndarray) -> np.ndarray:
        return np.full(len(z), self.temperature_)


def nll_temperature(z: np.ndarray, y: np.ndarray) -> tuple[float, str | None]:
    """The temperature of :class:`TemperatureScaling`, where other calibrators start.

    Args:
        z: (N, K) checked logits. y: (N,) checked labels.

    Returns:
        ``(temperature, bound_hit)``, as the attributes; it warns where a bound was hit.
    """
    small, large = _scales(z)
    low, high = -np.log(large * _SEARCH_FACTOR), -np.log(small / _SEARCH_FACTOR)
    bound_hit = None
    if _nll_slope(z, y, np.exp(low)) >= 0:
        log_s, bound_hit = low, "upper"
    elif _nll_slope(z, y, np.exp(high)) <= 1e-12 * small:
        log_s, bound_hit = high, "lower"
    else:
        log_s = brentq(lambda u: _nll_slope(z, y, np.exp(u)), low, high, xtol=1e-12, rtol=1e-12)
    temperature = float(np.exp(-log_s))
    if bound_hit:
        reason = {
            "upper": "the logits say nothing about the labels, or labels and logits do not belong together",
            "lower": "the likelihood keeps growing as T goes to 0, as it does when no prediction is wrong",
        }[bound_hit]
        warn(f"TemperatureScaling: T = {temperature:.3g} is the {bound_hit} search bound; {reason}.")
    return temperature, bound_hit


def _scales(z: np.ndarray) -> tuple[float, float]:
    """Median finite margin and mean finite gap to the largest logit, ties left out; 1 where all logits tie.

    Classes that were masked by a number like -1e9 rather than by -inf rule the mean gap, but not the margin.
    """
    total = count = 0.0
    for rows in row_chunks(*z.shape):
        gaps = z[rows].max(axis=1, keepdims=True).astype(np.float64) - z[rows]
        finite = gaps[(gaps > 0) & (gaps < _MASKED)]
        total, count = total + finite.sum(), count + finite.size
    if not count:
        return 1.0, 1.0
    mean, margins = float(total / count), margin_of(z)
    margins = margins[(margins > 0) & (margins < _MASKED)]
    return min(mean, float(np.median(margins))) if margins.size else mean, mean


def _nll_slope(z: np.ndarray, y: np.ndarray, s: float) -> float:
    """d NLL / ds = E[ E_p[z] - z_y ] at p = softmax(s z); increasing in s."""
    total = 0.0
    for rows in row_chunks(*z.shape):
        gaps = z[rows].astype(np.float64) - z[rows].max(axis=1, keepdims=True)
        with np.errstate(over="ignore"):  # the exponential of what overflows is rightly 0
            weights = np.exp(s * gaps)
        own = gaps[np.arange(len(gaps)), y[rows]]
        gaps[np.isneginf(gaps)] = 0.0  # weight 0
        total += ((weights * gaps).sum(axis=1) / weights.sum(axis=1) - own).sum()
    return total / len(z)
