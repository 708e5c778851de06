"""The contract of partitioners: one undirected graph in, a part for every node out."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pyg_scale.graph.topology import NodeType, Topology

BALANCES = ("nodes", "edges", "train")
"""Quantities to balance: nodes of each type, in-edges of all, training nodes of each type."""


@dataclass(frozen=True)
class PartitionGraph:
    """The graph as a partitioner sees it: undirected, without types.

    The nodes of all types are numbered through, in the order of the types. Every edge of the
    user's graph is there in both directions, once each way however often it was given; there are
    no self-loops. Neighbours are ascending within a node. A method that asks for less than that
    (:attr:`Partitioner.needs_simple`, :attr:`Partitioner.needs_sorted`) may get less.

    Attributes:
        indptr: ``int64`` ``[num_nodes + 1]``.
        indices: ``int32`` or ``int64`` ``[num_entries]``, the neighbours of each node; may be
            strided, and may be a memory-mapped file. Never written to.
        offsets: Where the nodes of each type begin and end: ``{type: (begin, end)}``, in the
            order of the types, without gaps.
        weights: ``int64`` ``[num_nodes, num_constraints]``, what is to be balanced: a column for
            each thing. At least one column, none negative; may be strided, also with stride 0.
        names: What each column counts: one of :data:`BALANCES`, and of what type where the graph
            has types (``"nodes of 'paper'"``).
        is_sorted: Whether neighbours are ascending within each node.
        train: ``bool`` ``[num_nodes]``, the training nodes; ``None`` where nothing says which.
        topology: The user's graph, directed and with types; ``None`` where only parts of it are
            at hand.
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
        """Undirected edges."""
        return self.indices.numel() // 2


class Partitioner(ABC):
    """Cuts a graph into parts.

    An instance holds the options of the method, each as an attribute of the same name as the
    argument of the constructor; all have defaults. :meth:`assign` may be called any number of
    times, and its result depends only on its arguments: not on the order of neighbours, not on
    the number of threads, not on the size of chunks.

    Attributes:
        balances: Which of :data:`BALANCES` the result keeps within :meth:`capacity` (on every
            column of that kind); asking for another is refused. Empty: the sizes are random.
        minimises_cut: Whether two cliques joined by an edge are cut at that edge.
        needs_simple: Whether there must be no self-loops and no parallel edges (which count as
            often as they are there).
        needs_sorted: Whether neighbours must be ascending. Without both, a large graph on disk is
            used where it lies.
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
            num_parts: From 2 to the number of nodes; the caller has dealt with all else.
            seed: Of every random choice (:mod:`pyg_scale.ops.keys`).
            shares: ``float64`` ``[num_parts]``, above 0, sum 1: the share of each column that a
                part should hold. Equal unless the user asked otherwise.

        Returns:
            Integers ``[num_nodes]`` from 0 to ``num_parts - 1``.

        Raises:
            ValueError: If the method cannot do this graph; says why and what can.
        """

    def assign_and_cache(
        self, graph: PartitionGraph, num_parts: int, *, seed: int, shares: Tensor
    ) -> tuple[Tensor, dict[NodeType, list[Tensor]]]:
        """:meth:`assign`, and which features of other parts each part should cache.

        Returns:
            The assignment, and for node types with such lists the ids ``int64`` ``[n]`` for each
            part, hottest first.
        """
        return self.assign(graph, num_parts, seed=seed, shares=shares), {}

    def options(self) -> dict[str, object]:
        """The arguments of the constructor, as they are kept in a graph directory."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def extra(self) -> dict[str, object]:
        """Further values to keep in a graph directory, as JSON."""
        return {}

    def capacity(self, graph: PartitionGraph, shares: Tensor) -> Tensor:
        """The most that each part may hold, ``int64`` ``[num_parts, num_constraints]``.

        ``max_imbalance`` times the fair share, but never less than what is needed to place every
        node whatever the weights are: the fair share, rounded up, and all of the heaviest node
        but one unit. With one column, or columns of which each node has one, some part then
        always has room; with others (nodes and in-edges) that is usual, not certain.
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
        extra: What the partitioner wants to be kept in the directory, as JSON values.
        cache: For node types with such lists, the ids ``int64`` ``[n]`` of nodes of other parts
            whose features each part should keep, hottest first.
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


def check_num_parts(num_parts: int, num_nodes: int) -> None:
    """Refuse a number of parts that cannot be.

    Raises:
        ValueError: If it is below 1, or there are fewer nodes than parts.
    """
    if isinstance(num_parts, bool) or not isinstance(num_parts, int) or num_parts < 1:
        raise ValueError(f"num_parts must be a number of at least 1 (got {num_parts!r})")
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
