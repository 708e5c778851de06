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
        f"{settings['batch_size']:,} seeds, {settings['num_neighbors']} neighbours, "
        f"{graph['features']} features a node; {graph['nodes'] / 1e6:.2g} M nodes, "
        f"{graph['edges'] / 1e6:.3g} M directed edges\n"
        f"{env['cpu']}, {env['cpus']} CPUs, torch {env['versions']['torch']}, "
        f"commit {env['commit'] or 'unknown'}"
    )
    return Report(found, lines, _tables(found), [[glance(found)]], caption)


# Tables #######################################################################################


def _tables(found: Mapping[str, Any]) -> list[Table]:
    tables = [_group(found, group) for group in GROUPS]
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


def glance(found: Mapping[str, Any]) -> Panel:
    """At most six bars: ours beside PyG's fastest, on the first graph on which PyG ran.

    The rows are sampling, and the loader with the fewest and the most workers.
    """
    cases = [case for case in found["cases"] if case["rates"]]
    by_pyg = [case for case in cases if case["side"] == PYG and case["group"] == "loader"]
    variant = (by_pyg or cases)[0]["variant"]
    here = [case for case in cases if case["variant"] == variant]
    workers = [case["workers"] for case in here if case["group"] == "loader"]
    rows = {"Sampling alone,\n1 thread": ("sampler", None)}
    for number in sorted({min(workers), max(workers)} if workers else ()):
        rows[f"Loader, features included,\n{_workers(number)}"] = "loader", number
    bars = []
    for row, which in rows.items():
        each = [case for case in here if (case["group"], case["workers"]) == which]
        theirs = [case for case in each if case["side"] == PYG]
        best = max(theirs, key=lambda case: case["batches_per_s"], default=None)
        for case in each:
            if case["side"] == OURS:
                more = case["batches_per_s"] / best["batches_per_s"] if best else 0.0
                bars.append(_bar(row, case, OURS, f"({more:.1f}×)" if best else ""))
        if best:
            bars.append(_bar(row, best, best["label"].partition(",")[0]))
    return Panel("Batches per second", bars, "", form=".1f", large=True)


def _bar(row: str, case: Mapping[str, Any], side: str, note: str = "") -> Bar:
    spread = case["batches_per_s_low"], case["batches_per_s_high"]
    return Bar(row, case["batches_per_s"], side, spread=spread, note=note)


def _workers(number: int) -> str:
    return "no workers" if number == 0 else f"{number} worker{'s' if number > 1 else ''}"
