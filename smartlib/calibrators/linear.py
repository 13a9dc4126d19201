"""Calibrators that learn a linear map of logits or log-probabilities: vector scaling and Dirichlet calibration.

Both minimise the NLL of softmax(map(x)) plus a quadratic penalty on the map's numbers. That is convex, and is solved by
L-BFGS from the solution of temperature scaling, each number scaled by the square root of its curvature there. Unlike
temperature scaling they may change predictions, and so the accuracy.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
from scipy.special import logsumexp
from sklearn.exceptions import ConvergenceWarning

from smartlib.arrays import as_count, row_chunks
from smartlib.calibrators.base import Calibrator, warn
from smartlib.calibrators.lbfgs import minimise_lbfgs
from smartlib.calibrators.scaling import nll_temperature

# Stop when so many iterations together lower the objective by less than this many nats.
_PATIENCE, _TOLERANCE = 10, 1e-6
# No probability is taken to be smaller than a rounding error of 1, once temperature scaling has corrected it.
_LOWEST_LOG_PROBABILITY = float(np.log(np.finfo(np.float64).eps))
# Masks such as -1e300 are raised to this, whose square is finite.
_LOWEST_LOGIT = -1e100
# The settings that cross-validation tries, in nats. For each mu lambda falls until the NLL exceeds the lowest by 1 %.
_N_FOLDS = 5
_LAMBDAS = {"l2": (1e0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5), "odir": (1e3, 1e2, 1e1, 1e0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5)}
_MUS = (1e0, 1e-2, 1e-4)
_CLEARLY_WORSE = 1.01


class _LinearMap(Calibrator):
    """Minimises mean NLL + sum of penalty * (theta - target)^2. Subclasses say how x and theta make logits.

    In here x, logits and probabilities lie with one row for each class, (K, N): where there are few classes, numpy
    takes sums over them ten times faster so.
    """

    keeps_predictions = False

    def _inputs(self, z: np.ndarray, log_sum: np.ndarray) -> np.ndarray:
        """(K or K + 1, N) finite x of float64 logits z, (K, N); log_sum: (N,) log sum_k exp(z_k)."""
        raise NotImplementedError

    @staticmethod
    def _outputs(theta: np.ndarray, x: np.ndarray) -> np.ndarray:
        """(K, N) logits that the map with the numbers theta makes of x."""
        raise NotImplementedError

    @staticmethod
    def _backward(x: np.ndarray, outer: np.ndarray) -> np.ndarray:
        """Gradient by theta, given that by the logits; for x^2 and the curvatures of the logits, those of theta."""
        raise NotImplementedError

    def _theta(self) -> np.ndarray:
        """The learned numbers."""
        raise NotImplementedError

    def _chunks(
        self, theta: np.ndarray, z: np.ndarray, log_sum: np.ndarray, index: np.ndarray
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
        """``(rows, x, p, log p)`` of the samples ``index``, a fixed number of rows at a time."""
        for chunk in row_chunks(len(index), 4 * z.shape[1]):  # so many arrays of a chunk are held at once
            rows = index[chunk]
            logits = np.ascontiguousarray(z.take(rows, axis=0).T, dtype=np.float64)
            x = self._inputs(logits, log_sum[rows])
            log_p = self._outputs(theta, x)
            log_p[logits == -np.inf] = -np.inf
            log_p -= log_p.max(axis=0)
            p = np.exp(log_p)
            total = p.sum(axis=0)
            p /= total
            log_p -= np.log(total)
            yield rows, x, p, log_p

    def _nll(self, theta: np.ndarray, z: np.ndarray, y: np.ndarray, log_sum: np.ndarray, index: np.ndarray) -> float:
        chunks = self._chunks(theta, z, log_sum, index)
        return -sum(log_p[y[rows], np.arange(len(rows))].sum() for rows, _, _, log_p in chunks) / len(index)

    def _minimise(
        self,
        start: np.ndarray,
        data: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
        penalty: np.ndarray,
        target: np.ndarray,
    ) -> tuple[np.ndarray, list[float], bool]:
        """``(theta, values, converged)`` from ``start``; data: z, y, log_sum, index; penalty, target: as theta."""
        as_count(self.max_iter, "max_iter")
        z, y, log_sum, index = data
        curvature = np.zeros_like(start)
        for _, x, p, _ in self._chunks(start, z, log_sum, index):
            curvature += self._backward(x * x, p * (1 - p))
        curvature = curvature / len(index) + 2 * penalty
        scale = 1 / np.sqrt(np.maximum(curvature, max(1e-9 * curvature.max(), np.finfo(np.float64).tiny)))

        def objective(scaled: np.ndarray) -> tuple[float, np.ndarray]:
            theta = scaled.reshape(start.shape) * scale
            value, gradient = 0.0, np.zeros_like(theta)
            for rows, x, p, log_p in self._chunks(theta, z, log_sum, index):
                own = y[rows], np.arange(len(rows))
                value -= log_p[own].sum()
                p[own] -= 1.0
                gradient += self._backward(x, p)
            away = theta - target
            value = value / len(index) + (penalty * away * away).sum()
            return value, ((gradient / len(index) + 2 * penalty * away) * scale).ravel()

        end, values, converged = minimise_lbfgs(
            objective,
            (start / scale).ravel(),
            max_iter=self.max_iter,
            is_done=lambda v: len(v) > _PATIENCE and v[-1 - _PATIENCE] - v[-1] < _TOLERANCE,
        )
        return end.reshape(start.shape) * scale, values, converged

    def _fit_map(self, start: np.ndarray, data: tuple, penalty: np.ndarray, target: np.ndarray) -> np.ndarray:
        """The final theta; ``start`` is temperature scaling as a map. Sets what tells how the fit went."""
        theta, values, self.converged_ = self._minimise(start, data, penalty, target)
        self.n_iter_, self.objective_ = len(values) - 1, values[-1]
        name = type(self).__name__
        if not self.converged_:
            text = f"{name}: the solver stopped at its limit of {self.n_iter_} iterations; raise max_iter."
            warn(text, ConvergenceWarning)
        absent = np.flatnonzero(np.bincount(data[1], minlength=self.n_classes_) == 0)
        if absent.size:
            classes = ", ".join(map(str, absent[:5])) + (", ..." if absent.size > 5 else "")
            warn(
                f"{name}: no label is class {classes}; as far as the penalty lets it, the fit makes such a class "
                "impossible. Use validation data that hold every class."
            )
        before, after = self._nll(start, *data), self._nll(theta, *data)
        if after > max(_CLEARLY_WORSE * before, before + 1e-3):
            warn(
                f"{name}: the map has a validation NLL of {after:.4g}, temperature scaling has {before:.4g}. The "
                "penalty is too strong for logits of this scale: lower it, or multiply all logits by a constant."
            )
        return theta

    def _predict_proba(self, z: np.ndarray, dtype: type, *, features: Any) -> np.ndarray:
        result = np.empty(z.shape, dtype=dtype)
        for rows, _, p, _ in self._chunks(self._theta(), z, _log_sums(z), np.arange(len(z))):
            result[rows] = p.T
        return result


class VectorScaling(_LinearMap):
    """Vector scaling: softmax(weight * z + bias), a weight and a bias for each class.

    Minimises the NLL plus ``l2`` times the sum of (weight - 1)^2 and bias^2. It acts on the logits as they are: adding
    a constant to a row, which no probability shows, changes what it returns. A class whose logit is -inf keeps
    probability 0.

    Args:
        l2: >= 0, nats. With the default, 0, the result follows the scale of the logits, and where the data do not
            determine it (separable data, a class that no label names) it is where the stopping rule ends.
        max_iter: limit of the L-BFGS iterations.

    Attributes after fit:
        weight_, bias_: (K,) each.
        objective_: NLL plus penalty on the validation data.
        n_iter_: iterations done. converged_: False when stopped by ``max_iter``.

    Raises:
        ValueError: a setting outside its range.

    Warns:
        CalibrationWarning: a class that no label names; a penalty so strong that temperature scaling has the lower NLL.
        sklearn.exceptions.ConvergenceWarning: stopped by ``max_iter``.

    Source: Guo et al. 2017. The penalty, the solver and its stopping rule are ours.

    >>> logits = np.array([[2.0, 0.0], [0.0, 2.0], [0.0, 2.0], [2.0, 0.0]])
    >>> vs = VectorScaling().fit(logits, [0, 1, 1, 1])      # class 0 is right in one case of two, class 1 in both
    >>> vs.predict_proba(logits[:2]).round(2).tolist()
    [[0.5, 0.5], [0.0, 1.0]]
    """

    registry_name = "vs"
    learned = ("weight_", "bias_")

    def __init__(self, *, l2: float = 0.0, max_iter: int = 1000):
        self.l2 = l2
        self.max_iter = max_iter

    @property
    def n_parameters(self) -> int:
        return 2 * self.n_classes_

    def _fit(self, z: np.ndarray, y: np.ndarray, *, features: Any, head: Any) -> None:
        _check_penalty("l2", self.l2)
        k = z.shape[1]
        target = np.stack([np.ones(k), np.zeros(k)])
        self.weight_, self.bias_ = self._fit_map(
            target / [[_temperature(z, y)], [1.0]],
            (z, y, _log_sums(z), np.arange(len(y))),
            np.full((2, k), float(self.l2)),
            target,
        )

    def _inputs(self, z: np.ndarray, log_sum: np.ndarray) -> np.ndarray:
        return np.maximum(z, _LOWEST_LOGIT)

    @staticmethod
    def _outputs(theta: np.ndarray, x: np.ndarray) -> np.ndarray:
        return theta[0, :, None] * x + theta[1, :, None]

    @staticmethod
    def _backward(x: np.ndarray, outer: np.ndarray) -> np.ndarray:
        return np.stack([np.einsum("kn,kn->k", outer, x), outer.sum(axis=1)])

    def _theta(self) -> np.ndarray:
        return np.stack([self.weight_, self.bias_])


class DirichletCalibration(_LinearMap):
    """Dirichlet calibration: softmax(weight log p + bias), with p = softmax(z) and a full (K, K) weight.

    Penalties on top of the mean NLL: "l2" is lambda times the sum of all squared weights and biases. "odir" is lambda
    times the sum of the squared weights off the diagonal, plus mu times that of the squared biases. What is not given
    is chosen by the NLL in 5-fold cross-validation on the validation data, from powers of ten: lambda in 1e-5 .. 1
    (l2) or 1e-5 .. 1e3 (odir), mu in 1e-4, 1e-2, 1; for each mu lambda falls until the NLL exceeds the lowest by 1 %.
    The map is then fitted on all the data. (The authors' grid is finer and reaches further, to 1e6, and they average
    the probabilities of the five folds' maps; one map can be read, and depends on the folds by the choice alone. The
    folds follow the order of the samples, and so does the choice: on small validation sets another order may end in
    another penalty.)

    The penalties are sums, as by default in the authors' code; their text divides the two of "odir" by K (K - 1) and K.

    log p is floored at log(2.2e-16), as in the authors' code, times T of temperature scaling where T > 1: sooner, the
    floor would cut real differences of an over-confident model. For a class whose logit is -inf the map sees the floor,
    as for any other that is all but impossible, and the result has probability 0 for it.

    The time grows with N K^2: seconds for 5,000 x 10, minutes for 5,000 x 100, and a day for 50,000 x 1,000, unless
    ``reg_lambda`` (and ``reg_mu``) are given. Beside the logits the memory holds some thirty copies of the map and a
    fixed number of rows.

    Args:
        regularisation: "odir" or "l2".
        reg_lambda: > 0, or None to choose it.
        reg_mu: > 0, or None to choose it; "odir" only.
        seed: of the folds.
        max_iter: limit of the L-BFGS iterations.

    Attributes after fit:
        weight_: (K, K), one row for each class of the result. bias_: (K,).
        floor_: the smallest log p.
        reg_lambda_, reg_mu_: the penalties used; for "l2" they are equal.
        cv_nll_: (S, 3), columns lambda, mu, NLL of each setting that was tried; no rows where none was.
        objective_: NLL plus penalty on the validation data.
        n_iter_: iterations of the last fit. converged_: False when stopped by ``max_iter``.

    Raises:
        ValueError: a setting outside its range.

    Warns:
        CalibrationWarning: fewer samples than folds, so that the strongest penalty is taken; a class that no label
            names; a penalty so strong that temperature scaling has the lower NLL.
        sklearn.exceptions.ConvergenceWarning: stopped by ``max_iter``.

    Source: Kull et al. 2019. The range of the grid, the refit, the floor's factor and the solver are ours.

    >>> rng = np.random.default_rng(0)
    >>> logits = rng.normal(size=(300, 2))
    >>> labels = (rng.random(300) < 1 / (1 + np.exp(logits[:, 0] - logits[:, 1]))).astype(int)
    >>> dirichlet = DirichletCalibration().fit(3 * logits, labels)       # three times too confident
    >>> bool(abs(dirichlet.predict_proba([[3.0, 0.0]])[0, 0] - 1 / (1 + np.exp(-1))) < 0.05)
    True
    """

    registry_name = "dirichlet"
    learned = ("weight_", "bias_", "floor_")

    def __init__(
        self,
        *,
        regularisation: str = "odir",
        reg_lambda: float | None = None,
        reg_mu: float | None = None,
        seed: int = 0,
        max_iter: int = 1000,
    ):
        self.regularisation = regularisation
        self.reg_lambda = reg_lambda
        self.reg_mu = reg_mu
        self.seed = seed
        self.max_iter = max_iter

    @property
    def n_parameters(self) -> int:
        return self.n_classes_ * (self.n_classes_ + 1)

    def _fit(self, z: np.ndarray, y: np.ndarray, *, features: Any, head: Any) -> None:
        grid = self._grid()
        t = _temperature(z, y)
        self.floor_ = _LOWEST_LOG_PROBABILITY * max(t, 1.0)
        start = np.append(np.eye(z.shape[1]) / t, np.zeros((z.shape[1], 1)), axis=1)
        if self.regularisation == "l2":
            start -= start.mean(axis=0)  # changes no probability, and the penalty least
        log_sum = _log_sums(z)
        self.cv_nll_ = np.empty((0, 3))
        self.reg_lambda_, self.reg_mu_ = strongest = grid[0][0]
        if grid != [[strongest]]:
            if len(y) < _N_FOLDS:
                warn(
                    f"DirichletCalibration: {len(y)} samples are too few for {_N_FOLDS} folds; lambda = "
                    f"{strongest[0]:g} and mu = {strongest[1]:g}, the strongest penalties, are taken."
                )
            else:
                self.cv_nll_ = self._cross_validated(grid, start, z, y, log_sum)
                self.reg_lambda_, self.reg_mu_ = self.cv_nll_[self.cv_nll_[:, 2].argmin(), :2].tolist()
        data = (z, y, log_sum, np.arange(len(y)))
        theta = self._fit_map(start, data, self._penalty(self.reg_lambda_, self.reg_mu_), np.zeros_like(start))
        self.weight_, self.bias_ = theta[:, :-1].copy(), theta[:, -1].copy()

    def _grid(self) -> list[list[tuple[float, float]]]:
        """The pairs of lambda and mu to try: a list for each mu, in it lambda falls."""
        if self.regularisation not in _LAMBDAS:
            raise ValueError(f"regularisation must be 'l2' or 'odir', got {self.regularisation!r}")
        for name in ("reg_lambda", "reg_mu"):
            if getattr(self, name) is not None:
                _check_penalty(name, getattr(self, name), positive=True)
        lambdas = _LAMBDAS[self.regularisation] if self.reg_lambda is None else (float(self.reg_lambda),)
        if self.regularisation == "odir":
            return [
                [(value, mu) for value in lambdas] for mu in (_MUS if self.reg_mu is None else (float(self.reg_mu),))
            ]
        if self.reg_mu is not None:
            raise ValueError("reg_mu belongs to regularisation='odir'; 'l2' has lambda alone")
        return [[(value, value) for value in lambdas]]

    def _penalty(self, reg_lambda: float, reg_mu: float) -> np.ndarray:
        penalty = np.full((self.n_classes_, self.n_classes_ + 1), reg_lambda)
        penalty[:, -1] = reg_mu
        if self.regularisation == "odir":
            np.fill_diagonal(penalty, 0.0)
        return penalty

    def _cross_validated(
        self, grid: list, start: np.ndarray, z: np.ndarray, y: np.ndarray, log_sum: np.ndarray
    ) -> np.ndarray:
        """(S, 3) lambda, mu and the NLL of held-out samples; each fit starts at that of the lambda before."""
        folds = np.array_split(np.random.default_rng(self.seed).permutation(len(y)), _N_FOLDS)
        rest = [np.sort(np.concatenate(folds[:i] + folds[i + 1 :])) for i in range(_N_FOLDS)]
        tried = []
        for path in grid:
            maps, lowest = [start] * _N_FOLDS, np.inf
            for setting in path:
                penalty = self._penalty(*setting)
                for i, train in enumerate(rest):
                    maps[i] = self._minimise(maps[i], (z, y, log_sum, train), penalty, np.zeros_like(start))[0]
                losses = [self._nll(m, z, y, log_sum, i) * len(i) for m, i in zip(maps, folds, strict=True)]
                tried.append((*setting, sum(losses) / len(y)))
                lowest = min(lowest, tried[-1][-1])
                if tried[-1][-1] > _CLEARLY_WORSE * lowest:
                    break
        return np.array(tried)

    def _inputs(self, z: np.ndarray, log_sum: np.ndarray) -> np.ndarray:
        x = np.ones((len(z) + 1, z.shape[1]))  # the last row is for the bias
        np.maximum(z - log_sum, self.floor_, out=x[:-1])
        return x

    @staticmethod
    def _outputs(theta: np.ndarray, x: np.ndarray) -> np.ndarray:
        return theta @ x

    @staticmethod
    def _backward(x: np.ndarray, outer: np.ndarray) -> np.ndarray:
        return outer @ x.T

    def _theta(self) -> np.ndarray:
        return np.column_stack([self.weight_, self.bias_])


def _log_sums(z: np.ndarray) -> np.ndarray:
    """(N,) log sum_k exp(z_k)."""
    result = np.empty(len(z))
    for rows in row_chunks(len(z), 4 * z.shape[1]):
        result[rows] = logsumexp(z[rows].astype(np.float64), axis=1)
    return result


def _temperature(z: np.ndarray, y: np.ndarray) -> float:
    """T of temperature scaling, where to start; 1 where the likelihood keeps growing as T goes to 0."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a bound is no failure of a start
        temperature, bound_hit = nll_temperature(z, y)
    return 1.0 if bound_hit == "lower" else temperature


def _check_penalty(name: str, value: Any, positive: bool = False) -> None:
    if not (0 < value < np.inf or (value == 0 and not positive)):
        raise ValueError(f"{name} must be {'positive' if positive else 'at least 0'} and finite, got {value!r}")
