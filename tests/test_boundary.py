"""The smallest perturbation to the decision boundary where it is known, and how distances are stored."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.spatial import cKDTree

from smartlib.data import zoo
from smartlib.data.boundary import smallest_perturbation


def linear(weight, bias):
    """A linear classifier of (N, 1, 1, D) images."""
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0])
    with torch.no_grad():
        layer.weight.copy_(torch.as_tensor(weight))
        layer.bias.copy_(torch.as_tensor(bias))
    return torch.nn.Sequential(torch.nn.Flatten(), layer).eval()


def network(seed, scale, width=12):
    """A smooth network of three classes in the plane with curved boundaries."""
    rng = np.random.default_rng(seed)
    first = linear(scale * rng.normal(size=(width, 2)), scale * rng.uniform(-1, 1, width) / 2)
    second = linear(rng.normal(size=(3, width)), np.zeros(3))
    return torch.nn.Sequential(first, torch.nn.Tanh(), second).eval()


def as_images(points):
    return torch.as_tensor(np.asarray(points, dtype=np.float32))[:, None, None]


@pytest.fixture(scope="module")
def random_linear():
    rng = np.random.default_rng(0)
    weight, bias = rng.normal(size=(10, 30)), 0.3 * rng.normal(size=10)
    points = rng.uniform(size=(60, 30)).astype(np.float32).astype(float)
    return weight, bias, points


def test_a_linear_classifier_where_the_box_does_not_bind(random_linear):
    weight, _, points = random_linear
    points = 0.5 + 0.05 * (points - 0.5)  # near the middle of the box, where all classes meet
    bias = -weight.sum(axis=1) / 2
    found = smallest_perturbation(linear(weight, bias), as_images(points))
    z = points @ weight.T + bias
    top = z.argmax(axis=1)
    slopes = np.linalg.norm(weight[top][:, None] - weight[None], axis=2)
    with np.errstate(invalid="ignore"):
        exact = (z.max(axis=1, keepdims=True) - z) / slopes  # NaN for the predicted class
    assert ((found.nearest > 0) & (found.nearest < 1)).all()
    np.testing.assert_allclose(found.distance, np.nanmin(exact, axis=1), rtol=1e-3, atol=1e-6)
    np.testing.assert_array_equal(found.other, np.nanargmin(exact, axis=1))
    np.testing.assert_array_equal(found.predicted, top)


def test_a_linear_classifier_where_the_box_binds(random_linear):
    """A quadratic programme for each class, solved by SciPy, is the oracle."""
    weight, bias, points = random_linear
    weight, points = weight[:4, :6], points[:20, :6]
    bias = np.array([2.0, 0.0, 0.0, 0.0])  # one class rules most of the box
    found = smallest_perturbation(linear(weight, bias), as_images(points))
    n_bound = 0
    for x, distance, top, y in zip(points, found.distance, found.predicted, found.nearest[:, 0, 0], strict=True):
        solutions = []
        for k in set(range(4)) - {top}:
            w, b = weight[k] - weight[top], bias[k] - bias[top]
            solved = minimize(
                lambda y, x=x: ((y - x) ** 2).sum(), x, jac=lambda y, x=x: 2 * (y - x), bounds=[(0, 1)] * 6,
                constraints={"type": "ineq", "fun": lambda y, w=w, b=b: w @ y + b, "jac": lambda y, w=w: w},
                method="SLSQP", options={"maxiter": 200, "ftol": 1e-12},
            )  # fmt: skip
            if solved.success:
                solutions.append(np.sqrt(solved.fun))
        if not solutions:
            assert np.isnan(distance), "no other class anywhere in the box"
            continue
        assert distance == pytest.approx(min(solutions), rel=1e-3)
        n_bound += bool(((y < 1e-4) | (y > 1 - 1e-4)).any())
    assert n_bound >= 3, "the box binds in some of the cases"


# The search starts once and goes downhill, so that it may end at another stretch of the boundary than the nearest. The
# last network is one where this happens.
@pytest.mark.parametrize(("seed", "scale", "share"), [(0, 3.0, 1.0), (1, 4.0, 1.0), (3, 3.0, 0.9)])
def test_a_network_in_the_plane_against_brute_force(seed, scale, share):
    model, cells = network(seed, scale), 700
    axis = (np.arange(cells) + 0.5) / cells
    grid = np.stack(np.meshgrid(axis, axis), axis=-1).reshape(-1, 2)
    with torch.no_grad():
        classes = model(as_images(grid)).argmax(dim=1).numpy()
    points = np.random.default_rng(seed).uniform(size=(200, 2))
    found = smallest_perturbation(model, as_images(points))
    assert found.n_not_found == 0
    excess = np.empty(len(points))
    for c in np.unique(found.predicted):
        rows = found.predicted == c
        brute, _ = cKDTree(grid[classes != c]).query(points[rows])
        # Where a region tapers off at the edge of the box the grid has its first point some cells behind.
        assert (found.distance[rows] >= brute - 5 / cells).all(), "none nearer than the nearest"
        excess[rows] = found.distance[rows] / brute
    assert (excess <= 1.02).mean() >= share


def test_the_points_lie_on_the_boundary_and_in_the_box():
    model = network(1, 4.0)
    images = as_images(np.random.default_rng(5).uniform(size=(200, 2)))
    found = smallest_perturbation(model, images)
    with torch.no_grad():
        z = model(torch.from_numpy(found.nearest)).numpy()
    rows = np.arange(len(z))
    assert np.abs(z[rows, found.predicted] - z[rows, found.other]).max() < 1e-4
    np.testing.assert_allclose(z.max(axis=1), z[rows, found.predicted], atol=1e-4)
    assert found.nearest.min() >= 0 and found.nearest.max() <= 1
    moved = np.linalg.norm((found.nearest - images.numpy()).reshape(len(z), -1), axis=1)
    np.testing.assert_allclose(found.distance, moved, atol=1e-6)


def test_a_second_run_is_the_same_and_the_batch_size_hardly_matters():
    model = network(3, 4.0)
    images = as_images(np.random.default_rng(6).uniform(size=(100, 2)))
    first, again, single = (smallest_perturbation(model, images, batch_size=n) for n in (100, 100, 7))
    np.testing.assert_array_equal(first.distance, again.distance)
    # A product of matrices of another size may differ in its last digit, and a search whose step is then just taken or
    # just not taken ends elsewhere: on some processors one in ten does, up to a few per cent further.
    assert np.median(np.abs(first.distance / single.distance - 1)) < 1e-5
    np.testing.assert_allclose(first.distance, single.distance, rtol=0.1)
    assert np.mean(first.other == single.other) >= 0.95


def test_a_tie_is_on_the_boundary_and_a_constant_classifier_has_none():
    weight, points = np.array([[1.0, 0.0], [0.0, 1.0], [-9.0, -9.0]]), as_images([[0.5, 0.5], [0.75, 0.25]])
    found = smallest_perturbation(linear(weight, np.zeros(3)), points)
    assert found.distance == pytest.approx([0, np.sqrt(0.125)], abs=1e-6)
    none = smallest_perturbation(linear(0 * weight, np.array([1.0, 0.0, 0.0])), points)
    assert np.isnan(none.distance).all() and none.n_not_found == 2 and (none.other == -1).all()


def test_bad_input_is_named():
    model = linear(np.eye(2), np.zeros(2))
    with pytest.raises(ValueError, match=r"shape \(N, 1, H, W\), got \(3, 2\)"):
        smallest_perturbation(model, torch.zeros(3, 2))
    with pytest.raises(ValueError, match=r"images\[1, 0, 0, 0\] is 255"):
        smallest_perturbation(model, as_images([[0.0, 1.0], [255.0, 0.0]]))
    with pytest.raises(ValueError, match=r"model.eval\(\)"):
        smallest_perturbation(model.train(), as_images([[0.0, 1.0]]))


# --- storage ----------------------------------------------------------------------------------------------------


def test_distances_come_back_as_they_were_stored(tmp_path):
    rows, other = np.array([9, 3, 70_000]), np.array([1, -1, 99])
    distance = np.array([0.25, np.nan, 1e-6])
    zoo.save_boundary(tmp_path, "fashion/tiny", zoo.Boundary(rows, distance, other), {"pixels": "[0, 1]"})
    assert (tmp_path / "boundary" / "fashion_tiny.npz").is_file()
    loaded = zoo.load_boundary("fashion/tiny", tmp_path)
    np.testing.assert_array_equal(loaded.rows, rows)
    np.testing.assert_array_equal(loaded.other, other)
    np.testing.assert_allclose(loaded.distance, distance, rtol=1e-6)
    assert (loaded.rows.dtype, loaded.distance.dtype, loaded.other.dtype) == (np.int64, np.float64, np.int64)


@pytest.mark.parametrize(
    ("distance", "message"),
    [([1.0], "one length"), ([1.0, -0.5], r"distance\[1\] is -0.5"), ([np.inf, 0], r"\[0\] is inf")],
)
def test_distances_that_are_none_are_refused(tmp_path, distance, message):
    with pytest.raises(ValueError, match=message):
        zoo.save_boundary(tmp_path, "x", zoo.Boundary(np.arange(2), np.array(distance), np.ones(2, int)), {})
