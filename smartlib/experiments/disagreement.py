"""Likelihood against calibration, measured on logits: along one temperature, and along a fit of SMART.

The theory is in `smartlib.mismatch`; notebook 02 shows both.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from sklearn.exceptions import ConvergenceWarning

from smartlib.arrays import as_labels, as_logits, to_numpy
from smartlib.calibrators.base import scaled_softmax
from smartlib.calibrators.smart import SMART, inputs, starting_parameters, training_objective
from smartlib.calibrators.temperature_network import store_parameters, stored_parameters, temperature_and_backward
from smartlib.metrics import N_BINS as N_HARD_BINS
from smartlib.metrics import bin_edges, bin_index, negative_log_likelihood
from smartlib.mismatch import accuracy_and_label_gap, confidence_and_error_gap
from smartlib.smce import smce_of
from smartlib.softece import BANDWIDTH, DELTA, N_BINS, soft_ece, soft_ece_and_gradient, soft_weights
from smartlib.toplabel import confidence_of

MEASURES = ("nll", "ece", "soft_ece", "smce")


# --- along one temperature ------------------------------------------------------------------------------------------


def temperature_curves(logits: Any, labels: Any, grid: Any) -> pd.DataFrame:
    """NLL and calibration errors along a constant temperature.

    Args:
        logits: (N, K). labels: (N,) class indices.
        grid: (G,) temperatures > 0, ascending.

    Returns:
        One row per temperature: temperature, nll (nats), ece, soft_ece, smce (fractions; 15 bins, SMART's settings).

    Raises:
        ValueError: bad arrays.

    Source: ours.

    >>> temperature_curves([[2.0, 0.0], [1.0, 0.0]], [0, 1], [1.0, 2.0])["nll"].round(4).tolist()
    [0.7201, 0.6437]
    """
    z, y = as_logits(logits), as_labels(labels, *np.shape(logits))
    grid = to_numpy(grid, "grid").astype(np.float64)
    values = _measures(z, y, grid, np.ones((1, len(y))))[:, 0]
    return pd.DataFrame({"temperature": grid, **dict(zip(MEASURES, values.T, strict=True))})


def resampled_minimisers(logits: Any, labels: Any, grid: Any, *, n_resamples: int = 100, seed: int = 0) -> pd.DataFrame:
    """Where on the grid each measure is smallest, for bootstrap resamples of the samples.

    Args:
        logits, labels, grid: as for :func:`temperature_curves`.
        n_resamples, seed: of the bootstrap.

    Returns:
        One row per resample: the temperatures that minimise nll, ece, soft_ece, smce. The same resample serves all
        four, so that differences within a row are paired.

    Raises:
        ValueError: bad arrays.

    Source: bootstrap (Efron 1979).
    """
    z, y = as_logits(logits), as_labels(labels, *np.shape(logits))
    grid = to_numpy(grid, "grid").astype(np.float64)
    counts = np.random.default_rng(seed).multinomial(len(y), np.full(len(y), 1 / len(y)), size=n_resamples)
    values = _measures(z, y, grid, counts.astype(np.float64))
    return pd.DataFrame(grid[values.argmin(axis=0)], columns=MEASURES)


def temperatures_from_the_other_half(logits: Any, labels: Any, grid: Any, *, seed: int = 0) -> pd.DataFrame:
    """The temperature of each sample where the samples are halved at random and each half chooses for the other one.

    What is measured at these temperatures was not fitted to the samples on which it is measured.

    Args:
        logits, labels, grid: as for :func:`temperature_curves`; at least two samples.
        seed: of the halving.

    Returns:
        One row per sample: the temperatures on the grid that minimise nll, ece, soft_ece, smce of the other half.

    Raises:
        ValueError: bad arrays.

    Source: cross-fitting with two folds.
    """
    z, y = as_logits(logits), as_labels(labels, *np.shape(logits))
    half = np.random.default_rng(seed).permutation(len(y)) % 2
    result = pd.DataFrame(index=range(len(y)), columns=MEASURES, dtype=np.float64)
    for side in (0, 1):
        curves = temperature_curves(z[half != side], y[half != side], grid)
        for measure in MEASURES:
            result.loc[half == side, measure] = curves["temperature"][curves[measure].argmin()]
    return result


def _measures(z: np.ndarray, y: np.ndarray, grid: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The four measures, (G, B, 4), where row i of the data occurs counts[b, i] times in sample b."""
    n, edges = len(y), bin_edges(np.empty(0), N_HARD_BINS, "width")
    correct = (z.argmax(axis=1) == y).astype(np.float64)
    own_gap = z.max(axis=1).astype(np.float64) - z[np.arange(n), y]
    result = np.empty((len(grid), len(counts), len(MEASURES)))
    for g, t in enumerate(grid):
        f = confidence_of(z, t)
        residual = correct - f
        loss = own_gap / t - np.log(f)
        hard = np.eye(N_HARD_BINS)[bin_index(f, edges)]
        soft = soft_weights(f, N_BINS, BANDWIDTH)
        result[g, :, 0] = counts @ loss / n
        result[g, :, 1] = np.abs(counts @ (hard * residual[:, None])).sum(axis=1) / n
        gap, mass = counts @ (soft * residual[:, None]), counts @ soft
        result[g, :, 2] = np.hypot(gap, DELTA * mass).sum(axis=1) / n
        order = np.argsort(f)
        # A sample that occurs k times has k times its residual; one that is absent has none, and changes nothing.
        result[g, :, 3] = [smce_of(f[order], (f + count * residual)[order]) for count in counts]
    return result


class Stretch(NamedTuple):
    """The temperatures between the minimiser of the NLL and that of a calibration error."""

    low: float
    high: float
    opposed: float
    """Share of the grid steps in between at which one of the two rises and the other falls."""


def mismatch_stretch(curves: pd.DataFrame, measure: str = "soft_ece") -> Stretch:
    """Where NLL and a calibration error disagree about the temperature.

    Args:
        curves: of :func:`temperature_curves`.
        measure: "ece", "soft_ece" or "smce".

    Returns:
        :class:`Stretch`; ``opposed`` is 0 where both minimisers coincide.

    Source: ours.

    >>> curves = pd.DataFrame({"temperature": [1, 2, 3], "nll": [1, 2, 3], "ece": [0.3, 0.2, 0.3]})
    >>> mismatch_stretch(curves, "ece")
    Stretch(low=1.0, high=2.0, opposed=1.0)
    """
    first, last = sorted((int(curves["nll"].argmin()), int(curves[measure].argmin())))
    between = curves.iloc[first : last + 1]
    opposed = np.diff(between["nll"]) * np.diff(between[measure]) < 0
    t = curves["temperature"].to_numpy(dtype=np.float64)
    return Stretch(float(t[first]), float(t[last]), float(opposed.mean()) if len(opposed) else 0.0)


# --- in the space of SMART's parameters -----------------------------------------------------------------------------


def smart_gradients(smart: SMART, logits: Any, labels: Any) -> tuple[np.ndarray, np.ndarray]:
    """Gradients of the NLL and of Charbonnier-SoftECE with respect to the parameters of a fitted SMART.

    Args:
        smart: a fitted `SMART`.
        logits: (N, K). labels: (N,) class indices.

    Returns:
        ``(gradient of the NLL, gradient of H)``, (P,) each, in the order of `temperature_network`.

    Raises:
        ValueError: bad arrays, or a label whose logit is -inf.

    Source: ours.
    """
    z, y = as_logits(logits), as_labels(labels, *np.shape(logits))
    return next(_gradients(smart, z, y, [np.arange(len(y))]))


def _gradients(smart: SMART, z: np.ndarray, y: np.ndarray, resamples: Iterable[np.ndarray]) -> Iterator[tuple]:
    """:func:`smart_gradients` of the samples ``rows``, for each ``rows`` in ``resamples``."""
    theta, hidden = stored_parameters(smart)
    t, backward = temperature_and_backward(theta, inputs(smart, z), hidden)
    correct, label_gap = accuracy_and_label_gap(z, y)
    f, error_gap = confidence_and_error_gap(z, t)
    mean_gap = (1 - f) * error_gap
    nll_along_t, f_along_t = (mean_gap - label_gap) / t**2, -f * mean_gap / t**2
    settings = smart.n_bins, smart.bandwidth, smart.delta
    for rows in resamples:
        count = np.bincount(rows, minlength=len(y))
        along_f = np.bincount(rows, soft_ece_and_gradient(f[rows], correct[rows], *settings)[1], len(y))
        yield backward(count / len(rows) * nll_along_t), backward(along_f * f_along_t)


def _cosine(nll: np.ndarray, soft: np.ndarray) -> float:
    """In [-1, 1]; nan where a gradient vanishes."""
    length = np.linalg.norm(nll) * np.linalg.norm(soft)
    return float(np.clip(nll @ soft / length, -1.0, 1.0)) if length > 0 else float("nan")


def starting_map(smart: SMART, logits: Any, labels: Any) -> SMART:
    """The constant map from which the L-BFGS fit of SMART starts, as a fitted SMART.

    Args:
        smart: a SMART that was fitted to these data.
        logits: (N, K). labels: (N,) class indices.

    Returns:
        A copy whose output weights are 0 and whose temperature is the best constant.

    Source: ours.
    """
    z, y = as_logits(logits), as_labels(labels, *np.shape(logits))
    start = copy.deepcopy(smart)
    theta = starting_parameters(smart, training_objective(smart, z, y), inputs(smart, z))
    store_parameters(start, theta, 1, stored_parameters(smart)[1])
    return start


def gradients_along_fit(logits: Any, labels: Any, *, n_resamples: int = 0, seed: int = 0) -> pd.DataFrame:
    """The two objectives and the angle between their gradients at every iterate of a fit of SMART.

    L-BFGS has no randomness, so that a fit that is stopped after k iterations ends at the k-th iterate of the whole.

    Args:
        logits: (N, K). labels: (N,) class indices.
        n_resamples, seed: of a bootstrap over the samples, with the iterates held fixed.

    Returns:
        One row per iteration, 0 being the start: iteration, nll (nats), soft_ece, cosine (1: both objectives ask for
        the same step; nan where a gradient vanishes; it depends on how the map is parametrised), nll_norm and
        soft_ece_norm (lengths of the gradients), and with ``n_resamples`` low and high, the 2.5 % and 97.5 % quantiles
        of the cosine.

    Raises:
        ValueError: bad arrays, or a label whose logit is -inf.

    Source: ours.
    """
    z, y = as_logits(logits), as_labels(labels, *np.shape(logits))
    maps = [_stopped(z, y, 1)]
    while not maps[-1].converged_:
        maps.append(_stopped(z, y, len(maps) + 1))
    rng = np.random.default_rng(seed)
    resamples = [rng.integers(len(y), size=len(y)) for _ in range(n_resamples)]
    table = []
    for iteration, smart in enumerate([starting_map(maps[0], z, y), *maps]):
        t = smart.temperatures(z)
        nll, soft = smart_gradients(smart, z, y)
        row = {
            "iteration": iteration, "nll": negative_log_likelihood(scaled_softmax(z, t), y),
            "soft_ece": soft_ece(confidence_of(z, t), z.argmax(axis=1) == y), "cosine": _cosine(nll, soft),
            "nll_norm": float(np.linalg.norm(nll)), "soft_ece_norm": float(np.linalg.norm(soft)),
        }  # fmt: skip
        if resamples:
            cosines = [_cosine(*pair) for pair in _gradients(smart, z, y, resamples)]
            row["low"], row["high"] = np.quantile(cosines, [0.025, 0.975])
        table.append(row)
    return pd.DataFrame(table)


def _stopped(z: np.ndarray, y: np.ndarray, max_iter: int) -> SMART:
    with warnings.catch_warnings():  # to stop early is what is meant here
        warnings.simplefilter("ignore", ConvergenceWarning)
        return SMART(max_iter=max_iter).fit(z, y)
