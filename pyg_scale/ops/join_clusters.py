"""Several clusters of a graph, joined, with the edges among them (``csrc/join_clusters.cpp``).

Nodes are numbered cluster by cluster, so that a cluster is a range of nodes and of edges.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_scale.ops import library
from pyg_scale.ops.induced_edges import Induced


def join_clusters(
    partptr: Tensor,
    indptr: Tensor,
    index: Tensor,
    which: Tensor,
    *,
    own_first: bool = True,
    positions: bool = True,
) -> Induced:
    """The nodes of some clusters, cluster after cluster, and the edges among them.

    Args:
        partptr: The nodes of cluster ``c`` are ``partptr[c]`` to ``partptr[c + 1] - 1``, ``int64``
            ``[num_clusters + 1]``. Tensors are on one device.
        indptr: The edges of node ``v`` are ``indptr[v]`` to ``indptr[v + 1] - 1``, ``int64``
            ``[num_nodes + 1]``.
        index: Their other ends, ``int64`` or, if all positions fit, ``int32`` ``[num_edges]``.
        which: The clusters, ``int64`` ``[c]``. Edges to a repeated one end in its last copy.
        own_first: True for an ``edge_index`` whose first row is that of the nodes that have the
            edges; False for one whose second row is.
        positions: True for edges with ids, which are their positions.

    Raises:
        ValueError: If pointers or ends lead out of the graph.
    """
    on_cpu = partptr.is_cpu and indptr.is_cpu and index.is_cpu and which.is_cpu
    if on_cpu and library.compiled():
        node, ends, edge = torch.ops.pyg_scale.join_clusters(
            partptr.contiguous(),
            indptr.contiguous(),
            index.contiguous(),
            which.contiguous(),
            own_first,
            positions,
        )
        return Induced(node, ends, edge if positions else None)
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
    ends = torch.stack([own, other] if own_first else [other, own])
    return Induced(node, ends, edge if positions else None)


def _joined(ranges: list[tuple[int, int]], device: torch.device) -> Tensor:
    """All integers of some ranges, one range after the other."""
    every = [torch.arange(low, high, device=device) for low, high in ((0, 0), *ranges)]
    return torch.cat(every)


def _slices(values: Tensor, ranges: list[tuple[int, int]]) -> Tensor:
    """The values of some ranges, one range after the other."""
    return torch.cat([values[low:high] for low, high in ((0, 0), *ranges)])
