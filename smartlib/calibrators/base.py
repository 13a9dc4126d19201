"""What all calibrators share: checks, scikit-learn manners, saving and loading as JSON.

A calibrator is fitted on validation logits and labels, then maps logits of the same classifier to probabilities. Two
families have a base class of their own: those that divide each row by a temperature (`TemperatureCalibrator`), and
those that correct the top-label confidence (`ConfidenceCalibrator`). Both keep every prediction.

Settings are constructor arguments (`get_params`, `set_params`, `clone` work); everything learned is an attribute whose
name ends in an underscore, and these are what `save` writes.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted

import smartlib
from smartlib.arrays import (
    as_features,
    as_head,
    as_labels,
    as_logits,
    check_label_logits,
    like,
    row_chunks,
    to_numpy,
)
from smartlib.toplabel import confidence_of

_FORMAT = "smartlib calibrator"


class CalibrationWarning(UserWarning):
    """A fit or a prediction that should not be trusted without a look; the text says why."""


class Calibrator(BaseEstimator):
    """Base class. Subclasses define ``_fit`` and ``_predict_proba`` on checked arrays."""

    registry_name: str
    """Name under which `smartlib.calibrators.create` knows the class."""
    n_parameters: int
    """How many numbers the fit learns. Where that depends on the data, it is known after the fit."""
    needs: tuple[str, ...] = ()
    """What it needs beside logits and labels: "features", "head". What it does not need is ignored."""
    keeps_predictions = True
    """Whether the predicted class of every row stays the same, whatever the data."""
    learned: tuple[str, ...] = ()
    """Names of the learned values without which a prediction is impossible; a saved file must hold them."""

    def fit(self, logits: Any, labels: Any, *, features: Any = None, head: Any = None, from_probs: bool = False):
        """Fit on validation data.

        Args:
            logits: (N, K); with ``from_probs`` rows of probabilities.
            labels: (N,) class indices.
            features: (N, D) input of the classifier's last layer, for the calibrators that need it.
            head: the classifier's last layer, for the calibrators that need it: anything with ``weight`` (K, D) and
                ``bias`` (K,), or a pair of the two.
            from_probs: take the logarithm of ``logits`` first.

        Returns:
            The calibrator itself.

        Raises:
            ValueError: bad arrays (see `smartlib.arrays`), a label whose own logit is -inf, or features or head
                missing where they are needed.

        Warns:
            CalibrationWarning: the data cannot determine the fit (no or few errors, a single class, a bound hit).
            sklearn.exceptions.ConvergenceWarning: a solver stopped at its iteration limit.
        """
        z = as_logits(logits, from_probs=from_probs)
        y = as_labels(labels, *z.shape)
        check_label_logits(z, y)
        features = self._checked_features(features, len(y))
        if "head" in self.needs:
            if head is None:
                raise ValueError(f"{type(self).__name__} needs head=..., the classifier's last layer (weight, bias)")
            head = as_head(head, z.shape[1], features.shape[1])
        if features is not None:
            self.n_features_ = features.shape[1]
        self.n_classes_ = z.shape[1]
        self.n_samples_, self.n_errors_ = len(y), int((z.argmax(axis=1) != y).sum())
        self._warn_about_data(y)
        self._fit(z, y, features=features, head=head)
        return self

    def predict_proba(self, logits: Any, *, features: Any = None, from_probs: bool = False) -> Any:
        """Calibrated probabilities.

        Args:
            logits: (N, K) of the same classifier.
            features: (N, D) of the same samples, for the calibrators that need them.
            from_probs: take the logarithm of ``logits`` first.

        Returns:
            (N, K) of the input's kind and device; float32 for float32 and narrower input, float64 otherwise.

        Raises:
            sklearn.exceptions.NotFittedError: before ``fit``.
            ValueError: bad arrays, another K (or D) than at the fit, or features missing where they are needed.
        """
        z = self._checked_logits(logits, from_probs)
        features = self._checked_features(features, len(z))
        if features is not None and features.shape[1] != self.n_features_:
            raise ValueError(
                f"features have {features.shape[1]} columns, but the calibrator was fitted on {self.n_features_}"
            )
        given = to_numpy(logits).dtype  # log-probabilities of float32 rows are float64
        single = given.kind == "f" and given.itemsize <= 4
        probs = self._predict_proba(z, np.float32 if single else np.float64, features=features)
        return like(probs, logits)

    def _checked_logits(self, logits: Any, from_probs: bool) -> np.ndarray:
        check_is_fitted(self, self.learned)
        z = as_logits(logits, from_probs=from_probs)
        if z.shape[1] != self.n_classes_:
            raise ValueError(f"logits have {z.shape[1]} classes, but the calibrator was fitted on {self.n_classes_}")
        return z

    def _checked_features(self, features: Any, n: int) -> np.ndarray | None:
        if "features" not in self.needs:
            return None
        if features is None:
            raise ValueError(
                f"{type(self).__name__} needs features=..., the (N, D) input of the classifier's last layer"
            )
        return as_features(features, n)

    def _warn_about_data(self, y: np.ndarray) -> None:
        name = type(self).__name__
        if self.n_errors_ == 0:
            warn(f"{name}: all {len(y)} predictions are correct, so nothing says how confident is too confident; "
                 "the fit only makes the model more confident. Use more validation data.")  # fmt: skip
        elif self.n_errors_ == len(y):
            warn(f"{name}: all {len(y)} predictions are wrong; check that labels and logits belong together.")
        if len(y) > 1 and np.all(y == y[0]):
            warn(f"{name}: every label is class {y[0]}; a validation set of one class does not represent the others.")

    def _fit(self, z: np.ndarray, y: np.ndarray, *, features: Any, head: Any) -> None:
        raise NotImplementedError

    def _predict_proba(self, z: np.ndarray, dtype: type, *, features: Any) -> np.ndarray:
        raise NotImplementedError

    def save(self, path: str | os.PathLike) -> None:
        """Write settings and learned values as JSON (never pickle), atomically.

        Raises:
            sklearn.exceptions.NotFittedError: before ``fit``.
        """
        check_is_fitted(self, self.learned)
        content = {
            "format": _FORMAT,
            "smartlib": smartlib.__version__,
            "calibrator": self.registry_name,
            "settings": {name: _encode(value) for name, value in self.get_params().items()},
            "learned": {name: _encode(value) for name, value in sorted(vars(self).items()) if name.endswith("_")},
        }
        path = Path(path)
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, path)


def load_calibrator(path: str | os.PathLike) -> Calibrator:
    """Load a calibrator that `Calibrator.save` wrote. Runs no code from the file.

    Args:
        path: JSON file.

    Returns:
        The fitted calibrator; its predictions equal those of the saved one exactly.

    Raises:
        ValueError: not JSON, not a calibrator, an unknown calibrator, unknown settings or a damaged file.
    """
    from smartlib.calibrators import create

    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a JSON file: {error}") from None
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise ValueError(f'{path} is not a saved calibrator (no "format": "{_FORMAT}")')
    try:
        calibrator = create(content["calibrator"], **content["settings"])
        learned = {name: _decode(value) for name, value in content["learned"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is a damaged calibrator file or one of another version: {error}") from None
    missing = [name for name in ("n_classes_", *calibrator.learned) if name not in learned]
    if missing:
        raise ValueError(f"{path} is a damaged calibrator file: it lacks {', '.join(missing)}")
    for name, value in learned.items():
        if not name.endswith("_") or name.startswith("_"):
            raise ValueError(f"{path}: {name!r} is not the name of a learned value")
        setattr(calibrator, name, value)
    return calibrator


class TemperatureCalibrator(Calibrator):
    """A calibrator that divides each row by a positive temperature, and so keeps every prediction.

    Subclasses define ``_fit`` and ``_temperatures``.
    """

    def temperatures(self, logits: Any, *, from_probs: bool = False) -> Any:
        """Temperature of each row.

        Args:
            logits: (N, K). from_probs: take the logarithm of ``logits`` first.

        Returns:
            (N,) float64, dimensionless, > 0, of the input's kind and device.

        Raises:
            sklearn.exceptions.NotFittedError: before ``fit``.
            ValueError: bad arrays, or another K than at the fit.
        """
        return like(self._temperatures(self._checked_logits(logits, from_probs)), logits)

    def _temperatures(self, z: np.ndarray) -> np.ndarray:
        raise NotImplementedError

    def _predict_proba(self, z: np.ndarray, dtype: type, *, features: Any) -> np.ndarray:
        return scaled_softmax(z, self._temperatures(z), dtype)


def scaled_softmax(z: np.ndarray, t: np.ndarray | float, dtype: type = np.float64) -> np.ndarray:
    """softmax(z / t) row by row; the arg max of each row is that of ``z``, whatever the rounding.

    Args:
        z: (N, K) checked logits. t: scalar or (N,), > 0. dtype: of the result.

    Returns:
        (N, K).
    """
    t = np.broadcast_to(t, len(z))
    result = np.empty(z.shape, dtype=dtype)
    for rows in row_chunks(*z.shape):
        p = z[rows].astype(np.float64) - z[rows].max(axis=1, keepdims=True)
        with np.errstate(over="ignore"):  # a class masked by the lowest number there is, at T < 1
            p /= t[rows, None]
        np.exp(p, out=p)
        p /= p.sum(axis=1, keepdims=True)
        result[rows] = p
        keep_predictions(result[rows], z[rows].argmax(axis=1))
    return result


class ConfidenceCalibrator(Calibrator):
    """A calibrator that maps the top-label confidence to a better one; the other classes share the rest.

    Subclasses define ``_fit_confidence`` and ``_confidence`` on the confidences softmax(z)_(1), (N,) float64.
    """

    def _fit(self, z: np.ndarray, y: np.ndarray, *, features: Any, head: Any) -> None:
        self._fit_confidence(confidence_of(z, 1.0), (z.argmax(axis=1) == y).astype(np.float64))

    def _predict_proba(self, z: np.ndarray, dtype: type, *, features: Any) -> np.ndarray:
        return with_confidence(z, self._confidence(confidence_of(z, 1.0)), dtype)

    def _fit_confidence(self, f: np.ndarray, correct: np.ndarray) -> None:
        raise NotImplementedError

    def _confidence(self, f: np.ndarray) -> np.ndarray:
        raise NotImplementedError


def with_confidence(z: np.ndarray, confidence: np.ndarray, dtype: type = np.float64) -> np.ndarray:
    """softmax(z) with another top-label confidence; the other classes share the rest in proportion.

    A confidence below 1/K is raised to 1/K, since no largest probability can be smaller. Where the second class would
    overtake the first, the shares of the others are drawn towards equal ones, just so far that it does not: the shares
    of those that have any, and where that cannot do, of all whose logit is finite. So a class that a number like -1e9
    masks stays at 0 as long as it can.

    Args:
        z: (N, K) checked logits. confidence: (N,) in [0, 1]. dtype: of the result.

    Returns:
        (N, K); the arg max of each row is that of ``z``. A class with logit -inf keeps probability 0, and a row whose
        other classes all are such keeps confidence 1.

    Source: ours.
    """
    result = np.empty(z.shape, dtype=dtype)
    for rows in row_chunks(*z.shape):
        share, first = z[rows].astype(np.float64), z[rows].argmax(axis=1)
        top = np.arange(len(share)), first
        share[top] = -np.inf
        possible = np.isfinite(share)
        second = share.max(axis=1, keepdims=True)
        np.subtract(share, second, out=share, where=np.isfinite(second))
        np.exp(share, out=share)
        share /= np.maximum(share.sum(axis=1, keepdims=True), 1.0)
        c = np.maximum(confidence[rows], 1 / (1 + possible.sum(axis=1)))
        present = share > 0
        possible = np.where((c < 1 / (1 + present.sum(axis=1)))[:, None], possible, present)
        largest, equal = share.max(axis=1), 1 / np.maximum(possible.sum(axis=1), 1)
        over = np.flatnonzero((1 - c) * largest > c)
        if over.size:
            # (1 - c) ((1 - a) largest + a equal) = c
            a = (largest[over] - c[over] / (1 - c[over])) / np.maximum(largest[over] - equal[over], 1e-300)
            a = np.clip(a, 0.0, 1.0)[:, None]
            share[over] = (1 - a) * share[over] + a * equal[over, None] * possible[over]
        share *= (1 - c)[:, None]
        share[top] = c
        result[rows] = share
        keep_predictions(result[rows], first)
    return result


def keep_predictions(probs: np.ndarray, predicted: np.ndarray) -> None:
    """Raise the predicted entry of each row by a last digit where rounding made another one as large; in place."""
    tied = np.flatnonzero(probs.argmax(axis=1) != predicted)
    if tied.size:
        index = tied, predicted[tied]
        probs[index] = np.nextafter(probs[tied].max(axis=1), probs.dtype.type(2))


def warn(text: str, category: type[Warning] = CalibrationWarning) -> None:
    """Give a warning that points at the user's line: the first one outside of the calibrators."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("smartlib.calibrators"):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {"array": value.tolist(), "dtype": str(value.dtype)}
    return value.item() if isinstance(value, np.generic) else value


def _decode(value: Any) -> Any:
    if isinstance(value, dict) and set(value) == {"array", "dtype"}:
        return np.asarray(value["array"], dtype=np.dtype(value["dtype"]))
    return value
