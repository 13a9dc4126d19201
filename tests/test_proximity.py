"""Proximity against brute force and by hand, its rules for few, equal and zero rows, and PIECE cell by cell."""

import itertools

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist
from threadpoolctl import threadpool_limits

from smartlib import expected_calibration_error
from smartlib.proximity import proximity, proximity_informed_ece, unit_rows

EXP = np.exp


def brute(features, reference=None, n_neighbours=10):
    """The definition, pair by pair, in float64."""
    unit = [
        x / np.linalg.norm(x, axis=1, keepdims=True) for x in (features, features if reference is None else reference)
    ]
    squared = cdist(*unit, "sqeuclidean")
    if reference is None:
        np.fill_diagonal(squared, np.inf)
    return np.exp(-np.sort(squared, axis=1)[:, :n_neighbours]).mean(axis=1)


# --- proximity ----------------------------------------------------------------------------------------------------


def test_by_hand_among_three_directions_each_leaving_itself_out():
    """Unit rows (1, 0), (0, 1), (−1, 0): squared distances 2 and 4 from the first, 2 and 2 from the second."""
    features = [[1.0, 0.0], [0.0, 2.0], [-3.0, 0.0]]
    expected = [(EXP(-2) + EXP(-4)) / 2, EXP(-2), (EXP(-2) + EXP(-4)) / 2]
    np.testing.assert_allclose(proximity(features, n_neighbours=2), expected, atol=1e-12)
    np.testing.assert_allclose(proximity(features, n_neighbours=1), EXP(-2), atol=1e-12)


def test_by_hand_among_other_samples_nobody_is_left_out():
    """(5, 0) finds itself at distance 0 and (0, 1) at squared distance 2."""
    np.testing.assert_allclose(
        proximity([[5.0, 0.0]], [[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]], n_neighbours=2), (1 + EXP(-2)) / 2, atol=1e-12
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("d", [1, 3, 40])
def test_agrees_with_brute_force(d, dtype):
    rng = np.random.default_rng(d)
    features, reference = rng.normal(size=(150, d)).astype(dtype), rng.normal(size=(90, d)).astype(dtype)
    features[:20] = features[20:40]  # equal rows of other samples count
    np.testing.assert_allclose(proximity(features), brute(features.astype(float)), atol=2e-7)
    np.testing.assert_allclose(
        proximity(features, reference, n_neighbours=4),
        brute(features.astype(float), reference.astype(float), 4),
        atol=2e-7,
    )


def test_the_sample_left_out_is_the_sample_itself_also_among_equal_rows():
    """Three equal rows and one opposite: leaving one out, two of them have an equal neighbour left at distance 0."""
    features = [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0], [-1.0, -1.0]]
    np.testing.assert_allclose(proximity(features, n_neighbours=2), [1, 1, 1, EXP(-4)], atol=1e-8)
    assert len(set(proximity(features, n_neighbours=2)[:3].tolist())) == 1


def test_where_neighbours_are_few_all_of_them_count():
    features = np.random.default_rng(0).normal(size=(4, 3))
    np.testing.assert_allclose(proximity(features, n_neighbours=10), brute(features, n_neighbours=3), atol=2e-7)
    assert proximity([[1.0, 2.0]]).tolist() == [0.0]
    assert proximity([[1.0, 2.0]], [[1.0, 2.0]]).tolist() == [1.0]


def test_a_row_of_zeros_is_at_distance_one_of_all_directions():
    expected = [EXP(-1), (EXP(-1) + EXP(-2)) / 2, (EXP(-1) + EXP(-2)) / 2]
    np.testing.assert_allclose(proximity([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]], n_neighbours=2), expected, atol=1e-12)
    assert proximity(np.zeros((3, 2)), n_neighbours=2).tolist() == [1, 1, 1]


def test_only_directions_count_whatever_the_scale():
    rng = np.random.default_rng(1)
    features = rng.normal(size=(60, 5))
    once = proximity(features)
    np.testing.assert_allclose(proximity(features * rng.uniform(0.1, 10, size=(60, 1))), once, atol=2e-7)
    for scale in (1e-300, 1e300):
        np.testing.assert_allclose(proximity(features * scale), once, atol=2e-7)
    np.testing.assert_allclose(np.linalg.norm(unit_rows(features * 1e300), axis=1), 1, atol=1e-6)


def test_permuting_samples_permutes_and_rotating_changes_nothing():
    rng = np.random.default_rng(2)
    features, order = rng.normal(size=(80, 4)), rng.permutation(80)
    rotation = np.linalg.qr(rng.normal(size=(4, 4)))[0]
    np.testing.assert_allclose(proximity(features[order]), proximity(features)[order], atol=1e-12)
    np.testing.assert_allclose(proximity(features, features[order][:50]), proximity(features, features[order[:50]]))
    np.testing.assert_allclose(proximity(features @ rotation), proximity(features), atol=2e-7)


def test_the_number_of_threads_changes_nothing():
    features = np.random.default_rng(3).normal(size=(700, 16))
    results = []
    for n in (1, 2):
        with threadpool_limits(n):
            results.append(proximity(features))
    np.testing.assert_allclose(*results, atol=1e-11, rtol=0)


def test_inputs_of_any_kind_give_the_same_and_stay_as_they_are():
    features = np.random.default_rng(4).normal(size=(30, 6)).astype(np.float32)
    once, kept = proximity(features), features.copy()
    features.setflags(write=False)
    tensor = proximity(torch.tensor(kept, requires_grad=True))
    assert isinstance(tensor, torch.Tensor)
    np.testing.assert_array_equal(tensor.numpy(), once)
    np.testing.assert_array_equal(proximity(np.asfortranarray(features)), once)
    np.testing.assert_array_equal(proximity(np.repeat(features, 2, axis=1)[:, ::2]), once)
    np.testing.assert_array_equal(proximity(features.astype(">f4")), once)
    np.testing.assert_array_equal(proximity(features.tolist()), once)
    np.testing.assert_array_equal(features, kept)
    assert once.dtype == np.float64


@pytest.mark.parametrize(
    "features, reference, n_neighbours, words",
    [
        ([1.0, 2.0], None, 10, r"features must have shape \(N, D\)"),
        (3.0, None, 10, r"features must have shape \(N, D\)"),
        (np.empty((0, 3)), None, 10, "no rows"),
        ([[1.0, np.nan]], None, 10, "row 0 holds a value that is not finite"),
        ([[1.0, 2.0]], [[1.0, 2.0, 3.0]], 10, "2 columns, but reference has 3"),
        ([[1.0, 2.0]], np.empty((0, 2)), 10, "no rows"),
        ([[1.0, 2.0]], None, 0, "n_neighbours must be a whole number of at least 1, got 0"),
        ([[1.0, 2.0]], None, 2.5, "n_neighbours .* got 2.5"),
        ([[1.0, 2.0]], None, True, "n_neighbours .* got True"),
    ],
)
def test_bad_arguments_are_refused_by_name(features, reference, n_neighbours, words):
    with pytest.raises(ValueError, match=words):
        proximity(features, reference, n_neighbours)


# --- PIECE --------------------------------------------------------------------------------------------------------

# Two bins of proximity, {.1, .2, .3} and {.7, .8, .9}, and two of confidence, up to .5 and above.
CONFIDENCE = [0.9, 0.4, 0.9, 0.8, 0.9, 0.4]
CORRECT = [0, 1, 0, 1, 1, 0]
PROXIMITY = [0.1, 0.3, 0.2, 0.9, 0.7, 0.8]


def test_piece_by_hand():
    """Cells: sparse, high: |0 − .9| of two; sparse, low: |1 − .4| of one; dense, high: |1 − .85| of two; dense, low:
    |0 − .4| of one. Mean over the six samples: (1.8 + .6 + .3 + .4) / 6."""
    piece = proximity_informed_ece(CONFIDENCE, CORRECT, PROXIMITY, n_proximity_bins=2, n_bins=2)
    assert piece == pytest.approx(3.1 / 6, abs=1e-12)
    # The usual ECE adds the gaps of both halves: |2 − 3.5| of the high ones and |1 − .8| of the low ones.
    assert expected_calibration_error(CONFIDENCE, CORRECT, n_bins=2) == pytest.approx(1.7 / 6, abs=1e-12)


def test_piece_of_one_bin_of_proximity_is_the_ece_and_more_bins_are_not_less():
    rng = np.random.default_rng(5)
    f, d = rng.uniform(size=2000), rng.uniform(size=2000)
    correct = rng.random(2000) < f * (0.5 + d / 2)
    ece = expected_calibration_error(f, correct)
    assert proximity_informed_ece(f, correct, d, n_proximity_bins=1) == pytest.approx(ece, abs=1e-12)
    assert proximity_informed_ece(f, correct, np.full(2000, 0.3)) == pytest.approx(ece, abs=1e-12)
    nested = [proximity_informed_ece(f, correct, d, n_proximity_bins=n) for n in (1, 2, 4, 8)]
    assert all(b >= a - 1e-12 for a, b in itertools.pairwise(nested))


def test_piece_sees_a_bias_that_cancels_in_the_ece():
    """At confidence .7 the sparse half is right half of the time, the dense half nine times of ten."""
    correct = np.r_[np.arange(100) % 10 < 5, np.arange(100) % 10 < 9]
    dense = np.r_[np.linspace(0.1, 0.2, 100), np.linspace(0.8, 0.9, 100)]
    assert expected_calibration_error(np.full(200, 0.7), correct) == pytest.approx(0, abs=1e-12)
    assert proximity_informed_ece(np.full(200, 0.7), correct, dense, n_proximity_bins=2) == pytest.approx(
        0.2, abs=1e-12
    )


def test_piece_bins_of_proximity_have_equal_mass_and_only_its_order_counts():
    rng = np.random.default_rng(6)
    f, rank = rng.uniform(0.3, 1, size=300), rng.permutation(300)
    d = rank / 300
    correct, order = rng.random(300) < f**2, rng.permutation(300)
    piece = proximity_informed_ece(f, correct, d)
    assert proximity_informed_ece(f[order], correct[order], d[order]) == pytest.approx(piece, abs=1e-12)
    assert proximity_informed_ece(f, correct, d**3) == pytest.approx(piece, abs=1e-12)
    # Thirty bins of ten samples each, by their ranks.
    cells = rank // 10 * 15 + np.ceil(f * 15).astype(int) - 1
    expected = sum(abs((correct[cells == c] - f[cells == c]).sum()) for c in set(cells.tolist())) / 300
    assert proximity_informed_ece(f, correct, d, n_proximity_bins=30) == pytest.approx(expected, abs=1e-12)


def test_piece_of_fewer_samples_than_bins_counts_each_once():
    assert proximity_informed_ece([0.9], [1], [0.5]) == pytest.approx(0.1, abs=1e-12)
    assert proximity_informed_ece([0.0, 1.0], [1, 0], [0.5, 0.5]) == 1.0


@pytest.mark.parametrize(
    "changed, words",
    [
        (dict(proximity=[0.1, 0.2]), r"confidence has shape \(6,\) but proximity has shape \(2,\)"),
        (dict(proximity=[0.1, 0.2, np.nan, 0.1, 0.1, 0.1]), "proximity nan in row 2 is not finite"),
        (dict(n_proximity_bins=0), "n_proximity_bins must be a whole number of at least 1, got 0"),
        (dict(n_proximity_bins=2.5), "n_proximity_bins .* got 2.5"),
        (dict(n_bins=-1), "n_bins must be a whole number of at least 1, got -1"),
        (dict(n_bins=2.5), "n_bins .* got 2.5"),
        (dict(confidence=[0.9, 0.4, 0.9, 0.8, 0.9, 1.4]), r"1.4 in row 5 is outside \[0, 1\]"),
        (dict(correct=[0, 1, 0, 1, 1, 2]), "correct must hold 0 and 1 only"),
    ],
)
def test_piece_refuses_bad_arguments_by_name(changed, words):
    with pytest.raises(ValueError, match=words):
        proximity_informed_ece(**{"confidence": CONFIDENCE, "correct": CORRECT, "proximity": PROXIMITY, **changed})
