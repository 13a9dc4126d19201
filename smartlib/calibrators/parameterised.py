"""Parameterised temperature scaling: the temperature of a sample from its largest logits, by a small network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.validation import check_is_fitted

from smartlib.arrays import as_count, row_chunks
from smartlib.calibrators import temperature_network as network
from smartlib.calibrators.base import TemperatureCalibrator, warn
from smartlib.calibrators.lbfgs import minimise_lbfgs, rounded
from smartlib.calibrators.scaling import nll_temperature
from smartlib.calibrators.temperature_objectives import (
    correct_and_gap,
    objective_of_parameters,
    objective_of_temperatures,
    objective_value,
    table_for,
)
from smartlib.toplabel import confidence_of

N_LOGITS = 10
HIDDEN = (5, 5)
# A class whose logit trails the largest by more than so many temperatures (of temperature scaling) has no probability,
# whether it was masked by -inf or by -1e9.
_ABSENT = 1000.0
# Iterations without a gain on the half that is kept back, after which a start is given up.
_PATIENCE = 20


class ParameterisedTemperatureScaling(TemperatureCalibrator):
    """Parameterised temperature scaling (PTS).

    The ten largest logits of a sample (all of them where K < 10), in descending order, divided by the temperature of
    temperature scaling and standardised, are the inputs of a network with two hidden layers of five units; T is that
    temperature times the network's output. What is minimised is the Brier score.

    The paper divides raw logits by the absolute value of the output and trains by Adam for a fixed number of steps; the
    results vary with the seed, and minimised to the end 91 parameters over-fit. Here every start begins at temperature
    scaling and lowers the Brier score of half of the validation data by L-BFGS; of all iterates of all starts the one
    is kept whose negative log-likelihood on the other half is lowest, which may be temperature scaling itself. The
    halves are every other sample in the order of their logits, so that neither chance nor the order of the samples
    enters. (Chosen on halves of the validation data of the shipped models: stopped by progress alone, at any tolerance,
    the result was worse than temperature scaling, and with the Brier score as the judge worse and less stable.)

    A constant added to all logits of a row changes its temperature, as in the paper: the data to be calibrated need
    logits of the same kind as the validation data.

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
        objective_: Brier score on all validation data.
        loss_curve_: negative log-likelihood (nats) of the half that is kept back, at the start and after each iteration
            of the start that was kept, as the solver saw it (to 1e-4, see ConfidenceTable).
        n_iter_: how many iterations that start did. converged_: False when it was stopped by ``max_iter``.

    Source: Tomani, Cremers and Buettner 2022. The scale, the limits, the solver, its starts and the half that is kept
        back are ours.

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
            as_count(getattr(self, name), name)
        temperature, _ = nll_temperature(z, y)
        self.scale_ = float(rounded(temperature))  # its last digits must not decide the path of the solver
        inputs = _largest(z, self.scale_)
        self._set_standardisation(inputs)
        x, (correct, gap) = self._standardised(inputs), correct_and_gap(z, y)
        table = table_for("brier", z, self.scale_)

        def objective_on(rows: np.ndarray, name: str) -> Callable[[np.ndarray], tuple[float, np.ndarray]]:
            objective = objective_of_temperatures(name, table.of(rows), correct[rows], gap[rows])
            return objective_of_parameters(objective, x[rows], HIDDEN, self.scale_)

        first, second = _halves(inputs, gap, confidence_of(z, self.scale_))
        fitting, kept_back = objective_on(first, "brier"), objective_on(second, "nll")
        starts = [_start(self.seed, number, x.shape[1]) for number in range(self.n_starts)]
        ends = [_follow(fitting, kept_back, start, self.max_iter) for start in starts]
        theta, self.loss_curve_, self.converged_ = min(ends, key=lambda end: min(end[1]))
        self.n_iter_ = len(self.loss_curve_) - 1
        network.store_parameters(self, theta, x.shape[1], HIDDEN)
        self.objective_ = objective_value("brier", z, y, self._at(x))
        if not self.converged_:
            warn(
                f"ParameterisedTemperatureScaling: L-BFGS stopped at its limit of {self.max_iter} iterations; raise "
                "max_iter.",
                ConvergenceWarning,
            )

    def _set_standardisation(self, inputs: np.ndarray) -> None:
        present = np.isfinite(inputs)
        columns = [
            values[here] if here.any() else np.zeros(1) for values, here in zip(inputs.T, present.T, strict=True)
        ]
        self.input_low_, self.input_high_, self.input_mean_, std = (
            np.array([statistic(values) for values in columns]) for statistic in (np.min, np.max, np.mean, np.std)
        )
        self.input_std_ = np.where(self.input_high_ > self.input_low_, std, 1.0)

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
                f"ParameterisedTemperatureScaling: {outside:.1%} of the inputs lie outside the fitted ranges and are "
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
    with np.errstate(over="ignore"):  # a mask near the lowest number, at a scale < 1, is -inf
        result /= scale
    result[result < result[:, :1] - _ABSENT] = -np.inf
    return result


def _halves(inputs: np.ndarray, gap: np.ndarray, confidence: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Indices of every other sample, in the order of the largest logits, of the gap of the label, and of the
    confidence, in which the other logits show. Samples that tie in all of these are alike. A single sample is in both
    halves."""
    order = np.lexsort([np.round(confidence, 9), gap, *inputs.T[::-1]])
    return order[::2], order[1::2] if len(order) > 1 else order


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


def _follow(fitting: Callable, kept_back: Callable, start: np.ndarray, max_iter: int) -> tuple[np.ndarray, list, bool]:
    """The iterate of L-BFGS on one half that is best on the other; the values there; whether it ended by itself."""
    last, iterates, values = start, [start], [kept_back(start)[0]]

    def objective(theta: np.ndarray) -> tuple[float, np.ndarray]:
        nonlocal last
        last = theta
        return fitting(theta)

    def is_done(_: list[float]) -> bool:  # after an iteration, when its end was the last to be evaluated
        iterates.append(last)
        values.append(kept_back(last)[0])
        return len(values) - 1 - int(np.argmin(values)) >= _PATIENCE

    _, _, converged = minimise_lbfgs(objective, start, max_iter=max_iter, is_done=is_done)
    return iterates[int(np.argmin(values))], values, converged
