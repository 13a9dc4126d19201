"""What notebook 08 computes: correlations, gaps of groups, and the population with many-way ties."""

import numpy as np
import pandas as pd
import pytest
from scipy.special import softmax
from scipy.stats import kendalltau, spearmanr

from smartlib.experiments import hardness_study as study
from smartlib.hardness import SIGNALS
from smartlib.metrics import METRICS
from smartlib.toplabel import confidence, log_odds, margin


def noisy_logits(n, k=5, seed=0):
    return 3 * np.random.default_rng(seed).normal(size=(n, k))


# --- correlations -----------------------------------------------------------------------------------------------


def test_correlations_are_scipys_and_all_signals_are_turned_the_same_way():
    logits = noisy_logits(150)
    distance = margin(logits) * np.exp(0.3 * np.random.default_rng(1).normal(size=150))
    distance[7] = np.nan
    table = study.rank_correlations(distance, logits, n_resamples=40)
    assert set(table["signal"]) == set(SIGNALS) and (table["n"] == 149).all()
    kept = np.delete(np.arange(150), 7)
    for name, measure in (("spearman", spearmanr), ("kendall", kendalltau)):
        rows = table[table["coefficient"] == name].set_index("signal")
        expected = measure(distance[kept], margin(logits)[kept]).statistic
        assert rows.loc["margin", "value"] == pytest.approx(expected, abs=1e-12)
        assert rows.loc[["margin", "confidence", "entropy", "soft_tail_margin"], "value"].min() > 0.3
        assert (rows["low"] <= rows["value"]).all() and (rows["value"] <= rows["high"]).all()
        assert rows.loc["margin", ["minus_margin", "minus_margin_low", "minus_margin_high"]].tolist() == [0, 0, 0]


def test_the_bootstrap_is_paired():
    """Two signals that rank all samples alike differ by nothing in any resample, however wide their own intervals."""
    logits = noisy_logits(60, k=2)
    distance = np.random.default_rng(3).random(60)
    table = study.rank_correlations(distance, logits, signals=["confidence", "entropy"], n_resamples=30)
    rows = table[table["signal"] == "confidence"]
    assert np.abs(rows[["minus_margin_low", "minus_margin_high"]].to_numpy()).max() < 1e-12, "K = 2: one to one"
    assert (rows["high"] - rows["low"]).min() > 0.1


def test_the_interval_is_as_wide_as_the_known_error():
    """Of independent rankings Spearman's coefficient has the standard deviation 1 / sqrt(n - 1)."""
    table = study.rank_correlations(
        np.random.default_rng(0).random(400), noisy_logits(400), signals=[], n_resamples=400
    ).set_index("coefficient")
    width = table.loc["spearman", "high"] - table.loc["spearman", "low"]
    assert width == pytest.approx(2 * 1.96 / np.sqrt(399), rel=0.15)


def test_too_few_distances():
    with pytest.raises(ValueError, match="at least 3 distances, got 2"):
        study.rank_correlations(np.array([1.0, 2.0, np.nan]), noisy_logits(3))


# --- groups -----------------------------------------------------------------------------------------------------


def test_groups_are_of_equal_size_and_keep_ties_together():
    groups = study.quantile_groups(np.random.default_rng(0).permutation(103), 10)
    assert set(np.bincount(groups)) == {10, 11}
    assert study.quantile_groups(np.array([5.0, 5, 5, 7]), 2).tolist() == [0, 0, 0, 1]


def test_gaps_against_wilsons_formula():
    f, correct = np.full(50, 0.7), np.arange(50) < 40
    table = study.group_gaps(f, correct, np.zeros(50, int))
    z, p, n = 1.959964, 0.8, 50
    centre, half = p + z**2 / (2 * n), z * np.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    assert table.loc[0, ["n", "accuracy", "gap"]].tolist() == pytest.approx([50, 0.8, 0.1])
    ends = np.array([centre - half, centre + half]) / (1 + z**2 / n) - 0.7
    np.testing.assert_allclose(table.loc[0, ["low", "high"]].to_numpy(float), ends, atol=1e-6)


def test_all_intervals_together_hold_the_truth():
    rng = np.random.default_rng(0)
    held = []
    for _ in range(200):
        f = rng.uniform(0.4, 0.99, 600)
        table = study.group_gaps(f, rng.random(600) < f - 0.1, study.quantile_groups(f, 6))
        held.append(((table["low"] <= -0.1) & (table["high"] >= -0.1)).all())
    assert np.mean(held) >= 0.93


def test_verdicts():
    assert [study.verdict(*ends) for ends in ((0.1, 0.2), (-0.2, -0.1), (-0.1, 0.1))] == [
        "under-confident", "over-confident", "undecided",
    ]  # fmt: skip


def test_margin_is_log_odds_and_effective_rivals():
    logits = noisy_logits(50, k=7)
    for t in (1.0, 2.5):
        rivals = study.effective_rivals(logits, t)
        np.testing.assert_allclose(margin(logits) / t, log_odds(logits, t) + np.log(rivals), atol=1e-12)
        assert ((rivals >= 1 - 1e-12) & (rivals <= 6 + 1e-12)).all()
        p = np.sort(softmax(logits / t, axis=1), axis=1)
        np.testing.assert_allclose(rivals, (1 - p[:, -1]) / p[:, -2], rtol=1e-9)
    assert study.effective_rivals(noisy_logits(20, k=2)) == pytest.approx(np.ones(20)), "K = 2: nothing is left"


def test_what_rivals_add_is_found_where_there_is_something_and_not_where_there_is_nothing():
    rng = np.random.default_rng(2)
    logits = noisy_logits(8000, k=8, seed=2)
    f, rivals = confidence(logits), study.effective_rivals(logits)
    centred = np.log(rivals) - np.log(rivals).mean()
    shifted = f + 0.15 * f * (1 - f) * np.sign(centred) * 4
    for truth, found in ((f, False), (np.clip(shifted, 0, 1), True)):
        table, (overall, low, high) = study.gaps_within_confidence(f, rng.random(8000) < truth, rivals, n_bins=5)
        assert (low > 0) == found and low < overall < high
        assert table["n"].sum() == 8000 and ((table["low"] > 0).any() == found)
        np.testing.assert_allclose(table["difference"], table["many"] - table["few"])


# --- ties -------------------------------------------------------------------------------------------------------


def test_ties_have_one_distribution_of_margins_and_the_stated_rivals():
    ties = study.sample_ties(20_000, n_rivals=(2, 30), seed=1)
    m = margin(ties.logits)
    few, many = m[~ties.many], m[ties.many]
    assert abs(np.median(few) - np.median(many)) < 0.2 and abs(few.mean() - many.mean()) < 0.2
    behind = (ties.logits.max(axis=1, keepdims=True) - ties.logits) <= m[:, None] + 0.1
    n_rivals = behind.sum(axis=1) - 1
    np.testing.assert_array_equal(n_rivals, np.where(ties.many, 30, 2))
    np.testing.assert_allclose(np.bincount(ties.labels, minlength=100) / 20_000, 0.01, atol=0.004)


def test_the_labels_follow_the_true_probabilities_at_each_kinds_temperature():
    ties = study.sample_ties(40_000, temperatures=(1.5, 3.0), seed=2)
    top = ties.logits.argmax(axis=1)
    for rows, t in ((~ties.many, 1.5), (ties.many, 3.0)):
        truth = confidence(ties.logits[rows], t)
        np.testing.assert_allclose(ties.probs[rows].max(axis=1), truth, atol=1e-12)
        correct = ties.labels[rows] == top[rows]
        assert abs(correct.mean() - truth.mean()) < 3 * np.sqrt((truth * (1 - truth)).sum()) / rows.sum()


def test_too_many_rivals():
    with pytest.raises(ValueError, match=r"between 1 and 9, .* got \(1, 10\)"):
        study.sample_ties(5, n_rivals=(1, 10), n_classes=10)


def test_ties_are_judged_beside_the_truth(monkeypatch):
    monkeypatch.setattr(study, "TIE_METHODS", {"uncalibrated": None, "ts": ("ts", {})})
    settings = {"n_rivals": (1, 8), "n_classes": 10}
    same = [study.sample_ties(1500, temperatures=(2.0, 2.0), seed=seed, **settings) for seed in (0, 1)]
    records, fitted = study.judge_ties("one temperature", *same, n_resamples=5)
    records = records.set_index("method")
    assert set(METRICS) <= set(records.columns) and "ece_floor_q95" in records
    assert list(records.index) == ["uncalibrated", "ts", "true probabilities"]
    assert fitted["ts"].temperature_ == pytest.approx(2.0, rel=0.1)
    truth = records.loc["true probabilities"]
    assert truth[["row_error_few", "row_error_many", "gap_few", "gap_many"]].abs().max() < 1e-12
    assert records.loc["ts", "row_error_many"] < 0.01 < records.loc["uncalibrated", "row_error_many"]
    f, top = same[1].probs, same[1].logits.argmax(axis=1)
    expected = (f - softmax(same[1].logits, axis=1))[np.arange(1500), top][same[1].many]
    assert records.loc["uncalibrated", "gap_many"] == pytest.approx(expected.mean())
    assert isinstance(records, pd.DataFrame)
