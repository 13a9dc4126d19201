"""Group calibration: learned soft groups of samples, a temperature per group, averaged over several groupings.

One grouping (the paper says partition) is a mixture of tempered softmaxes,

    p(y | x) = sum_g pi_g(x) softmax(z / T_g)_y,    pi(x) = softmax(W x),

where x are the logits or the features of the classifier, standardised. Each component keeps the order of the logits,
and so do the mixture and the average over groupings: the predicted class never changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.special import log_softmax, softmax
from sklearn.exceptions import ConvergenceWarning

from smartlib.arrays import as_count, row_chunks
from smartlib.calibrators.base import Calibrator, keep_predictions, warn
from smartlib.calibrators.confidence_table import ConfidenceTable
from smartlib.calibrators.lbfgs import minimise_lbfgs
from smartlib.calibrators.scaling import nll_temperature

# The logarithm of a group's temperature stays within this of that of temperature scaling: a factor of ten.
LOG_RANGE = 2.3
# A partition is done when so many iterations together lower its objective by less than so many nats. Around the start,
# where all groups have one temperature, there is a plateau on which half as many iterations may gain less than that.
PATIENCE, TOLERANCE = 10, 1e-5
# With fewer errors per input of the groups than this, GC has a worse NLL than temperature scaling on held-out parts of
# the public and shipped validation sets.
ERRORS_PER_INPUT = 2
# As an input of the groups, a logit further below the largest one than this many TS temperatures counts as just so far
# below. Its probability is nil either way, and a masked class is the same input whatever number masks it.
LOWEST_INPUT = -40.0
_LOWEST_EXPONENT = -700.0  # the last one with a normal exponential; denormals are slow, and their logarithm is not -inf


class GroupCalibration(Calibrator):
    """GC: temperatures of learned groups of samples, by maximum likelihood.

    The groups are a linear map of the standardised inputs with a softmax over groups. Weights and temperatures minimise
    NLL + ``penalty`` · mean(W²) on the validation data, by L-BFGS from random weights and the temperature of
    temperature scaling (TS). The log-probabilities of all partitions are averaged, and the rows normalised again.

    The input "logits" is (z - max z) / T of TS, held above -40, so that the scale of the logits and a number added to a
    row do not matter; a column that never varies is no input. On logits of public models all partitions end in the same
    two groups, whatever the random start (tests/test_groups.py), so the average matters little there.

    Args:
        inputs: "logits" (default), or "features": then ``fit`` and ``predict_proba`` need features.
        n_groups: groups of a partition. n_partitions: partitions, each from its own random weights.
        penalty: factor of the mean square of the weights.
        max_iter: limit of the L-BFGS iterations of a partition.
        seed: of the random weights.

    Attributes after fit:
        group_weight_: (U, G, D) of U partitions, G groups and D inputs. group_temperature_: (U, G).
        input_mean_, input_std_: (D,) standardisation of the inputs. input_low_, input_high_: (D,) their range; inputs
            outside it are taken as they are, and T stays between the temperatures of the groups.
        temperature_: that of TS.
        objective_: the penalised NLL of each partition, nats. n_iter_: iterations of each.
        converged_: False when ``max_iter`` ended one of the partitions.

    Source: Yang, Zhan and Gan 2023, "Beyond probability partitions: calibrating neural networks with semantic aware
        grouping" (two groups, twenty partitions, penalty 0.1, L-BFGS). The authors' code groups by features, and
        predicts with hard groups whose temperatures are fitted again; here, as in public comparisons on stored logits,
        the groups are made of logits and stay soft. Standardisation, start and stopping rule are ours.

    >>> rng = np.random.default_rng(0)
    >>> logits = 3 * rng.normal(size=(500, 4))
    >>> labels = (logits + rng.gumbel(size=logits.shape) * np.where(logits[:, :1] > 0, 1, 3)).argmax(axis=1)
    >>> gc = GroupCalibration(n_partitions=2).fit(logits, labels)
    >>> gc.group_temperature_.shape, gc.n_parameters
    ((2, 2), 20)
    """

    registry_name = "gc"
    learned = (
        "group_weight_",
        "group_temperature_",
        "input_mean_",
        "input_std_",
        "input_low_",
        "input_high_",
        "temperature_",
    )

    def __init__(
        self,
        *,
        inputs: str = "logits",
        n_groups: int = 2,
        n_partitions: int = 20,
        penalty: float = 0.1,
        max_iter: int = 200,
        seed: int = 0,
    ):
        self.inputs = inputs
        self.n_groups = n_groups
        self.n_partitions = n_partitions
        self.penalty = penalty
        self.max_iter = max_iter
        self.seed = seed

    @property
    def needs(self) -> tuple[str, ...]:
        """("features",) where the groups are made of them."""
        return ("features",) if self.inputs == "features" else ()

    @property
    def n_parameters(self) -> int:
        """Weights and temperatures of all partitions, known after the fit."""
        return self.group_weight_.size + self.group_temperature_.size

    def _fit(self, z: np.ndarray, y: np.ndarray, *, features: Any, head: Any) -> None:
        self._check_settings()
        self.temperature_, _ = nll_temperature(z, y)
        likelihood = _likelihood(z, y, self.temperature_)
        x = self._standardised_inputs(z, features)
        objective = _objective(x, likelihood, self.n_groups, self.penalty)
        rng = np.random.default_rng(self.seed)
        ends, self.objective_, self.n_iter_, n_limited = [], [], [], 0
        for _ in range(self.n_partitions):
            weight = rng.uniform(-1, 1, (self.n_groups, x.shape[1])) / np.sqrt(x.shape[1])
            weight *= x.any(axis=0)  # an input that never varies stays without weight
            theta, values, converged = minimise_lbfgs(
                objective,
                np.concatenate([weight.ravel(), np.zeros(self.n_groups)]),
                max_iter=self.max_iter,
                is_done=lambda values: len(values) > PATIENCE and values[-1 - PATIENCE] - values[-1] < TOLERANCE,
            )
            ends.append(theta)
            self.objective_.append(values[-1])
            self.n_iter_.append(len(values) - 1)
            n_limited += not converged
        weights, log_factors = np.split(np.array(ends), [-self.n_groups], axis=1)
        self.group_weight_ = weights.reshape(self.n_partitions, self.n_groups, -1)
        self.group_temperature_ = self.temperature_ * np.exp(_within_range(log_factors))
        self.converged_ = n_limited == 0
        self._warn_about_partitions(n_limited, float(np.mean(np.abs(log_factors) >= LOG_RANGE)))

    def _check_settings(self) -> None:
        if self.inputs not in ("logits", "features"):
            raise ValueError(f'inputs must be "logits" or "features", got {self.inputs!r}')
        for name in ("n_groups", "n_partitions", "max_iter"):
            as_count(getattr(self, name), name)
        if not 0 <= self.penalty < np.inf:
            raise ValueError(f"penalty must be at least 0 and finite, got {self.penalty!r}")

    def _warn_about_partitions(self, n_limited: int, at_end: float) -> None:
        n_inputs = len(self.input_mean_)
        if 0 < self.n_errors_ < ERRORS_PER_INPUT * n_inputs:
            warn(
                f"GroupCalibration: only {self.n_errors_} of {self.n_samples_} validation predictions are wrong; with "
                f"fewer than {ERRORS_PER_INPUT} errors for each of the {n_inputs} inputs of the groups "
                "TemperatureScaling is the safer choice."
            )
        if n_limited:
            warn(
                f"GroupCalibration: {n_limited} of {self.n_partitions} partitions stopped at the limit of "
                f"{self.max_iter} iterations; raise max_iter.",
                ConvergenceWarning,
            )
        if at_end:
            warn(
                f"GroupCalibration: {at_end:.0%} of the group temperatures are at an end of their range, a tenth "
                f"or ten times the T = {self.temperature_:.3g} of temperature scaling; the data do not determine them."
            )

    def _inputs(self, z: np.ndarray, features: np.ndarray | None, rows: slice) -> np.ndarray:
        """(n, D) float64 inputs of the groups, before standardisation."""
        if features is not None:
            return features[rows].astype(np.float64)
        return np.maximum(_divided(_below_top(z[rows]), self.temperature_), LOWEST_INPUT)

    def _standardised_inputs(self, z: np.ndarray, features: np.ndarray | None) -> np.ndarray:
        """All inputs, float32; learns mean, standard deviation and range."""
        n, d = (z if features is None else features).shape
        total, square = np.zeros(d), np.zeros(d)
        for rows in row_chunks(n, d):
            total += self._inputs(z, features, rows).sum(axis=0)
        self.input_mean_ = total / n
        self.input_low_, self.input_high_ = np.full(d, np.inf), np.full(d, -np.inf)
        for rows in row_chunks(n, d):
            inputs = self._inputs(z, features, rows)
            self.input_low_ = np.minimum(self.input_low_, inputs.min(axis=0))
            self.input_high_ = np.maximum(self.input_high_, inputs.max(axis=0))
            square += ((inputs - self.input_mean_) ** 2).sum(axis=0)
        std = np.sqrt(square / n)
        varies = std > 1e-7 * np.hypot(std, self.input_mean_)  # equal numbers have a std of rounding errors
        self.input_std_ = np.where(varies, std, 1.0)
        x = np.empty((n, d), dtype=np.float32)
        for rows in row_chunks(n, d):
            x[rows] = (self._inputs(z, features, rows) - self.input_mean_) / self.input_std_ * varies
        return x

    def _predict_proba(self, z: np.ndarray, dtype: type, *, features: Any) -> np.ndarray:
        result, n_outside = np.empty(z.shape, dtype=dtype), 0
        for rows in row_chunks(len(z), 4 * max(z.shape[1], len(self.input_mean_))):
            inputs = self._inputs(z, features, rows)
            n_outside += np.count_nonzero((inputs < self.input_low_) | (inputs > self.input_high_))
            x = (inputs - self.input_mean_) / self.input_std_
            below = _below_top(z[rows])
            log_p = np.zeros_like(below)
            for weight, temperature in zip(self.group_weight_, self.group_temperature_, strict=True):
                group = softmax(x @ weight.T, axis=1)
                p = np.zeros_like(below)
                for g, t in enumerate(temperature):
                    part = np.exp(np.maximum(_divided(below, t), _LOWEST_EXPONENT))
                    part *= (group[:, g] / part.sum(axis=1))[:, None]
                    p += part
                log_p += np.log(p)
            log_p /= len(self.group_weight_)
            log_p[np.isneginf(below)] = -np.inf
            result[rows] = softmax(log_p, axis=1)
            keep_predictions(result[rows], z[rows].argmax(axis=1))
        outside = n_outside / (len(z) * len(self.input_mean_))
        if outside > 0.01:
            warn(
                f"GroupCalibration: {outside:.1%} of the inputs lie outside the fitted range, where the groups are "
                "extrapolated. Fit on data like those to be calibrated."
            )
        return result


def _below_top(z: np.ndarray) -> np.ndarray:
    """z - max z of each row, float64."""
    below = z.astype(np.float64, order="C")  # the last digits of products depend on the layout
    below -= below.max(axis=1, keepdims=True)
    return below


def _divided(below: np.ndarray, t: float) -> np.ndarray:
    with np.errstate(over="ignore"):  # a mask near the lowest number, at T < 1, is -inf
        return below / t


def _within_range(log_factors: np.ndarray) -> np.ndarray:
    return np.clip(log_factors, -LOG_RANGE, LOG_RANGE)


def _likelihood(z: np.ndarray, y: np.ndarray, t: float) -> Callable[[float], tuple[np.ndarray, np.ndarray]]:
    """A function from a to log softmax(z / (t e^a))_y of all samples and its derivative in a, each (N,).

    It costs O(N) per call, since log p_y = (z_y - max z) / T + log c(T), and c is tabulated (see ConfidenceTable).
    """
    own, tables = [], []
    for rows in row_chunks(len(z), 4 * z.shape[1]):
        below = _divided(_below_top(z[rows]), t)
        own.append(below[np.arange(len(below)), y[rows]])
        tables.append(ConfidenceTable(below, 0.1, 10.0))
    own = np.concatenate(own)

    def likelihood(a: float) -> tuple[np.ndarray, np.ndarray]:
        factor = np.exp(a)
        parts = [table(np.full(len(table.value), factor)) for table in tables]
        confidence, slope = (np.concatenate(part) for part in zip(*parts, strict=True))
        return own / factor + np.log(confidence), slope * factor / confidence - own / factor

    return likelihood


def _objective(x: np.ndarray, likelihood: Callable, n_groups: int, penalty: float) -> Callable:
    """The penalised NLL of one partition: theta (G D + G,) = weights and log(T_g / T) -> value and gradient.

    With pi = softmax(W x) and r_g the share of group g in p(y | x), the gradient of -log p(y | x) is
    -(r_g - pi_g) x in W_g, and -r_g d log softmax(z / T_g)_y / d log T_g in log T_g.
    """
    n, d = x.shape

    def objective(theta: np.ndarray) -> tuple[float, np.ndarray]:
        weight, given = theta[:-n_groups].reshape(n_groups, d), theta[-n_groups:]
        a = _within_range(given)
        log_own, slope = (np.stack(parts, axis=1) for parts in zip(*map(likelihood, a), strict=True))
        nll, weight_gradient, a_gradient = 0.0, np.zeros_like(weight), np.zeros(n_groups)
        for rows in row_chunks(n, 16 * d):  # short chunks stay in the cache
            chunk = x[rows].astype(np.float64)
            log_group = log_softmax(chunk @ weight.T, axis=1)
            joint = log_group + log_own[rows]
            log_p = np.logaddexp.reduce(joint, axis=1, keepdims=True)
            share = np.exp(joint - log_p)
            nll -= log_p.sum()
            weight_gradient -= (share - np.exp(log_group)).T @ chunk
            a_gradient -= (share * slope[rows]).sum(axis=0)
        value = nll / n + penalty * np.mean(weight**2)
        weight_gradient = weight_gradient / n + 2 * penalty * weight / weight.size
        return value, np.concatenate([weight_gradient.ravel(), np.where(a == given, a_gradient / n, 0.0)])

    return objective
