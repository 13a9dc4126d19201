"""The paper's claims, and what this companion found: one table, made from what the notebooks save.

A notebook that examines a claim makes an entry with :func:`claim` and saves it under the key "claims" of its numbers::

    save_numbers({..., "claims": claim("C9", f"no prediction changed in {n} fits", "held")}, "05")

`make all` writes the table of all entries into the README, between two markers.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pandas as pd

CLAIMS = {
    "C1": "The margin bounds the feasible temperature; the maximum logit does not.",
    "C2": "The margin correlates strongly with the smallest perturbation that reaches the decision boundary.",
    "C3": "Groups of different margin are miscalibrated differently: those of high margin are often under-confident, "
    "which bins of confidence hide.",
    "C4": "There are local scalings of the logits that lower the NLL and raise the smooth calibration error.",
    "C5": "Charbonnier-SoftECE bounds the smooth calibration error from above.",
    "C6": "SMART has the lowest ECE and AdaECE among TS, PTS, CTS, spline, GC, ProCal and FC, on convolutional "
    "networks and on transformers.",
    "C7": "It stays low under corruption, sketch shift and long tails, where non-parametric methods degrade.",
    "C8": "49 parameters; a small cost over temperature scaling, far below that of class-wise temperature scaling.",
    "C9": "Accuracy is preserved exactly.",
    "C10": "It works from 50 validation samples on, and keeps improving with more.",
    "L1": "Limit: the margin of the top two is too coarse where ambiguity spreads over many classes.",
    "L2": "Limit: extreme class skew.",
}
VERDICTS = ("held", "held in part", "did not hold", "undecided")
NOT_EXAMINED = "not examined yet"
BEGIN, END = "<!-- claims -->", "<!-- /claims -->"


def claim(name: str, evidence: str, verdict: str) -> dict[str, dict[str, str]]:
    """The entry of one claim.

    Args:
        name: a key of ``CLAIMS``.
        evidence: one sentence with the numbers of the run, without a full stop at its end.
        verdict: one of ``VERDICTS``; of a limit, "held" says that it was seen.

    Returns:
        ``{name: {"evidence": ..., "verdict": ...}}``; join several by ``|``.

    Raises:
        ValueError: an unknown claim or verdict, or evidence that does not fit into a row of a table.

    >>> claim("C9", "no prediction changed in 110 fits", "held")
    {'C9': {'evidence': 'no prediction changed in 110 fits', 'verdict': 'held'}}
    """
    if name not in CLAIMS:
        raise ValueError(f"there is no claim {name!r}; there are {', '.join(CLAIMS)}")
    if verdict not in VERDICTS:
        raise ValueError(f"the verdict on {name} must be one of {', '.join(VERDICTS)}; got {verdict!r}")
    text = evidence.strip()
    if not text or "|" in text or "\n" in text or text.endswith("."):
        raise ValueError(
            f"the evidence on {name} must be one line of text without '|' and without a full stop; got {evidence!r}"
        )
    return {name: {"evidence": text, "verdict": verdict}}


def claims_table(folder: Path) -> pd.DataFrame:
    """What the notebooks found about each claim.

    Args:
        folder: of the figures; ``numbers/NN.json`` in it are read.

    Returns:
        One row per claim, in order and indexed by its name: ``claim``; ``evidence``, a dictionary from the number of a
        notebook to its sentence; ``verdict``. Where notebooks disagree, the claim "held in part", but those that leave
        it undecided yield to the others where these agree that it did not hold. A claim that no notebook examined has
        no evidence, and ``NOT_EXAMINED`` for a verdict.

    Raises:
        ValueError: a saved entry is not one that :func:`claim` makes.
    """
    found: dict[str, dict[str, dict]] = {name: {} for name in CLAIMS}
    for path in sorted((Path(folder) / "numbers").glob("[0-9][0-9].json")):
        for name, entry in json.loads(path.read_text(encoding="utf-8")).get("claims", {}).items():
            try:
                found[name][path.stem] = claim(name, **entry)[name]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path} holds an entry that `claim` does not make: {error}") from error
    rows = []
    for name, entries in found.items():
        evidence = {notebook: entry["evidence"] for notebook, entry in entries.items()}
        verdict = _together([entry["verdict"] for entry in entries.values()])
        rows.append({"name": name, "claim": CLAIMS[name], "evidence": evidence, "verdict": verdict})
    return pd.DataFrame(rows).set_index("name")


def write_claims(readme: Path, folder: Path) -> bool:
    """Replace what stands between the markers of the README by the table of claims, where it differs.

    Args:
        readme: the file; notebooks are in the folder ``notebooks`` beside it.
        folder: as for :func:`claims_table`.

    Returns:
        Whether the file was written anew; an interrupted run leaves the old or the new one.

    Raises:
        ValueError: the markers are not there, each once and in order, or a saved entry is wrong.
    """
    old = readme.read_text(encoding="utf-8")
    before, begin, rest = old.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end) or BEGIN in rest or END in before + after:
        raise ValueError(f"{readme} must hold {BEGIN} and {END}, each once and in this order")
    new = f"{before}{BEGIN}\n\n{markdown(claims_table(folder), readme.parent / 'notebooks')}\n\n{END}{after}"
    if new == old:
        return False
    partial = readme.with_name(readme.name + ".partial")
    partial.write_text(new, encoding="utf-8")
    os.replace(partial, readme)
    return True


def markdown(table: pd.DataFrame, notebooks: Path) -> str:
    """The table of claims in Markdown, each sentence with a link to its notebook.

    Args:
        table: from :func:`claims_table`.
        notebooks: their folder, in which their names are looked up.
    """
    files = {path.stem[:2]: f"{notebooks.name}/{path.name}" for path in notebooks.glob("[0-9][0-9]_*.ipynb")}
    lines = ["| | the paper says | evidence here | verdict |", "|---|---|---|---|"]
    for name, row in table.iterrows():
        parts = [
            f"{text} ([{notebook}]({files[notebook]}))" if notebook in files else f"{text} ({notebook})"
            for notebook, text in row["evidence"].items()
        ]
        lines.append(f"| {name} | {row['claim']} | {'; '.join(parts)} | {row['verdict']} |")
    return "\n".join(lines)


def _together(verdicts: list[str]) -> str:
    different = set(verdicts)
    if not different:
        return NOT_EXAMINED
    if different == {"undecided", "did not hold"}:
        return "did not hold"
    return verdicts[0] if len(different) == 1 else "held in part"
