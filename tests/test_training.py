"""The shipped models: their training code on a few tiny images, and what was shipped."""

import gzip
import json

import numpy as np
import pytest

pytest.importorskip("torchvision")
pytest.importorskip("timm")

import torch

from smartlib import load
from smartlib.data import training
from smartlib.data.fashion_images import MD5
from smartlib.data.zoo import load_shipped, names

ARCHITECTURES = ("resnet", "densenet", "vit")


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
    from dataclasses import replace

    return {name: replace(training.RECIPES[name], epochs=epochs, batch_size=40) for name in ARCHITECTURES}


def test_build_zoo_trains_and_writes_bundles_with_provenance(images, tmp_path):
    training.build_zoo(("resnet",), str(images), tmp_path / "work", tmp_path / "out", recipes=recipes(6), check=False)
    bundle = load_shipped("fashion/resnet", tmp_path / "out")
    assert bundle.val.logits.shape == (40, 10) and bundle.test.logits.shape == (60, 10)
    record = bundle.provenance
    assert record["settings"]["epochs"] == 6 and record["code"]["torch"] == torch.__version__
    accuracy = np.mean(bundle.test.logits.argmax(1) == bundle.test.labels)
    assert accuracy == pytest.approx(record["accuracy"]["test"]) and accuracy > 0.5, "it learns ten squares"
    again = bundle.test.features @ bundle.head.weight.T + bundle.head.bias
    assert np.abs(again - bundle.test.logits).max() < 0.05, "features and head give the logits, to float16"


def test_an_interrupted_training_equals_an_unbroken_one(images, tmp_path, monkeypatch):
    data = training.load_images(images, check=False)
    recipe = recipes(3)["resnet"]
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
    training.train(recipes(1)["vit"], data[0][:40], data[1][:40], tmp_path / "x.pt", "cpu", progress=False)
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_heads_are_the_last_layer(name):
    recipe = training.RECIPES[name]
    model = recipe.build().eval()
    pixels = np.random.default_rng(0).integers(0, 255, (3, 28, 28)).astype(np.uint8)
    logits, features = training.predict(model, recipe.head, pixels, "cpu")
    layer = model.get_submodule(recipe.head)
    assert np.allclose(features @ layer.weight.detach().numpy().T + layer.bias.detach().numpy(), logits, atol=1e-5)


def test_the_split_is_fixed_disjoint_and_complete():
    fit, held_out = training.split_indices(60_000, 10_000)
    assert len(fit) == 50_000 and len(held_out) == 10_000
    assert np.array_equal(np.sort(np.concatenate([fit, held_out])), np.arange(60_000))
    assert np.array_equal(training.split_indices(60_000, 10_000)[1], held_out)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_shipped_models_are_what_their_provenance_says(name):
    assert f"fashion/{name}" in names()
    bundle = load(f"fashion/{name}")
    record = bundle.provenance
    json.dumps(record)
    assert record["settings"] == json.loads(json.dumps(training.RECIPES[name].settings()))
    assert record["accuracy"]["test"] == pytest.approx(np.mean(bundle.test.logits.argmax(1) == bundle.test.labels))
    assert record["accuracy"]["test"] > 0.88 and record["accuracy"]["train"] > record["accuracy"]["test"]
    assert 0.02 < record["ece_uncalibrated"]["test"] < 0.08
    assert np.array_equal(np.bincount(bundle.test.labels), np.full(10, 1000))
