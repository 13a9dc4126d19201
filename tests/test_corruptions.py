"""Corrupted images: hand cases, growing severity, rows that do not depend on each other."""

from __future__ import annotations

import numpy as np
import pytest

from smartlib.data.corruptions import CORRUPTIONS, SEVERITIES, corrupt, sketch

EIGHT = (
    "gaussian-noise",
    "gaussian-blur",
    "contrast",
    "brightness",
    "pixelation",
    "jpeg",
    "rotation",
    "occlusion",
)


@pytest.fixture(scope="module")
def garments():
    """64 pictures (28, 28) like those of Fashion-MNIST: a smooth, textured blob of 8 to 20 pixels on black."""
    rng = np.random.default_rng(0)
    rows, columns = np.mgrid[:28, :28] - 13.5
    height, width = rng.uniform(4, 10, (2, 64, 1, 1))
    inside = (rows / height) ** 2 + (columns / width) ** 2 < 1
    texture = 150 + 40 * np.sin(rng.uniform(0.5, 2, (64, 1, 1)) * rows) + rng.normal(0, 15, (64, 28, 28))
    return (inside * texture).clip(0, 255).astype(np.uint8)


def grey(value, n=1):
    return np.full((n, 28, 28), value, np.uint8)


def distance(images, clean):
    return np.abs(images.astype(int) - clean.astype(int)).mean()


def test_the_eight_corruptions_in_their_order():
    assert CORRUPTIONS == EIGHT
    assert SEVERITIES == (1, 2, 3, 4, 5)


@pytest.mark.parametrize("name", EIGHT)
def test_each_severity_is_further_from_the_clean_image(garments, name):
    before = garments.copy()
    distances = [distance(corrupt(garments, name, severity), garments) for severity in SEVERITIES]
    assert distances[0] > 0.5
    assert np.all(np.diff(distances) > 0)
    np.testing.assert_array_equal(garments, before)


@pytest.mark.parametrize("name", EIGHT)
def test_an_image_does_not_depend_on_those_that_follow(garments, name):
    one, all_ = corrupt(garments[:1], name, 3), corrupt(garments, name, 3)
    assert all_.shape == garments.shape and all_.dtype == np.uint8
    np.testing.assert_array_equal(one, all_[:1])
    np.testing.assert_array_equal(all_, corrupt(garments, name, 3))
    assert corrupt(garments[:0], name, 3).shape == (0, 28, 28)


@pytest.mark.parametrize("name", EIGHT)
def test_the_seed_matters_where_something_is_random(garments, name):
    same = np.array_equal(corrupt(garments, name, 3, seed=0), corrupt(garments, name, 3, seed=1))
    assert same == (name not in ("gaussian-noise", "rotation", "occlusion"))


@pytest.mark.parametrize("name", ["gaussian-noise", "rotation", "occlusion"])
def test_equal_images_are_not_corrupted_equally(garments, name):
    first, *others = corrupt(np.repeat(garments[:1], 8, axis=0), name, 5)
    assert any(not np.array_equal(first, other) for other in others)


def test_the_global_random_state_is_left_alone(garments):
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    corrupt(garments, "gaussian-noise", 1)
    np.testing.assert_array_equal(np.random.get_state()[1], before)  # noqa: NPY002


@pytest.mark.parametrize("name", ["contrast", "gaussian-blur", "pixelation"])
@pytest.mark.parametrize("severity", SEVERITIES)
def test_a_constant_image_stays(name, severity):
    np.testing.assert_array_equal(corrupt(grey(90), name, severity), grey(90))


def test_contrast_shrinks_distances_from_the_mean():
    image = grey(100)
    image[:, :14] = 200
    # Mean 150; at severity 3 distances of 50 become 0.35 * 50 = 17.5, and half-way goes to the even number.
    np.testing.assert_array_equal(np.unique(corrupt(image, "contrast", 3)), [132, 168])


def test_brightness_adds_and_clips():
    image = grey(0)
    image[0, 0, 0] = 240
    # Severity 2 adds a tenth of 255.
    bright = corrupt(image, "brightness", 2)
    assert bright[0, 0, 0] == 255
    np.testing.assert_array_equal(np.unique(bright), [26, 255])


def test_noise_has_the_stated_deviation_and_no_bias():
    noise = corrupt(grey(128, 50), "gaussian-noise", 3).astype(float) - 128
    n = noise.size
    expected = 0.14 * 255
    assert noise.std() == pytest.approx(expected, rel=4 / np.sqrt(2 * n) + 0.003)  # clipped at 3.6 deviations
    assert abs(noise.mean()) < 4 * expected / np.sqrt(n)


def test_noise_of_the_next_severity_is_the_same_but_stronger():
    first, second = (corrupt(grey(128), "gaussian-noise", severity).astype(float) - 128 for severity in (1, 2))
    np.testing.assert_allclose(second, 2 * first, atol=1.5)  # twice the deviation, each rounded to a whole grey


def test_blur_spreads_a_point_by_the_gaussian():
    image = grey(0)
    image[0, 14, 14] = 255
    # Severity 2: a deviation of 0.8 pixels. The middle of the sampled kernel, squared for the two axes.
    kernel = np.exp(-(np.arange(-3, 4) ** 2) / (2 * 0.8**2))
    assert corrupt(image, "gaussian-blur", 2)[0, 14, 14] == round(255 * (kernel[3] / kernel.sum()) ** 2)


def test_pixelation_leaves_the_means_of_the_areas():
    image = np.random.default_rng(0).integers(0, 256, (1, 28, 28), dtype=np.uint8)
    # Pixels are cut where areas do not end at them, so the mean of all survives; severity 4 has 8 x 8 areas.
    coarse = corrupt(image, "pixelation", 4)
    edges = np.arange(9) * 3.5
    area = image[0, :4, :4].astype(float)
    share = np.array([1, 1, 1, 0.5]) / edges[1]
    assert coarse[0, 0, 0] == round(share @ area @ share)
    assert len(np.unique(coarse)) <= 64
    assert np.all(coarse[0, :3, :3] == coarse[0, 0, 0])


@pytest.mark.parametrize("severity", SEVERITIES)
def test_jpeg_of_a_constant_image_is_constant(severity):
    # Only the mean of a block of 8 x 8 pixels is coded, in steps of an eighth of at most 255 greys.
    (level,) = np.unique(corrupt(grey(100), "jpeg", severity))
    assert abs(int(level) - 100) <= 16


def test_jpeg_loses_a_chequerboard():
    board = grey(40)
    board[:, ::2, ::2] = board[:, 1::2, 1::2] = 60
    # Every wave that a difference of 20 greys is made of is below half a step.
    assert len(np.unique(corrupt(board, "jpeg", 5))) == 1


def test_rotation_turns_a_bar_by_the_stated_angle_to_either_side():
    image = grey(0, 20)
    image[:, 13:15, 4:24] = 255
    rows, columns = np.mgrid[:28, :28] - 13.5
    angles = []
    for turned in corrupt(image, "rotation", 3).astype(float):
        covariance = [(turned * a * b).sum() for a, b in ((columns, columns), (rows, rows), (columns, rows))]
        angles.append(np.degrees(np.arctan2(2 * covariance[2], covariance[0] - covariance[1]) / 2))
    np.testing.assert_allclose(np.abs(angles), 20, atol=1)
    assert {-1.0, 1.0} == set(np.sign(angles))


def test_rotation_leaves_a_disc():
    rows, columns = np.mgrid[:28, :28] - 13.5
    disc = (255 * (6 - np.hypot(rows, columns) / 2).clip(0, 1)).astype(np.uint8)[None]
    assert distance(corrupt(disc, "rotation", 5), disc) < 3


@pytest.mark.parametrize(("severity", "side"), [(1, 5), (2, 8), (3, 11), (4, 14), (5, 17)])
def test_occlusion_is_a_grey_square_inside_the_picture(severity, side):
    occluded = corrupt(grey(0, 200), "occlusion", severity)
    assert set(np.unique(occluded)) == {0, 128}
    covered = occluded == 128
    np.testing.assert_array_equal(covered.sum(axis=(1, 2)), side**2)
    np.testing.assert_array_equal(covered.any(axis=2).sum(axis=1), side)
    np.testing.assert_array_equal(covered.any(axis=1).sum(axis=1), side)
    # Every place is possible: over 200 pictures the outermost rows and columns are met.
    assert covered[:, [0, -1]].any() and covered[:, :, [0, -1]].any()


def test_a_sketch_draws_the_edge_of_a_square_alone():
    image = grey(0)
    image[0, 8:20, 8:20] = 200
    drawn = sketch(image)[0]
    # The Sobel gradient is 4 x 200 on the pixels at either side of a straight edge, and largest in a corner of the
    # square, (3 x 200, 3 x 200): a share of 4 / sqrt(18), of which the quarter is taken away.
    edge = round(255 * (4 / np.sqrt(18) - 0.25) / 0.75)
    assert drawn[8, 8] == 255
    assert np.all(drawn[12, [7, 8, 19, 20]] == edge) and np.all(drawn[[7, 8, 19, 20], 12] == edge)
    assert np.all(drawn[10:18, 10:18] == 0) and np.all(drawn[:6] == 0)


def test_a_sketch_does_not_depend_on_brightness_or_on_its_neighbours(garments):
    images = garments // 4
    np.testing.assert_allclose(sketch(4 * images).astype(int), sketch(images), atol=1)
    np.testing.assert_array_equal(sketch(garments)[3:5], sketch(garments[3:5]))


def test_a_sketch_of_nothing_is_black():
    np.testing.assert_array_equal(sketch(grey(70, 2)), grey(0, 2))


@pytest.mark.parametrize(
    ("images", "name", "severity", "message"),
    [
        (grey(0), "fog", 1, r"unknown corruption 'fog'; known: gaussian-noise"),
        (grey(0), "jpeg", 0, r"severity of jpeg must be one of \(1, 2, 3, 4, 5\), got 0"),
        (grey(0).astype(float), "jpeg", 1, r"uint8 of shape \(N, 28, 28\), got float64"),
        (grey(0)[:, :, :27], "jpeg", 1, r"got uint8 of shape \(1, 28, 27\)"),
    ],
)
def test_bad_input_is_named(images, name, severity, message):
    with pytest.raises(ValueError, match=message):
        corrupt(images, name, severity)


def test_a_sketch_of_the_wrong_shape_is_named():
    with pytest.raises(ValueError, match=r"got uint8 of shape \(28, 28\)"):
        sketch(grey(0)[0])
