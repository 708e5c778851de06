"""Latency, bandwidth and clocks between all pairs of ranks, measured over requests.

In each round every rank is paired with one other (the circle method of tournaments), so that no
rank is measured twice at once, and the time grows with the number of ranks, not of pairs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from pyg_scale.comm import Group
from pyg_scale.comm.meeting import store_failure
from pyg_scale.comm.service import Service
from pyg_scale.comm.tcp import TcpService
from pyg_scale.errors import CommError

_ECHOES = 20
_FIRST = 1 << 18  # bytes of the first message, whose time decides the size of the next
_LARGEST = 1 << 26
_CONNECT_SECONDS = 5.0


@dataclass
class Pair:
    """The measurements by one rank of another.

    Attributes:
        rank: The other rank.
        latency: Seconds of the shortest round trip of an empty request, or ``None``.
        sent: Bytes per second to the other.
        received: Bytes per second from the other.
        clock: Seconds by which the other's clock is ahead, accurate to half the latency.
        error: The reason why the other cannot be reached.
    """

    rank: int
    latency: float | None = None
    sent: float | None = None
    received: float | None = None
    clock: float | None = None
    error: str | None = None


def rounds(world_size: int) -> list[list[tuple[int, int]]]:
    """Pairs of ranks, each pair once, no rank twice in a round."""
    ring: list[int | None] = list(range(world_size))
    if world_size % 2:
        ring.append(None)
    found = []
    for _ in range(len(ring) - 1):
        pairs = []
        for a, b in zip(ring[: len(ring) // 2], reversed(ring[len(ring) // 2 :]), strict=True):
            if a is not None and b is not None:
                pairs.append((min(a, b), max(a, b)))
        found.append(pairs)
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return found


def measure_pairs(store: Any, rank: int, world_size: int, seconds: float) -> list[dict[str, Any]]:
    """Measure all pairs of ranks; every rank calls it.

    Args:
        store: A store for this measurement alone.
        rank: Rank of this process.
        world_size: Number of ranks.
        seconds: Approximate time for the whole measurement.

    Returns:
        The :class:`Pair` of each other rank, as plain values. The lower rank of a pair measures
        everything, the higher one only latency, to check that it can connect.
    """
    group = Group(PrefixStore("service", store), rank, world_size, _CONNECT_SECONDS)
    service = TcpService(group, {"echo": _echo, "give": _give, "clock": _clock}, 1)
    plan = rounds(world_size)
    start = time.monotonic()
    each = min(2.0, seconds / max(1, len(plan)))
    slot = each + _CONNECT_SECONDS  # of a round in which a rank cannot be reached
    found = []
    try:
        for number, pairs in enumerate(plan):
            mine = next((pair for pair in pairs if rank in pair), None)
            if mine is None:
                continue
            other = mine[1] if rank == mine[0] else mine[0]
            turn = _Turn(store, f"{number}/{mine[0]}-{mine[1]}", rank == mine[0])
            deadline = start + (number + 1) * slot
            found.append(asdict(_measure(service, other, turn, each, deadline)))
    finally:
        service.close(wait=_CONNECT_SECONDS)
    return found


class _Turn:
    """Lets two ranks act one after the other."""

    def __init__(self, store: Any, name: str, first: bool) -> None:
        self.store, self.name, self.first = store, name, first

    def begin(self, deadline: float) -> None:
        """Wait until the other rank is ready, and it is this one's turn."""
        self.store.set(f"{self.name}/here/{self.first}", "")
        self._wait(f"here/{not self.first}", deadline)
        if not self.first:
            self._wait("first", deadline)

    def end(self, deadline: float) -> None:
        """Let the other rank continue."""
        self.store.set(f"{self.name}/{'first' if self.first else 'second'}", "")
        if self.first:
            self._wait("second", deadline)

    def _wait(self, key: str, deadline: float) -> None:
        left = max(0.1, deadline - time.monotonic())
        try:
            self.store.wait([f"{self.name}/{key}"], timedelta(seconds=left))
        except RuntimeError as error:
            raise store_failure(error, "it did not take part in time") from None


def _measure(service: Service, other: int, turn: _Turn, seconds: float, deadline: float) -> Pair:
    pair = Pair(other)
    try:
        turn.begin(deadline)
        try:
            pair.latency = _latency(service, other)
            if turn.first:
                pair.clock = _ahead(service, other)
                pair.sent = _bandwidth(service, other, seconds / 3, towards=True)
                pair.received = _bandwidth(service, other, seconds / 3, towards=False)
        finally:
            turn.end(deadline)
    except CommError as error:
        pair.error = str(error)
    return pair


def _latency(service: Service, other: int) -> float:
    times = []
    for _ in range(_ECHOES):
        start = time.perf_counter()
        service.request(other, "echo", []).wait()
        times.append(time.perf_counter() - start)
    return min(times)


def _ahead(service: Service, other: int) -> float:
    best, ahead = float("inf"), 0.0
    for _ in range(_ECHOES // 2):
        before, start = time.time(), time.perf_counter()
        (theirs,) = service.request(other, "clock", []).wait()
        took = time.perf_counter() - start
        if took < best:
            best, ahead = took, float(theirs) - (before + took / 2)
    return ahead


def _bandwidth(service: Service, other: int, seconds: float, *, towards: bool) -> float:
    size, rate = _FIRST, 0.0
    for _ in range(3):
        payload = torch.zeros(size if towards else 0, dtype=torch.uint8)
        asked = [torch.tensor([0 if towards else size]), payload]
        start = time.perf_counter()
        service.request(other, "give", asked).wait()
        took = time.perf_counter() - start
        rate = size / took
        size = int(min(_LARGEST, max(_FIRST, rate * seconds / 2)))
    return rate


def _echo(tensors: list[Tensor]) -> Sequence[Tensor]:
    return []


def _give(tensors: list[Tensor]) -> Sequence[Tensor]:
    size = int(tensors[0])
    if not 0 <= size <= _LARGEST:
        raise ValueError(f"cannot send {size} bytes")
    return [torch.zeros(size, dtype=torch.uint8)]


def _clock(tensors: list[Tensor]) -> Sequence[Tensor]:
    return [torch.tensor(time.time(), dtype=torch.float64)]
