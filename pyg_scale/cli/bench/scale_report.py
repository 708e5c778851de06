"""What ``pyg-scale bench scale`` found: for the terminal, as markdown, as JSON, as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_GB = 1e9


def terminal(found: Mapping[str, Any]) -> str:
    """The numbers in a few lines."""
    return "\n".join(_lines(found))


def markdown(found: Mapping[str, Any], png_path: str | None) -> str:
    """The whole report."""
    picture = f"\n![Steps]({Path(png_path).name})\n" if png_path else ""
    head = f"# `pyg-scale bench scale`\n\n```\n{found['command']}\n```\n{picture}\n"
    return head + "\n".join(f"* {line}" for line in _lines(found)) + "\n"


def _lines(found: Mapping[str, Any]) -> list[str]:
    settings, machine = found["settings"], found["environment"]
    lines = [
        (
            f"graph: generated, power law, planted communities: {settings['nodes']:,} nodes, "
            f"{settings['edges']:,} directed edges, {settings['features']} fp16 features; "
            f"{found['file_bytes'] / _GB:.1f} GB of files"
        ),
        f"memory limit of every step, page cache included: {found['limit_bytes'] / _GB:.2f} GB"
        + ("" if found["limited"] else f", NOT ENFORCED: {found['why_not']}"),
    ]
    for step in found["steps"]:
        peak = step.get("peak_with_page_cache")
        result = step.get("result", {})
        parts = [f"{step['name']}: {step['wall_seconds']:.0f} s in all"]
        if step["name"] == "convert":
            rate = settings["edges"] / step["wall_seconds"] / 1e6
            parts.append(f"{rate:.1f} M edges/s, features included")
        if step["name"] == "partition":
            rate = settings["edges"] / result["seconds"] / 1e6
            options = ", ".join(f"{k}={v}" for k, v in result["options"].items())
            parts.append(
                f"{settings['method']} ({options}), {settings['parts']} parts in "
                f"{result['seconds']:.0f} s "
                f"({rate:.1f} M edges/s), {result['cut']:.3f} of the edges cut, balance "
                f"{result['balance']:.3f}"
            )
        if step["name"] == "train":
            parts.append(
                f"opened in {1000 * result['open_seconds']:.0f} ms, {result['batches']} batches at "
                f"{result['batches_per_s']:.2f} batches/s, loss {result['first_loss']:.2f} to "
                f"{result['last_loss']:.2f}, accuracy on the training nodes of the second half "
                f"{result['accuracy_of_the_second_half']:.3f}"
            )
            parts.append(_reads(found["cache_bytes"], result["store"]))
        if result.get("peak_resident"):
            parts.append(f"peak resident {result['peak_resident'] / _GB:.2f} GB")
        if peak:
            parts.append(f"peak with page cache {peak / _GB:.2f} GB")
        lines.append("; ".join(parts))
    quiet = "" if machine["quiet"] else " (NOT QUIET before: do not quote these numbers)"
    lines += [
        (
            f"machine: {machine['cpu']}, {machine['cpus']} CPUs, "
            f"{(machine['memory_bytes'] or 0) / 2**30:.1f} GiB memory, {machine['system']}"
        ),
        (
            f"load average: {machine['load_average_before']} before{quiet}, "
            f"{machine['load_average_after']} after"
        ),
        (
            f"versions: {', '.join(f'{k} {v}' for k, v in machine['versions'].items())}; commit "
            f"{machine['commit']}; {machine['date']}"
        ),
    ]
    return lines


def _reads(cache_bytes: int, store: Mapping[str, Any]) -> str:
    x = store["tensors"]["x"]
    return (
        f"a cache of {cache_bytes / _GB:.2f} GB ({store['policy']}) had "
        f"{x['hits'] / max(1, x['hits'] + x['misses']):.0%} of the rows of features; "
        f"{store['read_bytes'] / _GB:.0f} GB in {store['reads']:,} reads, "
        + ("past the page cache" if store["direct"] else "through the page cache")
    )


def draw(found: Mapping[str, Any], path: str) -> None:
    """Seconds of each step, and its memory beside the limit and the files."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SystemExit(f"--png needs matplotlib: pip install matplotlib ({error})") from error
    figure = Figure(figsize=(9, 3.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    names = [step["name"] for step in found["steps"]]
    seconds = [step["wall_seconds"] for step in found["steps"]]
    left.barh(names, seconds, color="#4a90c9")
    left.bar_label(left.containers[0], fmt="%.0f s", padding=3)
    left.set_xlabel("seconds")
    left.margins(x=0.15)
    peaks = [(step.get("peak_with_page_cache") or 0) / _GB for step in found["steps"]]
    right.barh([*names, "files"], [*peaks, found["file_bytes"] / _GB], color="#4a90c9")
    right.bar_label(right.containers[0], fmt="%.1f GB", padding=3)
    right.axvline(found["limit_bytes"] / _GB, color="#c2542d", label="limit")
    right.set_xlabel("GB, page cache included")
    right.margins(x=0.15)
    right.legend()
    for axis in (left, right):
        axis.invert_yaxis()
    figure.savefig(path, facecolor="white")
