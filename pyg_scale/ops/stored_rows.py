"""Rows as a store holds them, and their sums over neighbours: decoded while they are added up.

A store may hold numbers in fewer bytes (:mod:`pyg_scale.ops.quantize`), and the rows of a batch in
two matrices: slots of a cache, and a buffer with the rows that the cache lacked. The compiled ops
read such rows where they are; results have the bits of those of the rows gathered before.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_scale.ops import fused
from pyg_scale.ops.adjacency import Adjacency
from pyg_scale.ops.aggregate import FLOATS, accumulator, aggregate_plain
from pyg_scale.ops.gather import gather
from pyg_scale.ops.gather_cached import gather_cached
from pyg_scale.ops.quantize import dequantize, head_of

_FORMS = {
    torch.float32: (torch.uint8, torch.float16, torch.bfloat16),
    torch.float64: (torch.uint8,),
}
"""The stored dtypes that the compiled ops read as another dtype."""


class StoredRows(NamedTuple):
    """Rows that are read as floating point numbers, by their places."""

    rows: Tensor
    """``[num_rows, width]`` on the CPU, with contiguous rows: of ``dtype``, in half precision, or
    ``uint8`` of :func:`~pyg_scale.ops.quantize.quantize_rows`, or with ``scale`` and ``zero`` of
    :func:`~pyg_scale.ops.quantize.quantize_columns`."""
    dtype: torch.dtype
    """The dtype of the numbers."""
    rest: Tensor | None = None
    """``[m, width]``, more rows like those of ``rows``: row ``p`` has the place ``-1 - p``."""
    scale: Tensor | None = None
    """Scales of columns, ``[columns]``."""
    zero: Tensor | None = None
    """Zeros of columns, ``[columns]``."""
    lease: Any = None
    """Keeps the owner of the rows from changing them, as long as somebody holds it."""

    @property
    def columns(self) -> int:
        """Number of columns of the numbers."""
        packed = self.rows.dtype == torch.uint8 and self.scale is None
        return self.rows.size(1) - (head_of(self.dtype) if packed else 0)

    @property
    def matrix(self) -> Tensor | None:
        """The numbers themselves where a plain matrix has them all; else ``None``."""
        return self.rows if self.rest is None and self.rows.dtype == self.dtype else None

    @property
    def readable(self) -> bool:
        """True if the numbers have a form that :func:`aggregate_stored` reads: ``float32`` in any
        form, ``float64`` in ``int8``, and all floating types as they are."""
        rows = self.rows
        return (
            (self.dtype in FLOATS and rows.dtype == self.dtype)
            or rows.dtype in _FORMS.get(self.dtype, ())
        ) and (
            type(rows) is Tensor
            and rows.layout == torch.strided
            and rows.is_cpu
            and rows.dim() == 2
            and rows.is_contiguous()
            and not rows.requires_grad
            and self.columns >= 0
        )

    def gather(self, index: Tensor) -> Tensor:
        """The rows at places, ``[n, columns]`` of ``dtype``.

        Args:
            index: ``int64`` or ``int32`` ``[n]``.

        Raises:
            IndexError: If there is no row at a place.
        """
        rows = self.rows
        if self.rest is not None:
            rows = gather_cached(rows, self.rest, index)
            if rows.dtype == self.dtype:
                return rows
            index = torch.arange(rows.size(0))
        elif rows.dtype == self.dtype:
            return gather(rows, index)
        return dequantize(rows, index, self.dtype, self.scale, self.zero)


def aggregate_stored(
    adjacency: Adjacency, stored: StoredRows, weight: Tensor | None = None, reduce: str = "sum"
) -> Tensor:
    """Reduce, for every destination, the rows that its edges come from, without gathering them.

    The result has the bits of :func:`~pyg_scale.ops.aggregate.aggregate` of ``stored.gather``, and
    no gradient. Needs compiled kernels.

    Args:
        adjacency: The edges; its indices are places of ``stored``.
        stored: The rows.
        weight: Factor of the row of each edge, ``[num_edges]``, by edge id.
        reduce: ``"sum"``, ``"mean"``, ``"max"`` or ``"min"``.

    Returns:
        ``[num_dst, columns]``, of the dtype of ``stored``.

    Raises:
        ValueError: If an edge comes from a place without a row.
    """
    if weight is not None:
        weight = weight.detach().view(-1, 1).to(accumulator(stored.dtype))
    edges = adjacency.indptr, adjacency.indices, adjacency.edge_id
    given = *edges, stored.rows, stored.rest, stored.scale, stored.zero, stored.dtype, weight
    if reduce in ("sum", "mean"):
        out: Tensor = torch.ops.pyg_scale.stored_sum(*given, reduce == "mean")
    else:
        out = torch.ops.pyg_scale.stored_extreme(*given, reduce == "min")
    return out


def aggregate_stored_plain(
    adjacency: Adjacency, stored: StoredRows, weight: Tensor | None = None, reduce: str = "sum"
) -> Tensor:
    """The meaning of :func:`aggregate_stored` in plain torch: gather, decode and reduce."""
    places = torch.arange(adjacency.num_edges)
    rows = stored.gather(adjacency.indices)
    weight = None if weight is None else weight.view(-1, 1).to(accumulator(stored.dtype))
    return aggregate_plain(adjacency.indptr, places, adjacency.edge_id, rows, weight, reduce)


def usable() -> bool:
    """Return True if rows are read where they are in this call: with kernels, and not in a trace.

    Raises:
        KernelsError: If kernels cannot be used and ``PYG_SCALE_KERNELS=require``.
    """
    return fused.is_eager() and fused.usable(torch.empty(0))
