"""Where likelihood and calibration part: first-order effects of rescaling the logits of some samples.

A local scaling multiplies the inverse temperature of each sample, s(x) = 1/T(x), by 1 + eps a(x). Write p for
softmax(s z), f for its largest entry, A = 1 where the prediction is right, and g_k = z(1) - z_k for the gaps. To first
order in eps,

    d E[-log p_Y]       =  E[ a s (E_p[z] - z_Y) ]                       likelihood,
    d f                 =  a s f (z(1) - E_p[z])                         confidence of one sample; the bracket is >= 0,
    d E[(A - f) w(f)]   =  E[ df ((A - f) w'(f) - w(f)) ]                calibration, as the witness w sees it.

The first one splits (ours). Let gbar = E_p[g | not the predicted class] be the mean gap that the model expects of an
error. Then

    E_p[z] - z_Y  =  (f - A) gbar  +  (g_Y - (1 - A) gbar),

a part that sees the confidence only, and a part that sees which class the errors go to. For K = 2 the second is 0.
Notebook 02 derives all of this.

Labels are class indices (N,), or label probabilities (N, K) with sample weights, which describe a population exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from scipy.special import logit

from smartlib.arrays import as_labels, as_logits, as_probabilities, check_label_logits, like, row_chunks, to_numpy
from smartlib.toplabel import confidence_of

# --- directional derivatives ----------------------------------------------------------------------------------------


def nll_derivative(logits: Any, labels: Any, direction: Any, temperature: Any = 1.0, *, weights: Any = None) -> float:
    """Derivative of the NLL along a local scaling: E[a s (E_p[z] - z_Y)].

    Args:
        logits: (N, K).
        labels: (N,) class indices, or (N, K) label probabilities.
        direction: scalar or (N,), a(x), dimensionless; 1 lowers all temperatures by the same factor.
        temperature: scalar or (N,), T = 1/s > 0, dimensionless.
        weights: (N,) >= 0, of the samples; equal if None.

    Returns:
        The derivative, in nats per unit of eps; negative where the NLL falls.

    Raises:
        ValueError: bad arrays, or a label whose logit is -inf.

    Source: paper, Theorem 2a (the directional derivative).

    >>> round(nll_derivative([[np.log(4), 0.0]], [0], 1.0), 6)  # f = .8: (.8 - 1) log 4
    -0.277259
    """
    return sum(nll_derivative_parts(logits, labels, direction, temperature, weights=weights))


def nll_derivative_parts(
    logits: Any, labels: Any, direction: Any, temperature: Any = 1.0, *, weights: Any = None
) -> tuple[float, float]:
    """The two parts of :func:`nll_derivative`: wrong confidence, and errors that go to other classes than expected.

    Args:
        logits, labels, direction, temperature, weights: as for :func:`nll_derivative`.

    Returns:
        ``(confidence part, error part)``: E[a s (f - A) gbar] and E[a s (g_Y - (1 - A) gbar)], nats per unit of eps.
        The error part is 0 for K = 2.

    Raises:
        ValueError: as for :func:`nll_derivative`.

    Source: ours.

    >>> nll_derivative_parts([[2.0, 1.0, 0.0]], [[0.8, 0.2, 0.0]], 1.0)[1] < 0  # errors are nearer than expected
    True
    """
    z = as_logits(logits)
    t, a = _per_sample(temperature, z, "temperature"), _per_sample(direction, z, "direction")
    accuracy, label_gap = accuracy_and_label_gap(z, labels)
    f, error_gap = confidence_and_error_gap(z, t)
    confidence_part = a / t * (f - accuracy) * error_gap
    error_part = a / t * (label_gap - (1 - accuracy) * error_gap)
    return _mean(confidence_part, weights), _mean(error_part, weights)


def confidence_derivative(logits: Any, direction: Any, temperature: Any = 1.0) -> Any:
    """Derivative of each top-label confidence along a local scaling: a s f (z(1) - E_p[z]).

    Args:
        logits, direction, temperature: as for :func:`nll_derivative`.

    Returns:
        (N,) float64, of the input's kind and device; of the sign of the direction, or 0.

    Raises:
        ValueError: bad arrays.

    Source: paper, Theorem 2a (the directional derivative).

    >>> confidence_derivative([[np.log(4), 0.0]], 1.0).round(6)  # f (1 - f) log 4
    array([0.221807])
    """
    z = as_logits(logits)
    t, a = _per_sample(temperature, z, "temperature"), _per_sample(direction, z, "direction")
    f, error_gap = confidence_and_error_gap(z, t)
    return like(a / t * f * (1 - f) * error_gap, logits)


def witness_derivative(
    confidence: Any, accuracy: Any, confidence_change: Any, witness: Callable, slope: Callable, *, weights: Any = None
) -> float:
    """Derivative of a witness value E[(A - f) w(f)] as the confidences move: E[df ((A - f) w'(f) - w(f))].

    Args:
        confidence: (N,) f. accuracy: (N,) A, of 0 and 1, or true accuracies. confidence_change: (N,) df.
        witness, slope: w and w', functions of an array of confidences.
        weights: (N,) >= 0; equal if None.

    Returns:
        The derivative, a fraction per unit of eps.

    Source: paper, Theorem 2a (the directional derivative).

    >>> witness_derivative([0.5], [1.0], [2.0], lambda f: f, lambda f: 1.0)  # d of f - f^2 is df (1 - 2f)
    0.0
    """
    f, a, df = (to_numpy(x).astype(np.float64) for x in (confidence, accuracy, confidence_change))
    return _mean(df * ((a - f) * slope(f) - witness(f)), weights)


def _per_sample(value: Any, z: np.ndarray, name: str) -> np.ndarray:
    return np.broadcast_to(to_numpy(value, name).astype(np.float64), len(z))


def _mean(values: np.ndarray, weights: Any) -> float:
    return float(np.average(values, weights=None if weights is None else to_numpy(weights, "weights")))


def confidence_and_error_gap(z: np.ndarray, t: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """f and gbar, (N,) each: z(1) - E_p[z] is (1 - f) gbar."""
    f, error_gap = np.empty(len(z)), np.empty(len(z))
    for rows in row_chunks(*z.shape):
        gaps = z[rows].max(axis=1, keepdims=True).astype(np.float64) - z[rows]
        index = np.arange(len(gaps)), z[rows].argmax(axis=1)
        gaps[index] = np.inf  # the predicted class takes no part in the mean over the others
        smallest = gaps.min(axis=1, keepdims=True)
        # Relative to the smallest gap, or all weights would underflow where the margin is large.
        w = np.exp(-(gaps - np.where(np.isfinite(smallest), smallest, 0.0)) / t[rows, None])
        total = w.sum(axis=1)
        f[rows] = 1 / (1 + total * np.exp(-smallest[:, 0] / t[rows]))
        sums = (w * np.where(w > 0, gaps, 0.0)).sum(axis=1)
        error_gap[rows] = np.divide(sums, total, out=np.zeros_like(sums), where=total > 0)
    return f, error_gap


def accuracy_and_label_gap(z: np.ndarray, labels: Any) -> tuple[np.ndarray, np.ndarray]:
    """P(Y = predicted class | x) and E[z(1) - z_Y | x], (N,) each, of class indices or label probabilities."""
    array = to_numpy(labels, "labels")
    predicted, rows = z.argmax(axis=1), np.arange(len(z))
    if array.ndim < 2 or array.shape[1] == 1:
        y = as_labels(labels, *z.shape)
        check_label_logits(z, y)
        return (predicted == y).astype(np.float64), z.max(axis=1).astype(np.float64) - z[rows, y]
    q = as_probabilities(labels, "labels").astype(np.float64)
    if q.shape != z.shape:
        raise ValueError(f"label probabilities have shape {q.shape}, but the logits {z.shape}")
    gaps = z.max(axis=1, keepdims=True).astype(np.float64) - z
    if np.isinf(gaps[q > 0]).any():
        raise ValueError("a class of positive probability has the logit -inf: it is impossible under the model")
    return q[rows, predicted], (q * np.where(q > 0, gaps, 0.0)).sum(axis=1)


# --- the populations of the two theorems ----------------------------------------------------------------------------


class DiscretePopulation(NamedTuple):
    """Finitely many kinds of samples: their logits, the distribution of their labels, how frequent they are."""

    logits: np.ndarray
    """(N, K)."""
    labels: np.ndarray
    """(N, K) label probabilities."""
    weights: np.ndarray
    """(N,), sum to one."""


def two_groups(confidence: float, eta: float, delta: float = 0.0) -> DiscretePopulation:
    """The population of Theorem 2a: K = 2, two equally frequent groups, accuracies c + eta and c - eta.

    Args:
        confidence: c in (1/2, 1), of both groups at the start. eta: 0 < eta < 1 - c.
        delta: how far the confidence of the first group has been raised, 0 <= delta <= eta.

    Returns:
        :class:`DiscretePopulation`, the first group first.

    Source: paper, Theorem 2a.

    >>> two_groups(0.8, 0.1).labels.round(6).tolist()
    [[0.9, 0.1], [0.7, 0.3]]
    """
    if not (0.5 < confidence < 1 and 0 < eta < 1 - confidence and 0 <= delta <= eta):
        raise ValueError(f"need 1/2 < c < 1, 0 < eta < 1 - c, 0 <= delta <= eta; got {confidence}, {eta}, {delta}")
    accuracy = np.array([confidence + eta, confidence - eta])
    top = logit(np.array([confidence + delta, confidence]))
    return DiscretePopulation(
        np.stack([top, 0 * top], axis=1), np.stack([accuracy, 1 - accuracy], axis=1), np.full(2, 0.5)
    )


def two_groups_smce(eta: float, delta: float) -> float:
    """Smooth calibration error of :func:`two_groups`: delta (1 + eta - delta) / 2.

    Source: paper, Theorem 2a.

    >>> round(two_groups_smce(0.1, 0.05), 6)
    0.02625
    """
    return delta * (1 + eta - delta) / 2


def two_groups_nll_rate(confidence: float, eta: float) -> float:
    """Rate eta s mu / 2 at which the NLL of :func:`two_groups` falls at the start; s mu = logit(c).

    Source: paper, Theorem 2a.

    >>> round(two_groups_nll_rate(0.8, 0.1), 6)
    0.069315
    """
    return eta * float(logit(confidence)) / 2


def one_kind(logits: Any, runner_up_share: float) -> DiscretePopulation:
    """The population of Theorem 2b: one kind of sample whose accuracy is its confidence.

    Args:
        logits: (K,), in descending order, the first two different from the last.
        runner_up_share: share of the errors that go to the second class; the others go to the last one.

    Returns:
        :class:`DiscretePopulation` of one row.

    Source: ours, Theorem 2b.

    >>> one_kind([np.log(2), 0.0, 0.0], 0.5).labels.tolist()
    [[0.5, 0.25, 0.25]]
    """
    z = np.asarray(logits, dtype=np.float64)[None, :]
    f = float(confidence_of(z, 1.0)[0])
    q = np.zeros_like(z)
    q[0, 1] += runner_up_share * (1 - f)
    q[0, -1] += (1 - runner_up_share) * (1 - f)
    q[0, 0] = 1 - q[0, 1:].sum()
    return DiscretePopulation(z, q, np.ones(1))
