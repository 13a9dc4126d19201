"""What profile ``paper`` would download and how long it would take here (``make plan PROFILE=paper``); no network."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator

import numpy as np
import pandas as pd
from PIL import Image

from smartlib.data.vision import shards
from smartlib.data.vision.catalogue import Job, catalogue, conditions, family, images_folder, is_there, jobs, place_of

# What a network of unknown size is taken for: a ResNet-50.
GFLOPS = 4.09
# Seconds that each measurement takes at least.
_SAMPLE = 2.0


def dataset_plan() -> pd.DataFrame:
    """One row per data set: images, size of what would be downloaded, licence, checksum, and whether it is there.

    Source: ours; sizes and checksums are those that the publishers state.
    """
    rows = []
    for name, entry in catalogue()["data sets"].items():
        there = is_there(name)
        how = next((key for key in ("download", "archives", "stream") if key in entry), None)
        rows.append(
            {
                "data set": name,
                "images": entry.get("images", 0) * len(conditions(name)),
                "to download": 0 if there else entry.get("bytes", 0),
                "how": "is there"
                if there
                else {None: "by hand", "stream": "by hand, or streamed"}.get(how, "automatic"),
                "checksum": entry.get("checksum") or _checksums(entry),
                "licence": entry.get("licence", "not stated"),
                "folder": str(place_of(name)),
            }
        )
    return pd.DataFrame(rows)


def model_plan(speed: float, decoding: float) -> pd.DataFrame:
    """One row per network: size of the weights, licence, what is extracted already, and how long the rest takes.

    Args:
        speed: GFLOP per second of a network's forward pass here. decoding: images of 224 × 224 per second.

    Returns:
        The table; ``hours`` is for the images of all its data sets that are not extracted yet.

    Source: ours. One of the two, passing through the network and decoding, is slower, and the estimate is its time.
    """
    found, rows = catalogue(), []
    for name, network in found["models"].items():
        own = [job for job in jobs() if f"{family(job.dataset)}/{job.model}" == name]
        waiting = [job for job in own if not shards.read_manifest(job.folder)]
        seconds = sum(_seconds(job, network.get("gflops", GFLOPS), speed, decoding) for job in waiting)
        weights = ", ".join(network[key] for key in ("name", "weights") if key in network)
        rows.append(
            {
                "model": name,
                "weights": f"{network['from']}: {weights}",
                "to download": network.get("bytes", 0) if waiting else 0,
                "licence": network.get("licence", "not stated"),
                "extracted": f"{len(own) - len(waiting)} of {len(own)}",
                "hours": seconds / 3600,
            }
        )
    return pd.DataFrame(rows)


def measure_speed() -> tuple[str, float]:
    """GFLOP per second of a ResNet-50's forward pass here, with random weights, and what it was measured on."""
    import timm
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    batch = 128 if device.type == "cuda" else 8
    model = timm.create_model("resnet50").eval().to(device, memory_format=torch.channels_last)
    images = torch.rand(batch, 3, 224, 224, device=device).to(memory_format=torch.channels_last)

    def run() -> int:
        with torch.inference_mode():
            model(images)
            if device.type == "cuda":
                torch.cuda.synchronize()
        return batch

    return name, GFLOPS * _rate(run)


def measure_decoding() -> float:
    """Images per second that all cores read together: JPEG files of 500 × 375 pixels, resized and cropped to 224."""
    from joblib import cpu_count
    from torchvision.models import ResNet50_Weights

    file, transform = io.BytesIO(), ResNet50_Weights.IMAGENET1K_V1.transforms()
    pixels = np.random.default_rng(0).integers(0, 256, (24, 32, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((500, 375)).save(file, "JPEG", quality=90)

    def run() -> int:
        transform(Image.open(io.BytesIO(file.getvalue())).convert("RGB"))
        return 1

    return _rate(run) * cpu_count()


def measure_extraction(n_images: int, model: str, batch_size: int) -> tuple[float, float]:
    """What the pipeline costs beside the network: images per second of an extraction, and of the bare forward pass.

    Args:
        n_images: synthetic images of 224 × 224 pixels. model: of timm, with random weights. batch_size: images at once.

    Returns:
        The two rates, measured one after the other; transforming and writing are in the first one.

    Source: ours.
    """
    import tempfile

    import timm
    import torch

    from smartlib.data.vision.extraction import extract
    from smartlib.data.vision.models import cut
    from smartlib.data.vision.sources import Arrays

    # The same image again and again: a view, not a copy.
    pixels = np.random.default_rng(0).integers(0, 256, (224, 224, 3), dtype=np.uint8)
    source = Arrays(np.broadcast_to(pixels, (n_images, *pixels.shape)), np.zeros(n_images, int), 1000)
    source.identity = "synthetic"  # not the hash of 50,000 times the same pixels
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = {"input_size": (3, 224, 224), "crop_pct": 1.0}
    network = cut(timm.create_model(model).eval(), timm.data.create_transform(**config, is_training=False), model)
    body = network.body.to(device, memory_format=torch.channels_last)
    batch = torch.rand(batch_size, 3, 224, 224, device=device).to(memory_format=torch.channels_last)

    def run() -> int:
        with torch.inference_mode():
            body(batch)
            if device.type == "cuda":
                torch.cuda.synchronize()
        return batch_size

    bare = _rate(run)
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        extract(source, network, folder, batch_size=batch_size)
        return n_images / (time.perf_counter() - start), bare


def report() -> Iterator[str]:
    """The plan in lines of text."""
    name, speed = measure_speed()
    decoding = measure_decoding()
    data, models = dataset_plan(), model_plan(speed, decoding)
    yield f"Images are looked for in {images_folder()} (SMARTLIB_IMAGES_DIR).\n"
    for row in data.to_dict("records"):
        yield f"{row['data set']}: {row['images']:,} images, {row['how']}, {_size(row['to download'])} to download"
        yield f"    licence: {row['licence']}\n    checksum: {row['checksum']}\n    folder: {row['folder']}"
    yield f"\nMeasured here ({name}): {speed / GFLOPS:.0f} images/s by a ResNet-50, {decoding:.0f} images/s decoded.\n"
    shown = models.assign(
        **{"to download": models["to download"].map(_size), "hours": models["hours"].map("{:.1f}".format)}
    )
    yield shown.to_string(index=False)
    total = _size(data["to download"].sum() + models["to download"].sum())
    yield f"\nIn all: {total} to download, about {models['hours'].sum():.1f} hours of extraction on this machine."


def _seconds(job: Job, gflops: float, speed: float, decoding: float) -> float:
    entry = catalogue()["data sets"][job.dataset]
    # Small images cost little to read: their number of pixels counts.
    side = entry.get("side", 224)
    return entry.get("images", 0) * max(gflops / speed, (side / 224) ** 2 / decoding)


def _checksums(entry: dict) -> str:
    archives = entry.get("archives", [])
    known = [archive["checksum"] for archive in archives if "checksum" in archive]
    return f"{known[0]}{f' and {len(known) - 1} more' if len(known) > 1 else ''}" if known else "none published"


def _rate(run) -> float:
    run()
    done, start = 0, time.perf_counter()
    while time.perf_counter() - start < _SAMPLE:
        done += run()
    return done / (time.perf_counter() - start)


def _size(n_bytes: float) -> str:
    return "nothing" if not n_bytes else f"{n_bytes / 1e9:.1f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:.0f} MB"
