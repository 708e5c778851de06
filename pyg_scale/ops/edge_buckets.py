"""Edges grouped by ranges of destinations, then each range by destination.

Together they group by destination what memory does not hold.
"""

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


def edge_group(
    dst: Tensor, src: Tensor, offset: Tensor, first: Tensor, count: Tensor, num_dst: int
) -> tuple[Tensor, Tensor]:
    """Group the edges of a range by destination, within one in the order in which they are given.

    Args:
        dst: ``int32`` ``[n]``, each below ``num_dst``.
        src: ``int32`` or ``int64`` ``[n]``.
        offset: ``int16`` ``[n]``, read as unsigned: the id of an edge less that of the first edge
            of its block.
        first: ``int64`` ``[num_blocks]``, the id of the first edge of each block.
        count: ``int64`` ``[num_blocks]``, edges of each block; together ``n``.
        num_dst: Number of destinations.

    Returns:
        ``int64`` ``[num_dst + 1]``, where the edges of each begin; and ``[n, 2]``, source and id of
        each, ``int32`` where that holds them.
    """
    wide = src.dtype == torch.int64 or (first.numel() > 0 and int(first[-1]) + 2**16 > 2**31)
    if library.compiled():
        return torch.ops.pyg_scale.edge_group(dst, src, offset, first, count, num_dst, wide)
    order = torch.argsort(dst, stable=True)
    edge_id = first.repeat_interleave(count) + (offset.to(torch.int64) & 0xFFFF)
    pair = torch.stack([src.to(torch.int64), edge_id], dim=1)[order]
    degree = torch.bincount(dst, minlength=num_dst)
    indptr = torch.cat([degree.new_zeros(1), degree.cumsum(0)])
    return indptr, pair if wide else pair.to(torch.int32)
