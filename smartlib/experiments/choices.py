"""Experiments inside a validation set, on which the method's own settings are chosen.

The validation samples are halved at random: one half plays the validation set, the other the test set. No test
split is read here, so that what is chosen here can be judged there.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from sklearn.exceptions import ConvergenceWarning

from smartlib.calibrators import CalibrationWarning, Calibrator
from smartlib.data import load
from smartlib.metrics import evaluate


def held_out_table(
    bundles: Sequence[str],
    calibrators: Mapping[str, Calibrator],
    *,
    n_splits: int = 5,
    sizes: Sequence[int | None] = (None,),
) -> pd.DataFrame:
    """Fit on one random half of the validation split, judge on the other.

    Args:
        bundles: names for `smartlib.load`.
        calibrators: unfitted calibrators by the name that the table shows.
        n_splits: random halvings (seeds 0, 1, ...).
        sizes: use only the first so many samples of the fitting half; None uses it all.

    Returns:
        One row per bundle, halving, size and calibrator: bundle, split, size, n_errors (in the fitting part), method,
        objective and n_iter where the calibrator has them, ece, smce, nll of the other half (fractions, nats), and
        seconds.

    Source: ours.
    """
    rows = []
    for name in bundles:
        validation = load(name).val
        n = len(validation.labels)
        for split in range(n_splits):
            order = np.random.default_rng(split).permutation(n)
            fitting, held_out = order[: n // 2], order[n // 2 :]
            for size in sizes:
                part = fitting[:size]
                for method, calibrator in calibrators.items():
                    start = time.perf_counter()
                    with warnings.catch_warnings():  # doubtful fits are what some of these experiments are about
                        warnings.simplefilter("ignore", CalibrationWarning)
                        warnings.simplefilter("ignore", ConvergenceWarning)
                        calibrator.fit(validation.logits[part], validation.labels[part])
                        seconds = time.perf_counter() - start
                        probs = calibrator.predict_proba(validation.logits[held_out])
                    judged = evaluate(probs, validation.labels[held_out])
                    rows.append(
                        {
                            "bundle": name, "split": split, "size": len(part), "n_errors": calibrator.n_errors_,
                            "method": method, "objective": getattr(calibrator, "objective_", np.nan),
                            "n_iter": getattr(calibrator, "n_iter_", np.nan), "ece": judged.ece,
                            "smce": judged.smce, "nll": judged.nll, "seconds": seconds,
                        }
                    )  # fmt: skip
    return pd.DataFrame(rows)
