"""Tables for people: percent, intervals, noise floors, "paper" beside "here"."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from smartlib.experiments.profiles import REPORTED_AS
from smartlib.experiments.reported import reported_value
from smartlib.metrics import METRICS
from smartlib.plots.style import label

_NATURAL_UNITS = ("nll", "brier")
# Names of our methods in the reported values.
_REPORTED_METHOD = {"uncalibrated": "uncalibrated", "ts": "TS", "smart": "SMART", "smart-adam": "SMART"}


def header(metric: str) -> str:
    """Column header of a metric, with its unit.

    >>> header("ece"), header("nll")
    ('ECE, %', 'NLL, nats')
    """
    unit = {"nll": ", nats", "brier": ""}.get(metric, ", %")
    return label(metric) + unit


def format_value(value: float, metric: str) -> str:
    """A fraction as percent with two decimals; NLL and Brier score with four decimals.

    >>> format_value(0.04354, "ece"), format_value(0.4121, "nll")
    ('4.35', '0.4121')
    """
    return f"{value:.4f}" if metric in _NATURAL_UNITS else f"{100 * value:.2f}"


def metric_table(records: pd.DataFrame, metrics: Sequence[str] = METRICS) -> pd.DataFrame:
    """The main table: one row per bundle and method, each value with its 95 % interval, the noise floor of ECE beside.

    Args:
        records: from `smartlib.experiments.grid.run_cells`.
        metrics: the columns.

    Returns:
        A table of text, indexed by bundle and method.
    """
    rows = []
    for record in records.to_dict("records"):
        row = {"model": record["bundle"], "method": label(record["method"])}
        for metric in metrics:
            low, high = (format_value(record[f"{metric}_{end}"], metric) for end in ("low", "high"))
            row[header(metric)] = f"{format_value(record[metric], metric)} [{low}, {high}]"
        row["floor of ECE, %"] = (
            f"{format_value(record['ece_floor'], 'ece')} (95 %: {format_value(record['ece_floor_q95'], 'ece')})"
        )
        row["n"] = record["n"]
        rows.append(row)
    return pd.DataFrame(rows).set_index(["model", "method"])


def verdict_table(records: pd.DataFrame, method: str = "smart") -> pd.DataFrame:
    """Does a method beat temperature scaling? Paired differences with 95 % intervals, per bundle and metric.

    Args:
        records: from `smartlib.experiments.grid.run_cells`.
        method: the method.

    Returns:
        Text table indexed by bundle: for ECE, smCE and NLL the difference (method minus temperature scaling) with its
        interval and what it says: "lower" and "higher" where the interval excludes zero; and the share of
        predictions that were kept.
    """
    rows = []
    for record in records[records["method"] == method].to_dict("records"):
        row = {"model": record["bundle"], "predictions kept": f"{record['kept_predictions']:.2%}"}
        for metric in ("ece", "smce", "nll"):
            value, low, high = (record[f"{metric}_vs_ts{end}"] for end in ("", "_low", "_high"))
            word = "lower" if high < 0 else "higher" if low > 0 else "no difference"
            shown = [("+" if x > 0 else "") + format_value(x, metric) for x in (value, low, high)]
            row[header(metric)] = f"{word}: {shown[0]} [{shown[1]}, {shown[2]}]"
        rows.append(row)
    return pd.DataFrame(rows).set_index("model")


def paper_table(
    records: pd.DataFrame, metrics: Sequence[str] = ("ece", "adaece", "cwece", "nll", "accuracy")
) -> pd.DataFrame:
    """Reported values beside ours, where somebody reported the same model and method.

    Args:
        records: from `smartlib.experiments.grid.run_cells`; several records of one method (seeds) are averaged.
        metrics: the metrics to look up.

    Returns:
        Text table: model, method, metric, paper, here (with the range over seeds where there are several), source.
    """
    rows = []
    for (bundle, method), group in records.groupby(["bundle", "method"], sort=False):
        if bundle not in REPORTED_AS or method not in _REPORTED_METHOD:
            continue
        for metric in metrics:
            found = reported_value(*REPORTED_AS[bundle], _REPORTED_METHOD[method], metric)
            if found is None:
                continue
            here = format_value(group[metric].mean(), metric)
            if len(group) > 1:
                low, high = (format_value(x, metric) for x in (group[metric].min(), group[metric].max()))
                here = f"{here} ({low} to {high}, {len(group)} seeds)"
            row = {"model": bundle, "method": label(method), "metric": header(metric)}
            rows.append(row | {"reported": format_value(found.value, metric), "here": here, "source": found.source})
    return pd.DataFrame(rows)


def spread_table(
    rows: pd.DataFrame, by: Sequence[str], metrics: Sequence[str] = ("ece", "smce", "nll")
) -> pd.DataFrame:
    """How much metrics vary within groups: "mean (min to max)" and the number of runs.

    Args:
        rows: one row per run, with the columns of ``by`` and the metrics as fractions.
        by: the columns that make a group.
        metrics: the columns to summarise.

    Returns:
        Text table indexed by ``by``.
    """
    groups = rows.groupby(list(by), sort=False)
    table = pd.DataFrame({"runs": groups.size()})
    for metric in metrics:
        mean, low, high = (
            groups[metric].agg(how).map(lambda x, m=metric: format_value(x, m)) for how in ("mean", "min", "max")
        )
        table[header(metric)] = mean + " (" + low + " to " + high + ")"
    return table
