"""Sampling and loading batches: edges per second, batches per second, memory.

Every case runs once per round, rounds are repeated, and medians are given with the lowest and
highest round. PyG is measured in the same rounds if it can sample on this machine (with pyg-lib or
torch-sparse); otherwise the report says so. Building and generating a graph is not part of any
rate. Numbers from a busy machine are meaningless: the report has the load average before the run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import NeighborLoader as PyGNeighborLoader
from torch_geometric.sampler import NeighborSampler as PyGNeighborSampler

from pyg_scale import plugins
from pyg_scale.datasets import load
from pyg_scale.loader import NeighborLoader
from pyg_scale_bench import graphs, loader_options, peers, streams
from pyg_scale_bench.benchmark import Benchmark, Option, names_of
from pyg_scale_bench.loader_report import report
from pyg_scale_bench.rounds import OURS, PYG, attempt, take_turns
from pyg_scale_bench.streams import LIMIT, Case, Stream


def measure(args: argparse.Namespace, found: dict[str, Any]) -> None:
    """Measure every form of the graph and, if requested, the options of the loaders."""
    data = _graph(args)
    found |= {
        "backends": [vars(backend) for backend in peers.backends()],
        "pyg_says": peers.what_pyg_says(),
        "graph": {
            "name": args.data or "generated: power law, planted communities",
            "nodes": data.num_nodes,
            "edges": data.edge_index.shape[1],
            "features": 0 if data.x is None else data.x.shape[1],
            "bytes_per_node": streams.row_bytes(data),
        },
        "builds": [],
        "resident": [],
    }
    cases: list[Case] = []

    def turns(group: Sequence[Case], max_seconds: float) -> None:
        how = {"warmup": args.warmup, "batches": args.batches, "max_seconds": max_seconds}
        take_turns(group, lambda case: case.measure(**how), args.repeats)
        cases.extend(group)

    for variant in args.variants:
        print(f"measuring {variant}", file=sys.stderr)
        form = graphs.variant_of(data, variant)
        group = list(_cases(form, variant, args, found["builds"]))
        if variant == args.variants[0] and args.memory_batches:
            _watch_memory(group, args, found["resident"])
        turns(group, args.max_seconds)
        for case in group:
            case.release()
        del form, group
    if args.options:
        del data
        print("measuring every option", file=sys.stderr)
        found["option_nodes"] = loader_options.num_nodes(args)
        turns(list(loader_options.cases(args)), args.max_seconds / 4)
    found["cases"] = [case.to_dict() for case in cases]


def _graph(args: argparse.Namespace) -> Data:
    if not args.data:
        return graphs.cached(args.cache, args.nodes, args.edges, args.features)
    data = load(args.data)
    if isinstance(data, HeteroData):
        raise SystemExit(
            f"--data {args.data} is heterogeneous: this benchmark takes one type "
            f"of nodes; --options measures generated heterogeneous graphs"
        )
    return data


def _cases(
    data: Data, variant: str, args: argparse.Namespace, builds: list[dict[str, Any]]
) -> Iterator[Case]:
    most, size = max(1, *args.workers), args.batch_size
    rounds = max(args.memory_batches, args.warmup + args.batches + 2 * most)
    node = graphs.seeds(int(data.num_nodes or 0), rounds * size)
    options = {"num_neighbors": args.num_neighbors, "is_sorted": graphs.is_sorted(variant)}
    if options["is_sorted"]:  # most scripts do not declare it, and PyG sorts again
        _samplers(data, f"{variant}, not declared", args, builds, options | {"is_sorted": False})
    native, theirs = _samplers(data, variant, args, builds, options)

    def case(side: str, group: str, label: str, stream: Stream, workers: int | None = None) -> Case:
        return Case(
            side=side, group=group, label=label, variant=variant, stream=stream, workers=workers
        )

    alone = partial(streams.sampled, native, node, size)
    yield case(OURS, "sampler", "pyg_scale, 1 thread", alone)
    for name, sampler in theirs.items():
        alone = partial(streams.sampled_by_pyg, name, sampler, node, size)
        yield case(PYG, "sampler", f"PyG on {name}, 1 thread", alone)
    copy = partial(streams.limit, native, data, node, size, most)
    yield case(LIMIT, "limit", f"sampling and a plain copy, {most} threads", copy)
    for workers in args.workers:
        kwargs = {"input_nodes": node, "batch_size": size, "num_workers": workers} | options
        ours = partial(streams.loaded, partial(NeighborLoader, data, **kwargs, seed=0))
        yield case(OURS, "loader", f"pyg_scale, {workers} workers", ours, workers)
        for name, sampler in theirs.items():
            make = partial(PyGNeighborLoader, data, **kwargs, neighbor_sampler=sampler)
            stream = partial(streams.loaded_by_pyg, name, make)
            yield case(PYG, "loader", f"PyG on {name}, {workers} workers", stream, workers)


def _samplers(
    data: Data,
    variant: str,
    args: argparse.Namespace,
    builds: list[dict[str, Any]],
    options: dict[str, Any],
) -> tuple[Any, dict[str, Any]]:
    """Our sampler, and PyG's by package; ``builds`` gets the cost of making them."""
    make = partial(plugins.get("sampler", "native"), data, **options)
    native = streams.build(builds, OURS, variant, make)
    theirs: dict[str, Any] = {}
    for name in peers.working(args.no_pyg):
        with peers.using(name):
            make = partial(PyGNeighborSampler, data, **options)
            theirs[name] = streams.build(builds, f"PyG on {name}", variant, make)
    return native, theirs


def _watch_memory(
    group: Sequence[Case], args: argparse.Namespace, found: list[dict[str, Any]]
) -> None:
    """Memory of the loaders with the most workers; ours first, before anything is loaded."""

    def watch(case: Case) -> None:
        found.append(streams.resident(case, args.memory_batches, 4 * args.max_seconds))

    for case in group:
        if case.group == "loader" and case.workers == max(args.workers):
            attempt(case, watch)


def _complaint(args: argparse.Namespace) -> str | None:
    if args.data and args.options:
        return "--options generates graphs of its own: leave --data out"
    return None


BENCHMARK = Benchmark(
    "loader",
    __doc__,
    {
        "graph": {
            "data": Option(
                help="an .npz archive or a data set of PyG by name, instead of a generated graph"
            ),
            "nodes": Option(2_400_000),
            "edges": Option(120_000_000, "directed"),
            "features": Option(100, "columns of fp32"),
            "cache": Option(help="a folder that keeps the generated graph for the next run"),
        },
        "what is measured": {
            "batch_size": Option(1024, least=1),
            "num_neighbors": Option([15, 10, 5], "of each hop, as 15,10,5"),
            "workers": Option([0, 1, 2], "of loaders, as 0,1,2"),
            "variants": Option(
                list(graphs.VARIANTS),
                f"comma-separated, of: {', '.join(graphs.VARIANTS)}",
                names_of(graphs.VARIANTS),
            ),
            "options": Option(False, "every option of the loaders, too, on smaller graphs"),
            "no_pyg": Option(False, "leave PyG out"),
        },
        "how": {
            "batches": Option(40, "on the clock, per round", least=1),
            "warmup": Option(5, "batches before the clock starts"),
            "repeats": Option(5, "rounds", least=1),
            "max_seconds": Option(20.0, "after which a case's round ends early"),
            "memory_batches": Option(
                1000, "over which resident memory is watched; 0 for not at all"
            ),
        },
    },
    measure,
    report,
    {
        "nodes": 50_000, "edges": 1_000_000, "batches": 10, "repeats": 2, "warmup": 4,
        "variants": ["int64 unsorted"], "memory_batches": 0,
    },
    _complaint,
)  # fmt: skip
