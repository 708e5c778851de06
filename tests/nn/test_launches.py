"""Kernels that a layer launches on CUDA for a block that it sees for the first time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.nn
from torch import Tensor

import pyg_scale.nn
from pyg_scale.nn import fallbacks
from pyg_scale.ops import colptr
from tests.nn.on_cuda import Launches, on_cuda

NODES, EXPANDED, EDGES = 90, 30, 400  # more than a chunk: a row may be long

LAYERS: dict[str, Callable[[Any], Any]] = {
    "sage": lambda nn: nn.SAGEConv(8, 4),
    "sage max": lambda nn: nn.SAGEConv(8, 4, aggr="max"),
    "gcn": lambda nn: nn.GCNConv(8, 4),
    "gin": lambda nn: nn.GINConv(torch.nn.Linear(8, 4)),
    "graph": lambda nn: nn.GraphConv(8, 4),
    "gat": lambda nn: nn.GATConv(8, 4, heads=2),
    "gatv2": lambda nn: nn.GATv2Conv(8, 4, heads=2),
    "transformer": lambda nn: nn.TransformerConv(8, 4, heads=2),
}


def block(seed: int, order: str) -> Tensor:
    """Edges into the first nodes, with loops, as a sampler emits them or in any order."""
    generator = torch.Generator().manual_seed(seed)
    src = torch.randint(NODES, (EDGES,), generator=generator)
    dst = torch.randint(EXPANDED, (EDGES,), generator=generator)
    src[:9] = dst[:9]
    if order == "any":
        return torch.stack([src, dst])
    edge_index = torch.stack([src, dst.sort().values])
    colptr.remember(edge_index, torch.searchsorted(edge_index[1], torch.arange(EXPANDED + 1)))
    return edge_index


def step(
    layer: torch.nn.Module, deep: bool, edge_index: Tensor, launched: Launches | None = None
) -> tuple[list[Tensor], list[int]]:
    """The results and gradients of a layer, and what had been launched after each pass."""
    x = torch.randn(NODES, 8, generator=torch.Generator().manual_seed(7)).requires_grad_(deep)
    inputs = [*layer.parameters(), *([x] if deep else [])]
    ends = []
    names = [] if launched is None else launched.names
    names.clear()
    out = layer(x, edge_index)
    ends.append(len(names))
    gradient = torch.linspace(-1, 1, out.numel()).view_as(out)
    names.clear()
    found = torch.autograd.grad(out, inputs, gradient)
    ends.append(len(names))
    return [out.detach(), *found], ends


def pair(name: str) -> list[Any]:
    layers = []
    for nn in (torch_geometric.nn, pyg_scale.nn):
        torch.manual_seed(1)
        layers.append(LAYERS[name](nn))
    return layers


CHEAPER = {"sage", "gcn", "gat", "gatv2", "transformer"}
"""Layers of which PyG's path has more kernels than grouping the edges takes."""
OF_GROUPING = 2


@pytest.mark.parametrize("order", ["a sampler's", "any"])
@pytest.mark.parametrize("deep", [False, True], ids=["first layer", "deeper layer"])
@pytest.mark.parametrize("name", LAYERS)
def test_no_more_kernels_than_pyg_and_nobody_waits(name, deep, order, monkeypatch):
    theirs, ours = pair(name)
    edge_index = block(3, order)
    expected, _ = step(theirs, deep, edge_index)
    with on_cuda(monkeypatch) as launched:
        of_pyg = step(theirs, deep, edge_index, launched)[1]
        launched.waits = 0
        found, counted = step(ours, deep, edge_index, launched)
        waits = launched.waits
    assert not fallbacks(ours)
    assert waits == 0
    more = 0 if name in CHEAPER else OF_GROUPING
    assert counted[0] <= of_pyg[0] + more, "forward"
    assert sum(counted) <= sum(of_pyg) + more, "forward and backward"
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
