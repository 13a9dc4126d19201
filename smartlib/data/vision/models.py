"""Pretrained networks with the transform they were trained with, cut before their last linear layer.

A network is described by a small dictionary, as in ``paper.json``:

* ``{"from": "timm", "name": "resnet50.tv_in1k"}``, also ``"hf_hub:owner/name"``; with ``"checkpoint": "weights.pth"``
  (or ``"hf_hub:owner/name/file"``) the weights of that file, and then ``"n_classes"``; ``"stem": "3x3"`` for ResNets
  that were made for images of 32 × 32 pixels;
* ``{"from": "torchvision", "name": "resnet50", "weights": "IMAGENET1K_V1"}``;
* ``{"from": "torch.hub", "repository": "chenyaofo/pytorch-cifar-models", "name": "cifar10_resnet56"}``;

and where the network does not say it itself: ``"mean"``, ``"std"``, ``"size"``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import nn

# How far logits from features and head may be from the network's own, relative to the largest.
_TOLERANCE = 1e-4


@dataclass(frozen=True, eq=False)
class Network:
    """A network in evaluation mode.

    Args:
        name: what messages call it.
        body: images (B, 3, H, W) to features (B, D), or to logits where ``head`` is None.
        head: the last linear layer, or None where the network does not end in one.
        transform: a PIL image to a tensor (3, H, W). n_classes: K.
    """

    name: str
    body: nn.Module
    head: nn.Linear | None
    transform: Callable[[Image.Image], torch.Tensor]
    n_classes: int

    @property
    def sha256(self) -> str:
        """A hash of all weights and of the transform: what logits depend on, beside the images."""
        digest = hashlib.sha256(repr(self.transform).encode())
        for part in (self.body, self.head):
            for key, value in (part.state_dict() if part is not None else {}).items():
                digest.update(f"{key} {tuple(value.shape)}\0".encode())
                digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()


def load_network(what: dict) -> Network:
    """Load a pretrained network; weights that are not at hand are downloaded by the library they belong to.

    Args:
        what: see the head of this file.

    Returns:
        The network on the CPU.

    Raises:
        ValueError: an unknown library, a checkpoint that is missing or does not fit, or no way to know the transform.
        ConnectionError: the weights are not at hand and could not be downloaded.

    Source: ours; the models are those of their libraries.
    """
    loaders = {"timm": _from_timm, "torchvision": _from_torchvision, "torch.hub": _from_hub}
    if what.get("from") not in loaders:
        raise ValueError(f"a network is from one of {', '.join(loaders)}, got {what.get('from')!r} in {what}")
    try:
        model, transform = loaders[what["from"]](what)
    except OSError as error:  # what urllib, requests and the hub raise; a wrong name is another error
        raise ConnectionError(
            f"the weights of {what['name']} are not at hand and could not be downloaded ({error}); without a network, "
            "copy the folders that torch.hub.get_dir() and HF_HOME name from a machine that has them"
        ) from error
    return cut(model.eval(), transform, str(what["name"]))


def cut(model: nn.Module, transform: Callable[[Image.Image], torch.Tensor], name: str) -> Network:
    """Cut a network before its last linear layer, where that gives the same logits.

    Args:
        model: in evaluation mode, images to logits. transform: of an image. name: of the network.

    Returns:
        The network; ``head`` is None where the model's last step is not a linear layer.

    Source: ours; for timm's models its ``forward_head(pre_logits=True)`` and ``get_classifier``.
    """
    images = _random_images(transform)
    with torch.inference_mode():
        logits = model(images)
        if logits.ndim != 2:
            raise ValueError(f"{name} gives an output of shape {tuple(logits.shape)}, not logits (B, K)")
        body, head = _split_timm(model) if hasattr(model, "get_classifier") else _split_last_linear(model)
        if head is not None:
            features = body(images)
            same = features.ndim == 2 and features.shape[1] == head.in_features
            if same and (head(features) - logits).abs().max() <= _TOLERANCE * logits.abs().max():
                return Network(name, body, head, transform, logits.shape[1])
            if isinstance(body, _Headless):
                body.restore()
    return Network(name, model, None, transform, logits.shape[1])


def _from_timm(what: dict) -> tuple[nn.Module, Callable]:
    import timm

    options = {"num_classes": what["n_classes"]} if "checkpoint" in what else {}
    model = timm.create_model(what["name"], pretrained="checkpoint" not in what, **options)
    if what.get("stem") == "3x3":
        # ResNets for images of 32 × 32 pixels: no early loss of resolution.
        model.conv1 = nn.Conv2d(3, model.conv1.out_channels, 3, 1, 1, bias=False)
        model.maxpool = nn.Identity()
    if "checkpoint" in what:
        path = _checkpoint(what["checkpoint"])
        try:
            timm.models.load_checkpoint(model, str(path))  # refuses pickles that hold more than tensors
        except (RuntimeError, KeyError) as error:
            raise ValueError(f"{what['checkpoint']} does not fit {what['name']}: {error}") from error
    # What the transform is made of, where the checkpoint's differs from that of timm's own weights.
    given = {key: what[key] for key in ("mean", "std") if key in what}
    if "size" in what:
        given |= {"input_size": (3, what["size"], what["size"]), "crop_pct": 1.0}
    config = timm.data.resolve_model_data_config(model, pretrained_cfg=model.pretrained_cfg | given)
    return model, timm.data.create_transform(**config, is_training=False)


def _checkpoint(name: str) -> Path:
    """A file here, or ``hf_hub:owner/repository/file`` on the Hugging Face hub."""
    if str(name).startswith("hf_hub:"):
        from huggingface_hub import hf_hub_download

        owner, repository, file = str(name).removeprefix("hf_hub:").split("/", 2)
        return Path(hf_hub_download(f"{owner}/{repository}", file))
    if not Path(name).is_file():
        raise ValueError(f"{name}: there is no such checkpoint")
    return Path(name)


def _from_torchvision(what: dict) -> tuple[nn.Module, Callable]:
    from torchvision.models import get_model, get_model_weights

    weights = get_model_weights(what["name"])[what["weights"]]
    return get_model(what["name"], weights=weights), weights.transforms()


def _from_hub(what: dict) -> tuple[nn.Module, Callable]:
    from torchvision.transforms import v2

    missing = [key for key in ("mean", "std", "size") if key not in what]
    if missing:
        raise ValueError(f"{what['name']}: networks of torch.hub do not say their transform; give {missing}")
    # A folder on this machine is taken as it is.
    source = "local" if Path(what["repository"]).is_dir() else "github"
    model = torch.hub.load(what["repository"], what["name"], source=source, trust_repo=True, **what.get("options", {}))
    steps = [v2.ToImage(), v2.Resize(what["size"], antialias=True), v2.ToDtype(torch.float32, scale=True)]
    return model, v2.Compose([*steps, v2.Normalize(what["mean"], what["std"])])


def _random_images(transform: Callable[[Image.Image], torch.Tensor]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (2, 64, 64, 3), generator=generator, dtype=torch.uint8).numpy()
    return torch.stack([transform(Image.fromarray(image)) for image in pixels])


class _TimmBody(nn.Module):
    """A timm model without its classifier."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.model.forward_head(self.model.forward_features(images), pre_logits=True)


class _Headless(nn.Module):
    """A model whose last linear layer was replaced by the identity."""

    def __init__(self, model: nn.Module, parent: nn.Module, attribute: str):
        super().__init__()
        self.model = model
        self._place = (parent, attribute, getattr(parent, attribute))
        setattr(parent, attribute, nn.Identity())

    def restore(self) -> None:
        parent, attribute, layer = self._place
        setattr(parent, attribute, layer)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.model(images)


def _split_timm(model: nn.Module) -> tuple[nn.Module, nn.Linear | None]:
    head = model.get_classifier()
    return (_TimmBody(model), head) if isinstance(head, nn.Linear) else (model, None)


def _split_last_linear(model: nn.Module) -> tuple[nn.Module, nn.Linear | None]:
    linear = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    if not linear:
        return model, None
    parent, _, attribute = linear[-1].rpartition(".")
    head = model.get_submodule(linear[-1])
    return _Headless(model, model.get_submodule(parent), attribute), head
