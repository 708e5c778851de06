"""What ``pyg-scale bench dist`` found: for the terminal, as markdown, as JSON, as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from pyg_scale.cli.bench.dist_bandwidth import WAYS
from pyg_scale.cli.bench.dist_methods import BATCH_SIZE

_MB, _GB = 1e6, 1e9
_COLORS = {"sample": "#4a90c9", "fetch": "#e08a3c", "wait": "#b9b9b9", "train": "#5aa469"}


def terminal(found: Mapping[str, Any]) -> str:
    """The numbers in a few lines."""
    return "\n".join(_lines(found))


def share_of_tcp(found: Mapping[str, Any], name: str = "bandwidth") -> list[float]:
    """What share of the bytes per second of plain sockets rows have, round by round, all ranks.

    Args:
        found: What was found.
        name: ``"bandwidth"``, or ``"link"`` for what was found on a network of a given speed.
    """
    ranks = [rank[name] for rank in found["ranks"]]
    return [
        sum(each["features"][turn] for each in ranks) / sum(each["tcp"][turn] for each in ranks)
        for turn in range(len(ranks[0]["tcp"]))
    ]


def remote_bytes(found: Mapping[str, Any], cache: str) -> float:
    """Bytes of features from other ranks per batch."""
    return _remote_bytes([rank["caches"][cache] for rank in found["ranks"]])


def remote_bytes_by(found: Mapping[str, Any], method: str, cache: str) -> float:
    """The same of the graph that was partitioned by several methods."""
    return _remote_bytes([rank["methods"][method][cache] for rank in found["ranks"]])


def _remote_bytes(epochs: Sequence[Mapping[str, Any]]) -> float:
    return sum(e["fetch"]["remote_bytes"] for e in epochs) / sum(e["batches"] for e in epochs)


def gain_of_flight(found: Mapping[str, Any]) -> float:
    """How many times more batches per second there are with several batches in flight."""
    seconds = [
        max(rank["in_flight"][name]["seconds"] for rank in found["ranks"])
        for name in ("1", str(found["settings"]["in_flight"]))
    ]
    return seconds[0] / seconds[1]


def share_of_one(found: Mapping[str, Any]) -> list[float]:
    """Batches per second of ranks that share mappings by those of one process, turn by turn."""
    turns = found["ranks"][0]["shared"]
    return [one / ranks for one, ranks in zip(turns["one"], turns["ranks"], strict=True)]


def _lines(found: Mapping[str, Any]) -> list[str]:
    settings, graph, machine = found["settings"], found["graph"], found["environment"]
    ranks = [rank["bandwidth"] for rank in found["ranks"]]
    none = remote_bytes(found, "none")
    saved = {name: 1 - remote_bytes(found, name) / none for name in ("placed", "belady")}
    epochs = {
        name: max(r["caches"][name]["seconds"] for r in found["ranks"])
        for name in found["ranks"][0]["caches"]
    }
    quiet = "" if machine["quiet"] else " (NOT QUIET: do not quote these numbers)"
    versions = ", ".join(f"{k} {v}" for k, v in machine["versions"].items())
    return [
        *_speed(found),
        (
            f"a cache of {settings['cache']:.0%} of the features saves {saved['placed']:.0%} "
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
            f"{', '.join(f'{s:.2f}' for s in share_of_one(found))}), features included, no training"
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
            f"{ranks[0]['rows']:,} rows a round; {settings['shared_batches']} batches of each rank "
            f"where mappings are shared"
        ),
        (
            f"machine: {machine['cpu']}, {machine['cpus']} CPUs, "
            f"{(machine['memory_bytes'] or 0) / 2**30:.1f} GiB memory, {machine['system']}; load "
            f"average {machine['load_average_before']} before{quiet}, "
            f"{machine['load_average_after']} after"
        ),
        f"versions: {versions}; commit {machine['commit'] or 'unknown'}; {machine['date']}",
    ]


def _speed(found: Mapping[str, Any]) -> list[str]:
    """Rows of other ranks beside plain sockets: as fast as the machine goes, and on a network."""
    said = []
    for name in ("bandwidth", "link"):
        ranks = [rank[name] for rank in found["ranks"] if name in rank]
        if not ranks:
            continue
        shares = share_of_tcp(found, name)
        speed = {k: median([r for e in ranks for r in e[k]]) / _GB for k in WAYS}
        work = {k: median([r for e in ranks for r in e[f"{k}_cpu"]]) * _GB for k in WAYS}
        where = "between the same processes, as fast as the processors of one machine copy"
        if name == "link":
            where = f"on a network of {found['settings']['link']} for all that the ranks send"
        said.append(
            f"rows of other ranks come at {median(shares):.0%} of the bytes per second of plain "
            f"sockets {where} (rounds: {', '.join(f'{s:.0%}' for s in shares)}; median "
            f"{speed['features']:.2f} of {speed['tcp']:.2f} GB/s per rank, all ranks at once; "
            f"all_to_all of gloo: {speed['gloo']:.2f}); they take {work['features']:.2f} seconds "
            f"of a processor per GB, sockets {work['tcp']:.2f}, gloo {work['gloo']:.2f}"
        )
    return said


def _methods(found: Mapping[str, Any]) -> list[str]:
    """What travels of the graph that was partitioned by several methods, beside the first one."""
    if "compared" not in found:
        return []
    graph, cache = found["compared"], found["settings"]["cache"]
    seeds = min(found["settings"]["batch_size"], BATCH_SIZE)
    first = graph["methods"][0]
    whole = remote_bytes_by(found, first, "none")
    said = []
    for method in graph["methods"]:
        plain, cached = (remote_bytes_by(found, method, name) for name in ("none", "placed"))
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


def markdown(found: Mapping[str, Any], png_path: str | None) -> str:
    """The whole report."""
    lines = ["# `pyg-scale bench dist`", "", "```", found["command"], "```", ""]
    if png_path:
        lines += [f"![Ranks]({Path(png_path).name})", ""]
    lines += [f"* {line}" for line in _lines(found)]
    lines += ["", "## Every epoch", ""]
    header = ["rank", "cache", "batches", "seconds", "sample", "fetch", "wait", "train"]
    header += ["MB of other ranks per batch", "MB from the cache", "MB of its own parts"]
    lines += ["| " + " | ".join(header) + " |", "|--:|---" + "|--:" * (len(header) - 2) + "|"]
    for rank in found["ranks"]:
        for name, epoch in rank["caches"].items():
            sums = {s: sum(step[s] for step in epoch["timeline"]) for s in _COLORS}
            cells = [str(rank["rank"]), name, str(epoch["batches"]), f"{epoch['seconds']:.2f}"]
            cells += [f"{sums[stage]:.2f}" for stage in _COLORS]
            for what in ("remote_bytes", "cache_bytes", "local_bytes"):
                cells.append(f"{epoch['fetch'][what] / epoch['batches'] / _MB:.2f}")
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def draw(found: Mapping[str, Any], path: str) -> None:
    """What travels with each cache, and the stages of every batch, rank by rank."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SystemExit(f"--png needs matplotlib: pip install matplotlib ({error})") from error
    figure = Figure(figsize=(9, 5.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    top: Any = figure.subplot_mosaic([["bytes", "speed"], ["time", "time"]])
    names = list(found["ranks"][0]["caches"])
    bars = top["bytes"].bar(names, [remote_bytes(found, n) / _MB for n in names], color="#4a90c9")
    top["bytes"].bar_label(bars, fmt="%.2f", fontsize=8)
    cache = found["settings"]["cache"]
    title = f"MB from other ranks per batch, cache of {cache:.0%}"
    top["bytes"].set_title(title, fontsize=8, loc="left")
    ranks = [rank["bandwidth"] for rank in found["ranks"]]
    speeds = [median([r / _GB for e in ranks for r in e[k]]) for k in WAYS]
    labels, colors = ["plain sockets", "rows", "gloo"], ["#b9b9b9", "#e08a3c", "#b9b9b9"]
    bars = top["speed"].bar(labels, speeds, color=colors)
    top["speed"].bar_label(bars, fmt="%.2f", fontsize=8)
    top["speed"].set_title("GB/s that come to a rank, all at once", fontsize=8, loc="left")
    bottom = top["time"]
    for rank in found["ranks"]:
        for step in rank["caches"]["none"]["timeline"]:
            left = step["end"] - sum(step[stage] for stage in _COLORS)
            for stage, color in _COLORS.items():
                bottom.barh(rank["rank"], step[stage], 0.6, left, color=color, linewidth=0)
                left += step[stage]
    for stage, color in _COLORS.items():
        bottom.barh(0, 0, color=color, label=stage)
    bottom.set_yticks(range(len(ranks)), [f"rank {n}" for n in range(len(ranks))])
    bottom.set_xlabel("seconds")
    bottom.legend(fontsize=8, ncols=4, loc="lower right")
    loud = "" if found["environment"]["quiet"] else "   NOT A QUIET MACHINE"
    bottom.set_title(f"what each rank does (no cache){loud}", fontsize=8, loc="left")
    for axis in top.values():
        for spine in ("top", "right"):
            axis.spines[spine].set_visible(False)
    figure.savefig(path, facecolor="white")
