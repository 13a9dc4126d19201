"""Inputs that broke calibration code elsewhere, row by row of a collection of public bug reports.

Each test's name gives its row; the examples of a row stand for its whole kind. The report that a row comes from is
named beside it. Details of each module are in its own test file.
"""

import os
import re
import subprocess
import sys
import tracemalloc
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from every_calibrator import VARIANTS, features_of, fit, learned, needed, numbers, predict, sharpened
from scipy.special import log_softmax, softmax
from sklearn.exceptions import ConvergenceWarning, NotFittedError

import smartlib
from smartlib import SMART, TemperatureScaling, arrays, evaluate, expected_calibration_error, soft_ece
from smartlib.calibrators import CalibrationWarning, create
from smartlib.calibrators.base import TemperatureCalibrator
from smartlib.metrics import classwise_ece, debiased_ece, reliability_bins
from smartlib.toplabel import confidence, margin, predicted_class

INF = np.inf


@pytest.fixture(params=VARIANTS)
def make(request):
    return VARIANTS[request.param]


def is_refused(make, logits, labels):
    """Whether the calibrator refuses data without an error, or with nothing else, by a clear error."""
    correct = np.asarray(labels) == predicted_class(logits)
    calibrator = make()
    if not (correct.all() or not correct.any()) or getattr(calibrator, "method", None) != "density_ratio":
        return False
    with pytest.raises(ValueError, match="method='isotonic'"):
        fit(make, logits, labels)
    return True


def uses(fitted):
    """The methods that take logits after the fit."""
    return [fitted.predict_proba, *([fitted.temperatures] if isinstance(fitted, TemperatureCalibrator) else [])]


def rows(row, **examples):
    """Parameters of one row of the collection, with ids such as row-13-nan."""
    return [pytest.param(value, id=f"row-{row}-{name.replace('_', '-')}") for name, value in examples.items()]


def assert_sound(calibrator, logits, **options):
    """Finite learned values, probabilities that sum to one, and, where promised, the predictions of the logits."""
    probs = predict(calibrator, logits, **options)
    assert np.isfinite(probs).all()
    assert (probs >= 0).all()
    assert probs.dtype in (np.float32, np.float64)
    np.testing.assert_allclose(probs.sum(axis=1, dtype=np.float64), 1, atol=1e-6)
    if calibrator.keeps_predictions:
        np.testing.assert_array_equal(probs.argmax(axis=1), predicted_class(logits))
    for name, value in learned(calibrator).items():
        assert np.isfinite(numbers(value)).all(), name


# --- 1 (gpleiss/temperature_scaling #31, #20) and 6 ----------------------------------------------------------------


@pytest.mark.parametrize(
    "logits, labels, bound",
    [
        pytest.param([[2, 0], [0, 2]], [1, 0], "upper", id="row-1-contradicted"),
        pytest.param([[2, 0], [0, 2], [9, 1]], [1, 0, 1], "upper", id="row-1-three-rows"),
        pytest.param([[2, 0, 1], [0, 2, 1], [1, 0, 2]], [1, 0, 1], "upper", id="row-1-three-classes"),
        pytest.param([[0, 0], [0, 0]], [0, 1], "upper", id="row-1-uninformative"),
        pytest.param([[5, 0], [0, 5]], [0, 1], "lower", id="row-6-separable"),
        pytest.param([[5, 0, 1], [0, 5, 4], [0, 0.5, 1]], [0, 1, 2], "lower", id="row-6-three-classes"),
        pytest.param([[1e-3, 0], [0, 1e3]], [0, 1], "lower", id="row-6-unequal-margins"),
    ],
)
@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e4])
def test_where_the_data_fix_no_temperature_the_fit_is_finite_repeatable_and_says_so(logits, labels, bound, scale, make):
    logits = scale * np.array(logits, dtype=float)
    if is_refused(make, logits, labels):
        return
    first, caught = fit(make, logits, labels)
    second, _ = fit(make, logits, labels)
    assert learned(first) == learned(second)
    assert_sound(first, logits)
    if logits.any() or first.registry_name != "vs":  # without any logit two biases are all there is to fit
        assert any(category is CalibrationWarning for category, _ in caught)
    if isinstance(first, TemperatureScaling):
        assert first.bound_hit_ == bound
        assert any(f"is the {bound} search bound" in text for _, text in caught)


# --- 2 (gpleiss #23) -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", rows(2, image=(2, 3, 4, 4), sequence=(2, 5, 3), vector=(6,), one_column=(6, 1), scalar=())
)
def test_logits_of_another_shape_are_refused_with_the_shape_expected(shape, make):
    logits = np.arange(np.prod(shape), dtype=float).reshape(shape)
    n = shape[0] if shape else 1
    fitted, _ = fit(make, *sharpened())
    for use in (lambda z: make().fit(z, np.zeros(n, int)), *uses(fitted), margin):
        with pytest.raises(ValueError, match=r"shape \(N, K\)"):
            use(logits)
    with pytest.raises(ValueError, match=r"shape \(N, K\)"):
        evaluate(np.ones(shape), np.zeros(n, int))


# --- 3 (gpleiss #28, #34) ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("a", rows(3, times_20=20.0, divided_by_50=1 / 50, times_1e5=1e5, divided_by_1e5=1e-5))
def test_temperature_scaling_follows_the_scale_of_the_logits(a):
    logits, labels = sharpened(scale=1, n=2000)
    ts = TemperatureScaling().fit(a * logits, labels)
    assert ts.temperature_ == pytest.approx(a, rel=0.1)
    assert ts.temperature_ / a == pytest.approx(TemperatureScaling().fit(logits, labels).temperature_, rel=1e-9)


@pytest.mark.parametrize("a", rows(3, times_20=20.0, divided_by_50=1 / 50, times_1e5=1e5, divided_by_1e5=1e-5))
def test_every_calibrator_is_sound_at_every_scale_of_the_logits(a, make):
    logits, labels = sharpened(scale=1)
    assert_sound(fit(make, a * logits, labels)[0], a * logits)


@pytest.mark.parametrize(
    "solver, a, warned",
    [
        pytest.param("lbfgs", 1 / 50, "floor of 0.1", id="row-3-floor-lbfgs"),
        pytest.param("adam", 1 / 50, "floor of 0.1", id="row-3-floor-adam"),
        pytest.param("lbfgs", 1 / 500, "floor of 0.1", id="row-3-far-below-the-floor-lbfgs"),
        pytest.param("adam", 1 / 500, "floor of 0.1", id="row-3-far-below-the-floor-adam"),
        pytest.param("lbfgs", 1.0, None, id="row-3-neither-lbfgs"),
        pytest.param("adam", 1.0, None, id="row-3-neither-adam"),
        pytest.param("lbfgs", 20.0, None, id="row-3-large-lbfgs"),
        pytest.param("lbfgs", 1e5, "ceiling of 100", id="row-3-ceiling-lbfgs"),  # that of its table; Adam has none
    ],
)
def test_smart_says_when_a_bound_of_its_temperature_binds(solver, a, warned):
    logits, labels = sharpened()
    smart, caught = fit(lambda: SMART(solver=solver, max_iter=400), a * logits, labels)
    told = [text for category, text in caught if category is CalibrationWarning and "T is at its" in text]
    assert len(told) == (warned is not None)
    assert all(warned in text and "by a constant" in text for text in told)
    assert_sound(smart, a * logits)


# --- 4 (gpleiss #29, netcal #32, #55, torch-uncertainty #179) -------------------------------------------------------


@pytest.mark.parametrize("dtype", rows(4, float16=np.float16, float32=np.float32, float64=np.float64))
def test_softmax_rows_passed_as_logits_warn_and_with_the_option_equal_their_logarithm(dtype, make):
    logits, labels = sharpened()
    probs = softmax(logits, axis=1).astype(dtype)
    _, caught = fit(make, probs, labels)
    assert any("from_probs=True" in text for _, text in caught)
    tiny = np.finfo(dtype).tiny
    logarithm = np.log(np.maximum(probs.astype(np.float64), tiny))
    by_hand, _ = fit(make, logarithm, labels)
    right, caught = fit(make, probs, labels, from_probs=True, logits_for_features=logarithm)
    assert not any("from_probs" in text for _, text in caught)
    assert learned(right) == learned(by_hand)
    expected = predict(by_hand, logarithm)
    found = predict(right, probs, from_probs=True, logits_for_features=logarithm)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7 if found.dtype == np.float32 else 1e-12)
    with pytest.warns(UserWarning, match="from_probs=True"):
        predict(right, probs)


@pytest.mark.parametrize("dtype", rows(4, float32_zeros=np.float32, float64_zeros=np.float64))
def test_probabilities_of_exactly_zero_and_one_are_finite(dtype, make):
    probs = np.array([[1, 0, 0], [0, 1, 0], [0.5, 0.5, 0], [0.2, 0.3, 0.5]] * 5, dtype=dtype)
    labels = [0, 1, 1, 2] * 5
    logarithm = arrays.log_probabilities(probs)
    calibrator, _ = fit(make, probs, labels, from_probs=True, logits_for_features=logarithm)
    out = predict(calibrator, probs, from_probs=True, logits_for_features=logarithm)
    assert np.isfinite(out).all()
    if calibrator.keeps_predictions:
        assert out.argmax(axis=1).tolist() == [0, 1, 0, 2] * 5


# --- 5 (robustness_metrics #79) ------------------------------------------------------------------------------------


ITERATIVE = {
    "lbfgs": partial(SMART, tol=0.0),
    "adam": partial(SMART, solver="adam", tol=0.0),
    "lbfgs_321": partial(SMART, hidden=(16, 16), tol=0.0),
    "nll": partial(SMART, objective="nll", tol=0.0),
    **{name: partial(create, name) for name in ("vs", "pts", "dirichlet", "gc")},
}


@pytest.mark.parametrize("solver", rows(5, **ITERATIVE))
@pytest.mark.parametrize("limit", [1, 2])
def test_a_solver_stopped_by_its_limit_has_not_converged_and_warns(solver, limit):
    calibrator, caught = fit(partial(solver, max_iter=limit), *sharpened())
    assert calibrator.converged_ is False
    if isinstance(calibrator, SMART):
        assert calibrator.n_iter_ == limit
    told = [text for category, text in caught if category is ConvergenceWarning]
    assert len(told) == 1
    assert f"limit of {limit} iteration" in told[0]


# --- 7 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "convert",
    rows(
        7,
        column=lambda y: y[:, None],
        floats=lambda y: y.astype(np.float32),
        float_column=lambda y: y[:, None].astype(float),
        series_with_shuffled_index=lambda y: pd.Series(y, index=np.random.default_rng(0).permutation(len(y))),
        series_of_floats=lambda y: pd.Series(y, dtype=float, index=np.arange(len(y))[::-1]),
        frame=lambda y: pd.DataFrame({"y": y}),
        uint8=lambda y: y.astype(np.uint8),
        list=lambda y: y.tolist(),
        tensor=lambda y: torch.tensor(y),
    ),
)
def test_labels_of_every_accepted_kind_give_the_same_fit_and_the_same_record(convert, make):
    logits, labels = sharpened()
    assert learned(fit(make, logits, convert(labels))[0]) == learned(fit(make, logits, labels)[0])
    probs = softmax(logits, axis=1)
    assert evaluate(probs, convert(labels)) == evaluate(probs, labels)


@pytest.mark.parametrize(
    "value, message",
    [
        pytest.param(-1, r"label -1(\.0)? in row 17 is outside 0 \.\. 3", id="row-7-minus-one"),
        pytest.param(4, r"label 4(\.0)? in row 17 is outside 0 \.\. 3", id="row-7-equal-to-k"),
        pytest.param(255, r"label 255(\.0)? in row 17 is outside 0 \.\. 3", id="row-7-ignore-index"),
        pytest.param(1.5, r"label 1\.5 in row 17 is not a whole number", id="row-7-fraction"),
        pytest.param(np.nan, r"label nan in row 17 is not a whole number", id="row-7-nan"),
        pytest.param(INF, r"label inf in row 17 is not a whole number", id="row-7-inf"),
    ],
)
@pytest.mark.parametrize("kind", [np.array, list, pd.Series, torch.tensor])
def test_a_label_that_is_no_class_is_refused_with_its_value_and_row(value, message, kind, make):
    logits, labels = sharpened()
    labels = np.array(labels, dtype=type(value))
    labels[17] = value
    with pytest.raises(ValueError, match=message):
        make().fit(logits, kind(labels))
    with pytest.raises(ValueError, match=message):
        evaluate(softmax(logits, axis=1), kind(labels))


@pytest.mark.parametrize(
    "labels, message",
    [
        pytest.param(np.eye(4)[[0, 1, 2] * 100], r"or \(N, 1\), got \(300, 4\); one-hot", id="row-7-one-hot"),
        pytest.param(np.zeros((1, 300)), r"got \(1, 300\)", id="row-7-one-row"),
        pytest.param(np.zeros(299), "299 labels for 300 rows", id="row-7-too-few"),
        pytest.param(["cat"] * 300, "labels must hold real numbers", id="row-7-strings"),
    ],
)  # fmt: skip
def test_labels_of_another_shape_are_refused(labels, message, make):
    logits, _ = sharpened()
    with pytest.raises(ValueError, match=message):
        make().fit(logits, labels)


# --- 8 (torchmetrics #3510, #1907, #1646), 9, 10 (JonathanWenger/pycalib #4) -----------------------------------------


@pytest.mark.parametrize(
    "f, a, n_bins, ece",
    [
        pytest.param([0.95, 1.0], [1, 0], 15, 0.475, id="row-8-one-is-in-the-last-bin"),
        pytest.param([1.0, 1.0], [1, 0], 15, 0.5, id="row-8-only-ones"),
        pytest.param([0.0], [0], 15, 0.0, id="row-8-zero-counts"),
        pytest.param([0.0, 0.0, 1.0, 1.0], [1, 1, 1, 1], 15, 0.5, id="row-8-zeros-and-ones"),
        pytest.param([0.0, 0.01], [1, 0], 2, 0.495, id="row-8-zero-shares-the-first-bin"),
        pytest.param([0.91] * 100, [1] * 91 + [0] * 9, 10, 0.0, id="row-10-right-on-average"),
        pytest.param([0.91] * 100, [1] * 91 + [0] * 9, 15, 0.0, id="row-10-fifteen-bins"),
        pytest.param([0.91] * 100 + [0.55] * 20, [1] * 91 + [0] * 9 + [1, 0] * 10, 10, 1 / 120, id="row-10-two-bins"),
        pytest.param([0.81] * 3 + [0.89], [1, 1, 1, 0], 10, 0.08, id="row-10-means-not-centres"),
    ],
)  # fmt: skip
def test_ece_uses_means_of_bins_that_hold_every_sample(f, a, n_bins, ece):
    bins = reliability_bins(f, a, n_bins)
    assert bins.count.sum() == len(f)
    assert expected_calibration_error(f, a, n_bins) == pytest.approx(ece, abs=1e-13)
    assert expected_calibration_error(torch.tensor(f), torch.tensor(a), n_bins) == pytest.approx(ece, abs=1e-6)


@pytest.mark.parametrize("binning", ["width", "mass"])
@pytest.mark.parametrize(
    "f", rows(9, fewer_than_bins=[0.3, 0.9, 0.35], one=[0.4], all_equal=[0.7] * 50, all_one=[1.0] * 5, all_zero=[0.0])
)
def test_every_sample_is_counted_once_however_few_or_equal_they_are(f, binning):
    a = np.arange(len(f)) % 2
    bins = reliability_bins(f, a, 15, binning)
    assert bins.count.sum() == len(f)
    np.testing.assert_allclose(np.nansum(bins.count * bins.confidence), np.sum(f))
    np.testing.assert_allclose(np.nansum(bins.count * bins.accuracy), a.sum())
    for norm in ("l1", "l2", "max"):
        assert 0 <= expected_calibration_error(f, a, 15, binning, norm=norm) <= 1
    assert np.isfinite(soft_ece(f, a))


@pytest.mark.parametrize("n_bins", rows(9, zero=0, negative=-1, fraction=2.5, whole_float=15.0, none=None, text="15"))
def test_a_number_of_bins_that_is_no_positive_whole_number_is_refused(n_bins):
    words = re.escape(f"n_bins must be a whole number of at least 1, got {n_bins!r}")
    for function in (reliability_bins, expected_calibration_error, debiased_ece, soft_ece):
        with pytest.raises(ValueError, match=words):
            function([0.5, 0.7], [1, 0], n_bins)
    with pytest.raises(ValueError, match=words):
        classwise_ece([[0.5, 0.5]], [0], n_bins)
    with pytest.raises(ValueError, match=words):
        SMART(n_bins=n_bins).fit(*sharpened())


# --- 11 (p-lambda #2, #7) ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("present", rows(11, without_the_first=[1, 2], without_the_last=[0, 1], outer_only=[0, 2]))
def test_the_number_of_classes_comes_from_the_logits(present, make):
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(200, 3)), rng.choice(present, 200)
    calibrator, _ = fit(make, logits, labels)
    assert calibrator.n_classes_ == 3
    probs = predict(calibrator, logits)
    assert probs.shape == (200, 3)
    shares = np.bincount(labels, minlength=3) / 200
    assert classwise_ece(probs, labels, n_bins=1) == pytest.approx(np.abs(shares - probs.mean(axis=0)).mean(), rel=1e-9)
    assert evaluate(probs, labels).cwece == classwise_ece(probs, labels)


# --- 12 (fiftyone PR #8384 and others) --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "logits",
    rows(
        12,
        float16=np.array([[12, 0], [0, 11], [3, 1], [1, 2]], dtype=np.float16),
        float16_at_its_end=np.array([[65504, -65504], [0, 11], [3, 1], [1, 2]], dtype=np.float16),
        thousand=[[1000.0, 0], [0, 900], [3, 1], [1, 2]],
        minus_thousands=[[-1000.0, -9000], [-90, 0], [3, 1], [1, 2]],
        times_1e5=np.array([[12.0, 0], [0, 11], [3, 1], [1, 2]]) * 1e5,
        float32_times_1e30=np.array([[12, 0], [0, 11], [3, 1], [1, 2]], dtype=np.float32) * np.float32(1e30),
        int8=np.array([[120, -120], [0, 11], [3, 1], [1, 2]], dtype=np.int8),
        integers=[[12, 0], [0, 11], [3, 1], [1, 2]],
        bfloat16=torch.tensor([[12.0, 0], [0, 11], [3, 1], [1, 2]], dtype=torch.bfloat16),
        torch_float16=torch.tensor([[12.0, 0], [0, 11], [3, 1], [1, 2]], dtype=torch.float16),
        torch_integers=torch.tensor([[12, 0], [0, 11], [3, 1], [1, 2]]),
    ),
)
def test_numbers_of_every_width_and_size_are_upcast_first(logits, make):
    labels = [0, 1, 1, 1]
    calibrator, _ = fit(make, logits, labels)
    exact = torch.as_tensor(logits).double().numpy()
    assert_sound(calibrator, exact)
    probs = predict(calibrator, logits)
    assert np.asarray(probs).dtype.itemsize >= 4
    assert np.isfinite(np.asarray(probs)).all()
    np.testing.assert_allclose(np.asarray(probs), predict(calibrator, exact), rtol=1e-5, atol=1e-7)
    assert np.isfinite(np.asarray(margin(logits))).all()
    assert np.isfinite(np.asarray(confidence(logits))).all()


def test_row_12_float16_logits_keep_every_prediction(make):
    rng = np.random.default_rng(1)
    logits = (2 * rng.normal(size=(20_000, 10))).astype(np.float16)
    calibrator, _ = fit(make, logits[:300], rng.integers(0, 10, 300))
    probs = predict(calibrator, logits)
    if not calibrator.keeps_predictions:
        return
    np.testing.assert_array_equal(probs.argmax(axis=1), logits.argmax(axis=1))
    assert (probs.astype(np.float16).argmax(axis=1) != logits.argmax(axis=1)).any()  # why not in float16


# --- 13 (allennlp #890, optax #896) --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", rows(13, float32=np.float32, float64=np.float64))
def test_a_class_at_minus_infinity_counts_as_absent(dtype, make):
    logits, labels = sharpened(k=3)
    masked = np.concatenate([logits, np.full((300, 1), -INF)], axis=1).astype(dtype)
    without, _ = fit(make, logits.astype(dtype), labels)
    with_mask, _ = fit(make, masked, labels)
    probs = predict(with_mask, masked)
    assert (probs[:, 3] == 0).all()
    # The map of Dirichlet calibration has weights from every class, and GC's random starts have one per class.
    rough = {"dirichlet": 0.3, "gc": 0.02}.get(with_mask.registry_name, 1e-6)
    np.testing.assert_allclose(probs[:, :3], predict(without, logits.astype(dtype)), rtol=1e-5, atol=rough)


@pytest.mark.parametrize("number", rows(13, finite_mask=-1e9, lowest_float32=-3.4e38, lowest_float64=-1.79e308))
def test_a_class_masked_by_a_finite_number_stays_impossible_and_leaves_the_fit_finite(number, make):
    logits, labels = sharpened(k=3)
    masked = np.concatenate([logits, np.full((300, 1), number)], axis=1)
    if make().registry_name == "fc":  # its head gives no such logit: a clear error
        with pytest.raises(ValueError, match="head"):
            fit(make, masked, labels, logits_for_features=logits @ np.eye(3, 4))
        return
    calibrator, _ = fit(make, masked, labels, logits_for_features=logits @ np.eye(3, 4))
    probs = predict(calibrator, masked, logits_for_features=logits @ np.eye(3, 4))
    assert np.isfinite(probs).all()
    # The uniform part of ETS, and the map of Dirichlet calibration, take a finite logit for a possible class; and a
    # calibrated confidence below 1/3 leaves more than the two other classes can have.
    limit = {"ets": 0.05, "dirichlet": 0.05}.get(calibrator.registry_name, 1e-12)
    assert probs[probs.max(axis=1) >= 1 / 3, 3].max() <= limit


@pytest.mark.parametrize("share", rows(13, one_row=1, a_tenth=30, all_rows=300))
def test_rows_with_a_single_possible_class_are_certain_and_leave_the_fit_finite(share, make):
    logits, labels = sharpened(k=3)
    certain = logits[:share].argmax(axis=1)
    logits[:share] = -INF
    logits[np.arange(share), certain] = 2.0
    labels[:share] = certain
    if is_refused(make, logits, labels):
        return
    calibrator, _ = fit(make, logits, labels)
    assert_sound(calibrator, logits)
    probs = predict(calibrator, logits)
    assert (probs[np.arange(share), certain] == 1).all()
    if isinstance(calibrator, SMART) and "margin" in calibrator.signal:  # T is that of the largest finite margin
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            limit = calibrator.temperature_map(calibrator.margin_range_[1])
            np.testing.assert_allclose(calibrator.temperatures(logits)[:share], np.repeat(limit, share), rtol=1e-14)


@pytest.mark.parametrize(
    "bad, words",
    [
        pytest.param([-INF] * 4, "holds only -inf", id="row-13-all-minus-inf"),
        pytest.param([0, np.nan, 1, 2], "holds NaN", id="row-13-nan"),
        pytest.param([0, INF, 1, 2], r"holds \+inf", id="row-13-plus-inf"),
        pytest.param([INF] * 4, r"holds \+inf", id="row-13-all-plus-inf"),
    ],
)
@pytest.mark.parametrize("kind", [np.float32, np.float64, torch.tensor, pd.DataFrame])
def test_a_row_without_a_finite_largest_entry_is_refused_with_its_number(bad, words, kind, make):
    logits, labels = sharpened()
    calibrator, _ = fit(make, logits, labels)
    logits[211] = bad
    for use in (lambda z: make().fit(z, labels), *uses(calibrator), margin, confidence):
        with pytest.raises(ValueError, match=f"logits row 211 {words}"):
            use(kind(logits))


def test_row_13_a_label_that_the_logits_rule_out_is_refused_with_its_row(make):
    logits, labels = sharpened()
    logits[42, labels[42]] = -INF
    with pytest.raises(ValueError, match=f"row 42: the logit of its own label {labels[42]} is -inf"):
        make().fit(logits, labels)


# --- 14 (pytorch #17738 and others) --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "logits, predicted",
    [
        pytest.param([[1, 1, 0]], [0], id="row-14-two-tie"),
        pytest.param([[0, 1, 1]], [1], id="row-14-later-two-tie"),
        pytest.param([[2, 2, 2]], [0], id="row-14-all-tie"),
        pytest.param([[1, 1, 0], [0, 3, 3], [2, 2, 2], [5, 1, 0]], [0, 1, 0, 0], id="row-14-some-tie"),
        pytest.param([[1, 1, -INF], [-INF, 0, 0]], [0, 1], id="row-14-ties-beside-impossible-classes"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_tie_goes_to_the_lowest_index_with_margin_zero_and_a_finite_temperature(logits, predicted, dtype, make):
    logits = np.array(logits, dtype=dtype)
    assert predicted_class(logits).tolist() == predicted
    tied = (logits == logits.max(axis=1, keepdims=True)).sum(axis=1) > 1
    assert (margin(logits)[tied] == 0).all()
    for labels in (predicted, [2 if np.isfinite(z[2]) else 0 for z in logits]):
        if is_refused(make, logits, labels):
            continue
        calibrator, _ = fit(make, logits, labels)
        assert_sound(calibrator, logits)
        if isinstance(calibrator, TemperatureCalibrator):
            assert np.isfinite(calibrator.temperatures(logits)).all()
            top = np.sort(predict(calibrator, logits), axis=1)[tied]
            np.testing.assert_allclose(top[:, -1], top[:, -2], rtol=1e-6)


# --- 15 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape, words",
    [
        pytest.param((0, 3), "logits has no rows", id="row-15-no-samples"),
        pytest.param((0, 0), "logits has no rows", id="row-15-nothing"),
        pytest.param((4, 1), r"1 column\(s\): at least two classes are needed", id="row-15-one-class"),
        pytest.param((4, 0), r"0 column\(s\): at least two classes are needed", id="row-15-no-class"),
    ],
)
def test_no_samples_or_fewer_than_two_classes_are_refused(shape, words, make):
    with pytest.raises(ValueError, match=words):
        make().fit(np.zeros(shape), np.zeros(shape[0], int))
    with pytest.raises(ValueError, match=words.replace("logits", "probs")):
        evaluate(np.ones(shape), np.zeros(shape[0], int))


def test_row_15_no_confidences_are_refused():
    with pytest.raises(ValueError, match="confidence is empty"):
        expected_calibration_error([], [])
    with pytest.raises(ValueError, match="confidence is empty"):
        soft_ece([], [])


def few(labels_from):
    logits, _ = sharpened(n=60, k=3)
    return logits, labels_from(logits)


@pytest.mark.parametrize(
    "logits, labels, words",
    [
        pytest.param([[3.0, 1.0]], [0], "all 1 predictions are correct", id="row-15-one-sample-right"),
        pytest.param([[3.0, 1.0]], [1], "all 1 predictions are wrong", id="row-15-one-sample-wrong"),
        pytest.param(*few(lambda z: np.full(60, 2)), "every label is class 2; a validation", id="row-15-one-label"),
        pytest.param(*few(lambda z: z.argmax(axis=1)), "all 60 predictions are correct", id="row-15-all-correct"),
        pytest.param(*few(lambda z: z.argmin(axis=1)), "all 60 predictions are wrong", id="row-15-all-wrong"),
    ],
)  # fmt: skip
def test_a_set_that_cannot_be_trusted_gives_a_finite_fit_and_a_warning_that_says_why(logits, labels, words, make):
    if is_refused(make, logits, labels):
        return
    calibrator, caught = fit(make, logits, labels)
    assert any(category is CalibrationWarning and words in text for category, text in caught)
    assert_sound(calibrator, np.asarray(logits))
    record = evaluate(predict(calibrator, logits), labels)
    assert np.isfinite(list(record.to_dict().values())).all()


# --- 16 ------------------------------------------------------------------------------------------------------------


def test_row_16_memory_beyond_the_output_stays_below_the_input(monkeypatch, make):
    """50,000 × 1,000 in small: chunks of 1/64 of the input, a prediction, and every metric of the standard table."""
    logits, labels = sharpened(n=4000, k=128)
    calibrator, _ = fit(make, logits[:200], labels[:200])
    at_once = predict(calibrator, logits)
    record = evaluate(at_once, labels)
    given = {"features": features_of(logits)} if "features" in calibrator.needs else {}
    monkeypatch.setattr(arrays, "_CHUNK_NUMBERS", 4000 * 128 // 64)
    tracemalloc.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CalibrationWarning)
            probs = calibrator.predict_proba(logits, **given)
        peak_of_prediction = tracemalloc.get_traced_memory()[1] - probs.nbytes
        tracemalloc.reset_peak()
        in_chunks = evaluate(probs, labels)
        peak_of_metrics = tracemalloc.get_traced_memory()[1] - probs.nbytes
    finally:
        tracemalloc.stop()
    assert peak_of_prediction < 0.5 * logits.nbytes
    assert peak_of_metrics < 0.5 * logits.nbytes
    # A product of matrices may differ in its last digits between chunks of another size.
    np.testing.assert_allclose(probs, at_once, rtol=0, atol=1e-12)
    assert in_chunks.to_dict() == pytest.approx(record.to_dict(), rel=1e-12)


@pytest.mark.parametrize("name", [name for name in VARIANTS if not name.startswith("dirichlet")])
def test_row_16_a_fit_takes_no_more_than_twice_its_input(name, monkeypatch):
    """Dirichlet calibration has K (K + 1) parameters, and its memory is theirs."""
    logits, labels = sharpened(n=2000, k=128)
    calibrator = VARIANTS[name]()
    if name == "gc":
        calibrator.set_params(n_partitions=1)  # they are fitted one after the other
    given = needed(calibrator, logits)
    fit(VARIANTS[name], *sharpened())  # what is imported late is no memory of the fit
    monkeypatch.setattr(arrays, "_CHUNK_NUMBERS", 2000 * 128 // 16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tracemalloc.start()
        try:
            calibrator.fit(logits, labels, **given)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak < 2 * logits.nbytes


# --- 17 ------------------------------------------------------------------------------------------------------------


def memory_map(logits, folder):
    np.save(folder / "logits.npy", logits)
    return np.load(folder / "logits.npy", mmap_mode="r")


def read_only(logits, folder):
    copy = logits.copy()
    copy.flags.writeable = False
    return copy


def on_gpu(logits, folder):
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    return torch.tensor(logits, device="cuda")


@pytest.mark.parametrize(
    "convert",
    rows(
        17,
        non_contiguous=lambda z, _: np.repeat(z, 2, axis=1)[:, ::2],
        fortran_order=lambda z, _: np.asfortranarray(z),
        read_only=read_only,
        big_endian=lambda z, _: z.astype(">f8"),
        memory_mapped=memory_map,
        list_of_lists=lambda z, _: z.tolist(),
        frame=lambda z, _: pd.DataFrame(z, index=range(len(z), 0, -1)),
        requires_grad=lambda z, _: torch.tensor(z, requires_grad=True),
        inside_a_graph=lambda z, _: torch.tensor(z, requires_grad=True) + 0,
        on_another_device=on_gpu,
    ),
)
def test_arrays_of_every_kind_give_the_same_result_and_stay_as_they_were(convert, make, tmp_path):
    logits, labels = sharpened()
    expected, _ = fit(make, logits, labels)
    given = convert(logits.copy(), tmp_path)
    calibrator, _ = fit(make, given, labels)
    assert learned(calibrator) == learned(expected)
    probs = predict(calibrator, given)
    if isinstance(given, torch.Tensor):
        assert isinstance(probs, torch.Tensor)
        assert probs.device == given.device
        assert probs.grad_fn is None
        assert not probs.requires_grad
        given, probs = given.detach().cpu(), probs.cpu()
    np.testing.assert_array_equal(np.asarray(given), logits)
    np.testing.assert_array_equal(np.asarray(probs), predict(expected, logits))


# --- 19, 20, 21: see also test_smart.py -----------------------------------------------------------------------------


@pytest.mark.parametrize("k", rows(19, fewer=3, more=5, two=2))
def test_logits_of_another_classifier_are_refused(k, make):
    calibrator, _ = fit(make, *sharpened(k=4))
    for use in uses(calibrator):
        with pytest.raises(ValueError, match=f"logits have {k} classes, but the calibrator was fitted on 4"):
            use(sharpened(k=k)[0])


def test_row_19_prediction_before_the_fit_is_refused(make):
    with pytest.raises(NotFittedError):
        make().predict_proba(sharpened()[0])


def test_row_20_far_logits_get_a_temperature_within_those_of_the_fit(make):
    logits, labels = sharpened()
    calibrator, _ = fit(make, logits, labels)
    far = logits * 1000
    assert_sound(calibrator, far)
    if isinstance(calibrator, TemperatureCalibrator):
        fitted = calibrator.temperatures(logits)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CalibrationWarning)
            t = calibrator.temperatures(far)
        if calibrator.registry_name == "pts":  # ten inputs, each within its range, but in combinations not seen
            assert 0.1 * calibrator.scale_ <= t.min() <= t.max() <= 100 * calibrator.scale_
        else:
            assert fitted.min() - 1e-12 <= t.min() <= t.max() <= fitted.max() + 1e-12


@pytest.mark.parametrize("name", ["smart", "smart-entropy", "pts", "gc", "spline", "hb", "ir", "bbq", "procal"])
def test_row_20_values_outside_the_fitted_range_are_reported(name):
    logits, labels = sharpened()
    calibrator, _ = fit(VARIANTS[name], logits, labels)
    far = logits * (1000 if name in ("smart", "pts", "gc") else 0.01)
    given = {"features": features_of(far)} if calibrator.needs else {}
    with pytest.warns(CalibrationWarning, match="outside the fitted range"):
        calibrator.predict_proba(far, **given)


# --- the import -----------------------------------------------------------------------------------------------------

SLOW = {"torch", "torchvision", "timm", "matplotlib", "pandas", "seaborn", "sympy", "numba"}


def test_the_import_loads_no_slow_package_and_smart_has_49_parameters():
    code = f"""if True:
        import sys
        import smartlib
        loaded = {sorted(SLOW)!r}
        print([name for name in loaded if name in sys.modules])
        print(smartlib.SMART().n_parameters)
        print([name for name in ("torch", "matplotlib", "torchvision", "timm") if name in sys.modules])
    """
    folder = Path(smartlib.__file__).parents[1]
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(folder)}
    )
    assert run.stderr == ""
    assert run.stdout.split("\n") == ["[]", "49", "[]", ""]


def test_every_public_name_can_be_had_and_no_other():
    for name in smartlib.__all__:
        assert getattr(smartlib, name) is not None
    assert set(smartlib.__all__) <= set(dir(smartlib))
    with pytest.raises(AttributeError, match="module 'smartlib' has no attribute 'smart'"):
        _ = smartlib.smart


def test_temperature_scaling_of_calibrated_logits_is_near_one_and_lowers_the_nll_of_others():
    """A last check that the cases above are about a method that works."""
    logits, labels = sharpened(n=2000, scale=3)
    ts = TemperatureScaling().fit(logits, labels)
    assert ts.temperature_ == pytest.approx(3, rel=0.1)
    own = np.arange(len(labels)), labels
    assert -np.log(ts.predict_proba(logits)[own]).mean() < -log_softmax(logits, axis=1)[own].mean() - 0.1
