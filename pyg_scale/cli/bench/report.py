"""What a benchmark found, as tables, JSON and Markdown. Every number comes with its command."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

GROUPS = {
    "sampler": "Sampling only",
    "loader": "Loader: sampling, features, batches",
    "limit": "Limit",
    "options": "Every option",
}
"""Groups of cases, in the order of a report."""

NOTES = {
    "limit": (
        "Sampling plus a plain copy of as many bytes as the features of a batch have: what is "
        "left to gain in the loader."
    ),
    "options": (
        "Loader with features, on generated graphs of {option_nodes:,} nodes. *compiled* names the "
        "compiled op that was seen running; `PYG_SCALE_KERNELS=require` was set."
    ),
}

MEMORY_NOTE = (
    "One loader after the other. Before it; after some batches; the most after those; the peak "
    "above the start; what worker processes hold for themselves, which comes on top; the features "
    "of the largest batch, for scale."
)

# Measured once with pyg-lib 0.9 built from its sources, which cannot be installed from PyPI.
STATED: dict[str, Any] = {
    "where": "another machine of the same kind (2 cores), generated products-shaped graph, "
    "100 fp32 features, batch 1024, [15, 10, 5]",
    "rows": [
        ("sampler", "PyG on pyg-lib 0.9, 1 thread", 4.5),
        ("loader", "PyG on pyg-lib 0.9, 0 workers", 3.0),
        ("loader", "PyG on pyg-lib 0.9, 2 workers", 3.9),
    ],
}
"""Numbers that are not from this run: shown, and marked, for the same graph shape only."""


def stated_applies(found: Mapping[str, Any]) -> bool:
    """Whether :data:`STATED` is about a graph and batches like those of this run."""
    settings, graph = found["settings"], found["graph"]
    return (
        settings["data"] is None
        and (graph["nodes"], graph["edges"], graph["features"]) == (2_400_000, 120_000_000, 100)
        and settings["batch_size"] == 1024
        and settings["num_neighbors"] == [15, 10, 5]
    )


def write(
    found: Mapping[str, Any],
    json_path: str | None = None,
    png_path: str | None = None,
    markdown_path: str | None = None,
) -> None:
    """Write the files that were asked for."""
    if json_path:
        _folder(json_path)
        Path(json_path).write_text(json.dumps(found, indent=2, default=str) + "\n")
    if png_path:
        from pyg_scale.cli.bench.chart import draw

        _folder(png_path)
        draw(found, png_path)
    if markdown_path:
        _folder(markdown_path)
        Path(markdown_path).write_text(markdown(found, png_path))


def terminal(found: Mapping[str, Any]) -> str:
    """The tables, for a terminal."""
    lines = _head(found)
    for title, note, header, rows in _tables(found):
        lines += ["", title] + ([note] if note else [])
        lines += _aligned([header, *rows])
    return "\n".join(lines)


def markdown(found: Mapping[str, Any], png_path: str | None = None) -> str:
    """The whole report."""
    lines = [f"# `pyg-scale bench {found['benchmark']}`", ""]
    lines += ["```", found["command"], "```", ""]
    if png_path:
        lines += [f"![Chart]({Path(png_path).name})", ""]
    lines += [f"* {line}" for line in _head(found)]
    for title, note, header, rows in _tables(found):
        lines += ["", f"## {title}", ""] + ([note, ""] if note else [])
        lines.append("| " + " | ".join(header) + " |")
        lines.append("|" + "|".join("---" if i < 2 else "--:" for i in range(len(header))) + "|")
        lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _head(found: Mapping[str, Any]) -> list[str]:
    env, graph, settings = found["environment"], found["graph"], found["settings"]
    versions = ", ".join(f"{k} {v}" for k, v in env["versions"].items())
    quiet = "quiet before" if env["quiet"] else "NOT QUIET before: do not quote these numbers"
    lines = [
        (
            f"graph: {graph['name']}, {graph['nodes']:,} nodes, {graph['edges']:,} directed edges, "
            f"{graph['features']} features ({graph['bytes_per_node']} bytes a node)"
        ),
        f"batches: {settings['batch_size']} seeds, num_neighbors {settings['num_neighbors']}",
        (
            f"rounds: {settings['repeats']}, {settings['batches']} batches each after "
            f"{settings['warmup']} to warm up; median, lowest and highest round"
        ),
        (
            f"machine: {env['cpu']}, {env['cpus']} CPUs, {_size(env['memory_bytes'])} memory, "
            f"{env['threads']} torch threads, {env['system']}"
        ),
        (
            f"load average: {env['load_average_before']} before ({quiet}), "
            f"{env['load_average_after']} after"
        ),
        f"versions: {versions}; commit {env['commit'] or 'unknown'}; {env['date']}",
        f"kernels: {env['kernels']['path'] or env['kernels']['reason']}",
    ]
    for backend in found["backends"]:
        what = backend["version"] or f"not measured: {backend['reason']}"
        lines.append(f"baseline PyG on {backend['name']}: {what}")
    if found["pyg_says"]:
        lines.append(f"PyG's own loader here: {found['pyg_says']}")
    return lines


Table = tuple[str, str, list[str], list[list[str]]]


def _tables(found: Mapping[str, Any]) -> Iterable[Table]:
    baseline = _baselines(found["cases"])
    for group, title in GROUPS.items():
        rows = [c for c in found["cases"] if c["group"] == group]
        if not rows:
            continue
        note = NOTES.get(group, "").format(option_nodes=found.get("option_nodes", 0))
        header = ["", "graph", "batches/s", "low–high", "M edges/s", "against PyG"]
        extra = any(c["notes"] for c in rows)
        body = [_row(case, baseline) + ([_notes(case)] if extra else []) for case in rows]
        yield title, note, header + (["compiled"] if extra else []), body
    if stated_applies(found):
        yield (
            "Stated reference, not from this run",
            f"Measured on {STATED['where']}.",
            ["", "what", "batches/s"],
            [[label, GROUPS[group], f"{rate:.1f}"] for group, label, rate in STATED["rows"]],
        )
    if found.get("builds"):
        yield (
            "Building the topology (once)",
            "Peak and what is kept, above the memory in use before.",
            ["", "graph", "seconds", "peak", "kept"],
            [
                [
                    b["label"],
                    b["variant"],
                    f"{b['seconds']:.2f}",
                    _size(b["peak_bytes"]),
                    _size(b["kept_bytes"]),
                ]
                for b in found["builds"]
            ],
        )
    if found.get("resident"):
        yield (
            "Memory while loading",
            MEMORY_NOTE,
            [
                "",
                "graph",
                "batches",
                "before",
                "at batch",
                "is",
                "most after",
                "peak above",
                "worker processes",
                "a batch",
            ],
            [
                [
                    r["label"],
                    r["variant"],
                    str(r["batches"]),
                    _size(r["before"]),
                    str(r["early"]),
                    _size(r["at_early"]),
                    _size(r["largest_after"]),
                    _size(r["peak"]),
                    _size(r["workers"]),
                    _size(r["bytes_per_batch"]),
                ]
                for r in found["resident"]
            ],
        )


def _baselines(cases: Sequence[Mapping[str, Any]]) -> dict[tuple[Any, ...], float]:
    """PyG's best rate for each group, graph and number of workers (or option)."""
    best: dict[tuple[Any, ...], float] = {}
    for case in cases:
        if case["side"] == "PyG" and case["rates"]:
            key = _comparable(case)
            best[key] = max(best.get(key, 0.0), case["batches_per_s"])
    return best


def _comparable(case: Mapping[str, Any]) -> tuple[Any, ...]:
    return case["group"], case["variant"], case["workers"]


def _row(case: Mapping[str, Any], baseline: Mapping[tuple[Any, ...], float]) -> list[str]:
    if case["error"]:
        return [case["label"], case["variant"], "–", f"cannot: {_short(case['error'])}", "", ""]
    base = baseline.get(_comparable(case))
    times = f"{case['batches_per_s'] / base:.1f}×" if base and case["side"] == "pyg_scale" else ""
    return [
        case["label"],
        case["variant"],
        f"{case['batches_per_s']:.2f}",
        f"{case['batches_per_s_low']:.2f}–{case['batches_per_s_high']:.2f}",
        f"{case['edges_per_s'] / 1e6:.2f}",
        times,
    ]


def _notes(case: Mapping[str, Any]) -> str:
    return ", ".join(str(value) for value in case["notes"].values())


def _short(text: str, limit: int = 100) -> str:
    text = text.replace("|", "/")
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _size(num_bytes: int | None) -> str:
    if num_bytes is None:
        return "?"
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    width = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    return [
        "  ".join(
            cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, width))
        ).rstrip()
        for row in table
    ]


def _folder(path: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
