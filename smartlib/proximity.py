"""Proximity: how densely other samples lie around a sample in feature space, and an ECE measured per proximity.

Networks tend to be more over-confident where their features are sparse. Two samples of one confidence then differ in
accuracy, which a calibrator that sees the confidence alone cannot repair, and which the usual ECE averages away.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.neighbors import NearestNeighbors

from smartlib.arrays import as_confidence_and_correct, as_count, as_features, like, row_chunks, to_numpy
from smartlib.binned_errors import N_BINS, bin_edges, bin_index

N_NEIGHBOURS = 10
# Coarser than what differs between processors and numbers of threads, so that equal proximities stay equal.
_DECIMALS = 12


def proximity(features: Any, reference: Any = None, n_neighbours: int = N_NEIGHBOURS) -> Any:
    """Mean of exp(-d²) over the nearest reference features, d the distance of the directions (rows of length one).

    The neighbours are exact. A row of zeros has no direction: it stays zero, at distance 1 of all others. Where fewer
    neighbours than asked for exist, all of them count; a single sample without any has proximity 0.

    Args:
        features: (N, D), at least one row.
        reference: (M, D) features among which the neighbours are sought. None: ``features`` themselves, each sample's
            own row left out (equal rows of other samples count).
        n_neighbours: how many neighbours, at least 1.

    Returns:
        (N,) float64 in [exp(-4), 1], dimensionless, of the input's kind and device; large where samples are dense.

    Raises:
        ValueError: bad features (see `smartlib.arrays.as_features`), none at all, another D in the reference, or
            ``n_neighbours`` no whole number of at least 1.

    Source: Xiong et al. 2023 with the authors' code, which averages exp(-d²); their text has exp(-mean d).

    >>> proximity([[2.0, 0.0]], [[1.0, 0.0], [0.0, 3.0]], n_neighbours=2).round(4)     # (1 + exp(-2)) / 2
    array([0.5677])
    """
    k = as_count(n_neighbours, "n_neighbours")
    x = unit_rows(features)
    among_themselves = reference is None
    r = x if among_themselves else unit_rows(reference)
    if r.shape[1] != x.shape[1]:
        raise ValueError(f"features have {x.shape[1]} columns, but reference has {r.shape[1]}")
    k = min(k, len(r) - among_themselves)
    if k == 0:
        return like(np.zeros(len(x)), features)
    # scikit-learn computes the distances in blocks, in float64 also for float32 rows.
    nearest = NearestNeighbors(n_neighbors=k, algorithm="brute", metric="sqeuclidean").fit(r)
    squared, _ = nearest.kneighbors(None if among_themselves else x)
    return like(np.round(np.exp(-squared).mean(axis=1), _DECIMALS), features)


def unit_rows(features: Any) -> np.ndarray:
    """Checked features with every row divided by its length; a row of zeros stays zero.

    Args:
        features: (N, D), at least one row.

    Returns:
        (N, D) float32.

    Raises:
        ValueError: see :func:`proximity`.

    Source: Xiong et al. 2023 normalise in this way.

    >>> unit_rows([[0.0, 2.0], [0.0, 0.0]]).tolist()
    [[0.0, 1.0], [0.0, 0.0]]
    """
    array = to_numpy(features, "features")
    x = as_features(array, len(array) if array.ndim else 0)
    if len(x) == 0:
        raise ValueError("features have no rows: at least one sample is needed")
    result = np.empty(x.shape, dtype=np.float32)
    for rows in row_chunks(*x.shape):
        chunk = x[rows].astype(np.float64)
        largest = np.abs(chunk).max(axis=1, keepdims=True)  # divided out first: the squares may overflow or vanish
        chunk /= np.where(largest > 0, largest, 1.0)
        length = np.sqrt((chunk**2).sum(axis=1, keepdims=True))
        result[rows] = chunk / np.where(length > 0, length, 1.0)
    return result


def proximity_informed_ece(
    confidence: Any, correct: Any, proximity: Any, n_proximity_bins: int = 10, n_bins: int = N_BINS
) -> float:
    """PIECE: mean over samples of |accuracy - confidence| of their cell of proximity and confidence.

    It is at least the ECE, and equals it where the gaps of a confidence bin have one sign at all proximities. With so
    many cells it is never near zero on a small set: compare calibrators on one set only.

    Args:
        confidence: (N,) in [0, 1].
        correct: (N,) of 0 and 1.
        proximity: (N,) finite, of the same samples.
        n_proximity_bins: bins of proximity, of equal mass (ties stay together).
        n_bins: bins of confidence, of equal width.

    Returns:
        PIECE in [0, 1].

    Raises:
        ValueError: bad arrays or settings.

    Source: Xiong et al. 2023; the numbers of bins are those of the authors' code.

    >>> round(proximity_informed_ece([0.8, 0.8], [1, 0], [0.5, 0.6], n_proximity_bins=2), 12)   # (0.2 + 0.8) / 2
    0.5
    """
    f, a = as_confidence_and_correct(confidence, correct)
    d = to_numpy(proximity, "proximity").astype(np.float64)
    if d.shape != f.shape:
        raise ValueError(f"confidence has shape {f.shape} but proximity has shape {d.shape}; both must be (N,)")
    bad = np.flatnonzero(~np.isfinite(d))
    if bad.size:
        raise ValueError(f"proximity {d[bad[0]]} in row {bad[0]} is not finite")
    bin_of_confidence = bin_index(f, bin_edges(f, n_bins, "width"))
    cell = bin_of_confidence + n_bins * bin_index(d, proximity_edges(d, n_proximity_bins))
    return float(np.abs(np.bincount(cell, a - f)).sum() / len(f))


def proximity_edges(proximity: np.ndarray, n_proximity_bins: int) -> np.ndarray:
    """Edges of bins (lo, hi] of equal mass: the quantiles, interpolated between the two samples beside them.

    Raises:
        ValueError: ``n_proximity_bins`` is no whole number of at least 1.
    """
    n_proximity_bins = as_count(n_proximity_bins, "n_proximity_bins")
    return np.quantile(proximity, np.arange(n_proximity_bins + 1) / n_proximity_bins)
