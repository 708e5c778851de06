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

import pyg_scale
from pyg_scale.cli.bench.dist_bandwidth import bandwidth
from pyg_scale.cli.bench.dist_link import limited
from pyg_scale.cli.bench.dist_methods import by_method
from pyg_scale.cli.bench.dist_shared import shared
from pyg_scale.cli.bench.sage import GraphSAGE
from pyg_scale.comm import Communicator, Fault, Faulty, connect
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
            found["bandwidth"] = bandwidth(self.comm, data, self.settings)
            if self.settings["link"]:
                with limited(self.comm, self.settings["link"]):
                    found["link"] = bandwidth(self.comm, data, self.settings)
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
        paths = self.settings["compared"]
        found["methods"] = by_method(self.comm, paths, self.settings, self._epoch)
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


if __name__ == "__main__":
    rank = Rank(json.loads(sys.argv[1]))
    torch.set_num_threads(rank.settings["threads"])
    try:
        print(json.dumps(rank.measure()), flush=True)
    finally:
        rank.comm.close()
