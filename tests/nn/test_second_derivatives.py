"""Gradients of gradients, as gradient penalties take them, are those of PyG's layers."""

import pytest
import torch
import torch_geometric.nn

from pyg_scale import nn
from pyg_scale.nn import accelerate, fallbacks
from pyg_scale.testing import graphs
from tests.nn.oracle import distance, pair

pytestmark = pytest.mark.usefixtures("products")

LAYERS = {
    "gcn": (nn.GCNConv, lambda cls: cls(6, 4), "edge_weight"),
    "sage": (nn.SAGEConv, lambda cls: cls(6, 4, project=True, normalize=True), None),
    "sage max": (nn.SAGEConv, lambda cls: cls(6, 4, aggr="max"), None),
    "graph": (nn.GraphConv, lambda cls: cls(6, 4), "edge_weight"),
    "graph mean": (nn.GraphConv, lambda cls: cls(6, 4, aggr="mean"), "edge_weight"),
    "graph min": (nn.GraphConv, lambda cls: cls(6, 4, aggr="min"), "edge_weight"),
    "gin": (nn.GINConv, lambda cls: cls(torch.nn.Linear(6, 4), train_eps=True), None),
    "gat": (nn.GATConv, lambda cls: cls(6, 4, heads=2, edge_dim=3), "edge_attr"),
    "gatv2": (nn.GATv2Conv, lambda cls: cls(6, 4, heads=2, edge_dim=3), "edge_attr"),
    "gatv2 shared": (nn.GATv2Conv, lambda cls: cls(6, 4, heads=2, share_weights=True), None),
    "transformer": (nn.TransformerConv, lambda cls: cls(6, 4, heads=2, edge_dim=3), "edge_attr"),
    "rgcn": (nn.RGCNConv, lambda cls: cls(6, 4, 3), "edge_type"),
}


def penalty(layer, kind, edge_index):
    """The gradients of the squares of all gradients of a layer."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(100, 6, dtype=torch.float64, generator=generator, requires_grad=True)
    inputs, more = [x], {}
    if kind == "edge_type":
        more = {kind: torch.arange(edge_index.size(1)) % 3}
    elif kind:
        shape = (edge_index.size(1), 3) if kind == "edge_attr" else (edge_index.size(1),)
        of_edges = torch.rand(shape, dtype=torch.float64, generator=generator) + 0.5
        inputs.append(of_edges.requires_grad_())
        more = {kind: of_edges}
    inputs += layer.parameters()
    out = layer(x, edge_index, **more)
    first = torch.autograd.grad(out.tanh().pow(2).sum(), inputs, create_graph=True)
    return torch.autograd.grad(
        sum(g.pow(2).sum() for g in first), inputs, allow_unused=True, materialize_grads=True
    )


@pytest.mark.parametrize("name", LAYERS)
def test_they_are_those_of_pyg(name):
    conv, build, kind = LAYERS[name]
    # Parallel loops share a gradient in PyG's gcn_norm, though the last alone counts.
    edge_index = torch.unique(graphs.hostile().edge_index, dim=1).flip(1)
    theirs, ours = pair(conv, build)
    found = [penalty(layer, kind, edge_index) for layer in (theirs, ours)]
    assert not fallbacks(ours)
    floor = max(float(g.norm()) for g in found[0]) / 10
    for mine, right in zip(found[1], found[0], strict=True):
        assert distance(mine, right, floor) < 1e-10


@pytest.mark.parametrize("aggr", ["max", "min"])
@pytest.mark.parametrize("layer", [torch_geometric.nn.SAGEConv, torch_geometric.nn.GraphConv])
def test_extremes_of_no_sources(layer, aggr, fused_at_any_size):
    """The result does not depend on them, yet their gradients are zeros, as PyG's are."""
    edge_index = torch.empty(2, 0, dtype=torch.int64)
    x, root = torch.empty(0, 8), torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    x, root = x.double().requires_grad_(), root.double().requires_grad_()
    conv, found = layer((8, 8), 4, aggr=aggr).double(), []
    for _ in range(2):
        out = conv((x, root), edge_index).sin().sum()
        first = torch.autograd.grad(out, [x, root], create_graph=True)
        assert first[0].shape == (0, 8)
        found.append(torch.autograd.grad(first[1].pow(2).sum(), root)[0])
        accelerate(conv)
    assert distance(found[1], found[0]) < 1e-12


MANY = {
    "sage": lambda: torch_geometric.nn.SAGEConv(8, 2),
    "graph": lambda: torch_geometric.nn.GraphConv(8, 2),
    "gin": lambda: torch_geometric.nn.GINConv(torch.nn.Linear(8, 2)),
    "steps": lambda: torch_geometric.nn.EdgeConv(torch.nn.Linear(16, 2)),
    "two sets": lambda: torch_geometric.nn.SAGEConv((8, 8), 2),
}


@pytest.mark.parametrize("name", MANY)
def test_many_gradients_at_once(name, monkeypatch):
    monkeypatch.setattr("pyg_scale.nn.linear._MIN_MACS", 0)
    edge_index = graphs.hostile().edge_index
    x = torch.randn(100, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    layer, x = MANY[name]().double(), x.requires_grad_()
    if name == "two sets":
        edge_index = torch.stack([edge_index[0], edge_index[1] % 30])
    found = []
    for _ in range(2):
        out = layer((x, x[:30] * 1) if name == "two sets" else x, edge_index)
        many = torch.randn(3, *out.shape, generator=torch.Generator().manual_seed(2)).double()
        inputs = [x, *layer.parameters()]
        found.append(torch.autograd.grad(out, inputs, many, is_grads_batched=True))
        accelerate(layer)
    assert not fallbacks(layer)
    floor = max(float(g.norm()) for g in found[0]) / 10
    for mine, right in zip(*found[::-1], strict=True):
        assert not mine.requires_grad and distance(mine, right, floor) < 1e-10
