"""Vector scaling and Dirichlet calibration: closed forms, other solvers, published values, invariants and inputs."""

import os
import warnings

import numpy as np
import pytest
import torch
from scipy.optimize import brentq, minimize
from scipy.special import expit, log_softmax, softmax
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from threadpoolctl import threadpool_limits

from smartlib import TemperatureScaling, arrays, evaluate, load
from smartlib.calibrators import CalibrationWarning
from smartlib.calibrators.linear import DirichletCalibration, VectorScaling

MAKERS = {
    "vs": VectorScaling,
    "dirichlet-l2": lambda **options: DirichletCalibration(regularisation="l2", reg_lambda=1e-3, **options),
    "dirichlet-odir": lambda **options: DirichletCalibration(reg_lambda=0.1, reg_mu=0.1, **options),
}


@pytest.fixture(params=MAKERS)
def make(request):
    return MAKERS[request.param]


def calibrated(n=500, k=4, seed=0):
    """Logits whose softmax is the true distribution of the labels."""
    rng = np.random.default_rng(seed)
    logits = 2 * rng.normal(size=(n, k))
    labels = (softmax(logits, axis=1).cumsum(axis=1) < rng.random((n, 1))).sum(axis=1)
    return logits, labels


def skewed(n=1000, k=4, seed=0):
    """Logits that a known map, of full weight and bias, makes calibrated."""
    z, labels = calibrated(n, k, seed)
    rng = np.random.default_rng(seed + 100)
    return (z - rng.normal(size=k)) @ np.linalg.inv(0.4 * np.eye(k) + 0.05 * rng.normal(size=(k, k))), labels


def fit(calibrator, logits, labels):
    """The fitted calibrator and the texts of its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        calibrator.fit(logits, labels)
    assert all(issubclass(w.category, CalibrationWarning | ConvergenceWarning) for w in caught)
    return calibrator, [str(w.message) for w in caught]


def nll(probs, labels):
    return -np.log(probs[np.arange(len(labels)), labels]).mean()


# --- closed forms -------------------------------------------------------------------------------------------------


def test_two_kinds_of_rows_are_matched_exactly():
    """(2, 0) is class 0 three times in four, (0, 2) is class 1 nine times in ten: two numbers are free, so both fit."""
    logits = np.array([[2.0, 0.0]] * 4 + [[0.0, 2.0]] * 10)
    labels = [0, 0, 0, 1] + [1] * 9 + [0]
    vs = VectorScaling().fit(logits, labels)
    np.testing.assert_allclose(vs.predict_proba([[2.0, 0.0], [0.0, 2.0]]), [[0.75, 0.25], [0.1, 0.9]], atol=1e-3)
    # The logit differences are 2 w_0 + b_0 - b_1 = log 3 and b_0 - b_1 - 2 w_1 = -log 9.
    assert 2 * vs.weight_.sum() == pytest.approx(np.log(27), abs=0.01)


def test_l2_by_hand():
    """One kind of row, (0, 0), three times in four class 0: x = (log ½, log ½), and 1 for the bias.

    A difference d of the two outputs costs least where the rows of the map are ±d u / 2|u|² with u = (log ½, log ½, 1),
    namely λ d² / 2|u|². So σ(d) + λ d / |u|² = ¾.
    """
    reg_lambda, square = 0.3, 2 * np.log(2) ** 2 + 1
    d = brentq(lambda d: expit(d) + reg_lambda * d / square - 0.75, 0, 2)
    dirichlet = DirichletCalibration(regularisation="l2", reg_lambda=reg_lambda).fit(np.zeros((4, 2)), [0, 0, 0, 1])
    np.testing.assert_allclose(dirichlet.predict_proba(np.zeros((1, 2))), [[expit(d), expit(-d)]], atol=1e-4)
    np.testing.assert_allclose(
        dirichlet.weight_, d * np.log(0.5) / 2 / square * np.array([[1, 1], [-1, -1]]), atol=1e-3
    )
    np.testing.assert_allclose(dirichlet.bias_, d / 2 / square * np.array([1, -1]), atol=1e-3)


def test_odir_leaves_the_diagonal_free():
    """The same rows: the diagonal reaches ¾ at no cost, so nothing else is used, however small its penalty."""
    dirichlet = DirichletCalibration(reg_lambda=1e-2, reg_mu=1e-2).fit(np.zeros((4, 2)), [0, 0, 0, 1])
    np.testing.assert_allclose(dirichlet.predict_proba(np.zeros((1, 2))), [[0.75, 0.25]], atol=1e-4)
    np.testing.assert_allclose([dirichlet.weight_[0, 1], dirichlet.weight_[1, 0], *dirichlet.bias_], 0, atol=1e-2)
    assert np.log(0.5) * (dirichlet.weight_[0, 0] - dirichlet.weight_[1, 1]) == pytest.approx(np.log(3), abs=0.05)


def test_strong_penalties_lead_to_the_known_limits():
    logits, labels = skewed()
    vs, texts = fit(VectorScaling(l2=1e4), logits, labels)
    np.testing.assert_allclose(vs.predict_proba(logits), softmax(logits, axis=1), atol=1e-3)
    assert any("The penalty is too strong" in text for text in texts)
    l2, texts = fit(DirichletCalibration(regularisation="l2", reg_lambda=1e4), logits, labels)
    np.testing.assert_allclose(l2.predict_proba(logits), 0.25, atol=1e-2)
    assert any("The penalty is too strong" in text for text in texts)
    odir = DirichletCalibration(reg_lambda=1e4, reg_mu=1e4).fit(logits, labels)
    np.testing.assert_allclose(odir.weight_ - np.diag(np.diag(odir.weight_)), 0, atol=1e-3)
    np.testing.assert_allclose(odir.bias_, 0, atol=1e-3)


# --- other solvers of the same objective --------------------------------------------------------------------------


def reference(objective, start, labels):
    """The minimum that scipy finds, with torch's gradient."""

    def value_and_gradient(theta):
        theta = torch.tensor(theta, requires_grad=True)
        outputs, penalty = objective(theta)
        value = torch.nn.functional.cross_entropy(outputs, torch.tensor(labels)) + penalty
        value.backward()
        return value.item(), theta.grad.numpy()

    return minimize(value_and_gradient, start, jac=True, method="BFGS", options={"gtol": 1e-7, "maxiter": 2000})


@pytest.mark.parametrize("l2", [0.0, 1e-2])
def test_vector_scaling_agrees_with_scipy(l2):
    logits, labels = skewed()
    z = torch.tensor(logits)
    other = reference(
        lambda theta: (z * theta[:4] + theta[4:], l2 * ((theta[:4] - 1).square().sum() + theta[4:].square().sum())),
        np.repeat([1.0, 0.0], 4),
        labels,
    )
    vs = VectorScaling(l2=l2).fit(logits, labels)
    assert other.fun - 1e-7 <= vs.objective_ <= other.fun + 2e-6
    np.testing.assert_allclose(vs.weight_, other.x[:4], atol=3e-3)
    np.testing.assert_allclose(vs.predict_proba(logits), softmax(logits * other.x[:4] + other.x[4:], axis=1), atol=3e-3)


def test_vector_scaling_agrees_with_probmetrics():
    logits, labels = skewed()
    with warnings.catch_warnings():
        # Importing it compiles something of gpytorch or its like, which torch has deprecated.
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        from probmetrics.calibrators import VectorScalingCalibrator

        log_p = log_softmax(logits, axis=1)
        other = VectorScalingCalibrator().fit(np.exp(log_p), labels)
        theirs = np.asarray(other.predict_proba(np.exp(log_p)))
    ours = VectorScaling().fit(log_p, labels).predict_proba(log_p)
    assert np.abs(theirs - np.exp(log_p)).max() > 0.1  # it has done something
    np.testing.assert_allclose(ours, theirs, atol=5e-3)


@pytest.mark.parametrize("reg_lambda", [1e-3, 1e-1])
def test_l2_agrees_with_scikit_learn(reg_lambda):
    """Its objective is C times the summed NLL plus ½|W|², without the intercept; so that is a column here."""
    logits, labels = skewed()
    x = np.column_stack([log_softmax(logits, axis=1), np.ones(len(labels))])
    other = LogisticRegression(C=1 / (2 * reg_lambda * len(labels)), fit_intercept=False, tol=1e-8, max_iter=5000)
    other.fit(x, labels)
    ours = DirichletCalibration(regularisation="l2", reg_lambda=reg_lambda).fit(logits, labels)
    np.testing.assert_allclose(ours.predict_proba(logits), other.predict_proba(x), atol=3e-3)
    weight = np.column_stack([ours.weight_, ours.bias_])  # a row that all classes share shows in no probability
    np.testing.assert_allclose(weight - weight.mean(axis=0), other.coef_ - other.coef_.mean(axis=0), atol=1e-2)


def test_odir_agrees_with_scipy():
    logits, labels = skewed()
    x, off = torch.tensor(log_softmax(logits, axis=1)), 1 - torch.eye(4, dtype=torch.float64)
    reg_lambda, reg_mu = 1e-2, 1e-3

    def objective(theta):
        weight, bias = theta[:16].reshape(4, 4), theta[16:]
        penalty = reg_lambda * (off * weight).square().sum() + reg_mu * bias.square().sum()
        return x @ weight.T + bias, penalty

    other = reference(objective, np.append(np.eye(4).ravel(), np.zeros(4)), labels)
    ours = DirichletCalibration(reg_lambda=reg_lambda, reg_mu=reg_mu).fit(logits, labels)
    assert other.fun - 1e-7 <= ours.objective_ <= other.fun + 2e-6
    np.testing.assert_allclose(ours.weight_, other.x[:16].reshape(4, 4), atol=1e-2)
    np.testing.assert_allclose(ours.bias_, other.x[16:], atol=1e-2)


# --- what the maps can do -----------------------------------------------------------------------------------------


def test_calibrated_data_stay_nearly_as_they_are(make):
    logits, labels = calibrated(n=5000)
    probs = make().fit(logits, labels).predict_proba(logits)
    assert np.abs(probs - softmax(logits, axis=1)).mean() < 0.015


def test_a_skewed_model_gains_over_temperature_scaling_and_may_change_predictions(make):
    logits, labels = skewed(n=3000)
    new, new_labels = skewed(n=6000)[0][3000:], skewed(n=6000)[1][3000:]
    calibrator, scaling = make().fit(logits, labels), TemperatureScaling().fit(logits, labels)
    gain = nll(scaling.predict_proba(new), new_labels) - nll(calibrator.predict_proba(new), new_labels)
    assert gain > 0.02
    assert not make().keeps_predictions
    assert (calibrator.predict_proba(new).argmax(axis=1) != new.argmax(axis=1)).any()


def test_number_of_parameters():
    logits, labels = calibrated()
    assert VectorScaling().fit(logits, labels).n_parameters == 8
    assert MAKERS["dirichlet-l2"]().fit(logits, labels).n_parameters == 20


def test_cross_validation_takes_the_setting_with_the_lowest_nll_and_the_folds_follow_the_seed():
    logits, labels = calibrated(n=150, k=3)
    first = DirichletCalibration().fit(logits, labels)
    table = first.cv_nll_
    assert set(table[:, 1]) == {1, 1e-2, 1e-4} and len(table) >= 6
    again, other = (DirichletCalibration(reg_mu=1.0, seed=seed).fit(logits, labels) for seed in (0, 1))
    assert table[table[:, 2].argmin(), :2].tolist() == [first.reg_lambda_, first.reg_mu_]
    np.testing.assert_array_equal(table[: len(again.cv_nll_)], again.cv_nll_)
    assert not np.array_equal(again.cv_nll_[:3, 2], other.cv_nll_[:3, 2])
    fixed = DirichletCalibration(reg_lambda=first.reg_lambda_, reg_mu=first.reg_mu_).fit(logits, labels)
    np.testing.assert_array_equal(fixed.weight_, first.weight_)  # the final map does not depend on the folds
    assert len(fixed.cv_nll_) == 0
    l2 = DirichletCalibration(regularisation="l2").fit(logits, labels)
    assert l2.reg_lambda_ == l2.reg_mu_


def test_the_held_out_nll_is_that_of_maps_fitted_on_the_rest():
    logits, labels = calibrated(n=200)
    table = DirichletCalibration(regularisation="l2").fit(logits, labels).cv_nll_
    best, total = table[:, 2].argmin(), 0.0
    folds = np.array_split(np.random.default_rng(0).permutation(200), 5)
    for held_out in folds:
        rest = np.setdiff1d(np.arange(200), held_out)
        one = DirichletCalibration(regularisation="l2", reg_lambda=table[best, 0]).fit(logits[rest], labels[rest])
        total += nll(one.predict_proba(logits[held_out]), labels[held_out]) * len(held_out)
    assert total / 200 == pytest.approx(table[best, 2], abs=1e-4)


# --- invariants ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rows_are_probabilities_of_the_type_of_the_input(make, dtype):
    logits, labels = skewed()
    calibrator = make().fit(logits.astype(dtype), labels)
    probs = calibrator.predict_proba(logits.astype(dtype))
    assert probs.dtype == dtype and probs.min() >= 0
    np.testing.assert_allclose(probs.sum(axis=1), 1, atol=1e-6)
    np.testing.assert_allclose(probs, make().fit(logits, labels).predict_proba(logits), atol=2e-4)


def test_permutations_of_samples_and_of_classes(make):
    logits, labels = skewed()
    probs = make().fit(logits, labels).predict_proba(logits)
    rng = np.random.default_rng(0)
    order, classes = rng.permutation(len(labels)), rng.permutation(4)
    shuffled = make().fit(logits[order], labels[order])
    np.testing.assert_allclose(shuffled.predict_proba(logits), probs, atol=1e-4)
    permuted = make().fit(logits[:, classes], np.argsort(classes)[labels])
    np.testing.assert_allclose(permuted.predict_proba(logits[:, classes]), probs[:, classes], atol=1e-4)


def test_two_fits_are_identical_and_threads_change_nothing(make):
    logits, labels = skewed()
    calibrator = make().fit(logits, labels)
    probs = calibrator.predict_proba(logits)
    np.testing.assert_array_equal(make().fit(logits, labels).predict_proba(logits), probs)
    for threads in (1, 2):
        with threadpool_limits(threads):
            np.testing.assert_allclose(make().fit(logits, labels).predict_proba(logits), probs, atol=1e-6)


def test_chunks_give_the_same_result(make, monkeypatch):
    logits, labels = skewed()
    expected = make().fit(logits, labels).predict_proba(logits)
    monkeypatch.setattr(arrays, "_CHUNK_NUMBERS", 1000)
    np.testing.assert_allclose(make().fit(logits, labels).predict_proba(logits), expected, atol=1e-6)


@pytest.mark.parametrize("regularisation", ["l2", "odir"])
def test_dirichlet_sees_probabilities_alone(regularisation):
    logits, labels = skewed()
    make = MAKERS[f"dirichlet-{regularisation}"]
    shift = np.random.default_rng(1).normal(size=(len(labels), 1)) * 50
    probs = make().fit(logits, labels).predict_proba(logits)
    np.testing.assert_allclose(make().fit(logits + shift, labels).predict_proba(logits + shift), probs, atol=1e-5)
    given = softmax(logits, axis=1)
    from_probs = make().fit(given, labels, from_probs=True)
    np.testing.assert_allclose(from_probs.predict_proba(given, from_probs=True), probs, atol=1e-4)


@pytest.mark.parametrize("a", [1e5, 20, 1 / 50])
def test_vector_scaling_follows_the_scale_of_the_logits(a):
    logits, labels = skewed()
    once, scaled = VectorScaling().fit(logits, labels), VectorScaling().fit(a * logits, labels)
    np.testing.assert_allclose(scaled.predict_proba(a * logits), once.predict_proba(logits), atol=2e-3)


# --- inputs -------------------------------------------------------------------------------------------------------


def masked(logits, labels, mask, seed=5):
    """A fifth of the entries masked, never a label's own."""
    hidden = np.random.default_rng(seed).random(logits.shape) < 0.2
    hidden[np.arange(len(labels)), labels] = False
    return np.where(hidden, mask, logits)


def test_masked_classes_are_impossible_and_otherwise_like_those_masked_by_a_number(make):
    logits, labels = skewed()
    by_infinity, by_number = masked(logits, labels, -np.inf), masked(logits, labels, -1e9)
    calibrator = make().fit(by_infinity, labels)
    probs = calibrator.predict_proba(by_infinity)
    assert (probs[np.isneginf(by_infinity)] == 0).all()
    np.testing.assert_allclose(probs.sum(axis=1), 1, atol=1e-12)
    assert all(np.isfinite(v).all() for v in (calibrator.weight_, calibrator.bias_))
    # For vector scaling both say the same. For Dirichlet a number leaves the class what the map makes of the floor.
    np.testing.assert_allclose(make().fit(by_number, labels).predict_proba(by_number), probs, atol=1e-3)
    alone = np.array([[-np.inf, 0.3, -np.inf, -np.inf]])
    np.testing.assert_allclose(calibrator.predict_proba(alone), [[0, 1, 0, 0]], atol=1e-15)


def test_a_class_masked_everywhere_changes_nothing_for_vector_scaling():
    logits, labels = skewed()
    wide = np.column_stack([logits, np.full(len(labels), -np.inf)])
    vs, texts = fit(VectorScaling(), wide, labels)
    assert any("no label is class 4;" in text for text in texts)
    np.testing.assert_allclose(
        vs.predict_proba(wide)[:, :4], VectorScaling().fit(logits, labels).predict_proba(logits), atol=1e-6
    )


@pytest.mark.parametrize("name", ["vs", "l2", "odir"])
@pytest.mark.parametrize(
    "logits, labels, text",
    [
        ([[2.0, 1.0, 0.0]], [0], "all 1 predictions are correct"),
        ([[2.0, 1.0, 0.0]], [1], "all 1 predictions are wrong"),
        ([[5.0, 0.0], [0.0, 5.0]], [0, 1], "all 2 predictions are correct"),
        (1e5 * np.tile([[5.0, 0.0], [0.0, 5.0]], (10, 1)), [0, 1] * 10, "all 20 predictions are correct"),
        (1e5 * np.tile([[5.0, 0.0], [0.0, 5.0]], (10, 1)), [1, 0] * 10, "all 20 predictions are wrong"),
        ([[2.0, 0.0], [0.0, 2.0], [1.0, 0.0]], [0, 0, 0], "every label is class 0"),
        (np.eye(4, 3) + 1, [0, 1, 1, 0], "no label is class 2; as far as the penalty lets it"),
    ],
)
def test_degenerate_data_give_a_finite_result_and_a_warning(name, logits, labels, text):
    calibrator = VectorScaling() if name == "vs" else DirichletCalibration(regularisation=name)
    _, texts = fit(calibrator, logits, labels)
    assert any(text in given for given in texts)
    assert any("too few for 5 folds" in given for given in texts) == (name != "vs" and len(labels) < 5)
    probs = calibrator.predict_proba(logits)
    assert np.isfinite(probs).all()
    np.testing.assert_allclose(probs.sum(axis=1), 1, atol=1e-6)
    for value in vars(calibrator).values():
        assert isinstance(value, str | None) or np.isfinite(value).all()


def test_logits_of_an_enormous_scale_are_fitted_as_well():
    logits, labels = skewed()
    for a in (1, 1e5):
        l2, texts = fit(DirichletCalibration(regularisation="l2"), a * logits, labels)
        assert texts == []
        assert nll(l2.predict_proba(a * logits), labels) < 0.95 * nll(
            TemperatureScaling().fit(logits, labels).predict_proba(logits), labels
        )
    assert l2.floor_ < -1e6  # at T = 1e5 a gap of 36 is no sign of an impossible class


def test_a_solver_stopped_early_says_so(make):
    logits, labels = skewed()
    with pytest.warns(ConvergenceWarning, match="stopped at its limit of 1 iterations; raise max_iter"):
        calibrator = make(max_iter=1).fit(logits, labels)
    assert calibrator.converged_ is False and calibrator.n_iter_ == 1
    assert make().fit(logits, labels).converged_ is True


@pytest.mark.parametrize(
    "calibrator, text",
    [
        (VectorScaling(l2=-1.0), "l2 must be at least 0 and finite, got -1.0"),
        (VectorScaling(l2=np.nan), "l2 must be at least 0 and finite, got nan"),
        (VectorScaling(max_iter=0), "max_iter must be a whole number of at least 1, got 0"),
        (VectorScaling(max_iter=2.5), "max_iter must be a whole number of at least 1, got 2.5"),
        (DirichletCalibration(max_iter=0), "max_iter must be a whole number of at least 1, got 0"),
        (DirichletCalibration(max_iter=True), "max_iter must be a whole number of at least 1, got True"),
        (DirichletCalibration(regularisation="l1"), "regularisation must be 'l2' or 'odir', got 'l1'"),
        (DirichletCalibration(reg_lambda=0.0), "reg_lambda must be positive and finite, got 0.0"),
        (DirichletCalibration(reg_mu=np.inf), "reg_mu must be positive and finite, got inf"),
        (DirichletCalibration(regularisation="l2", reg_mu=1.0), "reg_mu belongs to regularisation='odir'"),
    ],
)
def test_settings_outside_their_range_are_refused(calibrator, text):
    with pytest.raises(ValueError, match=text):
        calibrator.fit(*calibrated())


def test_inputs_are_left_alone_and_tensors_come_back_as_tensors(make):
    logits, labels = skewed()
    expected = make().fit(logits, labels).predict_proba(logits)
    wide = np.repeat(logits, 2, axis=1)
    wide.flags.writeable = False
    np.testing.assert_array_equal(make().fit(wide[:, ::2], labels).predict_proba(wide[:, ::2]), expected)
    tensor = torch.tensor(logits, requires_grad=True)
    probs = make().fit(tensor, torch.tensor(labels)).predict_proba(tensor)
    assert isinstance(probs, torch.Tensor) and not probs.requires_grad
    np.testing.assert_array_equal(probs.numpy(), expected)


# --- published values ---------------------------------------------------------------------------------------------


@pytest.mark.skipif("SMARTLIB_DATA_DIR" not in os.environ, reason="the public logits are not on this machine")
@pytest.mark.parametrize(
    "calibrator, published, chosen",
    [
        # Test NLL in tables 3 and 4 of Kull et al. 2019, and the penalties that the authors' cross-validation chose.
        pytest.param(VectorScaling(), 0.2224, None, id="vs"),
        pytest.param(DirichletCalibration(regularisation="l2"), 0.2205, (0.01, 0.01), id="dirichlet-l2"),
        pytest.param(DirichletCalibration(), 0.2237, (1000.0, 0.01), id="dirichlet-odir"),
    ],
)
def test_densenet40_has_the_published_nll(calibrator, published, chosen):
    bundle = load("public/cifar10-densenet40")
    calibrator.fit(bundle.val.logits, bundle.val.labels)
    if chosen:
        assert (calibrator.reg_lambda_, calibrator.reg_mu_) == chosen
    judged = evaluate(calibrator.predict_proba(bundle.test.logits), bundle.test.labels)
    assert judged.nll == pytest.approx(published, abs=0.003)
