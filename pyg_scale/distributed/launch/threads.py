"""Threads of the ranks of one machine, compared with its cores."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import torch

from pyg_scale.distributed.launch.cpu_topology import read_topology


def check(num_threads: int | str | None) -> None:
    """Refuse an invalid number of threads.

    Raises:
        ValueError: If it is neither a positive number nor ``"fit"``.
    """
    if num_threads is None or num_threads == "fit":
        return
    if isinstance(num_threads, bool) or not isinstance(num_threads, int) or num_threads < 1:
        raise ValueError(f"num_threads must be 1 or more, or 'fit' (got {num_threads!r})")


def are_apart(peers: Sequence[frozenset[int]]) -> bool:
    """Return True if no two ranks share a CPU."""
    return len(peers) > 1 and sum(map(len, peers)) == len(frozenset().union(*peers))


def that_fit(num_cores: int, num_ranks: int, quota: float | None = None) -> int:
    """Number of threads of each rank such that all ranks together have no more than the cores.

    Args:
        num_cores: Physical cores that the ranks share.
        num_ranks: Number of ranks that share them.
        quota: CPUs that a container may use in total.
    """
    usable = num_cores if quota is None else min(num_cores, max(1, math.floor(quota)))
    return max(1, usable // max(1, num_ranks))


def fit(
    num_threads: int | str | None,
    threads: Sequence[int],
    peers: Sequence[frozenset[int]],
    quota: float | None,
    local_rank: int,
) -> None:
    """Set the number of torch's threads, or warn if they are too many.

    Args:
        num_threads: A number, ``"fit"``, or ``None`` to leave it unchanged, with a warning (by
            local rank 0, for all) if the ranks that share these cores have more threads than cores.
        threads: Threads of each rank that shares these cores.
        peers: CPUs of each of these ranks.
        quota: CPUs that a container grants to these ranks, or ``None``.
        local_rank: Local rank of this process.
    """
    num_cores = len(read_topology(frozenset().union(*peers)).cores)
    if num_threads == "fit":
        torch.set_num_threads(that_fit(num_cores, len(threads), quota))
        return
    if isinstance(num_threads, int):
        torch.set_num_threads(num_threads)
        threads = [num_threads] * len(threads)
    if local_rank == 0 and (said := complaint(threads, num_cores, quota)):
        warnings.warn(said, stacklevel=4)


def complaint(threads: Sequence[int], num_cores: int, quota: float | None = None) -> str | None:
    """The warning for ranks that have more threads than cores, or ``None``.

    Args:
        threads: Threads of each rank.
        num_cores: Physical cores that they share.
        quota: CPUs that a container may use in total.
    """
    usable = num_cores if quota is None else min(num_cores, max(1, math.floor(quota)))
    ranks = len(threads)
    if sum(threads) <= usable:
        return None
    limited = f" (of {num_cores}, limited by the container)" if usable < num_cores else ""
    here = f"{usable} {'core' if usable == 1 else 'cores'}{limited}"
    if ranks > usable:
        return f"{ranks} ranks share {here}: start at most {usable} for speed"
    each = that_fit(num_cores, ranks, quota)
    who = f"{ranks} ranks" if ranks > 1 else "a rank"
    return (
        f"{who} of {max(threads)} threads on {here}: they slow each other down. "
        f"OMP_NUM_THREADS={each} fits, or distributed.init(num_threads='fit')"
    )
