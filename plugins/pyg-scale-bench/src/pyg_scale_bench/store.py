"""Training with features on disk compared with training in memory, epoch by epoch in one run.

Two processes train the same model on the same batches of a generated graph: one has everything in
memory; the other reads features from the graph directory through a cache of a share of them, and
its memory, page cache included, is limited by a control group to less than the files. They take
turns, so that a slow minute affects both alike. The report says if memory could not be limited, and
if reads bypassed the page cache (``O_DIRECT``).
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch_geometric.data import Data

import pyg_scale
from pyg_scale.loader import NeighborLoader
from pyg_scale.store import Disk
from pyg_scale.store.cache.cached import POLICIES
from pyg_scale_bench import memory
from pyg_scale_bench.benchmark import FOLDER, Benchmark, Option, count, size_of
from pyg_scale_bench.chart import Bar, Panel
from pyg_scale_bench.child import Child, call
from pyg_scale_bench.graphs import REUSE, converted, reused
from pyg_scale_bench.report import GB, Report, Table, listed, number
from pyg_scale_bench.training import Trainer

_CLASSES = 47  # as of ogbn-products
_SIDES = {"memory": "everything in memory", "disk": "features on disk"}
_COUNTS = ("hits", "misses", "late", "evictions", "reads", "read_bytes")
_NOW = ("direct", "cached_bytes", "index_bytes")


# Measuring ################################################################################


def measure(args: argparse.Namespace, found: dict[str, Any]) -> None:
    """Make the graph, and train both sides in turns."""
    graph = Path(args.dir).absolute() / "graph"
    if not reused(args, found):
        names = ("nodes", "edges", "features", "dtype")
        values = {name: getattr(args, name) for name in names} | {"classes": _CLASSES}
        call(converted, {"path": str(graph), "values": values})
    features = (graph / "part-0/nodes/attributes/x.npy").stat().st_size
    ahead = args.cache if args.read_ahead is None else args.read_ahead
    found |= {"file_bytes": size_of(graph), "feature_bytes": features}
    found |= {"cache_bytes": int(args.cache * features), "read_ahead_bytes": int(ahead * features)}
    found |= {"limit_bytes": args.limit or int(0.9 * found["file_bytes"])}
    found |= {"limited": True, "memory": [], "disk": []}
    common = {name: found["settings"][name] for name in _TRAINING}
    common |= {"path": str(graph), "read_ahead": found["read_ahead_bytes"]}
    group = None
    with contextlib.ExitStack() as stack:
        try:
            group = stack.enter_context(memory.MemoryLimit(found["limit_bytes"]))
        except OSError as error:
            found |= {"limited": False, "why_not": str(error)}
        sides: dict[str, Child] = {}
        for name, cache in (("disk", found["cache_bytes"]), ("memory", 0)):
            limit = group if cache else None
            child = Child(epochs, {**common, "cache": cache}, group=limit, seconds=3600)
            sides[name] = stack.enter_context(child)
            child.next()  # it is ready
        for turn in range(args.warmup + args.rounds):
            for name, side in sides.items():
                print(f"epoch {turn + 1}: {name}", file=sys.stderr)
                more = {"warmup": turn < args.warmup, "load_average": memory.load_average()}
                found[name].append(side.next() | more)
        found["peak_with_page_cache"] = None if group is None else group.peak()


def epochs(
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
    trim: bool,
    seed: int = 0,
) -> Iterator[dict[str, Any]]:
    """One side: train epoch after epoch on every batch.

    Args:
        path: The directory, with ``x`` and ``y``.
        cache: Size in bytes of the cache of the files; 0 for everything in memory.
        read_ahead: Bytes for rows that are read ahead.
        policy: Policy of the cache.
        batches: Batches of an epoch.
        batch_size: Seeds of a batch.
        num_neighbors: Neighbours per hop of the loader.
        hidden: Channels of the model.
        workers: Number of workers of the loader.
        prefetch: Number of batches that the loader prefetches for each worker.
        trim: If True, each layer works only on the nodes and edges that are still needed.
        seed: Seed of the loader and of the model.

    Yields:
        An empty dictionary when it is ready, then plain values of each epoch.
    """
    data: Any = pyg_scale.open(path)
    store = None
    if cache:
        hot = "degree" if policy == "placed" else None
        store = Disk(path, cache, policy, hot, attributes=["x"], read_ahead=read_ahead)
    else:
        data = Data(x=data.x.clone(), y=data.y.clone(), edge_index=data.edge_index.clone())
    generator = torch.Generator().manual_seed(seed)
    nodes = torch.randperm(data.num_nodes, generator=generator)[: batches * batch_size]
    loader = NeighborLoader(
        data,
        num_neighbors,
        input_nodes=nodes,
        batch_size=batch_size,
        shuffle=True,
        seed=seed,
        num_workers=workers,
        prefetch_factor=prefetch if workers else None,
        persistent_workers=bool(workers),
        feature_store=store,
    )
    classes, layers = int(data.y.max()) + 1, len(num_neighbors)
    trainer = Trainer(data.x.size(1), hidden, classes, layers=layers, trim=trim, seed=seed)
    yield {}
    while True:
        before = {} if store is None else {name: store.stats()[name] for name in _COUNTS}
        found = _epoch(loader, trainer)
        if store is not None:
            stats = store.stats()
            found |= {name: stats[name] - before[name] for name in _COUNTS}
            found |= {name: stats[name] for name in _NOW}
        yield found


def _epoch(loader: NeighborLoader, trainer: Trainer) -> dict[str, Any]:
    total, nodes, number = 0.0, 0, 0
    start, first = time.perf_counter(), 0.0
    for batch in loader:
        first = first or time.perf_counter() - start
        total += float(trainer.step(batch)[0])
        nodes += batch.num_nodes
        number += 1
    return {
        "seconds": time.perf_counter() - start,
        "first_batch": first,
        "batches": number,
        "nodes": nodes,
        "loss": total / number,
        "stages": loader.stats()["epoch"],
        "resident": memory.resident(),
    }


# Report ###################################################################################


def counted(found: Mapping[str, Any], side: str) -> list[dict[str, Any]]:
    """The epochs of a side after warm-up."""
    return [epoch for epoch in found[side] if not epoch["warmup"]]


def ratios(found: Mapping[str, Any]) -> list[float]:
    """The factor by which each epoch took longer with features on disk, by round."""
    sides = zip(counted(found, "disk"), counted(found, "memory"))
    return [disk["seconds"] / memory["seconds"] for disk, memory in sides]


def report(found: Mapping[str, Any]) -> Report:
    """The report of the results."""
    settings, disk, ratio = found["settings"], counted(found, "disk"), ratios(found)
    through = "past the page cache" if disk[-1]["direct"] else "THROUGH THE PAGE CACHE"
    limit = f"{found['limit_bytes'] / GB:.2f} GB, page cache included"
    if found.get("peak_with_page_cache"):
        limit += f" (at most {found['peak_with_page_cache'] / GB:.2f} GB were in use)"
    limit += "" if found["limited"] else f"; NOT ENFORCED: {found['why_not']}"
    total = {name: sum(epoch[name] for epoch in disk) for name in ("batches", "nodes", *_COUNTS)}
    trimmed = ", layers trimmed" if settings["trim"] else ""
    loads = [epoch["load_average"] for side in _SIDES for epoch in found[side]]
    lines = [
        (
            f"an epoch with features on disk takes {median(ratio):.2f} times one in memory "
            f"(rounds: {listed(ratio, '.2f')})"
        ),
        (
            f"graph: generated, power law, planted communities: {settings['nodes']:,} nodes, "
            f"{settings['edges']:,} directed edges, {settings['features']} {settings['dtype']} "
            f"features; {found['file_bytes'] / GB:.2f} GB of files"
        ),
        f"memory limit of the side with features on disk: {limit}",
        (
            f"cache: {found['cache_bytes'] / GB:.2f} GB, {settings['cache']:.0%} of the features, "
            f"policy {settings['policy']}; {total['hits'] / (total['hits'] + total['misses']):.0%} "
            f"of the rows were in it; {disk[-1]['index_bytes'] / 1e6:.0f} MB to know which; at "
            f"most {found['read_ahead_bytes'] / GB:.2f} GB of rows that are read before they are "
            "used"
        ),
        (
            f"reads: {through}, {total['read_bytes'] / len(disk) / GB:.1f} GB an epoch in "
            f"{total['reads'] // len(disk):,} reads"
        ),
        (
            f"training: {_layers(settings)} GraphSAGE, {settings['hidden']} hidden{trimmed}, "
            f"{settings['batches']} batches of {settings['batch_size']} seeds, num_neighbors "
            f"{settings['num_neighbors']}, {settings['workers']} worker threads; a batch has "
            f"{total['nodes'] / total['batches']:,.0f} nodes"
        ),
        f"load average during the epochs: {min(loads)} to {max(loads)}; they alone are 2 to 4",
    ]
    header = ["", "epoch", "seconds", "first batch", "sample", "fetch", "wait", "hits", "misses"]
    header += ["GB read", "loss", "resident", "load"]
    each = [
        (side, f"{number}, warm-up" if epoch["warmup"] else str(number), epoch)
        for side in _SIDES
        for number, epoch in enumerate(found[side], 1)
    ]
    rows = [[_SIDES[side], number, *_cells(epoch)] for side, number, epoch in each]
    bars = [Bar(number, epoch["seconds"], _SIDES[side]) for side, number, epoch in each]
    note = "Seconds of stages are summed over worker threads."
    return Report(
        found,
        lines,
        [Table(header, rows, "Every epoch", note, detail=True)],
        [[Panel("Epochs", bars, "seconds", form=".1f")]],
        f"{median(ratio):.2f} times the epoch in memory: cache of {settings['cache']:.0%}, "
        f"{found['limit_bytes'] / GB:.1f} GB of memory for {found['file_bytes'] / GB:.1f} GB of "
        "files",
    )


def _layers(settings: Mapping[str, Any]) -> str:
    names = {1: "one", 2: "two", 3: "three", 4: "four"}
    count = len(settings["num_neighbors"])
    return f"{names.get(count, count)}-layer"


def _cells(epoch: Mapping[str, Any]) -> list[str]:
    stages = [epoch["stages"][name]["seconds"] for name in ("sample", "fetch", "wait")]
    seconds = [epoch["seconds"], epoch["first_batch"], *stages]
    return [
        *(f"{each:.1f}" for each in seconds),
        *(f"{epoch[name]:,}" if name in epoch else "" for name in ("hits", "misses")),
        f"{epoch['read_bytes'] / GB:.1f}" if "read_bytes" in epoch else "",
        number(epoch["loss"], ".4f"),
        f"{epoch['resident'] / GB:.2f} GB",
        str(epoch["load_average"]),
    ]


def _complaint(args: argparse.Namespace) -> str | None:
    if not 0 < args.cache <= 1:
        return "--cache must be a share, above 0 and at most 1"
    return None


_TRAINING = {
    "policy": Option("belady", "placed: by degree", choices=POLICIES),
    "batches": Option(20, "of an epoch", least=1),
    "batch_size": Option(512, least=1),
    "num_neighbors": Option([15, 10, 5], "of each hop, as 15,10,5"),
    "hidden": Option(128, least=1),
    "trim": Option(False, "layers only on the nodes that they need"),
    "workers": Option(2, least=0),
    "prefetch": Option(1, "batches per worker", least=1),
}
"""Options of both sides."""

BENCHMARK = Benchmark(
    "store",
    __doc__,
    {
        "graph": {
            "nodes": Option(6_000_000),
            "edges": Option(120_000_000, "directed"),
            "features": Option(128, "columns"),
            "dtype": Option("float32", choices=("float32", "float16")),
        },
        "how": {
            **FOLDER,
            **REUSE,
            "cache": Option(0.15, "share of the features in memory"),
            "read_ahead": Option(
                help="share of the features for rows read early; as --cache", type=float
            ),
            "limit": Option(help="bytes of memory; 0.9 of the files", type=count),
            **_TRAINING,
            "warmup": Option(1, "epochs before those that count", least=0),
            "rounds": Option(3, "epochs that count", least=1),
        },
    },
    measure,
    report,
    {
        "nodes": 30_000, "edges": 600_000, "features": 32, "batches": 6, "batch_size": 128,
        "limit": 4_000_000_000,
    },
    _complaint,
)  # fmt: skip
