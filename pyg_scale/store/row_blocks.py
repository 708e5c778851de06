"""Memory for short-lived rows, in blocks that are reused.

The system clears memory that is returned to it before it is used again, which takes longer than
reading the rows.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

BLOCK = 128 << 10
"""Size of a block in bytes, unless a single row is larger."""


class Held:
    """Memory for some rows, until it is released.

    Attributes:
        count: Number of rows.
        rows: ``uint8`` ``[n, row_bytes]``, the memory that contains them.
    """

    def __init__(self, of: _Segment, blocks: list[int], count: int) -> None:
        self.count, self.rows = count, of.rows
        self._of, self._blocks = of, blocks

    @property
    def num_bytes(self) -> int:
        """Size of the rows in bytes."""
        return self.count * self.rows.size(1)

    def positions(self) -> Tensor:
        """Their indices in ``rows``, ``int64`` ``[count]``."""
        # NumPy, as torch would start threads for this.
        first = np.array(self._blocks, dtype=np.int64) * self._of.block_rows
        found = first[:, None] + np.arange(self._of.block_rows)
        return torch.from_numpy(found.reshape(-1)[: self.count])

    def give_back(self) -> None:
        """Release the memory, which nobody reads or writes any more."""
        self._of.free += reversed(self._blocks)
        self._blocks = []


class RowBlocks:
    """Blocks for rows of one size. Not thread-safe.

    Args:
        row_bytes: Size of a row in bytes.
        room: Expected maximum of bytes in use; untouched memory costs nothing.
    """

    def __init__(self, row_bytes: int, room: int) -> None:
        self._row_bytes = row_bytes
        self._block_rows = max(1, BLOCK // row_bytes)
        self._expected = -(-room // (self._block_rows * row_bytes))
        self._segments: list[_Segment] = []

    def take(self, counts: Sequence[int]) -> list[Held]:
        """Allocate the given numbers of rows, all in the same memory."""
        blocks = [-(-count // self._block_rows) for count in counts]
        needed = sum(blocks)
        # memory beyond the expected maximum is returned to the system when free
        self._segments[1:] = [each for each in self._segments[1:] if each.in_use]
        segment = next((each for each in self._segments if len(each.free) >= needed), None)
        if segment is None:
            expected = 0 if self._segments else self._expected
            segment = _Segment(max(needed, expected), self._block_rows, self._row_bytes)
            self._segments.append(segment)
        return [segment.take(number, count) for number, count in zip(blocks, counts)]


class _Segment:
    """Consecutive blocks; the one released last is used first."""

    def __init__(self, num_blocks: int, block_rows: int, row_bytes: int) -> None:
        self.block_rows, self._num_blocks = block_rows, num_blocks
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        mapped = mmap.mmap(-1, max(1, num_blocks * block_rows * row_bytes), flags=flags)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            mapped.madvise(mmap.MADV_HUGEPAGE)
        self.rows = torch.frombuffer(mapped, dtype=torch.uint8).view(-1, row_bytes)
        self.free = list(reversed(range(num_blocks)))

    @property
    def in_use(self) -> bool:
        return len(self.free) < self._num_blocks

    def take(self, number: int, count: int) -> Held:
        first = len(self.free) - number
        blocks = self.free[first:][::-1]
        del self.free[first:]
        return Held(self, blocks, count)
