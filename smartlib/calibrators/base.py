"""What all calibrators share: checks, scikit-learn manners, saving and loading as JSON.

A calibrator is fitted on validation logits and labels, then maps logits of the same classifier to probabilities.
Settings are constructor arguments (`get_params`, `set_params`, `clone` work); everything learned is an attribute whose
name ends in an underscore, and these are what `save` writes.
"""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted

import smartlib
from smartlib.arrays import as_labels, as_logits, check_label_logits, like, row_chunks, to_numpy

_FORMAT = "smartlib calibrator"


class CalibrationWarning(UserWarning):
    """A fit or a prediction that should not be trusted without a look; the text says why."""


class Calibrator(BaseEstimator):
    """Base class. Subclasses define ``_fit`` and ``_predict_proba`` on checked arrays."""

    registry_name: str
    """Name under which `smartlib.calibrators.create` knows the class."""
    learned: tuple[str, ...] = ()
    """Names of the learned values without which a prediction is impossible; a saved file must hold them."""

    def fit(self, logits: Any, labels: Any, *, features: Any = None, head: Any = None, from_probs: bool = False):
        """Fit on validation data.

        Args:
            logits: (N, K); with ``from_probs`` rows of probabilities.
            labels: (N,) class indices.
            features: (N, D) penultimate features, for the calibrators that use them.
            head: the classifier's last layer, for the calibrators that use it.
            from_probs: take the logarithm of ``logits`` first.

        Returns:
            The calibrator itself.

        Raises:
            ValueError: bad arrays (see `smartlib.arrays`), or a label whose own logit is -inf.

        Warns:
            CalibrationWarning: the data cannot determine the fit (no or few errors, a single class, a bound hit).
            sklearn.exceptions.ConvergenceWarning: a solver stopped at its iteration limit.
        """
        z = as_logits(logits, from_probs=from_probs)
        y = as_labels(labels, *z.shape)
        check_label_logits(z, y)
        self.n_classes_ = z.shape[1]
        self.n_samples_, self.n_errors_ = len(y), int((z.argmax(axis=1) != y).sum())
        self._warn_about_data(y)
        self._fit(z, y, features=features, head=head)
        return self

    def predict_proba(self, logits: Any, *, features: Any = None, from_probs: bool = False) -> Any:
        """Calibrated probabilities.

        Args:
            logits: (N, K) of the same classifier.
            features: (N, D), for the calibrators that use them.
            from_probs: take the logarithm of ``logits`` first.

        Returns:
            (N, K) of the input's kind and device; float32 for float32 and narrower input, float64 otherwise.

        Raises:
            sklearn.exceptions.NotFittedError: before ``fit``.
            ValueError: bad arrays, or another K than at the fit.
        """
        z = self._checked_logits(logits, from_probs)
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
        predicted = z[rows].argmax(axis=1)
        p = z[rows].astype(np.float64) - z[rows].max(axis=1, keepdims=True)
        p /= t[rows, None]
        np.exp(p, out=p)
        p /= p.sum(axis=1, keepdims=True)
        result[rows] = p
        # Two logits that differ in the last digit can round to the same probability; then the lower index would win.
        tied = np.flatnonzero(result[rows].argmax(axis=1) != predicted)
        if tied.size:
            index = (tied + rows.start, predicted[tied])
            result[index] = np.nextafter(result[index], dtype(2))
    return result


def warn(text: str, category: type[Warning] = CalibrationWarning) -> None:
    """Give a warning that points at the user's line, four calls up: warn, _fit or a helper, fit, the user."""
    warnings.warn(text, category, stacklevel=4)


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {"array": value.tolist(), "dtype": str(value.dtype)}
    return value.item() if isinstance(value, np.generic) else value


def _decode(value: Any) -> Any:
    if isinstance(value, dict) and set(value) == {"array", "dtype"}:
        return np.asarray(value["array"], dtype=np.dtype(value["dtype"]))
    return value
