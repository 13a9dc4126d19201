"""A synthetic classifier whose true accuracy at every confidence, and so every true calibration error, is known.

A row is made from the top downwards: first its confidence f, then logits that have this confidence, then the label.

    f = 1 - (1 - 1/K) B,  B from a Beta distribution             most rows are confident, as with trained networks
    logits: normal numbers, scaled so that their softmax has confidence f                (Proposition 1: T* is unique)
    P(correct | row) = r(f),  logit r(f) = shift + slope * logit(f)      the other classes share the rest as the softmax
                                                                         does

r depends on the row through f alone, so it *is* P(correct | f). slope = 1 and shift = 0 is perfect calibration; a
slope below 1 makes confident predictions over-confident, a shift moves all of them, and both together give gaps of both
signs. All settings keep 0 < r < 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import expit, log_softmax
from scipy.stats import beta

from smartlib.data.bundles import Split
from smartlib.metrics import METRICS, N_BINS, TOP_LABEL_ERRORS, bin_edges, bin_index
from smartlib.resampling import population_statistic
from smartlib.toplabel import temperature_at_confidence

# Rows on which the true values are computed: equally spaced quantiles of f, so that only the shape of the classes below
# the top is random.
_N_TRUTH = 100_000


@dataclass(frozen=True)
class Population:
    """A population of logits and labels.

    Args:
        n_classes: K >= 2.
        slope, shift: of the true log-odds of being correct, as a function of those of the confidence.
        shape: the two parameters (b, a) of the Beta distribution of B.

    Raises:
        ValueError: fewer than two classes, or a shape that is not positive.

    Source: ours.

    >>> over_confident = Population(slope=0.6)
    >>> print(round(float(over_confident.accuracy(0.95)), 3))
    0.854
    """

    n_classes: int = 10
    slope: float = 1.0
    shift: float = 0.0
    shape: tuple[float, float] = (0.5, 4.0)

    def __post_init__(self):
        if self.n_classes < 2:
            raise ValueError(f"n_classes must be at least 2, got {self.n_classes}")
        if not min(self.shape) > 0:
            raise ValueError(f"shape must hold two positive numbers, got {self.shape}")

    def accuracy(self, confidence: np.ndarray) -> np.ndarray:
        """P(correct | confidence), r(f), for confidences (N,) strictly between 0 and 1."""
        f = np.asarray(confidence, dtype=np.float64)
        return expit(self.shift + self.slope * (np.log(f) - np.log1p(-f)))

    def sample(self, n: int, *, seed: int = 0) -> Split:
        """Independent rows.

        Args:
            n: number of rows.
            seed: of all random numbers.

        Returns:
            Split with logits (N, K) and labels (N,).
        """
        rng = np.random.default_rng(seed)
        logits, _, q = self._rows(beta.rvs(*self.shape, size=n, random_state=rng), rng)
        labels = (q.cumsum(axis=1)[:, :-1] < rng.random((n, 1))).sum(axis=1)
        return Split(logits, labels)

    def true_metrics(self) -> dict[str, float]:
        """The value of every metric of `smartlib.evaluate` in the whole population, to about 1e-4 of its size.

        Calibration errors are those of the population, without the noise of a sample: for a calibrated population
        they are zero. Bins are the metric's own (for adaece, quantiles of the population).

        Returns:
            Metric to value, fractions (NLL in nats).
        """
        quantiles = (np.arange(_N_TRUTH) + 0.5) / _N_TRUTH
        _, log_p, q = self._rows(beta.ppf(quantiles, *self.shape), np.random.default_rng(0))
        p = np.exp(log_p)
        f = p.max(axis=1)
        order = np.argsort(f)
        f, accuracy = f[order], self.accuracy(f[order])
        rows = np.arange(len(f))
        truth = {m: population_statistic(m, f)(rows, accuracy) for m in METRICS if m in TOP_LABEL_ERRORS}
        truth["accuracy"] = float(accuracy.mean())
        truth["nll"] = float(-(q * log_p).sum(axis=1).mean())
        truth["brier"] = float((1 - 2 * (p * q).sum(axis=1) + (p**2).sum(axis=1)).mean())
        # No class is special, so all columns together are one sample of a class's probability and its true one.
        index = bin_index(p.ravel(), bin_edges(p, N_BINS, "width"))
        truth["cwece"] = float(np.abs(np.bincount(index, (q - p).ravel(), N_BINS)).sum() / p.size)
        return {metric: truth[metric] for metric in METRICS}

    def _rows(self, b: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Logits, log-softmax and true class probabilities, each (N, K), of rows with confidence 1 - (1 - 1/K) b."""
        k = self.n_classes
        below = (1 - 1 / k) * np.clip(b, 1e-300, 1 - 1e-9)  # 1 - f, kept itself because f may round to 1
        odds = np.log1p(-below) - np.log(below)
        z = rng.normal(size=(len(b), k))
        logits = z / temperature_at_confidence(z, log_odds=odds)[:, None]
        log_p = log_softmax(logits, axis=1)
        correct = expit(self.shift + self.slope * odds)
        # The softmax without the top class, times the probability of being wrong.
        top = np.arange(k) == logits.argmax(axis=1)[:, None]
        q = np.where(top, 0.0, np.exp(log_p)) * ((1 - correct) / below)[:, None] + np.where(top, correct[:, None], 0.0)
        return logits, log_p, q
