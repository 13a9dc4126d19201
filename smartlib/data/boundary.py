"""The smallest change of an image that reaches a network's decision boundary.

A search in three parts, for many images at once:

1. DeepFool walks across: it takes the network for linear where it stands and steps over the nearest of the boundaries.
2. The segment from the original image to the point across meets the boundary; the meeting point is found by its sign.
3. At that point the boundary is taken for flat again. The original image is projected onto it, and in the direction of
   the projection the boundary is met again, nearer. This is repeated while the distance falls, as in FAB.

Each distance belongs to an image that was found, so it is an upper bound on the smallest one, and a tight one as the
tests show where the smallest one is known. Pixels stay in [0, 1].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

N_COMPARED = 9  # runners-up whose boundaries DeepFool compares at the original image
N_FOLLOWED = 3  # of these the nearest, which it compares at its later steps
N_DEEPFOOL = 12
N_REFINEMENTS = 12
N_EVALUATIONS = 3  # of the network, to find the boundary on a segment; 10 at the end, when the segment stays
N_LAST_EVALUATIONS = 10
# DeepFool steps this much further than the linear boundary, as a curved one may lie behind it.
OVERSHOOT = 1.05
# A shorter step toward the projection is not tried: the boundary is then as near as this search finds it.
SMALLEST_STEP = 1 / 32

Model = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Perturbation:
    """How far images are from the decision boundary.

    Args:
        distance: (N,) float32, the L2 norm of the smallest change found, pixels being in [0, 1]; NaN where none was.
        predicted: (N,) int64, the class of the image. other: (N,) int64, the class across, -1 where none was found.
        nearest: (N, 1, H, W) float32, the image on the boundary; NaN where none was found.
    """

    distance: np.ndarray
    predicted: np.ndarray
    other: np.ndarray
    nearest: np.ndarray

    @property
    def n_not_found(self) -> int:
        """The number of images for which no point across the boundary was found."""
        return int(np.isnan(self.distance).sum())


def smallest_perturbation(model: Model, images: torch.Tensor, *, batch_size: int = 250) -> Perturbation:
    """The nearest point of the decision boundary, image by image.

    The distance is that from the region of the *predicted* class, be the prediction right or wrong. The result is
    deterministic, and images influence each other by no more than the rounding of matrix products, which depends on
    the batch size on some processors.

    Args:
        model: images (N, 1, H, W) with pixels in [0, 1] to logits (N, K), differentiable, in evaluation mode. The
            standardisation of pixels belongs into it.
        images: (N, 1, H, W) float, on the model's device.
        batch_size: images that are searched at once.

    Returns:
        Distances, classes and points on the boundary.

    Raises:
        ValueError: images of another shape, pixels outside [0, 1], or a model in training mode.

    Source: Moosavi-Dezfooli, Fawzi and Frossard 2016 (DeepFool); Croce and Hein 2020 (FAB) for the projection of the
        original image; the step rule is ours.

    >>> slope = torch.tensor([[3.0, 4.0]])
    >>> two_classes = lambda x: torch.cat([x.flatten(1) @ slope.T, torch.full((len(x), 1), 2.0)], dim=1)
    >>> smallest_perturbation(two_classes, torch.full((1, 1, 1, 2), 0.5)).distance.round(4)  # (3.5 - 2) / 5
    array([0.3], dtype=float32)
    """
    if getattr(model, "training", False):
        raise ValueError("the model is in training mode, in which its output may be random; call model.eval() first")
    if images.ndim != 4 or images.shape[1] != 1:
        raise ValueError(f"images must have the shape (N, 1, H, W), got {tuple(images.shape)}")
    outside = torch.nonzero(~((images >= 0) & (images <= 1)))  # a NaN is outside
    if len(outside):
        where = tuple(outside[0].tolist())
        raise ValueError(f"pixels must be in [0, 1], but images{list(where)} is {images[where].item()}")
    found = [_search(model, batch.float()) for batch in images.split(batch_size)]
    return Perturbation(*(torch.cat(part).cpu().numpy() for part in zip(*found, strict=True)))


def _search(model: Model, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The four arrays of :class:`Perturbation` for one batch."""
    with torch.no_grad():
        logits = model(x)
    predicted = logits.argmax(dim=1)
    start, other = _gap_and_other(logits, predicted)
    across = _deepfool(model, x, predicted, logits)
    found = torch.nonzero(~across.isnan().flatten(1).any(dim=1))[:, 0]
    if len(found):
        best, best_other = _meet(model, x[found], across[found], predicted[found], start[found])
        best = _refine(model, x[found], best, predicted[found], best_other, start[found])
        across[found], other[found] = _meet(model, x[found], best, predicted[found], start[found], N_LAST_EVALUATIONS)
    distance = _norm(across - x)
    return distance, predicted, torch.where(distance.isnan(), -1, other), across


def _deepfool(model: Model, x: torch.Tensor, predicted: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """A point across the boundary, (N, 1, H, W); NaN where there was none after ``N_DEEPFOOL`` steps."""
    n_compared = min(N_COMPARED, logits.shape[1] - 1)
    rivals = logits.scatter(1, predicted[:, None], -torch.inf).topk(n_compared, dim=1).indices
    result = torch.full_like(x, torch.nan)
    crossed = _gap_and_other(logits, predicted)[0] <= 0  # a tie
    result[crossed] = x[crossed]
    rows = torch.nonzero(~crossed)[:, 0]
    point, rivals = x[rows], rivals[rows]
    for _ in range(N_DEEPFOOL):
        if not len(rows):
            break
        point = point.requires_grad_()
        z = model(point)
        gaps = z.gather(1, predicted[rows, None]) - z.gather(1, rivals)
        targets, lengths = [], []
        for k in range(rivals.shape[1]):
            (slope,) = torch.autograd.grad(gaps[:, k].sum(), point, retain_graph=k < rivals.shape[1] - 1)
            rise = OVERSHOOT * gaps[:, k].detach()
            target = _project(point.detach(), -slope, rise)
            move = target - point.detach()
            # The box may end the way early: then the way is reckoned as long as it would have to be.
            lengths.append(_norm(move) * rise / -(slope * move).flatten(1).sum(dim=1))
            targets.append(target)
        lengths = torch.stack(lengths, dim=1).nan_to_num(torch.inf)
        nearest = lengths.argsort(dim=1, stable=True)[:, :N_FOLLOWED]
        rivals = rivals.gather(1, nearest)
        point = torch.stack(targets, dim=1)[torch.arange(len(rows), device=x.device), nearest[:, 0]]
        with torch.no_grad():
            crossed = _gap_and_other(model(point), predicted[rows])[0] <= 0
        result[rows[crossed]] = point[crossed]
        # Where no step leads toward a boundary the search for this image ends.
        going = ~crossed & lengths.min(dim=1).values.isfinite()
        rows, rivals, point = rows[going], rivals[going], point[going]
    return result


def _refine(
    model: Model, x: torch.Tensor, best: torch.Tensor, predicted: torch.Tensor, other: torch.Tensor, start: torch.Tensor
) -> torch.Tensor:
    """Nearer points of the boundary, (N, 1, H, W).

    Args:
        x: originals. best: points on the boundary. other: the classes across there. start: the originals' gaps > 0.
    """
    best, other = best.clone(), other.clone()
    step = torch.ones(len(x), device=x.device)
    rows = torch.arange(len(x), device=x.device)
    for _ in range(N_REFINEMENTS):
        rows = rows[step[rows] >= SMALLEST_STEP]
        if not len(rows):
            break
        origin, old = x[rows], best[rows]
        point = old.clone().requires_grad_()
        z = model(point)
        gap = (z.gather(1, predicted[rows, None]) - z.gather(1, other[rows, None]))[:, 0]
        (slope,) = torch.autograd.grad(gap.sum(), point)
        # The linearised boundary: <-slope, y - origin> = <-slope, old - origin> + gap(old).
        target = _project(origin, -slope, -(slope * (old - origin)).flatten(1).sum(dim=1) + gap.detach())
        aim = old + step[rows, None, None, None] * (target - old) - origin
        # Look in this direction as far as the best distance: what is met there is nearer, or nothing is met.
        radius = _norm(old - origin)
        scale = radius / _norm(aim).clamp(min=torch.finfo(aim.dtype).tiny)
        end = (origin + scale[:, None, None, None] * aim).clamp(0, 1)
        with torch.no_grad():
            crossed = _gap_and_other(model(end), predicted[rows])[0] <= 0  # NaN, where nothing was aimed at: no
        step[rows[~crossed]] /= 2
        hit = rows[crossed]
        if not len(hit):
            continue
        new, new_other = _meet(model, x[hit], end[crossed], predicted[hit], start[hit])
        gain = 1 - _norm(new - x[hit]) / radius[crossed]
        nearer = gain > 0
        best[hit[nearer]], other[hit[nearer]] = new[nearer], new_other[nearer]
        # A step that gains next to nothing counts as one that failed.
        step[hit] = torch.where(gain > 1e-4, (2 * step[hit]).clamp(max=1), step[hit] / 2)
    return best


@torch.no_grad()
def _meet(
    model: Model,
    x: torch.Tensor,
    end: torch.Tensor,
    predicted: torch.Tensor,
    start: torch.Tensor,
    n_evaluations: int = N_EVALUATIONS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the segment from x to a point across meets the boundary; the point returned is on it or just behind it.

    Secants and bisections by turns: the secant is exact where the network is linear, the bisection makes sure. The
    secant is the regula falsi in its Illinois form, which halves the value of an end that stays.

    Args:
        x, end: the two ends, the end across. start: the gap at x, >= 0. n_evaluations: of the network.

    Returns:
        Points (N, 1, H, W) and the classes across (N,).
    """
    low, high = torch.zeros_like(start), torch.ones_like(start)
    f_low = start.clone()
    # The end was across when it was found; in a batch of another size rounding may say that it is just not.
    f_high, other = _gap_and_other(model(end), predicted)
    f_high = f_high.clamp(max=0)
    last_side = torch.zeros_like(start)
    for i in range(n_evaluations):
        share = f_low / (f_low - f_high).clamp(min=torch.finfo(start.dtype).tiny) if i % 2 == 0 else 0.5
        s = low + (high - low) * share
        f, seen = _gap_and_other(model(x + s[:, None, None, None] * (end - x)), predicted)
        far = f <= 0
        side = torch.where(far, 1.0, -1.0)
        stays = side == last_side
        f_low = torch.where(far, torch.where(stays, f_low / 2, f_low), f)
        f_high = torch.where(far, f, torch.where(stays, f_high / 2, f_high))
        low, high = torch.where(far, low, s), torch.where(far, s, high)
        other = torch.where(far, seen, other)
        last_side = side
    return x + high[:, None, None, None] * (end - x), other


def _project(x: torch.Tensor, w: torch.Tensor, rise: torch.Tensor) -> torch.Tensor:
    """The point y of [0, 1]^d nearest to x with <w, y - x> = rise, for x in the box and rise >= 0.

    It is y(t) = clip(x + t w), where <w, y(t) - x> rises with t, ever more slowly as pixels reach their ends. Newton's
    method from t = 0 therefore approaches the solution from below, and meets it after a few pieces.

    Returns:
        (N, 1, H, W); the corner of the box in the direction of w where the box holds no such point, and NaN where w
        is zero or not finite.
    """
    x_flat, w_flat = x.flatten(1), w.flatten(1)
    rise = rise.clamp(min=0)
    t = torch.zeros_like(rise)
    y = x_flat
    for _ in range(12):
        free = torch.where(w_flat > 0, y < 1, y > 0)
        steepness = (w_flat.square() * free).sum(dim=1)
        missing = (rise - (w_flat * (y - x_flat)).sum(dim=1)).clamp(min=0)
        t = t + torch.where(steepness > 0, missing / steepness, 0.0)
        y = (x_flat + t[:, None] * w_flat).clamp(0, 1)
    usable = (w_flat.square().sum(dim=1) > 0) & w_flat.isfinite().all(dim=1)
    return torch.where(usable[:, None], y, torch.nan).view_as(x)


def _gap_and_other(logits: torch.Tensor, predicted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The predicted class's logit minus the largest other, (N,), and which that is: <= 0 is across the boundary."""
    rivals, other = logits.scatter(1, predicted[:, None], -torch.inf).max(dim=1)
    return logits.gather(1, predicted[:, None])[:, 0] - rivals, other


def _norm(x: torch.Tensor) -> torch.Tensor:
    """The L2 norm of each image, (N,)."""
    return x.flatten(1).norm(dim=1)
