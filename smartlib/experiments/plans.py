"""What is measured: the cells of each experiment.

An ablation is judged on held-out validation samples (``@held-out``): it says what a part of the method does, and is
the place where settings are looked at. Test splits are for the comparisons of finished methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product

from smartlib.calibrators import create, names
from smartlib.data import load
from smartlib.data.corruptions import CORRUPTIONS, SEVERITIES
from smartlib.data.vision import bundles as extracted
from smartlib.data.zoo import load_shifted
from smartlib.experiments.cells import N_RESAMPLES, Cell
from smartlib.experiments.profiles import (
    LONG_TAILED,
    SHIFTED,
    ablation_bundles,
    bundle_names,
    experiment_bundles,
    skewed_bundles,
)

# Methods of the main table, by the name that tables show: the registered calibrators, and variants of SMART.
VARIANTS = {
    "smart-adam": ("smart", {"solver": "adam", "seed": 0}),
    "smart-321": ("smart", {"hidden": [16, 16]}),
}
N_SPLITS = 5
# Fits of half a minute and more: once is enough.
NOT_RESAMPLED = ("dirichlet", "smart-adam")
N_ADAM_SEEDS, N_NOISY_STARTS = 5, 20

# Validation sizes of the data efficiency experiment, beside all samples.
SIZES = (32, 50, 100, 200, 500, 1000, 2000, 5000)
SIZE_METHODS = ("ts", "ets", "vs", "spline", "hb", "ir", "smart")
N_SIZE_SPLITS = 20

# Shift and long tails: the methods; those that are compared with temperature scaling condition by condition, and where;
# severities and methods with validation images of the same shift; ratios of class skew.
SHIFT_METHODS = ("uncalibrated", "ts", "ets", "hb", "ir", "spline", "smart")
COMPARED_METHODS, COMPARED_SEVERITIES = ("ir", "smart"), (1, 3, 5)
MATCHED_METHODS, MATCHED_SEVERITIES = ("ts", "hb", "ir", "smart"), (3, 5)
SKEW_RATIOS, N_CONTROLS = (10, 100, 1000), 5


def methods_of(bundle: str) -> Iterator[tuple[str, str, dict]]:
    """The methods that a bundle has the arrays for: name, registered calibrator, settings; uncalibrated first."""
    yield "uncalibrated", "", {}
    has = {"features": load(bundle).val.features is not None, "head": load(bundle).head is not None}
    for name in names():
        if all(has[need] for need in create(name).needs):
            yield name, name, {}
    for name, (calibrator, settings) in VARIANTS.items():
        yield name, calibrator, settings


def main_cells(profile: str) -> list[Cell]:
    """All bundles and methods: once on all validation samples, and on five random halves, but not of public logits."""
    cells = []
    for bundle in experiment_bundles(profile):
        half = len(load(bundle).val.labels) // 2
        for method, calibrator, settings in methods_of(bundle):
            cells.append(Cell(bundle, method, calibrator, settings))
            if profile != "public" and method not in ("uncalibrated", *NOT_RESAMPLED):
                cells += [
                    Cell(bundle, method, calibrator, settings, half, seed, n_resamples=0) for seed in range(N_SPLITS)
                ]
    return cells


def resplit_cells(profile: str) -> list[Cell]:
    """The paper's protocol: validation and test split drawn again, five times; profile ``paper`` alone."""
    bundles = experiment_bundles(profile) if profile == "paper" else ()
    return [
        Cell(f"{bundle}@resplit-{seed}", method, calibrator, settings, n_resamples=0)
        for bundle in bundles for seed in range(N_SPLITS) for method, calibrator, settings in methods_of(bundle)
        if method not in NOT_RESAMPLED
    ]  # fmt: skip


def start_cells(profile: str) -> list[Cell]:
    """SMART from other starts on the first three bundles: Adam from five seeds, the default with noise added to it."""
    cells = []
    for bundle in bundle_names(profile)[:3]:
        cells.append(Cell(bundle, "smart", "smart", n_resamples=0))
        cells += [
            Cell(bundle, "smart-adam", "smart", {"solver": "adam", "seed": seed}, n_resamples=0)
            for seed in range(N_ADAM_SEEDS)
        ]
        cells += [
            Cell(bundle, "SMART, noisy start", "smart", {"start_noise": 0.1, "seed": seed}, n_resamples=0)
            for seed in range(N_NOISY_STARTS)
        ]
    return cells


def size_cells(profile: str) -> list[Cell]:
    """How much validation data a method needs: resampled subsets of growing size.

    Of each bundle one record, temperature scaling on all samples, has the noise floors.
    """
    cells = []
    for bundle in experiment_bundles(profile):
        n = len(load(bundle).val.labels)
        cells += [Cell(bundle, "uncalibrated", n_resamples=0), Cell(bundle, "ts", "ts")]
        cells += [Cell(bundle, method, method, n_resamples=0) for method in SIZE_METHODS if method != "ts"]
        for size in (size for size in SIZES if size < n):
            cells += [
                Cell(bundle, method, method, {}, size, seed, n_resamples=0)
                for method in SIZE_METHODS for seed in range(N_SIZE_SPLITS)
            ]  # fmt: skip
    return cells


def shift_cells(profile: str) -> list[Cell]:
    """Corruptions and sketches, long-tailed training, and class skew, as far as a profile has models for them.

    Raises:
        ValueError: an unknown profile.
    """
    bundle_names(profile)
    shifted, skewed = SHIFTED.get(profile, ()), skewed_bundles(profile)
    cells = [cell for bundle in dict.fromkeys((*shifted, *skewed)) for cell in _each_method(bundle)]
    for model in shifted:
        cells += _corruption_cells(model) + _matched_cells(model)
    if profile == "paper":
        cells += [cell for bundle in bundle_names(profile) for cell in _extracted_cells(bundle)]
    for model, ratio in LONG_TAILED.get(profile, {}).items():
        for val, test in product(("clean", f"long-tailed-{ratio}"), repeat=2):
            cells += _each_method(f"{model}@{val}:{test}")
    for model in skewed:
        cells += _skew_cells(model)
    return cells


def _corruption_cells(model: str) -> list[Cell]:
    """Calibrated on clean validation samples, judged on shifted images."""
    cells = _each_method(f"{model}@clean:sketch")
    for corruption, severity in product(CORRUPTIONS, SEVERITIES):
        compared = COMPARED_METHODS if severity in COMPARED_SEVERITIES else ()
        for method in SHIFT_METHODS:
            n_resamples = N_RESAMPLES if method in compared else 0
            cells += _each_method(f"{model}@clean:{corruption}-{severity}", [method], n_resamples=n_resamples)
    return cells


def _extracted_cells(bundle: str) -> list[Cell]:
    """Extracted shifted images: calibrated on clean validation images, and on those of the same shift, as the paper."""
    cells = []
    for condition in extracted.shifted(bundle):
        for val in ("clean", condition):
            cells += _each_method(f"{bundle}@{val}:{condition}", SHIFT_METHODS)
    return cells


def _matched_cells(model: str) -> list[Cell]:
    """Calibrated on shifted validation images of the same kind, and on as many clean ones."""
    cells = []
    conditions = [f"{corruption}-{severity}" for corruption, severity in product(CORRUPTIONS, MATCHED_SEVERITIES)]
    for condition in (*conditions, "sketch"):
        # Not every model has shifted validation images.
        if val := load_shifted(model)[condition].get("val"):
            n = len(val.labels)
            cells += _each_method(f"{model}@{condition}:{condition}", MATCHED_METHODS, n_resamples=0)
            cells += _each_method(f"{model}@clean:{condition}", MATCHED_METHODS, val_size=n, n_resamples=0)
    return cells


def _skew_cells(model: str) -> list[Cell]:
    """Calibrated on skewed classes, judged on them, or both; and on as many balanced samples as a skewed split has."""
    cells, sizes = [], set()
    for tail in (f"long-tailed-{ratio}" for ratio in SKEW_RATIOS):
        for val, test in (("clean", tail), (tail, "clean"), (tail, tail)):
            cells += _each_method(f"{model}@{val}:{test}")
        sizes.add(len(load(f"{model}@{tail}:clean").val.labels))
    for size, seed in product(sorted(sizes), range(N_CONTROLS)):
        cells += _each_method(model, ("ts", *COMPARED_METHODS), val_size=size, split_seed=seed, n_resamples=0)
    return cells


def _each_method(bundle: str, methods: Sequence[str] = SHIFT_METHODS, **options) -> list[Cell]:
    return [Cell(bundle, method, "" if method == "uncalibrated" else method, **options) for method in methods]


def ablation_cells(profile: str) -> list[Cell]:
    """What each part of SMART does: variants fitted on random halves of a pool, judged on held-out validation samples.

    Raises:
        ValueError: an unknown profile.
    """
    # Imported here because that file reads tables, and tables read the experiments.
    from smartlib.experiments.ablations import runs

    bundle_names(profile)
    cells = []
    for bundle in (f"{model}@held-out" for model in ablation_bundles(profile)):
        logits = load(bundle).val.logits
        cells.append(Cell(bundle, "uncalibrated", n_resamples=0))
        for method, calibrator, settings, n_splits in runs(logits):
            cells += [
                Cell(bundle, method, calibrator, settings, len(logits) // 2, seed, n_resamples=0)
                for seed in range(n_splits)
            ]
    return cells


PLANS: dict[str, Callable[[str], list[Cell]]] = {
    "main": main_cells,
    "resplits": resplit_cells,
    "starts": start_cells,
    "size": size_cells,
    "shift": shift_cells,
    "ablations": ablation_cells,
}
