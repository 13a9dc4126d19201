"""The solver: it finds minima, keeps to its stopping rule, and its path does not depend on last digits."""

import numpy as np
import pytest
from scipy.optimize import minimize, rosen, rosen_der

from smartlib.calibrators.lbfgs import minimise_lbfgs, rounded


def rosenbrock(x):
    return float(rosen(x)), rosen_der(x)


def never(values):
    return False


def test_it_finds_the_minimum_that_scipy_finds():
    start = np.array([-1.2, 1.0])
    end, values, converged = minimise_lbfgs(rosenbrock, start, max_iter=200, is_done=lambda v: v[-1] < 1e-10)
    reference = minimize(rosen, start, jac=rosen_der, method="L-BFGS-B")
    assert converged and len(values) < 3 * reference.nit
    np.testing.assert_allclose(end, 1, atol=1e-4)
    np.testing.assert_allclose(reference.x, 1, atol=1e-4)
    assert values[0] == pytest.approx(rosen(start), rel=1e-6)
    assert np.all(np.diff(values) <= 0)


def test_the_path_survives_noise_in_the_last_digits():
    """Noise of 1e-15 on every value and gradient, new in each evaluation: the very same end after 40 iterations."""

    def noisy(seed):
        rng = np.random.default_rng(seed)

        def objective(x):
            value, gradient = rosenbrock(x)
            return value * (1 + 1e-15 * rng.standard_normal()), gradient * (1 + 1e-15 * rng.standard_normal(len(x)))

        return objective

    start = np.linspace(-1.5, 1.5, 20)
    ends = [minimise_lbfgs(noisy(seed), start, max_iter=40, is_done=never)[0] for seed in range(5)]
    assert all(np.array_equal(end, ends[0]) for end in ends)
    # scipy's solver, for comparison, has turned the same noise into differences a thousand times as large and more.
    others = [minimize(noisy(seed), start, jac=True, method="L-BFGS-B", options={"maxiter": 40}).x for seed in range(5)]
    assert np.ptp(others, axis=0).max() > 1e-12


def test_it_stops_by_the_rule_the_limit_and_without_a_gradient():
    start = np.array([-1.2, 1.0])
    for limit in (1, 7):
        _, values, converged = minimise_lbfgs(rosenbrock, start, max_iter=limit, is_done=never)
        assert len(values) == limit + 1 and not converged
    _, values, converged = minimise_lbfgs(rosenbrock, start, max_iter=50, is_done=lambda v: len(v) == 4)
    assert len(values) == 4 and converged
    end, values, converged = minimise_lbfgs(rosenbrock, np.ones(2), max_iter=50, is_done=never)
    assert converged and values == [0.0] and np.array_equal(end, [1, 1])


def test_no_step_to_be_found_is_the_end():
    """A gradient of the wrong sign: no step along it lowers the value."""
    end, values, converged = minimise_lbfgs(lambda x: (float(x @ x), -2 * x), np.ones(2), max_iter=9, is_done=never)
    assert converged and len(values) == 1 and np.array_equal(end, [1, 1])


def test_rounding_keeps_24_binary_digits_of_the_largest():
    values = np.array([1.0, 1 / 3, 1e-9, -2 / 3])
    np.testing.assert_allclose(rounded(values), values, atol=2.0**-25)
    assert rounded(values)[2] == 0 and rounded(0.0) == 0
    np.testing.assert_array_equal(rounded(rounded(values)), rounded(values))
    np.testing.assert_array_equal(rounded(values * 2.0**40), rounded(values) * 2.0**40)
