"""The top-label confidence of every sample as a function of its temperature, tabulated once.

An objective that sees logits only through confidences then costs O(N) per step, whatever K is.
"""

from __future__ import annotations

import copy

import numpy as np

from smartlib.arrays import row_chunks

SPACING = 0.15  # in log T; the error in confidence is below 1e-4 at K = 100 (tests/test_smart.py)


class ConfidenceTable:
    """c_i(T) = 1 / sum_k exp(-g_ik / T) of every sample.

    Its negative logarithm and the derivative of that in u = log T are computed at nodes in u, one pass over N x K each,
    and interpolated by cubic Hermite pieces. It takes 16 bytes per sample and node.

    Args:
        z: (N, K) checked logits.
        low, high: the table's range of temperatures; T outside is taken at the end.
    """

    def __init__(self, z: np.ndarray, low: float, high: float):
        self.rows = np.arange(len(z))
        self.nodes = log_temperatures(low, high)
        self.value = np.empty((len(z), len(self.nodes)))
        self.slope = np.empty_like(self.value)
        for rows in row_chunks(*z.shape):
            self._tabulate(z[rows], self.value[rows], self.slope[rows])

    def _tabulate(self, z: np.ndarray, value: np.ndarray, slope: np.ndarray) -> None:
        gaps = z.max(axis=1, keepdims=True).astype(np.float64) - z
        scaled, weight = np.empty_like(gaps), np.empty_like(gaps)
        for j, node in enumerate(self.nodes):
            # exp(-700) is the last normal number; without the clip, denormals slow the loop several times.
            with np.errstate(over="ignore"):  # a class masked by the lowest number there is
                np.multiply(gaps, np.exp(-node), out=scaled)
            np.minimum(scaled, 700.0, out=scaled)
            np.exp(np.negative(scaled, out=weight), out=weight)
            total = weight.sum(axis=1)
            value[:, j] = np.log(total)
            slope[:, j] = np.multiply(weight, scaled, out=scaled).sum(axis=1) / total

    def of(self, rows: np.ndarray) -> ConfidenceTable:
        """The same table for some of the samples, by their indices; nothing is copied."""
        part = copy.copy(self)
        part.rows = self.rows[rows]
        return part

    def __call__(self, t: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Confidence and d confidence / dT, each (N,), at one temperature per sample."""
        u = np.log(t)
        step = self.nodes[1] - self.nodes[0]
        j = np.clip(((u - self.nodes[0]) / step).astype(int), 0, len(self.nodes) - 2)
        s = np.clip((u - self.nodes[j]) / step, 0.0, 1.0)
        y0, y1 = self.value[self.rows, j], self.value[self.rows, j + 1]
        d0, d1 = self.slope[self.rows, j] * step, self.slope[self.rows, j + 1] * step
        # y0 + s d0 + s^2 (3 (y1 - y0) - 2 d0 - d1) + s^3 (2 (y0 - y1) + d0 + d1)
        square, cube = 3 * (y1 - y0) - 2 * d0 - d1, 2 * (y0 - y1) + d0 + d1
        confidence = np.exp(-(y0 + s * (d0 + s * (square + s * cube))))
        inside = (u >= self.nodes[0]) & (u <= self.nodes[-1])
        slope = np.where(inside, (d0 + s * (2 * square + 3 * s * cube)) / step, 0.0)
        return confidence, -confidence * slope / t


def log_temperatures(low: float, high: float) -> np.ndarray:
    """The nodes: evenly spaced logarithms of temperatures from ``low`` to ``high``."""
    low, high = np.log(low), np.log(high)
    return np.linspace(low, high, int(np.ceil((high - low) / SPACING)) + 1)
