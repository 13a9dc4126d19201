"""Whether two results are the same up to what another processor would round differently.

Files of numbers, tables, notebooks and pictures, as ``make all`` decides what to replace and ``make verify`` what
to report.
"""

from __future__ import annotations

import base64
import csv
import io
import json
import math
import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
from PIL import Image

# Two numbers are the same within either of these; two images when their grey levels (0 to 255) differ by less than
# this on average. One changed digit in an axis label of a usual figure moves the average by about .01.
RELATIVE_TOLERANCE = 1e-3
ABSOLUTE_TOLERANCE = 1e-6
PIXEL_TOLERANCE = 0.003

NUMBER = re.compile(r"[-+]?(?:\d+\.\d*|\.\d+|\d+)(?:[eE][-+]?\d+)?")

# Where, what is committed, what was found.
Difference = tuple[str, Any, Any]


def flatten(path: Path) -> dict[str, Any]:
    """What a table, a file of numbers or a notebook's text outputs say, by place."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".csv":
        rows = list(csv.reader(io.StringIO(text)))
        return {f"row {i}, column {j}": cell for i, row in enumerate(rows) for j, cell in enumerate(row)}
    if path.suffix == ".json":
        return dict(flatten_json(json.loads(text), ""))
    flat = {}
    for cell in nbformat.reads(text, as_version=4).cells:
        for index, output in enumerate(cell.get("outputs", [])):
            for kind, data in {"text": output.get("text", ""), **output.get("data", {})}.items():
                if not kind.startswith("image/"):
                    for i, line in enumerate(data.splitlines() if isinstance(data, str) else [json.dumps(data)]):
                        flat[f"cell {cell.get('id')}, output {index}, {kind}, line {i + 1}"] = line
    return flat


def flatten_json(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    """The leaves of a JSON value with their places."""
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from flatten_json(item, f"{place}/{key}")
    else:
        yield place, value


def find_differences(committed: dict[str, Any], found: dict[str, Any], *, rounded: bool = False) -> list[Difference]:
    """The places where two flattened files differ beyond tolerance, with both values."""
    places = list(committed) + [place for place in found if place not in committed]
    pairs = [(place, committed.get(place, "(absent)"), found.get(place, "(absent)")) for place in places]
    return [pair for pair in pairs if not is_close(pair[1], pair[2], rounded)]


def is_close(a: Any, b: Any, rounded: bool) -> bool:
    """Whether two values agree: numbers within tolerance, text word by word with the numbers in it.

    With `rounded`, numbers in text were rounded for print, and may differ by one in the last place after the point.
    """
    if isinstance(a, str) and isinstance(b, str):
        a, b = " ".join(a.split()), " ".join(b.split())
        if NUMBER.split(a) != NUMBER.split(b):
            return False
        pairs = zip(NUMBER.findall(a), NUMBER.findall(b), strict=True)
        return all(is_close(float(x), float(y), False) or (rounded and last_places_touch(x, y)) for x, y in pairs)
    if not all(isinstance(x, int | float) and not isinstance(x, bool) for x in (a, b)):
        return type(a) is type(b) and a == b
    both_nan = math.isnan(a) and math.isnan(b)
    return both_nan or math.isclose(a, b, rel_tol=RELATIVE_TOLERANCE, abs_tol=ABSOLUTE_TOLERANCE)


def last_places_touch(a: str, b: str) -> bool:
    """Whether two printed numbers have the same decimals and differ by at most one in the last of them."""
    x, y = Decimal(a), Decimal(b)
    place = x.as_tuple().exponent
    return place == y.as_tuple().exponent and place < 0 and abs(x - y) <= Decimal(10) ** place


def same_pixels(a: bytes, b: bytes) -> bool:
    """Whether two PNG images show the same."""
    first, second = (np.asarray(Image.open(io.BytesIO(png)).convert("RGBA"), dtype=float) for png in (a, b))
    return first.shape == second.shape and float(np.abs(first - second).mean()) <= PIXEL_TOLERANCE


def take_apart(content: bytes) -> tuple[nbformat.NotebookNode, list[bytes]]:
    """A notebook without its outputs, and the images among them."""
    notebook = nbformat.reads(content.decode(), as_version=4)
    images = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            images += [base64.b64decode(o.data["image/png"]) for o in cell.outputs if "image/png" in o.get("data", {})]
            cell.outputs, cell.execution_count = [], None
    return notebook, images


def differs(committed: Path, found: Path) -> bool:
    """Whether a committed file must be replaced by what a run made."""
    if not committed.exists():
        return True
    old, new = committed.read_bytes(), found.read_bytes()
    if old == new:
        return False
    try:
        if found.suffix == ".png":
            return not same_pixels(old, new)
        if found.suffix == ".pdf" and found.with_suffix(".png").exists():
            # The same picture; its bytes can differ where its pixels do not.
            return differs(committed.with_suffix(".png"), found.with_suffix(".png"))
        if found.suffix in {".csv", ".json"}:
            return bool(find_differences(flatten(committed), flatten(found)))
        if found.suffix == ".ipynb":
            (old_source, old_images), (new_source, new_images) = take_apart(old), take_apart(new)
            return (
                old_source != new_source
                or bool(find_differences(flatten(committed), flatten(found), rounded=True))
                or len(old_images) != len(new_images)
                or not all(map(same_pixels, old_images, new_images))
            )
    except (ValueError, OSError):
        pass  # the committed file cannot be read, as after a conflict in a merge: replace it
    return True
