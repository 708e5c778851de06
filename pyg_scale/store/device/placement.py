"""The choice of features on a device within a budget, from sizes alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pyg_scale.store.rows import Key, TensorRows

GRAIN = 512
"""Torch allocates the memory of a device in multiples of this many bytes."""

_SLOT_BYTES = 4


class DeviceShare(NamedTuple):
    """The share of a tensor that is on the device.

    Attributes:
        rows: Number of rows on the device.
        whole: True if those are all rows.
        num_bytes: Their size on the device, including the lookup table.
    """

    rows: int
    whole: bool
    num_bytes: int


NOTHING = DeviceShare(0, False, 0)


def place(
    tensors: Mapping[Key, TensorRows],
    budget: int,
    listed: Mapping[Key, int],
    looked_up_there: frozenset[Key] = frozenset(),
) -> dict[Key, DeviceShare]:
    """Divide a budget among tensors.

    If all tensors fit, all are placed as a whole, which needs no lookup of rows. Otherwise tensors
    of nodes come first, in order of the length of their rows (labels, masks): each gets as much as
    it needs, but at most half of the remainder, and the last one all of it. A tensor that does not
    fit gets its hottest rows, if these are known. Edges, which are seldom read again, get the
    remainder after nodes.

    Args:
        tensors: Tensors by group and name.
        budget: Bytes of the device; the total never exceeds it.
        listed: Number of rows of a tensor that are listed in order of priority; without an entry it
            is placed as a whole or not at all.
        looked_up_there: Tensors whose rows are looked up on the device; if only some of their rows
            are on it, a table with a number for each row is on it, too.
    """
    whole = {key: _whole(rows) for key, rows in tensors.items()}
    if sum(each.num_bytes for each in whole.values()) <= budget:
        return whole
    found, left = dict.fromkeys(tensors, NOTHING), budget
    for of_edges in (False, True):
        waiting = sorted(
            (key for key in tensors if isinstance(key[0], tuple) == of_edges),
            key=lambda key: (tensors[key].row_bytes, whole[key].num_bytes),
        )
        for i, key in enumerate(waiting):
            share = left if i == len(waiting) - 1 else left // 2
            table = _SLOT_BYTES * tensors[key].num_rows if key in looked_up_there else 0
            part = _part(tensors[key], share, listed.get(key, 0), table)
            found[key] = whole[key] if whole[key].num_bytes <= share else part
            left -= found[key].num_bytes
    return found


def allotted(num_bytes: int) -> int:
    """The device memory in bytes that torch allocates for a tensor."""
    return -(-num_bytes // GRAIN) * GRAIN


def _whole(rows: TensorRows) -> DeviceShare:
    return DeviceShare(rows.num_rows, True, allotted(rows.num_rows * rows.row_bytes))


def _part(rows: TensorRows, share: int, listed: int, table: int) -> DeviceShare:
    if not rows.row_bytes:
        return NOTHING
    space = (share - allotted(table)) // GRAIN * GRAIN
    count = min(listed, space // rows.row_bytes) if space > 0 else 0
    if count <= 0:
        return NOTHING
    return DeviceShare(count, False, allotted(count * rows.row_bytes) + allotted(table))
