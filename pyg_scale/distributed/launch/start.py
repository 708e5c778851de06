"""Start of a job: ranks find each other and initialise ``torch.distributed``."""

from __future__ import annotations

import json
import os
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from pyg_scale.comm.address import INTERFACE
from pyg_scale.comm.meeting import Meeting
from pyg_scale.comm.roll_call import look
from pyg_scale.comm.secret import known_secret
from pyg_scale.comm.time_limit import check, within
from pyg_scale.distributed.context import DistContext, DistRole
from pyg_scale.distributed.launch import binding, threads
from pyg_scale.distributed.launch.cpu_topology import allowed_cpus, cpu_quota
from pyg_scale.distributed.launch.device import check_gpus, choose_backend, choose_device
from pyg_scale.distributed.launch.environment import read_launch
from pyg_scale.distributed.launch.gathering import Gathered, adopted, gather
from pyg_scale.errors import CommError

_LEAVE_SECONDS = 30.0
_PAUSE = 0.05
_GRACE = 5.0
_NEWS_SECONDS = 1.0  # after a connection ended, in which the goodbye of its rank may arrive
_lock = threading.Lock()
_running: _Running | None = None


class _Running:
    """The state that :func:`init` creates and :func:`shutdown` ends."""

    def __init__(self, context: DistContext, gathered: Gathered) -> None:
        self.context = context
        self.gathered = gathered
        self.owns_group = False


def init(
    rank: int | None = None,
    world_size: int | None = None,
    *,
    local_rank: int | None = None,
    local_world_size: int | None = None,
    master_addr: str | None = None,
    master_port: int | None = None,
    backend: str | None = None,
    device: str | torch.device | None = None,
    num_servers: int = 0,
    group_name: str | None = None,
    timeout: float = 300.0,
    start_timeout: float = 300.0,
    bind: str | None = None,
    num_threads: int | str | None = None,
) -> DistContext:
    """Meet the other ranks and initialise ``torch.distributed``. Every rank calls it.

    The rank of this process comes from torchrun's environment (``RANK``, ``WORLD_SIZE``,
    ``MASTER_ADDR``, ``MASTER_PORT``, ``LOCAL_RANK``), else from ``rank`` and ``world_size``, else
    from SLURM's (``SLURM_PROCID``, ``SLURM_NTASKS``, ``SLURM_LOCALID``, ``SLURM_JOB_NODELIST``,
    which is resolved locally). With none of them this process is alone, and the same script runs. A
    process group that was initialised before is used unchanged, and not ended.

    The ranks meet in a fresh part of the store in every attempt, so a restart by torchrun, also on
    several machines, finds no keys of an earlier attempt (see :mod:`pyg_scale.comm.meeting` for the
    fault of torch 2.13 that this avoids). Between machines gloo uses the address that others can
    reach (``GLOO_SOCKET_IFNAME``, unless set); ``PYG_SCALE_INTERFACE`` or ``PYG_SCALE_ADDRESS``
    choose another one.

    Use it on trusted networks only: the store, gloo and NCCL accept everyone who reaches their
    ports. Ranks answer requests for their parts of a graph only to ranks that have the secret, if
    there is one (``PYG_SCALE_SECRET`` or ``PYG_SCALE_SECRET_FILE``, the same on all ranks).

    Args:
        rank: Rank of a process that neither torchrun nor SLURM started, such as one of
            ``mp.spawn``.
        world_size: Number of such processes.
        local_rank: By default the launcher's, or counted from the ranks on this machine.
        local_world_size: By default the launcher's, or counted from the ranks on this machine.
        master_addr: Address of rank 0.
        master_port: Port of rank 0.
        backend: Backend of ``torch.distributed``: by default ``"cpu:gloo,cuda:nccl"`` with a GPU,
            else ``"gloo"``.
        device: By default the GPU of the local rank, else the CPU. It becomes the current device.
        num_servers: Number of servers, which are the first ranks; the others are their clients.
            Each role has a default group of its own, so that clients train as if they were alone.
        group_name: Name of the group; by default that of the role.
        timeout: Seconds that a collective of ``torch.distributed`` may take, such as that of the
            gradients of a step. It limits the wait for a rank that hangs or works alone.
        start_timeout: Seconds to wait for the other ranks at the start.
        bind: The CPUs that the threads of this process may use, see
            :func:`pyg_scale.distributed.bind`: ``"exclusive"``, ``"node"`` or ``"socket"``; by
            default unchanged.
        num_threads: Number of threads of torch, or ``"fit"`` for each rank's share of the cores; by
            default unchanged, with a warning if they are too many.

    Returns:
        The context of this process.

    Raises:
        ValueError: If the environment is incomplete, contradicts itself or the arguments, or its
            secret is not valid, or there are more ranks than GPUs. Raised before any waiting.
        CommError: If rank 0 cannot use the port, or the ranks cannot reach each other.
        CommTimeoutError: If ranks do not arrive in time; names them.
        RuntimeError: If it was called before.
    """
    global _running
    for name, value in (("timeout", timeout), ("start_timeout", start_timeout)):
        if not value > 0:
            raise ValueError(f"{name} must be above 0 seconds (got {value!r})")
    if bind is not None and bind not in binding.MODES:
        raise ValueError(f"bind must be one of {', '.join(binding.MODES)} (got {bind!r})")
    threads.check(num_threads)
    known_secret()  # first, so that no rank waits for one whose secret is wrong
    given = {
        "rank": rank,
        "world_size": world_size,
        "local_rank": local_rank,
        "local_world_size": local_world_size,
        "master_addr": master_addr,
        "master_port": master_port,
    }
    with _lock:
        if _running is not None:
            raise RuntimeError(
                "distributed.init() was called before: use distributed.get_context(), or "
                "distributed.shutdown() first"
            )
        there = dist.is_available() and dist.is_initialized()
        if there:
            launch = adopted(given | {"backend": backend, "num_servers": num_servers or None})
        else:
            launch = read_launch(os.environ, **given)  # type: ignore[arg-type]
        if num_servers and not 0 < num_servers < launch.world_size:
            raise ValueError(
                f"num_servers must be from 0 to {launch.world_size - 1}: of {launch.world_size} "
                f"ranks at least one must be a client (got {num_servers})"
            )
        known_rank, known_size = launch.local_rank, launch.local_world_size
        if known_rank is not None and known_size is not None and not num_servers:
            device = choose_device(device, known_rank, known_size)
            backend = backend if there else choose_backend(backend, device)
        store = dist.distributed_c10d._get_default_store() if there else None
        gathered = gather(launch, device, num_servers, start_timeout, store)
        backend = dist.get_backend() if there else choose_backend(backend, gathered.device)
        said = gathered.met.said
        check_gpus([each["gpu"] for each in said], [each["machine"] for each in said], backend)
        context = _describe(gathered, backend, num_servers, group_name)
        running = _Running(context, gathered)
        try:
            os.environ.update(gathered.network)
            if not there:
                _begin(running, timeout, start_timeout)
            _place(context, gathered.met, bind, num_threads)
        except BaseException:
            _undo(running)
            raise
        _running = running
        return context


def get_context() -> DistContext | None:
    """The context that :func:`init` returned, or ``None``."""
    return None if _running is None else _running.context


def shutdown(wait: float | None = None) -> list[int]:
    """Undo :func:`init`; may be called again.

    If rank 0 has the store, because no launcher does, it waits until the others have left: without
    it they could not finish. The others wait as well, to learn of a rank that was killed.

    Args:
        wait: Longest wait in seconds; by default 30.

    Returns:
        On rank 0 the ranks that it waited for in vain.

    Raises:
        CommError: If ranks ended without calling it; names them. :func:`init` is undone all the
            same.
    """
    global _running
    with _lock:
        running, _running = _running, None
        if running is None:
            return []
        try:
            return _leave(running, _LEAVE_SECONDS if wait is None else wait)
        finally:
            _undo(running)


def _begin(running: _Running, timeout: float, start_timeout: float) -> None:
    """Create the default group from the ranks of one role."""
    context, met = running.context, running.gathered.met
    backend = context.backend
    if context.device.type == "cuda":
        torch.cuda.set_device(context.device)
    try:
        dist.init_process_group(
            backend,
            store=PrefixStore(context.role.name.lower(), met.store),
            rank=context.rank,
            world_size=context.world_size,
            timeout=timedelta(seconds=start_timeout),
            device_id=context.device if "nccl" in backend else None,
        )
    except RuntimeError as error:
        first = str(error).strip().partition("\n")[0]
        rank = context.global_rank
        raise CommError(
            f"rank {rank} at {context.addresses[rank]} met the other ranks, but cannot reach them "
            f"by {backend}: {first}; {INTERFACE}=eth0 on every machine names the network interface "
            "to use"
        ) from error
    running.owns_group = True
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout))


def _describe(
    gathered: Gathered, backend: str, num_servers: int, group_name: str | None
) -> DistContext:
    met, launch = gathered.met, gathered.launch
    machines = list(dict.fromkeys(each["machine"] for each in met.said))
    total, rank = launch.world_size, launch.rank
    role, own, size = DistRole.WORKER, rank, total
    if num_servers:
        serves = rank < num_servers
        role = DistRole.SERVER if serves else DistRole.CLIENT
        own, size = (rank, num_servers) if serves else (rank - num_servers, total - num_servers)

    def names(kind: DistRole, count: int) -> tuple[str, ...]:
        base = group_name if group_name and kind is role else kind.name.lower()
        return tuple(f"{base}-{i}" for i in range(count)) if num_servers else ()

    return DistContext(
        own,
        rank,
        size,
        total,
        group_name or role.name.lower(),
        role,
        local_rank=launch.local_rank or 0,
        local_world_size=launch.local_world_size or 1,
        node_rank=machines.index(met.said[rank]["machine"]),
        num_nodes=len(machines),
        device=gathered.device,
        backend=backend,
        launcher=launch.launcher,
        restarts=launch.restarts,
        addresses=tuple(each["address"] for each in met.said),
        hosts=tuple(each["host"] for each in met.said),
        servers=names(DistRole.SERVER, num_servers),
        clients=names(DistRole.CLIENT, total - num_servers),
    )


def _place(
    context: DistContext, met: Meeting, bind: str | None, num_threads: int | str | None
) -> None:
    """Set the CPUs and threads of this process."""
    if context.global_world_size == 1 and bind is None and num_threads is None:
        return
    mine = met.said[context.global_rank]
    here = [each for each in met.said if each["machine"] == mine["machine"]]
    peers, quota = [frozenset(each["cpus"]) for each in here], cpu_quota()
    share = None if quota is None else quota / len(here)
    if threads.are_apart(peers):  # the launcher bound them
        here, peers, quota = [mine], [allowed_cpus()], share
    elif bind is not None:
        rank, size = context.local_rank, context.local_world_size
        bound = binding.bind(rank, size, bind, device=context.device)
        if bind == "exclusive":
            here, peers, quota = [mine], [bound.cpus], share
    threads.fit(num_threads, [each["threads"] for each in here], peers, quota, context.local_rank)


def _leave(running: _Running, seconds: float) -> list[int]:
    """Say goodbye, and wait for the goodbyes of the others."""
    context, gathered = running.context, running.gathered
    if context.global_world_size == 1:
        return []
    store, rank = gathered.met.store, context.global_rank

    def ended(others: list[int]) -> list[int]:
        """The ranks whose connection ended; empty if there are no such connections."""
        first = rank - context.rank  # the group has the ranks of one role
        inside = [r - first for r in others if 0 <= r - first < context.world_size]
        owns = running.owns_group and dist.is_initialized()
        if not owns or "gloo" not in str(dist.get_backend_config()):
            return []
        return [r + first for r in look(dist.distributed_c10d._get_default_group(), inside)[0]]

    words = [f"left/{rank}", f"heard/{rank}"]
    try:
        if gathered.launch.hosted or seconds <= 0:  # a launcher notices ranks that are killed
            within(_GRACE, _say, store, words)
            return []
        within(_GRACE, _say, store, words[:1])
    except (RuntimeError, TimeoutError):  # rank 0 left first, as it does after some time
        return []
    size, limit = context.global_world_size, seconds + (_GRACE if rank else 3 * _GRACE)
    try:
        late, gone = within(limit, say_goodbye, store, rank, size, seconds, ended)
    except (RuntimeError, TimeoutError):  # rank 0 or the network to it is gone
        late, gone = [], ended([0]) if rank else []
    if gone:
        names = f"{'rank' if len(gone) == 1 else 'ranks'} {', '.join(map(str, gone))}"
        raise CommError(
            f"{names} ended without distributed.shutdown(): killed, or failed at the end of the "
            "script (see its last output), or lost its connections before"
        )
    if late:
        warnings.warn(f"ranks {late} did not leave within {seconds:g} seconds", stacklevel=3)
    return late


def say_goodbye(
    store: Any,
    rank: int,
    world_size: int,
    seconds: float,
    ended: Callable[[list[int]], list[int]],
) -> tuple[list[int], list[int]]:
    """Wait until all have left the store; rank 0, whose process has it, goes last.

    Args:
        store: The store of a meeting, in which this rank has announced that it has left.
        rank: Rank of this process.
        world_size: Number of ranks.
        seconds: Longest time that ranks wait for each other.
        ended: Returns those of some ranks whose connections to this one ended.

    Returns:
        On rank 0 the ranks that did not leave in time; and those that ended without leaving.
    """
    deadline, ends = time.monotonic() + seconds, dict[int, float]()

    def gone(others: list[int], word: str) -> list[int]:
        """The ranks that ended a moment ago and still have not said goodbye."""
        now = time.monotonic()
        for other in ended(others):
            ends.setdefault(other, now)
        lost = [other for other in others if ends.get(other, now) < now - _NEWS_SECONDS]
        return [other for other in lost if not store.check([word.format(other)])]

    if rank != 0:
        lost: list[int] = []
        while not store.check(["over"]) and not lost and time.monotonic() < deadline:
            check()
            lost = gone([0], "over")
            time.sleep(_PAUSE)
        if not lost and store.check(["over"]):
            lost = json.loads(store.get("over"))
        store.set(f"heard/{rank}", "")
        return [], lost
    others = list(range(1, world_size))
    while True:
        check()
        others = [each for each in others if not store.check([f"left/{each}"])]
        lost = gone(others, "left/{}")
        if set(others) <= set(lost) or time.monotonic() >= deadline:
            break
        time.sleep(_PAUSE)
    store.set("over", json.dumps(lost))
    here = [each for each in range(1, world_size) if each not in others]
    until = time.monotonic() + 2 * _GRACE
    while here and time.monotonic() < until:
        here = [each for each in here if not store.check([f"heard/{each}"])]
        here = [each for each in here if each not in gone(here, "heard/{}")]
        time.sleep(_PAUSE)
    return [each for each in others if each not in lost], lost


def _say(store: Any, words: list[str]) -> None:
    for word in words:
        store.set(word, "")


def _undo(running: _Running) -> None:
    if running.owns_group and dist.is_initialized():
        dist.destroy_process_group()
    running.owns_group = False
    for name, value in running.gathered.network.items():
        if os.environ.get(name) == value:
            del os.environ[name]
