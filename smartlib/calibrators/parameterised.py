"""Parameterised temperature scaling: the temperature of a sample from its largest logits, by a small network."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.validation import check_is_fitted

from smartlib.arrays import row_chunks
from smartlib.calibrators import temperature_network as network
from smartlib.calibrators.base import TemperatureCalibrator, warn
from smartlib.calibrators.lbfgs import minimise_lbfgs
from smartlib.calibrators.scaling import TemperatureScaling
from smartlib.calibrators.temperature_objectives import (
    objective_of_parameters,
    objective_of_temperatures,
    objective_value,
    table_for,
)

N_LOGITS = 10
HIDDEN = (5, 5)
# A class whose logit trails the largest by more than so many temperatures (of temperature scaling) has no probability,
# whether it was masked by -inf or by -1e9.
_ABSENT = 1000.0
# The stopping rule, chosen on halves of the validation data of the shipped models: ten iterations that together lower
# the Brier score by less than this.
_TOL, _PATIENCE = 1e-4, 10


class ParameterisedTemperatureScaling(TemperatureCalibrator):
    """Parameterised temperature scaling (PTS).

    The ten largest logits of a sample (all of them where K < 10), in descending order, divided by the temperature of
    temperature scaling and standardised, are the inputs of a network with two hidden layers of five units; T is that
    temperature times the network's output. The network minimises the Brier score of the validation data.

    The paper divides raw logits by the absolute value of the output and trains by Adam for a fixed number of steps; the
    results vary with the seed. Here every start begins at temperature scaling, L-BFGS follows it until ten iterations
    gain less than 1e-4, and the best of ``n_starts`` ends is kept. A constant added to all logits of a row does change
    its temperature, as in the paper: the fit and what follows need logits of the same kind.

    Args:
        n_starts: random starts.
        max_iter: limit of L-BFGS iterations of each.
        seed: of the starts.

    Attributes after fit:
        scale_: the temperature of temperature scaling.
        hidden_weight_ (J, 5), hidden_bias_ (5,), second_hidden_weight_ (5, 5), second_hidden_bias_ (5,), output_weight_
            (5,), output_bias_: the network, J = min(10, K).
        input_mean_, input_std_, input_low_, input_high_: (J,) of each input on the validation data, in units of
            ``scale_``. Inputs outside are taken at the end of the range. A class with logit -inf, or more than 1,000
            ``scale_`` below the largest, takes no part in them and is taken at ``input_low_``.
        objective_: Brier score on the validation data.
        n_iter_: iterations of the start that was kept. converged_: False when stopped by ``max_iter``.

    Source: Tomani, Cremers and Buettner 2022. The scale, the limits, the solver, its starts and its stopping rule are
        ours.

    >>> rng = np.random.default_rng(0)
    >>> logits = 2 * rng.normal(size=(500, 3))
    >>> labels = (logits + rng.gumbel(size=logits.shape)).argmax(axis=1)       # drawn from the softmax of the logits
    >>> pts = ParameterisedTemperatureScaling(n_starts=1).fit(3 * logits, labels)
    >>> bool(abs(np.median(pts.temperatures(3 * logits)) - 3) < 0.5)
    True
    """

    registry_name = "pts"
    learned = (
        "scale_",
        *network.attribute_names(len(HIDDEN)),
        "input_mean_",
        "input_std_",
        "input_low_",
        "input_high_",
    )

    def __init__(self, *, n_starts: int = 5, max_iter: int = 500, seed: int = 0):
        self.n_starts = n_starts
        self.max_iter = max_iter
        self.seed = seed

    @property
    def n_parameters(self) -> int:
        check_is_fitted(self, self.learned)
        return network.count_parameters(len(self.input_mean_), HIDDEN)

    def _fit(self, z: np.ndarray, y: np.ndarray, *, features: Any, head: Any) -> None:
        for name in ("n_starts", "max_iter"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        ts = TemperatureScaling()
        ts._fit(z, y, features=None, head=None)
        self.scale_ = ts.temperature_
        inputs = _largest(z, self.scale_)
        present = np.isfinite(inputs)
        columns = [
            column[here] if here.any() else np.zeros(1) for column, here in zip(inputs.T, present.T, strict=True)
        ]
        self.input_low_, self.input_high_, self.input_mean_ = (
            np.array([statistic(column) for column in columns]) for statistic in (np.min, np.max, np.mean)
        )
        std = np.array([np.std(column) for column in columns])
        self.input_std_ = np.where(self.input_high_ > self.input_low_, std, 1.0)
        x = self._standardised(inputs)
        brier = objective_of_temperatures("brier", table_for("brier", z, self.scale_), z, y)
        objective = objective_of_parameters(brier, x, HIDDEN, self.scale_)
        ends = [
            minimise_lbfgs(
                objective,
                _start(self.seed, number, x.shape[1]),
                max_iter=self.max_iter,
                is_done=lambda values: len(values) > _PATIENCE and values[-1 - _PATIENCE] - values[-1] < _TOL,
            )
            for number in range(self.n_starts)
        ]
        theta, values, self.converged_ = min(ends, key=lambda end: end[1][-1])
        self.n_iter_ = len(values) - 1
        network.store_parameters(self, theta, x.shape[1], HIDDEN)
        self.objective_ = objective_value("brier", z, y, self._at(x))
        if not self.converged_:
            warn(
                f"ParameterisedTemperatureScaling: L-BFGS stopped at its limit of {self.max_iter} iterations; raise "
                "max_iter.",
                ConvergenceWarning,
            )

    def _standardised(self, inputs: np.ndarray) -> np.ndarray:
        held = np.clip(inputs, self.input_low_, self.input_high_)
        return (held - self.input_mean_) / self.input_std_

    def _at(self, x: np.ndarray) -> np.ndarray:
        theta, hidden = network.stored_parameters(self)
        return self.scale_ * network.temperature(theta, x, hidden)

    def _temperatures(self, z: np.ndarray) -> np.ndarray:
        inputs = _largest(z, self.scale_)
        beyond = (inputs < self.input_low_) | (inputs > self.input_high_)
        outside = float(np.mean(beyond & np.isfinite(inputs)))
        if outside > 0.01:
            warn(
                f"ParameterisedTemperatureScaling: {outside:.1%} of the inputs lie outside their fitted ranges and are "
                "taken at the nearest end. Fit on data like those to be calibrated."
            )
        return self._at(self._standardised(inputs))


def _largest(z: np.ndarray, scale: float) -> np.ndarray:
    """The largest logits of each row in descending order, in units of the scale, (N, J); -inf for absent classes."""
    n_classes = z.shape[1]
    n = min(N_LOGITS, n_classes)
    result = np.empty((len(z), n))
    for rows in row_chunks(*z.shape):
        result[rows] = np.sort(np.partition(z[rows], n_classes - n, axis=1)[:, n_classes - n :], axis=1)[:, ::-1]
    result /= scale
    result[result < result[:, :1] - _ABSENT] = -np.inf
    return result


def _start(seed: int, number: int, n_inputs: int) -> np.ndarray:
    """A start at the temperature of temperature scaling: output weights 0, hidden layers drawn as torch does.

    Weights and biases are uniform within +- 1 / sqrt(width of the layer before). They are drawn for ten inputs, so that
    a class that is absent everywhere changes nothing.
    """
    rng = np.random.default_rng([seed, number])
    first = rng.uniform(-1, 1, (N_LOGITS, HIDDEN[0]))[:n_inputs] / np.sqrt(N_LOGITS)
    bias = rng.uniform(-1, 1, HIDDEN[0]) / np.sqrt(N_LOGITS)
    second = rng.uniform(-1, 1, (HIDDEN[0] + 1) * HIDDEN[1]) / np.sqrt(HIDDEN[0])
    return np.concatenate([first.ravel(), bias, second, np.zeros(HIDDEN[1]), [network.constant(1.0)]])
