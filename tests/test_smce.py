"""Exact smooth calibration error: against the linear program, a second algorithm, closed forms and invariants."""

import heapq
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from scipy.sparse import diags_array, vstack

import smartlib.smce
from smartlib.smce import smooth_calibration_error


def by_linear_program(confidence, correct):
    """The definition itself, solved by HiGHS: maximise Σ a_i w_i, |w_i| ≤ 1, |w_{i+1} − w_i| ≤ v_{i+1} − v_i."""
    v, group = np.unique(confidence, return_inverse=True)
    a = np.bincount(group, weights=correct - confidence) / confidence.size
    step = diags_array([-np.ones(v.size - 1), np.ones(v.size - 1)], offsets=[0, 1], shape=(v.size - 1, v.size))
    rows, gaps = vstack([step, -step], format="csr"), np.diff(v)
    tight = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}
    result = linprog(-a, A_ub=rows, b_ub=np.r_[gaps, gaps], bounds=(-1, 1), method="highs", options=tight)
    assert result.status == 0, result.message
    return -result.fun


def by_two_heaps(confidence, correct):
    """The dynamic program in w: breakpoints left and right of the maximiser of V_i(w), one lazy offset per heap.

    It shares nothing with the library's solution of the dual, and is fast where the linear program is not.
    """
    v, group = np.unique(confidence, return_inverse=True)
    a = np.bincount(group, weights=correct - confidence) / confidence.size
    heaps = {
        1: [],
        -1: [],
    }  # side → [(key, weight)]; side = 1 is right of the maximiser, position = side · (key + offset)
    offset = value = 0.0  # both sides move outward by the same amount, so one number serves for both
    for i, slope in enumerate(a):
        offset += v[i] - v[i - 1] if i else 0.0
        side, rest = (1, slope) if slope > 0 else (-1, -slope)
        source, target = heaps[side], heaps[-side]
        while rest > 0:
            if source and source[0][0] + offset < 1:
                key, weight = source[0]
                moved = min(weight, rest)
                if weight > moved:
                    source[0] = (key, weight - moved)
                else:
                    heapq.heappop(source)
            else:  # the wall at ±1; what is beyond it can never be reached again
                source.clear()
                key, moved = 1 - offset, rest
            value += moved * (key + offset)
            heapq.heappush(target, (-(key + offset) - offset, moved))
            rest -= moved
    return value


def sample(family, n, rng):
    """n (confidence, correct) pairs of a named kind."""
    f = rng.random(n)
    if family == "ties":
        f = rng.integers(0, 8, n) / 7  # 0 and 1 among them
    elif family == "rounded":
        f = np.round(f, 2)
    elif family == "ends":
        f = rng.choice([0.0, 1.0, 0.5, 1e-12, 1 - 1e-12], n)
    elif family == "near one":
        f = 1 - 10.0 ** rng.uniform(-14, 0, n)
    elif family == "near zero":
        f = 10.0 ** rng.uniform(-14, 0, n)
    elif family == "close together":
        f = 0.5 + 1e-9 * rng.standard_normal(n)
    elif family == "clusters":
        f = np.clip(rng.choice(rng.random(4), n) + 1e-6 * rng.standard_normal(n), 0, 1)
    elif family in ("equally spaced", "alternating"):
        f = (np.arange(n) + 0.5) / n
    elif family == "float32":
        f = rng.random(n, dtype=np.float32).astype(float)

    if family == "calibrated":
        correct = rng.random(n) < f
    elif family == "overconfident":
        f = 1 - f / 2
        correct = rng.random(n) < f**2
    elif family == "alternating":
        correct = np.arange(n) % 2
    elif family == "runs":
        f.sort()
        correct = np.arange(n) // max(1, n // 7) % 2
    elif family == "one-sided":
        correct = f < 0.5
    elif family == "back and forth":  # the sample on which the two heaps move everything at every step
        half = n // 2
        f = np.r_[np.linspace(0, 1e-7, half + 1)[1:], 0.25, np.linspace(0.4999, 0.5001, n)][:n]
        correct = (np.arange(n) > half) & ((np.arange(n) - half) % 2 == 1)
    else:
        correct = rng.random(n) < rng.random()
    return f, correct.astype(float)


FAMILIES = (
    "uniform",
    "ties",
    "rounded",
    "ends",
    "near one",
    "near zero",
    "close together",
    "clusters",
    "equally spaced",
    "alternating",
    "float32",
    "calibrated",
    "overconfident",
    "runs",
    "one-sided",
    "back and forth",
)
SIZES = (1, 2, 3, 4, 5, 7, 10, 20, 30, 50, 70, 100, 150, 200, 300)


@pytest.mark.parametrize("family", FAMILIES)
def test_agrees_with_the_linear_program(family):
    rng = np.random.default_rng(FAMILIES.index(family))
    for n in 2 * SIZES:  # 16 families × 30
        f, correct = sample(family, n, rng)
        assert smooth_calibration_error(f, correct) == pytest.approx(by_linear_program(f, correct), abs=1e-8), n


@pytest.mark.parametrize("family", FAMILIES)
def test_agrees_with_the_linear_program_at_two_thousand_points(family):
    f, correct = sample(family, 2000, np.random.default_rng(1))
    assert smooth_calibration_error(f, correct) == pytest.approx(by_linear_program(f, correct), abs=1e-8)


@pytest.mark.parametrize("n", [1, 2, 50])
def test_linear_program_on_all_correct_and_all_wrong(n):
    f = np.random.default_rng(n).random(n)
    for correct in (np.ones(n), np.zeros(n)):
        assert smooth_calibration_error(f, correct) == pytest.approx(by_linear_program(f, correct), abs=1e-8)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "back and forth"])
def test_agrees_with_two_heaps(family):
    f, correct = sample(family, 5000, np.random.default_rng(2))
    assert smooth_calibration_error(f, correct) == pytest.approx(by_two_heaps(f, correct), abs=1e-12)


def test_one_sample():
    assert smooth_calibration_error([0.75], [1]) == 0.25
    assert smooth_calibration_error([0.75], [0]) == 0.75
    assert smooth_calibration_error([1.0], [1]) == 0
    assert smooth_calibration_error([0.0], [1]) == 1


@pytest.mark.parametrize("n", [1, 2, 10, 1000, 1_000_000])
def test_all_correct_and_all_wrong(n):
    f = np.random.default_rng(n).random(n)
    assert smooth_calibration_error(f, np.ones(n)) == pytest.approx(np.mean(1 - f), abs=1e-12)
    assert smooth_calibration_error(f, np.zeros(n)) == pytest.approx(np.mean(f), abs=1e-12)


@pytest.mark.parametrize("gap", [0.0, 1e-9, 0.125, 0.5])
def test_two_points(gap):
    """Right at .25, wrong at .25 + gap: a = (.75, −.25 − gap)/2, so the best w is 1 at .25 and 1 − gap beyond."""
    expected = 0.375 - (1 - gap) * (0.25 + gap) / 2
    assert smooth_calibration_error([0.25, 0.25 + gap], [1, 0]) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("delta", [0.0, 0.01, 0.1, 0.2])
def test_two_groups_of_theorem_2a(delta):
    """Accuracies c ± η; the first group alone is sharpened to c + δ: smCE = δ(1 + η − δ)/2."""
    n, c, eta = 1000, 0.6, 0.25
    f = np.repeat([c + delta, c], n)
    correct = np.r_[np.arange(n) < n * (c + eta), np.arange(n) < n * (c - eta)]
    assert smooth_calibration_error(f, correct) == pytest.approx(delta * (1 + eta - delta) / 2, abs=1e-12)


def test_a_million_equally_spaced_points():
    """Right above 1/2, wrong below: S(v) = −min(v, 1 − v)²/2, which encloses 1/24; 1/(12 n²) more on the grid."""
    n = 1_000_000
    f = (np.arange(n) + 0.5) / n
    assert smooth_calibration_error(f, f > 0.5) == pytest.approx(1 / 24 + 1 / (12 * n**2), abs=1e-12)


def test_a_million_points_back_and_forth():
    """The sample that would take two heaps hours; rounded to three values it has a value not far away (continuity)."""
    f, correct = sample("back and forth", 1_000_000, np.random.default_rng(0))
    value = smooth_calibration_error(f, correct)
    clusters = smooth_calibration_error(np.round(f, 2), correct)  # moves no point by more than 1e−4
    assert abs(np.mean(correct - f)) <= value <= np.mean(np.abs(correct - f))
    assert value == pytest.approx(clusters, abs=2e-4)


def test_perfectly_calibrated_groups_give_zero():
    f = np.repeat([0.25, 0.5, 0.75], 4)
    correct = np.tile(np.arange(4), 3) < 4 * f
    assert smooth_calibration_error(f, correct) == 0


@st.composite
def samples(draw):
    """Up to 40 pairs; the grid makes ties, the floats come as near to each other as floats can."""
    confidence = st.one_of(st.floats(0, 1, allow_subnormal=False), st.integers(0, 10).map(lambda i: i / 10))
    pairs = draw(st.lists(st.tuples(confidence, st.booleans()), min_size=1, max_size=40))
    f, correct = zip(*pairs, strict=True)
    return np.array(f), np.array(correct, float)


@given(samples())
@settings(max_examples=200, deadline=None)
def test_between_the_mean_and_the_mean_absolute_residual(pairs):
    f, correct = pairs
    value = smooth_calibration_error(f, correct)
    assert abs(np.mean(correct - f)) - 1e-12 <= value <= np.mean(np.abs(correct - f)) + 1e-12
    assert value == pytest.approx(by_two_heaps(f, correct), abs=1e-12)


@given(samples(), st.integers(0, 2**32 - 1), st.integers(2, 5))
@settings(max_examples=100, deadline=None)
def test_same_after_permutation_duplication_and_reflection(pairs, seed, copies):
    f, correct = pairs
    value = smooth_calibration_error(f, correct)
    order = np.random.default_rng(seed).permutation(f.size)
    assert smooth_calibration_error(f[order], correct[order]) == pytest.approx(value, abs=1e-12)
    assert smooth_calibration_error(np.tile(f, copies), np.tile(correct, copies)) == pytest.approx(value, abs=1e-12)
    assert smooth_calibration_error(1 - f, 1 - correct) == pytest.approx(value, abs=1e-12)


@given(samples(), st.integers(0, 2**32 - 1), st.floats(1e-9, 0.1))
@settings(max_examples=100, deadline=None)
def test_continuous_in_the_confidence(pairs, seed, epsilon):
    """Moving f by ε moves each (A − f) w(f) by at most ε|w| + |A − f| ε ≤ 2ε, for every witness w."""
    f, correct = pairs
    moved = np.clip(f + epsilon * np.random.default_rng(seed).uniform(-1, 1, f.size), 0, 1)
    change = smooth_calibration_error(moved, correct) - smooth_calibration_error(f, correct)
    assert abs(change) <= 2 * epsilon + 1e-12


def test_inputs_are_taken_as_they_come_and_left_alone():
    f = np.random.default_rng(0).random(20)
    correct = np.arange(20) % 3 == 0
    value = smooth_calibration_error(f, correct)
    before = f.copy()
    f.flags.writeable = False
    assert smooth_calibration_error(f, correct) == value
    assert smooth_calibration_error(f.tolist(), correct.tolist()) == value
    assert smooth_calibration_error(np.repeat(f, 2)[::2], correct.astype(np.int8)) == value
    assert smooth_calibration_error(f.astype(">f8"), correct.astype(float)) == value
    assert type(value) is float
    assert np.array_equal(f, before)


@pytest.mark.parametrize(
    ("confidence", "correct"),
    [([], []), ([0.5], [1, 0]), ([1.5], [1]), ([np.nan], [1]), ([0.5], [2]), ([[0.5, 0.6]], [[1, 0]])],
)
def test_refuses(confidence, correct):
    with pytest.raises(ValueError):
        smooth_calibration_error(confidence, correct)


def run_python(code, **environment):
    command, environment = [sys.executable, "-c", code], {**os.environ, **environment}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_import_does_not_load_numba():
    result = run_python("import sys, smartlib.smce; print('numba' in sys.modules)")
    assert result.stdout.strip() == "False", result.stderr


def test_works_where_nothing_can_be_cached(tmp_path):
    """Neither beside the file nor in the user's cache folder: plain files stand in the way of both."""
    shutil.copy(Path(smartlib.smce.__file__).with_name("_smce_kernel.py"), tmp_path / "kernel.py")
    blocked = tmp_path / "__pycache__"
    blocked.write_text("")
    code = "import numpy, kernel; print(kernel.isotonic_cost(numpy.array([3.0, 2.0]), numpy.array([1.0, 0.5])))"
    places = {"HOME": str(blocked), "XDG_CACHE_HOME": str(blocked), "NUMBA_CACHE_DIR": "", "PYTHONPATH": str(tmp_path)}
    result = run_python(code, **places)
    assert result.stdout.strip() == "0.5", result.stderr
