"""Full-graph inference, streamed and by gathering, in memory smaller than the files.

A graph is generated during its conversion to a directory. Then ``layerwise_inference`` computes a
model for all nodes: with its layers streamed, and with the same layers given the in-neighbours of a
batch of nodes at a time. Every run has a process of its own, whose memory, page cache included, is
limited by a control group to a share of the files, and begins with files that are not in the page
cache. Gathering is stopped after some times the seconds of streaming; the ratio is then a lower
bound. If memory cannot be limited, the report says so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import GAT, GraphSAGE

import pyg_scale
from pyg_scale_bench import memory
from pyg_scale_bench.benchmark import FOLDER, Benchmark, Option, count, names_of, size_of
from pyg_scale_bench.chart import Bar, Panel
from pyg_scale_bench.child import Child, call
from pyg_scale_bench.graphs import REUSE, converted, reused
from pyg_scale_bench.report import GB, Report, Table

WAYS = ("streamed", "gathered")
LABELS = {"streamed": "rows streamed", "gathered": "in-neighbours gathered, batch by batch"}
_CLASSES = 47
_LONGEST = 6 * 3600.0
_SHORTEST = 60.0  # seconds in which a process can start, and compute a small graph


class GatheredSAGE(GraphSAGE):
    """GraphSAGE whose layers are computed by a method of its own, and so from whole blocks."""

    def inference_per_layer(
        self, layer: int, x: Tensor, edge_index: Tensor, batch_size: int
    ) -> Tensor:
        """See PyG. ``[batch_size, channels]``."""
        return super().inference_per_layer(layer, x, edge_index, batch_size)


class GatheredGAT(GAT):
    """GAT whose layers are computed by a method of its own, and so from whole blocks."""

    def inference_per_layer(
        self, layer: int, x: Tensor, edge_index: Tensor, batch_size: int
    ) -> Tensor:
        """See PyG. ``[batch_size, channels]``."""
        return super().inference_per_layer(layer, x, edge_index, batch_size)


MODELS: dict[str, dict[str, Any]] = {
    "sage": {"streamed": GraphSAGE, "gathered": GatheredSAGE},
    "gat": {"streamed": GAT, "gathered": GatheredGAT},
}


# Measuring ################################################################################


def measure(args: argparse.Namespace, found: dict[str, Any]) -> None:
    """Make the graph, and compute every model in both ways in turns."""
    root = Path(args.dir).absolute()
    graph = root / "graph"
    root.mkdir(parents=True, exist_ok=True)
    if not reused(args, found):
        values = {name: getattr(args, name) for name in ("nodes", "edges", "features", "dtype")}
        call(converted, {"path": str(graph), "values": values, "memory_bytes": None})
    found["file_bytes"] = size_of(graph) + args.nodes * args.hidden * 4
    found["limit_bytes"] = args.limit or found["file_bytes"] // 3
    found["memory_bytes"] = int(found["limit_bytes"] - args.beside)
    if found["memory_bytes"] <= 0:
        raise SystemExit(
            f"pyg-scale bench: --beside {args.beside} leaves nothing of a limit of "
            f"{found['limit_bytes']} bytes: give more --nodes, or a larger --limit"
        )
    found |= {"limited": True, "rounds": {}}
    for turn in range(args.rounds):
        for model in args.models:
            longest = _LONGEST
            for way in sorted(args.ways, reverse=True):  # streamed first
                print(f"round {turn}: {model}, {LABELS[way]}", file=sys.stderr)
                result = _run(args, found, root, model, way, longest)
                found["rounds"].setdefault(f"{model} {way}", []).append(result)
                longest = max(args.times * result["seconds"], _SHORTEST)


def _run(
    args: argparse.Namespace,
    found: dict[str, Any],
    root: Path,
    model: str,
    way: str,
    longest: float,
) -> dict[str, Any]:
    """One way of computing a model; stopped after ``longest`` seconds."""
    out = root / "out"
    shutil.rmtree(out, ignore_errors=True)
    memory.evict(root)
    options = {name: getattr(args, name) for name in ("hidden", "layers", "batch_size", "threads")}
    options |= {"path": str(root / "graph"), "out": str(out), "model": model, "way": way}
    options["memory_bytes"] = found["memory_bytes"]
    with (
        memory.limited(found) as group,
        Child(infer, options, group=group, seconds=longest) as child,
    ):
        child.next()
        begin = time.perf_counter()
        result: dict[str, Any] = {"stopped": False, "done": 1.0}
        try:
            result |= child.next()
        except SystemExit:
            seconds = time.perf_counter() - begin
            if seconds < longest:  # not the time limit ended it
                raise
            rows = _rows_done(out) / (args.nodes * args.layers)
            result |= {"stopped": True, "seconds": seconds, "done": rows}
        if group is not None:
            result["peak_with_page_cache"] = group.peak()
    shutil.rmtree(out, ignore_errors=True)
    return result


def _rows_done(out: Path) -> int:
    """Rows of all layers that a stopped run had written."""
    rows: dict[int, int] = {}
    for line in (out / "PROGRESS.jsonl").read_text().splitlines():
        with contextlib.suppress(ValueError):
            note = json.loads(line)
            if "rows" in note:
                rows[note["step"]] = note["rows"]
    return sum(rows.values())


def infer(
    path: str,
    out: str,
    model: str,
    way: str,
    hidden: int,
    layers: int,
    batch_size: int,
    threads: int,
    memory_bytes: int,
) -> Iterator[dict[str, Any]]:
    """Compute a model for all nodes, and yield the seconds and the bytes from the disk.

    The first value is yielded before it begins.
    """
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    data = pyg_scale.open(path)
    made = MODELS[model][way](data.num_features, hidden, layers, _CLASSES).eval()
    yield {}
    before, begin = _read_bytes(), time.perf_counter()
    with memory.PeakOfOwn() as own:
        result = pyg_scale.layerwise_inference(
            made, data, out, batch_size=batch_size, memory=memory_bytes, num_workers=1
        )
    seconds = time.perf_counter() - begin
    yield {
        "seconds": seconds,
        "read_bytes": _read_bytes() - before,
        "own_before": own.first,
        "own_peak": own.most,
        "sum": float(result[:1000].double().abs().sum()),
    }


def _read_bytes() -> int:
    """Bytes that the disk gave this process, mapped files included."""
    for line in Path("/proc/self/io").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "read_bytes":
            return int(value)
    return 0


# Report ###################################################################################


def report(found: Mapping[str, Any]) -> Report:
    """The report of a run."""
    settings, rows, seconds, read = found["settings"], [], [], []
    middle = {
        name: sorted(rounds, key=lambda each: each["seconds"])[len(rounds) // 2]
        for name, rounds in found["rounds"].items()
    }
    for name, result in middle.items():
        model, _, way = name.partition(" ")
        other = middle.get(f"{model} gathered")
        label, done = f"{model}, {LABELS[way]}", result["done"]
        more = ">" if result["stopped"] else ""
        ratio = ""
        if other is not None:
            faster = other["seconds"] / result["seconds"]
            ratio = f"{faster:.1f}"
            if other["stopped"] and way == "streamed":
                whole = other["seconds"] / max(other["done"], 1e-9) / result["seconds"]
                ratio = f">{faster:.1f} ({whole:,.0f})"
        gb_read = "" if result["stopped"] else f"{result['read_bytes'] / GB:.2f}"
        own = "" if result["stopped"] else f"{result['own_peak'] / GB:.2f}"
        peak = result.get("peak_with_page_cache")
        rows.append(
            [
                label,
                f"{more}{result['seconds']:.1f}",
                f"{done:.0%}" if done > 0.1 else f"{done:.1%}",
                ratio,
                gb_read,
                own,
                "" if peak is None else f"{peak / GB:.2f}",
            ]
        )
        side = "pyg_scale" if way == "streamed" else "peers"
        shown = f"{label}, stopped" if result["stopped"] else label
        seconds.append(Bar(shown, result["seconds"], side))
        if not result["stopped"]:
            read.append(Bar(label, result["read_bytes"] / GB, side))
    enforced = "" if found["limited"] else f", NOT ENFORCED: {found['why_not']}"
    size = ", ".join(f"{settings[name]:,} {name}" for name in ("nodes", "edges", "features"))
    stop = f"gathering is stopped after {settings['times']:g} times the seconds of streaming"
    lines = [
        f"{size} ({settings['dtype']}); {settings['layers']} layers, {settings['hidden']} channels",
        f"{found['file_bytes'] / GB:.2f} GB of features, edges and hidden states",
        f"memory limit {found['limit_bytes'] / GB:.2f} GB, page cache included{enforced}",
        f"memory={found['memory_bytes'] / GB:.2f} GB; the rest is for Python and the page cache",
        f"gathered {settings['batch_size']:,} nodes at a time; {stop}",
        "> is a lower bound; in brackets, if gathering went on at the rate that it had",
        f"{settings['threads']} thread(s) of torch; medians of {settings['rounds']} round(s)",
        "--nodes and --edges run it on a graph of any size, such as 40e6 and 400e6",
    ]
    header = [
        "way",
        "seconds",
        "done",
        "times gathering",
        "GB read",
        "GB of its own at most",
        "GB with page cache",
    ]
    return Report(
        found,
        lines,
        [Table(header, rows, "Inference for all nodes", align="lr")],
        [[Panel("Time", seconds, "seconds"), Panel("Read from the disk", read, "GB")]],
        "Inference layer by layer",
    )


BENCHMARK = Benchmark(
    "inference",
    __doc__,
    {
        "graph": {
            "nodes": Option(2_000_000),
            "edges": Option(20_000_000, "directed"),
            "features": Option(128, "columns"),
            "dtype": Option("float32", "of features", choices=("float16", "float32")),
        },
        "how": {
            **FOLDER,
            **REUSE,
            "models": Option(list(MODELS), f"some of {','.join(MODELS)}", type=names_of([*MODELS])),
            "ways": Option(list(WAYS), f"some of {','.join(WAYS)}", type=names_of(WAYS)),
            "layers": Option(2),
            "hidden": Option(128, "channels"),
            "batch_size": Option(4096, "nodes at a time when gathered"),
            "limit": Option(help="bytes of memory; a third of the files", type=count),
            "beside": Option(400_000_000, "bytes of the limit that are not for streamed layers"),
            "times": Option(
                3.5, "gathering is stopped after so many times the seconds of streaming"
            ),
            "threads": Option(2, "of torch", least=1),
            "rounds": Option(1, least=1),
        },
    },
    measure,
    report,
    {"nodes": 20_000, "edges": 200_000, "features": 16, "hidden": 8, "limit": 4_000_000_000},
    lambda args: None if args.times >= 1 else "--times must be at least 1",
)
