"""The contract of partitioners: one undirected graph in, a part for every node out."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pyg_scale.store.base import NodeType


@dataclass(frozen=True)
class PartitionGraph:
    """What a partitioner sees: undirected, without types.

    The nodes of all types are numbered through, in the order of the types. Every edge of the
    user's graph is there in both directions, once each way however often it was given; there are
    no self-loops. Neighbours are ascending within a node.

    Attributes:
        indptr: ``int64`` ``[num_nodes + 1]``.
        indices: ``int32`` or ``int64`` ``[num_entries]``, the neighbours of each node; may be
            strided, and may be a memory-mapped file.
        offsets: Where the nodes of each type begin, and the number of nodes last:
            ``{type: (begin, end)}``.
        weights: ``int64`` ``[num_nodes, num_constraints]``, what is to be balanced: a column for
            each thing, such as nodes of a type, in-edges, training nodes. At least one column.
        names: What each column counts, for reports and errors.
    """

    indptr: Tensor
    indices: Tensor
    offsets: Mapping[NodeType, tuple[int, int]]
    weights: Tensor
    names: tuple[str, ...] = ("nodes",)

    @property
    def num_nodes(self) -> int:
        return self.indptr.numel() - 1

    @property
    def num_edges(self) -> int:
        """Undirected edges."""
        return self.indices.numel() // 2


class Partitioner(ABC):
    """Cuts a graph into parts.

    An instance holds the options of the method; :meth:`assign` may be called any number of times,
    and its result depends only on its arguments: not on the number of threads, not on the size of
    chunks.

    Attributes:
        balances: Whether the result keeps to ``max_imbalance``; else :attr:`max_imbalance` is no
            promise (``random``).
        minimises_cut: Whether two cliques joined by an edge are cut at that edge.
        max_imbalance: The largest part may be this many times the average, in every column of the
            weights where that is possible at all (a column that only few nodes have need not be).
    """

    balances: bool = True
    minimises_cut: bool = False
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

    def capacity(self, graph: PartitionGraph, shares: Tensor) -> Tensor:
        """The most that each part may hold, ``int64`` ``[num_parts, num_constraints]``.

        Never less than what lets every node be placed: the share rounded up, or one node of the
        largest weight.
        """
        total = graph.weights.sum(0)
        fair = shares.view(-1, 1) * total.to(torch.float64)
        largest = graph.weights.amax(0)
        least = fair.ceil().to(torch.int64)
        room = (fair * self.max_imbalance).floor().to(torch.int64)
        return torch.maximum(torch.maximum(room, least), largest.expand_as(least))


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
    """

    assignment: dict[NodeType, Tensor]
    num_parts: int
    method: str
    options: dict[str, object] = field(default_factory=dict)
    seed: int = 0
    extra: dict[str, object] = field(default_factory=dict)


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
    """How many times its fair share the fullest part holds, over all columns of ``weights``.

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
