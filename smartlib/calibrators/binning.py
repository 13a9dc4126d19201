"""Step functions and monotone functions of the top-label confidence: histogram binning, isotonic regression, BBQ.

Each maps the confidence of a prediction to the share of correct predictions among validation samples with about this
confidence. The other classes share the rest in proportion (`smartlib.calibrators.base.with_confidence`). Multiplying a
whole row by the ratio of the two confidences and normalising it again, as some public versions do, gives back the row.

Where all predictions of a bin, or of the highest confidences, are right, the first two return a confidence of exactly
1, at which one later error has an infinite NLL. BBQ's prior pulls towards the middle of the bin, which in a narrow bin
next to 1 is hardly less: in float32 it may round to 1.
"""

from __future__ import annotations

import numpy as np
from scipy.special import gammaln, softmax
from sklearn.isotonic import IsotonicRegression
from sklearn.utils.validation import check_is_fitted

from smartlib.binned_errors import N_BINS, bin_edges, bin_index
from smartlib.calibrators.base import ConfidenceCalibrator, warn

# BBQ: numbers of bins from N^(1/3) / SPREAD to N^(1/3) * SPREAD, and the pseudo-counts of a model's prior.
SPREAD = 10.0
PSEUDO_COUNTS = 2.0


class HistogramBinning(ConfidenceCalibrator):
    """Histogram binning of the top-label confidence: every bin returns its accuracy on the validation data.

    A bin without validation samples says nothing, so there a confidence stays as it is. Equal widths are the default:
    on validation data of the shipped models, bins of equal mass have a similar ECE and a much larger NLL.

    Args:
        n_bins: M >= 1.
        binning: "width" (bins of equal width on [0, 1]) or "mass" (equal numbers of validation samples).

    Attributes after fit:
        edges_: (M + 1,) bins (lo, hi], the first one closed. count_: (M,) validation samples in each.
        accuracy_: (M,) share of correct ones; 0 in an empty bin.
        confidence_range_: smallest and largest validation confidence.

    Source: Zadrozny and Elkan 2001, on the top label as in Guo et al. 2017; empty bins: ours.

    >>> logits = np.log([[0.9, 0.1]] * 4)
    >>> hb = HistogramBinning(n_bins=1).fit(logits, [0, 0, 0, 1])          # 90 % sure, right three times of four
    >>> hb.predict_proba(logits[:1]).round(6).tolist()
    [[0.75, 0.25]]
    """

    registry_name = "hb"
    learned = ("edges_", "count_", "accuracy_", "confidence_range_")

    def __init__(self, *, n_bins: int = N_BINS, binning: str = "width"):
        self.n_bins = n_bins
        self.binning = binning

    @property
    def n_parameters(self) -> int:
        """The accuracies of the bins that are not empty, and the inner edges where these are learned too."""
        check_is_fitted(self, self.learned)
        return int((self.count_ > 0).sum()) + (len(self.edges_) - 2 if self.binning == "mass" else 0)

    def _fit_confidence(self, f: np.ndarray, correct: np.ndarray) -> None:
        f = rounded_confidence(f)
        self.edges_ = rounded_confidence(bin_edges(f, self.n_bins, self.binning))
        index = bin_index(f, self.edges_)
        self.count_ = np.bincount(index, minlength=self.n_bins)
        self.accuracy_ = np.bincount(index, correct, self.n_bins) / np.maximum(self.count_, 1)
        self.confidence_range_ = [float(f.min()), float(f.max())]
        warn_if_few_distinct(self, f, self.n_bins, "bins")

    def _confidence(self, f: np.ndarray) -> np.ndarray:
        index = bin_index(rounded_confidence(f), self.edges_)
        warn_if_outside(self, f, self.confidence_range_)
        return np.where(self.count_[index] > 0, self.accuracy_[index], f)


class IsotonicCalibration(ConfidenceCalibrator):
    """Isotonic regression of correctness on the top-label confidence: the best map that never falls, by least squares.

    Between validation confidences the map is linear, outside of them constant.

    Attributes after fit:
        confidence_, accuracy_: (J,) each, the corners of the map, ascending.

    Source: Zadrozny and Elkan 2002, on the top label; the solver is scikit-learn's.

    >>> logits = np.log([[0.6, 0.4], [0.7, 0.3], [0.8, 0.2], [0.9, 0.1]])
    >>> ir = IsotonicCalibration().fit(logits, [1, 0, 1, 0])              # wrong, right, wrong, right
    >>> ir.accuracy_.tolist()                                               # the two in the middle violate the order
    [0.0, 0.5, 0.5, 1.0]
    """

    registry_name = "ir"
    learned = ("confidence_", "accuracy_")

    @property
    def n_parameters(self) -> int:
        """Two coordinates per corner."""
        check_is_fitted(self, self.learned)
        return 2 * len(self.confidence_)

    def _fit_confidence(self, f: np.ndarray, correct: np.ndarray) -> None:
        f = rounded_confidence(f)
        isotonic = IsotonicRegression(y_min=0.0, y_max=1.0, out_of_bounds="clip").fit(f, correct)
        self.confidence_, self.accuracy_ = isotonic.X_thresholds_, isotonic.y_thresholds_
        warn_if_few_distinct(self, f, 2, "points that a line needs")

    def _confidence(self, f: np.ndarray) -> np.ndarray:
        warn_if_outside(self, f, self.confidence_[[0, -1]])
        return np.interp(rounded_confidence(f), self.confidence_, self.accuracy_)


class BBQ(ConfidenceCalibrator):
    """Bayesian binning into quantiles: binnings of equal mass, averaged by how well each explains the data.

    One model for every whole number of bins B from N^(1/3) / 10 to 10 N^(1/3), at most the number of distinct
    confidences, all equally likely beforehand. In bin b of a model, m_b of n_b predictions are right, and the accuracy
    has the prior Beta(a p_b, a (1 - p_b)) with p_b the middle of the bin and a = 2 / B, two pseudo-counts for the whole
    model. So the data have the probability

        P(data | B) = prod_b G(a) / G(n_b + a) * G(m_b + a p_b) / G(a p_b) * G(n_b - m_b + a (1 - p_b)) / G(a (1 - p_b))

    (G the gamma function), and the bin's accuracy the posterior mean (m_b + a p_b) / (n_b + a). The prediction is the
    average over all models, weighted by P(data | B). Models of a weight below 1e-12 are left out of it; together they
    would move no confidence by 1e-9. The average is again a step function of the confidence; that is what is stored.

    Attributes after fit:
        n_bins_: (J,) the numbers of bins. weight_: (J,) posterior probability of each; they sum to one.
        edges_: (M + 1,) bins (lo, hi] of the averaged map, the first one closed. accuracy_: (M,) its values.
        confidence_range_: smallest and largest validation confidence.

    Source: Naeini, Cooper and Hauskrecht 2015, on the top label. They state the range of B, the prior and the average;
        whole numbers inside that range, and no more bins than distinct confidences, are our reading.

    >>> rng = np.random.default_rng(0)
    >>> logits, labels = rng.normal(size=(1000, 3)), rng.integers(3, size=1000)        # right one time in three
    >>> bbq = BBQ().fit(logits, labels)
    >>> print(bbq.n_bins_[bbq.weight_.argmax()], bbq.accuracy_.mean().round(2))
    1 0.33
    """

    registry_name = "bbq"
    learned = ("edges_", "accuracy_", "confidence_range_")

    @property
    def n_parameters(self) -> int:
        """The values and the inner edges of the averaged map."""
        check_is_fitted(self, self.learned)
        return 2 * len(self.accuracy_) - 1

    def _fit_confidence(self, f: np.ndarray, correct: np.ndarray) -> None:
        order = np.argsort(f)
        f, right = rounded_confidence(f[order]), np.concatenate([[0.0], np.cumsum(correct[order])])
        root = np.round(np.cbrt(len(f)), 9)  # so that the root of 1000 is 10
        most = int(np.floor(root * SPREAD))
        warn_if_few_distinct(self, f, most, "bins of its finest model")
        most = min(most, len(np.unique(f)))
        self.n_bins_ = np.arange(min(max(int(np.ceil(root / SPREAD)), 1), most), most + 1)
        models = [_quantile_model(f, right, int(b)) for b in self.n_bins_]
        self.weight_ = softmax([evidence for evidence, _, _ in models])
        # A step function is its first value and its jumps; the average is that of the first values and of the jumps.
        kept = np.flatnonzero(self.weight_ > 1e-12)
        edges = np.concatenate([models[j][1][1:-1] for j in kept])
        jumps = np.concatenate([self.weight_[j] * np.diff(models[j][2]) for j in kept])
        inner, place = np.unique(edges, return_inverse=True)
        steps = np.concatenate([[0.0], np.cumsum(np.bincount(place, jumps, len(inner)))])
        self.edges_ = np.concatenate([[0.0], inner, [1.0]])
        self.accuracy_ = np.clip(sum(self.weight_[j] * models[j][2][0] for j in kept) + steps, 0.0, 1.0)
        self.confidence_range_ = [float(f[0]), float(f[-1])]

    def _confidence(self, f: np.ndarray) -> np.ndarray:
        warn_if_outside(self, f, self.confidence_range_)
        return self.accuracy_[bin_index(rounded_confidence(f), self.edges_)]


def _quantile_model(f: np.ndarray, right: np.ndarray, n_bins: int) -> tuple[float, np.ndarray, np.ndarray]:
    """log P(data | B), edges (B + 1,) and posterior mean accuracies (B,) of one binning of equal mass.

    Args:
        f: (N,) ascending confidences. right: (N + 1,) number of correct ones among the first i. n_bins: B; fewer where
            ties make edges equal.
    """
    edges = np.unique(rounded_confidence(bin_edges(f, n_bins, "mass")))
    last = np.searchsorted(f, edges[1:], side="right")
    n, m = np.diff(last, prepend=0), np.diff(right[last], prepend=0.0)
    a, middle = PSEUDO_COUNTS / len(n), (edges[:-1] + edges[1:]) / 2
    p, q = a * middle, a * (1 - middle)
    evidence = gammaln(a) - gammaln(n + a) + gammaln(m + p) - gammaln(p) + gammaln(n - m + q) - gammaln(q)
    return float(evidence.sum()), edges, (m + p) / (n + a)


def rounded_confidence(f: np.ndarray) -> np.ndarray:
    """Confidences (or edges between them) to twelve decimals.

    The last digits depend on the processor and on the order in which classes are summed. Near 1, where a fifth of all
    confidences of a trained network may lie, they would decide about ranks, ties and bins.
    """
    return np.round(f, 12)


def warn_if_few_distinct(calibrator: ConfidenceCalibrator, f: np.ndarray, least: int, of_what: str) -> None:
    """Warn where rounded confidences ``f`` have fewer than ``least`` distinct values."""
    n_distinct = len(np.unique(f))
    if n_distinct < least:
        warn(
            f"{type(calibrator).__name__}: {len(f)} samples with {n_distinct} distinct confidence(s), fewer than the "
            f"{least} {of_what}, do not determine the fit. Use more validation data."
        )


def warn_if_outside(calibrator: ConfidenceCalibrator, f: np.ndarray, fitted: tuple[float, float]) -> None:
    """Warn where more than one confidence in a hundred lies outside the ``fitted`` range (low, high)."""
    low, high = fitted
    f = rounded_confidence(f)
    outside = float(np.mean((f < low) | (f > high)))
    if outside > 0.01:
        warn(
            f"{type(calibrator).__name__}: {outside:.1%} of the confidences lie outside the fitted range "
            f"{low:.3g} .. {high:.3g}, about which the validation data say nothing. Fit on data like those to be "
            "calibrated."
        )
