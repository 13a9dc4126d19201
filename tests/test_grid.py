"""Cells and their records: computed once, resumed, renewed when the code or the data change."""

import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner

import smartlib
from smartlib.calibrators import names
from smartlib.data import Bundle, Split
from smartlib.experiments import cells, choices, grid, pairs, records
from smartlib.experiments.cells import Cell, run_cell
from smartlib.experiments.grid import cell_key, module_of, run_cells
from smartlib.experiments.records import Task, run_tasks
from smartlib.experiments.tables import metric_table, paper_table, verdict_table


def small_bundle(seed: int = 0) -> Bundle:
    rng = np.random.default_rng(seed)

    def split(n):
        logits = rng.normal(size=(n, 4)) * 2
        p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        return Split(3 * logits, np.array([rng.choice(4, p=row) for row in p]))

    return Bundle("small", split(300), split(300))


CELLS = [
    Cell("small", "uncalibrated", n_resamples=10),
    Cell("small", "ts", "ts", n_resamples=10),
    Cell("small", "smart", "smart", n_resamples=10),
]


@pytest.fixture
def counted(tmp_path, monkeypatch):
    """Runs in an empty folder; counts the cells that were computed."""
    monkeypatch.setenv("SMARTLIB_FIGURES_DIR", str(tmp_path))
    monkeypatch.delenv("SMARTLIB_FORCE", raising=False)
    bundle = small_bundle()
    monkeypatch.setattr(grid, "load", lambda name: bundle)
    monkeypatch.setattr(cells, "load", lambda name: bundle)
    computed = []

    def counting(cell):
        computed.append(cell.method)
        return run_cell(cell)

    monkeypatch.setattr(grid, "run_cell", counting)
    return computed


def test_a_cell_is_computed_once_and_one_record_in_fifty_is_checked(counted):
    first = run_cells(CELLS, "p")
    assert counted == ["uncalibrated", "ts", "smart"]
    second = run_cells(CELLS, "p")
    assert len(counted) == 4, "one of three records is computed again to check it"
    pd.testing.assert_frame_equal(first, second)


def test_records_hold_what_was_measured(counted):
    table = run_cells(CELLS, "p").set_index("method")
    assert (table["kept_predictions"] == 1).all()
    assert table.loc["ts", "temperature"] == pytest.approx(3, rel=0.2), "logits were three times too large"
    assert table.loc["uncalibrated", "ece"] > table.loc["uncalibrated", "ece_floor_q95"]
    assert table.loc["ts", "ece_vs_ts"] == 0
    assert table.loc["uncalibrated", "nll_vs_ts_low"] > 0


def test_an_interrupted_run_resumes(counted, monkeypatch, tmp_path):
    real = grid.run_cell

    def stopped(cell):
        if cell.method == "smart":
            raise RuntimeError("interrupted")
        return real(cell)

    monkeypatch.setattr(grid, "run_cell", stopped)
    with pytest.raises(RuntimeError, match="interrupted"):
        run_cells(CELLS, "p")
    monkeypatch.setattr(grid, "run_cell", real)
    before = pd.read_csv(tmp_path / "records" / "p.csv")
    counted.clear()
    after = run_cells(CELLS, "p")
    assert len(before) == 2 and len(after) == 3
    assert counted.count("smart") == 1 and len(counted) == 2, "the missing cell, and one check"


def test_force_computes_all(counted, monkeypatch):
    run_cells(CELLS, "p")
    counted.clear()
    monkeypatch.setenv("SMARTLIB_FORCE", "1")
    run_cells(CELLS, "p")
    assert counted == ["uncalibrated", "ts", "smart"]


def test_a_planted_wrong_record_is_found(counted, tmp_path):
    run_cells(CELLS[:1], "p")
    path = tmp_path / "records" / "p.csv"
    table = pd.read_csv(path)
    table["nll"] += 0.01
    table.to_csv(path, index=False)
    with pytest.raises(RuntimeError, match=r"small, uncalibrated, .* says nll"):
        run_cells(CELLS[:1], "p")


def test_a_record_in_ten_may_differ_by_the_rounding_of_another_processor(tmp_path, monkeypatch):
    monkeypatch.setenv("SMARTLIB_FIGURES_DIR", str(tmp_path))
    monkeypatch.delenv("SMARTLIB_FORCE", raising=False)
    deviation = dict.fromkeys(range(1000), 0.0)

    def run(n=1000):
        tasks = [Task(f"{i:04d}", {"i": i}, lambda i=i: {"nll": 400.0 + deviation[i], "ece": 0.5}) for i in range(n)]
        return run_tasks(tasks, "p")

    run()
    checked = 20  # two per cent
    choices = {}

    def choose(self_rows, size, replace):
        choices["rows"] = list(self_rows)[:size]
        return choices["rows"]

    monkeypatch.setattr(records.np.random, "default_rng", lambda: SimpleNamespace(choice=choose))
    deviation[3] = 400 * 1.9e-4  # numbers above 1 are compared relatively
    run()
    deviation[3] = deviation[7] = 1.0
    with pytest.warns(UserWarning, match=f"2 of {checked} records .* the record of 3 says nll = 400"):
        run()
    deviation[9] = 1.0
    with pytest.raises(RuntimeError, match="computing it again gives 401"):
        run()
    deviation.update({3: 0.0, 7: 0.0, 9: 400 * 0.06})
    with pytest.raises(RuntimeError, match="the record of 9 says"):
        run()
    deviation[9] = np.nan
    with pytest.raises(RuntimeError, match="gives nan"):
        run()


def test_where_step_functions_are_not_compared():
    assert not grid._is_checked("adaece_vs_ts_low", {"method": "ir"})
    assert grid._is_checked("adaece_vs_ts_low", {"method": "ts"}) and grid._is_checked("ece", {"method": "ir"})
    assert not pairs._is_checked("adaece_bbq_behind", {}) and pairs._is_checked("adaece_ts_behind", {})


def test_the_key_follows_data_and_settings():
    bundle, other = small_bundle(), small_bundle(1)
    keys = {
        cell_key(CELLS[1], bundle), cell_key(CELLS[1], other), cell_key(CELLS[2], bundle),
        cell_key(Cell("small", "smart", "smart", {"solver": "adam"}), bundle),
    }  # fmt: skip
    assert len(keys) == 4
    assert cell_key(CELLS[1], small_bundle()) == cell_key(CELLS[1], bundle)


@pytest.fixture
def copied_package(monkeypatch, tmp_path):
    """A copy of the library's sources, which keys are then made from."""
    package = tmp_path / "smartlib"
    shutil.copytree(smartlib.__path__[0], package, ignore=shutil.ignore_patterns("shipped", "__pycache__"))
    monkeypatch.setattr(smartlib, "__file__", str(package / "__init__.py"))
    return package


@pytest.mark.parametrize("module", sorted({module_of(name) for name in names()}))
def test_a_changed_calibrator_makes_its_records_stale_and_no_others(module, copied_package):
    bundle = small_bundle()
    methods = [Cell("small", "uncalibrated")] + [Cell("small", name, name) for name in names()]
    before = [cell_key(cell, bundle) for cell in methods]
    source = copied_package / (module.replace(".", "/") + ".py")
    source.write_text(source.read_text(encoding="utf-8") + "# touched\n", encoding="utf-8")
    after = [cell_key(cell, bundle) for cell in methods]
    stale = {cell.method for cell, old, new in zip(methods, before, after, strict=True) if old != new}
    if module == "calibrators.scaling":  # every record holds differences from temperature scaling
        assert stale == {cell.method for cell in methods}
    else:
        # The spline is built on what binning.py has for confidences.
        built_on = {"spline"} if module == "calibrators.binning" else set()
        assert stale == {name for name in names() if module_of(name) == module} | built_on


def test_records_of_an_older_key_are_dropped_and_others_kept(counted, tmp_path):
    run_cells(CELLS, "p")
    run_cells([replace(cell, n_resamples=11) for cell in CELLS[:2]], "p")
    table = pd.read_csv(tmp_path / "records" / "p.csv")
    assert sorted(table["method"]) == ["smart", "ts", "uncalibrated"]


def test_tables_show_percent_with_intervals_and_a_verdict(counted):
    records = run_cells(CELLS, "p")
    table = metric_table(records, ["ece", "nll"])
    row = records.set_index("method").loc["ts"]
    shown = f"{100 * row['ece']:.2f} [{100 * row['ece_low']:.2f}, {100 * row['ece_high']:.2f}]"
    assert table.loc[("small", "temperature scaling"), "ECE, %"] == shown
    verdict = verdict_table(records, "uncalibrated").loc["small"]
    assert verdict["NLL, nats"].startswith("higher: +") and verdict["predictions kept"] == "100.00%"


def test_paper_table_puts_reported_values_beside_ours():
    base = {"ece": 0.04354, "adaece": 0.04338, "cwece": 0.009, "nll": 0.4121, "accuracy": 0.9505}
    rows = [{"bundle": "public/cifar10-resnet50-ce", "method": "uncalibrated"} | base]
    rows += [
        {"bundle": "public/cifar10-resnet50-ce", "method": "smart-adam"} | base | {"ece": e} for e in (0.007, 0.009)
    ]
    rows += [{"bundle": "fashion/resnet", "method": "ts"} | base]
    table = paper_table(pd.DataFrame(rows)).set_index(["method", "metric"])
    assert table.loc[("uncalibrated", "ECE, %"), ["reported", "here"]].tolist() == ["4.34", "4.35"]
    adam = table.loc[("SMART (Adam)", "ECE, %")]
    assert adam["reported"] == "0.76" and adam["here"] == "0.80 (0.70 to 0.90, 2 seeds)"
    assert set(table["model"]) == {"public/cifar10-resnet50-ce"}


def test_held_out_table_never_reads_the_test_split(monkeypatch):
    bundle = small_bundle()

    class Guarded:
        val = bundle.val

        @property
        def test(self):
            pytest.fail("the test split was read")

    monkeypatch.setattr(choices, "load", lambda name: Guarded())
    from smartlib import TemperatureScaling

    table = choices.held_out_table(["small"], {"ts": TemperatureScaling()}, n_splits=2, sizes=(50, None))
    assert table["size"].tolist() == [50, 150, 50, 150]
    assert table["ece"].between(0, 0.5).all() and table["n_errors"].gt(0).all()


def test_a_forced_run_that_was_interrupted_goes_on_after_what_it_had_finished(counted, monkeypatch):
    monkeypatch.setattr(grid, "PLANS", {"one": lambda profile: CELLS[:1], "two": lambda profile: CELLS[1:]})
    monkeypatch.setattr(grid, "other_records", lambda profile: {})
    monkeypatch.setenv("SMARTLIB_FORCE", "1")

    def run():
        return CliRunner().invoke(grid.main, ["run"], catch_exceptions=False)

    run()
    assert counted == ["uncalibrated", "ts", "smart"]
    run()
    assert len(counted) == 6, "all are computed again"
    computed = grid.run_cell

    def broken(cell):
        if cell.method == "smart":
            raise RuntimeError("interrupted")
        return computed(cell)

    monkeypatch.setattr(grid, "run_cell", broken)
    with pytest.raises(RuntimeError, match="interrupted"):
        grid.main(["run"], standalone_mode=False)
    monkeypatch.setattr(grid, "run_cell", computed)
    del counted[:]
    # One record of the first experiment, which is finished, is checked; of the second, that of TS is in the journal.
    assert run().output.count("records") == 2
    assert counted[0] == "uncalibrated" and "smart" in counted
