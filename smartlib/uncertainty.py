"""How far a measured calibration error can be trusted: noise floor and intervals.

Calibration errors are sums of absolute values, so that chance alone makes them positive. A perfectly calibrated
classifier does not measure 0 but the *noise floor*, and the plain bootstrap, which adds the noise of
resampling to that of the sample, misses the truth near the floor nearly always.

The intervals of binned errors come from inverting a test. Let r(f) be the accuracy at confidence f according to a
smooth recalibration curve that is fitted to the data. The model "the true accuracy at confidence f is f + t (r(f) - f)"
runs from perfect calibration at t = 0 through what was observed at t = 1, and its true error theta(t) grows with t. For
each t, samples of the same size are simulated and measured. The interval holds those theta(t) at which the value
measured on the data is neither among the lowest nor the highest 2.5 % of the simulated ones. At t = 0 this is exactly
the test of "perfectly calibrated". (For the classwise error r is the observed frequency in the bin.)

The smooth calibration error needs no such model. It is a supremum of sums, so it obeys the triangle inequality: smCE of
the sample and smCE of the population differ by at most the smCE of the noise, that is, of the sample's residuals minus
the population's. The interval is the measured value plus and minus the 95 % quantile of that, simulated. (Inverting a
test fails here: gaps of both signs may cancel by chance, and the model then believes that they always do.) SmoothECE
obeys it too: at a bandwidth of the sum of two fixed points, each part is below its own fixed point.

The two parts of the Brier score have no interval. Their recalibration is fitted to the labels that it is judged by; a
resample would be fitted once more, to its own noise, and the interval would miss the truth. The calibration part
has a noise floor, and the Brier score an interval.

Source: theory of test inversion (Neyman 1937); this use of it is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy.sparse import csr_array
from scipy.special import expit, logit
from scipy.stats import binomtest, rankdata
from scipy.stats import t as student_t

from smartlib.arrays import as_confidence, as_probabilities, row_chunks, to_numpy
from smartlib.binned_errors import N_BINS, bin_edges, bin_index
from smartlib.kernel_errors import smece_of
from smartlib.metrics import METRICS, TOP_LABEL_ERRORS, top_label
from smartlib.resampling import population_statistic, top_label_statistic
from smartlib.scores import PooledClass, auroc_of, brier_losses, log_losses
from smartlib.smce import smce_of

LEVEL = 0.95
_N_GRID = 9


def noise_floor(
    probs_or_confidence: Any, metric: str = "ece", n_resamples: int = 1000, seed: int = 0
) -> tuple[float, float]:
    """What a perfectly calibrated classifier with these confidences would measure.

    Args:
        probs_or_confidence: (N, K) probabilities, from whose rows labels are drawn, or (N,) top-label confidences.
        metric: a key of `smartlib.metrics.TOP_LABEL_ERRORS`; with (N, K) also "cwece" and "brier_calibration".
        n_resamples: simulated data sets.
        seed: of the simulation.

    Returns:
        ``(mean, q95)``: mean and 95th percentile of the metric, fractions. A measured value below q95 does not
        contradict perfect calibration.

    Raises:
        ValueError: bad arrays, an unknown metric, or one that needs (N, K) with (N,) confidences.

    Source: ours; cf. the consistency resampling of Bröcker and Smith 2007.

    >>> mean, q95 = noise_floor([0.5] * 100, n_resamples=200)
    >>> 0.03 < mean < 0.05 < q95 < 0.12
    True
    """
    rng = np.random.default_rng(seed)
    array = to_numpy(probs_or_confidence, "probs_or_confidence")
    if metric in ("cwece", "brier_calibration") and array.ndim != 2:
        raise ValueError(f'metric "{metric}" needs (N, K) probabilities')
    if metric == "brier_calibration":
        values = _brier_calibrations(as_probabilities(array), n_resamples, rng)
    elif metric == "cwece":
        simulate = _ClasswiseModel(as_probabilities(array)).simulator(0.0)
        values = [simulate(rng, False) for _ in range(n_resamples)]
    elif metric in TOP_LABEL_ERRORS:
        f = as_probabilities(array).max(axis=1).astype(np.float64) if array.ndim == 2 else as_confidence(array)
        f = np.sort(np.minimum(f, 1.0))
        statistic, everything = top_label_statistic(metric, f), np.arange(len(f))
        values = [
            max(statistic(everything, (rng.random(len(f)) < f).astype(np.float64)), 0.0) for _ in range(n_resamples)
        ]
    else:
        known = ", ".join((*TOP_LABEL_ERRORS, "cwece", "brier_calibration"))
        raise ValueError(f"no noise floor for {metric!r}; known: {known}")
    return float(np.mean(values)), float(np.quantile(values, 0.95))


def _brier_calibrations(p: np.ndarray, n_resamples: int, rng: np.random.Generator) -> np.ndarray:
    """The calibration part of the Brier score, (n_resamples,), for labels drawn from the rows."""
    n, k = p.shape
    labels = np.empty((n_resamples, n), dtype=np.int32)
    for sample in labels:
        for rows in row_chunks(n, k):
            cumulative = p[rows].cumsum(axis=1, dtype=np.float64)[:, :-1]
            sample[rows] = (cumulative < rng.random((len(cumulative), 1))).sum(axis=1)
    brier = [brier_losses(p, sample).sum() for sample in labels]
    refinement = np.zeros(n_resamples)
    for label in range(k):  # a class is sorted once for all samples
        pooled = PooledClass(p[:, label])
        refinement += [pooled.squared_error(sample == label) for sample in labels]
    return np.maximum(brier - refinement, 0.0) / n


def recalibration_curve(f: np.ndarray, a: np.ndarray) -> np.ndarray:
    """A smooth estimate of P(correct | f) at each confidence, (N,), for checked arrays.

    Logistic regression: logit r = logit f + a polynomial of degree 4 in logit f, its coefficients shrunk towards zero,
    which is perfect calibration. Five numbers follow a curve of either sign with far less noise than bins do.
    """
    from scipy.optimize import minimize

    odds = logit(np.clip(f, 1e-12, 1 - 1e-12))
    x = np.clip(odds, -14, 14)
    x = 2 * (x - x.min()) / max(np.ptp(x), 1e-12) - 1
    basis = np.polynomial.legendre.legvander(x, 4)

    def objective(beta: np.ndarray) -> tuple[float, np.ndarray]:
        eta = odds + basis @ beta
        return float(np.logaddexp(0, eta).sum() - a @ eta + beta @ beta / 2), basis.T @ (expit(eta) - a) + beta

    def hessian(beta: np.ndarray) -> np.ndarray:
        r = expit(odds + basis @ beta)
        return (basis * (r * (1 - r))[:, None]).T @ basis + np.eye(5)

    fit = minimize(objective, np.zeros(5), jac=True, hess=hessian, method="trust-exact")
    return expit(odds + basis @ fit.x)


class _TopLabelModel:
    """The family of true accuracies f + t (r(f) - f) for one top-label metric."""

    def __init__(self, metric: str, f: np.ndarray, a: np.ndarray):
        order = np.argsort(f, kind="stable")
        self.f, a = f[order], a[order]
        self.statistic, self.population = top_label_statistic(metric, self.f), population_statistic(metric, self.f)
        self.rows = np.arange(len(f))
        self.gap = recalibration_curve(self.f, a) - self.f
        self.estimate = self.statistic(self.rows, a)

    def accuracy(self, t: float) -> np.ndarray:
        return np.clip(self.f + t * self.gap, 0.0, 1.0)

    def truth(self, t: float) -> float:
        return self.population(self.rows, self.accuracy(t))

    def simulator(self, t: float) -> Callable[[np.random.Generator], float]:
        from smartlib._resampling_kernel import drawn_rows  # here, because it imports numba

        accuracy = self.accuracy(t)

        def simulate(rng: np.random.Generator) -> float:
            # Rows are drawn anew too: the truth is about the population, not about these confidences.
            n = len(self.f)
            copies = np.bincount(rng.integers(n, size=n), minlength=n)
            return self.statistic(*drawn_rows(copies, rng.random(n), accuracy))

        return simulate


class _ClasswiseModel:
    """The same family for the classwise ECE: class probabilities p + t (r(p) - p), cut off at 0 and renormalised."""

    def __init__(self, p: np.ndarray, y: np.ndarray | None = None):
        n, k = p.shape
        self.p = p.astype(np.float64)
        self.cell = bin_index(p, bin_edges(p, N_BINS, "width")) + N_BINS * np.arange(k)
        self.n_cells = k * N_BINS
        # Nearly all probabilities lie in the lowest bin of their class: a plain matrix for these, a sparse one for the
        # few others, so that the sums of a resample are two products.
        is_low = self.cell % N_BINS == 0
        row, column = np.nonzero(~is_low)
        self.low, high = np.where(is_low, self.p, 0.0), (self.p[row, column], (self.cell[row, column], row))
        self.high = csr_array(high, shape=(self.n_cells, n))
        if y is not None:
            hits = np.bincount(self.cell[np.arange(n), y], minlength=self.n_cells)
            total = np.bincount(self.cell.ravel(), self.p.ravel(), self.n_cells)
            count = np.maximum(np.bincount(self.cell.ravel(), minlength=self.n_cells), 1)
            self.gap = ((hits - total) / count)[self.cell]
            self.estimate = float(np.abs(hits - total).sum() / (n * k))

    def probabilities(self, t: float) -> np.ndarray:
        if t == 0:
            return self.p
        q = np.maximum(self.p + t * self.gap, 0.0)
        total = q.sum(axis=1, keepdims=True)
        return np.where(total > 0, q / np.where(total > 0, total, 1.0), self.p)

    def truth(self, t: float) -> float:
        difference = self.probabilities(t) - self.p
        return float(np.abs(np.bincount(self.cell.ravel(), difference.ravel(), self.n_cells)).sum() / self.p.size)

    def simulator(self, t: float) -> Callable[[np.random.Generator, bool], float]:
        from smartlib._resampling_kernel import drawn_labels

        cumulative = self.probabilities(t).cumsum(axis=1)
        cumulative[:, -1] = np.inf
        n, k = self.p.shape

        def simulate(rng: np.random.Generator, resample: bool = True) -> float:
            copies = np.bincount(rng.integers(n, size=n), minlength=n) if resample else np.ones(n, dtype=np.intp)
            gap = drawn_labels(self.cell, cumulative, copies, rng.random(n), self.n_cells) - self.high @ copies
            gap[::N_BINS] -= np.einsum("i,ik->k", copies.astype(np.float64), self.low)  # small: not worth BLAS threads
            return float(np.abs(gap).sum() / (n * k))

        return simulate


def _invert(model: _TopLabelModel | _ClasswiseModel, n_resamples: int, seed: int) -> tuple[float, float]:
    """The interval of :mod:`smartlib.uncertainty` for one model."""

    def simulated(t: float) -> np.ndarray:
        # The same random numbers at every t, so that the quantiles move smoothly with t.
        rng = np.random.default_rng(seed)
        simulate = model.simulator(t)
        return np.array([simulate(rng) for _ in range(n_resamples)])

    observed, full = model.estimate, model.truth(1.0)
    at_zero = simulated(0.0)
    if full < 1e-9:  # nothing to scale: all that can be said is what perfect calibration would have measured
        return 0.0, float(max(observed, np.quantile(at_zero, (1 + LEVEL) / 2), 0.0))
    at_one = simulated(1.0)
    reach = 4 * max(at_one.std(), at_zero.std())
    low = max(0.0, observed - max(at_one.mean() - full, 0.0) - reach) / full
    high = (max(observed, 0.0) + reach) / full
    if np.quantile(simulated(low), (1 + LEVEL) / 2) >= observed:
        low = 0.0
    grid = np.linspace(low, high, _N_GRID)
    quantiles = np.array([np.quantile(simulated(t), [(1 - LEVEL) / 2, (1 + LEVEL) / 2]) for t in grid])
    truth = np.array([model.truth(t) for t in grid])
    return _crossing(truth, quantiles[:, 1], observed), _crossing(truth, quantiles[:, 0], observed)


def top_label_interval(metric: str, f: np.ndarray, a: np.ndarray, n_resamples: int, seed: int) -> tuple[float, float]:
    """95 % interval of a top-label metric, for checked confidences and correctness."""
    if metric == "smce":
        return _triangle_interval(metric, smce_of, f, a, n_resamples, seed)
    if metric == "smece":
        return _triangle_interval(metric, smece_of, f, a, n_resamples, seed)
    return _invert(_TopLabelModel(metric, f, a), n_resamples, seed)


def _triangle_interval(
    metric: str, error: Callable[[np.ndarray, np.ndarray], float], f: np.ndarray, a: np.ndarray, n_resamples: int,
    seed: int,
) -> tuple[float, float]:  # fmt: skip
    """The interval of an error of the residuals that obeys the triangle inequality."""
    model, rng, n = _TopLabelModel(metric, f, a), np.random.default_rng(seed), len(f)
    accuracy, noise = model.accuracy(1.0), []
    for _ in range(n_resamples):
        copies = np.bincount(rng.integers(n, size=n), minlength=n)
        residual = rng.binomial(copies, accuracy) - copies * model.f - (accuracy - model.f)
        noise.append(error(model.f, model.f + residual))
    reach = np.quantile(noise, LEVEL)
    return float(max(0.0, model.estimate - reach)), float(min(1.0, model.estimate + reach))


def _auroc_interval(f: np.ndarray, a: np.ndarray) -> tuple[float, float]:
    """DeLong's standard error on the logit scale; (0, 1) where there are fewer than two right or two wrong samples.

    The t distribution has the degrees of freedom of the rarer kind, whose spread decides the error.
    """
    right = a == 1
    n_right, n_wrong = int(right.sum()), int((~right).sum())
    if min(n_right, n_wrong) < 2:
        return 0.0, 1.0
    value = auroc_of(f, a)
    if value in (0.0, 1.0):  # DeLong's error is 0; but all of min(n_right, n_wrong) disjoint pairs agree
        reach = ((1 - LEVEL) / 2) ** (1 / min(n_right, n_wrong))
        return (reach, 1.0) if value == 1 else (0.0, 1 - reach)
    rank = rankdata(f)
    # For each right sample the share of wrong ones below it, and for each wrong one the share of right ones below it.
    below_right = (rank[right] - rankdata(f[right])) / n_wrong
    below_wrong = (rank[~right] - rankdata(f[~right])) / n_right
    error = np.sqrt(below_right.var(ddof=1) / n_right + below_wrong.var(ddof=1) / n_wrong)
    reach = student_t.ppf((1 + LEVEL) / 2, min(n_right, n_wrong) - 1) * error / (value * (1 - value))
    return float(expit(logit(value) - reach)), float(expit(logit(value) + reach))


def _crossing(truth: np.ndarray, quantile: np.ndarray, observed: float) -> float:
    """The truth at which the increasing ``quantile`` passes ``observed``; beyond the grid it runs on with slope one."""
    quantile = np.maximum.accumulate(quantile)
    if observed <= quantile[0]:
        return float(max(0.0, truth[0] - (quantile[0] - observed))) if truth[0] > 0 else 0.0
    if observed >= quantile[-1]:
        return float(min(truth[-1] + observed - quantile[-1], 1.0))
    return float(np.interp(observed, quantile, truth))


def intervals_and_floors(
    p: np.ndarray, y: np.ndarray, *, metrics: Sequence[str] = METRICS, n_resamples: int, seed: int
) -> tuple[dict[str, tuple[float, float]], dict[str, tuple[float, float]]]:
    """95 % intervals of the metrics and noise floors of the calibration errors, for checked arrays.

    Accuracy: Wilson. NLL and Brier score: mean plus and minus 1.96 standard errors. AUROC: DeLong. Calibration errors:
    as the top of this file says.

    Returns:
        ``(intervals, floors)``, dictionaries from metric to (low, high) and to (mean, q95).
    """
    confidence, correct = top_label(p, y)
    intervals, floors = {}, {}
    for metric in metrics:
        if metric == "accuracy":
            wilson = binomtest(int(correct.sum()), len(correct)).proportion_ci(LEVEL, method="wilson")
            intervals[metric] = (float(wilson.low), float(wilson.high))
        elif metric in TOP_LABEL_ERRORS:
            intervals[metric] = top_label_interval(metric, confidence, correct, n_resamples, seed)
            floors[metric] = noise_floor(confidence, metric, n_resamples, seed)
        elif metric == "cwece":
            intervals[metric] = _invert(_ClasswiseModel(p, y), n_resamples, seed)
            floors[metric] = noise_floor(p, metric, n_resamples, seed)
        elif metric == "brier_calibration":
            floors[metric] = noise_floor(p, metric, n_resamples, seed)
        elif metric == "auroc":
            intervals[metric] = _auroc_interval(confidence, correct)
        elif metric in _LOSSES:
            losses = _LOSSES[metric](p, y)
            half = 1.959964 * losses.std(ddof=1) / np.sqrt(len(losses)) if len(losses) > 1 else np.inf
            intervals[metric] = (float(max(losses.mean() - half, 0.0)), float(losses.mean() + half))
    return intervals, floors


_LOSSES = {"nll": log_losses, "brier": brier_losses}
