"""The latest events of each node, linked in a log (``csrc/last_events.cpp``).

An event joins two nodes, and has an entry in the log for each of them. An entry holds the other
end, the number of the event, and the entry before it of the same node. Entries are counted from 1,
so that memory full of zeros says that nothing has happened yet.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pyg_scale.ops import library

COLUMNS = 3
"""Numbers of an entry: the other end, the event, the entry before it of the same node."""


class LastEvents(NamedTuple):
    """The latest events of some nodes.

    Attributes:
        n_id: The nodes and their neighbours, once each, ascending, ``int64`` ``[num_nodes]``.
        edge_index: Places in ``n_id`` of neighbour and node of each event, ``int64`` ``[2, m]``:
            node after node as they were given, the latest event of a node first.
        e_id: The numbers of the events, ``int64`` ``[m]``.
    """

    n_id: Tensor
    edge_index: Tensor
    e_id: Tensor


def insert_events(
    head: Tensor, log: Tensor, src: Tensor, dst: Tensor, used: int, first_event: int
) -> None:
    """Append events to a log, in place.

    Args:
        head: The last entry of each node, 0 if it has none, ``int64`` ``[num_nodes]``.
        log: Entries, ``int64`` ``[3 * capacity]``.
        src: One end of each event, ``int64`` ``[n]``.
        dst: The other end, ``int64`` ``[n]``.
        used: Entries that are taken; ``2 * n`` more are.
        first_event: The number of the first event; the others follow it.

    Raises:
        ValueError: If a node does not exist, or the log has no room.
    """
    if library.compiled():
        torch.ops.pyg_scale.insert_events(head, log, src, dst, used, first_event)
        return
    n, capacity = src.numel(), log.numel() // COLUMNS
    for end in (src, dst):
        wrong = end[(end < 0) | (end >= head.numel())]
        if wrong.numel():
            raise ValueError(f"node {int(wrong[0])} does not exist: there are {head.numel()}")
    if not 0 <= used <= capacity - 2 * n:
        raise ValueError("the log has no room for two entries of each event")
    node = torch.stack([dst, src], dim=1).view(-1)
    neighbor = torch.stack([src, dst], dim=1).view(-1)
    # The log is where its tensors are, whatever torch's default device is.
    event = torch.arange(first_event, first_event + n, device=log.device).repeat_interleave(2)
    entry = torch.arange(used + 1, used + 2 * n + 1, device=log.device)
    order = node.argsort(stable=True)
    same = node.new_zeros(2 * n, dtype=torch.bool)  # as the entry before it in this order
    same[1:] = node[order][1:] == node[order][:-1]
    previous = torch.empty_like(entry)
    previous[order] = torch.where(same, entry[order].roll(1), head[node[order]])
    log.view(-1, COLUMNS)[used : used + 2 * n] = torch.stack([neighbor, event, previous], dim=1)
    last = node.new_ones(2 * n, dtype=torch.bool)
    last[:-1] = ~same[1:]
    head[node[order][last]] = entry[order][last]


def last_events(head: Tensor, log: Tensor, n_id: Tensor, size: int) -> LastEvents:
    """The last events of nodes.

    Args:
        head: See :func:`insert_events`.
        log: See :func:`insert_events`.
        n_id: Nodes ``int64`` ``[n]``; repeats allowed.
        size: How many events each node gets at most.

    Raises:
        ValueError: If a node does not exist, or the log is damaged.
    """
    if library.compiled():
        return LastEvents(*torch.ops.pyg_scale.last_events(head, log, n_id, size))
    wrong = n_id[(n_id < 0) | (n_id >= head.numel())]
    if wrong.numel():
        raise ValueError(f"node {int(wrong[0])} does not exist: there are {head.numel()}")
    entries = entries_of(head, log, n_id, size)
    place, _ = entries.nonzero(as_tuple=True)
    found = log.view(-1, COLUMNS)[entries[entries > 0] - 1]
    neighbor, event = found[:, 0], found[:, 1]
    nodes = torch.cat([n_id, neighbor]).unique()
    ends = torch.stack([neighbor, n_id[place]])
    return LastEvents(nodes, torch.searchsorted(nodes, ends), event.contiguous())


def entries_of(head: Tensor, log: Tensor, n_id: Tensor, size: int) -> Tensor:
    """The last entries of nodes, the latest first, ``int64`` ``[n, size]``; 0 where there is none.

    Args:
        head: See :func:`insert_events`.
        log: See :func:`insert_events`.
        n_id: Nodes ``int64`` ``[n]``, in range.
        size: How many entries each node gets at most.

    Raises:
        ValueError: If the log is damaged.
    """
    rows, entries = log.view(-1, COLUMNS), log.new_zeros(n_id.numel(), size)
    here, limit = head[n_id], torch.full_like(n_id, rows.size(0))
    for k in range(size):
        if bool(((here < 0) | (here > limit)).any()):
            raise ValueError("the log is damaged: an entry is not before the one that names it")
        entries[:, k] = here
        there = here > 0
        limit = torch.where(there, here - 1, 0)
        here = torch.where(there, rows[(here - 1).clamp(min=0), 2] if rows.numel() else 0, 0)
    return entries


def keep_last(head: Tensor, log: Tensor, size: int, capacity: int) -> tuple[Tensor, int]:
    """A log of the last entries of each node alone, together; ``head`` is changed to match it.

    Args:
        head: See :func:`insert_events`.
        log: See :func:`insert_events`.
        size: How many entries of each node are kept.
        capacity: Entries for which there is room, at least; more if more are kept.

    Returns:
        The new log, and the number of its entries that are taken.
    """
    nodes = head.nonzero().view(-1)
    entries = entries_of(head, log, nodes, size).flip(1)  # the oldest first
    there = entries > 0
    kept, count = entries[there] - 1, there.sum(1)
    made = log.new_empty(max(capacity, 2 * kept.numel()), COLUMNS)
    torch.index_select(log.view(-1, COLUMNS), 0, kept, out=made[: kept.numel()])
    made[kept.numel() :] = 0
    place, last = torch.arange(kept.numel(), device=log.device), count.cumsum(0)
    made[: kept.numel(), 2] = place
    made[last - count, 2] = 0
    head[nodes] = last
    return made.view(-1), kept.numel()
