"""What partitioners see: undirected, numbered through, weighed; used where it lies if it can be."""

import pytest
import torch
from torch_geometric.data import Data

import pyg_scale
from pyg_scale.partitioner import graph as graph_module
from pyg_scale.partitioner import partition_graph
from pyg_scale.store.directory import DirectoryWriter, EdgeMeta, Meta, NodeMeta
from pyg_scale.store.topology import topology_of
from pyg_scale.testing import graphs


def pairs(graph):
    row = torch.arange(graph.num_nodes).repeat_interleave(graph.indptr.diff())
    return set(zip(row.tolist(), graph.indices.tolist()))


def expected(data):
    """Both directions of every edge, without loops, with the nodes of all types numbered."""
    facts = graphs.EdgeLists.of(data)
    first, total = {}, 0
    for node_type, size in facts.num_nodes.items():
        first[node_type] = total
        total += size
    found = set()
    for edge_type, (src, dst) in facts.edges.items():
        a = (src.long() + first[facts.source_type(edge_type)]).tolist()
        b = (dst.long() + first[facts.destination_type(edge_type)]).tolist()
        found |= {(u, v) for u, v in zip(a + b, b + a) if u != v}
    return found, first, total


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("graph", [*graphs.HOMOGENEOUS.values(), graphs.hetero])
def test_every_edge_once_in_both_directions(graph, dtype):
    data = graph(index_dtype=dtype)
    edges, first, total = expected(data)
    found = partition_graph(data)
    assert found.indices.numel() == len(edges) == 2 * found.num_edges
    assert pairs(found) == edges
    assert found.indices.dtype == torch.int32 and found.is_sorted
    for v in range(total):
        mine = found.indices[found.indptr[v] : found.indptr[v + 1]]
        assert bool((mine[1:] > mine[:-1]).all())
    assert {t: begin for t, (begin, _) in found.offsets.items()} == first
    assert found.num_nodes == total


def both_ways(num_nodes=50, num_edges=200):
    """An undirected graph whose edges are in no order."""
    generator = torch.Generator().manual_seed(1)
    src, dst = torch.randint(num_nodes, (2, num_edges), generator=generator)
    key = torch.unique(torch.cat([src * num_nodes + dst, dst * num_nodes + src]))
    key = key[key // num_nodes != key % num_nodes]
    key = key[torch.randperm(key.numel(), generator=generator)]
    return Data(edge_index=torch.stack([key // num_nodes, key % num_nodes]), num_nodes=num_nodes)


def test_an_undirected_graph_is_used_where_it_lies():
    data = both_ways()
    topology = topology_of(data)
    there = topology.csc[None].indices
    found = partition_graph(topology, is_sorted=False)
    assert found.indices.data_ptr() == there.data_ptr()
    assert not found.is_sorted
    before = there.clone()
    found = partition_graph(topology)  # in order: a copy
    assert found.is_sorted and pairs(found) == expected(data)[0]
    assert torch.equal(there, before)
    data = data.coalesce()
    topology = topology_of(data)
    found = partition_graph(topology)
    assert found.indices.data_ptr() == topology.csc[None].indices.data_ptr()


@pytest.mark.parametrize("spoil", ["loop", "copy", "direction"])
def test_any_other_graph_is_not(spoil):
    data = both_ways()
    more = {"loop": [[3], [3]], "copy": data.edge_index[:, :1], "direction": [[0], [1]]}[spoil]
    data.edge_index = torch.cat([data.edge_index, torch.as_tensor(more)], dim=1)
    if spoil == "direction":
        assert (1, 0) not in set(zip(*data.edge_index.tolist()))
    found = partition_graph(data, is_sorted=False)
    assert pairs(found) == expected(data)[0]
    assert found.indices.numel() == len(expected(data)[0])


# What is balanced ##############################################################################


def test_weights():
    data = graphs.hostile()
    data.train_mask = torch.arange(100) % 3 == 0
    found = partition_graph(data, balance=("train", "nodes", "edges"))
    assert found.names == ("nodes", "edges", "train")
    degree = torch.bincount(data.edge_index[1], minlength=100)
    assert torch.equal(
        found.weights, torch.stack([torch.ones(100), degree, data.train_mask], 1).long()
    )
    assert torch.equal(found.train, data.train_mask)
    assert partition_graph(graphs.hostile()).weights.tolist() == [[1]] * 100


def test_weights_of_types():
    data = graphs.hetero()
    train = {"user": torch.tensor([0, 19]), "tag": torch.tensor([False, True, False, False, False])}
    found = partition_graph(data, balance=["nodes", "train"], train=train)
    assert found.names == (
        "nodes of 'user'",
        "nodes of 'item'",
        "nodes of 'tag'",
        "nodes of 'ghost'",
        "train of 'user'",
        "train of 'tag'",
    )
    assert found.weights.sum(0).tolist() == [20, 12, 5, 3, 2, 1]
    assert found.weights[:, 4].nonzero().view(-1).tolist() == [0, 19]
    assert found.weights[:, 5].nonzero().view(-1).tolist() == [33]
    edges = partition_graph(data, balance="edges")
    in_degree = sum(
        torch.bincount(data[t].edge_index[1] + edges.offsets[t[2]][0], minlength=edges.num_nodes)
        for t in data.edge_types
    )
    assert edges.weights.view(-1).tolist() == in_degree.tolist()


@pytest.mark.parametrize("train", [torch.tensor([1, 4]), "chosen", "train", None])
def test_training_nodes(train):
    data = both_ways()
    mask = torch.zeros(50, dtype=torch.bool)
    mask[[1, 4]] = True
    data.chosen = data.train_mask = mask
    assert torch.equal(partition_graph(data, train=train).train, mask)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"balance": "volume"}, ValueError, "balance must be"),
        ({"balance": ()}, ValueError, "balance must be"),
        ({"balance": ("nodes", "nodes")}, ValueError, "balance must be"),
        ({"balance": "train"}, ValueError, "the training nodes are not known"),
        ({"train": "nobody"}, ValueError, "no nodes have that attribute"),
        ({"train": torch.tensor([50])}, ValueError, "go from 50 to 50, but there are 50 nodes"),
        ({"train": torch.tensor([-1])}, ValueError, "go from -1"),
        ({"train": torch.ones(49, dtype=torch.bool)}, ValueError, "49 entries for 50 nodes"),
        ({"train": torch.ones(50)}, TypeError, "must be a mask"),
        ({"train": 3}, TypeError, "train must be a mask"),
        ({"train": {"paper": torch.tensor([0])}}, ValueError, "'paper'"),
    ],
)
def test_wrong_arguments(options, error, message):
    with pytest.raises(error, match=message):
        partition_graph(both_ways(), **options)


def test_training_nodes_without_a_type_where_there_are_types():
    with pytest.raises(TypeError, match="several node types"):
        partition_graph(graphs.hetero(), train=torch.tensor([0]))


def test_wrong_data():
    with pytest.raises(TypeError, match="data must be"):
        partition_graph(3)


# Graph directories #############################################################################


def write(path, data):
    """A directory of one part with an index set."""
    topology = topology_of(data)
    nodes, edges = {}, {}
    with DirectoryWriter(path) as writer:
        for node_type, size in topology.num_nodes.items():
            nodes[node_type] = NodeMeta(node_type, size, part_nodes=[size], part_halo=[0])
        for edge_type, csc in topology.csc.items():
            folder = "part-0/edges" + ("" if edge_type is None else "/" + ",".join(edge_type))
            writer.write(f"{folder}/indptr.npy", csc.indptr)
            writer.write(f"{folder}/indices.npy", csc.indices.contiguous())
            edges[edge_type] = EdgeMeta(edge_type, csc.num_edges, part_edges=[csc.num_edges])
        meta = Meta(nodes, edges, is_hetero=topology.is_hetero)
        if not topology.is_hetero:
            writer.write("sets/train.npy", torch.tensor([1, 4]))
            meta.index_sets = {"": {"train": 2}}
        writer.commit(meta)


@pytest.mark.parametrize("make", [both_ways, graphs.hostile, graphs.hetero])
def test_a_directory_is_the_graph_it_was_made_of(make, tmp_path):
    data = make()
    write(tmp_path / "g", data)
    of_data = partition_graph(data, balance=("nodes", "edges"))
    found = partition_graph(tmp_path / "g", balance=("nodes", "edges"))
    assert torch.equal(found.indptr, of_data.indptr)
    assert torch.equal(found.indices, of_data.indices)
    assert torch.equal(found.weights, of_data.weights)
    assert found.offsets == of_data.offsets
    if make is not graphs.hetero:
        assert found.train.nonzero().view(-1).tolist() == [1, 4]


@pytest.mark.parametrize("opened", [True, False])
def test_files_are_used_where_they_lie(opened, tmp_path, monkeypatch):
    """Nothing is built of an undirected graph on disk."""
    data = both_ways()
    pyg_scale.save(data, tmp_path / "g")
    expected = partition_graph(data, is_sorted=False)

    def never(*args):
        raise AssertionError("a copy was made")

    monkeypatch.setattr(graph_module, "undirected", never)
    monkeypatch.setattr(graph_module, "sort_rows", never)
    found = partition_graph(
        pyg_scale.open(tmp_path / "g") if opened else tmp_path / "g", is_sorted=False
    )
    assert torch.equal(found.indptr, expected.indptr)
    assert torch.equal(found.indices, expected.indices)
    with pytest.raises(AssertionError, match="a copy"):
        partition_graph(tmp_path / "g")  # these neighbours are not in order
