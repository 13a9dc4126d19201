"""The README's claims that a machine can check."""

import json
import re
from pathlib import Path

import pytest

from smartlib import load

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


@pytest.mark.parametrize("target", re.findall(r"\]\(((?!http)[^)#]+)\)", README))
def test_links_and_pictures_exist(target):
    assert (ROOT / target).exists()


def test_first_screen_has_a_figure_the_two_commands_and_the_five_lines():
    first = "\n".join(README.splitlines()[:35])
    assert "figures/" in first and "make all" in first and "make test" in first and ".fit(val_logits" in first


def test_it_says_when_not_to_use_smart():
    assert "When not to use SMART" in README
