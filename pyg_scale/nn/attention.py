"""The common parts of layers with attention: their edges, self-loops and edge features."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.utils import add_self_loops, remove_self_loops

from pyg_scale.nn.aggregation import reductions
from pyg_scale.nn.conv.base import check_features
from pyg_scale.nn.fallback import RECORDED, NotFused
from pyg_scale.nn.graph import edges_of, is_sparse
from pyg_scale.nn.loops import with_self_loops, with_self_loops_in_a_trace
from pyg_scale.ops.adjacency import Adjacency, recording


class Attended(NamedTuple):
    """The edges over which a layer computes attention."""

    graph: Adjacency
    edge_index: Tensor
    """``[2, num_edges]``, as PyG's layer returns it with attention weights."""
    edge_attr: Tensor | None
    """``[num_edges, edge_dim]``, by edge id."""
    num_dst: int
    """Number of destinations; in a recorded run, ``graph`` may have one more as a dummy."""

    def padded(self, x: Tensor) -> Tensor:
        """Rows of destinations, with one for the dummy if the graph has it."""
        if self.graph.num_dst == self.num_dst:
            return x
        return torch.cat([x, x.new_zeros(1, *x.shape[1:])])


def attended(
    layer: Any,
    edge_index: Any,
    edge_attr: Tensor | None,
    x: tuple[Tensor, Tensor | None],
    size: tuple[int, int] | None = None,
    *,
    add_loops: bool = False,
    keep_edge_index: bool = False,
) -> Attended:
    """The edges of a layer with attention.

    Args:
        layer: A layer of PyG.
        edge_index: The edges passed to the layer, in any form.
        edge_attr: Features of edges, ``[num_edges, edge_dim]`` or ``[num_edges]``.
        x: Features of sources and, if there are any, of destinations.
        size: ``(num_src, num_dst)``, or ``None``.
        add_loops: If True, replace self-loops by one for each node on both sides, with
            ``layer.fill_value``.
        keep_edge_index: True if ``edge_index`` of the result is needed.

    Raises:
        NotFused: If the call is not covered.
        ValueError: If sizes do not fit, as in PyG.
    """
    src, dst = x
    if src is None:
        raise NotFused("no features of sources")
    check_features(src, dst)
    if reductions(layer) != ["sum"]:
        raise NotFused(f"aggr={layer.aggr}")
    if layer.flow != "source_to_target":
        raise NotFused("flow='target_to_source'")
    if is_sparse(edge_index):
        raise NotFused("attention over a sparse matrix")
    sizes = layer._check_input(edge_index, size)
    layer._set_size(sizes, 0, src)
    if dst is not None:
        layer._set_size(sizes, 1, dst)
    num_src, num_dst = src.size(0), sizes[1] if sizes[1] is not None else sizes[0]
    if edge_attr is not None:
        if edge_attr.size(0) != edge_index.size(1) or edge_attr.dim() not in (1, 2):
            raise NotFused("edge_attr is not of shape [num_edges, edge_dim]")
        if edge_attr.dim() == 1:
            edge_attr = edge_attr.view(-1, 1)
    if not add_loops:
        graph = edges_of(edge_index, num_src, num_dst)
        return Attended(graph, edge_index, edge_attr, num_dst)
    num_loops = min(size) if size is not None else min(num_src, num_dst)
    if recording():
        if edge_attr is not None or keep_edge_index:
            raise NotFused(f"{RECORDED}: self-loops and edge_attr or attention weights")
        graph = with_self_loops_in_a_trace(edge_index, num_src, num_dst, num_loops)
        return Attended(graph, edge_index, None, num_dst)
    graph = with_self_loops(edges_of(edge_index, num_src, num_dst), num_loops).by_edge
    if edge_attr is not None or keep_edge_index:
        edge_index, edge_attr = remove_self_loops(edge_index, edge_attr)
        edge_index, edge_attr = add_self_loops(
            edge_index, edge_attr, fill_value=layer.fill_value, num_nodes=num_loops
        )
    return Attended(graph, edge_index, edge_attr, num_dst)


def heads_joined(layer: Any, out: Tensor) -> Tensor:
    """``[num_dst, heads, channels]`` with heads concatenated or averaged, as the layer does."""
    if layer.concat:
        return out.reshape(-1, layer.heads * layer.out_channels)
    return out.mean(dim=1)
