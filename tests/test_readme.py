"""The README's claims that a machine can check."""

import json
import re
import warnings
from pathlib import Path

import numpy as np
import pytest

from smartlib import calibrators, load

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def python_blocks():
    return re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_the_five_lines_calibrate_ones_own_logits(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    bundle = load("fashion/resnet")
    own = {
        "val_logits": bundle.val.logits, "val_labels": bundle.val.labels,
        "test_logits": bundle.test.logits, "test_labels": bundle.test.labels,
    }  # fmt: skip
    code = python_blocks()[0].replace("n_resamples=200", "n_resamples=10")
    assert len([line for line in code.splitlines() if line.strip()]) == 5
    exec(compile(code, "README.md", "exec"), own)
    assert own["probs"].shape == bundle.test.logits.shape
    assert (own["probs"].argmax(axis=1) == bundle.test.logits.argmax(axis=1)).all()
    assert json.loads((tmp_path / "calibrator.json").read_text())["calibrator"] == "smart"
    assert "ece=" in capsys.readouterr().out


def test_the_library_example_runs():
    names: dict = {}
    exec(compile(python_blocks()[1], "README.md", "exec"), names)
    assert names["smart"].n_parameters == 49


def rows_of_the_table(text):
    """name -> (parameters learned, needs, keeps predictions)"""
    cells = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    return {row[0]: row[2:5] for row in cells if row[0] in calibrators.names()}


@pytest.mark.parametrize("text", [README, calibrators.__doc__], ids=["README", "docstring"])
def test_the_table_of_calibrators_says_what_the_classes_do(text):
    table = rows_of_the_table(text)
    assert tuple(table) == calibrators.names()
    k = 6
    logits = np.random.default_rng(0).normal(size=(500, k))
    labels = (2 * logits + np.random.default_rng(1).gumbel(size=logits.shape)).argmax(axis=1)
    for name, (parameters, needs, keeps) in table.items():
        calibrator = calibrators.create(name)
        assert needs == ", ".join(calibrator.needs)
        assert keeps == ("yes" if calibrator.keeps_predictions else "no")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", calibrators.CalibrationWarning)
            calibrator.fit(logits, labels, features=logits, head=(np.eye(k), np.zeros(k)))
        if "K" in parameters or parameters.isdigit():
            formula = parameters.replace(" (", " * (").replace("2 K", "2 * K").replace("5 min", "5 * min")
            assert calibrator.n_parameters == eval(formula.replace("min * (", "min("), {"K": k, "min": min}), name
        elif parameters.startswith("at most"):
            assert calibrator.n_parameters <= int(parameters.split()[-1])


@pytest.mark.parametrize("target", re.findall(r"\]\(((?!http)[^)#]+)\)", README))
def test_links_and_pictures_exist(target):
    assert (ROOT / target).exists()


def test_first_screen_has_a_figure_the_two_commands_and_the_five_lines():
    first = "\n".join(README.splitlines()[:35])
    assert "figures/" in first and "make all" in first and "make test" in first and ".fit(val_logits" in first


def test_it_says_when_not_to_use_smart():
    assert "When not to use SMART" in README
