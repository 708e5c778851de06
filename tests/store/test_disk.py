"""Features read from the files of a graph directory: parts, direct reads, damage, closing."""

from __future__ import annotations

import errno
import fcntl
import os
import pickle
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import TensorAttr

import pyg_scale
from pyg_scale.errors import GraphDirectoryError
from pyg_scale.loader import NeighborLoader
from pyg_scale.ops.disk_read import Read
from pyg_scale.store import Disk
from pyg_scale.store.cache.pending import Turns
from pyg_scale.store.directory import GraphDirectory
from pyg_scale.store.disk_features import DiskFeatures
from pyg_scale.store.disk_file import DiskFile
from pyg_scale.testing import graphs
from tests.store.feature_directories import write_features

X = torch.arange(300 * 25.0).view(300, 25)
Y = torch.arange(300)


def directory(path: Path, assignment: Tensor | None = None) -> Path:
    return write_features(path / "graph", {(None, "x"): X, (None, "y"): Y}, assignment)


def rows(store: Any, index: Any, name: str = "x") -> Tensor:
    return store[None, name, torch.as_tensor(index)]


def has_direct(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except (OSError, AttributeError):
        return False
    return True


def test_rows_come_from_the_files_and_then_from_memory(tmp_path: Path) -> None:
    store = Disk(directory(tmp_path), cache="20kB")
    index = torch.arange(0, 300, 7)
    assert torch.equal(rows(store, index), X[index])
    before = store.stats()
    assert before["reads"] >= 1 and before["misses"] == index.numel()
    assert before["read_bytes"] >= index.numel() * 100
    assert torch.equal(rows(store, index.flip(0)), X[index.flip(0)])
    after = store.stats()
    assert after["reads"] == before["reads"] and after["hits"] == index.numel()
    assert torch.equal(store[None, "x", None], X)
    assert torch.equal(rows(store, [3, 299, 3], "y"), torch.tensor([3, 299, 3]))


@pytest.mark.parametrize("contiguous", [True, False])
def test_parts_by_original_ids(tmp_path: Path, contiguous: bool) -> None:
    assignment = torch.arange(300) * 3 // 300 if contiguous else torch.arange(300) % 3
    store = Disk(directory(tmp_path, assignment), cache="1kB")
    for seed in range(5):
        index = torch.randint(0, 300, (80,), generator=torch.Generator().manual_seed(seed))
        assert torch.equal(rows(store, index), X[index])
        assert torch.equal(rows(store, index, "y"), Y[index])
    assert torch.equal(store[None, "x", slice(10, 200, 3)], X[10:200:3])


def test_a_part_that_is_not_here(tmp_path: Path) -> None:
    path = directory(tmp_path, torch.arange(300) % 3)
    shutil.rmtree(path / "part-1")
    store = Disk(path, cache="5kB")
    assert torch.equal(rows(store, [0, 2, 3]), X[[0, 2, 3]])
    with pytest.raises(GraphDirectoryError, match=r"in a part that is not local.*\[0, 2\]"):
        rows(store, [0, 4])
    assert torch.equal(rows(store, [0, 6]), X[[0, 6]])


def test_edge_features_of_several_parts(tmp_path: Path) -> None:
    data = graphs.hostile()
    path = tmp_path / "parts"
    pyg_scale.partition(data, 3, method="random", path=path, seed=1)
    store = Disk(path, cache="2kB")
    index = torch.randperm(data.num_edges, generator=torch.Generator().manual_seed(0))
    for group, name, value in (
        ((None, None), "edge_attr", data.edge_attr),
        ((None, None), "weight", data.weight),
    ):
        assert torch.equal(store[group, name, index], value[index])
    nodes = torch.arange(data.num_nodes).flip(0)
    assert torch.equal(store[None, "x", nodes], data.x.flip(0))


def test_whether_reads_are_direct_is_said(tmp_path: Path) -> None:
    path = directory(tmp_path)
    file = path / "part-0/nodes/attributes/x.npy"
    store = Disk(path)
    assert "not read yet" in repr(store) and store.stats()["direct"] is None
    rows(store, [1])
    assert store.stats()["direct"] is has_direct(file)
    assert ("direct" in repr(store)) is has_direct(file)
    cached = Disk(path, direct=False)
    assert torch.equal(rows(cached, [1, 299]), X[[1, 299]])
    assert cached.stats()["direct"] is False and "through the page cache" in repr(cached)


def test_without_o_direct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system that refuses it: said, or an error for who insists."""
    real = GraphDirectory.open_file

    def refusing(self: GraphDirectory, name: str, flags: int = 0) -> int:
        if flags:
            raise OSError(22, "Invalid argument")
        return real(self, name, flags)

    monkeypatch.setattr(GraphDirectory, "open_file", refusing)
    store = Disk(directory(tmp_path))
    assert torch.equal(rows(store, [5]), X[[5]])
    assert store.stats()["direct"] is False
    with pytest.raises(ValueError, match="cannot be read past the page cache"):
        rows(Disk(store.path, direct=True), [5])


def test_a_file_system_that_refuses_reads_while_others_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some say only then that they have no O_DIRECT: every reader goes on without."""
    real, both = DiskFile._read, threading.Barrier(2)
    direct: set[int] = set()

    def refusing(self: DiskFile, fd: int, *rest: Any) -> Any:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            direct.add(fd)
            both.wait(20)
            return Read(0, 0, errno.EINVAL, 0, 0)
        return real(self, fd, *rest)

    monkeypatch.setattr(DiskFile, "_read", refusing)
    path = directory(tmp_path)
    if not has_direct(path / "META.json"):
        pytest.skip("the file system of the tests has no O_DIRECT")
    store = Disk(path, cache=1000)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda row: rows(store, [row]), [5, 250], timeout=30))
    assert torch.equal(torch.cat(found), X[[5, 250]])
    assert torch.equal(rows(store, [299]), X[[299]])
    assert len(direct) == 1 and store.stats()["direct"] is False


def test_a_file_that_is_truncated_while_it_is_open(tmp_path: Path) -> None:
    path = directory(tmp_path)
    store = Disk(path, cache=1000)
    assert torch.equal(rows(store, [2]), X[[2]])
    file = path / "part-0/nodes/attributes/x.npy"
    os.truncate(file, 128 + 100 * 100 + 50)
    with pytest.raises(GraphDirectoryError, match=r"x\.npy: rows 290 to 290 of 300 cannot be read"):
        rows(store, [290])
    assert torch.equal(rows(store, [1, 2, 3]), X[[1, 2, 3]])


def test_an_error_of_a_read_reaches_who_iterates(tmp_path: Path) -> None:
    data = graphs.hostile()
    path = write_features(tmp_path / "graph", {(None, "x"): data.x})
    for workers in (0, 2):
        store = Disk(path, cache=100)
        loader = NeighborLoader(
            data, [3], batch_size=10, feature_store=store, num_workers=workers, seed=1
        )
        iterator = iter(loader)
        expected = next(iterator)
        assert torch.equal(expected.x, data.x[expected.n_id])
        os.truncate(path / "part-0/nodes/attributes/x.npy", 130)
        with pytest.raises(GraphDirectoryError, match="it was truncated"):
            list(iterator)
        del iterator
        path = write_features(tmp_path / f"graph{workers}", {(None, "x"): data.x})


def test_a_directory_that_was_replaced_is_read_as_it_was(tmp_path: Path) -> None:
    path = directory(tmp_path)
    store = Disk(path, cache=500)
    path.rename(tmp_path / "old")
    write_features(path, {(None, "x"): -X, (None, "y"): Y})
    assert torch.equal(rows(store, [7, 8]), X[[7, 8]])


def test_a_store_that_was_closed(tmp_path: Path) -> None:
    store = Disk(directory(tmp_path))
    rows(store, [1])
    store.close()
    store.close()
    for index in ([1], [2]):  # cached or not
        with pytest.raises(ValueError, match="was closed"):
            rows(store, index)


def test_in_another_process_it_is_opened_again(tmp_path: Path) -> None:
    store = Disk(directory(tmp_path), cache="4kB", attributes=["x"], look_ahead=3)
    rows(store, [1, 2])
    other = pickle.loads(pickle.dumps(store))
    assert torch.equal(rows(other, [2, 9]), X[[2, 9]])
    assert (other.capacity, other.look_ahead) == (4000, 3)
    assert other.stats()["hits"] == 0
    assert [attr.attr_name for attr in other.get_all_tensor_attrs()] == ["x"]


def test_files_are_closed_with_the_last_reference(tmp_path: Path) -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    path, before = directory(tmp_path), count()
    store = Disk(path)
    rows(store, [1])
    rows(store, [1], "y")
    assert count() > before
    del store
    assert count() == before


def test_hot_nodes_by_degree_of_the_directory(tmp_path: Path) -> None:
    data = graphs.hostile()
    pyg_scale.save(data, tmp_path / "graph")
    store = Disk(tmp_path / "graph", 8 * data.x.size(1) * 4, "placed", "degree", attributes=["x"])
    degree = torch.bincount(data.edge_index[0], minlength=data.num_nodes)
    most = degree.sort(descending=True, stable=True).indices[:8]
    for _ in range(2):
        assert torch.equal(rows(store, most), data.x[most])
    assert store.stats()["hits"] == 8
    with pytest.raises(ValueError, match="no lists of nodes to cache"):
        Disk(tmp_path / "graph", policy="placed", hot="listed")


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"cache": "12 parsecs"}, ValueError, "such as '4GB'"),
        ({"attributes": ["x", "z"]}, KeyError, r"no attribute 'z' \(found: .*x"),
        ({"attributes": ["z"]}, KeyError, r"no attribute 'z' \(found: .*x"),
        ({"direct": 1}, TypeError, "direct must be True, False or None"),
        ({"threads": 0}, ValueError, "threads"),
        ({"read_ahead": "much"}, ValueError, "read_ahead must be bytes"),
    ],
    ids=str,
)
def test_bad_arguments(
    tmp_path: Path, arguments: dict[str, Any], error: type[Exception], match: str
) -> None:
    path = directory(tmp_path)
    with pytest.raises(error, match=match):
        Disk(path, **arguments)


def test_what_is_no_graph_directory(tmp_path: Path) -> None:
    with pytest.raises(GraphDirectoryError, match="not a graph directory"):
        Disk(tmp_path)
    with pytest.raises(GraphDirectoryError):
        DiskFeatures(tmp_path / "nothing")


def announced(store: Disk, batches: list[list[int]]) -> Any:
    schedule = store.schedule()
    for b, index in enumerate(batches):
        schedule.announce(b, [TensorAttr(None, "x", index=torch.tensor(index))])
    return schedule


@pytest.mark.parametrize(
    ("look_ahead", "room", "planned", "first", "reads"),
    [
        (15, 128, [14] * 14, 2, 2),  # eight batches, and the other six before they are wanted
        (15, 64, [14] * 14, 1, 2),  # there is room for the first eight only
        (15, 48, [12] * 6 + [14] * 8, 1, 3),
        (3, 128, [4, 4, 6, 6, 8, 8, 10, 10, 12, 12, 14, 14, 14, 14], 2, 7),
    ],
)
def test_rows_that_coming_batches_miss_are_read_together(
    tmp_path: Path, look_ahead: int, room: int, planned: list[int], first: int, reads: int
) -> None:
    store = Disk(
        directory(tmp_path), 6000, read_ahead=100 * room, attributes=["x"], look_ahead=look_ahead
    )
    batches = [[10 * b + i for i in range(8)] for b in range(14)]
    schedule, found = announced(store, batches), []
    for b, index in enumerate(batches):
        with schedule.serving(b):
            assert torch.equal(rows(store, index), X[index])
        found.append(store.stats()["misses"] // 8)
        if b == 0:
            until = time.monotonic() + 20
            while store._ahead._reader is not None and time.monotonic() < until:
                time.sleep(0.01)
            assert store.stats()["reads"] == first
    assert found == planned and store.stats()["reads"] == reads
    assert store._ahead.held == 0
    schedule.close()


def test_no_more_is_read_ahead_than_there_is_memory_for(tmp_path: Path) -> None:
    batches = [[20 * b + i for i in range(8)] for b in range(9)]
    reads = {}
    for read_ahead in (1, 100 * 33, 100 * 48):
        store = Disk(directory(tmp_path / str(read_ahead)), 1000, read_ahead=read_ahead)
        schedule = announced(store, batches)
        for b, index in enumerate(batches):
            with schedule.serving(b):
                assert torch.equal(rows(store, index), X[index])
        schedule.close()
        reads[read_ahead] = store.stats()["reads"]
    assert reads == {1: 9, 100 * 33: 3, 100 * 48: 2}


def test_rows_read_together_fail_one_by_one(tmp_path: Path) -> None:
    path = directory(tmp_path)
    store = Disk(path, cache=100 * 60, attributes=["x"])
    batches = [[1, 2], [290, 3], [4, 5]]
    schedule = announced(store, batches)
    os.truncate(path / "part-0/nodes/attributes/x.npy", 128 + 100 * 100)
    for b in (0, 2):
        with schedule.serving(b):
            assert torch.equal(rows(store, batches[b]), X[batches[b]])
        if b == 0:
            with schedule.serving(1), pytest.raises(GraphDirectoryError, match="rows .* to 290"):
                rows(store, batches[1])
    assert torch.equal(rows(store, [5, 4, 2]), X[[5, 4, 2]])
    schedule.close()


def test_what_was_planned_ahead_does_not_hold_up_another_iteration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited, wait = [], Turns.wait
    monkeypatch.setattr(
        Turns, "wait", lambda self, turn, up: waited.append(wait(self, turn, up, 0.5)) or waited[-1]
    )
    store = Disk(directory(tmp_path), cache=100 * 60, attributes=["x"])
    outer_batches = [[10 * b + i for i in range(8)] for b in range(4)]
    outer = announced(store, outer_batches)
    with outer.serving(0):
        rows(store, outer_batches[0])
    inner = announced(store, [[100, 101], [102]])
    for b, index in enumerate([[100, 101], [102]]):
        with inner.serving(b):
            assert torch.equal(rows(store, index), X[index])
    inner.close()
    for b in (1, 2, 3):
        with outer.serving(b):
            assert torch.equal(rows(store, outer_batches[b]), X[outer_batches[b]])
    assert waited == [True, True, True]  # of the outer one only the first batch took its turn
    outer.close()
