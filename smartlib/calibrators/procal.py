"""ProCal: the top-label confidence corrected by the proximity of the sample, where features are sparse and elsewhere.

A calibrator of the confidence alone gives all samples of one confidence the same correction. ProCal looks at pairs
(confidence, proximity), see `smartlib.proximity`, and asks which share of the validation samples near a pair is right.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.special import expit
from sklearn.isotonic import IsotonicRegression

from smartlib.arrays import as_count
from smartlib.binned_errors import bin_index
from smartlib.calibrators.base import Calibrator, warn, with_confidence
from smartlib.proximity import N_NEIGHBOURS, proximity, proximity_edges, unit_rows
from smartlib.toplabel import confidence_of

# Fewer samples than this have no spread that a bandwidth could follow.
MIN_GROUP = 3
# A standard deviation below this is rounding: features are kept in float32.
MIN_SPREAD = 1e-6
# Pairs of samples that are handled at once: they stay in the processor's cache.
_BLOCK = 2**14
_COORDINATES = ("confidence", "proximity")
_METHODS = ("density_ratio", "isotonic")


class ProCal(Calibrator):
    """Proximity-informed calibration of the top-label confidence; the other classes share the rest.

    Both methods are non-parametric: what is learned are the validation samples themselves. A pair (confidence,
    proximity) outside their range is moved to the nearest end of each. A validation sample's own proximity leaves
    itself out, so that it is one of a new sample; the same sample at prediction finds itself among its neighbours.

    Args:
        method: "density_ratio" (default): Gaussian kernel densities k of the pairs of right and of wrong validation
            samples; the new confidence is P(right) k_right / (P(right) k_right + P(wrong) k_wrong). Kernels are
            products over the two coordinates; their widths are 1.06 s n^(-1/6), with s the standard deviation of the
            coordinate in the n samples of the group (normal reference rule). Where a group has fewer than 3 samples, or
            a coordinate hardly varies in it, s is that of all samples; a coordinate that varies nowhere is left out.
            "isotonic": isotonic regression of right or wrong on the confidence, within each bin of proximity. Its
            confidences may be exactly 1, where a single error makes the likelihood zero.
        n_neighbours: neighbours of the proximity.
        n_proximity_bins: bins of equal mass of "isotonic"; bins that stay empty, because of ties, are left out.

    Attributes after fit:
        reference_: (n, D) float32, directions of the validation features. A saved file holds about 25 bytes for each of
            its numbers: 16 MB for 10,000 × 64.
        confidence_, proximity_, correct_: (n,) of the validation samples.

    Costs: n distances in D dimensions, and for "density_ratio" n kernels, per predicted sample: for n = 25,000 and
        50,000 predictions about 30 seconds on one core.

    Raises at fit:
        ValueError: a bad setting; "density_ratio" without any error, or with nothing but errors.

    Source: Xiong et al. 2023. The widths, 10 neighbours and 5 bins are those of the authors' code; there "isotonic" is
        the bin-mean-shift of isotonic regression, applied to each class. The rules for small groups are ours.

    >>> rng = np.random.default_rng(0)
    >>> features = np.append(rng.normal(size=(200, 8)), 50 + rng.normal(size=(200, 8)), axis=0)    # sparse, then dense
    >>> logits = np.tile([1.5, 0.0], (400, 1)) + 0.1 * rng.normal(size=(400, 2))                   # confidence 0.82
    >>> labels = (np.arange(400) % 10 >= np.repeat([6, 9], 200)).astype(int)                       # accuracy 0.6, 0.9
    >>> procal = ProCal().fit(logits, labels, features=features)
    >>> probs = procal.predict_proba(logits, features=features)
    >>> print(probs[:200, 0].mean().round(1), probs[200:, 0].mean().round(1))
    0.6 0.9
    """

    registry_name = "procal"
    needs = ("features",)
    learned = ("reference_", "confidence_", "proximity_", "correct_")

    def __init__(self, *, method: str = "density_ratio", n_neighbours: int = N_NEIGHBOURS, n_proximity_bins: int = 5):
        self.method = method
        self.n_neighbours = n_neighbours
        self.n_proximity_bins = n_proximity_bins

    @property
    def n_parameters(self) -> int:
        """The numbers that are kept: (D + 3) n. Known after the fit."""
        return self.reference_.size + 3 * len(self.confidence_)

    def _fit(self, z: np.ndarray, y: np.ndarray, *, features: Any, head: Any) -> None:
        if self.method not in _METHODS:
            raise ValueError(f"method must be one of {', '.join(map(repr, _METHODS))}, got {self.method!r}")
        as_count(self.n_neighbours, "n_neighbours")
        as_count(self.n_proximity_bins, "n_proximity_bins")
        by_density = self.method == "density_ratio"
        if by_density and self.n_errors_ in (0, len(y)):
            what = "right" if self.n_errors_ == 0 else "wrong"
            raise ValueError(
                f"all {len(y)} validation predictions are {what}: ProCal(method='density_ratio') compares right with "
                "wrong samples and needs some of both; use more validation data, or method='isotonic'"
            )
        self.reference_ = unit_rows(features)
        self.confidence_ = confidence_of(z, 1.0)
        self.proximity_ = proximity(self.reference_, n_neighbours=self.n_neighbours)
        self.correct_ = (z.argmax(axis=1) == y).astype(np.int64)
        if len(y) <= self.n_neighbours:
            warn(
                f"ProCal: {len(y)} validation samples have only {len(y) - 1} neighbours each, not {self.n_neighbours}."
            )
        points = self._points()
        for name, spread in zip(_COORDINATES, points.std(axis=0), strict=True):
            if spread < MIN_SPREAD:
                warn(f"ProCal: the {name} of all {len(y)} validation samples is the same, so it tells nothing.")
        if by_density:
            for what, group in (("right", points[self.correct_ == 1]), ("wrong", points[self.correct_ == 0])):
                if len(group) < MIN_GROUP:
                    warn(f"ProCal: only {len(group)} of {len(y)} validation predictions are {what}, too few for a "
                         "density; its kernels get the spread of all samples.")  # fmt: skip

    def _points(self) -> np.ndarray:
        return np.column_stack([self.confidence_, self.proximity_])

    def _predict_proba(self, z: np.ndarray, dtype: type, *, features: Any) -> np.ndarray:
        points = self._points()
        low, high = points.min(axis=0), points.max(axis=0)
        new = np.column_stack(
            [confidence_of(z, 1.0), proximity(features, self.reference_, n_neighbours=self.n_neighbours)]
        )
        outside = ((new < low - MIN_SPREAD) | (new > high + MIN_SPREAD)).mean(axis=0)
        for name, share, start, end in zip(_COORDINATES, outside, low, high, strict=True):
            if share > 0.01:
                warn(
                    f"ProCal: {share:.1%} of the samples have a {name} outside the fitted range {start:.3g} .. "
                    f"{end:.3g}; they are taken at its end. Fit on data like those to be calibrated."
                )
        new, right = np.clip(new, low, high), self.correct_ == 1
        if self.method == "density_ratio":
            calibrated = density_ratio(new, points, right)
        else:
            calibrated = isotonic(new, points, right, self.n_proximity_bins)
        return with_confidence(z, calibrated, dtype)


def density_ratio(new: np.ndarray, points: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Probability of being right at new pairs, by Bayes' rule with kernel densities.

    Args:
        new: (M, 2) confidence and proximity. points: (n, 2) of the validation samples. right: (n,) bool, of both kinds.

    Returns:
        (M,) in [0, 1].
    """
    log_odds = np.zeros(len(new))
    for sign, group in ((1, points[right]), (-1, points[~right])):
        width = bandwidths(group, points)
        # P(group) k_group = (n_group / n) (sum of kernels) / (n_group · widths): the number of its samples cancels.
        log_odds += sign * (_log_kernel_sum(new / width, group / width) - np.log(width).sum())
    return expit(log_odds)


def bandwidths(group: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Kernel width of each coordinate, (2,), for the (m, 2) pairs of a group among all (n, 2); see `ProCal`."""
    spread = group.std(axis=0) if len(group) >= MIN_GROUP else np.zeros(2)
    spread = np.where(spread < MIN_SPREAD, points.std(axis=0), spread)
    # With a width of one, a coordinate that does not vary cancels between the groups.
    return np.where(spread < MIN_SPREAD, 1.0, 1.06 * spread * len(group) ** (-1 / 6))


def _log_kernel_sum(new: np.ndarray, points: np.ndarray) -> np.ndarray:
    """log Σ_j exp(-|x - x_j|² / 2) for (M, 2) and (n, 2); exact also far from all points, where the sum underflows."""
    result = np.empty(len(new))
    new, points = new * np.sqrt(0.5), points.T * np.sqrt(0.5)
    step = max(1, _BLOCK // points.shape[1])
    for start in range(0, len(new), step):
        rows = slice(start, start + step)
        square, other = (new[rows, i, None] - points[i] for i in (0, 1))
        square *= square
        other *= other
        square += other
        nearest = square.min(axis=1)
        np.subtract(nearest[:, None], square, out=square)
        # exp(-50) adds nothing to the nearest kernel's 1, and exponentials that underflow take four times as long.
        np.maximum(square, -50.0, out=square)
        result[rows] = np.log(np.exp(square, out=square).sum(axis=1)) - nearest
    return result


def isotonic(new: np.ndarray, points: np.ndarray, right: np.ndarray, n_proximity_bins: int) -> np.ndarray:
    """Probability of being right at new pairs, by isotonic regression on the confidence in each bin of proximity.

    Args, Returns: as for :func:`density_ratio`; ``right`` may be of one kind only.
    """
    edges = proximity_edges(points[:, 1], n_proximity_bins)
    occupied = np.unique(bin_index(points[:, 1], edges))
    edges = np.concatenate([[-np.inf], edges[occupied[1:]], [np.inf]])
    known, asked = bin_index(points[:, 1], edges), bin_index(new[:, 1], edges)
    result = np.empty(len(new))
    for b in np.unique(asked):
        curve = IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip")
        curve.fit(points[known == b, 0], right[known == b].astype(np.float64))
        result[asked == b] = curve.predict(new[asked == b, 0])
    return result
