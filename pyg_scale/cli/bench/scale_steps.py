"""The steps of ``pyg-scale bench scale``, each in a process of its own that prints JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import pyg_scale
from pyg_scale import plugins
from pyg_scale.cli.bench import memory
from pyg_scale.cli.bench.sage import GraphSAGE
from pyg_scale.loader import NeighborLoader

STREAMING = {"order": "natural", "refine": 0}
"""Options of streaming partitioners that read the edges from one end to the other, as a graph on
disk that is larger than memory needs; other orders, and moves of single nodes, read here and there.
"""


def partition(path: str, num_parts: int, method: str, out: str) -> dict[str, Any]:
    """Assign the nodes to parts; the assignment is kept as ``.npy``."""
    made = plugins.get("partitioner", method)
    partitioner = made(**STREAMING) if method in ("fennel", "ldg") else made()
    start = time.perf_counter()
    assignment = pyg_scale.partition(path, num_parts, method=partitioner)
    seconds = time.perf_counter() - start
    np.save(out, assignment.numpy())
    data = pyg_scale.open(path)
    sizes = torch.bincount(assignment, minlength=num_parts)
    return {
        "options": partitioner.options(),
        "seconds": seconds,
        "balance": float(sizes.max() * num_parts / sizes.sum()),
        "cut": _cut(data, assignment),
    }


def _cut(data: Any, assignment: Tensor, sample: int = 20_000_000) -> float:
    """The share of cut edges, of all or of evenly spaced pieces of a large graph."""
    from pyg_scale.store.topology import topology_of

    csc = topology_of(data).csc[None]
    total, cut, pieces = 0, 0, 64
    size = csc.num_edges
    width = min(-(-size // pieces), sample // pieces)
    for begin in range(0, size, max(1, size // pieces)):
        position = torch.arange(begin, min(begin + width, size))
        node = torch.searchsorted(csc.indptr, position, right=True) - 1
        neighbor = csc.indices[begin : begin + position.numel()].long()
        cut += int((assignment[node] != assignment[neighbor]).sum())
        total += position.numel()
    return cut / max(1, total)


def train(
    path: str, cache: str, batches: int, warmup: int, num_neighbors: list[int], hidden: int
) -> dict[str, Any]:
    """Train on batches whose features come from disk through a bounded cache."""
    start = time.perf_counter()
    data = pyg_scale.open(path)
    opened = time.perf_counter() - start
    torch.manual_seed(0)
    # Labels stay mapped: to know which of them are cached would take more than they do.
    store = plugins.get("feature_store", "disk")(path, cache=cache, attributes=["x"])
    loader = NeighborLoader(
        data,
        num_neighbors=num_neighbors,
        input_nodes=data.index_set("train"),
        batch_size=1024,
        shuffle=True,
        seed=0,
        num_workers=2,
        feature_store=store,
    )
    num_classes = int(data.y.max()) + 1
    model = GraphSAGE(data.num_features, hidden, num_classes)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    losses, correct, seen = [], 0, 0
    clock = time.perf_counter()
    for number, batch in enumerate(islice(loader, warmup + batches)):
        if number == warmup:
            clock = time.perf_counter()
        size = batch.batch_size
        hops = batch.num_sampled_nodes, batch.num_sampled_edges
        out = model(batch.x.float(), batch.edge_index, *hops)[:size]
        loss = F.cross_entropy(out, batch.y[:size])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        if number >= warmup + batches // 2:
            correct += int((out.argmax(1) == batch.y[:size]).sum())
            seen += size
    seconds = time.perf_counter() - clock
    return {
        "open_seconds": opened,
        "batches": len(losses) - warmup,
        "seconds": seconds,
        "batches_per_s": (len(losses) - warmup) / seconds,
        "first_loss": losses[0],
        "last_loss": sum(losses[-10:]) / 10,
        "accuracy_of_the_second_half": correct / max(1, seen),
        "loader": loader.stats()["total"],
        "store": _plain(store.stats()) if hasattr(store, "stats") else None,
    }


def _plain(value: Any) -> Any:
    if hasattr(value, "_asdict"):
        return value._asdict()
    return value if isinstance(value, dict) else str(value)


STEPS: dict[str, Callable[..., dict[str, Any]]] = {"partition": partition, "train": train}


def main(argv: list[str]) -> int:
    """Run one step; the last line of the output is its result as JSON."""
    name, arguments = argv[0], json.loads(argv[1])
    found = STEPS[name](**arguments)
    found["peak_resident"] = memory.peak()
    print(json.dumps(found))
    return 0


def command(name: str, **arguments: Any) -> list[str]:
    """The command line that runs a step."""
    module = "pyg_scale.cli.bench.scale_steps"
    plain = {k: str(v) if isinstance(v, Path) else v for k, v in arguments.items()}
    return [sys.executable, "-m", module, name, json.dumps(plain)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
