"""The small networks of the shipped models, built with timm and torchvision for grey images of 28 x 28 pixels.

Sized so that one core of a laptop trains each in a quarter to half an hour. Those for Fashion-Pairs-100 see two
garments side by side, 28 x 56 pixels.
"""

from __future__ import annotations

import torch
from torch import nn


def resnet() -> nn.Module:
    """A ResNet of four basic blocks (He et al. 2016) by timm; 64 features."""
    return _resnet((32, 48, 64, 64), n_classes=10)


def wideresnet() -> nn.Module:
    """A wide, shallow ResNet of three basic blocks (after Zagoruyko and Komodakis 2016) by timm; 112 features."""
    return _resnet((48, 80, 112), n_classes=10)


def densenet() -> nn.Module:
    """A DenseNet-BC of three blocks of four layers (Huang et al. 2017) by torchvision; 90 features."""
    from torchvision.models import DenseNet

    model = DenseNet(growth_rate=12, block_config=(4, 4, 4), num_init_features=24, num_classes=10)
    model.features.conv0 = nn.Conv2d(1, 24, kernel_size=3, stride=2, padding=1, bias=False)
    model.features.pool0 = nn.Identity()
    return model


def vit() -> nn.Module:
    """A vision transformer (Dosovitskiy et al. 2021) by timm: 49 patches of 4 x 4, width 64, depth 3; 64 features."""
    return _vit((28, 28), n_classes=10)


def pairs_resnet() -> nn.Module:
    """A ResNet of four basic blocks by timm for pairs; a second channel marks the halves; 64 features."""
    return nn.Sequential(MarkHalves(), _resnet((32, 48, 64, 64), n_classes=100, in_chans=2))


def pairs_wideresnet() -> nn.Module:
    """A wide, shallow ResNet by timm for pairs; a second channel marks the halves; 112 features."""
    return nn.Sequential(MarkHalves(), _resnet((48, 80, 112), n_classes=100, in_chans=2))


def pairs_vit() -> nn.Module:
    """A vision transformer by timm for pairs: 98 patches of 4 x 4, width 64, depth 3; 64 features."""
    return _vit((28, 56), n_classes=100)


class MarkHalves(nn.Module):
    """Add a channel that is -1 on the left half and 1 on the right.

    Without it global average pooling would not know which garment stands where.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, 1, H, W) -> (N, 2, H, W)."""
        mark = torch.ones_like(x)
        mark[..., : x.shape[-1] // 2] = -1
        return torch.cat([x, mark], dim=1).contiguous(memory_format=torch.channels_last)


def _resnet(channels: tuple[int, ...], n_classes: int, in_chans: int = 1) -> nn.Module:
    from timm.models.resnet import BasicBlock, ResNet

    model = ResNet(
        BasicBlock, (1,) * len(channels), num_classes=n_classes, in_chans=in_chans, channels=channels,
        stem_type="deep", stem_width=16,
    )  # fmt: skip
    model.maxpool = nn.Identity()  # 28 x 28 images: one halving in the stem is enough
    if len(channels) == 3:
        model.layer4 = nn.Identity()
    return model


def _vit(img_size: tuple[int, int], n_classes: int) -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(
        img_size=img_size, patch_size=4, in_chans=1, num_classes=n_classes, embed_dim=64, depth=3, num_heads=4,
        mlp_ratio=4,
    )  # fmt: skip
