"""Every layer of ``torch_geometric.nn.conv``, with arguments that make it and run it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

Inputs = tuple[Any, ...]


class Example(NamedTuple):
    """One layer of PyG, and how it is called.

    Attributes:
        make: Makes the layer for a number of channels, a multiple of 4, of input and output.
        inputs: The arguments of ``forward``, from features ``[num_nodes, channels]`` and edges.
    """

    make: Callable[[int], nn.Module]
    inputs: Callable[[Tensor, Tensor], Inputs] = lambda x, edge_index: (x, edge_index)


def random(like: Tensor, *shape: int) -> Tensor:
    """Positive numbers of the type of ``like``, the same in every call."""
    generator = torch.Generator().manual_seed(7)
    return torch.rand(shape, generator=generator, dtype=torch.float64).to(like.dtype) + 0.1


def _weighted(x: Tensor, edges: Tensor) -> Inputs:
    return x, edges, random(x, edges.size(1))


def featured(x: Tensor, edges: Tensor) -> Inputs:
    """Features, edges, and as many numbers for each edge as for each node."""
    return x, edges, random(x, edges.size(1), x.size(-1))


def _typed(x: Tensor, edges: Tensor) -> Inputs:
    return x, edges, torch.arange(edges.size(1)) % 3


def _positions(x: Tensor, edges: Tensor) -> Inputs:
    return x, random(x, x.size(0), 3), edges


def _normals(x: Tensor, edges: Tensor) -> Inputs:
    return x, random(x, x.size(0), 3), random(x, x.size(0), 3).flip(0), edges


def _mlp(sizes: list[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for wide, narrow in pairwise(sizes):
        layers += [nn.Linear(wide, narrow), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class _Gat(nn.Module):
    """One relation of a heterogeneous layer, as a layer of two plain arguments."""

    def __init__(self, make: Callable[[Any], nn.Module], channels: int) -> None:
        super().__init__()
        self.layer = make((["n"], [("n", "to", "n")]))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.layer({"n": x}, {("n", "to", "n"): edge_index})["n"]
        return out


LAYERS: dict[str, Example] = {
    "SimpleConv": Example(lambda c: pyg.SimpleConv(), _weighted),
    "GCNConv": Example(lambda c: pyg.GCNConv(c, c), _weighted),
    "ChebConv": Example(lambda c: pyg.ChebConv(c, c, K=3), _weighted),
    "SAGEConv": Example(lambda c: pyg.SAGEConv(c, c)),
    "GraphConv": Example(lambda c: pyg.GraphConv(c, c), _weighted),
    "GatedGraphConv": Example(lambda c: pyg.GatedGraphConv(c, 2), _weighted),
    "ResGatedGraphConv": Example(lambda c: pyg.ResGatedGraphConv(c, c)),
    "GATConv": Example(lambda c: pyg.GATConv(c, c // 4, 4)),
    "GATv2Conv": Example(lambda c: pyg.GATv2Conv(c, c // 4, 4)),
    "TransformerConv": Example(lambda c: pyg.TransformerConv(c, c // 4, 4)),
    "AGNNConv": Example(lambda c: pyg.AGNNConv()),
    "TAGConv": Example(lambda c: pyg.TAGConv(c, c), _weighted),
    "GINConv": Example(lambda c: pyg.GINConv(_mlp([c, c, c]))),
    "GINEConv": Example(lambda c: pyg.GINEConv(_mlp([c, c])), featured),
    "ARMAConv": Example(lambda c: pyg.ARMAConv(c, c, num_stacks=2), _weighted),
    "SGConv": Example(lambda c: pyg.SGConv(c, c, K=2), _weighted),
    "SSGConv": Example(lambda c: pyg.SSGConv(c, c, alpha=0.1, K=2), _weighted),
    "APPNP": Example(lambda c: pyg.APPNP(K=3, alpha=0.1), _weighted),
    "MFConv": Example(lambda c: pyg.MFConv(c, c, max_degree=3)),
    "RGCNConv": Example(lambda c: pyg.RGCNConv(c, c, 3), _typed),
    "FastRGCNConv": Example(lambda c: pyg.FastRGCNConv(c, c, 3), _typed),
    "RGATConv": Example(lambda c: pyg.RGATConv(c, c, 3), _typed),
    "SignedConv": Example(
        lambda c: pyg.SignedConv(c, c, first_aggr=True), lambda x, e: (x, e, e[:, ::2])
    ),
    "DNAConv": Example(
        lambda c: pyg.DNAConv(c, heads=2),
        lambda x, e: (torch.stack([x, x.flip(0)], 1), e, random(x, e.size(1))),
    ),
    "PointNetConv": Example(lambda c: pyg.PointNetConv(_mlp([c + 3, c])), _positions),
    "GMMConv": Example(lambda c: pyg.GMMConv(c, c, dim=3, kernel_size=2), lambda x, e: (
        x, e, random(x, e.size(1), 3)
    )),
    "NNConv": Example(lambda c: pyg.NNConv(c, c, _mlp([2, c * c])), lambda x, e: (
        x, e, random(x, e.size(1), 2)
    )),
    "CGConv": Example(lambda c: pyg.CGConv(c, dim=c), featured),
    "EdgeConv": Example(lambda c: pyg.EdgeConv(_mlp([2 * c, c, c]))),
    "PPFConv": Example(lambda c: pyg.PPFConv(_mlp([c + 4, c])), _normals),
    "FeaStConv": Example(lambda c: pyg.FeaStConv(c, c, heads=2)),
    "PointTransformerConv": Example(lambda c: pyg.PointTransformerConv(c, c), _positions),
    "HypergraphConv": Example(lambda c: pyg.HypergraphConv(c, c)),
    "LEConv": Example(lambda c: pyg.LEConv(c, c), _weighted),
    "PNAConv": Example(
        lambda c: pyg.PNAConv(
            c, c, ["mean", "max", "std"], ["identity", "amplification"], torch.tensor([1, 2, 3, 2])
        )
    ),
    "ClusterGCNConv": Example(lambda c: pyg.ClusterGCNConv(c, c)),
    "GENConv": Example(lambda c: pyg.GENConv(c, c, norm="layer", edge_dim=c), featured),
    "GCN2Conv": Example(lambda c: pyg.GCN2Conv(c, 0.1), lambda x, e: (
        x, x.flip(0), e, random(x, e.size(1))
    )),
    "WLConvContinuous": Example(lambda c: pyg.WLConvContinuous(), _weighted),
    "FiLMConv": Example(lambda c: pyg.FiLMConv(c, c, num_relations=3), _typed),
    "SuperGATConv": Example(lambda c: pyg.SuperGATConv(c, c // 4, 4)),
    "FAConv": Example(lambda c: pyg.FAConv(c), lambda x, e: (x, x.flip(0), e)),
    "EGConv": Example(lambda c: pyg.EGConv(c, c, ["symnorm", "max", "std"], 4)),
    "PDNConv": Example(lambda c: pyg.PDNConv(c, c, c, 8), featured),
    "GeneralConv": Example(lambda c: pyg.GeneralConv(c, c, c, attention=True), featured),
    "HGTConv": Example(lambda c: _Gat(lambda meta: pyg.HGTConv(c, c, meta, heads=4), c)),
    "HEATConv": Example(
        lambda c: pyg.HEATConv(c, c, 3, 3, 4, c, 4, heads=2),
        lambda x, e: (
            x, e, torch.arange(x.size(0)) % 3, torch.arange(e.size(1)) % 3,
            random(x, e.size(1), x.size(-1)),
        ),
    ),
    "HeteroConv": Example(
        lambda c: _Gat(lambda meta: pyg.HeteroConv({meta[1][0]: pyg.SGConv(c, c)}), c)
    ),
    "HANConv": Example(lambda c: _Gat(lambda meta: pyg.HANConv(c, c, meta, heads=4), c)),
    "LGConv": Example(lambda c: pyg.LGConv(), _weighted),
    "PointGNNConv": Example(
        lambda c: pyg.PointGNNConv(_mlp([c, 3]), _mlp([c + 3, c]), _mlp([c, c])), _positions
    ),
    "GPSConv": Example(
        lambda c: pyg.GPSConv(c, pyg.GCNConv(c, c), heads=2, norm=None, attn_type="performer")
    ),
    "AntiSymmetricConv": Example(lambda c: pyg.AntiSymmetricConv(c)),
    "DirGNNConv": Example(lambda c: pyg.DirGNNConv(pyg.SAGEConv(c, c))),
    "MixHopConv": Example(lambda c: pyg.MixHopConv(c, c), _weighted),
}  # fmt: skip
"""Every layer that PyPI's packages can run on any graph, by name."""

MATRIX_PER_EDGE = ("FastRGCNConv", "NNConv", "RGATConv")
"""The layers that multiply with a matrix of channels times channels for every edge."""

OTHERS: dict[str, str] = {
    "MessagePassing": "the base class",
    "CuGraphSAGEConv": "needs cugraph-ops, which is no longer released",
    "CuGraphGATConv": "needs cugraph-ops, which is no longer released",
    "CuGraphRGCNConv": "needs cugraph-ops, which is no longer released",
    "FusedGATConv": "needs dgNN, which is not on PyPI",
    "GravNetConv": "looks for nearest neighbours with torch-cluster, which is not on PyPI",
    "DynamicEdgeConv": "looks for nearest neighbours with torch-cluster, which is not on PyPI",
    "XConv": "looks for nearest neighbours with torch-cluster, which is not on PyPI",
    "SplineConv": "computes splines with pyg-lib, which is not on PyPI",
    "PANConv": "multiplies sparse matrices with torch-sparse, which is not on PyPI",
    "WLConv": "colours nodes with integers, without messages",
    "MeshCNNConv": "runs on edges of meshes only, each with four neighbours",
}
"""Every other name of ``torch_geometric.nn.conv``, and why it is none of :data:`LAYERS`."""
