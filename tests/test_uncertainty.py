"""Noise floor, intervals and paired comparison, against closed forms and simulated populations with known truth."""

import numpy as np
import pytest

from smartlib import compare, evaluate, expected_calibration_error, load, noise_floor, smooth_calibration_error
from smartlib.calibrators.base import scaled_softmax
from smartlib.smce import smce_of
from smartlib.uncertainty import (
    TOP_LABEL_METRICS,
    _ClasswiseModel,
    _invert,
    intervals_and_floors,
    top_label_interval,
    top_label_statistic,
)


def population(rng, n, gap):
    """Confidences like those of an accurate network, and their true accuracies."""
    f = 1 - 0.9 * rng.beta(0.5, 6, n)
    return f, np.clip(f - gap(f), 0, 1)


def as_probs(f):
    """Two-class rows with top-label confidence f (at least 1/2) and predicted class 0."""
    return np.stack([f, 1 - f], axis=1)


def test_noise_floor_of_one_bin_is_the_mean_absolute_deviation_of_a_binomial():
    # All confidences 1/2: ECE = |k/n - 1/2|, whose mean tends to sqrt(1 / (2 pi n)).
    mean, q95 = noise_floor(np.full(400, 0.5), n_resamples=4000, seed=1)
    assert mean == pytest.approx(np.sqrt(1 / (2 * np.pi * 400)), rel=0.05)
    assert q95 == pytest.approx(1.96 * 0.5 / np.sqrt(400), rel=0.06)


def test_noise_floor_from_rows_equals_that_from_confidences():
    f = np.linspace(0.5, 0.99, 300)
    assert noise_floor(as_probs(f), n_resamples=50) == noise_floor(f, n_resamples=50)


def test_noise_floor_of_certain_predictions_is_zero():
    assert noise_floor(np.ones(50), n_resamples=20) == (0.0, 0.0)


@pytest.mark.parametrize("metric", ["nll", "accuracy", "ECE", ""])
def test_noise_floor_refuses_other_metrics_by_name(metric):
    with pytest.raises(ValueError, match="known: ece"):
        noise_floor([0.5, 0.6], metric)
    with pytest.raises(ValueError, match="needs"):
        noise_floor([0.5, 0.6], "cwece")


@pytest.mark.parametrize("metric", ["ece", "adaece", "smce"])
def test_quick_statistics_equal_the_public_metrics(metric):
    rng = np.random.default_rng(0)
    f = rng.uniform(0.2, 1, 500)
    a = (rng.random(500) < f).astype(float)
    public = {
        "ece": expected_calibration_error(f, a),
        "adaece": expected_calibration_error(f, a, binning="mass"),
        "smce": smooth_calibration_error(f, a),
    }
    assert top_label_statistic(metric, f)(np.arange(500), a) == pytest.approx(public[metric], abs=1e-14)


@pytest.mark.parametrize(
    ("metric", "gap", "low", "high"),
    [
        ("ece", lambda f: 0 * f, 0.90, 1.0),
        ("ece", lambda f: 0.45 * (1 - f), 0.86, 0.99),
        ("adaece", lambda f: 0.03 * np.sin(12 * f), 0.84, 0.99),
        ("smce", lambda f: 0 * f, 0.90, 1.0),
        ("smce", lambda f: 0.45 * (1 - f), 0.86, 1.0),
        # Gaps of both signs: inverting a test covers 67 % here.
        ("smce", lambda f: 0.03 * np.sin(12 * f), 0.90, 1.0),
    ],
)
def test_intervals_cover_the_truth_at_the_floor_and_away_from_it(metric, gap, low, high):
    """Coverage in 60 simulated test sets, nominal 95 %. The limits allow three standard errors of simulation."""
    rng = np.random.default_rng(3)
    f, accuracy = population(rng, 400_000, gap)
    truth = smce_of(f, accuracy) if metric == "smce" else top_label_statistic(metric, f)(np.arange(len(f)), accuracy)
    covered = 0
    for seed in range(60):
        f, accuracy = population(rng, 2000, gap)
        correct = rng.random(2000) < accuracy
        interval = top_label_interval(metric, f, correct.astype(float), 60, seed)
        covered += interval[0] <= truth + 1e-12 and truth <= interval[1]
    assert low <= covered / 60 <= high


def test_the_plain_bootstrap_misses_the_truth_at_the_floor():
    """Why the intervals are built as they are: the percentile bootstrap covers 0 in none of 20 calibrated samples."""
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(20):
        f, accuracy = population(rng, 2000, lambda f: 0 * f)
        correct = (rng.random(2000) < accuracy).astype(float)
        statistic = top_label_statistic("ece", f)
        values = []
        for _ in range(100):
            rows = rng.integers(2000, size=2000)
            values.append(statistic(rows, correct[rows]))
        covered += np.quantile(values, 0.025) <= 1e-12
    assert covered == 0


def test_every_metric_gets_an_interval_that_holds_plausible_values():
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(1500, 4)) * 2
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    y = np.array([rng.choice(4, p=row) for row in p])
    record = evaluate(p, y, n_resamples=60)
    flat = record.to_dict()
    for metric in ("accuracy", "nll", "brier"):
        assert flat[f"{metric}_low"] < flat[metric] < flat[f"{metric}_high"]
    for metric in (*TOP_LABEL_METRICS, "cwece"):
        # The labels were drawn from p: zero must be inside, and the measured value is what the floor predicts.
        assert flat[f"{metric}_low"] == 0 <= flat[f"{metric}_high"] < 3 * flat[f"{metric}_floor_q95"]
        assert 0.3 * flat[f"{metric}_floor"] < flat[metric] < 2 * flat[f"{metric}_floor_q95"]


def test_classwise_interval_excludes_zero_for_an_overconfident_model():
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(3000, 3)) * 2
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    y = np.array([rng.choice(3, p=row) for row in p])
    sharper = p**3 / (p**3).sum(1, keepdims=True)
    intervals, floors = intervals_and_floors(sharper, y, n_resamples=60, seed=0)
    assert intervals["cwece"][0] > floors["cwece"][1]


def test_classwise_intervals_hold_zero_for_a_calibrated_model():
    """Forty samples of 400 rows: nominal 97.5 % of the intervals begin at zero, and all end above it."""
    rng = np.random.default_rng(7)
    intervals = []
    for seed in range(40):
        p = rng.dirichlet([0.3] * 5, size=400)
        y = np.minimum((p.cumsum(axis=1) < rng.random((400, 1))).sum(axis=1), 4)
        intervals.append(_invert(_ClasswiseModel(p, y), 60, seed))
    low, high = np.transpose(intervals)
    assert (low == 0).mean() >= 0.87 and (high > 0).all()


def test_intervals_are_reproducible_and_leave_global_random_states_alone():
    f = np.linspace(0.5, 1, 200)
    y = (np.arange(200) % 5 == 0).astype(int)
    before = np.random.get_state()[1].copy()  # noqa: NPY002  (the global state is what is looked at)
    first, second = (evaluate(as_probs(f), y, n_resamples=20) for _ in range(2))
    assert first == second
    assert np.array_equal(before, np.random.get_state()[1])  # noqa: NPY002


@pytest.mark.parametrize("n", [1, 2])
def test_tiny_samples_give_finite_calibration_intervals(n):
    record = evaluate(as_probs(np.full(n, 0.8)), np.zeros(n, int), n_resamples=20)
    for metric in TOP_LABEL_METRICS:
        low, high = record.intervals[metric]
        assert 0 <= low <= high < 1.5


def test_compare_finds_a_real_difference_and_none_between_equals():
    rng = np.random.default_rng(0)
    f, accuracy = population(rng, 4000, lambda f: 0 * f)
    f = np.maximum(f, 0.5)
    y = (rng.random(4000) > accuracy).astype(int)  # class 0 is right with probability `accuracy`
    calibrated, sharper = as_probs(f), as_probs(f**0.3)
    for metric in ("ece", "adaece", "smce", "nll", "brier"):
        worse = compare(sharper, calibrated, y, metric, n_resamples=100)
        assert worse.verdict == "higher" and worse.low <= worse.difference <= worse.high
        assert compare(calibrated, sharper, y, metric, n_resamples=100).verdict == "lower"
        same = compare(calibrated, calibrated, y, metric, n_resamples=20)
        assert (same.difference, same.low, same.high, same.verdict) == (0, 0, 0, "no difference")


def test_compare_names_no_winner_between_equally_good_models():
    """One model a little over-confident, one as much under-confident. Bootstrap intervals that were centred on the
    measured difference named a winner in four of five such samples: which one was decided by chance."""
    z = load("fashion/vit").val.logits[:3000]
    truth, rng = scaled_softmax(z, 1.14), np.random.default_rng(0)
    hotter, colder = scaled_softmax(z, 1.16), scaled_softmax(z, 1.12)
    difference = [smce_of(p.max(axis=1), truth.max(axis=1)) for p in (hotter, colder)]
    assert difference[0] == pytest.approx(difference[1], abs=2e-4), "they are equally good"
    verdicts = []
    for seed in range(20):
        y = np.minimum((truth.cumsum(axis=1) < rng.random((len(z), 1))).sum(axis=1), 9)
        verdicts.append(compare(hotter, colder, y, "smce", n_resamples=60, seed=seed).verdict)
    assert verdicts.count("no difference") >= 15


def test_compare_refuses_other_shapes_and_metrics():
    p = as_probs(np.full(5, 0.7))
    with pytest.raises(ValueError, match="shape"):
        compare(p, p[:4], np.zeros(5, int))
    with pytest.raises(ValueError, match="cannot compare"):
        compare(p, p, np.zeros(5, int), "sharpness")
