"""The nodes of a batch that is sampled on a device: their rows, in order of arrival."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from pyg_scale.ops.first_places import first_places


class Met(NamedTuple):
    """The nodes that the edges of a hop lead to, and their rows."""

    row: Tensor
    """Of each of them, ``int64`` ``[m]``."""
    new: Tensor
    """Those that had none, ``int64`` ``[b]``, of which the first ``size`` are meant: ``b`` is
    :meth:`DeviceNodes.most_new`."""
    new_seed: Tensor | None
    """The positions of their seeds, if disjoint."""
    is_new: Tensor
    """True where an entry of ``new`` is meant, ``bool`` ``[b]``."""
    size: Tensor
    """Number of these, ``int64``."""


class Numbers(NamedTuple):
    """The rows of nodes that were met, and which of these are the first of their kind."""

    row: Tensor
    """Of each, ``int64`` ``[m]``."""
    is_first: Tensor
    """True where a node gets the next row, ``bool`` ``[m]``."""
    rank: Tensor
    """Number of nodes that do so up to there, ``int64`` ``[m]``."""


class DeviceNodes(ABC):
    """The nodes of one type in the batch.

    The row of a node is the least of the numbers that were proposed for it: those of the batch
    before it, or the places of the edges that lead to it, counted on from there. A minimum does
    not depend on the order in which it is taken, so the rows are those of a loop over the edges.

    Args:
        node: The seeds of the type, ``int64``.
        seed: Their positions among all seeds, if disjoint.
        most: How many different ones there can be.
    """

    def __init__(self, node: Tensor, seed: Tensor | None, most: int) -> None:
        self._most = most
        self._parts = [node]
        self._seeds = None if seed is None else [seed]
        self.size = node.numel()
        self.per_hop = [self.size]

    @property
    def frontier(self) -> Tensor:
        """The ids of those that the hop before added, ``int64``."""
        return self._parts[-1]

    @property
    def frontier_seed(self) -> Tensor | None:
        """The positions of the seeds of these, if disjoint, ``int64``."""
        return None if self._seeds is None else self._seeds[-1]

    @property
    def begin(self) -> int:
        """The row of the first of these."""
        return self.size - self.per_hop[-1]

    def all(self) -> Tensor:
        """Their ids ``int64`` ``[size]``."""
        return joined(self._parts[0], self._parts)

    def all_seeds(self) -> Tensor | None:
        """The positions of their seeds, if disjoint, ``int64`` ``[size]``."""
        return None if self._seeds is None else joined(self._seeds[0], self._seeds)

    def most_new(self, count: int) -> int:
        """The most of ``count`` nodes that may be new: no more than are not in the batch.

        Seeds may be given more than once, so they are not counted.
        """
        return min(count, self._most - (self.size - self.per_hop[0]))

    def bytes_to_meet(self, count: int) -> int:
        """The most memory of the device that :meth:`meet` takes for ``count`` nodes: 64 bytes for
        each, 40 for each that may be new, and what finding rows takes.
        """
        return 64 * count + 40 * self.most_new(count) + self._bytes_to_number(count)

    def meet(self, node: Tensor, seed: Tensor | None) -> Met:
        """Give every node that has no row the next one; nobody waits for how many there are.

        No tensor has more than ``m`` entries, and those of new nodes have :meth:`most_new`.

        Args:
            node: Ids, ``int64`` ``[m]``, at least one.
            seed: The position of the seed of each, if disjoint.

        Raises:
            ValueError: If there are more than can be numbered.
        """
        count = node.numel()
        if self.size + count >= 2**31 - 1:
            raise ValueError(
                f"the batch has {self.size + count} nodes and edges of a hop, more than 2**31: use "
                "smaller batches or fewer neighbours"
            )
        row, is_first, rank = self._number(node, seed)
        most = self.most_new(count)
        to = torch.where(is_first, rank - 1, most)

        def firsts(of: Tensor) -> Tensor:
            return of.new_zeros(most + 1).scatter_(0, to, of)[:most]

        place = torch.arange(most, device=node.device)
        new_seed = None if seed is None else firsts(seed)
        return Met(row, firsts(node), new_seed, place < rank[-1], rank[-1])

    def add(self, node: Tensor, seed: Tensor | None) -> None:
        """Append the new ones."""
        self._parts.append(node)
        if self._seeds is not None and seed is not None:
            self._seeds.append(seed)
        self.size += node.numel()
        self.per_hop.append(node.numel())

    @abstractmethod
    def _number(self, node: Tensor, seed: Tensor | None) -> Numbers: ...

    @abstractmethod
    def _bytes_to_number(self, count: int) -> int: ...


class NodesInTable(DeviceNodes):
    """Nodes whose rows are in a table of all nodes of the graph.

    Args:
        node: See :class:`DeviceNodes`.
        row_of: See :class:`~pyg_scale.sampler.device_graph.DeviceGraph`.
    """

    def __init__(self, node: Tensor, row_of: Tensor) -> None:
        super().__init__(node, None, row_of.numel() - 1)
        self._row_of = row_of
        if self.size:
            self._propose(node, 0)

    def _number(self, node: Tensor, seed: Tensor | None) -> Numbers:
        nobody = self._row_of.numel() - 1
        place = self._propose(node, self.size)
        is_first = self._row_of[node] == place
        rank = is_first.cumsum(0)
        row = (rank + (self.size - 1)).to(torch.int32)
        self._row_of.scatter_(0, torch.where(is_first, node, nobody), row)
        return Numbers(self._row_of[node].to(torch.int64), is_first, rank)

    def _bytes_to_number(self, count: int) -> int:
        return 0  # the table is there

    def _propose(self, node: Tensor, begin: int) -> Tensor:
        end = begin + node.numel()
        place = torch.arange(begin, end, dtype=torch.int32, device=node.device)
        self._row_of.scatter_reduce_(0, node, place, "amin")
        return place


class NodesByHash(DeviceNodes):
    """Nodes whose rows are found by hashing: memory follows the batch, and not the graph.

    Args:
        node: See :class:`DeviceNodes`.
        seed: See there.
        num_nodes: Nodes of the type.
        num_seeds: Seeds of all types.

    Raises:
        ValueError: If the product of these exceeds 63 bits.
    """

    def __init__(self, node: Tensor, seed: Tensor | None, num_nodes: int, num_seeds: int) -> None:
        super().__init__(node, seed, num_nodes * (1 if seed is None else num_seeds))
        self._num_nodes = num_nodes
        if seed is not None and num_nodes * num_seeds >= 2**63:
            raise ValueError(
                f"disjoint: {num_seeds} seeds times {num_nodes} nodes exceed 63 bits; use smaller "
                "batches"
            )
        self._known = [self._identity(node, seed)]

    def add(self, node: Tensor, seed: Tensor | None) -> None:
        """Append the new ones."""
        super().add(node, seed)
        self._known.append(self._identity(node, seed))

    def _number(self, node: Tensor, seed: Tensor | None) -> Numbers:
        identity = torch.cat([*self._known, self._identity(node, seed)])
        first = first_places(identity, min(identity.numel(), self._most))[self.size :]
        place = torch.arange(self.size, self.size + node.numel(), device=node.device)
        is_first = first == place
        rank = is_first.cumsum(0)
        among_new = (first - self.size).clamp(min=0)
        row = torch.where(first < self.size, first, rank[among_new] + (self.size - 1))
        return Numbers(row, is_first, rank)

    def _bytes_to_number(self, count: int) -> int:
        # The identities of all, their first places, and a table of up to four slots for each.
        together = self.size + count
        return 16 * together + 48 * min(together, self._most) + 64 * 12

    def _identity(self, node: Tensor, seed: Tensor | None) -> Tensor:
        return node if seed is None else node + seed * self._num_nodes


def joined(none: Tensor, parts: list[Tensor]) -> Tensor:
    """Tensors one after the other; those without entries cost nothing."""
    parts = [part for part in parts if part.numel()] or [none]
    return torch.cat(parts) if len(parts) > 1 else parts[0]
