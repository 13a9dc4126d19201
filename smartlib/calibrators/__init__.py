"""Calibrators by name: ``create("smart")``, ``names()``.

| name | calibrator | parameters learned | keeps predictions | source |
|---|---|---|---|---|
| ts | temperature scaling | 1 | yes | Guo et al. 2017 |
| smart | SMART | 49 | yes | the paper |
"""

from __future__ import annotations

from typing import Any

from smartlib.calibrators.base import CalibrationWarning, Calibrator, load_calibrator
from smartlib.calibrators.binning import BBQ, HistogramBinning, IsotonicCalibration
from smartlib.calibrators.classwise import ClassWiseTemperatureScaling
from smartlib.calibrators.clipping import FeatureClipping
from smartlib.calibrators.ensemble import EnsembleTemperatureScaling
from smartlib.calibrators.groups import GroupCalibration
from smartlib.calibrators.linear import DirichletCalibration, VectorScaling
from smartlib.calibrators.parameterised import ParameterisedTemperatureScaling
from smartlib.calibrators.procal import ProCal
from smartlib.calibrators.scaling import TemperatureScaling
from smartlib.calibrators.smart import SMART
from smartlib.calibrators.spline import SplineCalibration

_CLASSES = (
    TemperatureScaling,
    VectorScaling,
    EnsembleTemperatureScaling,
    ParameterisedTemperatureScaling,
    ClassWiseTemperatureScaling,
    SplineCalibration,
    HistogramBinning,
    IsotonicCalibration,
    BBQ,
    DirichletCalibration,
    GroupCalibration,
    ProCal,
    FeatureClipping,
    SMART,
)
_REGISTRY = {cls.registry_name: cls for cls in _CLASSES}

__all__ = [
    *(cls.__name__ for cls in _CLASSES),
    "CalibrationWarning",
    "Calibrator",
    "create",
    "load_calibrator",
    "names",
]


def names() -> tuple[str, ...]:
    """The registered names, in the order in which tables show them."""
    return tuple(_REGISTRY)


def create(name: str, **settings: Any) -> Calibrator:
    """Create a calibrator by its registered name.

    Args:
        name: one of :func:`names`. settings: constructor arguments.

    Returns:
        An unfitted calibrator.

    Raises:
        ValueError: an unknown name; the message lists the known ones.
        TypeError: an unknown setting.

    >>> create("smart").n_parameters
    49
    """
    if name not in _REGISTRY:
        raise ValueError(f"unknown calibrator {name!r}; known: {', '.join(_REGISTRY)}")
    return _REGISTRY[name](**settings)
