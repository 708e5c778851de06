"""What of the features lies on a device, within a budget: a function of sizes alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pyg_scale.store.cache.budget import Rows

Key = tuple[Any, str]
"""A group and a name; the group of edges is a tuple."""

GRAIN = 512
"""Torch gives out the memory of a device in pieces of so many bytes."""

_SLOT_BYTES = 4


class Place(NamedTuple):
    """How much of a tensor is on the device.

    Attributes:
        rows: How many rows.
        whole: Whether those are all.
        num_bytes: What they take of the device, with the table that says where each is.
    """

    rows: int
    whole: bool
    num_bytes: int


NOTHING = Place(0, False, 0)


def place(
    tensors: Mapping[Key, Rows],
    budget: int,
    listed: Mapping[Key, int],
    looked_up_there: frozenset[Key] = frozenset(),
) -> dict[Key, Place]:
    """Share a budget among tensors.

    What fits as a whole is there as a whole, of which no row has to be looked up. If not all does,
    tensors of nodes come first, those with the shortest rows before the others (labels, masks):
    each gets what it needs, but at most half of what is left, and the last one all of it. A tensor
    that does not fit gets its most wanted rows, if somebody knows which these are. Edges, which are
    seldom asked for again, get what nodes leave.

    Args:
        tensors: By group and name.
        budget: Bytes of the device; what is given out in all is never more.
        listed: How many rows of a tensor are listed by how wanted they are; without an entry it is
            placed as a whole or not at all.
        looked_up_there: Tensors whose rows are looked up on the device, so that a table with
            a number for each of their rows lies there if they are there in part.
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
    """What torch takes of a device for a tensor."""
    return -(-num_bytes // GRAIN) * GRAIN


def _whole(rows: Rows) -> Place:
    return Place(rows.num_rows, True, allotted(rows.num_rows * rows.row_bytes))


def _part(rows: Rows, share: int, listed: int, table: int) -> Place:
    if not rows.row_bytes:
        return NOTHING
    space = (share - allotted(table)) // GRAIN * GRAIN
    count = min(listed, space // rows.row_bytes) if space > 0 else 0
    if count <= 0:
        return NOTHING
    return Place(count, False, allotted(count * rows.row_bytes) + allotted(table))
