"""Reports of benchmarks, for a terminal, as Markdown, as JSON and as a picture."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyg_scale.files.place import replace_file
from pyg_scale_bench import environment
from pyg_scale_bench.chart import Curves, Panel, draw

GB = 1e9


@dataclass(frozen=True)
class Table:
    """A table of text cells.

    Attributes:
        header: The names of the columns.
        rows: The rows, with a cell for each column.
        title: The title above the table.
        note: A note between title and table.
        align: ``l`` or ``r`` for each column; the last letter holds for all further ones.
        detail: True if it is too long for a terminal.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    note: str = ""
    align: str = "llr"
    detail: bool = False

    def terminal(self) -> list[str]:
        """The lines of the table with aligned columns."""
        table = [self.header, *self.rows]
        width = [max(map(len, column)) for column in zip(*table)]
        sides = self._sides()
        return [
            "  ".join(
                cell.ljust(size) if side == "l" else cell.rjust(size)
                for cell, size, side in zip(row, width, sides)
            ).rstrip()
            for row in table
        ]

    def markdown(self) -> list[str]:
        """The lines of the table in Markdown."""
        ruler = "|".join("---" if side == "l" else "--:" for side in self._sides())
        rows = ["| " + " | ".join(row) + " |" for row in (self.header, *self.rows)]
        return [rows[0], f"|{ruler}|", *rows[1:]]

    def _sides(self) -> str:
        return self.align.ljust(len(self.header), self.align[-1])[: len(self.header)]


@dataclass(frozen=True)
class Report:
    """The results of a benchmark, and their presentation.

    Attributes:
        found: All results, as JSON values.
        lines: Sentences; those about the machine are added.
        tables: The tables after the sentences.
        panels: The panels of the picture, row by row.
        caption: The caption above the picture.
        failed: True if something is wrong, not only slow.
    """

    found: Mapping[str, Any]
    lines: Sequence[str]
    tables: Sequence[Table] = ()
    panels: Sequence[Sequence[Panel | Curves]] = ()
    caption: str = ""
    failed: bool = False

    def terminal(self) -> str:
        """The sentences and the short tables."""
        lines = [*self.lines, *environment.lines(self.found["environment"])]
        for table in self.tables:
            if not table.detail and table.rows:
                lines += ["", *filter(None, (table.title, table.note)), *table.terminal()]
        return "\n".join(lines)

    def markdown(self, png_path: str | None = None) -> str:
        """The whole report, with the picture if its path is given."""
        lines = [f"# `pyg-scale bench {self.found['benchmark']}`", ""]
        lines += ["```", self.found["command"], "```", ""]
        if png_path:
            lines += [f"![Chart]({Path(png_path).name})", ""]
        lines += [f"* {line}" for line in self.lines]
        lines += [f"* {line}" for line in environment.lines(self.found["environment"])]
        for table in self.tables:
            if table.rows:
                for text in (f"## {table.title}" if table.title else "", table.note):
                    lines += ["", text] if text else []
                lines += ["", *table.markdown()]
        return "\n".join(lines) + "\n"

    def draw(self, path: str) -> None:
        """Draw the picture into a PNG."""
        loud = "" if self.found["environment"]["quiet"] else "   NOT A QUIET MACHINE"
        draw(self.panels, self.caption + loud, path)

    def write(self, json_path: str | None, png_path: str | None, markdown: str | None) -> None:
        """Write the requested files, and create their folders."""
        for path in (json_path, png_path, markdown):
            if path:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
        if json_path:
            Path(json_path).write_text(as_json(self.found, indent=1, default=str) + "\n")
        if markdown:
            Path(markdown).write_text(self.markdown(png_path))
        if png_path:  # the last one, as drawing is the most likely to fail
            self.draw(png_path)


def as_json(
    value: Any, indent: int | None = None, default: Callable[[Any], Any] | None = None
) -> str:
    """JSON text of values; numbers that are not finite become ``null``, as JSON has no others.

    Args:
        value: The values.
        indent: As of :func:`json.dumps`.
        default: As of :func:`json.dumps`.
    """
    return json.dumps(_finite(value), indent=indent, default=default, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value


def save_so_far(found: Mapping[str, Any], path: str | None, others: environment.Others) -> None:
    """Write what there is so far as JSON if ``path`` is given, whole or not at all.

    Args:
        found: The results.
        path: The file.
        others: What began before the work.
    """
    if path is None:
        return
    about = dict(found["environment"])
    environment.complete(about, others)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    text = as_json({**found, "environment": about}, indent=1, default=str)
    replace_file(Path(path), text + "\n")


def number(value: float | None, form: str) -> str:
    """A number as text; ``None`` is one that was not finite, see :func:`as_json`."""
    return "not finite" if value is None else format(value, form)


def size(num_bytes: int | None) -> str:
    """A size in bytes as text with a unit."""
    if num_bytes is None:
        return "?"
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"


def listed(values: Sequence[float], form: str) -> str:
    """Formatted numbers, separated by commas."""
    return ", ".join(format(value, form) for value in values)
