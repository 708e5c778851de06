"""All edges of some nodes of a graph in parts, asked of whoever has them."""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_scale.graph.topology import EdgeType, Topology
from pyg_scale.sampler.choose import Ask


class RoutedEdges:
    """The edges of a type, reached through the router of a graph.

    Args:
        graph: A graph with a router.
        edge_type: One of its edge types.
    """

    def __init__(self, graph: Topology, edge_type: EdgeType) -> None:
        from pyg_scale.sampler.native import NativeSampler  # which needs this package

        self._router, self._edge_type = graph.router, edge_type
        self._sampler = NativeSampler()
        self.out = graph.direction == "backward"
        """True if these are the out-edges of nodes."""
        self._num_others = graph.num_nodes[graph.neighbor_type(edge_type)]

    def of(self, node: Tensor) -> tuple[Tensor, Tensor]:
        """The edges of distinct nodes: the place of each in ``node``, and its other end."""
        assert self._router is not None
        ask = Ask(self._edge_type, 0, -1, 0, node, None, None)
        (picked,) = self._router.expand(self._sampler, [ask])
        place = torch.arange(node.numel()).repeat_interleave(picked.counts)
        return place, picked.neighbor

    def contain(self, src: Tensor, dst: Tensor) -> Tensor:
        """For each pair of nodes, True if there is an edge, ``bool`` ``[n]``."""
        node, other = (src, dst) if self.out else (dst, src)
        distinct, inverse = torch.unique(node, return_inverse=True)
        place, neighbor = self.of(distinct)
        size = max(1, self._num_others)
        return torch.isin(inverse * size + other, place * size + neighbor)
