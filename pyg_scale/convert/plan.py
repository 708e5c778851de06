"""The plan of a conversion: the ranges of destinations that are grouped at a time."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_LARGEST = 1 << 27  # bytes of a bucket: what is not much larger than a cache is grouped fastest


class Plan(NamedTuple):
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
) -> Plan:
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
    return Plan(bounds, counts, hub) if counts else Plan([0, num_dst], [0], [False])


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
