"""What holds for every calibrator: its promises, its manners, and that nothing but the data decides the result."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from every_calibrator import VARIANTS, features_of, fit, learned, predict, sharpened
from scipy.special import softmax
from sklearn.base import clone
from sklearn.exceptions import NotFittedError

import smartlib
from smartlib import expected_calibration_error, load_calibrator
from smartlib.calibrators import create, names
from smartlib.metrics import top_label

# How far the probabilities may move where an iterative solver takes another path to the same minimum.
TOLERANCE = {"vs": 1e-5, "dirichlet": 2e-4, "dirichlet-l2": 2e-4, "gc": 1e-4, "pts": 1e-4, "smart": 1e-4}
# To these a constant added to a row of logits matters, as their documentation says.
ABSOLUTE = ("vs", "pts", "smart-max-logit", "smart-energy")


def tolerance(name):
    return TOLERANCE.get(name, TOLERANCE["smart"] if name.startswith("smart") else 1e-9)


@pytest.fixture(params=VARIANTS)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def fitted():
    """Each variant fitted once on the same over-confident data."""
    known = {}

    def get(name):
        if name not in known:
            known[name] = fit(VARIANTS[name], *sharpened(n=2000))[0]
        return known[name]

    return get


def test_probabilities_are_probabilities_and_predictions_are_kept_where_promised(name, fitted):
    logits, _ = sharpened(n=5000, seed=1)
    probs = predict(fitted(name), logits)
    assert (probs >= 0).all()
    np.testing.assert_allclose(probs.sum(axis=1), 1, atol=1e-12)
    single = predict(fitted(name), logits.astype(np.float32))
    assert single.dtype == np.float32
    np.testing.assert_allclose(single.sum(axis=1, dtype=np.float64), 1, atol=1e-6)
    if fitted(name).keeps_predictions:
        np.testing.assert_array_equal(probs.argmax(axis=1), logits.argmax(axis=1))
        np.testing.assert_array_equal(single.argmax(axis=1), logits.astype(np.float32).argmax(axis=1))
    else:
        assert 0.9 < (probs.argmax(axis=1) == logits.argmax(axis=1)).mean()


def test_overconfidence_is_repaired_on_fresh_data(name, fitted):
    logits, labels = sharpened(n=5000, seed=1)
    before = expected_calibration_error(*top_label(softmax(logits, axis=1), labels))
    after = expected_calibration_error(*top_label(predict(fitted(name), logits), labels))
    assert before > 0.09
    # Feature clipping cannot shrink a confidence whose features lie inside the limits.
    assert after < (0.9 if name == "fc" else 0.5) * before


def test_calibrated_data_stay_nearly_as_they_are(name):
    logits, labels = sharpened(n=5000, scale=1.0)
    calibrator, _ = fit(VARIANTS[name], logits, labels)
    fresh, labels = sharpened(n=5000, scale=1.0, seed=1)
    before, after = softmax(fresh, axis=1), predict(calibrator, fresh)
    # A fit on 5,000 samples has noise, most where five isotonic regressions share them.
    assert np.abs(after.max(axis=1) - before.max(axis=1)).mean() < (0.04 if name == "procal-isotonic" else 0.025)
    assert expected_calibration_error(*top_label(after, labels)) < 0.03


def test_two_fits_give_the_same_result_and_no_global_random_state_is_touched(name):
    data = sharpened()
    random.seed(3), np.random.seed(3), torch.manual_seed(3)  # noqa: NPY002
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
    first, second = (fit(VARIANTS[name], *data)[0] for _ in range(2))
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
    assert before == after
    assert learned(first) == learned(second)
    np.testing.assert_array_equal(predict(first, data[0]), predict(second, data[0]))


def test_the_order_of_the_samples_does_not_matter(name, fitted):
    if name == "dirichlet" or name == "dirichlet-l2":
        pytest.skip("cross-validation splits the samples by their order")
    logits, labels = sharpened(n=2000)
    order = np.random.default_rng(0).permutation(2000)
    other, _ = fit(VARIANTS[name], logits[order], labels[order])
    fresh, _ = sharpened(seed=1)
    np.testing.assert_allclose(predict(other, fresh), predict(fitted(name), fresh), atol=tolerance(name))
    np.testing.assert_allclose(predict(other, fresh[::-1])[::-1], predict(other, fresh), atol=1e-12)


def test_the_order_of_the_classes_does_not_matter(name, fitted):
    logits, labels = sharpened(n=2000)
    order = np.array([2, 0, 3, 1])
    other, _ = fit(VARIANTS[name], logits[:, order], np.argsort(order)[labels])
    fresh, _ = sharpened(seed=1)
    found = predict(other, fresh[:, order])[:, np.argsort(order)]
    if name == "gc":  # its random starts belong to columns; the average over the partitions varies a little
        assert np.abs(found - predict(fitted(name), fresh)).mean() < 0.01
    else:
        np.testing.assert_allclose(found, predict(fitted(name), fresh), atol=tolerance(name))


def test_a_constant_added_to_a_row_of_logits_changes_nothing(name, fitted):
    if name in ABSOLUTE:
        pytest.skip("not invariant, as its documentation says")
    logits, labels = sharpened(n=2000)
    constant = np.random.default_rng(5).normal(size=(2000, 1)) * 3
    moved, _ = fit(VARIANTS[name], logits + constant, labels, logits_for_features=logits)
    fresh, _ = sharpened(seed=1)
    found = predict(moved, fresh - 7, logits_for_features=fresh)
    np.testing.assert_allclose(found, predict(fitted(name), fresh), atol=max(tolerance(name), 1e-7))


def test_a_saved_calibrator_predicts_exactly_the_same(name, fitted, tmp_path):
    fitted(name).save(tmp_path / "calibrator.json")
    loaded = load_calibrator(tmp_path / "calibrator.json")
    assert type(loaded) is type(fitted(name))
    assert json.dumps(loaded.get_params()) == json.dumps(fitted(name).get_params())  # tuples are lists in JSON
    assert learned(loaded) == learned(fitted(name))
    fresh, _ = sharpened(seed=1)
    np.testing.assert_array_equal(predict(loaded, fresh), predict(fitted(name), fresh))


def test_the_manners_of_scikit_learn(name, fitted):
    calibrator = clone(fitted(name))
    assert calibrator.get_params() == VARIANTS[name]().get_params()
    with pytest.raises(NotFittedError):
        calibrator.predict_proba(sharpened()[0])
    assert create(calibrator.registry_name).registry_name == calibrator.registry_name
    assert calibrator.registry_name == name.split("-")[0]


def test_a_second_fit_forgets_the_first(name):
    calibrator = VARIANTS[name]()
    logits, labels = sharpened(k=4)
    fit(lambda: calibrator, *sharpened(k=6, seed=2))
    fit(lambda: calibrator, logits, labels)
    assert learned(calibrator) == learned(fit(VARIANTS[name], logits, labels)[0])


def test_what_is_needed_is_asked_for(name):
    calibrator, (logits, labels) = VARIANTS[name](), sharpened()
    for missing in calibrator.needs:
        given = {"features": features_of(logits), "head": (np.eye(4), np.zeros(4))} | {missing: None}
        with pytest.raises(ValueError, match=f"needs {missing}="):
            calibrator.fit(logits, labels, **given)
    if "features" in calibrator.needs:
        fitted, _ = fit(VARIANTS[name], logits, labels)
        with pytest.raises(ValueError, match="needs features="):
            fitted.predict_proba(logits)
        with pytest.raises(ValueError, match="features have 3 columns, but the calibrator was fitted on 4"):
            fitted.predict_proba(logits, features=features_of(logits)[:, :3])
        with pytest.raises(ValueError, match="299 rows of features for 300 rows of logits"):
            fitted.predict_proba(logits, features=features_of(logits)[1:])


@pytest.fixture(scope="module")
def by_threads(tmp_path_factory):
    """Predictions of every variant by processes with one thread and with two."""
    folder = tmp_path_factory.mktemp("threads")
    code = """if True:
        import sys
        import numpy as np
        import torch
        from every_calibrator import VARIANTS, fit, predict, sharpened
        threads, path = sys.argv[1:]
        torch.set_num_threads(int(threads))
        logits, labels = sharpened(n=3000, k=12)
        fresh, _ = sharpened(n=500, k=12, seed=1)
        np.savez(path, **{name: predict(fit(make, logits, labels)[0], fresh) for name, make in VARIANTS.items()})
    """
    results = []
    for threads in "12":
        path = folder / f"{threads}.npz"
        variables = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
        root = Path(smartlib.__file__).parents[1]
        environment = os.environ | dict.fromkeys(variables, threads)
        environment["PYTHONPATH"] = os.pathsep.join([str(root), str(Path(__file__).parent)])
        subprocess.run([sys.executable, "-c", code, threads, str(path)], check=True, env=environment)
        with np.load(path) as found:
            results.append(dict(found))
    return results


def test_one_thread_and_two_give_the_same_result(name, by_threads):
    one, two = by_threads
    np.testing.assert_allclose(one[name], two[name], atol=1e-6)


def test_the_registry_creates_each_calibrator_by_its_name():
    assert names() == ("ts", "vs", "ets", "pts", "cts", "spline", "hb", "ir", "bbq", "dirichlet", "gc", "procal", "fc",
                       "smart")  # fmt: skip
    with pytest.raises(ValueError, match=r"unknown calibrator 'platt'; known: ts, .*smart"):
        create("platt")
    with pytest.raises(TypeError, match="learning_rate"):
        create("smart", learning_rate=0.01)
