"""Appends to a graph directory, and what they cost those who read it.

A generated graph is saved as a directory. Each round appends edges in bulk, each append a snapshot
that is on the disk when it returns, then single edges and nodes through an ``Appender``. The newest
snapshot is opened and sampled, in turns with a directory of the same graph that was saved as a
whole, and a predictor takes it. Then it is compacted, while another thread goes on appending.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch_geometric.nn import GraphSAGE

import pyg_scale
from pyg_scale.loader import NeighborLoader
from pyg_scale.serving import Predictor
from pyg_scale_bench import graphs
from pyg_scale_bench.benchmark import FOLDER, Benchmark, Option
from pyg_scale_bench.chart import Bar, Panel
from pyg_scale_bench.report import Report, Table

_SEED = 0
_PUBLISHED = 7_600
"""Updates per second that RIPPLE++ reports for a products-sized graph (arXiv 2601.12347).

They include updating embeddings, on the machine of the paper.
"""


def measure(args: argparse.Namespace, found: dict[str, Any]) -> None:
    """Make the graph, and append to copies of it."""
    before = torch.get_num_threads()
    torch.set_num_threads(args.threads)
    try:
        _measure(args, found)
    finally:
        torch.set_num_threads(before)


def _measure(args: argparse.Namespace, found: dict[str, Any]) -> None:
    folder = Path(args.dir).absolute()
    data = graphs.cached(None, args.nodes, args.edges, args.features)
    for name in [name for name in data.keys() if name not in ("x", "edge_index")]:  # noqa: SIM118
        del data[name]
    pyg_scale.save(data, folder / "base")
    found["rounds"] = []
    for turn in range(args.rounds + 1):  # the first one warms up
        print(f"round {turn}", file=sys.stderr)
        shutil.copytree(folder / "base", folder / "graph")
        result = _Round(args, folder, data, turn).run()
        if turn:
            found["rounds"].append(result)
        for name in ("graph", "whole"):
            shutil.rmtree(folder / name)


class _Round:
    """Appends to a fresh copy of the graph, and reads it.

    Args:
        args: The options.
        folder: Has the copy, as ``graph``.
        data: The graph.
        turn: The number of the round, which decides what is appended.
    """

    def __init__(self, args: argparse.Namespace, folder: Path, data: Any, turn: int) -> None:
        self.args, self.folder, self.data = args, folder, data
        self.path = folder / "graph"
        self._generator = torch.Generator().manual_seed(turn)

    def run(self) -> dict[str, float]:
        """Every number of a round."""
        out = self._bulk() | self._single() | self._reading()
        return out | self._compaction()

    def _edges(self, count: int) -> torch.Tensor:
        return torch.randint(self.args.nodes, (2, count), generator=self._generator)

    def _bulk(self) -> dict[str, float]:
        """Edges per second, many in each snapshot."""
        pieces = [self._edges(self.args.bulk) for _ in range(self.args.appends)]
        seconds = [_seconds(partial(pyg_scale.append, self.path, edges=e)) for e in pieces]
        self._appended = torch.cat(pieces, dim=1)
        return {"bulk": self._appended.size(1) / sum(seconds), "append_seconds": median(seconds)}

    def _single(self) -> dict[str, float]:
        """Updates per second, each of which is a call: edges, and a node now and then."""
        ends = self._edges(self.args.updates).t().tolist()
        row = torch.zeros(self.args.features)
        times = []

        def update() -> None:
            with pyg_scale.Appender(self.path, max_rows=self.args.group) as appender:
                for number, (src, dst) in enumerate(ends):
                    if number % 100 == 99:
                        appender.add_node(x=row)
                    else:
                        appender.add_edge(src, dst)

        times.append(_seconds(update))
        kept = [pair for number, pair in enumerate(ends) if number % 100 != 99]
        self._appended = torch.cat([self._appended, torch.tensor(kept).view(-1, 2).t()], dim=1)
        return {"single": len(ends) / times[0]}

    def _reading(self) -> dict[str, float]:
        """The first batch of a snapshot, and later ones beside those of the graph as a whole."""
        whole = self.data.clone()
        added = self.args.updates // 100
        whole.x = torch.cat([whole.x, torch.zeros(added, self.args.features)])
        whole.num_nodes = len(whole.x)
        whole.edge_index = torch.cat([whole.edge_index, self._appended], dim=1)
        pyg_scale.save(whole, self.folder / "whole")
        begin = time.perf_counter()
        opened = pyg_scale.open(self.path)
        middle = time.perf_counter()
        size = self.args.batches * self.args.batch_size
        seeds = torch.randperm(self.args.nodes, generator=self._generator)[:size].sort().values
        next(iter(self._loader(opened, seeds)))
        out = {"open": middle - begin, "first_batch": time.perf_counter() - middle}
        sides = (opened, pyg_scale.open(self.folder / "whole"))
        loaders = [self._loader(graph, seeds) for graph in sides]  # of the same batches
        seconds: list[list[float]] = [[], []]
        for _ in range(self.args.repeats):
            for loader, spent in zip(loaders, seconds):
                spent.append(_seconds(partial(_drain, loader)))
        out["sampled"], out["sampled_whole"] = (median(each) for each in seconds)
        out["slower"] = median(a / b for a, b in zip(*seconds))
        model = GraphSAGE(self.args.features, 8, num_layers=len(self.args.num_neighbors))
        with Predictor(model, self.path, self.args.num_neighbors, seed=_SEED) as predictor:
            predictor.predict([0])
            pyg_scale.append(self.path, edges=self._edges(1))
            out["refresh"] = _seconds(predictor.refresh)
        return out

    def _loader(self, graph: Any, seeds: torch.Tensor) -> NeighborLoader:
        return NeighborLoader(
            graph,
            self.args.num_neighbors,
            seeds,
            batch_size=self.args.batch_size,
            shuffle=True,
            seed=_SEED,
        )

    def _compaction(self) -> dict[str, float]:
        """Seconds of a compaction, and edges per second that are appended meanwhile."""
        done = threading.Event()
        counted = [0]

        def go_on() -> None:
            while not done.is_set():
                pyg_scale.append(self.path, edges=self._edges(self.args.bulk // 10))
                counted[0] += self.args.bulk // 10

        thread = threading.Thread(target=go_on)
        thread.start()
        try:
            seconds = _seconds(lambda: pyg_scale.compact(self.path))
            during = counted[0] / seconds
        finally:
            done.set()
            thread.join()
        return {"compaction": seconds, "bulk_during_compaction": during}


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _drain(loader: NeighborLoader) -> None:
    for _ in loader:
        pass


# Report ###################################################################################

_ROWS = {
    "bulk": ("edges appended in bulk, per second", 1.0, ",.0f"),
    "append_seconds": ("one append of them, ms", 1e3, ",.1f"),
    "single": ("single updates, per second", 1.0, ",.0f"),
    "open": ("opening the snapshot, ms", 1e3, ".1f"),
    "first_batch": ("its in-edges and the first batch, ms", 1e3, ",.0f"),
    "slower": ("sampling and features: time / that of a graph saved whole", 1.0, ".2f"),
    "refresh": ("a predictor takes a new snapshot, ms", 1e3, ",.0f"),
    "compaction": ("compaction, seconds", 1.0, ".2f"),
    "bulk_during_compaction": ("edges appended during it, per second", 1.0, ",.0f"),
}


def report(found: Mapping[str, Any]) -> Report:
    """The report of a run."""
    settings, rounds = found["settings"], found["rounds"]
    rows = []
    for name, (label, scale, form) in _ROWS.items():
        values = sorted(each[name] * scale for each in rounds)
        rows.append([label, *(f"{v:{form}}" for v in (median(values), values[0], values[-1]))])
    size = ", ".join(f"{settings[name]:,} {name}" for name in ("nodes", "edges", "features"))
    appended = f"{settings['appends']} appends of {settings['bulk']:,} edges, then "
    appended += f"{settings['updates']:,} single updates (a node in a hundred, else an edge) in "
    appended += f"groups of {settings['group']:,}; each snapshot is flushed to the disk"
    how = f"{settings['threads']} thread(s) of torch, neighbours {settings['num_neighbors']}, "
    how += f"batches of {settings['batch_size']:,}; {settings['rounds']} rounds"
    published = f"RIPPLE++ reports {_PUBLISHED:,} updates/s for a products-sized graph, with "
    published += "embeddings kept up to date, on another machine"
    panels = []
    for name, unit in (("bulk", "edges/s"), ("single", "updates/s"), ("slower", "times as long")):
        values = [each[name] for each in rounds]
        spread = (min(values), max(values))
        bar = Bar("", median(values), "pyg_scale", spread=spread)
        panels.append(Panel(_ROWS[name][0], [bar], unit))
    return Report(
        found,
        [size, appended, how, published],
        [Table(["what", "median", "least", "most"], rows, "Graphs that change", align="lr")],
        [panels],
        "Appending to a graph that others read",
    )


BENCHMARK = Benchmark(
    "streaming",
    __doc__,
    {
        "graph": {
            "nodes": Option(400_000),
            "edges": Option(10_000_000, "directed"),
            "features": Option(128, "columns"),
        },
        "how": {
            **FOLDER,
            "bulk": Option(200_000, "edges of an append", least=10),
            "appends": Option(5, least=1),
            "updates": Option(100_000, "single ones", least=100),
            "group": Option(10_000, "single updates of a snapshot", least=1),
            "num_neighbors": Option([15, 10], "of each hop, as 15,10"),
            "batch_size": Option(512, least=1),
            "batches": Option(50, "to sample", least=1),
            "repeats": Option(5, "of sampling, in turns", least=1),
            "threads": Option(1, "of torch", least=1),
            "rounds": Option(5, least=1),
        },
    },
    measure,
    report,
    {
        "nodes": 5_000,
        "edges": 60_000,
        "features": 16,
        "bulk": 5_000,
        "appends": 2,
        "updates": 2_000,
        "group": 500,
        "batches": 4,
        "repeats": 3,
        "rounds": 1,
    },
)
