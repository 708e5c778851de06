"""In-edges of nodes by keyed draws, on any device (``csrc/cuda/draw_neighbors.cuh``).

The draws are those of ``docs/draws.md``, without weights and times. This module has the plain-torch
meaning, which runs on every device of torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pyg_scale.ops import fused, keys, library


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
    """

    counts: Tensor
    offset: Tensor
    total: int


def counts_of(indptr: Tensor, node: Tensor, num_neighbors: int, replace: bool) -> Tensor:
    """Number of in-edges that each node gets, ``int64`` ``[n]``; see :func:`draw_neighbors`."""
    degree = indptr[node + 1] - indptr[node]
    if num_neighbors < 0:
        return degree
    if replace:
        return torch.where(degree > 0, num_neighbors, 0)
    return degree.clamp(max=num_neighbors)


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
        counted: The numbers of in-edges that nodes get, by :func:`counts_of` and
            :func:`offsets_of`.
        seed: ``int64`` ``[n]``, what the draws of a node depend on beside the node; ``None`` if on
            nothing.
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

    Raises:
        KernelsError: If there are no kernels and ``PYG_SCALE_KERNELS=require``.
    """
    counts = counts_of(indptr, node, num_neighbors, replace)
    offset = offsets_of(counts)
    counted = Counted(counts, offset, int(offset[-1]))
    given = indptr, indices, edge_id, node, num_nodes, key, num_neighbors, counted
    return draw_along_types([Wanted(*given, seed)], replace)[0]


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
    drawn = torch.ops.pyg_scale.draw_neighbors(
        [each.indptr for each in wanted],
        [each.indices for each in wanted],
        [none if each.edge_id is None else each.edge_id for each in wanted],
        [each.node for each in wanted],
        [none if each.seed is None else each.seed for each in wanted],
        [each.counted.offset for each in wanted],
        totals,
        [each.num_nodes for each in wanted],
        [keys.to_signed(each.key) for each in wanted],
        [each.num_neighbors for each in wanted],
        replace,
    )
    parts = zip(*(each.split(totals) for each in drawn))
    return [Drawn(each.counted.counts, *part) for each, part in zip(wanted, parts)]


def _draw(wanted: Wanted, replace: bool) -> Drawn:
    node, edge_id, (counts, offset, total) = wanted.node, wanted.edge_id, wanted.counted
    row = torch.repeat_interleave(
        torch.arange(node.numel(), device=node.device), counts, output_size=total
    )
    position = _positions(wanted, row, offset, replace)
    edge = position if edge_id is None else edge_id[position].to(torch.int64)
    return Drawn(counts, row, wanted.indices[position].to(torch.int64), edge)


def _positions(wanted: Wanted, row: Tensor, offset: Tensor, replace: bool) -> Tensor:
    """The positions of the in-edges, ``int64`` ``[m]``."""
    indptr, node, k = wanted.indptr, wanted.node, wanted.num_neighbors
    degree = indptr[node + 1] - indptr[node]
    place = torch.arange(row.numel(), device=row.device) - offset[row]  # within its node
    if k < 0:
        return indptr[node][row] + place
    own = keys.fold_tensor(wanted.key, node)
    if wanted.seed is not None:
        own = keys.fold_tensor(own, wanted.seed)
    if replace:
        drawn = keys.bounded(own[row], place, degree[row].clamp(min=1))
        return indptr[node][row] + drawn
    picks = torch.arange(k, device=node.device).repeat(node.numel(), 1)
    many = (degree > k).nonzero().view(-1)  # other nodes get all, in order
    table = picks[many]
    for i in range(k):
        j = degree[many] - k + i
        t = keys.bounded(own[many], i, j + 1)
        taken = (table[:, :i] == t.unsqueeze(1)).any(dim=1)
        table[:, i] = torch.where(taken, j, t)
    picks[many] = table
    return indptr[node][row] + picks[row, place]
