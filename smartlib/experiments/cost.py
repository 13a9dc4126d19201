"""What calibrators and metrics cost: seconds and memory, each measured in a process of its own (``make bench``).

The result is ``records/cost.csv`` in the folder of the figures, one row per calibrator or metric and size: seconds of
the fit and of a prediction of the same number of samples, or of the metric, and the peak of the memory beyond the
input (float32 logits; for calibrators that need them also 64 features per sample). Up to a few hundred megabytes of it
are chunks of a fixed size.

Seconds belong to the machine that is named in the row, and to its other work at that time; what carries over are
ratios. Temperature scaling is therefore timed in turn with each calibrator, in the same process on the same data, and
the row holds both.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import click
import numpy as np
import pandas as pd
from scipy.special import softmax

from smartlib.calibrators import create, names
from smartlib.experiments.grid import module_of
from smartlib.experiments.outputs import figures_folder
from smartlib.experiments.plans import VARIANTS
from smartlib.experiments.records import read_records, sources_of, task_key
from smartlib.metrics import TOP_LABEL_ERRORS, top_label
from smartlib.softece import soft_ece

N_FEATURES = 64
METHODS = {name: (name, {}) for name in names()} | VARIANTS
METRICS = ("ece", "kde_ece", "soft_ece", "smce")
# (samples, classes). A CIFAR-10 validation set, CIFAR-100, all of ImageNet's validation set:
SIZES = ((5_000, 10), (10_000, 100), (50_000, 1_000))
# Growth with the samples and with the classes, for the calibrators only.
GROWTH_N = tuple((n, 10) for n in (1_000, 3_000, 10_000, 30_000, 100_000))
GROWTH_K = tuple((5_000, k) for k in (10, 30, 100, 300, 1_000))
# What takes longer than about a minute on two cores is left out, and its row says so.
LEFT_OUT: dict[str, Callable[[int, int], bool]] = {
    "dirichlet": lambda n, k: n * k > 300_000,  # K (K + 1) parameters, fitted for each of many settings and folds
    "gc": lambda n, k: n * k > 1_500_000,
    "vs": lambda n, k: n * k > 5_000_000,
    "procal": lambda n, k: n > 50_000,  # neighbours of all samples among all
}
# A measurement is repeated so many times, or until it has taken so many seconds; the median counts.
REPEATS, REPEAT_SECONDS = 5, 1.0

# Seconds that the first version of the paper reports for the fit.
REPORTED_SECONDS = {"smart": 23.03, "cts": 5457.55}

# What the column ``note`` says.
MEASURED, TOO_SLOW = "measured", "left out: longer than a minute"
COLUMNS = (
    "what", "n", "classes", "n_parameters", "fit_seconds", "use_seconds", "ts_fit_seconds", "ts_use_seconds", "repeats",
    "input_megabytes", "peak_megabytes", "note", "machine", "key",
)  # fmt: skip


def synthetic_logits(n: int, k: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray, tuple]:
    """Over-confident logits (n, k) float32 that a head computes from 64 features, labels (n,), features and head.

    Made in place, so that no step needs much more memory than the result.
    """
    rng = np.random.default_rng(seed)
    features = rng.standard_normal((n, N_FEATURES), dtype=np.float32)
    weight = rng.standard_normal((k, N_FEATURES), dtype=np.float32) * np.float32(4 / np.sqrt(N_FEATURES))
    logits, labels = np.empty((n, k), dtype=np.float32), np.empty(n, dtype=np.int64)
    for start in range(0, n, 1000):
        rows = slice(start, start + 1000)
        logits[rows] = features[rows] @ weight.T
        # Gumbel noise at half the logits draws a label from softmax(z / 2): the model is too confident.
        labels[rows] = (logits[rows] / 2 + rng.gumbel(size=logits[rows].shape)).argmax(axis=1)
    return logits, labels, features, (weight, np.zeros(k))


def measure(what: str, n: int, k: int) -> dict:
    """Seconds and peak memory of one calibrator or metric, in this process.

    Args:
        what: a key of ``METHODS``, or a name in ``METRICS``.
        n: samples. k: classes.

    Returns:
        A flat record: parameters learned, medians of the seconds, those of temperature scaling (nan for a metric),
        number of repeats, megabytes.
    """
    for warm_up in (what, "ts"):  # imports and compilation are not what is measured
        _run(warm_up, *_input(warm_up, 200, min(k, 20)))
    data = _input(what, n, k)
    size, before = data[0].nbytes, _resident()
    n_parameters, *seconds = _run(what, *data)
    peak = max(_peak() - before, 0)
    if what in METHODS and "features" in create(METHODS[what][0]).needs:
        size += data[2].nbytes
    repeats = int(np.clip(REPEAT_SECONDS / np.nansum(seconds), 1, REPEATS))
    runs, baseline = [seconds], [[np.nan, np.nan]]
    for repeat in range(repeats):
        if repeat > 0:
            runs.append(_run(what, *data)[1:])
        if what in METHODS:
            baseline.append(_run("ts", *data)[1:])
    (fit, use), (ts_fit, ts_use) = np.median(runs, axis=0), np.median(baseline[1:] or baseline, axis=0)
    return {
        "n_parameters": n_parameters, "fit_seconds": fit, "use_seconds": use, "ts_fit_seconds": ts_fit,
        "ts_use_seconds": ts_use, "repeats": repeats, "input_megabytes": size / 1e6, "peak_megabytes": peak / 1e6,
    }  # fmt: skip


def _input(what: str, n: int, k: int) -> tuple:
    """The synthetic data; for a metric with probabilities in the place of logits."""
    data = synthetic_logits(n, k)
    if what in METRICS:
        for start in range(0, n, 1000):
            rows = slice(start, start + 1000)
            data[0][rows] = softmax(data[0][rows], axis=1)
    return data


def _run(what: str, logits: np.ndarray, labels: np.ndarray, features: np.ndarray, head: tuple) -> tuple:
    """Parameters learned, seconds of the fit, seconds of the use."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        start = time.perf_counter()
        if what in METRICS:
            (TOP_LABEL_ERRORS | {"soft_ece": soft_ece})[what](*top_label(logits, labels))
            return np.nan, np.nan, time.perf_counter() - start
        name, settings = METHODS[what]
        calibrator = create(name, **settings).fit(logits, labels, features=features, head=head)
        fitted = time.perf_counter()
        calibrator.predict_proba(logits, features=features)
        return int(calibrator.n_parameters), fitted - start, time.perf_counter() - fitted


def _peak() -> int:
    """Largest resident memory of this process so far, bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _resident() -> int:
    """Resident memory now, bytes; where the system does not tell, the largest so far, which is nearly the same here."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return _peak()


def tasks_of(chosen: Sequence[str] = ()) -> list[tuple[str, int, int]]:
    """What is measured, as (what, samples, classes): everything, or those chosen; small ones first."""
    sizes = {size: [*METHODS, *METRICS] for size in SIZES}
    for size in (*GROWTH_N, *GROWTH_K):
        sizes.setdefault(size, list(METHODS))
    tasks = [(what, n, k) for (n, k), whats in sizes.items() for what in whats if not chosen or what in chosen]
    return sorted(tasks, key=lambda task: task[1] * task[2])


def cost_table(costs: pd.DataFrame, n: int, k: int) -> pd.DataFrame:
    """The calibrators at one size, as a table for people.

    Args:
        costs: from ``read_records("cost")``.
        n: samples. k: classes.

    Returns:
        Text table indexed by calibrator, quickest fit first: parameters learned, seconds of the fit, seconds per 10,000
        predictions, peak megabytes beyond the input, and the ratios of the two times to those of temperature scaling
        that were taken in turn with them; those that were left out come last, and say so.
    """
    # Imported here: the processes that measure have no use for pictures, and start twice as fast without them.
    from smartlib.plots.style import label

    rows = costs[(costs["n"] == n) & (costs["classes"] == k) & costs["what"].isin(METHODS)]
    table = []
    for row in rows.sort_values("fit_seconds").to_dict("records"):
        shown = {"calibrator": label(row["what"])}
        if row["note"] != MEASURED:
            shown["fit, s"] = row["note"]
        else:
            shown |= {
                "parameters": f"{row['n_parameters']:,.0f}",
                "fit, s": f"{row['fit_seconds']:.3g}",
                "per 10,000 predictions, s": f"{1e4 * row['use_seconds'] / n:.3g}",
                "memory, MB": f"{row['peak_megabytes']:.0f}",
                "fit / TS": f"{row['fit_seconds'] / row['ts_fit_seconds']:.3g}",
                "prediction / TS": f"{row['use_seconds'] / row['ts_use_seconds']:.3g}",
            }
        table.append(shown)
    columns = ["parameters", "fit, s", "fit / TS", "per 10,000 predictions, s", "prediction / TS", "memory, MB"]
    return pd.DataFrame(table).set_index("calibrator").reindex(columns=columns).fillna("")


def growth_exponents(costs: pd.DataFrame, along: str) -> pd.Series:
    """The exponent a of seconds of the fit in proportion to size^a, from the three largest measured sizes.

    Args:
        costs: rows of one series, as for `smartlib.plots.cost.growth_plot`. along: "n" or "classes".

    Returns:
        Exponents by calibrator, of those with three measured sizes.
    """
    found = {}
    for what, rows in costs.dropna(subset=["fit_seconds"]).sort_values(along).groupby("what", sort=False):
        if len(rows) >= 3:
            largest = np.log(rows[[along, "fit_seconds"]].tail(3).to_numpy(float))
            found[what] = np.polyfit(*largest.T, 1)[0]
    return pd.Series(found, dtype=float)


@click.command()
@click.argument("chosen", nargs=-1, type=click.Choice((*METHODS, *METRICS)))
def main(chosen: tuple[str, ...]) -> None:
    """Measure all calibrators and metrics (or those CHOSEN) and write records/cost.csv.

    What was measured on this kind of machine with the same sources stays, so that an interrupted run resumes;
    SMARTLIB_FORCE=1 begins anew.
    """
    path = figures_folder() / "records" / "cost.csv"
    known = read_records("cost").to_dict("records") if path.is_file() else []
    if os.environ.get("SMARTLIB_FORCE") == "1":
        known = [row for row in known if chosen and row["what"] not in chosen]
        _write(path, known)
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    for what, n, k in tasks_of(chosen):
        module = module_of(METHODS[what][0]) if what in METHODS else "metrics"
        key = task_key([], sources_of(module), [what, n, k, machine])
        if any(row["key"] == key for row in known):
            continue
        known = [row for row in known if (row["what"], row["n"], row["classes"]) != (what, n, k)]
        found = {"what": what, "n": n, "classes": k, "note": TOO_SLOW}
        says = TOO_SLOW
        if not (what in LEFT_OUT and LEFT_OUT[what](n, k)):
            found |= _measure_in_a_process(what, n, k) | {"note": MEASURED}
            says = (
                f"fit {found['fit_seconds']:8.3f} s   use {found['use_seconds']:8.3f} s   "
                f"peak beyond the input {found['peak_megabytes']:.0f} MB"
            )
        known.append(found | {"machine": machine, "key": key})
        _write(path, known)
        click.echo(f"{what:10} {n:6} x {k:<5} {says}")


def _measure_in_a_process(what: str, n: int, k: int) -> dict:
    code = "import json, sys; from smartlib.experiments.cost import measure; " \
           "print(json.dumps(measure(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))"  # fmt: skip
    command = [sys.executable, "-c", code, what, str(n), str(k)]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1])


def _write(path: Path, rows: list[dict]) -> None:
    """Replace the file in one step: an interrupted run leaves what it had."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    pd.DataFrame(rows, columns=COLUMNS).to_csv(partial, index=False, float_format="%.4g", lineterminator="\n")
    os.replace(partial, path)


if __name__ == "__main__":
    main()
