"""Samplers side by side: batches with features, accuracy, bytes from a disk, equal cost, walks.

Every part measures its cases in turns, so that a slow minute affects all alike:

* ``batches``: one loader for each sampler of neighbours, on a large generated graph;
* ``subgraphs``: GraphSAINT (walks of 2 steps), ShaDow (2 hops of 10 neighbours) and clusters, on a
  smaller one, beside PyG's own where it runs (``make peers`` compiles torch-sparse for it), and
  what copying as many rows of features takes at least;
* ``training``: the same model trained with each, and its test accuracy after equal epochs and
  after equal time;
* ``disk``: LABOR with independent and with dependent batches, behind a cache of the features;
* ``cost``: batches of equal cost on a star and a power law;
* ``walks``: steps of random walks, beside torch-cluster and pyg-lib where they are installed.
"""

from __future__ import annotations

import argparse
import copy
import gc
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch_geometric.loader as pyg
from torch import Tensor
from torch_geometric.data import Data

import pyg_scale
from pyg_scale import loader as ours
from pyg_scale.loader import Budget, ClusterData, NeighborLoader
from pyg_scale.ops import memory
from pyg_scale.sampler import FastGCN, Labor, Ladies
from pyg_scale.store import Disk
from pyg_scale_bench import graphs, peers, sampler_training, sampler_walks
from pyg_scale_bench.benchmark import FOLDER, Benchmark, Option, names_of
from pyg_scale_bench.chart import Bar, Panel
from pyg_scale_bench.report import GB, Report, Table
from pyg_scale_bench.rounds import (
    OURS,
    PYG,
    Turns,
    in_turns,
    rate,
    threads_of_torch,
)

PARTS = ("batches", "subgraphs", "training", "disk", "cost", "walks")
_SEED = 0
_WALK, _ROOTS, _DEPTH, _NEIGHBORS = 2, 6_000, 2, 10  # as the papers of GraphSAINT and ShaDow
_BASE = "neighbours"


def measure(args: argparse.Namespace, found: dict[str, Any]) -> None:
    """Measure the parts that were asked for."""
    size = (args.nodes, args.edges, args.features)
    large = cache(
        lambda: (
            graphs.power_law(*size, args.power_law) if args.power_law else _features_alone(*size)
        )
    )
    parts: dict[str, Callable[[argparse.Namespace, Callable[[], Data]], Any]] = {
        "batches": _batches,
        "subgraphs": _subgraphs,
        "training": sampler_training.measure,
        "disk": _disk,
        "cost": _cost,
        "walks": sampler_walks.measure,
    }
    with threads_of_torch(args.threads):
        for name in args.parts:
            print(f"measuring: {name}", file=sys.stderr)
            begin = time.perf_counter()
            found[name] = parts[name](args, large)
            found.setdefault("seconds", {})[name] = round(time.perf_counter() - begin, 1)


def _features_alone(nodes: int, edges: int, features: int) -> Data:
    data = graphs.cached(None, nodes, edges, features)
    return Data(x=data.x, edge_index=data.edge_index)


# Batches ##################################################################################


def _batches(args: argparse.Namespace, large: Callable[[], Data]) -> list[dict[str, Any]]:
    data = large()
    seeds = graphs.seeds(args.nodes, args.batch_size * args.batches)
    hops, layers = args.num_neighbors, [args.layer_nodes] * len(args.num_neighbors)
    samplers = {
        _BASE: (hops, "native"),
        "LABOR": (hops, Labor()),
        "LABOR, layers dependent": (hops, Labor(layer_dependency=True)),
        "LABOR, every layer anew": (hops, Labor(hops="layers")),
        "LADIES": (layers, Ladies()),
        "FastGCN": (layers, FastGCN()),
    }
    common = {"batch_size": args.batch_size, "shuffle": True, "seed": _SEED}
    cases = []
    for name, (numbers, one) in samplers.items():
        # Samplers in plain torch take many times as long: fewer batches of them.
        few = max(1, args.batches // 5) if isinstance(one, Ladies) else args.batches
        nodes = seeds[: few * args.batch_size]
        loader = NeighborLoader(data, numbers, nodes, neighbor_sampler=one, **common)
        cases.append(Turns(side=OURS, name=name, run=partial(_epoch, loader)))
    return in_turns(cases, args.rounds)


def _epoch(loader: Any) -> dict[str, float]:
    """An epoch of a loader, with what it sampled and read."""
    begin = time.perf_counter()
    number = nodes = edges = 0
    for batch in loader:
        number, nodes, edges = number + 1, nodes + batch.num_nodes, edges + batch.num_edges
    seconds = time.perf_counter() - begin
    found = {"seconds": seconds, "batches": number, "nodes": nodes, "edges": edges}
    if isinstance(loader, ours.NodeLoader):
        stages = loader.stats()["epoch"]
        found |= {name: stages[name]["seconds"] for name in ("sample", "fetch")}
        found["feature_bytes"] = stages["fetch"]["bytes"]
    return found


# Subgraphs ################################################################################


def _subgraphs(args: argparse.Namespace, _: Callable[[], Data]) -> dict[str, Any]:
    size = (args.small_nodes, args.small_edges, args.features)
    data = _features_alone(*size)
    working = peers.working(none=args.without_pyg)
    number, roots = args.batches, min(_ROOTS, args.small_nodes)
    seeds = graphs.seeds(args.small_nodes, number * args.batch_size)
    cut = ClusterData(data, 10 * number, log=False, method="fennel")
    own_graph, their_graph = (data, cut), (data.clone(), copy.copy(cut))
    their_graph[1].data = cut.data.clone()  # ours moves features to huge pages, where they are
    saint = {"batch_size": roots, "walk_length": _WALK, "num_steps": number}
    shadow = {"depth": _DEPTH, "num_neighbors": _NEIGHBORS, "batch_size": args.batch_size}
    saint_name = f"GraphSAINT, {roots:,} walks of {_WALK}"
    shadow_name = f"ShaDow, {_DEPTH} hops of {_NEIGHBORS}"
    make: dict[str, Callable[..., Any]] = {
        saint_name: lambda of, graph, **how: of.GraphSAINTRandomWalkSampler(
            graph[0], log=False, **saint, **how
        ),
        shadow_name: lambda of, graph, **how: of.ShaDowKHopSampler(
            graph[0], node_idx=seeds, **shadow, **how
        ),
        f"clusters, 10 of {10 * number}": lambda of, graph, **how: of.ClusterLoader(
            graph[1], batch_size=10, **how
        ),
    }
    needs_sparse = {saint_name, shadow_name}
    cases = []
    for workers in args.workers:
        how = {"num_workers": workers, "persistent_workers": True} if workers else {}
        for name, made in make.items():
            named = f"{name}, {workers} worker{'s' * (workers > 1)}" if workers else name
            own = partial(_epoch_and_copies, made(ours, own_graph, **how), data.x)
            theirs = _of_pyg(partial(made, pyg, their_graph, **how), name in needs_sparse)
            peer = Turns(side=PYG, name=named, run=theirs)
            if args.without_pyg:
                peer.error = "left out"
            elif name in needs_sparse and "torch-sparse" not in working:
                peer.error = "torch-sparse does not work here"
            cases += in_turns([Turns(side=OURS, name=named, run=own), peer], args.rounds)
            del own, theirs, peer
            gc.collect()  # ends PyG's workers, before others are forked
    reasons = [] if args.without_pyg else peers.backends()
    return {
        "cases": cases,
        "backends": [vars(backend) for backend in reasons],
    }


def _epoch_and_copies(loader: Any, x: Tensor) -> dict[str, float]:
    """An epoch, and the seconds that copying blocks of as many rows of features takes.

    They are copied into recycled memory, as the rows of batches are, but lie next to each other.
    """
    found = _epoch(loader)
    batches = int(found["batches"])
    rows = min(round(found["nodes"] / batches), x.size(0))
    first = [i * rows % (x.size(0) - rows + 1) for i in range(batches)]
    begin = time.perf_counter()
    for at in first:
        memory.empty([rows, x.size(1)], x.dtype).copy_(x[at : at + rows])
    return found | {"copy_seconds": time.perf_counter() - begin}


def _of_pyg(make: Callable[[], Any], needs_sparse: bool) -> Callable[[], dict[str, float]]:
    """A function that runs an epoch of one of PyG's loaders: the same loader each time, with which
    its workers stay."""
    kept = cache(make)

    def run() -> dict[str, float]:
        with peers.using("torch-sparse") if needs_sparse else nullcontext():
            return _epoch(kept())

    return run


# Disk #####################################################################################


def _disk(args: argparse.Namespace, large: Callable[[], Data]) -> dict[str, Any]:
    folder = Path(args.dir).absolute() / "disk"
    pyg_scale.save(large(), folder)
    feature_bytes = args.nodes * args.features * 4
    cases = {
        "independent batches": Labor(),
        f"batch dependency {args.dependency:,}": Labor(batch_dependency=args.dependency),
    }
    seeds = graphs.seeds(args.nodes, args.disk_batch_size * args.disk_batches)
    out = []
    for name, one in cases.items():  # bytes do not depend on when they are read
        store = Disk(folder, cache=max(1, int(args.cache * feature_bytes)))
        loader = NeighborLoader(
            pyg_scale.open(folder),
            args.num_neighbors,
            seeds,
            batch_size=args.disk_batch_size,
            shuffle=True,
            seed=_SEED,
            neighbor_sampler=one,
            feature_store=store,
            num_workers=1,
        )
        begin = time.perf_counter()
        rows = sum(batch.num_nodes for batch in loader)
        counts = {key: store.stats()[key] for key in ("read_bytes", "hits", "misses")}
        seconds = time.perf_counter() - begin
        out.append({"name": name, "rows": rows, "seconds": seconds, **counts})
    return {"cases": out, "feature_bytes": feature_bytes}


# Equal cost ###############################################################################


def star_and_power_law(num_nodes: int, leaves: int) -> Data:
    """Nodes whose in-degrees fall as a power law, and a hub that is joined to its leaves."""
    draw = torch.Generator().manual_seed(_SEED)
    degree = (3 / torch.rand(num_nodes, generator=draw) ** 0.7).long().clamp(max=300)
    target = torch.arange(num_nodes).repeat_interleave(degree)
    source = (torch.rand(target.numel(), generator=draw) ** 2 * num_nodes).long()
    hub, leaf = num_nodes + leaves, torch.arange(num_nodes, num_nodes + leaves)
    hubs = torch.full_like(leaf, hub)
    edges = torch.stack([torch.cat([source, leaf, hubs]), torch.cat([target, hubs, leaf])])
    return Data(edge_index=edges, num_nodes=hub + 1)


def _cost(args: argparse.Namespace, _: Callable[[], Data]) -> dict[str, Any]:
    leaves = args.cost_nodes // 5
    data = star_and_power_law(args.cost_nodes, leaves)
    reach = leaves + 1
    cases: list[tuple[list[int], int, Any]] = [
        ([10, 5], reach * 5, "native"),
        ([10, 5], reach, "native"),
        ([10, 5], reach * 5, Labor()),
        ([-1], reach * 3 // 2, "native"),
        ([-1], reach * 3, "native"),
        ([-1, 10], reach * 12, "native"),
    ]
    out = []
    for numbers, budget, one in cases:
        common = {"shuffle": True, "seed": _SEED, "neighbor_sampler": one}
        planned = NeighborLoader(data, numbers, batch_cost=Budget("edges", budget), **common)
        size = -(-int(data.num_nodes or 0) // len(planned))
        by_number = NeighborLoader(data, numbers, batch_size=size, **common)
        out.append({
            "num_neighbors": numbers,
            "sampler": "LABOR" if isinstance(one, Labor) else _BASE,
            "budget": budget,
            "batches": len(planned),
            "planned": _max_over_mean(planned),
            "by_number": _max_over_mean(by_number),
        })  # fmt: skip
    return {"nodes": int(data.num_nodes or 0), "edges": data.num_edges, "cases": out}


def _max_over_mean(loader: Any) -> float:
    edges = torch.tensor([float(batch.num_edges) for batch in loader])
    return float(edges.max() / edges.mean())


# Walks ####################################################################################


# Report ###################################################################################


def _per_batch(case: Mapping[str, Any], count: str) -> float:
    rounds = case["rounds"]
    found: float = sum(each[count] for each in rounds) / sum(each["batches"] for each in rounds)
    return found


def factor(case: Mapping[str, Any], base: Mapping[str, Any]) -> float:
    """The median over rounds of how many times as fast as the base a case was in that round."""
    turns = zip(case["rounds"], base["rounds"])
    return median(
        (each["batches"] / each["seconds"]) / (other["batches"] / other["seconds"])
        for each, other in turns
    )


def report(found: Mapping[str, Any]) -> Report:
    """The report of a run."""
    settings = found["settings"]
    kind = "power law, planted communities"
    if exponent := settings.get("power_law"):
        kind = f"sources drawn by rank ** -{exponent:g}, destinations alike"
    lines = [
        (
            f"graph: generated, {kind}: {settings['nodes']:,} nodes, "
            f"{settings['edges']:,} directed edges, {settings['features']} float32 features; "
            f"{settings['batch_size']:,} seeds a batch, neighbours {settings['num_neighbors']}, "
            f"{settings['layer_nodes']:,} nodes a hop for LADIES and FastGCN"
        ),
        (
            f"no workers, but where a name has some; {settings['threads']} thread(s) of torch; "
            f"cases take turns, medians of {settings['rounds']} rounds"
        ),
    ]
    tables: list[Table] = []
    panels: list[list[Panel]] = []
    makers: dict[str, Callable[[Any, list[str]], tuple[Table, list[Panel]]]] = {
        "batches": _report_batches,
        "subgraphs": _report_subgraphs,
        "training": sampler_training.report,
        "disk": _report_disk,
        "cost": _report_cost,
        "walks": sampler_walks.report,
    }
    for name in PARTS:
        if name in found:
            table, row = makers[name](found[name], lines)
            tables.append(table)
            panels.append(row)
    return Report(found, lines, tables, panels, "Samplers side by side")


def _report_batches(cases: Any, lines: list[str]) -> tuple[Table, list[Panel]]:
    base, rows, bars, visited = cases[0], [], [], []
    for case in cases:
        turns = case["rounds"]
        nodes = _per_batch(case, "nodes")
        stages = [median(e[s] / e["batches"] * 1e3 for e in turns) for s in ("sample", "fetch")]
        share, megabytes = (
            nodes / _per_batch(base, "nodes"),
            _per_batch(case, "feature_bytes") / 1e6,
        )
        fast, speed = factor(case, base), rate(case, "batches")
        rows.append([
            case["name"], f"{nodes:,.0f}", f"{share:.2f}", f"{megabytes:.1f}",
            f"{_per_batch(case, 'edges'):,.0f}", f"{rate(case, 'edges') / 1e6:.2f}",
            f"{speed:.1f}", f"{fast:.2f}", *(f"{each:.1f}" for each in stages),
        ])  # fmt: skip
        speeds = [each["batches"] / each["seconds"] for each in turns]
        spread = (min(speeds), max(speeds))
        bars.append(Bar(case["name"], speed, spread=spread, note=f"{fast:.2f}x"))
        visited.append(Bar(case["name"], nodes / 1e3, note=f"{share:.2f}"))
    header = ["sampler", "nodes", "of neighbours'", "MB of features", "edges", "M edges/s"]
    header += ["batches/s", "times neighbours", "ms sampling", "ms reading"]
    note = "Nodes, bytes, edges and milliseconds are those of a batch; features are included."
    table = Table(header, rows, "Batches", note, align="lr")
    row = [
        Panel("Batches with features", bars, "batches/s", form=".1f"),
        Panel("Nodes of a batch", visited, "thousands", form=".0f"),
    ]
    return table, row


def _report_subgraphs(part: Any, lines: list[str]) -> tuple[Table, list[Panel]]:
    cases, rows, bars = part["cases"], [], []
    for backend in part["backends"]:
        lines.append(f"PyG with {backend['name']}: {backend['version'] or backend['reason']}")
    for own, peer in zip(cases[::2], cases[1::2]):
        cells, speed = [peer["error"], ""], rate(own, "batches")
        bars.append(Bar(own["name"], speed))
        if not peer["error"]:
            cells = [f"{rate(peer, 'batches'):.2f}", f"{factor(own, peer):.1f}"]
            bars.append(Bar(own["name"], rate(peer, "batches"), PYG))
        turns = own["rounds"]
        nodes = median(each["nodes"] / each["batches"] for each in turns)
        for part in ("seconds", "copy_seconds"):  # earlier runs did not measure the second
            known = [each[part] / each["batches"] * 1e3 for each in turns if part in each]
            cells.append(f"{median(known):.2f}" if known else "")
        rows.append([own["name"], f"{nodes:,.0f}", f"{speed:.1f}", *cells])
    header = ["loader", "nodes of a batch", "batches/s", "PyG's", "times PyG's"]
    header += ["ms", "ms of copying"]
    note = "Milliseconds are those of a batch. Copying is what as many rows of features take that "
    note += "lie next to each other, into recycled memory: a batch takes that at least."
    return Table(header, rows, "Subgraphs", note, align="lr"), [
        Panel("Subgraphs with features", bars, "batches/s", form=".1f")
    ]


def _report_disk(part: Any, lines: list[str]) -> tuple[Table, list[Panel]]:
    cases, rows, bars = part["cases"], [], []
    for case in cases:
        share = case["read_bytes"] / max(1, cases[0]["read_bytes"])
        hits = case["hits"] / (case["hits"] + case["misses"])
        read = case["read_bytes"] / GB
        rows.append(
            [case["name"], f"{case['rows']:,}", f"{read:.3f}", f"{share:.2f}", f"{hits:.0%}"]
        )
        bars.append(Bar(case["name"], read, note=f"{share:.2f}"))
    header = ["LABOR", "rows", "GB read", "of independent batches", "rows in the cache"]
    note = f"Features of {part['feature_bytes'] / GB:.2f} GB, a cache that is empty at first."
    return Table(header, rows, "From a disk", note, align="lr"), [
        Panel("Bytes read from the disk", bars, "GB", form=".3f")
    ]


def _report_cost(part: Any, lines: list[str]) -> tuple[Table, list[Panel]]:
    rows, bars = [], []
    for case in part["cases"]:
        name = f"{case['num_neighbors']}, {case['sampler']}, {case['budget']:,}"
        cells = [f"{case['planned']:.2f}", f"{case['by_number']:.2f}"]
        rows.append([name, str(case["batches"]), *cells])
        bars.append(Bar(name, case["planned"], OURS))
        bars.append(Bar(name, case["by_number"], "as many batches by number of seeds"))
    header = ["neighbours, sampler, budget in edges", "batches", "batch_cost=", "by number"]
    note = f"A star and a power law, {part['nodes']:,} nodes, {part['edges']:,} edges: "
    note += "the largest number of sampled edges of a batch over the mean."
    return Table(header, rows, "Equal cost", note, align="lr"), [
        Panel("Largest batch over the mean", bars, "sampled edges, max / mean")
    ]


def _wrong(args: argparse.Namespace) -> str | None:
    if not 0 < args.cache <= 1:
        return "--cache must be a share, above 0, at most 1"
    if not 0 < args.train_share <= 0.75:
        return "--train-share must be a share, above 0, at most 0.75: a quarter is for testing"
    for option, least in (("train_neighbors", 1), ("workers", 0)):
        if min(getattr(args, option), default=-1) < least:
            return f"--{option.replace('_', '-')} must be numbers of at least {least}"
    return None


BENCHMARK = Benchmark(
    "sampler",
    __doc__,
    {
        "graph": {
            "nodes": Option(600_000),
            "edges": Option(30_000_000, "directed"),
            "features": Option(128, "columns"),
            "power_law": Option(
                0.0, "exponent of how popular sources are, by rank; 0: communities", least=0
            ),
            "small_nodes": Option(100_000, "of the graph for whole subgraphs"),
            "small_edges": Option(2_000_000, "of that graph"),
            "cost_nodes": Option(20_000, "of the power law for equal cost; a fifth more in a star"),
        },
        "how": {
            **FOLDER,
            "parts": Option(list(PARTS), f"some of {','.join(PARTS)}", type=names_of(PARTS)),
            "without_pyg": Option(False, "do not measure other packages"),
            "num_neighbors": Option([15, 10, 5], "of each hop, as 15,10,5"),
            "layer_nodes": Option(4_096, "nodes of a hop, for LADIES and FastGCN"),
            "batch_size": Option(1_024, "seeds", least=1),
            "batches": Option(10, "of a round", least=1),
            "rounds": Option(5, least=1),
            "threads": Option(1, "of torch", least=1),
            "workers": Option([0, 2], "of loaders of subgraphs, one number after the other"),
        },
        "training": sampler_training.OPTIONS,
        "disk": {
            "dependency": Option(4_096, "batches", least=2),
            "cache": Option(0.1, "share of the features in memory"),
            "disk_batch_size": Option(256, "seeds", least=1),
            "disk_batches": Option(48, least=2),
        },
        "walks": sampler_walks.OPTIONS,
    },
    measure,
    report,
    {
        "nodes": 4_000, "edges": 60_000, "features": 16, "small_nodes": 2_000,
        "small_edges": 20_000, "cost_nodes": 1_500, "layer_nodes": 256, "batch_size": 64,
        "batches": 2, "rounds": 1, "disk_batch_size": 16, "disk_batches": 8,
        **sampler_training.QUICK, **sampler_walks.QUICK,
    },
    _wrong,
)  # fmt: skip
