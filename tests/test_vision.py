"""Images to bundles, on small data sets that are laid out exactly like the published ones."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import vision_miniatures as mini
from click.testing import CliRunner
from PIL import Image

from smartlib.data import load, names
from smartlib.data.vision import catalogue, extraction, models, shards, sources
from smartlib.data.vision.__main__ import main
from smartlib.experiments import notebooks, plans, profiles


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    return models.load_network(mini.checkpoint(tmp_path_factory.mktemp("weights") / "net.pth", 10))


@pytest.fixture
def images(tmp_path, monkeypatch):
    mini.cifar(tmp_path / "cifar", 60, monkeypatch)
    return sources.cifar(tmp_path / "cifar", 10)


def plain_loop(source, network) -> tuple[np.ndarray, np.ndarray]:
    with torch.no_grad():
        found = [network.head(network.body(network.transform(source[row][0])[None]))[0] for row in range(len(source))]
    return torch.stack(found).numpy(), source.labels


# --- sources ----------------------------------------------------------------------------------------------------


def test_cifar_is_read_from_its_batches_and_a_changed_batch_is_refused(tmp_path, monkeypatch):
    labels = mini.cifar(tmp_path, 20, monkeypatch)
    source = sources.cifar(tmp_path, 10)
    np.testing.assert_array_equal(source.labels, labels)
    image, label = source[3]
    assert image.size == (32, 32) and label == labels[3]
    mini.cifar(tmp_path, 20, monkeypatch, n_classes=100)
    assert sources.cifar(tmp_path, 100).n_classes == 100
    batch = tmp_path / "cifar-10-batches-py" / "test_batch"
    batch.write_bytes(batch.read_bytes()[:-1] + b"x")
    with pytest.raises(ValueError, match="does not have the published checksum"):
        sources.cifar(tmp_path, 10)


def test_cifar_c_gives_the_rows_of_one_severity(tmp_path):
    labels = np.arange(8) % 10
    mini.cifar_c(tmp_path, labels, "fog")
    source = sources.cifar_c(tmp_path, 10, "fog", 5)
    np.testing.assert_array_equal(source.labels, labels)
    np.testing.assert_array_equal(np.asarray(source[0][0]), np.load(tmp_path / "fog.npy")[32])
    with pytest.raises(ValueError, match=r"snow.npy is missing; corruptions there: fog"):
        sources.cifar_c(tmp_path, 10, "snow", 1)
    np.save(tmp_path / "short.npy", np.load(tmp_path / "fog.npy")[:-1])
    with pytest.raises(ValueError, match="39 images for 40 labels"):
        sources.cifar_c(tmp_path, 10, "short", 1)


def test_imagenet_has_the_same_rows_in_both_layouts_and_corrupted(tmp_path):
    flat = sources.imagenet(mini.imagenet_flat(tmp_path / "flat" / "val", 12))
    folders = sources.imagenet(mini.imagenet_folders(tmp_path / "folders", 12))
    corrupted = sources.imagenet_c(mini.imagenet_folders(tmp_path / "c" / "fog" / "5", 12).parents[1], "fog", 5)
    mini.imagenet_folders(tmp_path / "archives" / "weather" / "snow" / "3", 12)
    in_archive = sources.imagenet_c(tmp_path / "archives", "snow", 3)
    expected = [mini.SYNSETS[synset] for _, synset in mini.imagenet_names(12)]
    for source in (flat, folders, corrupted, in_archive):
        assert source.labels.tolist() == expected
        assert [path.name for path in source.paths] == [name for name, _ in mini.imagenet_names(12)]
    with pytest.raises(ValueError, match="corruptions there: fog"):
        sources.imagenet_c(tmp_path / "c", "frost", 5)


def test_imagenet_without_its_kit_or_with_a_short_one(tmp_path):
    folder = mini.imagenet_flat(tmp_path / "val", 5)
    truth = tmp_path / "ILSVRC2012_devkit_t12" / "data" / "ILSVRC2012_validation_ground_truth.txt"
    truth.write_text("490\n489\n")
    with pytest.raises(ValueError, match=r"ILSVRC2012_val_00000005\.JPEG has no line"):
        sources.imagenet(folder)
    (tmp_path / "ILSVRC2012_devkit_t12").rename(tmp_path / "kit")
    with pytest.raises(ValueError, match="put ILSVRC2012_devkit_t12 beside it"):
        sources.imagenet(folder)


def test_folders_numbers_and_lists(tmp_path):
    for k in (2, 10):
        mini.put(tmp_path / "v2" / str(k) / "a.jpeg", mini.jpeg(k))
    assert sorted(sources.numbered_folders(tmp_path / "v2").labels) == [2, 10]
    with pytest.raises(ValueError, match=r"10 is not one of the 5 classes"):
        sources.numbered_folders(tmp_path / "v2", 5)
    mini.put(tmp_path / "own" / "cat" / "a.png", mini.jpeg(1))
    mini.put(tmp_path / "own" / "ant" / "b.jpg", mini.jpeg(2))
    mini.put(tmp_path / "own" / "ant" / "notes.txt", b"no image")
    assert sources.image_folder(tmp_path / "own").labels.tolist() == [0, 1]
    mini.imagenet_folders(tmp_path / "imagenet" / "val", 6)
    listed = [f"val/{synset}/{name} {mini.SYNSETS[synset]}" for name, synset in mini.imagenet_names(6)]
    path = mini.put(tmp_path / "LT.txt", "\n".join(listed).encode())
    assert sources.image_list(tmp_path / "imagenet", path).labels.tolist() == [int(x.split()[1]) for x in listed]
    path.write_text("\n".join([listed[0], "val/n01440764/none.JPEG 0"]))
    with pytest.raises(ValueError, match=r"LT.txt line 2: .*none.JPEG is missing"):
        sources.image_list(tmp_path / "imagenet", path)
    path.write_text("val/only-a-path\n")
    with pytest.raises(ValueError, match=r"line 1: expected 'path label'"):
        sources.image_list(tmp_path / "imagenet", path)


# --- networks ---------------------------------------------------------------------------------------------------


def test_a_network_is_cut_so_that_features_and_head_give_its_logits(network):
    assert network.head.out_features == 10 and network.n_classes == 10
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8))
    x = network.transform(image)[None]
    with torch.no_grad():
        torch.testing.assert_close(network.head(network.body(x)), network.body.model(x), atol=1e-5, rtol=1e-5)


def test_networks_that_do_not_end_in_a_linear_layer_keep_their_output():
    last = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 4), torch.nn.ReLU()).eval()
    plain = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 6), torch.nn.ReLU(), torch.nn.Linear(6, 4))
    transform = lambda image: torch.from_numpy(np.array(image.resize((2, 2)))).permute(2, 0, 1) / 255  # noqa: E731
    uncut, cut = (models.cut(model.eval(), transform, "m") for model in (last, plain))
    assert uncut.head is None and isinstance(last[1], torch.nn.Linear), "the model is as it was"
    assert cut.head.in_features == 6 and cut.body(torch.zeros(1, 3, 2, 2)).shape == (1, 6)


def test_networks_from_the_other_libraries(tmp_path, monkeypatch):
    torchvision = pytest.importorskip("torchvision")
    torch.manual_seed(0)
    state = torchvision.models.squeezenet1_1(weights=None).state_dict()
    monkeypatch.setattr("torchvision.models._api.WeightsEnum.get_state_dict", lambda self, *args, **kwargs: state)
    found = models.load_network({"from": "torchvision", "name": "squeezenet1_1", "weights": "IMAGENET1K_V1"})
    assert found.head is None and found.n_classes == 1000 and found.transform.crop_size == [224]
    hub = "import torch\ndef small(pretrained=False):\n    torch.manual_seed(1)\n"
    hub += "    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 10))\n"
    mini.put(tmp_path / "hubconf.py", hub.encode())
    what = {"from": "torch.hub", "repository": str(tmp_path), "name": "small", "size": 32}
    with pytest.raises(ValueError, match=r"give \['mean', 'std'\]"):
        models.load_network(what)
    assert models.load_network(what | {"mean": [0.5] * 3, "std": [0.5] * 3}).head.in_features == 3072
    with pytest.raises(ValueError, match="there is no such checkpoint"):
        models.load_network({"from": "timm", "name": "test_resnet", "checkpoint": "none.pth", "n_classes": 3})
    mini.checkpoint(tmp_path / "w.pth", 7)
    with pytest.raises(ValueError, match=r"w.pth does not fit test_resnet"):
        models.load_network(
            {"from": "timm", "name": "test_resnet", "checkpoint": str(tmp_path / "w.pth"), "n_classes": 3}
        )
    with pytest.raises(ValueError, match="from one of timm"):
        models.load_network({"from": "keras", "name": "x"})


def test_weights_that_cannot_be_downloaded_are_said_to_be_missing(monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr("torchvision.models._api.WeightsEnum.get_state_dict", refuse)
    with pytest.raises(ConnectionError, match="weights of resnet50 are not at hand"):
        models.load_network({"from": "torchvision", "name": "resnet50", "weights": "IMAGENET1K_V1"})


# --- extraction -------------------------------------------------------------------------------------------------


def test_logits_are_those_of_a_plain_loop_however_they_are_cut(images, network, tmp_path):
    logits, labels = plain_loop(images, network)
    for batch_size, shard_rows, n_workers in ((7, 25, 0), (60, 60, 0), (2, 7, 2)):
        folder = tmp_path / f"out-{batch_size}"
        extraction.extract(
            images, network, folder, batch_size=batch_size, shard_rows=shard_rows, n_workers=n_workers, device="cpu"
        )
        found = shards.read_shards(folder)
        np.testing.assert_allclose(found["logits"], logits, atol=1e-4)
        np.testing.assert_array_equal(found["labels"], labels)
        np.testing.assert_array_equal(found["rows"], np.arange(60))
        head = shards.unpack((folder / "head.safetensors").read_bytes())
        np.testing.assert_allclose(found["features"] @ head["weight"].T + head["bias"], logits, atol=1e-4)


def test_reduced_precision_is_another_extraction_and_close(images, network, tmp_path):
    found = {}
    for precision in ("float32", "bfloat16"):
        extraction.extract(images, network, tmp_path / "out", precision=precision, device="cpu")
        found[precision] = shards.read_shards(tmp_path / "out")["logits"]
    assert found["bfloat16"].dtype == np.float32
    off = np.abs(found["bfloat16"] - found["float32"]).max()
    assert 0 < off < 0.05 * np.abs(found["float32"]).max()
    with pytest.raises(ValueError, match="precision must be one of float32"):
        extraction.extract(images, network, tmp_path / "out", precision="int8")
    with pytest.raises(ValueError, match="on_corrupt must be"):
        extraction.extract(images, network, tmp_path / "out", on_corrupt="ignore")


def test_a_killed_run_loses_one_shard_and_a_damaged_shard_is_computed_again(images, network, tmp_path, monkeypatch):
    folder, write, written = tmp_path / "out", shards.write_shard, []

    def dying(folder, index, *args, **kwargs):
        if index == 2 and 2 not in written:
            written.append(2)
            # What a kill leaves behind: a part under another name.
            mini.put(folder / "shard-00002.safetensors.1.partial", b"half")
            raise KeyboardInterrupt
        written.append(index)
        write(folder, index, *args, **kwargs)

    monkeypatch.setattr(shards, "write_shard", dying)
    with pytest.raises(KeyboardInterrupt):
        extraction.extract(images, network, folder, shard_rows=15, device="cpu")
    assert shards.read_manifest(folder) is None and written == [0, 1, 2]
    with pytest.raises(ValueError, match="no finished extraction"):
        shards.read_shards(folder)
    damaged = folder / "shard-00001.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-4] + b"\0\0\0\1")
    extraction.extract(images, network, folder, shard_rows=15, device="cpu")
    assert written == [0, 1, 2, 1, 2, 3]
    np.testing.assert_allclose(shards.read_shards(folder)["logits"], plain_loop(images, network)[0], atol=1e-4)
    extraction.extract(images, network, folder, shard_rows=15, device="cpu")
    assert len(written) == 6, "what is finished is not done again"
    (folder / "shard-00003.safetensors").unlink()
    with pytest.raises(ValueError, match=r"shard-00003\.safetensors is missing or damaged"):
        shards.read_shards(folder)


def test_a_corrupt_image_is_named_and_fatal_or_left_out(network, tmp_path):
    folder = mini.imagenet_folders(tmp_path / "val", 9)
    bad = sorted(folder.rglob("*.JPEG"), key=lambda path: path.name)[4]
    bad.write_bytes(bad.read_bytes()[:200])
    source = sources.imagenet(folder)
    source.n_classes = 10
    with pytest.raises(sources.CorruptImageError, match=f"{bad.name} cannot be decoded"):
        extraction.extract(source, network, tmp_path / "out", device="cpu", shard_rows=5)
    with pytest.warns(extraction.CorruptImageWarning, match=f"1 of 9 images .*{bad.name}"):
        extraction.extract(source, network, tmp_path / "out", device="cpu", shard_rows=5, on_corrupt="skip")
    assert shards.read_shards(tmp_path / "out")["rows"].tolist() == [0, 1, 2, 3, 5, 6, 7, 8]
    assert [row for row, _ in shards.read_manifest(tmp_path / "out")["skipped"]] == [4]


def test_a_full_disk_is_said_before_the_work_and_leaves_nothing_behind(images, network, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(shards.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 1000}))
        with pytest.raises(OSError, match=r"the result takes 0.00 GB, but there is room for 0.00 GB"):
            extraction.extract(images, network, tmp_path / "out", device="cpu")
    real = Path.write_bytes

    def full(path, content):
        if path.name.startswith("shard-00001"):
            real(path, content[:10])
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(OSError, match="what was finished stays: make room and start again"):
            extraction.extract(images, network, tmp_path / "out", device="cpu", shard_rows=20)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["shard-00000.json", "shard-00000.safetensors"]
    extraction.extract(images, network, tmp_path / "out", device="cpu", shard_rows=20)
    assert len(shards.read_shards(tmp_path / "out")["rows"]) == 60


# --- from the command line to notebooks -------------------------------------------------------------------------

CIFAR = {"layout": "cifar", "folder": "cifar", "n_classes": 10, "images": 240, "side": 32, "licence": "research"}


@pytest.fixture
def paper(tmp_path, monkeypatch):
    """A catalogue of CIFAR-10, CIFAR-10-C, a data set that is not there, and two networks."""
    labels = mini.cifar(tmp_path / "images" / "cifar", 240, monkeypatch)
    mini.cifar_c(tmp_path / "images" / "CIFAR-10-C", labels, "fog")
    datasets = {
        "cifar10": CIFAR,
        "cifar10-c": CIFAR | {"layout": "cifar-c", "folder": "CIFAR-10-C", "of": "cifar10", "models": "cifar10",
                              "severities": [5]},
        "imagenet": {"layout": "imagenet", "folder": "imagenet/val", "n_classes": 1000, "images": 50000,
                     "licence": "ImageNet terms of access", "validation": 0.2, "bytes": 6_744_924_160},
    }  # fmt: skip
    networks = {
        f"cifar10/{name}": mini.checkpoint(tmp_path / f"{name}.pth", 10, f"test_{name}") for name in ("resnet", "vit")
    }
    networks["cifar10/vit"]["size"] = 160
    networks["imagenet/small"] = mini.checkpoint(tmp_path / "imagenet.pth", 1000)
    path = mini.catalogue(tmp_path / "paper.json", datasets, networks, ["fog"])
    monkeypatch.setenv("SMARTLIB_CATALOGUE", str(path))
    monkeypatch.setenv("SMARTLIB_IMAGES_DIR", str(tmp_path / "images"))
    monkeypatch.setenv("SMARTLIB_LOGITS_DIR", str(tmp_path / "logits"))
    return tmp_path


def run(*arguments: str):
    return CliRunner().invoke(main, list(arguments), catch_exceptions=False)


def test_from_images_to_bundles_and_cells(paper):
    with pytest.raises(ValueError, match="make plan PROFILE=paper"):
        profiles.bundle_names("paper")
    result = run("extract", "--offline", "--device", "cpu")
    assert result.exit_code == 0 and "left out: imagenet/small: imagenet: no images in" in result.output
    assert "ImageNet terms of access" in result.output
    assert profiles.bundle_names("paper") == ("cifar10/resnet", "cifar10/vit") == names()[-2:]
    bundle = load("cifar10/resnet")
    assert len(bundle.val.labels) == len(bundle.test.labels) == 120 and bundle.head.weight.shape == (10, 96)
    np.testing.assert_allclose(
        bundle.val.features @ bundle.head.weight.T + bundle.head.bias, bundle.val.logits, atol=1e-4
    )
    foggy = load("cifar10/resnet@clean:fog-5")
    np.testing.assert_array_equal(foggy.test.labels, bundle.test.labels), "the same images, corrupted"
    assert not np.allclose(foggy.test.logits, bundle.test.logits)
    with pytest.raises(ValueError, match="known: clean, long-tailed-RATIO, fog-5"):
        load("cifar10/resnet@clean:snow-5")
    again = load("cifar10/resnet@resplit-1")
    assert len(again.val.labels) == 120 and not np.array_equal(again.val.logits, bundle.val.logits)
    chained = load("cifar10/resnet@fog-5:fog-5@resplit-2")
    pooled = [np.sort(np.concatenate([b.val.logits, b.test.logits]), axis=0) for b in (again, bundle)]
    np.testing.assert_array_equal(*pooled)
    assert chained.name == "cifar10/resnet@fog-5:fog-5@resplit-2"
    cells = plans.shift_cells("paper")
    assert {"cifar10/vit@clean:fog-5", "cifar10/vit@fog-5:fog-5"} <= {cell.bundle for cell in cells}
    resplits = plans.resplit_cells("paper")
    assert len({cell.bundle for cell in resplits}) == 10 and not plans.resplit_cells("embedded")
    assert "smart" in {cell.method for cell in resplits}


def test_a_corrupt_file_ends_the_extraction_and_nothing_at_all_is_an_error(paper):
    mini.imagenet_folders(paper / "images" / "imagenet" / "val", 4)
    bad = next((paper / "images" / "imagenet" / "val").rglob("*.JPEG"))
    bad.write_bytes(b"no image")
    result = run("extract", "--offline", "--dataset", "imagenet", "--device", "cpu")
    assert result.exit_code == 1 and f"{bad.name} cannot be decoded" in result.output
    result = run("extract", "--offline", "--dataset", "none")
    assert result.exit_code == 1 and "unknown data set 'none'; known: cifar10" in result.output
    for path in (paper / "images" / "imagenet" / "val").rglob("*.JPEG"):
        path.unlink()
    result = run("extract", "--offline", "--dataset", "imagenet")
    assert result.exit_code == 1 and "nothing was extracted" in result.output


def test_the_plan_says_what_is_there_and_what_is_not(paper, monkeypatch):
    from smartlib.data.vision import planning

    monkeypatch.setattr(planning, "_SAMPLE", 0.1)
    result = run("plan")
    assert result.exit_code == 0
    assert "cifar10: 240 images, is there" in result.output
    assert "imagenet: 50,000 images, by hand, 6.7 GB to download" in result.output
    assert "ImageNet terms of access" in result.output and "0 of 2" in result.output
    table = planning.model_plan(speed=409.0, decoding=50.0)
    # 50,000 images: 50 a second decoded, 100 a second through a network of the size of a ResNet-50.
    assert table.set_index("model").loc["imagenet/small", "hours"] == pytest.approx(1000 / 3600)


def test_what_the_pipeline_costs_is_measured_beside_the_bare_network(monkeypatch):
    from smartlib.data.vision import planning

    monkeypatch.setattr(planning, "_SAMPLE", 0.1)
    whole, bare = planning.measure_extraction(20, "test_resnet", 5)
    assert 0 < whole and 0 < bare
    monkeypatch.setattr(planning, "measure_extraction", lambda *args: (85.0, 100.0))
    assert "85.0 images/s, bare network 100.0; ratio 0.85" in run("bench").output


def test_the_shipped_catalogue(monkeypatch):
    monkeypatch.delenv("SMARTLIB_CATALOGUE", raising=False)
    found = catalogue.catalogue()
    assert len(found["corruptions"]) == 19
    listed = list(catalogue.jobs())
    on_imagenet = {job.model for job in listed if job.dataset == "imagenet"}
    assert on_imagenet == {"resnet50", "densenet121", "wide_resnet50_2", "swin_b", "vit_b_16", "vit_b_32"}
    assert sum(job.dataset == "imagenet-c" for job in listed) == 19 * 6
    for name, entry in found["data sets"].items():
        assert entry["licence"] and entry["bytes"] >= 0 and (name == "imagenet-lt" or entry["bytes"] > 1e8)
    for network in found["models"].values():
        assert network["licence"] and network["bytes"] > 1e6


def test_notebook_05_runs_in_profile_paper(paper, monkeypatch):
    run("extract", "--offline", "--device", "cpu")
    root = Path(extraction.__file__).parents[3]
    notebook = notebooks.find_notebooks(root, ("05",))[0]
    # Few images, random networks: that SMART warns and figures are bare is right here.
    output = notebooks.execute(notebook, paper / "work", profile="paper", root=root)
    text = output.read_text(encoding="utf-8")
    assert "All checks hold." in text and "cifar10/resnet" in text and 'profile = \\"paper\\"' in text
    tables = paper / "work" / "figures" / "tables"
    redrawn = pd.read_csv(tables / "05_resplits.csv")
    assert set(redrawn["bundle"]) == {"cifar10/resnet", "cifar10/vit"}
    records = pd.read_csv(paper / "work" / "figures" / "records" / "paper.csv")
    assert {"SMART", "smart"} & set(records["method"]) and (records["n"] == 120).all()


def test_two_processes_of_torchrun_give_the_same_logits(paper):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29517"]
    command += ["-m", "smartlib.data.vision", "extract", "--offline", "--device", "cpu", "--model", "resnet"]
    command += ["--dataset", "cifar10-c", "--shard-rows", "50"]
    environment = os.environ | {"PYTHONPATH": str(Path(extraction.__file__).parents[3]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    job = catalogue.Job("cifar10-c", "resnet", "fog-5")
    assert len(shards.read_shards(job.folder)["rows"]) == 240
    network = models.load_network(job.network)
    np.testing.assert_allclose(
        shards.read_shards(job.folder)["logits"],
        plain_loop(catalogue.open_source("cifar10-c", "fog-5"), network)[0],
        atol=1e-4,
    )
    assert json.loads((job.folder / shards.MANIFEST).read_text())["about"]["licence"] == "research"


@pytest.mark.parametrize("resources", [None, {"GPU": 1}])
def test_a_cluster_gives_the_same_logits(images, network, tmp_path, monkeypatch, resources):
    distributed = pytest.importorskip("distributed")
    options = {"processes": False, "n_workers": 1, "threads_per_worker": 2, "dashboard_address": None}
    with distributed.LocalCluster(**options, resources=resources or {}) as cluster:
        monkeypatch.setenv("SMARTLIB_SCHEDULER", cluster.scheduler_address)
        extraction.extract(images, network, tmp_path / "out", shard_rows=25, device="cpu")
    np.testing.assert_allclose(
        shards.read_shards(tmp_path / "out")["logits"], plain_loop(images, network)[0], atol=1e-4
    )
    assert len(shards.read_manifest(tmp_path / "out")["shards"]) == 3
