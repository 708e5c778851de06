"""METIS behind `pyg_scale.partition`: any graph goes in, and all that is asked is balanced."""

import numpy as np
import pymetis
import pytest
import torch
from torch_geometric.data import Data, HeteroData

from pyg_scale import plugins
from pyg_scale.ops.csc import expand_pointers
from pyg_scale.partitioner import (
    PartitionGraph,
    equal_shares,
    imbalance,
    partition,
    partition_graph,
)
from pyg_scale_metis.partitioner import MetisPartitioner


def planted(blocks=4, size=200, seed=0):
    """Blocks of nodes, of which each has 10 edges within and 1 to others; and the blocks."""
    generator = torch.Generator().manual_seed(seed)
    block = torch.randperm(blocks * size, generator=generator) % blocks
    pairs = torch.randint(block.numel(), (2, 40 * block.numel()), generator=generator)
    inside = pairs[:, block[pairs[0]] == block[pairs[1]]][:, : 5 * block.numel()]
    edge_index = torch.cat([inside, pairs[:, -block.numel() // 2 :]], dim=1)
    return Data(edge_index=edge_index, num_nodes=block.numel()), block


def cut(graph: PartitionGraph, part):
    row = expand_pointers(graph.indptr, graph.indices.numel()).long()
    return int((part[row] != part[graph.indices.long()]).sum()) // 2


def test_by_name():
    assert plugins.get("partitioner", "metis") is MetisPartitioner


@pytest.mark.parametrize("algorithm", ["auto", "recursive", "k-way"])
def test_finds_planted_blocks(algorithm):
    data, block = planted()
    part = partition(data, 4, method="metis", algorithm=algorithm)
    count = torch.zeros(4, 4).index_put_((part.long(), block), torch.ones(800), accumulate=True)
    assert float(count.amax(1).sum()) / 800 > 0.97
    assert part.dtype == torch.int32


def test_directed_edges_loops_duplicates_and_isolated_nodes():
    """METIS dies of each of these if it gets it."""
    edges = torch.tensor([[0, 1, 1, 2, 2, 0, 3, 3, 4], [1, 2, 2, 2, 0, 0, 4, 3, 3]])
    data = Data(edge_index=edges, num_nodes=9)
    for num_parts in (2, 3, 9):
        part = partition(data, num_parts, method="metis")
        assert part.shape == (9,)
        assert set(part.tolist()) == set(range(num_parts))
    empty = Data(edge_index=torch.empty(2, 0, dtype=torch.int64), num_nodes=6)
    assert torch.bincount(partition(empty, 3, method="metis")).tolist() == [2, 2, 2]


def test_shares():
    data, _ = planted()
    part = partition(data, 3, method="metis", shares=[0.6, 0.3, 0.1])
    found = torch.bincount(part) / 800
    assert torch.allclose(found, torch.tensor([0.6, 0.3, 0.1]), rtol=0.11)


def test_several_columns_are_balanced():
    data, _ = planted()
    data.train_mask = torch.arange(800) < 60
    graph = partition_graph(data, balance=("nodes", "edges", "train"))
    metis = MetisPartitioner()
    part = metis.assign(graph, 4, seed=0, shares=equal_shares(4))
    held = torch.zeros(4, 3, dtype=torch.int64).index_add_(0, part.long(), graph.weights)
    assert bool((held <= metis.capacity(graph, equal_shares(4))).all())
    assert cut(graph, part) < 0.5 * graph.num_edges


def test_node_types():
    data = HeteroData()
    data["a"].num_nodes, data["b"].num_nodes = 30, 50
    generator = torch.Generator().manual_seed(0)
    data["a", "to", "b"].edge_index = torch.stack(
        [
            torch.randint(30, (200,), generator=generator),
            torch.randint(50, (200,), generator=generator),
        ]
    )
    part = partition(data, 2, method="metis")
    assert torch.bincount(part["a"]).max() <= 17 and torch.bincount(part["b"]).max() <= 28


def test_depends_on_the_seed_alone():
    data, _ = planted(blocks=3)
    part = partition(data, 5, method="metis", seed=1)
    assert torch.equal(part, partition(data, 5, method="metis", seed=1))
    assert not torch.equal(part, partition(data, 5, method="metis", seed=2))


def test_options_reach_metis(monkeypatch):
    data, _ = planted()
    seen = []
    real = pymetis.part_graph

    def part_graph(*args, **options):
        seen.append(options)
        return real(*args, **options)

    monkeypatch.setattr(pymetis, "part_graph", part_graph)
    options = {"algorithm": "k-way", "objective": "volume", "ncuts": 3, "niter": 4}
    partition(data, 4, method="metis", max_imbalance=1.2, **options)
    given = seen[0]["options"]
    assert (given.ncuts, given.niter, given.ufactor) == (3, 4, 200)
    assert given.objtype == int(pymetis.ObjType.VOL)
    assert seen[0]["recursive"] is False


def test_a_graph_beyond_the_numbers_of_metis_is_refused(monkeypatch):
    data, _ = planted(blocks=2, size=100)
    monkeypatch.setattr(pymetis, "zero_copy_dtype", lambda: np.dtype(np.int8))
    with pytest.raises(ValueError, match=r"8-bit numbers.*more than 127.*'multilevel'"):
        partition(data, 2, method="metis")


def test_weights_beyond_the_numbers_of_metis_are_scaled(monkeypatch):
    graph = partition_graph(planted(blocks=2, size=100)[0])
    heavy = PartitionGraph(graph.indptr, graph.indices, graph.offsets, graph.weights * 2**40)
    monkeypatch.setattr(pymetis, "zero_copy_dtype", lambda: np.dtype(np.int32))
    real = pymetis.part_graph

    def part_graph(num_parts, adjacency, **options):
        assert int(options["vweights"].astype(np.int64).sum()) < 2**31
        options["vweights"] = options["vweights"].astype(np.int64)
        wide = pymetis.CSRAdjacency(graph.indptr.numpy(), graph.indices.numpy().astype(np.int64))
        return real(num_parts, wide, **options)

    monkeypatch.setattr(pymetis, "part_graph", part_graph)
    part = MetisPartitioner().assign(heavy, 2, seed=0, shares=equal_shares(2))
    assert imbalance(part, graph.weights, equal_shares(2)) <= 1.1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm": "kway"}, "algorithm must be one of auto, recursive, k-way"),
        ({"objective": "vol"}, "objective must be one of cut, volume"),
        ({"objective": "volume"}, "needs algorithm='k-way'"),
        ({"max_imbalance": 1.0}, "max_imbalance must be at least 1.001"),
        ({"max_imbalance": float("nan")}, "max_imbalance must be at least 1.001"),
        ({"ncuts": 0}, "ncuts must be a number of at least 1"),
        ({"niter": 2.0}, "niter must be a number of at least 1"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        MetisPartitioner(**options)
