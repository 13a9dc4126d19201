"""Margin, confidence and the temperatures a margin allows: hand values, closed forms, Proposition 1 as a property."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.special import expit, logsumexp

from smartlib import arrays
from smartlib.toplabel import confidence, margin, predicted_class, temperature_interval

INF = np.inf


@pytest.mark.parametrize(
    "row, gap, label",
    [
        ([3.0, 1.0, 2.5], 0.5, 0),
        ([-1.0, -4.0, -2.5], 1.5, 0),
        ([0.0, 0.0, -1.0], 0.0, 0),
        ([0.0, 2.0, 2.0], 0.0, 1),
        ([1.0, 1.0, 1.0], 0.0, 0),
        ([2.0, 1.0, -INF], 1.0, 0),
        ([-INF, 2.0, -INF], INF, 1),
        ([7, 3], 4.0, 0),
    ],
)
def test_margin_is_the_gap_of_the_two_largest_and_ties_go_to_the_lowest_class(row, gap, label):
    assert margin([row]).tolist() == [gap]
    assert predicted_class([row]).tolist() == [label]


def test_margin_of_float32_is_the_exact_difference():
    top, second = np.float32(0.1) + np.float32(1), np.float32(0.1)
    assert margin(np.array([[second, top, -3]], dtype=np.float32))[0] == float(top) - float(second)


def test_margin_agrees_with_a_full_sort_whatever_the_chunks(monkeypatch):
    logits = np.random.default_rng(0).normal(size=(50, 7))
    in_order = np.sort(logits, axis=1)
    monkeypatch.setattr(arrays, "_CHUNK_NUMBERS", 21)
    np.testing.assert_array_equal(margin(logits), in_order[:, -1] - in_order[:, -2])
    np.testing.assert_allclose(confidence(logits, 0.7), np.exp(in_order[:, -1] / 0.7 - logsumexp(logits / 0.7, axis=1)))


def test_tensors_come_back_as_tensors_of_the_same_numbers():
    logits = torch.tensor([[3.0, 1.0, 2.5], [0.0, 4.0, 0.0]], requires_grad=True)
    for function in (margin, confidence, predicted_class):
        result = function(logits)
        assert isinstance(result, torch.Tensor)
        assert not result.requires_grad
        np.testing.assert_array_equal(result.numpy(), function(logits.detach().numpy()))


# --- confidence -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("t", [0.01, 0.5, 1.0, 3.0, 1e4])
@pytest.mark.parametrize("m", [0.0, 0.1, 2.0, 700.0])
@pytest.mark.parametrize("k", [2, 3, 100])
def test_confidence_with_all_runners_up_tied_has_a_closed_form(m, t, k):
    row = np.full((1, k), -1.5)
    row[0, k // 2] += m
    np.testing.assert_allclose(confidence(row, t), expit(m / t - np.log(k - 1)), rtol=1e-13)


@pytest.mark.parametrize("t", [0.01, 1.0, 100.0])
def test_impossible_classes_do_not_count_in_the_confidence(t):
    np.testing.assert_allclose(confidence([[2.0, 1.0, -INF]], t), confidence([[2.0, 1.0]], t), rtol=0)
    assert confidence([[2.0, -INF, -INF]], t).tolist() == [1.0]


def test_confidence_takes_one_temperature_per_row():
    logits = [[3.0, 2.0]] * 3
    np.testing.assert_allclose(confidence(logits, [0.5, 1.0, 2.0]), expit([2.0, 1.0, 0.5]), rtol=1e-15)


@pytest.mark.parametrize("t", [0.0, -1.0, np.nan, INF, [1.0, 0.0]])
def test_confidence_refuses_a_temperature_that_is_not_positive_and_finite(t):
    with pytest.raises(ValueError, match="temperature must be positive and finite, got"):
        confidence([[1.0, 0.0], [2.0, 0.0]], t)


gaps_below_the_top = st.lists(st.floats(0.0, 30.0), min_size=1, max_size=12)


@given(gaps_below_the_top, st.floats(0.05, 50), st.floats(1.01, 10))
def test_confidence_falls_with_temperature_from_one_to_one_over_k(gaps, t, factor):
    logits = -np.array([[0.0, *gaps]])
    k = logits.shape[1]
    cold, warm = confidence(logits, t)[0], confidence(logits, t * factor)[0]
    assert warm <= cold + 1e-15
    if 1e-3 < max(gaps) / (t * factor) and max(gaps) / t < 30:  # else the difference may be below one rounding
        assert warm < cold
    assert 1 / k - 1e-15 <= warm <= cold <= 1
    assert confidence(logits, 1e9)[0] == pytest.approx(1 / k, abs=1e-7)
    ties = 1 + sum(gap == 0 for gap in gaps)
    if min([g for g in gaps if g > 0], default=1) > 0.01:
        assert confidence(logits, 1e-4)[0] == pytest.approx(1 / ties, rel=1e-12)


# --- Proposition 1 ----------------------------------------------------------------------------------------------


def test_interval_by_hand():
    """Odds of 9 to 1 and K = 10: logit(.9) = log 9 = log(K − 1), so the interval is [m / (2 log 9), m / log 9]."""
    lower, upper = temperature_interval(2.0, 0.9, n_classes=10)
    assert lower == pytest.approx(1 / np.log(9), rel=1e-14)
    assert upper == pytest.approx(2 / np.log(9), rel=1e-14)


def test_interval_collapses_to_a_point_for_two_classes():
    m, c = np.array([0.1, 1.0, 20.0]), np.array([0.51, 0.9, 0.999])
    lower, upper = temperature_interval(m, c, n_classes=2)
    np.testing.assert_array_equal(lower, upper)
    np.testing.assert_allclose(lower, m / np.log(c / (1 - c)), rtol=1e-12)


@pytest.mark.parametrize("c", [0.11, 0.3, 0.5])
def test_interval_is_half_infinite_up_to_a_confidence_of_one_half(c):
    lower, upper = temperature_interval(3.0, c, n_classes=10)
    assert upper == INF
    assert lower == pytest.approx(3 / (np.log(c / (1 - c)) + np.log(9)), rel=1e-12)
    assert np.isfinite(temperature_interval(3.0, 0.5 + 1e-9, n_classes=10)[1])


@given(st.floats(1e-3, 50), st.floats(0.51, 0.999), st.integers(3, 1000))
def test_interval_has_the_stated_width(m, c, k):
    lower, upper = temperature_interval(m, c, k)
    odds = np.log(c / (1 - c))
    assert upper - lower == pytest.approx(m * np.log(k - 1) / (odds * (odds + np.log(k - 1))), rel=1e-9)


@given(st.floats(1e-3, 50), st.floats(0.15, 0.99), st.integers(10, 1000))
def test_log_odds_and_confidence_give_the_same_interval(m, c, k):
    by_odds = temperature_interval(m, n_classes=k, log_odds=np.log(c / (1 - c)))
    np.testing.assert_allclose(by_odds, temperature_interval(m, c, k), rtol=1e-9)


def test_log_odds_reach_where_the_confidence_rounds_to_one():
    assert expit(38.0) == 1.0
    with pytest.raises(ValueError, match=r"got 1\.0"):
        temperature_interval(19.0, expit(38.0), 10)
    lower, upper = temperature_interval(19.0, n_classes=10, log_odds=38.0)
    assert lower == pytest.approx(19 / (38 + np.log(9)), rel=1e-15)
    assert upper == 0.5


def test_a_margin_of_zero_has_no_temperature():
    lower, upper = temperature_interval([0.0, 1.0], 0.9, n_classes=3)
    assert np.isnan([lower[0], upper[0]]).all()
    assert np.isfinite([lower[1], upper[1]]).all()


@pytest.mark.parametrize("c", [0.2, 0.6, 0.95])
@pytest.mark.parametrize("k", [6, 50])
def test_the_lower_end_is_attained_when_all_runners_up_tie(c, k):
    lower, _ = temperature_interval(2.5, c, k)
    assert confidence([[2.5] + [0.0] * (k - 1)], lower)[0] == pytest.approx(c, rel=1e-12)


@pytest.mark.parametrize("c", [0.6, 0.95])
@pytest.mark.parametrize("k", [3, 50])
def test_the_upper_end_is_attained_when_the_classes_below_the_second_vanish(c, k):
    _, upper = temperature_interval(2.5, c, k)
    assert confidence([[2.5, 0.0] + [-INF] * (k - 2)], upper)[0] == pytest.approx(c, rel=1e-12)
    assert confidence([[2.5, 0.0] + [-1e4] * (k - 2)], upper)[0] == pytest.approx(c, rel=1e-12)


def test_past_one_half_no_temperature_is_too_high():
    """c ≤ 1/2: with the classes below the second far enough down, T* passes any number."""
    row = np.array([[1.0, 0.0, -1e6]])
    t_star = brentq(lambda t: confidence(row, t)[0] - 0.45, 1.0, 1e9)
    assert t_star > 1e5


@given(
    gaps=st.lists(st.floats(1e-2, 20.0), min_size=1, max_size=30),
    share=st.floats(0.02, 0.98),
    most=st.floats(1e-3, 20.0),
)
def test_the_temperature_that_reaches_a_confidence_lies_in_the_interval(gaps, share, most):
    """T* is found by root finding on the log-odds of the confidence, which is independent of the interval."""
    gaps = np.sort(gaps)
    k = len(gaps) + 1
    target = -np.log(k - 1) + share * (most + np.log(k - 1))  # log-odds between −log(K−1) and `most`
    assume(target > -np.log(k - 1) + 1e-3)

    def excess(log_t):  # log-odds = −log Σ exp(−g/T)
        return -logsumexp(-gaps * np.exp(-log_t)) - target

    t_star = np.exp(brentq(excess, -20, 20, xtol=1e-13))
    assert -logsumexp(-gaps / t_star) == pytest.approx(target, abs=1e-8)
    lower, upper = temperature_interval(gaps[0], n_classes=k, log_odds=target)
    assert lower * (1 - 1e-8) <= t_star <= upper * (1 + 1e-8)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (dict(margin=1.0, n_classes=3), "exactly one of confidence and log_odds"),
        (dict(margin=1.0, confidence=0.9, n_classes=3, log_odds=2.0), "exactly one of confidence and log_odds"),
        (dict(margin=1.0, confidence=0.9, n_classes=1), "n_classes must be at least 2, got 1"),
        (dict(margin=[1.0, -0.5], confidence=0.9, n_classes=3), "margin must not be negative, got -0.5"),
        (dict(margin=np.nan, confidence=0.9, n_classes=3), "margin must not be negative, got nan"),
        (dict(margin=1.0, confidence=0.25, n_classes=4), r"must lie in \(1/K, 1\) = \(0.25, 1\), got 0.25"),
        (dict(margin=1.0, confidence=[0.9, 1.0], n_classes=4), "got 1.0"),
        (dict(margin=1.0, log_odds=-np.log(3), n_classes=4), r"log_odds must exceed -log\(K-1\) = -1.099"),
    ],
)
def test_interval_refuses_what_no_row_can_have(arguments, words):
    with pytest.raises(ValueError, match=words):
        temperature_interval(**arguments)


def test_interval_keeps_the_shape_and_kind_of_the_margin():
    lower, upper = temperature_interval(torch.tensor([1.0, 2.0]), 0.9, n_classes=3)
    assert isinstance(lower, torch.Tensor)
    np.testing.assert_allclose(upper.numpy(), np.array([1.0, 2.0]) / np.log(9))
    assert temperature_interval(torch.tensor(2.0), 0.9, n_classes=3)[0].shape == ()
    assert temperature_interval(2.0, [0.8, 0.9, 0.95], n_classes=3)[0].shape == (3,)
