"""The rank of this process: from torchrun's environment, SLURM's, or arguments."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

from pyg_scale.distributed.launch.slurm import default_port, expand_hosts, expand_tasks, is_step

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SLURM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_NODELIST")
DEFAULT_PORT = 29500
"""The default of ``torch.distributed``, too."""


@dataclass(frozen=True)
class Launch:
    """The identity of a process among those that were started together.

    Attributes:
        launcher: ``"torchrun"``, ``"slurm"``, ``"arguments"``, or ``"none"`` for one process.
        rank: From 0 to ``world_size - 1``.
        world_size: Number of processes.
        local_rank: Rank among the processes of this machine; ``None`` if the launcher does not say.
        local_world_size: Number of processes of this machine, or ``None``.
        master_addr: Address of rank 0.
        master_port: Port of rank 0.
        hosted: True if torchrun's agent has a store at that port.
        restarts: Number of times that this process was restarted, as counted by its agent.
    """

    launcher: str
    rank: int = 0
    world_size: int = 1
    local_rank: int | None = None
    local_world_size: int | None = None
    master_addr: str = "127.0.0.1"
    master_port: int = DEFAULT_PORT
    hosted: bool = False
    restarts: int = 0

    def __post_init__(self) -> None:
        def check(name: str, value: int | None, size_name: str, size: int | None) -> None:
            if value is not None and value < 0:
                raise ValueError(f"{self._from}: {name}={value} must not be below 0")
            if size is not None and size < 1:
                raise ValueError(f"{self._from}: {size_name}={size} must be 1 or more")
            if value is not None and size is not None and value >= size:
                raise ValueError(
                    f"{self._from}: {name}={value} contradicts {size_name}={size}; it must be "
                    "smaller"
                )

        check("rank", self.rank, "world_size", self.world_size)
        check("local_rank", self.local_rank, "local_world_size", self.local_world_size)
        check("local_rank", self.local_rank, "world_size", self.world_size)
        if self.local_world_size is not None and self.local_world_size > self.world_size:
            raise ValueError(
                f"{self._from}: local_world_size={self.local_world_size} contradicts "
                f"world_size={self.world_size}; a machine cannot have more ranks than the job"
            )
        if not 0 < self.master_port < 1 << 16:
            raise ValueError(
                f"{self._from}: MASTER_PORT must be from 1 to 65535 (got {self.master_port})"
            )

    @property
    def _from(self) -> str:
        names = {"torchrun": "the environment", "slurm": "SLURM's environment"}
        return names.get(self.launcher, "the arguments")


def read_launch(
    environ: Mapping[str, str],
    *,
    rank: int | None = None,
    world_size: int | None = None,
    local_rank: int | None = None,
    local_world_size: int | None = None,
    master_addr: str | None = None,
    master_port: int | None = None,
) -> Launch:
    """The identity of this process.

    Args:
        environ: The environment of the process.
        rank: Rank of this process, without torchrun; needs ``world_size``.
        world_size: Number of processes; needs ``rank``.
        local_rank: By default the launcher's.
        local_world_size: By default the launcher's.
        master_addr: Address of rank 0; by default ``MASTER_ADDR``, the first host of SLURM's list,
            or this machine.
        master_port: By default ``MASTER_PORT``, one derived from SLURM's job number, or 29500.

    Raises:
        ValueError: If the environment is incomplete, or contradicts itself or the arguments.
    """
    if (rank is None) != (world_size is None):
        raise ValueError("rank and world_size go together: pass both, or neither")
    given = {
        "rank": rank,
        "world_size": world_size,
        "local_rank": local_rank,
        "local_world_size": local_world_size,
        "master_addr": master_addr,
        "master_port": master_port,
    }
    if any(name in environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        return _of_torchrun(environ, given)
    if rank is not None and world_size is not None:
        return _of_arguments(environ, given, rank, world_size)
    if is_step(environ):
        return _of_slurm(environ, given)
    if environ.get("SLURM_NTASKS", "1") != "1":
        warnings.warn(
            f"SLURM has {environ['SLURM_NTASKS']} tasks, but srun did not start this "
            "process, so it is alone: start with srun, or with srun and torchrun",
            stacklevel=4,
        )
    alone = [name for name, value in given.items() if value is not None and name != "master_port"]
    if alone:
        raise ValueError(f"{', '.join(alone)}: pass rank and world_size as well")
    return Launch("none", local_rank=0, local_world_size=1)


def _of_torchrun(environ: Mapping[str, str], given: Mapping[str, int | str | None]) -> Launch:
    alone = environ.get("WORLD_SIZE") == "1"
    missing = [n for n in _TORCHRUN if n not in environ and not (alone and n.startswith("MASTER"))]
    if missing:
        have = [name for name in (*_TORCHRUN, "LOCAL_RANK") if name in environ]
        raise ValueError(
            f"the environment is incomplete: {', '.join(have)} are set, but not "
            f"{', '.join(missing)}; start with torchrun, or unset them"
        )
    found: dict[str, int | str | None] = {
        "rank": _number(environ, "RANK"),
        "world_size": _number(environ, "WORLD_SIZE"),
        "local_rank": _number(environ, "LOCAL_RANK") if "LOCAL_RANK" in environ else None,
        "local_world_size": (
            _number(environ, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environ else None
        ),
        "master_addr": environ.get("MASTER_ADDR", "127.0.0.1"),
        "master_port": _number(environ, "MASTER_PORT") if "MASTER_PORT" in environ else 29500,
    }
    for name, value in given.items():
        if value is not None and found[name] not in (None, value):
            raise ValueError(
                f"{name}={value!r} contradicts the environment, where it is {found[name]!r}: leave "
                "it out under torchrun"
            )
        if value is not None:
            found[name] = value
    hosted = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    restarts = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Launch(
        "torchrun",
        **found,  # type: ignore[arg-type]
        hosted=hosted,
        restarts=int(restarts) if restarts.isdigit() else 0,
    )


def _of_arguments(
    environ: Mapping[str, str],
    given: Mapping[str, int | str | None],
    rank: int,
    world_size: int,
) -> Launch:
    if is_step(environ) and environ.get("SLURM_NTASKS") == str(world_size) != "1":
        task = _number(environ, "SLURM_PROCID")
        if task != rank:
            raise ValueError(
                f"rank={rank} contradicts SLURM_PROCID={task} (of {world_size}): leave out rank "
                "and world_size under srun"
            )
    filled = {name: value for name, value in given.items() if value is not None}
    filled.setdefault("master_addr", environ.get("MASTER_ADDR", "127.0.0.1"))
    if "master_port" not in filled:
        port = _number(environ, "MASTER_PORT") if "MASTER_PORT" in environ else DEFAULT_PORT
        filled["master_port"] = port
    return Launch("arguments", **filled)  # type: ignore[arg-type]


def _of_slurm(environ: Mapping[str, str], given: Mapping[str, int | str | None]) -> Launch:
    if environ.get("SLURM_HET_SIZE", "1") not in ("0", "1"):
        raise NotImplementedError(
            "a heterogeneous SLURM job numbers its tasks per component: start torchrun in it, or "
            "pass rank and world_size"
        )
    missing = [name for name in _SLURM if name not in environ and name != "SLURM_JOB_NODELIST"]
    if "SLURM_JOB_NODELIST" not in environ and "SLURM_STEP_NODELIST" not in environ:
        missing.append("SLURM_JOB_NODELIST")
    if missing:
        raise ValueError(
            f"SLURM's environment is incomplete: SLURM_PROCID is set, but not {', '.join(missing)}"
        )
    world_size = _number(
        environ, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    )
    hosts = expand_hosts(environ.get("SLURM_STEP_NODELIST") or environ["SLURM_JOB_NODELIST"])
    first = "127.0.0.1" if len(hosts) == 1 else hosts[0]
    local: int | str | None = given["local_world_size"]
    if local is None:
        local = _tasks_of_this_node(environ, len(hosts), world_size)
    master = given["master_addr"] or environ.get("MASTER_ADDR") or first
    port = given["master_port"] or (
        _number(environ, "MASTER_PORT") if "MASTER_PORT" in environ else default_port(environ)
    )
    local_rank = _number(environ, "SLURM_LOCALID")
    if given["local_rank"] not in (None, local_rank):
        raise ValueError(
            f"local_rank={given['local_rank']} contradicts SLURM_LOCALID={local_rank}: leave it out"
        )
    return Launch(
        "slurm",
        _number(environ, "SLURM_PROCID"),
        world_size,
        local_rank,
        None if local is None else int(local),
        str(master),
        int(port),
    )


def _tasks_of_this_node(environ: Mapping[str, str], hosts: int, world_size: int) -> int | None:
    if hosts == 1:
        return world_size
    text = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE")
    if text is None or "SLURM_NODEID" not in environ:
        return None
    tasks, node = expand_tasks(text), _number(environ, "SLURM_NODEID")
    if len(tasks) != hosts or node >= hosts or sum(tasks) != world_size:
        return None  # numbers of the job, while the step has fewer: the ranks will exchange theirs
    return tasks[node]


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise ValueError(f"{name}={environ[name]!r} must be a whole number") from None
