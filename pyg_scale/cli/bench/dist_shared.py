"""Ranks of one machine that share its mappings, against one process with as many threads."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch

import pyg_scale
from pyg_scale.comm import Communicator
from pyg_scale.loader import NeighborLoader


def shared(comm: Communicator, settings: dict[str, Any]) -> dict[str, Any]:
    """Seconds of the same epoch by all ranks together and by rank 0 alone, in turns.

    The batches are the same, dealt out among the ranks; what they are made of is in files that are
    mapped, those of the parts or those of the whole graph. Nothing is trained.

    Args:
        comm: The ranks; all of them call it.
        settings: What ``pyg-scale bench dist`` was asked for.
    """
    batches = comm.world_size * settings["shared_batches"]
    found: dict[str, Any] = {"batches": batches, "ranks": [], "one": []}
    with pyg_scale.open(settings["path"], comm=comm) as data:
        generator = torch.Generator().manual_seed(settings["seed"])
        seeds = torch.randperm(data.num_nodes, generator=generator)
        seeds = seeds[: batches * settings["batch_size"]]
        one: Any = ()
        if comm.rank == 0:
            whole = pyg_scale.open(settings["whole"], comm="local")
            workers = comm.world_size * settings["threads"]
            one = _loader(whole, seeds, settings, workers, split_seeds=False)
        ranks = _loader(data, seeds, settings, settings["threads"])
        for turn in range(1 + settings["rounds"]):  # the first one warms up
            for name, loader in (("ranks", ranks), ("one", one)):
                seconds = _epoch(comm, loader)
                if turn:
                    found[name].append(seconds)
    return found


def _loader(
    data: Any, seeds: torch.Tensor, settings: dict[str, Any], workers: int, **options: Any
) -> NeighborLoader:
    return NeighborLoader(
        data,
        settings["num_neighbors"],
        input_nodes=seeds,
        batch_size=settings["batch_size"],
        seed=settings["seed"],
        num_workers=workers,
        **options,
    )


def _epoch(comm: Communicator, loader: Iterable[Any]) -> float:
    comm.barrier()
    start = time.perf_counter()
    for _ in loader:
        pass
    comm.barrier()
    return time.perf_counter() - start
