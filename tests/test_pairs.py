"""Paired comparisons of all methods: agreement with `compare`, and how often the set of the best holds the best."""

import numpy as np
import pandas as pd
import pytest

from smartlib import SMART, TemperatureScaling, compare
from smartlib.data import Bundle, Split
from smartlib.experiments import pairs, records
from smartlib.experiments.cells import Cell
from smartlib.experiments.pairs import CLAIMED, METRICS, behind_the_best, paired_table

SMALL = [Cell("small", "uncalibrated"), *(Cell("small", m, m) for m in ("ts", "hb", "smart"))]
SMALL.append(Cell("small", "smart-again", "smart"))


def small_bundle() -> Bundle:
    rng = np.random.default_rng(0)

    def split(n):
        logits = rng.normal(size=(n, 4)) * 2
        p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        return Split(3 * logits, np.array([rng.choice(4, p=row) for row in p]))

    return Bundle("small", split(400), split(400))


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SMARTLIB_FIGURES_DIR", str(tmp_path_factory.mktemp("figures")))
        patch.setattr(pairs, "load", lambda name: small_bundle())
        patch.setattr(pairs, "N_RESAMPLES", 60)
        # In this process, where the data are.
        patch.setattr(records, "compute", lambda tasks: ((task, task.run()) for task in tasks))
        first = paired_table(SMALL, "p_pairs")
        pd.testing.assert_frame_equal(first, paired_table(SMALL, "p_pairs"))
    return first.set_index(["metric", "method"])


@pytest.mark.filterwarnings("ignore::smartlib.calibrators.CalibrationWarning")
def test_the_difference_from_smart_is_that_of_compare(table):
    bundle = small_bundle()
    fitted = (c.fit(bundle.val.logits, bundle.val.labels) for c in (TemperatureScaling(), SMART()))
    ts, smart = (calibrator.predict_proba(bundle.test.logits) for calibrator in fitted)
    for metric in METRICS:
        expected = compare(ts, smart, bundle.test.labels, metric, n_resamples=60)
        found = table.loc[(metric, "ts"), ["vs_smart", "vs_smart_low", "vs_smart_high"]]
        assert found.tolist() == pytest.approx([expected.difference, expected.low, expected.high], abs=1e-7)


def test_one_row_per_metric_and_method_and_the_claimed_among_themselves(table):
    assert len(table) == len(METRICS) * len(SMALL)
    has_claimed = table["behind_claimed"].notna().groupby("method").all()
    assert has_claimed[has_claimed].index.tolist() == sorted({"ts", "smart"} & set(CLAIMED))
    # The logits are three times too large: not calibrating is worse than anything else.
    assert (table.xs("uncalibrated", level="method")["behind"] > 0.02).all()
    assert (table.xs("ts", level="method").loc[["nll", "brier"], "behind"] < 0).all()


def test_the_same_predictions_are_never_behind_each_other(table):
    again = table.xs("smart-again", level="method")
    assert (again[["vs_smart", "vs_smart_low", "vs_smart_high"]] == 0).all(axis=None)
    pd.testing.assert_series_equal(again["behind"], table.xs("smart", level="method")["behind"])


def test_two_methods_by_hand():
    # Differences of 2 with a standard deviation of 1 and no bias: the bound is 2 minus the 97.5 % quantile.
    drawn = np.random.default_rng(0).normal(size=200_000)
    resampled = np.column_stack([drawn - drawn.mean(), np.full(200_000, -2.0)])
    behind = behind_the_best(np.array([0.0, -2.0]), resampled)
    assert behind == pytest.approx([2 - 1.96, -2 - 1.96], abs=0.02)
    assert behind_the_best(np.array([3.0]), np.full((5, 1), 3.0)).tolist() == [0.0]


def test_of_the_two_kinds_of_bound_the_lower_one_counts():
    noise = np.random.default_rng(0).normal(size=1000) * 0.01
    for bias in (0.1, -0.1):
        behind = behind_the_best(np.array([0.5, 0.3]), np.column_stack([0.5 + bias + noise, np.full(1000, 0.3)]))
        assert behind[0] == pytest.approx(0.2 - 0.1 - 1.96 * 0.01, abs=0.003)


def test_the_set_holds_the_best_method_in_all_but_few_samples():
    """Eight methods that are equally good: the worst case. Without allowing for eight of them, one set in six fails."""
    rng = np.random.default_rng(0)
    missed, n_sims = 0, 300
    for _ in range(n_sims):
        losses = rng.normal(size=(200, 8)) + rng.normal(size=(200, 1))
        weights = rng.multinomial(200, np.full(200, 1 / 200), size=200) / 200
        missed += behind_the_best(losses.mean(axis=0), weights @ losses)[0] > 0
    assert missed / n_sims <= 0.05
