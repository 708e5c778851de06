"""How many edges of an undirected graph an assignment cuts, counted piece by piece."""

from __future__ import annotations

from torch import Tensor

_NODES = 1 << 20  # nodes at a time


def cut_edges(indptr: Tensor, indices: Tensor, part: Tensor) -> int:
    """The number of edges whose ends are in different parts.

    Args:
        indptr: ``int64`` ``[num_nodes + 1]``.
        indices: ``int32`` or ``int64`` ``[num_entries]``, each edge in both directions.
        part: ``int32`` ``[num_nodes]``.
    """
    cut = 0
    for begin in range(0, part.numel(), _NODES):
        end = min(part.numel(), begin + _NODES)
        pointer = indptr[begin : end + 1]
        other = part[indices[int(pointer[0]) : int(pointer[-1])]]
        cut += int((part[begin:end].repeat_interleave(pointer.diff()) != other).sum())
    return cut // 2
