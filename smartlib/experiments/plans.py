"""What is measured: the cells of each experiment.

An ablation is judged on held-out validation samples (``@held-out``): it says what a part of the method does, and is
the place where settings are looked at. Test splits are for the comparisons of finished methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from smartlib.calibrators import create, names
from smartlib.data import load
from smartlib.experiments.cells import Cell
from smartlib.experiments.profiles import experiment_bundles

# Methods of the main table, by the name that tables show: the registered calibrators, and variants of SMART.
VARIANTS = {
    "smart-adam": ("smart", {"solver": "adam", "seed": 0}),
    "smart-321": ("smart", {"hidden": [16, 16]}),
}
N_SPLITS = 10

# Validation sizes of the data efficiency experiment, beside all samples.
SIZES = (32, 50, 100, 200, 500, 1000, 2000, 5000)
SIZE_METHODS = ("ts", "ets", "vs", "spline", "hb", "ir", "smart")
N_SIZE_SPLITS = 20


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
    """All bundles and methods: once on all validation samples, and on ten random halves of them."""
    cells = []
    for bundle in experiment_bundles(profile):
        half = len(load(bundle).val.labels) // 2
        for method, calibrator, settings in methods_of(bundle):
            cells.append(Cell(bundle, method, calibrator, settings))
            if method != "uncalibrated":
                cells += [
                    Cell(bundle, method, calibrator, settings, half, seed, n_resamples=0) for seed in range(N_SPLITS)
                ]
    return cells


def size_cells(profile: str) -> list[Cell]:
    """How much validation data a method needs: resampled subsets of growing size."""
    cells = []
    for bundle in experiment_bundles(profile):
        n = len(load(bundle).val.labels)
        cells += [Cell(bundle, method, method, n_resamples=0) for method in SIZE_METHODS]
        for size in (size for size in SIZES if size < n):
            cells += [
                Cell(bundle, method, method, {}, size, seed, n_resamples=0)
                for method in SIZE_METHODS for seed in range(N_SIZE_SPLITS)
            ]  # fmt: skip
    return cells


PLANS: dict[str, Callable[[str], list[Cell]]] = {"main": main_cells, "size": size_cells}
