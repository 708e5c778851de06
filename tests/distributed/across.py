"""Graphs in parts, each rank with a directory of its own parts only."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyg_scale
from pyg_scale.comm import Communicator, Group
from pyg_scale.comm.gloo import Gloo
from pyg_scale.distributed.owners import share_out
from pyg_scale.testing.ranks import run_ranks


def in_parts(
    data: Any,
    folder: Path,
    num_parts: int,
    method: str = "random",
    strategy: str = "by_dst",
    **saved: Any,
) -> Path:
    """A partitioned directory of a graph in memory.

    Args:
        data: The graph.
        folder: Where it goes.
        num_parts: Number of parts.
        method: The partitioner.
        strategy: ``"by_dst"`` or ``"by_src"``.
        saved: Options of ``pyg_scale.save``.
    """
    whole, path = folder / "whole", folder / f"{method}-{num_parts}-{strategy}"
    if not whole.exists():
        pyg_scale.save(data, whole, **saved)
    if not path.exists():
        pyg_scale.partition(
            whole, num_parts, path=path, method=method, edge_assign_strategy=strategy
        )
    return path


def shares(world_size: int, num_parts: int) -> list[list[int]]:
    """The parts that each rank is to have; some ranks may have the same."""
    everything = [range(num_parts)] * world_size
    answer = share_out(everything, num_parts)
    return [[p for p in range(num_parts) if rank in answer[p]] for rank in range(world_size)]


def spread(path: Path, parts: Sequence[Sequence[int]]) -> list[Path]:
    """For each rank a directory that has only its parts."""
    out = []
    for rank, mine in enumerate(parts):
        target = path.parent / f"{path.name}-rank-{rank}-of-{len(parts)}"

        def left_out(folder: str, names: list[str], mine: Sequence[int] = mine) -> list[str]:
            if Path(folder) != path:
                return []
            keep = {f"part-{part}" for part in mine}
            return [name for name in names if name.startswith("part-") and name not in keep]

        if not target.exists():
            shutil.copytree(path, target, ignore=left_out, copy_function=os.link)
        out.append(target)
    return out


def on_ranks(
    paths: Sequence[Path],
    function: Callable[[Any], Any],
    *,
    wrap: Callable[[Communicator], Communicator] = lambda comm: comm,
    timeout: float = 30.0,
    **options: Any,
) -> list[Any]:
    """What ``function`` returns for the graph that all ranks opened, one after the other.

    Args:
        paths: The directory of each rank.
        function: Takes the opened graph.
        wrap: Makes another communicator of that of each rank.
        timeout: Seconds that ranks wait for each other.
        options: Of ``pyg_scale.open``.
    """

    def work(group: Group) -> Any:
        with (
            wrap(Gloo.join(group)) as comm,
            pyg_scale.open(paths[group.rank], comm=comm, **options) as data,
        ):
            return function(data)

    return run_ranks(len(paths), work, timeout=timeout)
