"""Charts of horizontal bars and of curves, in panels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_COLORS = {
    "pyg_scale": "#1b5e96",
    "features on disk": "#1b5e96",
    "torch.sparse.mm": "#9cc3e6",
    "sample": "#4a90c9",
    "fetch": "#e08a3c",
    "train": "#5aa469",
    "full graph": "#1b5e96",
    "batches": "#4a90c9",
    "pyg-lib": "#858585",
}
_OTHERS = "#b9b9b9"
_KEY: dict[str, Any] = {
    "loc": "lower right",
    "bbox_to_anchor": (1, 1),
    "ncols": 4,
    "frameon": False,
    "handlelength": 1.0,
    "columnspacing": 1.0,
    "borderaxespad": 0.2,
}
"""The place of the legend: above a panel, to the right of its title."""
_INK, _LINE, _GRID = "#2b2b2b", "#c2542d", "#e4e4e4"


@dataclass(frozen=True)
class Bar:
    """A bar.

    Attributes:
        row: The label of its row.
        value: Its length.
        side: The side that it belongs to, which determines its colour; others than ours are grey.
        begin: The position of its left end.
        spread: The lowest and the highest measurement, if there are several.
        note: Text after its length.
    """

    row: str
    value: float
    side: str = "pyg_scale"
    begin: float = 0.0
    spread: tuple[float, float] | None = None
    note: str = ""


@dataclass(frozen=True)
class Panel:
    """A panel of bars below each other.

    Attributes:
        title: The title above the bars.
        bars: The bars in the order of their rows.
        unit: The unit of their lengths.
        form: The format of the length written at the end of each bar; empty for none.
        log: True if the axis is logarithmic.
        stacked: True if the bars of a row are in one line, not below each other.
        mark: A length that is drawn as a line, and its label.
        large: True for thick bars and large text.
    """

    title: str
    bars: Sequence[Bar]
    unit: str
    form: str = ".2f"
    log: bool = False
    stacked: bool = False
    mark: tuple[float, str] | None = None
    large: bool = False

    @property
    def rows(self) -> list[str]:
        """The labels of the rows, from the top."""
        return list(dict.fromkeys(bar.row for bar in self.bars))

    @property
    def sides(self) -> list[str]:
        """The sides, in the order of their bars."""
        return list(dict.fromkeys(bar.side for bar in self.bars))


@dataclass(frozen=True)
class Curves:
    """A panel of curves over steps.

    Attributes:
        title: The title above the curves.
        curves: The values of each curve after each step, by its label.
        unit: The unit of the values.
    """

    title: str
    curves: Mapping[str, Sequence[float]]
    unit: str


def draw(panels: Sequence[Sequence[Panel | Curves]], caption: str, path: str) -> None:
    """Draw rows of panels into a PNG; panels without bars or curves are left out.

    Raises:
        SystemExit: If matplotlib is missing.
    """
    try:  # imported now, as the checks of a GPU also run without it
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SystemExit(f"--png needs matplotlib: pip install matplotlib ({error})") from error
    shown = [kept for row in panels if (kept := [panel for panel in row if _is_filled(panel)])]
    heights = [1.0 + max(_height(panel) for panel in row) for row in shown]
    width = max([9.0, *(6.0 * len(row) for row in shown)])
    figure = Figure(figsize=(width, 0.5 + sum(heights)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    if shown:
        parts = figure.subfigures(len(shown), 1, height_ratios=heights, squeeze=False)[:, 0]
        for part, row in zip(parts, shown):
            most = max(0 if isinstance(each, Curves) else len(each.rows) for each in row)
            for axis, panel in zip(part.subplots(1, len(row), squeeze=False)[0], row):
                if isinstance(panel, Curves):
                    _draw_curves(axis, panel)
                else:
                    _draw(axis, panel, most)
    figure.suptitle(caption, x=0.01, ha="left", fontsize=9, color=_INK)
    figure.savefig(path, facecolor="white")


def _is_filled(panel: Panel | Curves) -> bool:
    return bool(panel.curves if isinstance(panel, Curves) else panel.bars)


def _height(panel: Panel | Curves) -> float:
    """Height in inches of the rows of a panel."""
    if isinstance(panel, Curves):
        return 3.0
    bars = len(panel.rows) if panel.stacked else len(panel.bars)
    return (0.1 * len(panel.rows) + 0.2 * bars) * (1.7 if panel.large else 1.0)


def _draw_curves(axis: Any, panel: Curves) -> None:
    for label, values in panel.curves.items():
        axis.plot(range(1, len(values) + 1), values, linewidth=1.3, label=label)
    axis.legend(fontsize=7.5, frameon=False)
    axis.set_xlabel("step", fontsize=8)
    axis.set_ylabel(panel.unit, fontsize=8)
    axis.set_title(panel.title, loc="left", fontsize=9, fontweight="bold", color=_INK)
    axis.grid(color=_GRID, zorder=0)
    axis.tick_params(length=0, colors=_INK, labelsize=8)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _draw(axis: Any, panel: Panel, most_rows: int) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    scale = 1.45 if panel.large else 1.0
    top = max(end for bar in panel.bars for end in (bar.begin + bar.value, *(bar.spread or ())))
    rows = {row: number for number, row in enumerate(panel.rows)}
    each = {row: [bar.side for bar in panel.bars if bar.row == row] for row in rows}
    for bar in panel.bars:
        sides = [bar.side] if panel.stacked else each[bar.row]
        height = 0.76 / len(sides)
        place = rows[bar.row] + height * (sides.index(bar.side) - (len(sides) - 1) / 2)
        axis.barh(place, bar.value, height, bar.begin, **_style(bar.side))
        low, high = bar.spread or (bar.value, bar.value)
        axis.plot([low, high], [place, place], color=_INK, linewidth=1.1 if bar.spread else 0)
        if panel.form:
            end = high * 1.05 if panel.log else high + top * 0.012
            text = f"{format(bar.value, panel.form)}   {bar.note}".rstrip()
            axis.text(end, place, text, va="center", fontsize=7.5 * scale, color=_INK)
    for side in panel.sides if len(panel.sides) > 1 else []:
        axis.barh(0, 0, **_style(side), label=side)
    if panel.mark:
        top = max(top, panel.mark[0])
        axis.axvline(panel.mark[0], color=_LINE, linestyle="--", zorder=1, label=panel.mark[1])
    if len(panel.sides) > 1 or panel.mark:
        axis.legend(fontsize=7.5 * scale, **_KEY)
    axis.set_yticks(range(len(rows)), list(rows), fontsize=8 * scale)
    axis.set_ylim(most_rows - 0.45, -0.55)
    if panel.log:
        axis.set_xscale("log")
        axis.margins(x=0.1)
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_locator(NullLocator())
    else:
        room = 1.25 if any(bar.note for bar in panel.bars) else 1.12
        axis.set_xlim(0, top * room or 1)
    axis.set_xlabel(panel.unit, fontsize=8 * scale)
    axis.set_title(panel.title, loc="left", fontsize=9 * scale, fontweight="bold", color=_INK)
    axis.grid(axis="x", color=_GRID, zorder=0)
    axis.tick_params(length=0, colors=_INK, labelsize=8 * scale)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


def _style(side: str) -> dict[str, Any]:
    """The look of the bars of a side."""
    return {"color": _COLORS.get(side, _OTHERS), "linewidth": 0, "zorder": 2}
