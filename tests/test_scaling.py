"""Temperature scaling: closed forms, other minimisers as oracles, equivariance, bounds, and published temperatures."""

import os
import warnings

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, logsumexp, softmax
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.calibration import CalibratedClassifierCV
from sklearn.frozen import FrozenEstimator

from smartlib import TemperatureScaling, load
from smartlib.calibrators import CalibrationWarning
from smartlib.calibrators.base import scaled_softmax


def calibrated(n=500, k=5, seed=0):
    """Logits whose softmax is the true distribution of the labels."""
    rng = np.random.default_rng(seed)
    logits = 2 * rng.normal(size=(n, k))
    labels = (softmax(logits, axis=1).cumsum(axis=1) < rng.random((n, 1))).sum(axis=1)
    return logits, labels


def nll(logits, labels, t):
    return -log_softmax(logits / t, axis=1)[np.arange(len(labels)), labels].mean()


def fit(logits, labels, **options):
    """The fitted calibrator and the texts of its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ts = TemperatureScaling().fit(logits, labels, **options)
    assert all(issubclass(w.category, CalibrationWarning) for w in caught)
    return ts, [str(w.message) for w in caught]


# --- the right temperature ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("right, wrong", [(3, 1), (9, 1), (51, 49), (999, 1)])
@pytest.mark.parametrize("m", [0.01, 2.0, 300.0])
@pytest.mark.parametrize("k", [2, 4])
def test_equal_margins_have_the_closed_form_of_matching_the_accuracy(right, wrong, m, k):
    """All runners-up tie and errors go to any of them: c(T) equals the accuracy a, so T = m / (logit a + log(K−1))."""
    logits = np.tile([m] + [0.0] * (k - 1), (right + wrong, 1))
    labels = np.array([0] * right + [1] * wrong)
    expected = m / (np.log(right / wrong) + np.log(k - 1))
    assert TemperatureScaling().fit(logits, labels).temperature_ == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("k", [2, 5, 30])
def test_agrees_with_a_bounded_minimiser_of_the_nll(k, seed):
    logits, labels = calibrated(k=k, seed=seed)
    logits = logits * (0.3, 1, 4, 9)[seed]
    ours = TemperatureScaling().fit(logits, labels).temperature_
    other = minimize_scalar(
        lambda u: nll(logits, labels, np.exp(u)), bounds=(-6, 6), method="bounded", options=dict(xatol=1e-9)
    )
    assert np.log(ours) == pytest.approx(other.x, abs=1e-5)  # a minimiser knows its place to √ε only
    assert nll(logits, labels, ours) <= other.fun + 1e-14


def test_the_derivative_of_the_nll_vanishes_at_the_temperature():
    logits, labels = calibrated()
    s = 1 / TemperatureScaling().fit(logits, labels).temperature_
    expectation = (softmax(s * logits, axis=1) * logits).sum(axis=1)
    assert (expectation - logits[np.arange(len(labels)), labels]).mean() == pytest.approx(0, abs=1e-10)


@pytest.mark.parametrize("a", [20, 1 / 50, 1e5, 1e-9, 1e30])
def test_multiplying_the_logits_multiplies_the_temperature(a):
    logits, labels = calibrated()
    once, scaled = (TemperatureScaling().fit(z, labels).temperature_ for z in (logits, a * logits))
    assert scaled / a == pytest.approx(once, rel=1e-9)
    assert once == pytest.approx(1, abs=0.15)


def test_adding_a_number_to_each_row_changes_nothing():
    logits, labels = calibrated()
    shift = np.random.default_rng(1).normal(size=(len(labels), 1)) * 50
    ts, shifted = TemperatureScaling().fit(logits, labels), TemperatureScaling().fit(logits + shift, labels)
    assert shifted.temperature_ == pytest.approx(ts.temperature_, rel=1e-10)


@pytest.mark.parametrize("mask", [-np.inf, -1e4, -1e9, -3e38])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_masked_class_does_not_move_the_temperature_whatever_it_is_masked_with(mask, dtype):
    logits, labels = calibrated(k=5)
    ts = TemperatureScaling().fit(logits.astype(dtype), labels)
    with_mask = np.concatenate([logits, np.full((len(labels), 5), mask)], axis=1).astype(dtype)
    assert TemperatureScaling().fit(with_mask, labels).temperature_ == pytest.approx(ts.temperature_, rel=1e-9)


def test_two_fits_are_identical_and_there_is_one_parameter():
    logits, labels = calibrated()
    first, second = TemperatureScaling().fit(logits, labels), TemperatureScaling().fit(logits, labels)
    assert first.temperature_ == second.temperature_
    assert first.n_parameters == 1
    assert first.converged_ is True
    assert first.bound_hit_ is None
    assert first.temperatures(logits[:3]).tolist() == [first.temperature_] * 3


def test_refitting_forgets_the_first_fit():
    logits, labels = calibrated()
    ts, _ = fit([[5.0, 0.0], [0.0, 5.0]], [0, 1])
    assert ts.bound_hit_ == "lower"
    ts.fit(logits, labels)
    assert vars(ts) == vars(TemperatureScaling().fit(logits, labels))


# --- probabilities ------------------------------------------------------------------------------------------------


def test_probabilities_are_the_softmax_of_scaled_logits():
    logits, labels = calibrated()
    ts = TemperatureScaling().fit(3 * logits, labels)
    np.testing.assert_allclose(
        ts.predict_proba(3 * logits), softmax(3 * logits / ts.temperature_, axis=1), rtol=1e-13
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("t", [1e-3, 1.0, 50.0, 1e6])
def test_scaling_keeps_the_predicted_class_of_logits_one_rounding_apart(dtype, t):
    low = dtype(7.25)
    rows = np.array([[low, np.nextafter(low, dtype(8)), 0], [np.nextafter(low, dtype(8)), low, 0], [low, low, 0]])
    probs = scaled_softmax(rows.astype(dtype), t, dtype)
    assert probs.dtype == dtype
    assert probs.argmax(axis=1).tolist() == [1, 0, 0]
    np.testing.assert_allclose(probs.sum(axis=1), 1, rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_from_probs_equals_taking_the_logarithm(dtype):
    logits, labels = calibrated()
    probs = softmax(3 * logits, axis=1).astype(dtype)
    by_option = TemperatureScaling().fit(probs, labels, from_probs=True)
    by_hand = TemperatureScaling().fit(np.log(probs.astype(np.float64)), labels)
    assert by_option.temperature_ == pytest.approx(by_hand.temperature_, rel=1e-12)
    assert by_option.temperature_ == pytest.approx(TemperatureScaling().fit(3 * logits, labels).temperature_, rel=1e-5)
    given = by_option.predict_proba(probs, from_probs=True)
    assert given.dtype == dtype
    np.testing.assert_allclose(given, by_hand.predict_proba(np.log(probs.astype(np.float64))), rtol=1e-6)


def test_tensors_come_back_as_tensors():
    logits, labels = calibrated()
    ts = TemperatureScaling().fit(torch.tensor(logits, requires_grad=True), torch.tensor(labels))
    assert ts.temperature_ == TemperatureScaling().fit(logits, labels).temperature_
    probs = ts.predict_proba(torch.tensor(logits, requires_grad=True))
    assert isinstance(probs, torch.Tensor)
    assert not probs.requires_grad
    np.testing.assert_array_equal(probs.numpy(), ts.predict_proba(logits))


# --- bounds -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_labels_that_contradict_all_logits_hit_the_upper_bound(scale):
    ts, texts = fit(scale * np.array([[2.0, 0.0], [0.0, 2.0]]), [1, 0])
    assert ts.bound_hit_ == "upper"
    assert ts.temperature_ == pytest.approx(2000 * scale, rel=1e-12)
    assert any("is the upper search bound" in text for text in texts)
    assert any("all 2 predictions are wrong; check that labels and logits belong together" in text for text in texts)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_a_separable_set_hits_the_lower_bound(scale):
    ts, texts = fit(scale * np.array([[5.0, 0.0], [0.0, 5.0]]), [0, 1])
    assert ts.bound_hit_ == "lower"
    assert ts.temperature_ == pytest.approx(0.005 * scale, rel=1e-12)
    assert any("is the lower search bound" in text for text in texts)
    assert any("all 2 predictions are correct" in text for text in texts)
    assert ts.predict_proba(scale * np.array([[5.0, 0.0]])).tolist() == [[1, 0]]


def test_logits_that_tie_everywhere_hit_a_bound():
    ts, _ = fit(np.zeros((4, 3)), [0, 1, 2, 0])
    assert ts.bound_hit_ == "upper"
    np.testing.assert_allclose(ts.predict_proba(np.zeros((1, 3))), 1 / 3)


def test_one_error_among_many_is_enough_for_a_temperature_inside_the_bounds():
    logits = np.tile([[30.0, 0.0]], (10_000, 1))
    ts, texts = fit(logits, np.array([1] + [0] * 9_999))
    assert ts.bound_hit_ is None
    assert ts.temperature_ == pytest.approx(30 / np.log(9_999), rel=1e-9)
    assert texts == []


# --- other libraries, and public logits -----------------------------------------------------------------------------


class LogitsAsTheyAre(ClassifierMixin, BaseEstimator):
    """A classifier for scikit-learn whose decision values are its input."""

    def fit(self, logits, labels):
        self.classes_ = np.arange(logits.shape[1])
        return self

    def decision_function(self, logits):
        return logits

    def predict(self, logits):
        return logits.argmax(axis=1)


def by_scikit_learn(logits, labels):
    frozen = FrozenEstimator(LogitsAsTheyAre().fit(logits, labels))
    fitted = CalibratedClassifierCV(frozen, method="temperature").fit(logits, labels)
    return 1 / fitted.calibrated_classifiers_[0].calibrators[0].beta_


def by_probmetrics(logits, labels):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # it imports what torch has deprecated
        from probmetrics.calibrators import TemperatureScalingCalibrator
        from probmetrics.distributions import CategoricalLogits
    fitted = TemperatureScalingCalibrator()
    fitted.fit_torch(CategoricalLogits(torch.tensor(logits)), torch.tensor(labels))
    return 1 / fitted.invtemp_


@pytest.mark.parametrize("library", [by_scikit_learn, by_probmetrics])
@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize("name", ["synthetic", "fashion/resnet", "fashion/densenet", "fashion/vit"])
def test_other_libraries_find_the_same_temperature(library, scale, name):
    if name == "synthetic":
        logits, labels = calibrated(n=2000, k=10)
    else:
        val = load(name).val
        logits, labels = np.asarray(val.logits[:3000], dtype=np.float64), np.asarray(val.labels[:3000])
    ours = TemperatureScaling().fit(scale * logits, labels).temperature_
    assert ours == pytest.approx(library(scale * logits, labels), abs=1e-3)


@pytest.mark.skipif("SMARTLIB_DATA_DIR" not in os.environ, reason="the public logits are not on this machine")
@pytest.mark.parametrize(
    "name, temperature", [("public/cifar10-resnet50-ce", 2.4975), ("public/cifar10-densenet40", 2.8826)]
)
def test_public_logits_have_their_known_temperature(name, temperature):
    bundle = load(name)
    ts = TemperatureScaling().fit(bundle.val.logits, bundle.val.labels)
    assert ts.temperature_ == pytest.approx(temperature, abs=1e-4)
    z, y = np.asarray(bundle.val.logits, dtype=np.float64), bundle.val.labels
    own = z[np.arange(len(y)), y]
    values = [np.mean(logsumexp(z / t, axis=1) - own / t) for t in ts.temperature_ * np.array([0.999, 1, 1.001])]
    assert values[1] < min(values[0], values[2])
