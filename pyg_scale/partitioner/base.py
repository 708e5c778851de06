"""The contract of partitioners, which assign each node of an undirected graph to a part."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pyg_scale.graph.topology import NodeType, Topology

BALANCES = ("nodes", "edges", "train")
"""Quantities to balance: nodes of each type, in-edges of all types, training nodes of each type."""


@dataclass(frozen=True)
class PartitionGraph:
    """The undirected graph without types that a partitioner gets.

    The nodes of all types are numbered consecutively, in the order of the types. It has every edge
    of the user's graph once in each direction, however often it was given, and no self-loops.
    Neighbours are ascending within a node. A method that needs less
    (:attr:`Partitioner.needs_simple`, :attr:`Partitioner.needs_sorted`) may get less.

    Attributes:
        indptr: ``int64`` ``[num_nodes + 1]``.
        indices: ``int32`` or ``int64`` ``[num_entries]``, the neighbours of each node; may be
            strided, and may be a memory-mapped file. Must not be written to.
        offsets: The ranges of nodes of each type, ``{type: (begin, end)}``, in the order of the
            types, without gaps.
        weights: ``int64`` ``[num_nodes, num_constraints]``, not negative; each column, at least
            one, is a quantity to balance. May be strided, also with stride 0.
        names: The quantity of each column: one of :data:`BALANCES`, with the type if the graph has
            types (``"nodes of 'paper'"``).
        is_sorted: True if neighbours are ascending within each node.
        train: ``bool`` ``[num_nodes]``, the training nodes; ``None`` if unknown.
        topology: The user's graph, directed and with types; ``None`` if only parts of it are
            available.
    """

    indptr: Tensor
    indices: Tensor
    offsets: Mapping[NodeType, tuple[int, int]]
    weights: Tensor
    names: tuple[str, ...] = ("nodes",)
    is_sorted: bool = True
    train: Tensor | None = None
    topology: Topology | None = None

    @property
    def num_nodes(self) -> int:
        return self.indptr.numel() - 1

    @property
    def num_edges(self) -> int:
        """Number of undirected edges."""
        return self.indices.numel() // 2


class Partitioner(ABC):
    """Cuts a graph into parts.

    An instance has the options of the method as attributes named like the arguments of the
    constructor; all have defaults. :meth:`assign` may be called any number of times. Its result
    depends only on its arguments, not on the order of neighbours, the number of threads or the size
    of chunks.

    Attributes:
        balances: The :data:`BALANCES` that the result keeps within :meth:`capacity` (in every
            column of that kind); requests for others are refused. Empty: the sizes are random.
        minimises_cut: True if two cliques joined by an edge are cut at that edge.
        needs_simple: True if there must be no self-loops and no parallel edges (which otherwise
            count each time).
        needs_sorted: True if neighbours must be ascending. If both are False, a large graph on disk
            is used in place.
        max_imbalance: A part may hold this many times its fair share.
    """

    balances: tuple[str, ...] = BALANCES
    minimises_cut: bool = False
    needs_sorted: bool = True
    needs_simple: bool = True
    max_imbalance: float = 1.1

    @abstractmethod
    def assign(self, graph: PartitionGraph, num_parts: int, *, seed: int, shares: Tensor) -> Tensor:
        """The part of each node.

        Args:
            graph: At least one node.
            num_parts: From 2 to the number of nodes; the caller handles all other numbers.
            seed: Seed of all random choices (:mod:`pyg_scale.ops.keys`).
            shares: ``float64`` ``[num_parts]``, above 0, sum 1: the share of each column that a
                part should have. Equal by default.

        Returns:
            Integers ``[num_nodes]`` from 0 to ``num_parts - 1``.

        Raises:
            ValueError: If the method cannot partition this graph; names the reason and an
                alternative.
        """

    def assign_and_cache(
        self, graph: PartitionGraph, num_parts: int, *, seed: int, shares: Tensor
    ) -> tuple[Tensor, dict[NodeType, list[Tensor]]]:
        """Assign nodes to parts, and choose features of other parts that each part should cache.

        Returns:
            The assignment, and for node types with such lists the ids ``int64`` ``[n]`` for each
            part, hottest first.
        """
        return self.assign(graph, num_parts, seed=seed, shares=shares), {}

    def options(self) -> dict[str, object]:
        """The arguments of the constructor, as stored in a graph directory."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def extra(self) -> dict[str, object]:
        """Further values to store in a graph directory, as JSON."""
        return {}

    def capacity(self, graph: PartitionGraph, shares: Tensor) -> Tensor:
        """The largest load of each part, ``int64`` ``[num_parts, num_constraints]``.

        It is ``max_imbalance`` times the fair share, but at least the load with which every node
        can be placed for any weights: the fair share, rounded up, plus the weight of the heaviest
        node less one unit. With one column, or columns of which each node has one, some part then
        always has room; with others (nodes and in-edges) this is likely, but not certain.
        """
        total = graph.weights.sum(0)
        fair = shares.view(-1, 1) * total.to(torch.float64)
        # A share of 0.2 of 10 nodes is 2, not the 2.0000000000000004 of floating point.
        least = (fair - 1e-9 * fair).ceil().to(torch.int64)
        heaviest = graph.weights.amax(0)
        room = (fair * self.max_imbalance * (1 + 1e-12)).floor().to(torch.int64)
        return torch.maximum(room, least + (heaviest - 1).clamp(min=0))


@dataclass
class Partition:
    """A finished assignment, as :func:`pyg_scale.partition` writes it.

    Attributes:
        assignment: The part ``int32`` ``[num_nodes]`` of every node, by node type (``None`` in a
            homogeneous graph).
        num_parts: Number of parts.
        method: The name of the partitioner, or ``"imported"``.
        options: Its options, as JSON values.
        seed: Its seed.
        extra: Further values of the partitioner to store in the directory, as JSON values.
        cache: For node types with cache lists, the ids ``int64`` ``[n]`` of nodes of other parts
            whose features each part should cache, hottest first.
    """

    assignment: dict[NodeType, Tensor]
    num_parts: int
    method: str
    options: dict[str, object] = field(default_factory=dict)
    seed: int = 0
    extra: dict[str, object] = field(default_factory=dict)
    cache: dict[NodeType, list[Tensor]] = field(default_factory=dict)


def equal_shares(num_parts: int) -> Tensor:
    """``float64`` ``[num_parts]``, each ``1 / num_parts``."""
    return torch.full((num_parts,), 1.0 / num_parts, dtype=torch.float64)


def check_count(name: str, value: Any, least: int = 1) -> None:
    """Refuse an option that is no number of at least ``least``.

    Raises:
        ValueError: If so; names it.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a number of at least {least} (got {value!r})")


def check_imbalance(value: float) -> None:
    """Refuse a limit on the load of a part that no partition keeps.

    Raises:
        ValueError: If it is below 1, or NaN.
    """
    if not value >= 1:
        raise ValueError(f"max_imbalance must be at least 1 (got {value!r})")


def check_num_parts(num_parts: int, num_nodes: int) -> None:
    """Refuse an impossible number of parts.

    Raises:
        ValueError: If it is below 1, or there are fewer nodes than parts.
    """
    check_count("num_parts", num_parts)
    if num_parts > max(1, num_nodes):
        raise ValueError(
            f"num_parts={num_parts}, but the graph has only {num_nodes} nodes: ask for at most "
            f"{max(1, num_nodes)} parts"
        )


def imbalance(assignment: Tensor, weights: Tensor, shares: Tensor) -> float:
    """The load of the fullest part, as a multiple of its fair share, over all columns.

    Args:
        assignment: ``[num_nodes]``.
        weights: ``int64`` ``[num_nodes, num_constraints]``.
        shares: ``float64`` ``[num_parts]``.
    """
    held = torch.zeros(shares.numel(), weights.size(1), dtype=torch.int64)
    held.index_add_(0, assignment.to(torch.int64), weights)
    fair = shares.view(-1, 1) * weights.sum(0).to(torch.float64)
    ratio = torch.where(fair > 0, held / fair, torch.ones_like(fair))
    return float(ratio.max()) if ratio.numel() else math.nan
