"""What each part of SMART does: its variants, their differences from the default, and how sure these are (notebook 09).

Every variant is fitted on the same random halves of a fitting pool and judged on the same held-out validation samples
(bundles ``<model>@held-out``), so that differences are paired. Two things make a difference uncertain: the samples it
was fitted on, seen in how it varies over the halves, and the samples it was judged on, seen by resampling them.

Halves of one pool overlap. Of a mean over samples with variance v, halves of a pool of n vary with variance s^2 = v / n
around the pool's own mean, which itself varies with v / n from pool to pool: the mean over J halves is uncertain by
s^2 (1 + 1 / J), not by s^2 / J. This is the half-sample jackknife, and the correction of Nadeau and Bengio (2003) for
test sets as large as the training sets.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import product

import numpy as np
import pandas as pd
from scipy.special import logsumexp
from scipy.stats import t as student_t

from smartlib.calibrators import create
from smartlib.calibrators.smart import inputs
from smartlib.data.bundles import Split
from smartlib.experiments.cells import draw, load
from smartlib.experiments.records import Task, run_tasks, sources_of, task_key
from smartlib.experiments.tables import format_value, header, spread_table
from smartlib.hardness import SIGNALS
from smartlib.metrics import evaluate
from smartlib.plots.style import label
from smartlib.softece import BANDWIDTH, DELTA, N_BINS
from smartlib.toplabel import margin
from smartlib.uncertainty import compare, noise_floor

# Fitting sets of every variant; of the grid and of further seeds; and those whose judging noise is resampled.
N_SPLITS, N_FEWER_SPLITS, N_JUDGED_SPLITS = 10, 4, 3
N_SEEDS = 5
GRID = {
    "n_bins": (5, 10, 15, 20, 30),
    "bandwidth": (0.01, 0.02, 0.05, 0.1, 0.2),
    "delta": (1e-4, 1e-3, 1e-2),
}
_DEFAULT = {"n_bins": N_BINS, "bandwidth": BANDWIDTH, "delta": DELTA}
_SYMBOL = {"n_bins": "M", "bandwidth": "λ", "delta": "δ"}

# The variants of each ablation; all else is as in SMART().
VARIANTS: dict[str, dict[str, dict]] = {
    "objective": {
        "SoftECE (δ = 0)": {"objective": "softece"},
        "NLL": {"objective": "nll"},
        "Brier score": {"objective": "brier"},
    },
    "network": {
        "4 units": {"hidden": [4]},
        "64 units": {"hidden": [64]},
        "16 + 16 units": {"hidden": [16, 16]},
    },
    "signal": {signal.replace("_", " "): {"signal": signal} for signal in SIGNALS if signal != "margin"},
    "solver": {
        "stopped earlier": {"patience": 1},
        "stopped later": {"patience": 20, "tol": 1e-5},
        "noisy start": {"start_noise": 0.1, "seed": 0},
        "Adam": {"solver": "adam", "seed": 0},
    },
} | {
    name: {f"{_SYMBOL[name]} = {value:g}": {name: value} for value in values if value != _DEFAULT[name]}
    for name, values in GRID.items()
}

SHOWN = ("accuracy", "ece", "adaece", "cwece", "smce", "nll", "brier")
JUDGED = ("smce", "ece", "adaece", "nll", "brier")
LEVEL = 0.95


# --- what is run --------------------------------------------------------------------------------------------------


def runs(logits: np.ndarray) -> Iterator[tuple[str, str, dict, int]]:
    """All fits of one bundle.

    Args:
        logits: (N, K), to see which signals they hold.

    Yields:
        ``(method, calibrator, settings, n_splits)``: a name such as "objective: NLL", "ts", "smart" or "grid"; the
        registered calibrator with its settings; on how many fitting sets, split seeds 0, 1, ..., it is fitted.
    """
    yield "ts", "ts", {}, N_SPLITS
    yield "smart", "smart", {}, N_SPLITS
    left_out = lost_signals(logits)
    for ablation, variants in VARIANTS.items():
        for variant, settings in variants.items():
            if settings.get("signal") not in left_out:
                n_splits = N_FEWER_SPLITS if ablation in GRID else N_SPLITS
                yield f"{ablation}: {variant}", "smart", settings, n_splits
            if "seed" in settings:
                for seed in range(1, N_SEEDS):
                    yield f"{ablation}: {variant}", "smart", settings | {"seed": seed}, N_FEWER_SPLITS
    for values in product(*GRID.values()):
        settings = dict(zip(GRID, values, strict=True))
        if sum(settings[name] != _DEFAULT[name] for name in GRID) > 1:  # else it is one of those above
            yield "grid", "smart", settings, N_FEWER_SPLITS


def lost_signals(logits: np.ndarray) -> tuple[str, ...]:
    """The signals that are not in the logits: where these are log-probabilities, or z - max z, their height is gone.

    >>> lost_signals(np.log([[0.7, 0.3], [0.6, 0.4]])), lost_signals(np.array([[2.0, 0.0], [1.0, 0.0]]))
    (('max_logit', 'energy'), ())
    """
    heights = (logits.max(axis=1), logsumexp(logits, axis=1))
    return ("max_logit", "energy") if any(np.abs(height).max() < 1e-3 for height in heights) else ()


def with_variants(records: pd.DataFrame) -> pd.DataFrame:
    """Say in columns of their own what the names of bundles and methods and the settings say.

    Args:
        records: of the cells that come from :func:`runs`.

    Returns:
        The records with ``model``; ``ablation`` and ``variant`` ("" and a display name for what is no variant);
        ``seed``; and ``n_bins``, ``bandwidth``, ``delta`` of the objective.
    """
    settings = records["settings"].map(json.loads)
    parts = records["method"].str.extract(r"^(?:(?P<ablation>[^:]+): )?(?P<variant>.+)$")
    columns = {
        "model": records["bundle"].str.removesuffix("@held-out"),
        "ablation": parts["ablation"].fillna(""),
        "variant": parts["variant"].map(label),
        "seed": settings.map(lambda s: s.get("seed", 0)),
    }
    columns |= {name: settings.map(lambda s, n=name: s.get(n, _DEFAULT[n])) for name in GRID}
    return records.assign(**columns)


# --- differences from the default ---------------------------------------------------------------------------------


def half_width(differences: Sequence[float]) -> float:
    """Half the width of the 95 % interval of a mean over random halves of one pool, see the head of this file.

    Args:
        differences: (J,), one value for each half, J >= 2.

    Returns:
        t quantile (J - 1 degrees of freedom) times s sqrt(1 + 1 / J), in the unit of the differences.

    Source: half-sample jackknife (Shao and Wu 1989); Nadeau and Bengio 2003 (Machine Learning 52).

    >>> round(half_width([0.0, 1.0, 2.0]), 3)
    4.968
    """
    n = len(differences)
    return float(student_t.ppf((1 + LEVEL) / 2, n - 1) * np.std(differences, ddof=1) * np.sqrt(1 + 1 / n))


def paired_differences(
    records: pd.DataFrame, judging: pd.DataFrame, metrics: Sequence[str] = ("smce", "ece", "nll")
) -> pd.DataFrame:
    """Each variant minus the default SMART fitted on the same samples, with intervals for both sources of noise.

    Args:
        records: from :func:`with_variants`; of seeds the first counts.
        judging: from :func:`judging_noise`.
        metrics: out of ``JUDGED``.

    Returns:
        One row per model, variant and metric: ``model, ablation, variant, metric, n_splits, difference`` (mean over the
        fitting sets), ``fitting`` (half the width of its interval by :func:`half_width`), ``low, high`` (95 % interval
        for both sources: the distances from the mean add in quadrature), ``verdict`` ("lower", "higher" or
        "undecided").

    Source: distances in quadrature: Zou and Donner 2008.
    """
    first = records[(records["seed"] == 0) & ~records["method"].isin(["uncalibrated", "grid"])]
    noise = judging.groupby(["bundle", "method"])[[f"{m}_{end}" for m in metrics for end in ("down", "up")]].mean()
    rows = []
    for bundle, part in first.groupby("bundle", sort=False):
        default = part[part["method"] == "smart"].set_index("split_seed")
        for method, group in part[part["method"] != "smart"].groupby("method", sort=False):
            group = group.set_index("split_seed")
            for metric in metrics:
                difference = group[metric] - default.loc[group.index, metric]
                mean, fitting = difference.mean(), half_width(difference)
                low = mean - np.hypot(fitting, noise.loc[(bundle, method), f"{metric}_down"])
                high = mean + np.hypot(fitting, noise.loc[(bundle, method), f"{metric}_up"])
                rows.append(
                    {name: group[name].iloc[0] for name in ("model", "ablation", "variant")}
                    | {"metric": metric, "n_splits": len(group), "difference": mean, "fitting": fitting}
                    | {"low": low, "high": high}
                    | {"verdict": "lower" if high < 0 else "higher" if low > 0 else "undecided"}
                )
    return pd.DataFrame(rows)


def judging_noise(models: Iterable[str], profile: str, n_resamples: int = 200) -> pd.DataFrame:
    """How uncertain the differences from the default are because of the samples they are judged on; kept as records.

    Args:
        models: names of bundles, without ``@held-out``.
        profile: the records are kept in ``records/<profile>_ablations-judging.csv``.
        n_resamples: of the judging samples.

    Returns:
        One row per bundle, method and split seed (the first ``N_JUDGED_SPLITS``); for each metric in ``JUDGED`` the
        difference, and how far its interval by `smartlib.uncertainty.compare` reaches ``_down`` and ``_up`` from it.

    Source: paired bootstrap, see `smartlib.uncertainty.compare`.
    """
    sources = [*sources_of("uncertainty", "calibrators.scaling", "calibrators.smart", "experiments.cells")]
    sources.append("experiments/ablations.py")
    tasks = []
    for bundle in (f"{model}@held-out" for model in models):
        data = load(bundle)
        for method, calibrator, settings, _ in runs(data.val.logits):
            if method in ("smart", "grid") or settings.get("seed", 0):
                continue
            for split in range(N_JUDGED_SPLITS):
                identity = {"bundle": bundle, "method": method, "split_seed": split}
                key = task_key([], sources, [identity, calibrator, settings, n_resamples, data.sha256])
                run = partial(_judged_difference, bundle, calibrator, settings, split, n_resamples)
                tasks.append(Task(key, identity, run))
    return run_tasks(tasks, f"{profile}_ablations-judging")


def _judged_difference(bundle: str, calibrator: str, settings: dict, split: int, n_resamples: int) -> dict:
    data = load(bundle)
    fitted = _fitted(calibrator, settings, fitting_set(bundle, split))
    probs, default, row = fitted.predict_proba(data.test.logits), _default_probs(bundle, split), {}
    for metric in JUDGED:
        found = compare(probs, default, data.test.labels, metric, n_resamples=n_resamples)
        row[metric] = found.difference
        row[f"{metric}_down"], row[f"{metric}_up"] = found.difference - found.low, found.high - found.difference
    return row


@lru_cache(maxsize=8)
def _default_probs(bundle: str, split: int) -> np.ndarray:
    return _fitted("smart", {}, fitting_set(bundle, split)).predict_proba(load(bundle).test.logits)


def fitting_set(bundle: str, split: int) -> Split:
    """The half of a bundle's fitting pool (its validation split) on which calibrators of a split seed are fitted."""
    data = load(bundle)
    return draw(data, len(data.val.labels) // 2, split)


def _fitted(calibrator: str, settings: dict, part: Split):
    with warnings.catch_warnings():  # doubtful fits are what an ablation is about
        warnings.simplefilter("ignore")
        return create(calibrator, **settings).fit(part.logits, part.labels)


# --- tables -------------------------------------------------------------------------------------------------------


def noise_floors(models: Iterable[str], n_resamples: int = 200) -> pd.DataFrame:
    """What perfectly calibrated models with the confidences of the default SMART would measure.

    Args:
        models: names of bundles, without ``@held-out``. n_resamples: simulated data sets.

    Returns:
        Indexed by model: ``<metric>_floor`` and ``<metric>_floor_q95`` for ECE, AdaECE, classwise ECE and smCE.
    """
    rows = {}
    for model in models:
        probs = _default_probs(f"{model}@held-out", 0)
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
        over the fitting sets, and the noise floors of ECE and smCE on the judging samples (95 %).
    """
    part = records[(records["seed"] == 0) & records["ablation"].isin(["", ablation]) & (records["method"] != "grid")]
    table = spread_table(part, ["model", "variant"], SHOWN)
    models = table.index.get_level_values("model")
    for metric in ("ece", "smce"):
        shown = floors[f"{metric}_floor_q95"].map(lambda x, m=metric: format_value(x, m))
        table[f"floor of {header(metric)}"] = shown.loc[models].to_numpy()
    return table


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
        gains = values.rsub(values[tuple(_DEFAULT[name] for name in GRID)], axis=0)
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
        plain = _fitted("smart", {}, part)
        plain_inputs, plain_probs = inputs(plain, test.logits), plain.predict_proba(test.logits)
        for factor in factors:
            smart = _fitted("smart", {}, Split(factor * part.logits, part.labels))
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
        t = [_fitted("smart", settings, fitting_set(bundle, s)).temperature_map(at) for s in range(N_SPLITS)]
        low, median, high = np.quantile(t, (0, 0.5, 1), axis=0)
        tables.append(pd.DataFrame({"variant": variant, "margin": at, "median": median, "low": low, "high": high}))
    return pd.concat(tables, ignore_index=True)
