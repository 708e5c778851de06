"""Train with and without a recorder: the share of an epoch that recording costs.

GraphSAGE is trained on the batches of a ``NeighborLoader``. Epochs without and with a ``Recorder``
take turns, and in every second pair the recorded one comes first. Each pair gives a ratio, and the
report has their median and quartiles. Beside that, the recorder alone: steps that do nothing, of a
loader that counts what ours count.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch

from pyg_scale.datasets import planted_communities
from pyg_scale.loader import NeighborLoader
from pyg_scale.loader.stats import Stats
from pyg_scale.train import Recorder
from pyg_scale_bench.benchmark import Benchmark, Option, size_of
from pyg_scale_bench.chart import Bar, Panel
from pyg_scale_bench.report import Report, Table
from pyg_scale_bench.rounds import threads_of_torch
from pyg_scale_bench.training import Trainer

CLASSES = 47
CLOCKS = {"cpu": "of the processor", "wall": "of the clock"}
LIMIT = 2.0
"""Percent of an epoch that recording may cost."""


# Measuring ################################################################################


def measure(args: argparse.Namespace, found: dict[str, Any]) -> None:
    """Measure pairs of epochs for every batch size, and the recorder alone."""
    data = planted_communities(args.nodes, args.edges, CLASSES, args.features)
    with threads_of_torch(args.threads), tempfile.TemporaryDirectory() as folder:
        found["alone"] = _alone(Path(folder) / "alone", args.empty_steps)
        found["cases"] = {
            str(size): _pairs(args, data, size, Path(folder) / str(size))
            for size in args.batch_sizes
        }


def _pairs(args: argparse.Namespace, data: Any, size: int, folder: Path) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    seeds = torch.randint(args.nodes, (args.steps * size,), generator=generator)
    options = {"batch_size": size, "num_workers": args.workers, "seed": 0}
    loader = NeighborLoader(data, args.num_neighbors, seeds, **options)
    trainer = Trainer(args.features, args.hidden, CLASSES)
    _epoch(trainer, loader, None)  # warms up
    pairs: list[dict[str, dict[str, float]]] = []
    with Recorder(folder) as recorder:
        for number in range(args.rounds):
            turns = ("plain", "recorded") if number % 2 == 0 else ("recorded", "plain")
            pair = {
                turn: _epoch(trainer, loader, recorder if turn == "recorded" else None)
                for turn in turns
            }
            pairs.append(pair)
    written = size_of(folder) / (args.rounds * args.steps)
    return {"pairs": pairs, "bytes_of_a_step": written}


def _epoch(trainer: Trainer, loader: Any, recorder: Recorder | None) -> dict[str, float]:
    """Train an epoch; its seconds, writing what was recorded included."""
    wall, cpu = time.perf_counter(), time.process_time()
    for batch in loader if recorder is None else recorder(loader):
        loss, _ = trainer.step(batch)
        if recorder is not None:
            recorder.log(loss=loss)
    if recorder is not None:
        recorder.flush()
    return {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}


class _Counts:
    """A loader that makes no batches, and counts as if it did."""

    def __init__(self, steps: int) -> None:
        self._steps, self._stats = steps, Stats()

    def __iter__(self) -> Iterator[None]:
        for number in range(self._steps):
            for stage in ("sample", "fetch", "wait"):
                self._stats.add_seconds(stage, 1e-3 + 1e-6 * number)
                self._stats.count(stage, rows=number, num_bytes=8 * number)
            yield None

    def stats(self) -> dict[str, Any]:
        counted = self._stats.as_dict()
        return {"epoch": counted, "total": counted}


def _alone(folder: Path, steps: int) -> float:
    """Seconds of a processor that a recorder takes for a step."""

    def seconds(batches: Iterable[Any], recorder: Recorder | None) -> float:
        loss, begin = torch.tensor(0.5), time.process_time()
        for _ in batches:
            if recorder is not None:
                recorder.log(loss=loss)
        if recorder is not None:
            recorder.flush()
        return time.process_time() - begin

    with Recorder(folder) as recorder:
        recorded = seconds(recorder(_Counts(steps)), recorder)
    return max(0.0, recorded - seconds(_Counts(steps), None)) / steps


# Report ###################################################################################


def costs(case: Mapping[str, Any], clock: str) -> tuple[float, float, float]:
    """Percent by which recorded epochs are longer: lower quartile, median, upper quartile."""
    ratios = [pair["recorded"][clock] / pair["plain"][clock] for pair in case["pairs"]]
    more = 100 * (torch.tensor(ratios, dtype=torch.float64) - 1)
    low, middle, high = more.quantile(more.new_tensor([0.25, 0.5, 0.75])).tolist()
    return low, middle, high


def report(found: Mapping[str, Any]) -> Report:
    """The report of a run."""
    settings, alone = found["settings"], found["alone"]
    rows, bars = [], []
    for size, case in found["cases"].items():
        step = median(pair["plain"]["cpu"] for pair in case["pairs"]) / settings["steps"]
        row = [size, f"{1e3 * step:.2f}"]
        for clock in CLOCKS:
            low, middle, high = costs(case, clock)
            row.append(f"{middle:+.2f} % ({low:+.2f} to {high:+.2f})")
        share = 100 * alone / step
        rows.append([*row, f"{share:.2f} %", f"{case['bytes_of_a_step']:.0f}"])
        low, middle, high = costs(case, "cpu")
        bars.append(Bar(f"{size} seeds, pairs of epochs", middle, spread=(low, high)))
        bars.append(Bar(f"{size} seeds, the recorder alone", share))
    lines = [
        f"a recorder alone takes {1e6 * alone:.0f} microseconds of a processor for a step",
        (
            f"{settings['rounds']} pairs of epochs of {settings['steps']} steps, "
            f"{settings['workers']} workers, {settings['threads']} thread(s) of torch; "
            "medians, with quartiles"
        ),
        "seconds of the processor are those of all threads of the process",
    ]
    header = ["seeds of a step", "ms of a step"]
    header += [f"more seconds {name}" for name in CLOCKS.values()]
    header += ["the recorder alone", "bytes written for a step"]
    return Report(
        found,
        lines,
        [Table(header, rows, "Recorded epochs beside plain ones", align="r")],
        [[Panel("Cost of recording", bars, "% of an epoch", mark=(LIMIT, "2 %"))]],
        "Recording an epoch of GraphSAGE",
    )


BENCHMARK = Benchmark(
    "recording",
    __doc__,
    {
        "graph": {
            "nodes": Option(50_000, least=CLASSES),
            "edges": Option(1_000_000, least=1),
            "features": Option(100, "columns", least=1),
        },
        "how": {
            "batch_sizes": Option([64, 1024], "seeds of a step, as 64,1024", least=1),
            "num_neighbors": Option([10, 5], "of each hop, as 10,5"),
            "hidden": Option(64, "channels", least=1),
            "steps": Option(30, "of an epoch", least=1),
            "rounds": Option(40, "pairs of epochs", least=1),
            "empty_steps": Option(20_000, "of the recorder alone", least=1),
            "workers": Option(0, "of the loader", least=0),
            "threads": Option(1, "of torch", least=1),
        },
    },
    measure,
    report,
    {"nodes": 500, "edges": 4_000, "features": 8, "steps": 3, "rounds": 2, "empty_steps": 100},
)
