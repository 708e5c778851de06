"""An epoch over a stream of events: the last neighbours of each node, beside PyG's buffer.

The stream has the shape of JODIE's Wikipedia stream: 157,474 events of 8,227 users and 1,000 pages.
A batch has successive events. ``buffer`` and ``pyg`` are the loop of TGN without its model: events
with as many negatives, the last events of all nodes in them, and their insertion, with
``TemporalDataLoader`` and ``LastNeighborLoader`` of pyg_scale and of PyG. ``one-hop`` and
``two-hops`` are ``NeighborLoader`` with ``temporal_strategy="last"`` around the ends of events at
their times, also with workers.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from statistics import median
from typing import Any

import torch
from torch_geometric.data import Data, TemporalData
from torch_geometric.loader import TemporalDataLoader as PyGEvents
from torch_geometric.nn.models.tgn import LastNeighborLoader as PyGBuffer

from pyg_scale.datasets import event_stream
from pyg_scale.loader import LastNeighborLoader, NeighborLoader, TemporalDataLoader
from pyg_scale_bench.benchmark import Benchmark, Option, names_of, numbers
from pyg_scale_bench.chart import Bar, Panel
from pyg_scale_bench.report import Report, Table

HOPS = {"one-hop": 1, "two-hops": 2}
WAYS = ("pyg", "buffer", *HOPS)
LABELS = {
    "pyg": "PyG's LastNeighborLoader",
    "buffer": "LastNeighborLoader",
    "one-hop": "NeighborLoader, one hop",
    "two-hops": "NeighborLoader, two hops",
}


# Measuring ################################################################################


def measure(args: argparse.Namespace, found: dict[str, Any]) -> None:
    """Make the stream, and read it once in every way, in turns."""
    before = torch.get_num_threads()
    torch.set_num_threads(args.threads)
    try:
        found["rounds"] = _rounds(args)
    finally:
        torch.set_num_threads(before)


def _rounds(args: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    stream = event_stream(args.events, args.users, args.items, num_features=args.features)
    epoch = Epoch(stream, args)
    cases = [name for name in args.ways if name not in HOPS]
    cases += [f"{name}, {k} workers" for name in args.ways if name in HOPS for k in args.workers]
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
    for turn in range(args.rounds + 1):  # the first one warms up
        for name in cases:
            begin, cpu = time.perf_counter(), time.process_time()
            edges = epoch.run(name)
            result = {
                "seconds": time.perf_counter() - begin,
                "cpu": time.process_time() - cpu,
                "edges": float(edges),
            }
            if turn:
                rounds[name].append(result)
    return rounds


class Epoch:
    """An epoch over a stream, in several ways.

    Args:
        stream: The events.
        args: The options of ``pyg-scale bench events``.
    """

    def __init__(self, stream: TemporalData, args: argparse.Namespace) -> None:
        self._stream, self._args = stream, args
        ends = [stream.src, stream.dst] if args.ends == "both" else [stream.src]
        self._seeds = torch.stack(ends, dim=1).view(-1)
        self._times = stream.t.repeat_interleave(len(ends))
        self._seeds_per_batch = args.batch_size * len(ends)
        src, dst = stream.src, stream.dst
        edge_index = torch.stack([torch.cat([src, dst]), torch.cat([dst, src])])
        self._graph = Data(
            edge_index=edge_index, t=stream.t.repeat(2), num_nodes=args.users + args.items
        )

    def run(self, name: str) -> int:
        """Read the stream once.

        Args:
            name: A way; for ``NeighborLoader`` followed by the number of workers.

        Returns:
            The number of edges in all neighbourhoods.
        """
        way, _, workers = name.partition(", ")
        if way in HOPS:
            return self._sampled([self._args.size] * HOPS[way], int(workers.split()[0]))
        events, buffer = (
            (PyGEvents, PyGBuffer) if way == "pyg" else (TemporalDataLoader, LastNeighborLoader)
        )
        neighbors = buffer(self._args.users + self._args.items, self._args.size)
        count = 0
        for batch in events(self._stream, self._args.batch_size, neg_sampling_ratio=1.0):
            count += neighbors(batch.n_id)[2].numel()
            neighbors.insert(batch.src, batch.dst)
        return count

    def _sampled(self, num_neighbors: list[int], workers: int) -> int:
        loader = NeighborLoader(
            self._graph,
            num_neighbors,
            self._seeds,
            self._times,
            time_attr="t",
            temporal_strategy="last",
            batch_size=self._seeds_per_batch,
            num_workers=workers,
        )
        return sum(batch.edge_index.size(1) for batch in loader)


# Report ###################################################################################


def middle_of(found: Mapping[str, Any], name: str, what: str) -> float:
    """The median of a number over the rounds of a case."""
    return median(each[what] for each in found["rounds"][name])


def of_pyg(found: Mapping[str, Any], name: str) -> float:
    """The median over rounds of a case's seconds as a share of those of PyG's buffer."""
    pairs = zip(found["rounds"][name], found["rounds"]["pyg"], strict=True)
    return median(mine["seconds"] / theirs["seconds"] for mine, theirs in pairs)


def label(name: str) -> str:
    """The name of a case in a report."""
    way, comma, workers = name.partition(", ")
    return LABELS[way] + comma + workers.removesuffix("s" if workers == "1 workers" else "")


def report(found: Mapping[str, Any]) -> Report:
    """The report of a run."""
    settings, rounds = found["settings"], found["rounds"]
    rows, bars = [], []
    for name, results in rounds.items():
        seconds = [each["seconds"] for each in results]
        rows.append(
            [
                label(name),
                f"{median(seconds):.2f}",
                f"{min(seconds):.2f}–{max(seconds):.2f}",
                f"{of_pyg(found, name):.2f}" if "pyg" in rounds else "",
                f"{middle_of(found, name, 'cpu'):.2f}",
                f"{middle_of(found, name, 'edges'):,.0f}",
            ]
        )
        side = "PyG" if name == "pyg" else "pyg_scale"
        spread = (min(seconds), max(seconds))
        bars.append(Bar(label(name), median(seconds), side, spread=spread))
    size = ", ".join(f"{settings[name]:,} {name}" for name in ("events", "users", "items"))
    ends = "both ends" if settings["ends"] == "both" else "the source"
    lines = [
        f"{size}; batches of {settings['batch_size']} events; the last {settings['size']} events",
        f"neighbourhoods of NeighborLoader are those of {ends} of each event, at its time",
        f"{settings['threads']} thread(s) of torch; medians of {settings['rounds']} rounds",
    ]
    header = ["way", "s an epoch", "low–high", "of PyG's buffer", "s of a processor", "edges"]
    return Report(
        found,
        lines,
        [Table(header, rows, "An epoch over the stream", align="lr")],
        [[Panel("Seconds of an epoch", bars, "s")]],
        "The last events of each node",
    )


BENCHMARK = Benchmark(
    "events",
    __doc__,
    {
        "stream": {
            "events": Option(157_474, least=1),
            "users": Option(8_227, least=1),
            "items": Option(1_000, least=1),
            "features": Option(1, "columns", least=1),
        },
        "how": {
            "ways": Option(list(WAYS), f"some of {','.join(WAYS)}", type=names_of(WAYS)),
            "batch_size": Option(200, "events of a batch", least=1),
            "size": Option(10, "last events of a node", least=1),
            "ends": Option("source", "the seeds of NeighborLoader", choices=("source", "both")),
            "workers": Option([0, 2], "of NeighborLoader, as 0,2", type=numbers),
            "threads": Option(1, "of torch", least=1),
            "rounds": Option(5, least=1),
        },
    },
    measure,
    report,
    {"events": 2_000, "users": 100, "items": 30, "rounds": 1},
)
