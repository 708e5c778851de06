"""Sampling and loading batches: edges per second, batches per second, memory.

Every case runs once per round, rounds are repeated, medians are given with the lowest and highest
round. PyG is measured in the same rounds wherever it can sample here (with pyg-lib or
torch-sparse); the report says so where it cannot. Building and generating a graph is not
part of any rate. A machine that does something else meanwhile gives numbers that mean nothing:
the load average before the run is in the report.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import NeighborLoader as PyGNeighborLoader
from torch_geometric.sampler import NeighborSampler as PyGNeighborSampler

from pyg_scale import plugins
from pyg_scale.cli.bench import environment, files, graphs, memory, peers, report, streams
from pyg_scale.cli.bench.measure import (
    LIMIT,
    OURS,
    PYG,
    Case,
    build,
    in_one_line,
    resident,
    run_rounds,
)
from pyg_scale.datasets import load, planted_communities
from pyg_scale.loader import NeighborLoader
from pyg_scale.ops import library

QUICK = {"nodes": 50_000, "edges": 1_000_000, "batches": 10, "repeats": 2, "warmup": 4}


def main(argv: Sequence[str]) -> int:
    """Run ``pyg-scale bench loader``."""
    args = _arguments(argv)
    os.environ.setdefault("PYG_SCALE_KERNELS", "require")
    library.compiled()  # raises at once, not after the graph was made
    found: dict[str, Any] = {
        "benchmark": "loader",
        "command": environment.command("loader", argv),
        "environment": environment.describe(),
        "settings": {k: v for k, v in vars(args).items() if k not in ("json", "png", "report")},
        "backends": [vars(backend) for backend in peers.backends()],
        "pyg_says": peers.what_pyg_says(),
    }
    data = _graph(args)
    found["graph"] = _describe_graph(data, args)
    cases: list[Case] = []
    found["builds"], found["resident"] = [], []
    for variant in args.variants:
        print(f"measuring {variant}", file=sys.stderr)
        form = graphs.variant_of(data, variant)
        group = _cases(form, variant, args, found["builds"])
        if variant == args.variants[0] and args.memory_batches:
            found["resident"] = _resident(group, args)
        run_rounds(group, args.repeats, args.warmup, args.batches, args.max_seconds)
        cases += group
        for case in group:
            case.release()
        del form, group
    if args.options:
        from pyg_scale.cli.bench import options

        del data
        found["option_nodes"] = options.num_nodes(args)
        cases += options.measure(args)
    found["cases"] = [case.to_dict() for case in cases]
    found["environment"]["load_average_after"] = memory.load_average()
    print(report.terminal(found))
    report.write(found, json_path=args.json, png_path=args.png, markdown_path=args.report)
    return 0


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="pyg-scale bench loader",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    graph = parser.add_argument_group("graph")
    graph.add_argument(
        "--data", help="an .npz archive or a data set of PyG by name, instead of a generated graph"
    )
    graph.add_argument("--nodes", type=int, default=2_400_000)
    graph.add_argument("--edges", type=int, default=120_000_000, help="directed")
    graph.add_argument("--features", type=int, default=100, help="columns of fp32")
    graph.add_argument("--cache", help="a folder that keeps the generated graph for the next run")
    what = parser.add_argument_group("what is measured")
    what.add_argument("--batch-size", type=int, default=1024)
    what.add_argument("--num-neighbors", type=files.numbers, default=[15, 10, 5], metavar="K,K,...")
    what.add_argument("--workers", type=files.numbers, default=[0, 1, 2], metavar="W,W,...")
    what.add_argument(
        "--variants",
        type=_variants,
        default=list(graphs.VARIANTS),
        help=f"comma-separated, of: {', '.join(graphs.VARIANTS)}",
    )
    what.add_argument(
        "--options", action="store_true", help="every option of the loaders, too, on smaller graphs"
    )
    what.add_argument("--no-pyg", action="store_true", help="leave PyG out")
    how = parser.add_argument_group("how")
    how.add_argument("--batches", type=int, default=40, help="on the clock, per round")
    how.add_argument("--warmup", type=int, default=5, help="batches before the clock starts")
    how.add_argument("--repeats", type=int, default=5, help="rounds")
    how.add_argument(
        "--max-seconds", type=float, default=20.0, help="after which a case's round ends early"
    )
    how.add_argument(
        "--memory-batches",
        type=int,
        default=1000,
        help="over which resident memory is watched; 0 for not at all",
    )
    how.add_argument(
        "--quick", action="store_true", help="a small graph and few batches, to see that it runs"
    )
    files.add_output(parser)
    if "--quick" in argv:
        parser.set_defaults(**QUICK, variants=["int64 unsorted"], memory_batches=0)
    args = parser.parse_args(argv)
    for name in ("batch_size", "batches", "repeats"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if args.data and args.options:
        parser.error("--options generates graphs of its own: leave --data out")
    return args


def _variants(text: str) -> list[str]:
    names = [part.strip() for part in text.split(",")]
    for name in names:
        if name not in graphs.VARIANTS:
            raise argparse.ArgumentTypeError(
                f"{name!r} is none of {', '.join(map(repr, graphs.VARIANTS))}"
            )
    return names


# Graph ########################################################################################


def _graph(args: argparse.Namespace) -> Data:
    if args.data:
        data = load(args.data)
        if isinstance(data, HeteroData):
            raise SystemExit(
                f"--data {args.data} is heterogeneous: this benchmark takes one type "
                f"of nodes; --options measures generated heterogeneous graphs"
            )
        return data
    return cached(args.cache, args.nodes, args.edges, args.features)


def cached(folder: str | None, nodes: int, edges: int, features: int) -> Data:
    """A generated graph; kept in ``folder`` as plain ``.npy`` files if there is one."""
    if folder is None:
        return planted_communities(nodes, edges, 47, features)
    root = Path(folder) / f"planted-{nodes}-{edges}-{features}"
    if not root.is_dir():
        data = planted_communities(nodes, edges, 47, features)
        part = root.with_name(f"{root.name}.{os.getpid()}.part")
        part.mkdir(parents=True)
        np.save(part / "edge_index.npy", data.edge_index.numpy())
        if features:
            np.save(part / "x.npy", data.x.numpy())
        part.rename(root)
        return data
    data = Data(edge_index=torch.from_numpy(np.load(root / "edge_index.npy")), num_nodes=nodes)
    if features:
        data.x = torch.from_numpy(np.load(root / "x.npy"))
    return data


def _describe_graph(data: Data, args: argparse.Namespace) -> dict[str, Any]:
    return {
        "name": args.data or "generated: power law, planted communities",
        "nodes": data.num_nodes,
        "edges": data.edge_index.shape[1],
        "features": 0 if data.x is None else data.x.shape[1],
        "bytes_per_node": streams.row_bytes(data),
    }


# Cases ########################################################################################


def _cases(
    data: Data, variant: str, args: argparse.Namespace, builds: list[dict[str, Any]]
) -> list[Case]:
    most, size = max(1, *args.workers), args.batch_size
    rounds = max(args.memory_batches, args.warmup + args.batches + 2 * most)
    node = graphs.seeds(data.num_nodes, rounds * size)
    options = {"num_neighbors": args.num_neighbors, "is_sorted": graphs.is_sorted(variant)}
    if options["is_sorted"]:  # most scripts do not say so, and PyG sorts again
        _samplers(data, f"{variant}, not declared", args, builds, options | {"is_sorted": False})
    native, theirs = _samplers(data, variant, args, builds, options)

    cases = [
        Case(
            "sampler",
            "pyg_scale, 1 thread",
            OURS,
            variant,
            partial(streams.sampled, native, node, size),
        ),
    ]
    for name, sampler in theirs.items():
        cases.append(
            Case(
                "sampler",
                f"PyG on {name}, 1 thread",
                PYG,
                variant,
                partial(streams.sampled_by_pyg, name, sampler, node, size),
            )
        )
    cases.append(
        Case(
            "limit",
            f"sampling and a plain copy, {most} threads",
            LIMIT,
            variant,
            partial(streams.limit, native, data, node, size, most),
        )
    )
    for workers in args.workers:
        kwargs = {"input_nodes": node, "batch_size": size, "num_workers": workers} | options
        loader = partial(NeighborLoader, data, **kwargs, seed=0)
        cases.append(
            Case(
                "loader",
                f"pyg_scale, {workers} workers",
                OURS,
                variant,
                partial(streams.loaded, loader),
                workers,
            )
        )
        for name, sampler in theirs.items():
            loader = partial(PyGNeighborLoader, data, **kwargs, neighbor_sampler=sampler)
            cases.append(
                Case(
                    "loader",
                    f"PyG on {name}, {workers} workers",
                    PYG,
                    variant,
                    partial(streams.loaded_by_pyg, name, loader),
                    workers,
                )
            )
    return cases


def _samplers(
    data: Data,
    variant: str,
    args: argparse.Namespace,
    builds: list[dict[str, Any]],
    options: dict[str, Any],
) -> tuple[Any, dict[str, Any]]:
    """Our sampler, and PyG's by what it runs on; ``builds`` gets what making them took."""
    make = partial(plugins.get("sampler", "native"), data, **options)
    native = build(builds, OURS, variant, make)
    theirs: dict[str, Any] = {}
    for backend in [] if args.no_pyg else peers.backends():
        if backend.version:
            with peers.using(backend.name):
                make = partial(PyGNeighborSampler, data, **options)
                theirs[backend.name] = build(builds, f"PyG on {backend.name}", variant, make)
    return native, theirs


def _resident(group: Sequence[Case], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Memory of the loaders with the most workers; ours first, before anything was loaded."""
    found = []
    for case in group:
        if case.group == "loader" and case.workers == max(args.workers):
            try:
                found.append(
                    resident(
                        case.label,
                        case.variant,
                        case.stream,
                        args.memory_batches,
                        max_seconds=4 * args.max_seconds,
                    )
                )
            except Exception as error:
                if case.side == OURS:
                    raise
                case.error = in_one_line(error)
    return found
