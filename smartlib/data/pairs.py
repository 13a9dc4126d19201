"""Fashion-Pairs-100: two garments side by side, to be named in order, 10 x 10 classes.

A many-class task from the same images, in the role of CIFAR-100: fewer samples per class, less accurate and more
over-confident models. Ours.
"""

from __future__ import annotations

import numpy as np

_SEED = 0


def pair_up(images: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pair the images at random, each used once, so that the pairs are as independent as the images are.

    Args:
        images: (N, H, W) uint8. labels: (N,) in 0..9.

    Returns:
        Pairs (N // 2, H, 2 W) uint8 and their classes (N // 2,) int64: ten times the left label plus the right one.

    Source: ours.

    >>> pairs, classes = pair_up(np.zeros((5, 28, 28), np.uint8), np.array([7, 7, 7, 7, 7]))
    >>> pairs.shape, classes
    ((2, 28, 56), array([77, 77]))
    """
    left, right = np.random.default_rng(_SEED).permutation(len(labels))[: len(labels) // 2 * 2].reshape(2, -1)
    return np.concatenate([images[left], images[right]], axis=2), 10 * labels[left] + labels[right]
