"""What ``pyg-scale bench dist`` found: for the terminal, as markdown, as JSON, as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

_MB, _GB = 1e6, 1e9
_COLORS = {"sample": "#4a90c9", "fetch": "#e08a3c", "wait": "#b9b9b9", "train": "#5aa469"}


def terminal(found: Mapping[str, Any]) -> str:
    """The numbers in a few lines."""
    return "\n".join(_lines(found))


def share_of_tcp(found: Mapping[str, Any]) -> list[float]:
    """What share of the bytes per second of plain sockets rows have, round by round, all ranks."""
    ranks = [rank["bandwidth"] for rank in found["ranks"]]
    return [
        sum(each["features"][turn] for each in ranks) / sum(each["tcp"][turn] for each in ranks)
        for turn in range(len(ranks[0]["tcp"]))
    ]


def remote_bytes(found: Mapping[str, Any], cache: str) -> float:
    """Bytes of features from other ranks per batch."""
    epochs = [rank["caches"][cache] for rank in found["ranks"]]
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
    shares = share_of_tcp(found)
    ranks = [rank["bandwidth"] for rank in found["ranks"]]
    tcp, ours = (median([r for each in ranks for r in each[k]]) for k in ("tcp", "features"))
    work = {k: median([r for e in ranks for r in e[f"{k}_cpu"]]) * _GB for k in ("tcp", "features")}
    none = remote_bytes(found, "none")
    saved = {name: 1 - remote_bytes(found, name) / none for name in ("placed", "belady")}
    epochs = {
        name: max(r["caches"][name]["seconds"] for r in found["ranks"])
        for name in found["ranks"][0]["caches"]
    }
    quiet = "" if machine["quiet"] else " (NOT QUIET: do not quote these numbers)"
    versions = ", ".join(f"{k} {v}" for k, v in machine["versions"].items())
    return [
        (
            f"rows of other ranks come at {median(shares):.0%} of the bytes per second of plain "
            f"sockets between the same processes (rounds: {', '.join(f'{s:.0%}' for s in shares)}; "
            f"median {ours / _GB:.2f} of {tcp / _GB:.2f} GB/s per rank, all ranks at once); they "
            f"take {work['features']:.2f} seconds of a processor per GB, sockets {work['tcp']:.2f}"
        ),
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
        "an epoch takes " + ", ".join(f"{s:.2f} s ({n})" for n, s in epochs.items()),
        (
            f"graph: {graph['name']}: {graph['nodes']:,} nodes, {graph['edges']:,} directed edges, "
            f"{graph['features']} fp32 features, {graph['parts']} parts by {graph['method']}"
        ),
        (
            f"{settings['ranks']} ranks, {settings['threads']} thread each, network path forced; "
            f"{settings['batches']} batches of {settings['batch_size']} seeds each, num_neighbors "
            f"{settings['num_neighbors']}, no workers; messages of {ranks[0]['rows']:,} rows"
        ),
        (
            f"machine: {machine['cpu']}, {machine['cpus']} CPUs, "
            f"{(machine['memory_bytes'] or 0) / 2**30:.1f} GiB memory, {machine['system']}; load "
            f"average {machine['load_average_before']} before{quiet}, "
            f"{machine['load_average_after']} after"
        ),
        f"versions: {versions}; commit {machine['commit'] or 'unknown'}; {machine['date']}",
    ]


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
    speeds = [median([r / _GB for e in ranks for r in e[k]]) for k in ("tcp", "features")]
    bars = top["speed"].bar(["plain sockets", "rows"], speeds, color=["#b9b9b9", "#e08a3c"])
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
