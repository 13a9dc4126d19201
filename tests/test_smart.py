"""SMART: the map, its two solvers, what a fit promises, warnings, and saving."""

import json
import os
import pickle
import random
import subprocess
import sys
import textwrap
import warnings
from functools import partial

import every_calibrator
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit, softmax
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning, NotFittedError

import smartlib
from smartlib import SMART, TemperatureScaling, arrays, load_calibrator
from smartlib.calibrators import CalibrationWarning
from smartlib.calibrators import temperature_network as network
from smartlib.calibrators.confidence_table import ConfidenceTable
from smartlib.calibrators.temperature_network import MIN_TEMPERATURE
from smartlib.softece import soft_ece
from smartlib.toplabel import confidence, confidence_of, margin

SOLVERS = ["lbfgs", "adam"]


# About a third of the predictions is wrong.
sharpened = partial(every_calibrator.sharpened, n=400, k=5, scale=2.5)


def recorded(action):
    """The result of ``action`` and its warnings as (category, text)."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = action()
    return result, [(w.category, str(w.message)) for w in caught]


def fit(logits, labels, **options):
    """A fit whose warnings are not the subject."""
    return recorded(lambda: SMART(**options).fit(logits, labels))[0]


def quick(solver):
    """Options for a fit in a fraction of a second."""
    return {"solver": solver, **({"max_iter": 40} if solver == "adam" else {})}


@pytest.fixture(scope="module")
def data():
    return sharpened()


@pytest.fixture(scope="module", params=SOLVERS)
def fitted(request, data):
    return fit(*data, **quick(request.param))


def learned(smart):
    return {name: np.array(value).tolist() for name, value in vars(smart).items() if name.endswith("_")}


# --- the map ------------------------------------------------------------------------------------------------------


def test_there_are_49_parameters_and_each_is_learned(fitted):
    assert SMART().n_parameters == 49
    arrays_of_16 = (fitted.hidden_weight_, fitted.hidden_bias_, fitted.output_weight_)
    assert sum(a.size for a in arrays_of_16) + 1 == 49
    assert [a.shape for a in arrays_of_16] == [(16,)] * 3
    assert isinstance(fitted.output_bias_, float)


def test_temperatures_are_the_printed_formula_of_the_standardised_margin(fitted, data):
    logits, _ = data
    m = margin(logits)
    assert fitted.margin_mean_ == pytest.approx(m.mean(), rel=1e-13)
    assert fitted.margin_std_ == pytest.approx(m.std(), rel=1e-13)
    assert fitted.margin_range_ == [m.min(), m.max()]
    for row in range(0, len(m), 40):
        x = (m[row] - m.mean()) / m.std()
        u = fitted.output_bias_
        for w, b, v in zip(fitted.hidden_weight_, fitted.hidden_bias_, fitted.output_weight_, strict=True):
            u += v * max(w * x + b, 0)
        assert fitted.temperatures(logits[[row]])[0] == pytest.approx(np.log1p(np.exp(u)) + 0.1, rel=1e-12)
    np.testing.assert_allclose(fitted.temperature_map(m), fitted.temperatures(logits), rtol=1e-15)
    assert fitted.temperature_map(1.0).shape == (1,)


def test_equal_margins_have_equal_temperatures(fitted, data):
    row = data[0][0]
    others = np.stack([row, row + 7, row[::-1], np.where(row < np.sort(row)[-2], row - 3, row)])
    t = fitted.temperatures(others)
    np.testing.assert_allclose(t, t[0], rtol=1e-12)


def test_probabilities_are_the_softmax_at_the_temperatures(fitted, data):
    logits, _ = data
    t = fitted.temperatures(logits)
    np.testing.assert_allclose(fitted.predict_proba(logits), softmax(logits / t[:, None], axis=1), rtol=1e-12)


# --- the fit ------------------------------------------------------------------------------------------------------


def test_the_objective_is_the_softece_of_the_returned_temperatures(fitted, data):
    logits, labels = data
    c = confidence(logits, fitted.temperatures(logits))
    assert fitted.objective_ == pytest.approx(soft_ece(c, logits.argmax(axis=1) == labels), rel=1e-12)


@pytest.mark.parametrize("solver", SOLVERS)
def test_the_objective_follows_the_settings(solver, data):
    logits, labels = data
    options = dict(n_bins=7, bandwidth=0.2, delta=0.01)
    smart = fit(logits, labels, **quick(solver), **options)
    c = confidence(logits, smart.temperatures(logits))
    assert smart.objective_ == pytest.approx(soft_ece(c, logits.argmax(axis=1) == labels, **options), rel=1e-12)


def test_lbfgs_is_at_least_as_good_as_every_constant_temperature_it_starts_from(data):
    logits, labels = data
    correct = logits.argmax(axis=1) == labels
    constants = [soft_ece(confidence(logits, t), correct) for t in np.geomspace(0.1, 100, 60)]
    smart = SMART().fit(logits, labels)
    assert smart.objective_ < soft_ece(confidence(logits, 1.0), correct) / 3
    assert smart.objective_ < min(constants) + 1e-3


@pytest.mark.parametrize("solver", SOLVERS)
def test_two_fits_are_identical_to_the_last_bit(solver, data):
    first, second = (fit(*data, **quick(solver)) for _ in range(2))
    assert learned(first) == learned(second)
    assert first.predict_proba(data[0]).tobytes() == second.predict_proba(data[0]).tobytes()


@pytest.mark.parametrize("seed", range(6))
def test_the_last_digits_of_the_input_do_not_matter(seed):
    """Another processor or number of threads changes the last digits of every sum; the fit must not amplify them.

    The logits are on a grid, as float16 ones are, so that many margins are equal up to rounding.
    """
    logits, labels = sharpened(n=200, seed=seed)
    logits = np.round(logits * 64) / 64
    first, second = (fit(logits * factor, labels) for factor in (1.0, 1 + 3e-15))
    assert first.n_iter_ == second.n_iter_
    assert first.objective_ == pytest.approx(second.objective_, abs=1e-9)
    np.testing.assert_allclose(first.temperatures(logits), second.temperatures(logits), rtol=1e-6)


def test_adam_depends_on_its_seed_and_lbfgs_does_not(data):
    assert learned(fit(*data, solver="lbfgs", seed=0)) == learned(fit(*data, solver="lbfgs", seed=1))
    zero, one = (fit(*data, solver="adam", max_iter=5, seed=seed) for seed in (0, 1))
    assert learned(zero) != learned(one)


def test_the_noise_of_the_start_depends_on_the_seed(data):
    plain, zero, again, one = (
        fit(*data, start_noise=noise, seed=seed) for noise, seed in [(0, 0), (0.3, 0), (0.3, 0), (0.3, 1)]
    )
    assert learned(zero) == learned(again)
    assert learned(zero) != learned(one)
    assert learned(zero) != learned(plain)


def test_refitting_forgets_the_first_fit(data):
    smart = fit(*sharpened(seed=5, k=3))
    assert learned(smart.fit(*data)) == learned(fit(*data))


@pytest.mark.parametrize("solver", SOLVERS)
def test_no_global_random_state_is_touched_by_a_fit(solver, data):
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
    smart = fit(*data, **quick(solver), start_noise=0.1)
    smart.predict_proba(data[0])
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    state = np.random.get_state()  # noqa: NPY002
    assert state[1].tobytes() == before[2][1].tobytes()
    assert state[2:] == before[2][2:]


def test_no_global_random_state_is_touched_by_the_import():
    code = """
        import random, numpy as np, torch
        random.seed(3); np.random.seed(3); torch.manual_seed(3)
        state = lambda: (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
        before = state()
        import smartlib
        for name in smartlib.__all__:
            getattr(smartlib, name)
        assert state() == before
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, env=os.environ | {"PYTHONPATH": repo()})


def repo():
    return os.path.dirname(os.path.dirname(os.path.abspath(smartlib.__file__)))


def test_adam_returns_the_best_weights_that_it_saw_not_the_last(monkeypatch):
    """A hundred times the learning rate overshoots: the third loss is the best, the next two are worse."""
    adam = torch.optim.Adam
    monkeypatch.setattr(torch.optim, "Adam", lambda parameters, lr: adam(parameters, lr=100 * lr))
    smart = fit(*sharpened(n=60, seed=2), solver="adam", max_iter=5)
    losses = smart.loss_curve_
    assert len(losses) == smart.n_iter_ == 5
    assert 0 < np.argmin(losses) < 4
    assert losses[-1] > min(losses) + 1e-2
    assert smart.objective_ == pytest.approx(min(losses), abs=1e-5)  # the table's error


def test_adam_stops_200_epochs_after_the_last_gain():
    tol = 0.05
    smart = fit(*sharpened(n=60, seed=2), solver="adam", tol=tol)
    reference, last_gain = np.inf, 0
    for epoch, loss in enumerate(smart.loss_curve_, start=1):
        if loss < reference - tol:
            reference, last_gain = loss, epoch
    assert smart.n_iter_ == last_gain + 200 < 2000


def test_lbfgs_stops_when_ten_iterations_gain_less_than_a_thousandth():
    smart = fit(*sharpened(n=400, seed=2))
    curve = np.array(smart.loss_curve_)
    assert len(curve) == smart.n_iter_ and np.all(np.diff(curve) <= 0)
    gains = curve[:-10] - curve[10:]
    assert len(gains) == 0 or (gains[-1] < 1e-3 and np.all(gains[:-1] >= 1e-3))
    longer = fit(*sharpened(n=400, seed=2), tol=1e-6, patience=20)
    assert longer.n_iter_ > smart.n_iter_ and longer.loss_curve_[: smart.n_iter_] == smart.loss_curve_


def test_adam_begins_like_a_linear_layer_of_torch(data):
    """One epoch returns the start: every value within ±1 for one input, ±1/4 for sixteen, and spread over it."""
    starts = [fit(*data, solver="adam", max_iter=1, seed=seed) for seed in range(30)]
    for name, bound in [("hidden_weight_", 1), ("hidden_bias_", 1), ("output_weight_", 0.25), ("output_bias_", 0.25)]:
        values = np.abs(np.hstack([getattr(smart, name) for smart in starts]))
        assert 0.8 * bound < values.max() <= bound
        assert values.mean() == pytest.approx(bound / 2, abs=0.15 * bound)


@pytest.mark.parametrize("bandwidth", [0.05, 0.02, 0.01, 0.003])
@pytest.mark.parametrize("solver", SOLVERS)
def test_bins_far_from_every_confidence_do_not_stop_a_narrow_kernel(solver, bandwidth):
    """With two classes no confidence is below 1/2, and the weights of the lower bins underflow."""
    logits, labels = sharpened(n=200, k=2)
    start = fit(logits, labels, solver=solver, bandwidth=bandwidth, max_iter=1)
    end = fit(logits, labels, solver=solver, bandwidth=bandwidth, max_iter=60)
    assert np.isfinite([end.objective_, *end.temperatures(logits)]).all()
    if solver == "adam":
        assert end.objective_ < start.objective_ - 1e-3


# --- predictions are kept -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_logits_one_rounding_apart_keep_their_predicted_class(fitted, dtype):
    rng = np.random.default_rng(3)
    logits = -rng.exponential(size=(2000, 5)).astype(dtype)
    first, second = rng.permuted(np.tile(np.arange(5), (2000, 1)), axis=1)[:, :2].T
    top = (10 ** rng.uniform(-4, 2, 2000)).astype(dtype)  # the smaller, the smaller its rounding
    logits[np.arange(2000), first] = np.nextafter(top, dtype(30000))
    logits[np.arange(2000), second] = top
    assert (logits.argmax(axis=1) == first).all()
    probs, _ = recorded(lambda: fitted.predict_proba(logits))
    np.testing.assert_array_equal(probs.argmax(axis=1), first)
    if dtype == np.float32:  # the case is not empty: a plain softmax loses some
        t = recorded(lambda: fitted.temperatures(logits))[0]
        plain = softmax(logits.astype(np.float64) / t[:, None], axis=1).astype(np.float32)
        assert (plain.argmax(axis=1) != first).any()


@given(
    rows=st.lists(st.lists(st.floats(-50, 50, width=32), min_size=5, max_size=5), min_size=1, max_size=20),
    single=st.booleans(),
)
@settings(max_examples=50)
def test_every_prediction_is_kept(rows, single):
    logits = np.array(rows, dtype=np.float32 if single else np.float64)
    for calibrator in FITTED:
        probs, _ = recorded(lambda c=calibrator: c.predict_proba(logits))
        np.testing.assert_array_equal(probs.argmax(axis=1), logits.argmax(axis=1))
        np.testing.assert_allclose(probs.sum(axis=1, dtype=np.float64), 1, atol=1e-6)


FITTED = [fit(*sharpened(seed=4)), TemperatureScaling().fit(*sharpened(seed=4))]


# --- the table of confidences --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def table_of_100_classes():
    rng = np.random.default_rng(0)
    logits = np.concatenate([s * rng.normal(size=(40, 100)) for s in (0.05, 1, 4, 30)])
    logits[0, 1:] = -np.inf
    logits[1] = 0.0
    return logits, ConfidenceTable(logits, MIN_TEMPERATURE, 100.0)


def test_the_table_is_right_to_a_ten_thousandth_between_its_nodes(table_of_100_classes):
    logits, table = table_of_100_classes
    worst = 0.0
    for t in np.exp(np.linspace(np.log(MIN_TEMPERATURE), np.log(100), 301)):
        worst = max(worst, np.abs(table(np.full(len(logits), t))[0] - confidence_of(logits, t)).max())
    assert 0 < worst < 1e-4


def test_the_table_is_exact_at_its_nodes(table_of_100_classes):
    logits, table = table_of_100_classes
    for node in table.nodes:
        t = np.full(len(logits), np.exp(node))
        np.testing.assert_allclose(table(t)[0], confidence_of(logits, t), rtol=1e-10)


def test_the_slope_of_the_table_is_that_of_its_confidence(table_of_100_classes):
    logits, table = table_of_100_classes
    t = np.exp(np.random.default_rng(1).uniform(np.log(0.11), np.log(99), len(logits)))
    step = 1e-6 * t
    difference = (table(t + step)[0] - table(t - step)[0]) / (2 * step)
    np.testing.assert_allclose(table(t)[1], difference, rtol=1e-4, atol=1e-8)
    exact = (confidence_of(logits, t + step) - confidence_of(logits, t - step)) / (2 * step)
    np.testing.assert_allclose(table(t)[1], exact, atol=3e-3)


def test_the_table_holds_its_last_value_beyond_its_end_with_slope_zero(table_of_100_classes):
    logits, table = table_of_100_classes
    beyond, slope = table(np.full(len(logits), 1e4))
    np.testing.assert_allclose(beyond, confidence_of(logits, 100.0), rtol=1e-10)
    assert (slope == 0).all()


@pytest.mark.parametrize("n_inputs, hidden", [(1, (16,)), (1, (16, 16)), (10, (5, 5)), (2, (3, 7)), (3, (4, 1))])
def test_the_gradient_of_the_network_equals_that_of_autograd(n_inputs, hidden):
    rng = np.random.default_rng(0)
    theta = rng.normal(size=network.count_parameters(n_inputs, hidden))
    x, weight = rng.normal(size=(30, n_inputs)), rng.normal(size=30)
    t, backward = network.temperature_and_backward(theta, x, hidden)
    parameters = torch.tensor(theta, requires_grad=True)
    h, at = torch.tensor(x), 0
    for before, after in zip((n_inputs, *hidden[:-1]), hidden, strict=True):
        middle, end = at + before * after, at + (before + 1) * after
        h, at = torch.relu(h @ parameters[at:middle].reshape(before, after) + parameters[middle:end]), end
    u = h @ parameters[at:-1] + parameters[-1]
    by_torch = torch.logaddexp(u, torch.zeros_like(u)) + 0.1  # softplus of torch is rounded above 20
    (by_torch * torch.tensor(weight)).sum().backward()
    np.testing.assert_allclose(t, by_torch.detach().numpy(), rtol=1e-12)
    np.testing.assert_allclose(network.temperature(theta, x, hidden), t, rtol=1e-14)
    np.testing.assert_allclose(backward(weight), parameters.grad.numpy(), rtol=1e-9, atol=1e-12)


def test_chunks_do_not_change_a_fit(data, monkeypatch):
    at_once = fit(*data)
    monkeypatch.setattr(arrays, "_CHUNK_NUMBERS", 100)
    in_chunks = fit(*data)
    np.testing.assert_allclose(in_chunks.temperatures(data[0]), at_once.temperatures(data[0]), rtol=1e-6)
    np.testing.assert_allclose(in_chunks.predict_proba(data[0]), at_once.predict_proba(data[0]), rtol=1e-6)


# --- warnings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_solver_stopped_after_one_iteration_says_so(solver, data):
    smart, caught = recorded(lambda: SMART(solver=solver, max_iter=1).fit(*data))
    assert smart.converged_ is False
    assert smart.n_iter_ == 1
    assert [category for category, _ in caught] == [ConvergenceWarning]
    assert f"the {solver} solver stopped at its limit of 1 iterations" in caught[0][1]


def test_a_converged_fit_with_enough_errors_does_not_warn(data):
    smart, caught = recorded(lambda: SMART().fit(*data))
    assert smart.converged_ is True
    assert smart.n_errors_ == (data[0].argmax(axis=1) != data[1]).sum() >= 25
    assert caught == []


def with_errors(n_errors, n=400):
    logits, _ = sharpened(n=n)
    labels = logits.argmax(axis=1)
    labels[:n_errors] = (labels[:n_errors] + 1) % 5
    return logits, labels


@pytest.mark.parametrize("n_errors, warned", [(1, True), (99, True), (100, False)])
def test_few_errors_are_reported_with_their_number(n_errors, warned):
    smart, caught = recorded(lambda: SMART().fit(*with_errors(n_errors)))
    told = [text for _, text in caught if f"only {n_errors} of 400 validation predictions are wrong" in text]
    assert smart.n_errors_ == n_errors
    assert bool(told) == warned


def test_no_error_at_all_is_reported():
    _, caught = recorded(lambda: SMART().fit(*with_errors(0)))
    assert any("all 400 predictions are correct" in text for _, text in caught)


@pytest.mark.parametrize("solver", SOLVERS)
def test_the_floor_of_the_temperature_is_reported_with_the_rescaling(solver, data):
    """These logits need T = 2.5 / 50 = .05, and 0.1 is the lowest there is."""
    smart, caught = recorded(lambda: SMART(solver=solver, max_iter=500).fit(data[0] / 50, data[1]))
    told = [text for category, text in caught if category is CalibrationWarning and "floor of 0.1" in text]
    assert len(told) == 1
    assert "multiply all logits by a constant" in told[0]
    assert smart.temperatures(data[0] / 50).min() >= 0.1


def test_the_ceiling_of_the_temperature_is_reported_with_the_rescaling(data):
    """These logits need T = 250, and the table of L-BFGS ends at 100."""
    smart, caught = recorded(lambda: SMART().fit(100 * data[0], data[1]))
    told = [text for category, text in caught if category is CalibrationWarning and "ceiling of 100" in text]
    assert len(told) == 1
    assert "divide all logits by a constant" in told[0]
    assert (smart.temperatures(100 * data[0]) > 95).mean() > 0.05


def test_outside_the_fitted_margins_the_temperature_is_that_of_the_end_and_this_is_reported(fitted):
    low, high = fitted.margin_range_
    ends = fitted.temperature_map([low, high])
    rows = np.array([[low / 2, 0, -9, -9, -9], [low, 0, -9, -9, -9], [high, 0, -9, -9, -9], [1e6, 0, -9, -9, -9]])
    t, caught = recorded(lambda: fitted.temperatures(rows))
    np.testing.assert_allclose(t, ends[[0, 0, 1, 1]], rtol=1e-12)
    assert len(caught) == 1
    assert caught[0][0] is CalibrationWarning
    assert caught[0][1].startswith("SMART: 50.0% of the margins lie outside the fitted range")


def test_one_margin_in_a_hundred_outside_the_range_is_not_reported(fitted, data):
    rows = np.tile(data[0][:1], (200, 1))
    rows[0, rows[0].argmax()] += 1e6
    _, caught = recorded(lambda: fitted.predict_proba(rows))
    assert caught == []


def test_equal_margins_are_reported_even_where_their_deviation_does_not_round_to_zero():
    """The standard deviation of a thousand equal numbers is often about 1e−17 and not 0."""
    logits = np.tile([0.1, 0.0, 0.0], (1000, 1))
    assert margin(logits).std() > 0
    labels = np.arange(1000) % 3
    smart, caught = recorded(lambda: SMART().fit(logits, labels))
    assert any("all margins are equal" in text for _, text in caught)
    assert smart.margin_std_ == 1.0
    c = confidence(logits, smart.temperatures(logits))
    np.testing.assert_allclose(c, expit(0.1 / smart.temperatures(logits) - np.log(2)), rtol=1e-12)


@pytest.mark.parametrize(
    "settings, words",
    [
        (dict(solver="sgd"), "solver must be one of 'lbfgs', 'adam', got 'sgd'"),
        (dict(n_bins=0), "n_bins must be a whole number of at least 1, got 0"),
        (dict(n_bins=2.5), "n_bins must be a whole number of at least 1, got 2.5"),
        (dict(bandwidth=0.0), "bandwidth must be positive and finite, got 0.0"),
        (dict(delta=-1.0), "delta must be non-negative and finite, got -1.0"),
        (dict(max_iter=0), "max_iter must be a whole number of at least 1, got 0"),
        (dict(max_iter=2.5), "max_iter must be a whole number of at least 1, got 2.5"),
        (dict(patience=True), "patience must be a whole number of at least 1, got True"),
        (dict(tol=np.nan), "tol must be non-negative or None, got nan"),
    ],
    ids=str,
)
@pytest.mark.parametrize("solver", SOLVERS)
def test_settings_outside_their_range_are_refused_at_the_fit(solver, settings, words, data):
    with pytest.raises(ValueError) as error:
        SMART(**{"solver": solver, **settings}).fit(*data)
    assert str(error.value) == words


# --- saving -------------------------------------------------------------------------------------------------------

CALIBRATORS = {
    "smart": lambda: SMART(seed=np.int64(3), tol=np.float64(1e-3)),
    "smart-adam": lambda: SMART(solver="adam", max_iter=5),
    "ts": TemperatureScaling,
}


@pytest.fixture(scope="module", params=CALIBRATORS)
def calibrator(request, data):
    return recorded(lambda: CALIBRATORS[request.param]().fit(*data))[0]


def test_a_saved_calibrator_comes_back_exactly(calibrator, data, tmp_path):
    path = tmp_path / "calibrator.json"
    calibrator.save(path)
    loaded = load_calibrator(path)
    assert type(loaded) is type(calibrator)
    assert loaded.get_params() == calibrator.get_params()
    assert learned(loaded) == learned(calibrator)
    assert loaded.predict_proba(data[0]).tobytes() == calibrator.predict_proba(data[0]).tobytes()
    assert os.listdir(tmp_path) == ["calibrator.json"]
    loaded.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()


def test_a_saved_calibrator_is_plain_json_that_names_its_method(calibrator, tmp_path):
    calibrator.save(str(tmp_path / "calibrator.json"))
    content = json.loads((tmp_path / "calibrator.json").read_text())
    assert content["calibrator"] == calibrator.registry_name
    assert content["smartlib"] == smartlib.__version__
    assert content["settings"] == json.loads(json.dumps(calibrator.get_params(), default=float))


def damaged(content, change):
    content = json.loads(content)
    change(content)
    return json.dumps(content)


DAMAGE = {
    "not-json": (lambda text: "{", "is not a JSON file"),
    "empty": (lambda text: "", "is not a JSON file"),
    "cut-off": (lambda text: text[: len(text) // 2], "is not a JSON file"),
    "other-json": (lambda text: '{"a": 1}', "is not a saved calibrator"),
    "a-list": (lambda text: "[1, 2]", "is not a saved calibrator"),
    "unknown": (lambda text: damaged(text, lambda c: c.update(calibrator="platt")), "unknown calibrator 'platt'"),
    "no-name": (lambda text: damaged(text, lambda c: c.pop("calibrator")), "is a damaged calibrator file"),
    "no-settings": (lambda text: damaged(text, lambda c: c.pop("settings")), "is a damaged calibrator file"),
    "other-settings": (
        lambda text: damaged(text, lambda c: c["settings"].update(depth=3)),
        "is a damaged calibrator file",
    ),
    "no-learned": (lambda text: damaged(text, lambda c: c.pop("learned")), "is a damaged calibrator file"),
    "learned-is-a-list": (lambda text: damaged(text, lambda c: c.update(learned=[])), "is a damaged calibrator file"),
    "nothing-learned": (lambda text: damaged(text, lambda c: c.update(learned={})), "it lacks n_classes_"),
    "no-such-dtype": (
        lambda text: damaged(text, lambda c: c["learned"].update(a_={"array": [1], "dtype": "float99"})),
        "is a damaged calibrator file",
    ),
    "a-method-as-value": (
        lambda text: damaged(text, lambda c: c["learned"].update(predict_proba=1)),
        "'predict_proba' is not the name of a learned value",
    ),
    "a-private-name": (
        lambda text: damaged(text, lambda c: c["learned"].update(__class_=1)),
        "'__class_' is not the name of a learned value",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_file_that_is_no_saved_calibrator_is_refused_by_name(kind, calibrator, tmp_path):
    path = tmp_path / "calibrator.json"
    calibrator.save(path)
    change, words = DAMAGE[kind]
    path.write_text(change(path.read_text()))
    with pytest.raises(ValueError) as error:
        load_calibrator(path)
    assert words in str(error.value)
    if kind != "unknown":
        assert str(path) in str(error.value)


def test_every_learned_value_that_a_prediction_needs_is_missed(calibrator, data, tmp_path):
    path = tmp_path / "calibrator.json"
    calibrator.save(path)
    whole = json.loads(path.read_text())
    refused = []
    for name in whole["learned"]:
        path.write_text(json.dumps(whole | {"learned": {k: v for k, v in whole["learned"].items() if k != name}}))
        try:
            loaded = load_calibrator(path)
        except ValueError as error:
            assert f"is a damaged calibrator file: it lacks {name}" in str(error)
            refused.append(name)
        else:  # the value is a report on the fit; predictions do without it
            assert loaded.predict_proba(data[0]).tobytes() == calibrator.predict_proba(data[0]).tobytes()
    assert set(refused) == {"n_classes_", *calibrator.learned}


class Explosive:
    def __reduce__(self):
        return (os.mkdir, ("exploded",))


def test_a_pickle_is_refused_without_running_what_it_carries(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "calibrator.json").write_bytes(pickle.dumps(Explosive()))
    with pytest.raises(ValueError, match=r"calibrator\.json is not a JSON file"):
        load_calibrator("calibrator.json")
    assert not (tmp_path / "exploded").exists()


# --- the manners of scikit-learn -----------------------------------------------------------------------------------


def test_clone_and_parameters_work_as_in_scikit_learn(data):
    smart = fit(*data, solver="adam", max_iter=2, seed=7)
    copy = clone(smart)
    assert copy.get_params() == smart.get_params()
    assert copy.get_params()["seed"] == 7
    with pytest.raises(NotFittedError):
        copy.predict_proba(data[0])
    assert copy.set_params(solver="lbfgs", max_iter=None) is copy
    assert learned(copy.fit(*data)) == learned(fit(*data))
    with pytest.raises(ValueError, match="Invalid parameter 'depth'"):
        copy.set_params(depth=2)


@pytest.mark.parametrize("make", [SMART, TemperatureScaling])
def test_nothing_works_before_a_fit(make, data, tmp_path):
    unfitted = make()
    uses = [unfitted.predict_proba, unfitted.temperatures, lambda _: unfitted.save(tmp_path / "c.json")]
    uses += [unfitted.temperature_map] if make is SMART else []
    for use in uses:
        with pytest.raises(NotFittedError, match=f"This {make.__name__} instance is not fitted yet"):
            use(data[0])
    assert not list(tmp_path.iterdir())


def test_settings_are_keyword_only():
    with pytest.raises(TypeError):
        SMART("adam")


def test_another_number_of_classes_is_refused(calibrator, data):
    for use in (calibrator.predict_proba, calibrator.temperatures):
        with pytest.raises(ValueError, match="logits have 4 classes, but the calibrator was fitted on 5"):
            use(data[0][:, :4])


# --- kinds and types of numbers ------------------------------------------------------------------------------------


def whole_numbers(data):
    """Rows of whole numbers, exact in every type, with margins inside the fitted range."""
    rows = np.round(data[0])
    return rows[(margin(rows) >= 1) & (margin(rows) <= 6)][:50]


@pytest.mark.parametrize(
    "given, returned",
    [(np.float16, np.float32), (np.float32, np.float32), (np.float64, np.float64), (">f4", np.float32),
     (np.int64, np.float64), (np.longdouble, np.float64)],
)  # fmt: skip
def test_probabilities_are_float32_for_narrow_floats_and_float64_otherwise(calibrator, data, given, returned):
    rows = whole_numbers(data).astype(given)
    assert calibrator.predict_proba(rows).dtype == returned
    assert calibrator.temperatures(rows).dtype == np.float64
    expected = calibrator.predict_proba(whole_numbers(data))
    np.testing.assert_allclose(calibrator.predict_proba(rows), expected, rtol=1e-6)


@pytest.mark.parametrize(
    "given, returned",
    [(torch.float16, torch.float32), (torch.bfloat16, torch.float32), (torch.float32, torch.float32),
     (torch.float64, torch.float64), (torch.int32, torch.float64)],
)  # fmt: skip
def test_tensors_come_back_as_tensors_of_the_stated_type(calibrator, data, given, returned):
    rows = torch.tensor(whole_numbers(data)).to(given)
    kept = rows.clone()
    probs, t = calibrator.predict_proba(rows), calibrator.temperatures(rows)
    assert (probs.dtype, t.dtype) == (returned, torch.float64)
    assert probs.device == t.device == rows.device
    assert torch.equal(rows, kept)
    np.testing.assert_allclose(probs, calibrator.predict_proba(whole_numbers(data)), rtol=1e-6)


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_fit_on_tensors_equals_that_on_arrays_and_keeps_no_graph(solver, data):
    on_tensors = fit(torch.tensor(data[0], requires_grad=True), torch.tensor(data[1]), **quick(solver))
    assert learned(on_tensors) == learned(fit(*data, **quick(solver)))
    probs = on_tensors.predict_proba(torch.tensor(data[0], requires_grad=True))
    assert not probs.requires_grad
    assert not any(isinstance(value, torch.Tensor) for value in vars(on_tensors).values())


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_from_probs_equals_taking_the_logarithm(dtype, data):
    probs = softmax(data[0], axis=1).astype(dtype)
    by_option = SMART().fit(probs, data[1], from_probs=True)
    logits = np.log(probs.astype(np.float64))
    by_hand = SMART().fit(logits, data[1])
    assert learned(by_option) == learned(by_hand)
    given = by_option.predict_proba(probs, from_probs=True)
    assert given.dtype == dtype
    np.testing.assert_allclose(given, by_hand.predict_proba(logits), rtol=1e-6)
    np.testing.assert_array_equal(by_option.temperatures(probs, from_probs=True), by_hand.temperatures(logits))
