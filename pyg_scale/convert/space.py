"""A check that a conversion fits on the disk."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from pyg_scale.convert.base import Description
from pyg_scale.convert.edge_stream import EdgeStream
from pyg_scale.files.npy import numpy_dtype
from pyg_scale.graph.topology import EdgeType
from pyg_scale.store.directory.meta import Attribute

_EDGE = 8  # bytes of an edge in the result: neighbour and id
_BUCKET = 10  # and in a temporary file
_EXTRA = 8  # a time or a weight, in either


def estimate(
    description: Description,
    streams: Mapping[EdgeType, EdgeStream],
    *,
    time_attr: str | None,
    weight_attr: str | None,
    linked: str | None = None,
) -> int:
    """Bytes that a conversion needs at most, as far as sizes are known.

    Args:
        description: The graph.
        streams: The edges of the result.
        time_attr: The attribute by which edges are ordered.
        weight_attr: The attribute that holds weights.
        linked: The attribute of nodes that is linked, not copied.
    """
    total, temporary = 0, 0
    for stream in streams.values():
        size = sum(description.edges[each.edge_type].num_edges or 0 for each in stream.sources)
        names = {time_attr, weight_attr} & set(stream.edges.attributes)
        total += size * (_EDGE + _EXTRA * len(names))
        total += size * sum(map(_row_bytes, stream.edges.attributes.values()))
        temporary = max(temporary, size * (_BUCKET + _EXTRA * len(names)))
        end = None if stream.edge_type is None else stream.edge_type[2]
        total += 8 * ((description.nodes[end].num_nodes or 0) + 1)
    for nodes in description.nodes.values():
        copied = [each for name, each in nodes.attributes.items() if name != linked]
        total += (nodes.num_nodes or 0) * sum(map(_row_bytes, copied))
    return total + temporary


def check_space(root: Path, needed: int) -> None:
    """Refuse to begin what would not fit.

    Args:
        root: Where it is written; what lies there from a run before counts as free.

    Raises:
        OSError: With ``errno.ENOSPC``; says how much is needed and how much there is.
    """
    found = [
        os.lstat(os.path.join(folder, name)) for folder, _, names in os.walk(root) for name in names
    ]
    used = sum(each.st_blocks * 512 for each in found if each.st_nlink == 1)
    free = shutil.disk_usage(root).free + used
    if free < needed:
        raise OSError(
            errno.ENOSPC,
            f"the graph directory and temporary files need up to {needed / 1e9:.2f} GB, there are "
            f"{free / 1e9:.2f} GB free: make room, or write to another disk",
            str(root),
        )


def _row_bytes(attribute: Attribute) -> int:
    size = numpy_dtype(attribute.dtype).itemsize
    for each in attribute.row:
        size *= each
    return size
