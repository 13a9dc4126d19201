"""The readers take the formats of published logits files, and run nothing that a file carries."""

from __future__ import annotations

import builtins
import os
import pickle

import numpy as np
import pytest
import torch

from smartlib.data.readers import read_npz, read_numpy_pickle, read_torch


@pytest.fixture
def pairs():
    rng = np.random.default_rng(0)
    return tuple((rng.normal(size=(n, 4)).astype(np.float32), rng.integers(0, 4, (n, 1))) for n in (5, 7))


class RunsCode:
    """Pickles as a call that would create ``marker``."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


def attacks(marker):
    """Objects that create ``marker`` when unpickled, each by another function."""
    return {
        "system": RunsCode(os.system, f"touch '{marker}'"),
        "eval": RunsCode(eval, f"open({str(marker)!r}, 'w')"),
        "exec": RunsCode(exec, f"open({str(marker)!r}, 'w')"),
        "open": RunsCode(builtins.open, str(marker), "w"),
    }


def same(first, second):
    return first.dtype == second.dtype and np.array_equal(first, second)


# --- pickle -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [3, 4])
def test_pickle_reads_back(tmp_path, pairs, protocol):
    path = tmp_path / "logits.p"
    path.write_bytes(pickle.dumps(pairs, protocol))
    for pair, expected in zip(read_numpy_pickle(path), pairs, strict=True):
        assert all(map(same, pair, expected))


def test_pickle_takes_lists_and_the_module_path_of_numpy_1(tmp_path, pairs):
    path = tmp_path / "logits.p"
    content = pickle.dumps([list(pair) for pair in pairs], 3)
    assert b"numpy._core.multiarray" in content
    path.write_bytes(content.replace(b"numpy._core.multiarray", b"numpy.core.multiarray"))
    assert same(read_numpy_pickle(path)[1][0], pairs[1][0])


def test_pickle_takes_big_endian_and_fortran_arrays(tmp_path, pairs):
    path = tmp_path / "logits.p"
    path.write_bytes(pickle.dumps(tuple((np.asfortranarray(x.astype(">f8")), y.astype(">i4")) for x, y in pairs), 4))
    (logits, labels), _ = read_numpy_pickle(path)
    assert same(logits, pairs[0][0].astype(np.float64)) and same(labels, pairs[0][1].astype(np.int32))


@pytest.mark.parametrize("kind", attacks(""))
@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_pickle_refuses_by_name_and_runs_nothing(tmp_path, pairs, kind, protocol):
    marker, path = tmp_path / "marker", tmp_path / "logits.p"
    attack = attacks(marker)[kind]
    path.write_bytes(pickle.dumps((attack, pairs), protocol))
    function = attack.call[0]
    # Protocol 2 and below spell the module as Python 2 did.
    module = {"builtins": r"(builtins|__builtin__)"}.get(function.__module__, function.__module__)
    with pytest.raises(ValueError, match=rf"logits\.p.*{module}\.{function.__name__}.*refused"):
        read_numpy_pickle(path)
    assert not marker.exists()
    if kind == "system":  # the marker is what an ordinary load leaves behind
        pickle.loads(path.read_bytes())
        assert marker.exists()


def test_pickle_refuses_python_2_spelling_of_builtins(tmp_path):
    path = tmp_path / "logits.p"
    path.write_bytes(b"c__builtin__\neval\n(S'1'\ntR.")
    with pytest.raises(ValueError, match=r"__builtin__\.eval.*refused"):
        read_numpy_pickle(path)


def test_pickle_refuses_other_numpy_functions(tmp_path):
    path = tmp_path / "logits.p"
    path.write_bytes(pickle.dumps(RunsCode(np.fromfile, "secret"), 4))
    with pytest.raises(ValueError, match=r"fromfile.*refused"):
        read_numpy_pickle(path)


@pytest.mark.parametrize("dtype", [object, "U3", "M8[s]", [("a", "f4")]])
def test_pickle_refuses_anything_but_numbers(tmp_path, pairs, dtype):
    path = tmp_path / "logits.p"
    path.write_bytes(pickle.dumps((pairs[0], (np.zeros(2, dtype), pairs[1][1])), 4))
    with pytest.raises(ValueError, match="only plain numbers"):
        read_numpy_pickle(path)


class HandMade:
    """Pickles as a float64 array of two numbers whose type's state is ``state``."""

    def __init__(self, state):
        self.state = state

    def __reduce__(self):
        return (*np.zeros(2).__reduce__()[:2], (1, (2,), Float64(self.state), False, bytes(16)))


class Float64:
    def __init__(self, state):
        self.state = state

    def __reduce__(self):
        return (np.dtype, ("f8", False, True), self.state)


@pytest.mark.parametrize(
    "state",
    [
        (3, "<", (np.dtype("f8"), (1000,)), None, None, -1, -1, 0),  # eight bytes that claim to be eight thousand
        (3, "<", None, ("a",), {"a": (np.dtype("i4"), 5000)}, 8, 1, 0),  # a field far outside
        (3, "|", None, None, None, -1, -1, 63),  # numbers flagged as objects
    ],
)
def test_pickle_does_not_believe_a_misstated_dtype(tmp_path, pairs, state):
    path = tmp_path / "logits.p"
    path.write_bytes(pickle.dumps(((HandMade(state), pairs[0][1]), pairs[1]), 4))
    assert same(read_numpy_pickle(path)[0][0], np.zeros(2))


def test_pickle_array_longer_than_its_bytes(tmp_path, pairs):
    path = tmp_path / "logits.p"

    class Short:
        def __reduce__(self):
            return (*np.zeros(2).__reduce__()[:2], (1, (200,), np.dtype("f8"), False, bytes(16)))

    path.write_bytes(pickle.dumps(((Short(), pairs[0][1]), pairs[1]), 4))
    with pytest.raises(ValueError, match=r"logits\.p.*200"):
        read_numpy_pickle(path)


@pytest.mark.parametrize("keep", [0, 1, 20, 200, -1])
def test_pickle_truncated(tmp_path, pairs, keep):
    path = tmp_path / "logits.p"
    path.write_bytes(pickle.dumps(pairs, 4)[:keep])
    with pytest.raises(ValueError, match=r"logits\.p is not a readable pickle"):
        read_numpy_pickle(path)


def test_pickle_nested_in_another_way(tmp_path, pairs):
    path = tmp_path / "logits.p"
    for content, outline in [
        (pairs[0], r"\(array \(5, 4\), array \(5, 1\)\)"),
        ({"val": pairs[0]}, "dict"),
        ([*pairs, 1.5], "float"),
    ]:
        path.write_bytes(pickle.dumps(content, 4))
        with pytest.raises(ValueError, match=rf"holds .*{outline}.*expected \(\(val logits"):
            read_numpy_pickle(path)


# --- torch --------------------------------------------------------------------------------------------------


def test_torch_reads_back_and_keeps_no_graph(tmp_path, pairs):
    path = tmp_path / "logits.pt"
    logits, labels = pairs[0][0], pairs[0][1][:, 0]
    torch.save((torch.from_numpy(logits).requires_grad_(), torch.from_numpy(labels)), path)
    found = read_torch(path)
    assert same(found[0], logits) and same(found[1], labels)


def test_torch_bfloat16_becomes_float32(tmp_path):
    path = tmp_path / "logits.pt"
    torch.save((torch.ones(2, 3, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int64)), path)
    assert same(read_torch(path)[0], np.ones((2, 3), np.float32))


def test_torch_file_of_a_gpu_loads_on_the_cpu(tmp_path):
    # The device is a word in the zip's pickle, stored without compression and with a length before it:
    # what follows is the file that a GPU would have written.
    path = tmp_path / "logits.pt"
    torch.save((torch.ones(2, 3), torch.zeros(2, dtype=torch.int64)), path, _use_new_zipfile_serialization=False)
    content = path.read_bytes()
    word = b"X\x03\x00\x00\x00cpu"
    assert word in content
    path.write_bytes(content.replace(word, b"X\x06\x00\x00\x00cuda:0"))
    assert same(read_torch(path)[0], np.ones((2, 3), np.float32))


@pytest.mark.parametrize("kind", attacks(""))
@pytest.mark.parametrize("is_zip", [True, False])
def test_torch_refuses_by_name_and_runs_nothing(tmp_path, kind, is_zip):
    marker, path = tmp_path / "marker", tmp_path / "logits.pt"
    attack = attacks(marker)[kind]
    torch.save((torch.zeros(2, 3), attack), path, _use_new_zipfile_serialization=is_zip)
    with pytest.raises(
        ValueError, match=rf"logits\.pt was refused.* asks for \S*{attack.call[0].__name__}, "
    ) as caught:
        read_torch(path)
    assert "weights_only" not in str(caught.value)  # torch's advice to load it regardless
    assert not marker.exists()


@pytest.mark.parametrize("keep", [0, 100, 700, -20])
def test_torch_truncated(tmp_path, keep):
    path = tmp_path / "logits.pt"
    torch.save((torch.zeros(200, 3), torch.zeros(200, dtype=torch.int64)), path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"logits\.pt is not a readable torch file"):
        read_torch(path)


def test_torch_holds_something_else(tmp_path):
    path = tmp_path / "logits.pt"
    for content, found in [({"scores": torch.zeros(1), "y": torch.zeros(1)}, r"\['scores', 'y'\]"), ((1, 2), "tuple")]:
        torch.save(content, path)
        with pytest.raises(ValueError, match=rf"logits\.pt holds {found}.*expected a tuple of two tensors"):
            read_torch(path)


# --- npz ----------------------------------------------------------------------------------------------------


def test_npz_reads_the_named_arrays(tmp_path):
    path = tmp_path / "logits.npz"
    np.savez_compressed(path, a=np.arange(3, dtype=">i4"), b=np.eye(2), other=np.zeros(9))
    arrays = read_npz(path, ("b", "a"))
    assert list(arrays) == ["b", "a"]
    assert same(arrays["a"], np.arange(3, dtype=np.int32))


def test_npz_with_other_keys_lists_those_found(tmp_path):
    path = tmp_path / "logits.npz"
    np.savez(path, probs=np.eye(2), y=np.arange(2))
    with pytest.raises(ValueError, match=r"logits\.npz lacks \['labels'\].*found \['probs', 'y'\].*expected"):
        read_npz(path, ("probs", "labels"))


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("keep", [0, 3, 100, -1, -200])
def test_npz_truncated(tmp_path, save, keep):
    path = tmp_path / "logits.npz"
    save(path, probs=np.random.default_rng(0).random((40, 3)), labels=np.zeros(40))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"logits\.npz is not a readable npz file"):
        read_npz(path, ("probs", "labels"))


def test_npz_with_a_damaged_member(tmp_path):
    path = tmp_path / "logits.npz"
    np.savez_compressed(path, probs=np.random.default_rng(0).random((40, 3)))
    content = bytearray(path.read_bytes())
    content[200:240] = bytes(40)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"logits\.npz is not a readable npz file"):
        read_npz(path, ("probs",))


def test_npz_refuses_objects_and_runs_nothing(tmp_path):
    marker, path = tmp_path / "marker", tmp_path / "logits.npz"
    np.savez(path, probs=np.array([attacks(marker)["system"]], dtype=object))
    with pytest.raises(ValueError, match=r"logits\.npz.*Object arrays"):
        read_npz(path, ("probs",))
    assert not marker.exists()


def test_npz_is_a_pickle_or_an_npy_in_truth(tmp_path, pairs):
    marker, path = tmp_path / "marker", tmp_path / "logits.npz"
    path.write_bytes(pickle.dumps(attacks(marker)["system"]))
    with pytest.raises(ValueError, match=r"logits\.npz is not a readable npz file"):
        read_npz(path, ("probs",))
    assert not marker.exists()
    np.save(tmp_path / "one.npy", pairs[0][0])
    with pytest.raises(ValueError, match=r"one\.npy is not a readable npz file"):
        read_npz(tmp_path / "one.npy", ("probs",))


@pytest.mark.parametrize("read", [read_torch, read_numpy_pickle, lambda path: read_npz(path, ("a",))])
def test_a_missing_file_is_named(tmp_path, read):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        read(tmp_path / "nowhere")
