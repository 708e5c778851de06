"""Splits rows of features by the rank that has them, and removes repetitions of remote rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pyg_scale.distributed.features.parts import edge_book
from pyg_scale.graph.topology import EdgeType, NodeType
from pyg_scale.ops.split_rows import split_rows
from pyg_scale.store.directory import GraphDirectory

_NONE = torch.empty(0, dtype=torch.int64)


@dataclass
class RemoteRows:
    """Distinct rows of one part that another rank has.

    Attributes:
        part: The part.
        ids: The requested ids, each once: local ids of nodes, original ids of edges; ``int32`` if
            all of the type fit, else ``int64``.
        position: Positions of the rows in the result, ``int64`` ``[n]``.
        take: For each position, the index in ``ids``, ascending; ``None`` if they are in order.
    """

    part: int
    ids: Tensor
    position: Tensor
    take: Tensor | None


@dataclass
class RowsByRank:
    """Rows of one type, by the rank that has them.

    Attributes:
        of_edges: True for rows of edges.
        type: Node type or edge type.
        index: Their original ids, ``int64`` ``[n]``.
        local: ``(part, positions, ids)`` of the rows in local parts; ids are local ids of nodes and
            original ids of edges; positions are ``None`` for all rows in order.
        absent: Positions of the other rows, ``int64``; ascending unless they are requested.
        remote: The other rows, by part.
    """

    of_edges: bool
    type: NodeType | EdgeType
    index: Tensor
    local: list[tuple[int, Tensor | None, Tensor]] = field(default_factory=list)
    absent: Tensor = field(default_factory=lambda: _NONE)
    remote: list[RemoteRows] = field(default_factory=list)


class Splitter:
    """Splits rows by part.

    Args:
        directory: The directory.
        here: The local parts.
    """

    def __init__(self, directory: GraphDirectory, here: Any) -> None:
        self._directory = directory
        self._parts = directory.meta.num_parts
        self._here = torch.zeros(self._parts, dtype=torch.bool)
        self._here[sorted(here)] = True
        self._each = torch.arange(self._parts)
        # all parts that are not local as one
        self._absent_as_one = torch.where(self._here, self._each, self._parts)
        self._nothing_once = torch.zeros(self._parts + 1, dtype=torch.bool)
        self._edge_books: dict[EdgeType, Tensor | None] = {}
        self._narrow = {
            t: max(n.part_nodes, default=0) < 2**31 for t, n in directory.meta.nodes.items()
        }

    def is_here(self, of_edges: bool, kind: Any, index: Tensor) -> Tensor:
        """True for each row in a local part, ``bool`` ``[n]``."""
        found = torch.zeros(index.numel(), dtype=torch.bool)
        for _, position, _ in self.split(of_edges, kind, index, ask=False).local:
            found[slice(None) if position is None else position] = True
        return found

    def split(self, of_edges: bool, kind: Any, index: Tensor, *, ask: bool = True) -> RowsByRank:
        """Split rows by the rank that has them.

        Args:
            of_edges: True for rows of edges.
            kind: Node type or edge type.
            index: Original ids that exist, ``int64`` ``[n]``.
            ask: Fill in ``remote`` for the rows that are not local.

        Raises:
            GraphDirectoryError: If the directory does not say which part has an edge.
        """
        rows = RowsByRank(of_edges, kind, index)
        if not index.numel():
            return rows
        part, local, offsets, narrow = self._book(of_edges, kind)
        group = self._each if ask else self._absent_as_one
        once = ~self._here if ask else self._nothing_once
        absent = []
        shares = split_rows(
            part, local, offsets, index, group, once, original=of_edges, narrow=narrow
        )
        for share in shares:
            if share.group < self._parts and bool(self._here[share.group]):
                whole = share.position.numel() == index.numel()
                rows.local.append((share.group, None if whole else share.position, share.ids))
                continue
            absent.append(share.position)
            if ask:
                rows.remote.append(RemoteRows(share.group, share.ids, share.position, share.take))
        if absent:
            rows.absent = absent[0] if len(absent) == 1 else torch.cat(absent)
        return rows

    def _book(self, of_edges: bool, kind: Any) -> tuple[Tensor | None, Tensor | None, Tensor, bool]:
        """Parts, places in them, their first ids, and True if requested ids fit into ``int32``."""
        if not of_edges:
            book = self._directory.books[kind]
            return book.part, book.local, book.offsets, self._narrow[kind]
        if kind not in self._edge_books:
            self._edge_books[kind] = edge_book(self._directory, kind)
        size = self._directory.meta.edges[kind].num_edges
        offsets = torch.zeros(self._parts + 1, dtype=torch.int64)
        offsets[-1] = size
        return self._edge_books[kind], None, offsets, size < 2**31
