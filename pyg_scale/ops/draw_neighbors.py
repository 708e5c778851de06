"""In-edges of nodes by keyed draws, on any device (``csrc/cuda/draw_neighbors.cuh``).

The draws are those of ``docs/draws.md``. This module has the plain-torch meaning, which runs on
every device of torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pyg_scale.ops import fused, keys, library
from pyg_scale.ops.candidates import (
    Choosing,
    candidates_along_types,
    first_where,
    sums_before,
)


class Drawn(NamedTuple):
    """In-edges drawn for some nodes, node after node, in the order of the draws.

    Attributes:
        counts: Number of in-edges of each node, ``int64`` ``[n]``.
        row: Index into the nodes of the destination of each edge, ``int64`` ``[m]``.
        neighbor: Source of each edge, ``int64`` ``[m]``.
        edge: Original id of each edge, ``int64`` ``[m]``.
    """

    counts: Tensor
    row: Tensor
    neighbor: Tensor
    edge: Tensor


class Counted(NamedTuple):
    """The numbers of in-edges that some nodes get.

    Attributes:
        counts: Of each node, ``int64`` ``[n]``.
        offset: The sum of all earlier ones, ``int64`` ``[n + 1]``.
        total: The sum of all.
        begin: As in :class:`.Candidates`, as is ``end``.
        end: See there.
    """

    counts: Tensor
    offset: Tensor
    total: int
    begin: Tensor | None = None
    end: Tensor | None = None


def offsets_of(counts: Tensor) -> Tensor:
    """The sums of all earlier counts, ``int64`` ``[n + 1]``; the last one is of all counts."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


class Wanted(NamedTuple):
    """In-edges to draw along one edge type.

    Attributes:
        indptr: ``int64`` ``[num_rows + 1]``, see :class:`pyg_scale.graph.topology.CSC`. All tensors
            are contiguous and on one device.
        indices: ``int64`` or ``int32`` ``[num_edges]``.
        edge_id: ``int64`` or ``int32`` ``[num_edges]``; ``None`` if ids are positions.
        node: ``int64`` ``[n]``, nodes of ``indptr``.
        num_nodes: Nodes of the neighbours' type.
        key: Key of the hop and the edge type, unsigned.
        num_neighbors: Number of draws for each node, -1 for all in-edges.
        counted: The numbers of in-edges that nodes get, by :func:`.candidates_along_types` and
            :func:`offsets_of`.
        seed: ``int64`` ``[n]``, what the draws of a node depend on beside the node; ``None`` if on
            nothing.
        weight_prefix: The running sums of the weights within each node, ``int64``
            ``[num_edges]``; ``None`` without weights.
    """

    indptr: Tensor
    indices: Tensor
    edge_id: Tensor | None
    node: Tensor
    num_nodes: int
    key: int
    num_neighbors: int
    counted: Counted
    seed: Tensor | None = None
    weight_prefix: Tensor | None = None


def draw_neighbors(
    indptr: Tensor,
    indices: Tensor,
    edge_id: Tensor | None,
    node: Tensor,
    num_nodes: int,
    key: int,
    num_neighbors: int,
    *,
    replace: bool = False,
    seed: Tensor | None = None,
    weight_prefix: Tensor | None = None,
) -> Drawn:
    """Draw in-edges of nodes. Waits for the device once, to learn their number.

    Args:
        indptr: See :class:`Wanted`, as for the others.
        indices: See there.
        edge_id: See there.
        node: See there.
        num_nodes: See there.
        key: See there.
        num_neighbors: See there.
        replace: If True, draw with replacement.
        seed: See :class:`Wanted`.
        weight_prefix: See there.

    Raises:
        KernelsError: If there are no kernels and ``PYG_SCALE_KERNELS=require``.
    """
    choosing = Choosing(indptr, indices, node, num_neighbors, weight_prefix=weight_prefix)
    found = candidates_along_types([choosing], replace)[0]
    offset = offsets_of(found.counts)
    counted = Counted(found.counts, offset, int(offset[-1]), found.begin, found.end)
    given = indptr, indices, edge_id, node, num_nodes, key, num_neighbors, counted
    return draw_along_types([Wanted(*given, seed, weight_prefix)], replace)[0]


def draw_along_types(wanted: Sequence[Wanted], replace: bool) -> list[Drawn]:
    """Draw in-edges of nodes along several edge types, on a CUDA device by one kernel.

    Args:
        wanted: The edge types.
        replace: If True, draw with replacement.

    Raises:
        KernelsError: If there are no kernels and ``PYG_SCALE_KERNELS=require``.
    """
    if not wanted:
        return []
    here = wanted[0].node
    if not (library.compiled() if here.device.type == "cpu" else fused.usable(here)):
        return [_draw(each, replace) for each in wanted]
    none = here.new_empty(0)  # in the place of what is not there
    totals = [each.counted.total for each in wanted]

    def given(tensors: Iterable[Tensor | None]) -> list[Tensor]:
        return [none if tensor is None else tensor for tensor in tensors]

    drawn = torch.ops.pyg_scale.draw_neighbors(
        [each.indptr for each in wanted],
        [each.indices for each in wanted],
        given(each.edge_id for each in wanted),
        [each.node for each in wanted],
        given(each.seed for each in wanted),
        [each.counted.offset for each in wanted],
        given(each.counted.begin for each in wanted),
        given(each.counted.end for each in wanted),
        given(each.weight_prefix for each in wanted),
        totals,
        [each.num_nodes for each in wanted],
        [keys.to_signed(each.key) for each in wanted],
        [each.num_neighbors for each in wanted],
        replace,
    )
    parts = zip(*(each.split(totals) for each in drawn))
    return [Drawn(each.counted.counts, *part) for each, part in zip(wanted, parts)]


def _draw(wanted: Wanted, replace: bool) -> Drawn:
    node, edge_id, counted = wanted.node, wanted.edge_id, wanted.counted
    row = torch.repeat_interleave(
        torch.arange(node.numel(), device=node.device), counted.counts, output_size=counted.total
    )
    position = _positions(wanted, row, replace)
    edge = position if edge_id is None else edge_id[position].to(torch.int64)
    return Drawn(counted.counts, row, wanted.indices[position].to(torch.int64), edge)


def _positions(wanted: Wanted, row: Tensor, replace: bool) -> Tensor:
    """The positions of the in-edges, ``int64`` ``[m]``."""
    node, k, counted = wanted.node, wanted.num_neighbors, wanted.counted
    begin = wanted.indptr[node] if counted.begin is None else counted.begin
    end = wanted.indptr[node + 1] if counted.end is None else counted.end
    place = torch.arange(row.numel(), device=row.device) - counted.offset[row]  # within its node
    if k < 0:
        return begin[row] + place
    own = keys.fold_tensor(wanted.key, node)
    if wanted.seed is not None:
        own = keys.fold_tensor(own, wanted.seed)
    if replace:
        if wanted.weight_prefix is not None:
            return _weighted(
                wanted, own[row], begin[row], end[row], wanted.indptr[node][row], place
            )
        return begin[row] + keys.bounded(own[row], place, (end - begin)[row].clamp(min=1))
    picks = torch.arange(k, device=node.device).repeat(node.numel(), 1)
    many = (end - begin > k).nonzero().view(-1)  # other nodes get all, in order
    choose = _floyd if wanted.weight_prefix is None else _successive
    picks[many] = choose(wanted, own[many], begin[many], end[many], wanted.indptr[node][many])
    return begin[row] + picks[row, place]


def _floyd(wanted: Wanted, key: Tensor, begin: Tensor, end: Tensor, first: Tensor) -> Tensor:
    """Draws without replacement, counted from ``begin``, ``int64`` ``[n, k]``."""
    k = wanted.num_neighbors
    picks = begin.new_zeros(begin.numel(), k)
    for i in range(k):
        j = end - begin - k + i
        t = keys.bounded(key, i, j + 1)
        taken = (picks[:, :i] == t.unsqueeze(1)).any(dim=1)
        picks[:, i] = torch.where(taken, j, t)
    return picks


def _successive(wanted: Wanted, key: Tensor, begin: Tensor, end: Tensor, first: Tensor) -> Tensor:
    """The same in proportion to the weights of what is left; nodes may get fewer.

    A draw from what is left is moved past the picks before it, in the order of positions.
    """
    prefix, k = wanted.weight_prefix, wanted.num_neighbors
    assert prefix is not None
    picks, none = begin.new_zeros(begin.numel(), k), prefix.numel()
    starts, weights = torch.full_like(picks, none), torch.zeros_like(picks)
    base = sums_before(prefix, begin, first)
    left = sums_before(prefix, end, first) - base
    for i in range(k):
        t = base + keys.bounded(key, i, left.clamp(min=1))
        order = starts[:, :i].argsort(dim=1)
        for j in order.unbind(dim=1):
            start, weight = (
                each.gather(1, j.unsqueeze(1)).squeeze(1) for each in (starts, weights)
            )
            before = sums_before(prefix, start, first)
            t = torch.where((start < none) & (t >= before), t + weight, t)
        position = _beyond(prefix, t, begin, end)
        before = sums_before(prefix, position, first)
        goes_on = left > 0
        weights[:, i] = torch.where(goes_on, prefix[position] - before, 0)
        starts[:, i] = torch.where(goes_on, position, none)
        picks[:, i] = position - begin
        left = left - weights[:, i]
    return picks


def _weighted(
    wanted: Wanted, key: Tensor, begin: Tensor, end: Tensor, first: Tensor, pick: Tensor
) -> Tensor:
    """The positions of draws by weight with replacement, ``int64`` ``[m]``."""
    prefix = wanted.weight_prefix
    assert prefix is not None
    base = sums_before(prefix, begin, first)
    total = sums_before(prefix, end, first) - base
    return _beyond(prefix, base + keys.bounded(key, pick, total.clamp(min=1)), begin, end)


def _beyond(prefix: Tensor, limit: Tensor, begin: Tensor, end: Tensor) -> Tensor:
    """The first candidate at which the running sum is beyond a limit, else the last one."""
    return first_where(begin, end - 1, prefix.numel(), lambda position: prefix[position] > limit)
