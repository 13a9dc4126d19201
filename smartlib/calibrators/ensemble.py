"""Ensemble temperature scaling: a mixture of tempered, original and uniform probabilities."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np

from smartlib.arrays import row_chunks
from smartlib.calibrators.base import Calibrator, keep_predictions, scaled_softmax, warn
from smartlib.calibrators.scaling import nll_temperature


class EnsembleTemperatureScaling(Calibrator):
    """Ensemble temperature scaling: w_1 softmax(z / T) + w_2 softmax(z) + w_3 uniform.

    T is that of `TemperatureScaling`. The weights then minimise the Brier score of the mixture on the validation data;
    this is a convex quadratic on the simplex, solved exactly, face by face.

    The uniform part is over the classes of the row whose logit is finite, so that a class masked by -inf keeps
    probability 0. Every part ranks the classes as z does or not at all, so that predictions are kept. Where rounding,
    or a weight of 1 on the uniform part, makes classes tie, the predicted class is raised by the last digit.

    Attributes after fit:
        temperature_: T > 0.
        weights_: (3,) of the tempered, the original and the uniform part; non-negative, sum 1.
        bound_hit_: "lower", "upper" or None, of the search for T.
        converged_: True; both solvers always end.

    Warns:
        CalibrationWarning: T hit a search bound, or the uniform part has all the weight.

    Source: Zhang, Kailkhura and Han 2020 (Mix-n-Match), with the squared error; the exact solver and the treatment of
        masked classes are ours.

    >>> logits = np.array([[2.0, 0.0], [0.0, 2.0], [0.0, 2.0], [2.0, 0.0]])
    >>> ets = EnsembleTemperatureScaling().fit(logits, [0, 1, 1, 1])     # three of four right
    >>> ets.predict_proba(logits).round(6).tolist()[0]
    [0.75, 0.25]
    """

    registry_name = "ets"
    # T and two weights; the third is what they leave.
    n_parameters = 3
    learned = ("temperature_", "weights_")

    def _fit(self, z: np.ndarray, y: np.ndarray, *, features: Any, head: Any) -> None:
        self.temperature_, self.bound_hit_ = nll_temperature(z, y)
        self.converged_ = True
        gram, hits = np.zeros((3, 3)), np.zeros(3)
        for rows in row_chunks(len(z), 4 * z.shape[1]):  # three parts and a temporary at once
            parts = _parts(z[rows], self.temperature_)
            hits += parts[:, np.arange(len(y[rows])), y[rows]].sum(axis=1)
            flat = parts.reshape(3, -1)
            gram += flat @ flat.T
        self.weights_ = simplex_minimum(gram / len(y), hits / len(y))
        if self.weights_[2] == 1:
            warn(
                "EnsembleTemperatureScaling: the uniform part has all the weight; the logits say nothing about the "
                "labels, or labels and logits do not belong together."
            )

    def _predict_proba(self, z: np.ndarray, dtype: type, *, features: Any) -> np.ndarray:
        result = np.empty(z.shape, dtype=dtype)
        for rows in row_chunks(len(z), 4 * z.shape[1]):  # three parts and a temporary at once
            result[rows] = np.tensordot(self.weights_, _parts(z[rows], self.temperature_), axes=1)
            keep_predictions(result[rows], z[rows].argmax(axis=1))
        return result


def _parts(z: np.ndarray, t: float) -> np.ndarray:
    """(3, N, K): softmax(z / t), softmax(z), and the uniform distribution over the finite logits of each row."""
    parts = np.empty((3, *z.shape))
    parts[0], parts[1], parts[2] = scaled_softmax(z, t), scaled_softmax(z, 1.0), np.isfinite(z)
    parts[2] /= parts[2].sum(axis=1, keepdims=True)
    return parts


def simplex_minimum(gram: np.ndarray, linear: np.ndarray) -> np.ndarray:
    """The w that minimises w'Gw - 2 v'w with w >= 0, sum w = 1, exactly.

    The minimum is the stationary point of the face on which it lies, so each face is tried. Where several points are
    as low (T = 1 makes two parts equal), the one on the smallest and first face is taken.

    Args:
        gram: (M, M) G, positive semi-definite; M small, as there are 2^M - 1 faces.
        linear: (M,) v.

    Returns:
        (M,) w.

    Source: ours.

    >>> simplex_minimum(np.eye(3), np.array([0.5, 0.25, -5.0])).round(6).tolist()
    [0.625, 0.375, 0.0]
    """
    m = len(linear)
    found = []
    for size in range(1, m + 1):
        for face in map(list, combinations(range(m), size)):
            conditions = np.ones((size + 1, size + 1))
            conditions[:-1, :-1] = gram[np.ix_(face, face)]
            conditions[-1, -1] = 0.0
            solution = np.linalg.lstsq(conditions, np.append(linear[face], 1.0), rcond=None)[0][:-1]
            if solution.min() >= 0:
                w = np.zeros(m)
                w[face] = solution / solution.sum()
                found.append((w @ gram @ w - 2 * linear @ w, w))
    lowest = min(value for value, _ in found)
    return next(w for value, w in found if value <= lowest + 1e-12)
