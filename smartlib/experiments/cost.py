"""What calibrators and metrics cost: seconds and memory, each measured in a process of its own.

The result is ``records/cost.csv`` in the folder of the figures, one row per calibrator or metric and size: seconds of
the fit and of a prediction of the same number of samples, or of the metric, and the peak of the memory beyond the
input (float32 logits; for calibrators that need them also 64 features per sample). Up to a few hundred megabytes of it
are chunks of a fixed size. Seconds belong to the machine that is named in the row; ratios between rows are what
carries over.
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
from collections.abc import Iterator
from contextlib import contextmanager

import click
import numpy as np
import pandas as pd
from scipy.special import softmax

from smartlib.calibrators import create, names
from smartlib.experiments.outputs import figures_folder
from smartlib.metrics import TOP_LABEL_ERRORS, top_label
from smartlib.softece import soft_ece

N_FEATURES = 64
# (samples, classes): a CIFAR-10 validation set, CIFAR-100, all of ImageNet's validation set.
SIZES = ((5_000, 10), (10_000, 100), (50_000, 1_000))
# A million parameters by cross-validation would take hours there.
LEFT_OUT = {("dirichlet", 1_000)}
METRICS = ("ece", "kde_ece", "soft_ece", "smce")


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
        what: registered name of a calibrator, or a name in ``METRICS``.
        n: samples. k: classes.

    Returns:
        A flat record.
    """
    _run(what, *_input(what, 200, min(k, 20)))  # imports and compilation are not what is measured
    data = _input(what, n, k)
    size, before = data[0].nbytes, _resident()
    seconds = _run(what, *data)
    if what not in METRICS and "features" in create(what).needs:
        size += data[2].nbytes
    return {
        "what": what, "n": n, "classes": k, **seconds,
        "input_megabytes": size / 1e6, "peak_megabytes": max(_peak() - before, 0) / 1e6,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }  # fmt: skip


def _input(what: str, n: int, k: int) -> tuple:
    """The synthetic data; for a metric with probabilities in the place of logits."""
    data = synthetic_logits(n, k)
    if what in METRICS:
        for start in range(0, n, 1000):
            rows = slice(start, start + 1000)
            data[0][rows] = softmax(data[0][rows], axis=1)
    return data


def _run(what: str, logits: np.ndarray, labels: np.ndarray, features: np.ndarray, head: tuple) -> dict:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if what in METRICS:
            with _timed() as total:
                _metric(what, logits, labels)
            return {"fit_seconds": np.nan, "use_seconds": total()}
        calibrator = create(what)
        with _timed() as fitting:
            calibrator.fit(logits, labels, features=features, head=head)
        with _timed() as using:
            calibrator.predict_proba(logits, features=features)
    return {"fit_seconds": fitting(), "use_seconds": using()}


def _metric(what: str, values: np.ndarray, labels: np.ndarray) -> None:
    (TOP_LABEL_ERRORS | {"soft_ece": soft_ece})[what](*top_label(values, labels))


@contextmanager
def _timed() -> Iterator:
    start, end = time.perf_counter(), []
    yield lambda: end[0] - start
    end.append(time.perf_counter())


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


@click.command()
@click.argument("chosen", nargs=-1)
def main(chosen: tuple[str, ...]) -> None:
    """Measure all calibrators and metrics (or those CHOSEN) and write records/cost.csv."""
    path = figures_folder() / "records" / "cost.csv"
    known = pd.read_csv(path).to_dict("records") if chosen and path.is_file() else []
    tasks = [(what, n, k) for n, k in SIZES for what in chosen or (*names(), *METRICS) if (what, k) not in LEFT_OUT]
    for what, n, k in tasks:
        code = "import json, sys; from smartlib.experiments.cost import measure; " \
               "print(json.dumps(measure(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))"  # fmt: skip
        run = subprocess.run(
            [sys.executable, "-c", code, what, str(n), str(k)], capture_output=True, text=True, check=True
        )
        found = json.loads(run.stdout.splitlines()[-1])
        known = [row for row in known if (row["what"], row["n"], row["classes"]) != (what, n, k)] + [found]
        path.parent.mkdir(parents=True, exist_ok=True)
        pd.DataFrame(known).to_csv(path, index=False, float_format="%.4g", lineterminator="\n")
        click.echo(
            f"{what:10} {n:6} x {k:<5} fit {found['fit_seconds']:8.2f} s   use {found['use_seconds']:8.2f} s   "
            f"input {found['input_megabytes']:.1f} MB   peak beyond it {found['peak_megabytes']:.0f} MB"
        )


if __name__ == "__main__":
    main()
