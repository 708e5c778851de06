"""What travels between ranks when a graph was partitioned by one method or another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pyg_scale
from pyg_scale.comm import Communicator

BATCH_SIZE, MOST_BATCHES = 128, 8  # of each rank: real graphs are small, and their rows long


def by_method(
    comm: Communicator,
    paths: Mapping[str, str],
    settings: Mapping[str, Any],
    epoch: Callable[..., dict[str, Any]],
) -> dict[str, dict[str, Any]]:
    """An epoch over each partition, without a cache and with one.

    Args:
        comm: The ranks; all of them call it.
        paths: The parts that each method made of one graph.
        settings: What ``pyg-scale bench dist`` was asked for.
        epoch: Runs over a share of a rank's nodes.

    Returns:
        By method, then ``"none"`` and ``"placed"``.
    """
    found: dict[str, dict[str, Any]] = {}
    how = {
        "batches": min(settings["batches"], MOST_BATCHES),
        "batch_size": min(settings["batch_size"], BATCH_SIZE),
        "train": False,
    }
    cached = {"cache_ratio": settings["cache"], "policy": "placed"}
    for method, path in paths.items():
        with pyg_scale.open(path, comm=comm, through="requests") as data:
            found[method] = {
                "none": epoch(data, **how),
                "placed": epoch(data, **how, **cached),
            }
    return found
