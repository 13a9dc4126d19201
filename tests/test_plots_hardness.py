"""The pictures of notebook 08: what they draw and where."""

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from smartlib import plots
from smartlib.plots.hardness import correlation_plot, distance_plot, gap_plot, ties_plot


@pytest.fixture(autouse=True)
def style():
    with plots.style_context():
        yield
    plt.close("all")


def test_distance_plot_draws_medians_of_groups_and_every_sample_once():
    margin = np.arange(40.0)
    distance = margin / 10
    distance[39] = np.nan
    ax = distance_plot(margin, distance, n_groups=3)
    (line,) = ax.lines
    np.testing.assert_allclose(line.get_xdata(), [6, 19, 32])
    np.testing.assert_allclose(line.get_ydata(), [0.6, 1.9, 3.2])
    (cells,) = (c for c in ax.collections if hasattr(c, "get_array") and c.get_array() is not None)
    assert cells.get_array().sum() == 39


def test_correlation_plot_puts_each_signal_of_each_model_in_a_row_of_its_own():
    table = pd.DataFrame(
        [(b, s, v, v - 0.1, v + 0.05) for b, v in (("a", 0.5), ("b", 0.7)) for s in ("margin", "max_logit")],
        columns=["bundle", "signal", "value", "low", "high"],
    )
    ax = correlation_plot(table)
    points = {c.get_label(): np.array(c.lines[0].get_xydata()) for c in ax.containers}
    np.testing.assert_allclose(points["margin"], [[0.5, 0], [0.7, 3]])
    np.testing.assert_allclose(points["max logit"], [[0.5, 1], [0.7, 4]])
    segments = ax.containers[0].lines[2][0].get_segments()
    np.testing.assert_allclose(segments[0][:, 0], [0.4, 0.55])
    assert [t.get_text() for t in ax.get_yticklabels()] == ["a", "b"]


def test_gap_plot_is_in_points_with_intervals_and_the_methods_colours():
    table = pd.DataFrame({"group": [0, 1], "gap": [-0.02, 0.01], "low": [-0.03, 0.005], "high": [-0.015, 0.02]})
    ax = gap_plot({"ts": table, "few rivals": table}, xlabel="group")
    first, second = ax.containers
    np.testing.assert_allclose(first.lines[0].get_ydata(), [-2, 1])
    np.testing.assert_allclose(first.lines[2][0].get_segments()[1][:, 1], [0.5, 2])
    assert first.lines[0].get_color() == plots.colour("ts") and second.lines[0].get_color() in plots.FREE_COLOURS
    assert (np.array(first.lines[0].get_xdata()) < np.array(second.lines[0].get_xdata())).all(), "side by side"
    assert ax.get_xticks().tolist() == [1, 2]


def test_ties_plot_shows_the_median_temperature_of_each_kind():
    m, many = np.arange(20.0), np.arange(20) % 2 == 0
    ax = ties_plot({"smart": np.where(many, 3.0, 1.0)}, m, many, (1.0, 3.0), n_groups=2)
    curves = {line.get_label(): line for line in ax.lines}
    np.testing.assert_allclose(curves["SMART, many rivals"].get_ydata(), [3, 3])
    np.testing.assert_allclose(curves["SMART, few rivals"].get_xdata(), [5, 15])
    assert curves["truth, many rivals"].get_ydata()[0] == 3
