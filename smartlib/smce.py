"""Exact smooth calibration error of a finite sample, in O(n log n).

Let v_1 < … < v_m be the distinct confidences, d_i = v_{i+1} − v_i, a_i = (1/n) Σ (A − f) over the samples at v_i, and
S_i = a_1 + … + a_i the cumulative residual. The smooth calibration error is a linear program in the values
w_i = w(v_i):

    smCE = max Σ a_i w_i     subject to     |w_i| ≤ 1,   |w_{i+1} − w_i| ≤ d_i.

We solve its dual, which can be drawn: the cumulative residual and its best monotone fit. Replacing w by −w changes the
sign of every a_i, so let S_m ≥ 0. Then

    smCE = S_m + min Σ_{i<m} d_i |S_i − D_i|     over     0 ≤ D_1 ≤ … ≤ D_{m−1} ≤ S_m:             (*)

the error that does not average out, plus the area between the curve S and a monotone curve D from 0 to S_m.

**Why (*) holds.** Put D_0 = 0 and D_m = S_m. Summation by parts gives, for every D and every feasible w,

    Σ a_i w_i = Σ (D_i − D_{i−1}) w_i + Σ (S_i − D_i)(w_i − w_{i+1}) ≤ Σ |D_i − D_{i−1}| + Σ d_i |S_i − D_i|,

and the minimum of the right side over all D is the dual of the program, so it is attained with equality. It remains to
see that D may be taken monotone. Let e be the sum of all descents of D, so that Σ |D_i − D_{i−1}| = S_m + 2e. The
monotone curve max(D_0, …, D_i), cut off at S_m, is nowhere further than e from D, so the area grows by at most
e Σ d_i ≤ e, because confidences fill at most the unit interval, while the first sum falls by 2e. (So one of the
two bounds ±1 on w is never needed.)

**The slope trick.** First cut S off at 0 and S_m: D stays between them, so |S_i − D_i| splits into the part cut off and
the distance of D_i from the rest, y_i. What is left is a weighted L1 isotonic regression. Its value function

    G_i(D) = min Σ_{j≤i} d_j |y_j − D_j|     over     0 ≤ D_1 ≤ … ≤ D_i ≤ D

is convex, piecewise linear, never increasing, and flat from some point on: the minimum. A max-heap holds its
breakpoints, each with a weight, the change of slope there; the largest one, t, is where the flat part begins. A wall of
infinite weight stands at 0. One step does two things:

    add d_i |y_i − D|         a breakpoint of weight 2 d_i at y_i; the part that was flat now rises with slope d_i;
    minimise over D_i ≤ D     the rising part becomes flat: weight d_i is taken off the top of the heap, from one
                              breakpoint or several, the last of them perhaps in part; weight w taken off at t adds
                              w (t − y_i) to the minimum.

Each breakpoint enters once and leaves at most once: O(log n) per sample. (The dynamic program in w on the primal side
needs two heaps and moves breakpoints back and forth between them; a sample can be built on which it makes of the order
of n² moves.)

Sources: smCE is from Błasiok, Gopalan, Hu and Nakkiran, "A unifying theory of distance from calibration" (STOC 2023).
The first exact near-linear solver is in Hu, Jambulapati, Tian and Yang, "Testing calibration in nearly-linear time"
(NeurIPS 2024, arXiv 2402.13187). The form (*) and its one-heap solution are ours.
"""

import numpy as np

from smartlib.arrays import as_confidence_and_correct


def smooth_calibration_error(confidence, correct) -> float:
    """Exact smooth calibration error: the largest (1/n) Σ (A_i − f_i) w(f_i) over 1-Lipschitz w: [0, 1] → [−1, 1].

    The first call in a process imports numba, and the first on a machine compiles for a few seconds.

    Args:
        confidence: (N,) confidences f in [0, 1].
        correct: (N,) A, 1 (or True) where the prediction was right, else 0.

    Returns:
        The error as a fraction, between |mean(A − f)| and mean |A − f|.

    Raises:
        ValueError: for empty input, unequal lengths, or values outside the ranges above.

    Source:
        Błasiok et al., STOC 2023 (definition); the algorithm is ours, explained at the top of this file.

    Example:
        Two samples cancel on average, but not at the same confidence: S = .375 over a gap of .5.

        >>> smooth_calibration_error([0.25, 0.75], [1, 0])
        0.1875
    """
    return smce_of(*as_confidence_and_correct(confidence, correct))


def smce_of(confidence: np.ndarray, correct: np.ndarray) -> float:
    """:func:`smooth_calibration_error` of checked arrays; ``correct`` may be a true accuracy between 0 and 1."""
    from smartlib._smce_kernel import isotonic_cost  # here, because it imports numba

    order = np.argsort(confidence)
    cumulative = np.cumsum((correct - confidence)[order]) / confidence.size
    if cumulative[-1] < 0:
        cumulative = -cumulative
    gaps = np.diff(confidence[order])
    apart = gaps > 0  # between tied samples the curve encloses no area
    total, curve, gaps = cumulative[-1], cumulative[:-1][apart], gaps[apart]
    clipped = np.clip(curve, 0, total)
    return float(total + gaps @ np.abs(curve - clipped) + isotonic_cost(clipped, gaps))
