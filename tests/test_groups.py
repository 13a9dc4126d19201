"""Group calibration: closed forms, torch as oracle of gradient and optimum, the published ECE, and its promises."""

import os
import tracemalloc
import warnings

import numpy as np
import pytest
import torch
from scipy.special import softmax
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning

from smartlib import TemperatureScaling, load, load_calibrator
from smartlib.calibrators import CalibrationWarning
from smartlib.calibrators.groups import GroupCalibration, _likelihood, _objective
from smartlib.metrics import evaluate, negative_log_likelihood


def grouped(n=1500, k=4, seed=0):
    """Logits that are too large where the first one is positive, too small elsewhere."""
    rng = np.random.default_rng(seed)
    logits = 2 * rng.normal(size=(n, k))
    true = logits * np.where(logits[:, :1] > 0, 0.4, 1.5)
    labels = (softmax(true, axis=1).cumsum(axis=1) < rng.random((n, 1))).sum(axis=1)
    return logits, labels


def fit(logits, labels, *, features=None, **options):
    """The fitted calibrator, with three partitions unless told otherwise, and its warnings as (category, text)."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gc = GroupCalibration(**{"n_partitions": 3, **options}).fit(logits, labels, features=features)
    return gc, [(w.category, str(w.message)) for w in caught]


@pytest.fixture(scope="module")
def data():
    return grouped()


@pytest.fixture(scope="module")
def fitted(data):
    return fit(*data)[0]


def reference(z, x, weight, temperature):
    """The log-probabilities of one partition, by torch, and leaves that collect gradients."""
    z, x = torch.tensor(z), torch.tensor(x, dtype=torch.float64)
    groups = torch.log_softmax(x @ weight.T, dim=1)
    parts = torch.log_softmax(z[:, None, :] / temperature[None, :, None], dim=2)
    return torch.logsumexp(groups[:, :, None] + parts, dim=1)


# --- closed forms -------------------------------------------------------------------------------------------------


def test_one_group_is_temperature_scaling(data):
    """With one group pi = 1 and the minimum of the NLL is that of temperature scaling."""
    gc, _ = fit(*data, n_groups=1)
    ts = TemperatureScaling().fit(*data)
    assert gc.temperature_ == ts.temperature_
    np.testing.assert_allclose(gc.group_temperature_, ts.temperature_, rtol=1e-3)
    np.testing.assert_allclose(gc.predict_proba(data[0]), ts.predict_proba(data[0]), atol=1e-3)


def test_groups_that_a_feature_tells_apart_each_meet_their_accuracy():
    """One margin m = 2, two groups by the sign of a feature. Of 200 samples with -1 150 are right, of 200 with +1 180.

    The NLL is least where the confidence of either group is its accuracy, 3/4 and 9/10, at T = 2 / log 3 = 1.82 and
    2 / log 9 = 0.91. Without a penalty the weights grow until the groups are all but hard.
    """
    logits = np.tile([2.0, 0.0], (400, 1))
    labels = np.repeat([0, 1, 0, 1], [150, 50, 180, 20])
    feature = np.repeat([[-1.0], [1.0]], 200, axis=0)
    gc, _ = fit(logits, labels, features=feature, inputs="features", penalty=0.0)
    probs = gc.predict_proba([[2.0, 0.0], [2.0, 0.0]], features=[[-1.0], [1.0]])
    np.testing.assert_allclose(probs[:, 0], [0.75, 0.9], atol=0.01)
    assert gc.predict_proba([[2.0, 0.0]], features=[[0.0]])[0, 0] == pytest.approx(0.825, abs=0.03)
    penalised, _ = fit(logits, labels, features=feature, inputs="features", penalty=1e6)
    probs = penalised.predict_proba([[2.0, 0.0], [2.0, 0.0]], features=[[-1.0], [1.0]])
    np.testing.assert_allclose(probs[:, 0], [0.825, 0.825], atol=0.01)  # one group again: 330 of 400 right


def test_a_prediction_is_the_printed_formula():
    """Two partitions of two groups at margin 1, T of temperature scaling 1, so that the inputs are (0, -1).

    Partition 1 has weights (0, 1), (0, 0) and T = 1, 2: pi = (1, e) / (1 + e). Partition 2 has no weights and T = 1, 1.
    """
    gc = GroupCalibration()
    gc.n_classes_, gc.temperature_ = 2, 1.0
    gc.input_mean_, gc.input_std_ = np.zeros(2), np.ones(2)
    gc.input_low_, gc.input_high_ = np.full(2, -np.inf), np.full(2, np.inf)
    gc.group_weight_ = np.array([[[0.0, 1.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]]])
    gc.group_temperature_ = np.array([[1.0, 2.0], [1.0, 1.0]])
    first = np.array([1 / (1 + np.exp(-1)), 1 / (1 + np.exp(-0.5))])  # softmax of (1, 0) at T = 1, 2
    mixture = (first[0] + np.e * first[1]) / (1 + np.e)
    top, other = np.sqrt(mixture * first[0]), np.sqrt((1 - mixture) * (1 - first[0]))
    expected = [[top / (top + other), other / (top + other)]]
    np.testing.assert_allclose(gc.predict_proba([[3.0, 2.0]]), expected, rtol=1e-14)


# --- torch as oracle ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("a", [(0.0, 0.0), (0.7, -0.9), (-2.0, 1.5)])
def test_value_and_gradient_are_those_of_torch(data, a):
    z, y = data
    rng = np.random.default_rng(2)
    x, w, t0, penalty = rng.normal(size=(len(y), 3)).astype(np.float32), rng.normal(size=(2, 3)), 1.3, 0.1
    weight, log_factor = torch.tensor(w, requires_grad=True), torch.tensor(a, dtype=torch.float64, requires_grad=True)
    log_p = reference(z, x, weight, t0 * torch.exp(log_factor))
    loss = torch.nn.functional.nll_loss(log_p, torch.tensor(y)) + penalty * (weight**2).mean()
    loss.backward()
    value, gradient = _objective(x, _likelihood(z, y, t0), 2, penalty)(np.concatenate([w.ravel(), a]))
    assert value == pytest.approx(loss.item(), abs=1e-5)
    # The confidences are interpolated: their slopes are good to a few 1e-4.
    np.testing.assert_allclose(gradient[:-2].reshape(2, 3), weight.grad, atol=2e-5)
    np.testing.assert_allclose(gradient[-2:], log_factor.grad, atol=5e-4)


def test_the_optimum_is_the_one_that_torch_finds(data, fitted):
    z, y = data
    x = np.maximum((z - z.max(axis=1, keepdims=True)) / fitted.temperature_, -40)
    x = (x - x.mean(axis=0)) / x.std(axis=0)
    generator = torch.Generator().manual_seed(3)
    weight = (torch.rand((2, 4), generator=generator, dtype=torch.float64) - 0.5).requires_grad_()
    temperature = torch.tensor([1.5, 1.5], dtype=torch.float64, requires_grad=True)
    solver = torch.optim.LBFGS(
        [weight, temperature], max_iter=100, tolerance_change=1e-12, line_search_fn="strong_wolfe"
    )

    def closure():
        solver.zero_grad()
        loss = torch.nn.functional.nll_loss(reference(z, x, weight, temperature), torch.tensor(y))
        loss = loss + 0.1 * (weight**2).mean()
        loss.backward()
        return loss

    solver.step(closure)
    np.testing.assert_allclose(fitted.objective_, closure().item(), atol=2e-4)
    probs = reference(z, x, weight, temperature).exp().detach().numpy()
    np.testing.assert_allclose(fitted.predict_proba(z), probs, atol=0.01)
    np.testing.assert_allclose(np.sort(fitted.group_temperature_[0]), np.sort(temperature.detach()), rtol=0.02)


def test_it_finds_the_groups_and_beats_temperature_scaling(data, fitted):
    logits, labels = grouped(seed=1)
    ts = TemperatureScaling().fit(*data)
    assert negative_log_likelihood(fitted.predict_proba(logits), labels) < (
        negative_log_likelihood(ts.predict_proba(logits), labels) - 0.02
    )
    low, high = np.sort(fitted.group_temperature_, axis=1).T
    assert np.all(high > 2 * low)


# --- invariants ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_predictions_are_kept_and_rows_are_distributions(data, fitted, dtype):
    logits = data[0].astype(dtype)
    one_apart = dtype(7.25), np.nextafter(dtype(7.25), dtype(8))
    logits[:3] = [[*one_apart, 0, 0], [*one_apart[::-1], 0, 0], [one_apart[0]] * 2 + [0, 0]]
    probs = fitted.predict_proba(logits)
    assert probs.dtype == dtype
    np.testing.assert_array_equal(probs.argmax(axis=1), logits.argmax(axis=1))
    assert probs.min() >= 0
    np.testing.assert_allclose(probs.sum(axis=1), 1, rtol=1e-6)
    np.testing.assert_allclose(probs, fitted.predict_proba(logits.astype(np.float64)), atol=1e-6)


@pytest.mark.parametrize("scale", [20, 1 / 50, 1e5])
def test_the_scale_of_the_logits_and_a_number_added_to_each_row_do_not_matter(data, fitted, scale):
    logits, labels = data
    shift = np.random.default_rng(1).normal(size=(len(labels), 1)) * 50
    other = scale * (logits + shift)
    gc, _ = fit(other, labels)
    np.testing.assert_allclose(gc.predict_proba(other), fitted.predict_proba(logits), atol=1e-5)
    np.testing.assert_allclose(gc.group_temperature_, scale * fitted.group_temperature_, rtol=1e-4)


def test_the_units_of_features_do_not_matter(data):
    logits, labels = data
    features = np.random.default_rng(1).normal(size=(len(labels), 3)) + logits[:, :1]
    other = np.concatenate([features * [1e-3, 1, 1e4] + [0, 1e6, 5]], axis=1)
    once, again = (fit(logits, labels, features=f, inputs="features")[0] for f in (features, other))
    np.testing.assert_allclose(
        once.predict_proba(logits, features=features), again.predict_proba(logits, features=other), atol=1e-5
    )


def test_the_order_of_samples_does_not_matter_and_classes_take_their_columns_along(data, fitted):
    logits, labels = data
    rng = np.random.default_rng(1)
    rows, columns = rng.permutation(len(labels)), rng.permutation(4)
    permuted, _ = fit(logits[rows], labels[rows])
    np.testing.assert_allclose(permuted.predict_proba(logits), fitted.predict_proba(logits), atol=1e-5)
    # The random start is not permuted, and the partitions end near the same optimum, not on it.
    permuted, _ = fit(logits[:, columns], columns.argsort()[labels])
    np.testing.assert_allclose(
        permuted.predict_proba(logits[:, columns]), fitted.predict_proba(logits)[:, columns], atol=0.01
    )


def test_calibrated_logits_change_little():
    rng = np.random.default_rng(0)
    logits = 2 * rng.normal(size=(5000, 4))
    labels = (softmax(logits, axis=1).cumsum(axis=1) < rng.random((5000, 1))).sum(axis=1)
    gc, texts = fit(logits, labels)
    assert texts == [] and gc.converged_ is True
    assert np.abs(gc.predict_proba(logits) - softmax(logits, axis=1)).mean() < 0.01


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_masked_classes_are_the_same_whatever_masks_them(data, dtype):
    logits, labels = data
    often = np.random.default_rng(4).random((len(labels), 2)) < 0.7
    results = []
    for mask in (-np.inf, -1e9, -3e38):
        masked = np.concatenate([logits, np.where(often, mask, -1.0), np.full((len(labels), 1), mask)], axis=1)
        gc, _ = fit(masked.astype(dtype), labels)
        assert np.all(gc.group_weight_[:, :, 6] == 0)
        results.append(gc.predict_proba(masked.astype(dtype)))
        assert results[-1][:, 4:6][often].max() < 1e-30 and results[-1][:, 6].max() < 1e-30
    np.testing.assert_allclose(results[1], results[0], atol=1e-6)
    np.testing.assert_allclose(results[2], results[0], atol=1e-6)


def test_the_lowest_number_masks_a_class_as_minus_infinity_does(data):
    """Divided by T < 1 it overflows to -inf; that is no reason for a warning of numpy, which would be an error here."""
    logits, labels = data
    gc, _ = fit(logits / 10, labels)
    assert gc.temperature_ < 1
    masked, lowest = logits / 10, logits / 10
    masked[:, 3], lowest[:, 3] = -np.inf, np.finfo(np.float64).min
    probs = []
    for z in (lowest, masked):
        with pytest.warns(CalibrationWarning, match=r"25\.0% of the inputs lie outside the fitted range"):
            probs.append(gc.predict_proba(z))
    np.testing.assert_allclose(*probs, rtol=0, atol=1e-15)


def test_the_result_depends_on_the_seed_only(data, fitted):
    logits, labels = data
    strided = np.repeat(logits, 2, axis=0)[::2]
    strided.flags.writeable = False
    again, _ = fit(strided, labels)
    assert again.group_weight_.tobytes() == fitted.group_weight_.tobytes()
    other, _ = fit(logits, labels, seed=1)
    assert other.group_weight_.tobytes() != fitted.group_weight_.tobytes()
    np.testing.assert_allclose(other.predict_proba(logits), fitted.predict_proba(logits), atol=0.01)


def test_parameters_are_counted_and_features_asked_for_where_they_are_needed(data, fitted):
    logits, labels = data
    assert fitted.n_parameters == 3 * 2 * (4 + 1)
    assert GroupCalibration().needs == () and GroupCalibration(inputs="features").needs == ("features",)
    assert clone(GroupCalibration(seed=7, penalty=0.5)).get_params() == {
        "inputs": "logits", "n_groups": 2, "n_partitions": 20, "penalty": 0.5, "max_iter": 200, "seed": 7,
    }  # fmt: skip
    with pytest.raises(ValueError, match="GroupCalibration needs features"):
        GroupCalibration(inputs="features").fit(logits, labels)
    ignored, _ = fit(logits, labels, features=np.full((len(labels), 1), np.nan))
    assert ignored.group_weight_.tobytes() == fitted.group_weight_.tobytes()


@pytest.mark.parametrize("inputs", ["logits", "features"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_saved_calibrator_predicts_the_same_bits(data, tmp_path, monkeypatch, inputs, dtype):
    logits = data[0].astype(dtype)
    features = logits[:, :2] ** 2
    gc, _ = fit(logits, data[1], features=features, inputs=inputs)
    gc.save(tmp_path / "gc.json")
    loaded = load_calibrator(tmp_path / "gc.json")
    expected = gc.predict_proba(logits, features=features)
    assert loaded.predict_proba(logits, features=features).tobytes() == expected.tobytes()
    assert loaded.get_params() == gc.get_params() and loaded.n_parameters == gc.n_parameters


def test_memory_stays_near_that_of_the_logits():
    """20 MB of float32 logits: one copy of them, the tabulated confidences (5 MB), and chunks of 34 MB."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((10_000, 500), dtype=np.float32) * 3
    labels = np.where(rng.random(10_000) < 0.7, logits.argmax(axis=1), rng.integers(0, 500, 10_000))
    tracemalloc.start()
    gc, _ = fit(logits, labels, n_partitions=1, max_iter=1)
    fitted_at = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    gc.predict_proba(logits)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert fitted_at < 180e6
    assert peak < 100e6


# --- fits not to be trusted ---------------------------------------------------------------------------------------


def test_a_stopped_solver_says_so(data):
    gc, texts = fit(*data, max_iter=1)
    assert gc.converged_ is False and gc.n_iter_ == [1, 1, 1]
    assert [t for c, t in texts if c is ConvergenceWarning] == [
        "GroupCalibration: 3 of 3 partitions stopped at the limit of 1 iterations; raise max_iter."
    ]


def test_few_errors_are_said(data):
    logits, labels = data
    wrong = np.flatnonzero(logits.argmax(axis=1) != labels)
    keep = np.concatenate([wrong[:7], np.flatnonzero(logits.argmax(axis=1) == labels)])
    _, texts = fit(logits[keep], labels[keep])
    assert any("only 7 of" in t and "fewer than 2 errors for each of the 4 inputs" in t for _, t in texts)


def test_a_group_that_is_always_right_ends_at_the_end_of_the_range():
    logits = np.tile([2.0, 0.0], (400, 1))
    labels = np.repeat([0, 1, 0], [150, 50, 200])
    gc, texts = fit(
        logits, labels, features=np.repeat([[-1.0], [1.0]], 200, axis=0), inputs="features", penalty=0.0, max_iter=500
    )
    assert gc.group_temperature_.min(axis=1) == pytest.approx(gc.temperature_ / 9.97, rel=1e-2)
    assert any("are at an end of their range" in t for _, t in texts)


@pytest.mark.parametrize(
    "logits, labels, text",
    [
        ([[2.0, 0.0, 1.0]], [0], "all 1 predictions are correct"),
        ([[2.0, 0.0, 1.0]], [1], "all 1 predictions are wrong"),
        ([[5.0, 0.0], [0.0, 5.0]], [0, 1], "all 2 predictions are correct"),
        ([[2.0, 0.0], [0.0, 2.0]], [1, 0], "all 2 predictions are wrong"),
        (np.tile([3.0, 1.0, 0.0], (20, 1)), [0] * 15 + [1] * 5, "only 5 of 20"),
        (np.zeros((6, 3)), [0, 1, 2] * 2, "is the upper search bound"),
        (np.eye(3)[[0, 1, 2, 0]] * 1e5, [0, 1, 1, 0], "only 1 of 4"),
        (np.array([[2, 1, -np.inf], [2, -np.inf, -np.inf], [1, 2, 0]]), [1, 0, 1], "only 1 of 3"),
        (np.random.default_rng(0).normal(size=(9, 3)), [1] * 9, "every label is class 1"),
    ],
)
def test_degenerate_data_give_a_finite_fit_and_a_warning(logits, labels, text):
    gc, texts = fit(logits, labels)
    assert any(c is CalibrationWarning and text in t for c, t in texts)
    for name, value in vars(gc).items():
        if name.endswith("_"):
            assert np.all(np.isfinite(value)), name
    probs = gc.predict_proba(logits)
    assert np.all(np.isfinite(probs)) and np.all(probs.argmax(axis=1) == np.argmax(logits, axis=1))


@pytest.mark.parametrize(
    "options, text",
    [
        ({"inputs": "probs"}, 'inputs must be "logits" or "features", got \'probs\''),
        ({"n_groups": 0}, "n_groups must be a whole number of at least 1, got 0"),
        ({"n_partitions": -1}, "n_partitions must be a whole number of at least 1, got -1"),
        ({"max_iter": 0}, "max_iter must be a whole number of at least 1, got 0"),
        ({"n_groups": True}, "n_groups must be a whole number of at least 1, got True"),
        ({"n_partitions": 2.5}, "n_partitions must be a whole number of at least 1, got 2.5"),
        ({"max_iter": np.nan}, "max_iter must be a whole number of at least 1, got nan"),
        ({"penalty": -0.5}, "penalty must be at least 0 and finite, got -0.5"),
        ({"penalty": np.nan}, "penalty must be at least 0 and finite, got nan"),
        ({"penalty": np.inf}, "penalty must be at least 0 and finite, got inf"),
    ],
)
def test_settings_that_make_no_sense_are_refused(data, options, text):
    with pytest.raises(ValueError, match=text):
        GroupCalibration(**options).fit(*data)


# --- public logits ------------------------------------------------------------------------------------------------


@pytest.mark.skipif("SMARTLIB_DATA_DIR" not in os.environ, reason="the public logits are not on this machine")
def test_the_published_row_of_resnet_50_on_cifar_10():
    """Published (reported.csv): ECE 1.3654 %, AdaECE 1.8413 %, NLL .2012, accuracy 95.05 %."""
    bundle = load("public/cifar10-resnet50-ce")
    gc, texts = fit(bundle.val.logits, bundle.val.labels, n_partitions=20)
    assert texts == []
    # Whatever the random weights, all partitions end in the same two groups.
    assert np.ptp(gc.objective_) < 1e-4
    assert np.ptp(np.sort(gc.group_temperature_, axis=1), axis=0).max() < 0.05
    record = evaluate(gc.predict_proba(bundle.test.logits), bundle.test.labels)
    assert 100 * record.ece == pytest.approx(1.37, abs=0.5)
    assert 100 * record.adaece == pytest.approx(1.84, abs=0.5)
    assert record.nll == pytest.approx(0.2012, abs=0.004)
    assert record.accuracy == pytest.approx(0.9505, abs=1e-4)
