"""Calibrators by name: ``create("smart")``, ``names()``.

| name | calibrator | parameters learned | needs, beside logits and labels | keeps predictions | source |
|---|---|---|---|---|---|
| ts | temperature scaling | 1 | | yes | Guo et al. 2017 |
| vs | vector scaling | 2 K | | no | Guo et al. 2017 |
| ets | ensemble temperature scaling | 3 | | yes | Zhang et al. 2020 |
| pts | parameterised temperature scaling | 5 min(10, K) + 41 | | yes | Tomani et al. 2022 |
| cts | class-wise temperature scaling | K | | yes | Frenkel and Goldberger 2021 |
| spline | splines | 6 | | yes | Gupta et al. 2021 |
| hb | histogram binning | at most 15 | | yes | Zadrozny and Elkan 2001 |
| ir | isotonic regression | as many as the data ask for | | yes | Zadrozny and Elkan 2002 |
| bbq | Bayesian binning into quantiles | as many as the data ask for | | yes | Naeini et al. 2015 |
| dirichlet | Dirichlet calibration, ODIR or L2 | K (K + 1) | | no | Kull et al. 2019 |
| gc | group calibration | 40 (K + 1) | | yes | Yang et al. 2023 |
| procal | ProCal, density ratio or isotonic | the validation set itself | features | yes | Xiong et al. 2023 |
| fc | feature clipping | 1 | features, head | no | Tao et al. 2025 |
| smart | SMART | 49 | | yes | Guo et al. 2026 |

K is the number of classes. `spline`, `hb`, `ir`, `bbq` and `procal` change the confidence of the predicted class; the
other classes share the rest in proportion. Settings give the variants: `create("smart", hidden=(16, 16))` with 321
parameters, its `objective` and its `signal`; `create("dirichlet", regularisation="l2")`; `create("procal",
method="isotonic")`. Each class says where it departs from its source, and why.
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
