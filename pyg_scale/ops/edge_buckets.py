"""Grouping of edges by ranges of destinations, then of each range by destination.

Together the two steps group by destination more edges than fit in memory.
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
    """``int32``, the range of every bin of ``2**shift`` nodes, or -1 if one begins inside it."""
    shift: int

    @classmethod
    def of(cls, bounds: Tensor, shift: int) -> Ranges:
        """Make the ranges between bounds, to be looked up by bins of ``2**shift`` nodes."""
        bins = max(1, (int(bounds[-1]) + (1 << shift) - 1) >> shift)
        first = torch.arange(bins) << shift
        last = (first + (1 << shift) - 1).clamp(max=max(0, int(bounds[-1]) - 1))
        begin = torch.searchsorted(bounds, first, right=True) - 1
        end = torch.searchsorted(bounds, last, right=True) - 1
        return cls(bounds, torch.where(begin == end, begin, -1).to(torch.int32), shift)


class Grouped(NamedTuple):
    """A chunk of edges grouped by range; those of a range are in the given order."""

    dst: Tensor
    """``int32``, the destination less the first node of its range."""
    src: Tensor
    """``int32`` or ``int64``."""
    order: Tensor
    """``int32``, the position of the edge in the chunk."""
    counts: Tensor
    """``int64`` ``[num_blocks, num_ranges]``: number of edges of each block in each range."""


def edge_buckets(dst: Tensor, src: Tensor, ranges: Ranges, block: int, *, wide: bool) -> Grouped:
    """Group a chunk of edges by the range of their destination.

    Args:
        dst: ``int64`` or ``int32`` ``[n]``, each within the ranges.
        src: The same dtype and shape.
        ranges: The ranges. None may be longer than ``2**31``.
        block: Number of edges of a block.
        wide: If True, sources are returned as ``int64``.
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
    """Group the edges of a range by destination; those of a destination stay in the given order.

    Args:
        dst: ``int32`` ``[n]``, each below ``num_dst``.
        src: ``int32`` or ``int64`` ``[n]``.
        offset: ``int16`` ``[n]``, read as unsigned: the id of an edge less that of the first edge
            of its block.
        first: ``int64`` ``[num_blocks]``, the id of the first edge of each block.
        count: ``int64`` ``[num_blocks]``, number of edges of each block; together ``n``.
        num_dst: Number of destinations.

    Returns:
        ``int64`` ``[num_dst + 1]``, the first position of each destination; and ``[n, 2]``, source
        and id of each edge, ``int32`` if that holds them.
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
