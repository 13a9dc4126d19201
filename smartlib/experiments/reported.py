"""The values that the paper's authors and others reported, in smartlib's units.

``reported.csv`` holds them as they were printed; this file is the only place that converts them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

# Metric in the file -> smartlib's metric, and what one printed unit is worth in smartlib's unit.
UNITS = {
    "accuracy": ("accuracy", 0.01),  # percent
    "ece": ("ece", 0.01),
    "adaece": ("adaece", 0.01),
    "cwece": ("cwece", 0.01),  # mean over the classes, as in smartlib
    "cwece_sum": ("cwece", 0.01 / 10),  # sum over the classes: only CIFAR-10 rows, so ten
    "nll": ("nll", 1.0),  # nats
    "brier_half": ("brier", 2.0),  # half of smartlib's sum over the classes of (p - y)^2
}

# Where two sources report the same value, the first of these is the one to stand beside.
SOURCES = (
    "calibench summary tables",  # what the paper prints
    "calibench per-run records (one split, five optimiser seeds)",
    "dirichletcal/experiments_dnn, tables 3 and 4",
)


@dataclass(frozen=True)
class ReportedValue:
    """One reported value, in smartlib's units (fractions; nats; the full Brier score).

    Args:
        value: the value, or the mean where several runs were reported.
        std: its standard deviation over the runs, or None. The runs share one split: it is the noise of
            the optimiser, not of the data.
        runs: the number of runs, or None where it was not reported.
        source: where it was reported.
    """

    value: float
    std: float | None
    runs: int | None
    source: str


def reported(
    dataset: str | None = None, model: str | None = None, method: str | None = None, metric: str | None = None
) -> pd.DataFrame:
    """The reported values that match, from every source, in smartlib's units.

    Args:
        dataset: for instance ``"cifar10"``; None for all.
        model: for instance ``"resnet50"``.
        method: ``"uncalibrated"``, ``"SMART"``, ``"TS"``, ...; upper and lower case are one.
        metric: ``"accuracy"``, ``"ece"``, ``"adaece"``, ``"cwece"``, ``"nll"`` or ``"brier"``.

    Returns:
        One row per value: dataset, model, method, metric, mean, std, runs, source. Empty where the
        combination was not reported.

    Raises:
        ValueError: a name occurs nowhere in the file; lists those that do.
    """
    table = _table()
    wanted = {"dataset": dataset, "model": model, "method": method, "metric": metric}
    for column, name in wanted.items():
        if name is not None:
            known = sorted(_table()[column].unique())
            if name.lower() not in map(str.lower, known):
                raise ValueError(f"no reported {column} {name!r}; there are {', '.join(known)}")
            table = table[table[column].str.lower() == name.lower()]
    return table.reset_index(drop=True)


def reported_value(dataset: str, model: str, method: str, metric: str) -> ReportedValue | None:
    """One reported value, in smartlib's units.

    A few values on ImageNet-Sketch were reported twice, in the authors' summary tables and in their
    per-run records, and differ. This returns that of the summary tables, which are the paper's;
    ``reported`` returns both.

    Args:
        dataset: as for ``reported``, and so are ``model``, ``method`` and ``metric``.

    Returns:
        The value, or None where the combination was not reported.

    Raises:
        ValueError: a name occurs nowhere in the file; lists those that do.

    >>> value = reported_value("cifar10", "resnet50", "uncalibrated", "ece")
    >>> round(100 * value.value, 3), value.source
    (4.341, 'calibench summary tables')
    """
    rows = reported(dataset, model, method, metric)
    if rows.empty:
        return None
    row = min(rows.itertuples(), key=lambda row: SOURCES.index(row.source))
    return ReportedValue(
        value=row.mean,
        std=None if math.isnan(row.std) else row.std,
        runs=None if math.isnan(row.runs) else int(row.runs),
        source=row.source,
    )


@cache
def _table() -> pd.DataFrame:
    """The whole file, converted."""
    import pandas as pd

    table = pd.read_csv(Path(__file__).with_name("reported.csv"))
    factor = table["metric"].map({printed: factor for printed, (_, factor) in UNITS.items()})
    table["mean"] *= factor
    table["std"] *= factor
    table["metric"] = table["metric"].map({printed: ours for printed, (ours, _) in UNITS.items()})
    return table
