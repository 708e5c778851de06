"""Reduced neighbours and a node's own features, mapped and added by one function for autograd.

A layer such as ``SAGEConv`` is a linear map of the reduced neighbours, one of the destinations' own
features, and a bias. As separate functions they make a tensor for every product and one for every
gradient of the same features, which are added up, and each is as large as the features. As one, the
products are added up where the result is. The result and the gradients of features are in recycled
memory (:mod:`pyg_scale.ops.memory`): the first access to fresh pages takes as long as a product.

In a batch, where most nodes have no in-edges and most gradients are zero, no product reads these
rows, and edges are grouped by source only if a gradient flows along them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_scale.nn.aggregation import (
    LINEAR,
    mapped_neighbors,
    movable,
    plus_root,
    product_first,
    read_in_place,
    reduce_neighbors,
    reduce_rows,
    with_in_edges,
)
from pyg_scale.nn.linear import is_start_of
from pyg_scale.ops import library, memory
from pyg_scale.ops.adjacency import Adjacency, recording
from pyg_scale.ops.aggregate import aggregate, by_source
from pyg_scale.ops.dense_product import mm
from pyg_scale.ops.fused import divided, in_batches, is_eager
from pyg_scale.ops.lazy_rows import LazyRows
from pyg_scale.ops.nonzero_rows import nonzero_rows
from pyg_scale.ops.stored_rows import StoredRows

_PLAIN = (Tensor, torch.nn.Parameter)
_WIDE = (torch.float32, torch.float64)


def mapped_with_root(
    layer: Any,
    linear: Any,
    root: Any,
    graph: Adjacency,
    x: tuple[Tensor, Tensor | None],
    weight: Tensor | None,
    how: list[str],
) -> Tensor:
    """``linear(propagate(...)) + root(dst)``: ``[num_dst, out_channels]``.

    Args:
        layer: A layer of PyG.
        linear: The map of the reduced neighbours, with a bias or without.
        root: The map of the destinations' own features; ``None`` is zero.
        graph: The edges.
        x: Features of sources, and of destinations if there are any.
        weight: ``[num_edges]``, by edge id, or ``None``.
        how: The reductions.
    """
    src, dst = x
    if dst is None or root is None or not _is_one_function(linear, root, src, dst, weight, how):
        out, rest = mapped_neighbors(layer, linear, graph, src, weight, how)
        return plus_root(out, rest, root, dst, graph.num_dst)
    num_dst, graph = graph.num_dst, with_in_edges(graph)
    first = product_first(linear, graph, src)
    if first and isinstance(src, LazyRows):
        src = src.rows()
    graph, rows = read_in_place(graph, src, weight)
    src = rows if isinstance(rows, Tensor) else src
    own = None if dst is src or is_start_of(dst, src) else dst
    call = _Call(graph, num_dst, weight, how[0], first, rows)
    mapped: Tensor = _Mapped.apply(src, own, linear.weight, linear.bias, root.weight, call)
    return mapped


def summed_with_own(
    layer: Any,
    graph: Adjacency,
    x: tuple[Tensor, Tensor | None],
    weight: Tensor | None,
    how: list[str],
    factor: Tensor,
) -> Tensor:
    """``propagate(...) + factor * dst``: ``[num_dst, channels]``.

    Args:
        layer: A layer of PyG.
        graph: The edges.
        x: As in :func:`mapped_with_root`.
        weight: See there, as for ``how``.
        how: See there.
        factor: A single number.
    """
    src, dst = x
    if dst is None:
        return reduce_neighbors(layer, graph, src, weight, how)
    mine = (
        len(how) == 1
        and how[0] in LINEAR
        and not factor.requires_grad
        and factor.is_cpu
        and _is_plain(src, dst, weight)
        and src.size(1) == dst.size(1)
    )
    if not mine:
        return reduce_neighbors(layer, graph, src, weight, how) + factor * dst
    num_dst, graph = graph.num_dst, with_in_edges(graph)
    graph, rows = read_in_place(graph, src, weight)
    src = rows if isinstance(rows, Tensor) else src
    call = _Call(graph, num_dst, weight, how[0], False, rows)
    own = None if dst is src or is_start_of(dst, src) else dst
    out: Tensor = _Own.apply(src, own, factor.item(), call)
    return out


class _Call(NamedTuple):
    graph: Adjacency
    """Of the first destinations; the others have no in-edges."""
    num_dst: int
    """Number of all destinations."""
    weight: Tensor | None
    """``[num_edges]``, by edge id."""
    how: str
    """``"sum"`` or ``"mean"``."""
    product_first: bool
    """True if the sources are mapped before they are reduced."""
    rows: Tensor | StoredRows
    """The features of the sources, as they are reduced if they are not mapped before."""

    def reduced(self, src: Tensor) -> Tensor:
        """The reduced sources; ``src`` stands for them in autograd."""
        rows = self.rows if isinstance(self.rows, StoredRows) else src
        return reduce_rows(self.graph, rows, self.weight, self.how)


def _is_one_function(
    linear: Any,
    root: Any,
    src: Tensor,
    dst: Tensor,
    weight: Tensor | None,
    how: list[str],
) -> bool:
    if not (movable(linear, how) and movable(root, how) and _is_plain(src, dst, weight)):
        return False
    matrices = linear.weight, root.weight
    return root.bias is None and all(
        type(each) in _PLAIN and each.dtype is src.dtype for each in matrices
    )


def _is_plain(src: Tensor, dst: Tensor, weight: Tensor | None) -> bool:
    """Return True for features on the CPU whose products no one else needs to see."""
    return (
        is_eager()
        and not recording()
        and not torch.is_autocast_enabled("cpu")
        and (type(src) in _PLAIN or isinstance(src, LazyRows))
        and src.is_cpu
        and src.dtype in _WIDE
        and type(dst) in _PLAIN
        and dst.dtype is src.dtype
        and dst.dim() == 2
        and (weight is None or not weight.requires_grad)
        and library.compiled()
    )


def _start(x: Tensor, count: int) -> Tensor:
    return x if x.size(0) == count else x[:count]


class _Mapped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        src: Tensor,
        dst: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        root: Tensor,
        call: _Call,
    ) -> Tensor:
        own = _start(src if dst is None else dst, call.num_dst)
        out = memory.empty([call.num_dst, weight.size(0)], src.dtype)
        mm(own, root.t(), bias=bias, out=out)
        head, reduced = out[: call.graph.num_dst], None
        if call.product_first:
            rows = mm(src, weight.t())
            head.add_(aggregate(call.graph, rows, call.weight, call.how))
        else:
            reduced = call.reduced(src)
            mm(reduced, weight.t(), out=head, add=True)
        kept = call.product_first or dst is None or ctx.needs_input_grad[0]
        ctx.save_for_backward(src if kept else None, dst, weight, bias, root, reduced)
        ctx.call = call
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        src, dst, weight, _, root, reduced = ctx.saved_tensors
        call, needed = ctx.call, ctx.needs_input_grad[:5]
        if torch.is_grad_enabled():  # to be differentiated again
            return *_differentiable(ctx.saved_tensors, call, needed, grad), None
        some, head = _with_gradient(grad, call)
        of_src = of_dst = of_weight = of_root = None
        if not call.product_first:
            of_weight = mm(head.t(), reduced[: head.size(0)]) if needed[2] else None
            of_src = _to_sources(mm(head, weight), call) if needed[0] else None
        elif needed[0] or needed[2]:
            rows = _to_sources(head, call)
            of_weight = mm(rows.t(), src) if needed[2] else None
            of_src = mm(rows, weight) if needed[0] else None
        own = src if dst is None else dst
        if dst is None and of_src is not None:
            mm(some, root, out=of_src[: some.size(0)], add=True)
        if needed[1] and in_batches(grad):  # torch cannot write many to one tensor
            rest = own.new_zeros(own.size(0) - some.size(0), own.size(1))
            of_dst = torch.cat([some.mm(root), rest])
        elif needed[1]:
            of_dst = memory.empty(own.shape, grad.dtype)
            mm(some, root, out=of_dst[: some.size(0)])
            of_dst[some.size(0) :].zero_()
        if needed[4]:
            of_root = mm(some.t(), own[: some.size(0)])
        return of_src, of_dst, of_weight, some.sum(0) if needed[3] else None, of_root, None


def _differentiable(
    saved: tuple[Tensor | None, ...], call: _Call, needed: tuple[bool, ...], grad: Tensor
) -> list[Tensor | None]:
    """The gradients of :class:`_Mapped`, by functions that can be differentiated."""
    *given, reduced = saved
    # Views, as one of the tensors may have been computed from another.
    views = [t.view_as(t) if t is not None and n else t for t, n in zip(given, needed)]
    src, dst, weight, bias, root = views
    assert weight is not None and root is not None
    own = src if dst is None else dst
    assert own is not None
    if src is not None:
        reduced = aggregate(call.graph, src, call.weight, call.how)
    assert reduced is not None
    out = F.linear(reduced, weight)
    rest = out.new_zeros(call.num_dst - out.size(0), out.size(1))
    out = torch.cat([out, rest]) + F.linear(_start(own, call.num_dst), root, bias)
    inputs = [t for t, n in zip(views, needed) if t is not None and n]
    found = iter(torch.autograd.grad(out, inputs, grad, create_graph=True))
    return [next(found) if n else None for n in needed]


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, src: Tensor, dst: Tensor | None, factor: float, call: _Call) -> Tensor:
        ctx.rest = factor, call, src.size(0), dst is None
        own = _start(src if dst is None else dst, call.num_dst)
        reduced = call.reduced(src)
        if reduced.size(0) == call.num_dst:
            return reduced.add_(own, alpha=factor)
        out = memory.empty(own.shape, src.dtype)
        torch.mul(own, factor, out=out)
        out[: reduced.size(0)].add_(reduced)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        factor, call, num_src, is_same = ctx.rest
        of_src = of_dst = None
        if torch.is_grad_enabled():  # to be differentiated again
            if ctx.needs_input_grad[0]:
                of_src = _to_sources(_start(grad, call.graph.num_dst), call)
                if is_same:
                    rest = grad.new_zeros(num_src - call.num_dst, grad.size(1))
                    of_src = of_src + torch.cat([factor * grad, rest])
        elif ctx.needs_input_grad[0]:
            some, head = _with_gradient(grad, call)
            of_src = _to_sources(head, call)
            if is_same:
                of_src[: some.size(0)].add_(some, alpha=factor)
        if ctx.needs_input_grad[1]:
            of_dst = factor * grad
        return of_src, of_dst, None, None


def _with_gradient(grad: Tensor, call: _Call) -> tuple[Tensor, Tensor]:
    """The rows of a gradient up to the last one that is not zero, and those with in-edges."""
    is_plain = grad.is_contiguous() and not in_batches(grad)
    rows = nonzero_rows(grad) if is_plain else grad.size(0)
    some = _start(grad, rows)
    return some, _start(some, min(rows, call.graph.num_dst))


def _to_sources(rows: Tensor, call: _Call) -> Tensor:
    """The gradient of sources, given that of the reduced features of the first destinations."""
    graph, weight, count = call.graph, call.weight, rows.size(0)
    if count == 0:
        return rows.new_zeros(graph.num_src, rows.size(1))
    if call.how == "mean":
        degree = graph.indptr[: count + 1].diff().clamp(min=1)
        rows = divided(rows, degree.to(rows.dtype).unsqueeze(-1))
    if count < graph.num_dst:
        if graph.known_transpose is None and graph.edge_id is None and 2 * count < graph.num_dst:
            num_edges = int(graph.indptr[count])
            pointers, indices = graph.indptr[: count + 1], graph.indices[:num_edges]
            graph = Adjacency.of_checked(pointers, indices, graph.num_src)
            weight = None if weight is None else weight[:num_edges]
        else:
            rest = rows.new_zeros(graph.num_dst - count, rows.size(1))
            rows = torch.cat([rows, rest])
    return aggregate(by_source(graph), rows, weight)
