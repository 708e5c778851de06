"""Advice on wrappers: for graphs of known kinds, the one that is right for them."""

from __future__ import annotations

import pytest
import torch
import torch_geometric.nn as pyg
from torch_geometric.data import Data, HeteroData
from torch_geometric.utils import barabasi_albert_graph, grid, to_undirected

from pyg_scale.parallel import advise


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
    found = advise(scale_free(), model(), 4, memory="1GB")
    assert found.method == "feature" and found.replication > 1.5


def test_batches_are_sampled_if_memory_is_short() -> None:
    found = advise(mesh(), model(), 4, memory="50kB", method="fennel")
    assert found.method == "ddp" and "does not fit" in str(found) and "sampled" in str(found)


def test_wrappers_that_the_model_does_not_suit_are_left_out() -> None:
    heads = pyg.GAT(16, 30, 2, 4, heads=3)
    found = advise(scale_free(), heads, 4, memory="1GB", method="random")
    assert found.method == "halo" and "3 heads, which 4 ranks do not divide" in str(found)
    norm = pyg.GCN(16, 32, 2, 4, norm="PairNorm")
    assert advise(mesh(), norm, 2, memory="1GB", method="range").method == "ddp"


def test_sums_are_made_in_pieces_on_the_cpu() -> None:
    edge_index, _ = grid(100, 100)
    large = Data(x=torch.randn(10_000, 16), edge_index=edge_index)
    found = advise(large, model(), 2, memory="1GB", method="range")
    assert found.options == {"remat": True} and str(found).startswith("use 'halo' with remat=True")
    assert not advise(mesh(), model(), 2, memory="1GB", method="range").options  # one piece
    for other in (pyg.GAT(16, 32, 2, 4), pyg.GraphSAGE(16, 32, 2, 4, aggr="max")):
        found = advise(large, other, 2, memory="1GB", method="range")
        assert found.method == "halo" and not found.options, "it would compute again"
    # A rank has 100 halo nodes and 44,400 edges of 144 bytes. What goes forward may go again, which
    # takes as long as pieces gain, 0.2 ns for each byte of messages to and fro, at 5.6 MB/s.
    for bandwidth, expected in (("6MB", {"remat": True}), ("5MB", {})):
        found = advise(large, model(), 2, memory="1GB", method="range", bandwidth=bandwidth)
        assert found.options == expected, bandwidth


def test_bad_input() -> None:
    with pytest.raises(TypeError, match="must be a Data with x"):
        advise(HeteroData(), model(), 2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="world must be at least 1"):
        advise(mesh(), model(), 0)
    assert "one rank" in str(advise(mesh(), model(), 1))
