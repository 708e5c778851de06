"""The plan of a conversion: the ranges of destinations grouped at a time, and its disk space."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from pyg_scale.convert.base import Description
from pyg_scale.convert.edge_stream import EdgeStream
from pyg_scale.files.npy import numpy_dtype
from pyg_scale.graph.topology import EdgeType
from pyg_scale.store.directory.meta import Attribute

_LARGEST = 1 << 27  # bytes of a bucket: what is not much larger than a cache is grouped fastest


class BucketPlan(NamedTuple):
    """Buckets: ranges of destinations whose edges fit into memory, or single nodes."""

    bounds: list[int]
    """Bucket ``b`` has the destinations ``bounds[b]`` to ``bounds[b + 1] - 1``."""
    edges: list[int]
    """Edges of each bucket."""
    hub: list[bool]
    """True for a single node with more edges than fit into memory."""


class Cost(NamedTuple):
    """Bytes that a bucket takes when it is grouped."""

    edge: int
    node: int


def too_large(bins: Tensor, shift: int, cost: Cost, memory: int) -> Tensor:
    """The bins that must be looked at node by node: wider than a node, and too many edges."""
    if shift == 0:
        return bins.new_empty(0)
    return (bins * cost.edge + (cost.node << shift) > memory).nonzero().view(-1)


def make_plan(
    bins: Tensor,
    shift: int,
    refined: dict[int, Tensor],
    num_dst: int,
    cost: Cost,
    memory: int,
) -> BucketPlan:
    """Cut the destinations into as few ranges as memory allows.

    Args:
        bins: Edges of every ``2**shift`` destinations.
        shift: The width of a bin.
        refined: Edges of every single node of the bins that alone are too large.
        num_dst: Number of destinations.
        cost: Of a bucket.
        memory: Bytes that a bucket may take.
    """
    memory = min(memory, _LARGEST)
    first, edges = _units(bins, shift, refined, num_dst)
    width = torch.diff(first, append=torch.tensor([num_dst]))
    weight = torch.cat([edges.new_zeros(1), (edges * cost.edge + width * cost.node).cumsum(0)])
    total = torch.cat([edges.new_zeros(1), edges.cumsum(0)])
    bounds, counts, hub = [0], [], []
    at = 0
    while at < first.numel():
        limit = int(weight[at]) + memory
        end = int(torch.searchsorted(weight, limit, right=True)) - 1
        hub.append(end <= at)
        end = max(end, at + 1)
        bounds.append(int(first[end]) if end < first.numel() else num_dst)
        counts.append(int(total[end] - total[at]))
        at = end
    return BucketPlan(bounds, counts, hub) if counts else BucketPlan([0, num_dst], [0], [False])


def _units(
    bins: Tensor, shift: int, refined: dict[int, Tensor], num_dst: int
) -> tuple[Tensor, Tensor]:
    """Runs of nodes that a bucket takes whole or not at all: the first node, and the edges."""
    used = -(-num_dst // (1 << shift))
    bins = torch.cat([bins, bins.new_zeros(max(0, used - bins.numel()))])[:used]
    first = torch.arange(used) << shift
    if not refined:
        return first, bins
    pieces, begin = [], 0
    for number, counts in sorted(refined.items()):
        pieces.append((first[begin:number], bins[begin:number]))
        nodes = torch.arange(number << shift, min(num_dst, (number + 1) << shift))
        pieces.append((nodes, counts[: nodes.numel()]))
        begin = number + 1
    pieces.append((first[begin:], bins[begin:]))
    return torch.cat([p[0] for p in pieces]), torch.cat([p[1] for p in pieces])


_EDGE = 8  # bytes of an edge in the result: neighbour and id
_BUCKET = 10  # and in a temporary file
_EXTRA = 8  # a time or a weight, in either


def estimate(
    description: Description,
    streams: Mapping[EdgeType, EdgeStream],
    *,
    time_attr: str | None,
    weight_attr: str | None,
    linked: str | None = None,
) -> int:
    """Bytes that a conversion needs at most, as far as sizes are known.

    Args:
        description: The graph.
        streams: The edges of the result.
        time_attr: The attribute by which edges are ordered.
        weight_attr: The attribute that holds weights.
        linked: The attribute of nodes that is linked, not copied.
    """
    total, temporary = 0, 0
    for stream in streams.values():
        size = sum(description.edges[each.edge_type].num_edges or 0 for each in stream.sources)
        names = {time_attr, weight_attr} & set(stream.edges.attributes)
        total += size * (_EDGE + _EXTRA * len(names))
        total += size * sum(map(_row_bytes, stream.edges.attributes.values()))
        temporary = max(temporary, size * (_BUCKET + _EXTRA * len(names)))
        end = None if stream.edge_type is None else stream.edge_type[2]
        total += 8 * ((description.nodes[end].num_nodes or 0) + 1)
    for nodes in description.nodes.values():
        copied = [each for name, each in nodes.attributes.items() if name != linked]
        total += (nodes.num_nodes or 0) * sum(map(_row_bytes, copied))
    return total + temporary


def check_space(root: Path, needed: int) -> None:
    """Refuse to begin what would not fit.

    Args:
        root: Where it is written; what lies there from a run before counts as free.

    Raises:
        OSError: With ``errno.ENOSPC``; says how much is needed and how much there is.
    """
    found = [
        os.lstat(os.path.join(folder, name)) for folder, _, names in os.walk(root) for name in names
    ]
    used = sum(each.st_blocks * 512 for each in found if each.st_nlink == 1)
    free = shutil.disk_usage(root).free + used
    if free < needed:
        raise OSError(
            errno.ENOSPC,
            f"the graph directory and temporary files need up to {needed / 1e9:.2f} GB, there are "
            f"{free / 1e9:.2f} GB free: make room, or write to another disk",
            str(root),
        )


def _row_bytes(attribute: Attribute) -> int:
    size = numpy_dtype(attribute.dtype).itemsize
    for each in attribute.row:
        size *= each
    return size
