"""Tables for people: how SMART stands among others, and whether that depends on the validation samples."""

import pandas as pd
import pytest

from smartlib.experiments.tables import metric_table, paper_table, split_table, standings, standings_table

VALUES = {"uncalibrated": 0.05, "ts": 0.013, "gc": 0.009, "hb": 0.001, "smart": 0.010}


@pytest.fixture
def standing():
    records = pd.DataFrame([{"bundle": b, "method": m, "ece": v} for b in ("a", "b") for m, v in VALUES.items()])
    # On "a" GC and SMART may be the best, on "b" GC alone. Histogram binning is not among the methods of the claim.
    pairs = [
        ("a", "ts", 0.001, 0.002, 0.004), ("a", "gc", -0.01, -0.003, 0.001), ("a", "smart", -0.001, 0.0, 0.0),
        ("b", "ts", 0.001, -0.001, 0.007), ("b", "gc", -0.01, -0.003, -0.001), ("b", "smart", 0.0005, 0.0, 0.0),
        ("a", "hb", float("nan"), -0.011, -0.007), ("b", "hb", float("nan"), -0.011, -0.007),
    ]  # fmt: skip
    columns = ["bundle", "method", "behind_claimed", "vs_smart_low", "vs_smart_high"]
    return standings(records, pd.DataFrame(pairs, columns=columns).assign(metric="ece"), "ece")


def test_standings_count_the_methods_of_the_claim_alone(standing):
    assert standing.loc["a"].to_dict() == {
        "lowest": "gc", "rank": 2, "n_methods": 3, "in_set": True, "set_size": 2,
        "lower_than": ["ts"], "higher_than": [],
    }  # fmt: skip
    assert standing.loc["b"].to_dict() == {
        "lowest": "gc", "rank": 2, "n_methods": 3, "in_set": False, "set_size": 1,
        "lower_than": [], "higher_than": ["gc"],
    }  # fmt: skip


def test_standings_in_words(standing):
    assert standings_table(standing).loc["a"].tolist() == [
        "group calibration",
        "2 of 3",
        "yes, as one of 2",
        "temperature scaling",
        "–",
    ]
    assert standings_table(standing).loc["b"].tolist() == [
        "group calibration", "2 of 3", "no", "–", "group calibration",
    ]  # fmt: skip


def test_split_table_pairs_by_the_samples_and_not_by_the_order():
    rows = [{"bundle": "a", "method": "smart", "split_seed": s, "nll": v} for s, v in ((0, 0.2), (1, 0.31), (2, 0.25))]
    rows += [{"bundle": "a", "method": "ts", "split_seed": s, "nll": v} for s, v in ((2, 0.26), (1, 0.28), (0, 0.21))]
    table = split_table(pd.DataFrame(rows), metrics=["nll"])
    # Differences -.01, .03, -.01.
    assert table.loc["a", "NLL, nats"] == "lower on 2 of 3: +0.0033 (-0.0100 to +0.0300)"


def test_metric_table_has_one_row_per_model_and_method_with_the_floor():
    row = {"n": 1000, "ece_floor": 0.004, "ece_floor_q95": 0.006, "nll": 0.2, "nll_low": 0.19, "nll_high": 0.21}
    table = metric_table(pd.DataFrame([row | {"bundle": "a", "method": m} for m in ("ts", "bbq")]), ["nll"])
    assert table.index.tolist() == [("a", "temperature scaling"), ("a", "BBQ")]
    assert table.iloc[0].tolist() == ["0.2000 [0.1900, 0.2100]", "0.40 (95 %: 0.60)", 1000]


def test_reported_values_of_other_methods_stand_beside_ours():
    rows = [
        {"bundle": "public/cifar10-resnet50-ce", "method": "gc", "ece": 0.012},
        {"bundle": "public/cifar10-densenet40", "method": "dirichlet", "nll": 0.2230},
        {"bundle": "public/cifar10-densenet40", "method": "hb", "nll": 0.23},
    ]
    table = pd.concat([paper_table(pd.DataFrame(rows[:1]), ["ece"]), paper_table(pd.DataFrame(rows[1:]), ["nll"])])
    assert table["method"].tolist() == ["group calibration", "Dirichlet"]
    assert table["reported"].iloc[1] == "0.2237", "published for the ODIR penalty"
