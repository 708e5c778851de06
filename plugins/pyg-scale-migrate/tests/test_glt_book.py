"""Partition books of GLT, as tensors and as its own classes, which are not there."""

import sys
import types

import pytest
import torch
from torch_geometric.data import Data

from pyg_scale.partitioner.cut import partition
from pyg_scale_migrate.glt.book import read_book


class GLTPartitionBook(torch.Tensor):
    """GLT's class: a tensor under another name."""


class OffsetId2Index:
    """GLT's class."""

    def __init__(self):
        self.offset = 3


class RangePartitionBook:
    """GLT's class: where parts end."""

    def __init__(self, bounds):
        self.partition_bounds = torch.tensor(bounds)
        self.partition_idx = 0
        self._id2index = OffsetId2Index()


@pytest.fixture
def glt(monkeypatch):
    """The names of its classes while they are saved."""
    place = {
        "graphlearn_torch.partition.base": [GLTPartitionBook],
        "graphlearn_torch.partition.partition_book": [RangePartitionBook, OffsetId2Index],
    }
    with monkeypatch.context() as patch:
        for name in ("graphlearn_torch", "graphlearn_torch.partition", *place):
            patch.setitem(sys.modules, name, types.ModuleType(name))
        for name, classes in place.items():
            for cls in classes:
                patch.setattr(sys.modules[name], cls.__name__, cls, raising=False)
                patch.setattr(cls, "__module__", name)
        yield patch


def test_books_of_its_own_classes(tmp_path, glt):
    parts = torch.tensor([0, 2, 1, 0])
    torch.save(parts.as_subclass(GLTPartitionBook), tmp_path / "tensor.pt")
    torch.save(RangePartitionBook([2, 5, 6]), tmp_path / "ranges.pt")
    torch.save({"a": RangePartitionBook([1])}, tmp_path / "other.pt")
    torch.save(RangePartitionBook([5, 2]), tmp_path / "falling.pt")
    glt.undo()
    assert type(read_book(tmp_path / "tensor.pt")) is torch.Tensor
    assert torch.equal(read_book(tmp_path / "tensor.pt"), parts)
    assert read_book(tmp_path / "ranges.pt").tolist() == [0, 0, 1, 1, 1, 2]
    for name in ("other", "falling"):
        with pytest.raises(ValueError, match=f"{name}.pt must hold the part of each id"):
            read_book(tmp_path / f"{name}.pt")


def test_what_is_no_book(tmp_path):
    torch.save(torch.rand(3), tmp_path / "float.pt")
    with pytest.raises(ValueError, match=r"got torch.float32 of shape \[3\]"):
        read_book(tmp_path / "float.pt")
    with pytest.raises(FileNotFoundError, match="nothing.pt"):
        read_book(tmp_path / "nothing.pt")


def test_it_is_an_assignment(tmp_path):
    parts = torch.tensor([1, 0, 2, 2, 0])
    torch.save(parts, tmp_path / "node_pb.pt")
    data = Data(edge_index=torch.tensor([[0, 1, 2], [1, 2, 3]]), num_nodes=5)
    found = partition(data, 3, assignment=tmp_path / "node_pb.pt")
    assert torch.equal(found.long(), parts)
    with pytest.raises(ValueError, match=r"node_pb.pt: entry 2 is 2, expected a part from 0 to 1"):
        partition(data, 2, assignment=tmp_path / "node_pb.pt")
