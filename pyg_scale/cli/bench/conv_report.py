"""What ``pyg-scale bench conv`` found: for the terminal, as markdown, as JSON, as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyg_scale.cli.bench.conv_cases import OURS, PYG, SPARSE
from pyg_scale.cli.bench.conv_steps import CLASSES, FEATURES, STEPS

_COLORS = {OURS: "#1b5e96", PYG: "#b9b9b9", SPARSE: "#9cc3e6"}


def terminal(found: Mapping[str, Any]) -> str:
    """The numbers as a table."""
    return "\n".join([*_table(found), "", *_lines(found)])


def markdown(found: Mapping[str, Any], png_path: str | None) -> str:
    """The whole report."""
    lines = ["# `pyg-scale bench conv`", "", "```", found["command"], "```", ""]
    if png_path:
        lines += [f"![Seconds of a step]({Path(png_path).name})", ""]
    return "\n".join([*lines, *(f"* {line}" for line in _lines(found)), "", *_table(found), ""])


def comparisons(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One entry per op, graph and direction: its cases by side, and how much faster ours is."""
    out: dict[tuple[str, str, bool], dict[str, Any]] = {}
    for case in found["cases"]:
        key = case["op"], case["graph"], case["backward"]
        entry = out.setdefault(key, dict(zip(("op", "graph", "backward"), key)) | {"sides": {}})
        entry["sides"][case["side"]] = case
    for entry in out.values():
        ours = entry["sides"][OURS]
        for side in (PYG, SPARSE):
            other = entry["sides"].get(side, {})
            if "median_seconds" in other:
                entry[f"times {side}"] = other["median_seconds"] / ours["median_seconds"]
            if other.get("peak_bytes") and ours["peak_bytes"] is not None:
                entry[f"memory of {side}"] = ours["peak_bytes"] / other["peak_bytes"]
    return list(out.values())


def _table(found: Mapping[str, Any]) -> list[str]:
    header = ["what", "graph", "direction", "ms", "PyG ms", "faster", "sparse.mm ms", "faster"]
    header += ["rows GB/s", "of copy", "peak MB", "PyG peak MB"]
    lines = ["| " + " | ".join(header) + " |", "|---|---|---" + "|--:" * (len(header) - 3) + "|"]
    for entry in comparisons(found):
        ours, pyg, sparse = (entry["sides"].get(side) for side in (OURS, PYG, SPARSE))
        cells = [entry["op"], entry["graph"], _direction(entry)]
        cells += [_milliseconds(ours), _milliseconds(pyg), _times(entry, PYG)]
        cells += [_milliseconds(sparse), _times(entry, SPARSE)]
        rate = ours["bytes_per_s"]
        cells += ["" if rate is None else f"{rate / 1e9:.1f}"]
        cells += ["" if rate is None else f"{rate / found['copy_bytes_per_s']:.0%}"]
        cells += [_megabytes(ours), _megabytes(pyg)]
        lines.append("| " + " | ".join(cells) + " |")
    errors = {f"{c['side']} {c['op']}: {c['error']}" for c in found["cases"] if c["error"]}
    return [*lines, *(f"{error}" for error in sorted(errors))]


def _direction(entry: Mapping[str, Any]) -> str:
    return "step" if entry["op"] in STEPS else "both" if entry["backward"] else "forward"


def _milliseconds(case: Mapping[str, Any] | None) -> str:
    if case is None or "median_seconds" not in case:
        return "failed" if case else ""
    return f"{1e3 * case['median_seconds']:.1f}"


def _times(entry: Mapping[str, Any], side: str) -> str:
    return f"{entry[f'times {side}']:.1f}x" if f"times {side}" in entry else ""


def _megabytes(case: Mapping[str, Any] | None) -> str:
    known = case is not None and case["peak_bytes"] is not None
    return f"{case['peak_bytes'] / 1e6:.0f}" if case is not None and known else ""


def _lines(found: Mapping[str, Any]) -> list[str]:
    settings, machine = found["settings"], found["environment"]
    graphs = "; ".join(
        f"{g['name']}: {g['edges']:,} edges from {g['sources']:,} to {g['destinations']:,} nodes"
        for g in found["graphs"]
    )
    quiet = "" if machine["quiet"] else " (NOT QUIET: do not quote these numbers)"
    memory = (machine["memory_bytes"] or 0) / 2**30
    versions = ", ".join(f"{k} {v}" for k, v in machine["versions"].items())
    return [
        (
            f"fp32, {settings['channels']} channels, {settings['heads']} heads; medians of "
            f"{settings['rounds']} rounds, of short steps up to 100; the whole graph is grouped by "
            "source before, a block in every step with gradients, as every batch has another"
        ),
        (
            "layers: with their linear maps, gradients of features and parameters, options as they "
            "are by default (our GCNConv keeps the normalisation of a whole graph, PyG's makes it "
            "in every step)"
        ),
        (
            f"steps: two SAGE layers, {FEATURES} features, {settings['hidden']} hidden channels, "
            f"{CLASSES} classes, cross entropy, Adam; batches of our loader, made before; trimmed: "
            "by trim_to_layer"
        ),
        f"graphs: {graphs}",
        f"copying memory: {found['copy_bytes_per_s'] / 1e9:.1f} GB/s, read and written",
        "peak: memory that a first step needs beyond what there was, inputs not counted",
        (
            f"machine: {machine['cpu']}, {machine['cpus']} CPUs, {machine['threads']} threads, "
            f"{memory:.1f} GiB memory, {machine['system']}"
        ),
        (
            f"load average: {machine['load_average_before']} before{quiet}, "
            f"{machine['load_average_after']} after"
        ),
        f"versions: {versions}; commit {machine['commit'] or 'unknown'}; {machine['date']}",
    ]


def _label(entry: Mapping[str, Any]) -> str:
    return f"{entry['op']}{' + gradient' if _direction(entry) == 'both' else ''}"


def draw(found: Mapping[str, Any], path: str) -> None:
    """Milliseconds of every step, sides below each other."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SystemExit(f"--png needs matplotlib: pip install matplotlib ({error})") from error
    names = [graph["name"] for graph in found["graphs"]]
    entries = {name: [e for e in comparisons(found) if e["graph"] == name] for name in names}
    rows = max(map(len, entries.values()))
    size = (5.5 * len(names), 1.4 + 0.42 * rows)
    figure = Figure(figsize=size, dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(names), squeeze=False)[0]
    for axis, name in zip(axes, names):
        for shift, side in enumerate((OURS, PYG, SPARSE)):
            chosen = [
                (row, e["sides"][side]["median_seconds"] * 1e3)
                for row, e in enumerate(entries[name])
                if "median_seconds" in e["sides"].get(side, {})
            ]
            if chosen:
                places = [row + 0.26 * (shift - 1) for row, _ in chosen]
                axis.barh(places, [ms for _, ms in chosen], 0.25, color=_COLORS[side], label=side)
        labels = [_label(e) for e in entries[name]]
        axis.set_yticks(range(len(labels)), labels)
        axis.invert_yaxis()
        axis.set_xscale("log")
        axis.set_xlabel("milliseconds (median)")
        axis.set_title(name, fontsize=9)
        axis.legend(fontsize=7)
        for spine in ("top", "right"):
            axis.spines[spine].set_visible(False)
    loud = "" if found["environment"]["quiet"] else "   NOT A QUIET MACHINE"
    settings = found["settings"]
    figure.suptitle(
        f"{settings['channels']} channels fp32, {settings['heads']} heads{loud}", fontsize=9
    )
    figure.savefig(path, facecolor="white")
