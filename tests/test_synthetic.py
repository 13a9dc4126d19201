"""The synthetic population: its samples have the law that it states, and its true metrics are those of that law."""

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.special import log_softmax, softmax
from scipy.stats import beta, kstest

from smartlib import confidence, evaluate
from smartlib.data.synthetic import Population
from smartlib.metrics import METRICS

POPULATIONS = [
    Population(),
    Population(slope=0.6),
    Population(n_classes=3, slope=0.6, shift=0.5),
    Population(n_classes=2, slope=1.4, shift=-0.3, shape=(1.0, 2.0)),
]


def correct(split):
    return split.logits.argmax(axis=1) == split.labels


@pytest.mark.parametrize("population", POPULATIONS, ids=repr)
def test_confidences_have_the_stated_distribution(population):
    k = population.n_classes
    f = confidence(population.sample(5000, seed=1).logits)
    # B = (1 - f) / (1 - 1/K) is a Beta variable; f = 1 in float64 for B below 1e-16.
    assert kstest((1 - f) / (1 - 1 / k), beta(*population.shape).cdf).pvalue > 0.01


@pytest.mark.parametrize("population", POPULATIONS, ids=repr)
def test_the_accuracy_at_each_confidence_is_the_stated_one(population):
    split = population.sample(60_000, seed=2)
    f, hit = confidence(split.logits), correct(split)
    r = population.accuracy(np.minimum(f, 1 - 1e-15))
    for part in np.array_split(np.argsort(f), 12):
        standard_error = np.sqrt((r[part] * (1 - r[part])).mean() / len(part))
        assert abs(hit[part].mean() - r[part].mean()) < 4 * standard_error + 1e-9


def test_errors_go_to_the_other_classes_as_the_softmax_says():
    split = Population(n_classes=3, slope=0.5).sample(60_000, seed=3)
    wrong = ~correct(split)
    p = softmax(split.logits[wrong], axis=1)
    order = p.argsort(axis=1)
    rows = np.arange(len(p))
    second, third = p[rows, order[:, 1]], p[rows, order[:, 0]]
    hit_second = split.labels[wrong] == order[:, 1]
    assert hit_second.mean() == pytest.approx((second / (second + third)).mean(), abs=4 * 0.5 / np.sqrt(len(p)))


def test_a_calibrated_population_has_no_calibration_error():
    truth = Population().true_metrics()
    assert all(truth[metric] < 1e-9 for metric in ("ece", "adaece", "cwece", "mce", "smce"))
    assert 0.8 < truth["accuracy"] < 0.95


def test_true_metrics_of_coin_flips_by_integration():
    """K = 2 and r = 1/2 whatever f is: every calibration error of the top label is E f - 1/2; f = 1 - B / 2."""
    population = Population(n_classes=2, slope=0.0, shape=(2.0, 3.0))
    density = beta(2, 3).pdf

    def mean(of):
        return quad(lambda b: of(1 - b / 2) * density(b), 0, 1)[0]

    truth = population.true_metrics()
    gap = mean(lambda f: f) - 0.5
    for metric in ("ece", "adaece", "smce"):
        assert truth[metric] == pytest.approx(gap, rel=1e-4)
    # Of both classes: p is f or 1 - f, its true probability 1/2, so the mean of |p - 1/2| is the same gap.
    assert truth["cwece"] == pytest.approx(gap, rel=1e-3)
    assert truth["accuracy"] == pytest.approx(0.5, abs=1e-12)
    assert truth["nll"] == pytest.approx(mean(lambda f: -(np.log(f) + np.log1p(-f)) / 2), rel=1e-4)
    assert truth["brier"] == pytest.approx(mean(lambda f: f**2 + (1 - f) ** 2), rel=1e-4)


@pytest.mark.parametrize("population", POPULATIONS[1:3], ids=repr)
def test_metrics_of_a_large_sample_approach_the_true_ones(population):
    split = population.sample(100_000, seed=4)
    p = softmax(split.logits, axis=1)
    measured, truth = evaluate(p, split.labels).to_dict(), population.true_metrics()
    assert set(truth) == set(METRICS)
    losses = -log_softmax(split.logits, axis=1)[np.arange(len(p)), split.labels]
    assert measured["nll"] == pytest.approx(truth["nll"], abs=4 * losses.std() / np.sqrt(len(p)))
    for metric in ("accuracy", "ece", "adaece", "smce", "brier"):
        assert measured[metric] == pytest.approx(truth[metric], abs=0.006)
    assert measured["cwece"] == pytest.approx(truth["cwece"], abs=0.002)


def test_samples_follow_their_seed_and_move_no_global_state():
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    first, again, other = (Population().sample(50, seed=seed) for seed in (5, 5, 6))
    np.testing.assert_array_equal(first.logits, again.logits)
    np.testing.assert_array_equal(first.labels, again.labels)
    assert not np.array_equal(first.logits, other.logits)
    np.testing.assert_array_equal(np.random.get_state()[1], before)  # noqa: NPY002


def test_impossible_settings_are_refused():
    with pytest.raises(ValueError, match="at least 2, got 1"):
        Population(n_classes=1)
    with pytest.raises(ValueError, match=r"two positive numbers, got \(0, 1\)"):
        Population(shape=(0, 1))
