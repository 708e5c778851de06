"""Whom to ask for a part when a rank has failed: the next one that holds it.

Several ranks hold a part where they see one directory, or have copies. Draws are keyed and copies
are equal, so that batches are the same whoever answers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pyg_scale.errors import AccessError, CommError, CommTimeoutError

_MOST_SHARES = 3
"""Where many ranks hold a part, the next one gets a third of the time that is left."""
_LONGEST_PAUSE = 3600.0
_ONCE_MORE = 1 / 20
"""Of the time limit: what a rank gets that has failed lately."""
_AT_LEAST = 1.0  # seconds that it gets


class PartOwners(Protocol):
    """Who holds which part; :class:`~pyg_scale.distributed.owners.Owners` of an opened graph."""

    @property
    def direct(self) -> Collection[int]:
        """The parts that this process reads itself."""

    @property
    def num_parts(self) -> int:
        """Number of parts."""

    def holders(self, part: int) -> Sequence[int]:
        """The ranks that can answer for a part, in the order in which this one asks them."""


class Health:
    """Which ranks have failed lately. They are asked last, where others hold the same.

    Args:
        timeout: Seconds that a rank which failed is left alone; each time twice as long.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._lock = threading.Lock()
        self._failures: dict[int, int] = {}
        self._until: dict[int, float] = {}

    def failed(self, rank: int) -> None:
        """A rank did not answer, or with something else."""
        with self._lock:
            count = self._failures.get(rank, 0)
            self._failures[rank] = count + 1
            pause = min(_LONGEST_PAUSE, self._timeout * 2 ** min(count, 20))
            self._until[rank] = time.monotonic() + pause

    def answered(self, rank: int) -> None:
        """A rank answered as it should."""
        if rank in self._failures:
            with self._lock:
                self._failures.pop(rank, None)
                self._until.pop(rank, None)

    def ill(self) -> frozenset[int]:
        """The ranks to leave alone now."""
        if not self._until:
            return frozenset()
        now = time.monotonic()
        with self._lock:
            return frozenset(rank for rank, until in self._until.items() if until > now)


class Route(NamedTuple):
    """Whom to ask for each part.

    Attributes:
        rank_of: ``int64`` ``[num_parts]``; -1 for a part whose holders have all failed.
        chances: For each rank that is asked, how many ranks hold what it is asked for and have not
            failed, itself included; of several parts the least.
    """

    rank_of: Tensor
    chances: dict[int, int]


class Search:
    """The way of one request from rank to rank. Used by one thread at a time.

    Args:
        rank: This one, which asks itself for what it reads.
        owners: Who holds the parts.
        health: Who is asked last.
        timeout: Seconds that all of it may take; each rank has a share of them.
    """

    def __init__(self, rank: int, owners: PartOwners, health: Health, timeout: float) -> None:
        self._rank, self._owners, self._health = rank, owners, health
        self._timeout = timeout
        self._deadline = 0.0
        self._reasons: dict[int, CommError] = {}

    @property
    def went_well(self) -> bool:
        """Whether no rank has failed so far."""
        return not self._reasons

    def candidates(self, part: int, ill: Collection[int]) -> list[int]:
        """Who can still be asked, in this order."""
        left = [rank for rank in self._owners.holders(part) if rank not in self._reasons]
        return sorted(left, key=lambda rank: rank in ill and rank != self._rank)

    def rank_of(self, part: int) -> int:
        """Whom to ask for a part now.

        Raises:
            CommError: If all ranks that hold it have failed; says of each one why.
        """
        left = self.candidates(part, self._health.ill())
        if not left:
            raise self.given_up(part)
        return left[0]

    def chances(self, parts: Iterable[int]) -> int:
        """How many ranks can be asked for each of some parts, at least."""
        return min(len(self.candidates(part, ())) for part in parts)

    def route(self) -> Route:
        """Whom to ask for all parts, those that this rank reads among them."""
        ill, found, chances = self._health.ill(), [], dict[int, int]()
        for part in range(self._owners.num_parts):
            left = [self._rank] if part in self._owners.direct else self.candidates(part, ill)
            found.append(left[0] if left else -1)
            if left:
                chances[left[0]] = min(len(left), chances.get(left[0], len(left)))
        return Route(torch.tensor(found, dtype=torch.int64), chances)

    def begin(self) -> None:
        """From now on ranks are waited for."""
        self._deadline = time.monotonic() + self._timeout

    def patience(self, rank: int, chances: int) -> float:
        """Seconds from now on that a rank has which was asked.

        A rank that has failed lately gets a moment to show that it is back. Else everything that
        is under way would wait for it in turn, each time as long as the time limit says.

        Args:
            rank: Which.
            chances: How many ranks can be asked for the same, this one included.
        """
        left = max(0.0, self._deadline - time.monotonic())
        share = left / max(1, min(chances, _MOST_SHARES))
        if rank in self._health.ill():
            return min(share, max(_AT_LEAST, self._timeout * _ONCE_MORE))
        return share

    def has_failed(self, rank: int) -> bool:
        """Whether a rank has failed in this search."""
        return rank in self._reasons

    def failed(self, rank: int, error: CommError) -> None:
        """A rank could not be asked, did not answer, or answered something else.

        Raises:
            AccessError: If it has another secret: that is no failure which others make good.
        """
        if isinstance(error, AccessError):
            raise error
        self._reasons.setdefault(rank, error)
        self._health.failed(rank)

    def answered(self, rank: int) -> None:
        """A rank answered as it should."""
        self._health.answered(rank)

    def given_up(self, part: int) -> CommError:
        """Nobody is left who holds a part: the error of the only one, or one that names all."""
        holders = self._owners.holders(part)
        reasons = {rank: self._reasons[rank] for rank in holders}
        if len(reasons) == 1:
            return reasons[holders[0]]
        late = all(isinstance(error, CommTimeoutError) for error in reasons.values())
        why = "; ".join(f"rank {rank}: {error}" for rank, error in reasons.items())
        return (CommTimeoutError if late else CommError)(
            f"none of the {len(reasons)} ranks that hold part {part} answered. {why}"
        )
