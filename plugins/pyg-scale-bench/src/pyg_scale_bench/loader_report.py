"""The report of ``pyg-scale bench loader``: batches per second, compared with PyG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pyg_scale_bench.chart import Bar, Panel
from pyg_scale_bench.report import Report, Table, size
from pyg_scale_bench.rounds import OURS, PYG

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
_RESIDENT = {
    "batches": "batches",
    "before": "before",
    "early": "at batch",
    "at_early": "is",
    "largest_after": "most after",
    "peak": "peak above",
    "workers": "worker processes",
    "bytes_per_batch": "a batch",
}

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
"""Numbers that are not from this run, shown and marked only for the same graph shape."""


def report(found: Mapping[str, Any]) -> Report:
    """The report of the results."""
    graph, settings, env = found["graph"], found["settings"], found["environment"]
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
    ]
    for backend in found["backends"]:
        what = backend["version"] or f"not measured: {backend['reason']}"
        lines.append(f"baseline PyG on {backend['name']}: {what}")
    if found["pyg_says"]:
        lines.append(f"PyG's own loader here: {found['pyg_says']}")
    caption = (
        f"pyg-scale bench loader: {graph['nodes'] / 1e6:.2g} M nodes, "
        f"{graph['edges'] / 1e6:.3g} M directed edges, {graph['features']} features, "
        f"batch {settings['batch_size']}, {settings['num_neighbors']}\n"
        f"{env['cpu']}, {env['cpus']} CPUs, torch {env['versions']['torch']}, "
        f"commit {env['commit'] or 'unknown'}"
    )
    panels = [[_panel(found, "loader", "Loader")], [_panel(found, "sampler", "Sampling only")]]
    return Report(found, lines, _tables(found), panels, caption)


def stated_applies(found: Mapping[str, Any]) -> bool:
    """Return True if :data:`STATED` is about a graph and batches like those of this run."""
    settings, graph = found["settings"], found["graph"]
    return (
        settings["data"] is None
        and (graph["nodes"], graph["edges"], graph["features"]) == (2_400_000, 120_000_000, 100)
        and settings["batch_size"] == 1024
        and settings["num_neighbors"] == [15, 10, 5]
    )


# Tables #######################################################################################


def _tables(found: Mapping[str, Any]) -> list[Table]:
    tables = [_group(found, group) for group in GROUPS]
    if stated_applies(found):
        rows = [[label, GROUPS[group], f"{rate:.1f}"] for group, label, rate in STATED["rows"]]
        note = f"Measured on {STATED['where']}."
        title = "Stated reference, not from this run"
        tables.append(Table(["", "what", "batches/s"], rows, title, note))
    builds = [
        [b["label"], b["variant"], f"{b['seconds']:.2f}", size(b["peak_bytes"]),
         size(b["kept_bytes"])]
        for b in found["builds"]
    ]  # fmt: skip
    resident = [
        [each["label"], each["variant"], *(_resident(each, name) for name in _RESIDENT)]
        for each in found["resident"]
    ]
    return [
        *tables,
        Table(
            ["", "graph", "seconds", "peak", "kept"],
            builds,
            "Building the topology (once)",
            "Peak and what is kept, above the memory in use before.",
        ),
        Table(["", "graph", *_RESIDENT.values()], resident, "Memory while loading", MEMORY_NOTE),
    ]


def _resident(found: Mapping[str, Any], name: str) -> str:
    return str(found[name]) if name in ("batches", "early") else size(found[name])


def _group(found: Mapping[str, Any], group: str) -> Table:
    cases = [case for case in found["cases"] if case["group"] == group]
    best = _baselines(cases)
    header = ["", "graph", "batches/s", "low–high", "M edges/s", "against PyG"]
    rows = [_row(case, best) for case in cases]
    if any(case["notes"] for case in cases):
        header.append("compiled")
        for row, case in zip(rows, cases):
            row.append(", ".join(map(str, case["notes"].values())))
    note = NOTES.get(group, "").format(option_nodes=found.get("option_nodes", 0))
    return Table(header, rows, GROUPS[group], note)


def _baselines(cases: Sequence[Mapping[str, Any]]) -> dict[tuple[Any, ...], float]:
    """PyG's best rate for each graph (or option) and number of workers."""
    best: dict[tuple[Any, ...], float] = {}
    for case in cases:
        if case["side"] == PYG and case["rates"]:
            key = case["variant"], case["workers"]
            best[key] = max(best.get(key, 0.0), case["batches_per_s"])
    return best


def _row(case: Mapping[str, Any], best: Mapping[tuple[Any, ...], float]) -> list[str]:
    if case["error"]:
        return [case["label"], case["variant"], "–", f"cannot: {_short(case['error'])}", "", ""]
    base = best.get((case["variant"], case["workers"]))
    return [
        case["label"],
        case["variant"],
        f"{case['batches_per_s']:.2f}",
        f"{case['batches_per_s_low']:.2f}–{case['batches_per_s_high']:.2f}",
        f"{case['edges_per_s'] / 1e6:.2f}",
        f"{case['batches_per_s'] / base:.1f}×" if base and case["side"] == OURS else "",
    ]


def _short(text: str, limit: int = 100) -> str:
    text = text.replace("|", "/")
    return text if len(text) <= limit else text[: limit - 1] + "…"


# Picture ######################################################################################


def _panel(found: Mapping[str, Any], group: str, title: str) -> Panel:
    cases = [case for case in found["cases"] if case["rates"]]
    bars = [
        Bar(
            f"{case['label']}  ({case['variant']})",
            case["batches_per_s"],
            case["side"],
            spread=(case["batches_per_s_low"], case["batches_per_s_high"]),
        )
        for case in cases
        if case["group"] == group
    ]
    if bars and stated_applies(found):
        bars += [
            Bar(f"{label}  (stated, not this run)", rate, "stated")
            for stated, label, rate in STATED["rows"]
            if stated == group
        ]
    copies = [case["batches_per_s"] for case in cases if case["group"] == "limit"]
    mark = None
    if group == "loader" and copies:
        mark = (max(copies), f"limit {max(copies):.1f}: sampling and a plain copy")
    unit = "batches per second (median; line from the lowest to the highest round)"
    return Panel(title, bars, unit, form=".1f", mark=mark)
