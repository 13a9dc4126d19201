"""Run the notebooks, publish what changed, and verify what is committed (``make all``, ``make verify``).

A notebook is executed by papermill from its source into ``build/<profile>/``, never onto itself. What changes
from run to run is stripped. For the default profile the result then replaces the committed notebook and its
files under ``figures/``, only where it differs beyond a tolerance: two runs on one machine leave the repository
untouched, and a third decimal that another processor rounds differently does not make a commit.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import nbformat
import papermill
from jupyter_client.kernelspec import NoSuchKernel

from smartlib.experiments.claims import write_claims
from smartlib.experiments.compare import Difference, differs, find_differences, flatten

DEFAULT_PROFILE = "embedded"
# Seconds that one cell may take. Generous: the limit is there to end a run that hangs.
CELL_TIMEOUT = {"embedded": 1800, "public": 7200, "paper": 172_800}
START_TIMEOUT = 120

LIBRARY_SUFFIXES = {".py", ".csv", ".json", ".npz", ".mplstyle"}
KEPT_CELL_METADATA = ("tags", "jupyter")
NOTEBOOK_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python", "pygments_lexer": "ipython3"},
}
WIDGET = "application/vnd.jupyter.widget-view+json"
PROGRESS_BAR = re.compile(r"\d+%\||\d(it|s)/(s|it)|\dit \[")


class NotebookError(click.ClickException):
    """A notebook that could not be run; the command line prints its message and exits with status 1."""


# --- finding ----------------------------------------------------------------------------------------------------


def find_root(start: Path) -> Path:
    """The repository that holds `start`: the nearest folder upwards with pyproject.toml and notebooks/."""
    for folder in [start.resolve(), *start.resolve().parents]:
        if (folder / "pyproject.toml").is_file() and (folder / "notebooks").is_dir():
            return folder
    raise NotebookError(f"{start} is not inside the companion's repository (no pyproject.toml beside notebooks/)")


def find_notebooks(root: Path, names: tuple[str, ...] = ()) -> list[Path]:
    """The notebooks in the order of their numbers; with `names` (``04`` or ``04_smart``) only those."""
    paths = sorted((root / "notebooks").glob("[0-9][0-9]_*.ipynb"))
    if not paths:
        raise NotebookError(f"{root / 'notebooks'} holds no notebook (NN_name.ipynb)")
    for name in names:
        if not any(name in (path.stem, path.stem[:2]) for path in paths):
            known = ", ".join(path.stem for path in paths)
            raise NotebookError(f"there is no notebook {name!r}; there are: {known}")
    return [path for path in paths if not names or path.stem in names or path.stem[:2] in names]


def files_of(figures: Path, notebook: Path) -> set[Path]:
    """The files below `figures` that belong to a notebook, by the number that their names begin with."""
    return {path.relative_to(figures) for path in figures.rglob(f"{notebook.stem[:2]}[._]*") if path.is_file()}


# --- what a result depends on -----------------------------------------------------------------------------------


def hash_library(root: Path) -> str:
    """A hash of the library's sources and data and of the locked requirements."""
    digest = hashlib.sha256()
    paths = [path for path in (root / "smartlib").rglob("*") if path.suffix in LIBRARY_SUFFIXES]
    for path in sorted([*paths, *root.glob("requirements.lock")]):
        digest.update(f"{path.relative_to(root)}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def compute_key(source: nbformat.NotebookNode, profile: str, library: str, root: Path) -> str:
    """A hash of everything that decides what a notebook shows; while it stays the same, nothing is run again."""
    cells = [(cell.cell_type, cell.source, tags(cell)) for cell in source.cells]
    digest = hashlib.sha256(json.dumps([cells, profile, library]).encode())
    text = "".join(cell.source for cell in source.cells)
    for path in sorted((root / "figures" / "records").glob("*.csv")):
        # Records of no profile, such as a new `make bench`, concern the notebooks that read them by name.
        if path.stem.split("_")[0] not in CELL_TIMEOUT and f'read_records("{path.stem}")' not in text:
            continue
        digest.update(f"{path.name}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


# --- running ----------------------------------------------------------------------------------------------------


def tags(cell: nbformat.NotebookNode) -> list[str]:
    """The tags of a cell."""
    return list(cell.metadata.get("tags", []))


def read_source(path: Path, profile: str) -> nbformat.NotebookNode:
    """Read a notebook and check that it takes the parameter `profile`, which papermill would only warn about."""
    source = nbformat.read(path, as_version=4)
    # Left behind where somebody ran papermill by hand.
    source.cells = [cell for cell in source.cells if "injected-parameters" not in tags(cell)]
    n_tagged = sum("parameters" in tags(cell) for cell in source.cells)
    if n_tagged != 1:
        raise NotebookError(f"{path.name}: needs exactly one cell tagged 'parameters', has {n_tagged}")
    try:
        known = papermill.inspect_notebook(str(path))
    except ValueError as error:
        raise NotebookError(f"{path.name}: {error}") from error
    if "profile" not in known:
        found = ", ".join(repr(name) for name in known) or "nothing"
        raise NotebookError(f"{path.name}: has no parameter 'profile'; its parameters cell defines {found}")
    if known["profile"]["default"].strip("'\"") != DEFAULT_PROFILE:
        raise NotebookError(f"{path.name}: its parameters cell must say profile = {DEFAULT_PROFILE!r}")
    return source


@contextmanager
def kernel_environment(work: Path, root: Path) -> Iterator[None]:
    """Set the environment that kernels inherit, and restore it: papermill offers no argument for it."""
    saved = dict(os.environ)
    os.environ.update(
        SMARTLIB_FIGURES_DIR=str(work / "figures"),
        # This repository's smartlib, also where the environment was made for another clone.
        PYTHONPATH=os.pathsep.join(filter(None, [str(root), saved.get("PYTHONPATH")])),
        # This interpreter's kernel, not one that the user installed under the same name, and no start-up files.
        JUPYTER_PATH=str(Path(sys.prefix, "share", "jupyter")),
        IPYTHONDIR=str(work / "ipython"),
        # The order in which a printed set comes.
        PYTHONHASHSEED="0",
    )
    os.environ.pop("MPLBACKEND", None)  # the kernel chooses the inline backend only where this is not set
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)


def execute(path: Path, work: Path, *, profile: str, root: Path, timeout: float | None = None) -> Path:
    """Run one notebook.

    Args:
        path: The notebook; it is only read.
        work: The folder that receives ``notebooks/<name>.ipynb`` and ``figures/``.
        profile: The value of the notebook's parameter `profile`.
        root: The repository.
        timeout: Seconds that one cell may take; by default what the profile allows.

    Returns:
        The stripped, executed notebook below `work`.

    Raises:
        NotebookError: The kernel is not there, the parameters cell is wrong, a cell failed or took too long.
    """
    source = read_source(path, profile)
    output = work / "notebooks" / path.name
    figures = work / "figures"
    for old in files_of(figures, path):
        (figures / old).unlink()
    (figures / "records").mkdir(parents=True, exist_ok=True)
    output.parent.mkdir(parents=True, exist_ok=True)
    for committed in (root / "figures" / "records").glob("*.csv"):
        copied = figures / "records" / committed.name
        # The records that an interrupted run of this profile finished are newer, and worth keeping.
        if (
            committed.stem.split("_")[0] != profile
            or not copied.exists()
            or copied.stat().st_mtime < committed.stat().st_mtime
        ):
            write_atomically(copied, committed.read_bytes())
    try:
        with kernel_environment(work, root):
            executed = papermill.execute_notebook(
                str(path),
                str(output),
                parameters={"profile": profile},
                cwd=str(path.parent),
                progress_bar=False,
                extra_arguments=["--log-level=CRITICAL"],
                start_timeout=START_TIMEOUT,
                execution_timeout=timeout or CELL_TIMEOUT[profile],
            )
    except NoSuchKernel as error:
        raise NotebookError(f"{path.name}: names the kernel {error.name!r}, which is not installed") from error
    except papermill.PapermillExecutionError as error:
        message = f"{path.name}: cell {error.exec_count} failed ({output} has what it printed){error}"
        raise NotebookError(message) from error
    except TimeoutError as error:
        raise NotebookError(f"{path.name}: a cell took longer than its limit\n{error}") from error
    except RuntimeError as error:
        raise NotebookError(f"{path.name}: the kernel died or did not start\n{error}") from error
    for cell in executed.cells:
        for stream in cell.get("outputs", []):
            if stream.get("name") == "stderr" and not PROGRESS_BAR.search(stream.text):
                click.echo(f"{path.name}: {stream.text.rstrip()}", err=True)
    write_atomically(output, serialize(strip(source, executed, profile, [work, root])))
    return output


def strip(
    source: nbformat.NotebookNode, executed: nbformat.NotebookNode, profile: str, folders: list[Path]
) -> nbformat.NotebookNode:
    """The source with the outputs of a run, without anything that the next run would write differently."""
    result = copy.deepcopy(source)
    result.metadata, result.nbformat_minor = nbformat.from_dict(NOTEBOOK_METADATA), 5
    ran = [cell for cell in executed.cells if "injected-parameters" not in tags(cell)]
    styler_ids: dict[str, str] = {}
    count = 0
    for index, (cell, done) in enumerate(zip(result.cells, ran, strict=True)):
        cell.id = cell.get("id", f"cell-{index:02d}")
        kept = {name: cell.metadata[name] for name in KEPT_CELL_METADATA if cell.metadata.get(name)}
        cell.metadata = nbformat.from_dict(kept)
        if cell.cell_type != "code":
            continue
        if "parameters" in tags(cell) and profile != DEFAULT_PROFILE:
            cell.source = f'profile = "{profile}"'
        # Papermill's own cell took a number, so the cells are counted anew.
        count += done.execution_count is not None
        cell.execution_count = count if done.execution_count is not None else None
        cell.outputs = strip_outputs(done.outputs, folders, styler_ids)
        for output in cell.outputs:
            if output.output_type == "execute_result":
                output.execution_count = cell.execution_count
    return result


def strip_outputs(
    outputs: list[nbformat.NotebookNode], folders: list[Path], styler_ids: dict[str, str]
) -> list[nbformat.NotebookNode]:
    """Drop progress bars and the error stream; join the pieces of a stream; clean what text remains.

    The error stream is shown by :func:`execute` instead: warnings name files of the machine that ran them.
    """
    kept: list[nbformat.NotebookNode] = []
    for output in outputs:
        if output.get("name") == "stderr" or WIDGET in output.get("data", {}):
            continue
        if output.output_type == "stream":
            if kept and kept[-1].output_type == "stream":
                kept[-1].text += strip_text(output.text, folders, styler_ids)
                continue
            output.text = strip_text(output.text, folders, styler_ids)
        else:
            output.metadata = nbformat.from_dict({})
            for kind, data in output.data.items():
                if isinstance(data, str) and not kind.startswith("image/png"):
                    output.data[kind] = strip_text(data, folders, styler_ids)
        kept.append(output)
    return kept


def strip_text(text: str, folders: list[Path], styler_ids: dict[str, str]) -> str:
    """Remove addresses of objects and the paths of `folders`; number the random ids of pandas' styled tables."""

    def number(match: re.Match[str]) -> str:
        return match[1] + styler_ids.setdefault(match[2], f"{len(styler_ids):05x}")

    text = re.sub(r" at 0x[0-9a-fA-F]+", "", text)
    for folder in folders:
        text = text.replace(f"{folder}{os.sep}", "")
    return re.sub(r"""((?:#|id=["'])T_)([0-9a-f]{5})(?=[_"'\s])""", number, text)


def serialize(notebook: nbformat.NotebookNode) -> bytes:
    """The bytes of a notebook's file."""
    return (nbformat.writes(notebook).rstrip("\n") + "\n").encode()


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that an interrupted run leaves either the old or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(content)
    os.replace(partial, path)


# --- publishing -------------------------------------------------------------------------------------------------


def publish(notebook: Path, work: Path, *, profile: str, root: Path) -> list[str]:
    """Replace what is committed where a run's result differs beyond tolerance.

    Args:
        notebook: The notebook that was run.
        work: The folder that holds the result.
        profile: For the default profile the notebook and its figures are published, for others the records alone.
        root: The repository.

    Returns:
        The paths that were replaced or removed, relative to the repository.
    """
    figures = root / "figures"
    records = sorted((work / "figures" / "records").glob("*.csv"))
    pairs = [(figures / "records" / path.name, path) for path in records if path.stem.split("_")[0] == profile]
    gone: set[Path] = set()
    if profile == DEFAULT_PROFILE:
        made = files_of(work / "figures", notebook)
        gone = files_of(figures, notebook) - made
        pairs += [(figures / name, work / "figures" / name) for name in sorted(made)]
        pairs += [(notebook, work / "notebooks" / notebook.name)]
    # All are compared before any is replaced: a .pdf is judged by the .png beside it.
    changed = [(committed, found) for committed, found in pairs if found.exists() and differs(committed, found)]
    for committed, found in changed:
        write_atomically(committed, found.read_bytes())
    for name in gone:
        (figures / name).unlink()
    return sorted(str(path.relative_to(root)) for path in [*(old for old, _ in changed), *(figures / n for n in gone)])


def build(
    root: Path, profile: str = DEFAULT_PROFILE, names: tuple[str, ...] = (), timeout: float | None = None
) -> None:
    """Run each notebook whose sources, library or records changed since its last run, and publish the results.

    In the default profile the README's table of claims follows.

    Args:
        root: The repository.
        profile: Where the data come from: a key of `CELL_TIMEOUT`.
        names: Only these notebooks.
        timeout: Seconds that one cell may take; by default what the profile allows.

    Raises:
        NotebookError: A notebook could not be run. Those after it are not tried.
    """
    library = hash_library(root)
    work = root / "build" / profile
    for path in find_notebooks(root, names):
        stamp = work / f"{path.stem}.key"
        source = nbformat.read(path, as_version=4)
        before = json.loads(stamp.read_text()) if stamp.exists() else {"key": None, "files": []}
        in_place = all((work / name).exists() for name in before["files"])
        if before["key"] == compute_key(source, profile, library, root) and in_place:
            done = "nothing to run"
        else:
            stamp.unlink(missing_ok=True)
            click.echo(f"{path.stem}: running")
            start = time.monotonic()
            execute(path, work, profile=profile, root=root, timeout=timeout)
            done = f"ran in {time.monotonic() - start:.0f} s"
        replaced = publish(path, work, profile=profile, root=root)
        files = [f"notebooks/{path.name}", *(f"figures/{name}" for name in files_of(work / "figures", path))]
        # With the records as they are now: those that the run itself wrote are no reason to run it again.
        after = {"key": compute_key(source, profile, library, root), "files": sorted(files)}
        write_atomically(stamp, json.dumps(after).encode())
        click.echo(f"{path.stem}: {done}; {'replaced ' + ', '.join(replaced) if replaced else 'nothing to replace'}")
    readme = root / "README.md"
    if profile != DEFAULT_PROFILE:
        click.echo(f"The notebooks and figures of profile {profile!r} are in build/{profile}/.")
    elif readme.exists() and write_claims(readme, root / "figures"):
        click.echo("README.md: the table of claims was renewed")


def verify(root: Path, timeout: float | None = None) -> list[Difference]:
    """Run every notebook afresh and compare the numbers, tables and text outputs with the committed ones.

    Experiments take the committed records and compute a random two per cent of them again (`make grid FORCE=1`: all).

    Args:
        root: The repository; only its build/verify/ is written to.
        timeout: Seconds that one cell may take; by default what the profile allows.

    Returns:
        Each difference beyond tolerance: where, what is committed, what was found.

    Raises:
        NotebookError: A notebook could not be run.
    """
    work = root / "build" / "verify"
    shutil.rmtree(work, ignore_errors=True)
    differences: list[Difference] = []
    for path in find_notebooks(root):
        click.echo(f"{path.stem}: running")
        output = execute(path, work, profile=DEFAULT_PROFILE, root=root, timeout=timeout)
        named = find_differences(flatten(path), flatten(output), rounded=True)
        differences += [(f"notebooks/{path.name}: {place}", old, new) for place, old, new in named]
        for name in sorted(files_of(work / "figures", path) | files_of(root / "figures", path)):
            committed, found = root / "figures" / name, work / "figures" / name
            if not (committed.exists() and found.exists()):
                old, new = ("present" if side.exists() else "(absent)" for side in (committed, found))
                differences.append((f"figures/{name}", old, new))
            elif name.suffix in {".csv", ".json"}:
                named = find_differences(flatten(committed), flatten(found))
                differences += [(f"figures/{name}: {place}", old, new) for place, old, new in named]
    return differences


# --- the command line -------------------------------------------------------------------------------------------


@click.group(help=__doc__)
def main() -> None:
    """Run, publish and verify the notebooks."""


@main.command("build")
@click.option("--profile", type=click.Choice(list(CELL_TIMEOUT)), default=DEFAULT_PROFILE, show_default=True)
@click.argument("names", nargs=-1)
def build_command(profile: str, names: tuple[str, ...]) -> None:
    """Run the notebooks that are out of date (NAMES, such as 04, or all) and publish what changed."""
    build(find_root(Path.cwd()), profile, names)


@main.command("verify")
def verify_command() -> None:
    """Run everything afresh and compare it with what is committed; publish nothing."""
    differences = verify(find_root(Path.cwd()))
    for place, committed, found in differences:
        click.echo(f"{place}\n    committed: {committed}\n    found:     {found}", err=True)
    if differences:
        raise click.ClickException(f"{len(differences)} differences beyond tolerance")
    click.echo("Everything agrees with what is committed.")


if __name__ == "__main__":
    main()
