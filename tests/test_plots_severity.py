"""Curves over severities: means and ranges in the right units."""

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from smartlib import plots
from smartlib.plots.severity import severity_plot


@pytest.fixture(autouse=True)
def style():
    with plots.style_context():
        yield
    plt.close("all")


@pytest.fixture
def table():
    """Two methods, severities 0 and 3; two kinds of shift at 3, noise floors at 0 and of one record at 3."""
    rows = [("ts", 0, 0.01, 0.004), ("ts", 3, 0.02, np.nan), ("ts", 3, 0.06, np.nan), ("smart", 0, 0.005, 0.006),
            ("smart", 3, 0.01, 0.02), ("smart", 3, 0.03, np.nan)]  # fmt: skip
    frame = pd.DataFrame(rows, columns=["method", "severity", "ece", "ece_floor_q95"])
    return frame.assign(nll=10 * frame["ece"])


def lines_of(ax):
    return {line.get_label(): line for line in ax.lines}


def test_lines_are_means_in_percent_in_the_methods_colours(table):
    ax = severity_plot(table, "ece")
    lines = lines_of(ax)
    assert list(lines) == ["temperature scaling", "SMART"]
    np.testing.assert_allclose(lines["temperature scaling"].get_xydata(), [[0, 1], [3, 4]])
    np.testing.assert_allclose(lines["SMART"].get_xydata(), [[0, 0.5], [3, 2]])
    assert lines["SMART"].get_color() == plots.colour("smart")
    assert [line.get_marker() for line in lines.values()] == [plots.style.marker(m) for m in ("ts", "smart")]
    assert ax.get_ylabel() == "ECE (%)" and ax.get_xlabel() == "severity"


def test_bands_reach_from_the_least_to_the_largest(table):
    ax = severity_plot(table.drop(columns="ece_floor_q95"), "ece", banded=["smart"])
    (band,) = ax.collections
    points = band.get_paths()[0].vertices
    assert sorted(set(points[points[:, 0] == 3, 1].round(9))) == [1.0, 3.0]
    assert set(points[points[:, 0] == 0, 1].round(9)) == {0.5}


def test_the_noise_floor_is_the_mean_where_records_have_one(table):
    (floor,) = severity_plot(table, "ece").collections
    points = floor.get_paths()[0].vertices
    assert points[points[:, 0] == 0, 1].max() == pytest.approx(0.5)
    assert points[points[:, 0] == 3, 1].max() == pytest.approx(2.0)


def test_nll_stays_in_nats_and_has_no_floor(table):
    _, given = plt.subplots()
    ax = severity_plot(table, "nll", ax=given)
    assert ax is given and not ax.collections
    np.testing.assert_allclose(lines_of(ax)["SMART"].get_ydata(), [0.05, 0.2])
    assert ax.get_ylabel() == "NLL (nats)"


def test_another_strength_may_be_on_the_axis(table):
    ax = severity_plot(table.rename(columns={"severity": "ratio"}), "ece", x="ratio")
    assert ax.get_xlabel() == "ratio"
    np.testing.assert_array_equal(ax.lines[0].get_xdata(), [0, 3])
