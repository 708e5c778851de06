"""Filling the store from a graph directory."""

import pytest
import torch

from pyg_scale.errors import GraphDirectoryError
from pyg_scale.store.directory.meta import (
    Attribute,
    EdgeMeta,
    Meta,
    NodeMeta,
    PartitionMeta,
    attribute_file,
    edge_dir,
    node_dir,
)
from pyg_scale.store.directory.writer import DirectoryWriter
from pyg_scale_redis import Redis

X = torch.arange(20.0).view(10, 2).to(torch.bfloat16)
WEIGHT = torch.arange(6)


@pytest.fixture
def directory(tmp_path):
    """Ten nodes and six edges in two parts: the odd ones, and the even ones."""
    ids = [torch.arange(1, 10, 2), torch.arange(0, 10, 2)]
    edges = [torch.tensor([0, 4]), torch.tensor([1, 2, 3, 5])]
    node = NodeMeta(None, 10, {"x": Attribute("bfloat16", (2,))}, True, [5, 5], [0, 0])
    edge = EdgeMeta(None, 6, edge_id_dtype="int64", part_edges=[2, 4])
    edge.attributes["weight"] = Attribute("int64")
    with DirectoryWriter(tmp_path / "graph") as writer:
        for part in (0, 1):
            nodes, of_edges = node_dir(None, part), edge_dir(None, part)
            writer.write(f"{nodes}/orig_id.npy", ids[part])
            writer.write(attribute_file(nodes, "x"), X[ids[part]])
            writer.write(f"{of_edges}/ids.npy", edges[part])
            writer.write(attribute_file(of_edges, "weight"), WEIGHT[edges[part]])
        writer.commit(Meta({None: node}, {None: edge}, 2, partition=PartitionMeta("test")))
    return tmp_path / "graph"


def test_rows_are_by_original_id(server, directory):
    store = Redis(server.url, batch_bytes=12)
    store.load(directory)
    assert torch.equal(store[None, "x", None], X)
    assert torch.equal(store[(None, None), "weight", None], WEIGHT)


def test_what_lacks_a_part_is_refused(server, directory):
    (directory / "part-1").rename(directory.parent / "away")
    with pytest.raises(GraphDirectoryError, match=r"lacks the parts \[1\]"):
        Redis(server.url).load(directory)
    assert Redis(server.url).get_all_tensor_attrs() == []


def test_what_is_no_directory_is_refused(server, tmp_path):
    with pytest.raises(GraphDirectoryError, match="is no graph directory"):
        Redis(server.url).load(tmp_path)
