"""The share of a cache that each tensor of a store gets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch


class TensorRows(NamedTuple):
    """The rows of one tensor of a store."""

    num_rows: int
    row: tuple[int, ...]
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Size of a row in bytes."""
        size = self.dtype.itemsize
        for length in self.row:
            size *= length
        return size


def slots_of(tensors: Mapping[tuple[Any, str], TensorRows], capacity: int) -> dict[Any, int]:
    """Number of slots for each tensor, such that their rows have at most ``capacity`` bytes.

    A read of a short row costs about as much as one of a long row, so the shortest rows come first:
    each tensor gets as much as it needs, but at most half of the remainder, and the last one all of
    it. Edges, which are seldom read again, get the remainder after nodes.

    Args:
        tensors: Tensors by group and name; the group of edges is a tuple.
        capacity: Capacity in bytes.
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
