"""Feature clipping: C by hand and by a direct search, the check of the head, degenerate data, memory, saving."""

import tracemalloc
import warnings

import numpy as np
import pytest
import torch
from scipy.special import softmax
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from threadpoolctl import threadpool_limits

import smartlib
from smartlib import arrays, evaluate, expected_calibration_error, load_calibrator
from smartlib.calibrators import CalibrationWarning
from smartlib.calibrators.clipping import FeatureClipping

IDENTITY = np.eye(2), np.zeros(2)


def network(n=500, k=5, d=8, seed=0, temperature=1.0):
    """Features, a head, its logits, and labels drawn from softmax(logits / temperature)."""
    rng = np.random.default_rng(seed)
    head = np.random.default_rng(99).normal(size=(k, d)), np.linspace(-0.3, 0.3, k)
    features = rng.normal(size=(n, d))
    logits = features @ head[0].T + head[1]
    probs = softmax(logits / temperature, axis=1)
    labels = (probs.cumsum(axis=1) < rng.random((n, 1))).sum(axis=1)
    return logits, labels, features, head


def fit(logits, labels, features, head, **options):
    """The fitted calibrator and the texts of its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fc = FeatureClipping().fit(logits, labels, features=features, head=head, **options)
    assert all(issubclass(w.category, CalibrationWarning) for w in caught)
    return fc, [str(w.message) for w in caught]


# --- the right C --------------------------------------------------------------------------------------------------


def test_by_hand_the_clip_makes_the_confidence_the_accuracy():
    """Logits (C, 0) for rows (4, 0): confidence 1 / (1 + exp(−C)), accuracy ¾, so C = log 3 = 1.0986. On the grid
    4 · 2^(−j/32) that lies between j = 59, C = 1.114, and j = 60, C = 1.091, whose confidence .7484 is the nearer."""
    features = np.array([[4.0, 0.0], [0.0, 4.0], [4.0, 0.0], [4.0, 0.0]])
    fc, texts = fit(features, [0, 1, 1, 0], features, IDENTITY)
    assert texts == []
    assert fc.clip_ == pytest.approx(4 * 2 ** (-60 / 32), rel=1e-12)
    confidence = 1 / (1 + np.exp(-fc.clip_))
    assert confidence == pytest.approx(0.7484, abs=1e-4)
    assert fc.ece_ == pytest.approx(0.75 - confidence, abs=1e-12)
    assert fc.accuracy_ == 0.75
    np.testing.assert_allclose(
        fc.predict_proba(features[:2], features=features[:2]),
        [[confidence, 1 - confidence], [1 - confidence, confidence]],
        rtol=1e-12,
    )
    assert fc.n_parameters == 1


def test_features_are_clamped_from_below_too():
    """Rows (4, −4): logits (C, −C), so that C is half of that above, log(3) / 2: nearest are j = 91 and 92."""
    features = np.array([[4.0, -4.0], [-4.0, 4.0], [4.0, -4.0], [4.0, -4.0]])
    fc, _ = fit(features, [0, 1, 1, 0], features, IDENTITY)
    assert fc.clip_ == pytest.approx(4 * 2 ** (-92 / 32), rel=1e-12)
    np.testing.assert_allclose(
        fc.predict_proba([[1.0, -9.0]], features=[[1.0, -9.0]]), softmax([[fc.clip_, -fc.clip_]], axis=1), rtol=1e-12
    )


def test_a_clip_that_loses_accuracy_is_not_taken_however_low_its_ece():
    """Rows (5, 3) and (3, 5), three quarters right. At C <= 3 all rows tie, the confidence is ½ and so is the
    accuracy: an ECE of zero, refused. Left is C = 3 + log 3 = 4.10: nearest are j = 9, C = 4.114, and j = 10."""
    features = np.tile([[5.0, 3.0], [3.0, 5.0]], (100, 1))
    labels = np.tile([0, 1], 100)
    labels[:50] = 1 - labels[:50]
    fc, _ = fit(features, labels, features, IDENTITY)
    assert fc.clip_ == pytest.approx(5 * 2 ** (-9 / 32), rel=1e-12)
    assert fc.accuracy_ == 0.75
    tied = np.full((200, 2), 3.0)
    confidence, correct = softmax(tied, axis=1).max(axis=1), tied.argmax(axis=1) == labels
    assert expected_calibration_error(confidence, correct) == 0 < fc.ece_


@pytest.mark.parametrize("seed", range(3))
def test_agrees_with_a_direct_search_by_torch(seed):
    logits, labels, features, head = network(seed=seed, temperature=2.5)
    fc, _ = fit(logits, labels, features, head)
    linear = torch.nn.Linear(8, 5).double()
    linear.load_state_dict({"weight": torch.tensor(head[0]), "bias": torch.tensor(head[1])})
    original, found = (logits.argmax(axis=1) == labels).mean(), []
    for j in range(60):
        clip = np.abs(features).max() * 2 ** (-j / 32)
        with torch.no_grad():
            probs = torch.softmax(linear(torch.tensor(features).clamp(-clip, clip)), dim=1).numpy()
        correct = probs.argmax(axis=1) == labels
        if correct.mean() <= 0.99 * original:
            break
        found.append((expected_calibration_error(probs.max(axis=1), correct), clip))
    assert len(found) < 59
    assert (fc.ece_, fc.clip_) == pytest.approx(min(found), rel=1e-9)


def test_it_cools_an_over_confident_network_and_keeps_the_accuracy_that_it_promises():
    """Each class has four features of its own that are large where it is predicted; one prediction in five is wrong."""
    rng = np.random.default_rng(0)
    predicted, head = rng.integers(0, 5, size=4000), (np.repeat(np.eye(5), 4, axis=1), np.zeros(5))
    features = 3 * head[0][predicted] * rng.uniform(0.5, 1.5, size=(4000, 20)) + 0.2 * rng.random((4000, 20))
    logits = features @ head[0].T
    labels = np.where(rng.random(4000) < 0.8, predicted, rng.integers(0, 5, size=4000))
    fc, _ = fit(logits, labels, features, head)
    before, probs = softmax(logits, axis=1), fc.predict_proba(logits, features=features)
    original, correct = (predicted == labels).mean(), probs.argmax(axis=1) == labels
    assert correct.mean() == fc.accuracy_ > 0.99 * original
    assert expected_calibration_error(probs.max(axis=1), correct) == pytest.approx(fc.ece_, abs=1e-12)
    assert expected_calibration_error(before.max(axis=1), before.argmax(axis=1) == labels) > 0.15
    assert fc.ece_ < 0.02


def test_it_is_nearly_the_identity_on_calibrated_data():
    logits, labels, features, head = network(5000)
    fc, _ = fit(logits, labels, features, head)
    new, _, new_features, _ = network(2000, seed=1)
    assert np.abs(fc.predict_proba(new, features=new_features) - softmax(new, axis=1)).mean() < 0.01


def test_an_under_confident_network_is_nearly_left_as_it_is():
    logits, labels, features, head = network(2000, temperature=0.4)
    fc, _ = fit(logits, labels, features, head)
    before = softmax(logits, axis=1)
    assert fc.ece_ > 0.95 * expected_calibration_error(before.max(axis=1), logits.argmax(axis=1) == labels)
    assert np.abs(fc.predict_proba(logits, features=features) - before).mean() < 0.01


@pytest.mark.parametrize("a", [1e-6, 0.5, 1e5])
def test_multiplying_the_features_and_dividing_the_head_changes_nothing(a):
    logits, labels, features, head = network(temperature=2.0)
    fc, _ = fit(logits, labels, features, head)
    scaled, _ = fit(logits, labels, a * features, (head[0] / a, head[1]))
    assert scaled.clip_ == pytest.approx(a * fc.clip_, rel=1e-9)
    np.testing.assert_allclose(
        scaled.predict_proba(logits, features=a * features), fc.predict_proba(logits, features=features), atol=1e-9
    )


def test_permuting_samples_classes_or_features_changes_nothing_else():
    logits, labels, features, head = network(temperature=2.0)
    fc, _ = fit(logits, labels, features, head)
    probs = fc.predict_proba(logits, features=features)
    rng = np.random.default_rng(0)
    order, classes, columns = rng.permutation(500), rng.permutation(5), rng.permutation(8)
    renamed, _ = fit(
        logits[order][:, classes],
        np.argsort(classes)[labels[order]],
        features[order][:, columns],
        (head[0][classes][:, columns], head[1][classes]),
    )
    assert renamed.clip_ == fc.clip_
    assert renamed.ece_ == pytest.approx(fc.ece_, abs=1e-12)
    again = renamed.predict_proba(logits[:, classes], features=features[:, columns])
    np.testing.assert_allclose(again, probs[:, classes], atol=1e-12)
    np.testing.assert_allclose(fc.predict_proba(logits[:1], features=features[:1]), probs[:1], atol=1e-12)


def test_two_fits_and_one_or_two_threads_agree():
    data, results = network(temperature=2.0), []
    for threads in (1, 2, 2):
        with threadpool_limits(threads):
            fc, _ = fit(*data)
            results.append((fc.clip_, fc.predict_proba(data[0], features=data[2])))
    assert len({clip for clip, _ in results}) == 1
    np.testing.assert_array_equal(results[1][1], results[2][1])
    np.testing.assert_allclose(results[0][1], results[1][1], atol=1e-12)


# --- probabilities ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_probabilities_have_the_type_of_the_logits_and_come_from_the_features(dtype):
    logits, labels, features, head = network(temperature=2.0)
    fc, _ = fit(logits.astype(dtype), labels, features.astype(dtype), head)
    probs = fc.predict_proba(logits.astype(dtype), features=features.astype(dtype))
    assert probs.dtype == dtype
    np.testing.assert_allclose(probs.sum(axis=1, dtype=float), 1, atol=1e-6)
    clipped = np.clip(features, -fc.clip_, fc.clip_) @ head[0].T + head[1]
    np.testing.assert_allclose(probs, softmax(clipped, axis=1), atol=1e-6)
    np.testing.assert_array_equal(
        fc.predict_proba(np.zeros((500, 5), dtype=dtype), features=features.astype(dtype)), probs
    )


def test_a_masked_class_stays_impossible():
    logits, labels, features, head = network()
    mask = np.zeros((500, 5), dtype=bool)
    mask[::3, 4] = True
    mask[0, 1:] = True
    labels = np.where(mask[np.arange(500), labels], 0, labels)
    masked = np.where(mask, -np.inf, logits)
    fc, _ = fit(masked, labels, features, head)
    probs = fc.predict_proba(masked, features=features)
    assert (probs[mask] == 0).all()
    assert probs[0, 0] == 1
    clipped = np.clip(features, -fc.clip_, fc.clip_) @ head[0].T + head[1]
    np.testing.assert_allclose(probs, softmax(np.where(mask, -np.inf, clipped), axis=1), atol=1e-12)


def test_huge_logits_stay_finite():
    logits, labels, features, head = network()
    fc, _ = fit(1e5 * logits, labels, features, (1e5 * head[0], 1e5 * head[1]))
    probs = fc.predict_proba(1e5 * logits, features=features)
    assert np.isfinite(probs).all()
    np.testing.assert_allclose(probs.sum(axis=1), 1, atol=1e-12)


def test_inputs_and_heads_of_any_kind_give_the_same_and_stay_as_they_are():
    logits, labels, features, head = network(temperature=2.0)
    fc, _ = fit(logits, labels, features, head)
    probs, kept = fc.predict_proba(logits, features=features), features.copy()
    for array in (logits, labels, features, *head):
        array.setflags(write=False)
    linear = torch.nn.Linear(8, 5).double()
    linear.load_state_dict({"weight": torch.tensor(head[0]), "bias": torch.tensor(head[1])})
    same, _ = fit(torch.tensor(logits), torch.tensor(labels), torch.tensor(features, requires_grad=True), linear)
    tensor = same.predict_proba(torch.tensor(logits), features=torch.tensor(features))
    assert isinstance(tensor, torch.Tensor)
    assert not tensor.requires_grad
    np.testing.assert_array_equal(tensor.numpy(), probs)
    strided, _ = fit(np.asfortranarray(logits), labels, np.repeat(features, 2, axis=1)[:, ::2], head)
    np.testing.assert_allclose(strided.predict_proba(logits, features=np.asfortranarray(features)), probs, atol=1e-12)
    np.testing.assert_array_equal(features, kept)
    by_probs, _ = fit(softmax(logits, axis=1), labels, features, head, from_probs=True)
    assert by_probs.clip_ == fc.clip_
    again = by_probs.predict_proba(softmax(logits, axis=1), features=features, from_probs=True)
    np.testing.assert_allclose(again, probs, atol=1e-12)
    # The learned head is a copy: the classifier may go on training.
    before = same.predict_proba(logits, features=features)
    with torch.no_grad():
        linear.weight.zero_()
    np.testing.assert_array_equal(same.predict_proba(logits, features=features), before)


def test_memory_beyond_the_output_stays_below_half_the_logits(monkeypatch):
    """50,000 × 1,000 in small: chunks of 1/64 of the input."""
    data = network(2000, k=256, d=16, temperature=2.0)
    fc, _ = fit(*data)
    at_once = fc.predict_proba(data[0], features=data[2])
    monkeypatch.setattr(arrays, "_CHUNK_NUMBERS", 2000 * 256 // 64)
    tracemalloc.start()
    try:
        chunked, _ = fit(*data)
        peak_of_fit = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        probs = fc.predict_proba(data[0], features=data[2])
        peak = tracemalloc.get_traced_memory()[1] - probs.nbytes
    finally:
        tracemalloc.stop()
    assert peak_of_fit < 0.5 * data[0].nbytes
    assert peak < 0.5 * data[0].nbytes
    assert chunked.clip_ == fc.clip_
    np.testing.assert_allclose(probs, at_once, atol=1e-12)


def test_saved_and_loaded_it_predicts_the_same_bits(tmp_path, monkeypatch):
    logits, labels, features, head = network(temperature=2.0)
    fc, _ = fit(logits, labels, features, head)
    fc.save(tmp_path / "cal.json")
    loaded = load_calibrator(tmp_path / "cal.json")
    np.testing.assert_array_equal(
        loaded.predict_proba(logits, features=features), fc.predict_proba(logits, features=features)
    )
    with pytest.raises(NotFittedError):
        clone(fc).predict_proba(logits, features=features)


def test_refitting_forgets_the_first_fit():
    first, second = network(temperature=2.0), network(300, k=3, d=4, seed=1)
    fc, _ = fit(*first)
    fc.fit(second[0], second[1], features=second[2], head=second[3])
    np.testing.assert_equal(vars(fc), vars(fit(*second)[0]))


# --- the head must belong to the logits -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda z: z + np.linspace(-50, 50, len(z))[:, None], id="a constant per row"),
        pytest.param(lambda z: (z - z.max(axis=1, keepdims=True)).astype(np.float16), id="float16"),
        pytest.param(lambda z: torch.tensor(z).bfloat16(), id="bfloat16"),
    ],
)
def test_constants_and_rounding_are_no_reason_to_refuse_a_head(change):
    logits, labels, features, head = network(temperature=2.0)
    fc, texts = fit(change(logits), labels, features, head)
    assert texts == []
    assert fc.clip_ == fit(logits, labels, features, head)[0].clip_


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda z, x, h: (z, x[::-1], h), id="another order of samples"),
        pytest.param(lambda z, x, h: (z, x, (h[0][::-1], h[1])), id="another order of classes"),
        pytest.param(lambda z, x, h: (z / 1.5, x, h), id="scaled logits"),
        pytest.param(lambda z, x, h: (z, x, (-h[0], h[1])), id="another head"),
        pytest.param(lambda z, x, h: (z, np.maximum(x, 0), h), id="other features"),
        pytest.param(lambda z, x, h: (z, x, (h[0], 3 * np.arange(5.0))), id="another bias"),
    ],
)
def test_a_head_that_does_not_give_the_logits_is_refused(change):
    logits, labels, features, head = network()
    logits, features, head = change(logits, features, head)
    with pytest.raises(ValueError, match=r"the head applied to the features does not give the logits: .* network"):
        FeatureClipping().fit(logits, labels, features=features, head=head)


def test_the_refusal_says_by_how_much_and_where():
    """Centred, the logits are (1, −1), (−1, 1), (1, −1). The head gives (0, 6) for (0, 2) in row 1, which is off by
    (−2, 2): root of a squared error of 8 over a squared spread of 6, 115 %."""
    with pytest.raises(ValueError, match=r"up to 2 \(row 1\), on average by 115% of the logits' own spread"):
        FeatureClipping().fit(
            [[3.0, 1.0], [0.0, 2.0], [3.0, 1.0]], [0, 1, 1], features=[[3, 1], [0, 6], [3, 1]], head=IDENTITY
        )


# --- too little data, and errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "logits, labels, words",
    [
        ([[2.0, 0.0]], [0], "all 1 predictions are correct"),
        ([[2.0, 0.0]], [1], "all 1 predictions are wrong"),
        ([[2.0, 0.0], [0.0, 5.0]], [0, 1], "all 2 predictions are correct"),
        ([[2.0, 0.0], [0.0, 5.0]], [1, 0], "all 2 predictions are wrong"),
        ([[2.0, 0.0], [0.0, 5.0], [1.0, 0.0]], [0, 0, 0], "every label is class 0"),
        ([[0.0, 0.0], [0.0, 0.0]], [0, 1], "all features are 0, so there is nothing to clip"),
    ],
)
def test_a_set_that_cannot_be_trusted_gives_a_finite_fit_and_a_warning_that_says_why(logits, labels, words):
    """With the identity as its head, the logits are the features."""
    fc, texts = fit(logits, labels, logits, IDENTITY)
    assert any(words in text for text in texts)
    assert np.isfinite([fc.clip_, fc.ece_, fc.accuracy_]).all()
    probs = fc.predict_proba(np.array(logits), features=logits)
    np.testing.assert_allclose(probs.sum(axis=1), 1, atol=1e-12)
    assert np.isfinite(list(evaluate(probs, labels).to_dict().values())).all()


def test_features_and_head_are_needed_and_must_fit():
    logits, labels, features, head = network(50)
    with pytest.raises(ValueError, match=r"FeatureClipping needs features=..., the \(N, D\) input"):
        FeatureClipping().fit(logits, labels, head=head)
    with pytest.raises(ValueError, match=r"FeatureClipping needs head=..., the classifier's last layer"):
        FeatureClipping().fit(logits, labels, features=features)
    with pytest.raises(ValueError, match=r"head has weight \(5, 8\) and bias \(5,\); expected \(5, 7\)"):
        FeatureClipping().fit(logits, labels, features=features[:, 1:], head=head)
    fc, _ = fit(logits, labels, features, head)
    with pytest.raises(ValueError, match=r"FeatureClipping needs features=..., the \(N, D\) input"):
        fc.predict_proba(logits)
    with pytest.raises(ValueError, match="features have 7 columns, but the calibrator was fitted on 8"):
        fc.predict_proba(logits, features=features[:, 1:])
    with pytest.raises(ValueError, match="49 rows of features for 50 rows of logits"):
        fc.predict_proba(logits, features=features[1:])
    with pytest.raises(ValueError, match="logits have 4 classes, but the calibrator was fitted on 5"):
        fc.predict_proba(logits[:, 1:], features=features)


# --- a shipped model ------------------------------------------------------------------------------------------------


def test_on_a_shipped_model_it_halves_the_ece_and_keeps_the_accuracy():
    """Fitted on one half of the validation split, judged on the other; the shipped logits are rounded to float16."""
    bundle = smartlib.load("fashion/resnet")
    logits, labels, features = bundle.val.logits, bundle.val.labels, bundle.val.features
    fc, texts = fit(logits[:5000], labels[:5000], features[:5000], bundle.head)
    assert texts == []
    after = evaluate(fc.predict_proba(logits[5000:], features=features[5000:]), labels[5000:])
    before = evaluate(softmax(logits[5000:].astype(float), axis=1), labels[5000:])
    assert after.ece < 0.5 * before.ece
    assert after.accuracy > 0.99 * before.accuracy
