"""Whole layers, with their linear maps: ours beside PyG's with the same parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor, nn

import pyg_scale.nn
from pyg_scale.cli.bench.conv_cases import OURS, PYG, Case, Graph, step

RELATIONS = 8

_Build = Callable[[type, int, int], nn.Module]
_BUILD: dict[str, _Build] = {
    "GCNConv": lambda cls, channels, heads: cls(channels, channels),
    "SAGEConv": lambda cls, channels, heads: cls(channels, channels),
    "GINConv": lambda cls, channels, heads: cls(
        nn.Sequential(nn.Linear(channels, channels), nn.ReLU(), nn.Linear(channels, channels))
    ),
    "GraphConv": lambda cls, channels, heads: cls(channels, channels),
    "GATConv": lambda cls, channels, heads: cls(channels, channels // heads, heads),
    "GATv2Conv": lambda cls, channels, heads: cls(channels, channels // heads, heads),
    "TransformerConv": lambda cls, channels, heads: cls(channels, channels // heads, heads),
    "RGCNConv": lambda cls, channels, heads: cls(channels, channels, RELATIONS),
}

LAYERS = tuple(_BUILD)
"""Every layer, by name."""


def layer_cases(graph: Graph, channels: int, heads: int, names: Sequence[str]) -> list[Case]:
    """Every layer on a graph, forward alone and with gradients of features and parameters.

    On a block, destinations are the first of the sources, as in a loader's batch that is trimmed;
    ``GCNConv``, which has one set of nodes, gets all of them.

    Args:
        graph: The edges.
        channels: Of the features and of the result, all heads together.
        heads: Of attention.
        names: Of :data:`LAYERS`.
    """
    found = []
    for name in names:
        theirs = _BUILD[name](getattr(torch_geometric.nn, name), channels, heads)
        ours = _BUILD[name](getattr(pyg_scale.nn, name), channels, heads)
        ours.load_state_dict(theirs.state_dict())
        x = torch.randn(graph.num_src, channels)
        rest: tuple[Tensor, ...] = ()
        if name == "RGCNConv":
            rest = (torch.randint(RELATIONS, (graph.num_edges,)),)
        pair = graph.num_src != graph.num_dst and name != "GCNConv"
        gradient: list[Tensor] = []  # the same for both sides
        for backward in (False, True):
            for side, layer in ((OURS, ours), (PYG, theirs)):
                run = _call(layer, graph, pair, rest)
                inputs = [x, *layer.parameters()]
                once = step(run, inputs, gradient, backward)
                row = channels * x.element_size()
                found.append(Case(name, graph.name, backward, side, 0, row, graph.num_edges, once))
    return found


def _call(
    layer: nn.Module, graph: Graph, pair: bool, rest: tuple[Tensor, ...]
) -> Callable[..., Any]:
    def run(x: Tensor, *parameters: Tensor) -> Any:
        features = (x, x[: graph.num_dst]) if pair else x
        return layer(features, graph.fresh_edge_index(), *rest)

    return run
