"""Figures: what they draw, what they leave out, and that their bytes can be reproduced."""

import locale
import os

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from smartlib import SMART, margin, plots
from smartlib.experiments.outputs import save_figure, save_numbers, save_table


@pytest.fixture(autouse=True)
def style():
    with plots.style_context():
        yield
    plt.close("all")


def fitted():
    """SMART fitted on an over-confident three-class model, and its margins."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(400, 3)) * 2
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    labels = np.array([rng.choice(3, p=row) for row in p])
    return SMART().fit(2 * logits, labels), margin(2 * logits)


def test_reliability_diagram_draws_one_dot_per_filled_bin_at_its_accuracy():
    ax = plots.reliability_diagram([0.55, 0.55, 0.95, 0.95], [1, 0, 1, 1], n_bins=10)
    (dots,) = (
        c
        for c in ax.collections
        if hasattr(c, "get_offsets") and len(c.get_offsets()) == 2 and c.get_label() == "accuracy of the bin"
    )
    assert np.allclose(dots.get_offsets(), [[0.55, 0.5], [0.95, 1.0]])
    bars = [patch for patch in ax.patches if patch.get_height() >= 0]
    assert len(bars) == 2, "nothing is drawn for the eight empty bins"


def test_noise_band_is_the_binomial_range_of_a_calibrated_bin():
    ax = plots.reliability_diagram(np.full(100, 0.85), [1] * 85 + [0] * 15, n_bins=10)
    (band,) = ax.patches
    from scipy.stats import binom

    assert band.get_y() == pytest.approx(binom.ppf(0.025, 100, 0.85) / 100)
    assert band.get_y() + band.get_height() == pytest.approx(binom.ppf(0.975, 100, 0.85) / 100)


def test_functions_draw_on_the_axes_they_are_given_and_show_nothing(monkeypatch):
    monkeypatch.setattr(plt, "show", lambda *_, **__: pytest.fail("a plot function showed its figure"))
    _, ax = plt.subplots()
    assert plots.reliability_diagram([0.9], [1], ax=ax) is ax
    smart, margins = fitted()
    assert plots.temperature_map(smart, margins, temperature=1.5, ax=ax) is ax


def test_temperature_map_draws_the_fitted_map():
    smart, margins = fitted()
    ax = plots.temperature_map(smart, margins)
    x, y = ax.lines[0].get_data()
    assert np.array_equal(y, smart.temperature_map(x))


def records():
    row = {"ece": 0.02, "ece_low": 0.015, "ece_high": 0.03, "ece_floor_q95": 0.006}
    return pd.DataFrame([{"bundle": b, "method": m} | row for b in ("a", "b") for m in ("uncalibrated", "ts", "smart")])


def test_interval_plot_draws_percent_with_intervals_and_paper_values():
    ax = plots.interval_plot(records(), "ece", reported={("a", "smart"): 0.01})
    spans = [line.get_xdata() for line in ax.lines if len(line.get_xdata()) == 2]
    assert len(spans) == 6 and np.allclose(spans, [1.5, 3.0])
    labels = ax.get_legend_handles_labels()[1]
    assert labels.count("SMART") == 1 and "reported" in labels and "noise floor (95 %)" in labels


def test_colours_of_methods_are_distinct():
    assert len(set(plots.COLOURS.values())) == len(plots.COLOURS)


def test_same_figure_has_the_same_bytes_in_another_locale_and_home(tmp_path, monkeypatch):
    def draw(folder):
        monkeypatch.setenv("SMARTLIB_FIGURES_DIR", str(folder))
        ax = plots.reliability_diagram(np.linspace(0.1, 1, 50), [0, 1] * 25, title="x")
        save_figure(ax.figure, "00_x")
        return [(folder / f"00_x.{end}").read_bytes() for end in ("png", "pdf")]

    first = draw(tmp_path / "a")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1")
    before = locale.setlocale(locale.LC_NUMERIC)
    try:
        for name in ("de_DE.UTF-8", "C.UTF-8"):
            try:
                locale.setlocale(locale.LC_NUMERIC, name)
                break
            except locale.Error:
                continue
        second = draw(tmp_path / "b")
    finally:
        locale.setlocale(locale.LC_NUMERIC, before)
    assert first == second
    assert b"/CreationDate" not in first[1]


def test_tables_and_numbers_keep_six_digits_and_plain_types(tmp_path, monkeypatch):
    monkeypatch.setenv("SMARTLIB_FIGURES_DIR", str(tmp_path))
    save_table(pd.DataFrame({"x": [1 / 3]}), "00_t")
    save_numbers({"b": np.float64(1 / 3), "a": [np.int64(2), True], 3: {"c": "ü"}}, "00")
    assert (tmp_path / "tables" / "00_t.csv").read_text() == "x\n0.333333\n"
    text = (tmp_path / "numbers" / "00.json").read_text(encoding="utf-8")
    assert text == '{\n "3": {\n  "c": "ü"\n },\n "a": [\n  2,\n  true\n ],\n "b": 0.333333\n}\n'
    assert not os.listdir(tmp_path / "tables")[1:]
