"""Spline calibration: the cumulative gap between correctness and confidence, smoothed by a natural cubic spline.

Sort the validation samples by their top-label confidence f. The curve

    h(i / N) = 1/N sum_{j <= i} (correct_j - f_j)

needs no bins. Where it is straight, accuracy and confidence differ by its slope. So a smooth curve through it has the
derivative P(correct | f) - f at the quantile of f, and that is what corrects a confidence.
"""

from __future__ import annotations

import numpy as np
from scipy.interpolate import CubicSpline

from smartlib.calibrators.base import ConfidenceCalibrator
from smartlib.calibrators.binning import rounded_confidence, warn_if_few_distinct, warn_if_outside

N_KNOTS = 6


class SplineCalibration(ConfidenceCalibrator):
    """Spline calibration of the top-label confidence, with six knots.

    The spline has equally spaced knots on the quantiles 0 .. 1 and is fitted to h at 0, 1/N, ..., 1 by least squares.
    Equal confidences share their correctness equally: h is a straight line over the quantiles that they fill, and their
    correction is the mean derivative of the spline there (for a single sample, over its 1/N). Between two validation
    confidences the map is linear, outside of them constant. It may reach 1, where one later error has an infinite NLL.

    Attributes after fit:
        knot_values_: (6,) the spline at its knots.
        confidence_: (J,) the distinct validation confidences, ascending. calibrated_: (J,) what they are mapped to,
            within [0, 1].

    Source: Gupta et al. 2021; the treatment of ties is ours.

    >>> right = np.repeat(np.arange(10, 16), 20)             # of twenty predictions each; confidence: a tenth more
    >>> logits = np.log(np.stack([right / 20 + 0.1, 0.9 - right / 20], axis=1))
    >>> spline = SplineCalibration().fit(logits, np.tile(np.arange(20), 6) >= right)
    >>> spline.calibrated_.round(6).tolist()
    [0.5, 0.55, 0.6, 0.65, 0.7, 0.75]
    """

    registry_name = "spline"
    n_parameters = N_KNOTS
    learned = ("knot_values_", "confidence_", "calibrated_")

    def _fit_confidence(self, f: np.ndarray, correct: np.ndarray) -> None:
        f = rounded_confidence(f)
        warn_if_few_distinct(self, f, N_KNOTS, "knots of the spline")
        self.confidence_, group, size = np.unique(f, return_inverse=True, return_counts=True)
        n = len(f)
        ends = np.concatenate([[0], np.cumsum(size)]) / n
        gaps = np.bincount(group, correct) - size * self.confidence_
        h = np.concatenate([[0.0], np.cumsum(gaps)]) / n
        knots, quantile = np.linspace(0, 1, N_KNOTS), np.arange(n + 1) / n
        basis = CubicSpline(knots, np.eye(N_KNOTS), bc_type="natural")(quantile)
        self.knot_values_ = np.linalg.lstsq(basis, np.interp(quantile, ends, h), rcond=None)[0]
        spline = CubicSpline(knots, self.knot_values_, bc_type="natural")
        correction = np.diff(spline(ends)) * n / size
        self.calibrated_ = np.clip(self.confidence_ + correction, 0.0, 1.0)

    def _confidence(self, f: np.ndarray) -> np.ndarray:
        warn_if_outside(self, f, self.confidence_[[0, -1]])
        return np.interp(rounded_confidence(f), self.confidence_, self.calibrated_)
