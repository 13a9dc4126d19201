"""Reading the records of the shift experiment: what a bundle's name says, and what many shifts say together.

Eight corruptions are eight cases, not a sample of all that may go wrong: means over them come with their range, and
"mostly larger" is said by the signed-rank test over the cases.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import pandas as pd
from scipy.stats import wilcoxon

from smartlib.data.corruptions import CORRUPTIONS

# Long tails: the letter of a setting, what the model was trained on, and whether validation and test split have a tail.
SETTINGS = {
    "A": ("long tail", True, False),
    "B": ("long tail", True, True),
    "C": ("long tail", False, False),
    "D": ("long tail", False, True),
    "E": ("balanced", False, True),
    "F": ("balanced", True, True),
}

# A difference is called one where chance would give it in less than one case in twenty.
_LEVEL = 0.05


def with_conditions(records: pd.DataFrame) -> pd.DataFrame:
    """Say in columns of their own what the names of the bundles say.

    Args:
        records: from `smartlib.experiments.grid.run_cells`.

    Returns:
        The records with ``model``; ``val`` and ``test``, the splits (``clean``, ``sketch``, ``long-tailed-10``,
        ``jpeg-3``, ...); ``val_ratio`` and ``test_ratio``, the largest class divided by the smallest as far as the
        split was thinned out (1 for others); ``corruption`` ("" where the test images have none) and ``severity`` (0
        for clean images, nan where there is none).

    >>> table = with_conditions(pd.DataFrame({"bundle": ["fashion/resnet", "fashion/resnet@long-tailed-10:jpeg-3"]}))
    >>> table.loc[1, ["model", "val", "test", "corruption"]].tolist()
    ['fashion/resnet', 'long-tailed-10', 'jpeg-3', 'jpeg']
    >>> table[["val_ratio", "test_ratio", "severity"]].to_numpy().tolist()
    [[1.0, 1.0, 0.0], [10.0, 1.0, 3.0]]
    """
    named = records["bundle"].str.extract(r"^(?P<model>[^@]+)(?:@(?P<val>[^:]+):(?P<test>.+))?$").fillna("clean")
    for split in ("val", "test"):
        named[f"{split}_ratio"] = named[split].str.extract(r"^long-tailed-(\d+)$")[0].fillna("1").astype(int)
    found = named["test"].str.extract(rf"^({'|'.join(CORRUPTIONS)})-(\d)$")
    named["corruption"] = found[0].fillna("")
    named["severity"] = found[1].astype(float).mask(named["test"] == "clean", 0.0)
    return pd.concat([records, named], axis=1)


def with_all_samples(records: pd.DataFrame) -> pd.DataFrame:
    """The records of calibrators that were fitted on all validation samples of their split."""
    return records[records["val_size"].astype(str) == "all"]


def matched_fits(records: pd.DataFrame) -> pd.DataFrame:
    """Calibrators that were fitted on images of the shift they are judged on, and on as many clean ones.

    Args:
        records: from :func:`with_conditions`.

    Returns:
        Their records with ``fitted_on``: "clean" or "same shift".
    """
    shifted = records[records["severity"].gt(0) | (records["test"] == "sketch")]
    as_many = shifted[(shifted["val"] == "clean") & (shifted["val_size"].astype(str) != "all")]
    same = shifted[shifted["val"] == shifted["test"]]
    return pd.concat([as_many.assign(fitted_on="clean"), same.assign(fitted_on="same shift")], ignore_index=True)


def long_tail_settings(records: pd.DataFrame, trained: Mapping[str, int], ordinary: str) -> pd.DataFrame:
    """The records of the six settings that are called long-tailed, by letter (`SETTINGS`).

    Args:
        records: from :func:`with_conditions`. trained: models trained on long tails, with the ratios of their classes.
        ordinary: a model trained on balanced classes.

    Returns:
        Records with ``setting`` and ``ratio``.
    """
    parts = []
    for model, ratio in trained.items():
        for letter, (training, *tails) in SETTINGS.items():
            val, test = (f"long-tailed-{ratio}" if tail else "clean" for tail in tails)
            bundle = f"{model if training == 'long tail' else ordinary}@{val}:{test}"
            parts.append(records[records["bundle"] == bundle].assign(setting=letter, ratio=ratio))
    return pd.concat(parts, ignore_index=True)


def skew_schemes(records: pd.DataFrame, models: Sequence[str]) -> pd.DataFrame:
    """The records of class skew by scheme: which splits were thinned out.

    Args:
        records: from :func:`with_conditions`. models: trained on balanced classes.

    Returns:
        Records fitted on all samples of their split, with ``scheme`` ("skewed validation", "skewed test", "both
        skewed") and ``ratio``, which is 1 for the records without skew: those are in every scheme.
    """
    rows = with_all_samples(records)
    rows = rows[rows["model"].isin(models)]
    for split in ("val", "test"):
        rows = rows[(rows[f"{split}_ratio"] > 1) | (rows[split] == "clean")]
    chosen = {
        "skewed validation": rows[rows["test"] == "clean"],
        "skewed test": rows[rows["val"] == "clean"],
        "both skewed": rows[rows["val"] == rows["test"]],
    }
    parts = [
        part.assign(scheme=name, ratio=part[["val_ratio", "test_ratio"]].max(axis=1)) for name, part in chosen.items()
    ]
    return pd.concat(parts, ignore_index=True)


def size_controls(records: pd.DataFrame, models: Sequence[str]) -> pd.DataFrame:
    """Calibrators fitted on skewed validation samples, and on as many balanced ones, judged on balanced test samples.

    Args:
        records: from :func:`with_conditions`. models: trained on balanced classes.

    Returns:
        Records with ``validation`` ("skewed", "balanced") and the ``ratio`` of the skewed split that has this size, of
        the methods that have both.
    """
    skewed = skew_schemes(records, models)
    skewed = skewed[(skewed["scheme"] == "skewed validation") & (skewed["ratio"] > 1)]
    keys = ["model", "method", "n_val"]
    drawn = records[(records["bundle"] == records["model"]) & (records["val_size"].astype(str) != "all")]
    balanced = drawn.merge(skewed[[*keys, "ratio"]], on=keys)
    skewed = skewed.merge(drawn[keys].drop_duplicates(), on=keys)
    parts = [skewed.assign(validation="skewed"), balanced.assign(validation="balanced")]
    return pd.concat(parts, ignore_index=True).sort_values(
        ["model", "ratio", "method"], kind="stable", ignore_index=True
    )


def with_rise(records: pd.DataFrame, metric: str) -> pd.DataFrame:
    """How much a metric rises from clean to shifted test images, for each model and method.

    Args:
        records: from :func:`with_conditions`, with one record of each model and method on clean images among them.
        metric: the metric.

    Returns:
        The shifted records, with ``<metric>_rise``.
    """
    clean = records[records["test"] == "clean"].set_index(["model", "method"])[metric]
    shifted = records[records["test"] != "clean"]
    before = clean.loc[pd.MultiIndex.from_frame(shifted[["model", "method"]])].to_numpy()
    return shifted.assign(**{f"{metric}_rise": shifted[metric] - before})


def compare_over_conditions(
    records: pd.DataFrame, metric: str, method: str, others: Iterable[str], by: Sequence[str] = ("model",)
) -> pd.DataFrame:
    """Has a method mostly the lower value, over several shifts of the same images?

    Args:
        records: from :func:`with_conditions`: one for each model, test split and method.
        metric: what is compared, lower being better. method: the method. others: what it is compared with.
        by: the columns within which shifts are taken together.

    Returns:
        One row per group and other method: the columns of ``by``, ``other``, ``n_conditions``, ``n_lower`` (shifts on
        which the method is below the other), ``difference`` (mean of method minus other), ``p_value`` of Wilcoxon's
        signed-rank test, and ``verdict``: "lower", "higher" or "undecided", at 5 %.

    Source: Wilcoxon 1945; Demšar 2006 (JMLR 7) for comparisons over data sets.
    """
    rows = []
    for group, part in records.groupby(list(by), sort=False):
        values = part.pivot(index=["model", "test"], columns="method", values=metric)
        for other in others:
            difference = (values[method] - values[other]).dropna()
            p_value = float(wilcoxon(difference).pvalue) if (difference != 0).any() else 1.0
            mean = difference.mean()
            verdict = "undecided" if p_value >= _LEVEL else "lower" if mean < 0 else "higher"
            rows.append(
                dict(zip(by, group, strict=True))
                | {
                    "other": other, "n_conditions": len(difference), "n_lower": int((difference < 0).sum()),
                    "difference": mean, "p_value": p_value, "verdict": verdict,
                }
            )  # fmt: skip
    return pd.DataFrame(rows)


def count_against_ts(
    records: pd.DataFrame, by: Sequence[str], metrics: Sequence[str] = ("ece", "smce", "nll")
) -> pd.DataFrame:
    """On how many shifts is a method below temperature scaling, by the paired interval of each?

    Args:
        records: those with paired differences from temperature scaling count, others are left out.
        by: the columns that make a group. metrics: the metrics to count.

    Returns:
        One row per group, the columns of ``by`` in the index: ``n``, and for each metric ``<metric>_lower``,
        ``<metric>_higher`` and ``<metric>_undecided``.
    """
    compared = records[records[f"{metrics[0]}_vs_ts"].notna()]
    counts = {"n": compared.groupby(list(by), sort=False).size()}
    for metric in metrics:
        lower, higher = compared[f"{metric}_vs_ts_high"] < 0, compared[f"{metric}_vs_ts_low"] > 0
        for name, which in (("lower", lower), ("higher", higher), ("undecided", ~(lower | higher))):
            counts[f"{metric}_{name}"] = which.groupby([compared[c] for c in by], sort=False).sum()
    return pd.DataFrame(counts)


def verdict(n_for: int, n_against: int, n_all: int) -> str:
    """What most of a number of cases say: "held", "did not hold" or "undecided", with the counts.

    >>> verdict(3, 1, 5)
    'held (for 3, against 1, undecided 1)'
    """
    word = "held" if n_for > n_all / 2 else "did not hold" if n_against > n_all / 2 else "undecided"
    return f"{word} (for {n_for}, against {n_against}, undecided {n_all - n_for - n_against})"
