"""Reduce the features of neighbours without a tensor of shape ``[num_edges, channels]``.

PyG's message passing gathers a row per edge and then scatters the rows: three times the memory
traffic of reading each row once, and a tensor that grows with the edges. This op accumulates a row
of the result in registers while the rows of its neighbours are read (as in GE-SpMM, Huang et al.,
SC 2020, and FusedMM, Rahman et al., IPDPS 2021). Gradients run over the transposed graph in the
same way, so nothing is ever scattered: results have the same bits in every run and for any number
of threads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyg_scale.ops import fused, library
from pyg_scale.ops.adjacency import Adjacency, from_csr, recording, rows_of

REDUCTIONS = ("sum", "mean", "max", "min")
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""The dtypes of features. The two short types are accumulated in ``float32``."""


def csr_aggregate(
    indptr: Tensor,
    indices: Tensor,
    x: Tensor,
    weight: Tensor | None = None,
    reduce: str = "sum",
    *,
    edge_id: Tensor | None = None,
) -> Tensor:
    """Reduce, for every destination, the rows of ``x`` that its edges come from.

    The transposed graph, which the gradient with respect to ``x`` needs, is made once and kept for
    as long as ``indices`` lives: pass the same tensors again, or use :func:`aggregate`.

    Args:
        indptr: ``int64`` or ``int32`` ``[num_dst + 1]``.
        indices: ``int64`` or ``int32`` ``[num_edges]``, rows of ``x``.
        x: See :func:`aggregate`.
        weight: See :func:`aggregate`.
        reduce: See :func:`aggregate`.
        edge_id: See :class:`pyg_scale.ops.adjacency.Adjacency`.

    Returns:
        ``[num_dst, ...]``.

    Raises:
        TypeError: As :func:`aggregate`, and if an index tensor is not ``int64`` or ``int32``.
        ValueError: As :func:`aggregate`, and if the edges are not a valid graph on the rows of
            ``x``.
    """
    if x.dim() == 0:
        raise ValueError("x is a single number; expected [num_src, ...]")
    return aggregate(from_csr(indptr, indices, x.size(0), edge_id), x, weight, reduce)


def aggregate(
    adjacency: Adjacency, x: Tensor, weight: Tensor | None = None, reduce: str = "sum"
) -> Tensor:
    """Reduce, for every destination, the rows of ``x`` that its edges come from.

    Where destinations have no edges the result is 0, for ``mean``, ``max`` and ``min`` too, as in
    PyG. If extremes are equal, the edge of the smallest position gets the whole gradient. If a
    candidate of an extreme is NaN, the result is NaN. Under autocast a ``float32`` ``x`` is cast to
    its type, weights are not. Gradients can be differentiated again: those of ``sum`` and ``mean``
    with respect to ``x`` by the same op, others in plain torch, which takes as much memory as PyG.

    Args:
        adjacency: The edges.
        x: ``[num_src, ...]``, ``float32``, ``float64``, ``bfloat16`` or ``float16``.
        weight: Factor of the row of each edge, ``[num_edges]``, or ``[num_edges, heads]`` for ``x``
            of ``[num_src, heads, channels]``, by edge id. Converted to ``float32``, for ``float64``
            features to ``float64``.
        reduce: ``"sum"``, ``"mean"`` (the sum by the number of edges, whatever their weights),
            ``"max"`` or ``"min"``.

    Returns:
        ``[num_dst, ...]``, of the type of ``x``.

    Raises:
        TypeError: If ``x`` or ``weight`` is not of a floating type.
        ValueError: If ``reduce`` is none of the four, or shapes or devices do not fit.
    """
    _check(adjacency, x, weight, reduce)
    x = autocast(x)
    compiled = fused.usable(x)
    heads = 1 if weight is None or weight.dim() == 1 else weight.size(1)
    rows = x if x.dim() == 2 else x.reshape(x.size(0), row_numel(x))
    if weight is not None:
        weight = weight.view(-1, heads).to(accumulator(x.dtype))
    if not compiled:
        if x.device.type in ("cpu", "cuda") and not torch.compiler.is_compiling():
            library.warn_plain_path("csr_aggregate", fused.why_not(x.device))
        csr = (adjacency.indptr, adjacency.indices, adjacency.edge_id)
        out = aggregate_plain(*csr, rows, weight, reduce)
        return out.view(out.size(0), *x.shape[1:])
    edges = fused_edges(adjacency, x.requires_grad)
    if reduce in ("sum", "mean"):
        out = fused.call("csr_sum", *edges, rows, weight, reduce == "mean")
    else:
        out, _ = fused.call("csr_extreme", *edges, rows, weight, reduce == "min")
    return out if x.dim() == 2 else out.view(out.size(0), *x.shape[1:])


def aggregate_exactly(graph: Adjacency, x: Tensor, weight: Tensor | None, reduce: str) -> Tensor:
    """:func:`aggregate` in the type of ``x``, as PyG's scatter, also under autocast."""
    if torch.is_autocast_enabled(x.device.type):
        with torch.autocast(x.device.type, enabled=False):
            return aggregate(graph, x, weight, reduce)
    return aggregate(graph, x, weight, reduce)


def edge_dot(adjacency: Adjacency, x: Tensor, y: Tensor) -> Tensor:
    """The product of the rows at both ends of every edge, for each head.

    It can be differentiated any number of times.

    Args:
        adjacency: The edges.
        x: Rows of sources, ``[num_src, heads, channels]``, of a floating type.
        y: Rows of destinations, ``[num_dst, heads, channels]``, of the same type.

    Returns:
        ``[num_edges, heads]``, by edge id, of the type of ``x``.

    Raises:
        TypeError: If ``x`` or ``y`` is not of a floating type, or they differ.
        ValueError: If shapes or devices do not fit.
    """
    check_floats(adjacency.device, x=x, y=y)
    if x.dtype != y.dtype:
        raise TypeError(f"x and y must be of one type (got {x.dtype} and {y.dtype})")
    if (
        x.dim() != 3
        or x.shape[1:] != y.shape[1:]
        or (x.size(0), y.size(0))
        != (
            adjacency.num_src,
            adjacency.num_dst,
        )
    ):
        raise ValueError(
            f"expected x and y of shape [{adjacency.num_src}, heads, channels] and "
            f"[{adjacency.num_dst}, heads, channels] (got {list(x.shape)} and {list(y.shape)})"
        )
    return _EdgeDot.apply(x, y, adjacency)


class _EdgeDot(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, adjacency: Adjacency) -> Tensor:
        ctx.save_for_backward(x, y)
        ctx.adjacency = adjacency
        indptr, indices, edge_id = adjacency.indptr, adjacency.indices, adjacency.edge_id
        if fused.usable(x):
            rows = (each.reshape(each.size(0), row_numel(each)) for each in (x, y))
            rest = None, x.size(1), False
            out = fused.call("csr_weight_grad", indptr, indices, edge_id, *rows, *rest)
            return out.to(x.dtype)
        kind = accumulator(x.dtype)
        row = rows_of(indptr, indices.numel())
        out = (x.to(kind)[indices] * y.to(kind)[row]).sum(-1).to(x.dtype)
        if edge_id is None:
            return out
        return torch.empty_like(out).index_copy(0, edge_id.to(torch.int64), out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, y = ctx.saved_tensors
        of_x = of_y = None
        if ctx.needs_input_grad[0]:
            of_x = aggregate(by_source(ctx.adjacency), y, grad)
        if ctx.needs_input_grad[1]:
            of_y = aggregate(ctx.adjacency, x, grad)
        return of_x, of_y, None


def by_source(adjacency: Adjacency) -> Adjacency:
    """The same edges with the same ids in the other direction, grouped by source."""
    indptr, rows, position = adjacency.transpose()
    edge_id = adjacency.edge_id
    ids = position if edge_id is None else edge_id.index_select(0, position)
    return Adjacency.of_checked(indptr, rows, adjacency.num_dst, ids)


def aggregate_plain(
    indptr: Tensor,
    indices: Tensor,
    edge_id: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    reduce: str,
) -> Tensor:
    """The meaning of the compiled op: ``x`` is ``[num_src, F]``, ``weight`` ``[num_edges, H]``."""
    num_dst = indptr.numel() - 1
    row = rows_of(indptr, indices.numel())
    values = x.to(accumulator(x.dtype)).index_select(0, indices)
    if weight is not None:
        by_position = weight if edge_id is None else weight.index_select(0, edge_id)
        heads = weight.size(1)
        shaped = values.view(values.size(0), heads, values.size(1) // heads)
        values = (shaped * by_position.unsqueeze(-1)).view(values.shape)
    if reduce in ("sum", "mean"):
        out = values.new_zeros(num_dst, x.size(1)).index_add(0, row, values)
        if reduce == "mean":
            out = out / indptr.diff().clamp(min=1).to(out.dtype).unsqueeze(-1)
        return out.to(x.dtype)
    sign = -1 if reduce == "min" else 1
    arg = _first_extreme(row, sign * values.detach(), num_dst)
    # A row of zeros follows the last edge, for destinations without edges.
    values = torch.cat([values, values.new_zeros(1, values.size(1))])
    return values.gather(0, arg).to(x.dtype)


def _first_extreme(row: Tensor, values: Tensor, num_dst: int) -> Tensor:
    """The first position of the largest value of each row and column, or the number of edges."""
    index = row.unsqueeze(-1).expand_as(values)
    best = values.new_full((num_dst, values.size(1)), float("-inf"))
    best = best.scatter_reduce(0, index, values, "amax")
    of_row = best.gather(0, index)
    found = (values == of_row) | (values.isnan() & of_row.isnan())
    none = values.size(0)
    position = torch.arange(none, device=values.device).unsqueeze(-1)
    position = torch.where(found, position, none)
    first = position.new_full((num_dst, values.size(1)), none)
    return first.scatter_reduce(0, index, position, "amin")


# Shared by the ops of the layers ###########################################################


def autocast(x: Tensor) -> Tensor:
    """``x`` in the type of matrix products: autocast casts ``float32`` to the short type."""
    kind = x.device.type
    if x.dtype == torch.float32 and torch.is_autocast_enabled(kind):
        return x.to(torch.get_autocast_dtype(kind))
    return x


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums, weights and logits of features are computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def row_numel(x: Tensor) -> int:
    """Number of elements of a row of ``x``; unlike -1 in a shape, also defined without rows."""
    numel = 1
    for size in x.shape[1:]:
        numel *= size
    return numel


def fused_edges(
    adjacency: Adjacency, by_source: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """The six tensors that describe a graph to the compiled ops.

    Args:
        adjacency: The edges.
        by_source: True if a gradient needs them grouped by source. A recorded run groups them
            itself, unless they were grouped before.
    """
    transposed = adjacency.known_transpose
    kept = torch.is_grad_enabled() and not recording()
    if transposed is None and by_source and kept:
        transposed = adjacency.transpose()
    edges = (adjacency.indptr, adjacency.indices, adjacency.edge_id)
    return (*edges, *transposed) if transposed is not None else (*edges, None, None, None)


def check_floats(device: torch.device, **tensors: Tensor | None) -> None:
    """Refuse tensors (by argument name) on another device or of a type that is not floating."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.dtype not in FLOATS:
            raise TypeError(
                f"{name} must be float32, float64, bfloat16 or float16 (got {tensor.dtype})"
            )
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}, but the edges are on {device}")


def _check(adjacency: Adjacency, x: Tensor, weight: Tensor | None, reduce: str) -> None:
    if reduce not in REDUCTIONS:
        raise ValueError(f"reduce must be one of {', '.join(REDUCTIONS)} (got {reduce!r})")
    check_floats(adjacency.device, x=x, weight=weight)
    if x.dim() == 0 or x.size(0) != adjacency.num_src:
        raise ValueError(
            f"x must have a row for each of the {adjacency.num_src} source nodes "
            f"(got shape {list(x.shape)})"
        )
    if weight is None:
        return
    num_edges = adjacency.num_edges
    if weight.dim() not in (1, 2) or weight.size(0) != num_edges:
        raise ValueError(
            f"weight must be of shape [{num_edges}] or [{num_edges}, heads] "
            f"(got {list(weight.shape)})"
        )
    if weight.dim() == 2 and (x.dim() != 3 or x.size(1) != weight.size(1)):
        raise ValueError(
            f"a weight of shape {list(weight.shape)} needs x of shape "
            f"[num_src, {weight.size(1)}, channels] (got {list(x.shape)})"
        )
