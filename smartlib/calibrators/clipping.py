"""Feature clipping: large features make a network over-confident, so they are cut off before its last layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from smartlib.arrays import row_chunks
from smartlib.binned_errors import expected_calibration_error
from smartlib.calibrators.base import Calibrator, warn

# A clip counts only if it keeps more than this share of the accuracy.
MIN_ACCURACY = 0.99
# Grid of C: from the largest |feature| downwards, 2 % a step, over ten octaves.
_GRID = 2.0 ** (-np.arange(321) / 32)
# The head must give the logits up to this share of their own spread. bfloat16 is good to 0.01, another network is not
# to 0.5.
_TOLERANCE = 0.05


class FeatureClipping(Calibrator):
    """Feature clipping: softmax of the classifier's last layer, applied to features that are clamped to [-C, C].

    C is sought on a grid from the largest validation |feature|, where nothing is clipped, downwards, until the
    validation accuracy is no longer above 0.99 of the original one. Of these, the C with the lowest validation ECE
    (15 bins of equal width) is taken, the largest such C if there are several. Predictions may change.

    At prediction the logits give the number of classes, the type of the result, and the impossible classes (-inf); all
    else comes from the features.

    Attributes after fit:
        clip_: C > 0, in units of the features; 0 where all features are 0.
        head_weight_, head_bias_: (K, D) and (K,), copies of the last layer.
        ece_, accuracy_: on the validation data, with clipping.

    Costs: a fit applies the last layer up to 320 times, usually about 100 times, to all N samples.

    Raises at fit:
        ValueError: the head applied to the features does not give the logits, up to a constant per row and to rounding.

    Source: Tao et al. 2025. They give a grid of fixed step 0.01; one that follows the features' own scale is ours. The
        limit of accuracy is that of the SMART authors' comparison.

    >>> features = np.array([[4.0, 0.0], [0.0, 4.0], [4.0, 0.0], [4.0, 0.0]])
    >>> labels = [0, 1, 1, 0]                                       # three of four right, at confidence 0.98
    >>> fc = FeatureClipping().fit(features, labels, features=features, head=(np.eye(2), np.zeros(2)))
    >>> fc.predict_proba(features[:1], features=features[:1]).round(2)
    array([[0.75, 0.25]])
    """

    registry_name = "fc"
    n_parameters = 1
    needs = ("features", "head")
    keeps_predictions = False
    learned = ("clip_", "head_weight_", "head_bias_")

    def _fit(self, z: np.ndarray, y: np.ndarray, *, features: Any, head: Any) -> None:
        self.head_weight_, self.head_bias_ = head
        largest = max(float(features.max()), -float(features.min()))
        self._check_head(z, features, largest)
        if largest == 0:
            warn("FeatureClipping: all features are 0, so there is nothing to clip.")
        required = MIN_ACCURACY * (len(y) - self.n_errors_) / len(y)
        self.ece_ = np.inf
        for clip in largest * _GRID if largest > 0 else [0.0]:
            confidence, correct = self._top_label(z, y, features, clip)
            accuracy = float(correct.mean())
            if np.isfinite(self.ece_) and not accuracy > required:
                break
            ece = expected_calibration_error(confidence, correct)
            if ece < self.ece_:
                self.clip_, self.ece_, self.accuracy_ = float(clip), ece, accuracy

    def _head_logits(self, z: np.ndarray, features: np.ndarray, clip: float) -> Iterator[tuple[slice, np.ndarray]]:
        """Chunks of rows with the head's logits at clipped features, float64, largest entry 0; -inf where z is."""
        k, d = self.head_weight_.shape
        for rows in row_chunks(len(z), k + d):
            u = np.clip(features[rows].astype(np.float64), -clip, clip) @ self.head_weight_.T
            u += self.head_bias_
            u[np.isneginf(z[rows])] = -np.inf
            u -= u.max(axis=1, keepdims=True)
            yield rows, u

    def _top_label(self, z: np.ndarray, y: np.ndarray, features: np.ndarray, clip: float) -> tuple:
        confidence, correct = np.empty(len(y)), np.empty(len(y))
        for rows, u in self._head_logits(z, features, clip):
            correct[rows] = u.argmax(axis=1) == y[rows]
            confidence[rows] = 1 / np.exp(u, out=u).sum(axis=1)
        return confidence, correct

    def _check_head(self, z: np.ndarray, features: np.ndarray, largest: float) -> None:
        error = spread = worst = worst_row = 0
        for rows, u in self._head_logits(z, features, largest):
            finite = np.isfinite(z[rows])
            own = np.where(finite, z[rows], 0.0).astype(np.float64)
            count = finite.sum(axis=1, keepdims=True)
            difference = np.where(finite, u, 0.0) - own
            for array in (difference, own):  # up to a constant per row
                array -= array.sum(axis=1, keepdims=True) / count
                array *= finite
            with np.errstate(over="ignore"):
                error += (difference**2).sum()
                spread += (own**2).sum()
            by_row = np.abs(difference).max(axis=1)
            if by_row.max() > worst:
                worst, worst_row = by_row.max(), rows.start + int(by_row.argmax())
        if not np.isfinite(error) or np.sqrt(error) > _TOLERANCE * np.sqrt(spread) + 1e-6 * np.sqrt(z.size):
            share = np.sqrt(error / spread) if 0 < spread < np.inf else np.inf
            raise ValueError(
                "the head applied to the features does not give the logits: beyond a constant per row they differ by "
                f"up to {worst:.3g} (row {worst_row}), on average by {share:.0%} of the logits' own spread. Logits, "
                "features and head must come from one network, in one order of samples and classes, and the logits "
                "must not have been scaled, nor masked by anything but -inf."
            )

    def _predict_proba(self, z: np.ndarray, dtype: type, *, features: Any) -> np.ndarray:
        result = np.empty(z.shape, dtype=dtype)
        for rows, u in self._head_logits(z, features, self.clip_):
            np.exp(u, out=u)
            u /= u.sum(axis=1, keepdims=True)
            result[rows] = u
        return result
