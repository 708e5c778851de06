"""Directories of several parts: one graph again, or one part of it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.data import Data, HeteroData

import pyg_scale
from pyg_scale.errors import GraphDirectoryError
from pyg_scale.loader import NeighborLoader
from pyg_scale.partitioner.base import Partition
from pyg_scale.partitioner.write import write_partition
from pyg_scale.store import topology_of
from pyg_scale.store.directory import PartitionBook
from pyg_scale.store.directory.data import unchanged_directory
from pyg_scale.testing import graphs
from tests.loader.batches import assert_same_batches
from tests.store.directory.graphs import edge_list_was_made, everything
from tests.store.directory.test_data import assert_same_graph


def _assignment(data: Any, kind: str, num_parts: int) -> dict[Any, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    sizes = (
        {t: data[t].num_nodes for t in data.node_types}
        if isinstance(data, HeteroData)
        else {None: data.num_nodes}
    )
    out = {}
    for node_type, size in sizes.items():
        part = torch.randint(num_parts, (size,), generator=generator, dtype=torch.int32)
        out[node_type] = part.sort().values if kind == "range" else part
    return out


def _parted(
    data: Any,
    path: Path,
    kind: str = "random",
    strategy: str = "by_dst",
    parts: int = 3,
    **options: Any,
) -> Any:
    whole = path / "whole"
    pyg_scale.save(data, whole, **options)
    partition = Partition(_assignment(data, kind, parts), parts, kind)
    write_partition(whole, partition, path / "parts", edge_assign_strategy=strategy)
    return pyg_scale.open(path / "parts", verify=True)


@pytest.mark.matrix(3)
@pytest.mark.parametrize("kind", ["random", "range"])
@pytest.mark.parametrize("strategy", ["by_dst", "by_src"])
@pytest.mark.parametrize("options", [{}, {"time_attr": "time", "weight_attr": "weight"}], ids=str)
@pytest.mark.parametrize("typed", [False, True])
def test_one_graph_again(
    tmp_path: Path, kind: str, strategy: str, options: dict[str, Any], typed: bool
) -> None:
    data: Any = graphs.hetero() if typed else everything(torch.int32)
    found = _parted(data, tmp_path, kind, strategy, **options)

    def loader(graph: Any) -> NeighborLoader:
        return NeighborLoader(
            graph, [4, 3], "item" if typed else None, batch_size=9, seed=3, **options
        )

    topology_of(found, **options)
    assert edge_list_was_made(found) == (strategy == "by_src")
    assert_same_batches(loader(data), loader(found))
    assert_same_graph(found, data)


def test_nothing_is_put_together_that_nobody_asks_for(tmp_path: Path) -> None:
    data = everything()
    found = _parted(data, tmp_path)
    assert repr(found) == repr(data).replace("Data(", "DirectoryData(")
    assert found.num_nodes == 100 and found.num_features == 6
    assert sorted(found.node_attrs()) == sorted(data.node_attrs())
    assert sorted(found.edge_attrs()) == sorted(data.edge_attrs())
    assert "x" in found and "x" in found._store
    waiting = [name for name in found._store if found._store._mapping.entry(name) is not None]
    assert len(waiting) == len(data.node_attrs()) + len(data.edge_attrs())
    assert not any(found._store._mapping.entry(name).made for name in waiting)


@pytest.mark.parametrize("kind", ["random", "range"])
def test_a_part(tmp_path: Path, kind: str) -> None:
    data = everything()
    _parted(data, tmp_path, kind, time_attr="when", weight_attr="weight")
    assignment = _assignment(data, kind, 3)[None]
    book = pyg_scale.open(tmp_path / "parts", part=0).directory.books[None]
    whole = topology_of(data, time_attr="when", weight_attr="weight").csc[None]
    for number in range(3):
        part = pyg_scale.open(tmp_path / "parts", part=number)
        own = (assignment == number).nonzero().view(-1)
        assert torch.equal(part.orig_id(None), own) and part.num_nodes(None) == own.numel()
        assert torch.equal(book.part_of(own), torch.full_like(own, number))
        assert torch.equal(book.local_of(own), torch.arange(own.numel()))
        assert torch.equal(book.nodes_of(number), own)
        assert torch.equal(part.node_attribute(None, "x"), data.x[own])
        csc, edges = part.csc(None), []
        for local, node in enumerate(own.tolist()):
            mine = slice(int(csc.indptr[local]), int(csc.indptr[local + 1]))
            theirs = slice(int(whole.indptr[node]), int(whole.indptr[node + 1]))
            for name in ("indices", "edge_id", "time", "weight_prefix"):
                assert getattr(csc, name)[mine].tolist() == getattr(whole, name)[theirs].tolist()
            edges += csc.edge_id[mine].tolist()
        ids = part.edge_ids(None)
        assert ids.tolist() == sorted(edges)
        assert torch.equal(part.edge_attribute(None, "edge_attr"), data.edge_attr[ids.long()])
        neighbors = set(csc.indices.tolist()) - set(own.tolist())
        assert part.halo(None).tolist() == sorted(neighbors)
    with pytest.raises(IndexError, match="parts 0 to 2"):
        pyg_scale.open(tmp_path / "parts", part=3)


def test_a_machine_may_hold_only_its_own_parts(tmp_path: Path) -> None:
    data = everything()
    _parted(data, tmp_path)
    shutil.rmtree(tmp_path / "parts" / "part-1")
    part = pyg_scale.open(tmp_path / "parts", part=2, verify=True)
    assert torch.equal(part.node_attribute(None, "x"), data.x[part.orig_id(None)])
    with pytest.raises(GraphDirectoryError, match=r"3 parts, of which 1 is missing.*part="):
        pyg_scale.open(tmp_path / "parts")
    with pytest.raises(GraphDirectoryError, match=r"part 1 is not local.*has \[0, 2\]"):
        pyg_scale.open(tmp_path / "parts", part=1)
    (tmp_path / "parts" / "part-2" / "edges" / "indptr.npy").unlink()
    with pytest.raises(GraphDirectoryError, match="indptr.npy is missing"):
        pyg_scale.open(tmp_path / "parts", part=0)


def test_parts_without_anything(tmp_path: Path) -> None:
    data = Data(x=torch.arange(3.0).view(-1, 1), edge_index=torch.tensor([[0, 1], [1, 2]]))
    found = _parted(data, tmp_path, parts=3)
    assert_same_graph(found, data)


def test_a_book_of_parts() -> None:
    assignment = torch.tensor([2, 0, 0, 2, 1, 2])
    book = PartitionBook.from_assignment(assignment, 4)
    assert book.nodes_of(2).tolist() == [0, 3, 5] and book.nodes_of(3).numel() == 0
    assert book.part_of(torch.tensor([5, 1])).tolist() == [2, 0]
    assert book.local_of(torch.arange(6)).tolist() == [0, 0, 1, 1, 0, 2]
    assert torch.equal(book.assignment(), assignment)
    ranges = PartitionBook.from_assignment(torch.tensor([0, 0, 2, 2, 2]), 4)
    assert ranges.part is None
    assert ranges.part_of(torch.arange(5)).tolist() == [0, 0, 2, 2, 2]
    assert ranges.local_of(torch.arange(5)).tolist() == [0, 1, 0, 1, 2]
    assert torch.equal(ranges.assignment(), torch.tensor([0, 0, 2, 2, 2]))
    nothing = PartitionBook.from_assignment(torch.empty(0, dtype=torch.int64), 2)
    assert (
        nothing.num_nodes == 0 and nothing.part_of(torch.empty(0, dtype=torch.int64)).numel() == 0
    )
    for wrong in (torch.tensor([0, 4]), torch.tensor([-1, 0])):
        with pytest.raises(ValueError, match="node [01] is assigned to part"):
            PartitionBook.from_assignment(wrong, 4)
    many = torch.randint(300, (20_000,), generator=torch.Generator().manual_seed(1))
    book = PartitionBook.from_assignment(many, 300)
    for number in (0, 7, 299):
        mine = book.nodes_of(number)
        assert torch.equal(mine, (many == number).nonzero().view(-1))
        assert torch.equal(book.local_of(mine), torch.arange(mine.numel()))
    with pytest.raises(TypeError, match="one-dimensional integer"):
        PartitionBook.from_assignment(torch.tensor([0.0]), 4)


def test_whether_an_opened_graph_was_changed(tmp_path: Path) -> None:
    pyg_scale.save(everything(), tmp_path / "graph")
    found = pyg_scale.open(tmp_path / "graph")
    assert unchanged_directory(found) is found.graph_directory
    found.extra = 3
    assert found.edge_index is not None and unchanged_directory(found) is not None
    found.x[0] = 1
    assert unchanged_directory(found) is None
    found = pyg_scale.open(tmp_path / "graph")
    del found.y
    assert unchanged_directory(found) is None
    assert unchanged_directory(everything()) is None
