"""SMART: sample margin-aware recalibration of temperature.

A network of 49 parameters maps the margin m of a sample to its temperature,

    T(m) = softplus( sum_h v_h relu(w_h x + b_h) + c ) + 0.1,    x = (m - mean) / std,    h = 1 .. 16,

with mean and standard deviation of the validation margins. It is trained on validation data to minimise the
Charbonnier-SoftECE of the scaled top-label confidences (`smartlib.softece`). The predicted class never changes.

Three parts can be exchanged, to see what each contributes (notebook 09): the signal (`smartlib.hardness`), the network
(`temperature_network`) and the objective (`temperature_objectives`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.validation import check_is_fitted

from smartlib.arrays import as_count
from smartlib.calibrators import temperature_network as network
from smartlib.calibrators.base import TemperatureCalibrator, warn
from smartlib.calibrators.lbfgs import minimise_lbfgs
from smartlib.calibrators.temperature_network import MIN_TEMPERATURE
from smartlib.calibrators.temperature_objectives import (
    MAX_TEMPERATURE,
    OBJECTIVES,
    Objective,
    best_constant,
    correct_and_gap,
    objective_of_parameters,
    objective_of_temperatures,
    objective_value,
    table_for,
)
from smartlib.hardness import check_signal, hardness_of
from smartlib.softece import BANDWIDTH, DELTA, N_BINS, check_settings

# With fewer errors than this in the validation set SMART does worse than temperature scaling on most of the shipped
# models (notebook 04, on validation data).
FEW_ERRORS = 100
# A margin of 37 T makes the confidence 1 to the last digit. Beyond this one that holds at every temperature up to 100,
# as it does for an infinite margin: a class alone in its row, whether the others are masked by -inf or by -1e9.
CERTAIN_MARGIN = 37 * MAX_TEMPERATURE
_PLURAL = {
    "margin": "margins", "max_logit": "maximum logits", "confidence": "confidences", "entropy": "entropies",
    "energy": "energies", "soft_tail_margin": "soft-tail margins",
}  # fmt: skip


class SMART(TemperatureCalibrator):
    """SMART, by default with 49 parameters.

    Args:
        hidden: widths of one or two hidden layers: (16,) are the paper's 49 parameters, (16, 16) are 321.
        objective: "charbonnier" (the paper's Charbonnier-SoftECE), "softece" (the same with delta = 0, whose
            kinks end L-BFGS early), "nll", "brier".
        signal: from which number the temperature is learned, one of `smartlib.hardness.SIGNALS`. Not "max_logit" or
            "energy" where the logits are z - max z or log-probabilities: these have lost it.
        solver: "lbfgs" (default): full-batch L-BFGS from a fixed start, deterministic, no seed. "adam": the paper's
            recipe, Adam at learning rate 5e-3, best weights restored; depends on ``seed``.
        tol, patience: stop when ``patience`` iterations together improve the objective by less than ``tol`` (Adam:
            when so many epochs in a row do not improve it by ``tol``). None is the solver's own: 1e-3, 10 for L-BFGS,
            1e-4, 200 for Adam. Part of the method: minimising to the end over-fits (notebook 04). On halves of the
            validation data of the shipped models the same rule is the best one for "nll" and "brier" too: smaller
            ``tol`` makes the held-out NLL worse.
        max_iter: limit of the solver; None means 500 L-BFGS iterations or 2,000 Adam epochs.
        n_bins, bandwidth, delta: M, lambda and delta of the objective, see `smartlib.soft_ece`.
        seed: of Adam's initial weights, and of ``start_noise``.
        start_noise: standard deviation of Gaussian noise on the starting values of L-BFGS, to study how much the
            result depends on the start.

    Attributes after fit:
        hidden_weight_, hidden_bias_, output_weight_: (16,) each; output_bias_: the 49 parameters. With hidden =
            (H1, H2) they are (H1,), (H1,) and (H2,), and second_hidden_weight_ (H1, H2), second_hidden_bias_ (H2,) come
            between them.
        margin_mean_, margin_std_: standardisation of the margin, logit units; of the signal where it is another.
        margin_range_: its smallest and largest finite value on the validation data. Outside it T is held at the end's
            value. Margins above 3,700, whose confidence is 1 at every T up to 100, are left out, as infinite ones are.
        objective_: the objective on the validation data at the returned parameters.
        loss_curve_: the objective after each iteration or epoch, as the solver saw it (to 1e-4, see ConfidenceTable).
        n_iter_: iterations or epochs done. converged_: False when stopped by ``max_iter``.

    Source: paper. The L-BFGS solver, its start and stopping rule, and the constant extrapolation are ours.

    >>> SMART().n_parameters, SMART(hidden=(16, 16)).n_parameters
    (49, 321)
    """

    registry_name = "smart"

    def __init__(
        self,
        *,
        hidden: tuple[int, ...] = (16,),
        objective: str = "charbonnier",
        signal: str = "margin",
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
        self.hidden = tuple(hidden) if isinstance(hidden, list) else hidden  # JSON knows lists only
        self.objective = objective
        self.signal = signal
        self.solver = solver
        self.tol = tol
        self.patience = patience
        self.max_iter = max_iter
        self.n_bins = n_bins
        self.bandwidth = bandwidth
        self.delta = delta
        self.seed = seed
        self.start_noise = start_noise

    @property
    def n_parameters(self) -> int:
        return network.count_parameters(1, network.check_hidden(self.hidden))

    @property
    def learned(self) -> tuple[str, ...]:
        return (*network.attribute_names(len(self.hidden)), "margin_mean_", "margin_std_", "margin_range_")

    def _fit(self, z: np.ndarray, y: np.ndarray, *, features: Any, head: Any) -> None:
        self._check_settings()
        s = hardness_of(z, self.signal)
        of_margins = self.signal in ("margin", "soft_tail_margin")
        finite = s[s <= CERTAIN_MARGIN] if of_margins else s
        low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
        self.margin_range_ = [low, high]
        self.margin_mean_ = float(finite.mean()) if finite.size else 0.0
        self.margin_std_ = float(finite.std()) if high > low else 1.0  # std of equal numbers may round to 1e-17
        if not high > low:
            warn(f"SMART: all {_PLURAL[self.signal]} are equal, so T is the same for every sample.")
        if 0 < self.n_errors_ < FEW_ERRORS:
            warn(
                f"SMART: only {self.n_errors_} of {len(y)} validation predictions are wrong; with fewer than "
                f"{FEW_ERRORS} errors TemperatureScaling is the safer choice."
            )
        objective = training_objective(self, z, y)
        solve = _SOLVERS[self.solver]
        theta, self.loss_curve_, self.converged_ = solve(self, objective, self._inputs(s))
        self.n_iter_ = len(self.loss_curve_)
        network.store_parameters(self, theta, 1, network.check_hidden(self.hidden))
        if not self.converged_:
            warn(
                f"SMART: the {self.solver} solver stopped at its limit of {self.n_iter_} iterations; raise max_iter.",
                ConvergenceWarning,
            )
        t = self._map(s)
        self.objective_ = objective_value(self.objective, z, y, t, **_soft_bins(self))
        self._warn_about_bounds(t)

    def _check_settings(self) -> None:
        network.check_hidden(self.hidden)
        check_signal(self.signal)
        for name, value, known in (("objective", self.objective, OBJECTIVES), ("solver", self.solver, _SOLVERS)):
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}")
        check_settings(self.n_bins, self.bandwidth, self.delta)
        for name in ("max_iter", "patience"):
            if getattr(self, name) is not None:
                as_count(getattr(self, name), name)
        if self.tol is not None and not self.tol >= 0:
            raise ValueError(f"tol must be non-negative or None, got {self.tol!r}")

    def _warn_about_bounds(self, t: np.ndarray) -> None:
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

    def _inputs(self, s: np.ndarray) -> np.ndarray:
        """The network's inputs, (N, 1)."""
        return (np.clip(s, *self.margin_range_)[:, None] - self.margin_mean_) / self.margin_std_

    def _map(self, s: np.ndarray) -> np.ndarray:
        theta, hidden = network.stored_parameters(self)
        return network.temperature(theta, self._inputs(s), hidden)

    def temperature_map(self, signal: Any) -> np.ndarray:
        """The learned map T(m), for pictures.

        Args:
            signal: scalar or (N,), margins in logit units, or values of the signal that was chosen instead; outside
                ``margin_range_`` the end's value holds.

        Returns:
            (N,) float64, dimensionless, > 0.1.

        Raises:
            sklearn.exceptions.NotFittedError: before ``fit``.

        Source: paper.
        """
        check_is_fitted(self, self.learned)
        return self._map(np.atleast_1d(np.asarray(signal, dtype=np.float64)))

    def _temperatures(self, z: np.ndarray) -> np.ndarray:
        s = hardness_of(z, self.signal)
        low, high = self.margin_range_
        outside = float(np.mean(((s < low) | (s > high)) & np.isfinite(s)))
        if outside > 0.01:
            warn(
                f"SMART: {outside:.1%} of the {_PLURAL[self.signal]} lie outside the fitted range {low:.3g} .. "
                f"{high:.3g}; their temperature is that of the range's nearest end. Fit on data like those to be "
                "calibrated."
            )
        return self._map(s)


def _soft_bins(smart: SMART) -> dict[str, float]:
    return {"n_bins": smart.n_bins, "bandwidth": smart.bandwidth, "delta": smart.delta}


def inputs(smart: SMART, z: np.ndarray) -> np.ndarray:
    """What the network of a fitted SMART is given for checked logits: the standardised signal, (N, 1)."""
    return smart._inputs(hardness_of(z, smart.signal))


def training_objective(smart: SMART, z: np.ndarray, y: np.ndarray) -> Objective:
    """What a SMART with these settings minimises on checked data, as a function of the temperatures (N,)."""
    table = table_for(smart.objective, z)
    return objective_of_temperatures(smart.objective, table, *correct_and_gap(z, y), **_soft_bins(smart))


def starting_parameters(smart: SMART, objective: Objective, x: np.ndarray) -> np.ndarray:
    """The start of L-BFGS: the best constant map, with the hinges of the first layer at quantiles of the signal.

    The hinges look to the right and to the left in turn, so that both ends of the signal can bend. A second hidden
    layer passes on what the first one gives: its unit j takes the sum of those units whose number is j modulo the
    smaller of the two widths.

    Args:
        smart: for its hidden layers. objective: see :func:`training_objective`. x: (N, 1) see :func:`inputs`.
    """
    first, *second = network.check_hidden(smart.hidden)
    values, index = np.unique(np.round(x, 9)), np.arange(first)
    # Half way between two values: on a value, the last digit would decide on which side of the hinge a sample lies.
    above = np.searchsorted(values, np.quantile(x, (index + 0.5) / first), side="right")
    above = np.clip(above, 1, max(len(values) - 1, 0))
    hinge = (values[above - 1] + values[above]) / 2
    w = np.where(index % 2 == 0, 1.0, -1.0)
    parts = [w, -w * hinge]
    for width in second:
        n = min(first, width)
        parts += [np.equal.outer(index % n, np.arange(width) % n).ravel(), np.zeros(width)]
    constant = network.constant(best_constant(objective, len(x)))
    return np.concatenate([*parts, np.zeros([first, *second][-1]), [constant]])


def _fit_lbfgs(smart: SMART, objective: Objective, x: np.ndarray) -> tuple[np.ndarray, list, bool]:
    theta = starting_parameters(smart, objective, x)
    if smart.start_noise:
        theta = theta + smart.start_noise * np.random.default_rng(smart.seed).standard_normal(len(theta))
    tol, patience, limit = _stopping(smart, tol=1e-3, patience=10, limit=500)
    theta, values, converged = minimise_lbfgs(
        objective_of_parameters(objective, x, network.check_hidden(smart.hidden)),
        theta,
        max_iter=limit,
        # Progress comes in bursts, so one slow iteration is no reason to stop (notebook 04).
        is_done=lambda values: len(values) > patience and values[-1 - patience] - values[-1] < tol,
    )
    return theta, values[1:], converged


def _fit_adam(smart: SMART, objective: Objective, x: np.ndarray) -> tuple[np.ndarray, list, bool]:
    """The paper's recipe: full-batch Adam from the random initial weights of torch's linear layers."""
    import torch

    hidden = network.check_hidden(smart.hidden)
    generator = torch.Generator().manual_seed(smart.seed)
    # torch.nn.Linear draws from +- 1 / sqrt(fan in), but only from the global generator, which is not ours to move.
    bound = torch.cat(
        [
            torch.full(((before + 1) * after,), before**-0.5, dtype=torch.float64)
            for before, after in zip((1, *hidden), (*hidden, 1), strict=True)
        ]
    )
    theta = (torch.rand(len(bound), generator=generator, dtype=torch.float64) * 2 - 1) * bound
    optimizer = torch.optim.Adam([theta], lr=5e-3)
    value_and_gradient = objective_of_parameters(objective, x, hidden)
    tol, patience, limit = _stopping(smart, tol=1e-4, patience=200, limit=2000)
    best, lowest, reference, waited, values = theta.numpy().copy(), np.inf, np.inf, 0, []
    while len(values) < limit and waited < patience:
        value, gradient = value_and_gradient(theta.numpy())
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
