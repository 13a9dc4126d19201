"""What the margin says about a sample (notebook 08): distance to the boundary, calibration by group, and many-way ties.

Three questions, one part of this file each: which signal ranks samples as their distance to the decision boundary does;
how calibrated are groups of samples with similar margins, and does the margin say anything that the confidence does
not; and what becomes of calibration by margin where a sample is torn between many classes at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import softmax
from scipy.stats import binomtest, gamma, kendalltau, norm, rankdata

from smartlib.calibrators import create
from smartlib.hardness import SIGNALS, hardness
from smartlib.metrics import evaluate
from smartlib.toplabel import log_odds, margin

# Of these two a harder sample has more; with the sign changed, all signals should rise with the distance.
_MORE_IS_HARDER = ("entropy", "energy")

# --- distance to the boundary -----------------------------------------------------------------------------------


def rank_correlations(
    distance: np.ndarray,
    logits: np.ndarray,
    *,
    signals: Iterable[str] = SIGNALS,
    n_resamples: int = 300,
    seed: int = 0,
) -> pd.DataFrame:
    """Rank correlations of hardness signals with the distance to the decision boundary.

    All signals are turned so that a larger value says "easier". The bootstrap draws samples, the same ones for all
    signals, so that differences between signals are paired.

    Args:
        distance: (N,) distances; samples where it is NaN are left out.
        logits: (N, K) of the same samples.
        signals: from `smartlib.hardness.SIGNALS`; the margin is added where it is missing.
        n_resamples: bootstrap resamples. seed: of the bootstrap.

    Returns:
        One row per coefficient ("spearman", "kendall") and signal: coefficient, signal, n, value, low, high (95 %
        percentile interval), and minus_margin, minus_margin_low, minus_margin_high: the signal's coefficient minus the
        margin's.

    Raises:
        ValueError: fewer than 3 distances.

    Source: Spearman 1904; Kendall 1938 (tau-b); the bootstrap: Efron 1979.
    """
    found = np.isfinite(distance)
    if found.sum() < 3:
        raise ValueError(f"a rank correlation needs at least 3 distances, got {found.sum()}")
    signals = ["margin", *(signal for signal in signals if signal != "margin")]
    easier = [(-1 if signal in _MORE_IS_HARDER else 1) * hardness(logits[found], signal) for signal in signals]
    values = np.stack([distance[found], *easier])
    rng, n = np.random.default_rng(seed), int(found.sum())
    resampled = [values[:, rng.integers(0, n, n)] for _ in range(n_resamples)]
    rows = []
    for coefficient, measure in (("spearman", _spearman), ("kendall", _kendall)):
        value, draws = measure(values), np.array([measure(sample) for sample in resampled])
        limits, paired = (_percentiles(x) for x in (draws, draws - draws[:, :1]))
        for i, signal in enumerate(signals):
            rows.append(
                {"coefficient": coefficient, "signal": signal, "n": n, "value": value[i], "low": limits[0, i],
                 "high": limits[1, i], "minus_margin": value[i] - value[0], "minus_margin_low": paired[0, i],
                 "minus_margin_high": paired[1, i]}
            )  # fmt: skip
    return pd.DataFrame(rows)


def _spearman(values: np.ndarray) -> np.ndarray:
    """Of the first row with each of the others."""
    return np.corrcoef(rankdata(values, axis=1))[0, 1:]


def _kendall(values: np.ndarray) -> np.ndarray:
    """Of the first row with each of the others."""
    return np.array([kendalltau(values[0], row).statistic for row in values[1:]])


def _percentiles(draws: np.ndarray) -> np.ndarray:
    return np.quantile(draws, [0.025, 0.975], axis=0)


# --- groups -----------------------------------------------------------------------------------------------------


def quantile_groups(values: np.ndarray, n_groups: int) -> np.ndarray:
    """Groups of equal size by rank, 0 .. n_groups - 1, (N,) int64; equal values stay together.

    >>> quantile_groups(np.array([0.3, 0.1, 0.2, 0.9]), 2)
    array([1, 0, 0, 1])
    """
    return ((rankdata(values, method="min") - 1) * n_groups / len(values)).astype(np.int64)


def group_gaps(confidence: np.ndarray, correct: np.ndarray, groups: np.ndarray, *, level: float = 0.95) -> pd.DataFrame:
    """Accuracy minus confidence in groups of samples.

    Args:
        confidence: (N,) of the predicted class. correct: (N,) of 0 and 1. groups: (N,) int, the group of each sample.
        level: with which *all* intervals together hold the true gaps (Bonferroni).

    Returns:
        One row per group that has samples, in ascending order: group, n, accuracy, confidence, gap, low, high; the gap
        is positive where the group is under-confident. The interval is Wilson's of the accuracy, less the confidence.

    Source: Wilson 1927.

    >>> group_gaps(np.full(4, 0.5), np.array([1, 1, 1, 0]), np.array([0, 0, 1, 1]))[["n", "gap"]].values.tolist()
    [[2.0, 0.5], [2.0, 0.0]]
    """
    present = np.unique(groups)
    rows = []
    for group in present:
        inside = groups == group
        n, n_correct, f = int(inside.sum()), int(correct[inside].sum()), float(confidence[inside].mean())
        low, high = _wilson(n_correct, n, 1 - (1 - level) / len(present))
        rows.append(
            {"group": int(group), "n": n, "accuracy": n_correct / n, "confidence": f, "gap": n_correct / n - f,
             "low": low - f, "high": high - f}
        )  # fmt: skip
    return pd.DataFrame(rows)


def verdict(low: float, high: float) -> str:
    """What an interval of accuracy minus confidence says: "under-confident", "over-confident" or "undecided"."""
    return "under-confident" if low > 0 else "over-confident" if high < 0 else "undecided"


def effective_rivals(logits: np.ndarray, temperature: Any = 1.0) -> np.ndarray:
    """How many runners-up share what the predicted class leaves: (1 - f) / p(2), from 1 to K - 1.

    It is exactly what the margin has and the confidence lacks: m / T = log-odds(f) + log of this number. One rival has
    it all (1), or all K - 1 classes share it equally (K - 1).

    Args:
        logits: (N, K). temperature: scalar or (N,).

    Returns:
        (N,) float64, NaN where only one logit is finite.

    Source: ours.

    >>> effective_rivals(np.array([[4.0, 1.0, 1.0, 1.0], [4.0, 1.0, -np.inf, -np.inf]])).round(6)
    array([3., 1.])
    """
    with np.errstate(invalid="ignore"):
        return np.exp(margin(logits) / temperature - log_odds(logits, temperature))


def gaps_within_confidence(
    confidence: np.ndarray, correct: np.ndarray, rivals: np.ndarray, *, n_bins: int = 10
) -> tuple[pd.DataFrame, tuple[float, float, float]]:
    """Does the number of rivals, so the margin at a given confidence, tell more than the confidence?

    In bins of equal numbers by confidence, the half of the samples with many rivals is compared with the half with few.

    Args:
        confidence: (N,). correct: (N,) of 0 and 1. rivals: (N,), of :func:`effective_rivals`.
        n_bins: confidence bins.

    Returns:
        A table with one row per bin: group, n, confidence, few, many (the gaps of the two halves), difference (many -
        few), low, high (95 % for all bins together; Newcombe's interval of a difference of shares, less the difference
        of the confidences); and the difference over all bins, weighted by their size, with its 95 % interval (normal).

    Source: Newcombe 1998; ours.
    """
    bins = quantile_groups(confidence, n_bins)
    present = np.unique(bins)
    level = 1 - 0.05 / len(present)
    rows, variance = [], 0.0
    for group in present:
        inside = np.flatnonzero(bins == group)
        halves = quantile_groups(rivals[inside], 2)
        if halves.max() == 0:  # all of one number
            continue
        few, many = (inside[halves == half] for half in (0, 1))
        gap, ends, spread = {}, {}, 0.0
        for name, half in (("few", few), ("many", many)):
            gap[name] = correct[half].mean() - confidence[half].mean()
            low, high = _wilson(int(correct[half].sum()), len(half), level)
            ends[name] = (correct[half].mean() - low, high - correct[half].mean())
            spread += (correct[half] - confidence[half]).var(ddof=1) / len(half)
        difference = gap["many"] - gap["few"]
        rows.append(
            {"group": int(group), "n": len(inside), "confidence": confidence[inside].mean()} | gap
            | {"difference": difference, "low": difference - np.hypot(ends["many"][0], ends["few"][1]),
               "high": difference + np.hypot(ends["many"][1], ends["few"][0])}
        )  # fmt: skip
        variance += len(inside) ** 2 * spread
    table = pd.DataFrame(rows)
    overall = float(np.average(table["difference"], weights=table["n"]))
    width = norm.ppf(0.975) * np.sqrt(variance) / table["n"].sum()
    return table, (overall, overall - width, overall + width)


def _wilson(k: int, n: int, level: float) -> tuple[float, float]:
    interval = binomtest(k, n).proportion_ci(level, method="wilson")
    return float(interval.low), float(interval.high)


# --- many-way ties ----------------------------------------------------------------------------------------------

# Name in tables to calibrator and settings; None is the model as it is.
TIE_METHODS: dict[str, tuple[str, dict] | None] = {
    "uncalibrated": None,
    "ts": ("ts", {}),
    "ets": ("ets", {}),
    "smart": ("smart", {}),
    "SMART by entropy": ("smart", {"signal": "entropy"}),
    "SMART by soft-tail margin": ("smart", {"signal": "soft_tail_margin"}),
}


@dataclass(frozen=True)
class Ties:
    """Samples of two kinds, of which one is torn between many classes; the true probabilities are known.

    Args:
        logits: (N, K). labels: (N,). probs: (N, K), P(label | row), from which the labels were drawn.
        many: (N,) bool, whether the row is of the kind with many rivals.
    """

    logits: np.ndarray
    labels: np.ndarray
    probs: np.ndarray
    many: np.ndarray


def sample_ties(
    n: int,
    *,
    n_rivals: tuple[int, int] = (1, 40),
    temperatures: tuple[float, float] = (1.5, 3.0),
    n_classes: int = 100,
    seed: int = 0,
) -> Ties:
    """Draw samples whose margins are alike while their number of rivals is not.

    Half of the rows have few rivals, half have many: that many classes trail the top one by the margin m (the first
    exactly, the others by up to 0.1 more), all others by about m + 12. The margins of both kinds come from one Gamma
    distribution. The labels are drawn from softmax(z / T) with the temperature of the row's kind, so that dividing each
    kind by its own temperature is perfect calibration, and no function of the margin alone can do that.

    Args:
        n: number of rows.
        n_rivals: of the two kinds. temperatures: of the two kinds; two equal ones make a model that temperature scaling
            calibrates perfectly.
        n_classes: K. seed: of all random numbers.

    Raises:
        ValueError: more rivals than K - 1.

    Source: ours, for the limit that the paper names.
    """
    if not 1 <= min(n_rivals) <= max(n_rivals) <= n_classes - 1:
        raise ValueError(f"n_rivals must lie between 1 and {n_classes - 1}, one less than the classes; got {n_rivals}")
    rng = np.random.default_rng(seed)
    many = rng.random(n) < 0.5
    m = gamma.rvs(2.0, scale=4.0, size=n, random_state=rng)
    position = np.arange(n_classes)
    below = np.where(position == 1, 0.0, rng.uniform(0, 0.1, (n, n_classes)))
    is_far = position > np.where(many, n_rivals[1], n_rivals[0])[:, None]
    logits = -(m[:, None] + below + np.where(is_far, 12.0, 0.0))
    logits[:, 0] = 0.0
    logits = rng.permuted(logits, axis=1)
    probs = softmax(logits / np.where(many, temperatures[1], temperatures[0])[:, None], axis=1)
    labels = (probs.cumsum(axis=1)[:, :-1] < rng.random((n, 1))).sum(axis=1)
    return Ties(logits, labels, probs, many)


def judge_ties(name: str, val: Ties, test: Ties, *, n_resamples: int = 100) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Fit each of ``TIE_METHODS`` on one sample and judge it on another, beside the true probabilities.

    Args:
        name: of the population, for the column "bundle". val, test: of :func:`sample_ties`.
        n_resamples: for the intervals of `smartlib.evaluate`.

    Returns:
        Records for `smartlib.experiments.tables.metric_table`, the method "true probabilities" being the last, with
        ``row_error_few`` and ``row_error_many`` beside: mean |confidence - true probability| over the rows of a kind,
        which is zero for the truth and has no noise floor; and ``gap_few``, ``gap_many``: mean true probability minus
        mean confidence. And the fitted calibrators by method.
    """
    predict: dict[str, Callable[[np.ndarray], np.ndarray]] = {}
    fitted = {}
    for method, how in TIE_METHODS.items():
        if how is None:
            predict[method] = lambda z: softmax(z, axis=1)
        else:
            fitted[method] = create(how[0], **how[1]).fit(val.logits, val.labels)
            predict[method] = fitted[method].predict_proba
    predict["true probabilities"] = lambda _: test.probs
    truth = test.probs[np.arange(len(test.labels)), test.logits.argmax(axis=1)]
    records = []
    for method, function in predict.items():
        probs = function(test.logits)
        record = {"bundle": name, "method": method} | evaluate(probs, test.labels, n_resamples=n_resamples).to_dict()
        error = truth - probs[np.arange(len(truth)), test.logits.argmax(axis=1)]
        for kind, rows in (("few", ~test.many), ("many", test.many)):
            record |= {f"row_error_{kind}": np.abs(error[rows]).mean(), f"gap_{kind}": error[rows].mean()}
        records.append(record)
    return pd.DataFrame(records), fitted
