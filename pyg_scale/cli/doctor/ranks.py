"""``pyg-scale doctor --dist``: a report of the ranks and the network between them."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from pyg_scale.errors import CommError

_MARK = {False: "BROKEN", None: "note"}
_MOST_IN_MATRIX = 16


def doctor_dist(directory: str | None, as_json: bool) -> int:
    """Examine all ranks; rank 0 prints the report.

    Returns:
        On rank 0, 1 if something is broken; on the others 0, so that a launcher reports one
        failure.
    """
    from pyg_scale.cli.doctor.examine import examine

    try:
        found = examine(directory)
    except (CommError, ValueError, NotImplementedError) as error:
        print(f"pyg-scale doctor --dist: {error}", file=sys.stderr)
        return 1
    if found["rank"] != 0:
        return 0
    print(json.dumps(found, indent=2) if as_json else report(found), flush=True)
    return 0 if found["ok"] else 1


def report(found: dict[str, Any]) -> str:
    """The report of the results of :func:`pyg_scale.cli.doctor.examine.examine`."""
    ranks: Sequence[dict[str, Any]] = found["ranks"]
    machines = len({rank["machine"] for rank in ranks})
    who = f"{_count(len(ranks), 'rank')} on {_count(machines, 'machine')}"
    lines = ["```", f"pyg-scale doctor --dist: {who}, launcher {found['launcher']}", ""]
    lines += [f"{name:<16} {version}" for name, version in ranks[0]["versions"].items()]
    lines.append(f"{'kernels':<16} {ranks[0]['kernels']}")
    lines += ["", *_table(ranks)]
    told = ranks[0]["directory"]
    if told is not None and "error" not in told:
        lines += ["", f"{told['path']}: {_count(told['num_parts'], 'part')}"]
    if len(ranks) > 1:
        lines += ["", *_pairs(ranks)]
    lines.append("")
    for finding in found["findings"]:
        lines.append(f"{_MARK[finding['ok']]:<7} {finding['what']}")
        if finding["fix"]:
            lines.append(f"{'':<7} fix: {finding['fix']}")
    if not found["findings"]:
        lines.append("all is well")
    if found["launcher"] == "none":
        lines.append("This process is alone: start it with torchrun or srun to examine ranks.")
    return "\n".join([*lines, "```"])


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _table(ranks: Sequence[dict[str, Any]]) -> list[str]:
    rows = [("rank", "machine", "address", "on", "device", "cores", "threads", "/dev/shm", "parts")]
    for number, rank in enumerate(ranks):
        shared = rank["shared_memory"]
        parts = (rank["directory"] or {}).get("parts")
        rows.append(
            (
                str(number),
                rank["host"],
                rank["address"],
                rank["interface"] or "?",
                rank["device"],
                str(rank["cores"]),
                str(rank["threads"]),
                "?" if shared is None else f"{shared / (1 << 30):.1f} GiB",
                "-" if parts is None else _short(parts),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _short(parts: Sequence[int]) -> str:
    return ",".join(map(str, parts[:8])) + (f",... ({len(parts)})" if len(parts) > 8 else "")


def _pairs(ranks: Sequence[dict[str, Any]]) -> list[str]:
    count = len(ranks)
    rate: dict[tuple[int, int], float] = {}
    wait: dict[tuple[int, int], float] = {}
    for a, rank in enumerate(ranks):
        for pair in rank["pairs"]:
            b = pair["rank"]
            for key, value in (((a, b), pair["sent"]), ((b, a), pair["received"])):
                if value:
                    rate[key] = value / 1e9
            if pair["latency"]:
                wait[a, b] = pair["latency"] * 1e3
    if count > _MOST_IN_MATRIX:
        slowest = sorted((value, key) for key, value in rate.items())[:_MOST_IN_MATRIX]
        lines = [f"the slowest of {len(rate)} directions"]
        return lines + [
            f"  rank {a} to {b}: {value:.2f} GB/s, {wait.get((a, b), float('nan')):.2f} ms"
            for value, (a, b) in slowest
        ]
    titles = ("GB/s, from row to column", "round trip, ms, asked by row")
    lines = []
    for title, values, digits in ((titles[0], rate, 2), (titles[1], wait, 2)):
        lines += [title, "rank" + "".join(f"{b:>8}" for b in range(count))]
        for a in range(count):
            cells = [
                "-" if a == b else f"{values[a, b]:.{digits}f}" if (a, b) in values else "?"
                for b in range(count)
            ]
            lines.append(f"{a:>4}" + "".join(f"{cell:>8}" for cell in cells))
        lines.append("")
    return lines[:-1]
