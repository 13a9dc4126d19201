"""The pictures of Proposition 1: what they draw and where."""

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pytest

from smartlib import plots, temperature_interval
from smartlib.toplabel import temperature_at_confidence

ROWS = np.array([[2.0, 2.0, 2.0], [2.0, 3.0, 4.0], [2.0, np.inf, np.inf]])


@pytest.fixture(autouse=True)
def style():
    with plots.style_context():
        yield
    plt.close("all")


def bar_on_the_axis(ax):
    """The thick line at confidence 0 that marks the interval."""
    (bar,) = (line for line in ax.lines if line.get_linewidth() == 5)
    return bar.get_xdata()


def test_proposition_plot_marks_the_interval_and_where_each_row_passes():
    ax = plots.proposition_plot(ROWS, 0.9)
    lower, upper = map(float, temperature_interval(2.0, 0.9, 4))
    assert bar_on_the_axis(ax) == pytest.approx([lower, upper])
    (dots,) = (c for c in ax.collections if len(c.get_offsets()) == 3)
    np.testing.assert_allclose(dots.get_offsets()[:, 0], temperature_at_confidence(-np.insert(ROWS, 0, 0, 1), 0.9))
    assert dots.get_offsets()[[0, 2], 0].tolist() == pytest.approx([lower, upper]), "the extreme rows sit on the ends"
    np.testing.assert_array_equal(dots.get_offsets()[:, 1], 0.9)


def test_proposition_plot_encloses_the_rows_between_the_two_curves():
    ax = plots.proposition_plot(ROWS, 0.9)
    curves = [line.get_ydata() for line in ax.lines if len(line.get_xdata()) > 2]
    alone, tied, *rows = curves
    assert len(rows) == 3
    for row in rows:
        assert np.all(tied <= row + 1e-12)
        assert np.all(row <= alone + 1e-12)


def test_proposition_plot_draws_an_arrow_where_there_is_no_upper_end():
    ax = plots.proposition_plot(ROWS[:2], 0.4)
    lower = float(temperature_interval(2.0, 0.4, 4)[0])
    assert bar_on_the_axis(ax) == pytest.approx([lower, 6.4 * lower])
    assert [line.get_marker() for line in ax.lines].count(">") == 1
    assert ax.get_xlim() == pytest.approx((0, 6.4 * lower))


def test_proposition_plot_refuses_rows_of_different_margins():
    with pytest.raises(ValueError, match=r"the same margin, got \[1\. 2\.\]"):
        plots.proposition_plot([[2.0, 3.0], [1.0, 3.0]], 0.9)


def test_temperature_band_draws_the_rows_between_two_lines_and_leaves_out_ties():
    margin, second = np.array([0.0, 1.0, 4.0]), np.array([1.0, 10.0, 4.0])
    t_star = np.array([np.nan, 0.4, 1.0])
    _, ax = plt.subplots()
    assert plots.temperature_band(margin, t_star, 0.9, 10, third_gap=second, ax=ax) is ax
    upper, lower = (line.get_ydata()[1] / line.get_xdata()[1] for line in ax.lines)
    assert [lower, upper] == pytest.approx([1 / (2 * np.log(9)), 1 / np.log(9)])
    dots = ax.collections[-1]
    np.testing.assert_allclose(dots.get_offsets(), [[1.0, 0.4], [4.0, 1.0]])
    assert dots.get_array().tolist() == [4.0, 1.0], "third gap over margin, cut at 4"
