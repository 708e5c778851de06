"""Number of edges of an undirected graph that an assignment cuts (``csrc/cut_edges.cpp``)."""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_scale.ops import library
from pyg_scale.ops.csc import expand_pointers

_NODES = 1 << 20  # nodes at a time


def cut_edges(indptr: Tensor, indices: Tensor, part: Tensor) -> int:
    """Number of edges whose ends are in different parts.

    Args:
        indptr: ``int64`` ``[num_nodes + 1]``.
        indices: ``int32`` or ``int64`` ``[num_entries]``, each edge in both directions.
        part: ``int8``, ``int32`` or ``int64`` ``[num_nodes]``, at least 0.

    Raises:
        ValueError: In the compiled op, if the arguments are not a valid graph, or do not fit each
            other.
    """
    if library.compiled():
        few = part.numel() == 0 or int(part.max()) <= torch.iinfo(torch.int8).max
        narrow = part.to(torch.int8 if few else torch.int32).contiguous()
        return torch.ops.pyg_scale.cut_edges(indptr, indices, narrow, library.num_threads())
    cut = 0
    for begin in range(0, part.numel(), _NODES):
        end = min(part.numel(), begin + _NODES)
        pointer = indptr[begin : end + 1]
        first, last = int(pointer[0]), int(pointer[-1])
        node = begin + expand_pointers(pointer - first, last - first)
        cut += int((part[node] != part[indices[first:last]]).sum())
    return cut // 2
