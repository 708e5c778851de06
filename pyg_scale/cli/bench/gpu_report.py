"""What ``pyg-scale bench gpu`` found: its gates, for the terminal and as markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyg_scale.cli.bench.gpu_cases import GATES, Gate


def gates(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each gate with the number that was measured, ``None`` if there is none, and if it is met."""
    cases = {(case["name"], case["side"]): case for case in found["cases"]}
    out = []
    for gate in GATES:
        left, right = cases.get(gate.left, {}), cases.get(gate.right, {})
        value = _value(gate, left, right, found["copy_bytes_per_s"])
        most = gate.kind in ("slower", "memory")
        met = None if value is None else (value <= gate.limit if most else value >= gate.limit)
        why = "" if value is not None else left.get("error") or right.get("error") or "no numbers"
        out.append({**gate._asdict(), "value": value, "met": met, "why": why})
    return out


def _value(
    gate: Gate, left: Mapping[str, Any], right: Mapping[str, Any], copy: float
) -> float | None:
    if "median_seconds" not in left:
        return None
    if gate.kind == "rate":
        return float(left["bytes_per_s"] / copy)
    if gate.kind == "memory":
        known = left["peak_bytes"] is not None
        return float(left["peak_bytes"] / left["memory_limit"]) if known else None
    if "median_seconds" not in right:
        return None
    ratio = right["median_seconds"] / left["median_seconds"]
    return float(1 / ratio if gate.kind == "slower" else ratio)


def terminal(found: Mapping[str, Any]) -> str:
    """Everything but the checks that passed."""
    return "\n".join(_body(found))


def markdown(found: Mapping[str, Any]) -> str:
    """The whole report."""
    head = ["# `pyg-scale bench gpu`", "", "```", found["command"], "```", ""]
    checks = ["", "## Checks", "", "| check | | |", "|---|---|---|"]
    for check in found["checks"]:
        passed = {True: "ok", False: "**wrong**", None: "not checked"}[check["ok"]]
        checks.append(f"| {check['name']} | {passed} | {check['detail']} |")
    return "\n".join([*head, *_body(found), *checks, ""])


def _body(found: Mapping[str, Any]) -> list[str]:
    lines = [f"* {line}" for line in _lines(found)]
    for ok, what in ((False, "WRONG"), (None, "not checked")):
        which = [check for check in found["checks"] if check["ok"] is ok]
        lines += [f"* {what}: {check['name']}: {check['detail']}" for check in which]
    if found["gates"]:
        lines += ["", "| gate | wanted | measured | |", "|---|--:|--:|---|"]
    for gate in found["gates"]:
        sign = "≤" if gate["kind"] in ("slower", "memory") else "≥"
        value = gate["why"] if gate["value"] is None else f"{gate['value']:.2f}"
        met = {True: "met", False: "**missed**", None: "not measured"}[gate["met"]]
        lines.append(f"| {gate['name']} | {sign} {gate['limit']:g} | {value} | {met} |")
    if found["cases"]:
        lines += ["", "| case | side | ms | lowest | highest | GB/s | peak MB |"]
        lines += ["|---|---|--:|--:|--:|--:|--:|"]
    for case in found["cases"]:
        cells = [case["name"], case["side"]]
        if "median_seconds" not in case:
            lines.append("| " + " | ".join([*cells, case["error"], "", "", "", ""]) + " |")
            continue
        times = (case["median_seconds"], min(case["seconds"]), max(case["seconds"]))
        cells += [f"{1e3 * seconds:.3f}" for seconds in times]
        cells.append(f"{case['bytes_per_s'] / 1e9:.0f}" if case["bytes"] else "")
        peak = case["peak_bytes"]
        cells.append("" if peak is None else f"{peak / 1e6:.0f}")
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _lines(found: Mapping[str, Any]) -> list[str]:
    machine, device = found["environment"], found["device"]
    versions = ", ".join(f"{k} {v}" for k, v in machine["versions"].items())
    passed = sum(check["ok"] is True for check in found["checks"])
    lines = [
        "device: " + ", ".join(f"{key} {value}" for key, value in device.items()),
        f"checks: {passed} of {len(found['checks'])} passed",
    ]
    if "copy_bytes_per_s" in found:
        copy = f"{found['copy_bytes_per_s'] / 1e9:.0f} GB/s, read and written"
        lines += [
            f"copying memory on the device: {copy}",
            (
                "GB/s of sums: a row of features for every edge, results and indices, over the "
                "median time"
            ),
            f"medians of {found['settings']['rounds']} steps; both: with gradients",
            "sizes: " + ", ".join(f"{k} {v}" for k, v in found["settings"]["sizes"].items()),
        ]
    if found["settings"]["quick"]:
        lines.append("QUICK: these graphs are too small for numbers")
    lines.append(f"{versions}; commit {machine['commit'] or 'unknown'}; {machine['date']}")
    return lines
