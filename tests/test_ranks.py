"""Rank tests: published examples, hand-computed cases, what happens at the ends."""

import numpy as np
import pandas as pd
import pytest
from scipy.stats import rankdata

from smartlib.experiments.ranks import against_each, critical_difference, friedman, ranks

# Table 6 of Demšar 2006: AUC of four variants of C4.5 on 14 data sets; higher is better, so the signs are changed.
DEMSAR = -pd.DataFrame(
    {
        "C4.5": [0.763, 0.599, 0.954, 0.628, 0.882, 0.936, 0.661, 0.583, 0.775, 1.000, 0.940, 0.619, 0.972, 0.957],
        "C4.5+m": [0.768, 0.591, 0.971, 0.661, 0.888, 0.931, 0.668, 0.583, 0.838, 1.000, 0.962, 0.666, 0.981, 0.978],
        "C4.5+cf": [0.771, 0.590, 0.968, 0.654, 0.886, 0.916, 0.609, 0.563, 0.866, 1.000, 0.965, 0.614, 0.9751, 0.946],
        "C4.5+m+cf": [0.798, 0.569, 0.967, 0.657, 0.898, 0.931, 0.685, 0.625, 0.875, 1.000, 0.962, 0.669, 0.975, 0.970],
    }
)


def test_the_example_of_demsar_comes_out_as_printed():
    average = ranks(DEMSAR).mean()
    assert average.round(3).tolist() == [3.143, 2.0, 2.893, 1.964]
    # Printed as 9.28 and 3.69: without the correction for ties, which Iman and Davenport's F has in its ANOVA form.
    chi_square = 12 * 14 / 20 * ((average**2).sum() - 4 * 25 / 4)
    assert chi_square == pytest.approx(9.28, abs=0.005)
    assert 13 * chi_square / (14 * 3 - chi_square) == pytest.approx(3.69, abs=0.005)
    assert friedman(DEMSAR).statistic > 3.69 and friedman(DEMSAR).p_value < 0.02
    assert critical_difference(4, 14) == pytest.approx(1.25, abs=0.005)
    assert critical_difference(4, 14, 0.10) == pytest.approx(1.12, abs=0.005)


@pytest.mark.parametrize(("k", "q"), [(2, 1.960), (3, 2.343), (5, 2.728), (8, 3.031), (10, 3.164)])
def test_critical_values_are_those_of_the_printed_table(k, q):
    assert critical_difference(k, 1) == pytest.approx(q * np.sqrt(k * (k + 1) / 6), rel=4e-4)


def test_two_identical_columns_share_their_rank_and_the_sum_stays():
    scores = pd.DataFrame(np.random.default_rng(0).normal(size=(6, 4)), columns=list("abcd"))
    scores["d"] = scores["a"]
    result = ranks(scores)
    assert (result["a"] == result["d"]).all() and (result.sum(axis=1) == 10).all()
    assert np.array_equal(result.to_numpy(), rankdata(scores.to_numpy(), axis=1))


@pytest.mark.parametrize(
    "scores", [DEMSAR, pd.DataFrame(np.random.default_rng(1).normal(size=(10, 6)))], ids=["ties", "no ties"]
)
def test_friedman_is_the_two_way_analysis_of_variance_of_the_ranks(scores):
    r = ranks(scores).to_numpy()
    n, k = r.shape
    between = n * ((r.mean(axis=0) - r.mean()) ** 2).sum()
    within = ((r - r.mean()) ** 2).sum() - between  # the ranks of every model have the same mean
    assert friedman(scores).statistic == pytest.approx((between / (k - 1)) / (within / ((k - 1) * (n - 1))))


def test_friedman_at_its_ends():
    same = pd.DataFrame({"a": [1.0, 2.0], "b": [1.0, 2.0], "c": [1.0, 2.0]})
    assert friedman(same) == (0.0, 1.0)
    agree = pd.DataFrame({"a": [1.0, 2.0], "b": [2.0, 3.0], "c": [3.0, 4.0]})
    assert friedman(agree) == (np.inf, 0.0)


def test_friedman_keeps_its_level_on_few_models():
    rng = np.random.default_rng(0)
    p = [friedman(pd.DataFrame(rng.normal(size=(10, 8)))).p_value for _ in range(400)]
    assert np.mean(np.array(p) < 0.05) == pytest.approx(0.05, abs=0.03)


def test_one_against_each_by_hand():
    scores = pd.DataFrame(
        {"a": [1.0, 2, 3, 4, 5], "b": [2.0, 4, 6, 8, 10], "c": [0.5, 2.25, 2.0, 4.75, 5.5], "d": range(1, 6)}
    )
    table = against_each(scores.astype(float), "a")
    assert table.loc["b", ["lower_on", "higher_on", "median_difference"]].tolist() == [5, 0, -3]
    # All five differences of one sign: 2 of the 32 patterns of signs are as extreme. Three rows: times three.
    assert table.loc["b", ["p_value", "p_holm"]].tolist() == pytest.approx([2 / 32, 6 / 32])
    # Differences .5, -.25, 1, -.75, -.5.
    assert table.loc["c", ["lower_on", "higher_on"]].tolist() == [3, 2]
    assert table.loc["d", ["lower_on", "higher_on", "p_value", "p_holm"]].tolist() == [0, 0, 1, 1]


def test_holm_never_falls_and_never_exceeds_bonferroni():
    rng = np.random.default_rng(0)
    scores = pd.DataFrame(rng.normal(size=(10, 6)) + np.arange(6), columns=list("abcdef"))
    table = against_each(scores, "a").sort_values("p_value")
    assert (table["p_holm"].diff().dropna() >= 0).all() and (
        table["p_holm"] <= np.minimum(5 * table["p_value"], 1)
    ).all()
    assert table["p_holm"].iloc[0] == min(5 * table["p_value"].iloc[0], 1)


def test_missing_scores_and_unknown_methods_are_named():
    scores = pd.DataFrame({"a": [1.0, 2.0], "b": [np.nan, 1.0], "c": [1.0, 3.0]})
    for function in (ranks, friedman, lambda s: against_each(s, "a")):
        with pytest.raises(ValueError, match=r"missing on some model: b; leave"):
            function(scores)
    with pytest.raises(ValueError, match=r"no scores of 'x'; there are a, c"):
        against_each(scores[["a", "c"]], "x")
    with pytest.raises(ValueError, match="at least 2 models and 3 methods; got 1 and 2"):
        friedman(scores[["a", "c"]].iloc[:1])
    with pytest.raises(ValueError, match="at least 2 methods and 1 model; got 1 and 5"):
        critical_difference(1, 5)
