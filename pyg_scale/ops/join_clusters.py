"""Several clusters of a graph, joined, with the edges among them (``csrc/join_clusters.cpp``).

Nodes are numbered cluster by cluster, so that a cluster is a range of nodes and of edges.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pyg_scale.ops import library


class Joined(NamedTuple):
    """Clusters side by side.

    Attributes:
        node: Their nodes, cluster after cluster, ``int64`` ``[n]``.
        own: The place in ``node`` of the node that has each edge, rising, ``int64`` ``[m]``.
        other: The place of its other end, ``int64`` ``[m]``.
        edge: The position of each edge, ``int64`` ``[m]``; ``None`` if it was not asked for.
    """

    node: Tensor
    own: Tensor
    other: Tensor
    edge: Tensor | None


def join_clusters(
    partptr: Tensor,
    indptr: Tensor,
    index: Tensor,
    which: Tensor,
    *,
    own_first: bool = True,
    positions: bool = True,
) -> Joined:
    """The nodes of some clusters and the edges that both begin and end in these.

    Args:
        partptr: The nodes of cluster ``c`` are ``partptr[c]`` to ``partptr[c + 1] - 1``, ``int64``
            ``[num_clusters + 1]``. Tensors are on one device.
        indptr: The edges of node ``v`` are ``indptr[v]`` to ``indptr[v + 1] - 1``, ``int64``
            ``[num_nodes + 1]``.
        index: Their other ends, ``int64`` or, if all positions fit, ``int32`` ``[num_edges]``.
        which: The clusters, ``int64`` ``[c]``. Edges to a repeated one end in its last copy.
        own_first: Which of ``own`` and ``other`` is the first row of the one tensor that both are
            rows of, if compiled.
        positions: Whether the positions of edges are wanted.

    Raises:
        ValueError: If pointers or ends lead out of the graph.
    """
    tensors = (partptr, indptr, index, which)
    if library.compiled() and all(each.device.type == "cpu" for each in tensors):
        node, ends, edge = torch.ops.pyg_scale.join_clusters(
            *(each.contiguous() for each in tensors), own_first, positions
        )
        first, second = ends.unbind()
        return Joined(
            node, *((first, second) if own_first else (second, first)), edge if positions else None
        )
    begin, end = partptr[which], partptr[which + 1]
    ranges = list(zip(begin.tolist(), end.tolist(), strict=True))
    node = _joined(ranges, which.device)
    edges = list(zip(indptr[begin].tolist(), indptr[end].tolist(), strict=True))
    edge = _joined(edges, which.device)
    other = _slices(index, edges).to(torch.int64)
    size = end - begin
    shift = torch.full_like(partptr[1:], torch.iinfo(torch.int64).min // 2)
    shift[which] = size.cumsum(0) - size - begin
    part = torch.searchsorted(partptr, other, right=True) - 1
    other = other + shift.index_select(0, part)
    inside = (other >= 0).nonzero().view(-1)
    degree = _slices(indptr[1:], ranges) - _slices(indptr, ranges)
    own = torch.arange(node.numel(), device=node.device).repeat_interleave(degree)
    own, other, edge = (each.index_select(0, inside) for each in (own, other, edge))
    return Joined(node, own, other, edge if positions else None)


def _joined(ranges: list[tuple[int, int]], device: torch.device) -> Tensor:
    """All integers of some ranges, one range after the other."""
    every = [torch.arange(low, high, device=device) for low, high in ((0, 0), *ranges)]
    return torch.cat(every)


def _slices(values: Tensor, ranges: list[tuple[int, int]]) -> Tensor:
    """The values of some ranges, one range after the other."""
    return torch.cat([values[low:high] for low, high in ((0, 0), *ranges)])
