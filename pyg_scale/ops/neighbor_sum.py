"""The sum over the neighbours of each node: the adjacency matrix times a dense matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_scale.ops import library
from pyg_scale.ops.csc import expand_pointers


def neighbor_sum(
    indptr: Tensor, indices: Tensor, x: Tensor, *, weights: Tensor | None = None
) -> Tensor:
    """Add up, for every node, the rows of its neighbours, in their order.

    The result has the same bits for any number of threads.

    Args:
        indptr: ``int64`` ``[num_nodes + 1]``.
        indices: ``int32`` or ``int64`` ``[num_entries]``, rows of ``x``. May be strided.
        x: ``float64`` ``[num_rows]`` or ``[num_rows, channels]``.
        weights: ``float64`` ``[num_entries]``, the factor of each entry. ``None``: 1 each.

    Returns:
        ``float64`` ``[num_nodes]`` or ``[num_nodes, channels]``.

    Raises:
        ValueError: If ``x`` or ``weights`` is of another type or shape.
    """
    if x.dtype != torch.float64 or x.dim() not in (1, 2):
        raise ValueError(
            f"x must be float64 of one or two dimensions (got {x.dtype}, {list(x.shape)})"
        )
    if weights is not None and (
        weights.dtype != torch.float64 or weights.shape != (indices.numel(),)
    ):
        raise ValueError(
            f"weights must be float64 of shape [{indices.numel()}] "
            f"(got {weights.dtype}, {list(weights.shape)})"
        )
    rows = x if x.dim() == 2 else x.view(-1, 1)
    if library.compiled():
        none = torch.empty(0, dtype=torch.float64)
        entries = none if weights is None else weights.contiguous()
        op = torch.ops.pyg_scale.neighbor_sum
        out = op(indptr, indices, entries, rows.contiguous(), library.num_threads())
    else:
        out = neighbor_sum_plain(indptr, indices, rows, weights)
    return out.view(out.size(0), *x.shape[1:])


def neighbor_sum_plain(
    indptr: Tensor, indices: Tensor, x: Tensor, weights: Tensor | None
) -> Tensor:
    """The meaning of the compiled op: ``x`` has two dimensions."""
    values = x[indices.to(torch.int64)]
    if weights is not None:
        values = values * weights.view(-1, 1)
    row = expand_pointers(indptr, indices.numel()).to(torch.int64)
    out = torch.zeros(indptr.numel() - 1, x.size(1), dtype=torch.float64)
    return out.index_add_(0, row, values)
