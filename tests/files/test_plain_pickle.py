"""Pickles of tensors and arrays come back; whatever else they name is never called."""

import collections
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from pyg_scale.files.plain_pickle import iterate_pickles, load_pickle, load_plain

CONTENT = {
    "edge": np.arange(6).reshape(3, 2),
    "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "bits": np.array([True, False]),
    "view": torch.arange(10)[2:8:2],
    "matrix": torch.arange(12.0).view(3, 4).t(),
    "number": np.float32(0.5),
    "plain": [1, "two", (3.0, None), {"set": {4}}],
    "dtype": torch.int32,
    "shape": torch.Size([2, 3]),
    "ordered": collections.OrderedDict(a=1),
    "empty": torch.empty(0, 5),
}


def same(got, wanted):
    assert type(got) is type(wanted)
    if isinstance(wanted, torch.Tensor):
        assert got.dtype == wanted.dtype and torch.equal(got, wanted)
    elif isinstance(wanted, np.ndarray):
        assert got.dtype == wanted.dtype
        np.testing.assert_array_equal(got, wanted)
    else:
        assert got == wanted


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("mmap", [False, True])
def test_what_torch_saved(tmp_path, protocol, mmap):
    torch.save(CONTENT, tmp_path / "a.pt", pickle_protocol=protocol)
    got = load_plain(tmp_path / "a.pt", mmap=mmap)
    assert got.keys() == CONTENT.keys()
    for key, value in CONTENT.items():
        same(got[key], value)


@pytest.mark.parametrize("mmap", [False, True])
def test_what_torch_saved_before_its_version_1_6(tmp_path, mmap):
    torch.save(CONTENT, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    got = load_plain(tmp_path / "a.pt", mmap=mmap)
    for key, value in CONTENT.items():
        same(got[key], value)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint64, torch.float8_e5m2])
def test_dtypes_without_a_storage_class(tmp_path, dtype):
    """Their storages are bytes, in files of every kind."""
    wanted = torch.arange(12.0).to(dtype).view(3, 4)[:, 1:]
    torch.save(wanted, tmp_path / "new.pt")
    torch.save(wanted, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(wanted))
    files = (tmp_path / name for name in ("new.pt", "old.pt", "a.pkl"))
    for load, file in zip((load_plain, load_plain, load_pickle), files, strict=True):
        got = load(file)
        assert got.dtype == dtype and torch.equal(got.double(), wanted.double())


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_what_was_appended(tmp_path, protocol):
    file = tmp_path / "feats.pkl"
    with file.open("wb") as out:
        for number in range(5):
            pickle.dump(torch.full((2, 3), number), out, protocol)
    assert [int(t[0, 0]) for t in iterate_pickles(file)] == [0, 1, 2, 3, 4]
    file.write_bytes(file.read_bytes()[:-3])
    parts = iterate_pickles(file)
    assert [int(next(parts)[0, 0]) for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="feats.pkl is damaged"):
        next(parts)
    file.write_bytes(b"")
    assert list(iterate_pickles(file)) == []


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    "call",
    [
        (os.mkdir, "{0}"),
        (eval, "__import__('os').mkdir({0!r})"),
        (exec, "import os; os.mkdir({0!r})"),
        (Path.mkdir, Path("{0}")),
        (torch.load, "{0}"),
        (np.load, "{0}"),
    ],
    ids=["mkdir", "eval", "exec", "method", "torch.load", "np.load"],
)
def test_nothing_is_run(tmp_path, call):
    made = tmp_path / "made"
    function, text = call
    argument = type(text)(str(text).format(str(made)))
    payload = Payload(function, argument)
    torch.save({"a": payload}, tmp_path / "a.pt")
    torch.save({"a": payload}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "a.pkl").write_bytes(pickle.dumps([torch.ones(2), payload]))
    for read, name in ((load_plain, "a.pt"), (load_plain, "old.pt"), (load_pickle, "a.pkl")):
        with pytest.raises(
            ValueError, match=f"{name} is damaged, or holds more than .*not allowed"
        ):
            read(tmp_path / name)
    assert not made.exists()


def test_nothing_is_run_by_a_tensor_in_a_pickle(tmp_path):
    """The storage of a pickled tensor is a file of torch inside, read by the same rules."""
    inner = tmp_path / "inner.pt"
    made = tmp_path / "made"
    torch.save(Payload(os.mkdir, str(made)), inner, _use_new_zipfile_serialization=False)

    outer = Payload(torch.storage._load_from_bytes, inner.read_bytes())
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(outer))
    with pytest.raises(ValueError, match="not allowed"):
        load_pickle(tmp_path / "a.pkl")
    assert not made.exists()


class Mine:
    """Stands for an object of another program."""


@pytest.mark.parametrize("protocol", [2, 4])
def test_other_classes_only_through_a_stand_in(tmp_path, protocol):
    theirs = Mine()
    theirs.bounds = torch.arange(3)
    theirs.own = {"a": (theirs.bounds, None)}
    file = tmp_path / "a.pkl"
    file.write_bytes(pickle.dumps([theirs], protocol))
    with pytest.raises(ValueError, match=f"it names {__name__}.Mine, which is not allowed"):
        load_pickle(file)

    class Stand:
        pass

    (got,) = load_pickle(file, stand_in=lambda module, name: Stand if name == "Mine" else None)
    assert type(got) is Stand and vars(got).keys() == {"bounds", "own"}
    assert got.bounds.tolist() == [0, 1, 2] and got.own["a"][0] is got.bounds


def test_subclasses_of_tensors_are_plain(tmp_path):
    value = torch.nn.Buffer(torch.arange(3)).as_subclass(Book)
    torch.save(value, tmp_path / "a.pt")
    with pytest.raises(ValueError, match="Book, which is not allowed"):
        load_plain(tmp_path / "a.pt")
    got = load_plain(tmp_path / "a.pt", stand_in=lambda m, n: torch.Tensor if n == "Book" else None)
    assert type(got) is torch.Tensor and got.tolist() == [0, 1, 2]


class Book(torch.Tensor):
    pass


def test_files_that_are_none(tmp_path):
    for read in (load_plain, load_pickle, lambda file: list(iterate_pickles(file))):
        with pytest.raises(FileNotFoundError, match="nothing.pt"):
            read(tmp_path / "nothing.pt")
        (tmp_path / "noise.pt").write_bytes(b"no pickle at all")
        with pytest.raises(ValueError, match="noise.pt is damaged"):
            read(tmp_path / "noise.pt")
