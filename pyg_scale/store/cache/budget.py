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


def slots_of(tensors: Mapping[tuple[Any, str], Rows], capacity: int) -> dict[Any, int]:
    """Slots for each tensor, so that their rows have ``capacity`` bytes at most.

    A read of a short row costs about as much as one of a long row, so the shortest rows come
    first: each tensor gets what it needs, but at most half of what is left, and the last one all
    of it. Edges, which are seldom asked for again, get what nodes leave.

    Args:
        tensors: By group and name; the group of edges is a tuple.
        capacity: Bytes.
    """
    slots, left = dict.fromkeys(tensors, 0), capacity
    for of_edges in (False, True):
        waiting = [
            (rows.row_bytes, key)
            for key, rows in tensors.items()
            if isinstance(key[0], tuple) == of_edges and rows.row_bytes
        ]
        waiting.sort(key=lambda each: each[0])
        for i, (size, key) in enumerate(waiting):
            share = left if i == len(waiting) - 1 else left // 2
            slots[key] = min(tensors[key].num_rows, share // size)
            left -= slots[key] * size
    return slots
