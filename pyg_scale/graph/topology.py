"""The graph as a sampler sees it: the in-edges of nodes, one edge type at a time."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from pyg_scale.ops.keys import edge_type_hash

NodeType = str | None
"""A node type, or ``None`` in a homogeneous graph."""

EdgeType = tuple[str, str, str] | None
"""An edge type ``(source, relation, destination)``, or ``None`` in a homogeneous graph."""

_EXACT = 2**53  # up to it every integer is a float64


@dataclass(frozen=True)
class CSC:
    """The in-edges of one edge type, grouped by destination node.

    Within a destination, edges are ordered by original edge id; in a temporal graph by
    time, then original edge id.

    Attributes:
        indptr: ``int64`` ``[num_dst_nodes + 1]``; the in-edges of node ``v`` are the
            positions ``indptr[v]`` to ``indptr[v + 1] - 1``.
        indices: ``int32`` or ``int64`` ``[num_edges]``, the source node of each position.
            May be strided (neighbour and edge id can lie side by side in memory).
        edge_id: ``int32`` or ``int64`` ``[num_edges]``, the original id of each position: the
            position of the edge in the user's input. ``None`` if it is the position itself. May be
            strided.
        time: ``int64`` ``[num_edges]``, the (sortable) time of each position, or ``None``.
        weight_prefix: ``int64`` ``[num_edges]``, the running sum of the fixed-point weights
            within each destination, this position included, or ``None``.
        waits: True if reading them may wait for a disk, as they do not fit into memory.
    """

    indptr: Tensor
    indices: Tensor
    edge_id: Tensor | None = None
    time: Tensor | None = None
    weight_prefix: Tensor | None = None
    waits: bool = False

    @property
    def num_edges(self) -> int:
        return self.indices.numel()

    def share_memory_(self) -> None:
        """Move all tensors to shared memory."""
        for tensor in (self.indptr, self.indices, self.edge_id, self.time, self.weight_prefix):
            if tensor is not None:
                tensor.share_memory_()

    def original_id(self, position: Tensor) -> Tensor:
        """The original edge ids, ``int64``, of positions ``[n]``."""
        if self.edge_id is None:
            return position.to(torch.int64)
        return self.edge_id[position].to(torch.int64)


@dataclass(frozen=True)
class PartsHere:
    """A graph whose parts are all read by this process.

    Attributes:
        csc: For each edge type, the in-edges of every part, by place in the part.
        books: The :class:`~pyg_scale.store.directory.PartitionBook` of each node type.
    """

    csc: Mapping[EdgeType, Sequence[CSC]]
    books: Mapping[NodeType, Any]


class Router(Protocol):
    """Samples in-edges that are not in one :class:`CSC`: in several parts, in other processes.

    Attributes:
        timed: The edge types whose in-edges are ordered and limited by time.
        timed_nodes: The node types that have these times; empty if they are times of edges.
    """

    timed: frozenset[EdgeType]
    timed_nodes: frozenset[NodeType]

    def expand(self, sampler: Any, asks: Sequence[Any]) -> list[Any]:
        """The result of :meth:`pyg_scale.sampler.hop.HopSampler.expand`."""
        ...

    def node_time(self, node_type: NodeType, node: Tensor) -> Tensor:
        """The (sortable) times ``int64`` ``[n]`` of nodes ``[n]``."""
        ...

    def all_node_times(self, node_type: NodeType) -> Tensor:
        """The times of all nodes of a type, always the same tensor."""
        ...

    def parts_here(self) -> PartsHere | None:
        """All in-edges, if this process reads all parts; else ``None``."""
        ...


@dataclass(frozen=True)
class Topology:
    """A graph as samplers see it, immutable and shared by every loader of a process.

    A homogeneous graph has the one node type ``None`` and the one edge type ``None``.
    With ``direction="backward"`` the roles of source and destination are exchanged in every
    :class:`CSC`: its "in-edges" are the out-edges of the graph.

    Attributes:
        node_types: Node types in the order of the graph's metadata.
        edge_types: Edge types in the order of the graph's metadata. Batches depend on this order,
            so it never comes from a set or a hash.
        num_nodes: Number of nodes of each type.
        csc: In-edges of each edge type.
        node_time: ``int64`` (sortable) ``[num_nodes]`` of the node types that have a time.
        index_dtype: ``torch.int64`` or ``torch.int32``: the dtype of the user's edge index, and so
            of batches.
        direction: ``"forward"`` (follow in-edges) or ``"backward"`` (follow out-edges).
        float_time: True if the graph's times are floating point numbers.
        router: Samples the in-edges if they are not all in this process; ``csc`` and ``node_time``
            are then empty.
    """

    node_types: tuple[NodeType, ...]
    edge_types: tuple[EdgeType, ...]
    num_nodes: Mapping[NodeType, int]
    csc: Mapping[EdgeType, CSC]
    node_time: Mapping[NodeType, Tensor] = field(default_factory=dict)
    index_dtype: torch.dtype = torch.int64
    direction: str = "forward"
    float_time: bool = False
    router: Router | None = None

    # Kept once they were asked for, as samplers do so for every batch.

    @functools.cached_property
    def is_hetero(self) -> bool:
        return self.node_types != (None,)

    @functools.cached_property
    def has_edge_time(self) -> bool:
        if self.router is not None:
            return bool(self.router.timed) and not self.router.timed_nodes
        return any(csc.time is not None for csc in self.csc.values())

    @functools.cached_property
    def has_node_time(self) -> bool:
        return bool(self.node_time if self.router is None else self.router.timed_nodes)

    @functools.cached_property
    def is_temporal(self) -> bool:
        return self.has_node_time or self.has_edge_time

    @functools.cached_property
    def expanded_types(self) -> list[int]:
        """For each edge type, the index in ``node_types`` of :meth:`expanded_type`."""
        return [self.node_types.index(self.expanded_type(each)) for each in self.edge_types]

    @functools.cached_property
    def neighbor_types(self) -> list[int]:
        """For each edge type, the index in ``node_types`` of :meth:`neighbor_type`."""
        return [self.node_types.index(self.neighbor_type(each)) for each in self.edge_types]

    @functools.cached_property
    def edge_type_hashes(self) -> list[int]:
        """For each edge type, the number by which it takes part in keys."""
        return [edge_type_hash(each) for each in self.edge_types]

    def is_timed(self, edge_type: EdgeType) -> bool:
        """Return True if the in-edges of an edge type are limited by time."""
        if self.router is not None:
            return edge_type in self.router.timed
        timed = self.csc[edge_type].time is not None
        return timed or self.neighbor_type(edge_type) in self.node_time

    def time_of(self, node_type: NodeType, node: Tensor) -> Tensor | None:
        """The (sortable) times ``int64`` ``[n]`` of nodes; ``None`` if their type has none."""
        if self.router is not None:
            known = node_type in self.router.timed_nodes
            return self.router.node_time(node_type, node) if known else None
        time = self.node_time.get(node_type)
        return None if time is None else time[node.to(torch.int64)]

    def all_times_of(self, node_type: NodeType) -> Tensor | None:
        """The (sortable) times of all nodes of a type; ``None`` if it has none."""
        if self.router is not None:
            known = node_type in self.router.timed_nodes
            return self.router.all_node_times(node_type) if known else None
        return self.node_time.get(node_type)

    def has_times_of(self, node_type: NodeType) -> bool:
        """Return True if the nodes of a type have times of their own."""
        return node_type in (self.node_time if self.router is None else self.router.timed_nodes)

    def expanded_type(self, edge_type: EdgeType) -> NodeType:
        """The node type whose neighbours ``csc[edge_type]`` lists."""
        if edge_type is None:
            return None
        return edge_type[2] if self.direction == "forward" else edge_type[0]

    def neighbor_type(self, edge_type: EdgeType) -> NodeType:
        """The node type of the neighbours that ``csc[edge_type]`` lists."""
        if edge_type is None:
            return None
        return edge_type[0] if self.direction == "forward" else edge_type[2]

    def share_memory_(self) -> Topology:
        """Move all tensors to shared memory, so that other processes get them by reference.

        Neighbours and edge ids that are interleaved in memory stay so.
        """
        for csc in self.csc.values():
            csc.share_memory_()
        for time in self.node_time.values():
            time.share_memory_()
        return self

    def to_time(self, time: Tensor, name: str = "input_time (edge_label_time of links)") -> Tensor:
        """Seed times as ``int64`` that compare with this graph's times.

        Args:
            time: Times ``[n]``.
            name: Of the times, for errors.

        Raises:
            ValueError: If one is NaN, or an integer that becomes another as ``float64``.
        """
        if self.float_time:
            return sortable_time(time, True, name)
        if time.is_floating_point():  # an integer is <= t exactly if it is <= floor(t)
            return _floor(time)
        return sortable_time(time.to(torch.int64))

    def check_time(self, time: Tensor, name: str) -> None:
        """Refuse seed times that :meth:`to_time` would, before there are batches.

        Args:
            time: Times ``[n]``.
            name: Of the argument, for the error.

        Raises:
            ValueError: If they are integers that become others among times in ``float64``.
        """
        if self.float_time and not time.is_floating_point():
            refuse_rounded(time.to(torch.int64), name)

    def time_before(self, time: Tensor, length: float) -> Tensor:
        """Times that are earlier by a length of time.

        Args:
            time: Sortable times, as :meth:`to_time` gives them, ``int64``.
            length: A positive length: an integer, unless the graph's times are floating point
                numbers, which are subtracted in ``float64``.

        Returns:
            Sortable times ``int64``; the least there is in the place of those before it.
        """
        if self.float_time:
            return sortable_time(_unsorted(time) - float(length))
        least = -(2**63)
        if length >= 2**63:
            return torch.full_like(time, least)
        return torch.where(time < least + length, least, time - length)


def _floor(time: Tensor) -> Tensor:
    """Times rounded down to ``int64``, clamped to its range."""
    if bool(time.isnan().any()):
        raise ValueError("timestamps must not be NaN: give every seed a time")
    time = time.to(torch.float64).floor()
    beyond = time >= 2.0**63
    within = time.clamp(min=-(2.0**63)).masked_fill(beyond, 0).to(torch.int64)
    return within.masked_fill(beyond, 2**63 - 1)


def sortable_time(time: Tensor, float_time: bool = False, name: str = "times") -> Tensor:
    """Times as ``int64`` in the same order; floating point times by their ordered bits.

    Args:
        time: Integers or floating point numbers.
        float_time: True if those that they are compared with are floating point numbers, so that
            integers become such, too.
        name: Of the times, for errors.

    Raises:
        ValueError: If a time is NaN, or an integer that becomes another as ``float64``.
    """
    if not time.is_floating_point():
        time = time.to(torch.int64)
        if not float_time:
            return time
        refuse_rounded(time, name)
    if bool(time.isnan().any()):
        raise ValueError("timestamps must not be NaN: give every node or edge a time")
    bits = (time.to(torch.float64) + 0.0).view(torch.int64)  # + 0.0 turns -0.0 into 0.0
    return bits ^ ((bits >> 63) & ((1 << 63) - 1))


def refuse_rounded(time: Tensor, name: str) -> None:
    """Refuse integers that ``float64`` cannot hold.

    Args:
        time: ``int64``.
        name: Of the times, for the error.

    Raises:
        ValueError: If one would become another; names it.
    """
    if not time.numel():
        return
    low, high = (int(each) for each in torch.aminmax(time))
    if low >= -_EXACT and high <= _EXACT:
        return
    rounded = time.to(torch.float64)
    # What is 2**63 as float64 has no int64 to compare with: none is exact there.
    wrong = (rounded >= 2.0**63) | (rounded.to(torch.int64) != time)
    if bool(wrong.any()):
        raise ValueError(
            f"{name}: the integer {int(time[wrong][0])} would be rounded, because other times of "
            "this graph are floating point numbers: give all times of the graph and of seeds as "
            "integers, or as float64"
        )


def _unsorted(time: Tensor) -> Tensor:
    """The floating point times that sortable ones stand for."""
    return (time ^ ((time >> 63) & ((1 << 63) - 1))).view(torch.float64)
