"""Signals that end a run in good order: all ranks agree on the step after which they stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch

from pyg_scale.comm import Communicator, Work

EXIT_CODE = 75
"""The exit status of a run that was told to stop and has saved: ``EX_TEMPFAIL``, "try again"."""


class Stopping:
    """Notices signals, on whichever rank they come.

    Args:
        signals: Their names.
        ranks: Those that must agree.

    Raises:
        ValueError: If there is no such signal, it cannot be caught, or this is not the main
            thread.
    """

    def __init__(self, signals: Iterable[str], ranks: Communicator) -> None:
        if isinstance(signals, str):
            raise ValueError(f"stop_on must be a list of signals, such as [{signals!r}]")
        self._ranks = ranks
        self._told = False
        self._asked: Work[Any] | None = None
        self._calls = 0
        self._before: dict[signal.Signals, Any] = {}
        found = [_signal(name) for name in signals]
        if found and threading.current_thread() is not threading.main_thread():
            raise ValueError("stop_on: signals can be noticed by the main thread only")
        for each in found:
            self._before[each] = signal.signal(each, self._notice)

    def agreed(self) -> bool:
        """Return True if it is time to stop; every rank gets the same answer.

        Called once for each step. Nobody waits: ranks ask in one step and look at
        the answers in the next one.
        """
        if not self._before:
            return False
        if self._ranks.world_size == 1:
            return self._told
        answers = self._asked.wait() if self._asked is not None else []
        mine = torch.tensor([self._told])
        tag = self._calls % (1 << 20)
        self._calls += 1
        self._asked = self._ranks.all_gather(mine, tag=tag, async_op=True)
        return any(bool(answer) for answer in answers)

    def settle(self) -> None:
        """Wait for what is under way: a rank must not go before the others have its answer."""
        if self._asked is not None:
            self._asked.wait()
            self._asked = None

    def close(self) -> None:
        """Let signals do what they did before; may be called again."""
        for each, before in self._before.items():
            signal.signal(each, signal.SIG_DFL if before is None else before)
        self._before = {}

    def _notice(self, number: int, frame: FrameType | None) -> None:
        self._told = True


def _signal(name: str) -> signal.Signals:
    try:
        found = signal.Signals[name]
    except KeyError:
        raise ValueError(f"stop_on: there is no signal {name!r}; SIGTERM is one") from None
    if found in (signal.SIGKILL, signal.SIGSTOP):
        raise ValueError(f"stop_on: {name} cannot be noticed")
    return found
