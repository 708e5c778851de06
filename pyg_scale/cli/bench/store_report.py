"""What ``pyg-scale bench store`` found: for the terminal, as markdown, as JSON, as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

_GB = 1e9
_SIDES = {"memory": "everything in memory", "disk": "features on disk"}


def terminal(found: Mapping[str, Any]) -> str:
    """The numbers in a few lines."""
    return "\n".join(_lines(found))


def counted(found: Mapping[str, Any], side: str) -> list[dict[str, Any]]:
    """The epochs of a side that count."""
    return [epoch for epoch in found[side] if not epoch["warmup"]]


def ratios(found: Mapping[str, Any]) -> list[float]:
    """How many times longer each epoch took with features on disk, round by round."""
    return [
        disk["seconds"] / memory["seconds"]
        for disk, memory in zip(counted(found, "disk"), counted(found, "memory"))
    ]


def _lines(found: Mapping[str, Any]) -> list[str]:
    settings, machine, disk = found["settings"], found["environment"], counted(found, "disk")
    ratio, last = ratios(found), disk[-1]
    through = "past the page cache" if last["direct"] else "THROUGH THE PAGE CACHE"
    limit = f"{found['limit_bytes'] / _GB:.2f} GB, page cache included"
    if found.get("peak_with_page_cache"):
        limit += f" (at most {found['peak_with_page_cache'] / _GB:.2f} GB were in use)"
    lookups = sum(e["hits"] + e["misses"] for e in disk)
    trimmed = ", layers trimmed" if settings["trim"] else ""
    lines = [
        (
            f"an epoch with features on disk takes {median(ratio):.2f} times one in memory "
            f"(rounds: {', '.join(f'{r:.2f}' for r in ratio)})"
        ),
        (
            f"graph: generated, power law, planted communities: {settings['nodes']:,} nodes, "
            f"{settings['edges']:,} directed edges, {settings['features']} {settings['dtype']} "
            f"features; {found['file_bytes'] / _GB:.2f} GB of files"
        ),
        (
            f"memory limit of the side with features on disk: {limit}"
            + ("" if found["limited"] else f"; NOT ENFORCED: {found['why_not']}")
        ),
        (
            f"cache: {found['cache_bytes'] / _GB:.2f} GB, {settings['cache']:.0%} of the features, "
            f"policy {settings['policy']}; {sum(e['hits'] for e in disk) / lookups:.0%} of the "
            f"rows were in it; {last['index_bytes'] / 1e6:.0f} MB to know which; at most "
            f"{found['read_ahead_bytes'] / _GB:.2f} GB of rows that are read before they are used"
        ),
        (
            f"reads: {through}, {sum(e['read_bytes'] for e in disk) / len(disk) / _GB:.1f} GB an "
            f"epoch in {sum(e['reads'] for e in disk) // len(disk):,} reads"
        ),
        (
            f"training: three-layer GraphSAGE, {settings['hidden']} hidden{trimmed}, "
            f"{settings['batches']} batches of {settings['batch_size']} seeds, num_neighbors "
            f"{settings['num_neighbors']}, {settings['workers']} worker threads; a batch has "
            f"{sum(e['nodes'] for e in disk) / sum(e['batches'] for e in disk):,.0f} nodes"
        ),
    ]
    loads = [e["load_average"] for side in _SIDES for e in found[side]]
    quiet = "" if machine["quiet"] else " (NOT QUIET: do not quote these numbers)"
    versions = ", ".join(f"{k} {v}" for k, v in machine["versions"].items())
    return [
        *lines,
        (
            f"machine: {machine['cpu']}, {machine['cpus']} CPUs, "
            f"{(machine['memory_bytes'] or 0) / 2**30:.1f} GiB memory, {machine['system']}"
        ),
        (
            f"load average: {machine['load_average_before']} before{quiet}, {min(loads)} to "
            f"{max(loads)} during, {machine['load_average_after']} after; the run itself is 2 to 4"
        ),
        f"versions: {versions}; commit {machine['commit'] or 'unknown'}; {machine['date']}",
    ]


def markdown(found: Mapping[str, Any], png_path: str | None) -> str:
    """The whole report."""
    lines = ["# `pyg-scale bench store`", "", "```", found["command"], "```", ""]
    if png_path:
        lines += [f"![Epochs]({Path(png_path).name})", ""]
    lines += [f"* {line}" for line in _lines(found)]
    lines += ["", "## Every epoch", "", "Seconds of stages are summed over worker threads.", ""]
    header = [
        "",
        "epoch",
        "seconds",
        "first batch",
        "sample",
        "fetch",
        "wait",
        "hits",
        "misses",
        "GB read",
    ]
    header += ["loss", "resident", "load"]
    lines += ["| " + " | ".join(header) + " |", "|---|---" + "|--:" * (len(header) - 2) + "|"]
    for side, title in _SIDES.items():
        for number, epoch in enumerate(found[side], 1):
            cells = [title, f"{number}, warm-up" if epoch["warmup"] else str(number)]
            cells += [f"{epoch['seconds']:.1f}", f"{epoch['first_batch']:.1f}"]
            cells += [f"{epoch['stages'][name]['seconds']:.1f}" for name in ("sample", "fetch")]
            cells += [f"{epoch['stages']['wait']['seconds']:.1f}"]
            cells += [f"{epoch[name]:,}" if name in epoch else "" for name in ("hits", "misses")]
            cells += [f"{epoch['read_bytes'] / _GB:.1f}" if "read_bytes" in epoch else ""]
            cells += [f"{epoch['loss']:.4f}", f"{epoch['resident'] / _GB:.2f} GB"]
            cells += [str(epoch["load_average"])]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def draw(found: Mapping[str, Any], path: str) -> None:
    """Seconds of every epoch, side by side."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SystemExit(f"--png needs matplotlib: pip install matplotlib ({error})") from error
    figure = Figure(figsize=(8, 3.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    for shift, (side, color) in ((-0.2, ("memory", "#b9b9b9")), (0.2, ("disk", "#4a90c9"))):
        seconds = [epoch["seconds"] for epoch in found[side]]
        place = [number + shift for number in range(len(seconds))]
        bars = axis.bar(place, seconds, 0.38, color=color, label=_SIDES[side])
        axis.bar_label(bars, fmt="%.1f", fontsize=8)
    names = [
        f"{n + 1}, warm-up" if e["warmup"] else f"{n + 1}" for n, e in enumerate(found["disk"])
    ]
    axis.set_xticks(range(len(names)), names)
    axis.set_xlabel("epoch")
    axis.set_ylabel("seconds")
    axis.margins(y=0.15)
    axis.legend(fontsize=8)
    for spine in ("top", "right"):
        axis.spines[spine].set_visible(False)
    loud = "" if found["environment"]["quiet"] else "   NOT A QUIET MACHINE"
    axis.set_title(
        f"{median(ratios(found)):.2f} times the epoch in memory: cache of "
        f"{found['settings']['cache']:.0%}, {found['limit_bytes'] / _GB:.1f} GB of memory for "
        f"{found['file_bytes'] / _GB:.1f} GB of files{loud}",
        loc="left",
        fontsize=9,
    )
    figure.savefig(path, facecolor="white")
