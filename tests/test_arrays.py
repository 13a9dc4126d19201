"""Checks and conversions: what is accepted, what is refused and with which words, and that inputs stay as they were."""

import warnings

import numpy as np
import pandas as pd
import pytest
import torch

from smartlib import arrays
from smartlib.arrays import (
    as_confidence,
    as_confidence_and_correct,
    as_count,
    as_labels,
    as_logits,
    as_probabilities,
    check_label_logits,
    like,
    log_probabilities,
    row_chunks,
    to_numpy,
)

LOGITS = np.array([[2.0, -1.5, 0.25], [0.0, 3.0, -4.0], [1.0, 1.5, -0.5], [-2.0, 0.5, 8.0]])  # exact in float16


@pytest.fixture(params=[1, 4, 7, 2**22], ids=lambda numbers: f"chunks-of-{numbers}-numbers")
def chunk(request, monkeypatch):
    monkeypatch.setattr(arrays, "_CHUNK_NUMBERS", request.param)


def every_second_column(tmp_path):
    wide = np.full((4, 6), 99.0)
    wide[:, ::2] = LOGITS
    return wide[:, ::2]


def read_only(tmp_path):
    array = LOGITS.copy()
    array.flags.writeable = False
    return array


def memory_map(tmp_path):
    np.save(tmp_path / "logits.npy", LOGITS)
    return np.load(tmp_path / "logits.npy", mmap_mode="r")


KINDS = {
    "contiguous": lambda _: LOGITS.copy(),
    "fortran-order": lambda _: np.asfortranarray(LOGITS),
    "every-second-column": every_second_column,
    "negative-strides": lambda _: LOGITS[::-1, ::-1].copy()[::-1, ::-1],
    "transposed": lambda _: LOGITS.T.copy().T,
    "read-only": read_only,
    "big-endian-float64": lambda _: LOGITS.astype(">f8"),
    "big-endian-float32": lambda _: LOGITS.astype(">f4"),
    "float16": lambda _: LOGITS.astype(np.float16),
    "float32": lambda _: LOGITS.astype(np.float32),
    "long-double": lambda _: LOGITS.astype(np.longdouble),
    "object": lambda _: LOGITS.astype(object),
    "memory-map": memory_map,
    "list-of-lists": lambda _: LOGITS.tolist(),
    "tuple-of-arrays": lambda _: tuple(LOGITS),
    "frame": lambda _: pd.DataFrame(LOGITS, index=[3, 1, 0, 2], columns=list("zxy")),
    "nullable-frame": lambda _: pd.DataFrame(LOGITS).astype("Float64"),
    "torch-float64": lambda _: torch.tensor(LOGITS),
    "torch-float32": lambda _: torch.tensor(LOGITS, dtype=torch.float32),
    "torch-float16": lambda _: torch.tensor(LOGITS, dtype=torch.float16),
    "torch-bfloat16": lambda _: torch.tensor(LOGITS, dtype=torch.bfloat16),
    "torch-with-gradient": lambda _: torch.tensor(LOGITS, requires_grad=True),
    "torch-inside-a-graph": lambda _: torch.tensor(LOGITS, requires_grad=True) * 1,
    "torch-transposed": lambda _: torch.tensor(LOGITS.T.copy()).T,
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_accepted_kind_gives_the_same_numbers_and_is_left_as_it_was(kind, tmp_path):
    given = KINDS[kind](tmp_path)
    result = as_logits(given)
    assert isinstance(result, np.ndarray)
    assert result.dtype.isnative
    np.testing.assert_array_equal(result, LOGITS)
    if kind.startswith("torch"):
        np.testing.assert_array_equal(given.detach().double().numpy(), LOGITS)
    else:
        np.testing.assert_array_equal(np.asarray(given).astype(float), LOGITS)


@pytest.mark.parametrize(
    "dtype, becomes",
    [(np.float16, np.float32), (np.float32, np.float32), (">f4", np.float32), (np.float64, np.float64),
     (">f8", np.float64), (np.longdouble, np.float64), (np.int8, np.float64), (np.int64, np.float64),
     (np.uint8, np.float64)],
)  # fmt: skip
def test_logits_become_float32_from_narrow_floats_and_float64_from_all_else(dtype, becomes):
    assert as_logits(np.array([[2, 0], [0, 3]], dtype=dtype)).dtype == becomes


def test_bfloat16_logits_become_float32():
    assert as_logits(torch.tensor([[2.0, 0.0]], dtype=torch.bfloat16)).dtype == np.float32


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_logits_that_need_no_conversion_are_not_copied(dtype):
    given = LOGITS.astype(dtype)
    assert np.shares_memory(as_logits(given), given)


def test_a_tensor_in_a_graph_gives_an_array_without_one():
    given = torch.ones(3, requires_grad=True) * 2
    result = like(to_numpy(given), given)
    assert not result.requires_grad
    assert result.grad_fn is None


def test_negated_views_of_torch_are_read_by_value():
    imaginary = torch.tensor([1 + 2j, 3 - 4j]).conj().imag  # a view with the negative bit set
    np.testing.assert_array_equal(to_numpy(imaginary), [-2, 4])


def test_like_follows_the_original_and_keeps_the_shape_of_a_scalar():
    assert isinstance(like(np.arange(3), [1, 2]), np.ndarray)
    back = like(np.arange(6).reshape(2, 3)[:, ::-1], torch.zeros(1))
    assert torch.equal(back, torch.tensor([[2, 1, 0], [5, 4, 3]]))
    assert like(np.array(1.5), torch.tensor(2.0)).shape == ()


@pytest.mark.parametrize(
    "given, words",
    [
        ([[1, 2], [3]], "array is not a rectangular array"),
        ([["a", "b"]], "array must hold real numbers, got dtype <U1"),
        ([[1 + 2j, 0]], "array must hold real numbers, got dtype complex128"),
        (np.array([["a", {}]], dtype=object), "array holds objects that are not numbers"),
        (pd.Series(["cat", "dog"], dtype=object), "array holds objects that are not numbers"),
        (np.array(["2020-01-01"], dtype="datetime64[D]"), "array must hold real numbers, got dtype datetime64"),
    ],
)
def test_what_is_not_an_array_of_real_numbers_is_refused(given, words):
    with pytest.raises(ValueError) as error:
        to_numpy(given)
    assert str(error.value).startswith(words)


# --- shapes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", [as_logits, as_probabilities, log_probabilities])
@pytest.mark.parametrize(
    "shape, words",
    [
        ((), r"shape \(N, K\), one row per sample and one column per class; got \(\)"),
        ((4,), r"shape \(N, K\), one row per sample and one column per class; got \(4,\)"),
        ((2, 3, 4, 5), r"shape \(N, K\), one row per sample and one column per class; got \(2, 3, 4, 5\)"),
        ((0, 3), r"no rows \(shape \(0, 3\)\): at least one sample is needed"),
        ((5, 1), r"1 column\(s\): at least two classes are needed, shape \(N, K\), K >= 2"),
        ((5, 0), r"0 column\(s\): at least two classes are needed"),
    ],
)
def test_a_wrong_shape_is_refused_with_the_shape_expected(check, shape, words):
    with pytest.raises(ValueError, match=words):
        check(np.ones(shape))


# --- values of logits, and rows counted across chunks -------------------------------------------------------------


@pytest.mark.parametrize("row", [0, 2, 3, 4, 9])
@pytest.mark.parametrize(
    "bad, value",
    [([0, np.nan, 1], "NaN"), ([np.nan] * 3, "NaN"), ([0, 1, np.inf], "+inf"), ([-np.inf] * 3, "only -inf"),
     ([np.nan, np.inf, -np.inf], "NaN")],
)  # fmt: skip
def test_a_bad_row_of_logits_is_named_with_its_value_whatever_the_chunks(bad, value, row, chunk):
    logits = np.tile(LOGITS[0], (10, 1))
    logits[row] = bad
    with pytest.raises(ValueError) as error:
        as_logits(logits, name="validation logits")
    assert str(error.value) == (
        f"validation logits row {row} holds {value}; every row needs a finite largest entry"
    )  # fmt: skip


def test_the_first_of_several_bad_rows_is_named(chunk):
    logits = np.tile(LOGITS[0], (10, 1))
    logits[[5, 8]] = np.nan
    with pytest.raises(ValueError, match="row 5 holds NaN"):
        as_logits(logits)


def test_single_classes_at_minus_infinity_are_accepted():
    np.testing.assert_array_equal(as_logits([[2, -np.inf, 1], [-np.inf, -np.inf, 0]])[1], [-np.inf, -np.inf, 0])


@pytest.mark.parametrize("n, k", [(1, 1), (10, 3), (7, 100), (2, 0)])
def test_row_chunks_cover_every_row_once_and_keep_to_their_size(n, k, chunk):
    slices = list(row_chunks(n, k))
    assert [i for s in slices for i in range(n)[s]] == list(range(n))
    assert all((s.stop - s.start) * k <= max(arrays._CHUNK_NUMBERS, k) for s in slices)


# --- logits or probabilities? -----------------------------------------------------------------------------------


def softmax_rows(n, k, dtype):
    u = np.random.default_rng(0).normal(size=(n, k))
    return (np.exp(u) / np.exp(u).sum(axis=1, keepdims=True)).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("k", [2, 10, 1000])
def test_rows_that_look_like_a_softmax_warn_and_name_the_option(dtype, k, chunk):
    with pytest.warns(UserWarning, match="from_probs=True"):
        as_logits(softmax_rows(4, k, dtype))


@pytest.mark.parametrize(
    "change", [lambda p: 2 * p, lambda p: p - 0.01, lambda p: np.log(p), lambda p: np.vstack([p, [[0.5, 0.6, 0.1]]])]
)
def test_rows_that_no_softmax_can_give_do_not_warn(change, chunk):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        as_logits(change(softmax_rows(6, 3, np.float64)))


def test_from_probs_is_the_logarithm_and_does_not_warn():
    probs = softmax_rows(5, 3, np.float64)
    np.testing.assert_array_equal(as_logits(probs, from_probs=True), np.log(probs))


@pytest.mark.parametrize(
    "dtype, smallest", [(np.float16, 2.0**-14), (np.float32, 2.0**-126), (np.float64, 2.0**-1022), (int, 2.0**-1022)]
)
def test_a_probability_of_zero_becomes_the_log_of_the_smallest_normal_number_of_its_type(dtype, smallest):
    result = log_probabilities(np.array([[1, 0]], dtype=dtype))
    assert result.dtype == np.float64
    np.testing.assert_allclose(result, [[0, np.log(smallest)]], rtol=1e-15)


def test_probabilities_above_the_smallest_normal_number_are_kept_exactly():
    probs = np.array([[1 - 1e-30, 1e-30]], dtype=np.float32)
    np.testing.assert_array_equal(log_probabilities(probs), np.log(probs.astype(np.float64)))


def test_zero_in_bfloat16_counts_as_in_float32():
    result = log_probabilities(torch.tensor([[1.0, 0.0]], dtype=torch.bfloat16))
    np.testing.assert_allclose(result, [[0, np.log(2.0**-126)]], rtol=1e-15)


@pytest.mark.parametrize("row", [0, 3, 8])
@pytest.mark.parametrize(
    "bad, words",
    [
        ([0.5, 0.4, 0.0], "smallest entry 0, sum 0.9"),
        ([1.2, -0.2, 0.0], "smallest entry -0.2, sum 1"),
        ([np.nan, 0.5, 0.5], "smallest entry nan, sum nan"),
        ([3.0, -1.0, 2.0], "smallest entry -1, sum 4"),
    ],
)
def test_a_row_that_is_no_probability_vector_is_named_with_its_sum(bad, words, row, chunk):
    probs = np.full((9, 3), 1 / 3)
    probs[row] = bad
    with pytest.raises(ValueError) as error:
        as_probabilities(probs)
    assert f"probs row {row} is not a probability vector ({words})" in str(error.value)
    assert "if these are logits, apply a softmax" in str(error.value)


@pytest.mark.parametrize("off, accepted", [(1.5e-3, True), (-1.5e-3, True), (2.5e-3, False), (-2.5e-3, False)])
def test_a_sum_may_miss_one_by_two_thousandths(off, accepted):
    probs = [[0.5, 0.5 + off]]
    if accepted:
        np.testing.assert_array_equal(as_probabilities(probs), probs)
    else:
        with pytest.raises(ValueError, match="not a probability vector"):
            as_probabilities(probs)


def test_probabilities_are_never_narrower_than_float32():
    assert as_probabilities(np.array([[0.5, 0.5]], dtype=np.float16)).dtype == np.float32
    assert as_probabilities([[1, 0]]).dtype == np.float64


# --- labels -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        [2, 0, 1],
        [[2], [0], [1]],
        [2.0, 0.0, 1.0],
        np.array([2, 0, 1], dtype=np.uint8),
        np.array([2, 0, 1], dtype=">i4"),
        np.array([2, 0, 1], dtype=np.float16),
        torch.tensor([2, 0, 1]),
        torch.tensor([[2], [0], [1]], dtype=torch.int32),
        pd.Series([2, 0, 1], index=[1, 2, 0]),
        pd.Series([2, 0, 1], index=[1, 2, 0], dtype="Int64"),
        pd.DataFrame({"label": [2, 0, 1]}, index=[7, 7, 7]),
    ],
    ids=lambda given: type(given).__name__,
)
def test_labels_are_whole_numbers_by_position(given):
    result = as_labels(given, n=3, n_classes=3)
    assert result.dtype == np.int64
    assert result.tolist() == [2, 0, 1]


def test_boolean_labels_are_classes_zero_and_one():
    assert as_labels([True, False], n=2, n_classes=2).tolist() == [1, 0]


@pytest.mark.parametrize(
    "given, message",
    [
        ([0, 1, -1, 5], "label -1 in row 2 is outside 0 .. 2, the classes of the logits"),
        ([0, 1, 2, 3], "label 3 in row 3 is outside 0 .. 2, the classes of the logits"),
        ([0, 3.0, 1, 2], "label 3.0 in row 1 is outside 0 .. 2, the classes of the logits"),
        ([0, 1, 0.5, 0], "label 0.5 in row 2 is not a whole number"),
        ([0, 1, 2, np.nan], "label nan in row 3 is not a whole number"),
        ([0, -np.inf, 2, 1], "label -inf in row 1 is not a whole number"),
        (pd.Series([0, 7, 1, 2], index=[3, 2, 1, 0]), "label 7 in row 1 is outside 0 .. 2, the classes of the logits"),
        ([0, 1], "2 labels for 4 rows of logits or probabilities"),
        (np.eye(4, 3), "labels must have shape (N,) or (N, 1), got (4, 3); "
         "one-hot rows: pass labels.argmax(axis=1)"),
        (np.zeros((4, 1, 1)), "labels must have shape (N,) or (N, 1), got (4, 1, 1)"),
        (None, "labels must have shape (N,) or (N, 1), got ()"),
    ],
)  # fmt: skip
def test_bad_labels_are_refused_with_value_and_row(given, message):
    with pytest.raises(ValueError) as error:
        as_labels(given, n=4, n_classes=3)
    assert str(error.value) == message


def test_a_label_whose_own_logit_is_minus_infinity_is_refused_with_its_row():
    logits = np.array([[0.0, 1.0], [2.0, -np.inf]])
    check_label_logits(logits, np.array([0, 0]))  # the other class may be impossible
    with pytest.raises(ValueError, match="row 1: the logit of its own label 1 is -inf"):
        check_label_logits(logits, np.array([0, 1]))


# --- confidences, correctness, numbers of bins --------------------------------------------------------------------


@pytest.mark.parametrize(
    "confidence",
    [[0.25, 1.0], [[0.25], [1.0]], np.float32([0.25, 1.0]), torch.tensor([0.25, 1.0]), pd.Series([0.25, 1.0], [1, 0])],
    ids=lambda given: type(given).__name__,
)
@pytest.mark.parametrize("correct", [[True, False], [1, 0], [1.0, 0.0], [[1], [0]], torch.tensor([True, False])])
def test_confidences_and_correctness_become_float64_vectors(confidence, correct):
    f, a = as_confidence_and_correct(confidence, correct)
    assert f.dtype == a.dtype == np.float64
    assert f.tolist() == [0.25, 1.0]
    assert a.tolist() == [1.0, 0.0]


def test_a_rounding_excess_of_a_confidence_is_cut_off():
    assert as_confidence(np.float32([1 + 1.2e-7, 0.5])).tolist() == [1.0, 0.5]


@pytest.mark.parametrize(
    "given, message",
    [
        ([0.5, 1.1], "confidence 1.1 in row 1 is outside [0, 1]"),
        ([0.5, 0.5, -0.1], "confidence -0.1 in row 2 is outside [0, 1]"),
        ([np.nan, 0.5], "confidence nan in row 0 is outside [0, 1]"),
        ([], "confidence is empty: at least one sample is needed"),
        ([[0.5, 0.5]], "confidence must have shape (N,), got (1, 2); for (N, K) probabilities take the maximum"),
    ],
)
def test_bad_confidences_are_refused_with_value_and_row(given, message):
    with pytest.raises(ValueError) as error:
        as_confidence(given)
    assert str(error.value) == message


@pytest.mark.parametrize(
    "correct, message",
    [
        ([1, 0.5], "correct must hold 0 and 1 only, found 0.5 in row 1"),
        ([2, 0], "correct must hold 0 and 1 only, found 2 in row 0"),
        ([np.nan, 1], "correct must hold 0 and 1 only, found nan in row 0"),
        ([1], "confidence has shape (2,) but correct has shape (1,); both must be (N,)"),
        ([[1, 0]], "confidence has shape (2,) but correct has shape (1, 2); both must be (N,)"),
    ],
)
def test_bad_correctness_is_refused_with_value_and_row(correct, message):
    with pytest.raises(ValueError) as error:
        as_confidence_and_correct([0.5, 0.5], correct)
    assert str(error.value) == message


@pytest.mark.parametrize("given", [0, -1, 2.5, 3.0, "15", None, True, np.True_])
def test_a_number_of_bins_that_is_no_positive_whole_number_is_refused(given):
    with pytest.raises(ValueError) as error:
        as_count(given, "n_bins")
    assert str(error.value) == f"n_bins must be a whole number of at least 1, got {given!r}"


@pytest.mark.parametrize("given", [1, 15, np.int32(15), np.uint8(3)])
def test_numpy_whole_numbers_of_bins_are_accepted(given):
    assert as_count(given, "n_bins") == given
    assert type(as_count(given, "n_bins")) is int
