"""Edges grouped by ranges of destinations: the first half of grouping more than memory holds."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pyg_scale.ops import library


class Ranges(NamedTuple):
    """Ranges of nodes that follow one another, from node 0 on."""

    bounds: Tensor
    """``int64`` ``[num_ranges + 1]``: range ``r`` is ``bounds[r]`` to ``bounds[r + 1] - 1``."""
    table: Tensor
    """``int32``, for every bin of ``2**shift`` nodes the range that it lies in, or -1 where one
    begins inside it."""
    shift: int

    @classmethod
    def of(cls, bounds: Tensor, shift: int) -> Ranges:
        """The ranges between bounds, to be looked up by bins of ``2**shift`` nodes."""
        bins = max(1, (int(bounds[-1]) + (1 << shift) - 1) >> shift)
        first = torch.arange(bins) << shift
        last = (first + (1 << shift) - 1).clamp(max=max(0, int(bounds[-1]) - 1))
        begin = torch.searchsorted(bounds, first, right=True) - 1
        end = torch.searchsorted(bounds, last, right=True) - 1
        return cls(bounds, torch.where(begin == end, begin, -1).to(torch.int32), shift)


class Grouped(NamedTuple):
    """A chunk of edges by range; within one, in the order in which they were given."""

    dst: Tensor
    """``int32``, the destination less the first node of its range."""
    src: Tensor
    """``int32`` or ``int64``."""
    order: Tensor
    """``int32``, where the edge stood in the chunk."""
    counts: Tensor
    """``int64`` ``[num_blocks, num_ranges]``: how many edges of each block of the chunk go to each
    range."""


def edge_buckets(dst: Tensor, src: Tensor, ranges: Ranges, block: int, *, wide: bool) -> Grouped:
    """Group a chunk of edges by the range that their destination is in.

    Args:
        dst: ``int64`` or ``int32`` ``[n]``, each within the ranges.
        src: The same dtype and shape.
        ranges: The ranges. None may be longer than ``2**31``.
        block: Edges of a block.
        wide: Whether sources come out as ``int64``.
    """
    dst, src = dst.contiguous(), src.contiguous()
    if library.compiled():
        bounds, table, shift = ranges
        return Grouped(
            *torch.ops.pyg_scale.edge_buckets(dst, src, bounds, table, shift, block, wide)
        )
    num_ranges = ranges.bounds.numel() - 1
    to = torch.searchsorted(ranges.bounds, dst.to(torch.int64), right=True) - 1
    order = torch.argsort(to, stable=True)
    blocks = -(-dst.numel() // block)
    cell = torch.arange(dst.numel()) // block * num_ranges + to
    counts = torch.bincount(cell, minlength=blocks * num_ranges).view(blocks, num_ranges)
    near = dst.to(torch.int64) - ranges.bounds[to]
    kind = torch.int64 if wide else torch.int32
    return Grouped(near[order].to(torch.int32), src[order].to(kind), order.to(torch.int32), counts)
