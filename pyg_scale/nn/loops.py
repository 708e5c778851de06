"""Self-loops, added to grouped edges without sorting again, and GCN's normalisation."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.utils import add_remaining_self_loops

from pyg_scale.nn.fallback import NotFused
from pyg_scale.nn.graph import derived, edges_of
from pyg_scale.ops.adjacency import (
    Adjacency,
    from_edge_index,
    grouped_at_once,
    rows_of,
    transpose,
)
from pyg_scale.ops.aggregate import aggregate, fused_edges


class Looped(NamedTuple):
    """The same edges with self-loops in two forms, which differ in the order of edge values."""

    by_edge: Adjacency
    """Values of edges are in PyG's order: the remaining edges, then the loops."""
    by_position: Adjacency
    """Values of edges are in the order of the positions."""


def with_self_loops(graph: Adjacency, num_loops: int) -> Looped:
    """Replace all self-loops by one at each of the first ``num_loops`` nodes.

    As PyG's ``remove_self_loops`` and ``add_self_loops``, or ``add_remaining_self_loops``. The loop
    of a node is its last in-edge.

    Args:
        graph: The edges; destination ``i`` and source ``i`` are one node.
        num_loops: At most the number of source and of destination nodes.
    """
    return derived(graph, ("self-loops", num_loops), lambda: _with_self_loops(graph, num_loops))


def looped_edges(
    edge_index: Any, num_src: int, num_dst: int, num_loops: int, *, numbered: bool
) -> Adjacency:
    """The edges passed to a layer with their self-loops replaced, see :func:`with_self_loops`.

    On CUDA there may be one destination more, see :func:`~pyg_scale.ops.adjacency.grouped`.

    Args:
        edge_index: See :func:`~pyg_scale.nn.graph.edges_of`, as for the following.
        num_src: See there.
        num_dst: See there.
        num_loops: At most the number of source and of destination nodes.
        numbered: True if edges have values, in PyG's order.

    Raises:
        NotFused: As there.
    """
    if grouped_at_once(edge_index) and (edge_index.is_cpu or not numbered):
        return edges_of(edge_index, num_src, num_dst, num_loops=num_loops)
    return with_self_loops(edges_of(edge_index, num_src, num_dst), num_loops).by_edge


def _with_self_loops(graph: Adjacency, num_loops: int) -> Looped:
    src, indptr, edge_id = graph.indices, graph.indptr, graph.edge_id
    here = graph.device
    dst = rows_of(indptr, graph.num_edges)
    keep = src != dst
    if edge_id is None:
        column = torch.arange(graph.num_edges, device=here)
    else:
        column = edge_id.to(torch.int64)
    if not bool(keep.all()):
        rank = torch.empty_like(keep).index_copy(0, column, keep).to(torch.int64).cumsum(0) - 1
        column, src, dst = rank[column[keep]], src[keep], dst[keep]
        count = torch.bincount(dst, minlength=graph.num_dst)
        indptr = torch.cat([count.new_zeros(1), count.cumsum(0)])
    kept = src.numel()
    node = torch.arange(num_loops, device=here)
    # After the loops of earlier rows.
    place = torch.arange(kept, device=here) + dst.clamp(max=num_loops)
    place_of_loop = indptr[1 : num_loops + 1] + node
    indices = src.new_empty(kept + num_loops)
    indices[place] = src
    indices[place_of_loop] = node.to(src.dtype)
    columns = torch.empty(kept + num_loops, dtype=torch.int64, device=here)
    columns[place] = column
    columns[place_of_loop] = kept + node
    indptr = indptr + torch.arange(graph.num_dst + 1, device=here).clamp(max=num_loops)
    return Looped(
        Adjacency.of_checked(indptr, indices, graph.num_src, columns),
        Adjacency.of_checked(indptr, indices, graph.num_src),
    )


def with_self_loops_in_a_trace(
    edge_index: Tensor, num_src: int, num_dst: int, num_loops: int
) -> Adjacency:
    """The same in a recorded run, where no shape may depend on the values of the edges.

    There is one destination more, to which the replaced self-loops lead.

    Args:
        edge_index: ``[2, num_edges]``, sources above destinations.
        num_src: Number of source nodes.
        num_dst: Number of destination nodes.
        num_loops: At most either of them.
    """
    src, dst = edge_index[0], edge_index[1]
    node = torch.arange(num_loops, dtype=src.dtype, device=src.device)
    dst = torch.where(src == dst, num_dst, dst)
    edges = torch.stack([torch.cat([src, node]), torch.cat([dst, node])])
    return from_edge_index(edges, num_src, num_dst + 1)


def gcn_edges(
    graph: Adjacency,
    edge_index: Tensor,
    edge_weight: Tensor | None,
    improved: bool,
    add_self_loops: bool,
    dtype: torch.dtype,
) -> tuple[Adjacency, Tensor]:
    """GCN's symmetric normalisation of edges that are already grouped.

    As PyG's ``gcn_norm`` of an edge list: an existing self-loop keeps its weight, others get 1 (2
    if ``improved`` and there are weights). Degrees are those of destinations.

    Args:
        graph: The edges, of a graph whose sources are its destinations.
        edge_index: ``[2, num_edges]``, the edges of which ``graph`` was made, before any flip.
        edge_weight: ``[num_edges]``, or ``None``.
        improved: If True, added loops have the weight 2.
        add_self_loops: If True, loops are added.
        dtype: Dtype of the result if there are no weights.

    Returns:
        The edges with their loops, and ``[num_edges]`` weights for them.
    """
    if add_self_loops:
        by_edge, edges = with_self_loops(graph, graph.num_dst)
    else:
        by_edge, edges = graph, _without_edge_id(graph)
    if edge_weight is None:
        return edges, derived(edges, ("gcn", dtype), lambda: _by_degree(edges, dtype))

    def weigh() -> Tensor:
        weight = edge_weight
        if add_self_loops:
            fill = 2.0 if improved else 1.0
            _, weight = add_remaining_self_loops(edge_index, weight, fill, graph.num_dst)
        if by_edge.edge_id is not None:
            weight = weight.index_select(0, by_edge.edge_id)
        return _normalized(edges, rows_of(edges.indptr, edges.num_edges), weight)

    return edges, derived(edges, ("gcn", improved), weigh, of=edge_weight)


def gcn_edges_at_once(
    edge_index: Tensor, num_nodes: int, flow: str, dtype: torch.dtype
) -> tuple[Adjacency, Tensor]:
    """The same of a few edges on CUDA, without weights and with loops: nobody waits for the device.

    There is one destination more, see :func:`~pyg_scale.ops.adjacency.grouped`.

    Args:
        edge_index: ``[2, num_edges]``; :func:`~pyg_scale.ops.adjacency.grouped_at_once` is True.
        num_nodes: Number of nodes.
        flow: As in PyG's ``MessagePassing``.
        dtype: Dtype of the weights.
    """
    edges = _without_edge_id(edges_of(edge_index, num_nodes, num_nodes, flow, num_nodes))
    return edges, derived(edges, ("gcn", dtype), lambda: _by_degree(edges, dtype))


def gcn_edges_in_a_trace(
    edge_index: Tensor,
    edge_weight: Tensor | None,
    num_nodes: int,
    flow: str,
    improved: bool,
    add_self_loops: bool,
    dtype: torch.dtype,
) -> tuple[Adjacency, Tensor]:
    """The same in a recorded run, see :func:`with_self_loops_in_a_trace`."""
    if flow == "target_to_source":
        edge_index = edge_index.flip(0)
    src, dst = edge_index[0], edge_index[1]
    weight = edge_weight
    if weight is None:
        weight = torch.ones(src.size(0), dtype=dtype, device=src.device)
    if add_self_loops:
        is_loop = src == dst
        fill = 2.0 if improved and edge_weight is not None else 1.0
        loops = weight.new_full((num_nodes + 1,), fill)
        if edge_weight is not None:
            loops = loops.index_put((torch.where(is_loop, dst, num_nodes),), weight)
        node = torch.arange(num_nodes, dtype=src.dtype, device=src.device)
        src = torch.cat([src, node])
        dst = torch.cat([torch.where(is_loop, num_nodes, dst), node])
        weight = torch.cat([weight, loops[:num_nodes]])
    edges = from_edge_index(torch.stack([src, dst]), num_nodes, num_nodes + 1)
    assert edges.edge_id is not None
    order = edges.edge_id
    edges = Adjacency.of_checked(edges.indptr, edges.indices, num_nodes)
    weight = weight.index_select(0, order)
    return edges, _normalized(edges, dst.index_select(0, order), weight)


def scaled_weights(
    edge_index: Tensor, weight: Tensor, num_nodes: int, improved: bool, add_self_loops: bool
) -> tuple[Tensor, Tensor | None]:
    """GCN's symmetric normalisation of edges that are not grouped, with gradients.

    As PyG's ``gcn_norm``, but the edges stay as they are: self-loops have numbers of their own.

    Args:
        edge_index: ``int64`` ``[2, num_edges]``, on the CPU.
        weight: ``[num_edges]``.
        num_nodes: Number of nodes.
        improved: See :func:`gcn_edges`, as for the rest.
        add_self_loops: See there.

    Returns:
        ``[num_edges]`` weights, 0 for self-loops that are replaced, and the ``[num_nodes]`` weights
        of the loops; ``None`` if none are added.

    Raises:
        NotFused: If an edge names a node that does not exist.
    """
    src, dst, loop = edge_index[0], edge_index[1], None
    try:
        if add_self_loops:
            is_loop = src == dst
            loop = weight.new_full((num_nodes,), 2.0 if improved else 1.0)
            at = is_loop.nonzero().view(-1)
            if at.numel():
                loop.index_put_((src[at],), weight.index_select(0, at))
                weight = weight.masked_fill(is_loop, 0.0)
        start = weight.new_zeros(num_nodes) if loop is None else loop
        scale = _inverse_sqrt(start.scatter_add(0, dst, weight))
        weight = scale.index_select(0, src) * weight * scale.index_select(0, dst)
    except (IndexError, RuntimeError) as error:
        raise NotFused("edge_index has nodes that do not exist") from error
    return weight, None if loop is None else scale * scale * loop


def _without_edge_id(graph: Adjacency) -> Adjacency:
    if graph.edge_id is None:
        return graph
    kept = graph.known_transpose  # has positions, no ids
    make = lambda: Adjacency.of_checked(graph.indptr, graph.indices, graph.num_src, None, kept)  # noqa: E731
    return derived(graph, "by position", make)


def _by_degree(graph: Adjacency, dtype: torch.dtype) -> Tensor:
    exact = dtype if dtype == torch.float64 else torch.float32  # bfloat16 counts to 256
    scale = _inverse_sqrt(graph.indptr.diff().to(exact))
    dst = rows_of(graph.indptr, graph.num_edges)
    return (scale.index_select(0, graph.indices) * scale.index_select(0, dst)).to(dtype)


def _normalized(graph: Adjacency, dst: Tensor, weight: Tensor) -> Tensor:
    """Weights by position, multiplied by the scales of both ends of their edges.

    Args:
        graph: The edges; ids are positions. It may have one destination more than sources.
        dst: ``[num_edges]``, the destination of each position.
        weight: ``[num_edges]``.
    """
    ones = weight.new_ones(graph.num_src, 1)
    scale = _inverse_sqrt(_sum(graph, ones, weight))
    by_source = weight.requires_grad
    tensors = fused_edges(graph, by_source)
    return weight * _ScalesOfEnds.apply(scale, dst, graph.num_src, *tensors)


class _ScalesOfEnds(torch.autograd.Function):
    """The product of the scales of both ends of each edge: ``scale[src] * scale[dst]``.

    The gradient of a gather is a scatter, which on CUDA adds in a different order in every run.
    This function sums over the edges of each node instead.
    """

    @staticmethod
    def forward(ctx: Any, scale: Tensor, dst: Tensor, num_src: int, *edges: Any) -> Tensor:
        ctx.save_for_backward(scale, *edges)
        ctx.num_src = num_src
        return scale.index_select(0, edges[1]) * scale.index_select(0, dst)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        scale, indptr, indices, _, *by_source = ctx.saved_tensors
        num_src = ctx.num_src
        if by_source[0] is None:
            by_source = transpose(indptr, indices, num_src)
        pointers, rows, position = by_source
        here = Adjacency.of_checked(indptr, indices, num_src)
        there = Adjacency.of_checked(pointers, rows, scale.numel(), position)
        of_sources = _sum(there, scale.unsqueeze(-1), grad)
        of_sources = torch.nn.functional.pad(of_sources, (0, scale.numel() - num_src))
        of_scale = _sum(here, scale[:num_src].unsqueeze(-1), grad) + of_sources
        return (of_scale, *(None,) * 8)


def _sum(graph: Adjacency, x: Tensor, weight: Tensor) -> Tensor:
    """The weighted sum of one number of each neighbour, in full precision: ``[num_dst]``."""
    with torch.autocast(weight.device.type, enabled=False):
        return aggregate(graph, x, weight).view(-1)


def _inverse_sqrt(degree: Tensor) -> Tensor:
    scale = degree.pow(-0.5)
    return scale.masked_fill(scale == float("inf"), 0.0)
