"""One HTML page about a run: nothing is fetched from anywhere, and no script runs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from html import escape

from pyg_scale.train.load import Load
from pyg_scale.train.recording.charts import Lane, Line, lanes_chart, line_chart, share_bar, short
from pyg_scale.train.recording.findings import (
    Finding,
    Summary,
    findings,
    load,
    milliseconds,
    summaries,
)
from pyg_scale.train.recording.run import Rank, Run
from pyg_scale.train.steps import Step

MOST_RANKS = 64
"""Ranks that are drawn; of more, the busiest ones."""
_COLORS = 8
_PIECES = 60
"""Pieces of the time for rates, of four steps or more."""

_STYLE = """
:root { --ink: #1f2933; --soft: #66727f; --paper: #ffffff; --back: #f4f6f8; --rule: #dfe4ea;
  --load: #e0913a; --compute: #2f7fb8; --exchange: #9a86c4; --bad: #c2452d; --good: #3d8f5f;
  --c0: #2f7fb8; --c1: #e0913a; --c2: #3d8f5f; --c3: #c2452d; --c4: #9a86c4; --c5: #8a6a4f;
  --c6: #c771a8; --c7: #6f7b87; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e9ee; --soft: #95a1ad; --paper: #1b2229;
  --back: #12171c; --rule: #2e3842; --compute: #4a9bd6; --c0: #4a9bd6; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 1200px; margin: 0 auto; padding: 28px 24px 60px; }
h1 { font-size: 25px; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 16px; margin: 0 0 8px; }
.sub { color: var(--soft); margin: 2px 0 20px; overflow-wrap: anywhere; }
.card { background: var(--paper); border: 1px solid var(--rule); border-radius: 8px;
  padding: 16px 18px; margin-bottom: 16px; overflow-x: auto; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px;
  margin-bottom: 16px; }
.tile { background: var(--paper); border: 1px solid var(--rule); border-radius: 8px;
  padding: 12px 16px; }
.tile b { display: block; font-size: 23px; font-weight: 600; line-height: 1.3; }
.tile span { color: var(--soft); font-size: 13px; }
.finding { border-left: 5px solid var(--bad); }
.fine { border-left: 5px solid var(--good); }
.finding p, .fine p, .card .sub { margin: 0; }
.card .sub { font-size: 13px; margin-top: 8px; }
.finding p + p { margin-top: 6px; color: var(--soft); }
.grid2 { display: grid; grid-template-columns: repeat(auto-fit, minmax(480px, 1fr)); gap: 0 16px; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; color: var(--soft); font-size: 13px;
  margin-bottom: 6px; }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 2px;
  margin-right: 5px; }
svg { display: block; max-width: 100%; height: auto; }
.grid { stroke: var(--rule); } .lane { fill: var(--back); }
.tick, .unit { fill: var(--soft); font-size: 11.5px; }
.line { fill: none; stroke-width: 1.7; stroke-linejoin: round; }
.load { fill: var(--load); background: var(--load); }
.compute { fill: var(--compute); background: var(--compute); }
.exchange { fill: var(--exchange); background: var(--exchange); }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: right; color: var(--soft); font-weight: 500; font-size: 13px; padding: 4px 10px; }
td { text-align: right; padding: 4px 10px; border-top: 1px solid var(--rule); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } tr.slow td { color: var(--bad); }
""" + "".join(
    f".line.c{i} {{ stroke: var(--c{i}); }} .dot.c{i} {{ fill: var(--c{i}); }} "
    f"i.c{i} {{ background: var(--c{i}); }}\n"
    for i in range(_COLORS)
)


def page(run: Run) -> str:
    """The report of a run as HTML, of which a browser needs nothing else."""
    found, problems, whole = summaries(run), findings(run), load(run)
    end = max((_end(rank) for rank in run.ranks), default=0.0)
    shown = run.ranks
    if len(shown) > MOST_RANKS:
        busiest = sorted(zip(whole.busy, run.ranks, strict=True), key=lambda pair: -pair[0])
        shown = tuple(sorted((r for _, r in busiest[:MOST_RANKS]), key=lambda r: r.rank))
    body = [
        _head(run, found, whole, end),
        *map(_problem, problems),
        "" if problems else _all_is_well(found),
        _timeline(run, shown, end),
        _table(run, found, problems),
        f'<div class="grid2">{"".join(_charts(run, shown, end))}</div>',
    ]
    title = escape(f"{run.path.name}: a run of {run.world_size} ranks")
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head><body><main>"
        f"{''.join(body)}</main></body></html>\n"
    )


# Parts of the page ########################################################################


def _head(run: Run, found: Sequence[Summary], whole: Load, end: float) -> str:
    began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(max(0.0, run.time)))
    hosts = len({rank.host for rank in run.ranks})
    lacking = run.world_size - len(run.ranks)
    about = [
        f"began {began}",
        f"session {run.session} of {run.num_sessions}",
        f"{hosts} machine{'s' if hosts != 1 else ''}",
        f"pyg_scale {run.version}",
    ]
    if lacking:
        about.append(f"files of {lacking} of {run.world_size} ranks are missing")
    if torn := [rank.rank for rank in run.ranks if rank.torn]:
        about.append(f"killed while writing: rank {', '.join(map(str, torn))}")
    computed = sum(each.compute for each in found)
    elapsed = sum(each.elapsed for each in found)
    tiles = [
        (str(run.world_size), "ranks"),
        (str(max((each.num_steps for each in found), default=0)), "steps"),
        (f"{short(end)} s", "elapsed"),
        (short(sum(each.throughput for each in found)), "seeds per second, all ranks"),
        (f"{computed / elapsed:.0%}" if elapsed > 0 else "-", "of the time computing"),
        (f"{whole.imbalance:.2f}", "imbalance: slowest rank by mean"),
    ]
    boxes = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>'
        for value, name in tiles
    )
    name = escape(run.path.resolve().name or str(run.path))
    sub = escape(" · ".join(about))
    return f'<h1>{name}</h1><p class="sub">{sub}</p><div class="tiles">{boxes}</div>'


def _problem(finding: Finding) -> str:
    remedy = finding.remedy[:1].upper() + finding.remedy[1:]
    return (
        f'<div class="card finding"><p><b>{escape(finding.text)}</b></p>'
        f"<p>{escape(remedy)}.</p></div>"
    )


def _all_is_well(found: Sequence[Summary]) -> str:
    text = "No rank lags behind, and all compute in more than half of the time."
    if not any(each.num_steps for each in found):
        text = "No step was recorded."
    return f'<div class="card fine"><p>{text}</p></div>'


def _timeline(run: Run, shown: Sequence[Rank], end: float) -> str:
    lanes = []
    for rank in shown:
        parts: dict[str, list[tuple[float, float]]] = {"load": [], "compute": [], "exchange": []}
        for step in rank.steps:
            there = step.begin + step.load
            parts["load"].append((step.begin, there))
            parts["compute"].append((there, there + step.compute))
            parts["exchange"].append((there + step.compute, there + step.body))
        lanes.append(Lane(f"rank {rank.rank}", parts))
    keys = "".join(
        f'<span><i class="{part}"></i>{text}</span>'
        for part, text in (
            ("load", "waits for the loader"),
            ("compute", "computes"),
            ("exchange", "waits for other ranks"),
        )
    )
    notes = []
    if len(shown) < len(run.ranks):
        notes.append(f"the busiest {len(shown)} of {len(run.ranks)} ranks")
    if run.world_size > 1 and not all(rank.waiting for rank in run.ranks):
        notes.append(
            "waiting for other ranks counts as computing: Recorder got no model= that says"
        )
    note = f" ({'; '.join(notes)})" if notes else ""
    return (
        f'<div class="card"><h2>Timeline{escape(note)}</h2><div class="legend">{keys}</div>'
        f"{lanes_chart(lanes, end=end)}</div>"
    )


def _table(run: Run, found: Sequence[Summary], problems: Sequence[Finding]) -> str:
    slow = {rank for each in problems if each.kind == "slow rank" for rank in each.ranks}
    names = ("rank", "steps", "seeds/s", "ms/step", "load", "compute", "others", "sample", "fetch",
             "bytes", "cache hits", "")  # fmt: skip
    hosts = {rank.rank: rank.host for rank in run.ranks}
    rows = []
    for each in found:
        steps = max(1, each.num_steps)
        total = each.load + each.compute + each.exchange

        def ms(seconds: float, steps: int = steps) -> str:
            return milliseconds(seconds / steps)

        hits, read = each.counts.get("cache_hits", 0), each.counts.get("rows", 0)
        cells = [
            f"{each.rank} <small>{escape(hosts[each.rank])}</small>",
            str(each.num_steps),
            short(each.throughput),
            ms(total),
            *map(ms, (each.load, each.compute, each.exchange)),
            *(ms(each.stages.get(name, 0.0)) for name in ("sample", "fetch")),
            short(each.counts.get("bytes", 0)),
            f"{hits / read:.0%}" if hits and read else "-",
            share_bar({
                name: getattr(each, name) / each.elapsed if each.elapsed > 0 else 0.0
                for name in ("load", "compute", "exchange")
            }, 220),
        ]  # fmt: skip
        mark = ' class="slow"' if each.rank in slow else ""
        rows.append(f"<tr{mark}>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    head = "".join(f"<th>{name}</th>" for name in names)
    return (
        f'<div class="card"><h2>Ranks</h2><table><tr>{head}</tr>{"".join(rows)}</table>'
        '<p class="sub">load, compute and waiting for others are milliseconds of a step; sample '
        "and fetch are those of the loader's workers, beside the loop</p></div>"
    )


def _charts(run: Run, shown: Sequence[Rank], end: float) -> list[str]:
    """Those for which something was recorded."""
    found = [
        _card("Throughput", [_line(r, _rates(r.steps, end, lambda s: s.seeds)) for r in shown],
              end, "seeds/s"),
        _card("Seconds of a step", [
            _line(r, [(s.begin, s.load + s.body) for s in r.steps]) for r in shown], end, "s"),
    ]  # fmt: skip
    if len(run.ranks) > 1:
        found.append(
            _card("Imbalance", [Line("slowest rank by mean", "c3", _imbalance(run, end))], end,
                  "slowest by mean", least=1.0)
        )  # fmt: skip
    read = [
        Line(name, f"c{number}", _summed(run, end, count))
        for number, (name, count) in enumerate(
            (("features read", "bytes"), ("from other ranks", "remote_bytes"))
        )
        if any(step.counts.get(count) for rank in run.ranks for step in rank.steps)
    ]
    if read:
        found.append(_card("Bytes of features, all ranks", read, end, "bytes/s"))
    if any(step.counts.get("cache_hits") for rank in run.ranks for step in rank.steps):
        hits = [
            _line(rank, [
                (s.begin, s.counts.get("cache_hits", 0) / s.counts["rows"])
                for s in rank.steps if s.counts.get("rows")
            ])
            for rank in shown
        ]  # fmt: skip
        found.append(_card("Rows found in a cache", hits, end, "share of rows"))
    if any(rank.memory for rank in run.ranks):
        memory = [_line(r, [(m.begin, float(m.process)) for m in r.memory]) for r in shown]
        found.append(_card("Memory of the process", memory, end, "bytes"))
    if any(each.device for rank in run.ranks for each in rank.memory):
        memory = [_line(r, [(m.begin, float(m.device)) for m in r.memory]) for r in shown]
        found.append(_card("Memory of the device", memory, end, "bytes"))
    names = sorted({name for rank in run.ranks for step in rank.steps for name in step.values})
    for name in names[:12]:
        values = [
            _line(r, [(s.begin, _drawable(s.values[name])) for s in r.steps if name in s.values])
            for r in shown
        ]
        broken = any(not math.isfinite(y) for line in values for _, y in line.points)
        title = f"{name} (not finite in some steps)" if broken else name
        found.append(_card(title, values, end, least=None))
    return found


def _drawable(value: float) -> float:
    """A value, infinite if differences of such values may be infinite."""
    return value if abs(value) < 1e300 else math.copysign(math.inf, value)


def _card(
    title: str, lines: Sequence[Line], end: float, unit: str = "", least: float | None = 0.0
) -> str:
    drawn = [line for line in lines if line.points]
    keys = "".join(
        f'<span><i class="{line.color}"></i>{escape(line.name)}</span>' for line in drawn[:16]
    )
    more = f"<span>and {len(drawn) - 16} more</span>" if len(drawn) > 16 else ""
    return (
        f'<div class="card"><h2>{escape(title[:80])}</h2><div class="legend">{keys}{more}</div>'
        f"{line_chart(drawn, end=end, unit=unit, least=least)}</div>"
    )


def _line(rank: Rank, points: Sequence[tuple[float, float]]) -> Line:
    return Line(f"rank {rank.rank}", f"c{rank.rank % _COLORS}", points)


def _rates(
    steps: Sequence[Step], end: float, count: Callable[[Step], float]
) -> list[tuple[float, float]]:
    """Counts per second, in equal pieces of the time."""
    if end <= 0:
        return []
    pieces = max(1, min(_PIECES, len(steps) // 4))
    sums = [0.0] * pieces
    for step in steps:
        at = step.begin + step.load + step.body
        sums[max(0, min(pieces - 1, int(at / end * pieces)))] += count(step)
    wide = end / pieces
    return [((i + 0.5) * wide, total / wide) for i, total in enumerate(sums)]


def _summed(run: Run, end: float, name: str) -> list[tuple[float, float]]:
    steps = sorted((s for rank in run.ranks for s in rank.steps), key=lambda s: s.begin)
    return _rates(steps, end, lambda s: s.counts.get(name, 0))


def _imbalance(run: Run, end: float) -> list[tuple[float, float]]:
    """The imbalance in pieces of the time in which all ranks made steps."""
    pieces = max(1, min(_PIECES, min(len(rank.steps) for rank in run.ranks) // 4))
    busy: list[dict[int, float]] = [{} for _ in range(pieces)]
    for rank in run.ranks:
        for step in rank.steps:
            at = max(0, min(pieces - 1, int(step.begin / end * pieces) if end > 0 else 0))
            busy[at][rank.rank] = busy[at].get(rank.rank, 0.0) + step.busy
    wide = end / pieces
    return [
        ((i + 0.5) * wide, max(each.values()) * len(each) / sum(each.values()))
        for i, each in enumerate(busy)
        if len(each) == len(run.ranks) and sum(each.values()) > 0
    ]


def _end(rank: Rank) -> float:
    """The time at which the last thing that a rank recorded ended."""
    ends = [step.begin + step.load + step.body for step in rank.steps[-1:]]
    ends += [span.begin + span.seconds for span in rank.spans]
    return max(ends, default=0.0)
