"""A whole graph as a graph directory of one part, whatever it was handed over as."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

from pyg_scale.errors import GraphDirectoryError
from pyg_scale.store.directory import GraphDirectory


def whole_directory(data: Any) -> GraphDirectory:
    """The directory of one part that a path names, opened.

    Raises:
        GraphDirectoryError: If it is damaged, or has several parts.
        TypeError: If it is something else.
    """
    opened = directory_of(data)
    if opened is None:
        raise TypeError(
            f"data must be the path of a graph directory (got {type(data).__name__}): "
            "save the graph first"
        )
    if opened.meta.num_parts > 1:
        raise GraphDirectoryError(
            f"{opened.path} is cut into {opened.meta.num_parts} parts already: give the "
            "directory of one part that it was made from"
        )
    opened.part(0)
    return opened


def directory_of(data: Any) -> GraphDirectory | None:
    """The directory that a path names or that a graph was opened from; ``None`` if neither."""
    if isinstance(data, GraphDirectory):
        return data
    if isinstance(data, str | PathLike):
        return GraphDirectory(Path(data))
    return None
