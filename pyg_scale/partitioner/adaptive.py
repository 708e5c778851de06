"""Moves of few nodes, after which every part has the share that its device can handle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyg_scale.graph.topology import NodeType
from pyg_scale.ops import keys
from pyg_scale.ops.refine_partition import refine_partition
from pyg_scale.partitioner.assigned import check_assignment
from pyg_scale.partitioner.base import Partition, PartitionGraph
from pyg_scale.partitioner.graph import partition_graph

_FINE = 1 << 20  # units of work of an average node


@dataclass(frozen=True)
class Repartition:
    """The result of :func:`repartition`.

    Attributes:
        assignment: The part ``int32`` ``[num_nodes]`` of every node; by node type if there are
            types.
        num_moved: Number of nodes whose part has changed.
        lower_bound: Smallest number of moves to any assignment within the tolerance.
        shares: The present share of each part, of nodes or work, ``[num_parts]``.
        target: The share that each part should have.
        cut_before: Share of the (undirected) edges between parts, before.
        cut_after: The same, after.
        balanced: True if every part is within the tolerance; single nodes may be too heavy for
            that.
    """

    assignment: Tensor | dict[str, Tensor]
    num_moved: int
    lower_bound: int
    shares: list[float]
    target: list[float]
    cut_before: float
    cut_after: float
    balanced: bool


def repartition(
    data: Any,
    assignment: Partition | Mapping[NodeType, Tensor] | Tensor,
    shares: Sequence[float] | Tensor | None = None,
    *,
    loads: Sequence[float] | Tensor | None = None,
    capabilities: Sequence[float] | Tensor | None = None,
    weights: Tensor | None = None,
    num_parts: int | None = None,
    tolerance: float = 0.05,
    seed: int = 0,
) -> Repartition:
    """Adapt an assignment to unequal devices by moving few nodes.

    Nodes move from parts with too much to parts with too little; first those that lower the cut
    most or raise it least, which are nodes at the boundary. Parts within the tolerance stay as they
    are. Once all are, further calls move nothing, so that repeated calls do not oscillate. Moves
    stop at the edge of the tolerance, as reaching the target would take more of them.

    Give either ``shares``, or measurements: ``loads``, the work that each part caused (edges
    sampled, seconds times speed, ...), and ``capabilities``, the speeds of the devices. The weight
    of a node is then the load of its part divided by the number of the part's nodes, and parts
    should have work in proportion to the capabilities. Measure the loads again before the next
    call.

    Args:
        data: The graph, as :func:`pyg_scale.partition` takes it, or a
            :class:`~pyg_scale.partitioner.base.PartitionGraph`.
        assignment: The part of every node.
        shares: The share ``[num_parts]`` that each part should have, in any unit.
        loads: Measured work of each part ``[num_parts]``, above 0 where a part has nodes.
        capabilities: Speed of each device ``[num_parts]``, above 0, in any unit.
        weights: Weight of each node, ``int64`` ``[num_nodes]``, at least 0, over all types in
            order; with ``shares``. ``None``: 1 each.
        num_parts: Number of parts, if the assignment does not determine it.
        tolerance: Largest relative deviation of a part from its target: 0.05 is 5 %.
        seed: Seed of the order of equally good moves.

    Raises:
        ValueError: If arguments contradict each other or do not fit; the message names them.
        TypeError: If one has a wrong type.
    """
    graph = data if isinstance(data, PartitionGraph) else partition_graph(data, is_sorted=False)
    counts = {name: end - begin for name, (begin, end) in graph.offsets.items()}
    assigned = check_assignment(assignment, counts, num_parts)
    parts = assigned.num_parts
    if not 0 < tolerance < 1:
        raise ValueError(f"tolerance must be above 0 and below 1 (got {tolerance})")
    before = torch.cat([assigned.part[name] for name in graph.offsets]).to(torch.int32)
    if (shares is None) == (loads is None) or (loads is None) != (capabilities is None):
        raise ValueError("give either shares=, or both loads= and capabilities=")
    if shares is not None:
        target = _positive(shares, parts, "shares")
        weight = _weights(weights, before.numel())
    else:
        if weights is not None:
            raise ValueError("weights= goes with shares=; loads= already weigh the nodes")
        target = _positive(capabilities, parts, "capabilities")
        weight = _weights_of(loads, before, parts)
    target = target / target.sum()
    held = _held(before, weight, parts)
    least, most = _bounds(target, int(weight.sum()), tolerance)
    after = before
    for lower, upper in ((_frozen(held, least, most)), (least, most)):
        after = refine_partition(
            graph.indptr,
            graph.indices,
            after,
            upper.view(-1, 1),
            node_weights=weight.view(-1, 1),
            minimum=lower.view(-1, 1),
            passes=0,
            key=keys.fold(0, seed),
        )
    now = _held(after, weight, parts)
    total = max(1, int(weight.sum()))
    split = {name: after[begin:end] for name, (begin, end) in graph.offsets.items()}
    return Repartition(
        assignment=split[None]
        if tuple(split) == (None,)
        else {str(k): v for k, v in split.items()},
        num_moved=int((after != before).sum()),
        lower_bound=_lower_bound(before, weight, held, least, most),
        shares=(now.to(torch.float64) / total).tolist(),
        target=target.tolist(),
        cut_before=_cut(graph, before),
        cut_after=_cut(graph, after),
        balanced=bool(((now >= least) & (now <= most)).all()),
    )


def _positive(values: Any, parts: int, name: str) -> Tensor:
    found = torch.as_tensor(values, dtype=torch.float64).detach().cpu()
    if found.shape != (parts,):
        raise ValueError(f"{name} must have one number for each of the {parts} parts")
    if not bool((found.isfinite() & (found > 0)).all()):
        raise ValueError(f"{name} must be above 0 and finite (got {found.tolist()})")
    return found


def _weights(weights: Tensor | None, size: int) -> Tensor:
    if weights is None:
        return torch.ones(size, dtype=torch.int64)
    if weights.dtype != torch.int64 or weights.shape != (size,):
        raise TypeError(
            f"weights must be int64 of shape [{size}] (got {weights.dtype} of shape "
            f"{list(weights.shape)})"
        )
    if size and int(weights.min()) < 0:
        raise ValueError("weights must not be negative")
    return weights


def _weights_of(loads: Any, part: Tensor, parts: int) -> Tensor:
    """The weight of a node of each part, such that parts have the measured loads."""
    found = torch.as_tensor(loads, dtype=torch.float64).detach().cpu()
    if found.shape != (parts,):
        raise ValueError(f"loads must have one number for each of the {parts} parts")
    sizes = torch.bincount(part, minlength=parts)
    wrong = ~found.isfinite() | (found < 0) | ((found == 0) & (sizes > 0))
    if bool(wrong.any()):
        raise ValueError(
            f"loads must be finite, and above 0 where a part has nodes (got {found.tolist()})"
        )
    each = found / sizes.clamp(min=1)
    mean = found.sum() / max(1, part.numel())
    return (each / mean * _FINE).round().to(torch.int64)[part.long()].clamp(min=1)


def _held(part: Tensor, weight: Tensor, parts: int) -> Tensor:
    return torch.zeros(parts, dtype=torch.int64).index_add_(0, part.long(), weight)


def _bounds(target: Tensor, total: int, tolerance: float) -> tuple[Tensor, Tensor]:
    """The smallest and largest load of each part: integers within the tolerance if possible."""
    fair = target * total
    least = (fair * (1 - tolerance)).ceil().to(torch.int64)
    most = (fair * (1 + tolerance)).floor().to(torch.int64)
    low, high = fair.floor().to(torch.int64), fair.ceil().to(torch.int64)
    return torch.minimum(least, low), torch.maximum(most, high)


def _frozen(held: Tensor, least: Tensor, most: Tensor) -> tuple[Tensor, Tensor]:
    """Bounds that let nodes move only from parts with too much to parts with too little.

    A node that passed through a balanced part would move twice.
    """
    return torch.minimum(held, most).clamp(min=least), torch.maximum(held, least).clamp(max=most)


def _lower_bound(part: Tensor, weight: Tensor, held: Tensor, least: Tensor, most: Tensor) -> int:
    """Number of moves that are always needed: of the heaviest nodes out of parts with too much, or
    into parts with too little.
    """
    out = 0
    for number in (held > most).nonzero().view(-1).tolist():
        mine = weight[part == number].sort(descending=True).values.cumsum(0)
        out += 1 + int((mine < held[number] - most[number]).sum())
    lacks = least - held
    heaviest = weight.sort(descending=True).values.cumsum(0) if bool((lacks > 0).any()) else None
    into = 0
    for number in (lacks > 0).nonzero().view(-1).tolist():
        assert heaviest is not None
        into += 1 + int((heaviest < lacks[number]).sum())
    return max(out, into)


def _cut(graph: PartitionGraph, part: Tensor) -> float:
    """Share of the edges whose ends are in different parts."""
    cut, step = 0, 1 << 20
    for begin in range(0, graph.num_nodes, step):
        pointers = graph.indptr[begin : begin + step + 1]
        mine = part[begin : begin + step].repeat_interleave(pointers.diff())
        other = part[graph.indices[int(pointers[0]) : int(pointers[-1])].long()]
        cut += int((mine != other).sum())
    return cut / graph.indices.numel() if graph.indices.numel() else 0.0
