"""The paper's own row and a published one, from public logits (where they are at hand)."""

import numpy as np
import pytest

from smartlib import SMART, TemperatureScaling, certificate, evaluate, expected_calibration_error, load, noise_floor
from smartlib.calibrators.base import scaled_softmax


def public(name):
    try:
        return load(f"public/{name}")
    except ConnectionError as error:
        pytest.skip(str(error))


def ece(probs, labels):
    return expected_calibration_error(probs.max(axis=1), probs.argmax(axis=1) == labels)


@pytest.fixture(scope="module")
def resnet():
    return public("cifar10-resnet50-ce")


def test_resnet50_uncalibrated_and_temperature_scaling(resnet):
    val, test = resnet.val, resnet.test
    plain = evaluate(scaled_softmax(test.logits, 1.0), test.labels)
    assert 100 * plain.ece == pytest.approx(4.35, abs=0.02) and plain.nll == pytest.approx(0.4121, abs=5e-4)
    assert 100 * plain.adaece == pytest.approx(4.338, abs=0.02) and plain.accuracy == pytest.approx(0.9505)
    ts = TemperatureScaling().fit(val.logits, val.labels)
    scaled = evaluate(ts.predict_proba(test.logits), test.labels)
    assert ts.temperature_ == pytest.approx(2.4975, abs=1e-3)
    assert 100 * scaled.ece == pytest.approx(1.37, abs=0.05) and scaled.nll == pytest.approx(0.2038, abs=5e-4)


def test_resnet50_smart_default_solver(resnet):
    smart = SMART().fit(resnet.val.logits, resnet.val.labels)
    probs = smart.predict_proba(resnet.test.logits)
    judged = evaluate(probs, resnet.test.labels)
    assert 100 * judged.ece <= 0.95 and judged.nll <= 0.215
    assert np.array_equal(probs.argmax(axis=1), resnet.test.logits.argmax(axis=1))
    floor, _ = noise_floor(probs, n_resamples=200)
    assert 100 * floor == pytest.approx(0.46, abs=0.06)


def test_resnet50_smart_by_the_papers_recipe(resnet):
    errors = []
    for seed in range(5):
        smart = SMART(solver="adam", seed=seed).fit(resnet.val.logits, resnet.val.labels)
        errors.append(ece(smart.predict_proba(resnet.test.logits), resnet.test.labels))
    assert 0.65 <= 100 * np.mean(errors) <= 0.95, "the paper reports .764"


def test_the_papers_bound_is_vacuous_and_the_sharper_one_is_not(resnet):
    """At M = 15, lambda = .05: H + 2B is more than the ECE before calibration; the sharper bound is useful."""
    smart = SMART().fit(resnet.val.logits, resnet.val.labels)
    probs = smart.predict_proba(resnet.test.logits)
    terms = certificate(probs.max(axis=1), probs.argmax(axis=1) == resnet.test.labels)
    assert terms.paper_bound == pytest.approx(0.0945, abs=0.003)
    assert terms.smce < 0.008 and terms.smce <= terms.bound < 0.02


def test_densenet40_agrees_with_the_published_values():
    bundle = public("cifar10-densenet40")
    assert 100 * ece(scaled_softmax(bundle.test.logits, 1.0), bundle.test.labels) == pytest.approx(5.500, abs=0.001)
    ts = TemperatureScaling().fit(bundle.val.logits, bundle.val.labels)
    assert ts.temperature_ == pytest.approx(2.883, abs=0.001)
    scaled = evaluate(ts.predict_proba(bundle.test.logits), bundle.test.labels)
    assert 100 * scaled.ece == pytest.approx(0.946, abs=0.001) and scaled.nll == pytest.approx(0.2251, abs=1e-4)
