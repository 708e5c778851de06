"""Functions of torch that read or add up rows by an end of the edges, on grouped edges.

A layer may gather and scatter by itself, as PyG's ``softmax`` and aggregations do. The ends of its
edges are :class:`~pyg_scale.nn.lifted.EdgeIndices`, so that these functions need no sort, and their
gradients no scatter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pyg_scale.nn.edges import DESTINATION, SOURCE, gather, sum_edges
from pyg_scale.nn.lifted import INDEX_SELECT, EdgeIndices, Lifted, by_rule, rows
from pyg_scale.ops.aggregate import FLOATS


def by_ends(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a function of the ends of edges; ``None`` if it needs plain tensors."""
    rule = _RULES.get(func)
    return None if rule is None else by_rule(rule, args, kwargs)


def _row(whole: Any, key: Any) -> Any:
    """``edge_index[0]`` and ``edge_index[1]``."""
    if not isinstance(whole, EdgeIndices) or whole.row is not None or type(key) is not int:
        return None
    row = key % 2
    return EdgeIndices.of(whole.as_subclass(Tensor)[key], whole.edges, row)


def _spread(function: Callable[..., Any]) -> Callable[..., Any]:
    """The rule of a view, which may repeat the ends of edges in other dimensions."""

    def rule(index: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(index, EdgeIndices) or index.row is None:
            return None
        out = function(index.as_subclass(Tensor), *args, **kwargs)
        return EdgeIndices.of(out, index.edges, index.row)

    return rule


def _along(index: Any, dim: Any, shape: Sequence[int]) -> int | None:
    """The dimension in which an index of a shape has edges, if it is the same in all others."""
    if not isinstance(index, EdgeIndices) or index.row is None or not isinstance(dim, int):
        return None
    if [*index.shape] != [*shape] or not index.numel():
        return None
    at = dim + index.dim() if dim < 0 else dim
    step = index.edges.edge_index.stride(1)
    for k, (size, stride) in enumerate(zip(index.shape, index.stride(), strict=True)):
        if (size != index.edges.num_edges or stride != step) if k == at else size > 1 and stride:
            return None
    return at


def _select(x: Any, dim: Any, index: Any) -> Any:
    if not isinstance(x, Tensor) or isinstance(x, (Lifted, EdgeIndices)):
        return None
    at = _along(index, 0, index.shape)
    if at is None or index.dim() != 1 or not x.is_floating_point():
        return None
    end = index.edges.end(index.row)
    graph = index.edges.graph
    dim = dim + x.dim() if dim < 0 else dim
    if x.size(dim) != (graph.num_src if end == SOURCE else graph.num_dst):
        return None
    return gather(index.edges, x, dim, end)


def _scatter_add(out: Any, dim: Any, index: Any, src: Any) -> Any:
    reduced = _scattered(out, dim, index, src, "sum")
    return None if reduced is None else out.add_(reduced)


def _scatter_reduce(
    out: Any, dim: Any, index: Any, src: Any, reduce: str, *, include_self: bool = True
) -> Any:
    if include_self or reduce not in ("amax", "amin", "sum", "mean"):
        return None
    reduced = _scattered(out, dim, index, src, reduce.removeprefix("a"))
    if reduced is None:
        return None
    edges = index.edges
    end = edges.end(index.row)
    pointers = edges.graph.indptr if end == DESTINATION else edges.graph.transpose().indptr
    shape = [1] * out.dim()
    shape[dim] = -1
    return out.copy_(torch.where((pointers.diff() > 0).view(shape), reduced, out))


def _index_add(out: Any, dim: Any, index: Any, src: Any, *, alpha: Any = 1) -> Any:
    if not isinstance(src, Tensor) or not isinstance(index, EdgeIndices) or index.dim() != 1:
        return None
    shape = [1] * src.dim()
    shape[dim] = -1
    view = index.as_subclass(Tensor).view(shape).expand(src.shape)
    whole = EdgeIndices.of(view, index.edges, index.row)
    reduced = _scattered(out, dim, whole, src, "sum")
    return None if reduced is None else out.add_(reduced, alpha=alpha)


def _scattered(out: Any, dim: Any, index: Any, src: Any, reduce: str) -> Tensor | None:
    """Reduce edges at the nodes of one end; ``None`` if a scatter does anything else."""
    if not isinstance(src, Tensor) or isinstance(src, EdgeIndices) or isinstance(out, Lifted):
        return None
    at = _along(index, dim, src.shape)
    if at is None or src.dtype not in FLOATS or out.dtype != src.dtype:
        return None
    edges, end = index.edges, index.edges.end(index.row)
    size = edges.graph.num_src if end == SOURCE else edges.graph.num_dst
    if [*out.shape] != [*src.shape[:at], size, *src.shape[at + 1 :]]:
        return None
    if isinstance(src, Lifted):
        if end == DESTINATION and src.edges.call is edges and src.dim_of_edges == at:
            found = src.reduced(reduce)
            if found is not None:
                return found
        src = rows(src)
    return sum_edges(edges.graph, src, at, end, reduce)


_RULES: dict[Any, Callable[..., Any]] = {
    Tensor.__getitem__: _row,
    **dict.fromkeys(INDEX_SELECT, _select),
    Tensor.scatter_add_: _scatter_add,
    Tensor.scatter_reduce_: _scatter_reduce,
    Tensor.index_add_: _index_add,
    **{f: _spread(f) for f in (torch.reshape, Tensor.reshape, Tensor.view)},
    **{f: _spread(f) for f in (Tensor.expand_as, Tensor.expand)},
}
