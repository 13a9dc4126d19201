"""The simulation of interval coverage: its shares are counts of the intervals that `evaluate` gives."""

import numpy as np
import pytest
from scipy.special import softmax

from smartlib import evaluate
from smartlib.data.synthetic import Population
from smartlib.experiments import coverage
from smartlib.metrics import METRICS


def test_shares_are_counted_from_the_intervals_of_evaluate(tmp_path, monkeypatch):
    population = Population(n_classes=3, slope=0.5)
    monkeypatch.setenv("SMARTLIB_FIGURES_DIR", str(tmp_path))
    monkeypatch.setattr(coverage, "POPULATIONS", {"over-confident": population})
    for name, value in {"SAMPLE_SIZE": 150, "N_SAMPLES": 8, "BLOCK": 4, "N_RESAMPLES": 20}.items():
        monkeypatch.setattr(coverage, name, value)
    table = coverage.coverage_table().set_index("metric")
    assert list(table.index) == list(METRICS) and (table["n_samples"] == 8).all()
    np.testing.assert_allclose(table["covered"] + table["above"] + table["below"], 1)
    truth = population.true_metrics()
    records = []
    for seed in range(8):
        split = population.sample(150, seed=seed)
        records.append(evaluate(softmax(split.logits, axis=1), split.labels, n_resamples=20, seed=seed))
    for metric in ("accuracy", "ece", "smce"):
        intervals = [record.intervals[metric] for record in records]
        covered = np.mean([low <= truth[metric] <= high for low, high in intervals])
        row = table.loc[metric]
        assert row["covered"] == pytest.approx(covered)
        assert row["detected"] == pytest.approx(np.mean([low > 0 for low, _ in intervals]))
        assert row["width"] == pytest.approx(np.mean([high - low for low, high in intervals]), rel=1e-6)
        assert row["measured"] == pytest.approx(np.mean([getattr(record, metric) for record in records]), rel=1e-6)
        assert row["truth"] == pytest.approx(truth[metric], rel=1e-6)
