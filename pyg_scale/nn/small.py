"""Small inputs of layers: neighbours are reduced without grouping edges that are used once.

A step on a graph of a few dozen nodes takes as long as the Python around it. So these paths check
what a call needs and no more, call the ops without anything between, and, where a layer's linear
maps are plain, are one function for autograd, whose backward pass is a few products and one sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_scale.nn.aggregation import LINEAR, REDUCTIONS
from pyg_scale.nn.conv.base import pair_of, untouched
from pyg_scale.nn.fallback import SMALL, NotFused
from pyg_scale.nn.linear import is_linear
from pyg_scale.ops import fused, library
from pyg_scale.ops.edge_sum import NORMS, edge_sum

_PLAIN = (Tensor, torch.nn.Parameter)
_WIDE = (torch.float32, torch.float64)
_FEW = 1024
"""Number of edges below which torch's own functions add up rows with gradients faster: a function
of Python in the backward pass takes longer than they do."""


class Small(NamedTuple):
    """The input of a layer whose messages are the features of sources."""

    src: Tensor
    """Features of sources, ``[num_src, channels]``."""
    dst: Tensor | None
    """Features of destinations, the same tensor in a graph of one set of nodes."""
    edge_index: Tensor
    """``int64`` ``[2, num_edges]``."""
    num_dst: int
    """Number of destinations."""
    how: str
    """``"max"``, ``"min"`` or a norm of :func:`~pyg_scale.ops.edge_sum.edge_sum`."""


def small(layer: Any, x: Any, edge_index: Any, size: tuple[int, int] | None = None) -> Small:
    """The input of a call whose edges need not be grouped.

    Args:
        layer: A layer of PyG whose messages are the features of sources, weighted or not.
        x: ``[num_nodes, channels]``, or a pair of sources and destinations.
        edge_index: The edges passed to the layer, ``int64`` ``[2, num_edges]`` on the CPU.
        size: ``(num_src, num_dst)``, or ``None``.

    Raises:
        NotFused: If the call is not covered.
    """
    src, dst = pair_of(x)
    module = layer._modules["aggr_module"]
    how = REDUCTIONS.get(type(module))
    if (
        how is None
        or type(edge_index) is not Tensor
        or type(src) not in _PLAIN
        or src.dim() != 2
        or src.dtype not in _WIDE
        or not src.is_cpu
        or edge_index.size(0) != 2
        or layer.node_dim not in (-2, 0)
        or layer.flow != "source_to_target"
        or not untouched(module, type(module))
        or not library.compiled()
    ):
        raise NotFused(SMALL)
    num_dst = src.size(0) if dst is None else dst.size(0)
    if size is not None:
        if len(size) != 2 or size[0] not in (None, src.size(0)):
            raise NotFused(SMALL)  # and PyG says what is wrong
        if dst is None:
            num_dst = num_dst if size[1] is None else size[1]
        elif size[1] not in (None, num_dst):
            raise NotFused(SMALL)
    return Small(src, dst, edge_index, num_dst, how)


def small_weight(weight: Tensor | None, call: Small) -> Tensor | None:
    """Accept only weights ``[num_edges]`` of the type of the features.

    Raises:
        NotFused: If they are others.
    """
    if weight is not None and (
        type(weight) not in _PLAIN
        or weight.dim() != 1
        or weight.size(0) != call.edge_index.size(1)
        or weight.dtype is not call.src.dtype
        or call.how not in LINEAR
    ):
        raise NotFused(SMALL)
    return weight


def reduce_small(call: Small, weight: Tensor | None = None, own: float = 0.0) -> Tensor:
    """The result of ``propagate``: ``[num_dst, channels]``.

    Args:
        call: The input.
        weight: ``[num_edges]``, or ``None``.
        own: See :func:`~pyg_scale.ops.edge_sum.edge_sum`; 0 for ``"max"`` and ``"min"``.

    Raises:
        NotFused: If nodes of edges do not exist, so that PyG raises its error.
    """
    x, _, edge_index, num_dst, how = call
    learned = x if weight is None else weight
    if how == "sum" and own == 0.0 and learned.requires_grad and edge_index.size(1) < _FEW:
        return _sum_few(x, edge_index, num_dst, weight)
    try:
        if how in NORMS:
            return edge_sum(x, edge_index, num_dst, how, weight, own)
        wanted = x.requires_grad and torch.is_grad_enabled()
        group = torch.ops.pyg_scale.csr_group.default
        edges = group(edge_index, x.size(0), num_dst, -1, wanted)
    except ValueError as error:
        raise NotFused("edge_index has nodes that do not exist") from error
    fused.usable(x)  # registers gradients
    out: Tensor = fused.call("csr_extreme", *edges, x, None, how == "min")[0]
    return out


def _sum_few(x: Tensor, edge_index: Tensor, num_dst: int, weight: Tensor | None) -> Tensor:
    try:
        rows = x.index_select(0, edge_index[0])
        if weight is not None:
            rows = rows * weight.view(-1, 1)
        at = edge_index[1].view(-1, 1).expand_as(rows)
        return x.new_zeros(num_dst, x.size(1)).scatter_add_(0, at, rows)
    except (IndexError, RuntimeError) as error:
        raise NotFused("edge_index has nodes that do not exist") from error


def mapped_small(call: Small, weight: Tensor | None, linear: Any, root: Any) -> Tensor:
    """``linear(propagate(...)) + root(dst)``: ``[num_dst, out_channels]``.

    Args:
        call: The input.
        weight: ``[num_edges]``, or ``None``.
        linear: The map of the reduced neighbours.
        root: The map of the destinations' own features; ``None`` is zero, as are no features.

    Raises:
        NotFused: As :func:`reduce_small`.
    """
    dst = call.dst
    if dst is None:
        root = None
    if not _is_one_function(call, weight, linear, root):
        out: Tensor = linear(reduce_small(call, weight))
        return out if root is None else out + root(dst)
    both = None if root is None else root.weight
    others = None if root is None or dst is call.src else dst
    given = call.src, others, linear.weight, linear.bias, both, call, weight
    try:
        if torch.is_grad_enabled():
            mapped: Tensor = _apply_mapped(*given)
            return mapped
        return _map(*given)[0]
    except ValueError as error:
        raise NotFused("edge_index has nodes that do not exist") from error


def prepared_map(
    layer: Any, linear: Any, root: Any
) -> Callable[[Tensor, Tensor, Tensor], Tensor | None] | None:
    """:func:`mapped_small` without gradients and weights, with the layer looked at once.

    Args:
        layer: See :func:`small`.
        linear: See :func:`mapped_small`, as for ``root``.

    Returns:
        A function of the features of sources and destinations, which are of one type, and of the
        edges, which exist. It returns ``None`` if these are not covered. ``None`` if the layer is
        not covered.
    """
    module = layer._modules["aggr_module"]
    how = REDUCTIONS.get(type(module))
    if (
        how not in LINEAR
        or layer.node_dim not in (-2, 0)
        or layer.flow != "source_to_target"
        or not untouched(module, type(module))
        or not is_linear(linear)
        or type(linear.weight) is not torch.nn.Parameter
        or not library.compiled()
    ):
        return None
    if root is not None and (
        not is_linear(root) or root.bias is not None or type(root.weight) is not torch.nn.Parameter
    ):
        return None
    weight, bias = linear.weight, linear.bias
    own = None if root is None else root.weight

    def compute(src: Tensor, dst: Tensor, edge_index: Tensor) -> Tensor | None:
        kind = src.dtype
        if (
            kind not in _WIDE
            or weight.dtype is not kind
            or (own is not None and own.dtype is not kind)
            or type(src) is not Tensor
            or src.dim() != 2
            or torch.is_autocast_enabled("cpu")
            or torch.nn.modules.module._has_any_global_hook()
        ):
            return None
        call = Small(src, dst, edge_index, dst.size(0), how)
        return _map(src, None if dst is src else dst, weight, bias, own, call, None)[0]

    return compute


def _is_one_function(call: Small, weight: Tensor | None, linear: Any, root: Any) -> bool:
    kind = call.src.dtype
    if call.how not in LINEAR or (weight is not None and weight.requires_grad):
        return False
    if torch.is_autocast_enabled("cpu") or not is_linear(linear):
        return False
    of_neighbors = linear.weight
    if type(of_neighbors) is not torch.nn.Parameter or of_neighbors.dtype is not kind:
        return False
    if root is None:
        return True
    dst = call.dst
    return (
        is_linear(root)
        and root.bias is None
        and type(root.weight) is torch.nn.Parameter
        and root.weight.dtype is kind
        and (dst is call.src or (type(dst) in _PLAIN and dst.dim() == 2 and dst.dtype is kind))  # type: ignore[union-attr]
    )


def _map(
    src: Tensor,
    dst: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    root: Tensor | None,
    call: Small,
    edge_weight: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The result, and the reduced neighbours; ``dst`` is ``None`` if it is ``src``."""
    op, norm = torch.ops.pyg_scale.edge_sum.default, NORMS.index(call.how)
    x = src if src.is_contiguous() else src.contiguous()
    reduced = op(x, call.edge_index, edge_weight, call.num_dst, norm, 0.0, False)
    if bias is None:
        out = reduced.mm(weight.t())
    else:
        out = torch.addmm(bias, reduced, weight.t())
    if root is not None:
        out.addmm_(src if dst is None else dst, root.t())
    return out, reduced


class _Mapped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        out, reduced = _map(*given)
        ctx.save_for_backward(*given[:5], reduced)
        ctx.rest = given[5:]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        src, dst, weight, _, root, reduced = ctx.saved_tensors
        call, edge_weight = ctx.rest
        needed = ctx.needs_input_grad[:5]
        if torch.is_grad_enabled():  # to be differentiated again
            grads = _differentiable(ctx.saved_tensors[:5], call, edge_weight, needed, grad)
            return *grads, None, None
        back = grad.t()
        of_src = of_dst = None
        if needed[0]:
            op, norm = torch.ops.pyg_scale.edge_sum.default, NORMS.index(call.how)
            rows = grad.mm(weight)
            of_src = op(rows, call.edge_index, edge_weight, src.size(0), norm, 0.0, True)
            if root is not None and dst is None:
                of_src.addmm_(grad, root)
        if needed[1]:
            of_dst = grad.mm(root)
        return (
            of_src,
            of_dst,
            back.mm(reduced) if needed[2] else None,
            grad.sum(0) if needed[3] else None,
            back.mm(src if dst is None else dst) if needed[4] else None,
            None,
            None,
        )


_apply_mapped = fused.applied(_Mapped)


def _differentiable(
    given: tuple[Tensor | None, ...],
    call: Small,
    edge_weight: Tensor | None,
    needed: tuple[bool, ...],
    grad: Tensor,
) -> list[Tensor | None]:
    """The gradients of :class:`_Mapped`, by functions that can be differentiated."""
    # Views, as one of the tensors may have been computed from another.
    views = [t.view_as(t) if t is not None and n else t for t, n in zip(given, needed)]
    src, dst, weight, bias, root = views
    assert src is not None and weight is not None
    out = edge_sum(src, call.edge_index, call.num_dst, call.how, edge_weight)
    out = torch.nn.functional.linear(out, weight, bias)
    if root is not None:
        own = src if dst is None else dst
        out = out + own @ root.t()
    inputs = [t for t, n in zip(views, needed) if t is not None and n]
    found = iter(torch.autograd.grad(out, inputs, grad, create_graph=True))
    return [next(found) if n else None for n in needed]
