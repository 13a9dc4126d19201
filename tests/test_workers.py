"""Cells on several processes and on a Dask cluster; what a kill leaves behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from smartlib.experiments import records, workers
from smartlib.experiments.cells import Cell
from smartlib.experiments.grid import run_cells
from smartlib.experiments.records import Task, run_tasks

CELLS = [
    Cell("fashion/resnet@held-out", method, method, {}, 1000, seed, n_resamples=0)
    for method in ("ts", "spline") for seed in range(20)
]  # fmt: skip

PROGRAM = """
from test_workers import CELLS
from smartlib.experiments.grid import run_cells
run_cells(CELLS, "p")
"""


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The table of a run that nothing disturbed, in this process alone."""
    folder = tmp_path_factory.mktemp("expected")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SMARTLIB_FIGURES_DIR", str(folder))
        patch.delenv("SMARTLIB_FORCE", raising=False)
        return run_cells(CELLS, "p")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SMARTLIB_FIGURES_DIR", str(tmp_path))
    monkeypatch.delenv("SMARTLIB_FORCE", raising=False)
    return tmp_path / "records"


def start(folder: Path) -> subprocess.Popen:
    """The cells in a process (and workers) of their own."""
    environment = os.environ | {
        "SMARTLIB_FIGURES_DIR": str(folder.parent),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(Path(workers.__file__).parents[2])]),
        "LOKY_MAX_CPU_COUNT": "2",
    }
    return subprocess.Popen([sys.executable, "-c", PROGRAM], env=environment, stderr=subprocess.DEVNULL)


def lines(journal: Path) -> list[str]:
    return journal.read_text(encoding="utf-8").splitlines() if journal.is_file() else []


def wait_for(condition, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.002)


def test_five_kills_change_nothing_and_repeat_nothing(folder, expected):
    journal, rng = folder / "p.journal", np.random.default_rng(0)
    for _ in range(5):
        run = start(folder)
        before = len(lines(journal))
        target = before + int(rng.integers(1, 3))
        wait_for(lambda target=target, run=run: len(lines(journal)) >= target or run.poll() is not None)
        assert run.poll() is None, "killed before it was over"
        time.sleep(rng.random() * 0.02)
        run.send_signal(signal.SIGKILL)
        run.wait()
    kept = [line for line in lines(journal) if line.endswith("}")]
    assert 5 <= len(kept) < len(CELLS) and not (folder / "p.csv").exists()
    assert start(folder).wait() == 0
    table = pd.read_csv(folder / "p.csv")
    assert not journal.exists()
    pd.testing.assert_frame_equal(table, expected, rtol=1e-6)
    keys = [line.split('"key": "')[1][:16] for line in kept]
    assert len(set(keys)) == len(keys), "no finished cell was computed again"


def test_a_torn_line_of_a_journal_is_computed_again(folder, expected):
    run_cells(CELLS[:2], "p")
    journal = folder / "p.journal"
    rows = pd.read_csv(folder / "p.csv").to_dict("records")
    (folder / "p.csv").unlink()
    for row in rows:
        records._append(journal, row)
    journal.write_text(journal.read_text()[:-40])
    assert set(records._read_journal(journal)) == {rows[0]["key"]}
    pd.testing.assert_frame_equal(run_cells(CELLS[:2], "p"), expected[:2], rtol=1e-6, check_dtype=False)


def test_a_forced_run_that_was_killed_goes_on_where_it_stopped(folder, monkeypatch):
    done = []
    tasks = [Task(f"key{i}", {"name": i}, lambda i=i: done.append(i) or {"value": float(i)}) for i in range(4)]
    run_tasks(tasks, "p")
    monkeypatch.setenv("SMARTLIB_FORCE", "1")
    done.clear()
    for i in range(2):  # what the killed run had finished
        records._append(folder / "p.journal", {"key": f"key{i}", "name": i, "value": float(i)})
    run_tasks(tasks, "p")
    assert done[-2:] == [2, 3] and len(done) == 3, "two cells, and one of the finished ones to check it"


@pytest.mark.filterwarnings("ignore")  # of Dask and tornado, about sockets that a killed worker leaves
def test_a_cluster_that_loses_a_worker_gives_the_same_table(folder, expected, monkeypatch):
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, silence_logs=50
    ) as cluster:
        with distributed.Client(cluster) as client:
            first, _ = client.run(os.getpid).values()
        monkeypatch.setenv("SMARTLIB_SCHEDULER", cluster.scheduler_address)
        killed = []

        def kill():
            wait_for(lambda: len(lines(folder / "p.journal")) >= 2)
            os.kill(first, signal.SIGKILL)
            killed.append(len(lines(folder / "p.journal")))

        thread = threading.Thread(target=kill)
        thread.start()
        table = run_cells(CELLS, "p")
        thread.join()
    assert killed[0] < len(CELLS), "in the middle"
    pd.testing.assert_frame_equal(table, expected, rtol=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_workers_with_other_sources_are_refused(folder, monkeypatch):
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(
        n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None, silence_logs=50
    ) as cluster:
        monkeypatch.setenv("SMARTLIB_SCHEDULER", cluster.scheduler_address)
        answers = iter(["ours", "theirs"])
        monkeypatch.setattr(workers, "library_hash", lambda: next(answers))
        with pytest.raises(RuntimeError, match="these workers run other sources of smartlib"):
            run_cells(CELLS[:1], "p")
