"""What the records of growing validation sets say: pairs, intervals, where a method pays, sets without errors."""

import numpy as np
import pandas as pd
import pytest
from scipy.stats import t as student_t

from smartlib.experiments import efficiency
from smartlib.experiments.plans import N_SIZE_SPLITS, SIZES, size_cells
from smartlib.metrics import METRICS


def record(bundle="a", method="ts", size=100, seed=0, errors=5, **values):
    n_val = 1000 if size == "all" else size
    row = {"bundle": bundle, "method": method, "val_size": size, "n_val": n_val, "split_seed": seed}
    row |= {"n_val_errors": errors, "ece_floor": np.nan, "ece_floor_q95": np.nan}
    return row | dict.fromkeys(METRICS, 0.1) | values


def records(differences, metric="ece"):
    """SMART minus temperature scaling, by size and subset; one uncalibrated record at 0.5."""
    rows = [record(method="uncalibrated", size="all", errors=50, **{metric: 0.5})]
    for size, values in differences.items():
        for seed, value in enumerate(values):
            of_ts = 0.2 + 0.01 * seed
            errors = 50 if size == "all" else size // 20
            rows.append(record("a", "ts", size, seed, errors, **{metric: of_ts}))
            rows.append(record("a", "smart", size, seed, errors, **{metric: of_ts + value}))
    return pd.DataFrame(rows)


def test_differences_are_of_the_same_subset_whatever_the_order_of_the_records():
    table = records({100: [0.01, -0.02], "all": [-0.03]})
    shuffled = table.sample(frac=1, random_state=0)
    pairs = efficiency.paired_differences(shuffled).sort_values(["n_val", "split_seed"])
    assert pairs["ece"].tolist() == pytest.approx([0.01, -0.02, -0.03])
    assert pairs["smce"].tolist() == [0, 0, 0]
    assert pairs["n_val_errors"].tolist() == [5, 5, 50]
    untouched = efficiency.paired_differences(shuffled, baseline="uncalibrated").sort_values(["n_val", "split_seed"])
    assert untouched["ece"].tolist() == pytest.approx([0.21 - 0.5, 0.19 - 0.5, 0.17 - 0.5])


def test_the_interval_is_the_paired_t_interval():
    values = np.array([0.01, 0.02, 0.06])
    pairs = efficiency.paired_differences(records({100: values, 200: [0.3, 0.3], "all": [0.1]}))
    found = efficiency.mean_differences(pairs, ["ece"]).set_index("n_val")
    half = student_t.ppf(0.975, 2) * values.std(ddof=1) / np.sqrt(3)
    assert found.loc[100, ["mean", "low", "high"]].tolist() == pytest.approx([0.03, 0.03 - half, 0.03 + half])
    assert found.loc[200, ["low", "high"]].tolist() == pytest.approx([0.3, 0.3]), "equal differences have no spread"
    assert found.loc[1000, "mean"] == pytest.approx(0.1) and np.isnan(found.loc[1000, "low"])


BELOW, UNCLEAR, ABOVE = [-0.02, -0.021, -0.019], [-0.02, 0.0, 0.01], [0.02, 0.021, 0.019]


@pytest.mark.parametrize(
    ("differences", "expected"),
    [
        ({32: ABOVE, 100: BELOW, 200: BELOW, "all": [-0.01]}, 100),
        ({32: BELOW, 100: UNCLEAR, 200: BELOW, "all": [-0.01]}, 200),
        ({32: BELOW, 100: BELOW, 200: BELOW, "all": [-0.01]}, 32),
        ({100: BELOW, 200: UNCLEAR, "all": [-0.01]}, np.nan),  # one draw, of all samples, decides nothing
        ({100: BELOW, 200: BELOW, "all": [0.01]}, np.nan),
        ({100: ABOVE, 200: ABOVE, "all": [0.01]}, np.nan),
    ],
)
def test_a_method_pays_from_where_it_is_below_at_every_larger_size_too(differences, expected):
    table = records(differences)
    found = efficiency.pays_from(efficiency.mean_differences(efficiency.paired_differences(table)))
    assert found.loc["a", "ece"] == pytest.approx(expected, nan_ok=True)
    assert np.isnan(found.loc["a", "nll"]), "no difference is not below"
    shown = efficiency.pays_table(table)
    assert shown.loc["a", "errors on validation data"] == "5.0%"
    written = "at no size" if np.isnan(expected) else f"{expected} ({expected / 20:.0f} errors)"
    assert shown.loc["a", "ECE below temperature scaling from"] == written
    assert shown.loc["a", "NLL below temperature scaling from"] == "at no size"


def test_sizes_are_shown_as_median_and_range_with_the_floor():
    table = records({100: np.zeros(11), "all": [0.0]})
    whole = (table["method"] == "ts") & (table["val_size"] == "all")
    table.loc[whole, ["ece_floor", "ece_floor_q95"]] = [0.004, 0.006]
    shown = efficiency.size_table(table)
    of_ts = shown.loc[("a", "temperature scaling", 100)]
    assert of_ts["ECE, %"] == "25.00 (21.00 to 29.00)"
    assert of_ts["subsets"] == 11 and of_ts["errors among them"] == "5 (5 to 5)"
    assert shown.loc[("a", "SMART", 1000), "ECE, %"] == "20.00"
    assert (shown["floor of ECE, %"] == "0.40 (95 %: 0.60)").all()
    assert {"accuracy, %", "AdaECE, %", "classwise ECE, %", "smCE, %", "NLL, nats", "Brier score"} <= set(shown.columns)


def test_sets_without_an_error_are_counted_and_their_chance_is_hypergeometric():
    # 2 errors among 10 samples: a subset of 3 has none in (8 * 7 * 6) / (10 * 9 * 8) of all draws.
    rows = [record(method="uncalibrated", size="all", errors=2, ece=0.5, nll=0.9)]
    for method, ece in (("ts", 0.3), ("smart", 0.4)):
        rows.append(record(method=method, size="all", errors=2) | {"n_val": 10})
        rows += [record(method=method, size=3, seed=s, errors=e, ece=ece + 0.1 * s) for s, e in enumerate((0, 1, 0))]
    shown = efficiency.no_error_table(pd.DataFrame(rows), [3])
    assert shown["chance of no error"].tolist() == ["46.67%"] * 3
    assert shown["seen"].tolist() == ["2 of 3"] * 3
    assert shown["ECE, %: no error"].tolist() == ["50.00", "40.00", "50.00"]
    assert shown["ECE, %: with errors"].tolist() == ["50.00", "40.00", "50.00"]
    assert shown["NLL, nats: no error"].tolist() == ["0.9000", "0.1000", "0.1000"]
    missing = efficiency.no_error_table(pd.DataFrame(rows).query("n_val_errors > 0"), [3])
    assert missing.loc[("a", 3, "SMART"), "ECE, %: no error"] == "–"


def test_the_plan_has_every_size_and_subset_once_and_one_record_with_floors_per_bundle(monkeypatch):
    from smartlib.experiments import plans

    monkeypatch.setattr(plans, "experiment_bundles", lambda profile: ("fashion/resnet",))
    cells = size_cells("embedded")
    assert len(set(map(repr, cells))) == len(cells)
    smart = [(cell.val_size, cell.split_seed) for cell in cells if cell.method == "smart"]
    assert sorted(smart, key=str) == sorted(
        [(None, 0), *((size, seed) for size in SIZES for seed in range(N_SIZE_SPLITS))], key=str
    )
    assert [(c.method, c.val_size) for c in cells if c.n_resamples] == [("ts", None)]
    assert [c.method for c in cells].count("uncalibrated") == 1
