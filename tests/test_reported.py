"""The reported values: what the file holds, and the conversion to smartlib's units."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from smartlib.experiments import reported as module
from smartlib.experiments.reported import SOURCES, UNITS, reported, reported_value


@pytest.fixture(scope="module")
def printed():
    return pd.read_csv(Path(module.__file__).with_name("reported.csv"))


def test_the_file(printed):
    assert len(printed) == 1076
    assert set(printed["metric"]) == set(UNITS)
    assert set(printed["source"]) == set(SOURCES)
    assert printed[["dataset", "model", "method", "metric", "mean", "source"]].notna().all(axis=None)
    assert not printed.duplicated(["dataset", "model", "method", "metric", "source"]).any()


def test_only_sums_over_ten_classes(printed):
    # UNITS divides these by ten.
    assert set(printed.loc[printed["metric"] == "cwece_sum", "dataset"]) == {"cifar10"}


def test_the_whole_table():
    table = reported()
    assert len(table) == 1076
    assert set(table["metric"]) == {"accuracy", "ece", "adaece", "cwece", "nll", "brier"}
    fractions = table[table["metric"].isin(["accuracy", "ece", "adaece", "cwece"])]
    assert fractions["mean"].between(0, 1).all()
    assert table.loc[table["metric"] == "accuracy", "mean"].min() > 0.17
    assert table.loc[table["metric"] == "brier", "mean"].between(0, 2).all()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (("cifar10", "resnet50", "uncalibrated", "ece"), 0.04341),
        (("cifar10", "resnet50", "uncalibrated", "adaece"), 0.043324),
        (("cifar10", "resnet50", "uncalibrated", "nll"), 0.4122),
        (("cifar10", "resnet50", "uncalibrated", "accuracy"), 0.9505),
        (("cifar10", "resnet50", "SMART", "ece"), 0.00764),
        (("cifar10", "resnet50", "SMART", "adaece"), 0.00905),
        (("cifar10", "densenet40", "uncalibrated", "ece"), 0.055003),
        (("cifar10", "densenet40", "uncalibrated", "nll"), 0.428207),
        (("cifar10", "densenet40", "uncalibrated", "cwece"), 0.011430),
        (("cifar10", "densenet40", "TS", "ece"), 0.009464),
        (("cifar10", "densenet40", "TS", "nll"), 0.225086),
    ],
)
def test_known_values(key, value):
    assert reported_value(*key).value == pytest.approx(value, abs=5e-7)


def test_brier_std_and_runs(printed):
    key = ("imagenet_sketch", "swin_b", "SMART", "brier")
    row = printed.query("model == 'swin_b' and method == 'SMART' and metric == 'brier_half'").iloc[0]
    found = reported_value(*key)
    assert (found.value, found.std, found.runs) == pytest.approx((2 * row["mean"], 2 * row["std"], 5))


def test_what_was_not_reported_is_none():
    assert reported_value("cifar10", "resnet50", "TS", "ece") is None
    found = reported_value("cifar10", "resnet50", "SMART", "ece")
    assert (found.std, found.runs) == (None, None)


def test_two_sources_the_summary_tables_win():
    key = ("imagenet_sketch", "densenet121", "SMART", "ece")
    assert sorted(reported(*key)["mean"]) == pytest.approx([0.00598, 0.012901])
    assert reported_value(*key).value == pytest.approx(0.00598)
    assert reported_value(*key).source == SOURCES[0]


def test_filters_do_not_mind_case_and_reject_unknown_names():
    assert len(reported(dataset="CIFAR10", method="smart")) == 8
    with pytest.raises(
        ValueError, match="no reported metric 'smce'; there are accuracy, adaece, brier, cwece, ece, nll"
    ):
        reported(metric="smce")
    with pytest.raises(ValueError, match=r"no reported model 'resnet18'.*resnet50"):
        reported_value("cifar10", "resnet18", "SMART", "ece")


def test_the_table_returned_is_the_callers_own():
    table = reported()
    table["mean"] = 0.0
    assert reported_value("cifar10", "resnet50", "SMART", "ece").value > 0
