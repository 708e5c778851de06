"""Ranks in separate processes for tests, which are started once and reused."""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_DEVICES: deque[Any] = deque(maxlen=8)
"""Gloo's devices of the last groups. Else the thread of a device may be the last one that holds it,
and then it waits for itself and ends the process."""
_PRELOADED = ["torch", "torch.distributed", "torch_geometric.nn", "pyg_scale.comm"]


class WaitingProcesses:
    """Processes that wait for work.

    They are forked from a process that has loaded only torch, so that a start takes the time of one
    import. Use it as a context, or call :meth:`close`.

    Args:
        size: Number of processes.
        limit: Largest number of seconds of a call of :meth:`run`.
    """

    def __init__(self, size: int, limit: float = 60.0) -> None:
        self.size, self.limit = size, limit
        self._folder = tempfile.TemporaryDirectory(prefix="pyg_scale-ranks-")
        self._calls = 0
        self._running: list[tuple[Any, Connection]] = []

    def run(
        self, function: Callable[..., Any], *args: Any, world_size: int | None = None
    ) -> list[Any]:
        """Call a function on every rank of a new gloo group.

        Args:
            function: A function of an importable module, as for ``multiprocessing``.
            *args: Its arguments, the same on every rank.
            world_size: Number of ranks, by default all.

        Returns:
            The result of each rank.

        Raises:
            TimeoutError: If a rank exceeds the limit; names it. All are then killed.
            ExceptionGroup: If ranks raised exceptions; contains these.
        """
        world_size = self.size if world_size is None else world_size
        if not 1 <= world_size <= self.size:
            raise ValueError(f"world_size must be from 1 to {self.size} (got {world_size})")
        self._start()
        self._calls += 1
        store = str(Path(self._folder.name, str(self._calls)))
        for rank, (_, connection) in enumerate(self._running[:world_size]):
            call = (function, args, rank, world_size, store, self.limit)
            connection.send_bytes(pickle.dumps(call))
        answers = self._answers(world_size)
        errors = [answer for answer in answers if isinstance(answer, Exception)]
        if errors:
            raise ExceptionGroup("ranks failed", errors)
        return [value for _, value in answers]

    def close(self) -> None:
        """End the processes; may be called again."""
        for process, connection in self._running:
            connection.close()
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join(5)
        self._running = []
        self._folder.cleanup()

    def _start(self) -> None:
        if self._running:
            return
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs,), name=f"rank-{rank}", daemon=True
            )
            process.start()
            theirs.close()
            self._running.append((process, ours))

    def _answers(self, world_size: int) -> list[Any]:
        deadline = time.monotonic() + self.limit
        waiting = {self._running[rank][1]: rank for rank in range(world_size)}
        answers: list[Any] = [None] * world_size
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                late = ", ".join(f"rank {rank}" for rank in sorted(waiting.values()))
                self._kill()
                raise TimeoutError(f"{late} did not end within {self.limit:g} seconds")
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    answers[rank] = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    process = self._running[rank][0]
                    process.join(5)
                    answers[rank] = RuntimeError(
                        f"the process of rank {rank} ended ({process.exitcode})"
                    )
        if any(not process.is_alive() for process, _ in self._running):
            self._kill()  # the next call starts new processes
        return answers

    def _kill(self) -> None:
        for process, connection in self._running:
            process.kill()
            process.join(5)
            connection.close()
        self._running = []

    def __enter__(self) -> WaitingProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _serve(connection: Connection) -> None:
    """Answer calls until the other end is closed."""
    torch.set_num_threads(1)
    while True:
        try:
            call = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return
        connection.send_bytes(_answer(*call))


def _answer(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    world_size: int,
    store: str,
    limit: float,
) -> bytes:
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=limit / 2),
        )
        group = dist.distributed_c10d._get_default_group()
        _DEVICES.append(group._get_backend(torch.device("cpu")).options._devices)  # type: ignore[attr-defined]
        try:
            dist.barrier()  # else a rank that ends at once fails others that are still connecting
            return pickle.dumps(("done", function(*args)))
        finally:
            dist.destroy_process_group()
    except Exception as error:
        text = f"rank {rank}: {''.join(traceback.format_exception(error))}"
        return pickle.dumps(
            AssertionError(text) if isinstance(error, AssertionError) else RuntimeError(text)
        )
