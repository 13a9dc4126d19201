"""First-order effects of local scaling, against autograd, finite differences, linear programs and hand values."""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from scipy.special import expit, logit, softmax
from sklearn.exceptions import ConvergenceWarning

from smartlib import SMART, expected_calibration_error, smooth_calibration_error, soft_ece
from smartlib.calibrators import CalibrationWarning
from smartlib.experiments.disagreement import (
    MEASURES,
    Stretch,
    _cosine,
    gradients_along_fit,
    mismatch_stretch,
    resampled_minimisers,
    smart_gradients,
    starting_map,
    temperature_curves,
    temperatures_from_the_other_half,
)
from smartlib.metrics import negative_log_likelihood
from smartlib.mismatch import (
    confidence_derivative,
    nll_derivative,
    nll_derivative_parts,
    one_kind,
    two_groups,
    two_groups_nll_rate,
    two_groups_smce,
    witness_derivative,
)
from smartlib.smce import smce_of
from smartlib.softece import bin_centres
from smartlib.toplabel import confidence, margin


def sample(n=40, k=4, seed=0):
    """Logits, class indices, label probabilities, a direction, temperatures and weights, all different by row."""
    rng = np.random.default_rng(seed)
    return (
        3 * rng.normal(size=(n, k)), rng.integers(0, k, n), rng.dirichlet(np.ones(k), n), rng.normal(size=n),
        rng.uniform(0.5, 3, n), rng.uniform(0, 2, n),
    )  # fmt: skip


def nll_by_torch(logits, q, direction, temperature, weights):
    """E[−log p_Y] as a function of ε, written with the log-softmax of torch."""
    z, q, a, t, w = (torch.tensor(np.array(x, dtype=float)) for x in (logits, q, direction, temperature, weights))
    return lambda eps: -(w * (q * torch.log_softmax((z.T * (1 + eps * a) / t).T, dim=1)).sum(1)).sum() / w.sum()


# --- directional derivatives --------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [2, 3, 10])
@pytest.mark.parametrize("hard", [True, False])
def test_nll_derivative_equals_autograd_and_the_printed_formula(k, hard):
    z, y, q, a, t, w = sample(k=k)
    q = np.eye(k)[y] if hard else q
    eps = torch.tensor(0.0, dtype=torch.float64, requires_grad=True)
    nll_by_torch(z, q, a, t, w)(eps).backward()
    value = nll_derivative(z, y if hard else q, a, t, weights=w)
    assert value == pytest.approx(eps.grad.item(), rel=1e-12)
    p = softmax(z / t[:, None], axis=1)
    assert value == pytest.approx(np.average(a / t * ((p - q) * z).sum(axis=1), weights=w), rel=1e-12)
    assert sum(nll_derivative_parts(z, q, a, t, weights=w)) == pytest.approx(value, rel=1e-14)


def test_nll_derivative_equals_finite_differences():
    z, y, _, a, t, _ = sample()
    step = 1e-5
    up, down = (
        negative_log_likelihood(softmax(z * ((1 + sign * step * a) / t)[:, None], axis=1), y) for sign in (1, -1)
    )
    assert nll_derivative(z, y, a, t) == pytest.approx((up - down) / (2 * step), rel=1e-7)


def test_the_parts_are_their_printed_formulas():
    z, y, _, a, t, _ = sample()
    p = softmax(z / t[:, None], axis=1)
    rows, predicted = np.arange(len(z)), z.argmax(axis=1)
    f, correct = p.max(axis=1), predicted == y
    others = np.where(np.arange(4) == predicted[:, None], 0, p)
    mean_of_others = (others * z).sum(axis=1) / others.sum(axis=1)
    first = np.mean(a / t * (f - correct) * (z.max(axis=1) - mean_of_others))
    second = np.mean(a / t * (1 - correct) * (mean_of_others - z[rows, y]))
    np.testing.assert_allclose(nll_derivative_parts(z, y, a, t), (first, second), rtol=1e-12)


def test_confidence_derivative_equals_autograd():
    z, _, _, a, t, _ = sample()
    eps = torch.zeros(len(z), dtype=torch.float64, requires_grad=True)
    scaled = torch.tensor(z) * ((1 + eps * torch.tensor(a)) / torch.tensor(t))[:, None]
    torch.softmax(scaled, dim=1).amax(dim=1).sum().backward()
    np.testing.assert_allclose(confidence_derivative(z, a, t), eps.grad.numpy(), rtol=1e-10, atol=1e-15)


rows_of_logits = st.lists(st.floats(-50, 50), min_size=3, max_size=3)


@given(st.lists(rows_of_logits, min_size=1, max_size=5), st.floats(0.05, 20))
def test_lowering_the_temperature_never_lowers_a_confidence(rows, t):
    z = np.array(rows) * 1.5 - 0.25  # no row looks like a softmax output
    derivative = confidence_derivative(z, 1.0, t)
    assert (derivative >= 0).all()
    p = softmax(z / t, axis=1)
    np.testing.assert_allclose(derivative, p.max(axis=1) / t * (z.max(axis=1) - (p * z).sum(axis=1)), atol=1e-10)
    np.testing.assert_array_equal(confidence_derivative(z, -1.0, t), -derivative)


def test_equal_logits_have_no_direction_and_impossible_classes_do_not_matter():
    assert confidence_derivative([[2.0, 2.0, 2.0]], 1.0).tolist() == [0.0]
    with_impossible = np.array([[3.0, 1.0, -np.inf], [2.0, -np.inf, -np.inf]])
    np.testing.assert_allclose(
        confidence_derivative(with_impossible, 1.0), [confidence_derivative([[3.0, 1.0]], 1.0)[0], 0.0], rtol=1e-14
    )
    assert nll_derivative(with_impossible, [1, 0], 1.0) == pytest.approx(nll_derivative([[3.0, 1.0]], [1], 0.5))


def test_huge_margins_keep_the_gap_of_an_error():
    """e^(−5000) underflows, but the model still says what it expects of an error: the runner-up, 5000 below."""
    confidence_part, error_part = nll_derivative_parts([[5000.0, 0.0, -900.0]], [2], 1.0)
    assert (confidence_part, error_part) == (5000.0, 900.0)


def test_witness_derivative_equals_finite_differences():
    rng = np.random.default_rng(1)
    f, a, df, weights = rng.uniform(0.2, 0.8, 20), rng.integers(0, 2, 20), rng.normal(size=20), rng.uniform(0, 1, 20)

    def value(eps):
        return np.average((a - f - eps * df) * np.sin(f + eps * df), weights=weights)

    by_formula = witness_derivative(f, a, df, np.sin, np.cos, weights=weights)
    assert by_formula == pytest.approx((value(1e-5) - value(-1e-5)) / 2e-5, rel=1e-8)


@given(st.integers(2, 6), st.integers(0, 1000), st.floats(0.2, 5))
@settings(max_examples=40)
def test_where_the_whole_distribution_is_calibrated_no_direction_changes_the_nll(k, seed, t):
    z, _, _, a, _, _ = sample(8, k, seed)
    parts = nll_derivative_parts(z, softmax(z / t, axis=1), a, t)
    np.testing.assert_allclose(parts, 0, atol=1e-12)


def test_tensors_give_tensors_and_the_same_numbers():
    z, y, q, a, t, w = sample()
    tensors = [torch.tensor(x) for x in (z, y, q, a, t, w)]
    assert nll_derivative(tensors[0], tensors[1], tensors[3], tensors[4], weights=tensors[5]) == nll_derivative(
        z, y, a, t, weights=w
    )
    derivative = confidence_derivative(tensors[0], tensors[3], tensors[4])
    assert isinstance(derivative, torch.Tensor)
    np.testing.assert_array_equal(derivative, confidence_derivative(z, a, t))


@pytest.mark.parametrize(
    "logits, labels, words",
    [
        ([[1.0, -np.inf]], [1], "row 0: the logit of its own label 1 is -inf"),
        ([[1.0, -np.inf]], [[0.5, 0.5]], "a class of positive probability has the logit -inf"),
        ([[1.0, 2.0]], [[0.5, 0.25, 0.25]], r"label probabilities have shape \(1, 3\), but the logits \(1, 2\)"),
        ([[1.0, 2.0]], [2], "label 2 in row 0 is outside 0 .. 1"),
    ],
)
def test_impossible_labels_and_other_shapes_are_refused(logits, labels, words):
    with pytest.raises(ValueError, match=words):
        nll_derivative(logits, labels, 1.0)


# --- Theorem 2a ---------------------------------------------------------------------------------------------------

GRID_2A = [(c, eta, share * eta) for c in (0.55, 0.7, 0.9) for eta in (0.02, 0.09) for share in (0.1, 0.5, 1.0)]


def smce_by_linear_program(f, accuracy):
    """The definition with two kinds of samples: a program in w(f_1), w(f_2)."""
    residual, distance = (accuracy - f) / 2, abs(f[0] - f[1])
    program = linprog(-residual, A_ub=[[1, -1], [-1, 1]], b_ub=[distance] * 2, bounds=[(-1, 1)] * 2)
    return -program.fun


@pytest.mark.parametrize("c, eta, delta", GRID_2A)
def test_the_smooth_error_of_two_groups_is_the_closed_form(c, eta, delta):
    population = two_groups(c, eta, delta)
    f, accuracy = confidence(population.logits), population.labels[:, 0]
    np.testing.assert_allclose(f, [c + delta, c], rtol=1e-13)
    np.testing.assert_allclose(accuracy, [c + eta, c - eta], rtol=1e-13)
    assert two_groups_smce(eta, delta) == pytest.approx(smce_of(f, accuracy), rel=1e-10)
    assert two_groups_smce(eta, delta) == pytest.approx(smce_by_linear_program(f, accuracy), rel=1e-9)


def test_two_groups_by_hand():
    """c = .8, η = .1, δ = .05: residuals .025 and −.05; w = (−.95, −1) gives −.02375 + .05 = .02625."""
    assert two_groups_smce(0.1, 0.05) == pytest.approx(0.02625, rel=1e-14)
    assert two_groups_smce(0.1, 0.0) == 0


@pytest.mark.parametrize("c, eta", [(0.6, 0.3), (0.8, 0.1), (0.95, 0.01)])
def test_the_rate_of_the_nll_is_the_derivative_and_a_finite_difference(c, eta):
    population, direction = two_groups(c, eta), np.array([1.0, 0.0])
    rate = two_groups_nll_rate(c, eta)
    assert rate > 0
    derivative = nll_derivative(population.logits, population.labels, direction, weights=population.weights)
    assert derivative == pytest.approx(-rate, rel=1e-12)
    eps = 1e-6
    f, q = expit(logit(c) * (1 + eps * np.array([1, -1]))), c + eta
    up, down = -0.5 * (q * np.log(f) + (1 - q) * np.log(1 - f))
    assert (up - down) / (2 * eps) == pytest.approx(-rate, rel=1e-7)


def test_the_best_witness_of_two_groups_gives_the_slope_of_the_smooth_error():
    """w(v) = −1 + (v − c): to first order smCE grows by (1 + η)/2 times the step in confidence."""
    c, eta = 0.77, 0.15
    slope = witness_derivative([c, c], [c + eta, c - eta], [1, 0], lambda f: f - c - 1, lambda f: 1.0)
    assert slope == pytest.approx((1 + eta) / 2, rel=1e-12)
    assert two_groups_smce(eta, 1e-7) / 1e-7 == pytest.approx(slope, rel=1e-6)


@pytest.mark.parametrize("wrong", [(0.5, 0.1, 0), (0.8, 0.2, 0), (0.8, 0.0, 0), (0.8, 0.1, 0.11), (0.8, 0.1, -0.01)])
def test_two_groups_refuses_what_the_theorem_excludes(wrong):
    with pytest.raises(ValueError, match="need 1/2 < c < 1"):
        two_groups(*wrong)


# --- K = 2: where the calibration error is zero, and the margins stay apart, the NLL is stationary -----------------


@given(st.integers(0, 1000), st.floats(0.3, 4))
@settings(max_examples=40)
def test_two_classes_calibrated_at_one_temperature_are_stationary_in_every_direction_of_the_margin(seed, t):
    rng = np.random.default_rng(seed)
    m = rng.uniform(0, 8, 20)
    z, f = np.stack([m, 0 * m], axis=1), expit(m / t)
    q = np.stack([f, 1 - f], axis=1)
    assert smce_of(confidence(z, t), q[:, 0]) == pytest.approx(0, abs=1e-12)
    assert nll_derivative(z, q, rng.normal(size=20), t) == pytest.approx(0, abs=1e-12)


def test_a_map_that_gives_two_margins_one_confidence_is_not_stationary():
    """T(m) proportional to m merges all margins; where accuracy grows with m, separating them lowers the NLL."""
    z, accuracy, c = np.array([[1.0, 0.0], [3.0, 0.0]]), np.array([0.7, 0.9]), 0.8
    q = np.stack([accuracy, 1 - accuracy], axis=1)
    t = margin(z) / logit(c)
    assert smce_of(confidence(z, t), accuracy) == pytest.approx(0, abs=1e-15)
    assert nll_derivative(z, q, 1.0, t) == pytest.approx(0, abs=1e-15)
    assert nll_derivative(z, q, [-1.0, 1.0], t) == pytest.approx(-0.1 * logit(c), rel=1e-12)


@given(st.integers(0, 1000), st.floats(0.3, 4))
@settings(max_examples=40)
def test_for_two_classes_the_error_part_is_zero(seed, t):
    z, y, _, a, _, _ = sample(10, 2, seed)
    assert nll_derivative_parts(z, y, a, t)[1] == pytest.approx(0, abs=1e-13)


# --- Theorem 2b ---------------------------------------------------------------------------------------------------


# A single row of logits may by chance look like probabilities.
@pytest.mark.filterwarnings("ignore:every row of logits is non-negative")
@given(st.floats(0.1, 5), st.floats(0.1, 5), st.floats(0, 1))
def test_one_kind_of_sample_is_pulled_by_where_its_errors_go(first, second, share):
    z = [first + second, second, 0.0]
    population = one_kind(z, share)
    p = softmax(z)
    assert population.labels[0, 0] == pytest.approx(p[0], rel=1e-12)
    confidence_part, error_part = nll_derivative_parts(population.logits, population.labels, 1.0)
    assert confidence_part == pytest.approx(0, abs=1e-12)
    expected_share = p[1] / (p[1] + p[2])
    assert error_part == pytest.approx((1 - p[0]) * (expected_share - share) * second, abs=1e-12)


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_two_classes_have_one_kind_of_error_and_no_pull(share):
    population = one_kind([1.3, 0.0], share)
    assert nll_derivative(population.logits, population.labels, 1.0) == pytest.approx(0, abs=1e-15)


# --- along one temperature ----------------------------------------------------------------------------------------


def overconfident(n=600, k=5, seed=0):
    rng = np.random.default_rng(seed)
    logits = 1.5 * rng.normal(size=(n, k))
    labels = (softmax(logits, axis=1).cumsum(axis=1) < rng.random((n, 1))).sum(axis=1)
    return 2 * logits, labels


def test_the_curves_are_the_four_measures():
    z, y = overconfident()
    grid = [0.7, 1.3, 2.9]
    curves = temperature_curves(z, y, grid)
    assert list(curves.columns) == ["temperature", *MEASURES]
    correct = z.argmax(axis=1) == y
    for row in curves.itertuples():
        f = confidence(z, row.temperature)
        assert row.nll == pytest.approx(negative_log_likelihood(softmax(z / row.temperature, axis=1), y), rel=1e-12)
        assert row.ece == pytest.approx(expected_calibration_error(f, correct), rel=1e-11)
        assert row.soft_ece == pytest.approx(soft_ece(f, correct), rel=1e-11)
        assert row.smce == pytest.approx(smooth_calibration_error(f, correct), rel=1e-9)


def test_a_resample_is_the_data_with_repeated_rows():
    z, y = overconfident(200)
    grid = np.geomspace(0.8, 4, 12)
    minimisers = resampled_minimisers(z, y, grid, n_resamples=3, seed=5)
    counts = np.random.default_rng(5).multinomial(200, np.full(200, 1 / 200), size=3)
    for row, count in zip(minimisers.itertuples(), counts, strict=True):
        curves = temperature_curves(z.repeat(count, axis=0), y.repeat(count), grid)
        for measure in MEASURES:
            assert getattr(row, measure) == grid[curves[measure].argmin()]


def test_each_half_chooses_for_the_other_one():
    z, y = overconfident(101)
    grid = np.geomspace(0.8, 4, 12)
    chosen = temperatures_from_the_other_half(z, y, grid, seed=3)
    half = np.random.default_rng(3).permutation(101) % 2
    assert 0 < half.sum() < 101
    for side in (0, 1):
        other = temperature_curves(z[half != side], y[half != side], grid)
        for measure in MEASURES:
            assert (chosen[measure][half == side] == grid[other[measure].argmin()]).all()


def test_the_stretch_lies_between_the_minimisers_whichever_comes_first():
    curves = temperature_curves([[2.0, 0.0], [1.0, 0.0]], [0, 1], [1.0, 2.0, 3.0, 4.0, 5.0])
    curves["nll"], curves["ece"] = [5, 4, 3, 2, 3], [2, 1, 1.5, 1.4, 9]
    assert mismatch_stretch(curves, "ece") == Stretch(low=2.0, high=4.0, opposed=0.5)
    curves["ece"] = [9, 9, 9, 1, 9]
    assert mismatch_stretch(curves, "ece") == Stretch(low=4.0, high=4.0, opposed=0.0)


# --- in the space of SMART's parameters ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data():
    return overconfident()


@pytest.fixture(scope="module", params=[1, 5])
def smart(request, data):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        warnings.simplefilter("ignore", CalibrationWarning)
        return SMART(max_iter=request.param).fit(*data)


def objectives_by_torch(theta, smart, z, y):
    """NLL and Charbonnier-SoftECE of the 49 parameters, from the printed formulas."""
    m = torch.tensor(margin(z))
    w, b, v = theta[:-1].reshape(3, 16)
    x = (m - smart.margin_mean_) / smart.margin_std_
    t = torch.nn.functional.softplus(torch.relu(x[:, None] * w + b) @ v + theta[-1]) + 0.1
    log_p = torch.log_softmax(torch.tensor(z) / t[:, None], dim=1)
    f, correct = log_p.exp().amax(dim=1), torch.tensor(z.argmax(axis=1) == y)
    weight = torch.softmax(-(f[:, None] - torch.tensor(bin_centres(15))).square() / (2 * 0.05**2), dim=1)
    mass, gap = weight.mean(dim=0), (weight * (correct.double() - f)[:, None]).mean(dim=0)
    return -log_p[torch.arange(len(y)), torch.tensor(y)].mean(), (gap.square() + (1e-3 * mass).square()).sqrt().sum()


def test_both_gradients_equal_those_of_autograd(smart, data):
    theta = np.concatenate([smart.hidden_weight_, smart.hidden_bias_, smart.output_weight_, [smart.output_bias_]])
    ours = smart_gradients(smart, *data)
    expected = []
    for i in range(2):
        parameters = torch.tensor(theta, requires_grad=True)
        objectives_by_torch(parameters, smart, *data)[i].backward()
        expected.append(parameters.grad.numpy())
        np.testing.assert_allclose(ours[i], expected[i], rtol=1e-7, atol=1e-11)
    cosine = expected[0] @ expected[1] / np.linalg.norm(expected[0]) / np.linalg.norm(expected[1])
    assert _cosine(*smart_gradients(smart, *data)) == pytest.approx(cosine, rel=1e-7)


def test_the_starting_map_is_where_the_solver_starts(data):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = SMART(max_iter=1).fit(*data)
    start = starting_map(first, *data)
    t = start.temperature_map(np.linspace(0, 9, 5))
    np.testing.assert_allclose(t, t[0], rtol=1e-14)
    correct = data[0].argmax(axis=1) == data[1]
    neighbours = [soft_ece(confidence(data[0], t[0] * np.exp(shift)), correct) for shift in (-0.15, 0, 0.15)]
    assert np.argmin(neighbours) == 1
    # Both gradients of the hidden layer vanish where the output weights are 0, so that one step leaves it as it was.
    assert (start.output_weight_ == 0).all() and np.any(first.output_weight_ != 0)
    np.testing.assert_allclose(start.hidden_weight_, first.hidden_weight_, rtol=1e-6)
    np.testing.assert_allclose(start.hidden_bias_, first.hidden_bias_, rtol=1e-6)


def test_a_vanishing_gradient_has_no_cosine():
    """All logits equal: no temperature changes anything."""
    z, y = np.zeros((200, 3)), np.arange(200) % 3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        smart = SMART(max_iter=1).fit(z, y)
    assert np.isnan(_cosine(*smart_gradients(smart, z, y)))


def test_the_path_of_a_fit_runs_from_the_start_to_the_fit_itself(data):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)
        whole = SMART().fit(*data)
        path = gradients_along_fit(*data, n_resamples=2)
    assert path["iteration"].tolist() == list(range(whole.n_iter_ + 1))
    assert path["soft_ece"].iloc[-1] == pytest.approx(whole.objective_, rel=1e-12)
    assert path["cosine"].iloc[-1] == pytest.approx(_cosine(*smart_gradients(whole, *data)), rel=1e-9)
    np.testing.assert_allclose(path["soft_ece"].iloc[1:], whole.loss_curve_, atol=2e-4)
    t = whole.temperatures(data[0])
    nll = negative_log_likelihood(softmax(data[0] / t[:, None], axis=1), data[1])
    assert path["nll"].iloc[-1] == pytest.approx(nll, rel=1e-12)
    rng = np.random.default_rng(0)
    drawn = [rng.integers(len(data[1]), size=len(data[1])) for _ in range(2)]
    cosines = [_cosine(*smart_gradients(whole, data[0][rows], data[1][rows])) for rows in drawn]
    np.testing.assert_allclose(path[["low", "high"]].iloc[-1], np.quantile(cosines, [0.025, 0.975]), rtol=1e-9)
