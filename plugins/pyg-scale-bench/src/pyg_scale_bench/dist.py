"""Traffic, speed and waiting times of ranks that share a partitioned graph.

Every rank is a process of this machine that reads only its own parts and requests others over the
network path. One run measures: rows of other ranks against plain sockets between the same
processes; bytes of features from other ranks with and without a cache; epochs in which every
request is answered late, with one and with several batches in flight; the time of each stage of a
batch; and ranks that share the mappings of the machine against one process with as many threads.
``--compare-npz`` adds the traffic of another graph partitioned by several methods. ``--link``
repeats rows against plain sockets on a network of that speed.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pyg_scale
from pyg_scale.datasets import planted_communities, read_npz
from pyg_scale_bench import dist_network, dist_rank
from pyg_scale_bench.benchmark import FOLDER, Benchmark, Option
from pyg_scale_bench.chart import Bar, Panel
from pyg_scale_bench.child import Child, call
from pyg_scale_bench.dist_network import WAYS
from pyg_scale_bench.dist_rank import METHOD_BATCH_SIZE, STAGES
from pyg_scale_bench.report import GB, Report, Table, listed

_SECONDS = 1800.0
_MB = 1e6


# Measuring ################################################################################


def measure(args: argparse.Namespace, found: dict[str, Any]) -> None:
    """Make the parts, and run the measurements of the ranks."""
    root, settings = Path(args.dir).absolute(), found["settings"]
    graph = {"nodes": args.nodes, "edges": args.edges, "features": args.features}
    graph["parts"] = args.parts or args.ranks
    paths: dict[str, Any] = {"whole": str(root / "whole"), "path": str(root / args.method)}
    # In separate processes, which free their memory at the end.
    made = {"root": str(root), "npz": args.npz, "methods": [args.method]}
    found["graph"] = call(parts, graph | made, seconds=_SECONDS)
    settings |= {name: found["graph"][name] for name in ("classes", "features")}
    paths["compared"] = {}
    if args.compare_npz:
        other, methods = root / "compared", args.compare_methods
        made = {"root": str(other), "npz": args.compare_npz, "methods": methods}
        found["compared"] = call(parts, graph | made, seconds=_SECONDS)
        paths["compared"] = {method: str(other / method) for method in methods}
    with contextlib.ExitStack() as stack:
        prefix = stack.enter_context(dist_network.namespace()) if args.link else []
        ranks = [
            stack.enter_context(
                Child(
                    dist_rank.measured,
                    {"settings": settings | paths},
                    prefix=prefix,
                    environ=environ,
                    seconds=_SECONDS,
                )
            )
            for environ in _environs(args.ranks, args.threads)
        ]
        for rank in ranks:
            rank.ask()
        try:
            found["ranks"] = [rank.answer() for rank in ranks]
        except SystemExit:
            for rank in ranks:
                rank.kill()  # the others wait for the failed one
            raise


def _environs(ranks: int, threads: int) -> list[dict[str, str]]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    common["OMP_NUM_THREADS"] = str(threads)
    return [{**common, "RANK": str(rank)} for rank in range(ranks)]


def parts(
    root: str,
    npz: str | None,
    methods: list[str],
    nodes: int,
    edges: int,
    features: int,
    parts: int,
) -> Iterator[dict[str, Any]]:
    """Write ``root/whole`` and its parts by each method; returns a description of the graph."""
    if npz:
        data: Any = read_npz(npz)
        for name in list(data.keys()):
            if name not in ("x", "y", "edge_index"):
                del data[name]
        data.x = data.x.float()
    else:
        data = planted_communities(nodes, edges, 16, features)
    whole = Path(root) / "whole"
    whole.parent.mkdir(parents=True, exist_ok=True)
    pyg_scale.save(data, whole, overwrite=True)
    for method in methods:
        pyg_scale.partition(whole, parts, method, Path(root) / method)
    yield {
        "name": Path(npz).stem if npz else "generated, power law",
        "nodes": data.num_nodes,
        "edges": data.num_edges,
        "features": data.x.size(1),
        "classes": int(data.y.max()) + 1,
        "parts": parts,
        "methods": methods,
    }


# Numbers ##################################################################################


def share_of_tcp(found: Mapping[str, Any], name: str = "bandwidth") -> list[float]:
    """Bytes per second of rows as a share of those of plain sockets, by round, over all ranks.

    Args:
        found: The results.
        name: ``"bandwidth"``, or ``"link"`` for results on a network of a given speed.
    """
    ranks = [rank[name] for rank in found["ranks"]]
    return [
        sum(each["features"][turn] for each in ranks) / sum(each["tcp"][turn] for each in ranks)
        for turn in range(len(ranks[0]["tcp"]))
    ]


def remote_bytes(found: Mapping[str, Any], cache: str, method: str | None = None) -> float:
    """Bytes of features from other ranks per batch; with ``method``, for its graph."""
    ranks = [rank["methods"][method] if method else rank["caches"] for rank in found["ranks"]]
    epochs = [rank[cache] for rank in ranks]
    return sum(e["fetch"]["remote_bytes"] for e in epochs) / sum(e["batches"] for e in epochs)


def gain_of_flight(found: Mapping[str, Any]) -> float:
    """Gain in batches per second by several batches in flight."""
    seconds = [
        max(rank["in_flight"][name]["seconds"] for rank in found["ranks"])
        for name in ("1", str(found["settings"]["in_flight"]))
    ]
    return seconds[0] / seconds[1]


def share_of_one(found: Mapping[str, Any]) -> list[float]:
    """Batches per second of ranks that share mappings, divided by those of one process, by turn."""
    turns = found["ranks"][0]["shared"]
    return [one / ranks for one, ranks in zip(turns["one"], turns["ranks"], strict=True)]


def _median(ranks: Sequence[Mapping[str, Any]], name: str) -> float:
    return median(value for rank in ranks for value in rank[name])


# Report ###################################################################################


def report(found: Mapping[str, Any]) -> Report:
    """The report of the results."""
    settings, graph = found["settings"], found["graph"]
    caches = list(found["ranks"][0]["caches"])
    none, cache = remote_bytes(found, "none"), settings["cache"]
    saved = {name: 1 - remote_bytes(found, name) / none for name in ("placed", "belady")}
    epochs = {c: max(rank["caches"][c]["seconds"] for rank in found["ranks"]) for c in caches}
    lines = [
        *_speed(found),
        (
            f"a cache of {cache:.0%} of the features saves {saved['placed']:.0%} "
            f"(placed: halo nodes by degree) or {saved['belady']:.0%} (belady) of the bytes from "
            f"other ranks; without, they are {none / _MB:.2f} MB per batch"
        ),
        (
            f"answers {settings['latency'] * 1e3:g} ms late: {settings['in_flight']} batches in "
            f"flight, sampled by as many threads, give {gain_of_flight(found):.2f} times the "
            f"batches per second of one ({settings['latency_batch_size']} seeds each)"
        ),
        (
            f"ranks that share the mappings of the machine, {settings['threads']} thread each, "
            f"make {median(share_of_one(found)):.2f} of the batches per second of one process with "
            f"{settings['ranks'] * settings['threads']} threads on the whole graph (rounds: "
            f"{listed(share_of_one(found), '.2f')}), features included, no training"
        ),
        *_methods(found),
        "an epoch takes " + ", ".join(f"{s:.2f} s ({n})" for n, s in epochs.items()),
        (
            f"graph: {graph['name']}: {graph['nodes']:,} nodes, {graph['edges']:,} directed edges, "
            f"{graph['features']} fp32 features, {graph['parts']} parts by {graph['methods'][0]}"
        ),
        (
            f"{settings['ranks']} ranks, {settings['threads']} thread each, network path forced; "
            f"{settings['batches']} batches of {settings['batch_size']} seeds each, num_neighbors "
            f"{settings['num_neighbors']}, no workers; {settings['messages']} messages of "
            f"{found['ranks'][0]['bandwidth']['rows']:,} rows a round; "
            f"{settings['shared_batches']} batches of each rank where mappings are shared"
        ),
    ]
    header = ["rank", "cache", "batches", "seconds", *STAGES]
    header += ["MB of other ranks per batch", "MB from the cache", "MB of its own parts"]
    rows = [
        _row(rank["rank"], name, epoch)
        for rank in found["ranks"]
        for name, epoch in rank["caches"].items()
    ]
    ranks = [rank["bandwidth"] for rank in found["ranks"]]
    ways = {"tcp": "plain sockets", "features": "rows", "gloo": "gloo"}
    speeds = [
        Bar(ways[way], _median(ranks, way) / GB, "pyg_scale" if way == "features" else "others")
        for way in WAYS
    ]
    sent = [Bar(name, remote_bytes(found, name) / _MB) for name in caches]
    return Report(
        found,
        lines,
        [Table(header, rows, "Every epoch", align="rlr", detail=True)],
        [
            [
                Panel(f"From other ranks, cache of {cache:.0%}", sent, "MB per batch"),
                Panel("What comes to a rank, all at once", speeds, "GB/s"),
            ],
            [Panel("Each rank (no cache)", _timeline(found), "seconds", form="", stacked=True)],
        ],
        f"{settings['ranks']} ranks: {graph['name']}, {graph['nodes']:,} nodes",
    )


def _row(rank: int, cache: str, epoch: Mapping[str, Any]) -> list[str]:
    sums = [sum(step[stage] for step in epoch["timeline"]) for stage in STAGES]
    sent = [epoch["fetch"][what] for what in ("remote_bytes", "cache_bytes", "local_bytes")]
    cells = [str(rank), cache, str(epoch["batches"]), f"{epoch['seconds']:.2f}"]
    cells += [f"{seconds:.2f}" for seconds in sums]
    return cells + [f"{num_bytes / epoch['batches'] / _MB:.2f}" for num_bytes in sent]


def _timeline(found: Mapping[str, Any]) -> list[Bar]:
    bars = []
    for rank in found["ranks"]:
        for step in rank["caches"]["none"]["timeline"]:
            begin = step["end"] - sum(step[stage] for stage in STAGES)
            for stage in STAGES:
                bars.append(Bar(f"rank {rank['rank']}", step[stage], stage, begin))
                begin += step[stage]
    return bars


def _speed(found: Mapping[str, Any]) -> list[str]:
    """Rows of other ranks compared with plain sockets: within the machine, and on a network."""
    said = []
    for name in ("bandwidth", "link"):
        ranks = [rank[name] for rank in found["ranks"] if name in rank]
        if not ranks:
            continue
        shares = share_of_tcp(found, name)
        speed = {way: _median(ranks, way) / GB for way in WAYS}
        work = {way: _median(ranks, f"{way}_cpu") * GB for way in WAYS}
        where = "between the same processes, as fast as the processors of one machine copy"
        if name == "link":
            where = f"on a network of {found['settings']['link']} for all that the ranks send"
        said.append(
            f"rows of other ranks come at {median(shares):.0%} of the bytes per second of plain "
            f"sockets {where} (rounds: {listed(shares, '.0%')}; median "
            f"{speed['features']:.2f} of {speed['tcp']:.2f} GB/s per rank, all ranks at once; "
            f"all_to_all of gloo: {speed['gloo']:.2f}); they take {work['features']:.2f} seconds "
            f"of a processor per GB, sockets {work['tcp']:.2f}, gloo {work['gloo']:.2f}"
        )
    return said


def _methods(found: Mapping[str, Any]) -> list[str]:
    """The traffic of the graph partitioned by several methods, compared with the first one."""
    if "compared" not in found:
        return []
    graph, cache = found["compared"], found["settings"]["cache"]
    seeds = min(found["settings"]["batch_size"], METHOD_BATCH_SIZE)
    first = graph["methods"][0]
    whole = remote_bytes(found, "none", first)
    said = []
    for method in graph["methods"]:
        plain, cached = (remote_bytes(found, name, method) for name in ("none", "placed"))
        less = "" if method == first else f" ({1 - plain / whole:.0%} less)"
        said.append(
            f"{method} {plain / _MB:.2f} MB{less}, with a cache of {cache:.0%} "
            f"{cached / _MB:.2f} MB ({1 - cached / whole:.0%} less)"
        )
    said_of = (
        f"features from other ranks per batch of {seeds} seeds of {graph['name']} "
        f"({graph['nodes']:,} nodes, {graph['edges']:,} directed edges, {graph['features']:,} fp32 "
        f"features, {graph['parts']} parts)"
    )
    return [f"{said_of}: {'; '.join(said)}"]


def _complaint(args: argparse.Namespace) -> str | None:
    if not 0 < args.cache <= 1:
        return "--cache must be a share, above 0 and at most 1"
    try:
        if args.link is not None:
            dist_network.rate(args.link)
    except ValueError as error:
        return f"--link: {error}"
    return None


BENCHMARK = Benchmark(
    "dist",
    __doc__,
    {
        "graph (power law, generated)": {
            "nodes": Option(400_000),
            "edges": Option(8_000_000, "directed"),
            "features": Option(128, "columns of fp32"),
            "npz": Option(help="a file with a graph of nodes with x and y instead"),
            "method": Option("random", "how it is partitioned"),
            "parts": Option(help="as many as ranks", type=int),
            "compare_npz": Option(help="see also what travels of the graph of another file"),
            "compare_methods": Option(
                ["random", "metis"],
                "by which that one is partitioned, one after the other (default: random,metis)",
                type=lambda text: text.split(","),
            ),
        },
        "how": {
            **FOLDER,
            "ranks": Option(2, least=2),
            "threads": Option(1, "of each rank"),
            "cache": Option(0.2, "share of the features in a cache"),
            "batches": Option(20, "of each rank in an epoch", least=1),
            "batch_size": Option(512),
            "num_neighbors": Option([15, 10], "of each hop, as 15,10"),
            "hidden": Option(64),
            "in_flight": Option(4, "batches", least=1),
            "latency": Option(0.05, "seconds, added to answers"),
            "latency_batches": Option(24, "of each rank, while late"),
            "latency_batch_size": Option(32, "of these"),
            "link": Option(
                help="also on a network of this speed, such as 10gbit (needs root and iproute2)"
            ),
            "rows": Option(40_000, "of a message"),
            "messages": Option(60, "of a round"),
            "shared_batches": Option(60, "of each rank, mappings shared"),
            "rounds": Option(9, least=1),
            "seed": Option(0),
            "timeout": Option(120.0, "seconds, of a request"),
        },
    },
    measure,
    report,
    {
        "nodes": 4_000, "edges": 40_000, "features": 16, "batches": 4, "batch_size": 64,
        "rows": 500, "messages": 4, "rounds": 1, "shared_batches": 4, "latency_batches": 8,
        "num_neighbors": [4, 3],
    },
    _complaint,
)  # fmt: skip
