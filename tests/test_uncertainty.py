"""Noise floor, intervals and paired comparison, against closed forms and simulated populations with known truth."""

import numpy as np
import pytest

from smartlib import compare, evaluate, load, noise_floor
from smartlib.calibrators.base import scaled_softmax
from smartlib.metrics import ALL_METRICS, METRICS, TOP_LABEL_ERRORS, brier_decomposition
from smartlib.resampling import population_statistic, top_label_statistic
from smartlib.scores import auroc_of
from smartlib.smce import smce_of
from smartlib.uncertainty import (
    _auroc_interval,
    _ClasswiseModel,
    _invert,
    intervals_and_floors,
    top_label_interval,
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


@pytest.mark.parametrize("metric", ["nll", "accuracy", "auroc", "brier_refinement", "ECE", ""])
def test_noise_floor_refuses_other_metrics_by_name(metric):
    with pytest.raises(ValueError, match="known: ece"):
        noise_floor([0.5, 0.6], metric)
    for needs_all_classes in ("cwece", "brier_calibration"):
        with pytest.raises(ValueError, match=f'"{needs_all_classes}" needs'):
            noise_floor([0.5, 0.6], needs_all_classes)


@pytest.mark.parametrize("metric", [*TOP_LABEL_ERRORS, "cwece", "brier_calibration"])
def test_the_noise_floor_is_what_calibrated_samples_measure(metric):
    rng = np.random.default_rng(0)
    p = rng.dirichlet([0.4] * 3, size=300)
    measured = []
    for _ in range(60):
        y = np.minimum((p.cumsum(axis=1) < rng.random((300, 1))).sum(axis=1), 2)
        measured.append(getattr(evaluate(p, y, metrics=[metric]), metric))
    mean, q95 = noise_floor(p, metric, n_resamples=200)
    assert mean == pytest.approx(np.mean(measured), abs=4 * np.std(measured) / np.sqrt(60))
    assert 0.85 <= np.mean(np.array(measured) <= q95) and mean < q95


def test_the_kde_ece_has_a_high_floor_on_a_confident_network():
    """The figures that its docstring gives."""
    split = load("fashion/resnet").val
    p = scaled_softmax(split.logits[:5000], 1.0)
    record = evaluate(p, split.labels[:5000], metrics=["ece", "kde_ece"])
    assert (round(record.kde_ece, 3), round(record.ece, 3)) == (0.025, 0.034)
    assert noise_floor(p, "kde_ece", n_resamples=50)[0] == pytest.approx(0.016, abs=5e-4)


def test_the_noise_floor_of_the_brier_calibration_measures_each_set_of_labels():
    p = np.random.default_rng(1).dirichlet([0.4] * 3, size=100)
    rng = np.random.default_rng(0)
    labels = [(p.cumsum(axis=1)[:, :-1] < rng.random((100, 1))).sum(axis=1) for _ in range(10)]
    values = [brier_decomposition(p, y)[0] for y in labels]
    floor = noise_floor(p, "brier_calibration", n_resamples=10)
    assert floor == pytest.approx((np.mean(values), np.quantile(values, 0.95)), rel=1e-9)


@pytest.mark.parametrize("metric", TOP_LABEL_ERRORS)
def test_quick_statistics_equal_the_public_metrics(metric):
    rng = np.random.default_rng(0)
    f = rng.uniform(0.2, 1, 500)
    a = (rng.random(500) < f).astype(float)
    quick = top_label_statistic(metric, f)(np.arange(500), a)
    assert max(quick, 0.0) == pytest.approx(TOP_LABEL_ERRORS[metric](f, a), abs=1e-14)
    # A row twice is a sample twice.
    rows = rng.integers(500, size=500)
    rows.sort()
    if metric not in ("adaece", "debiased_ece", "kde_ece"):  # their bins and bandwidth stay those of f
        quick = top_label_statistic(metric, f)(rows, a[rows])
        assert quick == pytest.approx(TOP_LABEL_ERRORS[metric](f[rows], a[rows]), abs=1e-14)


@pytest.mark.parametrize("metric", TOP_LABEL_ERRORS)
def test_what_a_metric_estimates_is_what_it_measures_in_a_large_sample(metric):
    rng = np.random.default_rng(0)
    f = np.sort(rng.uniform(0.4, 0.9, 200_000))
    accuracy = f - 0.3 * (1 - f)
    truth = population_statistic(metric, f)(np.arange(len(f)), accuracy)
    measured = TOP_LABEL_ERRORS[metric](f, rng.random(len(f)) < accuracy)
    assert measured == pytest.approx(truth, rel=0.12 if metric == "mce" else 0.05)


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
        ("rmsce", lambda f: 0.45 * (1 - f), 0.86, 1.0),
        ("debiased_ece", lambda f: 0.03 * np.sin(12 * f), 0.84, 1.0),
    ],
)
def test_intervals_cover_the_truth_at_the_floor_and_away_from_it(metric, gap, low, high):
    """Coverage in 60 simulated test sets, nominal 95 %. The limits allow three standard errors of simulation."""
    rng = np.random.default_rng(3)
    f, accuracy = population(rng, 400_000, gap)
    truth = population_statistic(metric, f)(np.arange(len(f)), accuracy)
    covered = 0
    for seed in range(60):
        f, accuracy = population(rng, 2000, gap)
        correct = rng.random(2000) < accuracy
        interval = top_label_interval(metric, f, correct.astype(float), 60, seed)
        covered += interval[0] <= truth + 1e-12 and truth <= interval[1]
    assert low <= covered / 60 <= high


@pytest.mark.parametrize("metric", ["sweep_ece", "kde_ece", "smece"])
@pytest.mark.parametrize("gap", [lambda f: 0 * f, lambda f: 0.45 * (1 - f)], ids=["calibrated", "over-confident"])
def test_intervals_of_the_slower_errors_cover_the_truth_in_twenty_samples(metric, gap):
    """As above with fewer and smaller samples: of twenty, one may be missed on average; four would be too many."""
    rng = np.random.default_rng(3)
    f, accuracy = population(rng, 100_000, gap)
    truth, covered = population_statistic(metric, f)(np.arange(len(f)), accuracy), 0
    for seed in range(20):
        f, accuracy = population(rng, 500, gap)
        low, high = top_label_interval(metric, f, (rng.random(500) < accuracy).astype(float), 40, seed)
        covered += low <= truth + 1e-12 and truth <= high
    assert covered >= 17


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
    record = evaluate(p, y, metrics="all", n_resamples=60)
    assert set(record.intervals) == set(ALL_METRICS) - {"brier_calibration", "brier_refinement"}
    assert set(record.noise_floor) == {*TOP_LABEL_ERRORS, "cwece", "brier_calibration"}
    flat = record.to_dict()
    for metric in ("accuracy", "nll", "brier", "auroc"):
        assert flat[f"{metric}_low"] < flat[metric] < flat[f"{metric}_high"]
    for metric in (*TOP_LABEL_ERRORS, "cwece"):
        # The labels were drawn from p: zero must be inside, and the measured value is what the floor predicts.
        assert flat[f"{metric}_low"] == 0 <= flat[f"{metric}_high"] < 3 * flat[f"{metric}_floor_q95"]
        low = 0.0 if metric == "debiased_ece" else 0.3 * flat[f"{metric}_floor"]
        assert low <= flat[metric] < 2 * flat[f"{metric}_floor_q95"]


@pytest.mark.parametrize("n", [2000, 60, 20])
def test_auroc_intervals_cover_the_truth(n):
    """400 samples, nominal 95 %. (With the normal quantile instead of t's, 91 % of the intervals of 60 rows did.)"""
    rng = np.random.default_rng(3)
    f, accuracy = population(rng, 400_000, lambda f: 0.45 * (1 - f))
    truth = auroc_of(f, (rng.random(len(f)) < accuracy).astype(float))
    covered = 0
    for _ in range(400):
        f, accuracy = population(rng, n, lambda f: 0.45 * (1 - f))
        low, high = _auroc_interval(f, (rng.random(n) < accuracy).astype(float))
        assert 0 <= low <= high <= 1
        covered += low <= truth <= high
    assert 0.92 <= covered / 400 <= 1


def test_auroc_intervals_where_delong_has_no_error():
    f = np.linspace(0.1, 0.9, 9)
    assert _auroc_interval(f, np.ones(9)) == _auroc_interval(f, np.zeros(9)) == (0, 1)
    assert _auroc_interval(f, (f > 0.15).astype(float)) == (0, 1)  # one wrong sample
    # Perfect ranking with four wrong and five right: four disjoint pairs, all in order, and x^4 = 1/40.
    assert _auroc_interval(f, (f > 0.45).astype(float)) == (pytest.approx(0.025**0.25), 1)
    assert _auroc_interval(f, (f < 0.45).astype(float)) == (0, pytest.approx(1 - 0.025**0.25))


def test_intervals_of_a_metric_do_not_depend_on_what_else_is_asked_for():
    rng = np.random.default_rng(5)
    p = rng.dirichlet([0.4] * 3, size=100)
    y = rng.integers(0, 3, 100)
    every, standard = (evaluate(p, y, metrics=m, n_resamples=10) for m in ("all", METRICS))
    assert standard.intervals == {m: every.intervals[m] for m in METRICS}
    assert standard.noise_floor == {m: every.noise_floor[m] for m in METRICS if m in every.noise_floor}


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
    record = evaluate(as_probs(np.full(n, 0.8)), np.zeros(n, int), metrics="all", n_resamples=20)
    for metric in TOP_LABEL_ERRORS:
        low, high = record.intervals[metric]
        assert 0 <= low <= high < 1.5


def test_compare_finds_a_real_difference_and_none_between_equals():
    rng = np.random.default_rng(0)
    f, accuracy = population(rng, 4000, lambda f: 0 * f)
    f = np.maximum(f, 0.5)
    y = (rng.random(4000) > accuracy).astype(int)  # class 0 is right with probability `accuracy`
    calibrated, sharper = as_probs(f), as_probs(f**0.3)
    for metric in ("ece", "adaece", "smce", "nll", "brier", "rmsce", "debiased_ece", "sweep_ece", "kde_ece", "smece"):
        worse = compare(sharper, calibrated, y, metric, n_resamples=100)
        assert worse.verdict == "higher" and worse.low <= worse.difference <= worse.high
        assert compare(calibrated, sharper, y, metric, n_resamples=100).verdict == "lower"
        same = compare(calibrated, calibrated, y, metric, n_resamples=10)
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
    for metric in ("sharpness", "cwece", "brier_calibration"):
        with pytest.raises(ValueError, match=r"cannot compare by .*known: accuracy, auroc, ece"):
            compare(p, p, np.zeros(5, int), metric)


def test_compare_by_auroc():
    """Confidences that rank right from wrong, against the same ones shuffled."""
    rng = np.random.default_rng(0)
    f = rng.uniform(0.5, 1, 1000)
    y = (rng.random(1000) > f).astype(int)
    found = compare(as_probs(f), as_probs(rng.permutation(f)), y, "auroc", n_resamples=50)
    assert found.verdict == "higher" and found.difference == pytest.approx(0.25, abs=0.06)
