"""Ensemble temperature scaling: the exact minimum on the simplex, a general solver beside it, predictions, inputs."""

import os
import warnings

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.special import softmax

from smartlib import TemperatureScaling, arrays, load
from smartlib.calibrators import CalibrationWarning
from smartlib.calibrators.ensemble import EnsembleTemperatureScaling, simplex_minimum


def calibrated(n=500, k=5, seed=0):
    """Logits whose softmax is the true distribution of the labels."""
    rng = np.random.default_rng(seed)
    logits = 2 * rng.normal(size=(n, k))
    labels = (softmax(logits, axis=1).cumsum(axis=1) < rng.random((n, 1))).sum(axis=1)
    return logits, labels


def contaminated(n=2000, k=5, seed=0, scale=3.0):
    """Over-confident logits, and one label in ten drawn from all classes alike: all three parts are of use."""
    logits, labels = calibrated(n, k, seed)
    rng = np.random.default_rng(seed + 100)
    noise = rng.random(n) < 0.1
    return scale * logits, np.where(noise, rng.integers(0, k, n), labels)


def fit(logits, labels):
    """The fitted calibrator and the texts of its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ets = EnsembleTemperatureScaling().fit(logits, labels)
    assert all(issubclass(w.category, CalibrationWarning) for w in caught)
    return ets, [str(w.message) for w in caught]


def brier(probs, labels):
    return ((probs - np.eye(probs.shape[1])[labels]) ** 2).sum(axis=1).mean()


def parts(logits, t):
    return np.stack([softmax(logits / t, axis=1), softmax(logits, axis=1), np.full(logits.shape, 1 / logits.shape[1])])


# --- the weights --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "linear, expected",
    [
        # With G = 1 the minimum is the point of the simplex next to v.
        ([0.2, 0.3, 0.5], [0.2, 0.3, 0.5]),  # on it
        ([0.0, 0.0, 0.0], [1 / 3, 1 / 3, 1 / 3]),  # v + 1/3
        ([0.5, 0.25, -5.0], [0.625, 0.375, 0.0]),  # on an edge: v_1 - v_2 = .25 = w_1 - w_2
        ([0.0, 5.0, 0.0], [0.0, 1.0, 0.0]),  # in a corner
    ],
)
def test_the_minimum_on_the_simplex_by_hand(linear, expected):
    np.testing.assert_allclose(simplex_minimum(np.eye(3), np.array(linear)), expected, atol=1e-14)


@pytest.mark.parametrize("seed", range(30))
def test_no_point_of_the_simplex_is_lower(seed):
    rng = np.random.default_rng(seed)
    a, v = rng.normal(size=(3, rng.integers(1, 4))), rng.normal(size=3)  # of rank one, two or three
    gram = a @ a.T
    w = simplex_minimum(gram, v)
    assert w.min() >= 0 and w.sum() == pytest.approx(1, abs=1e-14)
    others = rng.dirichlet([0.5, 0.5, 0.5], size=5000)
    values = np.einsum("si,ij,sj->s", others, gram, others) - 2 * others @ v
    assert w @ gram @ w - 2 * v @ w <= values.min() + 1e-12


def test_equal_parts_give_the_weight_to_the_first():
    """Four rows with margin log 3, three right: c = 3/4 at T = 1, so that the first two parts are the same."""
    logits = np.tile([np.log(3), 0.0], (4, 1))
    ets = EnsembleTemperatureScaling().fit(logits, [0, 0, 0, 1])
    assert ets.temperature_ == pytest.approx(1, rel=1e-10)
    assert ets.weights_.tolist() == [1, 0, 0]
    np.testing.assert_allclose(ets.predict_proba(logits[:1]), [[0.75, 0.25]], rtol=1e-9)


def by_slsqp(mixed, labels):
    """The lowest Brier score of a mixture and its weights, by a general solver."""
    return minimize(
        lambda w: brier(np.tensordot(w, mixed, axes=1), labels),
        [1 / 3, 1 / 3, 1 / 3],
        method="SLSQP",
        bounds=[(0, 1)] * 3,
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1},
        options={"ftol": 1e-14, "maxiter": 500},
    )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("scale", [0.3, 3.0])
def test_weights_agree_with_a_general_solver(seed, scale):
    logits, labels = contaminated(seed=seed, scale=scale)
    ets = EnsembleTemperatureScaling().fit(logits, labels)
    mixed = parts(logits, ets.temperature_)
    other = by_slsqp(mixed, labels)
    np.testing.assert_allclose(ets.weights_, other.x, atol=2e-4)
    assert brier(ets.predict_proba(logits), labels) <= other.fun + 1e-12
    assert ets.temperature_ == TemperatureScaling().fit(logits, labels).temperature_


def test_all_three_parts_can_have_weight_and_lower_the_brier_score():
    logits, labels = contaminated()
    ets, texts = fit(logits, labels)
    assert texts == []
    assert ets.weights_.min() > 0.005
    assert ets.bound_hit_ is None and ets.converged_ is True and ets.n_parameters == 3
    scaled = TemperatureScaling().fit(logits, labels).predict_proba(logits)
    assert brier(ets.predict_proba(logits), labels) < brier(scaled, labels)


def test_calibrated_data_stay_as_they_are():
    logits, labels = calibrated(n=5000)
    probs = EnsembleTemperatureScaling().fit(logits, labels).predict_proba(logits)
    assert np.abs(probs - softmax(logits, axis=1)).max() < 0.03


# --- probabilities ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rows_are_the_mixture_and_keep_every_prediction(dtype):
    logits, labels = contaminated()
    ets = EnsembleTemperatureScaling().fit(logits.astype(dtype), labels)
    probs = ets.predict_proba(logits.astype(dtype))
    assert probs.dtype == dtype and probs.min() >= 0
    np.testing.assert_allclose(probs.sum(axis=1), 1, atol=1e-6)
    np.testing.assert_array_equal(probs.argmax(axis=1), logits.astype(dtype).argmax(axis=1))
    expected = np.tensordot(ets.weights_, parts(logits, ets.temperature_), axes=1)
    np.testing.assert_allclose(probs, expected, atol=1e-6 if dtype == np.float32 else 1e-13)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("weights", [[0.0, 0.0, 1.0], [0.0, 1e-12, 1.0 - 1e-12], [0.5, 0.5, 0.0], [0.9, 0.05, 0.05]])
def test_predictions_are_kept_where_rounding_or_the_uniform_part_makes_classes_tie(dtype, weights):
    ets = EnsembleTemperatureScaling().fit(*contaminated(k=3))
    ets.weights_ = np.array(weights)
    low = dtype(7.25)
    rows = np.array([[low, np.nextafter(low, dtype(8)), 0], [0, 1, 2], [0, 2, 1], [1, 1, 0]], dtype=dtype)
    probs = ets.predict_proba(rows)
    assert probs.argmax(axis=1).tolist() == [1, 2, 1, 0]
    np.testing.assert_allclose(probs.sum(axis=1), 1, atol=1e-6)


def test_labels_at_odds_with_the_logits_leave_the_uniform_part_alone():
    """Equal margins, every second prediction right: c = 1/2 is best, and that is the uniform part's."""
    logits = np.array([[2.0, 0.0], [0.0, 2.0]])
    ets, texts = fit(logits, [0, 0])
    assert ets.weights_.tolist() == [0, 0, 1] and ets.bound_hit_ == "upper"
    assert any("the uniform part has all the weight" in text for text in texts)
    assert any("is the upper search bound" in text for text in texts)
    probs = ets.predict_proba(logits)
    np.testing.assert_allclose(probs, 0.5, rtol=1e-15)
    assert probs.argmax(axis=1).tolist() == [0, 1]


def test_a_masked_class_stays_impossible_and_changes_nothing_else():
    logits, labels = contaminated()
    masked = np.column_stack([logits[:, :2], np.full(len(labels), -np.inf), logits[:, 2:]])
    with_mask = EnsembleTemperatureScaling().fit(masked, labels + (labels >= 2))
    without = EnsembleTemperatureScaling().fit(logits, labels)
    assert without.weights_[2] > 0.005
    np.testing.assert_allclose(with_mask.weights_, without.weights_, atol=1e-12)
    probs = with_mask.predict_proba(masked)
    assert (probs[:, 2] == 0).all()
    np.testing.assert_allclose(np.delete(probs, 2, axis=1), without.predict_proba(logits), atol=1e-12)
    np.testing.assert_allclose(with_mask.predict_proba([[-np.inf] * 5 + [0.3]]), [[0, 0, 0, 0, 0, 1]], rtol=1e-15)


def test_permutations_of_samples_and_of_classes():
    logits, labels = contaminated()
    ets = EnsembleTemperatureScaling().fit(logits, labels)
    rng = np.random.default_rng(0)
    order, classes = rng.permutation(len(labels)), rng.permutation(5)
    shuffled = EnsembleTemperatureScaling().fit(logits[order], labels[order])
    np.testing.assert_allclose(shuffled.weights_, ets.weights_, atol=1e-9)
    permuted = EnsembleTemperatureScaling().fit(logits[:, classes], np.argsort(classes)[labels])
    np.testing.assert_allclose(permuted.weights_, ets.weights_, atol=1e-9)
    np.testing.assert_allclose(
        permuted.predict_proba(logits[:, classes]), ets.predict_proba(logits)[:, classes], atol=1e-9
    )


# --- inputs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("a", [1e5, 20, 1 / 50])
def test_the_tempered_part_follows_the_scale_of_the_logits(a):
    logits, labels = calibrated()
    ets, _ = fit(a * logits, labels)
    assert ets.temperature_ / a == pytest.approx(TemperatureScaling().fit(logits, labels).temperature_, rel=1e-9)
    assert np.isfinite(ets.predict_proba(a * logits)).all()


@pytest.mark.parametrize(
    "logits, labels, text",
    [
        ([[2.0, 1.0, 0.0]], [0], "all 1 predictions are correct"),
        ([[2.0, 1.0, 0.0]], [1], "all 1 predictions are wrong"),
        ([[5.0, 0.0], [0.0, 5.0]], [0, 1], "is the lower search bound"),
        ([[2.0, 0.0], [0.0, 2.0]], [1, 0], "is the upper search bound"),
        ([[2.0, 0.0], [0.0, 2.0], [1.0, 0.0]], [0, 0, 0], "every label is class 0"),
        (np.zeros((4, 3)), [0, 1, 2, 0], "is the upper search bound"),
    ],
)
def test_degenerate_data_give_a_finite_result_and_a_warning(logits, labels, text):
    ets, texts = fit(logits, labels)
    assert any(text in given for given in texts)
    assert np.isfinite(ets.weights_).all() and ets.weights_.sum() == pytest.approx(1, abs=1e-14)
    probs = ets.predict_proba(logits)
    assert np.isfinite(probs).all()
    np.testing.assert_allclose(probs.sum(axis=1), 1, atol=1e-6)
    np.testing.assert_array_equal(probs.argmax(axis=1), np.argmax(logits, axis=1))


def test_chunks_give_the_same_result(monkeypatch):
    logits, labels = contaminated()
    whole = EnsembleTemperatureScaling().fit(logits, labels)
    expected = whole.predict_proba(logits)
    monkeypatch.setattr(arrays, "_CHUNK_NUMBERS", 1000)
    chunked = EnsembleTemperatureScaling().fit(logits, labels)
    np.testing.assert_allclose(chunked.weights_, whole.weights_, atol=1e-10)
    np.testing.assert_allclose(chunked.predict_proba(logits), expected, atol=1e-10)


def test_inputs_are_left_alone_and_tensors_come_back_as_tensors():
    logits, labels = contaminated()
    expected = EnsembleTemperatureScaling().fit(logits, labels).predict_proba(logits)
    wide = np.repeat(logits, 2, axis=1)
    wide.flags.writeable = False
    strided = EnsembleTemperatureScaling().fit(wide[:, ::2], labels)
    np.testing.assert_array_equal(strided.predict_proba(wide[:, ::2]), expected)
    tensor = torch.tensor(logits, requires_grad=True)
    probs = EnsembleTemperatureScaling().fit(tensor, torch.tensor(labels)).predict_proba(tensor)
    assert isinstance(probs, torch.Tensor) and not probs.requires_grad
    np.testing.assert_array_equal(probs.numpy(), expected)


def test_from_probs_equals_taking_the_logarithm():
    logits, labels = contaminated()
    probs = softmax(logits, axis=1)
    by_option = EnsembleTemperatureScaling().fit(probs, labels, from_probs=True)
    np.testing.assert_allclose(
        by_option.predict_proba(probs, from_probs=True),
        EnsembleTemperatureScaling().fit(np.log(probs), labels).predict_proba(np.log(probs)),
        atol=1e-12,
    )


@pytest.mark.skipif("SMARTLIB_DATA_DIR" not in os.environ, reason="the public logits are not on this machine")
def test_public_logits_agree_with_a_general_solver_and_improve_the_brier_score():
    bundle = load("public/cifar10-densenet40")
    z, y = np.asarray(bundle.val.logits, dtype=np.float64), bundle.val.labels
    ets = EnsembleTemperatureScaling().fit(z, y)
    assert ets.temperature_ == pytest.approx(2.8826, abs=1e-4)
    mixed = parts(z, ets.temperature_)
    np.testing.assert_allclose(ets.weights_, by_slsqp(mixed, y).x, atol=1e-3)
    assert brier(ets.predict_proba(z), y) < brier(softmax(z / ets.temperature_, axis=1), y)
