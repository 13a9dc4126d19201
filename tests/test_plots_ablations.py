"""Figures of the ablations: what is drawn where, and in which unit."""

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgba

from smartlib import plots
from smartlib.plots.ablations import difference_plot, map_band_plot, settings_map


@pytest.fixture(autouse=True)
def style():
    with plots.style_context():
        yield
    plt.close("all")


@pytest.fixture
def differences():
    """Two models; the second has no record of variant "b"."""
    rows = [
        ("one", "a", "ece", 0.01, 0.005, 0.02, "higher"),
        ("one", "b", "ece", 0.0, -0.01, 0.01, "undecided"),
        ("two", "a", "ece", -0.02, -0.03, -0.01, "lower"),
        ("one", "a", "nll", 0.5, 0.4, 0.6, "higher"),
    ]
    return pd.DataFrame(rows, columns=["model", "variant", "metric", "difference", "low", "high", "verdict"])


def test_marks_stand_at_differences_in_points_and_are_hollow_where_undecided(differences):
    ax = difference_plot(differences, "ece")
    marks = {c.get_label(): c for c in ax.collections if len(c.get_offsets()) and c.get_label() in ("one", "two")}
    x, y = marks["one"].get_offsets().T
    np.testing.assert_allclose(x, [1, 0])
    np.testing.assert_array_equal(y.round(), [0, 1])
    assert marks["two"].get_offsets()[0, 0] == -2 and marks["two"].get_offsets()[0, 1] > y[0]
    look = marks["one"].get_edgecolors()[0]
    np.testing.assert_allclose(marks["one"].get_facecolors(), [look, to_rgba("white")])
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["a", "b"]
    assert ax.get_ylim()[0] > ax.get_ylim()[1], "the first variant is on top"
    assert ax.get_xlabel() == "Δ ECE (points)"


def test_intervals_reach_from_low_to_high(differences):
    ax = difference_plot(differences, "ece")
    segments = [s[:, 0].tolist() for c in ax.collections if hasattr(c, "get_segments") for s in c.get_segments()]
    np.testing.assert_allclose(segments, [[0.5, 2], [-1, 1], [-3, -1]])


def test_nll_stays_in_nats_on_given_axes(differences):
    _, given = plt.subplots()
    ax = difference_plot(differences, "nll", ax=given)
    assert ax is given and ax.get_xlabel() == "Δ NLL (nats)"
    (marks,) = (c for c in ax.collections if c.get_label() == "one")
    assert marks.get_offsets()[0, 0] == 0.5


def test_cells_show_their_values_on_the_shared_scale_and_the_default_is_framed():
    table = pd.DataFrame(
        [(0.1, 0.001, 0.012), (0.05, 0.001, 0.02), (0.1, 0.01, 0.03), (0.05, 0.01, 0.004)],
        columns=["bandwidth", "delta", "ece"],
    )
    ax = settings_map(table, "ece", (0.0, 0.05), default=(0.1, 0.001))
    # Rows from the smallest lambda down, columns from the smallest delta.
    assert [text.get_text() for text in ax.texts] == ["2.00", "0.40", "1.20", "3.00"]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["0.05", "0.1"]
    assert [t.get_text() for t in ax.get_xticklabels()] == ["1e-3", "1e-2"]
    (mesh,) = ax.collections
    assert mesh.get_clim() == (0, 5)
    (frame,) = ax.patches
    assert frame.get_xy() == (0, 1)
    assert settings_map(table.rename(columns={"ece": "nll"}), "nll", (0, 1)).texts[0].get_text() == "0.020"


def test_bands_hold_the_medians_and_smart_has_its_colour():
    table = pd.DataFrame(
        {"variant": ["SMART"] * 2 + ["NLL"] * 2, "margin": [0.0, 4.0] * 2, "median": [1.0, 2.0, 1.5, 1.6],
         "low": [0.9, 1.8, 1.4, 1.5], "high": [1.1, 2.5, 1.6, 1.7]}
    )  # fmt: skip
    ax = map_band_plot(table)
    lines = {line.get_label(): line for line in ax.lines}
    assert lines["SMART"].get_color() == plots.colour("smart") != lines["NLL"].get_color()
    assert lines["SMART"].get_linestyle() != lines["NLL"].get_linestyle()
    np.testing.assert_allclose(lines["NLL"].get_xydata(), [[0, 1.5], [4, 1.6]])
    at_four = ax.collections[0].get_paths()[0].vertices
    assert set(at_four[at_four[:, 0] == 4, 1]) == {1.8, 2.5}
    assert ax.get_xlim() == (0, 4)
