"""Pictures of many methods: where marks lie, which bars are drawn, what is framed."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_hex

from smartlib import plots
from smartlib.plots.ranks import groups_within


@pytest.fixture(autouse=True)
def style():
    with plots.style_context():
        yield
    plt.close("all")


RANKS = pd.Series({"smart": 1.5, "gc": 5.75, "ts": 2.0, "hb": 4.0, "uncalibrated": 6.0})


def test_groups_are_the_largest_runs_within_the_distance():
    assert groups_within(RANKS, 2.0) == [("smart", "ts"), ("ts", "hb"), ("hb", "gc", "uncalibrated")]
    assert groups_within(RANKS, 2.5) == [("smart", "ts", "hb"), ("hb", "gc", "uncalibrated")]
    assert groups_within(RANKS, 10) == [("smart", "ts", "hb", "gc", "uncalibrated")]
    assert groups_within(RANKS, 0.1) == []


def test_the_diagram_puts_each_method_at_its_rank_and_draws_a_bar_per_group():
    ax = plots.critical_difference_diagram(RANKS, 2.5)
    at = {to_hex(line.get_color()).upper(): line.get_xdata()[0] for line in ax.lines if len(line.get_xdata()) == 1}
    assert at == {plots.colour(method): rank for method, rank in RANKS.items()}
    bars = [line.get_xdata() for line in ax.lines if line.get_linewidth() == 3]
    assert np.allclose(bars, [[1.5, 4.0], [4.0, 6.0]], atol=0.07)
    (scale,) = (line.get_xdata() for line in ax.lines if line.get_marker() == "|")
    assert np.ptp(scale) == 2.5
    texts = [text.get_text().strip() for text in ax.texts]
    assert {"SMART  1.5", "temperature scaling  2.0", "6.0  uncalibrated", "critical difference 2.5"} <= set(texts)


def test_the_matrix_frames_the_set_of_the_best_and_leaves_out_what_is_missing():
    values = pd.DataFrame({"a": [0.04, 0.01, 0.02], "b": [0.03, np.nan, 0.0301]}, index=["uncalibrated", "fc", "smart"])
    best = pd.DataFrame({"a": [False, True, True], "b": [True, False, False]}, index=["uncalibrated", "fc", "smart"])
    ax = plots.method_matrix(values, best, "ece")
    shown = {(round(t.get_position()[0]), round(t.get_position()[1])): t for t in ax.texts}
    assert {place: text.get_text() for place, text in shown.items()} == {
        (0, 0): "4.00", (0, 1): "1.00", (0, 2): "2.00", (1, 0): "3.00", (1, 2): "3.01",
    }  # fmt: skip
    framed = {(round(p.get_x() + 0.46), round(p.get_y() + 0.42)) for p in ax.patches}
    assert framed == {(0, 1), (0, 2), (1, 0)}
    assert framed == {place for place, text in shown.items() if text.get_fontweight() == "bold"}
    shade = np.ma.filled(ax.images[0].get_array(), np.nan)
    assert shade[:, 0] == pytest.approx([1, 0, 1 / 3])
    assert shade[2, 1] == 1, "above the uncalibrated model the shade is the darkest"
    assert "ECE (%)" in ax.get_xlabel()


def test_the_spread_plot_shows_every_fit_and_the_interval_of_the_full_one():
    full = {"bundle": "a", "val_size": "all", "ece": 0.012, "ece_low": 0.01, "ece_high": 0.02}
    rows = [full | {"method": m} for m in ("ts", "smart")]
    rows += [{"method": "smart", "val_size": "500", "ece": e} for e in (0.011, 0.015, 0.08)]
    ax = plots.validation_spread_plot(pd.DataFrame(rows), "ece", upper=3)
    drawn = [line.get_xdata() for line in ax.lines]
    assert sum(np.allclose(x, [1.0, 2.0]) for x in drawn if len(x) == 2) == 2
    assert sum(np.allclose(x, [1.1, 1.5, 8.0]) for x in drawn if len(x) == 3) == 1
    assert sum(np.allclose(x, [1.2]) for x in drawn if len(x) == 1) == 2
    assert ax.get_xlim() == (0, 3) and [t.get_text() for t in ax.get_yticklabels()] == ["temperature scaling", "SMART"]
    _, other = plt.subplots()
    assert plots.validation_spread_plot(pd.DataFrame(rows), "ece", ax=other) is other
