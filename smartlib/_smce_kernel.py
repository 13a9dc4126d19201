"""The compiled inner loop of `smartlib.smce`, in a file of its own so that numba is imported only when it is needed."""

import heapq

from numba import njit


def isotonic_cost(levels, gaps):
    """Cost of the best non-decreasing fit: min of Σ gaps_i |levels_i − D_i| over 0 ≤ D_1 ≤ … ≤ D_m.

    The algorithm is explained in `smartlib.smce`.

    Args:
        levels: (m,) float64, non-negative.
        gaps: (m,) float64, positive weights.

    Returns:
        The minimum, a float; 0.0 for m = 0.

    Source:
        Weighted L1 isotonic regression by the slope trick, with one heap.

    Example:
        >>> import numpy as np
        >>> isotonic_cost(np.array([1.0, 3.0, 2.0]), np.array([1.0, 1.0, 0.5]))
        0.5
    """
    # heapq keeps the smallest key on top and we need the largest breakpoint there, so keys are negated.
    # The first entry is the wall D ≥ 0; its weight never runs out, so the heap is never empty.
    heap = [(0.0, float("inf"))]
    cost = 0.0
    for i in range(levels.size):
        heapq.heappush(heap, (-levels[i], 2 * gaps[i]))
        rest = gaps[i]
        while rest > 0:
            key, weight = heap[0]
            cost += min(rest, weight) * (-key - levels[i])
            if weight > rest:
                heap[0] = (key, weight - rest)  # same position, less weight: the heap stays in order
            else:
                heapq.heappop(heap)
            rest -= weight
    return cost


# numba keeps the machine code in __pycache__ beside this file or, where that is read-only, in the user's cache folder
# (NUMBA_CACHE_DIR overrides both). Where none of them can be written it refuses; then we compile once per process.
try:
    isotonic_cost = njit(cache=True)(isotonic_cost)
except RuntimeError:
    isotonic_cost = njit(isotonic_cost)
