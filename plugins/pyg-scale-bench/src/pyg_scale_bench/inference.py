"""Full-graph inference, streamed and by gathering, in memory smaller than the files.

A graph is generated during its conversion to a directory. Then ``layerwise_inference`` computes a
model for all nodes: with its layers streamed, and with the same layers given the in-neighbours of a
batch of nodes at a time. Every run has a process of its own, whose memory, page cache included, is
limited by a control group to a share of the files, and begins with files that are not in the page
cache. If memory cannot be limited, the report says so.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import GAT, GraphSAGE

import pyg_scale
from pyg_scale_bench import memory
from pyg_scale_bench.benchmark import FOLDER, Benchmark, Option, count, names_of, size_of
from pyg_scale_bench.chart import Bar, Panel
from pyg_scale_bench.child import call
from pyg_scale_bench.graphs import REUSE, converted
from pyg_scale_bench.report import GB, Report, Table

WAYS = ("streamed", "gathered")
LABELS = {"streamed": "rows streamed", "gathered": "in-neighbours gathered, batch by batch"}
_CLASSES = 47


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
    if not (args.reuse and graph.exists()):
        values = {name: getattr(args, name) for name in ("nodes", "edges", "features")}
        call(converted, {"path": str(graph), "values": values, "memory_bytes": None})
    found["file_bytes"] = size_of(graph) + args.nodes * args.hidden * 4
    found["limit_bytes"] = args.limit or found["file_bytes"] // 3
    found |= {"limited": True, "rounds": {}}
    for turn in range(args.rounds):
        for model in args.models:
            for way in args.ways:
                print(f"round {turn}: {model}, {LABELS[way]}", file=sys.stderr)
                result = _run(args, found, root, model, way)
                found["rounds"].setdefault(f"{model} {way}", []).append(result)


def _run(
    args: argparse.Namespace, found: dict[str, Any], root: Path, model: str, way: str
) -> dict[str, Any]:
    out = root / "out"
    shutil.rmtree(out, ignore_errors=True)
    memory.evict(root)
    options = {name: getattr(args, name) for name in ("hidden", "layers", "batch_size", "threads")}
    options |= {"path": str(root / "graph"), "out": str(out), "model": model, "way": way}
    options["memory_bytes"] = int(args.share * found["limit_bytes"])
    with memory.limited(found) as group:
        result: dict[str, Any] = call(infer, options, group=group)
        if group is not None:
            result["peak_with_page_cache"] = group.peak()
    shutil.rmtree(out, ignore_errors=True)
    return result


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
    """Compute a model for all nodes, and yield the seconds and the bytes from the disk."""
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    data = pyg_scale.open(path)
    made = MODELS[model][way](data.num_features, hidden, layers, _CLASSES).eval()
    before, begin = _read_bytes(), time.perf_counter()
    result = pyg_scale.layerwise_inference(
        made, data, out, batch_size=batch_size, memory=memory_bytes, num_workers=1
    )
    seconds = time.perf_counter() - begin
    yield {
        "seconds": seconds,
        "read_bytes": _read_bytes() - before,
        "peak_resident": memory.peak(),
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
        name: {key: median(each[key] or 0 for each in rounds) for key in rounds[0]}
        for name, rounds in found["rounds"].items()
    }
    per_row = settings["nodes"] * settings["layers"]
    for name, result in middle.items():
        model, _, way = name.partition(" ")
        other = middle.get(f"{model} gathered", result)
        label = f"{model}, {LABELS[way]}"
        peak = result.get("peak_with_page_cache") or result["peak_resident"]
        rows.append(
            [
                label,
                f"{result['seconds']:.1f}",
                f"{per_row / result['seconds'] / 1e6:.2f}",
                f"{other['seconds'] / result['seconds']:.1f}",
                f"{result['read_bytes'] / GB:.2f}",
                f"{peak / GB:.2f}",
            ]
        )
        side = "pyg_scale" if way == "streamed" else "peers"
        seconds.append(Bar(label, result["seconds"], side))
        read.append(Bar(label, result["read_bytes"] / GB, side))
    enforced = "" if found["limited"] else f", NOT ENFORCED: {found['why_not']}"
    size = ", ".join(f"{settings[name]:,} {name}" for name in ("nodes", "edges", "features"))
    lines = [
        f"{size}; {settings['layers']} layers, {settings['hidden']} channels",
        f"{found['file_bytes'] / GB:.2f} GB of features, edges and hidden states",
        f"memory limit {found['limit_bytes'] / GB:.2f} GB, page cache included{enforced}",
        f"streamed with {settings['share']:.0%} of the limit as memory=",
        f"gathered {settings['batch_size']:,} nodes at a time",
        f"{settings['threads']} thread(s) of torch; medians of {settings['rounds']} round(s)",
    ]
    header = ["way", "seconds", "M nodes/s and layer", "times gathering", "GB read", "peak GB"]
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
            "nodes": Option(3_000_000),
            "edges": Option(30_000_000, "directed"),
            "features": Option(256, "columns of fp16"),
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
            "share": Option(0.4, "share of the limit that a streamed layer may use"),
            "threads": Option(2, "of torch", least=1),
            "rounds": Option(1, least=1),
        },
    },
    measure,
    report,
    {"nodes": 20_000, "edges": 200_000, "features": 16, "hidden": 8, "limit": 4e9},
    lambda args: None if 0 < args.share <= 1 else "--share must be above 0 and at most 1",
)
