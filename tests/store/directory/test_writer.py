"""Writing directories: nothing is lost, whatever happens on the way."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pyg_scale
from pyg_scale.errors import GraphDirectoryError
from pyg_scale.files import place
from pyg_scale.files.npy import DTYPES, torch_dtype
from pyg_scale.files.segment import Segment
from pyg_scale.partitioner.cut import partition
from pyg_scale.store import Mmap
from pyg_scale.store.directory import (
    Attribute,
    DirectoryWriter,
    EdgeMeta,
    GraphDirectory,
    Meta,
    NodeMeta,
)
from tests import preloaded
from tests.store.directory.graphs import bits, everything
from tests.store.directory.kill import graph as small_graph
from tests.store.directory.kill import what_is_at

ROOT = Path(pyg_scale.__file__).parents[1]


@pytest.mark.parametrize(
    ("before", "step", "more"),
    [
        pytest.param("replace", -7, [], marks=pytest.mark.slow),
        ("replace", 151, []),
        pytest.param("replace", -1, [], marks=pytest.mark.slow),
        pytest.param("replace", 19, [], marks=pytest.mark.slow),
        pytest.param("new", -1, [], marks=pytest.mark.slow),
        pytest.param("replace", -1, ["no-exchange"], marks=pytest.mark.slow),
    ],
)
def test_killed_anywhere(tmp_path: Path, before: str, step: int, more: list[str]) -> None:
    program = [preloaded.python(), "-m", "tests.store.directory.kill"]
    program += [str(tmp_path), before, str(step)]
    done = subprocess.run(
        program + more, cwd=ROOT, timeout=100, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    old, new, none = map(int, done.stdout.split())
    assert new >= 1 and old + none > 5  # the last one comes through


@contextmanager
def _largest_file(size: int) -> Iterator[None]:
    """As on a full disk: no file can grow beyond a size."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [0, 64, 200, 1000, 3000])
def test_a_full_disk(tmp_path: Path, size: int) -> None:
    path = pyg_scale.save(small_graph(old=True), tmp_path / "graph")
    with _largest_file(size), pytest.raises(GraphDirectoryError, match="cannot be written: File"):
        pyg_scale.save(small_graph(old=False), path, overwrite=True)
    assert what_is_at(path) == "old"
    assert os.listdir(tmp_path) == ["graph"]


def test_a_full_disk_is_said_before_anything_is_written(tmp_path: Path) -> None:
    with DirectoryWriter(tmp_path / "graph") as writer:
        with _largest_file(1 << 20), pytest.raises(GraphDirectoryError, match="big.npy cannot be"):
            writer.create("big.npy", torch.float32, (1 << 20,))
        with pytest.raises(GraphDirectoryError, match="No space left|too large|Invalid"):
            writer.create("big.npy", torch.float32, (1 << 55,))


def test_a_place_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises((GraphDirectoryError, FileExistsError)):
        pyg_scale.save(small_graph(old=True), tmp_path / "file" / "graph")
    with pytest.raises(FileExistsError, match="is not a graph directory"):
        pyg_scale.save(small_graph(old=True), tmp_path / "file", overwrite=True)


@pytest.mark.parametrize(
    "text",
    ['{"num_parts": 2, "is_hetero": false}', "[]", "no JSON", "\udcff", "truncated", "link"],
)
def test_overwrite_replaces_nothing_that_does_not_say_that_it_is_a_graph(
    tmp_path: Path, text: str
) -> None:
    path, meta = tmp_path / "graph", tmp_path / "graph" / "META.json"
    pyg_scale.save(small_graph(old=True), path)
    if text == "link":
        meta.rename(tmp_path / "elsewhere.json")
        meta.symlink_to(tmp_path / "elsewhere.json")
    elif text == "truncated":
        meta.write_bytes(meta.read_bytes()[:-9])
    else:
        meta.write_bytes(text.encode("utf-8", "surrogateescape"))
    (path / "photo.jpg").write_text("irreplaceable")
    with pytest.raises(FileExistsError, match="is not a graph directory: its META.json is of ano"):
        pyg_scale.save(small_graph(old=False), path, overwrite=True)
    with pytest.raises(FileExistsError, match="is not a graph directory"):
        partition(small_graph(old=False), 2, path=path, overwrite=True, method="range")
    assert (path / "photo.jpg").read_text() == "irreplaceable"
    assert not list(tmp_path.glob(".graph*"))


def test_folders_of_other_programs_may_hold_a_graph(tmp_path: Path) -> None:
    (tmp_path / "META.json").write_text('{"name": "a project"}')
    path = pyg_scale.save(small_graph(old=True), tmp_path / "graph")
    pyg_scale.save(small_graph(old=False), path, overwrite=True)
    assert what_is_at(tmp_path / "graph") == "new"
    with pytest.raises(FileExistsError, match="is inside the graph directory"):
        pyg_scale.save(small_graph(old=True), tmp_path / "graph" / "within")


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_comes_back(tmp_path: Path, name: str) -> None:
    dtype = torch_dtype(name)
    raw = torch.arange(240, dtype=torch.uint8)
    raw = raw % 2 if name == "bool" else raw
    values = (raw.view(dtype) if name != "bool" else raw.bool()).view(-1)[:12].view(4, 3)
    with DirectoryWriter(tmp_path / "graph") as writer:
        writer.write("part-0/nodes/attributes/a.npy", values.t().contiguous().t()[:3])
        out = writer.create("part-0/nodes/attributes/b.npy", dtype, (3, 3))
        assert out.dtype == dtype and not bits(out).any()
        out.copy_(values[:3])
        attribute = Attribute(name, (3,))
        node = NodeMeta(None, 3, {"a": attribute, "b": attribute}, part_nodes=[3], part_halo=[0])
        writer.commit(Meta({None: node}, {}))
    part = GraphDirectory(tmp_path / "graph").part(0)
    for attribute_name in "ab":
        found = part.node_attribute(None, attribute_name)
        assert found.dtype == dtype and torch.equal(bits(found), bits(values[:3]))
    pyg_scale.open(tmp_path / "graph", verify=True)


@pytest.mark.parametrize("shape", [(), (0,), (5,), (0, 3), (3, 0), (2, 3, 4)])
def test_numpy_reads_what_is_written(tmp_path: Path, shape: tuple[int, ...]) -> None:
    value = torch.randn(shape)
    with DirectoryWriter(tmp_path / "graph") as writer:
        writer.write("value.npy", value)
        writer.write("strided.npy", torch.stack([value, value], -1)[..., 0])
        writer.write("narrow.npy", value * 10, dtype=torch.int32)
        writer.write("array.npy", value.numpy())
        for name in ("value", "strided", "array"):
            found = np.load(writer.staging / f"{name}.npy")
            assert np.array_equal(found, value.numpy()) and found.shape == shape
        assert np.array_equal(
            np.load(writer.staging / "narrow.npy"), (value * 10).to(torch.int32).numpy()
        )


def test_large_tensors_are_written_piece_by_piece(tmp_path: Path) -> None:
    value = torch.arange(3 * (1 << 21) + 5).view(1, -1).expand(2, -1).t()
    seen: list[int] = []
    with DirectoryWriter(tmp_path / "graph") as writer:
        writer.write("value.npy", value, progress=seen.append)
        assert np.array_equal(np.load(writer.staging / "value.npy"), value.numpy())
    assert len(seen) == 7 and sum(seen) == value.numel() * 8


def test_files_that_others_write_get_their_checksums(tmp_path: Path) -> None:
    attribute = Attribute("int64")
    node = NodeMeta(None, 3, {"a": attribute}, part_nodes=[3], part_halo=[0])
    with DirectoryWriter(tmp_path / "graph") as writer:
        name = "part-0/nodes/attributes/a.npy"
        writer.write(name, torch.arange(3))
        np.save(writer.staging / name, np.arange(3) + 5)  # of the same length
        (writer.staging / "spill").mkdir()
        (writer.staging / "spill" / "left.bin").write_bytes(b"x")
        writer.commit(Meta({None: node}, {}))
    found = pyg_scale.open(tmp_path / "graph", verify=True)
    assert found.a.tolist() == [5, 6, 7]
    files = [p.relative_to(tmp_path / "graph") for p in (tmp_path / "graph").rglob("*")]
    assert {str(p) for p in files if not p.suffix} == {
        "part-0",
        "part-0/nodes",
        "part-0/nodes/attributes",
    }


def test_what_does_not_fit_meta_is_not_committed(tmp_path: Path) -> None:
    edge = EdgeMeta(None, 2, part_edges=[2])
    node = NodeMeta(None, 3, {"a": Attribute("int64")}, part_nodes=[3], part_halo=[0])
    with DirectoryWriter(tmp_path / "graph") as writer:
        with pytest.raises(ValueError, match="files lacks part-0/edges/indptr.npy"):
            writer.commit(
                Meta({None: NodeMeta(None, 3, part_nodes=[3], part_halo=[0])}, {None: edge})
            )
        writer.write("part-0/nodes/attributes/a.npy", torch.ones(3))
        with pytest.raises((ValueError, GraphDirectoryError), match="a.npy"):
            writer.commit(Meta({None: node}, {}))
        writer.write("part-0/nodes/attributes/a.npy", torch.ones(3, dtype=torch.float64))
        with pytest.raises(GraphDirectoryError, match="a.npy holds float64"):
            writer.commit(Meta({None: node}, {}))
        writer.write("part-0/nodes/attributes/a.npy", torch.arange(3))
        writer.commit(Meta({None: node}, {}))
    assert pyg_scale.open(tmp_path / "graph").a.tolist() == [0, 1, 2]


def test_going_on_after_a_writer_that_died(tmp_path: Path) -> None:
    path = tmp_path / "graph"
    node = NodeMeta(None, 3, {"a": Attribute("int64")}, part_nodes=[3], part_halo=[0])
    first = DirectoryWriter(path, resume=True)
    first.write("part-0/nodes/attributes/a.npy", torch.arange(3))
    first.close()
    assert not path.exists()
    with DirectoryWriter(path, resume=True) as second:
        assert (second.staging / "part-0/nodes/attributes/a.npy").is_file()
        second.commit(Meta({None: node}, {}))
    assert os.listdir(tmp_path) == ["graph"]
    # what was replaced is not taken for what is to be gone on with
    os.rename(path, tmp_path / ".other.partial")
    with DirectoryWriter(tmp_path / "other", resume=True) as third:
        assert os.listdir(third.staging) == [".writing"]
    # and without resume= nothing is
    (tmp_path / ".other.partial" / "part-0").mkdir()
    with DirectoryWriter(tmp_path / "other") as fourth:
        assert os.listdir(fourth.staging) == [".writing"]
    assert os.listdir(tmp_path) == []


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    with DirectoryWriter(tmp_path / "graph"):
        with pytest.raises(GraphDirectoryError, match="another process is writing"):
            DirectoryWriter(tmp_path / "graph")
        DirectoryWriter(tmp_path / "other").close()
    DirectoryWriter(tmp_path / "graph").close()
    assert os.listdir(tmp_path) == []


def test_a_lock_whose_file_was_removed_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between opening the file and locking it another writer ends, and a third one begins."""
    flock, others = fcntl.flock, []

    def too_late(handle: int, operation: int) -> None:
        if not others:
            others.append(None)
            (tmp_path / ".graph.lock").unlink()
            others.append(place.Lock(tmp_path / "graph"))
        flock(handle, operation)

    monkeypatch.setattr(fcntl, "flock", too_late)
    with pytest.raises(GraphDirectoryError, match="another process is writing"):
        place.Lock(tmp_path / "graph")
    others[1].release()
    place.Lock(tmp_path / "graph").release()
    assert os.listdir(tmp_path) == []


def test_a_file_system_without_locks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else is writing, and nobody waits for anybody."""

    def flock(handle: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    match = r"graph.lock cannot be written: its file system cannot lock files \(No locks available"
    with pytest.raises(GraphDirectoryError, match=match):
        DirectoryWriter(tmp_path / "graph")
    assert os.listdir(tmp_path) == []
    with pytest.raises(OSError, match="cannot lock files"):
        Mmap(tmp_path / "tensors")[None, "x", None] = torch.ones(3)
    with pytest.raises(OSError, match="cannot lock files"):
        Segment("name", tmp_path)


def test_the_target_of_a_link_is_replaced(tmp_path: Path) -> None:
    pyg_scale.save(small_graph(old=True), tmp_path / "graph")
    (tmp_path / "link").symlink_to("graph")
    pyg_scale.save(small_graph(old=False), tmp_path / "link", overwrite=True)
    assert (tmp_path / "link").is_symlink() and what_is_at(tmp_path / "graph") == "new"
    assert sorted(os.listdir(tmp_path)) == ["graph", "link"]


def test_an_opened_graph_can_replace_its_own_directory(tmp_path: Path) -> None:
    data = everything()
    path = pyg_scale.save(data, tmp_path / "graph")
    found = pyg_scale.open(path)
    found.more = torch.arange(100)
    pyg_scale.save(found, path, overwrite=True)
    again: Any = pyg_scale.open(path, verify=True)
    assert torch.equal(again.x, data.x) and torch.equal(again.more, torch.arange(100))
    assert torch.equal(again.edge_index, data.edge_index)
