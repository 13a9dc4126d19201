"""Methods ranked over models: is the order more than chance? (Demšar 2006)

Each model ranks the methods from 1, the lowest error, upwards. Friedman's test asks whether any method differs from
the others; Nemenyi's critical difference says how far apart two average ranks must be; Wilcoxon's signed rank test with
Holm's correction compares one method with each other. All three take the models for independent draws from the models
that somebody may have. Models that share data or architecture are not, so that the true p-values are higher.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.stats import f as f_distribution
from scipy.stats import friedmanchisquare, studentized_range, wilcoxon


class Friedman(NamedTuple):
    """Friedman's test of "all methods are alike", in the form of Iman and Davenport."""

    statistic: float
    p_value: float


def ranks(scores: pd.DataFrame) -> pd.DataFrame:
    """The rank of each method on each model: 1 for the lowest score; ties share the mean of their ranks.

    Args:
        scores: one row per model, one column per method, lower is better.

    Returns:
        The same shape.

    Raises:
        ValueError: a score is missing; name the methods that all models have.

    >>> ranks(pd.DataFrame({"a": [1.0, 3.0], "b": [2.0, 2.0], "c": [2.0, 4.0]})).to_numpy().tolist()
    [[1.0, 2.5, 2.5], [2.0, 1.0, 3.0]]
    """
    return _complete(scores).rank(axis=1)


def friedman(scores: pd.DataFrame) -> Friedman:
    """Friedman's test over models, with the F distribution of Iman and Davenport, which holds for few models.

    Args:
        scores: as for :func:`ranks`; at least two models and three methods.

    Returns:
        Statistic and p-value.

    Raises:
        ValueError: a score is missing, or there are too few.

    Source: Friedman 1937; Iman and Davenport 1980.
    """
    n, k = _complete(scores).shape
    if n < 2 or k < 3:
        raise ValueError(f"Friedman's test needs at least 2 models and 3 methods; got {n} and {k}")
    if (scores.nunique(axis=1) == 1).all():
        return Friedman(0.0, 1.0)  # no model tells any two methods apart
    chi_square = friedmanchisquare(*scores.to_numpy().T).statistic
    left = n * (k - 1) - chi_square
    # All models agree where nothing is left.
    statistic = (n - 1) * chi_square / left if left > 1e-9 else np.inf
    return Friedman(float(statistic), float(f_distribution.sf(statistic, k - 1, (k - 1) * (n - 1))))


def critical_difference(n_methods: int, n_models: int, level: float = 0.05) -> float:
    """How far apart two average ranks must be for Nemenyi's test to tell the methods apart.

    Args:
        n_methods: at least 2. n_models: at least 1.
        level: error probability for all pairs together.

    Returns:
        A difference of average ranks.

    Raises:
        ValueError: too few methods or models.

    Source: Nemenyi 1963, as in Demšar 2006, section 3.2.2.

    >>> round(critical_difference(4, 14), 2)
    1.25
    """
    if n_methods < 2 or n_models < 1:
        raise ValueError(f"need at least 2 methods and 1 model; got {n_methods} and {n_models}")
    q = studentized_range.ppf(1 - level, n_methods, np.inf) / np.sqrt(2)
    return float(q * np.sqrt(n_methods * (n_methods + 1) / (6 * n_models)))


def against_each(scores: pd.DataFrame, method: str) -> pd.DataFrame:
    """One method against each other one over the models: Wilcoxon's signed rank test, Holm's correction.

    Args:
        scores: as for :func:`ranks`.
        method: a column.

    Returns:
        One row per other method: ``lower_on`` and ``higher_on`` (models where ``method`` has the lower or the higher
        score), ``median_difference`` (method minus the other), ``p_value`` (two-sided) and ``p_holm``, which allows for
        the number of rows.

    Raises:
        ValueError: a score is missing, or there is no such column.

    Source: Wilcoxon 1945; Holm 1979.
    """
    if method not in _complete(scores).columns:
        raise ValueError(f"no scores of {method!r}; there are {', '.join(scores.columns)}")
    rows = []
    for other in scores.columns.drop(method):
        difference = (scores[method] - scores[other]).to_numpy()
        moved = difference[difference != 0]  # where both are equal nothing speaks for either
        p_value = wilcoxon(moved).pvalue if len(moved) else 1.0
        rows.append(
            {
                "other": other, "lower_on": int((difference < 0).sum()), "higher_on": int((difference > 0).sum()),
                "median_difference": float(np.median(difference)), "p_value": float(p_value),
            }
        )  # fmt: skip
    table = pd.DataFrame(rows).set_index("other")
    order = table["p_value"].argsort(kind="stable").to_numpy()
    steps = table["p_value"].to_numpy()[order] * np.arange(len(table), 0, -1)
    holm = np.empty(len(table))
    holm[order] = np.minimum(np.maximum.accumulate(steps), 1.0)
    return table.assign(p_holm=holm)


def _complete(scores: pd.DataFrame) -> pd.DataFrame:
    missing = scores.columns[scores.isna().any()]
    if len(missing):
        raise ValueError(f"scores are missing on some model: {', '.join(missing)}; leave these methods out")
    return scores
