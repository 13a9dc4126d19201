"""The runner of the notebooks, on tiny notebooks in temporary repositories."""

import json
import os
import textwrap
from pathlib import Path

import nbformat
import numpy as np
import pytest
from click.testing import CliRunner
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from PIL import Image

from smartlib.experiments import compare, notebooks

NUMBERS = """
import json, os, pathlib
figures = pathlib.Path(os.environ["SMARTLIB_FIGURES_DIR"])
for folder in ("numbers", "tables", "records"):
    (figures / folder).mkdir(parents=True, exist_ok=True)
(figures / "numbers" / "01.json").write_text(json.dumps({"ece": [0.0435, 0.0137], "profile": profile}))
(figures / "tables" / "01_main.csv").write_text("method,ece\\nTS,0.0137\\n")
(figures / "records" / f"{profile}.csv").write_text("key,ece\\na,0.0137\\n")
print("ECE 0.0137")
"""
NOISE = """
import sys, time, pandas as pd
from IPython.display import display
print("run", end="ning\\n", flush=True)
print("  50%|#####     | 1/2 [00:01<00:01, 1.1it/s]", file=sys.stderr)
print("in", pathlib.Path.cwd(), "for", figures / "01.png")
display(pd.DataFrame({"ece": [0.0137]}).style)
display(object())
object()
"""
FIGURE = """
import matplotlib.pyplot as plt
_ = plt.plot([0, 1])
plt.savefig(figures / "01_line.png", metadata={"Software": None})
plt.savefig(figures / "01_line.pdf")
"""


def write_notebook(
    root: Path, name: str, *cells: str, parameters: str = 'profile = "embedded"', kernel="python3"
) -> Path:
    """Write a notebook of a title, a parameters cell and `cells`."""
    notebook = new_notebook(
        cells=[
            new_markdown_cell("# A title", id="title"),
            new_code_cell(parameters, id="parameters", metadata={"tags": ["parameters"]}),
            *(new_code_cell(textwrap.dedent(cell).strip(), id=f"code-{i}") for i, cell in enumerate(cells)),
        ],
        metadata={"kernelspec": {"name": kernel, "display_name": "Mine", "language": "python"}},
    )
    path = root / "notebooks" / f"{name}.ipynb"
    path.parent.mkdir(exist_ok=True)
    path.write_text(nbformat.writes(notebook))
    return path


def snapshot(root: Path) -> dict[str, tuple[bytes, int]]:
    """The bytes and the time of last writing of what would be committed."""
    paths = [path for path in root.rglob("*") if path.is_file() and path.relative_to(root).parts[0] != "build"]
    return {str(path.relative_to(root)): (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An empty repository."""
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "notebooks").mkdir()
    return tmp_path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of one notebook that prints numbers, noise and a figure, built once. Tests leave it as it is."""
    root = tmp_path_factory.mktemp("built")
    (root / "pyproject.toml").touch()
    write_notebook(root, "01_main", NUMBERS, NOISE, FIGURE)
    notebooks.build(root)
    return root


def read_outputs(path: Path) -> str:
    """Everything that the cells of a notebook put out."""
    return json.dumps([cell.get("outputs") for cell in nbformat.read(path, as_version=4).cells])


# --- build ------------------------------------------------------------------------------------------------------


def test_build_publishes_a_stripped_notebook_and_its_files(built):
    notebook = nbformat.read(built / "notebooks" / "01_main.ipynb", as_version=4)
    assert [cell.id for cell in notebook.cells] == ["title", "parameters", "code-0", "code-1", "code-2"]
    assert [cell.execution_count for cell in notebook.cells[1:]] == [1, 2, 3, 4]
    assert notebook.cells[1].metadata == {"tags": ["parameters"]}
    assert notebook.cells[1].source == 'profile = "embedded"'
    assert all(not cell.metadata for cell in notebook.cells if cell.id != "parameters")
    assert notebook.metadata == notebooks.NOTEBOOK_METADATA
    noisy = notebook.cells[3].outputs
    assert noisy[0].text == "running\nin notebooks for figures/01.png\n"
    assert 'id="T_00000"' in noisy[1].data["text/html"]
    assert [output.data["text/plain"] for output in noisy[2:]] == ["<object>", "<object>"]
    assert "it/s" not in read_outputs(built / "notebooks" / "01_main.ipynb")
    assert "image/png" in notebook.cells[4].outputs[0].data  # the inline backend, whatever MPLBACKEND says here
    published = {str(path.relative_to(built / "figures")) for path in (built / "figures").rglob("*.*")}
    assert published == {"numbers/01.json", "tables/01_main.csv", "records/embedded.csv", "01_line.png", "01_line.pdf"}


def test_second_build_runs_nothing(built, monkeypatch):
    before = snapshot(built)
    monkeypatch.setattr(notebooks.papermill, "execute_notebook", lambda *_, **__: pytest.fail("was run again"))
    notebooks.build(built)
    assert snapshot(built) == before


def test_two_runs_give_the_same_bytes(built, tmp_path):
    path = built / "notebooks" / "01_main.ipynb"
    again = notebooks.execute(path, tmp_path, profile="embedded", root=built)
    assert again.read_bytes() == path.read_bytes()
    for name in ("01_line.png", "numbers/01.json", "tables/01_main.csv"):
        assert (tmp_path / "figures" / name).read_bytes() == (built / "figures" / name).read_bytes()


def test_build_replaces_only_what_differs(root):
    path = write_notebook(root, "01_main", NUMBERS, FIGURE)
    notebooks.build(root)
    (root / "figures" / "01_old.png").touch()
    (root / "figures" / "numbers" / "01.json").write_text('{"ece": [0.5, 0.0137], "profile": "embedded"}')
    # Within tolerance, so it stays, although the notebook runs again.
    (root / "figures" / "tables" / "01_main.csv").write_text("method,ece\nTS,0.01370001\n")
    before = snapshot(root)
    path.write_text(path.read_text().replace("# A title", "# Another title"))
    notebooks.build(root)
    after = snapshot(root)
    assert {name for name in before if before[name] != after.get(name)} == {
        "figures/01_old.png",
        "figures/numbers/01.json",
        "notebooks/01_main.ipynb",
    }
    assert "figures/01_old.png" not in after
    assert json.loads(after["figures/numbers/01.json"][0])["ece"] == [0.0435, 0.0137]


def test_library_and_records_are_part_of_the_key(root):
    path = write_notebook(root, "01_main")
    source = nbformat.read(path, as_version=4)

    def key(profile="embedded"):
        return notebooks.compute_key(source, profile, notebooks.hash_library(root), root)

    keys = [key(), key("public")]
    (root / "smartlib").mkdir()
    (root / "smartlib" / "core.py").write_text("x = 1")
    keys.append(key())
    (root / "requirements.lock").write_text("numpy==2.4.6")
    keys.append(key())
    (root / "figures" / "records").mkdir(parents=True)
    (root / "figures" / "records" / "public.csv").write_text("key\n")
    keys.append(key())
    source.cells[1].source = 'profile = "embedded"  # data'
    keys.append(key())
    assert len(set(keys)) == len(keys)
    (root / "figures" / "records" / "cost.csv").write_text("key\n")
    assert key() == keys[-1], "records of no profile concern only the notebooks that read them"
    source.cells[1].source += '\ncosts = read_records("cost")'
    keys.append(key())
    (root / "figures" / "records" / "cost.csv").write_text("key,n\n")
    keys.append(key())
    assert len(set(keys)) == len(keys)
    (root / "smartlib" / "core.cpython-311.pyc").touch()
    assert key() == keys[-1]


def test_injected_cell_is_folded_back(root):
    path = write_notebook(root, "01_main", "print(profile)")
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.insert(2, new_code_cell('profile = "paper"', id="x", metadata={"tags": ["injected-parameters"]}))
    path.write_text(nbformat.writes(notebook))
    notebooks.build(root)
    notebook = nbformat.read(path, as_version=4)
    assert [cell.id for cell in notebook.cells] == ["title", "parameters", "code-0"]
    assert notebook.cells[2].outputs[0].text == "embedded\n"


def test_other_profiles_publish_their_records_alone(root):
    path = write_notebook(root, "01_main", NUMBERS)
    before = path.read_bytes()
    notebooks.build(root, "public")
    assert path.read_bytes() == before
    assert [path.name for path in (root / "figures").rglob("*.*")] == ["public.csv"]
    work = root / "build" / "public"
    assert json.loads((work / "figures" / "numbers" / "01.json").read_text())["profile"] == "public"
    assert nbformat.read(work / "notebooks" / "01_main.ipynb", as_version=4).cells[1].source == 'profile = "public"'


def test_earlier_records_are_there_and_newer_ones_of_an_interrupted_run_stay(root):
    write_notebook(
        root,
        "01_main",
        """
        import os, pathlib
        for path in sorted(pathlib.Path(os.environ["SMARTLIB_FIGURES_DIR"], "records").glob("*.csv")):
            print(path.name, path.read_text())
        """,
    )
    for folder, text in {root / "figures": "committed", root / "build" / "embedded" / "figures": "interrupted"}.items():
        (folder / "records").mkdir(parents=True)
        for name in ("public", "embedded", "embedded_coverage"):
            (folder / "records" / f"{name}.csv").write_text(text)
    for name in ("embedded", "embedded_coverage"):
        os.utime(root / "figures" / "records" / f"{name}.csv", (0, 0))
    notebooks.build(root)
    output = nbformat.read(root / "notebooks" / "01_main.ipynb", as_version=4).cells[2].outputs[0].text
    assert output == "embedded.csv interrupted\nembedded_coverage.csv interrupted\npublic.csv committed\n"
    published = {path.name: path.read_text() for path in (root / "figures" / "records").glob("*.csv")}
    assert published == {
        "embedded.csv": "interrupted",
        "embedded_coverage.csv": "interrupted",
        "public.csv": "committed",
    }


# --- what goes wrong --------------------------------------------------------------------------------------------


def run_command(root: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str):
    monkeypatch.chdir(root)
    return CliRunner().invoke(notebooks.main, arguments)


def test_from_another_folder_with_chosen_names(root, monkeypatch):
    write_notebook(root, "01_main", "import pathlib; print(pathlib.Path.cwd().name)")
    write_notebook(root, "02_more", "1 / 0")
    (root / "tests").mkdir()
    result = run_command(root / "tests", monkeypatch, "build", "01")
    assert result.exit_code == 0, result.output
    assert "notebooks" in read_outputs(root / "notebooks" / "01_main.ipynb")
    unknown = run_command(root, monkeypatch, "build", "07")
    assert unknown.exit_code == 1
    assert "'07'" in unknown.stderr and "02_more" in unknown.stderr


def test_outside_a_repository(tmp_path, monkeypatch):
    result = run_command(tmp_path, monkeypatch, "build")
    assert result.exit_code == 1
    assert "pyproject.toml" in result.stderr


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"cells": ["1 / 0"]}, "ZeroDivisionError"),
        ({"parameters": 'profil = "embedded"'}, "no parameter 'profile'; its parameters cell defines 'profil'"),
        ({"parameters": 'profile = "public"'}, "must say profile = 'embedded'"),
        ({"kernel": "no-such-kernel"}, "'no-such-kernel'"),
        ({"cells": ["import os; os._exit(1)"]}, "kernel died"),
    ],
)
def test_errors_name_the_notebook(root, monkeypatch, options, expected):
    path = write_notebook(root, "01_main", *options.pop("cells", []), **options)
    before = path.read_bytes()
    result = run_command(root, monkeypatch, "build")
    assert result.exit_code == 1
    assert "01_main.ipynb" in result.stderr
    assert expected in result.stderr
    assert path.read_bytes() == before
    assert not (root / "build" / "embedded" / "01_main.key").exists()


def test_exactly_one_parameters_cell(root):
    path = write_notebook(root, "01_main")
    path.write_text(path.read_text().replace('"parameters"\n', '"other"\n'))
    with pytest.raises(notebooks.NotebookError, match="exactly one cell tagged 'parameters', has 0"):
        notebooks.build(root)


def test_cell_that_exceeds_its_time(root):
    write_notebook(root, "01_main", "import time; time.sleep(60)")
    with pytest.raises(notebooks.NotebookError, match=r"01_main\.ipynb: a cell took longer"):
        notebooks.build(root, timeout=1)


def test_warnings_of_a_notebook_are_shown_and_not_published(root, capsys):
    path = write_notebook(root, "01_main", "import warnings; warnings.warn('look here')")
    notebooks.build(root)
    assert "look here" in capsys.readouterr().err
    assert "look here" not in read_outputs(path)


def test_the_environment_comes_back(tmp_path, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "Agg")
    before = dict(os.environ)
    with pytest.raises(KeyError), notebooks.kernel_environment(tmp_path, tmp_path):
        assert "MPLBACKEND" not in os.environ
        raise KeyError
    assert dict(os.environ) == before


# --- verify -----------------------------------------------------------------------------------------------------


def test_verify_agrees_with_a_fresh_build_and_writes_nothing(built, monkeypatch):
    before = snapshot(built)
    result = run_command(built, monkeypatch, "verify")
    assert result.exit_code == 0, result.output
    assert snapshot(built) == before


def test_verify_finds_planted_changes(root, monkeypatch):
    path = write_notebook(root, "01_main", NUMBERS)
    notebooks.build(root)
    planted = {
        root / "figures" / "numbers" / "01.json": ("0.0137", "0.0139"),
        root / "figures" / "tables" / "01_main.csv": ("0.0137", "0.0136"),
        path: ('"ECE 0.0137\\n"', '"ECE 0.0237\\n"'),
    }
    for changed, (old, new) in planted.items():
        changed.write_text(changed.read_text().replace(old, new))
    (root / "figures" / "tables" / "01_extra.csv").touch()
    result = run_command(root, monkeypatch, "verify")
    assert result.exit_code == 1
    for expected in (
        "figures/numbers/01.json: /ece/1\n    committed: 0.0139\n    found:     0.0137",
        "figures/tables/01_main.csv: row 1, column 1\n    committed: 0.0136\n    found:     0.0137",
        "notebooks/01_main.ipynb: cell code-0, output 0, text, line 1\n    committed: ECE 0.0237",
        "figures/tables/01_extra.csv\n    committed: present\n    found:     (absent)",
        "4 differences",
    ):
        assert expected in result.stderr


# --- tolerance --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "rounded", "same"),
    [
        (0.0137, 0.0137 * (1 + 5e-4), False, True),
        (0.0137, 0.0137 * (1 + 2e-3), False, False),
        (0.0, 5e-7, False, True),
        (float("nan"), float("nan"), False, True),
        (1, True, False, False),
        (None, 0.0, False, False),
        ("ECE 1.37 %", "ECE 1.38 %", True, True),
        ("ECE 1.37 %", "ECE 1.39 %", True, False),
        ("ECE 1.37 %", "ECE 1.38 %", False, False),
        ("ECE 1.37 %", "ece 1.37 %", True, False),
        ("49 parameters", "50 parameters", True, False),
        ("T = 1.0e-05", "T = 1.1e-05", True, True),
        ("a   -0.00", "a 0.00", True, True),
        ("a 1", "a 1 2", True, False),
    ],
)
def test_tolerance_of_values(a, b, rounded, same):
    assert compare.is_close(a, b, rounded) is same


def test_tolerance_of_pictures(tmp_path):
    pixels = np.full((100, 100, 3), 200, dtype=np.uint8)
    nearly, other = pixels.copy(), pixels.copy()
    nearly[0, 0] += 5
    other[:10, :10] = 0
    for name, values in {"a": pixels, "nearly": nearly, "other": other, "small": pixels[:50]}.items():
        Image.fromarray(values).save(tmp_path / f"{name}.png")
        (tmp_path / f"{name}.pdf").write_bytes(name.encode())
    for suffix in (".png", ".pdf"):
        a = tmp_path / f"a{suffix}"
        answers = [compare.differs(a, tmp_path / f"{name}{suffix}") for name in ("nearly", "other", "small")]
        assert answers == [False, True, True]
    (tmp_path / "broken.png").write_bytes(b"<<<<<<< HEAD")
    assert compare.differs(tmp_path / "broken.png", tmp_path / "a.png")
    assert compare.differs(tmp_path / "absent.png", tmp_path / "a.png")
