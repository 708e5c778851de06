"""The common parts of layers with attention: their edges, self-loops and edge features."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.nn.aggr import SumAggregation
from torch_geometric.utils import add_self_loops, remove_self_loops

from pyg_scale.nn.aggregation import reductions
from pyg_scale.nn.conv.base import check_features, untouched
from pyg_scale.nn.fallback import RECORDED, NotFused
from pyg_scale.nn.graph import edges_of, is_sparse
from pyg_scale.nn.loops import looped_edges, with_self_loops_in_a_trace
from pyg_scale.ops import fused
from pyg_scale.ops.adjacency import Adjacency, recording
from pyg_scale.ops.attention import run_attention

_PLAIN = (Tensor, torch.nn.Parameter)
_WIDE = (torch.float32, torch.float64)
_FEW = 4096
"""Number of edges up to which grouping them takes no longer than to look the groups up."""


class Attended(NamedTuple):
    """The edges over which a layer computes attention."""

    graph: Adjacency
    edge_index: Tensor
    """``[2, num_edges]``, as PyG's layer returns it with attention weights."""
    edge_attr: Tensor | None
    """``[num_edges, edge_dim]``, by edge id."""
    num_dst: int
    """Number of destinations; in a recorded run and on CUDA ``graph`` may have a dummy more."""

    def padded(self, x: Tensor) -> Tensor:
        """Rows of destinations, with one for the dummy if the graph has it."""
        if self.graph.num_dst == self.num_dst:
            return x
        return torch.cat([x, x.new_zeros(1, *x.shape[1:])])

    def unpadded(self, x: Tensor) -> Tensor:
        """Rows without that of the dummy. A slice that has them all would be copied backward."""
        return x if self.graph.num_dst == self.num_dst else x[: self.num_dst]


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
    numbered = edge_attr is not None or keep_edge_index
    graph = looped_edges(edge_index, num_src, num_dst, num_loops, numbered=numbered)
    if numbered:
        edge_index, edge_attr = remove_self_loops(edge_index, edge_attr)
        edge_index, edge_attr = add_self_loops(
            edge_index, edge_attr, fill_value=layer.fill_value, num_nodes=num_loops
        )
    return Attended(graph, edge_index, edge_attr, num_dst)


def is_plain(layer: Any, src: Any, dst: Any, edge_index: Any) -> bool:
    """Return True for a call with a few edges that needs no more checks: :func:`attend` takes it.

    Args:
        layer: A layer of PyG.
        src: Features of sources.
        dst: Features of destinations.
        edge_index: The edges passed to the layer.
    """
    return (
        type(edge_index) is Tensor
        and type(src) in _PLAIN
        and type(dst) in _PLAIN
        and edge_index.dim() == src.dim() == dst.dim() == 2
        and edge_index.is_cpu
        and src.is_cpu
        and dst.is_cpu
        and edge_index.dtype is torch.int64
        and src.dtype is dst.dtype
        and src.dtype in _WIDE
        and edge_index.size(0) == 2
        and edge_index.size(1) <= _FEW
        and layer.flow == "source_to_target"
        and type(layer.aggr_module) is SumAggregation
        and untouched(layer.aggr_module, SumAggregation)
        and fused.is_eager()
        and not torch.is_autocast_enabled("cpu")
        and fused.usable(src)
    )


def attend(
    kind: str,
    edge_index: Tensor,
    src: Tensor,
    dst: Tensor,
    add_loops: bool,
    numbers: tuple[float, float],
    features: tuple[Tensor | None, ...],
) -> Tensor:
    """The attention of a layer over a few edges, with as little as possible around the ops.

    The result has the bits of :func:`attended` and the function of
    :mod:`pyg_scale.ops.attention`. Nothing is looked up or kept: grouping takes no longer.

    Args:
        kind: ``"gat"``, ``"gatv2"`` or ``"dot_product"``.
        edge_index: ``int64`` ``[2, num_edges]``.
        src: Features of sources, ``[num_src, channels]``.
        dst: Features of destinations.
        add_loops: If True, replace self-loops by one for each node on both sides.
        numbers: The slope of the leaky ReLU or the scale, and the probability of dropping a weight.
        features: The four features of the function.

    Returns:
        ``[num_dst, heads, channels]``.

    Raises:
        NotFused: If nodes of edges do not exist, or features differ in type.
    """
    wanted, train = False, torch.is_grad_enabled()
    for x in features:
        if x is None:
            continue
        wanted = wanted or (train and x.requires_grad)
        if x.dtype is not src.dtype:
            raise NotFused(f"features are {src.dtype}, parameters {x.dtype}")
    num_src, num_dst = src.size(0), dst.size(0)
    num_loops = min(num_src, num_dst) if add_loops else -1
    try:
        edges = torch.ops.pyg_scale.csr_group(edge_index, num_src, num_dst, num_loops, wanted)
    except ValueError as error:
        raise NotFused("edge_index has nodes that do not exist") from error
    return run_attention(kind, edges, features, *numbers, wanted)


def heads_joined(layer: Any, out: Tensor) -> Tensor:
    """``[num_dst, heads, channels]`` with heads concatenated or averaged, as the layer does."""
    if layer.concat:
        return out.reshape(-1, layer.heads * layer.out_channels)
    return out.mean(dim=1)
