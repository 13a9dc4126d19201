"""The base of the calibrators that correct the top-label confidence: `with_confidence`, and what all promise."""

import os
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays as np_arrays
from scipy.special import softmax
from sklearn.base import clone
from sklearn.exceptions import NotFittedError

from smartlib import arrays, evaluate, load, load_calibrator
from smartlib.calibrators import CalibrationWarning
from smartlib.calibrators.base import with_confidence
from smartlib.calibrators.binning import BBQ, HistogramBinning, IsotonicCalibration
from smartlib.calibrators.spline import SplineCalibration
from smartlib.data.synthetic import Population
from smartlib.toplabel import confidence_of

INF = np.inf
MAKERS = {
    "hb": HistogramBinning,
    "hb-mass": lambda: HistogramBinning(binning="mass"),
    "ir": IsotonicCalibration,
    "bbq": BBQ,
    "spline": SplineCalibration,
}
OVER_CONFIDENT, CALIBRATED = Population(slope=0.6), Population()


@pytest.fixture(params=MAKERS)
def make(request):
    return MAKERS[request.param]


@pytest.fixture(scope="module")
def data():
    return OVER_CONFIDENT.sample(5000, seed=0)


@pytest.fixture(scope="module")
def fresh():
    return OVER_CONFIDENT.sample(20_000, seed=1)


def fit(make, logits, labels, **options):
    """The fitted calibrator and the texts of its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        calibrator = make().fit(logits, labels, **options)
    assert all(issubclass(w.category, CalibrationWarning) for w in caught)
    return calibrator, [str(w.message) for w in caught]


def predict(calibrator, logits):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)  # confidences outside the fitted range
        return calibrator.predict_proba(logits)


def learned(calibrator):
    return {name: np.array(value).tolist() for name, value in vars(calibrator).items() if name.endswith("_")}


def assert_sound(probs, logits):
    """Rows of probabilities with the predictions of the logits."""
    assert np.isfinite(probs).all()
    assert (probs >= 0).all()
    np.testing.assert_allclose(probs.sum(axis=1, dtype=np.float64), 1, atol=1e-6)
    np.testing.assert_array_equal(probs.argmax(axis=1), np.asarray(logits).argmax(axis=1))


# --- with_confidence ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "probs, confidence, expected",
    [
        # .3 : .2 share the remaining .2
        pytest.param([0.5, 0.3, 0.2], 0.8, [0.8, 0.12, 0.08], id="raised"),
        pytest.param([0.2, 0.5, 0.3], 0.45, [0.22, 0.45, 0.33], id="lowered"),
        pytest.param([0.5, 0.3, 0.2], 1.0, [1, 0, 0], id="certain"),
        # A third is the least that a largest of three can be, and then all are equal.
        pytest.param([0.5, 0.3, 0.2], 0.1, [1 / 3, 1 / 3, 1 / 3], id="below-one-in-three"),
        pytest.param([0.8, 0.2], 0.3, [0.5, 0.5], id="two-classes-below-a-half"),
        pytest.param([0.8, 0.2], 0.7, [0.7, 0.3], id="two-classes"),
        # The masked class keeps 0; .3 : .2 share .4.
        pytest.param([0.5, 0.3, 0.0, 0.2], 0.6, [0.6, 0.24, 0, 0.16], id="masked"),
        # Two classes are possible, so one half is the least.
        pytest.param([0.6, 0.4, 0.0], 0.4, [0.5, 0.5, 0], id="masked-below-a-half"),
        pytest.param([1.0, 0.0, 0.0], 0.2, [1, 0, 0], id="nothing-else-possible"),
        # Shares of the others .9, .06, .04. In proportion the second would get .63, so they are drawn to 1/3 by
        # a = (.9 - 3/7) / (.9 - 1/3) = .8319328; .7 ((1 - a) .06 + a / 3) = .2011765 and with .04 it is .1988235.
        pytest.param([0.5, 0.45, 0.03, 0.02], 0.3, [0.3, 0.3, 0.2011765, 0.1988235], id="second-would-overtake"),
        # The same with a masked class: shares .9, .1; a = (.9 - .4 / .6) / .4 = .5833333; .6 (.1 (1 - a) + .5 a) = .2
        pytest.param([0.5, 0.45, 0.0, 0.05], 0.4, [0.4, 0.4, 0, 0.2], id="second-would-overtake-masked"),
        pytest.param([0.4, 0.4, 0.2], 0.6, [0.6, 0.4 * 2 / 3, 0.4 / 3], id="tie"),
    ],
)
@pytest.mark.parametrize("shift", [0.0, 1e5, -300.0])
def test_hand_cases(probs, confidence, expected, shift):
    with np.errstate(divide="ignore"):
        z = np.log([probs]) + shift
    tolerance = 2e-7 if any(str(e).endswith("765") for e in expected) else 1e-9 if abs(shift) > 1e4 else 1e-12
    result = with_confidence(z, np.array([confidence]))
    np.testing.assert_allclose(result, [expected], rtol=0, atol=tolerance)
    assert result.argmax() == z.argmax()
    assert all((result[0] == 0) == (np.isneginf(z[0]) | (np.array(expected) == 0)))


def test_the_prediction_stays_where_a_class_before_it_is_drawn_level():
    z = np.array([[0.0, 1.0], [1.0, 0.0]])
    result = with_confidence(z, np.zeros(2))
    assert result.argmax(axis=1).tolist() == [1, 0]
    np.testing.assert_allclose(result, 0.5, rtol=0, atol=2e-16)


@given(
    np_arrays(np.float64, st.tuples(st.integers(1, 4), st.integers(2, 7)), elements=st.floats(-40, 40)),
    st.floats(0, 1),
    st.integers(-1, 6),
    st.sampled_from([np.float32, np.float64]),
)
def test_any_row_keeps_its_prediction_and_gets_its_confidence(z, confidence, masked, dtype):
    if 0 <= masked < z.shape[1]:
        z[z.argmax(axis=1) != masked, masked] = -INF
    result = with_confidence(z, np.full(len(z), confidence), dtype)
    first, possible = z.argmax(axis=1), np.isfinite(z)
    assert result.dtype == dtype
    np.testing.assert_array_equal(result.argmax(axis=1), first)
    assert (result >= 0).all()
    assert (result[~possible] == 0).all()
    double = dtype is np.float64
    np.testing.assert_allclose(result.sum(axis=1, dtype=np.float64), 1, rtol=0, atol=1e-12 if double else 1e-6)
    expected = np.where(possible.sum(axis=1) > 1, np.maximum(confidence, 1 / possible.sum(axis=1)), 1.0)
    np.testing.assert_allclose(result[np.arange(len(z)), first], expected, rtol=0, atol=1e-12 if double else 1e-7)
    # The order of the others stays, beyond rounding.
    for row, probs in zip(z, result.astype(np.float64), strict=True):
        others = np.delete(probs, row.argmax())[np.argsort(np.delete(row, row.argmax()))]
        assert (np.diff(others) >= -1e-7).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("k", [2, 10, 1000])
def test_the_confidence_of_the_softmax_gives_the_softmax(dtype, k):
    z = 3 * np.random.default_rng(0).normal(size=(50, k)).astype(dtype)
    result = with_confidence(z, confidence_of(z, 1.0), dtype)
    np.testing.assert_allclose(
        result, softmax(z.astype(np.float64), axis=1), rtol=1e-6 if dtype == np.float32 else 1e-11
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("confidence", [0.0, 0.2, 0.34, 0.5, 1 - 1e-9, 1.0])
def test_logits_one_rounding_apart_keep_their_predicted_class(dtype, confidence):
    low = dtype(7.25)
    high = np.nextafter(low, dtype(8))
    z = np.array([[low, high, 0], [high, low, 0], [low, low, 0], [0, low, high]], dtype=dtype)
    result = with_confidence(z, np.full(4, confidence), dtype)
    assert result.argmax(axis=1).tolist() == [1, 0, 0, 2]
    np.testing.assert_allclose(result.sum(axis=1), 1, rtol=1e-6)


def test_chunks_change_nothing_and_the_input_stays_as_it_is(monkeypatch):
    rng = np.random.default_rng(0)
    z, confidence = 5 * rng.normal(size=(101, 6)), rng.random(101)
    before = z.copy()
    z.setflags(write=False)
    confidence.setflags(write=False)
    whole = with_confidence(z, confidence)
    monkeypatch.setattr(arrays, "_CHUNK_NUMBERS", 40)
    np.testing.assert_array_equal(with_confidence(z, confidence), whole)
    np.testing.assert_array_equal(z, before)


# --- what every calibrator of the confidence promises -------------------------------------------------------------


def test_confidences_move_although_rescaled_and_normalised_rows_would_not(make):
    """Sixty of a hundred right at a confidence of .9, whatever the second class.

    A public mistake is to multiply the row by new / old confidence and to normalise it: nothing changes.
    """
    logits = np.log(np.tile([[0.9, 0.06, 0.04], [0.02, 0.9, 0.08]], (50, 1)))
    labels = np.where(np.arange(100) < 60, logits.argmax(axis=1), 2)
    calibrator, _ = fit(make, logits, labels)
    probs = calibrator.predict_proba(logits)
    # BBQ's prior of two pseudo-counts for one bin [0, 1] has its middle at 1/2.
    expected = 61 / 102 if make is BBQ else 0.6
    np.testing.assert_allclose(probs.max(axis=1), expected, atol=1e-9)
    np.testing.assert_allclose(probs[0], [expected, (1 - expected) * 0.6, (1 - expected) * 0.4], atol=1e-9)
    before = softmax(logits, axis=1)
    rescaled = before * (0.6 / 0.9)
    np.testing.assert_allclose(rescaled / rescaled.sum(axis=1, keepdims=True), before, rtol=1e-12)


# On 20,000 fresh samples the ECE is .074 before; after the fits on 5,000 samples of seeds 0, 1, 2 between .0061 and
# .0153. The true error, E|c - P(correct | f)|, knows no bins: .0717 before, .008 to .039 after.
@pytest.mark.parametrize("seed", range(2))
def test_over_confident_data_have_a_fourth_of_their_ece_on_fresh_data(seed, make, fresh):
    val = OVER_CONFIDENT.sample(5000, seed=seed)
    probs = predict(make().fit(val.logits, val.labels), fresh.logits)
    before, after = (evaluate(p, fresh.labels) for p in (softmax(fresh.logits, axis=1), probs))
    assert before.ece > 0.07
    assert after.ece < before.ece / 4
    assert after.smce < before.smce / 8
    assert after.brier < before.brier  # the NLL may rise where a confidence is mapped to 1
    f = confidence_of(fresh.logits, 1.0)
    truth = OVER_CONFIDENT.accuracy(np.minimum(f, 1 - 1e-15))
    moved = np.abs(probs.max(axis=1) - f).mean()
    assert 0.06 < moved < 0.1
    assert np.abs(probs.max(axis=1) - truth).mean() < 0.6 * np.abs(f - truth).mean()


# How far a step function is from the diagonal depends on its bins; the spline is the smoothest.
@pytest.mark.parametrize(
    "name, moved", [("hb", 0.025), ("hb-mass", 0.025), ("ir", 0.02), ("bbq", 0.03), ("spline", 0.008)]
)
def test_calibrated_data_are_left_nearly_as_they_are(name, moved):
    val, other = CALIBRATED.sample(5000, seed=0), CALIBRATED.sample(20_000, seed=10)
    probs = predict(MAKERS[name]().fit(val.logits, val.labels), other.logits)
    assert np.abs(probs.max(axis=1) - confidence_of(other.logits, 1.0)).mean() < moved
    assert evaluate(probs, other.labels).ece < 0.015


def test_the_map_is_a_function_of_the_confidence_alone(make, data):
    """Other logits with the same confidences get the same confidences."""
    calibrator = make().fit(data.logits, data.labels)
    f = confidence_of(data.logits, 1.0)
    two = np.stack([np.log(f), np.log(np.maximum(1 - f, 1e-300))], axis=1)[f > 0.5]
    other = np.concatenate([two, np.full((len(two), 8), -INF)], axis=1)
    np.testing.assert_allclose(
        predict(calibrator, other).max(axis=1),
        np.maximum(predict(calibrator, data.logits[f > 0.5]).max(axis=1), 0.5),
        atol=1e-9,
    )


def test_the_order_of_samples_and_of_classes_changes_nothing(make, data, fresh):
    calibrator, logits = make().fit(data.logits, data.labels), fresh.logits[:2000]
    probs = calibrator.predict_proba(logits)
    rows = np.random.default_rng(0).permutation(len(data.labels))
    shuffled = make().fit(data.logits[rows], data.labels[rows])
    np.testing.assert_allclose(shuffled.predict_proba(logits), probs, atol=1e-12)
    columns = np.random.default_rng(1).permutation(10)  # new column j is the old class columns[j]
    renamed = make().fit(data.logits[:, columns], np.argsort(columns)[data.labels])
    np.testing.assert_allclose(renamed.predict_proba(logits[:, columns]), probs[:, columns], atol=1e-9)


def test_confidences_that_round_to_one_are_equal_whatever_the_order_of_the_classes(make):
    """Four runners-up of 1e-16 each: their sum moves 1 by an ulp or two, depending on the order of the sum."""
    rng = np.random.default_rng(0)
    tails = np.log(rng.uniform(1e-17, 3e-16, size=(400, 4)))
    saturated = np.concatenate([np.zeros((400, 1)), tails], axis=1)
    unsure = rng.normal(size=(400, 5))
    logits = np.concatenate([saturated, unsure])
    labels = np.where(rng.random(800) < 0.8, logits.argmax(axis=1), 4)
    calibrator, _ = fit(make, logits, labels)
    ones = predict(calibrator, saturated).max(axis=1)
    assert len(np.unique(confidence_of(saturated, 1.0))) > 1
    assert len(np.unique(ones)) == 1
    reversed_, _ = fit(make, logits[:, ::-1], 4 - labels)
    np.testing.assert_allclose(predict(reversed_, logits[:, ::-1])[:, ::-1], predict(calibrator, logits), atol=1e-9)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_real_logits_keep_every_prediction(make, dtype):
    bundle = load("fashion/resnet")
    logits = np.asarray(bundle.val.logits, dtype=dtype)
    probs = predict(make().fit(logits[:5000], bundle.val.labels[:5000]), logits[5000:])
    assert probs.dtype == dtype
    assert_sound(probs, logits[5000:])
    assert np.abs(probs.max(axis=1) - confidence_of(logits[5000:], 1.0)).max() > 0.01


def test_float32_and_float64_agree(make, data, fresh):
    single, double = data.logits.astype(np.float32), data.logits.astype(np.float32).astype(np.float64)
    logits = fresh.logits[:1000].astype(np.float32)
    np.testing.assert_allclose(
        make().fit(single, data.labels).predict_proba(logits),
        make().fit(double, data.labels).predict_proba(logits.astype(np.float64)),
        atol=1e-6,
    )


def test_two_fits_are_identical_and_a_refit_forgets_the_first(make, data, fresh):
    first, second = make().fit(data.logits, data.labels), make().fit(fresh.logits, fresh.labels)
    second.fit(data.logits, data.labels)
    assert learned(first) == learned(second)
    assert learned(clone(first).fit(data.logits, data.labels)) == learned(first)


def test_a_saved_calibrator_predicts_the_same_bits(make, data, fresh, tmp_path):
    calibrator = make().fit(data.logits, data.labels)
    calibrator.save(tmp_path / "calibrator.json")
    assert "NaN" not in (tmp_path / "calibrator.json").read_text()
    loaded = load_calibrator(tmp_path / "calibrator.json")
    np.testing.assert_array_equal(predict(loaded, fresh.logits), predict(calibrator, fresh.logits))
    assert loaded.get_params() == calibrator.get_params()
    assert loaded.n_parameters == calibrator.n_parameters


def test_every_value_that_a_prediction_needs_is_missed(make, data, tmp_path):
    calibrator = make().fit(data.logits, data.labels)
    calibrator.save(tmp_path / "whole.json")
    for name in calibrator.learned:
        damaged = make().fit(data.logits, data.labels)
        delattr(damaged, name)
        with pytest.raises(NotFittedError):
            damaged.predict_proba(data.logits)
    needed = {"n_classes_", *calibrator.learned}
    bare = make()
    for name in needed:
        setattr(bare, name, getattr(calibrator, name))
    np.testing.assert_array_equal(bare.predict_proba(data.logits), calibrator.predict_proba(data.logits))


def test_arrays_of_every_kind_give_the_same_and_stay_as_they_are(make, data, tmp_path):
    logits, labels = data.logits[:500], data.labels[:500]
    calibrator = make().fit(logits, labels)
    probs = calibrator.predict_proba(logits)
    np.save(tmp_path / "logits.npy", logits)
    read_only = logits.copy()
    read_only.setflags(write=False)
    wide = np.repeat(logits, 2, axis=1)
    for array in (read_only, wide[:, ::2], np.load(tmp_path / "logits.npy", mmap_mode="r"), logits.astype(">f8")):
        before = np.array(array)
        np.testing.assert_array_equal(make().fit(array, labels).predict_proba(array), probs)
        np.testing.assert_array_equal(np.array(array), before)
    tensor = torch.tensor(logits, requires_grad=True)
    result = make().fit(tensor, torch.tensor(labels)).predict_proba(tensor)
    assert isinstance(result, torch.Tensor)
    np.testing.assert_array_equal(result.numpy(), probs)


DEGENERATE = {
    "one-right": ([[2.0, 0.0, 1.0]], [0]),
    "one-wrong": ([[2.0, 0.0, 1.0]], [1]),
    "two-contradicted": ([[2.0, 0.0], [0.0, 2.0]], [1, 0]),
    "separable": ([[5.0, 0.0], [0.0, 5.0]], [0, 1]),
    "ties-everywhere": (np.zeros((6, 3)), [0, 1, 2, 0, 1, 2]),
    "all-right": (np.diag([3.0, 4, 5, 6, 7]), [0, 1, 2, 3, 4]),
    "all-wrong": (np.diag([3.0, 4, 5, 6, 7]), [1, 2, 3, 4, 0]),
    "one-class": ([[3.0, 0, 0], [0, 1.0, 0], [2.0, 1, 0], [0, 0, 1.0]], [0, 0, 0, 0]),
    "equal-confidences": ([[2.0, 0, 0], [0, 2.0, 0], [0, 0, 2.0], [2.0, 0, 0]], [0, 1, 0, 0]),
    "certain": ([[1.0, -INF, -INF], [0.0, 3.0, -INF], [1.0, -INF, -INF]], [0, 0, 0]),
    "huge": (1e5 * np.array([[1.0, 0, 0.5], [0, 1.0, 0], [0.9, 0.2, 1.0]]), [0, 1, 0]),
    "two-confidences": ([[1.0, 0, 0], [0, 1.0, 0], [0, 2.0, 0], [2.0, 0, 0]], [0, 2, 1, 0]),
}


@pytest.mark.parametrize("kind", DEGENERATE)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_degenerate_data_give_finite_values_and_a_warning(kind, dtype, make, tmp_path):
    logits, labels = np.array(DEGENERATE[kind][0], dtype=dtype), np.array(DEGENERATE[kind][1])
    calibrator, texts = fit(make, logits, labels)
    if make is not IsotonicCalibration or len(np.unique(confidence_of(logits, 1.0).round(12))) == 1:
        assert any("do not determine the fit" in text for text in texts)
    elif kind != "two-confidences":  # which determine a line
        assert texts
    for name, value in learned(calibrator).items():
        assert np.isfinite(value).all(), name
    others = np.random.default_rng(0).normal(size=(50, logits.shape[1])).astype(dtype)
    for rows in (logits, others, 1e5 * others):
        assert_sound(predict(calibrator, rows), rows)
    calibrator.save(tmp_path / "calibrator.json")
    np.testing.assert_array_equal(
        predict(load_calibrator(tmp_path / "calibrator.json"), others), predict(calibrator, others)
    )


@pytest.mark.parametrize("n", [2, 3, 5, 8, 14])
@pytest.mark.parametrize("seed", range(3))
def test_few_samples_give_sound_rows(n, seed, make):
    rng = np.random.default_rng(seed)
    logits, labels = 2 * rng.normal(size=(n, 4)), rng.integers(4, size=n)
    calibrator, _ = fit(make, logits, labels)
    others = 5 * rng.normal(size=(200, 4))
    assert_sound(predict(calibrator, others), others)


def test_confidences_outside_the_fitted_range_are_reported(make, data):
    calibrator = make().fit(data.logits, data.labels)
    calibrator.predict_proba(data.logits)  # no warning, or it would be an error here
    unsure = np.zeros((99, 10))
    with pytest.warns(CalibrationWarning, match=r"2\.0% of the confidences lie outside the fitted range"):
        calibrator.predict_proba(np.concatenate([data.logits[:98], unsure[:2]]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        calibrator.predict_proba(np.concatenate([data.logits[:99], unsure[:1]]))
    assert not caught  # one in a hundred


def test_nothing_works_before_a_fit(make, data, tmp_path):
    with pytest.raises(NotFittedError):
        make().predict_proba(data.logits)
    with pytest.raises(NotFittedError):
        make().save(tmp_path / "calibrator.json")
    if make is not SplineCalibration:
        with pytest.raises(NotFittedError):
            make().n_parameters  # noqa: B018


def test_another_number_of_classes_is_refused(make, data):
    calibrator = make().fit(data.logits, data.labels)
    with pytest.raises(ValueError, match="logits have 9 classes, but the calibrator was fitted on 10"):
        calibrator.predict_proba(data.logits[:, :9])


# --- public logits ------------------------------------------------------------------------------------------------


@pytest.mark.skipif("SMARTLIB_DATA_DIR" not in os.environ, reason="the public logits are not on this machine")
def test_public_logits_lose_two_thirds_of_their_ece(make):
    """CIFAR-10 DenseNet-40, whose ECE is 5.50 %; 23 % of its validation confidences are 1 to twelve decimals."""
    bundle = load("public/cifar10-densenet40")
    calibrator = make().fit(bundle.val.logits, bundle.val.labels)
    probs = predict(calibrator, bundle.test.logits)
    assert_sound(probs, bundle.test.logits)
    record = evaluate(probs, bundle.test.labels)
    assert record.accuracy == pytest.approx(0.9242)
    assert record.ece < 0.055 / 3
