"""Bundles: the shipped arrays' storage, the public files, and loading by name."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from smartlib.data import Bundle, Head, Split, load, names, public, zoo
from smartlib.metrics import expected_calibration_error


@pytest.fixture
def arrays():
    """Logits at the scale of a trained network's: about 90 % accurate, over-confident."""
    rng = np.random.default_rng(0)
    result = {}
    for split, n in (("val", 3000), ("test", 4000)):
        labels = rng.integers(0, 10, n)
        logits = rng.normal(size=(n, 10))
        logits[np.arange(n), labels] += 3
        result[f"{split}_logits"] = (6 * logits).astype(np.float32)  # calibrated with 3 in place of 6
        result[f"{split}_labels"] = labels
        result[f"{split}_features"] = rng.normal(size=(n, 8)).astype(np.float32)
    result["head_weight"] = rng.normal(size=(10, 8)).astype(np.float32)
    result["head_bias"] = rng.normal(size=10).astype(np.float32)
    return result


def save_and_load(folder, arrays):
    zoo.save_arrays(folder, "fashion/tiny", arrays, {"seed": 3})
    return zoo.load_shipped("fashion/tiny", folder)


def with_logits(arrays, logits):
    """``arrays`` with these few rows as the validation split."""
    logits = np.asarray(logits, dtype=np.float32)
    n = len(logits)
    return arrays | {
        "val_logits": logits,
        "val_labels": np.zeros(n, dtype=np.int64),
        "val_features": arrays["val_features"][:n],
    }


# --- bundles ------------------------------------------------------------------------------------------------


def test_arrays_are_read_only_and_the_callers_stay_writable():
    logits, labels = np.eye(3), np.arange(3)
    split = Split(logits, labels)
    with pytest.raises(ValueError, match="read-only"):
        split.logits[0, 0] = 5
    logits[0, 0] = 5
    assert split.features is None
    assert not Head(np.eye(3), np.zeros(3)).weight.flags.writeable


def test_reprs_are_short():
    split = Split(np.eye(3), np.arange(3), np.ones((3, 2)))
    assert repr(split) == "Split(logits (3, 3) float64, labels (3,), features (3, 2))"
    text = repr(Bundle("a/b", split, split, Head(np.ones((3, 2)), np.zeros(3))))
    assert text.startswith("Bundle('a/b', 3 classes, val=Split(") and "Head(weight (3, 2), bias (3,))" in text


def test_shapes_that_do_not_fit():
    with pytest.raises(ValueError, match=r"shapes \(3, 3\) and \(2,\)"):
        Split(np.eye(3), np.arange(2))
    with pytest.raises(ValueError, match=r"expected features \(3, D\), found shape \(2, 5\)"):
        Split(np.eye(3), np.arange(3), np.ones((2, 5)))


def test_names_and_unknown_name(monkeypatch, tmp_path, arrays):
    zoo.save_arrays(tmp_path, "fashion/tiny", arrays, {})
    monkeypatch.setattr(zoo, "SHIPPED_FOLDER", tmp_path)
    assert names() == ("fashion/tiny", *public.FILES)
    with pytest.raises(ValueError, match="unknown bundle 'fashion/tini'; known, closest first: fashion/tiny, "):
        load("fashion/tini")
    with pytest.raises(ValueError, match="closest first: public/cifar10-resnet50-ce, "):
        load("cifar10-resnet50-ce")


@pytest.mark.parametrize("name", zoo.names())
def test_shipped_models(name):
    bundle = load(name)
    n, k = (5_000, 100) if name.startswith("fashion-pairs/") else (10_000, 10)
    assert (bundle.name, bundle.n_classes) == (name, k)
    assert bundle.val.logits.shape == bundle.test.logits.shape == (n, k)
    for split in (bundle.val, bundle.test):
        assert split.labels.dtype == np.int64
        assert set(np.unique(split.labels)) == set(range(k))
        assert (split.logits.argmax(1) == split.labels).mean() > 0.7
        if split.features is not None:
            # The head maps the features to the logits, up to float16.
            rebuilt = split.features @ bundle.head.weight.T + bundle.head.bias
            np.testing.assert_allclose(rebuilt, split.logits, atol=0.1)
    accuracy = (bundle.test.logits.argmax(1) == bundle.test.labels).mean()
    assert accuracy == pytest.approx(bundle.provenance["accuracy"]["test"], abs=1e-12)


def test_variants_are_the_splits_that_their_names_say():
    bundle = load("fashion/wideresnet")
    held_out = load("fashion/wideresnet@held-out")
    rows = np.concatenate([held_out.val.logits, held_out.test.logits])
    assert np.array_equal(np.unique(rows, axis=0), np.unique(bundle.val.logits, axis=0)), "halves of the validation set"
    skewed = load("fashion/wideresnet@long-tailed-10:clean")
    counts = np.bincount(skewed.val.labels)
    smallest = np.bincount(bundle.val.labels).min()
    assert counts.tolist() == [round(smallest * 10 ** (-k / 9)) for k in range(10)]
    assert np.array_equal(skewed.test.logits, bundle.test.logits)
    shifted = load("fashion/wideresnet@clean:occlusion-5")
    assert np.array_equal(shifted.val.logits, bundle.val.logits) and len(shifted.test.labels) == 2000
    accuracy = [
        np.mean(split.logits.argmax(1) == split.labels)
        for split in (load(f"fashion/wideresnet@clean:gaussian-noise-{s}").test for s in range(1, 6))
    ]
    assert accuracy == sorted(accuracy, reverse=True) and accuracy[0] - accuracy[-1] > 0.2


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ("half", "'half' is none of 'held-out', 'resplit-SEED' and VALIDATION:TEST"),
        ("clean:fog-3", r"has no test split 'fog-3'; known: clean, long-tailed-RATIO, gaussian-noise-1"),
        ("fog-3:clean", r"has no val split 'fog-3'"),
    ],
)
def test_an_unknown_variant_is_an_error(variant, message):
    with pytest.raises(ValueError, match=message):
        load(f"fashion/wideresnet@{variant}")


def test_importing_is_light():
    code = (
        "import sys, smartlib.data, smartlib.experiments.reported; "
        "print([m for m in ('torch', 'torchvision', 'timm', 'pandas', 'pooch', 'matplotlib') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# --- storage of the shipped arrays --------------------------------------------------------------------------


def test_storage_types(tmp_path, arrays):
    bundle = save_and_load(tmp_path, arrays)
    assert (bundle.name, bundle.n_classes) == ("fashion/tiny", 10)
    for name in ("val", "test"):
        split = getattr(bundle, name)
        assert np.array_equal(split.labels, arrays[f"{name}_labels"]) and split.labels.dtype == np.int64
        assert split.logits.dtype == np.float64 and split.features.dtype == np.float32
        np.testing.assert_allclose(split.features, arrays[f"{name}_features"], rtol=5e-4, atol=1e-7)
    assert np.array_equal(bundle.head.weight, arrays["head_weight"]) and bundle.head.weight.dtype == np.float32
    assert np.array_equal(bundle.head.bias, arrays["head_bias"])
    with np.load(tmp_path / "fashion" / "tiny.npz") as stored:
        assert {key: str(stored[key].dtype) for key in ("val_gaps", "val_max", "val_labels", "val_features")} == {
            "val_gaps": "float16", "val_max": "float32", "val_labels": "uint8", "val_features": "float16",
        }  # fmt: skip


def accuracy_and_ece(logits, labels, temperature=1.0):
    logits = logits.astype(np.float64) / temperature
    probs = np.exp(logits - logits.max(1, keepdims=True))
    correct = logits.argmax(1) == labels
    return correct.mean(), expected_calibration_error(probs.max(1) / probs.sum(1), correct)


def test_storage_changes_no_prediction_and_ece_by_less_than_a_hundredth_of_a_point(tmp_path, arrays):
    stored = save_and_load(tmp_path, arrays).test.logits
    exact, labels = arrays["test_logits"], arrays["test_labels"]
    assert np.array_equal(stored.argmax(1), exact.argmax(1))
    accuracy, ece = accuracy_and_ece(exact, labels)
    assert 0.85 < accuracy < 0.97 and ece > 0.02
    assert accuracy_and_ece(stored, labels) == (accuracy, pytest.approx(ece, abs=1e-4))


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_storage_of_real_logits(temperature):
    test = load_or_skip("public/cifar10-resnet50-ce").test
    stored = zoo._unpack_logits(*zoo._pack_logits(test.logits, "logits"))
    accuracy, ece = accuracy_and_ece(test.logits, test.labels, temperature)
    assert accuracy_and_ece(stored, test.labels, temperature) == (accuracy, pytest.approx(ece, abs=1e-4))


def test_small_margins_survive(tmp_path, arrays):
    margins = np.float32([1e-7, 1e-6, 1e-4, 1e-2, 1.0])
    # Around zero float32 can tell them apart; the larger logit comes second, where a tie would lose it.
    logits = np.stack([np.zeros(5), margins, np.full(5, -7)], axis=1).astype(np.float32)
    bundle = save_and_load(tmp_path, with_logits(arrays, logits))
    ordered = np.sort(bundle.val.logits, axis=1)
    found = ordered[:, -1] - ordered[:, -2]
    np.testing.assert_allclose(found[2:], margins[2:], rtol=1e-3)
    np.testing.assert_allclose(found[:2], margins[:2], atol=3e-8)  # half of float16's smallest step
    assert (bundle.val.logits.argmax(1) == 1).all()


def test_a_margin_below_float16_does_not_become_a_tie(tmp_path, arrays):
    logits = [[0.0, 1e-9, -3.0], [1e-9, 0.0, -3.0], [2.0, 2.0, 2.0]]
    bundle = save_and_load(tmp_path, with_logits(arrays, logits))
    assert bundle.val.logits.argmax(1).tolist() == [1, 0, 0]
    assert np.ptp(bundle.val.logits[2]) == 0  # a true tie stays one


@pytest.mark.parametrize(
    ("value", "message"),
    [(np.nan, "row maxima of val_logits at"), (-1e5, "gaps of val_logits at .*-100000"), (-np.inf, "gaps .* -inf")],
)
def test_a_logit_that_cannot_be_stored_is_named(tmp_path, arrays, value, message):
    with pytest.raises(ValueError, match=message):
        save_and_load(tmp_path, with_logits(arrays, [[0, 1, 2], [0, value, 0]]))


def test_labels_and_features_that_cannot_be_stored_are_named(tmp_path, arrays):
    labels = arrays["val_labels"].copy()
    labels[7] = -1
    with pytest.raises(ValueError, match=r"val_labels at \(7,\) is -1, which does not fit uint8"):
        save_and_load(tmp_path, arrays | {"val_labels": labels})
    with pytest.raises(ValueError, match=r"test_features at \(0, 0\) .* float16"):
        save_and_load(tmp_path, arrays | {"test_features": arrays["test_features"] * 1e9})
    assert not list(tmp_path.rglob("*.npz"))


def test_saving_twice_gives_the_same_bytes_and_leaves_nothing_else(tmp_path, arrays):
    zoo.save_arrays(tmp_path, "fashion/tiny", arrays, {"seed": 3})
    folder = tmp_path / "fashion"
    first = {path.name: path.read_bytes() for path in folder.iterdir()}
    zoo.save_arrays(tmp_path, "fashion/tiny", {key: array.copy() for key, array in arrays.items()}, {"seed": 3})
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == first
    assert set(first) == {"tiny.npz", "tiny.json"}
    record = json.loads(first["tiny.json"])
    assert record["seed"] == 3
    assert set(record["arrays_sha256"]) == set(np.load(folder / "tiny.npz").files)


@pytest.mark.parametrize(
    "damage", [lambda content: content[:-500], lambda content: content[:900] + b"?" + content[901:]]
)
def test_a_damaged_file_is_refused(tmp_path, arrays, damage):
    zoo.save_arrays(tmp_path, "fashion/tiny", arrays, {})
    path = tmp_path / "fashion" / "tiny.npz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=r"tiny\.npz is damaged.*sha256 .*expected .*make zoo"):
        zoo.load_shipped("fashion/tiny", tmp_path)


def test_a_file_with_other_keys_lists_them(tmp_path, arrays):
    zoo.save_arrays(tmp_path, "fashion/tiny", arrays, {})
    path = tmp_path / "fashion" / "tiny.npz"
    np.savez(path, logits=np.eye(2))
    record = json.loads(path.with_suffix(".json").read_text())
    path.with_suffix(".json").write_text(json.dumps(record | {"sha256": zoo._sha256(path.read_bytes())}))
    with pytest.raises(ValueError, match=r"keys found \['logits'\]"):
        zoo.load_shipped("fashion/tiny", tmp_path)


# --- public files -------------------------------------------------------------------------------------------


def at_hand(name):
    """Whether the files of a public bundle can be read without a network."""
    import pooch

    folders = [Path(pooch.os_cache("smartlib"))]
    if os.environ.get(public.FOLDER_VARIABLE):
        folders.append(Path(os.environ[public.FOLDER_VARIABLE]))
    return all(any((folder / file).is_file() for folder in folders) for file in public.FILES[name])


def load_or_skip(name):
    if not at_hand(name):
        pytest.skip(f"the files of {name} are neither in {public.FOLDER_VARIABLE} nor in the cache")
    return load(name)


@pytest.fixture
def elsewhere(monkeypatch, tmp_path):
    """No folder, an empty cache, and a manifest whose only file is of our making, at a closed port."""
    import pooch

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    entry = {
        "file": "x.npz",
        "sha256": zoo._sha256(b"content"),
        "url": f"http://127.0.0.1:{port}/x.npz",
    }
    monkeypatch.setattr(public, "manifest", lambda: {"x.npz": entry})
    monkeypatch.delenv(public.FOLDER_VARIABLE, raising=False)
    monkeypatch.setattr(pooch, "os_cache", lambda project: tmp_path / "cache" / project)
    return tmp_path


def test_every_public_file_is_described():
    assert {file for files in public.FILES.values() for file in files} == set(public.manifest())
    for entry in public.manifest().values():
        assert len(entry["sha256"]) == 64 and entry["url"].startswith("https://") and entry["licence"]


def test_fetch_from_the_folder(elsewhere, monkeypatch):
    monkeypatch.setenv(public.FOLDER_VARIABLE, str(elsewhere))
    (elsewhere / "x.npz").write_bytes(b"content")
    assert public.fetch("x.npz") == elsewhere / "x.npz"
    (elsewhere / "x.npz").write_bytes(b"conten")
    with pytest.raises(
        ValueError, match=rf"x\.npz is damaged.*{zoo._sha256(b'conten')}, expected {zoo._sha256(b'content')}"
    ):
        public.fetch("x.npz")


def test_fetch_from_the_cache(elsewhere):
    cached = elsewhere / "cache" / "smartlib" / "x.npz"
    cached.parent.mkdir(parents=True)
    cached.write_bytes(b"content")
    assert public.fetch("x.npz") == cached


@pytest.mark.parametrize("folder_is_set", [False, True])
def test_fetch_offline_says_what_to_do(elsewhere, monkeypatch, folder_is_set):
    if folder_is_set:  # to a folder that lacks the file
        monkeypatch.setenv(public.FOLDER_VARIABLE, str(elsewhere))
    with pytest.raises(ConnectionError, match=r"x\.npz .*http://127\.0\.0\.1:\d+/x\.npz.*SMARTLIB_DATA_DIR"):
        public.fetch("x.npz")


def test_fetch_unknown():
    with pytest.raises(ValueError, match=r"unknown public file 'y'; known: cifar10_resnet50_ce_val.pt"):
        public.fetch("y")
    with pytest.raises(ValueError, match="unknown public bundle 'y'; known: public/cifar10-resnet50-ce"):
        public.load_public("y")


@pytest.mark.parametrize(
    ("name", "n_test", "k", "accuracy"),
    [
        ("public/cifar10-resnet50-ce", 10_000, 10, 0.9505),
        ("public/cifar10-resnet50-focal", 10_000, 10, 0.9502),
        ("public/cifar10-densenet40", 10_000, 10, 1 - 0.0758),
        ("public/cifar10-wideresnet-16-4", 5_000, 10, 0.9152),
        ("public/cifar100-wideresnet-16-4", 5_000, 100, 0.7534),
        ("public/cifar100-densenet-bc-100", 5_000, 100, 0.7580),
    ],
)
def test_public_bundles(name, n_test, k, accuracy):
    bundle = load_or_skip(name)
    assert (bundle.name, bundle.n_classes, bundle.head) == (name, k, None)
    assert bundle.val.logits.shape == (5_000, k) and bundle.test.logits.shape == (n_test, k)
    for split in (bundle.val, bundle.test):
        assert split.logits.dtype == (np.float64 if n_test == 5_000 else np.float32)
        assert split.labels.dtype == np.int64 and split.features is None
        assert np.isfinite(split.logits).all()
        assert set(np.unique(split.labels)) == set(range(k))
    assert (bundle.test.logits.argmax(1) == bundle.test.labels).mean() == pytest.approx(accuracy, abs=1e-9)
    assert [entry["file"] for entry in bundle.provenance["files"]] == list(public.FILES[name])
    assert bundle.provenance["licence"] in {"MIT", "Apache-2.0"}


def test_a_drawn_split_is_disjoint_and_complete():
    validation, test = public._draw_validation(10_000)
    assert (len(validation), len(test)) == (5_000, 5_000)
    assert np.array_equal(np.union1d(validation, test), np.arange(10_000))


@pytest.mark.parametrize("name", [name for name, files in public.FILES.items() if files[0].endswith(".npz")])
def test_probabilities_become_their_logarithms(name):
    bundle = load_or_skip(name)
    with np.load(public.fetch(public.FILES[name][0])) as archive:
        probs = archive["predictions"]
    chosen, others = public._draw_validation(len(probs))
    np.testing.assert_allclose(np.exp(bundle.val.logits), probs[chosen], rtol=1e-6)
    np.testing.assert_allclose(np.exp(bundle.test.logits), probs[others], rtol=1e-6)
