"""L-BFGS with the same path on every machine.

The last digits of sums, of exponentials and of matrix products differ between processors and numbers of threads. A
quasi-Newton method amplifies them from step to step, so that after thirty steps the first digits of the result may
differ. Here every point, value and gradient is rounded to 24 binary digits before it is used again. That is far finer
than any stopping rule, and far coarser than the differences, which therefore vanish each time.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable

import numpy as np
from scipy.optimize import line_search

MEMORY = 10
# Below this, a step of unit length gains nothing that a value near one could show.
GRADIENT_LIMIT = 1e-14


def minimise_lbfgs(
    objective: Callable[[np.ndarray], tuple[float, np.ndarray]],
    start: np.ndarray,
    *,
    max_iter: int,
    is_done: Callable[[list[float]], bool],
) -> tuple[np.ndarray, list[float], bool]:
    """Minimise a function of n parameters.

    Args:
        objective: (n,) to the value and its gradient (n,).
        start: (n,).
        max_iter: limit of the iterations.
        is_done: the stopping rule, given the values at the start and after each iteration.

    Returns:
        ``(end, values, converged)``: (n,); the values at the start and after each iteration, never rising; False where
        ``max_iter`` ended it. Where no step along the gradient lowers the value, that counts as converged.

    Source: Nocedal and Wright, Numerical Optimization, 2nd edition, algorithm 7.4; the line search is scipy's (strong
        Wolfe conditions); the rounding is ours.

    >>> def fourth_power(x):
    ...     return float((x**4).sum()), 4 * x**3
    >>> end, values, converged = minimise_lbfgs(
    ...     fourth_power, np.array([1.0, -2.0]), max_iter=50, is_done=lambda values: values[-1] < 1e-6
    ... )
    >>> bool(abs(end).max() < 0.05), converged
    (True, True)
    """
    last: dict[str, object] = {"at": None}

    def evaluate(x: np.ndarray) -> tuple[float, np.ndarray]:
        x = rounded(x)
        if last["at"] is None or not np.array_equal(last["at"], x):  # the line search asks for both parts separately
            value, gradient = objective(x)
            last.update(at=x, value=float(rounded(value)), gradient=rounded(gradient))
        return last["value"], last["gradient"]

    x = rounded(start)
    value, gradient = evaluate(x)
    values, before, pairs = [value], None, deque(maxlen=MEMORY)
    for _ in range(max_iter):
        if np.abs(gradient).max() < GRADIENT_LIMIT:
            return x, values, True
        direction = -_quasi_newton(gradient, pairs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a search that fails says so by None
            step = line_search(
                lambda p: evaluate(p)[0], lambda p: evaluate(p)[1], x, direction, gradient, value, before
            )[0]
        # A search that used up its doublings returns its last point as it is.
        new = None if step is None else rounded(x + step * direction)
        if new is None or evaluate(new)[0] > value:
            if not pairs:
                return x, values, True
            pairs.clear()  # once more, along the gradient
            before = None
            continue
        new_value, new_gradient = evaluate(new)
        if (new - x) @ (new_gradient - gradient) > 0:
            pairs.append((new - x, new_gradient - gradient))
        x, before, value, gradient = new, value, new_value, new_gradient
        values.append(value)
        if is_done(values):
            return x, values, True
    return x, values, False


def _quasi_newton(gradient: np.ndarray, pairs: deque) -> np.ndarray:
    """Inverse Hessian times gradient, by the two-loop recursion; a unit vector where nothing is known yet."""
    if not pairs:
        return gradient / np.linalg.norm(gradient)
    result, factors = gradient.copy(), []
    for s, y in reversed(pairs):
        factors.append((s @ result) / (s @ y))
        result -= factors[-1] * y
    s, y = pairs[-1]
    result *= (s @ y) / (y @ y)
    for (s, y), factor in zip(pairs, reversed(factors), strict=True):
        result += s * (factor - (y @ result) / (s @ y))
    return result


def rounded(values: np.ndarray | float) -> np.ndarray:
    """Values to 24 binary digits of the largest of them."""
    unit = np.exp2(np.round(np.log2(max(np.abs(values).max(), np.finfo(float).tiny))) - 24)
    return np.round(values / unit) * unit
