"""The pictures of cost: what is drawn in colour, where names stand, which dots are where."""

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from smartlib import plots
from smartlib.plots.cost import cost_quality_plot, growth_plot, spread_out


@pytest.fixture(autouse=True)
def style():
    with plots.style_context():
        yield
    plt.close("all")


def costs():
    rows = [
        {"what": what, "n": n, "fit_seconds": factor * n}
        for what, factor in {"ts": 1e-5, "smart": 1.02e-5, "hb": 1e-6, "gc": 1e-3}.items()
        for n in (10_000, 1000, 100_000)
    ]
    rows[-1]["fit_seconds"] = np.nan  # gc at 100,000
    return pd.DataFrame(rows)


def test_growth_lines_are_sorted_coloured_and_end_where_sizes_were_left_out():
    ax = growth_plot(costs(), "n", highlighted=("ts", "smart"))
    ts, smart, hb, gc, proportion = ax.lines
    assert ts.get_xdata().tolist() == [1000, 10_000, 100_000] and ts.get_ydata() == pytest.approx([0.01, 0.1, 1])
    assert [line.get_color() for line in (ts, smart)] == [plots.colour("ts"), plots.colour("smart")]
    assert hb.get_color() == gc.get_color() and hb.get_color() not in plots.COLOURS.values()
    assert gc.get_xdata().tolist() == [1000, 10_000]
    (x0, x1), (y0, y1) = proportion.get_data()
    assert y1 / y0 == pytest.approx(x1 / x0), "slope 1"
    assert ax.get_xscale() == ax.get_yscale() == "log"


def test_names_stand_at_the_ends_of_the_lines_and_apart_from_each_other():
    ax = growth_plot(costs(), "n")
    names = {text.get_text(): text.xy for text in ax.texts if hasattr(text, "xy")}
    assert names["group calibration"] == pytest.approx((10_000, 10.0))
    assert names["histogram binning"] == pytest.approx((100_000, 0.1))
    (_, below), (_, above) = names["temperature scaling"], names["SMART"]
    low, high = np.log10(ax.get_ylim())
    assert np.log10(above / below) == pytest.approx(0.033 * (high - low), rel=0.05)
    assert np.sqrt(above * below) == pytest.approx(np.sqrt(1 * 1.02), rel=1e-3)


def test_spread_out_moves_no_more_than_it_must():
    assert spread_out([3.0, 1.0, 2.0], 0.5).tolist() == [3.0, 1.0, 2.0]
    np.testing.assert_allclose(spread_out([0.0, 0.1, 5.0], 1.0), [-0.45, 0.55, 5.0])
    assert spread_out([], 1.0).size == 0


def quality():
    return pd.DataFrame(
        {
            "method": ["ts", "smart", "hb"], "seconds": [0.02, 0.2, 0.1], "ece": [0.013, 0.010, 0.0101],
            "ece_low": 0.006, "ece_high": 0.016, "ece_floor_q95": 0.007,
            "nll": [0.223, 0.222, 0.25], "nll_low": 0.21, "nll_high": 0.26,
        }
    )  # fmt: skip


def test_quality_is_in_percent_over_seconds_with_intervals_and_the_floor():
    ax = cost_quality_plot(quality(), "ece")
    bars, marks = ax.lines[::2], ax.lines[1::2]
    assert [mark.get_label() for mark in marks] == [plots.label(m) for m in ("ts", "hb", "smart")], "quickest first"
    assert [mark.get_xdata()[0] for mark in marks] == [0.02, 0.1, 0.2]
    assert [mark.get_ydata()[0] for mark in marks] == pytest.approx([1.3, 1.01, 1.0])
    assert [mark.get_marker() for mark in marks] == [plots.marker(m) for m in ("ts", "hb", "smart")]
    assert bars[0].get_ydata() == pytest.approx([0.6, 1.6])
    (floor,) = ax.patches
    assert floor.get_y() + floor.get_height() == pytest.approx(0.7)
    assert ax.get_ylabel() == "ECE (%)" and ax.get_ylim()[0] == 0
    ax = cost_quality_plot(quality(), "nll")
    assert ax.get_ylabel() == "NLL (nats)" and not ax.patches and ax.get_ylim()[0] > 0
