"""Spline calibration: hand cases, another basis of the same splines, ties, and the gap that it must find.

What all calibrators of the confidence have in common is in test_calibrator_base.py.
"""

import numpy as np
import pytest

from smartlib.calibrators import CalibrationWarning
from smartlib.calibrators.spline import SplineCalibration
from smartlib.data.synthetic import Population
from smartlib.toplabel import confidence_of


def two_classes(confidence, correct):
    """Logits with these confidences, (N, 2), and labels of class 0 where correct."""
    f = np.asarray(confidence, dtype=float)
    return np.log(np.stack([f, 1 - f], axis=1)), 1 - np.asarray(correct, dtype=int)


def power_basis(x, knots, slope=False):
    """Natural cubic splines (or their derivatives) by truncated powers: 1, x, and d_k - d_(K-1), k = 1 .. K - 2, with

    d_k(x) = ((x - knot_k)_+^3 - (x - knot_K)_+^3) / (knot_K - knot_k).

    Source: Hastie, Tibshirani and Friedman 2009, The Elements of Statistical Learning, 2nd edition, (5.4), (5.5).
    """

    def d(k):
        power, factor = (2, 3) if slope else (3, 1)
        above = [np.maximum(x - knot, 0) ** power * factor for knot in (knots[k], knots[-1])]
        return (above[0] - above[1]) / (knots[-1] - knots[k])

    first = [np.zeros_like(x), np.ones_like(x)] if slope else [np.ones_like(x), x]
    return np.stack([*first, *(d(k) - d(len(knots) - 2) for k in range(len(knots) - 2))], axis=1)


def cumulative_gap(f, correct):
    """h at 0, 1/N, ..., 1; equal confidences share their correctness."""
    order = np.argsort(f)
    f, correct = f[order], correct[order].astype(float)
    shared = np.array([correct[f == value].mean() for value in f])
    return np.concatenate([[0], np.cumsum(shared - f)]) / len(f)


def direct_fit(f, correct):
    """Coefficients of the power basis by least squares on h."""
    x, knots = np.arange(len(f) + 1) / len(f), np.linspace(0, 1, 6)
    return np.linalg.lstsq(power_basis(x, knots), cumulative_gap(f, correct), rcond=None)[0], knots


def sample(n, seed=0, decimals=9):
    rng = np.random.default_rng(seed)
    f = np.minimum(np.round(rng.beta(4, 1, n) * 0.49 + 0.505, decimals), 0.995)
    return f, (rng.random(n) < f - 0.1).astype(int)


# --- hand cases ---------------------------------------------------------------------------------------------------


def test_a_constant_gap_is_a_straight_line_and_is_taken_away():
    """Seven confidences, twenty samples each, a tenth less right than sure: h is straight, so any spline is exact."""
    right = np.arange(9, 16)
    f = np.repeat(right / 20 + 0.1, 20)
    correct = np.tile(np.arange(20), 7) < np.repeat(right, 20)
    spline = SplineCalibration().fit(*two_classes(f, correct))
    np.testing.assert_allclose(spline.confidence_, right / 20 + 0.1, atol=1e-12)
    np.testing.assert_allclose(spline.calibrated_, right / 20, atol=1e-12)
    np.testing.assert_allclose(spline.knot_values_, -0.1 * np.linspace(0, 1, 6), atol=1e-12)
    assert spline.n_parameters == len(spline.knot_values_) == 6


def test_between_confidences_the_map_is_linear_and_outside_constant():
    right = np.arange(12, 18)
    f = np.repeat(right / 20 + 0.1, 20)
    correct = np.tile(np.arange(20), 6) < np.repeat(right, 20)
    spline = SplineCalibration().fit(*two_classes(f, correct))  # .7 .. .95 to .6 .. .85
    logits, _ = two_classes([0.55, 0.7, 0.73, 0.95, 0.97, 0.9999], [1] * 6)
    with pytest.warns(
        CalibrationWarning, match=r"50\.0% of the confidences lie outside the fitted range 0\.7 \.\. 0\.95"
    ):
        probs = spline.predict_proba(logits)
    np.testing.assert_allclose(probs[:, 0], [0.6, 0.6, 0.63, 0.85, 0.85, 0.85], atol=1e-12)


def test_two_samples_are_met_exactly_because_six_knots_can():
    """h is 0, -.6/2, (-.6 + .2)/2; its steps times two are what is wrong with .6 and .8."""
    logits, labels = two_classes([0.6, 0.8], [0, 1])
    with pytest.warns(
        CalibrationWarning, match=r"2 samples with 2 distinct confidence\(s\), fewer than the 6 knots of the"
    ):
        spline = SplineCalibration().fit(logits, labels)
    np.testing.assert_allclose(spline.calibrated_, [0, 1], atol=1e-12)


# --- another basis ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [6, 20, 501, 5000])
@pytest.mark.parametrize("decimals", [9, 2, 1])
def test_agrees_with_least_squares_on_truncated_powers(n, decimals):
    f, correct = sample(n, seed=n, decimals=decimals)
    correct[:2] = 0, 1
    logits, labels = two_classes(f, correct)
    if len(np.unique(f)) < 6:
        with pytest.warns(CalibrationWarning):
            spline = SplineCalibration().fit(logits, labels)
    else:
        spline = SplineCalibration().fit(logits, labels)
    coefficients, knots = direct_fit(f, correct)
    np.testing.assert_allclose(spline.knot_values_, power_basis(knots, knots) @ coefficients, atol=1e-8)
    values, counts = np.unique(f, return_counts=True)
    ends = np.concatenate([[0], np.cumsum(counts)]) / n
    step = np.diff(power_basis(ends, knots) @ coefficients) / np.diff(ends)
    np.testing.assert_allclose(spline.confidence_, values, atol=1e-11)
    np.testing.assert_allclose(spline.calibrated_, np.clip(values + step, 0, 1), atol=1e-8)


def test_the_correction_of_a_single_sample_is_the_derivative_at_its_quantile():
    """The mean derivative over 1/N is the derivative in the middle, but for N^-2 times the third one over 24."""
    f, correct = sample(5000)
    spline = SplineCalibration().fit(*two_classes(f, correct))
    coefficients, knots = direct_fit(f, correct)
    assert len(np.unique(f)) == 5000
    slope = power_basis((np.arange(5000) + 0.5) / 5000, knots, slope=True) @ coefficients
    np.testing.assert_allclose(spline.calibrated_, np.clip(np.sort(f) + slope, 0, 1), atol=1e-6)


def test_the_spline_is_natural_and_smooth():
    """Its derivative is a parabola between knots, continuous at them, and straight at neither end but level there."""
    f, correct = sample(30_000)
    spline = SplineCalibration().fit(*two_classes(f, correct))
    slope = spline.calibrated_ - spline.confidence_
    q = (np.cumsum(np.unique(f, return_counts=True)[1]) - 0.5) / len(f)
    bend = np.gradient(slope, q)
    assert abs(bend[5]) < 0.02 * np.abs(bend).max()
    assert abs(bend[-5]) < 0.02 * np.abs(bend).max()
    # In each fifth the derivative is a parabola.
    for k in range(5):
        inside = (q > k / 5 + 1e-3) & (q < (k + 1) / 5 - 1e-3) & (spline.calibrated_ < 1)
        fit = np.polynomial.Polynomial.fit(q[inside], slope[inside], 2)
        np.testing.assert_allclose(fit(q[inside]), slope[inside], atol=1e-6)


# --- ties ---------------------------------------------------------------------------------------------------------


def test_samples_of_equal_confidence_may_come_in_any_order():
    """The same bits, also where wrong ones come first or last among the equals."""
    f, correct = sample(2000, decimals=2)
    maps = []
    for order in (np.arange(2000), np.lexsort([correct, f]), np.lexsort([-correct, f])[::-1]):
        maps.append(SplineCalibration().fit(*two_classes(f[order], correct[order])).calibrated_)
    np.testing.assert_array_equal(maps[0], maps[1])
    np.testing.assert_array_equal(maps[0], maps[2])


def test_a_large_tie_gets_about_its_own_accuracy():
    """Four tenths of all samples are 99 % sure and 90 % right; the others are calibrated."""
    rng = np.random.default_rng(0)
    f = np.concatenate([rng.uniform(0.55, 0.95, 3000), np.full(2000, 0.99)])
    correct = np.concatenate([rng.random(3000) < f[:3000], np.arange(2000) % 10 > 0]).astype(int)
    spline = SplineCalibration().fit(*two_classes(f, correct))
    assert spline.calibrated_[-1] == pytest.approx(0.9, abs=0.01)


# --- what it finds ------------------------------------------------------------------------------------------------


def test_it_finds_the_gap_of_a_population():
    """The mean error |c - P(correct | f)| of 5,000 samples is a ninth of what it was (.0717)."""
    population = Population(slope=0.6)
    val, fresh = population.sample(5000, seed=0), population.sample(20_000, seed=1)
    f = confidence_of(fresh.logits, 1.0)
    truth = population.accuracy(np.minimum(f, 1 - 1e-15))
    c = SplineCalibration().fit(val.logits, val.labels).predict_proba(fresh.logits).max(axis=1)
    assert np.abs(c - truth).mean() < np.abs(f - truth).mean() / 5


def test_more_samples_than_are_good_for_an_n_by_n_table():
    f, correct = sample(50_000)
    spline = SplineCalibration().fit(*two_classes(f, correct))
    inner = (f > 0.65) & (f < 0.95)
    assert np.abs(spline._confidence(f) - (f - 0.1))[inner].mean() < 0.01
