"""Finds the rank that is gone or late after a collective of ``torch.distributed`` failed (gloo).

Gloo gives an address at most, possibly that of a rank that itself only failed a moment earlier. So
ranks whose collective failed find out which connections ended, report them in the store in which
all met, and break their remaining connections, so that the others fail now and report, too.

The ranks without a report are to blame: after an ended connection, those of them at an end of one;
after a timeout, all of them.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from pyg_scale.comm.meeting import named
from pyg_scale.comm.time_limit import within
from pyg_scale.errors import CommError, CommTimeoutError

_GRACE = 3.0  # seconds in which ranks that are alive report
_PAUSE = 0.02
STORE_SECONDS = 10.0  # that the store may take for reports, and for those of others
_NOBODY = (1 << 29) + 1  # a tag that nobody sends with
_LONGEST = 2_000  # characters of an error that others are told


class RollCall:
    """Explains errors of a process group; communicates only if there is one.

    Every rank of the group creates it, at the same time.

    Args:
        group: A process group of ``torch.distributed``.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._ranks = dist.get_process_group_ranks(group)
        self._parts: list[dist.ProcessGroup] = []
        self._named: CommError | None = None
        self._store: Any = None
        if len(self._ranks) == 1 or "gloo" not in str(dist.get_backend_config(group)):
            return
        # Torchrun's store may hold keys of an earlier attempt.
        word = torch.tensor([secrets.randbits(62)])
        dist.broadcast(word, self._ranks[0], group=group)
        store = dist.distributed_c10d._get_default_store()
        self._store = PrefixStore(f"pyg_scale/roll/{int(word)}", store)

    def include(self, part: dist.ProcessGroup) -> None:
        """Explain errors of a smaller group of these ranks, too: waits in it end with the others.

        Args:
            part: A group that this rank is in.
        """
        self._parts.append(part)

    def leave_word(self, error: Exception) -> None:
        """End the exchanges of all ranks for an error of this one: the others will name both.

        Args:
            error: The reason; ranks that have named another before keep that.
        """
        if self._store is None or self._named is not None:
            return
        alive = self._look()[1]
        text = f"{type(error).__name__}: {error}"
        word = {"late": 0.0, "ended": [], "raised": text[:_LONGEST]}
        with contextlib.suppress(RuntimeError, TimeoutError):
            within(STORE_SECONDS, report, self._store, self._group.rank(), word)
        _break(alive)

    def _look(self) -> tuple[list[int], list[Any]]:
        """See :func:`look`; the receives are also those of smaller groups."""
        ended, alive = look(self._group, self._others())
        for part in self._parts:
            others = [rank for rank in range(part.size()) if rank != part.rank()]
            alive += look(part, others)[1]
        return ended, alive

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Within it, an error of gloo becomes one that names the ranks that are gone or late."""
        try:
            yield
        except RuntimeError as error:
            if (found := self.explain(error)) is not None:
                raise found from error
            raise

    def explain(self, error: RuntimeError) -> CommError | None:
        """The error to raise for that of a collective; ``None`` if it is not gloo's."""
        if isinstance(error, CommError) or self._store is None or not _is_of_gloo(error):
            return None
        if self._named is None:
            self._named = self._ask(is_timeout(error), str(error).strip().partition("\n")[0])
        return self._named

    def _ask(self, late: bool, said: str) -> CommError:
        seconds = self._group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        own, others = self._group.rank(), self._others()
        ended, alive = self._look()
        word = {"late": seconds if late else 0.0, "ended": [] if late else ended}
        why = f"(rank {self._ranks[own]} got from gloo: {said})"
        try:
            words = within(STORE_SECONDS, self._exchange, word, alive)
        except (RuntimeError, TimeoutError):
            _break(alive)
            which = self._name(ended) if ended and not late else "a rank"
            return CommError(
                f"the connection to {which} ended, and the store in which all met, that of "
                f"rank 0 or of the launcher, is gone {why}"
            )
        for rank, each in sorted(words.items()):
            if raised := each.get("raised"):
                return CommError(f"rank {self._ranks[rank]} failed: {raised}")
        silent = [rank for rank in others if rank not in words]
        limit = max(each["late"] for each in words.values())
        if not limit:
            seen = {rank for each in words.values() for rank in each["ended"]}
            gone = [rank for rank in silent if rank in seen]
            if not gone:
                return CommError(f"the connections between ranks broke, and no rank ended {why}")
            return CommError(f"{self._name(gone)} ended while the others went on {why}")
        if silent:
            return CommTimeoutError(
                f"{self._name(silent)} did not come within {limit:g} seconds (waited for by rank "
                f"{self._ranks[own]}); if a rank needs longer than that, raise the limit of "
                "pyg_scale.distributed.init(timeout=...)"
            )
        return CommTimeoutError(
            f"rank {self._ranks[own]}, which is this one, or another came too late: the others "
            f"had waited for {limit:g} seconds and gave up"
        )

    def _others(self) -> list[int]:
        own = self._group.rank()
        return [rank for rank in range(self._group.size()) if rank != own]

    def _exchange(self, word: dict[str, Any], alive: list[Any]) -> dict[int, dict[str, Any]]:
        """The reports of ranks, this one included, after those alive have had time to report."""
        report(self._store, self._group.rank(), word)
        _break(alive)
        return reports(self._store, self._group.size())

    def _name(self, ranks: list[int]) -> str:
        return named([self._ranks[rank] for rank in ranks])


def report(store: Any, rank: int, word: dict[str, Any]) -> None:
    """Tell the other ranks something, which :func:`reports` reads."""
    store.set(f"word/{rank}", json.dumps(word))


def reports(store: Any, world_size: int) -> dict[int, dict[str, Any]]:
    """The reports of ranks, after those alive have had time to report; see :func:`report`.

    Args:
        store: A store of these reports alone.
        world_size: Number of ranks, this one included.
    """
    words: dict[int, dict[str, Any]] = {}
    deadline = time.monotonic() + _GRACE
    while time.monotonic() < deadline and len(words) < world_size:
        if any("raised" in each for each in words.values()):
            break
        for rank in range(world_size):
            if rank not in words and store.check([f"word/{rank}"]):
                words[rank] = json.loads(store.get(f"word/{rank}"))
        time.sleep(_PAUSE)
    return words


def is_timeout(error: RuntimeError) -> bool:
    """Return True if an error of gloo comes from an expired time limit of this rank or another."""
    text = str(error).lower()
    return "timed out" in text or "timeout" in text


def _is_of_gloo(error: RuntimeError) -> bool:
    # Most name a source of gloo's. After a time limit, other waits of a rank say only
    # "Application timeout caused pair closure".
    return "gloo" in str(error) or "pair closure" in str(error)


def look(group: dist.ProcessGroup, ranks: Iterable[int]) -> tuple[list[int], list[Any]]:
    """The ranks whose connections ended, and pending receives from the others.

    Args:
        group: A process group of gloo.
        ranks: Ranks of that group.
    """
    ended, alive = [], []
    for rank in ranks:
        nothing = torch.empty(1, dtype=torch.uint8)
        try:
            alive.append((group.recv([nothing], rank, _NOBODY), nothing))
        except RuntimeError:
            ended.append(rank)
    return ended, alive


def _break(alive: list[Any]) -> None:
    """Let all waits of the group fail: an expired time limit ends all of its connections."""
    for work, _ in alive:
        with contextlib.suppress(RuntimeError):
            work.wait(timedelta(milliseconds=1))
