"""Margin, confidence and the temperatures a margin allows: hand values, closed forms, Proposition 1 as a property."""

from functools import partial

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.special import expit, logsumexp

from smartlib import arrays
from smartlib.toplabel import (
    confidence,
    gaps,
    log_odds,
    margin,
    predicted_class,
    refined_temperature_interval,
    temperature_at_confidence,
    temperature_interval,
)

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
    for function in (
        margin,
        confidence,
        predicted_class,
        gaps,
        log_odds,
        partial(temperature_at_confidence, confidence=0.6),
    ):
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


def test_a_temperature_next_to_zero_gives_certainty_and_no_warning():
    assert confidence([[100.0, 0.0, -5.0]], 1e-307).tolist() == [1.0]
    assert log_odds([[100.0, 0.0, -5.0]], 1e-307).tolist() == [INF]
    assert log_odds([[0.0, 0.0, -5.0]], 1e-307).tolist() == [0.0]


gaps_below_the_top = st.lists(st.floats(0.0, 30.0), min_size=1, max_size=12)


@given(gaps_below_the_top, st.floats(0.05, 50), st.floats(1.01, 10))
def test_confidence_falls_with_temperature_from_one_to_one_over_k(below, t, factor):
    logits = -np.array([[0.0, *below]])
    k = logits.shape[1]
    cold, warm = confidence(logits, t)[0], confidence(logits, t * factor)[0]
    assert warm <= cold + 1e-15
    if 1e-3 < max(below) / (t * factor) and max(below) / t < 30:  # else the difference may be below one rounding
        assert warm < cold
    assert 1 / k - 1e-15 <= warm <= cold <= 1
    assert confidence(logits, 1e9)[0] == pytest.approx(1 / k, abs=1e-7)
    ties = 1 + sum(gap == 0 for gap in below)
    if min([g for g in below if g > 0], default=1) > 0.01:
        assert confidence(logits, 1e-4)[0] == pytest.approx(1 / ties, rel=1e-12)


# --- gaps and log-odds -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row, expected",
    [
        ([3.0, 1.0, 2.5], [0.5, 2.0]),
        ([0.0, 0.0], [0.0]),
        ([-1.0, 2.0, -INF, 2.0], [0.0, 3.0, INF]),
        ([-INF, 5, -INF], [INF, INF]),
    ],
)
def test_gaps_ascend_from_the_margin(row, expected):
    assert gaps([row]).tolist() == [expected]


def test_gaps_of_float32_are_exact_differences():
    row = np.array([[0.1, 100.0, 1e-6]], dtype=np.float32)
    assert gaps(row).dtype == np.float64
    assert gaps(row)[0].tolist() == [100.0 - float(row[0, 0]), 100.0 - float(row[0, 2])]


@given(gaps_below_the_top, st.floats(0.05, 50), st.floats(-100, 100))
def test_log_odds_are_those_of_the_confidence_wherever_it_can_be_inverted(below, t, shift):
    logits = shift - np.array([[0.0, *below]])
    c, odds = confidence(logits, t)[0], log_odds(logits, t)[0]
    assert odds == pytest.approx(-logsumexp(-gaps(logits)[0] / t), rel=1e-13, abs=1e-13)
    if c < 0.999:
        assert odds == pytest.approx(np.log(c / (1 - c)), abs=1e-12)


@pytest.mark.parametrize("odds", [38.0, 700.0])
def test_log_odds_are_exact_where_the_confidence_rounds_to_one(odds):
    row = [[odds, 0.0, 0.0, -1.0]]
    assert confidence(row)[0] == 1.0
    assert log_odds(row)[0] == pytest.approx(odds - np.log(2 + np.exp(-1)), rel=1e-15)
    assert log_odds([[odds, 0.0]]).tolist() == [odds]


@pytest.mark.parametrize("t", [1e-3, 1.0, 1e8])
@pytest.mark.parametrize("row", [[0.3, 0.1, -2.0, 0.29], [5.0, 5.0, 1.0, -700.0]])
def test_log_odds_agree_with_fifty_digits(t, row):
    with mpmath.workdps(50):
        p = [mpmath.exp((mpmath.mpf(z) - max(row)) / t) for z in row]
        expected = -mpmath.log(sum(p) - 1)  # c = 1 / sum(p)
    assert log_odds([row], t)[0] == pytest.approx(float(expected), rel=1e-14, abs=1e-14)


def test_log_odds_run_from_infinity_to_those_of_one_over_k():
    assert log_odds([[1.0, 0.0, -2.0]], 1e300)[0] == -np.log(2)
    assert log_odds([[1.0, 0.0, -2.0]], 1e-300)[0] == pytest.approx(1e300, rel=1e-15)
    assert log_odds([[2.0, -INF, -INF]], [3.0]).tolist() == [INF]
    assert log_odds([[2.0, 1.0, -INF]], 0.5).tolist() == [2.0]


def test_log_odds_take_one_temperature_per_row_whatever_the_chunks(monkeypatch):
    logits, t = np.random.default_rng(0).normal(size=(50, 7)), np.linspace(0.1, 5, 50)
    monkeypatch.setattr(arrays, "_CHUNK_NUMBERS", 21)
    expected = [-logsumexp(-np.sort(row.max() - row)[1:] / at) for row, at in zip(logits, t, strict=True)]
    np.testing.assert_allclose(log_odds(logits, t), expected, rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(temperature_at_confidence(logits, log_odds=log_odds(logits, t)), t, rtol=1e-11)


@given(st.lists(st.floats(1e-3, 30.0), min_size=1, max_size=30), st.floats(0.01, 50), st.floats(1.001, 10))
def test_log_odds_fall_strictly_with_temperature_and_at_least_as_fast_as_the_margin_says(below, t, factor):
    """The slope of the log-odds in 1/T is a weighted mean of the gaps, hence between the smallest and the largest."""
    logits = -np.array([[0.0, *below]])
    cold, warm = log_odds(logits, [t])[0], log_odds(logits, [t * factor])[0]
    step, rounding = 1 / t - 1 / (t * factor), 1e-14 * (1 + max(below) / t)
    assert min(below) * step - rounding <= cold - warm <= max(below) * step + rounding
    if min(below) * step > rounding:
        assert warm < cold


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


def test_an_infinite_margin_has_no_temperature_either():
    """One finite logit: c(T) = 1 at every T."""
    assert np.isnan(temperature_interval(INF, 0.9, n_classes=3)).all()
    assert np.isnan(temperature_interval(INF, 0.4, n_classes=3)).all()


@pytest.mark.parametrize("k", [2, 3, 7, 10, 100, 1000])
def test_a_confidence_one_rounding_above_one_over_k_has_a_large_finite_lower_end(k):
    lower, upper = temperature_interval(1.0, np.nextafter(1 / k, 1), k)
    assert 1e14 < lower <= upper
    assert np.isfinite(lower)


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
    below=st.lists(st.floats(1e-2, 20.0), min_size=1, max_size=30),
    share=st.floats(0.02, 0.98),
    most=st.floats(1e-3, 20.0),
)
def test_the_temperature_that_reaches_a_confidence_lies_in_the_interval(below, share, most):
    """T* is found by root finding on the log-odds of the confidence, which is independent of the interval."""
    below = np.sort(below)
    k = len(below) + 1
    target = -np.log(k - 1) + share * (most + np.log(k - 1))  # log-odds between −log(K−1) and `most`
    assume(target > -np.log(k - 1) + 1e-3)

    t_star = root_by_bisection(below, target)
    assert -logsumexp(-below / t_star) == pytest.approx(target, abs=1e-8)
    lower, upper = temperature_interval(below[0], n_classes=k, log_odds=target)
    assert lower * (1 - 1e-8) <= t_star <= upper * (1 + 1e-8)
    assert temperature_at_confidence(-np.array([[0.0, *below]]), log_odds=target)[0] == pytest.approx(t_star, rel=1e-8)


def root_by_bisection(below, target):
    """The T at which log-odds = −log Σ exp(−g/T) is the target."""
    return np.exp(brentq(lambda log_t: -logsumexp(-below * np.exp(-log_t)) - target, -20, 20, xtol=1e-13))


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
        (dict(margin=1.0, log_odds=[2.0, INF], n_classes=4), "and be finite, got inf"),
        (dict(margin=1.0, log_odds=np.nan, n_classes=4), "and be finite, got nan"),
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


# --- Proposition 1c: what further gaps add -----------------------------------------------------------------------

# Ties within a row and classes that cannot be are common in what draws from a few values.
some_gap = st.one_of(st.floats(1e-3, 30.0), st.sampled_from([0.5, 1.0, 1.0, 4.0, INF]))
rows_of_gaps = st.lists(some_gap, min_size=1, max_size=29).map(sorted).map(np.array)
above_the_lowest = st.one_of(st.floats(1e-3, 0.1), st.floats(0.1, 43.0))  # log-odds above −log(K−1)


def intervals_of(below, target):
    """Lower and upper ends for j = 2 .. K, each (K − 1,)."""
    k = len(below) + 1
    pairs = [refined_temperature_interval(below[None, : j - 1], n_classes=k, log_odds=target) for j in range(2, k + 1)]
    return np.array(pairs)[:, :, 0].T


def test_refined_interval_by_hand():
    """Three known gaps that are multiples of log 2 make the equations polynomials in x = exp(−(log 2)/T).

    Gaps log 2 and 2 log 2, K = 3: x + x² = 3/4 has the root x = 1/2, so c = 4/7 is reached at T = 1. With K = 5 the two
    unknown classes add at most 2x²: x + 3x² = 3/4 has x = (√10 − 1)/6; the upper end stays.
    """
    known = np.log(2) * np.array([[1.0, 2.0]])
    lower, upper = refined_temperature_interval(known, 4 / 7, n_classes=3)
    assert [lower[0], upper[0]] == pytest.approx([1.0, 1.0], rel=1e-14)
    lower, upper = refined_temperature_interval(known, 4 / 7, n_classes=5)
    assert lower[0] == pytest.approx(-np.log(2) / np.log((np.sqrt(10) - 1) / 6), rel=1e-14)
    assert upper[0] == pytest.approx(1.0, rel=1e-14)


@given(st.one_of(st.just(0.0), st.floats(1e-6, 50.0)), st.integers(2, 1000), above_the_lowest)
def test_with_the_margin_alone_it_is_proposition_one(m, k, offset):
    target = -np.log(k - 1) + offset
    refined = refined_temperature_interval([[m]], n_classes=k, log_odds=target)
    np.testing.assert_allclose(
        np.ravel(refined), np.ravel(temperature_interval(m, n_classes=k, log_odds=target)), rtol=1e-11
    )


@given(rows_of_gaps, above_the_lowest)
def test_intervals_are_nested_hold_t_star_and_end_in_it(below, offset):
    k = len(below) + 1
    target = -np.log(k - 1) + offset
    finite = below[np.isfinite(below)]
    logits = -np.array([[0.0, *below]])
    t_star = temperature_at_confidence(logits, log_odds=target)[0]
    lower, upper = intervals_of(below, target)
    if len(finite) == 0 or target <= -np.log(len(finite)):  # c(T) never falls as low as c
        assert np.isnan([t_star, lower[-1], upper[-1]]).all()
        return
    assume(target > -np.log(len(finite)) + 1e-3)
    assert t_star == pytest.approx(root_by_bisection(finite, target), rel=1e-8)
    assert log_odds(logits, t_star)[0] == pytest.approx(target, abs=1e-11)
    assert np.all(lower <= t_star * (1 + 1e-11))
    assert np.all(upper >= t_star * (1 - 1e-11))
    assert np.all(lower[1:] >= lower[:-1] * (1 - 1e-11))
    assert np.all(upper[1:] <= upper[:-1] * (1 + 1e-11))
    assert [lower[-1], upper[-1]] == pytest.approx([t_star, t_star], rel=1e-11)


@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=12).map(sorted).map(np.array), st.floats(0.05, 10))
def test_both_ends_are_attained(known, offset):
    """The lower end when the unknown classes tie with the last known one, the upper end when they vanish."""
    n_unknown = 4
    k = 1 + len(known) + n_unknown
    target = -np.log(k - 1) + offset
    lower, upper = refined_temperature_interval(known[None], n_classes=k, log_odds=target)
    tied = -np.array([[0.0, *known, *[known[-1]] * n_unknown]])
    vanished = -np.array([[0.0, *known, *[INF] * n_unknown]])
    assert log_odds(tied, lower)[0] == pytest.approx(target, abs=1e-11)
    if np.isfinite(upper[0]):
        assert log_odds(vanished, upper)[0] == pytest.approx(target, abs=1e-11)
        assert temperature_at_confidence(vanished, log_odds=target)[0] == pytest.approx(upper[0], rel=1e-12)
    else:
        assert np.isnan(temperature_at_confidence(vanished, log_odds=target)[0])


@pytest.mark.parametrize("j", [2, 3, 5, 9])
def test_the_upper_end_is_infinite_exactly_where_j_minus_one_is_at_most_the_inverse_odds(j):
    known, edge = np.linspace(1, 2, j - 1)[None], -np.log(j - 1)  # (1 − c)/c = j − 1
    for target, infinite in [(edge, True), (edge - 0.01, True), (edge + 0.01, False)]:
        lower, upper = refined_temperature_interval(known, n_classes=10, log_odds=target)
        assert np.isinf(upper[0]) == infinite
        assert 0 < lower[0] < np.inf


@pytest.mark.parametrize("j", [2, 3, 4, 5, 6, 9, 10])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 50.0])
def test_a_confidence_of_one_over_j_is_on_the_infinite_side(j, scale):
    """A confidence such as .25 is the accuracy of a small bin, and its logit rounds."""
    known = scale * np.linspace(0.1, 2, j - 1)[None]
    assert refined_temperature_interval(known, 1 / j, n_classes=11)[1][0] == INF
    logits = np.column_stack([[0.0], -known, np.full((1, 11 - j), -INF)])
    assert np.isnan(temperature_at_confidence(logits, 1 / j))[0]


@given(rows_of_gaps, st.integers(1, 40))
def test_a_few_roundings_above_one_over_k_the_temperature_is_huge_and_no_less(below, n_roundings):
    below = below[np.isfinite(below)]
    assume(len(below))
    k = len(below) + 1
    edge = -np.log(k - 1)
    target = edge + n_roundings * max(np.spacing(abs(edge)), 1e-16)
    t_star = temperature_at_confidence(-np.array([[0.0, *below]]), log_odds=target)[0]
    assert t_star > 1e10
    lower, upper = refined_temperature_interval(below[None], n_classes=k, log_odds=target)
    assert 1e10 < lower[0] <= upper[0]


@pytest.mark.parametrize("t", [2, 3, 5])
def test_a_tie_of_t_classes_reaches_only_confidences_below_one_over_t(t):
    row = -np.array([[0.0] * t + [1.0, 2.5]])
    k, below = t + 2, gaps(row)
    for odds, reached in [(-np.log(t - 1), False), (-np.log(t - 1) + 0.5, False), (-np.log(t - 1) - 0.1, True)]:
        found = temperature_at_confidence(row, log_odds=odds)[0]
        assert np.isfinite(found) == reached
        if reached:
            assert log_odds(row, found)[0] == pytest.approx(odds, abs=1e-12)
        lower, upper = refined_temperature_interval(below, n_classes=k, log_odds=odds)
        np.testing.assert_allclose([lower[0], upper[0]], [found, found], rtol=1e-12)
        # Only the margin, 0, is known: c <= 1/2 may be reached at any temperature, c > 1/2 at none.
        expected = [0.0, INF] if odds <= 0 else [np.nan, np.nan]
        np.testing.assert_array_equal(
            np.ravel(refined_temperature_interval([[0.0]], n_classes=k, log_odds=odds)), expected
        )


def test_rows_without_a_temperature_are_nan_and_leave_the_others_alone():
    rows = [[0.0, 0.0, 0.0], [2.0, -INF, -INF], [3.0, 1.0, 0.0], [1.0, 0.0, -INF]]
    found = temperature_at_confidence(rows, 0.4)
    assert np.isnan(found).tolist() == [True, True, False, True]  # the last has c >= 1/2 at every temperature
    assert found[2] == temperature_at_confidence(rows[2:3], 0.4)[0]
    assert np.isnan(temperature_at_confidence([[0.0, 0.0, -INF]], 0.5)).all()  # every temperature does it
    by_row = temperature_at_confidence([rows[2]] * 2, [0.4, 0.9])
    np.testing.assert_allclose(confidence([rows[2]] * 2, by_row), [0.4, 0.9], rtol=1e-13)


@pytest.mark.parametrize("target", [38.0, 700.0, 1000.0])
def test_temperature_at_log_odds_past_the_confidence_of_one(target):
    assert temperature_at_confidence([[3.0, 0.0]], log_odds=target)[0] == pytest.approx(3 / target, rel=1e-15)
    t = temperature_at_confidence([[3.0, 0.0, 0.0, -INF]], log_odds=target)[0]
    assert t == pytest.approx(3 / (target + np.log(2)), rel=1e-14)


def test_refined_interval_keeps_the_kind_and_takes_one_confidence_per_row(monkeypatch):
    known = np.sort(np.random.default_rng(0).exponential(size=(20, 3)), axis=1)
    c = np.linspace(0.3, 0.99, 20)
    lower, upper = refined_temperature_interval(known, c, n_classes=8)
    monkeypatch.setattr(arrays, "_CHUNK_NUMBERS", 12)
    again = refined_temperature_interval(torch.from_numpy(known), c, n_classes=8)
    assert all(isinstance(end, torch.Tensor) for end in again)
    np.testing.assert_array_equal(again[0].numpy(), lower)
    np.testing.assert_array_equal(again[1].numpy(), upper)
    one = refined_temperature_interval(known[7:8], c[7], n_classes=8)
    assert [one[0][0], one[1][0]] == [lower[7], upper[7]]


@pytest.mark.parametrize(
    "known, arguments, words",
    [
        ([1.0, 2.0], dict(confidence=0.9, n_classes=3), r"must have shape \(N, j - 1\) with 1 <= j - 1 <= K - 1 = 2"),
        ([[1.0, 2.0]], dict(confidence=0.9, n_classes=2), r"K - 1 = 1, got \(1, 2\)"),
        (np.empty((3, 0)), dict(confidence=0.9, n_classes=2), r"got \(3, 0\)"),
        ([[2.0, 1.0]], dict(confidence=0.9, n_classes=3), "must ascend along each row"),
        ([[-0.1, 1.0]], dict(confidence=0.9, n_classes=3), "must not be negative"),
        ([[np.nan, 1.0]], dict(confidence=0.9, n_classes=3), "must not be negative"),
        ([[1.0, np.nan]], dict(confidence=0.9, n_classes=3), "must ascend"),
        ([[1.0]], dict(n_classes=3), "exactly one of confidence and log_odds"),
        ([[1.0]], dict(confidence=1 / 3, n_classes=3), r"must lie in \(1/K, 1\)"),
    ],
)
def test_refined_interval_refuses_what_are_no_gaps(known, arguments, words):
    with pytest.raises(ValueError, match=words):
        refined_temperature_interval(known, **arguments)


def test_temperature_at_confidence_refuses_what_no_row_can_have():
    for c in (0.5, 1.0):
        with pytest.raises(ValueError, match=r"must lie in \(1/K, 1\)"):
            temperature_at_confidence([[2.0, 0.0]], c)
    with pytest.raises(ValueError, match="exactly one"):
        temperature_at_confidence([[2.0, 0.0]])
