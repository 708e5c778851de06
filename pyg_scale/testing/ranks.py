"""Ranks in one process for tests: threads that meet in their own store."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]

from pyg_scale.comm import Group


def run_ranks(
    world_size: int,
    function: Callable[[Group], Any],
    *,
    timeout: float = 30.0,
    limit: float = 60.0,
) -> list[Any]:
    """Call ``function`` on every rank concurrently.

    Args:
        world_size: Number of ranks.
        function: Takes the :class:`~pyg_scale.comm.Group` of its rank.
        timeout: Time limit of the group in seconds.
        limit: Seconds within which all ranks must end.

    Returns:
        The result of each rank.

    Raises:
        TimeoutError: If a rank exceeds the limit; names it and the line that it is at.
        ExceptionGroup: If ranks raised exceptions; contains these.
    """
    store = HashStore()
    found: list[Any] = [None] * world_size
    errors: list[tuple[int, Exception]] = []

    def work(rank: int) -> None:
        try:
            group = Group(PrefixStore("ranks", store), rank, world_size, timeout)
            found[rank] = function(group)
        except BaseException as raised:  # pytest.raises fails with a BaseException
            if isinstance(raised, Exception):
                error = raised
            else:
                error = AssertionError(f"{type(raised).__name__}: {raised}")
                error.__cause__ = raised
            error.add_note(f"(raised by rank {rank})")
            errors.append((rank, error))

    threads = [
        threading.Thread(target=work, args=(rank,), name=f"rank-{rank}", daemon=True)
        for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit)
    late = [thread for thread in threads if thread.is_alive()]
    if late:
        said = [_place(thread) for thread in late]
        said += ["".join(traceback.format_exception(error)) for _, error in sorted_by_rank(errors)]
        names = ", ".join(thread.name for thread in late)
        raise TimeoutError("\n".join([f"{names} did not end within {limit:g} seconds", *said]))
    if errors:
        raise ExceptionGroup("ranks failed", [error for _, error in sorted_by_rank(errors)])
    return found


def _place(thread: threading.Thread) -> str:
    """The line that a thread is at, and its callers."""
    frame = sys._current_frames().get(thread.ident or 0)
    return f"{thread.name} is at\n{''.join(traceback.format_stack(frame))}" if frame else ""


def sorted_by_rank(errors: list[tuple[int, Exception]]) -> list[tuple[int, Exception]]:
    """Errors of ranks, ordered by rank."""
    return sorted(errors, key=lambda each: each[0])
