"""One rank of ``pyg-scale bench dist``; all ranks run the same measurements together."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch

import pyg_scale
from pyg_scale.comm import Communicator, Fault, Faulty, connect
from pyg_scale.loader import NeighborLoader
from pyg_scale_bench.dist_network import bandwidth, limited
from pyg_scale_bench.training import Trainer

STAGES = ("sample", "fetch", "wait", "train")
METHOD_BATCH_SIZE, _METHOD_BATCHES = 128, 8  # of each rank: real graphs are small, with long rows


def measured(settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The measurements of this rank, once.

    Args:
        settings: The options of ``pyg-scale bench dist``, and the paths of the parts.
    """
    torch.set_num_threads(settings["threads"])
    rank = Rank(settings)
    try:
        yield rank.measure()
    finally:
        rank.comm.close()


class Rank:
    """A rank and its measurements.

    Args:
        settings: The options of ``pyg-scale bench dist``.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.comm = connect("gloo", timeout=settings["timeout"])

    def measure(self) -> dict[str, Any]:
        """Run all measurements; returns plain values."""
        settings = self.settings
        found: dict[str, Any] = {"rank": self.comm.rank, "in_flight": {}}
        with self._opened(settings["path"], self.comm) as data:
            found["bandwidth"] = bandwidth(self.comm, data, settings)
            if settings["link"]:
                with limited(self.comm, settings["link"]):
                    found["link"] = bandwidth(self.comm, data, settings)
            found["caches"] = {
                cache: self._epoch(
                    data, settings["batches"], settings["batch_size"], train=True,
                    **self._cache(cache),
                )
                for cache in ("none", "placed", "belady")
            }  # fmt: skip
        for number in (1, settings["in_flight"]):
            delay = Fault("delay", None, settings["latency"], of="request")
            with self._opened(settings["path"], Faulty(self.comm, [delay])) as data:
                found["in_flight"][str(number)] = self._epoch(
                    data, settings["latency_batches"], settings["latency_batch_size"],
                    workers=0 if number == 1 else number, in_flight=number,
                )  # fmt: skip
        found["shared"] = self._shared()
        found["methods"] = {
            method: self._by_method(path) for method, path in settings["compared"].items()
        }
        return found

    def _opened(self, path: str, comm: Communicator) -> Any:
        return pyg_scale.open(path, comm=comm, through="requests")

    def _cache(self, policy: str) -> dict[str, Any]:
        if policy == "none":
            return {}
        return {"cache_ratio": self.settings["cache"], "policy": policy}

    def _by_method(self, path: str) -> dict[str, Any]:
        """Epochs over the parts made by a method, without and with a cache."""
        size = min(self.settings["batch_size"], METHOD_BATCH_SIZE)
        batches = min(self.settings["batches"], _METHOD_BATCHES)
        with self._opened(path, self.comm) as data:
            return {
                cache: self._epoch(data, batches, size, **self._cache(cache))
                for cache in ("none", "placed")
            }

    def _loader(self, data: Any, seeds: torch.Tensor, batch_size: int, **options: Any) -> Any:
        settings = self.settings
        return NeighborLoader(
            data, settings["num_neighbors"], input_nodes=seeds, batch_size=batch_size,
            seed=settings["seed"], **options,
        )  # fmt: skip

    def _shuffled(self, nodes: torch.Tensor, count: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.settings["seed"])
        return nodes[torch.randperm(nodes.numel(), generator=generator)[:count]]

    # Epochs ################################################################################

    def _epoch(
        self,
        data: Any,
        batches: int,
        batch_size: int,
        *,
        train: bool = False,
        workers: int = 0,
        **options: Any,
    ) -> dict[str, Any]:
        """An epoch over a share of this rank's nodes."""
        settings = self.settings
        features = data.rank_features(**options)
        nodes = torch.cat([data.graph_directory.part(p).orig_id(None) for p in data.owners.owned()])
        loader = self._loader(
            data, self._shuffled(nodes, batches * batch_size), batch_size,
            feature_store=features, num_workers=workers,
            split_seeds=False,  # each rank has its own nodes
        )  # fmt: skip
        sizes = settings["features"], settings["hidden"], settings["classes"]
        trainer = Trainer(*sizes, seed=settings["seed"]) if train else None
        self.comm.barrier()
        timeline, start, before = [], time.perf_counter(), dict.fromkeys(STAGES, 0.0)
        for batch in loader:
            begin = time.perf_counter()
            if trainer is not None:
                trainer.step(batch)
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
            "batches": len(timeline),
            "seconds": seconds,
            "fetch": {k: v for k, v in fetch.items() if k not in ("seconds", "rows", "bytes")},
            "rows": fetch["rows"],
            "bytes": fetch["bytes"],
            "timeline": timeline,
        }

    def _shared(self) -> dict[str, Any]:
        """Seconds of the same epoch on all ranks together and on rank 0 alone, in turns.

        The batches are the same, divided among the ranks, and are made from mapped files of the
        parts or of the whole graph. Nothing is trained.
        """
        comm, settings = self.comm, self.settings
        size, threads = settings["batch_size"], settings["threads"]
        batches = comm.world_size * settings["shared_batches"]
        found: dict[str, Any] = {"batches": batches, "ranks": [], "one": []}
        with pyg_scale.open(settings["path"], comm=comm) as data:
            seeds = self._shuffled(torch.arange(data.num_nodes), batches * size)
            one: Iterable[Any] = ()
            if comm.rank == 0:
                whole = pyg_scale.open(settings["whole"], comm="local")
                workers = comm.world_size * threads
                one = self._loader(whole, seeds, size, num_workers=workers, split_seeds=False)
            ranks = self._loader(data, seeds, size, num_workers=threads)
            for turn in range(1 + settings["rounds"]):  # the first one warms up
                for name, loader in (("ranks", ranks), ("one", one)):
                    comm.barrier()
                    start = time.perf_counter()
                    for _ in loader:
                        pass
                    comm.barrier()
                    if turn:
                        found[name].append(time.perf_counter() - start)
        return found
