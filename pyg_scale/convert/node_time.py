"""The times of nodes, on the disk, read for the neighbours of many edges at a time."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from pyg_scale.convert.array_file import ArrayReader


class NodeTime:
    """Sortable times of the nodes of one type.

    Args:
        file: ``int64`` ``[num_nodes]``, as ``.npy``.
    """

    def __init__(self, file: Path) -> None:
        self._file = ArrayReader(file)
        self._whole: Tensor | None = None

    def of(self, node: Tensor, memory: int) -> Tensor:
        """The time of each node ``[n]``, ``int64``.

        The file is kept in memory if it takes at most ``memory`` bytes, else it is read once from
        its beginning to its end.
        """
        size = self._file.shape[0]
        if self._whole is None and size * 8 <= memory:
            self._whole = torch.from_numpy(self._file.rows(0, size))
        node = node.to(torch.int64)
        if self._whole is not None:
            return self._whole[node]
        step = max(1 << 12, memory // 16)
        out = torch.empty(node.numel(), dtype=torch.int64)
        for begin in range(0, size, step):
            end = min(size, begin + step)
            inside = ((node >= begin) & (node < end)).nonzero().view(-1)
            if inside.numel():
                part = torch.from_numpy(self._file.rows(begin, end))
                out[inside] = part[node[inside] - begin]
        return out

    def close(self) -> None:
        self._file.close()
