"""Which rank has which rows: requests are split by owner, each row once, and put together again.

What a rank that fails was asked for is asked of the next one that holds its part.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_scale.comm import Service, Work
from pyg_scale.distributed.failover import PartOwners, Search
from pyg_scale.distributed.features_parts import Column, Key, edge_book
from pyg_scale.distributed.features_served import FEATURES, Entry, request_of
from pyg_scale.errors import CommError
from pyg_scale.ops import row_cache
from pyg_scale.ops.gather import gather
from pyg_scale.store.base import EdgeType, NodeType
from pyg_scale.store.directory import GraphDirectory
from pyg_scale.store.reading import count_remote

MAX_TENSORS = 250
"""Of a request or an answer; a message has a few more."""


@dataclass
class Piece:
    """Different rows of one part that another rank has.

    Attributes:
        part: The part.
        ids: What is asked for: local ids of nodes, original ids of edges, ascending.
        position: Where rows go, ``int64`` ``[n]``.
        take: Which of ``ids`` goes to each of these; in order if ``None``.
    """

    part: int
    ids: Tensor
    position: Tensor
    take: Tensor | None


@dataclass
class Rows:
    """Rows of one type that were asked for, by who has them.

    Attributes:
        of_edges: Whether they are of edges.
        type: Node type or edge type.
        index: Their original ids, ``int64`` ``[n]``.
        local: ``(part, positions, ids)`` of those that are read here; ids are local ids of nodes
            and original ids of edges; positions are ``None`` for all of them, in order.
        absent: Positions of the others, ``int64``.
        remote: These, by part.
    """

    of_edges: bool
    type: NodeType | EdgeType
    index: Tensor
    local: list[tuple[int, Tensor | None, Tensor]] = field(default_factory=list)
    absent: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    remote: list[Piece] = field(default_factory=list)


class Splitter:
    """Splits rows by part.

    Args:
        directory: The directory.
        owners: Who has the parts.
    """

    def __init__(self, directory: GraphDirectory, owners: PartOwners) -> None:
        self._directory = directory
        self._parts = directory.meta.num_parts
        self._here = np.zeros(self._parts, dtype=bool)
        self._here[sorted(owners.direct)] = True
        self._all_here = bool(self._here.all())
        self._edge_books: dict[EdgeType, Tensor | None] = {}
        self._offsets = {t: book.offsets.numpy() for t, book in directory.books.items()}

    def is_here(self, of_edges: bool, kind: Any, index: Tensor) -> Tensor:
        """Whether each row is in a part that is read here, ``bool`` ``[n]``."""
        return torch.from_numpy(self._here[self._part_of(of_edges, kind, index)])

    def split(self, of_edges: bool, kind: Any, index: Tensor, *, ask: bool = True) -> Rows:
        """Split rows by who has them.

        Args:
            of_edges: Whether they are of edges.
            kind: Node type or edge type.
            index: Original ids that exist, ``int64`` ``[n]``.
            ask: Whether to say whom to ask for those that are not here.

        Raises:
            GraphDirectoryError: If the directory does not say where edges are.
        """
        rows = Rows(of_edges, kind, index)
        if not index.numel():
            return rows
        part = self._part_of(of_edges, kind, index)
        if self._all_here:
            absent, here = part[:0], None
        else:
            mine = self._here[part]
            absent = np.flatnonzero(~mine)
            here = np.flatnonzero(mine) if absent.size else None
        self._split_here(rows, part, here)
        rows.absent = torch.from_numpy(absent.astype(np.int64, copy=False))
        if ask and absent.size:
            self._split_absent(rows, part[absent])
        return rows

    def _part_of(self, of_edges: bool, kind: Any, index: Tensor) -> np.ndarray[Any, Any]:
        # NumPy and gather, as torch would start threads for this in every worker thread.
        if self._parts == 1:
            return np.zeros(index.numel(), dtype=np.uint8)
        if of_edges:
            if kind not in self._edge_books:
                self._edge_books[kind] = edge_book(self._directory, kind)
            known = self._edge_books[kind]
            assert known is not None, "there are several parts"
            return gather(known, index).numpy()
        book = self._directory.books[kind]
        if book.part is None:
            return np.searchsorted(self._offsets[kind][1:], index.numpy(), side="right")
        return gather(book.part, index).numpy()

    def _split_here(
        self, rows: Rows, part: np.ndarray[Any, Any], here: np.ndarray[Any, Any] | None
    ) -> None:
        """Fill ``rows.local``; ``here`` are positions, all if ``None``."""
        of_here = part if here is None else part[here]
        for number in np.flatnonzero(np.bincount(of_here, minlength=self._parts)).tolist():
            found = np.flatnonzero(of_here == number)
            whole = here is None and found.size == part.size
            position = None if whole else torch.from_numpy(found if here is None else here[found])
            index = rows.index if position is None else gather(rows.index, position)
            ids = index if rows.of_edges else self._local_of(rows.type, number, index)  # type: ignore[arg-type]
            rows.local.append((number, position, ids))

    def _local_of(self, kind: NodeType, part: int, index: Tensor) -> Tensor:
        """Local ids of nodes of a part."""
        book = self._directory.books[kind]
        if book.local is not None:
            return gather(book.local, index).to(torch.int64)
        return torch.from_numpy(index.numpy() - self._offsets[kind][part])

    def _split_absent(self, rows: Rows, part: np.ndarray[Any, Any]) -> None:
        """Fill ``rows.remote``: one sort finds the parts and what is asked for twice."""
        index = gather(rows.index, rows.absent)
        if rows.of_edges:
            size = self._directory.meta.edges[rows.type].num_edges  # type: ignore[index]
            starts = np.arange(self._parts + 1) * size
            key = index.numpy() + starts[part]
        else:
            starts = self._offsets[rows.type]  # type: ignore[index]
            book, size = self._directory.books[rows.type], 0  # type: ignore[index]
            key = index.numpy()
            if book.local is not None:
                key = gather(book.local, index).numpy() + starts[part]
        wide = np.int64 if int(np.diff(starts).max()) >= 2**31 else np.int32
        order = np.argsort(key)
        key = key[order]
        new = np.empty(key.size, dtype=bool)
        new[0] = True
        np.not_equal(key[1:], key[:-1], out=new[1:])
        different = key if new.all() else key[new]
        take = None if different is key else np.cumsum(new) - 1
        position = rows.absent.numpy()[order]
        of_key, of_different = (np.searchsorted(k, starts) for k in (key, different))
        for number in np.flatnonzero(np.diff(of_key)).tolist():
            here = slice(of_key[number], of_key[number + 1])
            first, last = of_different[number], of_different[number + 1]
            rows.remote.append(
                Piece(
                    number,
                    torch.from_numpy((different[first:last] - starts[number]).astype(wide)),
                    torch.from_numpy(position[here]),
                    None if take is None else torch.from_numpy(take[here] - first),
                )
            )


class Asked:
    """Rows that were asked of other ranks, and are coming. Any number of threads may take them.

    Args:
        service: How ranks are asked. All of them are at once.
        wanted: Rows, each with the attributes that are wanted of them.
        search: Finds out whom to ask.
    """

    def __init__(
        self,
        service: Service,
        wanted: Sequence[tuple[Rows, Sequence[Column]]],
        search: Search,
    ) -> None:
        self._service, self._search = service, search
        self._lock = threading.Lock()
        self._found: dict[tuple[int, Key], list[tuple[Tensor, Piece]]] = {}
        self._error: CommError | None = None
        self._coming: list[tuple[Work[list[Tensor]] | CommError, int, list[_Part]]] = []
        parts = []
        for number, (rows, columns) in enumerate(wanted):
            for piece in rows.remote:
                for begin in range(0, len(columns), MAX_TENSORS):
                    some = tuple(columns[begin : begin + MAX_TENSORS])
                    parts.append(_Part(number, piece, some))
        self._ask(parts)

    def _ask(self, parts: Sequence[_Part]) -> None:
        by_rank: dict[int, list[_Part]] = {}
        rank_of: dict[int, int] = {}
        for part in parts:
            number = part.piece.part
            if number not in rank_of:
                rank_of[number] = self._search.rank_of(number)
            by_rank.setdefault(rank_of[number], []).append(part)
        for rank, mine in by_rank.items():
            for message in _messages(mine):
                entries = [part.entry() for part in message]
                try:
                    work: Any = self._service.request(rank, FEATURES, request_of(entries))
                except CommError as error:  # raised when the rows are needed
                    work = error
                self._coming.append((work, rank, message))

    def write(self, number: int, column: Column, out: Tensor) -> None:
        """Wait for the answers, and write the rows of an attribute; once for each.

        Args:
            number: Which of ``wanted``.
            column: The attribute.
            out: ``uint8`` ``[n, row_bytes]``, written to.

        Raises:
            CommTimeoutError: If a rank did not answer in time; names it and what was asked for.
            CommError: If a rank is gone or answered something else; names it.
        """
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._coming:
                try:
                    self._receive()
                except CommError as error:
                    self._error = error
                    raise
        for values, piece in self._found.pop((number, column.key), ()):
            row_cache.scatter(values, piece.position, out, take=piece.take)

    def _receive(self) -> None:
        search = self._search
        search.begin()
        while self._coming:
            coming, self._coming = self._coming, []
            now, failed = time.monotonic(), []
            limits = [
                now + search.patience(search.chances({part.piece.part for part in parts}))
                for _, _, parts in coming
            ]
            for (work, rank, parts), limit in zip(coming, limits, strict=True):
                try:
                    found = _answer(work, rank, parts, limit)
                except CommError as error:
                    search.failed(rank, error)
                    failed += parts
                    continue
                search.answered(rank)
                self._keep(found, parts)
            self._ask(failed)

    def _keep(self, found: Sequence[Tensor], parts: Sequence[_Part]) -> None:
        answers = iter(found)
        for part in parts:
            for column in part.columns:
                values = next(answers)
                count_remote(values.size(0), values.numel())
                known = self._found.setdefault((part.number, column.key), [])
                known.append((values, part.piece))


@dataclass
class _Part:
    """A piece, and which attributes of it are asked for in one message."""

    number: int
    piece: Piece
    columns: tuple[Column, ...]

    def entry(self) -> Entry:
        first, names = self.columns[0], tuple(column.name for column in self.columns)
        return Entry(first.of_edges, first.type, self.piece.part, names, self.piece.ids)


def _messages(parts: Sequence[_Part]) -> list[list[_Part]]:
    """What is asked of one rank: in one message, unless that had too many tensors."""
    out: list[list[_Part]] = []
    count = MAX_TENSORS
    for part in parts:
        count += len(part.columns)
        if count > MAX_TENSORS:
            out.append([])
            count = len(part.columns)
        out[-1].append(part)
    return out


def _answer(
    work: Work[list[Tensor]] | CommError, rank: int, parts: Sequence[_Part], limit: float
) -> list[Tensor]:
    """Wait for an answer.

    Raises:
        CommError: If there is none, in time, that can be used.
    """
    try:
        if isinstance(work, CommError):
            raise work
        found = work.wait(max(0.0, limit - time.monotonic()))
    except CommError as error:
        names = ", ".join(str(column) for part in parts for column in part.columns)
        # of the same type, as a time limit is one error and a rank that is gone another
        raise type(error)(f"features of other ranks ({names}): {error}") from error
    _check(found, rank, parts)
    return found


def _check(found: Sequence[Tensor], rank: int, parts: Sequence[_Part]) -> None:
    """Refuse an answer that is none.

    Raises:
        CommError: Names the rank, and what was wrong.
    """
    expected = [(part, column) for part in parts for column in part.columns]
    if len(found) != len(expected):
        raise CommError(
            f"rank {rank} answered a request for features with {len(found)} tensors, expected "
            f"{len(expected)}"
        )
    for values, (part, column) in zip(found, expected):
        shape = [part.piece.ids.numel(), column.row_bytes]
        if values.dtype != torch.uint8 or list(values.shape) != shape:
            raise CommError(
                f"rank {rank} answered a request for {column} with {values.dtype} of shape "
                f"{list(values.shape)}, expected torch.uint8 of shape {shape}"
            )
