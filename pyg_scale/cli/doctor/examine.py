"""Ranks check each other before they start: the work of ``pyg-scale doctor --dist``."""

from __future__ import annotations

import hashlib
import os
import platform
import resource
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from pyg_scale import __version__, plugins
from pyg_scale.cli.doctor.diagnose import diagnose
from pyg_scale.cli.doctor.pairs import measure_pairs
from pyg_scale.comm import Group
from pyg_scale.comm.address import interface_of, interfaces
from pyg_scale.comm.meeting import leave, meet
from pyg_scale.distributed.launch.cpu_topology import allowed_cpus, cpu_quota, read_topology
from pyg_scale.distributed.launch.device import choose_device
from pyg_scale.distributed.launch.environment import read_launch
from pyg_scale.distributed.launch.gathering import gather
from pyg_scale.errors import GraphDirectoryError
from pyg_scale.ops import library

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


_ENVIRONMENT = ("PYG_SCALE_", "GLOO_", "NCCL_", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
SHARED_MEMORY = Path("/dev/shm")


def probe(directory: str | None, address: str) -> dict[str, Any]:
    """The facts about a rank, as values that JSON can represent.

    Args:
        directory: A graph directory, or ``None``.
        address: The address at which others reach it.
    """
    return {
        "versions": versions(),
        "kernels": kernels(),
        "kernels_missing": library.status()["reason"],
        "kernels_fix": library.status()["command"],
        "directory": None if directory is None else describe_directory(directory),
        "interface": interface_of(address),
        "interfaces": interfaces(),
        "shared_memory": shared_memory(),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "gpus": torch.cuda.device_count(),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_ENVIRONMENT) and "TOKEN" not in name
        },
    }


def versions() -> dict[str, str]:
    """Versions of the software that must be the same on all ranks."""
    import numpy
    import torch_geometric

    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "torch_geometric": str(torch_geometric.__version__),
        "numpy": str(numpy.__version__),
        "pyg_scale": __version__,
    }


def kernels() -> str:
    """The compiled kernels of this rank: a checksum, or ``"none"``."""
    status = library.status()
    if not status["loaded"]:
        return "none"
    try:
        with open(str(status["path"]), "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:12]
    except OSError:
        return str(status["path"])


def describe_directory(path: str) -> dict[str, Any]:
    """The contents of a graph directory that a rank can read."""
    from pyg_scale.store.directory import GraphDirectory

    found: dict[str, Any] = {"path": str(Path(path).absolute())}
    try:
        directory = GraphDirectory(path)
        meta = (Path(directory.path) / "META.json").read_bytes()
        return found | {
            "checksum": hashlib.sha256(meta).hexdigest()[:12],
            "num_parts": directory.meta.num_parts,
            "parts": list(directory.parts),
            "files": len(directory.files_here()),
        }
    except (GraphDirectoryError, OSError) as error:
        return found | {"error": f"{type(error).__name__}: {error}"}


def shared_memory(path: Path = SHARED_MEMORY) -> int | None:
    """Size in bytes of the file system for shared memory, or ``None``."""
    try:
        return shutil.disk_usage(path).total
    except OSError:
        return None
