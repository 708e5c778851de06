"""Sums, means and extremes over neighbours, for layers that aggregate unchanged features."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn.aggr import (
    MaxAggregation,
    MeanAggregation,
    MinAggregation,
    MultiAggregation,
    SumAggregation,
)
from torch_geometric.typing import SparseTensor

from pyg_scale.nn.conv.base import check_features, check_weight, untouched
from pyg_scale.nn.fallback import NotFused
from pyg_scale.nn.graph import derived, edges_of, edges_of_sparse, is_sparse
from pyg_scale.nn.linear import apply_linear, apply_weight, is_linear
from pyg_scale.ops import stored_rows
from pyg_scale.ops.adjacency import Adjacency, recording
from pyg_scale.ops.aggregate import aggregate
from pyg_scale.ops.lazy_rows import LazyRows
from pyg_scale.ops.stored_rows import StoredRows

REDUCTIONS = {
    SumAggregation: "sum",
    MeanAggregation: "mean",
    MaxAggregation: "max",
    MinAggregation: "min",
}
LINEAR = ("sum", "mean")
_MACS_PER_GATHERED = 24
"""Number of multiply-adds that take as long as reading one number of a neighbour."""

_WORTH_CUTTING = 1 << 14
"""Number of rows whose product takes as long on CUDA as the kernels that put rows together. A
guess, until a GPU measures it."""


def reductions(layer: Any) -> list[str]:
    """The reductions of a layer: one, or those of a ``MultiAggregation``.

    Raises:
        NotFused: If one of them is not among sum, mean, max and min.
    """
    module = layer.aggr_module
    if type(module) is MultiAggregation and untouched(module, MultiAggregation):
        modules = list(module.aggrs)
    else:
        modules = [module]
    if not all(untouched(each, type(each)) and type(each) in REDUCTIONS for each in modules):
        raise NotFused(f"aggr={layer.aggr}")
    return [REDUCTIONS[type(each)] for each in modules]


def reduce_neighbors(
    layer: Any, graph: Adjacency, x: Tensor, weight: Tensor | None, how: list[str]
) -> Tensor:
    """The result of ``propagate`` on features ``[num_src, channels]``: ``[num_dst, ...]``.

    Lazy features are read where they are, with the bits of gathered ones.
    """
    graph, rows = read_in_place(graph, x, weight)
    outs = [reduce_rows(graph, rows, weight, each) for each in how]
    return layer.aggr_module.combine(outs) if len(outs) > 1 else outs[0]


def read_in_place(
    graph: Adjacency, x: Tensor, weight: Tensor | None
) -> tuple[Adjacency, Tensor | StoredRows]:
    """Lazy features as the rows of their table, with edges from these; others as they are.

    They are gathered where a gradient or a trace needs them as a tensor.
    """
    if not isinstance(x, LazyRows):
        return graph, x
    unread = None if torch.is_autocast_enabled("cpu") else x.unread()
    if unread is None:
        return graph, x.rows()
    stored, index = unread
    matrix = stored.matrix
    if matrix is None and (
        (weight is not None and weight.requires_grad) or not stored_rows.usable()
    ):
        return graph, x.rows()
    indices = index.index_select(0, graph.indices)
    found = Adjacency.of_checked(graph.indptr, indices, stored.rows.size(0), graph.edge_id)
    return found, stored if matrix is None else matrix


def reduce_rows(
    graph: Adjacency, rows: Tensor | StoredRows, weight: Tensor | None, how: str
) -> Tensor:
    """One reduction of the rows that :func:`read_in_place` returns."""
    if isinstance(rows, StoredRows):
        return stored_rows.aggregate_stored(graph, rows, weight, how)
    return aggregate(graph, rows, weight, how)


def bipartite(
    layer: Any,
    edge_index: Any,
    x: tuple[Tensor, Tensor | None],
    edge_weight: Tensor | None,
    size: tuple[int, int] | None,
    *,
    sparse_values: bool,
) -> tuple[Adjacency, Tensor | None]:
    """The edges between source and destination nodes, and their weights, by edge id.

    Args:
        layer: A layer of PyG.
        edge_index: The edges passed to the layer, in any form.
        x: Features of sources and, if there are any, of destinations.
        edge_weight: ``[num_edges]``, or ``None``.
        size: ``(num_src, num_dst)``, or ``None``.
        sparse_values: True if the layer multiplies with the values of a ``SparseTensor``. All
            layers do so with those of torch's sparse matrices.

    Raises:
        NotFused: If the call is not covered.
        ValueError: If sizes do not fit, as in PyG.
    """
    src, dst = x
    if src is None:
        raise NotFused("no features of sources")
    check_features(src)
    if layer.node_dim not in (-2, 0):
        raise NotFused("node_dim")
    if is_sparse(edge_index):
        if layer.flow == "target_to_source":
            raise NotFused("a sparse matrix with flow='target_to_source'")
        graph, value = edges_of_sparse(edge_index, src.size(0))
        if isinstance(edge_index, SparseTensor) and not sparse_values:
            value = None
        if value is not None and (value.dim() != 1 or value.dtype != src.dtype):
            raise NotFused("the values of the sparse matrix do not fit the features")
        return graph, value
    if layer.flow == "target_to_source" and dst is not src:
        raise NotFused("two sets of features with flow='target_to_source'")
    sizes = layer._check_input(edge_index, size)
    layer._set_size(sizes, 0, src)
    if dst is not None:
        layer._set_size(sizes, 1, dst)
    num_dst = sizes[1] if sizes[1] is not None else sizes[0]
    graph = edges_of(edge_index, src.size(0), num_dst, layer.flow)
    check_weight(edge_weight, graph.num_edges, src.dtype)
    return graph, edge_weight


def mapped_neighbors(
    layer: Any, linear: Any, graph: Adjacency, x: Tensor, weight: Tensor | None, how: list[str]
) -> tuple[Tensor, Tensor | None]:
    """A linear map of the reduced neighbours, ``linear(propagate(...))``.

    In a block of a sampler only the first nodes have in-edges. The others need no matrix product,
    as the map of zeros is the bias.

    Returns:
        ``[num_rows, out_channels]`` for the first destinations, and the bias as the result for the
        others if there are fewer rows than destinations.
    """
    if not movable(linear, how, REDUCTIONS.values()):
        return linear(reduce_neighbors(layer, graph, x, weight, how)), None
    graph = with_in_edges(graph)
    if movable(linear, how) and product_first(linear, graph, x):
        x = x.rows() if isinstance(x, LazyRows) else x
        out = reduce_neighbors(layer, graph, apply_weight(x, linear.weight), weight, how)
        if linear.bias is None:
            return out, None
        # As in a linear map: under autocast, parameters are wider than the tensors they are added
        # to.
        return out + linear.bias.to(out.dtype), linear.bias
    out = reduce_neighbors(layer, graph, x, weight, how)
    return apply_linear(linear, out), linear.bias


def plus_root(
    out: Tensor, rest: Tensor | None, linear: Any, dst: Tensor | None, num_dst: int
) -> Tensor:
    """Add the contributions of the destinations to the result of :func:`mapped_neighbors`.

    Args:
        out: ``[num_rows, out_channels]``.
        rest: ``[out_channels]``, the result for destinations that ``out`` lacks; ``None`` is zero.
        linear: The map of the destinations' own features, or ``None``.
        dst: These features, ``[num_dst, in_channels]``, or ``None``.
        num_dst: Number of destinations.
    """
    lacking = num_dst - out.size(0)
    if (
        dst is not None
        and out.is_cuda
        and lacking == 0
        and movable(linear, ["sum"])
        and linear.bias is None
        and out.dtype == dst.dtype == linear.weight.dtype
        and not torch.is_autocast_enabled("cuda")
    ):
        return torch.addmm(out, dst, linear.weight.t())  # one kernel, and no product in memory
    root = None if linear is None or dst is None else apply_linear(linear, dst)
    if lacking == 0:
        return out if root is None else out + root
    tail = out.new_zeros(out.size(1)) if rest is None else rest.to(out.dtype)
    if root is None:
        return torch.cat([out, tail.expand(lacking, -1)])
    if movable(linear, ["sum"]) and root.dtype == out.dtype:
        return _AddRows.apply(root, out, tail)
    return root + torch.cat([out, tail.expand(lacking, -1)])


class _AddRows(torch.autograd.Function):
    """Add in place to a tensor that is not used elsewhere: no copy, forward or backward."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, first: Tensor, rest: Tensor) -> Tensor:
        ctx.size = first.size(0)
        ctx.mark_dirty(root)
        root[: ctx.size].add_(first)  # not +=, which would copy the rows to themselves
        root[ctx.size :].add_(rest)
        return root

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return grad, grad[: ctx.size], grad[ctx.size :].sum(dim=0)


def with_in_edges(graph: Adjacency) -> Adjacency:
    """The same edges without the last destinations, if many of these have no in-edges."""
    if recording() or graph.num_edges == 0:
        return graph

    def cut() -> Adjacency | None:
        if graph.device.type == "cpu":
            size = int(torch.searchsorted(graph.indptr, graph.num_edges))
        else:  # nobody waits for the device
            size = graph.num_expanded
            if graph.num_dst - size < _WORTH_CUTTING:
                return None
        if size > 0.9 * graph.num_dst:
            return None
        rest = graph.indices, graph.num_src, graph.edge_id, graph.known_transpose
        return Adjacency.of_checked(graph.indptr[: size + 1], *rest)

    return derived(graph, "with in-edges", cut) or graph


def movable(linear: Any, how: list[str], among: Container[str] = LINEAR) -> bool:
    """Return True if a linear map of neighbours may be applied before they are reduced or after.

    Sums and means commute with it, up to rounding, if it is a plain linear map without hooks.

    Args:
        linear: The map.
        how: The reductions.
        among: The reductions that are allowed.
    """
    return is_linear(linear) and len(how) == 1 and how[0] in among


def product_first(linear: Any, graph: Adjacency, x: Tensor) -> bool:
    """Return True if a linear map of neighbours is cheaper before their reduction than after it.

    The cost counts the numbers read from neighbours, forward and backward, and the multiply-adds of
    the product.

    Args:
        linear: The map.
        graph: The edges.
        x: ``[num_src, in_channels]``.
    """
    wide, narrow = x.size(1), linear.weight.size(0)
    train = torch.is_grad_enabled() and linear.weight.requires_grad
    deep = torch.is_grad_enabled() and x.requires_grad  # features of the data set have no gradient
    gathered = graph.num_edges * _MACS_PER_GATHERED
    product = wide * narrow * (1 + train + deep)
    last = gathered * wide * (1 + deep) + graph.num_dst * product
    first = gathered * narrow * (1 + (train or deep)) + x.size(0) * product
    return first < last
