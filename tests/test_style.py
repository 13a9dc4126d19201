"""Every method can be told from every other, whoever looks."""

from itertools import combinations

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.markers import MarkerStyle

from smartlib import calibrators, plots
from smartlib.experiments.plans import VARIANTS
from smartlib.metrics import ALL_METRICS

METHODS = ("uncalibrated", *calibrators.names(), *VARIANTS)
# Linear RGB as seen with a complete deficiency (Machado, Oliveira and Fernandes 2009).
VISION = {
    "normal": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}


def lab(colour, vision):
    """CIE L*a*b* (D65) of a colour as it is seen; a distance of about 2 can just be noticed side by side."""
    rgb = np.array(to_rgb(colour))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.array(VISION[vision]) @ linear, 0, 1)
    to_xyz = [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
    t = np.array(to_xyz) @ seen / [0.95047, 1.0, 1.08883]
    x, y, z = np.where(t > 0.008856, np.cbrt(t), 7.787 * t + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_every_method_and_metric_has_its_own_look_and_name():
    assert set(plots.COLOURS) == set(plots.MARKERS) == set(METHODS)
    names = [plots.label(name) for name in (*METHODS, *ALL_METRICS)]
    assert len(set(names)) == len(names)
    assert all(name in plots.LABELS for name in (*METHODS, *ALL_METRICS))
    assert not set(plots.FREE_COLOURS) & set(plots.COLOURS.values())
    assert all(MarkerStyle(plots.marker(method)).is_filled() for method in METHODS)


@pytest.mark.parametrize("vision", VISION)
def test_methods_of_one_marker_differ_clearly_in_colour(vision):
    for one, other in combinations(METHODS, 2):
        if plots.marker(one) == plots.marker(other):
            distance = np.linalg.norm(lab(plots.colour(one), vision) - lab(plots.colour(other), vision))
            assert distance > 15, f"{one} and {other}: {distance:.1f}"


def test_the_colour_distance_is_that_of_known_colours():
    assert lab("#FFFFFF", "normal") == pytest.approx([100, 0, 0], abs=0.02)
    assert lab("#FF0000", "normal") == pytest.approx([53.24, 80.09, 67.20], abs=0.05)
    # Protanopes mistake this dark red for a dark yellow-green of the same lightness.
    red, green = (lab(c, "protanopia") for c in ("#B00000", "#454500"))
    assert abs(red[1] - green[1]) < 15 < abs(lab("#B00000", "normal")[1] - lab("#454500", "normal")[1])
