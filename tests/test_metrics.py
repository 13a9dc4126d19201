"""Metrics: hand values, the convention of the bins, other implementations as oracles, invariants."""

from dataclasses import fields
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, brier_score_loss, log_loss

from smartlib import arrays
from smartlib.metrics import (
    METRICS,
    Evaluation,
    bin_edges,
    bin_index,
    brier_score,
    classwise_ece,
    evaluate,
    expected_calibration_error,
    maximum_calibration_error,
    negative_log_likelihood,
    reliability_bins,
    top_label,
)
from smartlib.smce import smooth_calibration_error


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
    assert maximum_calibration_error(confidence, correct, n_bins) == pytest.approx(mce, abs=1e-14)


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
    assert 0 <= ece <= maximum_calibration_error(f, a, n_bins, binning) + 1e-12 <= 1 + 1e-12
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
    assert maximum_calibration_error([value] * n, a, 15, binning) == pytest.approx(gap, abs=1e-13)


@pytest.mark.parametrize(
    "function", [reliability_bins, expected_calibration_error, maximum_calibration_error], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("n_bins", [0, -1, 2.5])
@pytest.mark.parametrize("binning", ["width", "mass"])
def test_a_wrong_number_of_bins_is_refused(function, n_bins, binning):
    with pytest.raises(ValueError, match=f"n_bins must be a whole number of at least 1, got {n_bins}"):
        function([0.5], [1], n_bins, binning)


def test_an_unknown_binning_is_refused_by_name():
    with pytest.raises(ValueError, match='binning must be "width" or "mass", got \'quantile\''):
        expected_calibration_error([0.5], [1], binning="quantile")


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


# --- everything at once -------------------------------------------------------------------------------------------


def test_evaluate_equals_the_single_functions():
    p, y = predictions()
    confidence, correct = p.max(axis=1), p.argmax(axis=1) == y
    record = evaluate(p, y)
    assert record == Evaluation(
        n=300,
        accuracy=accuracy_score(y, p.argmax(axis=1)),
        ece=expected_calibration_error(confidence, correct),
        adaece=expected_calibration_error(confidence, correct, binning="mass"),
        cwece=classwise_ece(p, y),
        mce=maximum_calibration_error(confidence, correct),
        smce=smooth_calibration_error(confidence, correct),
        nll=negative_log_likelihood(p, y),
        brier=brier_score(p, y),
    )


def test_a_record_without_resampling_has_exactly_the_metrics():
    record = evaluate(*predictions(20))
    assert list(record.to_dict()) == ["n", *METRICS]
    assert {f.name for f in fields(record)} == {"n", *METRICS, "intervals", "noise_floor"}
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
    f, a = p.max(axis=1), p.argmax(axis=1) == y
    for function in (expected_calibration_error, maximum_calibration_error):
        assert function(torch.tensor(f), torch.tensor(a)) == function(f, a)


def test_sums_are_accumulated_in_float64():
    """A million float32 confidences of .1 sum to 100,958 in float32 arithmetic, one after another."""
    f = np.full(1_000_000, 0.1, dtype=np.float32)
    assert expected_calibration_error(f, np.zeros(len(f))) == pytest.approx(float(np.float32(0.1)), rel=1e-9)


@pytest.mark.parametrize("function", [evaluate, classwise_ece, negative_log_likelihood, brier_score])
def test_logits_are_refused_where_probabilities_are_expected(function):
    with pytest.raises(ValueError, match=r"row 1 is not a probability vector.*if these are logits"):
        function([[0.5, 0.5], [3.0, -1.0]], [0, 1])
    with pytest.raises(ValueError, match=r"label 2 in row 1 is outside 0 \.\. 1"):
        function([[0.5, 0.5], [0.5, 0.5]], [0, 2])
