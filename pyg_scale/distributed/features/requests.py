"""Rows requested from other ranks, and written to their places as they arrive.

If a rank fails, its rows are requested from the next rank that holds the part.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pyg_scale.comm import Service, Work
from pyg_scale.comm.landing import Landing
from pyg_scale.distributed.failover import Search
from pyg_scale.distributed.features.plan import RemoteRows, RowsByRank
from pyg_scale.distributed.features.serve import FEATURES, ServedRows, request_of
from pyg_scale.errors import CommError
from pyg_scale.ops import memory, row_cache
from pyg_scale.ops.sockets import RowPlaces
from pyg_scale.store.directory_features import FeatureColumn
from pyg_scale.store.reading import count_remote
from pyg_scale.store.rows import Key, raw_rows

MAX_TENSORS = 250
"""Tensors of a request or an answer; a message has a few more."""


class RemoteRead:
    """Rows requested from other ranks. Any number of threads may take them.

    Args:
        service: The service by which all ranks are asked at once.
        wanted: Rows, each with their requested attributes.
        search: Chooses the ranks to ask.

    Attributes:
        out: For each of ``wanted`` and each attribute with requested rows, the tensor of all its
            rows. Requested rows are written there; the caller that takes the tensor writes the
            others.
    """

    def __init__(
        self,
        service: Service,
        wanted: Sequence[tuple[RowsByRank, Sequence[FeatureColumn]]],
        search: Search,
    ) -> None:
        self._service, self._wanted, self._search = service, wanted, search
        self.out: dict[tuple[int, Key], Tensor] = {}
        self._places: dict[tuple[int, Key], Tensor] = {}  # the same memory
        self._lock = threading.Lock()
        self._found: dict[tuple[int, Key], list[tuple[Tensor, RemoteRows]]] = {}
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
                landings = [landing for part in message for landing in self._land(part)]
                try:
                    work: Any = self._service.request(rank, FEATURES, request_of(entries))
                except CommError as error:  # raised when the rows are needed
                    work = error
                else:
                    work.land(landings)
                self._coming.append((work, rank, message))

    def _land(self, part: _Part) -> list[Landing]:
        """The places of the rows of a part, for each of its attributes."""
        piece, part.landings = part.piece, []
        for column in part.columns:
            key = part.number, column.key
            if key not in self._places:
                count = self._wanted[part.number][0].index.numel()
                self.out[key] = memory.empty([count, *column.row], column.dtype)
                self._places[key] = raw_rows(self.out[key])
            places = RowPlaces(self._places[key], piece.ids.numel(), piece.position, piece.take)
            part.landings.append(Landing(places))
        return part.landings

    def write(self, number: int, column: FeatureColumn, out: Tensor) -> None:
        """Wait for the answers, and write the rows of an attribute; once for each.

        Args:
            number: Index in ``wanted``.
            column: The attribute.
            out: ``uint8`` ``[n, row_bytes]``, written to.

        Raises:
            CommTimeoutError: If a rank did not answer in time; names it and the requested
                attributes.
            CommError: If a rank is gone or sent a wrong answer; names it.
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
                now + search.patience(rank, search.chances({part.piece.part for part in parts}))
                for _, rank, parts in coming
            ]
            for (work, rank, parts), limit in zip(coming, limits, strict=True):
                try:
                    found = _answer(work, rank, parts, limit)
                except CommError as error:
                    if not isinstance(work, CommError):
                        work.withdraw()
                    search.failed(rank, error)
                    failed += parts
                    continue
                search.answered(rank)
                self._keep(found, parts)
            self._ask(failed)

    def _keep(self, found: Sequence[Tensor], parts: Sequence[_Part]) -> None:
        answers = iter(found)
        for part in parts:
            for column, landing in zip(part.columns, part.landings, strict=True):
                values = next(answers)
                count_remote(values.size(0), values.numel())
                if landing.landed:
                    continue
                known = self._found.setdefault((part.number, column.key), [])
                known.append((values, part.piece))


@dataclass
class _Part:
    """A piece, and its attributes that are requested in one message."""

    number: int
    piece: RemoteRows
    columns: tuple[FeatureColumn, ...]
    landings: list[Landing] = field(default_factory=list)

    def entry(self) -> ServedRows:
        first, names = self.columns[0], tuple(column.name for column in self.columns)
        return ServedRows(first.of_edges, first.type, self.piece.part, names, self.piece.ids)


def _messages(parts: Sequence[_Part]) -> list[list[_Part]]:
    """The messages to one rank: a single one unless it had too many tensors."""
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
        CommError: If no usable answer arrived in time.
    """
    try:
        if isinstance(work, CommError):
            raise work
        found = work.wait(max(0.0, limit - time.monotonic()))
    except CommError as error:
        names = ", ".join(str(column) for part in parts for column in part.columns)
        # of the same type, to tell a timeout from a rank that is gone
        raise type(error)(f"features of other ranks ({names}): {error}") from error
    _check(found, rank, parts)
    return found


def _check(found: Sequence[Tensor], rank: int, parts: Sequence[_Part]) -> None:
    """Refuse an answer that does not fit the request.

    Raises:
        CommError: If it does not fit; names the rank and the fault.
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
