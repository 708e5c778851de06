"""Ranks as processes of one script, without a launcher."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.multiprocessing as mp
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from pyg_scale.comm.address import LOOPBACK
from pyg_scale.distributed.launch.cpu_topology import allowed_cpus, cpu_quota, read_topology
from pyg_scale.distributed.launch.threads import that_fit
from pyg_scale.errors import CommError, CommTimeoutError

_POLL = 0.2
_GRACE = 5.0


def spawn(
    function: Callable[..., Any],
    nprocs: int,
    args: Sequence[Any] = (),
    *,
    timeout: float | None = None,
    num_threads: int | None = None,
) -> None:
    """Run a function in several processes of this machine, as torchrun would run a script.

    In each, :func:`pyg_scale.distributed.init` needs no arguments: the environment is that of
    torchrun, whose store is in this process. Unlike ``torch.multiprocessing.spawn``, it chooses the
    port and a suitable number of threads, has a time limit, and leaves no process behind.

    Args:
        function: Called with ``args``. It must be at the top level of an importable module
            (processes are spawned, so the script needs ``if __name__ == "__main__":``).
        nprocs: Number of ranks.
        args: Sent to the processes by pickle.
        timeout: Seconds until all ranks must have ended; by default there is no limit.
        num_threads: Threads of torch in each rank; by default its share of the cores.

    Raises:
        ValueError: If a number is out of range.
        CommError: If a rank raised or was killed; names it and has its traceback. The others
            are ended.
        CommTimeoutError: If ranks still run at the time limit; names them and ends them.
    """
    if nprocs < 1:
        raise ValueError(f"nprocs must be 1 or more (got {nprocs})")
    if timeout is not None and not timeout > 0:
        raise ValueError(f"timeout must be above 0 seconds (got {timeout!r})")
    if num_threads is None:
        num_threads = that_fit(len(read_topology(allowed_cpus()).cores), nprocs, cpu_quota())
    listener = socket.create_server((LOOPBACK, 0))  # torch would listen on all interfaces
    port = listener.getsockname()[1]
    number = listener.detach()
    store = TCPStore(LOOPBACK, port, None, True, wait_for_workers=False, master_listen_fd=number)
    context = mp.start_processes(  # type: ignore[attr-defined]
        _run,
        (nprocs, store.port, num_threads, function, tuple(args)),
        nprocs,
        join=False,
        daemon=False,
        start_method="spawn",
    )
    deadline = None if timeout is None else time.monotonic() + timeout
    try:
        while not context.join(timeout=_POLL, grace_period=_GRACE):
            if deadline is not None and time.monotonic() > deadline:
                late = [str(r) for r, process in enumerate(context.processes) if process.is_alive()]
                raise CommTimeoutError(
                    f"rank {', '.join(late)} of {nprocs} was running after {timeout:g} seconds"
                )
    except mp.ProcessRaisedException as error:  # type: ignore[attr-defined]
        raise CommError(f"rank {error.error_index} failed: {error.msg.strip()}") from None
    except mp.ProcessExitedException as error:  # type: ignore[attr-defined]
        how = (
            f"by signal {error.signal_name}"
            if error.signal_name
            else f"with exit status {error.exit_code}"
        )
        raise CommError(f"rank {error.error_index} ended {how}") from None
    finally:
        _end(context.processes)


def _run(
    rank: int,
    world_size: int,
    port: int,
    num_threads: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR=LOOPBACK,
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
    )
    torch.set_num_threads(num_threads)
    function(*args)


def _end(processes: Sequence[Any]) -> None:
    for process in processes:
        if process.is_alive():
            process.terminate()
    deadline = time.monotonic() + _GRACE
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
