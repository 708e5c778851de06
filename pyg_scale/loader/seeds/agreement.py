"""The values of a loader that ranks compare, left in the store where they met.

No collective: a rank that does not come makes the others raise, and breaks nothing.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from pyg_scale.comm import Group
from pyg_scale.comm.time_limit import within
from pyg_scale.errors import CommError, CommTimeoutError

_PAUSES = (0.0005, 0.05)  # seconds between two looks, at first and at last
_FAILED = "failed"
_LONGEST = 2_000  # characters of an error that others are told


class Agreement:
    """A place in the store for one loader (or another thing), the same on all ranks.

    Ranks make their places in the same order.

    Args:
        group: The ranks, more than one.
        name: What the loader is called in errors.
        advice: What those errors say at their end.
    """

    def __init__(self, group: Group, name: str, advice: str) -> None:
        self.rank, self.world_size, self.timeout = group.rank, group.world_size, group.timeout
        self._name, self._advice = name, advice
        store = PrefixStore("seeds", group.store)
        number = self._safe(store.add, f"loaders/{self.rank}", 1)
        self._store = PrefixStore(f"loader/{number}", store)

    def publish(self, topic: str, value: Mapping[str, Any]) -> None:
        """Say something to the other ranks; does not wait.

        Args:
            topic: Any word, the same on all ranks.
            value: What JSON can say.

        Raises:
            CommError: If the store is gone.
        """
        self._safe(self._store.set, f"{topic}/{self.rank}", json.dumps(value))

    def leave_word(self, error: Exception) -> None:
        """Let the ranks that wait, or will, raise: this one has failed and will say nothing more.

        Args:
            error: The reason; that of the first rank which failed is kept.
        """
        word = {"rank": self.rank, "raised": f"{type(error).__name__}: {error}"[:_LONGEST]}
        with contextlib.suppress(CommError):
            self._safe(self._store.compare_set, _FAILED, "", json.dumps(word))

    def beat(self, number: int) -> None:
        """Say that this rank is at work; the number is another one each time."""
        self._safe(self._store.set, f"beat/{self.rank}", str(number))

    def collect(
        self, topic: str, verb: str, ranks: Sequence[int] | None = None, patient: bool = False
    ) -> list[dict[str, Any]]:
        """The values of all ranks, in their order; waits until all are there.

        Args:
            topic: See :meth:`publish`.
            verb: What a rank does when it says this, for the error.
            ranks: Those that are waited for, by default all.
            patient: Whether to wait as long as those that are missed :meth:`beat`.

        Raises:
            CommTimeoutError: Names the ranks that said nothing in time; also if the store, which
                is that of rank 0, does not answer.
            CommError: If the store is gone, or a rank has failed; names it and its error.
        """
        ranks = range(self.world_size) if ranks is None else ranks
        names = [f"{topic}/{rank}" for rank in ranks]
        deadline = time.monotonic() + self.timeout
        pause, longest = _PAUSES
        beats = {rank: self._beat(rank) for rank in ranks} if patient else {}
        while not self._safe(self._store.check, names):
            if self._safe(self._store.check, [_FAILED]):
                word = json.loads(self._safe(self._store.get, _FAILED))
                raise CommError(
                    f"rank {word['rank']} failed in this {self._name}: {word['raised']} (noticed "
                    f"by rank {self.rank})"
                )
            if time.monotonic() > deadline:
                late = self._missing(topic, ranks)
                found = {rank: self._beat(rank) for rank in late} if patient else {}
                if late and all(found.get(rank) == beats.get(rank) for rank in late):
                    raise self._late(late, verb)
                beats, deadline = found, time.monotonic() + self.timeout
            time.sleep(pause)
            pause = min(longest, 2 * pause)
        return [json.loads(self._safe(self._store.get, name)) for name in names]

    def forget(self, topic: str) -> None:
        """Remove what this rank said; the others must have collected it."""
        self._safe(self._store.delete_key, f"{topic}/{self.rank}")

    def _missing(self, topic: str, ranks: Sequence[int]) -> list[int]:
        return [r for r in ranks if not self._safe(self._store.check, [f"{topic}/{r}"])]

    def _beat(self, rank: int) -> bytes:
        name = f"beat/{rank}"
        return self._safe(self._store.get, name) if self._safe(self._store.check, [name]) else b""

    def _late(self, late: Sequence[int], verb: str) -> CommTimeoutError:
        said = ", ".join(map(str, late[:16])) + (", ..." if len(late) > 16 else "")
        return CommTimeoutError(
            f"{'rank' if len(late) == 1 else 'ranks'} {said} did not {verb} this {self._name} "
            f"within {self.timeout:g} seconds (waited for by rank {self.rank}), {self._advice}"
        )

    def _safe(self, call: Any, *arguments: Any) -> Any:
        # A store whose process is stopped answers nothing, and has no time limit for that.
        try:
            return within(self.timeout, call, *arguments)
        except TimeoutError:
            raise CommTimeoutError(
                f"the store where the ranks met (that of rank 0) did not answer rank {self.rank} "
                f"within {self.timeout:g} seconds: its process hangs, or the way to it is lost"
            ) from None
        except RuntimeError as error:  # what stores raise
            first = str(error).strip().partition("\n")[0]
            raise CommError(
                f"the store where the ranks met is gone (that of rank 0, seen by rank "
                f"{self.rank}): {first}"
            ) from error
