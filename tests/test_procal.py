"""ProCal: densities and isotonic curves by hand and by libraries, what it promises, few errors, memory, saving."""

import tracemalloc
import warnings

import numpy as np
import pytest
import torch
from scipy.special import softmax
from scipy.stats import gaussian_kde, norm
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.isotonic import IsotonicRegression
from threadpoolctl import threadpool_limits

import smartlib
from smartlib import arrays, evaluate, load_calibrator
from smartlib.calibrators import CalibrationWarning
from smartlib.calibrators.procal import ProCal, bandwidths, density_ratio, isotonic
from smartlib.proximity import proximity, proximity_informed_ece

METHODS = ["density_ratio", "isotonic"]


def calibrated(n=500, k=5, seed=0, d=6):
    """Logits whose softmax is the true distribution of the labels, and features that say nothing more."""
    rng = np.random.default_rng(seed)
    logits = 1.5 * rng.normal(size=(n, k))
    labels = (softmax(logits, axis=1).cumsum(axis=1) < rng.random((n, 1))).sum(axis=1)
    return logits, labels, rng.normal(size=(n, d))


def biased(n=2000, seed=0):
    """Confidence near .8 everywhere; accuracy .6 where features are sparse and .95 where they are dense."""
    rng = np.random.default_rng(seed)
    features = np.r_[rng.normal(size=(n, 8)), 30 + rng.normal(size=(n, 8))]
    logits = np.tile([np.log(8.0), 0.0, 0.0], (2 * n, 1)) + 0.05 * rng.normal(size=(2 * n, 3))
    accuracy = np.repeat([0.6, 0.95], n)
    labels = np.where(rng.random(2 * n) < accuracy, 0, rng.integers(1, 3, size=2 * n))
    return logits, labels, features


def fit(logits, labels, features, **settings):
    """The fitted calibrator and the texts of its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        procal = ProCal(**settings).fit(logits, labels, features=features)
    assert all(issubclass(w.category, CalibrationWarning) for w in caught)
    return procal, [str(w.message) for w in caught]


def predict(procal, logits, features, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)  # a few samples outside the range of a small fit
        return procal.predict_proba(logits, features=features, **options)


# --- the density ratio --------------------------------------------------------------------------------------------


def test_density_ratio_by_hand():
    """Right at (.5, .2), (.5, .4), (.9, .2), (.9, .4): standard deviations .2 and .1, widths w = 1.06 · 4^(−1/6) · s.
    Wrong at the same four points twice: widths u = 1.06 · 8^(−1/6) · s = w · 2^(−1/6).
    At the centre every point is one standard deviation away in both coordinates: with a = 1 / 1.06,
    sums of kernels 4 exp(−a² 4^(1/3)) and 8 exp(−a² 8^(1/3)), over the areas of the widths, 1 and 2^(−1/3)."""
    square = np.array([[0.5, 0.2], [0.5, 0.4], [0.9, 0.2], [0.9, 0.4]])
    points = np.r_[square, square, square]
    right = np.arange(12) < 4
    np.testing.assert_allclose(bandwidths(points[right], points), 1.06 * 4 ** (-1 / 6) * np.array([0.2, 0.1]))
    a = 1 / 1.06**2
    k_right, k_wrong = 4 * np.exp(-a * 4 ** (1 / 3)), 8 * np.exp(-a * 2) * 2 ** (1 / 3)
    result = density_ratio(np.array([[0.7, 0.3]]), points, right)
    np.testing.assert_allclose(result, k_right / (k_right + k_wrong), rtol=1e-12)


def symmetric(rng, n):
    """(4 n, 2) points whose coordinates are uncorrelated and have one standard deviation."""
    x = rng.normal(size=(n, 2))
    x = np.concatenate([x * signs for signs in ([1, 1], [1, -1], [-1, 1], [-1, -1])])
    return 0.5 + 0.1 * x / x.std(axis=0)


@pytest.mark.parametrize("oracle", ["scipy.stats.gaussian_kde", "a sum of normal densities"])
def test_density_ratio_agrees_with_other_kernel_densities(oracle):
    """gaussian_kde turns its kernels by the covariance, so the groups here have uncorrelated coordinates."""
    rng = np.random.default_rng(0)
    groups = symmetric(rng, 40), 0.05 + symmetric(rng, 9)
    points, right = np.concatenate(groups), np.arange(196) < 160
    new = rng.uniform(0.2, 0.9, size=(300, 2))
    joint = []
    for group in groups:
        n = len(group)
        if oracle.startswith("scipy"):
            factor = 1.06 * n ** (-1 / 6) * np.sqrt((n - 1) / n)  # its covariance divides by n − 1
            density = gaussian_kde(group.T, bw_method=factor)(new.T)
        else:
            width = 1.06 * group.std(axis=0) * n ** (-1 / 6)
            density = np.array([norm.pdf(x, group, width).prod(axis=1).mean() for x in new])
        joint.append(n / len(points) * density)
    np.testing.assert_allclose(density_ratio(new, points, right), joint[0] / (joint[0] + joint[1]), rtol=1e-9)


def test_density_ratio_is_finite_where_both_densities_underflow():
    rng = np.random.default_rng(1)
    points = np.r_[rng.normal(0.3, 1e-4, size=(50, 2)), rng.normal(0.4, 1e-4, size=(50, 2))]
    result = density_ratio(np.array([[0.9, 0.9], [0.3, 0.3], [0.4, 0.4]]), points, np.arange(100) < 50)
    assert np.isfinite(result).all()
    np.testing.assert_allclose(result[1:], [1, 0], atol=1e-12)


def test_where_right_and_wrong_samples_lie_alike_the_ratio_is_the_accuracy():
    rng = np.random.default_rng(2)
    right = rng.random(20_000) < 0.8
    result = density_ratio(rng.normal(0.5, 0.05, size=(200, 2)), rng.normal(0.5, 0.1, size=(20_000, 2)), right)
    np.testing.assert_allclose(result, 0.8, atol=0.05)


# --- isotonic -----------------------------------------------------------------------------------------------------


def test_isotonic_by_hand():
    """Sparse half, by confidence: wrong, right, wrong, right → 0, ½, ½, 1. Dense half: all right but the lowest two,
    right and wrong → ½, ½, 1, 1. Between two points the curve is linear, beyond the ends constant."""
    confidence = [0.2, 0.4, 0.6, 0.8]
    points = np.array([[f, d] for d in (0.1, 0.9) for f in confidence])
    right = np.array([0, 1, 0, 1, 1, 0, 1, 1], dtype=bool)
    sparse = isotonic(np.array([[f, 0.2] for f in (0.1, 0.3, 0.5, 0.7, 0.9)]), points, right, 2)
    np.testing.assert_allclose(sparse, [0, 0.25, 0.5, 0.75, 1], atol=1e-12)
    dense = isotonic(np.array([[f, 0.8] for f in (0.1, 0.3, 0.5, 0.7, 0.9)]), points, right, 2)
    np.testing.assert_allclose(dense, [0.5, 0.5, 0.75, 1, 1], atol=1e-12)


def test_isotonic_is_that_of_scikit_learn_in_each_bin_of_proximity():
    rng = np.random.default_rng(3)
    points, new = rng.uniform(size=(500, 2)), rng.uniform(size=(300, 2))
    right = rng.random(500) < points[:, 0] ** (2 - points[:, 1])
    edges = np.quantile(points[:, 1], [0, 0.2, 0.4, 0.6, 0.8, 1])
    result = isotonic(new, points, right, 5)
    for b in range(5):
        here, asked = (np.clip(np.searchsorted(edges, x[:, 1]) - 1, 0, 4) == b for x in (points, new))
        assert here.sum() == 100
        curve = IsotonicRegression(out_of_bounds="clip").fit(points[here, 0], right[here])
        np.testing.assert_allclose(result[asked], curve.predict(new[asked, 0]), atol=1e-12)


def test_isotonic_leaves_empty_bins_out_and_asks_the_next():
    """Proximities tie at two values: of five bins three stay empty."""
    points = np.array([[0.5, 0.2]] * 6 + [[0.5, 0.7]] * 4)
    right = np.array([1, 1, 1, 0, 0, 0, 1, 1, 1, 0], dtype=bool)
    new = np.array([[0.5, 0.1], [0.5, 0.2], [0.5, 0.7], [0.5, 0.9]])
    np.testing.assert_allclose(isotonic(new, points, right, 5), [0.5, 0.5, 0.75, 0.75])


# --- what a fit promises ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_it_removes_a_bias_that_no_calibrator_of_the_confidence_can(method):
    procal, texts = fit(*biased(), method=method)
    assert texts == []
    logits, labels, features = biased(seed=1)
    # New features among the old ones: proximities as new samples have them.
    probs = predict(procal, logits, features)
    sparse, dense = probs[:2000].max(axis=1), probs[2000:].max(axis=1)
    assert sparse.mean() == pytest.approx(0.6, abs=0.04)
    assert dense.mean() == pytest.approx(0.95, abs=0.04)
    near = proximity(features, procal.reference_)
    before, after = (
        proximity_informed_ece(p.max(axis=1), p.argmax(axis=1) == labels, near)
        for p in (softmax(logits, axis=1), probs)
    )
    assert before > 0.15
    assert after < 0.06


@pytest.mark.parametrize("method, tolerance", [("density_ratio", 0.03), ("isotonic", 0.05)])
def test_it_is_nearly_the_identity_on_calibrated_data(method, tolerance):
    procal, _ = fit(*calibrated(5000), method=method)
    logits, _, features = calibrated(2000, seed=1)
    before, after = softmax(logits, axis=1).max(axis=1), predict(procal, logits, features).max(axis=1)
    assert np.abs(after - before).mean() < tolerance


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_predictions_are_kept_and_the_other_classes_share_the_rest(method, dtype):
    procal, _ = fit(*calibrated(), method=method)
    logits, _, features = calibrated(500, seed=1)
    logits[:3] = [[1, 1, 0, 0, 0], [9, 0, 0, 0, 8.999], [0, 0, 0, 0, 0]]
    logits = logits.astype(dtype)
    probs = predict(procal, logits, features)
    assert probs.dtype == dtype
    assert probs.min() >= 0
    np.testing.assert_allclose(probs.sum(axis=1, dtype=float), 1, atol=1e-6)
    np.testing.assert_array_equal(probs.argmax(axis=1), logits.argmax(axis=1))
    new = np.column_stack([softmax(logits.astype(float), axis=1).max(axis=1), proximity(features, procal.reference_)])
    points = np.column_stack([procal.confidence_, procal.proximity_])
    new = np.clip(new, points.min(axis=0), points.max(axis=0))
    right = procal.correct_ == 1
    expected = density_ratio(new, points, right) if method == "density_ratio" else isotonic(new, points, right, 5)
    np.testing.assert_allclose(probs.max(axis=1), np.maximum(expected, 0.2), atol=1e-6)
    free = np.flatnonzero((expected > 0.5) & (expected < 0.999))
    assert free.size > 100
    rest, share = (np.sort(p[free], axis=1)[:, :-1] for p in (probs, softmax(logits.astype(float), axis=1)))
    np.testing.assert_allclose(
        rest / rest.sum(axis=1, keepdims=True), share / share.sum(axis=1, keepdims=True), atol=1e-4
    )


@pytest.mark.parametrize("method", METHODS)
def test_permuting_samples_or_classes_changes_nothing_else(method):
    logits, labels, features = calibrated()
    new, _, new_features = calibrated(200, seed=1)
    probs = predict(fit(logits, labels, features, method=method)[0], new, new_features)
    rng = np.random.default_rng(4)
    order, classes = rng.permutation(500), rng.permutation(5)
    permuted, _ = fit(logits[order], labels[order], features[order], method=method)
    np.testing.assert_allclose(predict(permuted, new, new_features), probs, atol=1e-9)
    renamed, _ = fit(logits[:, classes], np.argsort(classes)[labels], features, method=method)
    np.testing.assert_allclose(predict(renamed, new[:, classes], new_features), probs[:, classes], atol=1e-9)
    once = predict(renamed, new[:1, classes], new_features[:1])
    np.testing.assert_allclose(once, probs[:1, classes], atol=1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_two_fits_and_one_or_two_threads_agree(method):
    data, (new, _, new_features) = calibrated(), calibrated(200, seed=1)
    results = []
    for threads in (1, 2, 2):
        with threadpool_limits(threads):
            results.append(predict(fit(*data, method=method)[0], new, new_features))
    np.testing.assert_array_equal(results[1], results[2])
    np.testing.assert_allclose(results[0], results[1], atol=1e-9)


def test_the_samples_own_proximity_leaves_itself_out():
    logits, labels, features = calibrated()
    procal, _ = fit(logits, labels, features, n_neighbours=3)
    np.testing.assert_allclose(procal.proximity_, proximity(features, n_neighbours=3), atol=1e-7)
    # The sample itself in place of its third neighbour: at least (1 − exp(−d₃²)) / 3 more, d₃ its distance.
    assert (proximity(features, procal.reference_, n_neighbours=3) > procal.proximity_ + 0.01).all()
    assert procal.n_parameters == 500 * (6 + 3)


def test_inputs_of_any_kind_give_the_same_and_stay_as_they_are():
    logits, labels, features = calibrated()
    logits, features = logits.astype(np.float32), features.astype(np.float32)
    procal, _ = fit(logits, labels, features)
    probs, kept = predict(procal, logits, features), (logits.copy(), features.copy())
    for array in (logits, labels, features):
        array.setflags(write=False)
    same, _ = fit(torch.tensor(kept[0]), torch.tensor(labels), torch.tensor(kept[1], requires_grad=True))
    tensor = predict(same, torch.tensor(kept[0]), torch.tensor(kept[1]))
    assert isinstance(tensor, torch.Tensor)
    np.testing.assert_array_equal(tensor.numpy(), probs)
    strided, _ = fit(np.repeat(logits, 2, axis=0)[::2], labels, np.asfortranarray(features))
    np.testing.assert_array_equal(predict(strided, logits, features), probs)
    np.testing.assert_array_equal(logits, kept[0])
    np.testing.assert_array_equal(features, kept[1])
    by_probs = ProCal().fit(softmax(logits.astype(float), axis=1), labels, features=features, from_probs=True)
    again = predict(by_probs, softmax(logits.astype(float), axis=1), features, from_probs=True)
    np.testing.assert_allclose(again, probs, atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_masked_classes_huge_logits_and_zero_features_stay_finite(method):
    logits, labels, features = calibrated()
    procal, _ = fit(logits, labels, features, method=method)
    new, _, new_features = calibrated(60, seed=1)
    new[:20] *= 1e5
    new[20:40, 3:] = -np.inf
    new[39, 1:] = -np.inf
    new_features[:10] = 0
    probs = predict(procal, new, new_features)
    assert np.isfinite(probs).all()
    np.testing.assert_allclose(probs.sum(axis=1), 1, atol=1e-12)
    np.testing.assert_array_equal(probs.argmax(axis=1), new.argmax(axis=1))
    assert (probs[20:40, 3:] == 0).all()
    assert probs[39, 0] == 1
    huge, _ = fit(1e5 * logits, labels, features, method=method)
    assert np.isfinite(predict(huge, 1e5 * new[:20], new_features[:20])).all()


@pytest.mark.parametrize("method", METHODS)
def test_refitting_forgets_the_first_fit_and_a_clone_is_unfitted(method):
    first, second = calibrated(), calibrated(300, seed=1, d=3)
    procal, _ = fit(*first, method=method)
    with pytest.raises(NotFittedError):
        clone(procal).predict_proba(first[0], features=first[2])
    procal.fit(second[0], second[1], features=second[2])
    fresh, _ = fit(*second, method=method)
    np.testing.assert_equal(vars(procal), vars(fresh))


@pytest.mark.parametrize("method", METHODS)
def test_saved_and_loaded_it_predicts_the_same_bits(method, tmp_path, monkeypatch):
    procal, _ = fit(*calibrated(200), method=method, n_neighbours=7, n_proximity_bins=3)
    new, _, new_features = calibrated(100, seed=1)
    procal.save(tmp_path / "cal.json")
    loaded = load_calibrator(tmp_path / "cal.json")
    assert loaded.get_params() == procal.get_params()
    np.testing.assert_array_equal(predict(loaded, new, new_features), predict(procal, new, new_features))


def test_memory_beyond_the_output_stays_below_half_the_logits(monkeypatch):
    """50,000 × 1,000 in small: chunks of 1/64 of the input."""
    logits, labels, features = calibrated(2000, k=256, d=16)
    procal, _ = fit(logits, labels, features)
    at_once = predict(procal, logits, features)
    monkeypatch.setattr(arrays, "_CHUNK_NUMBERS", 2000 * 256 // 64)
    tracemalloc.start()
    try:
        fit(logits, labels, features)
        peak_of_fit = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        probs = predict(procal, logits, features)
        peak = tracemalloc.get_traced_memory()[1] - probs.nbytes
    finally:
        tracemalloc.stop()
    assert peak_of_fit < 0.5 * logits.nbytes
    assert peak < 0.5 * logits.nbytes
    np.testing.assert_array_equal(probs, at_once)


# --- too little data, and errors ----------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong, word", [(False, "right"), (True, "wrong")])
def test_densities_need_right_and_wrong_samples(wrong, word):
    logits, _, features = calibrated(50)
    labels = (logits.argmax(axis=1) + wrong) % 5
    with (
        pytest.raises(ValueError, match=f"all 50 validation predictions are {word}: .*method='isotonic'"),
        pytest.warns(CalibrationWarning, match="all 50 predictions are"),
    ):
        ProCal().fit(logits, labels, features=features)
    procal, texts = fit(logits, labels, features, method="isotonic")
    assert any("all 50 predictions are" in text for text in texts)
    probs = predict(procal, logits, features)
    np.testing.assert_allclose(probs.max(axis=1), 0.2 if wrong else 1.0, atol=1e-12)
    np.testing.assert_array_equal(probs.argmax(axis=1), logits.argmax(axis=1))


@pytest.mark.parametrize("n_wrong", [1, 2])
def test_one_or_two_errors_get_the_spread_of_all_samples(n_wrong):
    logits, _, features = calibrated(100)
    labels = logits.argmax(axis=1)
    labels[:n_wrong] = (labels[:n_wrong] + 1) % 5
    procal, texts = fit(logits, labels, features)
    assert len(texts) == 1
    assert f"only {n_wrong} of 100 validation predictions are wrong" in texts[0]
    points = np.column_stack([procal.confidence_, procal.proximity_])
    expected = 1.06 * points.std(axis=0) * n_wrong ** (-1 / 6)
    np.testing.assert_allclose(bandwidths(points[:n_wrong], points), expected, rtol=1e-12)
    probs = predict(procal, logits, features)
    assert np.isfinite(probs).all()
    assert 0.9 < probs.max(axis=1).mean() < 1


@pytest.mark.parametrize("method", METHODS)
def test_a_constant_proximity_leaves_the_confidence_alone(method):
    logits, labels, _ = calibrated(2000)
    features = np.random.default_rng(0).uniform(1, 2, size=(2000, 1)) * np.ones(3)  # one direction
    procal, texts = fit(logits, labels, features, method=method)
    assert texts == ["ProCal: the proximity of all 2000 validation samples is the same, so it tells nothing."]
    probs = predict(procal, logits, features)
    before, after = softmax(logits, axis=1).max(axis=1), probs.max(axis=1)
    assert np.abs(after - before).mean() < 0.05
    # Any other proximity changes nothing either.
    with pytest.warns(
        CalibrationWarning, match="100.0% of the samples have a proximity outside the fitted range 1 .. 1"
    ):
        other = procal.predict_proba(logits, features=np.tile([1.0, 0, 0], (2000, 1)))
    np.testing.assert_allclose(other, probs, atol=1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_where_nothing_varies_the_confidence_is_the_accuracy(method):
    """Six of eight are right, at one confidence and one proximity: 6 / 8."""
    logits, features = np.tile([2.0, 0.0, 0.0], (8, 1)), np.ones((8, 2))
    procal, texts = fit(logits, [0, 0, 0, 0, 0, 0, 1, 2], features, method=method, n_neighbours=3)
    assert sum("is the same, so it tells nothing" in text for text in texts) == 2
    assert any("only 2 of 8" in text for text in texts) == (method == "density_ratio")
    np.testing.assert_allclose(predict(procal, logits, features)[:, 0], 0.75, rtol=1e-12)


def test_a_single_sample_and_fewer_samples_than_neighbours_or_bins():
    procal, texts = fit([[2.0, 0.0]], [0], [[1.0, 2.0]], method="isotonic")
    assert any("1 validation samples have only 0 neighbours each, not 10" in text for text in texts)
    np.testing.assert_allclose(predict(procal, [[2.0, 0.0], [0.0, 1.0]], np.ones((2, 2))), [[1, 0], [0, 1]])
    procal, texts = fit([[2.0, 0.0], [0.0, 1.0]], [0, 0], [[1.0, 2.0], [2.0, 1.0]])
    assert any("2 validation samples have only 1 neighbours" in text for text in texts)
    probs = predict(procal, [[2.0, 0.0], [0.0, 1.0]], np.ones((2, 2)))
    assert np.isfinite(probs).all()
    assert np.isfinite(list(evaluate(probs, [0, 0]).to_dict().values())).all()


def test_samples_outside_the_fitted_range_are_taken_at_its_end_and_reported():
    logits, labels, features = calibrated()
    procal, _ = fit(0.3 * logits, labels, features)
    new, new_features = 50 * logits[:100], features[:100]
    with pytest.warns(CalibrationWarning, match=r"of the samples have a confidence outside the fitted range 0\.2"):
        probs = procal.predict_proba(new, features=new_features)
    end = np.column_stack([np.full(100, procal.confidence_.max()), proximity(new_features, procal.reference_)])
    points = np.column_stack([procal.confidence_, procal.proximity_])
    end[:, 1] = np.clip(end[:, 1], points[:, 1].min(), points[:, 1].max())
    far = softmax(new, axis=1).max(axis=1) > points[:, 0].max()
    assert far.sum() > 90
    expected = density_ratio(end, points, procal.correct_ == 1)
    np.testing.assert_allclose(probs.max(axis=1)[far], expected[far], atol=1e-9)


@pytest.mark.parametrize(
    "settings, words",
    [
        (dict(method="kde"), "method must be one of 'density_ratio', 'isotonic', got 'kde'"),
        (dict(n_neighbours=0), "n_neighbours must be a whole number of at least 1, got 0"),
        (dict(n_proximity_bins=1.5), "n_proximity_bins must be a whole number of at least 1, got 1.5"),
    ],
)
def test_bad_settings_are_refused_at_the_fit(settings, words):
    procal = ProCal(**settings)
    logits, labels, features = calibrated(50)
    with pytest.raises(ValueError, match=words):
        procal.fit(logits, labels, features=features)


def test_features_are_needed_and_must_fit():
    logits, labels, features = calibrated(50)
    with pytest.raises(ValueError, match=r"ProCal needs features=..., the \(N, D\) input"):
        ProCal().fit(logits, labels)
    with pytest.raises(ValueError, match="49 rows of features for 50 rows of logits"):
        ProCal().fit(logits, labels, features=features[1:])
    procal, _ = fit(logits, labels, features)
    with pytest.raises(ValueError, match=r"ProCal needs features=..., the \(N, D\) input"):
        procal.predict_proba(logits)
    with pytest.raises(ValueError, match="features have 5 columns, but the calibrator was fitted on 6"):
        procal.predict_proba(logits, features=features[:, 1:])
    with pytest.raises(ValueError, match="logits have 4 classes, but the calibrator was fitted on 5"):
        procal.predict_proba(logits[:, 1:], features=features)
    features[7, 2] = np.nan
    with pytest.raises(ValueError, match="features row 7 holds a value that is not finite"):
        procal.predict_proba(logits, features=features)


# --- a shipped model ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method, share", [("density_ratio", 0.85), ("isotonic", 0.65)])
def test_on_a_shipped_model_it_lowers_the_error_per_proximity(method, share):
    """Fitted on one half of the validation split, judged on the other."""
    val = smartlib.load("fashion/resnet").val
    procal, texts = fit(val.logits[:5000], val.labels[:5000], val.features[:5000], method=method)
    assert texts == []
    logits, labels, features = val.logits[5000:], val.labels[5000:], val.features[5000:]
    probs, near = predict(procal, logits, features), proximity(features, procal.reference_)
    after, before = (
        proximity_informed_ece(p.max(axis=1), p.argmax(axis=1) == labels, near)
        for p in (probs, softmax(logits.astype(float), axis=1))
    )
    assert after < share * before
