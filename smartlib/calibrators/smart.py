"""SMART: sample margin-aware recalibration of temperature.

A network of 49 parameters maps the margin m of a sample to its temperature,

    T(m) = softplus( sum_h v_h relu(w_h x + b_h) + c ) + 0.1,    x = (m - mean) / std,    h = 1 .. 16,

with mean and standard deviation of the validation margins. It is trained on validation data to minimise the
Charbonnier-SoftECE of the scaled top-label confidences (`smartlib.softece`). The predicted class never changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.special import expit
from sklearn.exceptions import ConvergenceWarning

from smartlib.arrays import row_chunks
from smartlib.calibrators.base import TemperatureCalibrator, warn
from smartlib.calibrators.lbfgs import minimise_lbfgs, rounded
from smartlib.softece import BANDWIDTH, DELTA, N_BINS, check_settings, soft_ece_and_gradient
from smartlib.toplabel import confidence_of, margin_of

WIDTH = 16
MIN_TEMPERATURE = 0.1
# The solvers see confidences up to this temperature only (ConfidenceTable).
MAX_TEMPERATURE = 100.0
# With fewer errors than this in the validation set SMART does worse than temperature scaling on most of the shipped
# models (notebook 04, on validation data).
FEW_ERRORS = 100


class SMART(TemperatureCalibrator):
    """SMART with 49 parameters.

    Args:
        solver: "lbfgs" (default): full-batch L-BFGS from a fixed start, deterministic, no seed. "adam": the paper's
            recipe, Adam at learning rate 5e-3, best weights restored; depends on ``seed``.
        tol, patience: stop when ``patience`` iterations together improve the objective by less than ``tol`` (Adam:
            when so many epochs in a row do not improve it by ``tol``). None is the solver's own: 1e-3, 10 for L-BFGS,
            1e-4, 200 for Adam. Part of the method: minimising to the end over-fits (notebook 04).
        max_iter: limit of the solver; None means 500 L-BFGS iterations or 2,000 Adam epochs.
        n_bins, bandwidth, delta: M, lambda and delta of the objective, see `smartlib.soft_ece`.
        seed: of Adam's initial weights, and of ``start_noise``.
        start_noise: standard deviation of Gaussian noise on the 49 starting values of L-BFGS, to study how much
            the result depends on the start.

    Attributes after fit:
        hidden_weight_, hidden_bias_, output_weight_: (16,) each; output_bias_: the 49 parameters.
        margin_mean_, margin_std_: standardisation of the margin, logit units.
        margin_range_: smallest and largest finite validation margin. Outside it T is held at the end's value.
        objective_: Charbonnier-SoftECE on the validation data at the returned parameters.
        loss_curve_: the objective after each iteration or epoch, as the solver saw it (to 1e-4, see ConfidenceTable).
        n_iter_: iterations or epochs done. converged_: False when stopped by ``max_iter``.

    Source: paper. The L-BFGS solver, its start and stopping rule, and the constant extrapolation are ours.

    >>> SMART().n_parameters
    49
    """

    registry_name = "smart"
    n_parameters = 3 * WIDTH + 1
    learned = ("hidden_weight_", "hidden_bias_", "output_weight_", "output_bias_",
               "margin_mean_", "margin_std_", "margin_range_")  # fmt: skip

    def __init__(
        self,
        *,
        solver: str = "lbfgs",
        tol: float | None = None,
        patience: int | None = None,
        max_iter: int | None = None,
        n_bins: int = N_BINS,
        bandwidth: float = BANDWIDTH,
        delta: float = DELTA,
        seed: int = 0,
        start_noise: float = 0.0,
    ):
        self.solver = solver
        self.tol = tol
        self.patience = patience
        self.max_iter = max_iter
        self.n_bins = n_bins
        self.bandwidth = bandwidth
        self.delta = delta
        self.seed = seed
        self.start_noise = start_noise

    def _fit(self, z: np.ndarray, y: np.ndarray, *, features: Any, head: Any) -> None:
        if self.solver not in _SOLVERS:
            raise ValueError(f"solver must be one of {', '.join(map(repr, _SOLVERS))}, got {self.solver!r}")
        check_settings(self.n_bins, self.bandwidth, self.delta)
        for name in ("max_iter", "patience"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1 or None, got {value!r}")
        m = margin_of(z)
        finite = m[np.isfinite(m)]
        low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
        self.margin_range_ = [low, high]
        self.margin_mean_ = float(finite.mean()) if finite.size else 0.0
        self.margin_std_ = float(finite.std()) if high > low else 1.0  # std of equal numbers may round to 1e-17
        if not high > low:
            warn("SMART: all margins are equal, so T(m) is a single temperature.")
        if 0 < self.n_errors_ < FEW_ERRORS:
            warn(
                f"SMART: only {self.n_errors_} of {len(y)} validation predictions are wrong; with fewer than "
                f"{FEW_ERRORS} errors TemperatureScaling is the safer choice."
            )
        correct = (z.argmax(axis=1) == y).astype(np.float64)
        theta, self.loss_curve_, self.converged_ = _SOLVERS[self.solver](self, z, self._standardised(m), correct)
        self.n_iter_ = len(self.loss_curve_)
        self._set_parameters(theta)
        if not self.converged_:
            warn(
                f"SMART: the {self.solver} solver stopped at its limit of {self.n_iter_} iterations; raise max_iter.",
                ConvergenceWarning,
            )
        t = self._map(m)
        confidence = confidence_of(z, t)
        self.objective_ = soft_ece_and_gradient(confidence, correct, self.n_bins, self.bandwidth, self.delta)[0]
        at_floor = float(np.mean(t < MIN_TEMPERATURE * 1.02))
        if at_floor > 0.05:
            warn(
                f"SMART: T is at its floor of {MIN_TEMPERATURE} for {at_floor:.0%} of the samples. Logits of a small "
                "scale (a cosine or normalised head) need smaller temperatures: multiply all logits by a constant, "
                "for example so that their mean margin is about 10, before fit and predict_proba."
            )
        at_ceiling = float(np.mean(t > MAX_TEMPERATURE / 1.02))
        if at_ceiling > 0.05:
            warn(
                f"SMART: T is at its ceiling of {MAX_TEMPERATURE:g} for {at_ceiling:.0%} of the samples. Logits of a "
                "large scale need larger temperatures: divide all logits by a constant, for example so that their mean "
                "margin is about 10, before fit and predict_proba."
            )

    def _standardised(self, m: np.ndarray) -> np.ndarray:
        return (np.clip(m, *self.margin_range_) - self.margin_mean_) / self.margin_std_

    def _set_parameters(self, theta: np.ndarray) -> None:
        self.hidden_weight_, self.hidden_bias_, self.output_weight_ = theta[:-1].reshape(3, WIDTH).copy()
        self.output_bias_ = float(theta[-1])

    def _map(self, m: np.ndarray) -> np.ndarray:
        theta = np.concatenate([self.hidden_weight_, self.hidden_bias_, self.output_weight_, [self.output_bias_]])
        return _temperature(theta, self._standardised(m))

    def temperature_map(self, margin: Any) -> np.ndarray:
        """The learned map T(m), for pictures.

        Args:
            margin: scalar or (N,), logit units; outside ``margin_range_`` the end's value holds.

        Returns:
            (N,) float64, dimensionless, > 0.1.

        Raises:
            sklearn.exceptions.NotFittedError: before ``fit``.

        Source: paper.
        """
        from sklearn.utils.validation import check_is_fitted

        check_is_fitted(self, self.learned)
        return self._map(np.atleast_1d(np.asarray(margin, dtype=np.float64)))

    def _temperatures(self, z: np.ndarray) -> np.ndarray:
        m = margin_of(z)
        low, high = self.margin_range_
        outside = float(np.mean(((m < low) | (m > high)) & np.isfinite(m)))
        if outside > 0.01:
            warn(
                f"SMART: {outside:.1%} of the margins lie outside the fitted range {low:.3g} .. {high:.3g}; their "
                "temperature is that of the nearest fitted margin. Fit on data like those to be calibrated."
            )
        return self._map(m)


def _softplus(u: np.ndarray) -> np.ndarray:
    return np.logaddexp(0.0, u)


def _temperature(theta: np.ndarray, x: np.ndarray) -> np.ndarray:
    """T at standardised margins x (N,); theta (49,) = w (16), b (16), v (16), c."""
    w, b, v = theta[:-1].reshape(3, WIDTH)
    result = np.empty(len(x))
    for rows in row_chunks(len(x), WIDTH):
        hidden = np.maximum(x[rows, None] * w + b, 0.0)
        result[rows] = _softplus(hidden @ v + theta[-1]) + MIN_TEMPERATURE
    return result


def temperature_and_backward(theta: np.ndarray, x: np.ndarray):
    """T (N,) and a function from dH/dT (N,) to dH/dtheta (49,)."""
    w, b, v = theta[:-1].reshape(3, WIDTH)
    hidden = np.maximum(x[:, None] * w + b, 0.0)
    u = hidden @ v + theta[-1]

    def backward(grad_t: np.ndarray) -> np.ndarray:
        grad_u = grad_t * expit(u)
        active = (hidden > 0) * grad_u[:, None]
        return np.concatenate([(x @ active) * v, active.sum(axis=0) * v, grad_u @ hidden, [grad_u.sum()]])

    return _softplus(u) + MIN_TEMPERATURE, backward


class ConfidenceTable:
    """Top-label confidence of every sample as a function of T, tabulated once.

    The objective sees the logits only through c_i(T) = 1 / sum_k exp(-g_ik / T). Its negative logarithm and the
    derivative of that in u = log T are computed at nodes in u, one pass over N x K each, and interpolated by cubic
    Hermite pieces; every later evaluation costs O(N), whatever K is.

    Args:
        z: (N, K) checked logits.
        max_temperature: upper end of the table; T beyond it is taken at the end.
    """

    SPACING = 0.15  # in log T; the error in confidence is below 1e-4 at K = 100 (tests/test_smart.py)

    def __init__(self, z: np.ndarray, max_temperature: float):
        low, high = np.log(MIN_TEMPERATURE), np.log(max_temperature)
        self.nodes = np.linspace(low, high, int(np.ceil((high - low) / self.SPACING)) + 1)
        self.value = np.empty((len(z), len(self.nodes)))
        self.slope = np.empty_like(self.value)
        for rows in row_chunks(*z.shape):
            gaps = z[rows].max(axis=1, keepdims=True).astype(np.float64) - z[rows]
            # exp(-700) is the last normal number; without the clip, denormals slow the loop several times.
            for j, node in enumerate(self.nodes):
                scaled = np.minimum(gaps * np.exp(-node), 700.0)
                weight = np.exp(-scaled)
                total = weight.sum(axis=1)
                self.value[rows, j] = np.log(total)
                self.slope[rows, j] = (weight * scaled).sum(axis=1) / total

    def __call__(self, t: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Confidence and d confidence / dT, each (N,), at one temperature per sample."""
        u = np.log(t)
        step = self.nodes[1] - self.nodes[0]
        j = np.clip(((u - self.nodes[0]) / step).astype(int), 0, len(self.nodes) - 2)
        s = np.clip((u - self.nodes[j]) / step, 0.0, 1.0)
        row = np.arange(len(t))
        y0, y1 = self.value[row, j], self.value[row, j + 1]
        d0, d1 = self.slope[row, j] * step, self.slope[row, j + 1] * step
        # y0 + s d0 + s^2 (3 (y1 - y0) - 2 d0 - d1) + s^3 (2 (y0 - y1) + d0 + d1)
        square, cube = 3 * (y1 - y0) - 2 * d0 - d1, 2 * (y0 - y1) + d0 + d1
        confidence = np.exp(-(y0 + s * (d0 + s * (square + s * cube))))
        inside = (u >= self.nodes[0]) & (u <= self.nodes[-1])
        slope = np.where(inside, (d0 + s * (2 * square + 3 * s * cube)) / step, 0.0)
        return confidence, -confidence * slope / t


def _start(x: np.ndarray, t0: float) -> np.ndarray:
    """The start of L-BFGS: the constant map t0, with the 16 hinges at quantiles of the margin.

    The hinges look to the right and to the left in turn, so that both ends of the margin can bend.
    """
    values = np.unique(np.round(x, 9))
    # Half way between two margins: on a margin, the last digit would decide on which side of the hinge a sample lies.
    above = np.searchsorted(values, np.quantile(x, (np.arange(WIDTH) + 0.5) / WIDTH), side="right")
    above = np.clip(above, 1, max(len(values) - 1, 0))
    hinge = (values[above - 1] + values[above]) / 2
    w = np.where(np.arange(WIDTH) % 2 == 0, 1.0, -1.0)
    u = t0 - MIN_TEMPERATURE
    return np.concatenate([w, -w * hinge, np.zeros(WIDTH), [u + np.log(-np.expm1(-u))]])


def _objective(smart: SMART, table: ConfidenceTable, x: np.ndarray, correct: np.ndarray) -> Callable:
    """The training objective: theta (49,) -> (H, dH/dtheta)."""

    def objective(theta: np.ndarray) -> tuple[float, np.ndarray]:
        t, backward = temperature_and_backward(theta, x)
        confidence, slope = table(t)
        value, gradient = soft_ece_and_gradient(confidence, correct, smart.n_bins, smart.bandwidth, smart.delta)
        gradient = backward(gradient * slope)
        # Rounded also for Adam, so that its path is the same on every machine (see lbfgs.py).
        return float(rounded(value)), rounded(gradient)

    return objective


def _fit_lbfgs(smart: SMART, z: np.ndarray, x: np.ndarray, correct: np.ndarray) -> tuple[np.ndarray, list, bool]:
    table = ConfidenceTable(z, max_temperature=MAX_TEMPERATURE)

    def at_constant(t: float) -> float:
        confidence = table(np.full(len(x), t))[0]
        return soft_ece_and_gradient(confidence, correct, smart.n_bins, smart.bandwidth, smart.delta)[0]

    start = _start(x, min(np.exp(table.nodes[1:]), key=at_constant))
    if smart.start_noise:
        start = start + smart.start_noise * np.random.default_rng(smart.seed).standard_normal(len(start))
    tol, patience, limit = _stopping(smart, tol=1e-3, patience=10, limit=500)
    theta, values, converged = minimise_lbfgs(
        _objective(smart, table, x, correct),
        start,
        max_iter=limit,
        # Progress comes in bursts, so one slow iteration is no reason to stop (notebook 04).
        is_done=lambda values: len(values) > patience and values[-1 - patience] - values[-1] < tol,
    )
    return theta, values[1:], converged


def _fit_adam(smart: SMART, z: np.ndarray, x: np.ndarray, correct: np.ndarray) -> tuple[np.ndarray, list, bool]:
    """The paper's recipe: full-batch Adam from the random initial weights of torch's linear layers."""
    import torch

    generator = torch.Generator().manual_seed(smart.seed)
    # torch.nn.Linear draws from +- 1 / sqrt(fan in), but only from the global generator, which is not ours to move.
    bound = torch.cat([torch.ones(2 * WIDTH), torch.full((WIDTH + 1,), WIDTH**-0.5)]).double()
    theta = (torch.rand(len(bound), generator=generator, dtype=torch.float64) * 2 - 1) * bound
    optimizer = torch.optim.Adam([theta], lr=5e-3)
    objective = _objective(smart, ConfidenceTable(z, max_temperature=MAX_TEMPERATURE), x, correct)
    tol, patience, limit = _stopping(smart, tol=1e-4, patience=200, limit=2000)
    best, lowest, reference, waited, values = theta.numpy().copy(), np.inf, np.inf, 0, []
    while len(values) < limit and waited < patience:
        value, gradient = objective(theta.numpy())
        values.append(value)
        if value < lowest:  # a copy: theta goes on changing
            lowest, best = value, theta.numpy().copy()
        reference, waited = (value, 0) if value < reference - tol else (reference, waited + 1)
        theta.grad = torch.from_numpy(gradient)
        optimizer.step()
    return best, values, waited >= patience


def _stopping(smart: SMART, *, tol: float, patience: int, limit: int) -> tuple[float, int, int]:
    """The stopping rule: the settings where given, else the solver's own."""
    given = (smart.tol, smart.patience, smart.max_iter)
    return tuple(own if value is None else value for value, own in zip(given, (tol, patience, limit), strict=True))


_SOLVERS = {"lbfgs": _fit_lbfgs, "adam": _fit_adam}
