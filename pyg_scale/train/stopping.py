"""Ends of a run before its last step, by a signal or a metric: all ranks agree where they stop."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch

from pyg_scale.comm import Communicator, Work, connect
from pyg_scale.comm.connect import num_ranks

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


class EarlyStopping:
    """Says when a metric has not become better for a while; every rank gets the same answer.

    ```python
    with EarlyStopping(patience=10, mode="max") as stopping:
        for epoch in range(200):
            ...
            if stopping.step(validation_accuracy):
                break
    ```

    The values of rank 0 decide. It has ``state_dict`` and ``load_state_dict`` for a
    :class:`~pyg_scale.train.Checkpoint`.

    Args:
        patience: After how many values in a row that are no better it is time to stop.
        mode: ``"min"`` or ``"max"``: what better means.
        min_delta: By how much a value must be better than the best one.
        comm: How ranks hear of it: see :class:`~pyg_scale.train.Checkpoint`.
        timeout: Seconds that ranks wait for each other.

    Attributes:
        best: The best value so far, ``None`` before the first one.
        is_best: Whether the last one was.

    Raises:
        ValueError: If a number or the mode cannot be.
        CommTimeoutError: If not all ranks make one in time.
    """

    def __init__(
        self,
        patience: int,
        mode: str = "min",
        *,
        min_delta: float = 0.0,
        comm: str | Communicator | None = None,
        timeout: float = 300.0,
    ) -> None:
        if patience < 1:
            raise ValueError(f"patience must be 1 or more (got {patience})")
        if mode not in ("min", "max"):
            raise ValueError(f"mode must be 'min' or 'max' (got {mode!r})")
        if not (math.isfinite(min_delta) and min_delta >= 0):
            raise ValueError(f"min_delta must be 0 or more (got {min_delta})")
        self.patience, self.mode, self.min_delta = patience, mode, min_delta
        self.best: float | None = None
        self.is_best = False
        self._waited = 0
        self._ranks = connect(comm or ("local" if num_ranks() == 1 else "gloo"), timeout=timeout)
        self._owns_ranks = self._ranks is not comm

    def step(self, value: float) -> bool:
        """Return True if it is time to stop. Every rank calls it, as often as the others.

        Args:
            value: The metric. NaN is no better than anything.
        """
        mine = torch.tensor(float(value), dtype=torch.float64)
        found = float(self._ranks.broadcast(mine))
        self.is_best = not math.isnan(found) and (self.best is None or self._better(found))
        if self.is_best:
            self.best, self._waited = found, 0
        else:
            self._waited += 1
        return self._waited >= self.patience

    def _better(self, value: float) -> bool:
        assert self.best is not None
        gain = self.best - value if self.mode == "min" else value - self.best
        return gain > self.min_delta

    def state_dict(self) -> dict[str, Any]:
        """The best value, and for how long there was none."""
        return {"best": self.best, "waited": self._waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with a state."""
        self.best, self._waited = state["best"], state["waited"]

    def close(self) -> None:
        """Release the connections to other ranks; may be called again."""
        if self._owns_ranks:
            self._ranks.close()

    def __enter__(self) -> EarlyStopping:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
