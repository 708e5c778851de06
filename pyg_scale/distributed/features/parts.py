"""Rows of features in the parts that this rank reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from pyg_scale.graph.topology import EdgeType
from pyg_scale.ops.gather import gather
from pyg_scale.ops.gather_parts import gather_parts
from pyg_scale.store.directory import GraphDirectory
from pyg_scale.store.directory_features import FeatureColumn, described
from pyg_scale.store.rows import Key, raw_rows


class RowSource(Protocol):
    """A source of the rows of local parts."""

    def raw(self, column: FeatureColumn, part: int) -> Tensor:
        """All rows of a part, ``uint8`` ``[n, row_bytes]``."""

    def place_of_edges(self, edge_type: EdgeType, part: int, ids: Tensor) -> Tensor:
        """The places ``int64`` ``[n]`` of edges in their part, by original id."""


class PartRows:
    """Rows of the parts that this process can read, mapped.

    Rows are found by *place*: the local id of a node; of an edge, its rank by original id among
    the edges of its part.

    Args:
        directory: The directory.
    """

    def __init__(self, directory: GraphDirectory) -> None:
        self.directory = directory
        self._raw: dict[tuple[Key, int], Tensor] = {}
        self._edge_ids: dict[tuple[EdgeType, int], Tensor | None] = {}

    def raw(self, column: FeatureColumn, part: int) -> Tensor:
        """All rows of a part, ``uint8`` ``[n, row_bytes]``.

        Raises:
            GraphDirectoryError: If the part is not local, or a file is damaged.
        """
        known = self._raw.get((column.key, part))
        if known is None:
            opened, kind = self.directory.part(part), column.type
            if column.of_edges:
                known = raw_rows(opened.edge_attribute(kind, column.name))
            else:
                known = raw_rows(opened.node_attribute(kind, column.name))
            self._raw[column.key, part] = known
        return known

    def of_nodes(self, columns: Sequence[FeatureColumn], index: Tensor) -> list[Tensor]:
        """Rows of nodes by original id; all their parts must be local.

        Args:
            columns: Attributes of the nodes of one type.
            index: Original ids, ``int64`` or ``int32`` ``[n]``, which exist.
        """
        book = self.directory.books[columns[0].type]
        rows = [[self.raw(column, part) for part in range(book.num_parts)] for column in columns]
        found = gather_parts(rows, book.part, book.local, book.offsets, index)
        return [
            each.view(-1).view(column.dtype).view(index.numel(), *column.row)
            for each, column in zip(found, columns, strict=True)
        ]

    def place_of_edges(self, edge_type: EdgeType, part: int, ids: Tensor) -> Tensor:
        """The places of edges in their part.

        Args:
            edge_type: Their type.
            part: The part.
            ids: Original ids, ``int64`` or ``int32`` ``[n]``.

        Returns:
            ``int64`` ``[n]``.

        Raises:
            IndexError: If one is not an edge of the part.
        """
        if (edge_type, part) not in self._edge_ids:
            self._edge_ids[edge_type, part] = self.directory.part(part).edge_ids(edge_type)
        known = self._edge_ids[edge_type, part]
        if known is None:
            return ids.to(torch.int64)
        at = torch.searchsorted(known, ids.to(known.dtype))
        found = at < known.numel()
        if known.numel():
            found &= gather(known, at.clamp(max=known.numel() - 1)) == ids
        if not bool(found.all()):
            wrong = int(ids[~found][0])
            raise IndexError(f"edge {wrong} is not in {described(True, edge_type)} of part {part}")
        return at
