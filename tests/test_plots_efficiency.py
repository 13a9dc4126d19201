"""The pictures of data efficiency: medians, bands, groups of errors."""

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from smartlib import plots
from smartlib.plots.efficiency import MIN_SETS, difference_plot, size_plot


@pytest.fixture(autouse=True)
def style():
    with plots.style_context():
        yield
    plt.close("all")


def records():
    rows = [
        {"method": method, "n_val": n, "ece": value + 0.001 * i, "nll": 0.2, "ece_floor_q95": np.nan}
        for method, value in (("ts", 0.02), ("smart", 0.01))
        for n in (100, 50)
        for i in range(11)
    ]
    rows.append({"method": "uncalibrated", "n_val": 200, "ece": 0.04, "nll": 0.3, "ece_floor_q95": 0.007})
    return pd.DataFrame(rows)


def test_sizes_are_drawn_as_median_with_the_10_to_90_percent_band():
    ax = size_plot(records(), "ece")
    ts, smart, untouched = ax.lines
    assert ts.get_xdata().tolist() == [50, 100] and ts.get_ydata() == pytest.approx([2.5, 2.5])
    assert smart.get_ydata() == pytest.approx([1.5, 1.5]) and smart.get_color() == plots.colour("smart")
    band = ax.collections[0].get_paths()[0].vertices
    assert (band[:, 1].min(), band[:, 1].max()) == pytest.approx((2.1, 2.9))
    assert untouched.get_ydata()[0] == pytest.approx(4.0)
    (floor,) = ax.patches
    assert floor.get_y() + floor.get_height() == pytest.approx(0.7)
    assert ax.get_ylim()[0] == 0


def test_natural_units_and_what_there_is_no_record_of():
    ax = size_plot(records().query("method != 'uncalibrated'"), "nll", methods=("smart",))
    (smart,) = ax.lines
    assert smart.get_ydata().tolist() == [0.2, 0.2] and not ax.patches
    assert ax.get_ylabel() == "NLL (nats)"


def pairs():
    """Bundle a: nine sets with 2 or 3 errors, few with more; bundle b: none with errors."""
    rows = [{"bundle": "a", "n_val": 50, "n_val_errors": 2 + i % 2, "ece": 0.01 * i} for i in range(9)]
    rows += [{"bundle": "a", "n_val": 100, "n_val_errors": 4, "ece": -0.5} for _ in range(MIN_SETS - 1)]
    rows += [{"bundle": "b", "n_val": 50, "n_val_errors": 0, "ece": -0.02} for _ in range(MIN_SETS)]
    rows += [{"bundle": "b", "n_val": 9000, "n_val_errors": 600, "ece": -0.03} for _ in range(MIN_SETS)]
    return pd.DataFrame(rows)


def test_differences_over_sizes_and_over_groups_of_errors():
    rate = pd.Series({"a": 0.05, "b": 0.2})
    ax = difference_plot(pairs(), "ece", rate)
    a, b, zero = ax.lines
    assert a.get_xdata().tolist() == [50, 100] and a.get_ydata() == pytest.approx([4.0, -50.0])
    assert b.get_xdata().tolist() == [50, 9000]
    assert zero.get_ydata()[0] == 0 and a.get_color() != b.get_color()
    assert sum(b.get_color()[:3]) < sum(a.get_color()[:3]), "darker where there are more errors"

    ax = difference_plot(pairs(), "ece", rate, by="n_val_errors")
    ax.figure.draw_without_rendering()
    names = [tick.get_text() for tick in ax.get_xticklabels()]
    a, b, _ = ax.lines
    assert [names[int(x)] for x in a.get_xdata()] == ["2–3"], "of four errors there are too few sets"
    assert [names[int(x)] for x in b.get_xdata()] == ["0", "≥ 512"]
    assert b.get_ydata() == pytest.approx([-2.0, -3.0])
    assert ax.collections[0].norm.vmax == pytest.approx(20.0)


def test_models_with_the_same_error_rate_and_an_unknown_axis():
    ax = difference_plot(pairs(), "ece", pd.Series({"a": 0.1, "b": 0.1}))
    assert len(ax.lines) == 3
    with pytest.raises(ValueError, match="got 'val_size'"):
        difference_plot(pairs(), "ece", pd.Series({"a": 0.1, "b": 0.1}), by="val_size")
