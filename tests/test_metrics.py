"""Metrics: hand values, the convention of the bins, other implementations as oracles, invariants."""

import copy
import pickle
import tracemalloc
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, brier_score_loss, log_loss

from smartlib import arrays
from smartlib.binned_errors import debiased_square
from smartlib.metrics import (
    ALL_METRICS,
    METRICS,
    TOP_LABEL_ERRORS,
    Evaluation,
    bin_edges,
    bin_index,
    brier_decomposition,
    brier_score,
    classwise_ece,
    confidence_auroc,
    debiased_ece,
    evaluate,
    expected_calibration_error,
    kde_ece,
    negative_log_likelihood,
    reliability_bins,
    smece,
    smooth_calibration_error,
    sweep_ece,
    top_label,
)

everything_of_the_top_label = pytest.mark.parametrize(
    "metric", [pytest.param(m, id=name) for name, m in {**TOP_LABEL_ERRORS, "auroc": confidence_auroc}.items()]
)
every_error = pytest.mark.parametrize("name", TOP_LABEL_ERRORS)


def predictions(n=300, k=5, seed=0):
    rng = np.random.default_rng(seed)
    return rng.dirichlet(np.full(k, 0.4), n), rng.integers(0, k, n)


def ece_by_loops(confidence, correct, edges):
    """Σ_b n_b / N |accuracy − confidence| with bins (lo, hi], the first one closed, as the definition is printed."""
    total, seen = 0.0, 0
    for b, (low, high) in enumerate(pairwise(edges)):
        inside = [i for i, f in enumerate(confidence) if (low < f <= high) or (b == 0 and f == low)]
        seen += len(inside)
        if inside:
            gap = abs(np.mean([correct[i] for i in inside]) - np.mean([confidence[i] for i in inside]))
            total += len(inside) / len(confidence) * gap
    assert seen == len(confidence)
    return total


# --- ECE by hand --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "confidence, correct, n_bins, ece, mce",
    [
        ([0.95, 1.0], [1, 0], 15, 0.475, 0.475),  # one bin: |1/2 − .975|
        ([0.91] * 100, [1] * 91 + [0] * 9, 10, 0.0, 0.0),
        ([0.95, 0.3], [1, 0], 10, 0.175, 0.3),
        ([0.62, 0.68, 0.93, 0.97], [1, 0, 1, 1], 10, 0.1, 0.15),  # (.15 + .05) / 2
        ([0.0, 1.0], [0, 1], 15, 0.0, 0.0),
        ([0.0, 1.0], [1, 0], 15, 1.0, 1.0),
        ([0.0], [1], 1, 1.0, 1.0),
        ([0.5, 1.0], [1, 0], 1, 0.25, 0.25),
        ([0.5, 1.0], [1, 0], 2, 0.75, 1.0),  # .5 belongs to (0, .5]
    ],
)
def test_ece_and_mce_by_hand(confidence, correct, n_bins, ece, mce):
    assert expected_calibration_error(confidence, correct, n_bins) == pytest.approx(ece, abs=1e-14)
    assert expected_calibration_error(confidence, correct, n_bins, norm="max") == pytest.approx(mce, abs=1e-14)


@pytest.mark.parametrize("n_bins", [1, 2, 10, 15, 100])
@pytest.mark.parametrize("binning", ["width", "mass"])
def test_ece_equals_the_definition_by_loops(n_bins, binning):
    rng = np.random.default_rng(n_bins)
    f = np.round(rng.beta(3, 1, 200), 2)  # many ties, and values on the edges of 10 and 100 bins
    a = rng.random(200) < f
    expected = ece_by_loops(f, a, bin_edges(f, n_bins, binning))
    assert expected_calibration_error(f, a, n_bins, binning) == pytest.approx(expected, abs=1e-14)


# --- bins ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_bins", [1, 2, 7, 10, 15, 100])
def test_a_value_on_an_edge_belongs_to_the_bin_below_it_and_zero_to_the_first(n_bins):
    edges = bin_edges(np.array([]), n_bins, "width")
    assert edges[0] == 0
    assert edges[-1] == 1
    on_the_edges = np.array([b / n_bins for b in range(1, n_bins + 1)])
    assert bin_index(on_the_edges, edges).tolist() == list(range(n_bins))
    assert bin_index(np.nextafter(on_the_edges[:-1], 1), edges).tolist() == list(range(1, n_bins))
    assert bin_index(np.array([0.0, 5e-324]), edges).tolist() == [0, 0]


confidences = st.lists(st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.2, 0.5, 1.0])), min_size=1, max_size=40)


@given(confidences, st.integers(1, 60), st.sampled_from(["width", "mass"]), st.randoms())
def test_every_sample_is_counted_once_and_bins_hold_what_their_edges_say(values, n_bins, binning, random):
    f = np.array(values)
    a = np.array([random.random() < 0.5 for _ in values])
    bins = reliability_bins(f, a, n_bins, binning)
    assert bins.count.sum() == len(f)
    assert len(bins.edges) == n_bins + 1 == len(bins.count) + 1
    assert (np.diff(bins.edges) >= 0).all()
    filled = bins.count > 0
    low, high = bins.edges[:-1][filled], bins.edges[1:][filled]
    assert (bins.confidence[filled] <= high + 1e-15).all()
    assert (bins.confidence[filled] >= low - 1e-15).all()
    assert np.isnan(bins.confidence[~filled]).all()
    assert np.isnan(bins.accuracy[~filled]).all()
    ece = expected_calibration_error(f, a, n_bins, binning)
    assert ece == pytest.approx(np.nansum(bins.count * np.abs(bins.gap)) / len(f), abs=1e-12)
    assert 0 <= ece <= expected_calibration_error(f, a, n_bins, binning, "max") + 1e-12 <= 1 + 1e-12
    assert ece >= abs(a.mean() - f.mean()) - 1e-12


@pytest.mark.parametrize("n", [150, 151, 1000])
def test_bins_of_equal_mass_hold_equally_many_samples(n):
    f = np.random.default_rng(0).permutation(np.linspace(0.1, 0.9, n))
    count = reliability_bins(f, np.zeros(n), 15, "mass").count
    assert count.max() - count.min() <= 2
    assert count.sum() == n


def test_ties_stay_in_one_bin_of_equal_mass():
    """Ten at .5, five above: of three bins the first takes all ten, and the next is empty."""
    f = np.array([0.5] * 10 + [0.6, 0.7, 0.8, 0.9, 1.0])
    bins = reliability_bins(f, np.ones(15), 3, "mass")
    assert bins.count.tolist() == [10, 1, 4]  # the second edge lies at rank 10, on .6
    assert expected_calibration_error(f, np.ones(15), 3, "mass") == pytest.approx((5 + 0.4 + 0.6) / 15, rel=1e-13)


@pytest.mark.parametrize("binning", ["width", "mass"])
@pytest.mark.parametrize("value", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("n", [1, 3, 40])
def test_equal_confidences_give_the_plain_gap_in_any_number_of_bins(n, value, binning):
    a = np.arange(n) % 2
    gap = abs(a.mean() - value)
    assert expected_calibration_error([value] * n, a, 15, binning) == pytest.approx(gap, abs=1e-13)
    assert expected_calibration_error([value] * n, a, 15, binning, "max") == pytest.approx(gap, abs=1e-13)


@pytest.mark.parametrize("n_bins", [0, -1, 2.5])
@pytest.mark.parametrize("binning", ["width", "mass"])
def test_a_wrong_number_of_bins_is_refused(n_bins, binning):
    for call in (
        lambda: reliability_bins([0.5], [1], n_bins, binning),
        lambda: expected_calibration_error([0.5], [1], n_bins, binning),
        lambda: debiased_ece([0.5], [1], n_bins),
        lambda: classwise_ece([[0.5, 0.5]], [1], n_bins),
    ):
        with pytest.raises(ValueError, match=f"n_bins must be a whole number of at least 1, got {n_bins}"):
            call()


def test_an_unknown_binning_is_refused_by_name():
    with pytest.raises(ValueError, match='binning must be "width" or "mass", got \'quantile\''):
        expected_calibration_error([0.5], [1], binning="quantile")


def test_an_unknown_norm_is_refused_by_name():
    with pytest.raises(ValueError, match='norm must be "l1", "l2" or "max", got 2'):
        expected_calibration_error([0.5], [1], norm=2)


# --- the other top-label errors by hand ---------------------------------------------------------------------------


def test_the_l2_norm_is_the_root_of_the_mean_square_over_samples():
    # Bins of .62 and .68 (gap .15, two samples), and of .95 (gap .05, two samples): sqrt((.0225 + .0025) / 2).
    f, a = [0.62, 0.68, 0.93, 0.97], [1, 0, 1, 1]
    assert expected_calibration_error(f, a, 10, norm="l2") == pytest.approx(np.sqrt(0.0125), abs=1e-14)


def test_debiased_ece_by_hand():
    # One bin of four, one right: gap .65, variance (1/4)(3/4)/3 = .0625, and .4225 - .0625 = .6^2.
    assert debiased_ece([0.9] * 4, [1, 0, 0, 0], 1) == pytest.approx(0.6, abs=1e-14)
    # Gap 0, so that the variance makes it negative: 0.
    assert debiased_ece([0.5] * 4, [1, 1, 0, 0], 1) == 0
    # A bin of one sample says nothing; of two bins the other, with two of three samples, has gap .3 and variance 0.
    f = [0.7, 0.7, 0.9]
    assert reliability_bins(f, [1, 1, 0], 2, "mass").count.tolist() == [2, 1]
    assert debiased_ece(f, [1, 1, 0], 2) == pytest.approx(np.sqrt(2 / 3 * 0.09), abs=1e-14)
    assert debiased_ece([0.2], [1]) == 0


def test_debiasing_takes_the_noise_off():
    """For a calibrated model, the mean of the debiased square is 0; the plain square's is the noise."""
    rng, debiased, plain = np.random.default_rng(0), [], []
    f = np.sort(rng.uniform(0.5, 1, 1000))
    index = bin_index(f, bin_edges(f, 15, "mass"))
    for _ in range(400):
        a = (rng.random(1000) < f).astype(float)
        debiased.append(debiased_square(index, f, a, 15))
        plain.append(expected_calibration_error(f, a, binning="mass", norm="l2") ** 2)
    standard_error = np.std(debiased) / 20
    assert abs(np.mean(debiased)) < 4 * standard_error < np.mean(plain) / 5


def test_sweep_ece_by_hand():
    # Two bins: accuracies 1/2 and 1/2, gaps .2 and .2. Three bins would hold 2, 1, 1 samples: 1/2, then 0. Stop.
    assert sweep_ece([0.2, 0.4, 0.6, 0.8], [0, 1, 0, 1]) == pytest.approx(0.2, abs=1e-14)
    # Already two bins fall: one bin, |1/2 - .5|.
    assert sweep_ece([0.2, 0.4, 0.6, 0.8], [1, 1, 0, 0]) == pytest.approx(0.0, abs=1e-14)
    # Never falls: every sample is a bin of its own.
    assert sweep_ece([0.2, 0.4, 0.6, 0.8], [0, 0, 1, 1]) == pytest.approx((0.2 + 0.4 + 0.4 + 0.2) / 4, abs=1e-14)
    # Equal confidences stay together, so that one bin is all there is: |1/2 - .6|.
    assert sweep_ece([0.6] * 4, [0, 1, 0, 1]) == pytest.approx(0.1, abs=1e-14)


def test_kde_ece_by_hand():
    # Equal confidences leave the plain gap; those 1e-12 apart count as equal, those 1e-6 apart have a density.
    assert kde_ece([0.9, 0.9], [1, 0]) == pytest.approx(0.4, abs=1e-14)
    assert kde_ece([0.9, 0.9 + 1e-12], [1, 0]) == pytest.approx(0.4, abs=1e-9)
    assert kde_ece([0.9, 0.9 + 1e-6], [1, 1]) == pytest.approx(0.1, abs=1e-6)
    # All wrong: the integral of v times the density, the mean confidence, while the kernel stays inside [0, 1].
    f = np.linspace(0.4, 0.6, 50)
    assert kde_ece(f, np.zeros(50)) == pytest.approx(0.5, abs=1e-7)


def test_smece_by_hand():
    # One residual of -.75 in place: smoothing leaves its mass, so sigma = .75, and so for a fourth of the samples.
    assert smece([0.75], [0]) == pytest.approx(0.75, abs=1e-9)
    assert smece([0.75, 1, 1, 1], [0, 1, 1, 1]) == pytest.approx(0.75 / 4, abs=1e-9)
    # Residuals +.75 / 2 at .25 and -.75 / 2 at .75 are antisymmetric about 1/2, and of their cosines the first alone is
    # left at such a bandwidth: with c = .75 cos(pi / 4), |2 c e cos(pi v)| integrates to 4 c e / pi, where e is
    # exp(-(pi sigma)^2 / 2). The next, three times the frequency, adds less than 2e-3.
    sigma = smece([0.25, 0.75], [1, 0])
    assert sigma == pytest.approx(4 * 0.75 * np.cos(np.pi / 4) * np.exp(-((np.pi * sigma) ** 2) / 2) / np.pi, abs=2e-3)
    assert smece([1.0], [0]) == 1
    assert smece([0.91] * 100, [1] * 91 + [0] * 9) < 1e-9


def test_auroc_by_hand():
    # Right: .9, .7; wrong: .8, .7. Pairs: .9 > .8, .9 > .7, .7 < .8, .7 = .7: (1 + 1 + 0 + 1/2) / 4.
    assert confidence_auroc([0.9, 0.7, 0.8, 0.7], [1, 1, 0, 0]) == 0.625
    assert confidence_auroc([0.9, 0.7], [1, 1]) == confidence_auroc([0.9, 0.7], [0, 0]) == 0.5


# --- inputs that broke other libraries, for every top-label metric ------------------------------------------------


@every_error
@pytest.mark.parametrize(
    "f, a, error",
    [
        ([0.95, 1.0], [1, 0], None),
        ([1.0, 1.0], [1, 0], 0.5),
        ([0.0], [0], 0.0),
        ([0.0], [1], 1.0),
        ([1.0], [0], 1.0),
        ([0.91] * 100, [1] * 91 + [0] * 9, 0.0),
        ([0.7] * 50, [1] * 20 + [0] * 30, 0.3),
        ([0.7] * 50, [1] * 50, 0.3),
        ([0.7] * 50, [0] * 50, 0.7),
        ([0.3, 0.9, 0.35], [1, 0, 1], None),
        ([0.2, 0.8], [0, 1], None),
    ],
)
def test_few_equal_and_extreme_confidences_are_counted_once_and_finite(name, f, a, error):
    """Where all confidences are equal, every error is the gap itself; the debiased one less the noise of n samples."""
    value = TOP_LABEL_ERRORS[name](f, a)
    assert type(value) is float and 0 <= value <= 1
    if error is not None:
        if name == "debiased_ece":
            rate = np.mean(a)
            error = np.sqrt(max(error**2 - rate * (1 - rate) / (len(a) - 1), 0.0)) if len(a) > 1 else 0.0
        assert value == pytest.approx(error, abs=1e-9)


@everything_of_the_top_label
@pytest.mark.parametrize(
    "f, a, message",
    [
        ([], [], "confidence is empty"),
        ([[0.5, 0.5]], [1], r"confidence must have shape \(N,\)"),
        ([0.5, 0.6], [1], "both must be"),
        ([0.5, 1.1], [1, 0], r"confidence 1\.1 in row 1 is outside"),
        ([0.5, np.nan], [1, 0], "confidence nan in row 1"),
        ([0.5, -0.1], [1, 0], r"confidence -0\.1 in row 1"),
        ([0.5, 0.6], [1, 2], "found 2 in row 1"),
        ([0.5, 0.6], [1, 0.5], r"found 0\.5 in row 1"),
    ],
)
def test_wrong_arrays_are_refused_by_every_metric(metric, f, a, message):
    with pytest.raises(ValueError, match=message):
        metric(f, a)


@everything_of_the_top_label
def test_every_kind_of_array_gives_the_same_value_and_is_left_alone(metric):
    rng = np.random.default_rng(0)
    f = np.round(rng.random(200), 3)
    a = (rng.random(200) < f).astype(int)
    value = metric(f, a)
    kept = f.copy()
    f.setflags(write=False)
    index = rng.permutation(200)
    for other_f, other_a in (
        (torch.tensor(kept, requires_grad=True), torch.tensor(a)),
        (pd.Series(f, index=index), pd.Series(a, index=index)),
        (f.tolist(), (a == 1).tolist()),
        (f.astype(">f8"), a[:, None]),
        (np.repeat(f, 2)[::2], a.astype(float)),
    ):
        assert metric(other_f, other_a) == value
    assert np.array_equal(f, kept)


@everything_of_the_top_label
def test_the_order_of_samples_changes_no_metric(metric):
    rng = np.random.default_rng(1)
    f = np.round(rng.random(300), 2)  # with ties
    a = rng.random(300) < f
    order = rng.permutation(300)
    assert metric(f[order], a[order]) == pytest.approx(metric(f, a), abs=1e-12)


@everything_of_the_top_label
def test_float32_confidences_are_accumulated_in_float64(metric):
    rng = np.random.default_rng(2)
    f = rng.random(5000).astype(np.float32)
    a = rng.random(5000) < f
    assert metric(f, a) == metric(f.astype(np.float64), a)


@every_error
def test_errors_of_calibrated_predictions_fall_with_the_sample(name):
    def mean_error(n):
        rng, errors = np.random.default_rng(3), []
        for _ in range(5):
            f = rng.uniform(0.3, 1, n)
            errors.append(TOP_LABEL_ERRORS[name](f, rng.random(n) < f))
        return np.mean(errors)

    assert mean_error(20_000) < 0.5 * mean_error(500) < 0.1


@every_error
def test_a_constant_gap_is_measured_by_every_error(name):
    """Accuracy .2 below confidence everywhere: each error is about .2, and the largest of a bin a little more."""
    rng = np.random.default_rng(4)
    f = rng.uniform(0.4, 0.8, 20_000)
    a = rng.random(20_000) < f - 0.2
    high = 0.26 if name == "mce" else 0.21
    assert 0.19 < TOP_LABEL_ERRORS[name](f, a) < high


@pytest.mark.parametrize("metric", [kde_ece, smece, sweep_ece], ids=lambda f: f.__name__)
def test_memory_is_bounded_by_a_small_multiple_of_the_input(metric):
    """A million samples, 16 MB: at most ten times as much, and 30 MB for the grids."""
    rng = np.random.default_rng(5)
    f = rng.random(1_000_000)
    a = (rng.random(1_000_000) < f).astype(float)
    metric(f[:10], a[:10])  # imports
    tracemalloc.start()
    metric(f, a)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 * (f.nbytes + a.nbytes) + 30e6


# --- classwise ECE ------------------------------------------------------------------------------------------------


def test_classwise_ece_is_the_mean_over_classes_of_the_ece_of_each():
    p, y = predictions()
    each = [ece_by_loops(p[:, k], y == k, np.arange(16) / 15) for k in range(5)]
    assert classwise_ece(p, y) == pytest.approx(np.mean(each), rel=1e-12)


@pytest.mark.parametrize("labels, present", [([1, 2, 1, 2], "1, 2"), ([0, 1, 0, 1], "0, 1"), ([2, 2, 2, 2], "2")])
def test_classwise_ece_averages_over_all_classes_those_without_labels_too(labels, present):
    """One bin: each class contributes |share of the class − mean probability|."""
    p = np.array([[0.5, 0.3, 0.2]] * 4)
    shares = np.bincount(labels, minlength=3) / 4
    assert classwise_ece(p, labels, n_bins=1) == pytest.approx(np.abs(shares - p[0]).sum() / 3, rel=1e-13)


def test_classwise_ece_of_two_classes_is_the_same_for_both():
    p, y = predictions(k=2)
    one = ece_by_loops(p[:, 1], y == 1, np.arange(11) / 10)
    zero = ece_by_loops(p[:, 0], y == 0, np.arange(11) / 10)
    assert classwise_ece(p, y, n_bins=10) == pytest.approx((one + zero) / 2, rel=1e-12)


@pytest.mark.parametrize("numbers", [1, 10, 33, 500])
def test_metrics_of_the_distribution_do_not_depend_on_the_chunks(numbers, monkeypatch):
    p, y = predictions(101)
    at_once = classwise_ece(p, y), brier_score(p, y), negative_log_likelihood(p, y)
    monkeypatch.setattr(arrays, "_CHUNK_NUMBERS", numbers)
    in_chunks = classwise_ece(p, y), brier_score(p, y), negative_log_likelihood(p, y)
    np.testing.assert_allclose(in_chunks, at_once, rtol=1e-13)


# --- proper scores ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [2, 5, 20])
def test_nll_equals_the_log_loss_of_scikit_learn(k):
    p, y = predictions(k=k)
    assert negative_log_likelihood(p, y) == pytest.approx(log_loss(y, p, labels=range(k)), rel=1e-12)


@pytest.mark.parametrize("k", [3, 5, 20])
def test_brier_score_equals_the_sum_of_squares_and_the_binary_ones_of_scikit_learn(k):
    p, y = predictions(k=k)
    assert brier_score(p, y) == pytest.approx(((p - np.eye(k)[y]) ** 2).sum() / len(y), rel=1e-13)
    one_class_each = [brier_score_loss(y == label, p[:, label]) for label in range(k)]
    assert brier_score(p, y) == pytest.approx(sum(one_class_each), rel=1e-12)


@pytest.mark.parametrize(
    "probs, labels, nll, brier",
    [([[0.5, 0.5]], [1], np.log(2), 0.5), ([[1.0, 0.0]], [0], 0.0, 0.0), ([[0.25, 0.75]] * 2, [0, 1],
      (np.log(4) + np.log(4 / 3)) / 2, (1.125 + 0.125) / 2)],
)  # fmt: skip
def test_proper_scores_by_hand(probs, labels, nll, brier):
    assert negative_log_likelihood(probs, labels) == pytest.approx(nll, rel=1e-14)
    assert brier_score(probs, labels) == pytest.approx(brier, rel=1e-14)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_label_of_probability_zero_costs_the_log_of_the_smallest_normal_number(dtype):
    p = np.array([[1, 0]], dtype=dtype)
    assert negative_log_likelihood(p, [1]) == pytest.approx(-np.log(float(np.finfo(dtype).tiny)), rel=1e-14)
    assert brier_score(p, [1]) == 2


def test_the_brier_score_is_exactly_its_two_parts():
    for seed in range(20):
        for n, k in ((1, 2), (2, 2), (50, 3), (300, 20)):
            p, y = predictions(n, k, seed)
            calibration, refinement = brier_decomposition(p, y)
            assert calibration + refinement == brier_score(p, y)
            assert calibration >= 0 and refinement >= 0


def test_the_parts_of_the_brier_score_by_hand():
    # Class 0: .9 -> 1, .6 -> 1, .2 -> 0 stay apart, so nothing is left. Class 1 is its mirror image.
    calibration, refinement = brier_decomposition([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8]], [0, 0, 1])
    assert refinement == pytest.approx(0, abs=1e-15)
    assert calibration == pytest.approx(2 * (0.01 + 0.16 + 0.04) / 3, rel=1e-13)
    # The wrong order: pooled to 1/2 each, and 1/4 is left in each class; before, .49 in each.
    assert brier_decomposition([[0.7, 0.3], [0.3, 0.7]], [1, 0]) == pytest.approx((0.48, 0.5), rel=1e-13)
    # Two equal rows are recalibrated together.
    assert brier_decomposition([[0.8, 0.2]] * 2, [0, 1]) == pytest.approx((0.18, 0.5), rel=1e-13)


def test_refinement_does_not_change_where_probabilities_keep_their_order():
    p, y = predictions(k=2)
    q = np.stack([p[:, 0] ** 3, 1 - p[:, 0] ** 3], axis=1)
    assert brier_decomposition(q, y)[1] == pytest.approx(brier_decomposition(p, y)[1], rel=1e-12)


# --- everything at once -------------------------------------------------------------------------------------------


def test_evaluate_equals_the_single_functions():
    p, y = predictions()
    confidence, correct = p.max(axis=1), p.argmax(axis=1) == y
    standard = {
        "accuracy": accuracy_score(y, p.argmax(axis=1)),
        "ece": expected_calibration_error(confidence, correct),
        "adaece": expected_calibration_error(confidence, correct, binning="mass"),
        "cwece": classwise_ece(p, y),
        "mce": expected_calibration_error(confidence, correct, norm="max"),
        "smce": smooth_calibration_error(confidence, correct),
        "nll": negative_log_likelihood(p, y),
        "brier": brier_score(p, y),
    }
    more = {
        "rmsce": expected_calibration_error(confidence, correct, norm="l2"),
        "debiased_ece": debiased_ece(confidence, correct),
        "sweep_ece": sweep_ece(confidence, correct),
        "kde_ece": kde_ece(confidence, correct),
        "smece": smece(confidence, correct),
        "brier_calibration": brier_decomposition(p, y)[0],
        "brier_refinement": brier_decomposition(p, y)[1],
        "auroc": confidence_auroc(confidence, correct),
    }
    assert evaluate(p, y) == Evaluation(300, standard)
    record = evaluate(p, y, metrics="all")
    assert record == Evaluation(300, standard | more)
    assert list(record.values) == list(ALL_METRICS)
    assert evaluate(p, y) != evaluate(p, y, metrics=METRICS[:-1])


def test_a_record_without_resampling_has_exactly_the_metrics():
    record = evaluate(*predictions(20))
    assert list(record.to_dict()) == ["n", *METRICS]
    assert record.intervals == record.noise_floor == {}
    assert all(type(value) in (int, float) for value in record.to_dict().values())


def test_a_record_with_resampling_adds_intervals_and_floors_in_flat_keys():
    record = evaluate(*predictions(40, k=3), n_resamples=20)
    flat = record.to_dict()
    bounds = {f"{metric}_{end}" for metric in METRICS for end in ("low", "high")}
    floors = {f"{m}_{end}" for m in ("ece", "adaece", "cwece", "mce", "smce") for end in ("floor", "floor_q95")}
    assert set(flat) == {"n", *METRICS} | bounds | floors
    assert (flat["ece_low"], flat["ece_high"]) == record.intervals["ece"]
    assert (flat["smce_floor"], flat["smce_floor_q95"]) == record.noise_floor["smce"]
    assert record == evaluate(*predictions(40, k=3), n_resamples=20)  # the seed is an argument


def test_a_record_holds_what_was_asked_for_in_that_order_and_each_once():
    record = evaluate(*predictions(20), metrics=["smece", "brier_refinement", "ece", "smece"], n_resamples=5)
    assert list(record.to_dict())[:4] == ["n", "smece", "brier_refinement", "ece"]
    assert set(record.intervals) == set(record.noise_floor) == {"smece", "ece"}
    assert record.smece == record.values["smece"]
    for missing in ("brier", "accuracy", "auroc"):
        with pytest.raises(AttributeError, match=f"{missing} was not computed; pass metrics="):
            getattr(record, missing)
    with pytest.raises(AttributeError, match="has no attribute 'eces'"):
        record.eces  # noqa: B018
    assert not hasattr(record, "__array__")


def test_records_can_be_copied_pickled_and_read():
    record = evaluate(*predictions(20), n_resamples=5)
    assert copy.deepcopy(record) == record == pickle.loads(pickle.dumps(record))
    assert repr(record).startswith("Evaluation(n=20, accuracy=")
    assert f"ece={record.ece:.4g} [{record.intervals['ece'][0]:.4g}, {record.intervals['ece'][1]:.4g}]" in repr(record)


@pytest.mark.parametrize("metrics, said", [(["ece", "ace"], "'ace'"), ("ece", "'ece'"), ([""], "''"), ([1], "1")])
def test_unknown_metrics_are_refused_with_those_that_are_known(metrics, said):
    with pytest.raises(ValueError, match=f"{said}; known: accuracy, ece, .*auroc"):
        evaluate(*predictions(5), metrics=metrics)


@pytest.mark.parametrize("labels", [[0], [1]])
def test_one_sample_gives_finite_metrics(labels):
    record = evaluate([[0.7, 0.3]], labels, metrics="all").to_dict()
    assert np.isfinite(list(record.values())).all()


def test_the_top_label_of_a_tie_is_the_lowest_class():
    confidence, correct = top_label(np.array([[0.4, 0.4, 0.2], [0.2, 0.4, 0.4]]), np.array([1, 1]))
    assert confidence.tolist() == [0.4, 0.4]
    assert correct.tolist() == [0, 1]


def test_the_order_of_samples_does_not_matter():
    p, y = predictions()
    order = np.random.default_rng(1).permutation(len(y))
    first, second = evaluate(p, y).to_dict(), evaluate(p[order], y[order]).to_dict()
    assert first == pytest.approx(second, rel=1e-10)


def test_the_order_of_classes_does_not_matter():
    p, y = predictions()
    order = np.array([3, 0, 4, 1, 2])
    new_label = np.argsort(order)[y]
    assert evaluate(p, y).to_dict() == pytest.approx(evaluate(p[:, order], new_label).to_dict(), rel=1e-10)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_tensors_give_the_same_record_as_arrays(dtype):
    p, y = predictions()
    p = p.astype(dtype)
    assert evaluate(torch.tensor(p, requires_grad=True), torch.tensor(y)) == evaluate(p, y)
    assert evaluate(torch.tensor(p), torch.tensor(y), metrics="all") == evaluate(p, y, metrics="all")


def test_sums_are_accumulated_in_float64():
    """A million float32 confidences of .1 sum to 100,958 in float32 arithmetic, one after another."""
    f = np.full(1_000_000, 0.1, dtype=np.float32)
    assert expected_calibration_error(f, np.zeros(len(f))) == pytest.approx(float(np.float32(0.1)), rel=1e-9)


@pytest.mark.parametrize(
    "function", [evaluate, classwise_ece, negative_log_likelihood, brier_score, brier_decomposition]
)
def test_logits_are_refused_where_probabilities_are_expected(function):
    with pytest.raises(ValueError, match=r"row 1 is not a probability vector.*if these are logits"):
        function([[0.5, 0.5], [3.0, -1.0]], [0, 1])
    with pytest.raises(ValueError, match=r"label 2 in row 1 is outside 0 \.\. 1"):
        function([[0.5, 0.5], [0.5, 0.5]], [0, 2])
