"""What surrounds the certificate: the chain and its converse on arbitrary samples, the blind spot, the population."""

from itertools import product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from smartlib.bounds import (
    certificate_grid,
    lipschitz_constant,
    optimal_witness,
    population_bound,
    unseen_miscalibration,
)
from smartlib.plots import monotone_fit, monotone_plot
from smartlib.smce import smce_of, smooth_calibration_error
from smartlib.softece import bin_centres, kernel_error, soft_ece, soft_weights

CHAIN = ["smce", "bound", "bound_mean", "bound_sup", "paper_bound"]
samples = st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=30)


def random_sample(n, seed=0):
    rng = np.random.default_rng(seed)
    f = rng.beta(4, 2, n)
    return f, (rng.random(n) < f**1.5).astype(float)


# --- the chain --------------------------------------------------------------------------------------------------


@given(samples, st.integers(1, 40), st.floats(0.005, 1), st.floats(0, 0.1))
@settings(max_examples=60)
def test_every_link_of_the_chain_holds(pairs, n_bins, bandwidth, delta):
    f, a = np.array(pairs, dtype=float).T
    row = certificate_grid(f, a, n_bins=[n_bins], bandwidths=[bandwidth], deltas=[delta]).iloc[0]
    assert np.all(np.diff(row[CHAIN]) >= -1e-9)
    assert row["plain"] <= row["soft_ece"] + 1e-12 <= row["plain"] + delta + 2e-12


@pytest.mark.parametrize("half", [0.1, 0.25, 0.4])
def test_theorem_3_prime_is_attained(half):
    """One bin and two samples at 1/2 ± x, right below and wrong above: H = 0, and smCE = x (1/2 + x) = the bound."""
    row = certificate_grid([0.5 - half, 0.5 + half], [1, 0], n_bins=[1]).iloc[0]
    assert row["plain"] == pytest.approx(0, abs=1e-15)
    assert row["smce"] == pytest.approx(half * (0.5 + half), rel=1e-12)
    assert row["bound"] == pytest.approx(row["smce"], rel=1e-12)


def test_the_terms_are_what_their_names_say():
    """Two bins, centres .25 and .75, λ = .5; at f = .5 the bins share equally and β = .25, at .75 as computed."""
    f, a = np.array([0.75, 0.5]), np.array([1.0, 0.0])
    far = 1 / (1 + np.exp(0.5))  # the weight of the centre .25 at f = .75
    gaps = np.array([far * 0.25 - 0.25, (1 - far) * 0.25 - 0.25]) / 2
    plain = np.abs(gaps).sum()
    row = certificate_grid(f, a, n_bins=[2], bandwidths=[0.5], deltas=[0.1]).iloc[0]
    assert row["plain"] == pytest.approx(plain, rel=1e-12)
    assert row["bound"] == pytest.approx(plain + (0.25 * far * 0.5 + 0.5 * 0.25) / 2, rel=1e-12)
    assert row["bound_mean"] == pytest.approx(plain + kernel_error(2, 0.5) * 0.375, rel=1e-12)
    assert row["bound_sup"] == pytest.approx(soft_ece(f, a, 2, 0.5, 0.1) + kernel_error(2, 0.5), rel=1e-12)


def test_the_grid_has_one_row_for_each_combination():
    f, a = random_sample(50)
    table = certificate_grid(f, a, n_bins=(5, 15), bandwidths=iter([0.02, 0.05]), deltas=iter([0.0, 0.1, 0.2]))
    settings_of_rows = list(table[["n_bins", "bandwidth", "delta"]].itertuples(index=False, name=None))
    assert settings_of_rows == list(product((5, 15), (0.02, 0.05), (0.0, 0.1, 0.2)))
    assert table["smce"].nunique() == 1
    assert table.groupby(["n_bins", "bandwidth"])["bound"].nunique().eq(1).all(), "delta is not in it"


# --- the converse -----------------------------------------------------------------------------------------------


def steepest_combination(n_bins, bandwidth):
    """The largest difference quotient of Σ σ_b w_b over all signs σ, on a fine grid."""
    v = np.linspace(0, 1, 20_001)
    w = soft_weights(v, n_bins, bandwidth)
    signs = np.array(list(product((-1, 1), repeat=n_bins)))
    return np.abs(np.diff(w @ signs.T, axis=0)).max() * (len(v) - 1)


@pytest.mark.parametrize("n_bins, bandwidth", [(1, 0.1), (2, 0.3), (3, 0.05), (4, 0.12), (6, 0.05), (8, 0.03)])
def test_lipschitz_constant_is_that_of_the_steepest_signed_sum_of_weights(n_bins, bandwidth):
    expected = steepest_combination(n_bins, bandwidth)
    value = lipschitz_constant(n_bins, bandwidth)
    assert expected - 1e-9 <= value <= expected * (1 + 1e-5)


def test_lipschitz_constant_at_the_papers_settings():
    assert lipschitz_constant() == pytest.approx(17.4, abs=0.05)


@pytest.mark.parametrize("n_bins, bandwidth", [(15, 0.05), (15, 0.005), (40, 0.3), (7, 0.02), (2, 1.0)])
def test_lipschitz_constant_is_the_supremum_over_a_fine_grid(n_bins, bandwidth):
    v, centres = np.linspace(0, 1, 210_001), bin_centres(n_bins)
    w = soft_weights(v, n_bins, bandwidth)
    largest = (w * np.abs(centres - (w @ centres)[:, None])).sum(axis=1).max() / bandwidth**2
    assert lipschitz_constant(n_bins, bandwidth) == pytest.approx(largest, rel=1e-6)


@pytest.mark.parametrize("n_bins", [2, 15])
def test_lipschitz_constant_of_a_narrow_kernel(n_bins):
    """Half-way between two centres, which then share the weight: (1 / (2M)) / λ²."""
    assert lipschitz_constant(n_bins, 0.004) == pytest.approx(1 / (2 * n_bins * 0.004**2), rel=1e-6)


@given(samples, st.integers(1, 40), st.floats(0.005, 1))
@example([(0.5 + 1 / 60 + 1e-4, True), (0.5 + 1 / 60 - 1e-4, False)], 30, 0.005)
@settings(max_examples=60)
def test_soft_ece_is_at_most_the_constant_times_smce(pairs, n_bins, bandwidth):
    f, a = np.array(pairs, dtype=float).T
    constant = max(1.0, lipschitz_constant(n_bins, bandwidth))
    assert soft_ece(f, a, n_bins, bandwidth, 0.0) <= constant * smooth_calibration_error(f, a) * (1 + 1e-9) + 1e-12


def test_the_constant_cannot_be_left_out():
    """Opposite residuals at nearly the same confidence, between two centres: only a steep function tells them apart."""
    f, a = [1 / 2 - 0.004, 1 / 2 + 0.004], [1, 0]
    assert soft_ece(f, a, 2, 0.02, 0.0) > 5 * smooth_calibration_error(f, a)


# --- the blind spot ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "n_bins, bandwidth, equal_masses, at_least",
    [
        (15, 0.05, True, 0.005),
        (15, 0.05, False, 0.01),
        (15, 0.03, True, 0.003),
        (6, 0.1, True, 0.01),
        (1, 0.1, True, 0.1),
    ],
)
def test_unseen_miscalibration_is_there_and_unseen(n_bins, bandwidth, equal_masses, at_least):
    unseen = unseen_miscalibration(n_bins, bandwidth, n_confidences=120, equal_masses=equal_masses)
    v, p, r = unseen.confidence, unseen.mass, unseen.accuracy
    assert np.all(np.diff(v) > 0) and v[0] > 0 and v[-1] < 1
    assert p.min() > 0 and p.sum() == pytest.approx(1, abs=1e-13)
    assert r.min() >= 0 and r.max() <= 1
    kernel = np.exp(-((v[:, None] - (np.arange(n_bins) + 0.5) / n_bins) ** 2) / (2 * bandwidth**2))
    seen = (p * (r - v)) @ (kernel / kernel.sum(axis=1, keepdims=True))
    assert np.abs(seen).sum() < 1e-12
    # The exact solver takes samples of equal mass; only the products p (r − v) matter, so we hand it these.
    exact = smce_of(v, v + len(v) * p * (r - v))
    assert exact == pytest.approx(unseen.smce, abs=1e-9)
    assert exact > at_least
    beta = (soft_weights(v, n_bins, bandwidth) * np.abs(v[:, None] - bin_centres(n_bins))).sum(axis=1)
    mean_abs_gap = p * (r * (1 - v) + (1 - r) * v)  # E|A − f| with A drawn, not |r − v|
    assert exact <= mean_abs_gap @ beta, "Theorem 3′ with H = 0"


def test_equal_masses_are_equal():
    unseen = unseen_miscalibration(5, 0.1, n_confidences=40)
    np.testing.assert_allclose(unseen.mass, 1 / 40, rtol=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_the_witness_is_feasible_and_attains_smce(seed):
    f, a = random_sample(80, seed)
    order = np.argsort(f)
    v, residual = f[order], (a - f)[order] / len(f)
    w = optimal_witness(v, residual)
    assert np.abs(w).max() <= 1 + 1e-9
    assert np.all(np.abs(np.diff(w)) <= np.diff(v) + 1e-9)
    assert residual @ w == pytest.approx(smooth_calibration_error(f, a), abs=1e-9)


def test_the_witness_of_one_confidence_is_the_sign():
    assert optimal_witness(np.array([0.4]), np.array([-0.1])).tolist() == [-1]


# --- the population ---------------------------------------------------------------------------------------------


def test_deviations_by_hand():
    """n = 50, α = .1, half of the residuals ± .5, half ± .1: V = 50 · .13 / 49."""
    f = np.r_[np.full(25, 0.5), np.full(25, 0.9)]
    b = population_bound(f, np.r_[np.zeros(25), np.ones(25)], alpha=0.1)
    assert b.hoeffding == pytest.approx(np.sqrt(2 * np.log(10) / 50), rel=1e-13)
    variance, log = 50 * 0.13 / 49, np.log(20)
    assert b.bernstein == pytest.approx(np.sqrt(2 * variance * log / 50) + 14 * log / (3 * 49), rel=1e-13)
    assert b.smce == smooth_calibration_error(f, np.r_[np.zeros(25), np.ones(25)])
    assert b.smce <= b.bound


def test_one_sample_gives_no_variance():
    assert population_bound([0.5], [1]).bernstein == np.inf


@pytest.mark.parametrize("alpha", [0, 1, -0.1, np.nan])
def test_alpha_outside_its_range_is_refused(alpha):
    with pytest.raises(ValueError, match=r"alpha must lie in \(0, 1\)"):
        population_bound([0.5], [1], alpha=alpha)


pairs = st.tuples(st.floats(0, 1), st.booleans())


@given(samples, pairs, pairs, st.integers(1, 20), st.floats(0.01, 1))
@settings(max_examples=60)
def test_one_sample_changes_each_quantity_by_no_more_than_its_bounded_difference(rest, one, other, n_bins, bandwidth):
    """2/n for smCE and H, (2 + B)/n for H + E|A − f| β: the constants in the deviations."""
    n = len(rest) + 1
    (f, a), (g, c) = (np.array([*rest, pair], dtype=float).T for pair in (one, other))
    before, after = (certificate_grid(*x, n_bins=[n_bins], bandwidths=[bandwidth]).iloc[0] for x in ((f, a), (g, c)))
    assert abs(before["smce"] - after["smce"]) <= 2 / n + 1e-12
    assert abs(before["plain"] - after["plain"]) <= 2 / n + 1e-12
    assert abs(before["bound"] - after["bound"]) <= (2 + before["kernel_error"]) / n + 1e-12


def test_two_over_n_is_attained():
    """Among many right predictions at .99, replace one that was sure and wrong by one at 0 that was right."""
    f, a = np.full(1001, 0.99), np.ones(1001)
    f[0], a[0] = 1.0, 0.0
    g = f.copy()
    g[0] = 0.0
    b = np.ones(1001)
    assert soft_ece(g, b, delta=0) - soft_ece(f, a, delta=0) == pytest.approx(2 / 1001, rel=1e-12)
    assert smooth_calibration_error(g, b) - smooth_calibration_error(f, a) == pytest.approx(1.99 / 1001, rel=1e-9)


@pytest.mark.parametrize("n, alpha", [(30, 0.3), (300, 0.05)])
def test_coverage(n, alpha):
    """A population of 200 equally likely confidences with known accuracies, so that its smCE is exact."""
    rng = np.random.default_rng(0)
    v = np.sort(rng.beta(5, 1.5, 200))
    r = v**1.6
    truth = smce_of(v, r)
    held = {"hoeffding": 0, "bernstein": 0}
    for _ in range(300):
        drawn = rng.integers(0, 200, n)
        b = population_bound(v[drawn], rng.random(n) < r[drawn], alpha=alpha)
        for name in held:
            held[name] += truth <= b.smce + getattr(b, name)
    assert all(count / 300 >= 1 - alpha for count in held.values())


@pytest.mark.parametrize("sign", [1, -1])
def test_hoeffding_cannot_be_halved(sign):
    """Residuals of 1 and −1, equally likely, are the worst case: they pass half the deviation more often than α."""
    rng = np.random.default_rng(1)
    deviation = population_bound([0.5] * 400, [1] * 400).hoeffding
    means = rng.choice([-1.0, 1.0], (4000, 400)).mean(axis=1)
    assert np.mean(sign * means > deviation) <= 0.05 < np.mean(sign * means > deviation / 2)


# --- the picture ------------------------------------------------------------------------------------------------


@given(samples)
@example([(0.5, True), (0.5, False)])
@example([(1.0, True)])
def test_the_picture_shows_the_exact_value(pairs):
    """Last value plus shaded area, by pooling with weighted medians, is what the one-heap algorithm gives."""
    f, a = np.array(pairs, dtype=float).T
    v, s, d = monotone_fit(f, a)
    assert np.all(np.diff(d) >= -1e-15) and d[0] >= 0 and d[-1] == s[-1]
    value = s[-1] + np.diff(v) @ np.abs(s - d)[:-1]
    assert value == pytest.approx(smooth_calibration_error(f, a), abs=1e-12)


def test_the_shaded_area_is_between_the_two_curves():
    f, a = random_sample(40)
    ax = monotone_plot(f, a)
    _, s, d = monotone_fit(f, a)
    curves = {line.get_label(): line.get_ydata() for line in ax.lines}
    np.testing.assert_array_equal(curves["cumulative residual S"][1:-1], s)
    np.testing.assert_array_equal(curves["best monotone fit D"][1:-1], d)
    assert len(ax.collections) == 1
