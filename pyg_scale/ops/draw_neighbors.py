"""In-edges of nodes by keyed draws, on any device (``csrc/cuda/draw_neighbors.cuh``).

The draws are those of ``docs/draws.md``, without weights and times. This module has the plain-torch
meaning, which runs on every device of torch.
"""

from __future__ import annotations

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
    counted: Counted | None = None,
) -> Drawn:
    """Draw in-edges of nodes. Waits for the device once, to learn their number if it is not given.

    Args:
        indptr: ``int64`` ``[num_rows + 1]``, see :class:`pyg_scale.graph.topology.CSC`. All tensors
            are contiguous and on one device.
        indices: ``int64`` or ``int32`` ``[num_edges]``.
        edge_id: ``int64`` or ``int32`` ``[num_edges]``; ``None`` if ids are positions.
        node: ``int64`` ``[n]``, nodes of ``indptr``.
        num_nodes: Nodes of the neighbours' type.
        key: Key of the hop and the edge type, unsigned.
        num_neighbors: Number of draws for each node, -1 for all in-edges.
        replace: If True, draw with replacement.
        counted: The numbers of in-edges that nodes get, by :func:`counts_of` and
            :func:`offsets_of`.

    Raises:
        KernelsError: If there are no kernels and ``PYG_SCALE_KERNELS=require``.
    """
    if counted is None:
        counts = counts_of(indptr, node, num_neighbors, replace)
        offset = offsets_of(counts)
        counted = Counted(counts, offset, int(offset[-1]))
    counts, offset, total = counted
    row = torch.repeat_interleave(
        torch.arange(node.numel(), device=node.device), counts, output_size=total
    )
    compiled = library.compiled() if node.device.type == "cpu" else fused.usable(node)
    if compiled:
        neighbor, edge = torch.ops.pyg_scale.draw_neighbors(
            indptr,
            indices,
            edge_id,
            node,
            row,
            offset,
            num_nodes,
            keys.to_signed(key),
            num_neighbors,
            replace,
        )
        return Drawn(counts, row, neighbor, edge)
    position = _positions(indptr, node, row, offset, key, num_neighbors, replace)
    edge = position if edge_id is None else edge_id[position].to(torch.int64)
    return Drawn(counts, row, indices[position].to(torch.int64), edge)


def _positions(
    indptr: Tensor,
    node: Tensor,
    row: Tensor,
    offset: Tensor,
    key: int,
    k: int,
    replace: bool,
) -> Tensor:
    """The positions of the in-edges, ``int64`` ``[m]``."""
    degree = indptr[node + 1] - indptr[node]
    place = torch.arange(row.numel(), device=row.device) - offset[row]  # within its node
    if k < 0:
        return indptr[node][row] + place
    own = keys.fold_tensor(key, node)
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
