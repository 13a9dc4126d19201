"""The hardness signals: hand-computed values, invariances, limits, and oracles."""

import numpy as np
import pytest
import torch
from scipy.special import logsumexp, softmax
from scipy.stats import entropy

from smartlib import arrays, margin
from smartlib.hardness import SIGNALS, hardness

INF = np.inf


def rows(n=300, k=6, seed=0):
    return 3 * np.random.default_rng(seed).normal(size=(n, k))


HAND = {
    # logits (log 2, 0, 0): probabilities 1/2, 1/4, 1/4; margin log 2.
    "margin": np.log(2),
    "max_logit": np.log(2),
    "confidence": 1 / 2,
    "entropy": 1.5 * np.log(2),  # 1/2 log 2 + 2 (1/4 log 4)
    "energy": -2 * np.log(2),  # -log(2 + 1 + 1)
    "soft_tail_margin": 0.8 * np.log(2),  # log 2 - (1/5) log(1 + 1)
}


@pytest.mark.parametrize("signal", SIGNALS)
def test_a_row_that_can_be_computed_by_hand(signal):
    assert hardness([[np.log(2), 0, 0], [0, np.log(2), 0]], signal) == pytest.approx([HAND[signal]] * 2, rel=1e-14)


def test_every_signal_agrees_with_its_formula_written_out():
    z = rows()
    descending = np.sort(z, axis=1)[:, ::-1]
    expected = {
        "margin": descending[:, 0] - descending[:, 1],
        "max_logit": descending[:, 0],
        "confidence": softmax(z, axis=1).max(axis=1),
        "entropy": entropy(softmax(z, axis=1), axis=1),
        "energy": -logsumexp(z, axis=1),
        "soft_tail_margin": descending[:, 0] - logsumexp(5 * descending[:, 1:], axis=1) / 5,
    }
    assert set(expected) == set(SIGNALS)
    for signal, values in expected.items():
        np.testing.assert_allclose(hardness(z, signal), values, rtol=1e-12, atol=1e-13)


def test_the_margin_is_the_default_and_the_soft_tail_margin_is_below_it():
    z = rows()
    np.testing.assert_array_equal(hardness(z), margin(z))
    below = margin(z) - hardness(z, "soft_tail_margin")
    assert (below >= 0).all() and (below <= np.log(5) / 5 + 1e-12).all()  # K - 1 = 5 runners-up that all tie
    np.testing.assert_allclose(hardness(z[:, :2], "soft_tail_margin"), margin(z[:, :2]), rtol=1e-12)


@pytest.mark.parametrize("signal", SIGNALS)
def test_a_constant_added_to_a_row_changes_the_maximum_logit_and_the_energy_only(signal):
    z = rows()
    shift = np.random.default_rng(1).normal(size=(len(z), 1))
    moved = hardness(z + shift, signal) - hardness(z, signal)
    by = {"max_logit": shift[:, 0], "energy": -shift[:, 0]}.get(signal, 0.0)
    np.testing.assert_allclose(moved, by, atol=1e-12)
    if signal == "max_logit":
        assert (hardness(z - z.max(axis=1, keepdims=True), signal) == 0).all()


@pytest.mark.parametrize("signal", SIGNALS)
def test_the_order_of_classes_and_samples_and_the_chunks_do_not_matter(signal, monkeypatch):
    z = rows()
    at_once = hardness(z, signal)
    order = np.random.default_rng(1).permutation(len(z))
    np.testing.assert_allclose(hardness(z[order][:, ::-1], signal), at_once[order], rtol=1e-12, atol=1e-14)
    monkeypatch.setattr(arrays, "_CHUNK_NUMBERS", 50)
    np.testing.assert_allclose(hardness(z, signal), at_once, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("signal", SIGNALS)
def test_masked_classes_count_as_absent_and_a_class_alone_is_at_the_limit(signal):
    z = rows(k=4)
    masked = np.concatenate([z, np.full((len(z), 2), -INF)], axis=1)
    np.testing.assert_allclose(hardness(masked, signal), hardness(z, signal), rtol=1e-12, atol=1e-14)
    alone = hardness([[-INF, 2.0, -INF]], signal)[0]
    limit = {"margin": INF, "soft_tail_margin": INF, "max_logit": 2, "confidence": 1, "entropy": 0, "energy": -2}
    assert alone == pytest.approx(limit[signal], abs=1e-300)


@pytest.mark.parametrize("signal", SIGNALS)
@pytest.mark.parametrize("scale", [1e-30, 1e5, 1e30])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_numbers_of_every_size_stay_finite(signal, scale, dtype):
    values = hardness((scale * rows()).astype(dtype), signal)
    assert values.dtype == np.float64
    assert np.isfinite(values).all()


@pytest.mark.parametrize("signal", SIGNALS)
def test_ties_and_inputs_of_other_kinds(signal):
    tie = hardness([[1, 1, 1, 1]], signal)[0]
    expected = {"margin": 0, "max_logit": 1, "confidence": 1 / 4, "entropy": np.log(4), "energy": -1 - np.log(4),
                "soft_tail_margin": -np.log(3) / 5}  # fmt: skip
    assert tie == pytest.approx(expected[signal], abs=1e-15)
    z = rows()
    z.flags.writeable = False
    tensor = torch.tensor(z.copy(), requires_grad=True)
    on_tensor = hardness(tensor, signal)
    assert isinstance(on_tensor, torch.Tensor) and not on_tensor.requires_grad
    np.testing.assert_array_equal(on_tensor, hardness(z, signal))
    assert torch.equal(tensor.detach(), torch.tensor(z.copy()))


def test_unknown_signals_and_bad_logits_are_refused():
    with pytest.raises(ValueError, match=r"signal must be one of 'margin', 'max_logit', .*, got 'logit_norm'"):
        hardness(rows(), "logit_norm")
    with pytest.raises(ValueError, match=r"logits row 1 holds NaN"):
        hardness([[1, 2], [np.nan, 0]], "entropy")
