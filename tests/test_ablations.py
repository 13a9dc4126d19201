"""The ablations: which cells are run, how sure a difference is, and what is read from the records."""

import json

import numpy as np
import pandas as pd
import pytest

from smartlib.comparison import compare
from smartlib.data import Bundle, Split
from smartlib.experiments import ablation_tables, ablations, plans
from smartlib.experiments.ablation_tables import (
    best_elsewhere,
    difference_table,
    grid_means,
    noise_floors,
    objective_maps,
    rescaled_table,
    seed_spread,
    variant_table,
    verdict_counts,
)
from smartlib.experiments.ablations import (
    DEFAULT,
    GRID,
    VARIANTS,
    half_width,
    judging_noise,
    lost_signals,
    paired_differences,
    runs,
    with_variants,
)
from smartlib.experiments.plans import PLANS, ablation_cells
from smartlib.hardness import SIGNALS


def small_bundle(seed: int = 0) -> Bundle:
    rng = np.random.default_rng(seed)

    def split(n):
        logits = rng.normal(size=(n, 4)) * 2
        p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        return Split(2 * logits, np.array([rng.choice(4, p=row) for row in p]))

    return Bundle("small@held-out", split(900), split(500))


@pytest.fixture
def bundle(monkeypatch):
    stored = small_bundle()
    for module in (ablations, ablation_tables):
        monkeypatch.setattr(module, "load", lambda name: stored)
    monkeypatch.setattr(plans, "load", lambda name: stored)
    monkeypatch.setattr(plans, "ablation_bundles", {"embedded": ("small",)}.__getitem__)
    return stored


def record(method, split, settings=None, **metrics):
    values = {"accuracy": 0.9, "ece": 0.01, "adaece": 0.01, "cwece": 0.01, "smce": 0.01, "nll": 0.3, "brier": 0.1}
    return {
        "bundle": "a/b@held-out", "method": method, "settings": json.dumps(settings or {}), "split_seed": split,
    } | values | metrics  # fmt: skip


# --- what is run --------------------------------------------------------------------------------------------------


def test_every_point_of_the_grid_is_run_once_on_the_same_fitting_sets(bundle):
    cells = ablation_cells("embedded")
    assert PLANS["ablations"] is ablation_cells
    assert {(c.bundle, c.n_resamples) for c in cells} == {("small@held-out", 0)}
    assert {c.val_size for c in cells if c.method != "uncalibrated"} == {450}
    found = [
        (*(DEFAULT | c.settings).values(), c.split_seed)
        for c in cells if c.calibrator == "smart" and set(c.settings) <= set(GRID) and c.split_seed < 4
    ]  # fmt: skip
    assert len(found) == len(set(found)) == 4 * 5 * 5 * 3
    identities = [(c.method, json.dumps(c.settings, sort_keys=True), c.split_seed) for c in cells]
    assert len(set(identities)) == len(identities) <= 500, "three bundles stay below 1,500 cells"


def test_each_variant_differs_from_the_default_and_from_the_others():
    from smartlib import SMART

    default = SMART().get_params()
    settings = [v for variants in VARIANTS.values() for v in variants.values()]
    changed = [{**default, **v} for v in settings]
    assert all(c != default for c in changed) and len({json.dumps(c) for c in changed}) == len(changed)
    assert {v["signal"] for v in VARIANTS["signal"].values()} | {"margin"} == set(SIGNALS)


def test_signals_that_the_logits_lost_are_left_out(bundle):
    z = bundle.val.logits
    log_p = z - np.log(np.exp(z).sum(axis=1, keepdims=True))
    for shifted in (log_p, z - z.max(axis=1, keepdims=True)):
        assert lost_signals(shifted) == ("max_logit", "energy")
        assert {m for m, *_ in runs(z)} - {m for m, *_ in runs(shifted)} == {"signal: max logit", "signal: energy"}
    assert lost_signals(z) == ()


def test_an_unknown_profile_is_refused(bundle):
    with pytest.raises(ValueError, match="unknown profile 'papers'"):
        ablation_cells("papers")


def test_names_and_settings_become_columns():
    records = pd.DataFrame(
        [record("ts", 0), record("signal: max logit", 0), record("solver: Adam", 1, {"solver": "adam", "seed": 3}),
         record("grid", 0, {"n_bins": 5, "bandwidth": 0.2, "delta": 1e-3})]
    )  # fmt: skip
    table = with_variants(records)
    assert table["model"].tolist() == ["a/b"] * 4
    assert table["ablation"].tolist() == ["", "signal", "solver", ""]
    assert table["variant"].tolist() == ["temperature scaling", "max logit", "Adam", "grid"]
    assert table["seed"].tolist() == [0, 0, 3, 0]
    assert table["n_bins"].tolist() == [15, 15, 15, 5] and table["bandwidth"].tolist() == [0.05, 0.05, 0.05, 0.2]


# --- how sure a difference is -------------------------------------------------------------------------------------


def test_the_interval_over_halves_of_one_pool_holds_the_truth():
    """For a mean over samples, where the truth is 0; the usual interval of a mean of independent values does not."""
    rng = np.random.default_rng(0)
    held = held_by_the_usual_one = 0
    for _ in range(500):
        pool = rng.normal(size=60)
        means = [rng.permutation(pool)[:30].mean() for _ in range(10)]
        width = half_width(means)
        held += abs(np.mean(means)) <= width
        held_by_the_usual_one += abs(np.mean(means)) <= width / np.sqrt(11)  # s / sqrt(J) for s sqrt(1 + 1 / J)
    assert 0.93 <= held / 500 <= 0.98
    assert held_by_the_usual_one / 500 < 0.6


def judging_of(down, up, method="objective: NLL"):
    row = {"bundle": "a/b@held-out", "method": method, "split_seed": 0}
    return pd.DataFrame([row | {"smce_down": down, "smce_up": up}])


def test_differences_are_paired_and_both_sources_of_noise_add_in_quadrature():
    rows = [record("smart", s, smce=x) for s, x in enumerate((0.010, 0.020, 0.030))]
    rows += [record("objective: NLL", s, smce=x) for s, x in enumerate((0.014, 0.024, 0.037))]
    rows += [record("uncalibrated", 0), record("grid", 0, {"n_bins": 5, "bandwidth": 0.2})]
    table = paired_differences(with_variants(pd.DataFrame(rows)), judging_of(0.003, 0.004), ["smce"])
    (row,) = table.to_dict("records")
    assert row["difference"] == pytest.approx(0.005)
    # Differences .004, .004, .007: s = .001732; t(2) = 4.3027; sqrt(1 + 1/3) = 1.1547.
    assert row["fitting"] == pytest.approx(0.0086054, rel=1e-4)
    assert row["low"] == pytest.approx(0.005 - np.hypot(0.0086054, 0.003), rel=1e-4)
    assert row["high"] == pytest.approx(0.005 + np.hypot(0.0086054, 0.004), rel=1e-4)
    assert row["verdict"] == "undecided" and row["n_splits"] == 3 and row["n_lower"] == 0
    shown = difference_table(table).loc[("a/b", "NLL"), "smCE, %"]
    assert shown == "undecided: +0.50 [-0.41, +1.45], lower on 0/3"


@pytest.mark.parametrize(("step", "verdict"), [(-0.005, "lower"), (0.005, "higher"), (0.0, "undecided")])
def test_a_difference_is_decided_where_its_interval_excludes_zero(step, verdict):
    rows = [record("smart", s, smce=0.01) for s in range(3)]
    rows += [record("objective: NLL", s, smce=0.01 + step) for s in range(3)]
    table = paired_differences(with_variants(pd.DataFrame(rows)), judging_of(0.001, 0.001), ["smce"])
    assert table["verdict"].tolist() == [verdict]
    counts = verdict_counts(table)
    assert counts.loc[("objective", "NLL"), "smCE, %"] == f"1 {verdict}"


def test_judging_noise_is_that_of_a_paired_comparison_and_is_kept(bundle, monkeypatch, tmp_path):
    monkeypatch.setenv("SMARTLIB_FIGURES_DIR", str(tmp_path))
    monkeypatch.setattr(
        ablations, "runs", lambda z: [("ts", "ts", {}, 10), ("smart", "smart", {}, 10), ("grid", "smart", {}, 4)]
    )
    ablations.default_probs.cache_clear()
    # In this process: the stored bundle is known here only.
    monkeypatch.setattr("smartlib.experiments.workers.effective_n_jobs", lambda n: 1)
    table = judging_noise(["small"], "p", n_resamples=20)
    assert table[["method", "split_seed"]].to_numpy().tolist() == [["ts", 0], ["ts", 1], ["ts", 2]]
    from smartlib import SMART, TemperatureScaling

    part = ablations.fitting_set("small@held-out", 1)
    assert len(part.labels) == 450
    ts, smart = (c.fit(part.logits, part.labels).predict_proba(bundle.test.logits)
                 for c in (TemperatureScaling(), SMART()))  # fmt: skip
    found = compare(ts, smart, bundle.test.labels, "nll", n_resamples=20)
    row = table.iloc[1]
    assert row["nll"] == pytest.approx(found.difference, abs=1e-7)
    assert row["nll_down"] == pytest.approx(found.difference - found.low, abs=1e-7)
    assert row["nll_up"] == pytest.approx(found.high - found.difference, abs=1e-7)
    assert (tmp_path / "records" / "p_ablations-judging.csv").is_file()
    floors = noise_floors(["small"], n_resamples=20)
    assert 0 < floors.loc["small", "ece_floor"] < floors.loc["small", "ece_floor_q95"] < 0.2
    ablations.default_probs.cache_clear()


# --- tables -------------------------------------------------------------------------------------------------------


def test_variant_table_shows_the_default_the_variants_and_the_floors():
    rows = [record("uncalibrated", 0, ece=0.05), record("smart", 3, ece=0.9)]
    rows += [record(m, s, ece=x + s / 100) for m, x in (("smart", 0.01), ("objective: NLL", 0.02)) for s in range(3)]
    rows += [record("network: 4 units", 0), record("objective: NLL", 0, {"seed": 1}, ece=0.9)]
    floors = pd.DataFrame({"ece_floor_q95": [0.0123], "smce_floor_q95": [0.004]}, index=["a/b"])
    table = variant_table(with_variants(pd.DataFrame(rows)), floors, "objective")
    assert list(table.index) == [("a/b", "uncalibrated"), ("a/b", "SMART"), ("a/b", "NLL")]
    assert table.loc[("a/b", "NLL"), "ECE, %"] == "3.00 (2.00 to 4.00)" and table["runs"].tolist() == [1, 3, 3]
    assert table["floor of ECE, %"].tolist() == ["1.23"] * 3 and table["floor of smCE, %"].tolist() == ["0.40"] * 3
    for name in ("accuracy, %", "AdaECE, %", "classwise ECE, %", "smCE, %", "NLL, nats", "Brier score"):
        assert name in table


def test_spread_between_seeds_is_told_apart_from_that_between_fitting_sets():
    rows = [
        record("solver: Adam", split, {"seed": seed}, ece=0.01 * split + 0.001 * seed)
        for split in range(4) for seed in range(5)
    ]  # fmt: skip
    rows += [record("solver: Adam", 7, {"seed": 0}, ece=0.9), record("smart", 0, ece=0.5)]
    (row,) = seed_spread(with_variants(pd.DataFrame(rows)), ["ece"]).to_dict("records")
    assert row["between_seeds"] == pytest.approx(0.001 * np.std(range(5), ddof=1))
    assert row["between_splits"] == pytest.approx(0.01 * np.std(range(4), ddof=1))


def grid_records(values):
    """One record per point of the grid and fitting set; ``values`` maps (lambda, delta, M) and split to smCE."""
    rows = []
    for method, _, settings, n_splits in runs(np.array([[2.0, 0.0], [1.0, 0.5]])):
        if set(settings) <= set(GRID) and method != "ts":
            point = tuple((DEFAULT | settings).values())
            rows += [record(method, s, settings, smce=values(point, s)) for s in range(n_splits)]
    return with_variants(pd.DataFrame(rows))


def test_grid_means_are_over_the_fitting_sets_that_all_points_share():
    records = grid_records(lambda point, split: 0.01 * point[0] + split)
    table = grid_means(records, ["smce"])
    assert len(table) == 75
    assert table.loc[table["bandwidth"] == 0.05, "smce"].to_numpy() == pytest.approx(0.0005 + 1.5)  # splits 0 to 3


def test_what_wins_by_luck_does_not_win_elsewhere():
    def lucky(point, split):
        return 0.0 if split < 4 and (point[0], point[2]) == (0.2, (5, 10, 20, 30)[split]) else 0.01

    (row,) = best_elsewhere(grid_records(lucky)).to_dict("records")
    assert row["best"] == pytest.approx(0.0025) and row["elsewhere"] == 0
    assert row["default_rank"] == 13 and row["n_points"] == 75, "four winners at three values of delta"
    (row,) = best_elsewhere(grid_records(lambda point, split: 0.01 * point[0])).to_dict("records")
    assert row["best"] == row["elsewhere"] == pytest.approx(0.0004)


# --- what no cell can say -----------------------------------------------------------------------------------------


def test_standardised_margins_do_not_see_a_factor_of_the_logits(bundle):
    table = rescaled_table(["small"], factors=(1.0, 10.0))
    assert len(table) == 2 * ablations.N_FEWER_SPLITS
    assert table["input_change"].max() < 1e-9
    same = table[table["factor"] == 1]
    assert (same["confidence_change"] == 0).all()
    assert table["accuracy"].nunique() == 1


@pytest.mark.filterwarnings("ignore::smartlib.calibrators.CalibrationWarning")
def test_maps_are_those_of_the_fits(bundle):
    table = objective_maps("small", n_points=5)
    assert table["variant"].drop_duplicates().tolist() == ["SMART", *VARIANTS["objective"]]
    assert (table["low"] <= table["median"]).all() and (table["median"] <= table["high"]).all()
    from smartlib import SMART

    fits = [ablations.fitting_set("small@held-out", s) for s in range(10)]
    at = table.loc[table["variant"] == "NLL", "margin"].to_numpy()
    t = [SMART(objective="nll").fit(f.logits, f.labels).temperature_map(at) for f in fits]
    np.testing.assert_allclose(table.loc[table["variant"] == "NLL", "high"], np.max(t, axis=0))
