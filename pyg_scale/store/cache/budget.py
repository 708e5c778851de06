"""How much of a cache each tensor of a store gets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch


class Rows(NamedTuple):
    """The rows of one tensor of a store."""

    num_rows: int
    row: tuple[int, ...]
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        size = self.dtype.itemsize
        for length in self.row:
            size *= length
        return size


def slots_of(tensors: Mapping[Any, Rows], capacity: int) -> dict[Any, int]:
    """Slots for each tensor, so that their rows have ``capacity`` bytes at most.

    A read of a short row costs about as much as one of a long row, so the shortest rows come
    first: each tensor gets what it needs, but at most half of what is left, and the last one all
    of it.

    Args:
        tensors: By anything.
        capacity: Bytes.
    """
    slots = dict.fromkeys(tensors, 0)
    left = capacity
    waiting = sorted((k for k in tensors if tensors[k].row_bytes), key=_row_bytes(tensors))
    for i, key in enumerate(waiting):
        count, size = tensors[key].num_rows, tensors[key].row_bytes
        share = left if i == len(waiting) - 1 else left // 2
        slots[key] = min(count, share // size)
        left -= slots[key] * size
    return slots


def _row_bytes(tensors: Mapping[Any, Rows]) -> Any:
    return lambda key: tensors[key].row_bytes
