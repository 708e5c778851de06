"""Layers and the ops behind them: time and memory beside PyG and ``torch.sparse.mm``.

Every op and every layer runs on a whole generated graph and on blocks as a neighbour loader samples
them, forward alone and with gradients; all sides of a comparison take turns within a round, rounds
are repeated, medians are given. For ops of attention PyG's side is its layer's attention and
aggregation, without the projections before it; layers are compared with all that they do, and two
SAGE layers by a training step on a loader's batches. For ops the report gives the rate at which
rows of features are read (one for every edge, however many of them are in a cache) beside the
machine's measured copy bandwidth.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from pyg_scale.cli.bench import (
    conv_cases,
    conv_layers,
    conv_report,
    conv_steps,
    environment,
    files,
    memory,
)
from pyg_scale.cli.bench.conv_cases import OPS, OURS, Case, Graph
from pyg_scale.cli.bench.conv_layers import LAYERS
from pyg_scale.cli.bench.conv_steps import STEPS
from pyg_scale.cli.bench.measure import in_one_line
from pyg_scale.datasets import planted_communities
from pyg_scale.loader import NeighborLoader
from pyg_scale.ops import library
from pyg_scale.ops.memory import trim

QUICK = {"nodes": 3000, "edges": 30_000, "rounds": 2, "batch_size": 64, "hidden": 32}
_COPY_BYTES = 1 << 28
_MOST_ROUNDS, _SHORT_SECONDS = 100, 1.0


def main(argv: Sequence[str]) -> int:
    """Run ``pyg-scale bench conv``."""
    args = _arguments(argv)
    gc.collect()
    gc.freeze()  # what is there by now is not looked through again before every measurement
    try:
        return _run(args, argv)
    finally:
        gc.unfreeze()


def _run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    os.environ.setdefault("PYG_SCALE_KERNELS", "require")
    library.compiled()  # raises at once, not after the graph was made
    if args.threads:
        torch.set_num_threads(args.threads)
    found: dict[str, Any] = {
        "benchmark": "conv",
        "command": environment.command("conv", argv),
        "environment": environment.describe(),
        "settings": {k: v for k, v in vars(args).items() if k not in ("json", "png", "report")},
        "copy_bytes_per_s": copy_bandwidth(),
        "graphs": [],
        "cases": [],
    }
    data = planted_communities(args.nodes, args.edges, 16, 1)
    for graph in _graphs(data, args):
        found["graphs"].append(
            _described(graph.name, graph.num_src, graph.num_dst, graph.num_edges)
        )
        torch.manual_seed(0)
        for name in [*args.ops, *args.layers]:
            print(f"measuring {name} on {graph.name}", file=sys.stderr)
            make = conv_cases.cases if name in OPS else conv_layers.layer_cases
            found["cases"] += _measured(make(graph, args.channels, args.heads, [name]), args)
    if args.steps:
        batches = conv_steps.batches(data, args.num_neighbors, args.batch_size)
        nodes, edges = batches[0].num_nodes, batches[0].num_edges
        reached = int(batches[0].edge_index[1].unique().numel())
        found["graphs"].append(_described(conv_steps.GRAPH, nodes, reached, edges))
        torch.manual_seed(0)
        for name in args.steps:
            print(f"measuring a step of {name}", file=sys.stderr)
            cases = conv_steps.step_cases(batches, args.hidden, [name])
            found["cases"] += _measured(cases, args)
    found["environment"]["load_average_after"] = memory.load_average()
    print(conv_report.terminal(found))
    files.write(
        found,
        args.json,
        args.png,
        args.report,
        draw=conv_report.draw,
        markdown=conv_report.markdown,
    )
    return 0


def copy_bandwidth(rounds: int = 5) -> float:
    """Bytes per second that torch reads and writes when it copies a large tensor."""
    source = torch.ones(_COPY_BYTES // 4)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - start)
    return 2 * _COPY_BYTES / median(seconds[1:])


def _described(name: str, sources: int, destinations: int, edges: int) -> dict[str, Any]:
    return {"name": name, "sources": sources, "destinations": destinations, "edges": edges}


def _measured(cases: Sequence[Case], args: argparse.Namespace) -> list[dict[str, Any]]:
    """What was found, forward alone and with gradients apart."""
    for _, group in groupby(cases, key=lambda case: case.backward):
        _measure(list(group), args.rounds, 0.0 if args.quick else _SHORT_SECONDS)
    return [case.to_dict() for case in cases]


def _measure(cases: Sequence[Case], rounds: int, seconds: float) -> None:
    """Memory of a first step, then ``rounds`` others, or more for some seconds, sides in turn."""
    for case in cases:
        gc.collect()
        trim()
        memory.give_back()
        before = memory.resident()
        memory.reset_peak()
        try:
            case.step()
        except Exception as error:
            if case.side == OURS:
                raise
            case.error = in_one_line(error)
            continue
        top = memory.peak()
        case.peak_bytes = None if top is None or before is None else max(0, top - before)
    begin = time.perf_counter()
    for turn in range(_MOST_ROUNDS):
        if turn >= rounds and time.perf_counter() - begin > seconds:
            break  # short steps take more rounds, as one interruption is as long as they are
        for case in cases:
            if not case.error:
                start = time.perf_counter()
                case.step()
                case.seconds.append(time.perf_counter() - start)


# Graphs ###################################################################################


def _graphs(data: Data, args: argparse.Namespace) -> list[Graph]:
    size = int(data.num_nodes or 0)
    whole = Graph("whole graph", data.edge_index, size, size)
    loader = NeighborLoader(
        data, args.num_neighbors, batch_size=args.batch_size, shuffle=True, seed=0
    )
    batch = next(iter(loader))
    nodes, edges = batch.num_sampled_nodes, batch.num_sampled_edges
    blocks = []
    for hops in range(len(args.num_neighbors), 0, -1):  # as layers need them, trimmed
        index: Tensor = batch.edge_index[:, : sum(edges[:hops])]
        sizes = sum(nodes[: hops + 1]), sum(nodes[:hops])
        blocks.append(Graph(f"block of {hops} hops", index, *sizes, is_block=True))
    return [whole, *blocks[: args.blocks]]


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="pyg-scale bench conv",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_argument_group("what is measured")
    what.add_argument("--nodes", type=files.count, default=100_000)
    what.add_argument("--edges", type=files.count, default=1_500_000, help="directed")
    what.add_argument("--channels", type=int, default=128, help="of all heads together, fp32")
    what.add_argument("--heads", type=int, default=4)
    what.add_argument("--batch-size", type=int, default=1024)
    what.add_argument("--num-neighbors", type=files.numbers, default=[15, 10], metavar="K,K,...")
    what.add_argument("--blocks", type=int, default=1, help="how many layers' blocks, the largest")
    for option, among in (("--ops", OPS), ("--layers", LAYERS), ("--steps", tuple(STEPS))):
        what.add_argument(
            option,
            type=partial(_names, among),
            default=list(among),
            metavar="NAME,...",
            help=f"none, or of: {', '.join(among)}",
        )
    what.add_argument("--hidden", type=int, default=256, help="channels between layers of a step")
    what.add_argument("--rounds", type=int, default=7)
    what.add_argument("--threads", type=int, default=0, help="torch's own number if 0")
    what.add_argument("--quick", action="store_true", help="a small graph, to see that it runs")
    files.add_output(parser)
    if "--quick" in argv:
        parser.set_defaults(**QUICK)
    args = parser.parse_args(argv)
    for name in ("rounds", "channels", "heads", "batch_size", "hidden"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if args.channels % args.heads:
        parser.error(f"--channels {args.channels} must be a multiple of --heads {args.heads}")
    return args


def _names(among: Sequence[str], text: str) -> list[str]:
    names = [] if text == "none" else [part.strip() for part in text.split(",")]
    for name in names:
        if name not in among:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(among)}")
    return names
