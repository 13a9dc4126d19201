"""Shifted and skewed splits: which cells are run, and what is read from their records."""

from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from smartlib.data import Split
from smartlib.experiments import plans
from smartlib.experiments.plans import PLANS, shift_cells
from smartlib.experiments.shift import (
    compare_over_conditions,
    count_against_ts,
    long_tail_settings,
    matched_fits,
    size_controls,
    skew_schemes,
    verdict,
    with_conditions,
    with_rise,
)


def split(n):
    return Split(np.zeros((n, 2)), np.zeros(n, np.int64))


@pytest.fixture
def stored(monkeypatch):
    """Bundles of 900 validation samples, 90 in a long-tailed split; shifted validation images for one of two models."""
    monkeypatch.setattr(plans, "SHIFTED", {"embedded": ("a/one", "a/two")})
    monkeypatch.setattr(plans, "skewed_bundles", {"embedded": ("a/one", "a/three"), "public": ("public/p",)}.get)
    monkeypatch.setattr(plans, "LONG_TAILED", {"embedded": {"a/tailed": 50}})
    monkeypatch.setattr(plans, "load", lambda name: SimpleNamespace(val=split(90 if "long-tailed" in name else 900)))
    splits = {"a/one": {"val": split(120)}, "a/two": {}}
    monkeypatch.setattr(plans, "load_shifted", lambda name: defaultdict(lambda: splits[name]))
    return shift_cells("embedded")


def bundles_of(cells):
    return {cell.bundle for cell in cells}


def test_no_cell_is_run_twice_and_the_plan_is_known_by_name(stored):
    identities = [(c.bundle, c.method, c.val_size, c.split_seed) for c in stored]
    assert len(set(identities)) == len(identities)
    assert PLANS["shift"] is shift_cells


def test_every_corruption_and_severity_is_judged_with_every_method(stored):
    clean_calibrated = {(c.bundle, c.method) for c in stored if c.val_size is None}
    for model in ("a/one", "a/two"):
        for method in plans.SHIFT_METHODS:
            assert {(model, method), (f"{model}@clean:sketch", method)} <= clean_calibrated
            assert sum(c.startswith(f"{model}@clean:") and c[-1].isdigit() and "long" not in c and m == method
                       for c, m in clean_calibrated) == 40  # fmt: skip


def test_intervals_are_computed_where_methods_are_compared(stored):
    resampled = {(c.bundle, c.method) for c in stored if c.n_resamples and "two@clean:jpeg" in c.bundle}
    assert resampled == {(f"a/two@clean:jpeg-{s}", m) for s in (1, 3, 5) for m in ("ir", "smart")}


def test_shifted_validation_images_are_matched_by_as_many_clean_ones(stored):
    matched = {(c.bundle.split("@")[1].split(":")[0], c.method) for c in stored if c.bundle.startswith("a/one@jpeg-")}
    assert matched == {(f"jpeg-{s}", m) for s in (3, 5) for m in plans.MATCHED_METHODS}
    controls = [c for c in stored if c.bundle == "a/one@clean:jpeg-5" and c.val_size is not None]
    assert {c.val_size for c in controls} == {120} and len(controls) == len(plans.MATCHED_METHODS)
    # The other model has no shifted validation images: it is judged on the shift, and no more.
    assert not any(c.startswith("a/two@") and not c.startswith("a/two@clean:") for c in bundles_of(stored))


def test_skewed_validation_samples_are_matched_by_as_many_balanced_ones(stored):
    controls = [c for c in stored if c.bundle == "a/three" and c.val_size is not None and c.method == "ts"]
    # Here the splits of all three ratios have the same size, so that one set of draws serves them.
    assert {c.val_size for c in controls} == {90}
    assert [c.split_seed for c in controls] == list(range(plans.N_CONTROLS))


def test_long_tailed_models_are_judged_on_all_four_pairs_of_splits(stored):
    tail = "long-tailed-50"
    assert {c for c in bundles_of(stored) if c.startswith("a/tailed")} == {
        f"a/tailed@{val}:{test}" for val in ("clean", tail) for test in ("clean", tail)
    }


def test_the_public_profile_has_skewed_splits_alone(stored):
    assert {c.partition("@")[0] for c in bundles_of(shift_cells("public"))} == {"public/p"}
    assert {c.partition("@")[2] for c in bundles_of(shift_cells("public"))} >= {"clean:long-tailed-1000"}
    with pytest.raises(ValueError, match=r"unknown profile 'x'; known: embedded"):
        shift_cells("x")


def records(values):
    """Records of one model, by condition and method."""
    rows = [
        {"bundle": "m" if test == "clean" else f"m@clean:{test}", "method": method, "ece": ece}
        for test, methods in values.items()
        for method, ece in methods.items()
    ]
    return with_conditions(pd.DataFrame(rows))


EIGHT = [f"{name}-5" for name in ("jpeg", "contrast", "brightness", "rotation", "occlusion", "pixelation")]
EIGHT += ["gaussian-blur-5", "gaussian-noise-5"]


def test_names_of_bundles_are_read():
    names = ["fashion/a", "fashion/a@clean:sketch", "fashion/a@gaussian-noise-3:gaussian-noise-3",
             "fashion/a@long-tailed-100:clean", "fashion/a@clean:clean"]  # fmt: skip
    table = with_conditions(pd.DataFrame({"bundle": names}, index=[3, 4, 5, 6, 7]).reset_index(drop=True))
    assert set(table["model"]) == {"fashion/a"}
    assert table["val"].tolist() == ["clean", "clean", "gaussian-noise-3", "long-tailed-100", "clean"]
    assert table["test"].tolist() == ["clean", "sketch", "gaussian-noise-3", "clean", "clean"]
    np.testing.assert_array_equal(table["severity"], [0, np.nan, 3, 0, 0])
    assert table["corruption"].tolist() == ["", "", "gaussian-noise", "", ""]
    assert table["val_ratio"].tolist() == [1, 1, 1, 100, 1] and table["test_ratio"].tolist() == [1] * 5


def test_the_rise_is_from_the_same_models_and_methods_clean_value():
    table = with_rise(records({"clean": {"ts": 0.01, "ir": 0.02}, "jpeg-5": {"ir": 0.06, "ts": 0.03}}), "ece")
    assert dict(zip(table["method"], table["ece_rise"], strict=True)) == pytest.approx({"ir": 0.04, "ts": 0.02})


def test_a_method_that_is_lower_on_all_eight_corruptions_is_called_lower():
    values = {name: {"a": 0.01 * i, "b": 0.01 * i + 0.001 * (i + 1), "c": 0.01 * i} for i, name in enumerate(EIGHT)}
    lower, equal = compare_over_conditions(records(values), "ece", "a", ["b", "c"]).to_dict("records")
    assert (lower["n_conditions"], lower["n_lower"], lower["verdict"]) == (8, 8, "lower")
    assert lower["p_value"] == pytest.approx(2 / 2**8), "one of 2^8 signs, two-sided"
    assert lower["difference"] == pytest.approx(-0.0045)
    assert (equal["n_lower"], equal["p_value"], equal["verdict"]) == (0, 1.0, "undecided")
    (higher,) = compare_over_conditions(records(values), "ece", "b", ["a"])["verdict"]
    assert higher == "higher"


def test_differences_of_both_signs_are_undecided():
    values = {name: {"a": 0.05, "b": 0.05 + (-1) ** i * 0.001 * (i + 1)} for i, name in enumerate(EIGHT)}
    assert compare_over_conditions(records(values), "ece", "a", ["b"])["verdict"].tolist() == ["undecided"]


def test_groups_are_compared_apart():
    values = {name: {"a": 0.01, "b": 0.02 + 0.001 * i} for i, name in enumerate(EIGHT)}
    mild = {name.replace("5", "1"): {"a": 0.02 + 0.001 * i, "b": 0.01} for i, name in enumerate(EIGHT)}
    table = compare_over_conditions(records(values | mild), "ece", "a", ["b"], by=("model", "severity"))
    assert dict(zip(table["severity"], table["verdict"], strict=True)) == {5.0: "lower", 1.0: "higher"}


def test_paired_intervals_are_counted_and_records_without_one_left_out():
    ends = [(-0.02, -0.01), (-0.01, 0.01), (0.001, 0.01), (np.nan, np.nan)]
    rows = [
        {"severity": 5, "ece_vs_ts": np.mean(pair), "ece_vs_ts_low": pair[0], "ece_vs_ts_high": pair[1]}
        for pair in ends
    ]
    counts = count_against_ts(pd.DataFrame(rows), ["severity"], ["ece"]).loc[5]
    assert counts.to_dict() == {"n": 3, "ece_lower": 1, "ece_higher": 1, "ece_undecided": 1}


def named(*rows):
    """Records from (bundle, val_size, n_val)."""
    return with_conditions(pd.DataFrame(rows, columns=["bundle", "val_size", "n_val"]).assign(method="ts"))


def test_matched_fits_pair_the_same_shift_with_as_many_clean_samples():
    table = named(
        ("m", "all", 9), ("m", "5", 5), ("m@clean:jpeg-3", "all", 9), ("m@clean:jpeg-3", "5", 5),
        ("m@jpeg-3:jpeg-3", "all", 5), ("m@clean:sketch", "5", 5), ("m@sketch:sketch", "all", 5),
        ("m@long-tailed-10:long-tailed-10", "all", 4), ("m@clean:clean", "all", 9),
    )  # fmt: skip
    matched = matched_fits(table)
    assert matched[["fitted_on", "test", "n_val"]].to_numpy().tolist() == [
        ["clean", "jpeg-3", 5], ["clean", "sketch", 5], ["same shift", "jpeg-3", 5], ["same shift", "sketch", 5],
    ]  # fmt: skip


def test_settings_of_long_tails_name_training_validation_and_test():
    tail = "long-tailed-10"
    table = named(*((f"{model}@{val}:{test}", "all", 9) for model in ("trained", "ordinary")
                    for val in ("clean", tail) for test in ("clean", tail)))  # fmt: skip
    settings = long_tail_settings(table, {"trained": 10}, "ordinary")
    assert dict(zip(settings["setting"], settings["bundle"], strict=True)) == {
        "A": f"trained@{tail}:clean", "B": f"trained@{tail}:{tail}", "C": "trained@clean:clean",
        "D": f"trained@clean:{tail}", "E": f"ordinary@clean:{tail}", "F": f"ordinary@{tail}:{tail}",
    }  # fmt: skip
    assert set(settings["ratio"]) == {10}


SKEWED = (
    ("m", "all", 9), ("m", "5", 5), ("m", "5", 5), ("m@clean:long-tailed-10", "all", 9),
    ("m@long-tailed-10:clean", "all", 5), ("m@long-tailed-10:long-tailed-10", "all", 5), ("m@clean:jpeg-3", "all", 9),
    ("other@long-tailed-10:clean", "all", 5), ("m@jpeg-3:jpeg-3", "all", 3),
)  # fmt: skip


def test_schemes_of_skew_start_from_the_balanced_record():
    schemes = skew_schemes(named(*SKEWED), ["m"])
    assert schemes[["scheme", "ratio", "bundle"]].to_numpy().tolist() == [
        ["skewed validation", 1, "m"], ["skewed validation", 10, "m@long-tailed-10:clean"],
        ["skewed test", 1, "m"], ["skewed test", 10, "m@clean:long-tailed-10"],
        ["both skewed", 1, "m"], ["both skewed", 10, "m@long-tailed-10:long-tailed-10"],
    ]  # fmt: skip


def test_controls_have_as_many_samples_and_the_same_methods():
    table = named(*SKEWED)
    more = table[table["bundle"] == "m@long-tailed-10:clean"].assign(method="hb")  # hb has no control
    controls = size_controls(pd.concat([table, more], ignore_index=True), ["m"])
    assert controls[["validation", "ratio", "n_val", "method"]].to_numpy().tolist() == [
        ["skewed", 10, 5, "ts"], ["balanced", 10, 5, "ts"], ["balanced", 10, 5, "ts"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("counts", "word"),
    [((3, 0, 3), "held"), ((1, 1, 2), "undecided"), ((1, 3, 4), "did not hold"), ((0, 0, 3), "undecided")],
)
def test_a_verdict_needs_more_than_half_of_the_cases(counts, word):
    assert verdict(*counts).startswith(word + " (")
