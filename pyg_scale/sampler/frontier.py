"""The nodes that a hop expands and those it takes: both ends of :meth:`HopSampler.pick`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from pyg_scale.graph.topology import CSC, EdgeType
from pyg_scale.ops.candidates import first_where


@dataclass(frozen=True)
class Frontier:
    """The ``n`` nodes that one hop expands along one edge type, and what each may choose from.

    Row ``i`` is node ``node[i]``. Its candidates are the positions ``begin[i]`` to
    ``end[i] - 1`` of ``csc``: its in-edges, in a temporal graph only those that are not later
    than its seed and within its window (with ``temporal_strategy="last"``, the last of them).

    Attributes:
        csc: The in-edges of the edge type: ``csc.indices[position]`` is the neighbour at a
            position.
        node: Original node ids, ``int64`` ``[n]``.
        begin: First candidate of each row, ``int64`` ``[n]``.
        end: One past the last candidate of each row, ``int64`` ``[n]``.
        key: A key for the draws of each row, ``int64`` ``[n]``, see :mod:`pyg_scale.ops.keys`.
            It depends on the key of the batch, the hop, the edge type, the node and, if
            disjoint, the position of the seed, and on nothing else.
        edge_type: The edge type, ``None`` in a homogeneous graph.
        hop: The number of the hop, from 0.
        batch_key: The key of the batch, for draws that are not made per expanded node.
        place: Where the in-edges of each row are in ``csc``, ``int64`` ``[n]``, if not at its
            ``node``: in a part of a graph.
    """

    csc: CSC
    node: Tensor
    begin: Tensor
    end: Tensor
    key: Tensor
    edge_type: EdgeType
    hop: int
    batch_key: int
    place: Tensor | None = None

    @property
    def num_candidates(self) -> Tensor:
        """From how many in-edges each row may choose, ``int64`` ``[n]``."""
        return self.end - self.begin

    @property
    def first(self) -> Tensor:
        """The first in-edge of each row, candidate or not, ``int64`` ``[n]``."""
        return self.csc.indptr[self.node if self.place is None else self.place]

    def candidates(self) -> tuple[Tensor, Tensor]:
        """Everything there is to choose from: rows and positions, ``int64`` ``[m]`` each."""
        count = self.num_candidates
        row = torch.repeat_interleave(torch.arange(count.numel()), count)
        before = count.cumsum(0) - count
        return row, self.begin[row] + torch.arange(row.numel()) - before[row]

    def first_where(self, condition: Callable[[Tensor], Tensor]) -> Tensor:
        """The first candidate of each row from which on a condition holds, else ``end``.

        Args:
            condition: Takes one position per row, ``int64`` ``[n]``, and returns ``bool``
                ``[n]``. Within a row it must not turn from true to false.
        """
        return first_where(self.begin, self.end, self.csc.num_edges, condition)

    def at(self, row: Tensor) -> Frontier:
        """Some of the rows, ``int64`` ``[r]``."""
        return replace(
            self,
            node=self.node[row],
            begin=self.begin[row],
            end=self.end[row],
            key=self.key[row],
            place=None if self.place is None else self.place[row],
        )


class Chosen(NamedTuple):
    """The in-edges that a hop takes.

    Attributes:
        row: The row of the frontier that takes each edge, ``int64`` ``[m]``, in any order;
            edges of one row stay in the order given.
        position: The position of each edge in the ``csc`` of the frontier, ``int64`` ``[m]``.
        edge_attrs: Extra tensors ``[m, ...]`` by name, such as importance weights
            ``{"edge_weight": ...}``; the loader puts them on the batch. The same names must
            be given every time.
    """

    row: Tensor
    position: Tensor
    edge_attrs: Mapping[str, Tensor] | None = None
