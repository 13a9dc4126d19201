"""The compiled inner loops of simulated samples, in a file of their own so that numba is imported only when needed."""

import numpy as np
from numba import njit


def drawn_rows(copies, uniform, accuracy):
    """A resample of sorted samples with simulated outcomes.

    Args:
        copies: (N,) how often each sample is drawn; sums to n.
        uniform: (n,) random numbers. accuracy: (N,) probability that a sample is right.

    Returns:
        ``(rows, correct)``, (n,) each: the samples in their order, each as often as it is drawn, and 1.0 where right.
    """
    rows = np.empty(uniform.size, dtype=np.intp)
    correct = np.empty(uniform.size)
    position = 0
    for i in range(copies.size):
        for _ in range(copies[i]):
            rows[position] = i
            correct[position] = 1.0 if uniform[position] < accuracy[i] else 0.0
            position += 1
    return rows, correct


def binned_gaps(index, f, rows, correct, n_bins):
    """Number of samples in each bin and sum of correct - confidence there, ``(count, gap)`` of (n_bins,) each.

    Args:
        index: (N,) bin of each sample. f: (N,) confidences. rows: (n,) the samples. correct: (n,) their outcomes.
    """
    count, gap = np.zeros(n_bins), np.zeros(n_bins)
    for position in range(rows.size):
        i = rows[position]
        count[index[i]] += 1.0
        gap[index[i]] += correct[position] - f[i]
    return count, gap


def drawn_labels(cell, cumulative, copies, uniform, n_cells):
    """How many simulated labels fall into each cell of a classwise error.

    Args:
        cell: (N, K) cell of each probability, a bin of a class.
        cumulative: (N, K) of the probabilities that labels are drawn from; the last column infinite.
        copies: (N,) how often each row is drawn; sums to n. uniform: (n,) random numbers.

    Returns:
        (n_cells,).
    """
    hits = np.zeros(n_cells)
    position = 0
    for i in range(copies.size):
        # Each copy of a row gets a label of its own.
        for _ in range(copies[i]):
            hits[cell[i, np.searchsorted(cumulative[i], uniform[position])]] += 1.0
            position += 1
    return hits


# Where no cache can be written (see `smartlib._smce_kernel`) they are compiled once per process.
try:
    drawn_rows, binned_gaps, drawn_labels = map(njit(cache=True), (drawn_rows, binned_gaps, drawn_labels))
except RuntimeError:
    drawn_rows, binned_gaps, drawn_labels = map(njit, (drawn_rows, binned_gaps, drawn_labels))
