"""Logits and features of all images of a source, on whatever is there: one GPU, several, a cluster, or the CPU.

Images are cut into shards of consecutive rows. A run computes those that are missing (`smartlib.data.vision.shards`),
so that it can be killed at any time, and several processes can share the work:

* ``torchrun --nproc-per-node 4 -m smartlib.data.vision extract`` gives every fourth shard to each process and its GPU;
* with ``SMARTLIB_SCHEDULER=tcp://...`` the shards are tasks of a Dask cluster; where its workers were started with
  ``--resources GPU=1``, one task at a time runs on each GPU. The folder must be one that all of them see.

Neither the number of processes nor the batch size changes the result by more than rounding.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm

from smartlib.data.vision import shards
from smartlib.data.vision.models import Network
from smartlib.data.vision.sources import CorruptImageError, Stream

PRECISIONS = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}

Batch = tuple[list[int], torch.Tensor | None, list[int], list[tuple[int, str]]]


class CorruptImageWarning(UserWarning):
    """Images that could not be decoded were left out."""


def extract(
    source: Dataset | Stream, network: Network, folder: str | os.PathLike, *, batch_size: int = 128,
    shard_rows: int = shards.SHARD_ROWS, device: str = "auto", precision: str = "float32", n_workers: int | None = None,
    compiled: bool = False, on_corrupt: str = "error", about: dict | None = None,
) -> Path:  # fmt: skip
    """Write the logits, labels and, where the network has a linear head, features of all images.

    Args:
        source: from `smartlib.data.vision.sources`. network: from `smartlib.data.vision.models`.
        folder: receives the shards and, at the end, ``manifest.json``.
        batch_size: images at once. shard_rows: images per shard.
        device: "auto" takes this process' GPU where there is one, else the CPU.
        precision: of the network's body: "float32", or "bfloat16" or "float16" by autocast, which on a GPU is faster
            and moves logits by about a hundredth. Logits are computed from features, and kept, in float32.
        n_workers: processes that decode images; by default one per core, at most 16. On Stream they are threads.
        compiled: use ``torch.compile``: worth its minutes from some ten thousand images on.
        on_corrupt: "error" ends the run at an image that cannot be decoded; "skip" leaves it out, and says so.
        about: written to the manifest: data set, model, licence.

    Returns:
        The folder. ``rows`` (N,) int64, ``labels`` (N,) int64, ``logits`` (N, K) float32, ``features`` (N, D) float32
        are its arrays (:func:`smartlib.data.vision.shards.read_shards`); ``rows`` are those of the source.

    Raises:
        ValueError: an option has no such value, or the source has other classes than the network.
        CorruptImageError: an image cannot be decoded (on_corrupt="error").
        OSError: the disk has not so much room.

    Warns:
        CorruptImageWarning: images were left out.

    Source: ours.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
    if on_corrupt not in ("error", "skip"):
        raise ValueError(f"on_corrupt must be 'error' or 'skip', got {on_corrupt!r}")
    if source.n_classes > network.n_classes:
        raise ValueError(f"the source has {source.n_classes} classes, but {network.name} only {network.n_classes}")
    folder, n = Path(folder), len(source)
    parts = [source.identity, network.sha256, precision, on_corrupt, shard_rows]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
    spans = [(start, min(start + shard_rows, n)) for start in range(0, n, shard_rows)]
    if (manifest := shards.read_manifest(folder)) and manifest["key"] == key:
        return folder
    with _process_group() as (rank, world):
        records = [shards.read_record(folder, index, key, span) for index, span in enumerate(spans)]
        waiting = [(index, spans[index]) for index, record in enumerate(records) if record is None]
        width = network.n_classes + (network.head.in_features if network.head is not None else 0) + 4
        shards.check_space(folder, sum(stop - start for _, (start, stop) in waiting) * width * 4)
        options = {
            "batch_size": batch_size, "device": device, "precision": precision, "compiled": compiled,
            "n_workers": n_workers, "on_corrupt": on_corrupt, "key": key,
        }  # fmt: skip
        bar = tqdm(
            total=n, initial=n - sum(stop - start for _, (start, stop) in waiting), unit="image", desc=network.name,
            disable=rank > 0 or not waiting,
        )  # fmt: skip
        with bar:
            if os.environ.get("SMARTLIB_SCHEDULER") and waiting:
                _on_cluster(source, network, folder, waiting, options, bar.update)
            else:
                # What other processes do is not seen before it is done: their share is counted with this one's.
                own = waiting[rank::world]
                extract_shards(source, network, folder, own, **options, update=lambda rows: bar.update(rows * world))
        if world > 1:
            torch.distributed.barrier()
        if rank == 0:
            records = [shards.read_record(folder, index, key, span) for index, span in enumerate(spans)]
            if missing := [index for index, record in enumerate(records) if record is None]:
                raise RuntimeError(f"{folder}: shard {missing[0]} was not written; start again to compute it")
            skipped = [item for record in records for item in record["skipped"]]
            head = {} if network.head is None else _head_arrays(network.head)
            if head:
                shards.write_file(folder / "head.safetensors", shards.pack(head))
            shards.write_manifest(
                folder, records, key=key, network=network.name, network_sha256=network.sha256,
                n_classes=network.n_classes, precision=precision, images=n, skipped=skipped, about=about or {},
            )  # fmt: skip
            if skipped:
                warnings.warn(
                    f"{len(skipped)} of {n} images could not be decoded and were left out, the first: {skipped[0][1]}",
                    CorruptImageWarning,
                    stacklevel=2,
                )
        if world > 1:
            torch.distributed.barrier()
    return folder


def extract_shards(
    source: Dataset | Stream, network: Network, folder: Path, waiting: Sequence[tuple[int, tuple[int, int]]], *,
    batch_size: int, device: str, precision: str, compiled: bool, n_workers: int | None, on_corrupt: str, key: str,
    update: Callable[[int], object] = lambda rows: None,
) -> None:  # fmt: skip
    """Compute some shards and write each as soon as it is there: what one process does of :func:`extract`.

    Args:
        waiting: number and span of each shard. key: of the records. update: is told of so many finished rows.
            The others as of :func:`extract`.
    """
    if not waiting:
        return
    place = _device(device)
    forward = _forward(network, place, precision, compiled)
    if n_workers is None:
        n_workers = min(16, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    spans = [span for _, span in waiting]
    if isinstance(source, Stream):
        batches = _stream_batches(source, network.transform, spans, batch_size)
    else:
        batches = _file_batches(source, network.transform, spans, batch_size, n_workers, place)
    numbers = iter(waiting)
    index, (start, stop) = next(numbers)
    parts: list[tuple] = []
    skipped: list[tuple[int, str]] = []
    done = start
    for rows, images, labels, bad in batches:
        if bad and on_corrupt == "error":
            raise CorruptImageError(f"{bad[0][1]}; on_corrupt='skip' leaves such images out")
        skipped += bad
        if images is not None:
            parts.append((np.array(rows), np.array(labels), *forward(images)))
        done += len(rows) + len(bad)
        update(len(rows) + len(bad))
        if done == stop:
            shards.write_shard(folder, index, key, (start, stop), _joined(parts), skipped=skipped)
            parts, skipped = [], []
            index, (start, stop) = next(numbers, (index, (start, stop)))
            done = start


def _forward(network: Network, device: torch.device, precision: str, compiled: bool) -> Callable:
    """A function of a batch of images that gives its logits and features, float32 on the CPU."""
    body = network.body.to(device, memory_format=torch.channels_last)
    head = network.head.to(device) if network.head is not None else None
    run = torch.compile(body) if compiled else body
    dtype = PRECISIONS[precision]

    def forward(images: torch.Tensor) -> tuple[np.ndarray, ...]:
        images = images.to(device, memory_format=torch.channels_last, non_blocking=True)
        with torch.inference_mode():
            with torch.autocast(device.type, dtype, enabled=dtype is not None):
                found = run(images)
            found = found.float()
            arrays = (found,) if head is None else (head(found), found)
        # One copy per batch, in pageable memory: the logits of a batch are small beside its images.
        return tuple(array.cpu().numpy() for array in arrays)

    return forward


def _joined(parts: list[tuple]) -> dict[str, np.ndarray]:
    names = ("rows", "labels", "logits", "features")
    if not parts:
        raise CorruptImageError("not one image of a whole shard could be decoded")
    return {name: np.concatenate(arrays) for name, arrays in zip(names, zip(*parts, strict=True), strict=False)}


def _head_arrays(head: torch.nn.Linear) -> dict[str, np.ndarray]:
    weight = head.weight.detach().float().cpu().numpy()
    bias = head.bias.detach().float().cpu().numpy() if head.bias is not None else np.zeros(len(weight), np.float32)
    return {"weight": weight, "bias": bias}


class _Rows(Dataset):
    """A source whose images are transformed, and whose corrupt images are messages."""

    def __init__(self, source: Dataset, transform: Callable):
        self.source, self.transform = source, transform

    def __getitem__(self, row: int) -> tuple[int, torch.Tensor | str, int]:
        try:
            image, label = self.source[row]
        except CorruptImageError as error:
            return row, str(error), -1
        return row, self.transform(image), label


def _collate(items: list[tuple[int, torch.Tensor | str, int]]) -> Batch:
    good = [item for item in items if not isinstance(item[1], str)]
    bad = [(row, message) for row, message, _ in items if isinstance(message, str)]
    images = torch.stack([image for _, image, _ in good]) if good else None
    return [row for row, _, _ in good], images, [label for _, _, label in good], bad


def _file_batches(source, transform, spans, batch_size, n_workers, device) -> Iterator[Batch]:
    """Batches of the spans' rows in order; none of them has rows of two spans."""
    batches = [
        range(first, min(first + batch_size, stop)) for start, stop in spans for first in range(start, stop, batch_size)
    ]
    # Workers are worth their start only where there is something to decode for each.
    n_workers = min(n_workers, len(batches) // 4)
    return iter(
        DataLoader(
            _Rows(source, transform), batch_sampler=batches, num_workers=n_workers, collate_fn=_collate,
            pin_memory=device.type == "cuda", prefetch_factor=4 if n_workers else None,
        )
    )  # fmt: skip


def _stream_batches(source: Stream, transform, spans, batch_size) -> Iterator[Batch]:
    for start, stop in spans:
        items = []
        for row, image, label in source.rows(start, stop):
            failed = isinstance(image, CorruptImageError)
            items.append((row, str(image) if failed else transform(image), label))
            if len(items) == batch_size:
                yield _collate(items)
                items = []
        if items:
            yield _collate(items)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name!r}: torch sees no GPU here; take device='cpu'")
    return device


@contextmanager
def _process_group() -> Iterator[tuple[int, int]]:
    """Rank and number of the processes that torchrun (or accelerate) started; 0 and 1 without it."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world == 1:
        yield 0, 1
        return
    started_here = not torch.distributed.is_initialized()
    if started_here:
        # Only to wait for each other: no tensor is exchanged, so the CPU's backend serves GPUs as well.
        torch.distributed.init_process_group("gloo")
    try:
        yield torch.distributed.get_rank(), world
    finally:
        if started_here:
            torch.distributed.destroy_process_group()


def _on_cluster(source, network: Network, folder: Path, waiting, options: dict, update: Callable) -> None:
    """One task per shard on the Dask cluster, on workers with a GPU where there are any."""
    from distributed import Client, as_completed

    with Client(os.environ["SMARTLIB_SCHEDULER"]) as client:
        workers = client.scheduler_info(n_workers=-1)["workers"].values()
        resources = {"GPU": 1} if any(worker["resources"].get("GPU") for worker in workers) else None
        # Sent once to each worker, not with each task.
        both = client.scatter((source, network), broadcast=True)
        run = partial(_cluster_task, folder=folder, options=options)
        futures = {client.submit(run, both, item, pure=False, resources=resources): item for item in waiting}
        for future in as_completed(futures):
            future.result()
            start, stop = futures[future][1]
            update(stop - start)


def _cluster_task(both: tuple, item: tuple, *, folder: Path, options: dict) -> None:
    # A task of a cluster may not start processes of its own.
    extract_shards(*both, folder, [item], **options | {"n_workers": 0})
