"""Train the shipped models on Fashion-MNIST and write their logits (``make zoo``).

Small networks of four families (`smartlib.data.architectures`), each trained on one core in a quarter of an hour to an
hour; all twelve take about four and a half hours of one core, with their distances and shifted logits. They are trained
to fit: cross-entropy, a decaying learning rate, no early stopping. That is what makes networks over-confident, and
over-confidence is what the companion is about. Three have a loss that is said to calibrate, two see long-tailed
classes, and three learn pairs of garments, a hundred classes (`smartlib.data.pairs`).

The 60,000 training images are split once (seed 0) into 50,000 for training and 10,000 for validation, which is where
calibrators are fitted. The official 10,000 test images are only predicted on.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import click
import numpy as np
import torch
from joblib import Parallel, delayed
from torch import nn
from tqdm.auto import tqdm

import smartlib
from smartlib.data.architectures import densenet, pairs_resnet, pairs_vit, pairs_wideresnet, resnet, vit, wideresnet
from smartlib.data.boundary import smallest_perturbation
from smartlib.data.corruptions import CORRUPTIONS, SEVERITIES, corrupt, sketch
from smartlib.data.fashion_images import load_images
from smartlib.data.pairs import pair_up
from smartlib.data.variants import long_tailed
from smartlib.data.zoo import SHIPPED_FOLDER, Boundary, save_arrays, save_boundary, save_shifted

N_VALIDATION = 10_000
SPLIT_SEED = 0
# Mean and standard deviation of the 50,000 training images' pixels, scaled to [0, 1].
PIXEL_MEAN, PIXEL_STD = 0.286, 0.353


@dataclass(frozen=True)
class Recipe:
    """How one shipped model is built and trained."""

    build: Callable[[], nn.Module]
    head: str  # the name of the last linear layer
    optimizer: str
    lr: float
    weight_decay: float
    epochs: int
    batch_size: int = 128
    seed: int = 0
    loss: str = "cross-entropy"  # or "focal", "label-smoothing", "mixup"
    imbalance: int = 1  # the largest class of the training images divided by the smallest

    def settings(self) -> dict:
        return asdict(self) | {"build": self.build.__name__}


_RESNET = Recipe(resnet, head="fc", optimizer="sgd", lr=0.1, weight_decay=5e-4, epochs=15)
_PAIRS = Recipe(pairs_resnet, head="1.fc", optimizer="sgd", lr=0.1, weight_decay=5e-4, epochs=12)

# By the name of the bundle: fashion/ has ten classes, fashion-pairs/ a hundred.
RECIPES = {
    "fashion/resnet": _RESNET,
    "fashion/densenet": replace(_RESNET, build=densenet, head="classifier"),
    "fashion/wideresnet": replace(_RESNET, build=wideresnet, epochs=12),
    "fashion/vit": Recipe(vit, head="head", optimizer="adamw", lr=2e-3, weight_decay=0.05, epochs=20),
    "fashion/resnet-focal": replace(_RESNET, loss="focal", epochs=12),
    "fashion/resnet-smoothing": replace(_RESNET, loss="label-smoothing", epochs=12),
    "fashion/resnet-mixup": replace(_RESNET, loss="mixup", epochs=12),
    "fashion/resnet-lt10": replace(_RESNET, imbalance=10),
    "fashion/resnet-lt100": replace(_RESNET, imbalance=100),
    "fashion-pairs/resnet": _PAIRS,
    "fashion-pairs/wideresnet": replace(_PAIRS, build=pairs_wideresnet, epochs=16),
    "fashion-pairs/vit": Recipe(pairs_vit, head="head", optimizer="adamw", lr=2e-3, weight_decay=0.05, epochs=30),
}


# Features cost most of a bundle's size; feature-based calibrators are compared on these.
WITH_FEATURES = tuple(
    name for name, recipe in RECIPES.items() if recipe.loss == "cross-entropy" and recipe.imbalance == 1
)
# How many images of each split are shifted, and how many test images are brought to the decision boundary.
SHIFTED = {
    "fashion/wideresnet": {"test": 2000, "val": 1000},
    "fashion/resnet-mixup": {"test": 2000, "val": 1000},
    "fashion-pairs/resnet": {"test": 1000},
}
BOUNDARY = {name: 1000 if name.startswith("fashion-pairs/") else 2000 for name in RECIPES if "-lt" not in name}


def split_indices(n: int, n_validation: int) -> tuple[np.ndarray, np.ndarray]:
    """The fixed split of the training images: ``(training indices, validation indices)``, each sorted."""
    order = np.random.default_rng(SPLIT_SEED).permutation(n)
    return np.sort(order[n_validation:]), np.sort(order[:n_validation])


def _as_batch(images: np.ndarray) -> torch.Tensor:
    """uint8 (N, H, W) -> float32 (N, 1, H, W), standardised."""
    return (_unit(images) - PIXEL_MEAN) / PIXEL_STD


def _unit(images: np.ndarray) -> torch.Tensor:
    """uint8 (N, H, W) -> float32 (N, 1, H, W) in [0, 1]."""
    return (torch.from_numpy(images.copy()).float() / 255).unsqueeze(1)


def _optimizer(model: nn.Module, recipe: Recipe, n_steps: int):
    if recipe.optimizer == "sgd":
        optimizer = torch.optim.SGD(
            model.parameters(), lr=recipe.lr, momentum=0.9, nesterov=True, weight_decay=recipe.weight_decay
        )
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, weight_decay=recipe.weight_decay)
    # One cycle: a short warm-up (transformers need it), then cosine decay to zero.
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=recipe.lr, total_steps=n_steps, pct_start=0.15, cycle_momentum=False
    )
    return optimizer, schedule


def compute_loss(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, kind: str, rng: np.random.Generator
) -> torch.Tensor:
    """The training loss of one batch.

    Args:
        model: the network. x: (B, 1, H, W). y: (B,) int64.
        kind: "cross-entropy"; "focal" with gamma = 3 (Mukhoti et al. 2020); "label-smoothing" of 0.05 (Szegedy et al.
            2016); "mixup" with weights from Beta(0.2, 0.2) (Zhang et al. 2018).
        rng: for mixup.
    """
    if kind == "mixup":
        weight = float(rng.beta(0.2, 0.2))
        other = torch.from_numpy(rng.permutation(len(y))).to(y.device)
        logits = model((weight * x + (1 - weight) * x[other]).contiguous(memory_format=torch.channels_last))
        first, second = (nn.functional.cross_entropy(logits, labels) for labels in (y, y[other]))
        return weight * first + (1 - weight) * second
    logits = model(x.contiguous(memory_format=torch.channels_last))
    if kind == "focal":
        log_p = nn.functional.log_softmax(logits, dim=1).gather(1, y[:, None]).squeeze(1)
        return (-((1 - log_p.exp()) ** 3) * log_p).mean()
    return nn.functional.cross_entropy(logits, y, label_smoothing=0.05 if kind == "label-smoothing" else 0.0)


def train(
    recipe: Recipe, images: np.ndarray, labels: np.ndarray, checkpoint: Path, device: str, progress: bool = True
) -> nn.Module:
    """Train one model; after each epoch the state is saved, and an interrupted run continues from it.

    Args:
        recipe: architecture and settings.
        images: (N, H, W) uint8. labels: (N,) int64.
        checkpoint: file for the state; replaced atomically after every epoch.
        device: "cpu" or "cuda".
        progress: show a progress bar.

    Returns:
        The trained model in evaluation mode, on ``device``.
    """
    # The initial weights come from torch's global generator; it is put back as it was.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = recipe.build()
    model.to(device, memory_format=torch.channels_last)
    steps_per_epoch = -(-len(labels) // recipe.batch_size)
    optimizer, schedule = _optimizer(model, recipe, recipe.epochs * steps_per_epoch)
    x, y = _as_batch(images).to(device), torch.from_numpy(labels).to(device)

    first_epoch = 0
    if checkpoint.is_file():
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        if state["settings"] == recipe.settings():
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            schedule.load_state_dict(state["schedule"])
            first_epoch = state["epoch"]

    epochs = tqdm(range(first_epoch, recipe.epochs), initial=first_epoch, total=recipe.epochs,
                  desc=checkpoint.stem, unit="epoch", disable=not progress)  # fmt: skip
    for epoch in epochs:
        model.train()
        # The order of an epoch depends on (seed, epoch) alone, so that a resumed run equals an unbroken one.
        rng = np.random.default_rng((recipe.seed, epoch))
        order = torch.from_numpy(rng.permutation(len(y))).to(device)
        total = 0.0
        for batch in order.split(recipe.batch_size):
            optimizer.zero_grad(set_to_none=True)
            loss = compute_loss(model, x[batch], y[batch], recipe.loss, rng)
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item() * len(batch)
        epochs.set_postfix(loss=f"{total / len(y):.4f}")
        state = {
            "settings": recipe.settings(), "epoch": epoch + 1, "model": model.state_dict(),
            "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict(),
        }  # fmt: skip
        temporary = checkpoint.with_suffix(".tmp")
        torch.save(state, temporary)
        os.replace(temporary, checkpoint)
    return model.eval()


@torch.no_grad()
def predict(model: nn.Module, head: str, images: np.ndarray, device: str) -> tuple[np.ndarray, np.ndarray]:
    """Logits (N, K) and penultimate features (N, D), the input of the layer named ``head``, both float32."""
    captured: list[torch.Tensor] = []
    hook = model.get_submodule(head).register_forward_pre_hook(lambda _, args: captured.append(args[0].float().cpu()))
    try:
        logits = [model(batch.to(device)).float().cpu() for batch in _as_batch(images).split(1000)]
    finally:
        hook.remove()
    return torch.cat(logits).numpy(), torch.cat(captured).numpy()


def task_images(name: str, images: tuple, recipe: Recipe) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The images and labels of a model's three splits.

    Args:
        name: of the bundle; it says whether the task is single garments or pairs.
        images: from `load_images`. recipe: says how imbalanced the training images are.

    Returns:
        By ``"train"``, ``"val"`` and ``"test"``: (N, H, W) uint8 and (N,) int64.
    """
    train_images, train_labels, test_images, test_labels = images
    fit, held_out = split_indices(len(train_labels), min(N_VALIDATION, len(train_labels) // 6))
    splits = {
        "train": (train_images[fit], train_labels[fit]),
        "val": (train_images[held_out], train_labels[held_out]),
        "test": (test_images, test_labels),
    }
    if name.startswith("fashion-pairs/"):
        splits = {split: pair_up(*arrays) for split, arrays in splits.items()}
    if recipe.imbalance > 1:
        kept = long_tailed(splits["train"][1], recipe.imbalance)
        splits["train"] = tuple(array[kept] for array in splits["train"])
    return splits


def shifted_images(pixels: np.ndarray, seed: int) -> Iterator[tuple[str, np.ndarray]]:
    """Every condition of the shift experiments: its name and the images under it.

    Args:
        pixels: (N, 28, 28) or, for pairs, (N, 28, 56) uint8; each garment is corrupted by itself.
        seed: of the corruptions.
    """
    height, width = pixels.shape[1:]
    garments = np.concatenate(np.split(pixels, width // height, axis=2))

    def joined(changed: np.ndarray) -> np.ndarray:
        return np.concatenate(np.split(changed, width // height), axis=2)

    for corruption in CORRUPTIONS:
        for severity in SEVERITIES:
            yield f"{corruption}-{severity}", joined(corrupt(garments, corruption, severity, seed))
    yield "sketch", joined(sketch(garments))


def build_model(name: str, recipe: Recipe, images: tuple, workdir: Path, output: Path) -> dict:
    """Train a model and write its bundle, and where they are shipped its shifted logits and boundary distances.

    Returns:
        Name, accuracy and ECE by split.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    splits = task_images(name, images, recipe)
    start = time.monotonic()
    model = train(recipe, *splits["train"], workdir / f"{name.replace('/', '-')}.pt", device)
    minutes = (time.monotonic() - start) / 60
    layer = model.get_submodule(recipe.head)
    arrays = {"head_weight": layer.weight.detach().cpu().numpy(), "head_bias": layer.bias.detach().cpu().numpy()}
    accuracy, ece = {}, {}
    for split, (pixels, labels) in splits.items():
        logits, features = predict(model, recipe.head, pixels, device)
        confidence = torch.from_numpy(logits).double().softmax(1).amax(1).numpy()
        correct = logits.argmax(1) == labels
        accuracy[split] = float(correct.mean())
        ece[split] = smartlib.expected_calibration_error(confidence, correct)
        if split != "train":
            arrays |= {f"{split}_logits": logits, f"{split}_labels": labels}
            if name in WITH_FEATURES:
                arrays[f"{split}_features"] = features
    provenance = {
        "name": name,
        "dataset": "Fashion-MNIST (Xiao, Rasul, Vollgraf 2017), MIT licence"
        + ("; Fashion-Pairs-100: disjoint random pairs, side by side" if name.startswith("fashion-pairs/") else ""),
        "images_sha256": hashlib.sha256(images[0].tobytes() + images[2].tobytes()).hexdigest(),
        "split": f"{len(splits['train'][1])} train / {len(splits['val'][1])} validation (seed {SPLIT_SEED}) / "
        f"{len(splits['test'][1])} test",
        "architecture": " ".join(recipe.build.__doc__.split()),
        "n_parameters": sum(p.numel() for p in model.parameters()),
        "settings": recipe.settings(),
        "accuracy": accuracy,
        "ece_uncalibrated": ece,
        "code": {
            "smartlib": smartlib.__version__,
            "training.py sha256": hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),
            "torch": torch.__version__,
        },
        "device": device,
    }
    save_arrays(output, name, arrays, provenance)
    about = {key: provenance[key] for key in ("name", "dataset", "images_sha256", "code", "device")}
    if name in SHIFTED:
        shifted: dict[str, dict] = {}
        for seed, split in enumerate(SHIFTED[name]):
            pixels, labels = (array[fixed_rows(len(splits[split][1]), SHIFTED[name][split])] for array in splits[split])
            for condition, changed in shifted_images(pixels, seed):
                logits, _ = predict(model, recipe.head, changed, device)
                shifted.setdefault(condition, {})[split] = (logits, labels)
        save_shifted(output, name, shifted, about)
    if name in BOUNDARY:
        rows = fixed_rows(len(splits["test"][1]), BOUNDARY[name])
        found = smallest_perturbation(
            lambda x: model((x - PIXEL_MEAN) / PIXEL_STD), _unit(splits["test"][0][rows]).to(device)
        )
        save_boundary(output, name, Boundary(rows, found.distance, found.other), about)
    return {"name": name, "accuracy": accuracy, "ece_uncalibrated": ece, "training_minutes": round(minutes, 1)}


def fixed_rows(n: int, size: int) -> np.ndarray:
    """So many of n samples, drawn once for all, sorted."""
    return np.sort(np.random.default_rng(SPLIT_SEED).permutation(n)[:size])


def build_zoo(
    names: Sequence[str], images_folder: str | None, workdir: Path, output: Path, *, recipes=RECIPES, check=True
) -> None:
    """Build the named models, as many at a time as there are cores: one thread each, so that the number of cores
    decides nothing; on a GPU one after the other.
    """
    images = load_images(images_folder, check=check)
    workdir.mkdir(parents=True, exist_ok=True)
    jobs = 1 if torch.cuda.is_available() else -1
    builds = Parallel(n_jobs=jobs, return_as="generator_unordered", batch_size=1)(
        delayed(_build_alone)(name, recipes[name], images, workdir, output) for name in names
    )
    for built in builds:
        click.echo(json.dumps(built))


def _build_alone(*args) -> dict:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    try:
        return build_model(*args)
    finally:
        torch.set_num_threads(threads)
        torch.set_flush_denormal(False)


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(tuple(RECIPES)))
@click.option("--images", "images_folder", help="Folder with the four idx files (default: Debian's, else a download).")
@click.option("--workdir", default="build/zoo", type=click.Path(path_type=Path), help="Folder for the checkpoints.")
def main(names: tuple[str, ...], images_folder: str | None, workdir: Path) -> None:
    """Train the shipped models (all, or those NAMED), resuming from the last finished epoch."""
    build_zoo(names or tuple(RECIPES), images_folder, workdir, SHIPPED_FOLDER)


if __name__ == "__main__":
    main()
