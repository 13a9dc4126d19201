"""SMART: sample margin-aware recalibration of temperature.

A network of 49 parameters maps the margin m of a sample to its temperature,

    T(m) = softplus( sum_h v_h relu(w_h x + b_h) + c ) + 0.1,    x = (m - mean) / std,    h = 1 .. 16,

with mean and standard deviation of the validation margins. It is trained on validation data to minimise the
Charbonnier-SoftECE of the scaled top-label confidences (`smartlib.softece`). The predicted class never changes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.optimize import minimize
from sklearn.exceptions import ConvergenceWarning

from smartlib.arrays import row_chunks
from smartlib.calibrators.base import TemperatureCalibrator, warn
from smartlib.softece import BANDWIDTH, DELTA, N_BINS, check_settings, soft_ece_and_gradient
from smartlib.toplabel import confidence_of, margin_of

WIDTH = 16
MIN_TEMPERATURE = 0.1
# L-BFGS sees confidences up to this temperature only (ConfidenceTable).
MAX_TEMPERATURE = 100.0
# Below this many errors in the validation set SMART was seen to do worse than temperature scaling (notebook 04).
FEW_ERRORS = 25


class SMART(TemperatureCalibrator):
    """SMART with 49 parameters.

    Args:
        solver: "lbfgs" (default): full-batch L-BFGS from a fixed start, deterministic, no seed. "adam": the paper's
            recipe, Adam at learning rate 5e-3 for at most 2,000 full-batch epochs, stopped after 200 epochs without
            an improvement of ``tol``, best weights restored; depends on ``seed``.
        tol: L-BFGS stops when an iteration improves the objective by less; Adam counts an epoch as an improvement
            only when it gains more. Part of the method: minimising to the end over-fits (notebook 04).
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
        tol: float = 1e-4,
        max_iter: int | None = None,
        n_bins: int = N_BINS,
        bandwidth: float = BANDWIDTH,
        delta: float = DELTA,
        seed: int = 0,
        start_noise: float = 0.0,
    ):
        self.solver = solver
        self.tol = tol
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
        if self.max_iter is not None and self.max_iter < 1:
            raise ValueError(f"max_iter must be at least 1 or None, got {self.max_iter!r}")
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
        theta, self.n_iter_, self.converged_ = _SOLVERS[self.solver](self, z, self._standardised(m), correct)
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
        at_ceiling = float(np.mean(t > MAX_TEMPERATURE / 1.02)) if self.solver == "lbfgs" else 0.0
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

        check_is_fitted(self)
        return self._map(np.atleast_1d(np.asarray(margin, dtype=np.float64)))

    def _temperatures(self, z: np.ndarray) -> np.ndarray:
        m = margin_of(z)
        low, high = self.margin_range_
        outside = float(np.mean((m < low) | (m > high)))
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


def _temperature_and_backward(theta: np.ndarray, x: np.ndarray):
    """T (N,) and a function from dH/dT (N,) to dH/dtheta (49,)."""
    w, b, v = theta[:-1].reshape(3, WIDTH)
    hidden = np.maximum(x[:, None] * w + b, 0.0)
    u = hidden @ v + theta[-1]

    def backward(grad_t: np.ndarray) -> np.ndarray:
        grad_u = grad_t / (1.0 + np.exp(-u))
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
    hinge = np.quantile(x, (np.arange(WIDTH) + 0.5) / WIDTH)
    w = np.where(np.arange(WIDTH) % 2 == 0, 1.0, -1.0)
    u = t0 - MIN_TEMPERATURE
    return np.concatenate([w, -w * hinge, np.zeros(WIDTH), [u + np.log(-np.expm1(-u))]])


def _fit_lbfgs(smart: SMART, z: np.ndarray, x: np.ndarray, correct: np.ndarray) -> tuple[np.ndarray, int, bool]:
    settings = (smart.n_bins, smart.bandwidth, smart.delta)
    table = ConfidenceTable(z, max_temperature=MAX_TEMPERATURE)
    constants = np.exp(table.nodes[1:])
    t0 = min(constants, key=lambda t: soft_ece_and_gradient(table(np.full(len(x), t))[0], correct, *settings)[0])
    start = _start(x, t0)
    if smart.start_noise:
        start = start + smart.start_noise * np.random.default_rng(smart.seed).standard_normal(len(start))

    def objective(theta: np.ndarray) -> tuple[float, np.ndarray]:
        t, backward = _temperature_and_backward(theta, x)
        confidence, slope = table(t)
        value, gradient = soft_ece_and_gradient(confidence, correct, *settings)
        return value, backward(gradient * slope)

    limit = 500 if smart.max_iter is None else smart.max_iter
    result = minimize(
        objective, start, jac=True, method="L-BFGS-B", options={"maxiter": limit, "ftol": smart.tol, "gtol": 0.0}
    )
    return result.x, int(result.nit), result.status != 1  # 1: iteration limit; a failed line search is the end


def _fit_adam(smart: SMART, z: np.ndarray, x: np.ndarray, correct: np.ndarray) -> tuple[np.ndarray, int, bool]:
    """The paper's recipe: full-batch Adam on the exact confidences."""
    import torch

    generator = torch.Generator().manual_seed(smart.seed)

    def uniform(
        fan_in: int, *shape: int
    ) -> torch.Tensor:  # torch.nn.Linear's initial distribution, without the global seed
        bound = fan_in**-0.5
        return (torch.rand(*shape, generator=generator, dtype=torch.float64) * 2 - 1) * bound

    parameters = [uniform(1, WIDTH), uniform(1, WIDTH), uniform(WIDTH, WIDTH), uniform(WIDTH, 1)]
    for parameter in parameters:
        parameter.requires_grad_(True)
    gaps = torch.from_numpy(np.minimum(z.max(axis=1, keepdims=True).astype(np.float64) - z, 1e6))
    x, correct = torch.from_numpy(x), torch.from_numpy(correct)
    centres = (torch.arange(smart.n_bins, dtype=torch.float64) + 0.5) / smart.n_bins
    optimizer = torch.optim.Adam(parameters, lr=5e-3)

    def loss_at_parameters() -> torch.Tensor:
        w, b, v, c = parameters
        t = torch.nn.functional.softplus(torch.relu(x[:, None] * w + b) @ v + c) + MIN_TEMPERATURE
        f = 1.0 / torch.exp(-gaps / t[:, None]).sum(dim=1)
        weights = torch.softmax(-((f[:, None] - centres) ** 2) / (2 * smart.bandwidth**2), dim=1)
        mass, gap = weights.mean(dim=0), ((correct - f)[:, None] * weights).mean(dim=0)
        # A bin so far from all confidences that its square underflows would have a gradient of 0 / 0.
        return torch.sqrt((gap**2 + (smart.delta * mass) ** 2).clamp_min(1e-300)).sum()

    limit = 2000 if smart.max_iter is None else smart.max_iter
    best, reference, waited, epoch = None, np.inf, 0, 0
    best_loss = np.inf
    while epoch < limit and waited < 200:
        epoch += 1
        optimizer.zero_grad()
        loss = loss_at_parameters()
        loss.backward()
        value = loss.item()
        if value < best_loss:  # a copy: the tensors go on changing
            best_loss, best = value, [p.detach().clone() for p in parameters]
        if value < reference - smart.tol:
            reference, waited = value, 0
        else:
            waited += 1
        optimizer.step()
    return torch.cat(best).numpy(), epoch, waited >= 200


_SOLVERS = {"lbfgs": _fit_lbfgs, "adam": _fit_adam}
