"""What notebook 09 shows of the ablations: tables, the grid of settings, learned maps, rescaled logits."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from itertools import product

import numpy as np
import pandas as pd

from smartlib.calibrators.smart import inputs
from smartlib.data.bundles import Split
from smartlib.experiments.ablations import (
    DEFAULT,
    GRID,
    N_FEWER_SPLITS,
    N_SPLITS,
    VARIANTS,
    default_probs,
    fit_quietly,
    fitting_set,
)
from smartlib.experiments.cells import load
from smartlib.experiments.tables import format_value, header, spread_table
from smartlib.metrics import evaluate
from smartlib.toplabel import margin
from smartlib.uncertainty import noise_floor

SHOWN = ("accuracy", "ece", "adaece", "cwece", "smce", "nll", "brier")


def noise_floors(models: Iterable[str], n_resamples: int = 200) -> pd.DataFrame:
    """What perfectly calibrated models with the confidences of the default SMART would measure.

    Args:
        models: names of bundles, without ``@held-out``. n_resamples: simulated data sets.

    Returns:
        Indexed by model: ``<metric>_floor`` and ``<metric>_floor_q95`` for ECE, AdaECE, classwise ECE and smCE.
    """
    rows = {}
    for model in models:
        probs = default_probs(f"{model}@held-out", 0)
        rows[model] = {
            f"{metric}_floor{end}": value
            for metric in ("ece", "adaece", "cwece", "smce")
            for end, value in zip(("", "_q95"), noise_floor(probs, metric, n_resamples), strict=True)
        }
    return pd.DataFrame.from_dict(rows, orient="index")


def variant_table(records: pd.DataFrame, floors: pd.DataFrame, ablation: str) -> pd.DataFrame:
    """The metrics of the variants of an ablation, beside the default SMART and what is no SMART.

    Args:
        records: from :func:`with_variants`; of seeds the first counts.
        floors: from :func:`noise_floors`.
        ablation: a key of ``VARIANTS``.

    Returns:
        Text table indexed by model and variant: the number of fits, every metric of ``SHOWN`` as "mean (min to max)"
        over the fitting sets of the ablation, and the noise floors of ECE and smCE on the held-out samples (95 %).
    """
    part = records[(records["seed"] == 0) & records["ablation"].isin(["", ablation]) & (records["method"] != "grid")]
    part = part[part["split_seed"].isin(part.loc[part["ablation"] == ablation, "split_seed"])]
    table = spread_table(part, ["model", "variant"], SHOWN)
    models = table.index.get_level_values("model")
    for metric in ("ece", "smce"):
        shown = floors[f"{metric}_floor_q95"].map(lambda x, m=metric: format_value(x, m))
        table[f"floor of {header(metric)}"] = shown.loc[models].to_numpy()
    return table


def difference_table(differences: pd.DataFrame) -> pd.DataFrame:
    """Differences with their intervals and what these decide.

    Args:
        differences: from `smartlib.experiments.ablations.paired_differences`.

    Returns:
        Text table indexed by model and variant, a column per metric: "undecided: +0.05 [-0.10, +0.20], lower on 3/10".
    """

    def describe(row: pd.Series) -> str:
        mean, low, high = (
            ("+" if row[name] > 0 else "") + format_value(row[name], row["metric"])
            for name in ("difference", "low", "high")
        )
        return f"{row['verdict']}: {mean} [{low}, {high}], lower on {row['n_lower']}/{row['n_splits']}"

    rows = differences.assign(text=differences.apply(describe, axis=1))
    table = rows.pivot(index=["model", "variant"], columns="metric", values="text")
    order = pd.MultiIndex.from_frame(rows[["model", "variant"]].drop_duplicates())
    return table.loc[order, list(dict.fromkeys(rows["metric"]))].rename(columns=header)


def verdict_counts(differences: pd.DataFrame) -> pd.DataFrame:
    """On how many models a variant's metrics are lower, higher and undecided.

    Args:
        differences: from :func:`paired_differences`.

    Returns:
        Text table indexed by ablation and variant, a column per metric: "2 lower, 1 undecided".
    """

    def count(verdicts: pd.Series) -> str:
        found = verdicts.value_counts()
        return ", ".join(f"{found[word]} {word}" for word in ("lower", "higher", "undecided") if word in found)

    table = differences.groupby(["ablation", "variant", "metric"], sort=False)["verdict"].agg(count).unstack("metric")
    order = differences.drop_duplicates(["ablation", "variant"]).set_index(["ablation", "variant"]).index
    return table.loc[order, list(dict.fromkeys(differences["metric"]))].rename(columns=header)


def seed_spread(records: pd.DataFrame, metrics: Sequence[str] = ("ece", "smce", "nll")) -> pd.DataFrame:
    """How much results vary from seed to seed on the same samples, and from fitting set to fitting set at one seed.

    Args:
        records: from :func:`with_variants`.
        metrics: the metrics.

    Returns:
        One row per model, variant that has seeds, and metric: ``model, variant, metric, between_seeds,
        between_splits``, root mean square standard deviations (fractions, nats). Halves of one pool overlap, so that
        independent fitting sets would vary by sqrt(2) times ``between_splits``.
    """
    rows = []
    seeded = records[records["settings"].str.contains('"seed"') & (records["split_seed"] < N_FEWER_SPLITS)]
    for (model, variant), group in seeded.groupby(["model", "variant"], sort=False):
        for metric in metrics:
            values = group.pivot(index="split_seed", columns="seed", values=metric)
            between = {f"between_{name}": np.sqrt(values.var(axis=axis).mean()) for name, axis in
                       (("seeds", 1), ("splits", 0))}  # fmt: skip
            rows.append({"model": model, "variant": variant, "metric": metric} | between)
    return pd.DataFrame(rows)


# --- the grid of M, lambda and delta ------------------------------------------------------------------------------


def grid_means(records: pd.DataFrame, metrics: Sequence[str] = SHOWN) -> pd.DataFrame:
    """The metrics on the grid, mean over the fitting sets that all its points share.

    Args:
        records: from :func:`with_variants`. metrics: the columns.

    Returns:
        One row per model, M, lambda and delta.
    """
    at = ["model", *GRID]
    return _grid_records(records).groupby(at, sort=False)[list(metrics)].mean().sort_index().reset_index()


def best_elsewhere(records: pd.DataFrame, metric: str = "smce") -> pd.DataFrame:
    """Does a point of the grid that wins on some fitting sets also win on the others?

    For each fitting set in turn the best point on the others is taken, and compared with the default on this one.

    Args:
        records: from :func:`with_variants`. metric: by which the best is chosen.

    Returns:
        Indexed by model: ``best`` (its gain over the default, mean over all fitting sets, where it was chosen),
        ``elsewhere`` (mean gain on the fitting sets left out), ``default_rank`` (of the default among all
        points, 1 is the best) and ``n_points``; gains are positive, in the metric's unit.
    """
    rows = {}
    for model, part in _grid_records(records).groupby("model", sort=False):
        values = part.pivot(index="split_seed", columns=list(GRID), values=metric)
        gains = values.rsub(values[tuple(DEFAULT[name] for name in GRID)], axis=0)
        elsewhere = [gains.loc[split, gains.drop(index=split).mean().idxmax()] for split in gains.index]
        rows[model] = {
            "best": gains.mean().max(), "elsewhere": float(np.mean(elsewhere)),
            "default_rank": int((gains.mean() > 1e-12).sum()) + 1, "n_points": gains.shape[1],
        }  # fmt: skip
    return pd.DataFrame.from_dict(rows, orient="index")


def _grid_records(records: pd.DataFrame) -> pd.DataFrame:
    on_grid = records["method"].isin(["smart", "grid"]) | records["ablation"].isin(GRID)
    return records[on_grid & (records["split_seed"] < N_FEWER_SPLITS)]


# --- what no cell can say -----------------------------------------------------------------------------------------


def rescaled_table(models: Iterable[str], factors: Sequence[float] = (0.1, 1.0, 10.0)) -> pd.DataFrame:
    """SMART fitted on logits that were multiplied by a constant, and judged on logits multiplied by the same.

    Args:
        models: names of bundles, without ``@held-out``.
        factors: the constants.

    Returns:
        One row per model, fitting set and factor: ``model, factor, split_seed``, the metrics of ``SHOWN``,
        ``input_change`` (largest difference of the network's inputs, standardised margins, from those without a
        factor), ``confidence_change`` (mean absolute difference of the confidences from those without a factor) and
        ``at_floor`` (share of judging samples whose T is within 2 % of its floor of 0.1).
    """
    rows = []
    for model, split in product(models, range(N_FEWER_SPLITS)):
        bundle = f"{model}@held-out"
        part, test = fitting_set(bundle, split), load(bundle).test
        plain = fit_quietly("smart", {}, part)
        plain_inputs, plain_probs = inputs(plain, test.logits), plain.predict_proba(test.logits)
        for factor in factors:
            smart = fit_quietly("smart", {}, Split(factor * part.logits, part.labels))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                probs, t = smart.predict_proba(factor * test.logits), smart.temperatures(factor * test.logits)
            rows.append(
                {"model": model, "factor": factor, "split_seed": split}
                | evaluate(probs, test.labels, metrics=SHOWN).to_dict()
                | {
                    "input_change": float(np.abs(inputs(smart, factor * test.logits) - plain_inputs).max()),
                    "confidence_change": float(np.abs(probs.max(axis=1) - plain_probs.max(axis=1)).mean()),
                    "at_floor": float(np.mean(t < 0.102)),
                }
            )
    return pd.DataFrame(rows)


def objective_maps(model: str, n_points: int = 150) -> pd.DataFrame:
    """The maps T(m) that the objectives lead to, over the fitting sets.

    Args:
        model: name of a bundle, without ``@held-out``.
        n_points: margins, from 0 to the 99 % quantile of the fitting pool.

    Returns:
        One row per objective and margin: ``variant, margin`` (logit units), ``median, low, high`` of T over the fitting
        sets (dimensionless; low and high are the smallest and the largest).
    """
    bundle = f"{model}@held-out"
    at = np.linspace(0, np.quantile(margin(load(bundle).val.logits), 0.99), n_points)
    tables = []
    for variant, settings in ({"SMART": {}} | VARIANTS["objective"]).items():
        t = [fit_quietly("smart", settings, fitting_set(bundle, s)).temperature_map(at) for s in range(N_SPLITS)]
        low, median, high = np.quantile(t, (0, 0.5, 1), axis=0)
        tables.append(pd.DataFrame({"variant": variant, "margin": at, "median": median, "low": low, "high": high}))
    return pd.concat(tables, ignore_index=True)
