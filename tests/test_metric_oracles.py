"""Every metric beside an implementation that is not ours: other libraries, and the definitions written out as loops.

Random predictions of 2 to 20,000 samples and 2 to 100 classes, the shipped logits, and the public ones where they are.
The smooth calibration error is compared with a linear program in test_smce.py.
"""

import os
from itertools import pairwise

import netcal.metrics
import numpy as np
import pytest
import relplot
import torch
from sklearn.isotonic import isotonic_regression
from sklearn.metrics import accuracy_score, brier_score_loss, log_loss, roc_auc_score
from torchmetrics.functional.classification import multiclass_calibration_error
from torchmetrics.functional.classification.calibration_error import _ce_compute

from smartlib import load
from smartlib.binned_errors import debiased_square
from smartlib.calibrators.base import scaled_softmax
from smartlib.kernel_errors import cosine_coefficients, smoothed_error
from smartlib.metrics import (
    TOP_LABEL_ERRORS,
    bin_edges,
    bin_index,
    brier_decomposition,
    evaluate,
    expected_calibration_error,
    kde_ece,
    reliability_bins,
    smece,
    top_label,
)

SIZES = [(2, 2), (3, 10), (17, 3), (200, 5), (1000, 100), (5000, 10), (20_000, 2)]
REAL = ["fashion/resnet", "fashion/densenet", "fashion/vit"]
if "SMARTLIB_DATA_DIR" in os.environ:
    REAL += ["public/cifar10-densenet40", "public/cifar100-wideresnet-16-4"]


def random_predictions(n, k, seed):
    """Rows whose labels follow them, or follow sharper rows, or have nothing to do with them."""
    rng = np.random.default_rng([n, k, seed])
    p = rng.dirichlet(np.full(k, [2.0, 0.3, 0.05][seed]), n)
    p = (p + 1e-6) / (p + 1e-6).sum(axis=1, keepdims=True)
    labels_from = [p, p**2 / (p**2).sum(axis=1, keepdims=True), np.full_like(p, 1 / k)][seed]
    return p, np.minimum((labels_from.cumsum(axis=1) < rng.random((n, 1))).sum(axis=1), k - 1)


def real_predictions(name):
    split = load(name).val
    return scaled_softmax(split.logits, 1.0), split.labels


def sets(sizes):
    return [pytest.param((*size, seed), id=f"n{size[0]}-k{size[1]}-{seed}") for size in sizes for seed in range(3)]


@pytest.fixture(scope="module", params=sets(SIZES) + REAL)
def predictions(request):
    """Probabilities, labels, confidence, correct."""
    p, y = real_predictions(request.param) if isinstance(request.param, str) else random_predictions(*request.param)
    return p, y, *top_label(p, y)


@pytest.fixture(scope="module", params=sets(SIZES[3:]) + REAL)
def many(request):
    """Confidence and correct of at least 200 samples, for relplot, which adds 1e-4 of a sample to the density."""
    p, y = real_predictions(request.param) if isinstance(request.param, str) else random_predictions(*request.param)
    return top_label(p, y)


# --- other libraries --------------------------------------------------------------------------------------------------


def test_ece_and_mce_equal_those_of_netcal(predictions):
    """netcal's bins are [lo, hi): the same but for a confidence on an edge, and there is none."""
    _, _, f, a = predictions
    for n_bins in (1, 10, 15):
        ece, mce, ace = (getattr(netcal.metrics, name)(n_bins).measure(f, a) for name in ("ECE", "MCE", "ACE"))
        assert expected_calibration_error(f, a, n_bins) == pytest.approx(ece, abs=1e-9)
        assert expected_calibration_error(f, a, n_bins, norm="max") == pytest.approx(mce, abs=1e-9)
        # Its ACE is not our AdaECE but the plain mean over the bins that hold a sample: it checks the bins themselves.
        assert np.nanmean(np.abs(reliability_bins(f, a, n_bins).gap)) == pytest.approx(ace, abs=1e-9)


def test_classwise_ece_equals_the_mean_of_the_classes_eces_of_netcal(predictions):
    p, y, _, _ = predictions
    p, y = p[: 300_000 // p.shape[1]], y[: 300_000 // p.shape[1]]
    each = [netcal.metrics.ECE(15).measure(p[:, k].astype(float), (y == k).astype(float)) for k in range(p.shape[1])]
    assert evaluate(p, y, metrics=["cwece"]).cwece == pytest.approx(np.mean(each), abs=1e-9)


@pytest.mark.parametrize("norm", ["l1", "l2", "max"])
@pytest.mark.parametrize("binning", ["width", "mass"])
def test_every_norm_equals_that_of_torchmetrics(predictions, norm, binning):
    """Its bins are [lo, hi), with a bin of its own for 1.0. Edges moved up by one digit make them ours, (lo, hi]."""
    _, _, f, a = predictions
    edges = torch.tensor(np.nextafter(bin_edges(f, 15, binning), 2))
    edges[0] = 0.0
    theirs = _ce_compute(torch.tensor(f), torch.tensor(a), edges, norm)
    assert expected_calibration_error(f, a, 15, binning, norm) == pytest.approx(theirs.item(), abs=1e-9)


@pytest.mark.parametrize("norm", ["l1", "l2", "max"])
def test_the_public_function_of_torchmetrics_agrees_within_its_float32_sums(norm):
    p, y = random_predictions(5000, 10, 0)
    p = p.astype(np.float32)
    theirs = multiclass_calibration_error(torch.tensor(p), torch.tensor(y), 10, 15, norm)
    assert expected_calibration_error(*top_label(p, y), norm=norm) == pytest.approx(theirs.item(), abs=2e-5)


def test_debiased_square_equals_that_of_torchmetrics(predictions):
    """In a bin with one sample it keeps the squared gap and subtracts nothing; Kumar et al. leave the bin out."""
    _, _, f, a = predictions
    edges, bins = bin_edges(f, 15, "mass"), reliability_bins(f, a, 15, "mass")
    of_single_samples = (bins.gap[bins.count == 1] ** 2).sum() / len(f)
    ours = debiased_square(bin_index(f, edges), f, a, 15)
    assert TOP_LABEL_ERRORS["debiased_ece"](f, a) == np.sqrt(max(ours, 0.0))
    edges = torch.tensor(np.nextafter(edges, 2))
    edges[0] = 0.0
    theirs = _ce_compute(torch.tensor(f), torch.tensor(a), edges, "l2", debias=True)
    assert max(ours + of_single_samples, 0.0) == pytest.approx(theirs.item() ** 2, abs=1e-9)


def test_smece_agrees_with_relplot_within_the_steps_of_its_search(many):
    """relplot halves an interval for the bandwidth ten times, so that it ends up to 1/1024 above the fixed point, where
    its error is smaller by at most as much, and it sums over a mesh of as few as 200 points. Confidences are kept away
    from the ends, where the next test says what it does."""
    f, a = many
    f = 0.02 + 0.96 * f
    assert smece(f, a) == pytest.approx(relplot.smECE(f, a), abs=1.1e-3)


@pytest.mark.parametrize("sigma", [0.02, 0.1])  # its kernel ends at a distance of .5
def test_at_one_bandwidth_relplot_differs_only_by_the_mirror_image_of_its_last_node(many, sigma, monkeypatch):
    """relplot shares a sample between two of 1,001 nodes and reflects all nodes but the two at the ends. So of a sample
    within .001 of 1, its part on the last node counts half, in the residuals and in the density that it divides by. On
    confident networks this makes its result several per cent larger than the integral."""
    f, a = many
    monkeypatch.setattr(relplot.config, "smECE_mesh_pts", 20_001)  # its own 200 points are off by more
    theirs = relplot.metrics.smECE_sigma(f, a, sigma)
    at_one, at_zero = np.maximum(1 - 1000 * (1 - f), 0) / len(f), np.maximum(1 - 1000 * f, 0) / len(f)
    coefficients = cosine_coefficients(f, (a - f) / len(f))
    missing = np.ones(len(coefficients)) * (at_zero @ (a - f)) / 2
    missing += (-1.0) ** np.arange(len(coefficients)) * (at_one @ (a - f)) / 2
    as_theirs = smoothed_error(coefficients - missing, sigma) / (1 - at_one.sum() / 2 - at_zero.sum() / 2)
    assert theirs == pytest.approx(as_theirs, rel=1e-3, abs=1e-6)
    assert smoothed_error(coefficients, sigma) == pytest.approx(theirs, rel=at_one.sum() + 2e-3, abs=1e-6)


def test_scores_equal_those_of_scikit_learn(predictions):
    p, y, f, a = predictions
    record = evaluate(p, y, metrics=["accuracy", "nll", "brier", "auroc"])
    k = p.shape[1]
    exact = p.astype(np.float64)
    exact /= exact.sum(axis=1, keepdims=True)  # scikit-learn warns where float32 rows miss one by 1e-7
    assert record.accuracy == accuracy_score(y, p.argmax(axis=1))
    assert record.nll == pytest.approx(log_loss(y, exact, labels=range(k)), abs=1e-6)
    one_class_each = [brier_score_loss(y == label, exact[:, label]) for label in range(k)]
    assert record.brier == pytest.approx(sum(one_class_each), abs=1e-6)
    if 0 < a.mean() < 1:
        assert record.auroc == pytest.approx(roc_auc_score(a, f), abs=1e-12)
    else:
        assert record.auroc == 0.5


def test_the_parts_of_the_brier_score_equal_those_of_isotonic_regression(predictions):
    p, y, _, _ = predictions
    calibration, refinement = brier_decomposition(p, y)
    before = after = 0.0
    for label in range(p.shape[1]):
        score, hit = p[:, label].astype(float), (y == label).astype(float)
        # Not IsotonicRegression, which takes probabilities that differ by less than 1e-15 for equal.
        _, group, count = np.unique(score, return_inverse=True, return_counts=True)
        recalibrated = isotonic_regression(np.bincount(group, hit) / count, sample_weight=count)[group]
        before += np.mean((score - hit) ** 2)
        after += np.mean((recalibrated - hit) ** 2)
    assert refinement == pytest.approx(after, abs=1e-6)
    assert calibration == pytest.approx(before - after, abs=1e-6)


# --- definitions as loops ---------------------------------------------------------------------------------------------


def equal_mass_bins(f, a, n_bins):
    """The samples of each bin, with the edges of Mukhoti et al. 2020: the order statistics at ranks j n / M, between
    whole ranks by interpolation. (Their bins leave out the smallest confidence, which is the lowest edge.)"""
    ordered, n = sorted(f), len(f)
    edges = []
    for j in range(1, n_bins):
        rank, rest = divmod(j * n, n_bins)
        above = ordered[min(rank + 1, n - 1)]
        edges.append(ordered[rank] + rest / n_bins * (above - ordered[rank]))
    bins = [[] for _ in range(n_bins)]
    for confidence, correct in zip(f, a, strict=True):
        bins[sum(edge < confidence for edge in edges)].append((confidence, correct))
    return [np.array(samples) for samples in bins if samples]


def test_adaptive_ece_and_debiased_ece_equal_their_definitions(predictions):
    _, _, f, a = predictions
    absolute = debiased = 0.0
    for samples in equal_mass_bins(f, a, 15):
        gap, rate = np.mean(samples[:, 1] - samples[:, 0]), np.mean(samples[:, 1])
        absolute += len(samples) / len(f) * abs(gap)
        if len(samples) > 1:
            debiased += len(samples) / len(f) * (gap**2 - rate * (1 - rate) / (len(samples) - 1))
    assert TOP_LABEL_ERRORS["adaece"](f, a) == pytest.approx(absolute, abs=1e-9)
    assert TOP_LABEL_ERRORS["debiased_ece"](f, a) ** 2 == pytest.approx(max(debiased, 0.0), abs=1e-9)


def sweep_by_loops(f, a):
    """As Roelofs et al. print it, one number of bins after another, with equal confidences kept together."""
    order = np.argsort(f, kind="stable")
    f, a = f[order], a[order]
    first_of_ties = np.searchsorted(f, f, side="left")
    error = None
    for n_bins in range(1, len(f) + 1):
        bin_of = first_of_ties * n_bins // len(f)
        means = [(np.mean(a[bin_of == b]), np.mean(f[bin_of == b]), np.mean(bin_of == b)) for b in np.unique(bin_of)]
        if any(upper[0] < lower[0] for lower, upper in pairwise(means)):
            return error
        error = sum(share * abs(accuracy - confidence) for accuracy, confidence, share in means)
    return error


def test_sweep_ece_equals_its_definition(predictions):
    _, _, f, a = predictions
    assert TOP_LABEL_ERRORS["sweep_ece"](f, a) == pytest.approx(sweep_by_loops(f, a), abs=1e-9)


@pytest.mark.parametrize("seed", range(40))
def test_sweep_ece_equals_its_definition_on_ties_and_long_sweeps(seed):
    rng = np.random.default_rng(seed)
    f = np.round(rng.random(rng.integers(1, 80)), [1, 2, 12][seed % 3])
    a = (f > 0.4) if seed % 2 else rng.random(len(f)) < f
    a = np.where(rng.random(len(f)) < 0.05, ~a, a).astype(float)
    assert TOP_LABEL_ERRORS["sweep_ece"](f, a) == pytest.approx(sweep_by_loops(f, a), abs=1e-12)


def images(f):
    """Each confidence with its mirror images, over the range that the widest kernel can reach from [0, 1]."""
    return np.concatenate([f + 2 * turn for turn in (-3, -2, -1, 0, 1, 2, 3)] + [2 * turn - f for turn in range(-3, 4)])


def kde_by_sums(f, a, n_points=20_001):
    half_width = 3 * 1.06 * f.std() * len(f) ** -0.2
    v = np.linspace(max(f.min() - half_width, 0.0), min(f.max() + half_width, 1.0), n_points)
    density, hits = np.zeros(n_points), np.zeros(n_points)
    for centre, correct in zip(images(f), np.tile(a, 14), strict=True):
        i, j = np.searchsorted(v, [centre - half_width, centre + half_width])
        kernel = 35 / 32 / half_width * (1 - ((v[i:j] - centre) / half_width) ** 2) ** 3
        density[i:j] += kernel
        hits[i:j] += correct * kernel
    return np.trapezoid(np.abs(hits - v * density), v) / len(f)


def test_kde_ece_equals_the_sum_over_all_samples_and_images(predictions):
    _, _, f, a = predictions
    f, a = f[:1000], a[:1000]
    assert kde_ece(f, a) == pytest.approx(kde_by_sums(f, a), abs=1e-6)


def test_smece_is_the_fixed_point_of_the_sum_over_all_samples_and_images(predictions):
    _, _, f, a = predictions
    f, a = f[:500], a[:500]
    sigma, v, smoothed = smece(f, a), np.linspace(0, 1, 8001), np.zeros(8001)
    for centre, residual in zip(images(f), np.tile(a - f, 14), strict=True):
        i, j = np.searchsorted(v, [centre - 9 * sigma, centre + 9 * sigma])
        smoothed[i:j] += residual * np.exp(-(((v[i:j] - centre) / sigma) ** 2) / 2)
    smoothed /= len(f) * sigma * np.sqrt(2 * np.pi)
    assert np.trapezoid(np.abs(smoothed), v) == pytest.approx(sigma, abs=1e-6)


def pool_adjacent_violators(outcomes):
    """Best non-decreasing fit to a sequence: join neighbours that fall, until none does."""
    blocks = []
    for outcome in outcomes:
        blocks.append([float(outcome), 1])
        while len(blocks) > 1 and blocks[-2][0] / blocks[-2][1] >= blocks[-1][0] / blocks[-1][1]:
            total, size = blocks.pop()
            blocks[-1] = [blocks[-1][0] + total, blocks[-1][1] + size]
    return np.repeat([total / size for total, size in blocks], [size for _, size in blocks])


@pytest.mark.parametrize("n, k", [(2, 2), (30, 3), (400, 4)])
def test_the_parts_of_the_brier_score_equal_those_of_pooling_by_hand(n, k):
    p, y = random_predictions(n, k, 0)
    left = 0.0
    for label in range(k):
        hit = (y == label)[np.argsort(p[:, label])]  # no two probabilities are equal
        left += ((pool_adjacent_violators(hit) - hit) ** 2).sum() / n
    assert brier_decomposition(p, y)[1] == pytest.approx(left, abs=1e-12)
