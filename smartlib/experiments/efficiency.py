"""How much validation data a method needs: what the records of the experiment "size" say.

For every bundle and size the records hold several subsets of the validation split, drawn at random, and on each subset
every method. Methods are therefore compared in pairs, on the same subset. What varies from subset to subset is the
validation data alone: all are judged on one test split. And large subsets of one split overlap, so that they vary less
than independent samples of that size would, and intervals over them are too short there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
from scipy.stats import hypergeom, ttest_1samp

from smartlib.experiments.tables import format_value, header
from smartlib.metrics import METRICS
from smartlib.plots.style import label

SUBSET = ["bundle", "n_val", "split_seed"]
COMPARED = ("ece", "smce", "nll")
LEVEL = 0.95


def size_table(records: pd.DataFrame, metrics: Sequence[str] = METRICS) -> pd.DataFrame:
    """Median and 10 to 90 % range over the subsets.

    Args:
        records: of the experiment "size".
        metrics: the columns.

    Returns:
        Text table indexed by model, method and validation size, in the order of the records; the last column is the
        noise floor of the ECE of that bundle after temperature scaling on all validation samples.
    """
    floors = _all_samples(records, "ts").dropna(subset=["ece_floor"])
    rows = []
    for (bundle, method, n), group in records.groupby(["bundle", "method", "n_val"], sort=False):
        row = {"model": bundle, "method": label(method), "validation samples": n, "subsets": len(group)}
        errors = group["n_val_errors"]
        row["errors among them"] = f"{errors.median():.0f}" + _range(errors, "{:.0f}".format)
        for metric in metrics:
            shown = _range(group[metric], lambda value, metric=metric: format_value(value, metric))
            row[header(metric)] = format_value(group[metric].median(), metric) + shown
        if bundle in floors.index:
            floor = floors.loc[bundle]
            row["floor of ECE, %"] = (
                f"{format_value(floor['ece_floor'], 'ece')} (95 %: {format_value(floor['ece_floor_q95'], 'ece')})"
            )
        rows.append(row)
    return pd.DataFrame(rows).set_index(["model", "method", "validation samples"])


def paired_differences(
    records: pd.DataFrame, method: str = "smart", baseline: str = "ts", metrics: Sequence[str] = COMPARED
) -> pd.DataFrame:
    """Method minus baseline on each subset.

    Args:
        records: of the experiment "size".
        method: the method.
        baseline: another method, or "uncalibrated", whose one value counts for every subset.
        metrics: the columns.

    Returns:
        One row per subset: bundle, val_size, n_val, n_val_errors, split_seed and the differences (fractions, nats),
        under the names of the metrics.
    """
    ours = records[records["method"] == method].reset_index(drop=True)
    on = ["bundle"] if baseline == "uncalibrated" else SUBSET
    theirs = records[records["method"] == baseline].drop_duplicates(on)
    both = ours[on].merge(theirs[[*on, *metrics]], on=on, how="left", validate="many_to_one")
    result = ours[["bundle", "val_size", "n_val", "n_val_errors", "split_seed"]].copy()
    for metric in metrics:
        result[metric] = ours[metric] - both[metric]
    return result


def mean_differences(pairs: pd.DataFrame, metrics: Sequence[str] = COMPARED) -> pd.DataFrame:
    """Mean differences per bundle and size, with 95 % intervals (paired t) over the subsets.

    Args:
        pairs: from :func:`paired_differences`.
        metrics: its columns of differences.

    Returns:
        One row per bundle, size and metric: bundle, n_val, metric, subsets, mean, low, high; the two ends are nan where
        there is one subset.
    """
    rows = []
    for (bundle, n), group in pairs.groupby(["bundle", "n_val"], sort=False):
        for metric in metrics:
            values = group[metric].to_numpy()
            low = high = np.nan
            if len(values) > 1:
                # Of equal differences the interval is their value, which the test calls undefined.
                equal = np.ptp(values) < 1e-12
                low, high = (values[0], values[0]) if equal else ttest_1samp(values, 0.0).confidence_interval(LEVEL)
            rows.append({"bundle": bundle, "n_val": n, "metric": metric, "subsets": len(values),
                         "mean": values.mean(), "low": low, "high": high})  # fmt: skip
    return pd.DataFrame(rows)


def pays_from(differences: pd.DataFrame) -> pd.DataFrame:
    """From which validation size on a method is below its baseline.

    Args:
        differences: from :func:`mean_differences`.

    Returns:
        Numbers indexed by bundle, one column per metric: the smallest size at which, and at every larger one, the
        interval lies below zero (where there is one subset, all samples: the difference itself); nan where no size is
        such.
    """
    sizes = {}
    for (bundle, metric), group in differences.groupby(["bundle", "metric"], sort=False):
        group = group.sort_values("n_val", ascending=False)
        below = (group["high"].fillna(group["mean"]) < 0).to_numpy()
        streak = int(np.argmin(below)) if not below.all() else len(below)
        # All samples alone are one draw, without an interval.
        decided = streak and group["subsets"].iloc[streak - 1] > 1
        sizes.setdefault(bundle, {})[metric] = group["n_val"].iloc[streak - 1] if decided else np.nan
    return pd.DataFrame.from_dict(sizes, orient="index").rename_axis("bundle")


def pays_table(records: pd.DataFrame, method: str = "smart") -> pd.DataFrame:
    """From which size on a method is below no calibration and below temperature scaling, per bundle and metric.

    Args:
        records: of the experiment "size". method: the method.

    Returns:
        Text table indexed by model: error rate on the validation split, and for each baseline and metric the size, with
        the number of errors that a validation set of that size holds on average.
    """
    whole = _all_samples(records, method)
    rate = whole["n_val_errors"] / whole["n_val"]
    table = pd.DataFrame({"errors on validation data": rate.map("{:.1%}".format)})
    for baseline in ("uncalibrated", "ts"):
        sizes = pays_from(mean_differences(paired_differences(records, method, baseline)))
        for metric in COMPARED:
            table[f"{header(metric).split(',')[0]} below {label(baseline)} from"] = [
                "at no size" if np.isnan(n) else f"{n:.0f} ({n * rate[bundle]:.0f} errors)"
                for bundle, n in sizes[metric].reindex(table.index).items()
            ]
    return table.rename_axis("model")


def no_error_table(
    records: pd.DataFrame, sizes: Sequence[int], methods: Sequence[str] = ("ts", "smart")
) -> pd.DataFrame:
    """Validation sets without a single error: how often they occur, and what a fit on them gives.

    Args:
        records: of the experiment "size".
        sizes: validation sizes.
        methods: which are shown, below no calibration.

    Returns:
        Text table indexed by model, size and method: the chance that a random subset has no error, how many of the
        subsets had none, and the medians of ECE and NLL over these and over the others.
    """
    whole = _all_samples(records, methods[0])
    rows = []
    for bundle, size in itertools.product(whole.index, sizes):
        chance = hypergeom.pmf(0, whole["n_val"][bundle], whole["n_val_errors"][bundle], size)
        here = records[(records["bundle"] == bundle) & (records["val_size"].astype(str) == str(size))]
        for method in ("uncalibrated", *methods):
            of_method = here if method != "uncalibrated" else records[records["bundle"] == bundle]
            of_method = of_method[of_method["method"] == method]
            without = here.loc[here["method"] == methods[0], "n_val_errors"] == 0
            row = {"model": bundle, "validation samples": size, "method": label(method),
                   "chance of no error": f"{chance:.2%}", "seen": f"{without.sum()} of {len(without)}"}  # fmt: skip
            for metric, (name, chosen) in itertools.product(
                ("ece", "nll"), {"no error": [True], "with errors": [False]}.items()
            ):
                values = of_method[metric]
                if method != "uncalibrated":
                    values = values[(of_method["n_val_errors"] == 0).isin(chosen)]
                row[f"{header(metric)}: {name}"] = format_value(values.median(), metric) if len(values) else "–"
            rows.append(row)
    return pd.DataFrame(rows).set_index(["model", "validation samples", "method"])


def _all_samples(records: pd.DataFrame, method: str) -> pd.DataFrame:
    """The records of a method that was fitted on all validation samples, by bundle."""
    return records[(records["method"] == method) & (records["val_size"].astype(str) == "all")].set_index("bundle")


def _range(values: pd.Series, show: Callable[[float], str]) -> str:
    """The 10 to 90 % range in brackets; nothing for a single value."""
    if len(values) == 1:
        return ""
    return f" ({show(values.quantile(0.1))} to {show(values.quantile(0.9))})"
