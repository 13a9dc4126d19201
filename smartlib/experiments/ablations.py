"""What each part of SMART does: its variants, their differences from the default, and how sure these are.

What notebook 09 shows of them is in `smartlib.experiments.ablation_tables`.

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

from smartlib.calibrators import Calibrator, create
from smartlib.comparison import compare
from smartlib.data.bundles import Split
from smartlib.experiments.cells import draw, load
from smartlib.experiments.records import Task, run_tasks, sources_of, task_key
from smartlib.hardness import SIGNALS
from smartlib.plots.style import label
from smartlib.softece import BANDWIDTH, DELTA, N_BINS

# Fitting sets of every variant; of the grid and of further seeds; and those whose judging noise is resampled.
N_SPLITS, N_FEWER_SPLITS, N_JUDGED_SPLITS = 10, 4, 3
N_SEEDS = 5
GRID = {
    "bandwidth": (0.01, 0.02, 0.05, 0.1, 0.2),
    "delta": (1e-4, 1e-3, 1e-2),
    "n_bins": (5, 10, 15, 20, 30),
}
DEFAULT = {"bandwidth": BANDWIDTH, "delta": DELTA, "n_bins": N_BINS}
_SYMBOL = {"bandwidth": "λ", "delta": "δ", "n_bins": "M"}

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
    name: {f"{_SYMBOL[name]} = {value:g}": {name: value} for value in values if value != DEFAULT[name]}
    for name, values in GRID.items()
}

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
        if sum(settings[name] != DEFAULT[name] for name in GRID) > 1:  # else it is one of those above
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
        ``seed``; and ``bandwidth``, ``delta``, ``n_bins`` of the objective.
    """
    settings = records["settings"].map(json.loads)
    parts = records["method"].str.extract(r"^(?:(?P<ablation>[^:]+): )?(?P<variant>.+)$")
    columns = {
        "model": records["bundle"].str.removesuffix("@held-out"),
        "ablation": parts["ablation"].fillna(""),
        "variant": parts["variant"].map(label),
        "seed": settings.map(lambda s: s.get("seed", 0)),
    }
    columns |= {name: settings.map(lambda s, n=name: s.get(n, DEFAULT[n])) for name in GRID}
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
        One row per model, variant and metric: ``model, ablation, variant, metric, n_splits``; ``n_lower`` (fitting sets
        on which the variant is below the default); ``difference`` (mean over the fitting sets); ``fitting`` (half the
        width of its interval by :func:`half_width`); ``low, high`` (95 % interval for both sources: the distances from
        the mean add in quadrature); ``verdict`` ("lower", "higher" or "undecided").

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
                    | {"metric": metric, "n_splits": len(group), "n_lower": int((difference < 0).sum())}
                    | {"difference": mean, "fitting": fitting, "low": low, "high": high}
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
        difference, and how far its interval by `smartlib.compare` reaches ``_down`` and ``_up`` from it.

    Source: paired bootstrap, see `smartlib.compare`.
    """
    modules = ("comparison", "calibrators.scaling", "calibrators.smart", "experiments.cells")
    sources = [*sources_of(*modules), "experiments/ablations.py"]
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
    test = load(bundle).test
    probs = fit_quietly(calibrator, settings, fitting_set(bundle, split)).predict_proba(test.logits)
    row = {}
    for metric in JUDGED:
        found = compare(probs, default_probs(bundle, split), test.labels, metric, n_resamples=n_resamples)
        row[metric] = found.difference
        row[f"{metric}_down"], row[f"{metric}_up"] = found.difference - found.low, found.high - found.difference
    return row


# --- fits ---------------------------------------------------------------------------------------------------------


def fitting_set(bundle: str, split: int) -> Split:
    """The half of a bundle's fitting pool, its validation split, on which calibrators of a split seed are fitted."""
    data = load(bundle)
    return draw(data, len(data.val.labels) // 2, split)


def fit_quietly(calibrator: str, settings: dict, part: Split) -> Calibrator:
    """A registered calibrator fitted on samples; doubtful fits are what an ablation is about, so nothing is warned."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return create(calibrator, **settings).fit(part.logits, part.labels)


@lru_cache(maxsize=8)
def default_probs(bundle: str, split: int) -> np.ndarray:
    """The probabilities (N, K) that the default SMART, fitted on a fitting set, gives the held-out samples."""
    return fit_quietly("smart", {}, fitting_set(bundle, split)).predict_proba(load(bundle).test.logits)
