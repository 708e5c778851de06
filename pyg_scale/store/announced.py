"""Reads that are announced ahead, batch by batch, for every store that looks ahead."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from pyg_scale.errors import was_interrupted
from pyg_scale.store.base import ReadSchedule


class AnnouncedReads:
    """The batches of one iteration: the parts of a
    :class:`~pyg_scale.store.base.ReadSchedule` that do not depend on the store.

    Args:
        store: The store that reads the batches.
        inner: Schedules of the stores from which it reads.

    Attributes:
        closed: True once no batch will follow.
    """

    def __init__(self, store: Any, inner: Sequence[ReadSchedule] = ()) -> None:
        self.closed = False
        self._store: Any = store
        self._inner = tuple(inner)
        self._paused = False

    @property
    def paused(self) -> bool:
        """True while reading ahead is paused."""
        return self._paused

    @paused.setter
    def paused(self, value: bool) -> None:
        self._paused = value
        for each in self._inner:
            each.paused = value

    def suffices(self, ahead: int) -> bool:
        """Return True if batches need not be announced any further ahead.

        Args:
            ahead: Number of announced batches after the one to be read next.
        """
        return all(each.suffices(ahead) for each in self._inner)

    @contextlib.contextmanager
    def serving(self, batch: int) -> Iterator[None]:
        """Within this context, reads of this thread belong to an announced batch."""
        with contextlib.ExitStack() as stack:
            for each in self._inner:
                stack.enter_context(each.serving(batch))
            _thread.serving.append((self, batch))
            try:
                try:
                    yield
                finally:
                    _thread.serving.remove((self, batch))
                    self.finish(batch)
            except BaseException as error:
                if was_interrupted(error):
                    self.interrupted()
                raise

    def finish(self, batch: int) -> None:
        """Called when a batch was read: forget it."""

    def interrupted(self) -> None:
        """Called when a read was interrupted, so that its state may be half changed."""

    def close(self) -> None:
        """Announce that no batch will follow. Never waits, so that a finalizer may call it."""
        self.closed = True
        for each in self._inner:
            each.close()


class _Thread(threading.local):
    def __init__(self) -> None:
        # of several stores, if one reads from others
        self.serving: list[tuple[AnnouncedReads, int]] = []


_thread = _Thread()


def served_now(store: object) -> tuple[Any, int] | None:
    """The schedule and batch of this thread's current read, if they are of the store."""
    for schedule, batch in _thread.serving:
        if schedule._store is store:
            return schedule, batch
    return None
