"""Tables for people: percent, intervals, noise floors, "paper" beside "here"."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from smartlib.experiments.pairs import CLAIMED
from smartlib.experiments.profiles import REPORTED_AS
from smartlib.experiments.reported import reported_value
from smartlib.metrics import METRICS
from smartlib.plots.style import label

_NATURAL_UNITS = ("nll", "brier")
# Names of our methods in the reported values.
_REPORTED_METHOD = {
    "uncalibrated": "uncalibrated",
    "ts": "TS",
    "vs": "VS",
    "dirichlet": "Dir-ODIR",
    "gc": "GC",
    "procal": "ProCal",
    "fc": "FC",
    "smart": "SMART",
    "smart-adam": "SMART",
}


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


def standings(records: pd.DataFrame, pairs: pd.DataFrame, metric: str) -> pd.DataFrame:
    """How SMART stands on each bundle among the methods of claim C6.

    Args:
        records: from `smartlib.experiments.grid.run_cells`, fits on all validation samples.
        pairs: from `smartlib.experiments.pairs.paired_table`.
        metric: "ece", "adaece", "smce", "nll" or "brier".

    Returns:
        One row per bundle: ``lowest``, the method with the lowest measured value; ``rank`` of SMART's value among
        ``n_methods``; ``in_set``, whether SMART is in the set that holds the best one, and ``set_size``; ``lower_than``
        and ``higher_than``, lists of the methods from which the 95 % interval of the paired difference tells SMART.
    """
    rows = []
    claimed = records[records["method"].isin(CLAIMED)]
    compared = pairs[(pairs["metric"] == metric) & pairs["method"].isin(CLAIMED)]
    for bundle, group in claimed.groupby("bundle", sort=False):
        value = group.set_index("method")[metric]
        pair = compared[compared["bundle"] == bundle].set_index("method")
        in_set = pair["behind_claimed"] <= 0
        rows.append(
            {
                "bundle": bundle,
                "lowest": value.idxmin(),
                "rank": int((value < value["smart"]).sum()) + 1,
                "n_methods": len(value),
                "in_set": bool(in_set["smart"]),
                "set_size": int(in_set.sum()),
                "lower_than": list(pair.index[pair["vs_smart_low"] > 0]),
                "higher_than": list(pair.index[pair["vs_smart_high"] < 0]),
            }
        )
    return pd.DataFrame(rows).set_index("bundle")


def standings_table(standing: pd.DataFrame) -> pd.DataFrame:
    """The same in words.

    Args:
        standing: from :func:`standings`.

    Returns:
        Text table indexed by bundle.
    """
    return pd.DataFrame(
        {
            "lowest measured": standing["lowest"].map(label),
            "rank of SMART": standing["rank"].astype(str) + " of " + standing["n_methods"].astype(str),
            "SMART may be the best": [
                "no" if not row.in_set else "yes, alone" if row.set_size == 1 else f"yes, as one of {row.set_size}"
                for row in standing.itertuples()
            ],
            "SMART lower than": standing["lower_than"].map(lambda names: ", ".join(map(label, names)) or "–"),
            "SMART higher than": standing["higher_than"].map(lambda names: ", ".join(map(label, names)) or "–"),
        }
    ).rename_axis("model")


def split_table(
    records: pd.DataFrame, method: str = "smart", other: str = "ts", metrics: Sequence[str] = ("ece", "smce", "nll")
) -> pd.DataFrame:
    """Does the comparison of two methods depend on which validation samples they were fitted on?

    Args:
        records: from `smartlib.experiments.grid.run_cells`, both methods fitted on the same parts of the validation
            split, told apart by ``split_seed``.
        method, other: the two methods.
        metrics: the metrics to compare.

    Returns:
        Text table indexed by bundle: on how many of the parts the method is lower, and the mean of the differences
        (method minus other) with the smallest and the largest.
    """
    rows = []
    for bundle, group in records.groupby("bundle", sort=False):
        first, second = (group[group["method"] == name].set_index("split_seed") for name in (method, other))
        row: dict = {"model": bundle}
        for metric in metrics:
            difference = first[metric] - second[metric]
            shown = [("+" if x > 0 else "") + format_value(x, metric) for x in difference.agg(["mean", "min", "max"])]
            lower = f"lower on {(difference < 0).sum()} of {len(difference)}"
            row[header(metric)] = f"{lower}: {shown[0]} ({shown[1]} to {shown[2]})"
        rows.append(row)
    return pd.DataFrame(rows, columns=["model", *map(header, metrics)]).set_index("model")


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
