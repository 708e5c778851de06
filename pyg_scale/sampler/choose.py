"""The choice of in-edges: asked for by the sampler, made where the edges are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from pyg_scale.graph.topology import CSC, EdgeType
from pyg_scale.ops.gather import gather
from pyg_scale.ops.keys import NEIGHBOR, edge_type_hash, fold, fold_tensor
from pyg_scale.sampler.frontier import Chosen, Frontier

if TYPE_CHECKING:
    from pyg_scale.sampler.hop import HopSampler

_INTEGERS = (torch.int64, torch.int32)


class Ask(NamedTuple):
    """The nodes that one hop expands along one edge type.

    Attributes:
        edge_type: ``None`` in a homogeneous graph.
        hop: From 0.
        num_neighbors: How many in-edges each node gets, -1 for all.
        key: The key of the batch.
        node: Original ids, ``int64`` ``[n]``.
        component: Position of the seed of each, ``int64`` ``[n]``, if disjoint.
        latest: The (sortable) time that no edge may be after, ``int64`` ``[n]``; ``None`` if the
            edge type has no times, or they do not matter.
        after: The (sortable) time that every edge must be after, ``int64`` ``[n]``; ``None`` if
            the edge type has no window.
    """

    edge_type: EdgeType
    hop: int
    num_neighbors: int
    key: int
    node: Tensor
    component: Tensor | None
    latest: Tensor | None
    after: Tensor | None = None

    def at(self, rows: Tensor) -> Ask:
        """The same of some of the nodes."""
        return self._replace(
            node=gather(self.node, rows),
            component=None if self.component is None else gather(self.component, rows),
            latest=None if self.latest is None else gather(self.latest, rows),
            after=None if self.after is None else gather(self.after, rows),
        )


class Picked(NamedTuple):
    """The in-edges that each node of an :class:`Ask` got.

    Attributes:
        counts: How many in-edges, ``int64`` ``[n]``.
        neighbor: Their sources, node after node, ``int64`` ``[m]``.
        edge: Their original ids, ``int64`` ``[m]``.
        attrs: Extra tensors ``[m, ...]`` by name.
    """

    counts: Tensor
    neighbor: Tensor
    edge: Tensor
    attrs: Mapping[str, Tensor]


def hop_key(ask: Ask) -> int:
    """The key of a hop along an edge type, from which those of its nodes are made."""
    return fold(ask.key, NEIGHBOR, ask.hop, edge_type_hash(ask.edge_type))


def choose(
    sampler: HopSampler,
    csc: CSC,
    ask: Ask,
    place: Tensor | None = None,
    neighbor_time: Tensor | None = None,
) -> Picked:
    """Choose in-edges with a sampler, in plain torch.

    Args:
        sampler: Says which.
        csc: The in-edges of a part, or of all nodes.
        ask: Which nodes.
        place: Where the in-edges of each node are in ``csc``, ``int64`` ``[n]``; at the node's
            own id if ``None``.
        neighbor_time: Times of the neighbours by id, by which ``csc`` is ordered, if ``csc`` has
            no ``time`` of its own.

    Raises:
        TypeError: If the sampler returned something else than a :class:`Chosen` of tensors.
        ValueError: If these differ in size, or take what is no candidate of its row.
    """
    frontier = frontier_of(csc, ask, place, neighbor_time, by_node=not sampler.redraw)
    if sampler.temporal_strategy == "last" and ask.num_neighbors >= 0 and ask.latest is not None:
        last = torch.maximum(frontier.begin, frontier.end - ask.num_neighbors)
        frontier = replace(frontier, begin=last)
    if ask.num_neighbors < 0:
        chosen = _checked(
            sampler.pick_all(frontier), frontier, f"{type(sampler).__name__}.pick_all"
        )
    else:
        found = sampler.pick(frontier, ask.num_neighbors)
        chosen = _checked(found, frontier, f"{type(sampler).__name__}.pick")
    order = chosen.row.argsort(stable=True)
    row, position = chosen.row[order], chosen.position[order]
    return Picked(
        torch.bincount(row, minlength=ask.node.numel()),
        csc.indices[position].to(torch.int64),
        csc.original_id(position),
        {name: value[order] for name, value in (chosen.edge_attrs or {}).items()},
    )


def _checked(chosen: Any, frontier: Frontier, who: str) -> Chosen:
    """The choice of a sampler, checked: indexing would silently make edges of a wrong one."""
    if not isinstance(chosen, Chosen):
        raise TypeError(f"{who} must return Chosen(row, position) (got {type(chosen).__name__})")
    attrs = chosen.edge_attrs or {}
    named = {"row": chosen.row, "position": chosen.position}
    named |= {f"edge_attrs[{name!r}]": value for name, value in attrs.items()}
    for name, value in named.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{who}: {name} must be a tensor (got {type(value).__name__})")
        size = list(value.shape)
        if name in ("row", "position") and (len(size) != 1 or value.dtype not in _INTEGERS):
            raise TypeError(f"{who}: {name} must be int64 [m] (got {value.dtype} {size})")
        if size[:1] != [chosen.row.numel()]:
            raise ValueError(
                f"{who}: {name} must have a row for each of the {chosen.row.numel()} edges that "
                f"are taken (got shape {size})"
            )
    if chosen.row.numel():
        _check_candidates(chosen, frontier, who)
    return chosen


def _check_candidates(chosen: Chosen, frontier: Frontier, who: str) -> None:
    rows = frontier.begin.numel()
    low, high = (int(end) for end in chosen.row.aminmax())
    if low < 0 or high >= rows:
        raise ValueError(
            f"{who}: row must be 0 or more, and less than the {rows} rows of the frontier (got "
            f"{low if low < 0 else high})"
        )
    begin, end = frontier.begin[chosen.row], frontier.end[chosen.row]
    outside = (chosen.position < begin) | (chosen.position >= end)
    if bool(outside.any()):
        at = int(outside.nonzero()[0])
        raise ValueError(
            f"{who}: position must be that of a candidate of its row, at least frontier.begin[row] "
            f"and less than frontier.end[row] (got {int(chosen.position[at])} for row "
            f"{int(chosen.row[at])}, from {int(begin[at])} to {int(end[at])})"
        )


def frontier_of(
    csc: CSC,
    ask: Ask,
    place: Tensor | None = None,
    neighbor_time: Tensor | None = None,
    *,
    by_node: bool = False,
) -> Frontier:
    """The nodes with the in-edges within the time limits of their seeds; see :func:`choose`."""
    key = fold_tensor(hop_key(ask), ask.node)
    if ask.component is not None and not by_node:
        key = fold_tensor(key, ask.component)
    where = ask.node if place is None else place
    frontier = Frontier(
        csc,
        ask.node,
        csc.indptr[where],
        csc.indptr[where + 1],
        key,
        ask.edge_type,
        ask.hop,
        ask.key,
        place,
    )
    if ask.latest is None:
        return frontier

    def later_than(limit: Tensor, position: Tensor) -> Tensor:
        if csc.time is not None:
            return csc.time[position] > limit
        assert neighbor_time is not None
        return neighbor_time[csc.indices[position].to(torch.int64)] > limit

    within = replace(frontier, end=frontier.first_where(partial(later_than, ask.latest)))
    if ask.after is None:
        return within
    return replace(within, begin=within.first_where(partial(later_than, ask.after)))
