"""Charts as SVG text: lines over time, and lanes that show how each rank spends its time.

Whatever comes from a file is escaped; colours are variables of the page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 1120
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 10, 26
_POINTS = 240
"""The most points that a line has."""
_BINS = 320
"""The pieces of time of a lane."""
PARTS = ("load", "compute", "exchange")
"""The parts of a lane, from the bottom."""


@dataclass(frozen=True)
class Line:
    """A line of a chart: its name, the class of its colour, and points (seconds, value)."""

    name: str
    color: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Lane:
    """The time of one rank: for each part of :data:`PARTS` intervals (begin, end)."""

    name: str
    parts: Mapping[str, Sequence[tuple[float, float]]]


def line_chart(
    lines: Sequence[Line],
    *,
    end: float,
    unit: str = "",
    width: int = WIDTH // 2 - 12,
    height: int = 190,
    least: float | None = 0.0,
) -> str:
    """Lines over time, from 0 to ``end`` seconds.

    Args:
        lines: Their points in order; values that are not finite interrupt a line.
        end: In seconds.
        unit: Of the values.
        width: In pixels.
        height: In pixels.
        least: The value at the bottom, if no value is below; ``None``: the smallest value.
    """  # fmt: skip
    thinned = [(line, thin(line.points, end)) for line in lines]
    values = [y for _, points in thinned for _, y in points if math.isfinite(y)]
    low = min([*values, *([] if least is None else [least])], default=0.0)
    high = max(values, default=1.0)
    if high <= low:
        high = low + (abs(low) or 1.0)
    marks = ticks(low, high, 4)
    low, high = min(low, marks[0]), max(high, marks[-1])
    inner, tall = width - _LEFT - _RIGHT, height - _TOP - _BOTTOM

    def x(seconds: float) -> float:
        return _LEFT + inner * (seconds / end if end > 0 else 0.0)

    def y(value: float) -> float:
        return _TOP + tall * (1 - (value - low) / (high - low))

    parts = [_open(width, height)]
    for mark in marks:
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{width - _RIGHT}" {_at(y(mark))}/>')
        parts.append(_text(_LEFT - 6, y(mark) + 4, f"{short(mark)}", "end"))
    parts += _time_axis(end, x, height)
    if unit:
        parts.append(_text(_LEFT + 4, _TOP + 8, unit, "start", "unit"))
    for line, points in thinned:
        for run in _unbroken(points):
            path = " ".join(f"{x(t):.1f},{y(v):.1f}" for t, v in run)
            title = f"<title>{escape(line.name)}</title>"
            if len(run) == 1:
                at, value = path.split(",")
                place = f'cx="{at}" cy="{value}" r="2"'
                parts.append(f'<circle class="dot {line.color}" {place}>{title}</circle>')
            else:
                parts.append(
                    f'<polyline class="line {line.color}" points="{path}">{title}</polyline>'
                )
    return "".join([*parts, "</svg>"])


def lanes_chart(lanes: Sequence[Lane], *, end: float) -> str:
    """A lane for each rank, whose height at a time is the share of each part then.

    Args:
        lanes: From the top.
        end: Of the time that is shown, in seconds.
    """
    tall, gap = (30, 6) if len(lanes) <= 16 else (16, 3)
    height = _TOP + len(lanes) * (tall + gap) + _BOTTOM
    inner = WIDTH - _LEFT - _RIGHT
    parts = [_open(WIDTH, height)]
    for number, lane in enumerate(lanes):
        top = _TOP + number * (tall + gap)
        parts.append(_text(_LEFT - 6, top + tall / 2 + 4, lane.name, "end"))
        parts.append(f'<rect class="lane" x="{_LEFT}" y="{top}" width="{inner}" height="{tall}"/>')
        below = [0.0] * _BINS
        for part in PARTS:
            shares = binned(lane.parts.get(part, ()), end, _BINS)
            above = [min(1.0, a + b) for a, b in zip(below, shares, strict=True)]
            parts.append(_area(below, above, top, tall, inner, part, lane.name))
            below = above
    parts += _time_axis(end, lambda s: _LEFT + inner * (s / end if end > 0 else 0.0), height)
    return "".join([*parts, "</svg>"])


def _area(
    below: Sequence[float], above: Sequence[float], top: float, tall: float, inner: float,
    part: str, name: str,
) -> str:  # fmt: skip
    """The area of one part in a lane, as steps."""
    wide = inner / len(above)

    def edge(shares: Sequence[float]) -> list[str]:
        found = []
        for i, share in enumerate(shares):
            y = f"{top + tall * (1 - share):.1f}"
            found += [f"{_LEFT + i * wide:.1f},{y}", f"{_LEFT + (i + 1) * wide:.1f},{y}"]
        return found

    points = " ".join(edge(above) + edge(below)[::-1])
    title = f"<title>{escape(name)}: {part}</title>"
    return f'<polygon class="part {part}" points="{points}">{title}</polygon>'


def share_bar(shares: Mapping[str, float], width: int = 320) -> str:
    """A bar of shares of 1, one after the other, in the colours of :data:`PARTS`."""
    parts, at = [_open(width, 16)], 0.0
    parts.append(f'<rect class="lane" x="0" y="2" width="{width}" height="12"/>')
    for name, share in shares.items():
        wide = max(0.0, min(share, 1 - at)) * width
        title = f"<title>{escape(name)}: {share:.1%}</title>"
        parts.append(
            f'<rect class="part {name}" x="{at * width:.1f}" y="2" width="{wide:.1f}" height="12">'
            f"{title}</rect>"
        )
        at += wide / width
    return "".join([*parts, "</svg>"])


def binned(intervals: Iterable[tuple[float, float]], end: float, bins: int) -> list[float]:
    """The share of each of ``bins`` equal pieces of the time that intervals cover."""
    found = [0.0] * bins
    if end <= 0:
        return found
    wide = end / bins
    for begin, stop in intervals:
        begin, stop = max(0.0, begin), min(end, stop)
        if stop <= begin:
            continue
        first, last = min(bins - 1, int(begin / wide)), min(bins - 1, int(stop / wide))
        if first == last:
            found[first] += (stop - begin) / wide
            continue
        found[first] += first + 1 - begin / wide
        for at in range(first + 1, last):
            found[at] += 1.0
        found[last] += stop / wide - last
    return [min(1.0, share) for share in found]


def thin(points: Sequence[tuple[float, float]], end: float) -> list[tuple[float, float]]:
    """At most :data:`_POINTS` points: the means of those that are close in time."""
    if len(points) <= _POINTS or end <= 0:
        return list(points)
    groups: dict[int, list[tuple[float, float]]] = {}
    for at, value in points:
        groups.setdefault(min(_POINTS - 1, int(at / end * _POINTS)), []).append((at, value))
    return [
        (sum(at for at, _ in group) / len(group), sum(value for _, value in group) / len(group))
        for _, group in sorted(groups.items())
    ]


def ticks(low: float, high: float, count: int) -> list[float]:
    """About ``count`` round numbers that span a range."""
    raw = (high - low) / count
    if not math.isfinite(raw) or raw <= 0:
        return [low, high] if high > low else [low, low + 1]
    power = 10 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * (1 - 1e-9))
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def short(value: float) -> str:
    """A number in few letters: ``12.5k``, ``3.2M``, ``0.05``."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.3g}{unit}"
    return f"{value:.4g}"


def _unbroken(points: Iterable[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    runs: list[list[tuple[float, float]]] = [[]]
    for point in points:
        if math.isfinite(point[1]):
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _time_axis(end: float, x: Callable[[float], float], height: int) -> list[str]:
    found = []
    for mark in ticks(0.0, end or 1.0, 6):
        if mark <= (end or 1.0) * (1 + 1e-9):
            found.append(_text(x(mark), height - 8, f"{short(mark)} s", "middle"))
    return found


def _open(width: int, height: int) -> str:
    return f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">'


def _at(y: float) -> str:
    return f'y1="{y:.1f}" y2="{y:.1f}"'


def _text(x: float, y: float, text: str, anchor: str, kind: str = "tick") -> str:
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
    )
