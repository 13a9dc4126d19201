"""Every notebook runs by papermill from top to bottom, and is committed as it runs."""

import json
import re
from pathlib import Path

import nbformat
import numpy as np
import pytest
from PIL import Image

from smartlib.experiments.compare import find_differences, flatten
from smartlib.experiments.notebooks import NotebookError, execute, files_of, find_notebooks

ROOT = Path(__file__).parents[1]
NOTEBOOKS = find_notebooks(ROOT)
FIGURES = ROOT / "figures"


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


# `make verify` runs all of them; here the quick ones on the theory.
@pytest.mark.parametrize("path", NOTEBOOKS[:4], ids=lambda path: path.stem)
def test_runs_and_gives_what_is_committed(path, tmp_path):
    execute(path, tmp_path, profile="embedded", root=ROOT)
    made = files_of(tmp_path / "figures", path)
    assert made == files_of(FIGURES, path), "the files under figures/ are those that the notebook makes"
    for name in made:
        if name.suffix in (".csv", ".json"):
            assert find_differences(flatten(FIGURES / name), flatten(tmp_path / "figures" / name)) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_committed_with_its_results(path):
    last = [cell for cell in read(path).cells if cell.cell_type == "code"][-1]
    assert "All checks hold." in last.outputs[-1].text
    assert Path("numbers", f"{path.stem[:2]}.json") in files_of(FIGURES, path)


@pytest.mark.parametrize("path", sorted(FIGURES.glob("*.png")), ids=lambda path: path.stem)
def test_no_figure_is_blank(path):
    assert np.asarray(Image.open(path).convert("L")).std() > 5


# A wrong statement for each notebook on the theory: what the source says, what it says wrongly, which check fails.
PLANTED = {
    "01_margin_temperature_bound": (
        "return m / (logit_c + log_n), m / logit_c",
        "return m / logit_c, m / (logit_c + log_n)",
        "solving for T gives the lower end",
    ),
    "02_nll_versus_ece": (
        "claimed = delta * (1 + eta - delta) / 2",
        "claimed = delta * (1 + eta + delta) / 2",
        "2a: the upper bound is the closed form",
    ),
    "03_smce_upper_bound": (
        "return h <= max(1, lipschitz) * smce + 1e-12",
        "return h <= smce + 1e-12",
        "Theorem 3'': H <= max(1, L) smCE",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_wrong_statement_fails_in_the_last_cell(name, tmp_path):
    true, wrong, check = PLANTED[name]
    notebook = read(ROOT / "notebooks" / f"{name}.ipynb")
    (cell,) = (cell for cell in notebook.cells if cell.cell_type == "code" and true in cell.source)
    assert cell.source.count(true) == 1
    cell.source = cell.source.replace(true, wrong)
    planted = tmp_path / "notebooks" / f"{name}.ipynb"
    planted.parent.mkdir()
    nbformat.write(notebook, planted)
    with pytest.raises(NotebookError, match=re.escape(check)):
        execute(planted, tmp_path / "work", profile="embedded", root=ROOT)
    ran = read(tmp_path / "work" / "notebooks" / f"{name}.ipynb").cells
    with_error = [cell for cell in ran if any(output.output_type == "error" for output in cell.get("outputs", []))]
    assert with_error == [ran[-1]]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_has_the_parts_that_every_notebook_has(path):
    cells = read(path).cells
    first, text = cells[0].source, "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    assert re.match(rf"# {path.stem[:2]} · ", first)
    for part in ("**Question.**", "**What is examined.**", "**Run time.**"):
        assert part in first
    assert re.search(r"\bC\d+\b", first), "which claims of the paper it examines"
    assert "## Exercises" in text and len(re.findall(r"^\d\. ", text.split("## Exercises")[1], re.MULTILINE)) in (2, 3)
    parameters = [cell for cell in cells if "parameters" in cell.metadata.get("tags", [])]
    assert [cell.source for cell in parameters] == ['profile = "embedded"']
    assert "assert" in cells[-1].source, "the last cell checks the claims"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_cells_are_short_executed_and_led_by_prose(path):
    cells = read(path).cells
    in_a_row = 0
    for cell in cells:
        in_a_row = in_a_row + 1 if cell.cell_type == "code" else 0
        assert in_a_row <= 3, "prose before code"
        if cell.cell_type == "code":
            assert len(cell.source.splitlines()) <= 30, "an algorithm belongs in smartlib"
            assert cell.execution_count is not None
            assert all(output.output_type != "error" for output in cell.outputs)


@pytest.mark.parametrize("path", sorted((FIGURES / "numbers").glob("*.json")), ids=lambda path: path.stem)
def test_numbers_are_finite(path):
    def refuse(name: str):
        raise AssertionError(f"{path.name} holds {name}")

    json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)
