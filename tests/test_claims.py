"""The table of claims: entries are checked, all are found, and the README says what the notebooks saved."""

import json
from pathlib import Path

import pytest

from smartlib.experiments import notebooks
from smartlib.experiments.claims import (
    BEGIN,
    CLAIMS,
    END,
    NOT_EXAMINED,
    claim,
    claims_table,
    markdown,
    write_claims,
)

ROOT = Path(__file__).parents[1]


def save(folder, notebook, entries):
    (folder / "numbers").mkdir(exist_ok=True)
    (folder / "numbers" / f"{notebook}.json").write_text(json.dumps({"claims": entries}), encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("C11", "x", "held"), r"no claim 'C11'; there are C1, .*, L2"),
        (("C9", "x", "Held"), r"verdict on C9 must be one of held, .*; got 'Held'"),
        (("C9", "  ", "held"), "one line of text"),
        (("C9", "a | b", "held"), "one line of text"),
        (("C9", "a\nb", "held"), "one line of text"),
        (("C9", "It held.", "held"), "without a full stop"),
    ],
)
def test_an_entry_that_would_break_the_table_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        claim(*arguments)


def test_every_claim_has_a_row_whether_examined_or_not(tmp_path):
    save(tmp_path, "05", claim("C6", "lowest on 2 of 3 models", "held in part") | claim("C9", "all kept", "held"))
    (tmp_path / "numbers" / "00.json").write_text('{"ece": 0.1}')
    table = claims_table(tmp_path)
    assert list(table.index) == list(CLAIMS)
    assert table.loc["C6"].to_dict() == {
        "claim": CLAIMS["C6"], "evidence": {"05": "lowest on 2 of 3 models"}, "verdict": "held in part",
    }  # fmt: skip
    assert set(table["verdict"].drop(["C6", "C9"])) == {NOT_EXAMINED}
    assert (claims_table(tmp_path / "nothing")["verdict"] == NOT_EXAMINED).all()


@pytest.mark.parametrize(
    ("verdicts", "together"),
    [
        (["held", "held"], "held"),
        (["held", "undecided"], "held in part"),
        (["held", "did not hold"], "held in part"),
        (["undecided", "did not hold"], "did not hold"),
        (["undecided", "undecided"], "undecided"),
    ],
)
def test_several_notebooks_on_one_claim_are_put_together(tmp_path, verdicts, together):
    for notebook, verdict in zip(("07", "12"), verdicts, strict=True):
        save(tmp_path, notebook, claim("C10", f"seen in {notebook}", verdict))
    row = claims_table(tmp_path).loc["C10"]
    assert row["evidence"] == {"07": "seen in 07", "12": "seen in 12"} and row["verdict"] == together


def test_a_saved_entry_that_is_wrong_is_named_with_its_file(tmp_path):
    for entries in ({"C9": {"evidence": "x"}}, {"X1": {"evidence": "x", "verdict": "held"}}):
        save(tmp_path, "05", entries)
        with pytest.raises(ValueError, match=r"05\.json holds an entry"):
            claims_table(tmp_path)


def test_the_readme_changes_between_the_markers_and_only_when_the_table_does(tmp_path):
    readme, figures = tmp_path / "README.md", tmp_path / "figures"
    figures.mkdir()
    readme.write_text(f"before\n\n{BEGIN}\nold\n{END}\n\nafter\n", encoding="utf-8")
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "05_experiments.ipynb").touch()
    save(figures, "05", claim("C9", "all kept", "held"))
    save(figures, "06", claim("C9", "here too", "held"))
    assert write_claims(readme, figures)
    text = readme.read_text(encoding="utf-8")
    assert text.startswith("before\n\n") and text.endswith("\n\nafter\n") and "old" not in text
    kept = "all kept ([05](notebooks/05_experiments.ipynb)); here too (06)"
    assert f"| C9 | {CLAIMS['C9']} | {kept} | held |" in text.splitlines()
    before = readme.stat().st_mtime_ns
    assert not write_claims(readme, figures) and readme.stat().st_mtime_ns == before
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["README.md"]


@pytest.mark.parametrize(("profile", "renewed"), [("embedded", True), ("public", False)])
def test_building_the_default_profile_renews_the_table(tmp_path, monkeypatch, profile, renewed):
    monkeypatch.setattr(notebooks, "find_notebooks", lambda root, names: [])
    (tmp_path / "README.md").write_text(f"{BEGIN}{END}")
    notebooks.build(tmp_path, profile)
    assert (NOT_EXAMINED in (tmp_path / "README.md").read_text()) == renewed


@pytest.mark.parametrize("text", ["no markers", f"{BEGIN} only", f"{END} {BEGIN}", f"{BEGIN} {END} {BEGIN} {END}"])
def test_a_readme_without_both_markers_is_refused(tmp_path, text):
    (tmp_path / "README.md").write_text(text)
    with pytest.raises(ValueError, match="each once and in this order"):
        write_claims(tmp_path / "README.md", tmp_path)
    assert (tmp_path / "README.md").read_text() == text


def test_the_readme_of_this_repository_says_what_the_notebooks_saved():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert markdown(claims_table(ROOT / "figures"), ROOT / "notebooks") in readme
