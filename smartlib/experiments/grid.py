"""Run the experiments: lists of cells, each computed once and kept as a record (``make grid``).

Records are kept as `smartlib.experiments.records` says: those of the main experiment in ``records/<profile>.csv``,
those of another in ``records/<profile>_<experiment>.csv``.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import click
import pandas as pd

from smartlib.calibrators import create
from smartlib.data import Bundle
from smartlib.experiments.cells import Cell, load, run_cell
from smartlib.experiments.certificates import certificate_table
from smartlib.experiments.coverage import coverage_table
from smartlib.experiments.outputs import figures_folder
from smartlib.experiments.plans import PLANS, main_cells
from smartlib.experiments.profiles import PROFILES, ablation_bundles, bundle_names
from smartlib.experiments.records import Task, run_tasks, sources_of, task_key
from smartlib.metrics import METRICS

STEP_FUNCTIONS = ("hb", "ir", "bbq")
IDENTITY = ("bundle", "method", "settings", "val_size", "split_seed")


def run_experiment(name: str, profile: str) -> pd.DataFrame:
    """The records of an experiment, computed where they are missing.

    Args:
        name: a key of `smartlib.experiments.plans.PLANS`.
        profile: whose bundles are used.

    Returns:
        As of :func:`run_cells`.
    """
    return run_cells(PLANS[name](profile), profile if name == "main" else f"{profile}_{name}")


def run_cells(cells: Sequence[Cell], name: str) -> pd.DataFrame:
    """The records of the cells, computed where they are missing.

    Args:
        cells: what to run.
        name: of the file of records.

    Returns:
        One row per cell, in their order: key, bundle, method, settings (JSON), val_size ("all" or a number), split_seed
        and what `smartlib.experiments.cells.run_cell` returns.

    Raises:
        RuntimeError: a record that was run again came out differently.

    Source: ours.
    """
    tasks = [Task(cell_key(cell, load(cell.bundle)), _identity(cell), partial(run_cell, cell)) for cell in cells]
    return run_tasks(tasks, name, is_checked=_is_checked)


def cell_key(cell: Cell, bundle: Bundle) -> str:
    """The key of a cell's record."""
    modules = [] if cell.method == "uncalibrated" else [module_of(cell.calibrator)]
    sources = sources_of("experiments.cells", "metrics", "calibrators.scaling", *modules)
    what = [*_identity(cell).values(), cell.calibrator, cell.n_resamples, bundle.sha256]
    return task_key([], sources, what)


def module_of(calibrator: str) -> str:
    """The module of a calibrator, within the package.

    >>> module_of("smart")
    'calibrators.smart'
    """
    return type(create(calibrator)).__module__.removeprefix("smartlib.")


def tidy(records: pd.DataFrame) -> pd.DataFrame:
    """Records of cells with one row per metric, as one file for whoever wants to draw something else from them.

    Args:
        records: from :func:`run_cells`.

    Returns:
        Columns ``bundle, method, settings, val_size, split_seed, n_val, n_val_errors, n`` (test samples), ``metric,
        value, low, high`` (95 % interval), ``floor, floor_q95`` (noise floor), ``vs_ts, vs_ts_low, vs_ts_high``; empty
        where a record has none.
    """
    fixed = [*IDENTITY, "n_val", "n_val_errors", "n"]
    parts = []
    for metric in METRICS:
        names = {metric: "value"} | {f"{metric}_{end}": end for end in ("low", "high", "floor", "floor_q95")}
        names |= {f"{metric}_vs_ts{end}": f"vs_ts{end}" for end in ("", "_low", "_high")}
        part = records.reindex(columns=[*fixed, *names]).rename(columns=names)
        parts.append(part.assign(metric=metric))
    long = pd.concat(parts, ignore_index=True)
    return long[[*fixed, "metric", *[c for c in long.columns if c not in (*fixed, "metric")]]]


def _identity(cell: Cell) -> dict:
    return {
        "bundle": cell.bundle,
        "method": cell.method,
        "settings": json.dumps(cell.settings, sort_keys=True),
        "val_size": "all" if cell.val_size is None else cell.val_size,
        "split_seed": cell.split_seed,
    }


def _is_checked(column: str, identity: dict) -> bool:
    # One sample in a bin decides the MCE, and the end point of a solver may differ where the objective is flat.
    return column not in ("objective", "temperature") and column.split("_")[0] not in unchecked_metrics(
        identity["method"]
    )


def unchecked_metrics(method: str) -> tuple[str, ...]:
    """Metrics of a method in which rounding shows: a step function's confidences are tied, and an adaptive bin ends
    between two that differ in their last digit alone."""
    return ("mce", "adaece") if method in STEP_FUNCTIONS else ("mce",)


@click.group(help=__doc__)
def main() -> None:
    """Run experiments, export records."""


@main.command("run")
@click.option("--profile", type=click.Choice(PROFILES), default="embedded", show_default=True)
@click.argument("names", nargs=-1, type=click.Choice(tuple(PLANS)))
def run_command(profile: str, names: tuple[str, ...]) -> None:
    """Compute the records that are missing (SMARTLIB_FORCE=1: all) of the experiments NAMED, or of all."""
    steps = {name: partial(run_experiment, name, profile) for name in names or PLANS}
    if not names:
        steps |= other_records(profile)
    forced = os.environ.get("SMARTLIB_FORCE") == "1"
    # What a forced run has finished; one that was killed goes on after it.
    done = figures_folder() / "records" / f"{profile}_forced.journal"
    finished = done.read_text(encoding="utf-8").split() if forced and done.is_file() else []
    for name, step in steps.items():
        start = time.monotonic()
        if forced:
            os.environ["SMARTLIB_FORCE"] = "0" if name in finished else "1"
        records = step()
        if forced:
            done.parent.mkdir(parents=True, exist_ok=True)
            with done.open("a", encoding="utf-8") as file:
                file.write(name + "\n")
        click.echo(f"{name}: {len(records)} records, {time.monotonic() - start:.0f} s")
    if forced:
        done.unlink()
        os.environ["SMARTLIB_FORCE"] = "1"


def other_records(profile: str) -> dict[str, Callable[[], pd.DataFrame]]:
    """The records that are no cells: comparisons of methods, judging noise of ablations, certificates, coverage."""
    # Imported here because these files read this one.
    from smartlib.experiments.ablations import judging_noise
    from smartlib.experiments.pairs import paired_table

    main = [cell for cell in main_cells(profile) if cell.val_size is None]
    steps = {
        "pairs": partial(paired_table, main, f"{profile}_pairs"),
        "ablations-judging": partial(judging_noise, ablation_bundles(profile), profile),
        "certificates": partial(certificate_table, bundle_names(profile), profile),
    }
    return steps | ({"coverage": coverage_table} if profile == "embedded" else {})


@main.command("export")
@click.argument("target", type=click.Path(path_type=Path))
def export_command(target: Path) -> None:
    """Write the records of all experiments and profiles to TARGET, one row per cell and metric (CSV)."""
    tables = []
    for path in sorted((figures_folder() / "records").glob("*.csv")):
        records = pd.read_csv(path, keep_default_na=False, na_values=[""])
        if set(IDENTITY) <= set(records.columns):
            profile, _, experiment = path.stem.partition("_")
            table = tidy(records)
            table.insert(0, "experiment", experiment or "main")
            table.insert(0, "profile", profile)
            tables.append(table)
    if not tables:
        raise click.ClickException(f"there are no records in {figures_folder() / 'records'}")
    partial_file = target.with_name(target.name + ".partial")
    pd.concat(tables, ignore_index=True).to_csv(partial_file, index=False, float_format="%.8g", lineterminator="\n")
    os.replace(partial_file, target)
    click.echo(f"{target}: {sum(map(len, tables))} rows")


if __name__ == "__main__":
    main()
