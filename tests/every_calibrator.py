"""Every calibrator and variant, and how the tests fit them; shared by the tests that hold for all of them."""

import warnings
from functools import partial

import numpy as np
from scipy.special import softmax

from smartlib.arrays import to_numpy
from smartlib.calibrators import CalibrationWarning, create, names

VARIANTS = {name: partial(create, name) for name in names()} | {
    "smart-adam": partial(create, "smart", solver="adam", max_iter=30),
    "smart-321": partial(create, "smart", hidden=(16, 16)),
    "smart-softece": partial(create, "smart", objective="softece"),
    "smart-nll": partial(create, "smart", objective="nll"),
    "smart-brier": partial(create, "smart", objective="brier"),
    "smart-max-logit": partial(create, "smart", signal="max_logit"),
    "smart-confidence": partial(create, "smart", signal="confidence"),
    "smart-entropy": partial(create, "smart", signal="entropy"),
    "smart-energy": partial(create, "smart", signal="energy"),
    "smart-soft-tail-margin": partial(create, "smart", signal="soft_tail_margin"),
    "hb-mass": partial(create, "hb", binning="mass"),
    "dirichlet-l2": partial(create, "dirichlet", regularisation="l2"),
    "procal-isotonic": partial(create, "procal", method="isotonic"),
}


def features_of(logits):
    """Features whose head is the identity: the logits themselves, 0 where a class is impossible."""
    z = to_numpy(logits).astype(np.float64)
    return np.where(np.isneginf(z), 0.0, z)


def needed(calibrator, logits):
    """The further arguments of ``fit`` that the calibrator needs."""
    k = np.shape(logits)[1]
    given = {"features": lambda: features_of(logits), "head": lambda: (np.eye(k), np.zeros(k))}
    return {name: given[name]() for name in calibrator.needs}


def fit(make, logits, labels, **options):
    """The fitted calibrator and the texts of its warnings by category."""
    calibrator = make()
    plain = options.pop("logits_for_features", logits)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        calibrator.fit(logits, labels, **needed(calibrator, plain), **options)
    return calibrator, [(w.category, str(w.message)) for w in caught]


def predict(calibrator, logits, **options):
    plain = options.pop("logits_for_features", logits)
    features = {"features": features_of(plain)} if "features" in calibrator.needs else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)  # margins outside the fitted range
        return calibrator.predict_proba(logits, **features, **options)


def sharpened(n=300, k=4, seed=0, scale=2.0):
    """Logits that are ``scale`` times those of a calibrated model, and labels."""
    rng = np.random.default_rng(seed)
    logits = 1.5 * rng.normal(size=(n, k))
    labels = (softmax(logits, axis=1).cumsum(axis=1) < rng.random((n, 1))).sum(axis=1)
    return scale * logits, labels


def learned(calibrator):
    """Everything that the fit learned, as plain lists."""

    def plain(value):
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        return np.asarray(value).tolist()

    return {name: plain(value) for name, value in vars(calibrator).items() if name.endswith("_")}


def numbers(value):
    """All numbers in the nested lists and dictionaries of :func:`learned`."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [number for item in value for number in numbers(item)]
    return [value] if isinstance(value, int | float) else []
