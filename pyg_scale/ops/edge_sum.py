"""Features added up along edges in any order: for graphs too small to be worth grouping."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from pyg_scale.ops import library
from pyg_scale.ops.fused import applied, is_eager

NORMS = ("sum", "mean", "gcn", "symmetric")


def edge_sum(
    x: Tensor,
    edge_index: Tensor,
    num_dst: int,
    norm: str = "sum",
    weight: Tensor | None = None,
    own: float = 0.0,
) -> Tensor:
    """Add up, for every node, the features of the nodes that its edges come from.

    Rows are added in the order of the edges, by one thread. It can be differentiated any number of
    times: the gradient of ``x`` is the same sum along the transposed edges.

    Args:
        x: Features of sources, ``float32`` or ``float64`` ``[num_src, channels]``, on the CPU.
        edge_index: ``int64`` ``[2, num_edges]``, sources and destinations.
        num_dst: Number of destinations.
        norm: ``"sum"``; ``"mean"``, which divides by the number of edges; ``"symmetric"``, which
            multiplies with ``1 / sqrt(degree of source * degree of destination)``, where a degree
            is the sum of the weights of edges; or ``"gcn"``, the normalisation of Kipf and Welling
            (ICLR 2017), the same where every node has one self-loop: its last one, or one of weight
            1.
        weight: ``[num_edges]``, of the type of ``x``; ``None`` is 1. Only a sum and a mean have
            gradients of it.
        own: A factor; that much of a node's own features is added. It needs as many destinations as
            sources.

    Returns:
        ``[num_dst, channels]``; zeros for a node without edges, but for ``"gcn"`` and ``own``.

    Raises:
        ValueError: If an argument is of another type or shape, or an edge names a node that does
            not exist.
        NotImplementedError: If ``weight`` needs a gradient that is not covered.
    """
    if norm not in NORMS:
        raise ValueError(f"norm must be one of {', '.join(NORMS)} (got {norm!r})")
    given = x, edge_index, weight, num_dst, NORMS.index(norm), own, False
    weighted = weight is not None and weight.requires_grad
    if weighted and norm not in ("sum", "mean"):
        raise NotImplementedError(f"norm={norm!r} has no gradient of weight: detach it")
    if weighted or x.requires_grad or getattr(forward_ad, "_current_level", -1) >= 0:
        return _apply(*given) if is_eager() else _EdgeSum.apply(*given)
    return run_edge_sum(*given)


def run_edge_sum(
    x: Tensor,
    edge_index: Tensor,
    weight: Tensor | None,
    num_dst: int,
    norm: int,
    own: float,
    transposed: bool,
) -> Tensor:
    """The sum without a gradient, of the edges or of the transposed ones.

    Args:
        x: See :func:`edge_sum`, as for the rest.
        edge_index: See there.
        weight: See there.
        num_dst: Number of rows of the result.
        norm: The index in :data:`NORMS`.
        own: See there.
        transposed: If True, edges lead from their destinations to their sources. Degrees are those
            of the edges as they are.
    """
    if library.compiled():
        op = torch.ops.pyg_scale.edge_sum.default
        return op(x.contiguous(), edge_index, weight, num_dst, norm, own, transposed)
    return edge_sum_plain(x, edge_index, weight, num_dst, NORMS[norm], own, transposed)


class _EdgeSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        edge_index: Tensor,
        weight: Tensor | None,
        num_dst: int,
        norm: int,
        own: float,
        transposed: bool,
    ) -> Tensor:
        of_weight = ctx.needs_input_grad[2]
        ctx.save_for_backward(edge_index, weight, x if of_weight else None)
        ctx.rest = x.size(0), norm, own, not transposed
        return run_edge_sum(x, edge_index, weight, num_dst, norm, own, transposed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        edge_index, weight, x = ctx.saved_tensors
        _, norm, _, back = ctx.rest
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            # Without another function around it, unless it is to be differentiated again.
            run = _EdgeSum.apply if torch.is_grad_enabled() else run_edge_sum
            of_x = run(grad, edge_index, weight, *ctx.rest)
        if x is not None:
            wanted = torch.is_grad_enabled()  # to be differentiated again
            dots = weight_grad_plain if wanted else run_weight_grad
            of_weight = dots(x, grad, edge_index, NORMS[norm] == "mean", not back)
        return of_x, None, of_weight, None, None, None, None


_apply = applied(_EdgeSum)


def run_weight_grad(
    x: Tensor, grad: Tensor, edge_index: Tensor, mean: bool, transposed: bool
) -> Tensor:
    """The gradient of the weights of a sum or a mean, without a gradient: ``[num_edges]``.

    Args:
        x: The features that were added up, ``[num_src, channels]``.
        grad: The gradient of the result, ``[num_dst, channels]``.
        edge_index: See :func:`edge_sum`.
        mean: True for a mean.
        transposed: See :func:`run_edge_sum`.
    """
    if library.compiled():
        op = torch.ops.pyg_scale.edge_sum_weight_grad.default
        return op(x.contiguous(), grad.contiguous(), edge_index, mean, transposed)
    return weight_grad_plain(x, grad, edge_index, mean, transposed)


def weight_grad_plain(
    x: Tensor, grad: Tensor, edge_index: Tensor, mean: bool, transposed: bool
) -> Tensor:
    """The meaning of the compiled gradient of weights, up to rounding: it sums in another order."""
    source, target = edge_index.flip(0) if transposed else edge_index
    dots = (x.index_select(0, source) * grad.index_select(0, target)).sum(-1)
    if not mean:
        return dots
    count = torch.bincount(edge_index[1], minlength=(x if transposed else grad).size(0))
    return dots / count[edge_index[1]].to(dots.dtype)


def edge_sum_plain(
    x: Tensor,
    edge_index: Tensor,
    weight: Tensor | None,
    num_dst: int,
    norm: str,
    own: float,
    transposed: bool,
) -> Tensor:
    """The meaning of the compiled op: of the edges, or of the transposed ones."""
    _check(x, edge_index, weight, num_dst, norm, own, transposed)
    source, target = edge_index.flip(0) if transposed else edge_index
    receiver, receivers = edge_index[1], x.size(0) if transposed else num_dst
    out = x.new_zeros(num_dst, x.size(1))
    if norm in ("gcn", "symmetric"):
        out = _normalized_sum(x, source, target, receiver, weight, norm == "gcn")
    else:
        count = x.new_zeros(receivers).index_add_(0, receiver, x.new_ones(receiver.numel()))
        count = count.clamp(min=1).view(-1, 1)
        rows = x[source]
        factor = None if weight is None else weight.view(-1, 1)
        if norm == "mean" and transposed:
            inverse = count.reciprocal()[source]
            factor = inverse if factor is None else inverse * factor
        out.index_add_(0, target, rows if factor is None else rows * factor)
        if norm == "mean" and not transposed:
            out = out / count
    return out + own * x if own else out


def _normalized_sum(
    x: Tensor,
    source: Tensor,
    target: Tensor,
    receiver: Tensor,
    weight: Tensor | None,
    loops: bool,
) -> Tensor:
    weight = x.new_ones(source.numel()) if weight is None else weight
    loop = None
    if loops:
        others, loop = source != target, x.new_ones(x.size(0))
        for node, of_loop in zip(source[~others].tolist(), weight[~others]):  # the last one counts
            loop[node] = of_loop
        source, target, receiver = source[others], target[others], receiver[others]
        weight = weight[others]
    degree = x.new_zeros(x.size(0)).index_add_(0, receiver, weight)
    degree = degree if loop is None else degree + loop
    # torch's own square root of float64 is not always the nearest number (torch 2.13).
    with np.errstate(invalid="ignore"):
        scale = torch.from_numpy(np.sqrt(degree.numpy())).reciprocal()
    scale = scale.masked_fill(degree == 0, 0.0)
    factor = scale[source] * scale[target] * weight
    out = torch.zeros_like(x).index_add_(0, target, x[source] * factor.view(-1, 1))
    return out if loop is None else out + x * (scale * scale * loop).view(-1, 1)


def _check(
    x: Tensor,
    edge_index: Tensor,
    weight: Tensor | None,
    num_dst: int,
    norm: str,
    own: float,
    transposed: bool,
) -> None:
    if x.dim() != 2 or x.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"x must be a 2-D float32 or float64 tensor (got {x.dtype}, {list(x.shape)})"
        )
    if edge_index.dtype != torch.int64 or edge_index.dim() != 2 or edge_index.size(0) != 2:
        raise ValueError(
            "edge_index must be an int64 tensor [2, num_edges] "
            f"(got {edge_index.dtype}, {list(edge_index.shape)})"
        )
    if (norm in ("gcn", "symmetric") or own) and num_dst != x.size(0):
        raise ValueError(
            f"norm={norm!r} and own={own} need as many destinations as sources "
            f"(got {num_dst} and {x.size(0)})"
        )
    if weight is not None and (weight.shape != edge_index.shape[1:] or weight.dtype != x.dtype):
        raise ValueError(
            f"weight must be of shape [{edge_index.size(1)}] and {x.dtype} "
            f"(got {list(weight.shape)}, {weight.dtype})"
        )
    sizes = (num_dst, x.size(0)) if transposed else (x.size(0), num_dst)
    for ids, size in zip(edge_index, sizes, strict=True):
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < size:
            raise ValueError(f"edge_index names nodes that do not exist: there are {size}")
