"""Convert, partition and train on a graph that is larger than the memory it may use.

A graph in the shape of papers100M is generated during its conversion, cut by a streaming
partitioner, and trained on with features from disk. Each step runs in a process whose memory, page
cache included, is limited by a control group to a share of the files. If that is not possible, the
report says so.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import Tensor

import pyg_scale
from pyg_scale import plugins
from pyg_scale.datasets import StreamedCommunities
from pyg_scale.loader import NeighborLoader
from pyg_scale.store.topology import topology_of
from pyg_scale_bench import environment, memory
from pyg_scale_bench.benchmark import FOLDER, Benchmark, Option, count, size_of
from pyg_scale_bench.chart import Bar, Panel
from pyg_scale_bench.child import call
from pyg_scale_bench.graphs import REUSE, converted, reused
from pyg_scale_bench.report import GB, Report, number, save_so_far
from pyg_scale_bench.training import Trainer

STREAMING = {"order": "natural", "refine": 0}
"""Options of streaming partitioners that read the edges from end to end, which a graph on disk
larger than memory needs; other orders, and moves of single nodes, read at random.
"""
_TEMPORARY = 12  # bytes per edge that a conversion needs temporarily
_BATCH_SIZE = 1024


# Measuring ################################################################################


def measure(args: argparse.Namespace, found: dict[str, Any]) -> None:
    """Run the steps, each under the limit; JSON is written anew after every one.

    Raises:
        SystemExit: If the graph that is used again has too few nodes to train on.
    """
    others = environment.Others()
    root = Path(args.dir).absolute()
    graph = root / "graph"
    root.mkdir(parents=True, exist_ok=True)
    again = reused(args, found)
    if again:
        found["settings"]["communities"] = None  # no directory says
    expected = args.nodes * (args.features * 2 + 8) + args.edges * 8
    limit = args.limit or expected // 3
    cache = int(args.cache * args.nodes * args.features * 2)
    found |= {"limit_bytes": limit, "limited": True, "cache_bytes": cache, "steps": []}
    if not again:
        names = ("nodes", "edges", "features", "communities")
        values = {name: getattr(args, name) for name in names}
        options = {"path": str(graph), "values": values, "memory_bytes": args.memory or limit // 2}
        _step(found, "convert", converted, options)
    found["file_bytes"] = size_of(graph)
    save_so_far(found, args.json, others)
    seeds = pyg_scale.open(graph).index_set("train")
    assert isinstance(seeds, Tensor), "the generated graph has one node type"
    if too_few := _too_few(args, seeds.numel()):
        raise SystemExit(f"pyg-scale bench: {too_few}")
    if args.parts > 1:
        memory.evict(root)
        options = {"num_parts": args.parts, "method": args.method}
        out = str(root / "assignment.npy")
        _step(found, "partition", partition, {"path": str(graph), "out": out, **options})
        save_so_far(found, args.json, others)
    memory.evict(root)
    names = ("batches", "warmup", "num_neighbors", "hidden")
    options = {name: getattr(args, name) for name in names}
    _step(found, "train", train, {"path": str(graph), "cache": f"{cache}B", **options})


def _step(
    found: dict[str, Any],
    name: str,
    target: Callable[..., Iterator[dict[str, Any]]],
    options: dict[str, Any],
) -> None:
    """Run a step under the limit, and append its results and costs."""
    print(f"{name} ...", file=sys.stderr)
    step: dict[str, Any] = {"name": name}
    start = time.perf_counter()
    with memory.limited(found) as group:
        step["result"] = call(target, options, group=group)
        if group is not None:
            step["peak_with_page_cache"] = group.peak()
    step["wall_seconds"] = time.perf_counter() - start
    found["steps"].append(step)


def partition(path: str, num_parts: int, method: str, out: str) -> Iterator[dict[str, Any]]:
    """Assign the nodes to parts; the assignment is saved as ``.npy``."""
    made = plugins.get("partitioner", method)
    partitioner = made(**STREAMING) if method in ("fennel", "ldg") else made()
    start = time.perf_counter()
    assignment = pyg_scale.partition(path, num_parts, method=partitioner)
    seconds = time.perf_counter() - start
    assert isinstance(assignment, Tensor), "the generated graph has one node type"
    np.save(out, assignment.numpy())
    sizes = torch.bincount(assignment, minlength=num_parts)
    yield {
        "options": partitioner.options(),
        "seconds": seconds,
        "balance": float(sizes.max() * num_parts / sizes.sum()),
        "cut": _cut(pyg_scale.open(path), assignment),
        "peak_resident": memory.peak(),
    }


def _cut(data: Any, assignment: Tensor, sample: int = 20_000_000) -> float:
    """The share of cut edges among all, or among evenly spaced pieces of a large graph."""
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
) -> Iterator[dict[str, Any]]:
    """Train on batches whose features come from disk through a bounded cache."""
    start = time.perf_counter()
    data = pyg_scale.open(path)
    opened = time.perf_counter() - start
    # Labels stay mapped, as the index of a cache would be larger than they are.
    store = plugins.get("feature_store", "disk")(path, cache=cache, attributes=["x"])
    loader = NeighborLoader(
        data,
        num_neighbors=num_neighbors,
        input_nodes=data.index_set("train"),
        batch_size=_BATCH_SIZE,
        shuffle=True,
        seed=0,
        num_workers=2,
        feature_store=store,
    )
    classes, layers = int(data.y.max()) + 1, len(num_neighbors)
    trainer = Trainer(data.num_features, hidden, classes, layers=layers, trim=True)
    losses, correct, seen = list[float](), 0, 0
    clock = time.perf_counter()
    for batch in islice(loader, warmup + batches):
        loss, out = trainer.step(batch)
        losses.append(float(loss))
        if len(losses) > warmup + batches // 2:
            correct += int((out.argmax(1) == batch.y[: len(out)]).sum())
            seen += len(out)
        if len(losses) == warmup:
            clock = time.perf_counter()  # the first batch that counts is not loaded yet
    seconds = time.perf_counter() - clock
    yield {
        "open_seconds": opened,
        "batches": len(losses) - warmup,
        "seconds": seconds,
        "batches_per_s": (len(losses) - warmup) / seconds,
        "first_loss": losses[0],
        "last_loss": mean(losses[-10:]),
        "accuracy_of_the_second_half": correct / max(1, seen),
        "loader": loader.stats()["total"],
        "store": store.stats(),
        "peak_resident": memory.peak(),
    }


# Report ###################################################################################


def report(found: Mapping[str, Any]) -> Report:
    """The report of the results."""
    settings, steps = found["settings"], found["steps"]
    enforced = "" if found["limited"] else f", NOT ENFORCED: {found['why_not']}"
    lines = [
        (
            f"graph: generated, power law, planted communities: {settings['nodes']:,} nodes, "
            f"{settings['edges']:,} directed edges, {settings['features']} fp16 features; "
            f"{found['file_bytes'] / GB:.1f} GB of files"
        ),
        (
            f"memory limit of every step, page cache included: {found['limit_bytes'] / GB:.2f} GB"
            f"{enforced}"
        ),
        *("; ".join(_said(step, found)) for step in steps),
    ]
    seconds = [Bar(step["name"], step["wall_seconds"]) for step in steps]
    peaks = [Bar(step["name"], (step.get("peak_with_page_cache") or 0) / GB) for step in steps]
    limit = found["limit_bytes"] / GB
    return Report(
        found,
        lines,
        panels=[
            [
                Panel("Time", seconds, "seconds", form=".0f"),
                Panel(
                    "Memory, page cache included",
                    [*peaks, Bar("files", found["file_bytes"] / GB)],
                    "GB",
                    form=".1f",
                    mark=(limit, f"limit {limit:.1f}"),
                ),
            ]
        ],
        caption=f"{settings['nodes']:,} nodes, {settings['edges']:,} directed edges",
    )


def _said(step: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[str]:
    """The description of a step."""
    settings, result, peak = found["settings"], step.get("result", {}), "peak_with_page_cache"
    yield f"{step['name']}: {step['wall_seconds']:.0f} s in all"
    if step["name"] == "convert":
        rate = settings["edges"] / step["wall_seconds"] / 1e6
        yield f"{rate:.1f} M edges/s, features included"
    if step["name"] == "partition":
        rate = settings["edges"] / result["seconds"] / 1e6
        options = ", ".join(f"{k}={v}" for k, v in result["options"].items())
        yield (
            f"{settings['method']} ({options}), {settings['parts']} parts in "
            f"{result['seconds']:.0f} s ({rate:.1f} M edges/s), {result['cut']:.3f} of the edges "
            f"cut, balance {result['balance']:.3f}"
        )
    if step["name"] == "train":
        yield (
            f"opened in {1000 * result['open_seconds']:.0f} ms, {result['batches']} batches at "
            f"{result['batches_per_s']:.2f} batches/s, loss "
            f"{number(result['first_loss'], '.2f')} to {number(result['last_loss'], '.2f')}, "
            "accuracy on the training nodes of the second half "
            f"{result['accuracy_of_the_second_half']:.3f}"
        )
        store = result["store"]
        x = store["tensors"]["x"]
        yield (
            f"a cache of {found['cache_bytes'] / GB:.2f} GB ({store['policy']}) had "
            f"{x['hits'] / max(1, x['hits'] + x['misses']):.0%} of the rows of features; "
            f"{store['read_bytes'] / GB:.0f} GB in {store['reads']:,} reads, "
            + ("past the page cache" if store["direct"] else "through the page cache")
        )
    if result.get("peak_resident"):
        yield f"peak resident {result['peak_resident'] / GB:.2f} GB"
    if step.get(peak):
        yield f"peak with page cache {step[peak] / GB:.2f} GB"


def _complaint(args: argparse.Namespace) -> str | None:
    """Refuse a graph that does not fit on the disk, or has too few nodes to train on."""
    root = Path(args.dir).absolute()
    again = args.reuse and (root / "graph").exists()
    share = StreamedCommunities.split[0]
    if not again and (too_few := _too_few(args, int(args.nodes * share))):
        return too_few
    needed = args.nodes * (args.features * 2 + 16) + args.edges * (8 + _TEMPORARY)
    if again:
        needed = args.nodes * 16
    there = next(path for path in (root, *root.parents) if path.exists())
    free = shutil.disk_usage(there).free
    if free >= needed:
        return None
    return (
        f"about {needed / GB:.0f} GB are needed in --dir, {free / GB:.0f} GB are free: choose "
        "another folder or a smaller graph"
    )


def _too_few(args: argparse.Namespace, seeds: int) -> str | None:
    """The fault of options that ask for more batches than an epoch has."""
    there = -(-seeds // _BATCH_SIZE)
    if args.warmup + args.batches <= there:
        return None
    return (
        f"{seeds:,} nodes to train on are {there} batches, fewer than --warmup and --batches: "
        "choose fewer, or more --nodes"
    )


BENCHMARK = Benchmark(
    "scale",
    __doc__,
    {
        "graph": {
            "nodes": Option(40_000_000),
            "edges": Option(600_000_000, "directed"),
            "features": Option(128, "columns of fp16"),
            "communities": Option(172, "one for each class at least", least=172),
        },
        "how": {
            **FOLDER,
            **REUSE,
            "limit": Option(help="bytes of memory; a third of the files", type=count),
            "memory": Option(help="of the conversion; half the limit", type=count),
            "parts": Option(4, "1 for no partition", least=1),
            "method": Option("fennel"),
            "cache": Option(0.15, "share of the features in memory"),
            "batches": Option(100, least=1),
            "warmup": Option(20, least=0),
            "num_neighbors": Option([15, 10, 5], "of each hop, as 15,10,5"),
            "hidden": Option(128, least=1),
        },
    },
    measure,
    report,
    complaint=_complaint,
)
