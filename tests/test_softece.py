"""Charbonnier-SoftECE: hand values, its gradient against two independent ones, and the chain of bounds."""

import tracemalloc
from math import exp, sqrt

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smartlib import arrays
from smartlib.softece import (
    Certificate,
    bin_centres,
    certificate,
    kernel_error,
    soft_ece,
    soft_ece_and_gradient,
    soft_weights,
)


def sample(n, seed=0):
    rng = np.random.default_rng(seed)
    return rng.uniform(0.1, 1, n), rng.integers(0, 2, n).astype(float)


def by_the_definition(confidence, correct, n_bins, bandwidth, delta):
    """Sums over samples and bins as the formula is printed; no vectorisation, no shift of exponents."""
    centres = [(b + 0.5) / n_bins for b in range(n_bins)]
    mass, gap = [0.0] * n_bins, [0.0] * n_bins
    for f, a in zip(confidence, correct, strict=True):
        kernel = [exp(-((f - mu) ** 2) / (2 * bandwidth**2)) for mu in centres]
        for b in range(n_bins):
            mass[b] += kernel[b] / sum(kernel) / len(confidence)
            gap[b] += kernel[b] / sum(kernel) * (a - f) / len(confidence)
    return sum(p * sqrt((s / p) ** 2 + delta**2) for p, s in zip(mass, gap, strict=True))


def by_torch(f, a, n_bins, bandwidth, delta):
    """The objective with plain torch operations, to be differentiated by autograd."""
    centres = (torch.arange(n_bins, dtype=torch.float64) + 0.5) / n_bins
    w = torch.softmax(-(f[:, None] - centres).square() / (2 * bandwidth**2), dim=1)
    mass = w.sum(dim=0) / len(f)
    mean_gap = (w * (a - f)[:, None]).sum(dim=0) / len(f) / mass
    return (mass * (mean_gap.square() + delta**2).sqrt()).sum()


# --- hand values ------------------------------------------------------------------------------------------------


def test_bin_centres_are_the_middles_of_equal_bins():
    np.testing.assert_allclose(bin_centres(4), [0.125, 0.375, 0.625, 0.875], rtol=1e-15)


@pytest.mark.parametrize("delta", [0.0, 1e-3, 0.3])
def test_one_bin_is_the_smoothed_absolute_mean_gap(delta):
    """Mean of A − f = (.1 − .8 + .4) / 3 = −.1, whatever the bandwidth."""
    for bandwidth in (0.01, 10.0):
        value = soft_ece([0.9, 0.8, 0.6], [1, 0, 1], n_bins=1, bandwidth=bandwidth, delta=delta)
        assert value == pytest.approx(sqrt(0.1**2 + delta**2), rel=1e-13)


def test_two_bins_by_hand():
    """Centres .25 and .75. At f = .75 the kernels are 1 and e^(−1/2) with λ = .5; at f = .5 the bins share equally.

    w(.75) = (1 − u, u), u = 1 / (1 + e^(−1/2)); A − f is .25 and −.5. gap_2 = (.25 u − .25) / 2 and so on.
    """
    u = 1 / (1 + exp(-0.5))
    gaps = [(0.25 * (1 - u) - 0.25) / 2, (0.25 * u - 0.25) / 2]
    masses = [((1 - u) + 0.5) / 2, (u + 0.5) / 2]
    assert soft_ece([0.75, 0.5], [1, 0], n_bins=2, bandwidth=0.5, delta=0) == pytest.approx(-sum(gaps), rel=1e-14)
    smoothed = sum(sqrt(s**2 + (0.1 * p) ** 2) for s, p in zip(gaps, masses, strict=True))
    assert soft_ece([0.75, 0.5], [1, 0], n_bins=2, bandwidth=0.5, delta=0.1) == pytest.approx(smoothed, rel=1e-14)


def test_a_narrow_kernel_gives_the_hard_binned_error():
    """Bins of width .1; in bin (.6, .7]: |.65 − 1/2| with mass 1/2, in (.9, 1]: |.95 − 1| and mass 1/2."""
    confidence, correct = [0.62, 0.68, 0.93, 0.97], [1, 0, 1, 1]
    assert soft_ece(confidence, correct, n_bins=10, bandwidth=1e-3, delta=0) == pytest.approx(0.1, rel=1e-12)


@pytest.mark.parametrize("n_bins, bandwidth, delta", [(15, 0.05, 1e-3), (2, 0.2, 0.1), (40, 0.03, 0.0), (7, 1.0, 1e-3)])
def test_agrees_with_the_definition_written_out(n_bins, bandwidth, delta):
    f, a = sample(40)
    expected = by_the_definition(f, a, n_bins, bandwidth, delta)
    assert soft_ece(f, a, n_bins, bandwidth, delta) == pytest.approx(expected, rel=1e-12)
    assert soft_ece_and_gradient(f, a, n_bins, bandwidth, delta)[0] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("bandwidth", [1e-6, 1e-3, 0.05, 1e3])
def test_soft_weights_sum_to_one_however_narrow_the_kernel(bandwidth):
    w = soft_weights(np.linspace(0, 1, 101), 15, bandwidth)
    np.testing.assert_allclose(w.sum(axis=1), 1, rtol=1e-14)
    assert w.min() >= 0


# --- gradient ---------------------------------------------------------------------------------------------------

SETTINGS = [(15, 0.05, 1e-3), (1, 0.05, 1e-3), (5, 0.5, 0.2), (40, 0.02, 1e-4), (15, 0.05, 0.0)]


@pytest.mark.parametrize("n_bins, bandwidth, delta", SETTINGS)
def test_gradient_equals_that_of_autograd(n_bins, bandwidth, delta):
    f, a = sample(60, seed=1)
    tensor = torch.tensor(f, requires_grad=True)
    value = by_torch(tensor, torch.tensor(a), n_bins, bandwidth, delta)
    value.backward()
    ours, gradient = soft_ece_and_gradient(f, a, n_bins, bandwidth, delta)
    assert ours == pytest.approx(value.item(), rel=1e-12)
    np.testing.assert_allclose(gradient, tensor.grad.numpy(), rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("n_bins, bandwidth, delta", SETTINGS)
def test_gradient_equals_finite_differences(n_bins, bandwidth, delta):
    f, a = sample(12, seed=2)
    gradient = soft_ece_and_gradient(f, a, n_bins, bandwidth, delta)[1]
    step = 1e-6
    for i in range(len(f)):
        moved = step * (np.arange(len(f)) == i)
        up, down = (soft_ece(f + sign * moved, a, n_bins, bandwidth, delta) for sign in (1, -1))
        assert gradient[i] == pytest.approx((up - down) / (2 * step), abs=1e-7)


def test_gradient_is_zero_and_finite_where_all_gaps_vanish():
    f = np.array([1.0, 1.0])
    value, gradient = soft_ece_and_gradient(f, np.array([1.0, 1.0]), 15, 1e-3, 0.0)
    assert value == 0
    assert gradient.tolist() == [0, 0]


# --- invariants -------------------------------------------------------------------------------------------------

samples = st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=30)


@given(samples, st.integers(1, 30), st.floats(0.005, 2), st.floats(0, 0.5))
def test_value_lies_between_delta_and_the_mean_absolute_gap_plus_delta(pairs, n_bins, bandwidth, delta):
    f, a = np.array(pairs, dtype=float).T
    value = soft_ece(f, a, n_bins, bandwidth, delta)
    assert value >= delta * (1 - 1e-12)
    assert abs(np.mean(a - f)) - 1e-12 <= value <= np.mean(np.abs(a - f)) + delta + 1e-12


@given(samples, st.integers(1, 40), st.floats(0.005, 1), st.floats(0, 0.1))
@settings(max_examples=60)
def test_the_chain_of_bounds_holds_for_every_sample(pairs, n_bins, bandwidth, delta):
    f, a = np.array(pairs, dtype=float).T
    c = certificate(f, a, n_bins, bandwidth, delta)
    assert isinstance(c, Certificate)
    assert 0 <= c.smce <= c.bound + 1e-12
    assert c.bound <= c.soft_ece + c.kernel_error + 1e-9
    assert c.soft_ece + c.kernel_error <= c.paper_bound
    assert c.paper_bound == c.soft_ece + 2 * c.kernel_error
    assert c.soft_ece == soft_ece(f, a, n_bins, bandwidth, delta)
    assert c.kernel_error == kernel_error(n_bins, bandwidth)


def test_the_bound_is_the_formula_of_theorem_3_prime():
    """One bin: H + E[|A − f| |f − 1/2|]."""
    f, a = np.array([0.9, 0.6, 0.7]), np.array([1, 0, 1])
    expected = abs((0.1 - 0.6 + 0.3) / 3) + (0.1 * 0.4 + 0.6 * 0.1 + 0.3 * 0.2) / 3
    assert certificate(f, a, n_bins=1, delta=0.5).bound == pytest.approx(expected, rel=1e-13)


@given(samples)
def test_order_does_not_matter(pairs):
    f, a = np.array(pairs, dtype=float).T
    assert soft_ece(f[::-1], a[::-1]) == pytest.approx(soft_ece(f, a), rel=1e-12)


# --- kernel error -----------------------------------------------------------------------------------------------


def test_kernel_error_at_the_papers_settings():
    assert kernel_error(15, 0.05) == pytest.approx(0.0435, abs=5e-5)


@pytest.mark.parametrize("n_bins", [1, 2, 15, 40])
def test_kernel_error_tends_to_half_a_bin_as_the_kernel_narrows(n_bins):
    assert kernel_error(n_bins, 1e-4) == pytest.approx(1 / (2 * n_bins), rel=1e-9)


def test_kernel_error_grows_with_the_bandwidth_and_has_the_limit_of_equal_weights():
    errors = [kernel_error(15, bandwidth) for bandwidth in (0.01, 0.02, 0.05, 0.1, 0.3, 1.0, 1e4)]
    assert errors == sorted(errors)
    assert errors[-1] == pytest.approx(0.5, rel=1e-6)  # at v = 0: the mean of the centres


@pytest.mark.parametrize("n_bins, bandwidth", [(15, 0.05), (3, 0.1), (15, 0.015), (30, 0.2)])
def test_kernel_error_is_the_supremum_over_a_fine_grid(n_bins, bandwidth):
    v = np.linspace(0, 1, 200_001)
    largest = (soft_weights(v, n_bins, bandwidth) * np.abs(v[:, None] - bin_centres(n_bins))).sum(axis=1).max()
    assert largest - 1e-12 <= kernel_error(n_bins, bandwidth) <= largest + 1e-8


# --- memory, settings, kinds ------------------------------------------------------------------------------------


@pytest.mark.parametrize("numbers", [1, 30, 150, 151])
def test_many_chunks_give_what_one_gives(numbers, monkeypatch):
    f, a = sample(101, seed=3)
    at_once = certificate(f, a)
    monkeypatch.setattr(arrays, "_CHUNK_NUMBERS", numbers)
    assert len(list(arrays.row_chunks(101, 15))) > 9
    in_chunks = certificate(f, a)
    assert in_chunks.soft_ece == pytest.approx(at_once.soft_ece, rel=1e-13)
    assert in_chunks.bound == pytest.approx(at_once.bound, rel=1e-13)


def test_memory_stays_a_small_multiple_of_the_input(monkeypatch):
    """The weights of 15 bins at once would be 7.5 times the two input arrays."""
    f, a = sample(100_000)
    soft_ece(f[:10], a[:10])
    monkeypatch.setattr(arrays, "_CHUNK_NUMBERS", 2**14)
    tracemalloc.start()
    try:
        soft_ece(f, a)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 * (f.nbytes + a.nbytes)


@pytest.mark.parametrize("function", [soft_ece, certificate])
@pytest.mark.parametrize(
    "wrong, words",
    [
        (dict(n_bins=0), "n_bins must be a whole number of at least 1, got 0"),
        (dict(n_bins=2.5), "n_bins must be a whole number of at least 1, got 2.5"),
        (dict(bandwidth=0), "bandwidth must be positive and finite, got 0"),
        (dict(bandwidth=np.inf), "bandwidth must be positive and finite, got inf"),
        (dict(bandwidth=np.nan), "bandwidth must be positive and finite, got nan"),
        (dict(delta=-1e-3), "delta must be non-negative and finite, got -0.001"),
        (dict(delta=np.nan), "delta must be non-negative and finite, got nan"),
    ],
    ids=str,
)
def test_settings_outside_their_range_are_refused(function, wrong, words):
    with pytest.raises(ValueError) as error:
        function([0.5], [1], **wrong)
    assert str(error.value) == words


def test_tensors_give_the_same_value():
    f, a = sample(30)
    tensors = torch.tensor(f, requires_grad=True), torch.tensor(a).bool()
    assert soft_ece(*tensors) == soft_ece(f, a)
    assert certificate(*tensors) == certificate(f, a)
