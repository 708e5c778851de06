"""One side of ``pyg-scale bench store``: a process that trains an epoch whenever it is told to.

It prints a line of JSON when it is ready and after every epoch, and ends with its input.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data

import pyg_scale
from pyg_scale.cli.bench import memory
from pyg_scale.cli.bench.sage import GraphSAGE
from pyg_scale.loader import NeighborLoader
from pyg_scale.store import Disk


class Side:
    """A loader over a graph directory, and a model.

    Args:
        path: The directory, with ``x`` and ``y``.
        cache: Bytes of the cache in front of the files; 0 for everything in memory.
        read_ahead: Bytes for rows that are read before they are used.
        policy: Of the cache.
        batches: Batches of an epoch.
        batch_size: Seeds of a batch.
        num_neighbors: Of the loader.
        hidden: Channels of the model.
        workers: Of the loader.
        prefetch: Of the loader, for each worker.
        trim: Whether each layer works on the nodes and edges that are still needed only.
        seed: Of the loader and of the model.
    """

    def __init__(
        self,
        path: str,
        cache: int,
        read_ahead: int,
        policy: str,
        batches: int,
        batch_size: int,
        num_neighbors: list[int],
        hidden: int,
        workers: int,
        prefetch: int,
        trim: bool = False,
        seed: int = 0,
    ) -> None:
        opened = pyg_scale.open(path)
        self.store = None
        if cache:
            data: Any = opened
            hot = "degree" if policy == "placed" else None
            self.store = Disk(path, cache, policy, hot, attributes=["x"], read_ahead=read_ahead)
        else:
            data = Data(
                x=opened.x.clone(), y=opened.y.clone(), edge_index=opened.edge_index.clone()
            )
        del opened
        generator = torch.Generator().manual_seed(seed)
        nodes = torch.randperm(data.num_nodes, generator=generator)[: batches * batch_size]
        self.loader = NeighborLoader(
            data,
            num_neighbors,
            input_nodes=nodes,
            batch_size=batch_size,
            shuffle=True,
            seed=seed,
            num_workers=workers,
            prefetch_factor=prefetch if workers else None,
            persistent_workers=bool(workers),
            feature_store=self.store,
        )
        self.trim = trim
        torch.manual_seed(seed)
        self.model = GraphSAGE(data.x.size(1), hidden, int(data.y.max()) + 1)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.003)

    def epoch(self) -> dict[str, Any]:
        """Train on every batch once; plain values."""
        before, total, nodes, count = self._counts(), 0.0, 0, 0
        start, first = time.perf_counter(), 0.0
        for batch in self.loader:
            first = first or time.perf_counter() - start
            total += self._step(batch)
            nodes += batch.num_nodes
            count += 1
        seconds = time.perf_counter() - start
        found: dict[str, Any] = {
            "seconds": seconds,
            "first_batch": first,
            "batches": count,
            "nodes": nodes,
            "loss": total / count,
            "stages": self.loader.stats()["epoch"],
            "resident": memory.resident(),
        }
        for name, value in self._counts().items():
            found[name] = value - before[name]
        return found

    def _step(self, batch: Any) -> float:
        size = batch.batch_size
        out = self._forward(batch)[:size]
        loss = F.cross_entropy(out, batch.y[:size])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def _forward(self, batch: Any) -> Tensor:
        hops = (batch.num_sampled_nodes, batch.num_sampled_edges) if self.trim else ()
        return self.model(batch.x.float(), batch.edge_index, *hops)

    def _counts(self) -> dict[str, int]:
        if self.store is None:
            return {}
        names = ("hits", "misses", "late", "evictions", "reads", "read_bytes")
        stats = self.store.stats()
        return {name: stats[name] for name in names}


def main(argv: list[str]) -> int:
    """Serve epochs until the input ends."""
    side = Side(**json.loads(argv[0]))
    direct = None if side.store is None else side.store.direct
    print(json.dumps({"ready": True, "resident": memory.resident(), "direct": direct}), flush=True)
    for _ in sys.stdin:
        found = side.epoch()
        if side.store is not None:
            stats = side.store.stats()
            found |= {name: stats[name] for name in ("direct", "cached_bytes", "index_bytes")}
        print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
