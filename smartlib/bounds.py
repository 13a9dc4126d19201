"""What surrounds the certificate: how tight it is, what it cannot see, and what it says about the population.

`smartlib.softece.certificate` gives, for a sample, the smooth calibration error and upper bounds on it. Here are the
whole chain of bounds over a grid of settings (`certificate_grid`), the constant of the reverse inequality
(`lipschitz_constant`), distributions on which the soft bins see nothing and smCE does (`unseen_miscalibration`), and
the step from a sample to the population (`population_bound`). Notebook 03 derives all of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from smartlib.arrays import as_confidence_and_correct, as_count
from smartlib.softece import (
    BANDWIDTH,
    DELTA,
    N_BINS,
    bin_centres,
    certificate,
    check_settings,
    soft_ece,
    soft_weights,
)

if TYPE_CHECKING:
    import pandas as pd

# HiGHS stops at 1e-7 unless told otherwise.
_TIGHT = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}


# --- the chain of bounds ----------------------------------------------------------------------------------------


def certificate_grid(
    confidence: Any,
    correct: Any,
    *,
    n_bins: Iterable[int] = (N_BINS,),
    bandwidths: Iterable[float] = (BANDWIDTH,),
    deltas: Iterable[float] = (DELTA,),
) -> pd.DataFrame:
    """Every term of the chain of bounds, for every combination of the settings.

        smce <= bound <= bound_mean <= bound_sup <= paper_bound

    Args:
        confidence: (N,) in [0, 1].
        correct: (N,) of 0 and 1.
        n_bins: values of M.
        bandwidths: values of lambda, units of confidence.
        deltas: values of delta.

    Returns:
        One row per combination, fractions: the settings ``n_bins``, ``bandwidth``, ``delta``; ``smce``; ``plain``,
        H_{lambda, 0}; ``bound``, H_{lambda, 0} + E[|A - f| beta(f)]; ``bound_mean``, H_{lambda, 0} + B E|A - f|;
        ``bound_sup``, H_{lambda, delta} + B; ``paper_bound``, H_{lambda, delta} + 2 B; and ``soft_ece``,
        H_{lambda, delta}, and ``kernel_error``, B.

    Raises:
        ValueError: bad arrays, or a setting outside its range.

    Source: paper, Theorem 3 (the last term); ours, Theorem 3' (the others).

    >>> certificate_grid([0.7, 0.8, 0.9, 0.6], [1, 1, 1, 0], bandwidths=[0.02, 0.05])["bound"].round(4).tolist()
    [0.3061, 0.2545]
    """
    import pandas as pd

    f, a = as_confidence_and_correct(confidence, correct)
    mean_gap = float(np.mean(np.abs(a - f)))
    bandwidths, deltas = list(bandwidths), list(deltas)
    rows = []
    for m in n_bins:
        for bandwidth in bandwidths:
            plain = soft_ece(f, a, m, bandwidth, 0.0)
            for delta in deltas:
                c = certificate(f, a, m, bandwidth, delta)
                rows.append(
                    {
                        "n_bins": m,
                        "bandwidth": bandwidth,
                        "delta": delta,
                        "smce": c.smce,
                        "plain": plain,
                        "bound": c.bound,
                        "bound_mean": plain + c.kernel_error * mean_gap,
                        "bound_sup": c.soft_ece + c.kernel_error,
                        "paper_bound": c.paper_bound,
                        "soft_ece": c.soft_ece,
                        "kernel_error": c.kernel_error,
                    }
                )
    return pd.DataFrame(rows)


# --- the reverse inequality -------------------------------------------------------------------------------------


def lipschitz_constant(n_bins: int = N_BINS, bandwidth: float = BANDWIDTH) -> float:
    """L_lambda = sup over v in [0, 1] of sum_b w_b(v) |mu_b - mean(v)| / lambda^2, mean(v) = sum_b w_b(v) mu_b.

    Since w_b' = w_b (mu_b - mean) / lambda^2, this is the largest Lipschitz constant of sum_b sigma_b w_b over all
    signs sigma. So that function, divided by max(1, L_lambda), is a witness, and

        H_{lambda, 0} <= max(1, L_lambda) smCE.

    Args:
        n_bins: M >= 1.
        bandwidth: lambda > 0, units of confidence.

    Returns:
        L, per unit of confidence; 0 for one bin.

    Raises:
        ValueError: a setting outside its range.

    Source: ours, Theorem 3''.

    >>> round(lipschitz_constant(15, 0.05), 1)
    17.4
    """
    from scipy.optimize import minimize_scalar

    n_bins, bandwidth, _ = check_settings(n_bins, bandwidth, 0.0)
    centres = bin_centres(n_bins)

    def slope(v: np.ndarray) -> np.ndarray:
        w = soft_weights(v, n_bins, bandwidth)
        return (w * np.abs(centres - (w @ centres)[:, None])).sum(axis=1) / bandwidth**2

    # A narrow kernel has its maxima half-way between two centres, which are points of this grid.
    grid = np.linspace(0, 1, 40 * n_bins + 1)
    values = slope(grid)
    best = int(np.argmax(values))
    low, high = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    fine = minimize_scalar(
        lambda v: -slope(np.array([v]))[0], bounds=(low, high), method="bounded", options={"xatol": 1e-12}
    )
    return float(max(-fine.fun, values[best]))


# --- the blind spot ---------------------------------------------------------------------------------------------


def optimal_witness(confidence: np.ndarray, residual: np.ndarray) -> np.ndarray:
    """The witness that attains smCE, from the linear program that defines it.

    A general solver: seconds at 5,000 points. It serves as an independent check of
    :func:`smartlib.smce.smooth_calibration_error`, which gives the value but no witness.

    Args:
        confidence: (m,) distinct confidences in ascending order.
        residual: (m,) a_i, the sum of (A - f) over the samples at confidence i, divided by the number of all samples.

    Returns:
        (m,) w_i that maximises sum a_i w_i subject to |w_i| <= 1 and |w_{i+1} - w_i| <= v_{i+1} - v_i.

    Source: Błasiok et al., STOC 2023 (definition).

    >>> w = optimal_witness(np.array([0.25, 0.75]), np.array([0.375, -0.375]))
    >>> round(float(w[0] - w[1]), 9)
    0.5
    """
    from scipy.optimize import linprog
    from scipy.sparse import diags_array, vstack

    m, gaps = len(confidence), np.diff(confidence)
    step = diags_array([-np.ones(m - 1), np.ones(m - 1)], offsets=[0, 1], shape=(m - 1, m))
    result = linprog(
        -residual, A_ub=vstack([step, -step], format="csr"), b_ub=np.r_[gaps, gaps], bounds=(-1, 1), options=_TIGHT
    )
    return result.x


@dataclass(frozen=True)
class Unseen:
    """A distribution with H_{lambda, 0} = 0 and a positive smooth calibration error."""

    confidence: np.ndarray
    """(m,) in ascending order."""
    mass: np.ndarray
    """(m,) probabilities of the confidences; they sum to one."""
    accuracy: np.ndarray
    """(m,) probability of a correct prediction at each confidence."""
    smce: float
    """Smooth calibration error, a fraction."""

    @property
    def residual(self) -> np.ndarray:
        """(m,) mass * (accuracy - confidence)."""
        return self.mass * (self.accuracy - self.confidence)


def unseen_miscalibration(
    n_bins: int = N_BINS, bandwidth: float = BANDWIDTH, *, n_confidences: int = 150, equal_masses: bool = True
) -> Unseen:
    """A miscalibrated distribution that the soft bins cannot see, the worst that an alternating search finds.

    H_{lambda, 0} = 0 is M linear equations in the joint probabilities of confidence and correctness, and for a fixed
    witness smCE is linear in them, too: a linear program. For fixed probabilities the best witness is a linear
    program. The two are solved in turn, from sawtooth witnesses with 4 to M teeth. Each turn can only raise smCE;
    the search may end in a local maximum, so the result is a lower bound on what can stay unseen.

    Args:
        n_bins: M >= 1.
        bandwidth: lambda > 0, units of confidence.
        n_confidences: number of confidences, equally spaced in [0, 1].
        equal_masses: all confidences are equally likely; else the masses are chosen by the search, too, and
            confidences without mass are left out of the result.

    Returns:
        :class:`Unseen`.

    Raises:
        ValueError: a setting outside its range.

    Source: ours.

    >>> unseen = unseen_miscalibration(5, 0.1, n_confidences=40)
    >>> unseen.smce > 0.005
    True
    """
    n_bins, bandwidth, _ = check_settings(n_bins, bandwidth, 0.0)
    v = (np.arange(as_count(n_confidences, "n_confidences")) + 0.5) / n_confidences
    weights = soft_weights(v, n_bins, bandwidth)
    best = (-np.inf, None)
    for teeth in range(min(4, n_bins), n_bins + 1):
        witness, reached = (np.abs((v * teeth) % 1 - 0.5) - 0.25) / teeth, -np.inf
        while True:
            joint = _worst_unseen(v, witness, weights, equal_masses)
            residual = joint[1] * (1 - v) - joint[0] * v
            witness = optimal_witness(v, residual)
            value = float(residual @ witness)
            if value <= reached + 1e-9:
                break
            reached = value
            best = max(best, (value, joint), key=lambda pair: pair[0])
    value, joint = best
    mass = joint.sum(axis=0)
    kept = mass > 0
    return Unseen(confidence=v[kept], mass=mass[kept], accuracy=joint[1, kept] / mass[kept], smce=value)


def _worst_unseen(v: np.ndarray, witness: np.ndarray, weights: np.ndarray, equal_masses: bool) -> np.ndarray:
    """Joint probabilities (2, m) of A = 0, 1 and the confidences that maximise E[(A - f) w(f)] where H = 0."""
    from scipy.optimize import linprog

    m, residual = len(v), np.concatenate([-v, 1 - v])
    blind = residual * np.tile(weights.T, 2)  # (M, 2m): E[w_b (A - f)] for each b
    if equal_masses:
        total, one = np.hstack([np.eye(m), np.eye(m)]), np.full(m, 1 / m)
    else:
        total, one = np.ones((1, 2 * m)), np.ones(1)
    equations, values = np.vstack([blind, total]), np.concatenate([np.zeros(len(blind)), one])
    x = linprog(-residual * np.tile(witness, 2), A_eq=equations, b_eq=values, bounds=(0, 1), options=_TIGHT).x
    # The solver leaves 1e-11 in the equations. The positive unknowns take up what is left: the shortest correction.
    x[x < 1e-9] = 0
    for _ in range(3):
        x[x > 0] += np.linalg.lstsq(equations[:, x > 0], values - equations @ x, rcond=None)[0]
    return x.reshape(2, m)


# --- from the sample to the population --------------------------------------------------------------------------


@dataclass(frozen=True)
class PopulationBound:
    """Upper bounds on the smooth calibration error of the population, all fractions.

    With probability at least 1 - alpha it is at most ``smce + hoeffding``, and so at most ``bound + hoeffding``; the
    same holds with ``bernstein``. Which of the two deviations is used must be decided before the data are seen.
    """

    smce: float
    """Exact smooth calibration error of the sample."""
    bound: float
    """H_{lambda, 0} + E|A - f| beta_lambda(f) of the sample (Theorem 3'), at least ``smce``."""
    hoeffding: float
    """sqrt(2 ln(1 / alpha) / n)."""
    bernstein: float
    """sqrt(2 V ln(2 / alpha) / n) + 14 ln(2 / alpha) / (3 (n - 1)) with V = sum (A - f)^2 / (n - 1); inf for n = 1."""


def population_bound(
    confidence: Any, correct: Any, n_bins: int = N_BINS, bandwidth: float = BANDWIDTH, *, alpha: float = 0.05
) -> PopulationBound:
    """What a sample says about the smooth calibration error of the population that it was drawn from.

    **Theorem.** Let the samples be independent draws from one distribution and let f be fixed before: fitted on other
    data. Then each of these holds with probability at least 1 - alpha, for all (M, lambda) at once:

        smCE(population) <= smCE(sample) + sqrt(2 ln(1/alpha) / n)                                       (Hoeffding)
        smCE(population) <= smCE(sample) + sqrt(2 V ln(2/alpha) / n) + 14 ln(2/alpha) / (3 (n - 1))      (Bernstein)

    and smCE(sample) may be replaced by any bound of Theorem 3'.

    *Proof.* The supremum over witnesses is attained, at w*, say. It belongs to the population, so it does not depend on
    the sample, and X_i = (A_i - f_i) w*(f_i) are independent, lie in [-1, 1] and have the mean smCE(population). By
    Hoeffding's inequality E[X] <= mean(X) + sqrt(2 ln(1/alpha) / n), except with probability alpha; and mean(X), the
    value of *one* witness on the sample, is at most the supremum over all of them, smCE(sample). For the second line
    take the empirical Bernstein inequality of Maurer and Pontil for variables in an interval of length 2; the
    variance of the X_i on the sample is at most V = sum (A_i - f_i)^2 / (n - 1) since |w*| <= 1. Theorem 3' holds on
    every sample for every (M, lambda), so nothing is lost by choosing these on the same data.

    (The direct way through the soft bins is worse: Jensen's inequality and McDiarmid's, applied to
    H_{lambda, 0} + E|A - f| beta, which one sample changes by at most (2 + B) / n, give bound +
    (2 + B) sqrt(ln(1/alpha) / (2n)), and only for an (M, lambda) that was fixed before.)

    Args:
        confidence: (N,) in [0, 1].
        correct: (N,) of 0 and 1.
        n_bins, bandwidth: M and lambda of ``bound``.
        alpha: probability of error, in (0, 1).

    Returns:
        :class:`PopulationBound`.

    Raises:
        ValueError: bad arrays, or a setting outside its range.

    Source: ours; Hoeffding 1963; Maurer and Pontil, COLT 2009, Theorem 4.

    >>> round(population_bound(np.full(10_000, 0.9), np.arange(10_000) % 10 > 0).hoeffding, 4)
    0.0245
    """
    f, a = as_confidence_and_correct(confidence, correct)
    if not 0 < alpha < 1:
        raise ValueError(f"alpha must lie in (0, 1), got {alpha!r}")
    n, log = len(f), np.log(2 / alpha)
    bernstein = np.inf
    if n > 1:
        bernstein = np.sqrt(2 * np.sum((a - f) ** 2) / (n - 1) * log / n) + 14 * log / (3 * (n - 1))
    c = certificate(f, a, n_bins, bandwidth, 0.0)
    return PopulationBound(
        smce=c.smce, bound=c.bound, hoeffding=float(np.sqrt(2 * np.log(1 / alpha) / n)), bernstein=float(bernstein)
    )
