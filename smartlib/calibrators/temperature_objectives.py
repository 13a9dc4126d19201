"""What a map of temperatures is trained to minimise, as functions of one temperature per sample.

All four see the logits only through the top-label confidence c(T) and the gap g of the label's own logit to the
largest, so that a table of c(T) serves them all (`confidence_table`):

    p_y(T) = exp(-g / T) c(T),    sum_k p_k(T)^2 = c(T)^2 / c(T / 2),

the latter since squaring exp(-g_k / T) halves T.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from smartlib.calibrators.confidence_table import ConfidenceTable, log_temperatures
from smartlib.calibrators.lbfgs import rounded
from smartlib.calibrators.temperature_network import MIN_TEMPERATURE, temperature_and_backward
from smartlib.softece import BANDWIDTH, DELTA, N_BINS, soft_ece_and_gradient
from smartlib.toplabel import confidence_of

OBJECTIVES = ("charbonnier", "softece", "nll", "brier")
# The solvers see confidences up to this temperature only.
MAX_TEMPERATURE = 100.0

Objective = Callable[[np.ndarray], tuple[float, np.ndarray]]
"""One temperature per sample, (N,), to the value and its derivative in each of them, (N,)."""


def table_for(objective: str, z: np.ndarray, scale: float = 1.0) -> ConfidenceTable:
    """The table of confidences that an objective needs for temperatures from 0.1 to 100 times ``scale``."""
    low = MIN_TEMPERATURE / 2 if objective == "brier" else MIN_TEMPERATURE
    return ConfidenceTable(z, scale * low, scale * MAX_TEMPERATURE)


def correct_and_gap(z: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Whether each prediction is right, as 0 and 1, and the gap of the label's logit to the largest, (N,) each."""
    return (z.argmax(axis=1) == y).astype(np.float64), z.max(axis=1).astype(np.float64) - z[np.arange(len(y)), y]


def objective_of_temperatures(
    objective: str,
    confidence: Callable,
    correct: np.ndarray,
    gap: np.ndarray,
    *,
    n_bins: int = N_BINS,
    bandwidth: float = BANDWIDTH,
    delta: float = DELTA,
) -> Objective:
    """An objective as a function of one temperature per sample.

    Args:
        objective: "charbonnier": Charbonnier-SoftECE; "softece": the same with delta = 0; "nll": mean negative
            log-likelihood, nats; "brier": mean squared distance of the probabilities to the label's unit vector.
        confidence: (N,) temperatures to confidences and their derivatives, (N,) each; a `ConfidenceTable`.
        correct, gap: (N,) each, see :func:`correct_and_gap`.
        n_bins, bandwidth, delta: of the Charbonnier-SoftECE.

    Source: paper (the first); standard (the others).
    """
    if objective in ("charbonnier", "softece"):
        return _soft_ece(confidence, correct, n_bins, bandwidth, delta if objective == "charbonnier" else 0.0)
    return {"nll": _nll, "brier": _brier}[objective](confidence, gap)


def objective_value(objective: str, z: np.ndarray, y: np.ndarray, t: np.ndarray, **settings: float) -> float:
    """The objective at the exact confidences rather than at those of a table."""

    def exact(t: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return confidence_of(z, t), np.zeros(len(t))  # the derivative is not asked for

    return objective_of_temperatures(objective, exact, *correct_and_gap(z, y), **settings)(t)[0]


def _soft_ece(confidence: Callable, correct: np.ndarray, n_bins: int, bandwidth: float, delta: float) -> Objective:
    def objective(t: np.ndarray) -> tuple[float, np.ndarray]:
        c, slope = confidence(t)
        value, gradient = soft_ece_and_gradient(c, correct, n_bins, bandwidth, delta)
        return value, gradient * slope

    return objective


def _nll(confidence: Callable, gap: np.ndarray) -> Objective:
    def objective(t: np.ndarray) -> tuple[float, np.ndarray]:
        c, slope = confidence(t)
        return float((gap / t - np.log(c)).mean()), -(gap / t**2 + slope / c) / len(t)

    return objective


def _brier(confidence: Callable, gap: np.ndarray) -> Objective:
    def objective(t: np.ndarray) -> tuple[float, np.ndarray]:
        (c, slope), (half, half_slope) = confidence(t), confidence(t / 2)
        own, squares = np.exp(-gap / t) * c, c**2 / half
        value = float((1 - 2 * own + squares).mean())
        own_slope = own * (gap / t**2 + slope / c)
        squares_slope = squares * (2 * slope / c - half_slope / (2 * half))
        return value, (squares_slope - 2 * own_slope) / len(t)

    return objective


def objective_of_parameters(
    objective: Objective, x: np.ndarray, hidden: tuple[int, ...], scale: float = 1.0
) -> Callable[[np.ndarray], tuple[float, np.ndarray]]:
    """An objective as a function of the parameters of a `temperature_network` at inputs x (N, D).

    The temperatures are ``scale`` times those of the network, which are held at the upper end of the table.
    """

    def value_and_gradient(theta: np.ndarray) -> tuple[float, np.ndarray]:
        t, backward = temperature_and_backward(theta, x, hidden)
        value, gradient = objective(scale * np.minimum(t, MAX_TEMPERATURE))
        gradient = backward(scale * gradient * (t <= MAX_TEMPERATURE))
        # Rounded also for Adam, so that its path is the same on every machine (see lbfgs.py).
        return float(rounded(value)), rounded(gradient)

    return value_and_gradient


def best_constant(objective: Objective, n: int) -> float:
    """The temperature between 0.1 and 100, at the nodes of the table, that is best for all n samples at once."""
    candidates = np.exp(log_temperatures(MIN_TEMPERATURE, MAX_TEMPERATURE)[1:])
    return float(min(candidates, key=lambda t: objective(np.full(n, t))[0]))
