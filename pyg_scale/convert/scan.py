"""The first pass over an edge list: how many edges, between which nodes, in which order."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_scale.convert.edge_stream import Chunk, EdgeStream
from pyg_scale.graph.source import of

_MAX_BINS = 1 << 18  # as many counters as stay in a core's cache


class Scan(NamedTuple):
    """The result of a pass over the edges of one type."""

    num_edges: int
    num_src: int
    """One more than the largest source."""
    num_dst: int
    is_sorted: bool
    """True if destinations never go down."""
    shift: int
    bins: list[int]
    """Edges of every ``2**shift`` destinations."""


class Bins:
    """A histogram of node ids whose bins widen when there are too many."""

    def __init__(self, most: int = _MAX_BINS) -> None:
        self.most = most
        self.shift = 0
        self.counts = torch.zeros(0, dtype=torch.int64)

    def add(self, node: Tensor, largest: int) -> None:
        """Count nodes, of which none is larger than ``largest``."""
        self.counts, self.shift = widened(self.counts, self.shift, largest + 1, self.most)
        self.counts += torch.bincount(node >> self.shift, minlength=self.counts.numel())


def widened(bins: Tensor, shift: int, num_nodes: int, most: int) -> tuple[Tensor, int]:
    """Bins so wide that a number of nodes has at most ``most`` of them.

    Args:
        bins: Edges of every ``2**shift`` nodes.
        shift: The width of a bin.
        num_nodes: Number of nodes.
        most: Number of bins.

    Returns:
        Bins of all nodes, and the width of one.
    """
    while (num_nodes - 1) >> shift >= most:
        shift += 1
        padded = torch.cat([bins, bins.new_zeros(bins.numel() % 2)])
        bins = padded.view(-1, 2).sum(1)
    missing = ((num_nodes - 1) >> shift) + 1 - bins.numel()
    return torch.cat([bins, bins.new_zeros(max(0, missing))]), shift


def scan(
    stream: EdgeStream,
    num_src: int | None,
    num_dst: int | None,
    rows: int,
    bar: Any,
    *,
    time_attr: str | None = None,
    weight_attr: str | None = None,
    most_bins: int = _MAX_BINS,
) -> Scan:
    """Read all edges once, and check them.

    Args:
        stream: The edges.
        num_src: Number of source nodes, ``None`` for as many as it needs.
        num_dst: Number of destination nodes.
        rows: Edges to read at a time.
        bar: Gets told how many.
        time_attr: An attribute of the edges that must not be NaN.
        weight_attr: An attribute of the edges that must be finite and not negative.
        most_bins: Length of the histogram.

    Raises:
        IndexError: If a node is negative or too large; names the edge and the file.
        ValueError: If a time or weight is wrong; names the edge and the file.
    """
    checked = [name for name in (time_attr, weight_attr) if name is not None]
    bins, needed, last = Bins(most_bins), [0, 0], 0
    num_edges, is_sorted = 0, True
    for chunk in stream.chunks(rows, checked):
        bar.update(chunk.after.row - chunk.before.row)
        num_edges += chunk.src.numel()
        if not chunk.src.numel():
            continue
        ends = zip(("source", "destination"), (chunk.src, chunk.dst), (num_src, num_dst))
        for i, (name, node, size) in enumerate(ends):
            needed[i] = max(needed[i], _largest(stream, chunk, name, node, size) + 1)
        _check_values(stream, chunk, time_attr, weight_attr)
        bins.add(chunk.dst, needed[1] - 1)
        if is_sorted:
            is_sorted = int(chunk.dst[0]) >= last
            is_sorted = is_sorted and not bool((chunk.dst[1:] < chunk.dst[:-1]).any())
            last = int(chunk.dst[-1])
    return Scan(
        num_edges,
        max(needed[0], num_src or 0),
        max(needed[1], num_dst or 0),
        is_sorted,
        bins.shift,
        bins.counts.tolist(),
    )


def refine(stream: EdgeStream, bins: Tensor, shift: int, rows: int, bar: Any) -> dict[int, Tensor]:
    """Read all edges again, to count the edges of every single node of some bins.

    Args:
        stream: The edges.
        bins: ``int64`` ``[n]``, ascending: which bins of ``2**shift`` nodes.
        shift: Their width.
        rows: Edges to read at a time.
        bar: Gets told how many.

    Returns:
        For each bin, ``int64`` ``[2**shift]``.
    """
    counts = torch.zeros(bins.numel(), 1 << shift, dtype=torch.int64)
    for chunk in stream.chunks(rows):
        bar.update(chunk.after.row - chunk.before.row)
        dst = chunk.dst.to(torch.int64)
        slot = torch.searchsorted(bins, dst >> shift)
        inside = bins[slot.clamp(max=bins.numel() - 1)] == dst >> shift
        slot, dst = slot[inside], dst[inside]
        cell = (slot << shift) + (dst & ((1 << shift) - 1))
        counts += torch.bincount(cell, minlength=counts.numel()).view_as(counts)
    return {int(b): row for b, row in zip(bins, counts)}


def _largest(stream: EdgeStream, chunk: Chunk, name: str, node: Tensor, size: int | None) -> int:
    low, high = (int(v) for v in torch.aminmax(node))
    if low < 0 or (size is not None and high >= size):
        wrong = (node < 0) | (node >= (size if size is not None else 1 << 62))
        first = int(wrong.nonzero()[0])
        there = "ids begin at 0" if size is None else f"there are {size} {name} nodes"
        raise IndexError(
            f"{stream.name_of(chunk, first)} has {name} {int(node[first])}, but {there}: correct "
            "the edge" + ("" if size is None else ", or the number of nodes")
        )
    return high


_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)


def _check_values(
    stream: EdgeStream, chunk: Chunk, time_attr: str | None, weight_attr: str | None
) -> None:
    extra = list(chunk.extra)
    if time_attr is not None:
        time = extra.pop(0)
        if time.is_floating_point() and bool(time.isnan().any()):
            first = int(time.isnan().reshape(-1).nonzero()[0])
            raise ValueError(
                f"time_attr={time_attr!r}: the time of {stream.name_of(chunk, first)} is NaN: "
                "give every edge a time"
            )
    if weight_attr is not None:
        weight = extra.pop(0).reshape(-1)
        if weight.dtype in _UNSIGNED:
            return  # finite and not negative, and torch compares none of them
        good = (weight >= 0) & (torch.isfinite(weight) if weight.is_floating_point() else True)
        if not bool(good.all()):
            first = int((~good).nonzero()[0])
            raise ValueError(
                f"weight_attr={weight_attr!r}: the weight of {stream.name_of(chunk, first)} is "
                f"{weight[first].item()}; weights must be finite and not negative"
            )


def check_column(stream: EdgeStream, name: str, what: str) -> None:
    """Refuse an attribute that is no column of real numbers.

    Raises:
        ValueError: If it is none.
    """
    attribute = stream.edges.attributes[name]
    if attribute.row not in ((), (1,)) or attribute.dtype.startswith(("complex", "bool", "float8")):
        raise ValueError(
            f"{what}={name!r}{of(stream.edge_type)} must hold one number an edge (it is "
            f"{attribute.dtype} with rows of shape {list(attribute.row)})"
        )
