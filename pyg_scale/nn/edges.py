"""Rows of features along edges: gathered at either end, and reduced there, on grouped edges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pyg_scale.nn.fallback import NotFused
from pyg_scale.nn.graph import derived, edges_of
from pyg_scale.ops.adjacency import Adjacency, Transpose, rows_of
from pyg_scale.ops.aggregate import FLOATS, aggregate_exactly, edge_dot, row_numel

SOURCE, DESTINATION = 0, 1
"""The two ends of an edge, of a message on its way."""


@dataclass
class Asked:
    """The rows that the code of a layer asked for in one call."""

    needed_by: str = ""
    """The first function that needed rows of features, if any did."""
    not_fused: str = ""
    """The reason why steps on single numbers gather rows on this device, if they do."""
    gathered: int = 0
    """The largest number of elements of rows that were gathered."""
    widest: int = 0
    """The largest number of elements of rows that the layer asked for."""
    saved: list[Tensor] = field(default_factory=list)
    """The tensors that gradients of numbers of edges need, where PyG may have a copy."""


class Edges:
    """The edges of one call of ``propagate``, and what is computed along them.

    Args:
        edge_index: ``[2, num_edges]``.
        sizes: Numbers of nodes of the two rows of ``edge_index``, filled in while PyG collects the
            arguments of a message.
        flow: As in PyG's ``MessagePassing``.
        node_dim: The dimension of nodes in features.
    """

    def __init__(
        self, edge_index: Tensor, sizes: list[int | None], flow: str, node_dim: int
    ) -> None:
        self.edge_index, self.sizes, self.flow = edge_index, sizes, flow
        self.node_dim = node_dim
        self.num_edges = edge_index.size(1)
        self.of_call = self.num_edges
        """The number of edges of the call, if these are some of them."""
        self.grad_mode = torch.is_grad_enabled()
        self._of: Edges | None = None
        self.asked = Asked()
        self.other_rules: tuple[Callable[..., Any], ...] = ()
        """Rules of functions that do not keep features products, in the order they are tried."""
        self._graph: Adjacency | None = None

    @classmethod
    def of(cls, graph: Adjacency, whole: Edges) -> Edges:
        """Some of the edges of a call, which are grouped."""
        # Of int64, as torch's backward pass of a scatter is wrong for others.
        ends = [graph.indices.to(torch.int64), rows_of(graph.indptr, graph.num_edges)]
        sizes: list[int | None] = [graph.num_src, graph.num_dst]
        if whole.flow == "target_to_source":
            ends.reverse()
            sizes.reverse()
        made = cls(torch.stack(ends), sizes, whole.flow, whole.node_dim)
        made._graph, made.other_rules = graph, whole.other_rules
        made.of_call = whole.num_edges
        return made

    @classmethod
    def with_sources(cls, graph: Adjacency, edge_index: Tensor, call: Edges) -> Edges:
        """The edges of a call, but with other sources.

        Args:
            graph: The edges by destination, with the same edge ids.
            edge_index: The sources and the destinations, by edge id.
            call: The edges of the call.
        """
        made = cls(edge_index, [graph.num_src, graph.num_dst], "source_to_target", call.node_dim)
        made._graph, made.other_rules, made.grad_mode = graph, call.other_rules, call.grad_mode
        made._of, made.asked = call, call.asked
        return made

    @property
    def call(self) -> Edges:
        """The edges of the call, if these are the same with other sources; else themselves."""
        return self if self._of is None else self._of

    def end(self, row: int) -> int:
        """The end of edges, source or destination of messages, that a row of edges has."""
        return row if self.flow == "source_to_target" else 1 - row

    @property
    def graph(self) -> Adjacency:
        """The edges by destination."""
        return self.group() if self._graph is None else self._graph

    def group(self) -> Adjacency:
        """Group the edges by destination, once the numbers of nodes are known.

        Raises:
            NotFused: If they are invalid, or the number of nodes is not known.
        """
        sizes = [self.sizes[self.end(row)] for row in (SOURCE, DESTINATION)]
        here = [size if size is not None else sizes[1 - i] for i, size in enumerate(sizes)]
        if here[0] is None or here[1] is None:
            raise NotFused("the number of nodes is not known")
        self._graph = edges_of(self.edge_index, here[0], here[1], self.flow)
        return self._graph


def gather(edges: Edges, features: Tensor, dim: int, end: int) -> Tensor:
    """The rows of features at one end of every edge; the gradient adds rows up without a scatter.

    Args:
        edges: The edges.
        features: Nodes are in dimension ``dim``.
        dim: Not negative.
        end: :data:`SOURCE` or :data:`DESTINATION`.
    """
    row = end if edges.flow == "source_to_target" else 1 - end
    index = edges.edge_index[row]
    if not (features.requires_grad and torch.is_grad_enabled() and features.dtype in FLOATS):
        return features.index_select(dim, index)
    return _Gather.apply(features, index, dim, edges.graph, end)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, features: Tensor, index: Tensor, dim: int, graph: Adjacency, end: int
    ) -> Tensor:
        ctx.rest = dim, graph, end
        return features.index_select(dim, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        dim, graph, end = ctx.rest
        return sum_edges(graph, grad, dim, end), None, None, None, None


def sum_edges(graph: Adjacency, values: Tensor, dim: int, end: int, reduce: str = "sum") -> Tensor:
    """Reduce a row per edge to a row for each node at one end.

    Args:
        graph: The edges.
        values: Edges, by edge id, are in dimension ``dim``.
        dim: Not negative.
        end: :data:`SOURCE` or :data:`DESTINATION`.
        reduce: See :func:`~pyg_scale.ops.aggregate.aggregate`.
    """
    at = edges_at(graph, end)
    return _along(dim, values, lambda rows: aggregate_exactly(at, rows, None, reduce))


def edges_at(graph: Adjacency, end: int) -> Adjacency:
    """The edges at each node as an adjacency whose sources are the edges themselves, by edge id."""
    make = _edges_by_source if end == SOURCE else _edges_by_destination
    return derived(graph, ("edges at", end), lambda: make(graph))


def _edges_by_destination(graph: Adjacency) -> Adjacency:
    size = graph.num_edges
    position = torch.arange(size, device=graph.device)
    edge = position if graph.edge_id is None else graph.edge_id
    return _of_edges(graph.indptr, edge, rows_of(graph.indptr, size))


def _edges_by_source(graph: Adjacency) -> Adjacency:
    indptr, _, position = graph.transpose()
    edge = position if graph.edge_id is None else graph.edge_id.index_select(0, position)
    return _of_edges(indptr, edge, rows_of(indptr, graph.num_edges))


def _of_edges(indptr: Tensor, edge: Tensor, node: Tensor) -> Adjacency:
    """Every edge is the source of one other edge, to its node: so the transpose is known."""
    edge, size = edge.to(node.dtype), edge.numel()
    where = torch.empty_like(edge)
    where[edge] = torch.arange(size, device=edge.device)
    pointers = torch.arange(size + 1, device=edge.device)
    transposed = Transpose(pointers, node.index_select(0, where), where)
    return Adjacency.of_checked(indptr, edge, size, transposed=transposed)


def dot_at_ends(graph: Adjacency, source: Tensor, destination: Tensor) -> Tensor:
    """The products of the features at both ends of every edge, summed over the last dimension.

    Args:
        graph: The edges.
        source: ``[num_src, ..., channels]``.
        destination: ``[num_dst, ..., channels]``, otherwise of the same shape.

    Returns:
        ``[num_edges, ...]``, by edge id.
    """
    heads = source.shape[1:-1]
    with torch.autocast(source.device.type, enabled=False):
        rows = (x.reshape(x.size(0), heads.numel(), x.size(-1)) for x in (source, destination))
        return edge_dot(graph, *rows).view(graph.num_edges, *heads)


def _along(dim: int, x: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a reduction of matrices to the dimension ``dim`` of a tensor of any shape."""
    moved = x.movedim(dim, 0)
    out = reduce(moved.reshape(moved.size(0), row_numel(moved)))
    return out.view(out.size(0), *moved.shape[1:]).movedim(0, dim)
