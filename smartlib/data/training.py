"""Train the shipped models on Fashion-MNIST and write their logits (``make zoo``).

Small networks of three families, built with timm and torchvision, sized so that a laptop's CPU trains
each in half an hour. They are trained to fit: cross-entropy, a decaying learning rate, no early
stopping. That is what makes networks over-confident, and over-confidence is what the companion is about.

The 60,000 training images are split once (seed 0) into 50,000 for training and 10,000 for validation,
which is where calibrators are fitted. The official 10,000 test images are only predicted on.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import numpy as np
import torch
from torch import nn
from tqdm.auto import tqdm

import smartlib
from smartlib.data.fashion_images import load_images
from smartlib.data.zoo import SHIPPED_FOLDER, save_arrays

N_VALIDATION = 10_000
SPLIT_SEED = 0
# Mean and standard deviation of the 50,000 training images' pixels, scaled to [0, 1].
PIXEL_MEAN, PIXEL_STD = 0.286, 0.353


def resnet() -> nn.Module:
    """A ResNet of four basic blocks (He et al. 2016) by timm; 64 features."""
    from timm.models.resnet import BasicBlock, ResNet

    model = ResNet(
        BasicBlock, (1, 1, 1, 1), num_classes=10, in_chans=1, channels=(32, 48, 64, 64), stem_type="deep", stem_width=16
    )
    model.maxpool = nn.Identity()  # 28 x 28 images: one halving in the stem is enough
    return model


def densenet() -> nn.Module:
    """A DenseNet-BC of three blocks of four layers (Huang et al. 2017) by torchvision; 90 features."""
    from torchvision.models import DenseNet

    model = DenseNet(growth_rate=12, block_config=(4, 4, 4), num_init_features=24, num_classes=10)
    model.features.conv0 = nn.Conv2d(1, 24, kernel_size=3, stride=2, padding=1, bias=False)
    model.features.pool0 = nn.Identity()
    return model


def vit() -> nn.Module:
    """A vision transformer (Dosovitskiy et al. 2021) by timm: 49 patches of 4 x 4, width 64, depth 3; 64 features."""
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(
        img_size=28, patch_size=4, in_chans=1, num_classes=10, embed_dim=64, depth=3, num_heads=4, mlp_ratio=4
    )


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

    def settings(self) -> dict:
        return asdict(self) | {"build": self.build.__name__}


RECIPES = {
    "resnet": Recipe(resnet, head="fc", optimizer="sgd", lr=0.1, weight_decay=5e-4, epochs=15),
    "densenet": Recipe(densenet, head="classifier", optimizer="sgd", lr=0.1, weight_decay=5e-4, epochs=15),
    "vit": Recipe(vit, head="head", optimizer="adamw", lr=2e-3, weight_decay=0.05, epochs=20),
}


def split_indices(n: int, n_validation: int) -> tuple[np.ndarray, np.ndarray]:
    """The fixed split of the training images: ``(training indices, validation indices)``, each sorted."""
    order = np.random.default_rng(SPLIT_SEED).permutation(n)
    return np.sort(order[n_validation:]), np.sort(order[:n_validation])


def _as_batch(images: np.ndarray) -> torch.Tensor:
    """uint8 (N, 28, 28) -> float32 (N, 1, 28, 28), standardised."""
    return ((torch.from_numpy(images.copy()).float() / 255 - PIXEL_MEAN) / PIXEL_STD).unsqueeze(1)


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


def train(
    recipe: Recipe, images: np.ndarray, labels: np.ndarray, checkpoint: Path, device: str, progress: bool = True
) -> nn.Module:
    """Train one model; after each epoch the state is saved, and an interrupted run continues from it.

    Args:
        recipe: architecture and settings.
        images: (N, 28, 28) uint8. labels: (N,) int64.
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
                  desc=recipe.build.__name__, unit="epoch", disable=not progress)  # fmt: skip
    for epoch in epochs:
        model.train()
        # The order of an epoch depends on (seed, epoch) alone, so that a resumed run equals an unbroken one.
        order = torch.from_numpy(np.random.default_rng((recipe.seed, epoch)).permutation(len(y))).to(device)
        total = 0.0
        for batch in order.split(recipe.batch_size):
            optimizer.zero_grad(set_to_none=True)
            loss = nn.functional.cross_entropy(model(x[batch].contiguous(memory_format=torch.channels_last)), y[batch])
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


def build_zoo(
    names: tuple[str, ...], images_folder: str | None, workdir: Path, output: Path, *, recipes=RECIPES, check=True
) -> None:
    """Train each named model and write ``<output>/fashion/<name>.npz`` and ``.json``."""
    train_images, train_labels, test_images, test_labels = load_images(images_folder, check=check)
    n_validation = min(N_VALIDATION, len(train_labels) // 6)
    fit, held_out = split_indices(len(train_labels), n_validation)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    workdir.mkdir(parents=True, exist_ok=True)
    for name in names:
        recipe = recipes[name]
        model = train(recipe, train_images[fit], train_labels[fit], workdir / f"{name}.pt", device)
        layer = model.get_submodule(recipe.head)
        arrays = {"head_weight": layer.weight.detach().cpu().numpy(), "head_bias": layer.bias.detach().cpu().numpy()}
        accuracy, ece = {}, {}
        for split, images, labels in (
            ("train", train_images[fit], train_labels[fit]),
            ("val", train_images[held_out], train_labels[held_out]),
            ("test", test_images, test_labels),
        ):
            logits, features = predict(model, recipe.head, images, device)
            confidence = torch.from_numpy(logits).double().softmax(1).amax(1).numpy()
            correct = logits.argmax(1) == labels
            accuracy[split] = float(correct.mean())
            ece[split] = smartlib.expected_calibration_error(confidence, correct)
            if split != "train":
                arrays |= {f"{split}_logits": logits, f"{split}_labels": labels, f"{split}_features": features}
        provenance = {
            "name": f"fashion/{name}",
            "dataset": "Fashion-MNIST (Xiao, Rasul, Vollgraf 2017), MIT licence",
            "images_sha256": hashlib.sha256(train_images.tobytes() + test_images.tobytes()).hexdigest(),
            "split": f"{len(fit)} train / {len(held_out)} validation (seed {SPLIT_SEED}) / {len(test_labels)} test",
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
        save_arrays(output, f"fashion/{name}", arrays, provenance)
        click.echo(json.dumps({"name": name, "accuracy": accuracy, "ece_uncalibrated": ece}))


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(tuple(RECIPES)))
@click.option("--images", "images_folder", help="Folder with the four idx files (default: Debian's, else a download).")
@click.option("--workdir", default="build/zoo", type=click.Path(path_type=Path), help="Folder for the checkpoints.")
def main(names: tuple[str, ...], images_folder: str | None, workdir: Path) -> None:
    """Train the shipped models (all, or those NAMED), resuming from the last finished epoch."""
    build_zoo(names or tuple(RECIPES), images_folder, workdir, SHIPPED_FOLDER)


if __name__ == "__main__":
    main()
