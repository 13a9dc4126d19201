"""The shipped models: their training code on a few tiny images, and what was shipped."""

import gzip
import json
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torchvision")
pytest.importorskip("timm")

import torch

from smartlib import load
from smartlib.data import training
from smartlib.data.fashion_images import MD5
from smartlib.data.pairs import pair_up
from smartlib.data.zoo import (
    SHIPPED_FOLDER,
    boundary_names,
    load_boundary,
    load_shifted,
    load_shipped,
    names,
    shifted_names,
)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """240 training and 60 test images, each class a bright square of its own, in the four idx files."""
    folder = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for prefix, n in (("train", 240), ("t10k", 60)):
        labels = (np.arange(n) % 10).astype(np.uint8)
        pixels = rng.integers(0, 60, (n, 28, 28)).astype(np.uint8)
        for i, label in enumerate(labels):
            row, column = divmod(int(label), 5)
            pixels[i, 3 + 12 * row : 12 + 12 * row, 1 + 5 * column : 6 + 5 * column] = 255
        for name, array in ((f"{prefix}-images-idx3-ubyte", pixels), (f"{prefix}-labels-idx1-ubyte", labels)):
            assert name in MD5
            header = bytes([0, 0, 8, array.ndim]) + np.asarray(array.shape, ">i4").tobytes()
            (folder / f"{name}.gz").write_bytes(gzip.compress(header + array.tobytes()))
    return folder


def recipes(epochs: int) -> dict:
    return {name: replace(recipe, epochs=epochs, batch_size=40) for name, recipe in training.RECIPES.items()}


@pytest.fixture(scope="module")
def built(images, tmp_path_factory):
    """Two tiny models with all that is shipped of any."""
    folder = tmp_path_factory.mktemp("zoo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "SHIFTED", {"fashion/resnet": {"test": 20, "val": 10}})
        patch.setattr(training, "BOUNDARY", {"fashion/resnet": 30})
        names = ("fashion/resnet", "fashion-pairs/resnet")
        training.build_zoo(names, str(images), folder / "work", folder / "out", recipes=recipes(6), check=False)
    return folder / "out"


def test_build_zoo_trains_and_writes_bundles_with_provenance(built):
    bundle = load_shipped("fashion/resnet", built)
    assert bundle.val.logits.shape == (40, 10) and bundle.test.logits.shape == (60, 10)
    record = bundle.provenance
    assert record["settings"]["epochs"] == 6 and record["code"]["torch"] == torch.__version__
    accuracy = np.mean(bundle.test.logits.argmax(1) == bundle.test.labels)
    assert accuracy == pytest.approx(record["accuracy"]["test"]) and accuracy > 0.5, "it learns ten squares"
    again = bundle.test.features @ bundle.head.weight.T + bundle.head.bias
    assert np.abs(again - bundle.test.logits).max() < 0.05, "features and head give the logits, to float16"


def test_pairs_use_every_image_once(images, built):
    bundle = load_shipped("fashion-pairs/resnet", built)
    assert bundle.val.logits.shape == (20, 100) and bundle.test.logits.shape == (30, 100)
    pixels, labels, *_ = training.load_images(images, check=False)
    pairs, classes = pair_up(pixels, labels)
    halves, named = np.concatenate([pairs[:, :, :28], pairs[:, :, 28:]]), np.concatenate([classes // 10, classes % 10])
    found = {(image.tobytes(), int(label)) for image, label in zip(halves, named, strict=True)}
    assert found == {(image.tobytes(), int(label)) for image, label in zip(pixels, labels, strict=True)}
    assert len(halves) == len(pixels)


def test_shifted_images_are_those_of_the_fixed_rows(built):
    shifted = load_shifted("fashion/resnet", built)
    assert len(shifted) == 8 * 5 + 1 and "jpeg-5" in shifted and "sketch" in shifted
    labels = load_shipped("fashion/resnet", built).test.labels[training.fixed_rows(60, 20)]
    for splits in shifted.values():
        assert np.array_equal(splits["test"].labels, labels) and len(splits["val"].labels) == 10
    assert not np.allclose(shifted["gaussian-noise-5"]["test"].logits, shifted["gaussian-noise-1"]["test"].logits)


def test_each_garment_of_a_pair_is_corrupted_by_itself():
    left, right = np.random.default_rng(0).integers(0, 255, (2, 3, 28, 28), dtype=np.uint8)
    pairs = dict(training.shifted_images(np.concatenate([left, right], axis=2), seed=3))
    single = dict(training.shifted_images(np.concatenate([left, right]), seed=3))
    for condition, pair in pairs.items():
        assert np.array_equal(np.concatenate([pair[:, :, :28], pair[:, :, 28:]]), single[condition])


def test_distances_belong_to_the_fixed_rows(built):
    boundary = load_boundary("fashion/resnet", built)
    assert np.array_equal(boundary.rows, training.fixed_rows(60, 30))
    logits = load_shipped("fashion/resnet", built).test.logits[boundary.rows]
    crossed = np.isfinite(boundary.distance)
    assert crossed.mean() > 0.9 and (boundary.distance[crossed] > 0).all()
    assert (boundary.other[crossed] != logits.argmax(1)[crossed]).all()


@pytest.mark.parametrize("kind", ["cross-entropy", "focal", "label-smoothing", "mixup"])
def test_losses_are_what_their_papers_say(kind):
    logits = torch.tensor([[2.0, 0.0, -1.0], [0.0, 1.0, 0.5]])
    x, y = torch.zeros(2, 1, 2, 2), torch.tensor([0, 2])
    loss = training.compute_loss(lambda batch: logits, x, y, kind, np.random.default_rng(0)).item()
    log_p = logits.log_softmax(1)
    own = -log_p[[0, 1], y]
    p = (-own).exp()
    rng = np.random.default_rng(0)
    weight, other = rng.beta(0.2, 0.2), rng.permutation(2)
    expected = {
        "cross-entropy": own.mean(),
        "focal": ((1 - p) ** 3 * own).mean(),
        "label-smoothing": (0.95 * own - 0.05 * log_p.mean(1)).mean(),
        "mixup": weight * own.mean() - (1 - weight) * log_p[[0, 1], y[other]].mean(),
    }
    assert loss == pytest.approx(expected[kind].item(), rel=1e-6)


def test_an_interrupted_training_equals_an_unbroken_one(images, tmp_path, monkeypatch):
    data = training.load_images(images, check=False)
    recipe = recipes(3)["fashion/resnet"]
    whole = training.train(recipe, data[0], data[1], tmp_path / "whole.pt", "cpu", progress=False)
    saved, real = [], torch.save

    def interrupt(state, path):
        real(state, path)
        saved.append(path)
        if len(saved) == 2:
            raise KeyboardInterrupt  # between writing the new state and putting it in place

    monkeypatch.setattr(torch, "save", interrupt)
    with pytest.raises(KeyboardInterrupt):
        training.train(recipe, data[0], data[1], tmp_path / "broken.pt", "cpu", progress=False)
    monkeypatch.setattr(torch, "save", real)
    assert torch.load(tmp_path / "broken.pt", weights_only=True)["epoch"] == 1
    resumed = training.train(recipe, data[0], data[1], tmp_path / "broken.pt", "cpu", progress=False)
    for a, b in zip(whole.state_dict().values(), resumed.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_training_leaves_the_global_random_state_alone(images, tmp_path):
    data = training.load_images(images, check=False)
    before = torch.random.get_rng_state()
    training.train(recipes(1)["fashion/vit"], data[0][:40], data[1][:40], tmp_path / "x.pt", "cpu", progress=False)
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("name", training.RECIPES)
def test_heads_are_the_last_layer(name):
    recipe = training.RECIPES[name]
    model = recipe.build().eval()
    width = 56 if name.startswith("fashion-pairs/") else 28
    pixels = np.random.default_rng(0).integers(0, 255, (3, 28, width)).astype(np.uint8)
    logits, features = training.predict(model, recipe.head, pixels, "cpu")
    layer = model.get_submodule(recipe.head)
    assert np.allclose(features @ layer.weight.detach().numpy().T + layer.bias.detach().numpy(), logits, atol=1e-5)


def test_the_split_is_fixed_disjoint_and_complete():
    fit, held_out = training.split_indices(60_000, 10_000)
    assert len(fit) == 50_000 and len(held_out) == 10_000
    assert np.array_equal(np.sort(np.concatenate([fit, held_out])), np.arange(60_000))
    assert np.array_equal(training.split_indices(60_000, 10_000)[1], held_out)


def test_what_is_shipped_has_a_recipe_and_is_small():
    assert set(names()) == set(training.RECIPES)
    assert set(shifted_names()) == set(training.SHIFTED)
    assert set(boundary_names()) <= set(training.BOUNDARY)
    size = sum(path.stat().st_size for path in SHIPPED_FOLDER.rglob("*") if path.is_file())
    assert size < 40e6


@pytest.mark.parametrize("name", names())
def test_shipped_models_are_what_their_provenance_says(name):
    bundle = load(name)
    record = bundle.provenance
    json.dumps(record)
    assert record["settings"] == json.loads(json.dumps(training.RECIPES[name].settings()))
    accuracy = np.mean(bundle.test.logits.argmax(1) == bundle.test.labels)
    assert record["accuracy"]["test"] == pytest.approx(accuracy)
    assert record["accuracy"]["train"] > record["accuracy"]["test"]
    assert (bundle.val.features is not None) == (name in training.WITH_FEATURES)
    if name.startswith("fashion-pairs/"):
        assert accuracy > 0.7 and bundle.n_classes == 100 and len(bundle.val.labels) == len(bundle.test.labels) == 5000
        assert record["ece_uncalibrated"]["test"] > 0.04, "strongly over-confident"
    else:
        assert accuracy > (0.88 if training.RECIPES[name].imbalance == 1 else 0.7)
        assert np.array_equal(np.bincount(bundle.test.labels), np.full(10, 1000))
