"""Figures. Each function takes data and ``ax=None``, draws, and returns the Axes; none shows or saves anything."""

from smartlib.plots.bounds import proposition_plot, temperature_band
from smartlib.plots.intervals import interval_plot
from smartlib.plots.maps import temperature_map
from smartlib.plots.monotone import monotone_fit, monotone_plot
from smartlib.plots.ranks import critical_difference_diagram, method_matrix
from smartlib.plots.reliability import reliability_diagram
from smartlib.plots.spread import validation_spread_plot
from smartlib.plots.style import COLOURS, FREE_COLOURS, LABELS, MARKERS, colour, label, marker, style_context, use_style

__all__ = [
    "COLOURS",
    "FREE_COLOURS",
    "LABELS",
    "MARKERS",
    "colour",
    "critical_difference_diagram",
    "interval_plot",
    "label",
    "marker",
    "method_matrix",
    "monotone_fit",
    "monotone_plot",
    "proposition_plot",
    "reliability_diagram",
    "style_context",
    "temperature_band",
    "temperature_map",
    "use_style",
    "validation_spread_plot",
]
