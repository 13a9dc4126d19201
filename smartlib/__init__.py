"""smartlib: the library behind the companion to *Sample Margin-Aware Recalibration of Temperature Scaling* (SMART).

    from smartlib import SMART, load
    bundle = load("fashion/resnet")
    smart = SMART().fit(bundle.val.logits, bundle.val.labels)
    probs = smart.predict_proba(bundle.test.logits)

Names are imported when they are first used, so that ``import smartlib`` is quick.
"""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

_HOME = {
    "SMART": "calibrators",
    "TemperatureScaling": "calibrators",
    "load_calibrator": "calibrators",
    "load": "data",
    "margin": "toplabel",
    "confidence": "toplabel",
    "temperature_interval": "toplabel",
    "soft_ece": "softece",
    "certificate": "softece",
    "smooth_calibration_error": "smce",
    "evaluate": "metrics",
    "expected_calibration_error": "metrics",
    "classwise_ece": "metrics",
    "debiased_ece": "metrics",
    "sweep_ece": "metrics",
    "kde_ece": "metrics",
    "smece": "metrics",
    "negative_log_likelihood": "metrics",
    "brier_score": "metrics",
    "brier_decomposition": "metrics",
    "confidence_auroc": "metrics",
    "reliability_bins": "metrics",
    "proximity_informed_ece": "proximity",
    "noise_floor": "uncertainty",
    "compare": "comparison",
}
_MODULES = (
    "bounds",
    "calibrators",
    "comparison",
    "data",
    "hardness",
    "metrics",
    "mismatch",
    "plots",
    "proximity",
    "softece",
    "smce",
    "toplabel",
    "uncertainty",
)

__all__ = [*sorted(_HOME), *_MODULES]


def __getattr__(name: str):
    if name in _HOME:
        return getattr(importlib.import_module(f"smartlib.{_HOME[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"smartlib.{name}")
    raise AttributeError(f"module 'smartlib' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
