"""Refuse what cannot be computed exactly from a node and its in-neighbours."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch_geometric import nn as pyg
from torch_geometric.data import Data

from pyg_scale.inference.grid import Layout
from pyg_scale.inference.inputs import Graph, LayerInputs
from pyg_scale.inference.partial import NotStreamed
from pyg_scale.inference.streaming import Cut, Streaming
from pyg_scale.loader.node_loader import NodeLoader
from pyg_scale.ops import keys

_OVER_THE_GRAPH = {
    "GraphNorm",
    "PairNorm",
    "GraphSizeNorm",
    "MeanSubtractionNorm",
}
_SEVERAL_HOPS = {
    "APPNP",
    "ARMAConv",
    "AntiSymmetricConv",
    "ChebConv",
    "ClusterGCNConv",
    "DNAConv",
    "DirGNNConv",
    "DynamicEdgeConv",
    "FAConv",
    "GCN2Conv",
    "GPSConv",
    "GatedGraphConv",
    "GravNetConv",
    "HypergraphConv",
    "LGConv",
    "LabelPropagation",
    "MixHopConv",
    "PANConv",
    "PDNConv",
    "SGConv",
    "SSGConv",
    "TAGConv",
    "WLConv",
    "WLConvContinuous",
    "XConv",
}
_PROBES, _CANDIDATES = 16, 1024


def check_modules(model: Any, normalised: set[int]) -> None:
    """Refuse modules that are known to need more than in-neighbours.

    Args:
        model: The model.
        normalised: The ids of layers whose normalisation is taken care of.

    Raises:
        NotImplementedError: Names the module.
    """
    for name, module in model.named_modules():
        reason = _why_not(module, normalised)
        if reason:
            raise NotImplementedError(
                f"{type(module).__name__} ({name or 'the model'}) {reason}; layerwise_inference "
                "would give other numbers than the model"
            )


def _why_not(module: Any, normalised: set[int]) -> str:
    name = type(module).__name__
    if name in _OVER_THE_GRAPH:
        return "normalises over all nodes of the graph"
    if isinstance(module, pyg.LayerNorm) and module.mode == "graph":
        return 'normalises over all nodes of the graph: use norm_kwargs={"mode": "node"}'
    if isinstance(module, _BatchNorm | _InstanceNorm) and not module.track_running_stats:
        return "normalises over the nodes of a batch: use track_running_stats=True"
    if name in _SEVERAL_HOPS:
        return "needs more than the in-neighbours of a node"
    if isinstance(module, pyg.GCNConv) and module.normalize and id(module) not in normalised:
        return (
            "normalises by the degrees of neighbours, which a block does not know: use "
            "normalize=False with weights, or a BasicGNN such as GCN"
        )
    if isinstance(module, pyg.MessagePassing) and module.flow != "source_to_target":
        return f"has flow={module.flow!r}, but a block holds in-edges"
    return ""


def check_one_hop(
    graph: Any,
    layers: Any,
    step: int,
    data: Any,
    inputs: Any,
    to_block: Callable[[Any], Any],
    degrees: Any,
) -> None:
    """Refuse a layer whose output for some nodes depends on what else is in their block.

    Some nodes are computed twice: among others, and, with other nodes and with neighbours of
    neighbours, as part of a larger block. A layer that is a function of in-neighbours gives the
    same, one that counts degrees, normalises over a batch, or draws random numbers does not.

    Raises:
        NotImplementedError: Names the layer.
    """
    first, second = _probes(graph)
    half = first.numel() // 2
    if not half:
        return
    options: dict[str, Any] = {"feature_store": inputs, "seed": 0}
    rows = []
    for sampler, nodes in (
        (graph.sampler(), first),
        (graph.wider_sampler(), torch.cat([first[:half], second])),
    ):
        (batch,) = NodeLoader(data, sampler, nodes, **options | _whole(nodes))
        rows.append(layers.run(step, to_block(batch), degrees)[:half].to(torch.float64))
    tolerance = math.sqrt(torch.finfo(layers.real).eps)
    size = float(rows[0].abs().nan_to_num().amax()) if rows[0].numel() else 0.0
    one, other = rows
    if not torch.allclose(one, other, rtol=tolerance, atol=tolerance * size, equal_nan=True):
        raise NotImplementedError(
            f"{layers.describe(step)} gives other numbers for the same nodes in another block: it "
            "depends on more than a node and its in-neighbours (on degrees of neighbours, on all "
            "nodes of a batch, or on chance), so it cannot be computed layer by layer"
        )


def check_pieces(
    graph: Any, layers: Any, step: int, data: Any, inputs: Any, to_block: Any, degrees: Any
) -> None:
    """Refuse to stream a layer that gives other numbers from pieces of its edges.

    Some nodes are computed from all of their edges at once, and from these in pieces.

    Raises:
        NotStreamed: Says what is different.
    """
    nodes, _ = _probes(graph)
    if not nodes.numel():
        return
    (batch,) = NodeLoader(
        data, graph.sampler(), nodes, feature_store=inputs, seed=0, **_whole(nodes)
    )
    block = to_block(batch)
    one = layers.run(step, block, degrees).to("cpu", torch.float64)
    inner = None if degrees is None else degrees[block.n_id.cpu()]
    try:
        layer = layers.streamed(step, inner)
        small = Data(x=block.x.cpu(), edge_index=block.edge_index.cpu(), num_nodes=block.num_nodes)
        if layer.attr is not None:
            small[layer.attr] = block[layer.attr].cpu()
        whole = Graph(small, [] if layer.attr is None else [layer.attr])
        size, num_src = nodes.numel(), int(block.num_nodes)
        layout = Layout(0, size, num_src, -(-size // 2), -(-num_src // 3))
        with tempfile.TemporaryDirectory() as folder:
            inputs = LayerInputs(whole, None, layers.real)
            rows = Streaming(
                whole,
                layer,
                inputs,
                inputs,
                range(size),
                memory=1 << 20,
                folder=Path(folder) / "edges",
                device=block.x.device,
                cut=Cut(layout, 5, 3),
            ).rows(0, 0)
            other = torch.cat([each.to("cpu", torch.float64) for each in rows])
    except NotStreamed:
        raise
    except Exception as error:  # the layer as it is raises its own
        raise NotStreamed(f"it raised {error!r} on a piece of its edges") from error
    tolerance = math.sqrt(torch.finfo(layers.real).eps)
    size_of = float(one.abs().nan_to_num().amax()) if one.numel() else 0.0
    if one.shape != other.shape or not torch.allclose(
        one, other, rtol=tolerance, atol=tolerance * size_of, equal_nan=True
    ):
        raise NotStreamed("it gives other numbers from pieces of its edges")


def _whole(nodes: Tensor) -> dict[str, Any]:
    """One batch, which is not shared with other ranks."""
    return {"batch_size": nodes.numel(), "sampler": range(nodes.numel())}


def _probes(graph: Any) -> tuple[Tensor, Tensor]:
    """Nodes with few in-edges but some, whose blocks are small, and others."""
    size = graph.num_nodes
    if not size:
        return torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
    index = torch.arange(min(_CANDIDATES, 4 * size))
    drawn = keys.bounded(torch.tensor(0x5EED), index, torch.tensor(size)).unique()
    degree = graph.degree(drawn)
    order = drawn[degree > 0][degree[degree > 0].argsort(stable=True)]
    return order[:_PROBES], order[_PROBES : 2 * _PROBES + 5]
