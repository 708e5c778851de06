"""One rank of ``pyg-scale bench dist``: all ranks go through the same measurements together.

It prints one line of JSON at its end.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import TensorAttr

import pyg_scale
from pyg_scale.cli.bench.dist_shared import shared
from pyg_scale.cli.bench.dist_tcp import Ring
from pyg_scale.cli.bench.sage import GraphSAGE
from pyg_scale.comm import Communicator, Fault, Faulty, connect
from pyg_scale.distributed.features import RankFeatures
from pyg_scale.loader import NeighborLoader

STAGES = ("sample", "fetch", "wait", "train")


class Rank:
    """A rank and what it measures.

    Args:
        settings: What ``pyg-scale bench dist`` was asked for.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.comm = connect("gloo", timeout=settings["timeout"])

    def measure(self) -> dict[str, Any]:
        """Everything, one after the other; plain values."""
        found: dict[str, Any] = {"rank": self.comm.rank}
        with self._opened(self.comm) as data:
            found["bandwidth"] = self._bandwidth(data)
            found["caches"] = {
                name: self._epoch(
                    data,
                    batches=self.settings["batches"],
                    batch_size=self.settings["batch_size"],
                    **options,
                )
                for name, options in self._caches().items()
            }
        found["in_flight"] = {}
        for batches in (1, self.settings["in_flight"]):
            delay = Fault("delay", None, self.settings["latency"], of="request")
            with self._opened(Faulty(self.comm, [delay])) as data:
                found["in_flight"][str(batches)] = self._epoch(
                    data,
                    in_flight=batches,
                    workers=0 if batches == 1 else batches,
                    batches=self.settings["latency_batches"],
                    batch_size=self.settings["latency_batch_size"],
                    train=False,
                )
        found["shared"] = shared(self.comm, self.settings)
        return found

    def _caches(self) -> dict[str, dict[str, Any]]:
        ratio = self.settings["cache"]
        return {
            "none": {},
            "placed": {"cache_ratio": ratio, "policy": "placed"},
            "belady": {"cache_ratio": ratio, "policy": "belady"},
        }

    @contextlib.contextmanager
    def _opened(self, comm: Communicator) -> Any:
        with pyg_scale.open(self.settings["path"], comm=comm, through="requests") as data:
            yield data

    # Rows of other ranks, against plain sockets ############################################

    def _bandwidth(self, data: Any) -> dict[str, Any]:
        """Bytes per second that come, of rows of the next rank's nodes and of plain sockets.

        And seconds of the processor per byte, which hardly depend on who else uses it.
        """
        rows = self.settings["rows"]
        features = data.rank_features(attributes=["x"], in_flight=self.settings["in_flight"])
        part = data.graph_directory.books[None].part_of(torch.arange(data.num_nodes))
        to = torch.tensor([data.owners.ask(p) for p in range(data.owners.num_parts)])
        others = (to[part] == (self.comm.rank + 1) % self.comm.world_size).nonzero().view(-1)
        rows = min(rows, others.numel())
        generator = torch.Generator().manual_seed(self.comm.rank)
        batches = [
            others[torch.randperm(others.numel(), generator=generator)[:rows]]
            for _ in range(self.settings["messages"])
        ]
        row_bytes = self.settings["features"] * 4
        ring = Ring(self.comm, rows * row_bytes)
        num_bytes = len(batches) * rows * row_bytes
        names = ("tcp", "features", "tcp_cpu", "features_cpu")
        found: dict[str, Any] = {"rows": rows, **{name: [] for name in names}}
        try:
            for turn in range(1 + self.settings["rounds"]):  # the first one warms up
                for name, run in (
                    ("tcp", lambda: ring.turn(len(batches))),
                    ("features", lambda: _read(features, batches) * row_bytes),
                ):
                    self.comm.barrier()
                    before = time.process_time()
                    speed = run()
                    self.comm.barrier()  # what this rank sent has come, too
                    if turn:
                        found[name].append(speed)
                        found[f"{name}_cpu"].append((time.process_time() - before) / num_bytes)
        finally:
            ring.close()
        return found

    # Epochs ################################################################################

    def _epoch(
        self,
        data: Any,
        *,
        batches: int,
        batch_size: int,
        train: bool = True,
        workers: int = 0,
        **options: Any,
    ) -> dict[str, Any]:
        """An epoch over a share of this rank's nodes."""
        settings = self.settings
        features = data.rank_features(**options)
        nodes = torch.cat([data.graph_directory.part(p).orig_id(None) for p in data.owners.owned()])
        generator = torch.Generator().manual_seed(settings["seed"])
        nodes = nodes[torch.randperm(nodes.numel(), generator=generator)]
        loader = NeighborLoader(
            data,
            settings["num_neighbors"],
            input_nodes=nodes[: batches * batch_size],
            batch_size=batch_size,
            seed=settings["seed"],
            feature_store=features,
            num_workers=workers,
            split_seeds=False,  # each rank has nodes of its own
        )
        step = self._trainer() if train else None
        self.comm.barrier()
        timeline, start, before = [], time.perf_counter(), dict.fromkeys(STAGES, 0.0)
        count = 0
        for batch in loader:
            count += 1
            begin = time.perf_counter()
            if step is not None:
                step(batch)
            stages = loader.stats()["epoch"]
            now = {name: stages[name]["seconds"] for name in ("sample", "fetch", "wait")}
            spent = {name: now[name] - before[name] for name in now}
            before.update(now)
            end = time.perf_counter()
            timeline.append({**spent, "train": end - begin, "end": end - start})
        seconds = time.perf_counter() - start
        fetch = loader.stats()["epoch"]["fetch"]
        self.comm.barrier()
        return {
            "batches": count,
            "seconds": seconds,
            "fetch": {k: v for k, v in fetch.items() if k not in ("seconds", "rows", "bytes")},
            "rows": fetch["rows"],
            "bytes": fetch["bytes"],
            "timeline": timeline,
        }

    def _trainer(self) -> Callable[[Any], None]:
        torch.manual_seed(self.settings["seed"])
        model = GraphSAGE(
            self.settings["features"], self.settings["hidden"], self.settings["classes"]
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=0.003)

        def step(batch: Any) -> None:
            out: Tensor = model(batch.x, batch.edge_index)[: batch.batch_size]
            loss = F.cross_entropy(out, batch.y[: batch.batch_size])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        return step


def _read(features: RankFeatures, batches: list[Tensor]) -> float:
    """Rows per second, with several batches in flight, as loaders read."""
    start = time.perf_counter()
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
    return sum(index.numel() for index in batches) / (time.perf_counter() - start)


if __name__ == "__main__":
    rank = Rank(json.loads(sys.argv[1]))
    torch.set_num_threads(rank.settings["threads"])
    try:
        print(json.dumps(rank.measure()), flush=True)
    finally:
        rank.comm.close()
