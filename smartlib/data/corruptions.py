"""Corrupted images: eight ways in which a picture goes bad, each in five severities, and a sketch.

In the manner of ImageNet-C (Hendrycks and Dietterich 2019, arXiv 1903.12261) for the grey images of Fashion-MNIST;
the sketch plays the part of ImageNet-Sketch (Wang et al. 2019, arXiv 1905.13549). Severities are strengths chosen by
eye: 1 is hardly seen, 5 leaves the kind of garment to be guessed.
"""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
from PIL import Image
from scipy import ndimage

SEVERITIES = (1, 2, 3, 4, 5)
SIDE = 28

# Share of a sketch's strongest edge below which nothing is drawn: folds and prints of the cloth.
_EDGE_THRESHOLD = 0.25


def corrupt(images: np.ndarray, name: str, severity: int, seed: int = 0) -> np.ndarray:
    """Corrupt images.

    What is random (noise, the direction of a rotation, the place of an occlusion) is drawn image by image from
    ``seed`` and ``name`` alone: an image gets the same however many follow it, and of one severity to the next the
    same noise is stronger, the same square larger.

    Args:
        images: (N, 28, 28) uint8. name: one of `CORRUPTIONS`. severity: 1 to 5. seed: >= 0.

    Returns:
        (N, 28, 28) uint8, a new array.

    Raises:
        ValueError: an unknown name or severity, or images of another shape or type.

    Source: after Hendrycks and Dietterich 2019; rotation and occlusion, and all strengths, ours.

    >>> images = np.full((1, 28, 28), 200, np.uint8)
    >>> [int(corrupt(images, "brightness", severity).max()) for severity in SEVERITIES]
    [213, 226, 246, 255, 255]
    """
    _check_images(images)
    if name not in _CORRUPTIONS:
        raise ValueError(f"unknown corruption {name!r}; known: {', '.join(CORRUPTIONS)}")
    if severity not in SEVERITIES:
        raise ValueError(f"severity of {name} must be one of {SEVERITIES}, got {severity!r}")
    function, strengths = _CORRUPTIONS[name]
    rng = np.random.default_rng([seed, CORRUPTIONS.index(name)])
    return _to_bytes(function(images.astype(np.float32), strengths[severity - 1], rng))


def sketch(images: np.ndarray) -> np.ndarray:
    """Keep the edges alone: bright lines on a dark ground.

    The magnitude of the Sobel gradient, from a quarter of its largest value in the image (drawn black) up to it
    (drawn white).

    Args:
        images: (N, 28, 28) uint8.

    Returns:
        (N, 28, 28) uint8; black where an image has no edge.

    Raises:
        ValueError: images of another shape or type.

    Source: ours.
    """
    _check_images(images)
    values = images.astype(np.float32)
    # Not ndimage.sobel, which would smooth along the first axis too, from image to image.
    steps = {axis: ndimage.correlate1d(values, [-1, 0, 1], axis, mode="nearest") for axis in (1, 2)}
    down = ndimage.correlate1d(steps[1], [1, 2, 1], 2, mode="nearest")
    across = ndimage.correlate1d(steps[2], [1, 2, 1], 1, mode="nearest")
    magnitude = np.hypot(down, across)
    strongest = np.maximum(magnitude.max(axis=(1, 2), keepdims=True), 1.0)
    return _to_bytes(255 * (magnitude / strongest - _EDGE_THRESHOLD) / (1 - _EDGE_THRESHOLD))


def _gaussian_noise(images: np.ndarray, deviation: float, rng: np.random.Generator) -> np.ndarray:
    """deviation: standard deviation of the noise, as a share of the range of grey."""
    return images + 255 * deviation * rng.standard_normal(images.shape, dtype=np.float32)


def _gaussian_blur(images: np.ndarray, width: float, rng: np.random.Generator) -> np.ndarray:
    """width: standard deviation of the kernel, in pixels."""
    return ndimage.gaussian_filter(images, (0, width, width), mode="nearest")


def _contrast(images: np.ndarray, factor: float, rng: np.random.Generator) -> np.ndarray:
    """factor: by which each pixel's distance from its image's mean is multiplied."""
    mean = images.mean(axis=(1, 2), keepdims=True)
    return mean + factor * (images - mean)


def _brightness(images: np.ndarray, rise: float, rng: np.random.Generator) -> np.ndarray:
    """rise: added to every pixel, as a share of the range of grey."""
    return images + 255 * rise


def _pixelation(images: np.ndarray, side: int, rng: np.random.Generator) -> np.ndarray:
    """side: the picture is averaged to side x side areas, each of which gets one grey."""
    # Row i of the weights: how much of each of the 28 pixels lies in area i of the coarse grid.
    edges, pixels = np.arange(side + 1) * SIDE / side, np.arange(SIDE)
    overlap = np.minimum(edges[1:, None], pixels + 1) - np.maximum(edges[:-1, None], pixels)
    weights = (overlap.clip(min=0) * side / SIDE).astype(np.float32)
    nearest = ((pixels + 0.5) * side / SIDE).astype(int)
    return (weights @ images @ weights.T)[:, nearest][:, :, nearest]


def _jpeg(images: np.ndarray, quality: int, rng: np.random.Generator) -> np.ndarray:
    """quality: of the JPEG compression, 1 (worst) to 95."""
    decoded = np.empty_like(images)
    for row, image in enumerate(images.astype(np.uint8)):
        decoded[row] = _through_jpeg(image, quality)
    return decoded


def _through_jpeg(image: np.ndarray, quality: int) -> np.ndarray:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "JPEG", quality=quality)
    return np.asarray(Image.open(buffer))


def _rotation(images: np.ndarray, angle: float, rng: np.random.Generator) -> np.ndarray:
    """angle: in degrees, about the centre, to the left or to the right by the toss of a coin."""
    left = rng.random(len(images)) < 0.5
    rotated = np.empty_like(images)
    for rows, signed in ((left, angle), (~left, -angle)):
        rotated[rows] = ndimage.rotate(images[rows], signed, axes=(2, 1), reshape=False, order=1)
    return rotated


def _occlusion(images: np.ndarray, side: int, rng: np.random.Generator) -> np.ndarray:
    """side: of a square of middle grey at a random place, in pixels."""
    corners = np.floor(rng.random((len(images), 2, 1)) * (SIDE - side + 1))
    pixels = np.arange(SIDE)
    covered = (pixels >= corners) & (pixels < corners + side)  # (N, 2, 28): rows, columns
    return np.where(covered[:, 0, :, None] & covered[:, 1, None, :], np.float32(128), images)


# What is done and how strongly, by severity; the meaning of a strength is said in the function.
_CORRUPTIONS: dict[str, tuple[Callable, tuple[float, ...]]] = {
    "gaussian-noise": (_gaussian_noise, (0.04, 0.08, 0.14, 0.22, 0.35)),
    "gaussian-blur": (_gaussian_blur, (0.5, 0.8, 1.1, 1.5, 2.0)),
    "contrast": (_contrast, (0.75, 0.55, 0.35, 0.2, 0.1)),
    "brightness": (_brightness, (0.05, 0.1, 0.18, 0.28, 0.4)),
    "pixelation": (_pixelation, (20, 15, 11, 8, 6)),
    "jpeg": (_jpeg, (40, 20, 12, 7, 4)),
    "rotation": (_rotation, (6, 12, 20, 30, 45)),
    "occlusion": (_occlusion, (5, 8, 11, 14, 17)),
}
CORRUPTIONS = tuple(_CORRUPTIONS)


def _to_bytes(values: np.ndarray) -> np.ndarray:
    return values.round().clip(0, 255).astype(np.uint8)


def _check_images(images: np.ndarray) -> None:
    if images.dtype != np.uint8 or images.shape[1:] != (SIDE, SIDE):
        raise ValueError(
            f"images must be uint8 of shape (N, {SIDE}, {SIDE}), got {images.dtype} of shape {images.shape}"
        )
