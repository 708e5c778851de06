"""Quality reports of one or several partitions: a table, and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pyg_scale.partitioner.counts import Quality

_BAR, _INK, _GRID = "#1b5e96", "#2b2b2b", "#e4e4e4"


def table(found: Sequence[Quality]) -> str:
    """One line for each partition, as text.

    Columns without any values are left out.
    """
    rows = [_row(each) for each in found]
    names = [name for name in rows[0] if any(row[name] is not None for row in rows)] if rows else []
    cells = [names, *[[_text(row[name]) for name in names] for row in rows]]
    width = [max(len(line[column]) for line in cells) for column in range(len(names))]
    return "\n".join(
        "  ".join(
            cell.ljust(width[0]) if column == 0 else cell.rjust(width[column])
            for column, cell in enumerate(line)
        ).rstrip()
        for line in cells
    )


def describe(found: Quality) -> str:
    """The full text of one partition: its table, then a line for each part."""
    lines = [table([found]), "", "part  nodes  edges  halo nodes  training nodes"]
    for part in range(found.num_parts):
        lines.append(
            f"{part:>4}  {_sum(found.nodes, part):,}  {_sum(found.edges, part):,}  "
            f"{_sum(found.halo, part):,}  {_sum(found.train, part):,}"
        )
    return "\n".join(lines)


def check_drawable(path: str) -> None:
    """Check that a picture can be drawn, before what it shows is computed.

    Raises:
        ImportError: If matplotlib is missing; names the command to install it.
        ValueError: If the name does not end in one of its formats.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        raise ImportError(f"a picture needs matplotlib: pip install matplotlib ({error})") from None
    ends = sorted(FigureCanvasAgg.filetypes)
    if Path(path).suffix[1:].lower() not in ends:
        raise ValueError(f"{path!r} must end in one of .{', .'.join(ends)}")


def draw(found: Sequence[Quality], path: str) -> None:
    """Draw partitions side by side as bars into a picture.

    Raises:
        ImportError, ValueError: See :func:`check_drawable`.
    """
    check_drawable(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [_row(each) for each in found]
    panels = [
        name
        for name in (rows[0] if rows else ())
        if name not in ("method", "parts") and any(row[name] is not None for row in rows)
    ]
    across = min(3, max(1, len(panels)))
    down = -(-max(1, len(panels)) // across)
    figure = Figure(
        figsize=(3.6 * across, down * (1.1 + 0.32 * len(rows))), dpi=150, layout="constrained"
    )
    FigureCanvasAgg(figure)
    axes = figure.subplots(down, across, squeeze=False).reshape(-1)
    labels = [f"{row['method']}, {row['parts']} parts" for row in rows]
    for axis, name in zip(axes, panels):
        _panel(axis, name, labels, [row[name] for row in rows])
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    figure.savefig(path, facecolor="white")


def _panel(axis: Any, name: str, labels: list[str], values: list[Any]) -> None:
    lengths = [0 if value is None else value for value in values]
    axis.barh(range(len(values)), lengths, color=_BAR, height=0.7, zorder=2)
    top = max([*lengths, 1e-9])
    for row, value in enumerate(values):
        axis.text(lengths[row] + top * 0.02, row, _text(value), va="center", fontsize=8)
    axis.set_yticks(range(len(values)), labels, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, top * 1.25)
    axis.locator_params(axis="x", nbins=4)
    axis.set_title(name, loc="left", fontsize=9, fontweight="bold", color=_INK)
    axis.grid(axis="x", color=_GRID, zorder=0)
    axis.tick_params(length=0, colors=_INK, labelsize=8)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


def _row(found: Quality) -> dict[str, Any]:
    """The columns of a table, in order; ``None`` for values that were not measured."""
    remote = found.remote
    cached = remote is not None and remote.cached > 0
    return {
        "method": found.method or "-",
        "parts": found.num_parts,
        "cut": found.cut,
        "node balance": found.node_balance,
        "edge balance": found.edge_balance,
        "train balance": found.train_balance,
        "replication": found.replication,
        "largest halo": found.largest_halo,
        "remote per batch": None if remote is None else round(remote.per_batch),
        "remote share": None if remote is None else remote.share,
        "of them cached": round(remote.cached) if remote is not None and cached else None,
        "seconds": found.seconds,
    }


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _sum(counts: dict[Any, list[int]], part: int) -> int:
    return sum(each[part] for each in counts.values())
