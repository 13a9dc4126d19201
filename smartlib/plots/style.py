"""Colours, display names and the style sheet: the same method looks the same in every figure."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import matplotlib.pyplot as plt

_STYLE_FILE = Path(__file__).with_name("smartlib.mplstyle")

# Seventeen colours that everybody can tell apart do not exist. The hue says what kind of calibrator a method is, the
# lightness and the marker which one: no two methods share a marker and look alike, with any common colour vision
# deficiency. Blue, vermilion, orange and grey are those of Okabe and Ito's palette.
_LOOKS = {
    "uncalibrated": ("#666666", "X"),
    # one temperature, or several: blue
    "ts": ("#0072B2", "o"),
    "ets": ("#003A5C", "s"),
    "pts": ("#4FA9DE", "^"),
    "cts": ("#9AD0F0", "D"),
    "gc": ("#0093A7", "v"),
    # linear maps of the logits: purple
    "vs": ("#AA3377", "o"),
    "dirichlet": ("#E3A6C8", "s"),
    # maps of the top confidence: green
    "spline": ("#00583D", "o"),
    "hb": ("#3DAA7D", "s"),
    "ir": ("#8CCFA9", "^"),
    "bbq": ("#1E7F5C", "D"),
    # with the features: yellow
    "procal": ("#5B4A00", "D"),
    "fc": ("#C7B200", "v"),
    # red
    "smart": ("#D55E00", "o"),
    "smart-adam": ("#E69F00", "s"),
    "smart-321": ("#8A2E00", "^"),
}
COLOURS = {method: look[0] for method, look in _LOOKS.items()}
MARKERS = {method: look[1] for method, look in _LOOKS.items()}
NOISE_COLOUR = "#BFBFBF"
# Colours that no method has, for what is none: the rest of that palette, then three of Paul Tol's muted one.
FREE_COLOURS = ("#56B4E9", "#009E73", "#CC79A7", "#882255", "#999933", "#332288")

LABELS = {
    "uncalibrated": "uncalibrated",
    "ts": "temperature scaling",
    "vs": "vector scaling",
    "ets": "ensemble TS",
    "pts": "parameterised TS",
    "cts": "class-wise TS",
    "spline": "spline",
    "hb": "histogram binning",
    "ir": "isotonic regression",
    "bbq": "BBQ",
    "dirichlet": "Dirichlet",
    "gc": "group calibration",
    "procal": "ProCal",
    "fc": "feature clipping",
    "smart": "SMART",
    "smart-adam": "SMART (Adam)",
    "smart-321": "SMART (321 parameters)",
    "accuracy": "accuracy",
    "ece": "ECE",
    "adaece": "AdaECE",
    "cwece": "classwise ECE",
    "mce": "MCE",
    "smce": "smCE",
    "nll": "NLL",
    "brier": "Brier score",
    "rmsce": "RMS calibration error",
    "debiased_ece": "debiased ECE",
    "sweep_ece": "ECE sweep",
    "kde_ece": "KDE-ECE",
    "smece": "SmoothECE",
    "soft_ece": "SoftECE",
    "brier_calibration": "calibration part of Brier",
    "brier_refinement": "refinement part of Brier",
    "auroc": "AUROC of confidence",
}


def colour(method: str) -> str:
    """The colour of a method; black for one that has none."""
    return COLOURS.get(method, "#000000")


def marker(method: str) -> str:
    """The marker of a method, for matplotlib; a star for one that has none."""
    return MARKERS.get(method, "*")


def label(name: str) -> str:
    """The display name of a method or metric; the name itself where there is none."""
    return LABELS.get(name, name)


def use_style() -> None:
    """Switch matplotlib to the companion's style for the rest of the session (notebooks call it once)."""
    plt.style.use(_STYLE_FILE)


def style_context() -> AbstractContextManager:
    """The style for the body of a ``with`` statement."""
    return plt.style.context(_STYLE_FILE)
