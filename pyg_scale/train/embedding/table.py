"""The rows of a table, sharded among ranks by the partition book, and answers to those who ask."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pyg_scale.distributed.features.plan import Book, RowsByRank
from pyg_scale.distributed.features.serve import MAX_BYTES, entries_of
from pyg_scale.errors import CheckpointError
from pyg_scale.graph.topology import EdgeType, NodeType
from pyg_scale.ops import keys
from pyg_scale.ops.sockets import GatheredRows
from pyg_scale.ops.split_rows import split_rows
from pyg_scale.store.directory.book import PartitionBook
from pyg_scale.store.directory_features import FeatureColumn, described
from pyg_scale.store.rows import raw_rows
from pyg_scale.train.tree import Rows, RowShard

NAME = "embedding"
"""The name of the rows in requests and errors."""

_CHUNK = 1 << 13  # rows that are made at a time


class RowLayout:
    """The rank and the place of every row. Each row has one owner.

    Args:
        book: The part of every row.
        owner: The rank that has each part, the same on all ranks.
        rank: This rank.
        world_size: Number of ranks.

    Attributes:
        own_parts: The parts of this rank, ascending.
        num_own: Number of rows of this rank.
        begin: Number of rows of lower ranks.
        in_order: True if the rows of all ranks, one after the other, are in the order of their ids.
    """

    def __init__(
        self, book: PartitionBook, owner: Sequence[int], rank: int, world_size: int
    ) -> None:
        self.book = book
        self.own_parts = tuple(part for part, each in enumerate(owner) if each == rank)
        self._world_size, self._owner = world_size, torch.tensor(owner, dtype=torch.int64)
        sizes = book.offsets.diff()
        self._first = torch.full((book.num_parts,), -1, dtype=torch.int64)
        self.num_own = 0
        for part in self.own_parts:
            self._first[part] = self.num_own
            self.num_own += int(sizes[part])
        self.begin = int(sizes[self._owner < rank].sum())
        self.in_order = book.part is None and list(owner) == sorted(owner)
        self._here = self._owner == rank
        self._rows = Book(book.part, book.local, book.offsets, book.num_nodes < 2**31)

    @property
    def num_rows(self) -> int:
        """Number of rows of all ranks."""
        return self.book.num_nodes

    def span(self, part: int) -> slice:
        """The places of the rows of an own part."""
        begin = int(self._first[part])
        return slice(begin, begin + int(self.book.offsets[part + 1] - self.book.offsets[part]))

    def own_ids(self) -> Tensor:
        """The original ids ``int64`` ``[num_own]`` of the rows of this rank, by their place."""
        none = torch.empty(0, dtype=torch.int64)
        return torch.cat([none, *[self.book.nodes_of(part) for part in self.own_parts]])

    def by_part(self, kind: NodeType, ids: Tensor) -> RowsByRank:
        """Rows by the part that has them, remote ones without repetitions.

        Args:
            kind: The node type.
            ids: Original ids that exist, ``int64`` ``[n]``.
        """
        rows = RowsByRank(False, kind, ids)
        if ids.numel():
            rows.fill(self._rows, self._here)
        return rows

    def by_owner(self, ids: Tensor) -> list[Tensor]:
        """The positions ``int64`` of the ids that each rank owns, ascending."""
        found = [torch.empty(0, dtype=torch.int64)] * self._world_size
        if ids.numel():
            often = torch.zeros(self._world_size, dtype=torch.bool)
            book = self._rows
            for share in split_rows(
                book.part, book.local, book.offsets, ids, self._owner, often, original=True
            ):
                found[share.group] = share.position
        return found

    def places(self, ids: Tensor) -> Tensor:
        """The places ``int64`` ``[n]`` of own rows.

        Raises:
            IndexError: If one is not a row of this rank.
        """
        if not ids.numel():
            return ids
        wrong = (ids < 0) | (ids >= self.num_rows)
        if not bool(wrong.any()):
            first = self._first[self.book.part_of(ids)]
            wrong = first < 0
            if not bool(wrong.any()):
                return first + self.book.local_of(ids)
        raise IndexError(f"row {int(ids[wrong][0])} is not one of this rank")


def ranges(num_rows: int, world_size: int) -> PartitionBook:
    """The book of a table without parts: ranges of equal size, one for each rank."""
    bounds = [num_rows * rank // world_size for rank in range(world_size + 1)]
    return PartitionBook(world_size, num_rows, torch.tensor(bounds, dtype=torch.int64))


class Table:
    """The rows of the nodes of one type, of which this rank has some.

    Args:
        kind: The node type, ``None`` in a homogeneous graph.
        layout: The places of rows.
        channels: Length of a row.
        dtype: Their dtype.
        init: Makes the first values of rows from their original ids.

    Attributes:
        column: Describes the rows to those who request them.
        weight: The rows of this rank, ``[num_own, channels]``.
    """

    def __init__(
        self,
        kind: NodeType,
        layout: RowLayout,
        channels: int,
        dtype: torch.dtype,
        init: Callable[[Tensor], Tensor],
    ) -> None:
        self.kind, self.layout = kind, layout
        self.column = FeatureColumn(layout.num_rows, (channels,), dtype, False, kind, NAME)
        values = torch.empty(layout.num_own, channels, dtype=dtype)
        ids = layout.own_ids()
        for begin in range(0, layout.num_own, _CHUNK):
            some = ids[begin : begin + _CHUNK]
            made = self.column.checked(init(some), some.numel(), str(self.column), "init")
            values[begin : begin + _CHUNK] = made
        self.weight = nn.Parameter(values)

    def raw(self, part: int) -> Tensor:
        """The rows of an own part, ``uint8`` ``[n, row_bytes]``."""
        return raw_rows(self.weight.detach()[self.layout.span(part)])

    def shard(self, values: Tensor) -> RowShard:
        """Values with a row for each own row, as a part of those of all ranks."""
        layout = self.layout
        return RowShard(values, layout.own_ids(), layout.begin, layout.num_rows, layout.in_order)

    def rows_of(self, saved: Rows, what: str) -> Tensor:
        """The own rows of a table that was saved, by as many ranks or others.

        Args:
            saved: Its rows.
            what: Its name in errors.

        Raises:
            CheckpointError: If it has another number of rows, or lacks one.
        """
        if saved.num_rows != self.layout.num_rows:
            raise CheckpointError(
                f"{what}: {saved.num_rows} rows were saved, and this table has "
                f"{self.layout.num_rows}: it belongs to another graph"
            )
        return saved.take(self.layout.own_ids())


class ShardRows:
    """The rows of this rank, for reads of its own.

    Args:
        tables: By node type.
    """

    def __init__(self, tables: Mapping[NodeType, Table]) -> None:
        self._tables = tables

    def raw(self, column: FeatureColumn, part: int) -> Tensor:
        """All rows of an own part, ``uint8`` ``[n, row_bytes]``."""
        return self._tables[column.type].raw(part)

    def place_of_edges(self, edge_type: EdgeType, part: int, ids: Tensor) -> Tensor:
        """Refused.

        Raises:
            TypeError: Always.
        """
        raise TypeError("a table has rows of nodes only")


class ShardAnswers:
    """Answers requests for rows of this rank; a handler of the request for features.

    Messages are not trusted: anything that is not a valid request raises, and the sender is told.

    Args:
        tables: By node type.
    """

    def __init__(self, tables: Mapping[NodeType, Table]) -> None:
        self._tables = tables

    def __call__(self, tensors: list[Tensor]) -> list[Tensor]:
        """The requested rows, ``uint8`` ``[n, row_bytes]`` each.

        Raises:
            ValueError: If it is not a request, or asks for too many bytes.
            KeyError: If there is no such table.
            IndexError: If a part is not this rank's, or a row is not in it.
        """
        return [rows.tensor() for rows in self.rows(tensors)]

    def rows(self, tensors: list[Tensor]) -> list[GatheredRows]:
        """The same rows, to be chosen while they are sent."""
        found = []
        for of_edges, kind, part, names, ids in entries_of(tensors):
            table = None if of_edges else self._tables.get(kind)  # type: ignore[arg-type]
            if table is None or names != (NAME,):
                raise KeyError(f"there is no table of {described(of_edges, kind)}: {names}")
            if part not in table.layout.own_parts:
                raise IndexError(f"part {part} is not served, only {table.layout.own_parts}")
            if ids.dim() != 1 or ids.dtype not in (torch.int64, torch.int32):
                raise ValueError("rows must be one-dimensional int64 or int32 tensors")
            raw = table.raw(part)
            if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < raw.size(0):
                raise IndexError(f"a row of part {part} does not exist, there are {raw.size(0)}")
            found.append(GatheredRows(raw, ids))
        size = sum(each.index.numel() * each.data.size(1) for each in found)
        if size > MAX_BYTES:
            raise ValueError(f"the requested rows have {size} bytes, more than {MAX_BYTES}")
        return found


def uniform(
    kind: NodeType, channels: int, dtype: torch.dtype, seed: int
) -> Callable[[Tensor], Tensor]:
    """First values that are uniform in ``±1 / sqrt(channels)``, a function of seed and id alone."""
    of_type = 0 if kind is None else keys.edge_type_hash((kind, "", ""))
    key = keys.fold(0, seed, keys.EMBEDDING, of_type)
    columns = torch.arange(channels)

    def init(ids: Tensor) -> Tensor:
        word = keys.draw(keys.fold_tensor(key, ids)[:, None], columns[None])
        unit = ((word >> 40) & ((1 << 24) - 1)).to(torch.float64).add_(0.5).div_(1 << 23).sub_(1)
        return unit.mul_(channels**-0.5).to(dtype)

    return init


def checked_ids(ids: Any, table: Table) -> Tensor:
    """Original ids as ``int64`` on the CPU.

    Raises:
        TypeError: If they are not integers.
        ValueError: If they have another number of dimensions.
        IndexError: If one does not exist.
    """
    what, count = f"ids of {table.column}", table.layout.num_rows
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32):
        kind = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise TypeError(f"{what} must be an int64 or int32 tensor, such as batch.n_id (got {kind})")
    if ids.dim() != 1:
        raise ValueError(f"{what} must have one dimension (got shape {list(ids.shape)})")
    found = ids.to("cpu", torch.int64).contiguous()
    if found.numel():
        low, high = (int(each) for each in torch.aminmax(found))
        if low < 0 or high >= count:
            raise IndexError(
                f"{what}: {low if low < 0 else high} does not exist, there are {count} rows: pass "
                "original ids, batch.n_id"
            )
    return found
