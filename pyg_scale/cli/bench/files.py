"""What every benchmark writes and is told on the command line in the same way."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name the files of :func:`write`."""
    out = parser.add_argument_group("output")
    out.add_argument("--json", metavar="FILE")
    out.add_argument("--png", metavar="FILE", help="needs matplotlib")
    out.add_argument("--report", metavar="FILE.md")


def count(text: str) -> int:
    """A whole number, also as ``4e7``."""
    return int(float(text))


def numbers(text: str) -> list[int]:
    """``15,10,5``."""
    return [int(part) for part in text.split(",")]


def write(
    found: Mapping[str, Any],
    json_path: str | None,
    png_path: str | None,
    report: str | None,
    *,
    draw: Callable[[Mapping[str, Any], str], None],
    markdown: Callable[[Mapping[str, Any], str | None], str],
) -> None:
    """Write the files that were asked for, and the folders that they are in.

    Args:
        found: What was measured, as JSON values.
        json_path: All of it.
        png_path: The picture.
        report: The report, as markdown.
        draw: Writes the picture to a path.
        markdown: Makes the report; is given the path of the picture, if there is one.
    """
    for path in (json_path, png_path, report):
        if path:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
    if json_path:
        Path(json_path).write_text(json.dumps(found, indent=1) + "\n")
    if png_path:
        draw(found, png_path)
    if report:
        Path(report).write_text(markdown(found, png_path))
