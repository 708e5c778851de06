"""Plans of reads: rows by the rank that has them, and remote ones without repetitions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import TensorAttr

from pyg_scale.errors import GraphDirectoryError
from pyg_scale.graph.topology import EdgeType, NodeType
from pyg_scale.ops.gather import gather
from pyg_scale.ops.split_rows import split_rows
from pyg_scale.store.directory import GraphDirectory
from pyg_scale.store.directory_features import FeatureColumn, described
from pyg_scale.store.rows import Key

if TYPE_CHECKING:
    from pyg_scale.distributed.features.requests import RemoteRead

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


class Book(NamedTuple):
    """The part of every row of a type.

    Attributes:
        part: See :func:`~pyg_scale.ops.split_rows.split_rows`, also for the next two.
        local: Places in parts.
        offsets: The first row of each part.
        narrow: True if requested ids fit into ``int32``.
    """

    part: Tensor | None
    local: Tensor | None
    offsets: Tensor
    narrow: bool


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

    def fill(self, book: Book, here: Tensor, *, ask: bool = True) -> None:
        """Divide the rows, of which there must be some, among parts.

        Args:
            book: The part of every row.
            here: True for each local part, ``bool`` ``[num_parts]``.
            ask: Fill in ``remote`` for the rows that are not local.

        Raises:
            IndexError: If one does not exist.
        """
        parts, each = here.numel(), torch.arange(here.numel())
        # without asking, all parts that are not local are one
        group = each if ask else torch.where(here, each, parts)
        once = ~here if ask else torch.zeros(parts + 1, dtype=torch.bool)
        absent = []
        for share in split_rows(
            book.part,
            book.local,
            book.offsets,
            self.index,
            group,
            once,
            original=self.of_edges,
            narrow=book.narrow,
        ):
            if share.group < parts and bool(here[share.group]):
                whole = share.position.numel() == self.index.numel()
                self.local.append((share.group, None if whole else share.position, share.ids))
                continue
            absent.append(share.position)
            if ask:
                self.remote.append(RemoteRows(share.group, share.ids, share.position, share.take))
        if absent:
            self.absent = absent[0] if len(absent) == 1 else torch.cat(absent)

    def here(self) -> Iterator[tuple[Tensor, Tensor]]:
        """``(positions, original ids)`` of the rows in local parts, if any."""
        count = self.index.numel()
        if self.absent.numel() == count:
            return
        if not self.absent.numel():
            yield torch.from_numpy(np.arange(count)), self.index
            return
        mine = np.ones(count, dtype=bool)
        mine[self.absent.numpy()] = False
        position = torch.from_numpy(np.flatnonzero(mine))
        yield position, gather(self.index, position)


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
        if index.numel():
            rows.fill(self._book(of_edges, kind), self._here, ask=ask)
        return rows

    def _book(self, of_edges: bool, kind: Any) -> Book:
        if not of_edges:
            book = self._directory.books[kind]
            return Book(book.part, book.local, book.offsets, self._narrow[kind])
        if kind not in self._edge_books:
            self._edge_books[kind] = edge_book(self._directory, kind)
        size = self._directory.meta.edges[kind].num_edges
        offsets = torch.zeros(self._parts + 1, dtype=torch.int64)
        offsets[-1] = size
        return Book(self._edge_books[kind], None, offsets, size < 2**31)


@dataclass
class ReadPlan:
    """The plan of a read.

    Attributes:
        attrs: The tensors to read, each with a tensor ``int64`` ``[n]`` as its index.
        wanted: Rows of each type and index, with the attributes to read.
        place: For each of ``attrs``, the index in ``wanted`` and the attribute.
        through_cache: For each of ``wanted``, original ids of the rows that are not local, if they
            are read through a cache.
        asked: The requests under way.
    """

    attrs: list[TensorAttr] = field(default_factory=list)
    wanted: list[tuple[RowsByRank, list[FeatureColumn]]] = field(default_factory=list)
    place: list[tuple[int, FeatureColumn]] = field(default_factory=list)
    through_cache: list[Tensor | None] = field(default_factory=list)
    asked: RemoteRead | None = None

    def coming(self, number: int, column: FeatureColumn | None = None) -> dict[Key, Tensor]:
        """Take the tensors to which requested rows are written as they arrive.

        Args:
            number: Index in :attr:`wanted`.
            column: Take the tensor of this attribute only.
        """
        columns = self.wanted[number][1] if column is None else [column]
        made = {} if self.asked is None else self.asked.out
        keys = [each.key for each in columns if (number, each.key) in made]
        return {key: made.pop((number, key)) for key in keys}

    def cache_attrs(self) -> list[TensorAttr]:
        """The tensors to read through a cache, by original id."""
        return [
            TensorAttr(*column.key, index=ids)
            for ids, (_, columns) in zip(self.through_cache, self.wanted)
            for column in columns
            if ids is not None and ids.numel()
        ]

    def local_attrs(self) -> list[TensorAttr]:
        """The tensors to read from local parts, by original id."""
        return [
            TensorAttr(*column.key, index=index)
            for rows, columns in self.wanted
            for _, index in rows.here()
            for column in columns
        ]


def edge_book(directory: GraphDirectory, edge_type: EdgeType) -> Tensor | None:
    """The part of every edge; ``None`` if there is only one part.

    Raises:
        GraphDirectoryError: If the directory was written without this information.
    """
    book = directory.edge_book(edge_type)
    if book is None and directory.meta.num_parts > 1:
        raise GraphDirectoryError(
            f"{directory.path} does not say in which part each of {described(True, edge_type)} is, "
            "so their features cannot be requested from other ranks: an older release wrote it; "
            "partition the graph again"
        )
    return book
