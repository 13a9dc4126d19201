"""Class-wise temperature scaling: hand-computed and brute-force optima, a naive search as oracle, and its promises."""

import itertools
import os
import tracemalloc
import warnings

import numpy as np
import pytest
from scipy.special import softmax
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning

from smartlib import TemperatureScaling, load, load_calibrator
from smartlib.calibrators import CalibrationWarning
from smartlib.calibrators.classwise import GRID, ClassWiseTemperatureScaling, _gaps_per_bin
from smartlib.metrics import expected_calibration_error, top_label
from smartlib.toplabel import confidence


def sharpened(n=2000, k=4, seed=0, scale=2.0):
    """Logits ``scale`` times those of the true distribution of the labels."""
    rng = np.random.default_rng(seed)
    logits = 1.5 * rng.normal(size=(n, k)) + np.linspace(0, 1, k)
    labels = (softmax(logits, axis=1).cumsum(axis=1) < rng.random((n, 1))).sum(axis=1)
    return scale * logits, labels


def fit(logits, labels, **options):
    """The fitted calibrator and its warnings as (category, text)."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cts = ClassWiseTemperatureScaling(**options).fit(logits, labels)
    return cts, [(w.category, str(w.message)) for w in caught]


def ece(logits, labels, class_temperature):
    predicted = logits.argmax(axis=1)
    return expected_calibration_error(confidence(logits, class_temperature[predicted]), predicted == labels)


def naive(logits, labels, max_iter=5):
    """The same search with the whole ECE computed anew for each candidate."""
    t0 = TemperatureScaling().fit(logits, labels).temperature_
    candidates = np.concatenate([[t0], GRID if 0.5 <= t0 <= 5 else GRID * t0 / np.sqrt(2.5)])
    count = np.bincount(logits.argmax(axis=1), minlength=logits.shape[1])
    temperature = np.full(logits.shape[1], t0)
    for _ in range(max_iter):
        before = temperature.copy()
        for k in sorted(np.flatnonzero(count), key=lambda k: -count[k]):
            rated = []
            for t in candidates:
                trial = temperature.copy()
                trial[k] = t
                rated.append((round(ece(logits, labels, trial), 9), abs(np.log(t / temperature[k])), t))
            temperature[k] = min(rated)[2]
        if np.array_equal(before, temperature):
            break
    return temperature


@pytest.fixture(scope="module")
def data():
    return sharpened()


@pytest.fixture(scope="module")
def fitted(data):
    return fit(*data)[0]


# --- the right temperatures ---------------------------------------------------------------------------------------


def test_a_hand_computed_case_is_the_best_of_all_pairs_of_temperatures():
    """Two margins, one per predicted class: confidence sigma(m / T) meets accuracy a at T = m / logit(a).

    Class 0: m = 2 log 3, 3 of 4 right, logit(3/4) = log 3, so T = 2. Class 1: m = 3 log 9, 9 of 10 right, logit(9/10) =
    log 9, so T = 3. Both are on the grid, and the ECE there is 0.
    """
    logits = np.repeat([[2 * np.log(3), 0], [0, 3 * np.log(9)]], [4, 10], axis=0)
    labels = np.repeat([0, 1, 1, 0], [3, 1, 9, 1])
    cts, texts = fit(logits, labels)
    assert cts.class_temperature_.tolist() == [2.0, 3.0]
    assert cts.ece_ == pytest.approx(0, abs=1e-15)
    every_pair = [ece(logits, labels, np.array(pair)) for pair in itertools.product(GRID, GRID)]
    assert np.argmin(np.round(every_pair, 9)) == 15 * len(GRID) + 25 and sum(np.round(every_pair, 9) == 0) == 1
    np.testing.assert_allclose(cts.predict_proba(logits[[0, 4]]), [[0.75, 0.25], [0.1, 0.9]], rtol=1e-12)
    assert any("2 of 2 classes are predicted for fewer than 50 validation samples (0 for none)" in t for _, t in texts)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("scale", [0.05, 1, 3, 40])
def test_agrees_with_a_search_that_computes_the_whole_ece_for_each_candidate(seed, scale):
    logits, labels = sharpened(n=150, k=3, seed=seed, scale=scale)
    cts, _ = fit(logits, labels)
    np.testing.assert_allclose(cts.class_temperature_, naive(logits, labels), rtol=1e-14)
    assert len(set(cts.class_temperature_.tolist())) > 1


def test_the_ece_is_that_of_the_probabilities_and_below_that_of_temperature_scaling(data, fitted):
    logits, labels = data
    of_ours, of_ts = (
        expected_calibration_error(*top_label(c.predict_proba(logits), labels))
        for c in (fitted, TemperatureScaling().fit(logits, labels))
    )
    assert fitted.ece_ == pytest.approx(of_ours, abs=1e-12)
    assert of_ours < of_ts - 0.003


def test_temperatures_belong_to_the_predicted_class(data, fitted):
    logits, _ = data
    t = fitted.temperatures(logits)
    assert t.tolist() == [fitted.class_temperature_[k] for k in logits.argmax(axis=1)]
    np.testing.assert_allclose(fitted.predict_proba(logits), softmax(logits / t[:, None], axis=1), rtol=1e-12)
    assert fitted.n_parameters == len(fitted.class_temperature_) == 4


def test_a_class_that_no_temperature_changes_stays_at_that_of_temperature_scaling():
    """All logits tie, so that the confidence is 1/3 at every T and all candidates have the same ECE."""
    cts, _ = fit(np.zeros((30, 3)), [0, 1, 2] * 10)
    assert cts.class_temperature_.tolist() == [cts.temperature_] * 3


def test_a_confidence_on_an_edge_but_for_its_last_digits_is_in_the_lower_bin():
    """Three equal logits: 1/3 is the edge of bins 4 and 5 of 15, and rounding puts it on either side."""
    for noise in (0, 1e-15, -1e-15):
        z, y = np.array([[noise, 0, 0]]), np.array([0])
        gaps = _gaps_per_bin(z, y, np.array([0]), np.array([1.0]))
        assert np.flatnonzero(gaps[0, 0]).tolist() == [4]
        assert gaps[0, 0, 4] == pytest.approx(2 / 3)


# --- many classes -------------------------------------------------------------------------------------------------


def test_a_thousand_classes_that_are_mostly_empty():
    logits, labels = sharpened(n=300, k=1000)
    cts, texts = fit(logits, labels)
    empty = np.bincount(logits.argmax(axis=1), minlength=1000) == 0
    assert 700 < empty.sum() < 1000
    assert np.all(cts.class_temperature_[empty] == cts.temperature_)
    assert cts.ece_ < ece(logits, labels, np.full(1000, cts.temperature_))
    assert any(f"1000 of 1000 classes are predicted for fewer than 50 validation samples ({empty.sum()} for none)" in t
               for _, t in texts)  # fmt: skip


def test_memory_is_bounded_whatever_the_size():
    """A table of candidates, samples and classes would be 1.9 GB. Chunks are 34 MB, and some exist at a time."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((10_000, 500), dtype=np.float32) * 3
    labels = np.where(rng.random(10_000) < 0.7, logits.argmax(axis=1), rng.integers(0, 500, 10_000))
    tracemalloc.start()
    fit(logits, labels, max_iter=1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 180e6


# --- invariants ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_predictions_are_kept_and_rows_are_distributions(data, dtype):
    logits, labels = data
    logits = logits.astype(dtype)
    logits[:5] = logits[:5].round()  # ties
    cts, _ = fit(logits, labels)
    probs = cts.predict_proba(logits)
    assert probs.dtype == dtype
    np.testing.assert_array_equal(probs.argmax(axis=1), logits.argmax(axis=1))
    assert probs.min() >= 0
    np.testing.assert_allclose(probs.sum(axis=1), 1, rtol=1e-6)


def test_the_order_of_samples_and_the_numbers_of_classes_do_not_matter(data, fitted):
    logits, labels = data
    rng = np.random.default_rng(1)
    rows, columns = rng.permutation(len(labels)), rng.permutation(4)
    permuted, _ = fit(logits[rows], labels[rows])
    np.testing.assert_allclose(permuted.class_temperature_, fitted.class_temperature_, rtol=1e-9)
    count = np.bincount(logits.argmax(axis=1))
    assert len(set(count.tolist())) == 4
    permuted, _ = fit(logits[:, columns], columns.argsort()[labels])
    np.testing.assert_allclose(permuted.class_temperature_, fitted.class_temperature_[columns], rtol=1e-9)


@pytest.mark.parametrize("scale", [20, 1 / 50, 1e5])
def test_outside_of_the_grid_temperatures_follow_the_scale_of_the_logits(data, scale):
    logits, labels = data
    once, again = (fit(s * logits, labels)[0] for s in (scale, 64 * scale if scale > 1 else scale / 64))
    ratio = 64 if scale > 1 else 1 / 64
    np.testing.assert_allclose(again.class_temperature_, ratio * once.class_temperature_, rtol=1e-9)
    assert len(set(once.class_temperature_.tolist())) > 1
    assert once.ece_ < ece(scale * logits, labels, np.full(4, once.temperature_))


def test_calibrated_logits_change_little():
    logits, labels = sharpened(n=5000, scale=1.0)
    cts, _ = fit(logits, labels)
    assert np.abs(cts.predict_proba(logits) - softmax(logits, axis=1)).mean() < 0.02
    far, _ = fit(3 * logits, labels)
    assert np.abs(far.predict_proba(3 * logits) - softmax(3 * logits, axis=1)).mean() > 0.05


@pytest.mark.parametrize("mask", [-np.inf, -1e9, -3e38])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_masked_classes_do_not_matter_whatever_masks_them(data, fitted, mask, dtype):
    logits, labels = data
    masked = np.concatenate([logits, np.full((len(labels), 2), mask)], axis=1).astype(dtype)
    cts, _ = fit(masked, labels)
    np.testing.assert_allclose(cts.class_temperature_[:4], fitted.class_temperature_, rtol=1e-6)
    assert cts.predict_proba(masked)[:, 4:].max() == 0


def test_two_fits_are_identical_and_the_input_is_left_alone(data, fitted):
    logits, labels = data
    strided = np.repeat(logits, 2, axis=0)[::2]
    strided.flags.writeable = False
    again, _ = fit(strided, labels)
    assert again.class_temperature_.tobytes() == fitted.class_temperature_.tobytes()
    assert clone(again).get_params() == {"max_iter": 5}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_saved_calibrator_predicts_the_same_bits(data, fitted, tmp_path, monkeypatch, dtype):
    fitted.save(tmp_path / "cts.json")
    logits = data[0].astype(dtype)
    assert load_calibrator(tmp_path / "cts.json").predict_proba(logits).tobytes() == (
        fitted.predict_proba(logits).tobytes()
    )


# --- fits not to be trusted ---------------------------------------------------------------------------------------


def test_a_good_fit_gives_no_warning():
    logits, labels = sharpened(n=3000, k=3)
    cts, texts = fit(logits, labels)
    assert texts == [] and cts.converged_ is True and 2 <= cts.n_iter_ <= 5


def test_one_pass_is_too_few_and_said_so(data):
    cts, texts = fit(*data, max_iter=1)
    assert cts.converged_ is False and cts.n_iter_ == 1
    assert [t for c, t in texts if c is ConvergenceWarning] == [
        "ClassWiseTemperatureScaling: pass 1, the last one allowed, still changed temperatures; raise max_iter."
    ]


def test_a_class_without_errors_ends_at_the_end_of_the_grid_and_is_named():
    logits, labels = sharpened(n=3000, k=3, scale=1.0)
    labels = np.where(logits.argmax(axis=1) == 1, 1, labels)
    cts, texts = fit(logits, labels)
    assert cts.class_temperature_[1] == GRID[0]
    assert any("the temperatures of 1 classes, with 3" in t and "end of the grid" in t for _, t in texts)


@pytest.mark.parametrize(
    "logits, labels, text",
    [
        ([[2.0, 0.0, 1.0]], [0], "all 1 predictions are correct"),
        ([[2.0, 0.0, 1.0]], [1], "all 1 predictions are wrong"),
        ([[5.0, 0.0], [0.0, 5.0]], [0, 1], "all 2 predictions are correct"),
        ([[2.0, 0.0], [0.0, 2.0]], [1, 0], "all 2 predictions are wrong"),
        (np.tile([3.0, 1.0, 0.0], (20, 1)), [0] * 15 + [1] * 5, "2 for none"),
        (np.zeros((6, 3)), [0, 1, 2] * 2, "2 for none"),
        (np.eye(3)[[0, 1, 2, 0]] * 1e5, [0, 1, 1, 0], "fewer than 50"),
        (np.array([[2, 1, -np.inf], [2, -np.inf, -np.inf], [1, 2, 0]]), [1, 0, 1], "fewer than 50"),
        (np.random.default_rng(0).normal(size=(9, 3)), [1] * 9, "every label is class 1"),
    ],
)
def test_degenerate_data_give_a_finite_fit_and_a_warning(logits, labels, text):
    cts, texts = fit(logits, labels)
    assert any(c is CalibrationWarning and text in t for c, t in texts)
    assert np.all(np.isfinite(cts.class_temperature_)) and np.all(cts.class_temperature_ > 0)
    assert np.all(np.isfinite(cts.predict_proba(logits))) and np.isfinite(cts.ece_)


@pytest.mark.parametrize("max_iter", [0, -3, 2.5, True, np.nan])
def test_a_limit_that_is_no_count_is_refused(data, max_iter):
    with pytest.raises(ValueError, match=f"max_iter must be a whole number of at least 1, got {max_iter}"):
        ClassWiseTemperatureScaling(max_iter=max_iter).fit(*data)


# --- public logits ------------------------------------------------------------------------------------------------


@pytest.mark.skipif("SMARTLIB_DATA_DIR" not in os.environ, reason="the public logits are not on this machine")
def test_on_densenet_40_it_agrees_with_the_naive_search_and_lowers_the_validation_ece():
    bundle = load("public/cifar10-densenet40")
    logits, labels = bundle.val.logits[:1000].astype(np.float64), bundle.val.labels[:1000]
    cts, _ = fit(logits, labels)
    np.testing.assert_allclose(cts.class_temperature_, naive(logits, labels), rtol=1e-14)
    assert cts.ece_ < 0.7 * ece(logits, labels, np.full(10, cts.temperature_))
