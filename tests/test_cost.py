"""What is measured of calibrators and metrics: the data, one measurement, what is left out, and the tables."""

import json

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner
from scipy.special import softmax

from smartlib import expected_calibration_error
from smartlib.experiments import cost
from smartlib.metrics import top_label


def test_the_data_are_logits_of_the_head_twice_as_large_as_calibrated_ones():
    logits, labels, features, (weight, bias) = cost.synthetic_logits(5000, 10)
    assert logits.shape == (5000, 10) and logits.dtype == np.float32
    np.testing.assert_allclose(logits, features @ weight.T + bias, rtol=1e-4, atol=1e-4)
    calibrated = softmax(logits / 2, axis=1)
    assert expected_calibration_error(*top_label(calibrated, labels)) < 0.02
    assert expected_calibration_error(*top_label(softmax(logits, axis=1), labels)) > 0.05


@pytest.mark.parametrize(
    ("what", "n_parameters"),
    [("ts", 1), ("procal", 600 * (64 + 3)), ("fc", 1), ("smart", 49), ("smart-321", 321), ("kde_ece", None),
     ("soft_ece", None)],
)  # fmt: skip
def test_a_measurement_has_seconds_parameters_and_the_size_of_its_input(what, n_parameters):
    found = cost.measure(what, 600, 5)
    features = 600 * cost.N_FEATURES * 4 if what in ("procal", "fc") else 0
    assert found["input_megabytes"] == pytest.approx((600 * 5 * 4 + features) / 1e6)
    assert found["use_seconds"] > 0 and found["peak_megabytes"] >= 0 and 1 <= found["repeats"] <= cost.REPEATS
    times = [found[name] for name in ("fit_seconds", "ts_fit_seconds", "ts_use_seconds")]
    if n_parameters is None:
        assert np.isnan(times).all() and np.isnan(found["n_parameters"])
    else:
        assert min(times) > 0 and found["n_parameters"] == n_parameters
    json.loads(json.dumps(found))  # as it comes from its own process


def test_medians_of_repeats_are_taken_in_turn_with_temperature_scaling(monkeypatch):
    calls, seconds = [], iter([0.1, 0.5, 0.3, 0.2, 0.4])

    def run(what, *data):
        calls.append(what)
        if len(data[1]) == 200:
            return 1, 9.0, 9.0  # the warm-up counts for nothing
        return (1, 0.01, 0.001) if what == "ts" else (2, next(seconds), 0.0)

    monkeypatch.setattr(cost, "_run", run)
    found = cost.measure("cts", 300, 4)
    assert calls == ["cts", "ts", *["cts", "ts"] * 5]
    assert (found["fit_seconds"], found["ts_fit_seconds"], found["repeats"]) == (0.3, 0.01, 5)

    calls.clear()
    seconds = iter([0.45, 0.55])
    assert cost.measure("cts", 300, 4)["repeats"] == 2, "a second is enough"


def test_growth_is_measured_for_calibrators_and_metrics_only_at_the_three_sizes():
    tasks = cost.tasks_of()
    assert len(set(tasks)) == len(tasks)
    assert {(n, k) for what, n, k in tasks if what == "smce"} == set(cost.SIZES)
    assert {(n, k) for what, n, k in tasks if what == "smart-adam"} == {*cost.SIZES, *cost.GROWTH_N, *cost.GROWTH_K}
    assert [n * k for _, n, k in tasks] == sorted(n * k for _, n, k in tasks), "small ones first"
    assert {what for what, _, _ in cost.tasks_of(["ts", "ece"])} == {"ts", "ece"}


@pytest.fixture
def small(tmp_path, monkeypatch):
    """One small size for everything, and no processes: returns the list of what is measured."""
    monkeypatch.setenv("SMARTLIB_FIGURES_DIR", str(tmp_path))
    for name in ("SIZES", "GROWTH_N", "GROWTH_K"):
        monkeypatch.setattr(cost, name, ((300, 4),))
    measured = []

    def measure(what, n, k):
        if what == "hb" and len(measured) < 5:
            raise KeyboardInterrupt
        measured.append(what)
        return {"fit_seconds": 1.0, "use_seconds": 0.5, "peak_megabytes": len(measured)}

    monkeypatch.setattr(cost, "_measure_in_a_process", measure)
    return measured


def run(*chosen):
    return CliRunner().invoke(cost.main, chosen, catch_exceptions=False)


def table(folder):
    return pd.read_csv(folder / "records" / "cost.csv").set_index("what")


def test_an_interrupted_run_keeps_its_rows_and_is_taken_up(small, tmp_path, monkeypatch):
    assert run("ts", "vs", "hb", "ece").exit_code != 0
    assert list(table(tmp_path).index) == ["ts", "vs"]
    small.extend(["-"] * 5)
    assert run("ts", "vs", "hb", "ece").exit_code == 0
    assert small[7:] == ["hb", "ece"]
    assert (table(tmp_path)["machine"].str.contains("cores")).all()
    run("ts", "ece")
    assert small[9:] == [], "nothing to do"
    monkeypatch.setenv("SMARTLIB_FORCE", "1")
    run("ece", "ts")
    assert small[9:] == ["ts", "ece"], "forced, and in the order of the table"
    assert sorted(table(tmp_path).index) == ["ece", "hb", "ts", "vs"]


def test_what_takes_too_long_is_a_row_that_says_so_and_is_not_measured(small, tmp_path, monkeypatch):
    monkeypatch.setattr(cost, "SIZES", ((300, 4), (1000, 10), (1001, 10)))
    monkeypatch.setitem(cost.LEFT_OUT, "gc", lambda n, k: n * k > 10_000)
    run("gc")
    rows = table(tmp_path)
    assert small == ["gc", "gc"]
    assert rows["note"].tolist() == ["measured", "measured", "left out: longer than a minute"]
    assert rows["fit_seconds"].isna().tolist() == [False, False, True]
    run("gc")
    assert len(small) == 2, "and is not tried again"


def test_smart_ts_and_the_papers_recipe_are_measured_at_every_size():
    assert set(cost.LEFT_OUT) <= set(cost.METHODS) - {"ts", "smart", "smart-adam", "cts"}


def test_other_sources_or_another_machine_make_a_row_old(small, tmp_path, monkeypatch):
    run("ts")
    monkeypatch.setattr(cost.platform, "machine", lambda: "abacus")
    run("ts")
    assert small == ["ts", "ts"]
    monkeypatch.setattr(cost, "sources_of", lambda module: ("softece.py",))
    run("ts")
    assert small == ["ts"] * 3
    assert table(tmp_path)["machine"].str.startswith("abacus").tolist() == [True]


def test_one_real_run_in_processes_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("SMARTLIB_FIGURES_DIR", str(tmp_path))
    for name in ("SIZES", "GROWTH_N", "GROWTH_K"):
        monkeypatch.setattr(cost, name, ((300, 4),))
    found = run("ts", "ece")
    assert "fit" in found.output
    rows = table(tmp_path)
    assert list(rows.columns[:3]) == ["n", "classes", "n_parameters"]
    assert rows.loc["ts", "fit_seconds"] > 0 and rows.loc["ts", "n_parameters"] == 1
    assert np.isnan(rows.loc["ece", "fit_seconds"]) and rows.loc["ece", "use_seconds"] > 0


def test_the_table_sorts_by_cost_and_says_what_was_left_out():
    measured = {"n": 5000, "classes": 10, "n_parameters": 1.0, "use_seconds": 0.01, "peak_megabytes": 12.3,
                "ts_fit_seconds": 0.02, "ts_use_seconds": 0.005, "note": "measured"}  # fmt: skip
    costs = pd.DataFrame(
        [
            {"what": "dirichlet", "n": 5000, "classes": 10, "note": "left out: ..."},
            {"what": "smart", "fit_seconds": 0.1, **measured},
            {"what": "ts", "fit_seconds": 0.02, **measured},
            {"what": "smce", "fit_seconds": np.nan, **measured},
            {"what": "hb", "fit_seconds": 9.0, **measured, "n": 1000},
        ]
    )
    shown = cost.cost_table(costs, 5000, 10)
    assert list(shown.index) == ["temperature scaling", "SMART", "Dirichlet"]
    assert shown.loc["SMART"].tolist() == ["1", "0.1", "5", "0.02", "2", "12"]
    assert shown.loc["Dirichlet"].tolist() == ["", "left out: ...", "", "", "", ""]


def test_exponents_come_from_the_three_largest_sizes_that_were_measured():
    n = np.array([1000, 3000, 10_000, 30_000, 100_000])
    quadratic = [{"what": "gc", "n": size, "fit_seconds": 1e-6 * size**2} for size in n]
    quadratic[0]["fit_seconds"], quadratic[-1]["fit_seconds"] = 100.0, np.nan
    short = [{"what": "ts", "n": 1000, "fit_seconds": 1.0}]
    found = cost.growth_exponents(pd.DataFrame(quadratic[::-1] + short), "n")
    assert found.to_dict() == {"gc": pytest.approx(2.0)}
