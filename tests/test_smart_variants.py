"""SMART's variants: the four objectives, the signals, the widths, and what holds for all of them."""

import numpy as np
import pytest
import torch
from scipy.special import log_softmax, softmax
from test_smart import fit, learned, recorded, sharpened

from smartlib import SMART, load_calibrator
from smartlib.calibrators import temperature_network as network
from smartlib.calibrators.smart import inputs, starting_parameters, training_objective
from smartlib.calibrators.temperature_objectives import (
    OBJECTIVES,
    best_constant,
    correct_and_gap,
    objective_of_parameters,
    objective_of_temperatures,
    objective_value,
    table_for,
)
from smartlib.hardness import SIGNALS, hardness
from smartlib.softece import bin_centres, soft_ece
from smartlib.toplabel import confidence

VARIANTS = {
    "321": dict(hidden=(16, 16)),
    "narrowing": dict(hidden=(6, 3)),
    "widening": dict(hidden=(3, 6)),
    "one-unit": dict(hidden=(1,)),
    **{objective: dict(objective=objective) for objective in OBJECTIVES[1:]},
    **{signal: dict(signal=signal) for signal in SIGNALS[1:]},
    "all-at-once": dict(hidden=(4, 4), objective="brier", signal="entropy"),
}


@pytest.fixture(scope="module")
def data():
    return sharpened()


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request, data):
    return fit(*data, **VARIANTS[request.param])


# --- the objectives -----------------------------------------------------------------------------------------------


def by_torch(name, z, y, t):
    """The objective from the printed formulas."""
    log_p = torch.log_softmax(torch.tensor(z) / t[:, None], dim=1)
    p, y = log_p.exp(), torch.tensor(y)
    if name == "nll":
        return -log_p[torch.arange(len(y)), y].mean()
    if name == "brier":
        return (p - torch.nn.functional.one_hot(y, z.shape[1])).square().sum(dim=1).mean()
    f, correct = p.amax(dim=1), (torch.tensor(z).argmax(dim=1) == y).double()
    weight = torch.softmax(-(f[:, None] - torch.tensor(bin_centres(15))).square() / (2 * 0.05**2), dim=1)
    mass, gap = weight.mean(dim=0), (weight * (correct - f)[:, None]).mean(dim=0)
    delta = 1e-3 if name == "charbonnier" else 0.0
    return (gap.square() + (delta * mass).square()).sqrt().sum()


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("k", [2, 5, 40])
def test_value_and_derivative_equal_those_of_autograd_on_whole_rows(name, k):
    z, y = sharpened(n=300, k=k)
    t = np.random.default_rng(1).uniform(0.15, 8, len(y))
    value, gradient = objective_of_temperatures(name, table_for(name, z), *correct_and_gap(z, y))(t)
    leaf = torch.tensor(t, requires_grad=True)
    expected = by_torch(name, z, y, leaf)
    expected.backward()
    assert value == pytest.approx(expected.item(), abs=2e-5)  # the table's error
    scale = np.abs(leaf.grad.numpy()).max()
    np.testing.assert_allclose(gradient, leaf.grad.numpy(), atol=3e-3 * scale)
    assert objective_value(name, z, y, t) == pytest.approx(expected.item(), rel=1e-12)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_derivative_is_that_of_the_value(name, data):
    z, y = data
    objective = objective_of_temperatures(name, table_for(name, z), *correct_and_gap(z, y))
    t = np.random.default_rng(2).uniform(0.2, 8, len(y))
    direction = np.random.default_rng(3).normal(size=len(y))
    step = 1e-6
    difference = (objective(t + step * direction)[0] - objective(t - step * direction)[0]) / (2 * step)
    assert objective(t)[1] @ direction == pytest.approx(difference, rel=1e-6, abs=1e-9)


def test_two_samples_by_hand():
    """Logits (log 3, 0) at T = 1: p = (3/4, 1/4). One label right, one wrong."""
    z, y, t = np.array([[np.log(3), 0.0]] * 2), np.array([0, 1]), np.ones(2)
    assert objective_value("nll", z, y, t) == pytest.approx((np.log(4 / 3) + np.log(4)) / 2, rel=1e-14)
    assert objective_value("brier", z, y, t) == pytest.approx((2 / 16 + 2 * 9 / 16) / 2, rel=1e-14)
    # Both confidences are 3/4, so the soft bins have the same weights for both, and each has the gap 1/2 - 3/4.
    assert objective_value("softece", z, y, t) == pytest.approx(1 / 4, rel=1e-14)
    assert objective_value("charbonnier", z, y, t, delta=0.1) == pytest.approx(np.hypot(1 / 4, 0.1), rel=1e-14)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_masked_classes_are_as_absent_ones_for_every_objective(name, data):
    z, y = data
    t = np.random.default_rng(2).uniform(0.2, 8, len(y))
    at = [
        objective_of_temperatures(name, table_for(name, logits), *correct_and_gap(logits, y))(t)
        for logits in (z, np.concatenate([z, np.full((len(y), 2), -np.inf)], axis=1))
    ]
    assert at[0][0] == pytest.approx(at[1][0], rel=1e-12)
    np.testing.assert_allclose(at[0][1], at[1][1], rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_gradient_in_the_parameters_follows_the_value_and_vanishes_above_the_ceiling(name, data):
    z, y = data
    x, hidden = hardness(z)[:, None], (4, 3)
    objective = objective_of_parameters(
        objective_of_temperatures(name, table_for(name, z), *correct_and_gap(z, y)), x, hidden
    )
    theta = 0.3 * np.random.default_rng(0).normal(size=network.count_parameters(1, hidden))
    theta[-1] = 2.0
    value, gradient = objective(theta)
    step = 1e-4 * np.random.default_rng(1).normal(size=len(theta))
    assert objective(theta + step)[0] - objective(theta - step)[0] == pytest.approx(
        2 * gradient @ step, rel=2e-2, abs=2e-7 * value
    )
    theta[-1] = 200.0  # T = 200 and more, where the table has ended
    assert np.all(objective(theta)[1] == 0)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_best_constant_beats_its_neighbours(name, data):
    z, y = data
    t = best_constant(objective_of_temperatures(name, table_for(name, z), *correct_and_gap(z, y)), len(y))
    values = [objective_value(name, z, y, np.full(len(y), t * factor)) for factor in (0.86, 1, 1.16)]
    assert np.argmin(values) == 1
    assert t == pytest.approx(2.5, rel=0.3)


# --- the start ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hidden", [(16,), (16, 16), (6, 3), (3, 6), (1,)])
def test_the_start_is_a_constant_map_whose_last_layer_has_all_hinges(hidden, data):
    smart = fit(*data, hidden=hidden, max_iter=1)
    x = inputs(smart, data[0])
    theta = starting_parameters(smart, training_objective(smart, *data), x)
    assert len(theta) == smart.n_parameters
    t = network.temperature(theta, x, hidden)
    np.testing.assert_allclose(t, t[0], rtol=1e-14)
    _, backward = network.temperature_and_backward(theta, x, hidden)
    gradient = backward(np.ones(len(x)))
    *_, (along_output, _) = network.split(gradient, 1, hidden)
    assert (along_output > 0).all()  # no unit is dead
    # Each hinge of the first layer is at a quantile of the input.
    weight, bias = network.split(theta, 1, hidden)[0]
    below = (x < -bias / weight[0]).mean(axis=0)
    np.testing.assert_allclose(below, (np.arange(hidden[0]) + 0.5) / hidden[0], atol=0.01)


def test_a_second_layer_starts_by_passing_on_the_first(data):
    """Equal widths: the same function of the input, so the same gradient at the output."""
    along_output = []
    for hidden in [(16,), (16, 16)]:
        smart = fit(*data, hidden=hidden, max_iter=1)
        x = inputs(smart, data[0])
        theta = starting_parameters(smart, training_objective(smart, *data), x)
        gradient = network.temperature_and_backward(theta, x, hidden)[1](np.ones(len(x)))
        along_output.append(network.split(gradient, 1, hidden)[-1][0])
    np.testing.assert_allclose(along_output[0], along_output[1], rtol=1e-12)


# --- every variant ------------------------------------------------------------------------------------------------


def test_the_number_of_parameters_is_known_before_the_fit_and_is_what_is_learned(variant):
    unfitted = SMART(hidden=variant.hidden)
    stored, hidden = network.stored_parameters(variant)
    assert unfitted.n_parameters == variant.n_parameters == len(stored)
    assert hidden == variant.hidden
    assert (SMART().n_parameters, SMART(hidden=(16, 16)).n_parameters) == (49, 321)


def test_the_objective_is_that_of_the_returned_temperatures_and_below_the_best_constant(variant, data):
    logits, labels = data
    t = variant.temperatures(logits)
    assert variant.objective_ == pytest.approx(by_torch(variant.objective, *data, torch.tensor(t)).item(), rel=1e-10)
    objective = training_objective(variant, *data)
    constant = best_constant(objective, len(labels))
    assert variant.objective_ <= objective_value(variant.objective, *data, np.full(len(labels), constant)) + 1e-4
    assert variant.converged_ is True


def test_temperatures_are_the_printed_formula_of_the_standardised_signal(variant, data):
    s = hardness(data[0], variant.signal)
    assert variant.margin_mean_ == pytest.approx(s.mean(), rel=1e-12)
    assert variant.margin_std_ == pytest.approx(s.std(), rel=1e-12)
    assert variant.margin_range_ == [s.min(), s.max()]
    h = np.maximum(((s - s.mean()) / s.std())[:, None] * variant.hidden_weight_ + variant.hidden_bias_, 0)
    if len(variant.hidden) == 2:
        h = np.maximum(h @ variant.second_hidden_weight_ + variant.second_hidden_bias_, 0)
    t = np.logaddexp(0, h @ variant.output_weight_ + variant.output_bias_) + 0.1
    np.testing.assert_allclose(variant.temperatures(data[0]), t, rtol=1e-11)
    np.testing.assert_allclose(variant.temperature_map(s), t, rtol=1e-11)
    probs = variant.predict_proba(data[0])
    np.testing.assert_allclose(probs, softmax(data[0] / t[:, None], axis=1), rtol=1e-9)
    np.testing.assert_array_equal(probs.argmax(axis=1), data[0].argmax(axis=1))


def test_a_saved_variant_comes_back_exactly(variant, data, tmp_path):
    variant.save(tmp_path / "variant.json")
    loaded = load_calibrator(tmp_path / "variant.json")
    assert loaded.get_params() == variant.get_params()
    assert learned(loaded) == learned(variant)
    assert loaded.predict_proba(data[0]).tobytes() == variant.predict_proba(data[0]).tobytes()
    assert loaded.n_parameters == variant.n_parameters


def test_permuting_samples_and_classes_permutes_the_result(variant, data):
    logits, labels = data
    rng = np.random.default_rng(0)
    samples, classes = rng.permutation(len(labels)), rng.permutation(logits.shape[1])
    other = fit(logits[samples][:, classes], np.argsort(classes)[labels[samples]], **variant.get_params())
    np.testing.assert_allclose(
        other.predict_proba(logits[samples][:, classes]), variant.predict_proba(logits)[samples][:, classes], rtol=1e-5
    )


@pytest.mark.parametrize("name", ["321", "nll", "all-at-once"])
def test_two_fits_of_a_variant_are_identical(name, data):
    first, second = (fit(*data, **VARIANTS[name]) for _ in range(2))
    assert learned(first) == learned(second)


@pytest.mark.parametrize("options", [dict(objective="nll"), dict(objective="brier"), dict(hidden=(16, 16))], ids=str)
def test_calibrated_logits_stay_nearly_as_they_are(options):
    logits, labels = sharpened(n=5000, k=5, scale=1)
    smart = fit(logits, labels, **options)
    plain = softmax(logits, axis=1).max(axis=1)
    assert np.abs(confidence(logits, smart.temperatures(logits)) - plain).mean() < 0.02


def test_each_objective_is_best_at_what_it_minimises():
    """On sharp logits with a kink: temperatures 3 and 1 for small and large margins."""
    logits, labels = sharpened(n=3000, k=4, scale=1)
    logits = logits * np.where(hardness(logits) < 1.5, 3.0, 1.0)[:, None]
    scores = {}
    for name in ("charbonnier", "nll", "brier"):
        t = fit(logits, labels, objective=name).temperatures(logits)
        scores[name] = {other: objective_value(other, logits, labels, t) for other in ("charbonnier", "nll", "brier")}
    for name in scores:
        others = [scores[other][name] for other in scores if other != name]
        assert scores[name][name] <= min(others) + 2e-4
    nll = -log_softmax(logits, axis=1)[np.arange(len(labels)), labels].mean()
    assert scores["nll"]["nll"] < nll


@pytest.mark.parametrize("options", [dict(hidden=(16, 16)), dict(objective="nll"), dict(signal="entropy")], ids=str)
def test_adam_trains_every_variant(options, data):
    start, end = (fit(*data, solver="adam", max_iter=limit, **options) for limit in (1, 60))
    assert end.objective_ < start.objective_
    assert learned(end) == learned(fit(*data, solver="adam", max_iter=60, **options))


def test_adam_draws_every_layer_as_torch_does():
    logits, labels = sharpened(n=60)
    starts = [fit(logits, labels, solver="adam", hidden=(4, 9), max_iter=1, seed=seed) for seed in range(30)]
    for name, bound in [("hidden_weight_", 1), ("hidden_bias_", 1), ("second_hidden_weight_", 1 / 2),
                        ("second_hidden_bias_", 1 / 2), ("output_weight_", 1 / 3),
                        ("output_bias_", 1 / 3)]:  # fmt: skip
        values = np.abs(np.hstack([np.ravel(getattr(smart, name)) for smart in starts]))
        assert 0.8 * bound < values.max() <= bound
        assert values.mean() == pytest.approx(bound / 2, abs=0.15 * bound)


def test_a_refit_with_one_layer_forgets_the_second(data):
    smart = fit(*data, hidden=(4, 4), max_iter=2)
    smart.set_params(hidden=(16,), max_iter=None)
    assert learned(smart.fit(*data)) == learned(fit(*data))


def test_softece_is_charbonnier_without_smoothing(data):
    smart = fit(*data, objective="softece")
    correct = data[0].argmax(axis=1) == data[1]
    assert smart.objective_ == pytest.approx(
        soft_ece(confidence(data[0], smart.temperatures(data[0])), correct, delta=0)
    )
    assert learned(smart) == learned(fit(*data, objective="charbonnier", delta=0.0))


# --- settings and warnings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, words",
    [
        (dict(objective="mse"), "objective must be one of 'charbonnier', 'softece', 'nll', 'brier', got 'mse'"),
        (dict(signal="norm"), "signal must be one of 'margin', .*, got 'norm'"),
        (dict(hidden=16), r"hidden must hold the widths of one or two hidden layers, for instance \(16,\), got 16"),
        (dict(hidden=()), "hidden must hold"),
        (dict(hidden=(4, 4, 4)), "hidden must hold"),
        (dict(hidden=(0,)), "hidden must hold"),
        (dict(hidden=(2.0,)), "hidden must hold"),
        (dict(hidden=(True,)), "hidden must hold"),
        (dict(hidden="16"), "hidden must hold"),
    ],
    ids=str,
)
def test_settings_outside_their_range_are_refused(settings, words, data):
    with pytest.raises(ValueError, match=words):
        SMART(**settings).fit(*data)


def test_a_signal_that_the_logits_have_lost_is_reported():
    """The maximum of z - max z is 0 in every row."""
    logits, labels = sharpened()
    lost = logits - logits.max(axis=1, keepdims=True)
    smart, caught = recorded(lambda: SMART(signal="max_logit").fit(lost, labels))
    assert [text for _, text in caught if "all maximum logits are equal" in text]
    np.testing.assert_allclose(smart.temperatures(lost), smart.temperatures(lost)[0], rtol=1e-12)


@pytest.mark.parametrize("signal, plural", [("entropy", "entropies"), ("confidence", "confidences")])
def test_values_outside_the_fitted_range_are_reported_by_the_name_of_the_signal(signal, plural, data):
    logits, labels = data
    smart = fit(logits[:, :3], np.minimum(labels, 2), signal=signal)
    tied = np.zeros((5, 3))
    _, caught = recorded(lambda: smart.temperatures(tied))
    assert [text for _, text in caught] and f"SMART: 100.0% of the {plural} lie outside the fitted range" in caught[0][
        1
    ]


@pytest.mark.parametrize("signal", ["margin", "soft_tail_margin"])
@pytest.mark.parametrize("mask", [-np.inf, -1e4, -1e9, -3e38])
def test_rows_with_a_single_class_do_not_move_the_map_whatever_masks_the_others(signal, mask, data):
    logits, labels = data
    alone = np.full((40, 5), mask)
    alone[:, 0] = 1.0
    masked = np.concatenate([logits, alone]), np.concatenate([labels, np.zeros(40, int)])
    smart, reference = fit(*masked, signal=signal), fit(*data, signal=signal)
    assert smart.margin_range_ == reference.margin_range_
    assert smart.margin_std_ == pytest.approx(reference.margin_std_, rel=1e-12)
    t, _ = recorded(lambda: smart.temperatures(masked[0]))
    np.testing.assert_allclose(t[:400], fit(*masked_by_inf(masked), signal=signal).temperatures(logits), rtol=1e-4)
    np.testing.assert_allclose(t[400:], smart.temperature_map(smart.margin_range_[1])[0], rtol=1e-12)


def masked_by_inf(masked):
    return np.where(masked[0] < -1e3, -np.inf, masked[0]), masked[1]


@pytest.mark.parametrize("variant_name", ["321", "nll", "brier", "entropy", "energy"])
@pytest.mark.parametrize(
    "logits, labels",
    [
        ([[2.0, 0.0, 1.0]], [0]),
        ([[2.0, 0.0, 1.0]], [1]),
        ([[2.0, 2.0, 2.0]] * 4, [0, 1, 2, 0]),
        ([[5.0, 0.0, 0.0], [0.0, 5.0, 0.0]], [0, 1]),
        ([[2.0, -np.inf, -np.inf], [1.0, 0.0, -np.inf], [0.0, 1.0, 3.0]], [0, 1, 2]),
        (np.array([[2.0, 0.0, 1.0], [0.0, 1.0, 2.0], [3.0, 1.0, 0.0]]) * 1e5, [0, 1, 1]),
        (np.array([[2.0, 0.0, 1.0], [0.0, 1.0, 2.0], [3.0, 1.0, 0.0]], np.float32) * np.float32(1e30), [0, 1, 1]),
    ],
    ids=["one-right", "one-wrong", "ties", "all-right", "masked", "large", "huge"],
)  # fmt: skip
def test_degenerate_data_have_a_finite_fit_and_a_warning(variant_name, logits, labels):
    smart, caught = recorded(lambda: SMART(**VARIANTS[variant_name]).fit(logits, labels))
    assert caught
    t, _ = recorded(lambda: smart.temperatures(logits))
    probs, _ = recorded(lambda: smart.predict_proba(logits))
    assert np.isfinite(t).all() and (t >= 0.1).all() and np.isfinite(smart.objective_)
    assert np.isfinite(probs).all()
    np.testing.assert_array_equal(probs.argmax(axis=1), np.argmax(logits, axis=1))
