"""Where notebooks leave figures, tables and key numbers: ``$SMARTLIB_FIGURES_DIR``, or ``figures`` in this folder.

Names begin with the number of the notebook: ``04_temperature_map``. The same data give the same bytes.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


def figures_folder() -> Path:
    """The folder that figures, tables, numbers and records go to."""
    return Path(os.environ.get("SMARTLIB_FIGURES_DIR", "figures"))


def save_figure(figure: Figure, name: str) -> None:
    """Write ``<name>.png`` and ``<name>.pdf``, without dates and program versions.

    Args:
        figure: the figure. name: for instance "04_temperature_map".
    """
    folder = figures_folder()
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / f"{name}.png", metadata={"Software": None})
    figure.savefig(folder / f"{name}.pdf", metadata={"CreationDate": None, "Creator": None, "Producer": None})


def save_table(table: pd.DataFrame, name: str) -> None:
    """Write ``tables/<name>.csv``: without the index, six significant digits."""
    folder = figures_folder() / "tables"
    folder.mkdir(parents=True, exist_ok=True)
    table.to_csv(folder / f"{name}.csv", index=False, float_format="%.6g", lineterminator="\n")


def save_numbers(numbers: dict, notebook: str) -> None:
    """Write ``numbers/<notebook>.json``, the key numbers of a notebook.

    Args:
        numbers: names to numbers, texts or nested dictionaries; floats keep six significant digits.
        notebook: its number, for instance "04".
    """
    folder = figures_folder() / "numbers"
    folder.mkdir(parents=True, exist_ok=True)
    content = json.dumps(_rounded(numbers), indent=1, sort_keys=True, ensure_ascii=False)
    (folder / f"{notebook}.json").write_text(content + "\n", encoding="utf-8")


def _rounded(value):
    if isinstance(value, dict):
        return {str(key): _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    return float(f"{value:.6g}") if isinstance(value, float) else value
