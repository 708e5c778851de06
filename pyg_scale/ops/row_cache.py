"""Rows in the slots of a cache, and plans of requests: the rows to copy, to read and to keep.

``slot_of`` ``int32`` ``[num_rows]`` holds for every row 0, or its slot + 1 (zeros cost no memory
until they are written). A plan gives the slots in which rows *will* be once all earlier plans are
carried out; ``held`` ``int64`` ``[num_slots]`` gives the row whose values *are* in a slot, which a
copy compares.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pyg_scale.ops import library


class CachePlan(NamedTuple):
    """The plan of a request for rows ``index`` ``[n]``."""

    slot_at: Tensor
    """``int32`` ``[n]``: the slot to copy a row from, -1 if there is none."""
    miss: Tensor
    """``int64``: the positions in ``index`` of rows that have to be read."""
    fill: Tensor
    """``int64``: the positions in ``index`` of rows to put into slots."""
    fill_slot: Tensor
    """``int32``: the slot of each of these."""
    again: Tensor
    """``int64``: the positions of repeated rows that an earlier position reads."""
    same: Tensor
    """``int64``: the earlier position for each of these."""


def check_rows(index: Tensor, num_rows: int) -> None:
    """Refuse rows that do not exist.

    Raises:
        IndexError: If there are any; names the first one and the number of rows.
    """
    wrong = index[(index < 0) | (index >= num_rows)]
    if wrong.numel():
        raise IndexError(f"row {int(wrong[0])} does not exist, there are only {num_rows} rows")


def lookup(slot_of: Tensor, index: Tensor) -> CachePlan:
    """The plan that keeps everything as it is.

    Raises:
        IndexError: If a row does not exist.
    """
    if library.compiled():
        slot_at = torch.ops.pyg_scale.cache_lookup(slot_of, index)
    else:
        check_rows(index, slot_of.numel())
        slot_at = slot_of[index].clamp(min=0) - 1
    none = index.new_empty(0)
    return CachePlan(slot_at, (slot_at < 0).nonzero().view(-1), none, none.int(), none, none)


def plan_placed(slot_of: Tensor, loaded: Tensor, index: Tensor) -> CachePlan:
    """A plan for slots with fixed rows, which the first request for each row fills.

    Args:
        slot_of: ``int32`` ``[num_rows]``.
        loaded: ``uint8`` ``[num_slots]``: 1 for slots that an earlier plan fills; written to.
        index: ``int64`` ``[n]``.

    Raises:
        IndexError: If a row does not exist.
    """
    if library.compiled():
        return CachePlan(*torch.ops.pyg_scale.cache_plan_placed(slot_of, loaded, index))
    check_rows(index, slot_of.numel())
    slot = slot_of[index] - 1
    hit = (slot >= 0) & loaded[slot.clamp(min=0).long()].bool()
    miss, again, same = first_of_each(index, (~hit).nonzero().view(-1))
    fill = miss[slot[miss] >= 0]
    loaded[slot[fill].long()] = 1
    return CachePlan(slot.masked_fill(~hit, -1), miss, fill, slot[fill], again, same)


class Placed:
    """A cache of rows that are chosen once and stay.

    Args:
        num_rows: Number of rows.
        rows: ``int64`` ``[num_slots]``, the rows to keep, without repetition.
    """

    evictions = 0

    def __init__(self, num_rows: int, rows: Tensor) -> None:
        check_rows(rows, num_rows)
        self.slot_of = torch.zeros(num_rows, dtype=torch.int32)
        self.slot_of[rows] = torch.arange(1, rows.numel() + 1, dtype=torch.int32)
        self.loaded = torch.zeros(rows.numel(), dtype=torch.uint8)

    def plan(self, index: Tensor, now: int = 0) -> CachePlan:
        """The plan of a request for rows ``int64`` ``[n]``; ``now`` is ignored.

        Raises:
            IndexError: If a row does not exist.
        """
        return plan_placed(self.slot_of, self.loaded, index)

    def index_bytes(self) -> int:
        """Size of its tensors in bytes."""
        return tensor_bytes(self)


def tensor_bytes(policy: object) -> int:
    """Size of an object's tensors in bytes."""
    tensors = [value for value in vars(policy).values() if isinstance(value, Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def first_of_each(index: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Positions of distinct rows, positions of repeats, and the first position for each repeat."""
    rows = index[position]
    ordered, order = rows.sort(stable=True)
    begins = torch.ones_like(ordered, dtype=torch.bool)
    begins[1:] = ordered[1:] != ordered[:-1]
    first = order[begins][begins.cumsum(0) - 1]  # for each sorted position
    repeats = torch.zeros_like(begins)
    repeats[order] = ~begins
    first_of = torch.empty_like(order)
    first_of[order] = first
    return position[~repeats], position[repeats], position[first_of[repeats]]


def copy(rows: Tensor, held: Tensor, slot_at: Tensor, index: Tensor, out: Tensor) -> Tensor:
    """Copy rows in slots to a batch.

    Args:
        rows: ``uint8`` ``[num_slots, row_bytes]``.
        held: ``int64`` ``[num_slots]``: the row whose values are in each slot, -1 for none.
        slot_at: The slots of a plan.
        index: ``int64`` ``[n]``, the rows of the plan.
        out: ``uint8`` ``[n, row_bytes]``, written to.

    Returns:
        ``int64``: positions whose slot holds another row, which are not written.
    """
    if library.compiled():
        return torch.ops.pyg_scale.cache_copy(rows, held, slot_at, index, out)
    position = (slot_at >= 0).nonzero().view(-1)
    slot = slot_at[position].long()
    there = held[slot] == index[position]
    out[position[there]] = rows[slot[there]]
    return position[~there]


def fill(
    rows: Tensor, held: Tensor, slots: Tensor, position: Tensor, index: Tensor, out: Tensor
) -> None:
    """Copy rows of a batch into slots.

    Args:
        rows: ``uint8`` ``[num_slots, row_bytes]``, written to.
        held: ``int64`` ``[num_slots]``, written to.
        slots: ``int32`` ``[m]``.
        position: ``int64`` ``[m]``.
        index: ``int64`` ``[n]``, the rows of the batch.
        out: ``uint8`` ``[n, row_bytes]``, their values.
    """
    if library.compiled():
        torch.ops.pyg_scale.cache_fill(rows, held, slots, position, index, out)
        return
    slot = slots.long()
    rows[slot] = out[position]
    held[slot] = index[position]


def scatter(rows: Tensor, position: Tensor, out: Tensor, take: Tensor | None = None) -> None:
    """Write ``rows[take[i]]`` (``rows[i]`` without ``take``) to ``out[position[i]]``.

    Args:
        rows: ``uint8`` ``[k, row_bytes]``.
        position: ``int64`` ``[m]``.
        out: ``uint8`` ``[n, row_bytes]``, written to; may be ``rows``.
        take: ``int64`` or ``int32`` ``[m]``.
    """
    if position.numel() == 0:
        return
    if library.compiled():
        chosen = position.new_empty(0) if take is None else take
        torch.ops.pyg_scale.cache_scatter(rows, chosen, position, out)
        return
    out[position] = rows if take is None else rows[take]


# Rows that stay in their slots ############################################################


def places(plan: CachePlan, num_slots: int) -> tuple[Tensor, Tensor]:
    """The places of a request's rows, of which those in slots stay there.

    Args:
        plan: The plan.
        num_slots: Number of slots.

    Returns:
        The slot of each row, or ``-1 - p`` for row ``p`` of those that are brought, ``int64``
        ``[n]``; and the positions of rows that are brought beside ``plan.miss``, after them: those
        of slots that the plan refills, ``int64``.
    """
    if library.compiled():
        place, moved = torch.ops.pyg_scale.cache_places(
            plan.slot_at, plan.miss, plan.fill_slot, plan.again, plan.same, num_slots
        )
        return place, moved
    place = plan.slot_at.long()
    moved = torch.isin(plan.slot_at, plan.fill_slot).nonzero().view(-1)
    moved = moved[place[moved] >= 0]
    brought = torch.cat([plan.miss, moved])
    place[brought] = -1 - torch.arange(brought.numel())
    place[plan.again] = place[plan.same]
    return place, moved


def pin(pins: Tensor, held: Tensor, place: Tensor, index: Tensor, start: int) -> Tensor:
    """Count a use of every slot that is a place.

    Args:
        pins: ``int32`` ``[num_slots]``, the uses of each slot; written to.
        held: ``int64`` ``[num_slots]``.
        place: ``int64`` ``[n]``, the places; where a slot holds another row, the place becomes
            that of a row to be brought, the first of which is row ``start``.
        index: ``int64`` ``[n]``, the rows.
        start: Number of rows that were brought.

    Returns:
        ``int64``: the positions of rows to be brought, in order.
    """
    if library.compiled():
        return torch.ops.pyg_scale.cache_pin(pins, held, place, index, start)
    position = (place >= 0).nonzero().view(-1)
    there = held[place[position]] == index[position]
    late = position[~there]
    place[late] = -1 - start - torch.arange(late.numel())
    pins.index_add_(0, place[position[there]], pins.new_ones(int(there.sum())))
    return late


def unpin(pins: Tensor, place: Tensor) -> None:
    """Take back the uses that :func:`pin` counted for these places."""
    if library.compiled():
        torch.ops.pyg_scale.cache_unpin(pins, place)
        return
    slots = place[place >= 0]
    pins.index_add_(0, slots, -pins.new_ones(slots.numel()))
