"""Advice on wrappers: for graphs of known kinds, the one that is right for them."""

from __future__ import annotations

import pytest
import torch
import torch_geometric.nn as pyg
from torch_geometric.data import Data, HeteroData
from torch_geometric.utils import barabasi_albert_graph, grid, to_undirected

from pyg_scale.parallel import advise
from pyg_scale.partitioner import assign, quality
from pyg_scale.partitioner.range import RangePartitioner


def mesh() -> Data:
    edge_index, _ = grid(40, 40)
    return Data(x=torch.randn(1600, 16), edge_index=edge_index)


def scale_free() -> Data:
    torch.manual_seed(0)
    edge_index = to_undirected(barabasi_albert_graph(400, 12))
    return Data(x=torch.randn(400, 16), edge_index=edge_index)


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return pyg.GCN(16, 32, 2, 4)


def test_meshes_have_few_halo_nodes() -> None:
    net = model().train()
    found = advise(mesh(), net, 4, memory="1GB")
    assert found.method == "halo" and found.replication < 0.5
    # Two propagates, of 32 and of 4 channels of 4 bytes; each halo row goes forth, and back.
    halo = found.replication * 1600
    assert found.costs["halo"].sent == pytest.approx(2 * halo / 4 * (32 + 4) * 4)
    assert found.costs["feature"].sent == pytest.approx(4 * 3 / 16 * 1600 * (32 + 4) * 4)
    assert found.costs["halo"].seconds == pytest.approx(found.costs["halo"].sent / 1e9)
    assert net.training and not net._forward_hooks
    assert "use 'halo'" in str(found) and "below 1.50 'halo' sends less" in str(found)


def test_scale_free_graphs_are_divided_by_channels() -> None:
    graph, wide = scale_free(), pyg.GCN(16, 256, 2, 256)
    for net, bandwidth in ((wide, "1GB"), (model(), "100MB")):
        found = advise(graph, net, 4, memory="1GB", bandwidth=bandwidth)
        assert found.method == "feature" and found.replication > 1.5 and not found.options
        assert found.costs["feature"].sent < found.costs["halo"].sent
    # All edges are followed on all ranks, which takes longer than sending what channels save.
    found = advise(graph, model(), 4, memory="1GB")
    halo, feature = found.costs["halo"], found.costs["feature"]
    assert found.method == "halo" and feature.seconds < halo.seconds
    assert feature.computing > halo.computing + halo.seconds
    # Of each of two messages an edge takes 20 ns, and each of 36 numbers a nanosecond.
    assert feature.computing == pytest.approx(graph.num_edges * (2 * 20e-9 + 36e-9 / 4))


def test_batches_are_sampled_if_memory_is_short() -> None:
    found = advise(mesh(), model(), 4, memory="50kB", method="fennel")
    assert found.method == "ddp" and "does not fit" in str(found) and "sampled" in str(found)
    assert not found.options


def test_messages_in_pieces_take_the_least_memory() -> None:
    torch.manual_seed(0)
    edges = to_undirected(torch.randint(3_000, (2, 60_000)))
    dense = Data(x=torch.randn(3_000, 16), edge_index=edges)
    found = advise(dense, pyg.GraphSAGE(16, 32, 2, 4, aggr="max"), 2, memory="1GB")
    assert found.method == "halo" and not found.options
    # As much as messages in pieces need, which is too little for the others.
    needed = int(found.costs["halo+remat"].memory) + 1
    short = advise(dense, pyg.GraphSAGE(16, 32, 2, 4, aggr="max"), 2, memory=needed)
    assert short.wrapper == "'halo' with remat=True"


def test_memory_of_messages_in_pieces_follows_from_nodes_halo_and_edges() -> None:
    """What a node takes, found with two ranks, tells what three ranks need."""
    torch.manual_seed(0)
    edges = to_undirected(torch.randint(3_000, (2, 60_000)))
    dense, row = Data(x=torch.randn(3_000, 16), edge_index=edges), 4 * 32  # the widest message
    net = pyg.GraphSAGE(16, 32, 2, 4, aggr="max")

    def ranks(world: int) -> list[tuple[int, float]]:
        """The nodes of each rank, and the bytes of all else."""
        partition, _ = assign(dense, world, "multilevel", balance=("nodes", "edges"))
        found, blocks = quality(dense, partition), world - 1  # of the halo, of which three at once
        return [
            (n, row * (min(3, blocks) * h / blocks + 4 * min(e, 8192)) + 24 * e)
            for n, h, e in zip(found.nodes[None], found.halo[None], found.edges[None], strict=True)
        ]

    needed = {
        world: advise(dense, net, world, memory="1GB").costs["halo+remat"].memory
        for world in (2, 3, 6)
    }
    of_node = min((needed[2] - others) / n for n, others in ranks(2))
    for world in (3, 6):
        expected = max(n * of_node + others for n, others in ranks(world))
        assert needed[world] == pytest.approx(expected)


def test_wrappers_that_the_model_does_not_suit_are_left_out() -> None:
    heads = pyg.GAT(16, 30, 2, 4, heads=3)
    found = advise(scale_free(), heads, 4, memory="1GB", method="random")
    assert found.method == "halo" and "3 heads, which 4 ranks do not divide" in str(found)
    norm = pyg.GCN(16, 32, 2, 4, norm="PairNorm")
    assert advise(mesh(), norm, 2, memory="1GB", method="range", balance="nodes").method == "ddp"
    edges = pyg.EdgeCNN(16, 32, 2, 4)
    found = advise(mesh(), edges, 2, memory="1GB", method="range", balance="nodes")
    assert list(found.costs) == ["halo"] and "cannot be computed in pieces" in str(found)


def test_large_messages_are_made_in_pieces_on_the_cpu() -> None:
    edge_index, _ = grid(200, 200)
    large = Data(x=torch.randn(40_000, 64), edge_index=edge_index)
    options = {"memory": "8GB", "method": "range", "balance": "nodes"}
    # A rank has 178,800 edges of 256 bytes, most of 48 MiB, beyond which no memory is used again.
    for net in (pyg.GraphSAGE(64, 64, 2, 4), pyg.GAT(64, 64, 2, 64, heads=4)):
        found = advise(large, net, 2, **options)
        assert found.options == {"remat": True}
        assert str(found).startswith("use 'halo' with remat=True")
    assert not advise(large, pyg.GraphSAGE(64, 64, 2, 4), 4, **options).options
    assert not advise(large, pyg.GCN(64, 32, 2, 4), 2, **options).options
    # 200 halo rows of 2 times 256 bytes go forward, and may go again. That takes as long as is
    # gained, 0.526 ns for each of 2 times 45.8 million bytes less 25 ns for each edge twice, at
    # 2.6 MB a second.
    net = pyg.GraphSAGE(64, 64, 2, 4)
    for bandwidth, expected in (("2700kB", {"remat": True}), ("2500kB", {})):
        assert advise(large, net, 2, bandwidth=bandwidth, **options).options == expected, bandwidth


def test_parts_have_equal_numbers_of_edges() -> None:
    torch.manual_seed(0)
    edges = torch.randint(2_000, (2, 20_000))
    edges[:, :10_000] %= 200  # a tenth of the nodes has more than half of the edges
    data = Data(x=torch.randn(2_000, 16), edge_index=edges)
    halves = {"memory": "1GB", "method": "range"}
    found = advise(data, model(), 2, **halves, balance="nodes")
    assert "times the average of edges" in str(found)
    assert "times the average of edges" not in str(
        advise(data, model(), 2, **halves, balance="edges")
    )
    assert "times the average of edges" not in str(advise(data, model(), 2, memory="1GB"))
    # A range balances one of nodes and edges, and is given edges.
    for method in ("range", RangePartitioner()):
        found = advise(data, model(), 2, memory="1GB", method=method)
        # Of each of two messages an edge takes 20 ns, and each of 36 numbers a nanosecond.
        half = data.num_edges / 2 * (2 * 20e-9 + 36e-9)
        assert found.costs["halo"].computing == pytest.approx(half, rel=0.01)
    with pytest.raises(ValueError, match="give balance= one of them"):
        advise(data, model(), 2, **halves, balance=("nodes", "edges"))


def test_bad_input() -> None:
    with pytest.raises(TypeError, match="must be a Data with x"):
        advise(HeteroData(), model(), 2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="world must be at least 1"):
        advise(mesh(), model(), 0)
    assert "one rank" in str(advise(mesh(), model(), 1))
