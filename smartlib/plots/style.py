"""Colours, display names and the style sheet: the same method looks the same in every figure."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import matplotlib.pyplot as plt

_STYLE_FILE = Path(__file__).with_name("smartlib.mplstyle")

# Okabe and Ito's palette, distinguishable with all common colour vision deficiencies.
COLOURS = {
    "uncalibrated": "#666666",
    "ts": "#0072B2",
    "smart": "#D55E00",
    "smart-adam": "#E69F00",
}
NOISE_COLOUR = "#BFBFBF"
# Colours that no method has, for what is none: the rest of that palette, then three of Paul Tol's muted one.
FREE_COLOURS = ("#56B4E9", "#009E73", "#CC79A7", "#882255", "#999933", "#332288")

LABELS = {
    "uncalibrated": "uncalibrated",
    "ts": "temperature scaling",
    "smart": "SMART",
    "smart-adam": "SMART (Adam)",
    "accuracy": "accuracy",
    "ece": "ECE",
    "adaece": "AdaECE",
    "cwece": "classwise ECE",
    "mce": "MCE",
    "smce": "smCE",
    "nll": "NLL",
    "brier": "Brier score",
}


def colour(method: str) -> str:
    """The colour of a method; black for one that has none."""
    return COLOURS.get(method, "#000000")


def label(name: str) -> str:
    """The display name of a method or metric; the name itself where there is none."""
    return LABELS.get(name, name)


def use_style() -> None:
    """Switch matplotlib to the companion's style for the rest of the session (notebooks call it once)."""
    plt.style.use(_STYLE_FILE)


def style_context() -> AbstractContextManager:
    """The style for the body of a ``with`` statement."""
    return plt.style.context(_STYLE_FILE)
