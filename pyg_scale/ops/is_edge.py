"""A test whether pairs of nodes are edges."""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_scale.ops import library


def is_edge(indptr: Tensor, indices: Tensor, src: Tensor, dst: Tensor) -> Tensor:
    """For each pair of nodes, True if it is an edge.

    Scans the in-edges of the destination.

    Args:
        indptr: ``int64`` ``[num_dst_nodes + 1]``; the in-edges of node ``v`` are the positions
            ``indptr[v]`` to ``indptr[v + 1] - 1``.
        indices: ``int32`` or ``int64`` ``[num_edges]``, the source of each position, in any
            order within a destination. May be strided.
        src: ``int64`` ``[n]``.
        dst: ``int64`` ``[n]``, in range.

    Returns:
        ``bool`` ``[n]``: True if there is an edge from ``src[i]`` to ``dst[i]``.
    """
    if library.compiled():
        return torch.ops.pyg_scale.is_edge(indptr, indices, src, dst)
    return is_edge_reference(indptr, indices, src, dst)


def is_edge_reference(indptr: Tensor, indices: Tensor, src: Tensor, dst: Tensor) -> Tensor:
    """The plain-torch meaning of :func:`is_edge`."""
    pair, position = in_edges(indptr, dst)
    same = indices[position].to(torch.int64) == src[pair]
    found = torch.zeros(dst.numel(), dtype=torch.bool)
    found[pair[same]] = True
    return found


def in_edges(indptr: Tensor, dst: Tensor) -> tuple[Tensor, Tensor]:
    """All in-edges of nodes: for each edge the index of its node in ``dst``, and its position.

    Args:
        indptr: As in :func:`is_edge`.
        dst: ``int64`` ``[n]``, in range; repeats allowed.

    Returns:
        Two ``int64`` tensors ``[number of in-edges]``, in the order of ``dst``.
    """
    begin, end = indptr[dst], indptr[dst + 1]
    degree = end - begin
    place = torch.repeat_interleave(torch.arange(dst.numel()), degree)
    before = degree.cumsum(0) - degree
    return place, torch.arange(place.numel()) + (begin - before)[place]
