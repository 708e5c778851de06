"""Ranks check each other before they start: the work of ``pyg-scale doctor --dist``."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from pyg_scale import plugins
from pyg_scale.cli.doctor.diagnose import diagnose
from pyg_scale.cli.doctor.pairs import measure_pairs
from pyg_scale.cli.doctor.probe import probe
from pyg_scale.comm import Group
from pyg_scale.comm.meeting import leave, meet
from pyg_scale.distributed.launch.cpu_topology import allowed_cpus, cpu_quota, read_topology
from pyg_scale.distributed.launch.device import choose_device
from pyg_scale.distributed.launch.environment import read_launch
from pyg_scale.distributed.launch.gathering import gather

_COLLECTIVE_SECONDS = 10.0


def examine(
    directory: str | None, *, seconds: float = 15.0, timeout: float = 60.0
) -> dict[str, Any]:
    """Check the ranks of a job; every rank calls it.

    Args:
        directory: A graph directory that every rank should find, or ``None``.
        seconds: Approximate time for measurements between ranks.
        timeout: Seconds to wait for other ranks.

    Returns:
        Plain values, the same on every rank: ``ok``, ``world_size``, ``launcher``, ``ranks`` (the
        facts and measurements of each) and ``findings``. ``rank`` is that of this process.

    Raises:
        ValueError: If the environment is incomplete or contradicts itself.
        CommError: If the ranks cannot meet at all.
        CommTimeoutError: If ranks did not come in time; names them.
    """
    launch = read_launch(os.environ)
    device, device_error = torch.device("cpu"), None
    if launch.local_rank is not None and launch.local_world_size is not None:
        try:
            device = choose_device(None, launch.local_rank, launch.local_world_size)
        except ValueError as error:
            device_error = str(error)
    gathered = gather(launch, device, 0, timeout)
    rank, world_size, store = launch.rank, launch.world_size, gathered.met.store
    os.environ.update(gathered.network)
    mine = dict(gathered.met.said[rank])
    mine |= probe(directory, mine["address"])
    mine |= {
        "device_error": device_error,
        "cores": len(read_topology(allowed_cpus()).cores),
        "quota": cpu_quota(),
        "pairs": [],
        "collective": "",
    }
    if world_size > 1:
        mine["pairs"] = measure_pairs(PrefixStore("pairs", store), rank, world_size, seconds)
        mine["collective"] = _collective(store, rank, world_size)
    met = meet(PrefixStore("said", store), rank, world_size, timeout=timeout, said=mine)
    found = diagnose(met.said)
    if world_size > 1:
        leave(met.store, rank, world_size, timeout=timeout)
    return {
        "ok": all(finding.ok is not False for finding in found),
        "rank": rank,
        "world_size": world_size,
        "launcher": launch.launcher,
        "findings": [asdict(finding) for finding in found],
        "ranks": list(met.said),
    }


def _collective(store: Any, rank: int, world_size: int) -> str:
    """The reason why the ranks cannot do collectives, or an empty string."""
    group = Group(PrefixStore("gloo", store), rank, world_size, _COLLECTIVE_SECONDS)
    try:
        with plugins.get("comm", "gloo").join(group) as ranks:
            total = ranks.all_reduce(torch.ones(1))
            if int(total) != world_size:
                return f"an all_reduce of ones gave {float(total)}, not {world_size}"
            ranks.barrier()
    except (RuntimeError, ValueError) as error:
        return f"no collectives by gloo: {error}"
    return ""
