"""Steps of random walks, beside those of torch-cluster and of pyg-lib where they are installed.

All walk on the same edges, grouped by their sources before, from the same nodes. Of the others
torch-cluster has no weights, and pyg-lib neither weights nor node2vec's ``p`` and ``q``.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from pyg_scale.sampler import random_walk
from pyg_scale_bench import graphs
from pyg_scale_bench.benchmark import Option, Options
from pyg_scale_bench.chart import Bar, Panel
from pyg_scale_bench.report import Table
from pyg_scale_bench.rounds import OURS, Turns, in_one_line, in_turns, rate

OPTIONS: Options = {
    "walks": Option(40_000, least=1),
    "walk_length": Option(20, least=1),
}

QUICK = {"walks": 500}

PEERS = {"torch-cluster": "torch_cluster", "pyg-lib": "pyg_lib"}
"""Packages with walks of their own, and their modules."""

_SEED = 0


def measure(args: argparse.Namespace, large: Callable[[], Data]) -> dict[str, Any]:
    """Walk in every way, in turns."""
    edges = large().edge_index
    start = graphs.seeds(args.nodes, args.walks)
    weight = torch.rand(edges.size(1), generator=torch.Generator().manual_seed(_SEED))
    kinds: dict[str, dict[str, Any]] = {
        "uniform": {},
        "weighted": {"weight": weight},
        "node2vec, p=0.5, q=2": {"p": 0.5, "q": 2.0},
    }
    missing = {name: _missing(name, args) for name in PEERS}
    indptr, target = _grouped(edges, args.nodes)
    cases = []
    for name, kind in kinds.items():
        options = {"seed": _SEED, "num_nodes": args.nodes, **kind}
        walk = partial(random_walk, edges, start, args.walk_length, **options)
        cases.append(Turns(side=OURS, name=name, run=partial(_steps, walk, start, args)))
        for peer, error in missing.items():
            if "weight" in kind:
                error = f"{peer} has no weights"
            p, q = kind.get("p", 1.0), kind.get("q", 1.0)
            theirs = partial(_walk_of, peer, indptr, target, start, args.walk_length, p, q)
            run = partial(_steps, theirs, start, args)
            cases.append(Turns(side=peer, name=name, run=run, error=error))
    return {"cases": in_turns(cases, args.rounds)}


def _missing(name: str, args: argparse.Namespace) -> str:
    if args.without_pyg:
        return "left out"
    if importlib.util.find_spec(PEERS[name]) is None:
        return f"{name} is not installed"
    try:
        importlib.import_module(PEERS[name])  # which makes its ops known to torch
    except Exception as error:
        return in_one_line(error)
    return ""


def _grouped(edges: Tensor, nodes: int) -> tuple[Tensor, Tensor]:
    """Beginnings ``[nodes + 1]`` of the edges of each source, and their destinations."""
    order = edges[0].argsort(stable=True)
    indptr = torch.zeros(nodes + 1, dtype=torch.int64)
    indptr[1:] = torch.bincount(edges[0], minlength=nodes).cumsum(0)
    return indptr, edges[1][order]


def _walk_of(name: str, *arguments: Any) -> Any:
    ops = torch.ops.torch_cluster if name == "torch-cluster" else torch.ops.pyg
    return ops.random_walk(*arguments)


def _steps(walk: Callable[[], Any], start: Tensor, args: argparse.Namespace) -> dict[str, float]:
    begin = time.perf_counter()
    walk()
    return {"seconds": time.perf_counter() - begin, "steps": start.numel() * args.walk_length}


def report(part: Mapping[str, Any], lines: list[str]) -> tuple[Table, list[Panel]]:
    """The table and the panel of what :func:`measure` found."""
    rows, bars = [], []
    names = dict.fromkeys(case["name"] for case in part["cases"])
    sides = {(case["name"], case["side"]): case for case in part["cases"]}
    for name in names:
        speed = rate(sides[name, OURS], "steps") / 1e6
        cells = [f"{speed:.2f}"]
        bars.append(Bar(name, speed))
        for peer in PEERS:
            if error := sides[name, peer]["error"]:
                cells += [error, ""]
                continue
            theirs = rate(sides[name, peer], "steps") / 1e6
            cells += [f"{theirs:.2f}", f"{speed / theirs:.1f}"]
            bars.append(Bar(name, theirs, peer))
        rows.append([name, *cells])
    header = ["walks", "M steps/s"]
    header += [text for peer in PEERS for text in (f"{peer}'s", f"times {peer}'s")]
    return Table(header, rows, "Walks", align="lr"), [Panel("Steps of walks", bars, "M steps/s")]
