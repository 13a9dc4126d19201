"""Class-wise temperature scaling: one temperature per predicted class, by a greedy search for the lowest ECE."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.exceptions import ConvergenceWarning

from smartlib.arrays import as_count, row_chunks
from smartlib.binned_errors import N_BINS, bin_index
from smartlib.calibrators.base import TemperatureCalibrator, warn
from smartlib.calibrators.scaling import nll_temperature

GRID = np.arange(5, 51) / 10
# With fewer samples per class than this, CTS has no lower ECE than TS on held-out parts of the public CIFAR validation
# sets: the temperatures follow the noise.
FEW_SAMPLES = 50
# A confidence on the edge of a bin but for its last digits is on the edge, so that it has the same bin everywhere.
_EDGE_WIDTH = 1e-12


class ClassWiseTemperatureScaling(TemperatureCalibrator):
    """CTS: a temperature per predicted class, chosen one class after the other on the ECE of the validation data.

    Every class starts at the temperature of temperature scaling (TS). A pass visits the classes, those with the most
    samples first, and gives each the temperature from 0.5, 0.6, ... 5.0, or that of TS, at which the ECE (15 bins) of
    all samples is lowest; passes are repeated until one changes nothing. Of temperatures with the same ECE (to nine
    decimals) the class takes the nearest to its present one, in the logarithm, so it moves only where that helps.

    Where TS itself lies outside of 0.5 .. 5, as for logits of another scale, the whole grid is multiplied by the factor
    that puts TS at its geometric mean. A class that is never predicted on the validation data keeps the TS temperature.

    Args:
        max_iter: limit of the passes.

    Attributes after fit:
        class_temperature_: (K,), by predicted class.
        temperature_: that of TS.
        ece_: ECE on the validation data, a fraction.
        n_iter_: passes done. converged_: False when the last allowed pass still changed a temperature.

    Source: Frenkel and Goldberger 2021, "Network calibration by class-based temperature scaling" (grid and passes). The
        order of the classes, the rule for ties and the grid for other scales are ours.

    >>> logits = np.repeat([[2 * np.log(3), 0], [0, 3 * np.log(9)]], [200, 500], axis=0)
    >>> labels = np.repeat([0, 1, 1, 0], [150, 50, 450, 50])     # 3/4 and 9/10 right
    >>> ClassWiseTemperatureScaling().fit(logits, labels).class_temperature_
    array([2., 3.])
    """

    registry_name = "cts"
    learned = ("class_temperature_",)

    def __init__(self, *, max_iter: int = 5):
        self.max_iter = max_iter

    @property
    def n_parameters(self) -> int:
        """K, known after the fit."""
        return len(self.class_temperature_)

    def _fit(self, z: np.ndarray, y: np.ndarray, *, features: Any, head: Any) -> None:
        as_count(self.max_iter, "max_iter")
        self.temperature_, _ = nll_temperature(z, y)
        grid = GRID
        if not grid[0] <= self.temperature_ <= grid[-1]:
            grid = grid * (self.temperature_ / np.sqrt(grid[0] * grid[-1]))
        candidates = np.concatenate([[self.temperature_], grid])
        predicted = z.argmax(axis=1)
        count = np.bincount(predicted, minlength=z.shape[1])
        gaps = _gaps_per_bin(z, y, predicted, candidates)
        order = np.argsort(-count, kind="stable")[: np.count_nonzero(count)]
        chosen = np.zeros(z.shape[1], dtype=int)
        total = gaps[0].sum(axis=0)
        self.n_iter_, self.converged_ = 0, False
        while not self.converged_ and self.n_iter_ < self.max_iter:
            before = chosen.copy()
            for k in order:
                total -= gaps[chosen[k], k]
                ece = np.round(np.abs(total + gaps[:, k]).sum(axis=1) / len(y), 9)
                distance = np.abs(np.log(candidates / candidates[chosen[k]]))
                chosen[k] = np.lexsort((distance, ece))[0]
                total += gaps[chosen[k], k]
            self.n_iter_ += 1
            self.converged_ = bool(np.array_equal(chosen, before))
        self.class_temperature_ = candidates[chosen]
        self.ece_ = float(np.abs(total).sum() / len(y))
        self._warn_about_classes(count, np.isin(chosen, (1, len(grid))))

    def _warn_about_classes(self, count: np.ndarray, at_end: np.ndarray) -> None:
        name = type(self).__name__
        few = int(np.sum(count < FEW_SAMPLES))
        if few:
            warn(
                f"{name}: {few} of {len(count)} classes are predicted for fewer than {FEW_SAMPLES} validation samples "
                f"({int(np.sum(count == 0))} for none), so their temperatures are not to be trusted. Use more "
                "validation data, or TemperatureScaling."
            )
        share = float(count[at_end].sum() / count.sum())
        if share > 0.05:
            warn(
                f"{name}: the temperatures of {int(at_end.sum())} classes, with {share:.0%} of the samples, are at an "
                "end of the grid; a class without errors, or with many, has no best temperature on it."
            )
        if not self.converged_:
            warn(f"{name}: pass {self.n_iter_}, the last one allowed, still changed temperatures; raise max_iter.",
                 ConvergenceWarning)  # fmt: skip

    def _temperatures(self, z: np.ndarray) -> np.ndarray:
        return self.class_temperature_[z.argmax(axis=1)]


def _gaps_per_bin(z: np.ndarray, y: np.ndarray, predicted: np.ndarray, temperatures: np.ndarray) -> np.ndarray:
    """Sum of (correct - confidence) over the samples of each predicted class and bin, at each temperature.

    These (J, K, 15) numbers are all that the search needs: the ECE is the sum over bins of the absolute total over
    classes, divided by N, and another temperature of one class changes only that class's own sums.
    """
    n, k = z.shape
    edges, correct = np.arange(N_BINS + 1) / N_BINS, (predicted == y).astype(np.float64)
    result = np.zeros((len(temperatures), k * N_BINS))
    for rows in row_chunks(n, k * len(temperatures)):  # short chunks: each is read once per temperature
        below = z[rows].astype(np.float64)
        below -= below.max(axis=1, keepdims=True)
        weight = np.empty_like(below)
        for j, t in enumerate(temperatures):
            with np.errstate(over="ignore"):  # masks near the largest number, at T < 1
                np.divide(below, t, out=weight)
            np.maximum(weight, -700.0, out=weight)  # the last normal exponential; denormals are slow
            confidence = 1.0 / np.exp(weight, out=weight).sum(axis=1)
            cell = predicted[rows] * N_BINS + bin_index(confidence - _EDGE_WIDTH, edges)
            result[j] += np.bincount(cell, correct[rows] - confidence, k * N_BINS)
    return result.reshape(len(temperatures), k, N_BINS)
