"""Filling the store from a graph directory, of one part and of several."""

import pytest
import torch
from torch_geometric.data import Data, HeteroData

import pyg_scale
from pyg_scale.errors import GraphDirectoryError
from pyg_scale_redis import Redis

ODD = torch.arange(10) % 2


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(0)
    return Data(
        x=torch.arange(20.0).view(10, 2).to(torch.bfloat16),
        y=torch.arange(10),
        edge_index=torch.randint(10, (2, 40), generator=generator),
        weight=torch.arange(40.0),
    )


@pytest.fixture
def hetero(data):
    hetero = HeteroData()
    hetero["a"].x, hetero["b"].x = data.x, -data.x[:, 0]
    hetero["a", "to", "b"].edge_index = data.edge_index
    hetero["a", "to", "b"].weight = data.weight
    return hetero


def test_a_graph_of_one_part(server, data, tmp_path):
    pyg_scale.save(data, tmp_path / "graph")
    store = Redis(server.url, batch_bytes=12)
    store.load(tmp_path / "graph")
    check(store, data)


def test_rows_of_parts_are_by_original_id(server, data, tmp_path):
    in_parts(data, ODD, tmp_path)
    store = Redis(server.url, batch_bytes=12)
    store.load(str(tmp_path / "parts"))
    check(store, data)


def test_types(server, hetero, tmp_path):
    parts = {"a": ODD, "b": 1 - ODD}
    in_parts(hetero, parts, tmp_path)
    store = Redis(server.url)
    store.load(tmp_path / "parts")
    assert torch.equal(store["a", "x", None], hetero["a"].x)
    assert torch.equal(store["b", "x", None], hetero["b"].x)
    edge_type = ("a", "to", "b")
    assert torch.equal(store[edge_type, "weight", None], hetero[edge_type].weight)
    assert len(store.get_all_tensor_attrs()) == 3


def in_parts(data, assignment, folder):
    pyg_scale.save(data, folder / "whole")
    pyg_scale.partition(folder / "whole", 2, assignment=assignment, path=folder / "parts")


def check(store, data):
    assert torch.equal(store[None, "x", None], data.x)
    assert torch.equal(store[None, "y", None], data.y)
    assert torch.equal(store[(None, None), "weight", None], data.weight)
    assert len(store.get_all_tensor_attrs()) == 3


def test_what_lacks_a_part_is_refused(server, data, tmp_path):
    in_parts(data, ODD, tmp_path)
    (tmp_path / "parts" / "part-1").rename(tmp_path / "away")
    with pytest.raises(GraphDirectoryError, match=r"lacks the parts \[1\]"):
        Redis(server.url).load(tmp_path / "parts")
    assert Redis(server.url).get_all_tensor_attrs() == []


def test_what_is_no_directory_is_refused(server, tmp_path):
    with pytest.raises(GraphDirectoryError, match="is not a graph directory"):
        Redis(server.url).load(tmp_path)
