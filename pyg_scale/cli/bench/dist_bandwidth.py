"""Rows of other ranks, beside what plain sockets and gloo carry between the same processes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import TensorAttr

from pyg_scale.cli.bench.dist_gloo import Exchange
from pyg_scale.cli.bench.dist_tcp import Ring
from pyg_scale.comm import Communicator
from pyg_scale.distributed.features import RankFeatures

WAYS = ("tcp", "features", "gloo")
"""Plain sockets, rows of features, ``all_to_all`` of gloo."""


def bandwidth(comm: Communicator, data: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Bytes per second that come to this rank, of rows of the next rank's nodes and otherwise.

    And seconds of the processor per byte, which hardly depend on who else uses it. All ranks send
    and receive at the same time, as many bytes each way; ways take turns.

    Args:
        comm: The ranks; all of them call it.
        data: The graph, opened with ``through="requests"``.
        settings: What ``pyg-scale bench dist`` was asked for.
    """
    features = data.rank_features(attributes=["x"], in_flight=settings["in_flight"])
    part = data.graph_directory.books[None].part_of(torch.arange(data.num_nodes))
    to = torch.tensor([data.owners.ask(p) for p in range(data.owners.num_parts)])
    others = (to[part] == (comm.rank + 1) % comm.world_size).nonzero().view(-1)
    rows = min(settings["rows"], others.numel())
    generator = torch.Generator().manual_seed(comm.rank)
    batches = [
        others[torch.randperm(others.numel(), generator=generator)[:rows]]
        for _ in range(settings["messages"])
    ]
    row_bytes = settings["features"] * 4
    num_bytes = len(batches) * rows * row_bytes
    ring, exchange = Ring(comm, rows * row_bytes), Exchange(comm, rows * row_bytes)
    run: dict[str, Callable[[], object]] = {
        "tcp": lambda: ring.turn(len(batches)),
        "features": lambda: _read(features, batches),
        "gloo": lambda: exchange.turn(len(batches)),
    }
    found: dict[str, Any] = {"rows": rows}
    found |= {name: [] for way in WAYS for name in (way, f"{way}_cpu")}
    try:
        for turn in range(1 + settings["rounds"]):  # the first one warms up
            for way in WAYS:
                comm.barrier()
                start, before = time.perf_counter(), time.process_time()
                run[way]()
                seconds = time.perf_counter() - start
                comm.barrier()  # what this rank sent has come, too
                if turn:
                    found[way].append(num_bytes / seconds)
                    found[f"{way}_cpu"].append((time.process_time() - before) / num_bytes)
    finally:
        ring.close()
    return found


def _read(features: RankFeatures, batches: list[Tensor]) -> None:
    """Read rows with several batches in flight, as loaders do."""
    with contextlib.closing(features.schedule()) as schedule:
        asked = 0
        for number, index in enumerate(batches):
            while asked < len(batches) and not (
                asked > number and schedule.suffices(asked - number - 1)
            ):
                schedule.announce(asked, [TensorAttr(None, "x", batches[asked])])
                asked += 1
            with schedule.serving(number):
                features.multi_get_tensor([TensorAttr(None, "x", index)])
