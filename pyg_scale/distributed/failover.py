"""Failover: when a rank has failed, its requests go to the next rank that holds the part.

Several ranks hold a part if they see one directory, or have copies. Draws are keyed and copies are
equal, so batches are the same whichever rank answers.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pyg_scale.errors import AccessError, CommError, CommTimeoutError

_MOST_SHARES = 3
"""If many ranks hold a part, the next one gets a third of the remaining time."""
_LONGEST_PAUSE = 3600.0
_ONCE_MORE = 1 / 20
"""Share of the time limit that a recently failed rank gets."""
_AT_LEAST = 1.0  # seconds that it gets, at least


class PartOwners(Protocol):
    """The holders of parts; :class:`~pyg_scale.distributed.owners.Owners` of an opened graph."""

    @property
    def direct(self) -> Collection[int]:
        """The parts that this process reads itself."""

    @property
    def num_parts(self) -> int:
        """Number of parts."""

    def holders(self, part: int) -> Sequence[int]:
        """The ranks that can answer for a part, in the order in which this one asks them."""


class Health:
    """The ranks that failed recently. They are asked last if others hold the same part.

    Args:
        timeout: Seconds for which a failed rank is avoided; doubled with each failure.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._lock = threading.Lock()
        self._failures: dict[int, int] = {}
        self._since: dict[int, float] = {}
        self._until: dict[int, float] = {}

    def failed(self, rank: int) -> None:
        """Record that a rank did not answer, or sent a wrong answer."""
        with self._lock:
            count = self._failures.get(rank, 0)
            self._failures[rank] = count + 1
            pause = min(_LONGEST_PAUSE, self._timeout * 2 ** min(count, 20))
            self._since[rank] = time.monotonic()
            self._until[rank] = self._since[rank] + pause

    def answered(self, rank: int, asked: float) -> None:
        """Record that a rank answered.

        Args:
            rank: The rank.
            asked: The ``time.monotonic()`` of the request. One from before the rank's last failure
                does not count: its answer may have arrived before the failure, and been read late.
        """
        if rank in self._failures:
            with self._lock:
                if asked > self._since.get(rank, math.inf):
                    for kept in (self._failures, self._since, self._until):
                        kept.pop(rank, None)

    def ill(self) -> frozenset[int]:
        """The ranks to avoid now."""
        if not self._until:
            return frozenset()
        now = time.monotonic()
        with self._lock:
            return frozenset(rank for rank, until in self._until.items() if until > now)


class Route(NamedTuple):
    """The rank to ask for each part.

    Attributes:
        rank_of: ``int64`` ``[num_parts]``; -1 for a part whose holders have all failed.
        chances: For each rank that is asked, the number of ranks, itself included, that hold the
            same parts and have not failed; for several parts, the minimum.
    """

    rank_of: Tensor
    chances: dict[int, int]


class Search:
    """The path of one request from rank to rank. Used by one thread at a time.

    Args:
        rank: This rank, which asks itself for parts that it reads.
        owners: The holders of the parts.
        health: The ranks that are asked last.
        timeout: Seconds that the whole search may take; each rank gets a share of them.
    """

    def __init__(self, rank: int, owners: PartOwners, health: Health, timeout: float) -> None:
        self._rank, self._owners, self._health = rank, owners, health
        self._timeout = timeout
        self._began = time.monotonic()  # no request of it is older
        self._deadline = 0.0
        self._reasons: dict[int, CommError] = {}

    @property
    def went_well(self) -> bool:
        """True if no rank has failed so far."""
        return not self._reasons

    def candidates(self, part: int, ill: Collection[int]) -> list[int]:
        """The ranks that can still be asked, in this order."""
        left = [rank for rank in self._owners.holders(part) if rank not in self._reasons]
        return sorted(left, key=lambda rank: rank in ill and rank != self._rank)

    def rank_of(self, part: int) -> int:
        """The rank to ask for a part now.

        Raises:
            CommError: If all ranks that hold it have failed; gives the reason of each.
        """
        left = self.candidates(part, self._health.ill())
        if not left:
            raise self.given_up(part)
        return left[0]

    def chances(self, parts: Iterable[int]) -> int:
        """Smallest number of ranks that can be asked for one of some parts."""
        return min(len(self.candidates(part, ())) for part in parts)

    def route(self) -> Route:
        """The route for all parts, including those that this rank reads."""
        ill, found, chances = self._health.ill(), [], dict[int, int]()
        for part in range(self._owners.num_parts):
            left = [self._rank] if part in self._owners.direct else self.candidates(part, ill)
            found.append(left[0] if left else -1)
            if left:
                chances[left[0]] = min(len(left), chances.get(left[0], len(left)))
        return Route(torch.tensor(found, dtype=torch.int64), chances)

    def begin(self) -> None:
        """Start the time limit, as the wait for ranks begins."""
        self._deadline = time.monotonic() + self._timeout

    def patience(self, rank: int, chances: int) -> float:
        """Seconds from now on that an asked rank has.

        A rank that failed recently gets only a moment to show that it is back. Otherwise all
        requests under way would wait for it in turn, each for the whole time limit.

        Args:
            rank: The rank.
            chances: Number of ranks that can be asked for the same part, this one included.
        """
        left = max(0.0, self._deadline - time.monotonic())
        share = left / max(1, min(chances, _MOST_SHARES))
        if rank in self._health.ill():
            return min(share, max(_AT_LEAST, self._timeout * _ONCE_MORE))
        return share

    def has_failed(self, rank: int) -> bool:
        """Return True if a rank has failed in this search."""
        return rank in self._reasons

    def failed(self, rank: int, error: CommError) -> None:
        """Record that a rank could not be asked, did not answer, or sent a wrong answer.

        Raises:
            AccessError: If it has another secret, a failure for which other ranks cannot stand in.
        """
        if isinstance(error, AccessError):
            raise error
        self._reasons.setdefault(rank, error)
        self._health.failed(rank)

    def answered(self, rank: int) -> None:
        """Record that a rank answered."""
        self._health.answered(rank, self._began)

    def given_up(self, part: int) -> CommError:
        """The error when all holders of a part failed; it names all of them."""
        holders = self._owners.holders(part)
        reasons = {rank: self._reasons[rank] for rank in holders}
        if len(reasons) == 1:
            return reasons[holders[0]]
        late = all(isinstance(error, CommTimeoutError) for error in reasons.values())
        why = "; ".join(f"rank {rank}: {error}" for rank, error in reasons.items())
        return (CommTimeoutError if late else CommError)(
            f"none of the {len(reasons)} ranks that hold part {part} answered. {why}"
        )
