"""Features added up along edges in any order: for graphs too small to be worth grouping."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from pyg_scale.ops import library

NORMS = ("sum", "mean", "gcn")


def edge_sum(x: Tensor, edge_index: Tensor, num_dst: int, norm: str = "sum") -> Tensor:
    """Add up, for every node, the features of the nodes that its edges come from.

    Rows are added in the order of the edges, by one thread. It can be differentiated any number of
    times: the gradient is the same sum along the transposed edges.

    Args:
        x: Features of sources, ``float32`` or ``float64`` ``[num_src, channels]``, on the CPU.
        edge_index: ``int64`` ``[2, num_edges]``, sources and destinations.
        num_dst: Number of destinations.
        norm: ``"sum"``; ``"mean"``, which divides by the number of edges; or ``"gcn"``, the
            normalisation of Kipf and Welling (ICLR 2017): every node has one self-loop, and an edge
            the weight ``1 / sqrt(degree of source * degree of destination)``.

    Returns:
        ``[num_dst, channels]``; zeros for a node without edges, but for ``"gcn"``.

    Raises:
        ValueError: If an argument is of another type or shape, or an edge names a node that does
            not exist.
    """
    if norm not in NORMS:
        raise ValueError(f"norm must be one of {', '.join(NORMS)} (got {norm!r})")
    given = x, edge_index, num_dst, NORMS.index(norm), False
    if x.requires_grad or getattr(forward_ad, "_current_level", -1) >= 0:
        return _EdgeSum.apply(*given)
    return _sum(*given)


def _sum(x: Tensor, edge_index: Tensor, num_dst: int, norm: int, transposed: bool) -> Tensor:
    if library.compiled():
        op = torch.ops.pyg_scale.edge_sum
        return op(x.contiguous(), edge_index, num_dst, norm, transposed)
    return edge_sum_plain(x, edge_index, num_dst, NORMS[norm], transposed)


class _EdgeSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, edge_index: Tensor, num_dst: int, norm: int, transposed: bool
    ) -> Tensor:
        ctx.save_for_backward(edge_index)
        ctx.rest = x.size(0), norm, not transposed
        return _sum(x, edge_index, num_dst, norm, transposed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (edge_index,) = ctx.saved_tensors
        # Without another function around it, unless it is to be differentiated again.
        run = _EdgeSum.apply if torch.is_grad_enabled() else _sum
        return run(grad, edge_index, *ctx.rest), None, None, None, None


def edge_sum_plain(
    x: Tensor, edge_index: Tensor, num_dst: int, norm: str, transposed: bool
) -> Tensor:
    """The meaning of the compiled op: of the edges, or of the transposed ones."""
    _check(x, edge_index, num_dst, norm, transposed)
    source, target = edge_index.flip(0) if transposed else edge_index
    receiver, receivers = edge_index[1], x.size(0) if transposed else num_dst
    if norm == "gcn":
        others = source != target
        source, target, receiver = source[others], target[others], receiver[others]
    degree = x.new_zeros(receivers).index_add_(0, receiver, x.new_ones(receiver.numel()))
    out = x.new_zeros(num_dst, x.size(1))
    if norm == "gcn":
        # torch's own square root of float64 is not always the nearest number (torch 2.13).
        factor = torch.from_numpy(np.sqrt((degree + 1).numpy())).reciprocal()
        weight = factor[source] * factor[target]
        out.index_add_(0, target, x[source] * weight.view(-1, 1))
        return out + x * (factor * factor).view(-1, 1)
    degree = degree.clamp(min=1).view(-1, 1)
    if norm == "mean" and transposed:
        return out.index_add_(0, target, x[source] * degree.reciprocal()[source])
    out.index_add_(0, target, x[source])
    return out / degree if norm == "mean" else out


def _check(x: Tensor, edge_index: Tensor, num_dst: int, norm: str, transposed: bool) -> None:
    if x.dim() != 2 or x.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"x must be a 2-D float32 or float64 tensor (got {x.dtype}, {list(x.shape)})"
        )
    if edge_index.dtype != torch.int64 or edge_index.dim() != 2 or edge_index.size(0) != 2:
        raise ValueError(
            "edge_index must be an int64 tensor [2, num_edges] "
            f"(got {edge_index.dtype}, {list(edge_index.shape)})"
        )
    if norm == "gcn" and num_dst != x.size(0):
        raise ValueError(
            f"norm='gcn' needs as many destinations as sources (got {num_dst} and {x.size(0)})"
        )
    sizes = (num_dst, x.size(0)) if transposed else (x.size(0), num_dst)
    for ids, size in zip(edge_index, sizes, strict=True):
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < size:
            raise ValueError(f"edge_index names nodes that do not exist: there are {size}")
