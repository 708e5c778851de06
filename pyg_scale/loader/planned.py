"""A warning for loaders that sample other numbers of neighbours than a partition was made for."""

from __future__ import annotations

import warnings
from typing import Any

from torch_geometric.sampler import NumNeighbors

from pyg_scale.graph.base import directory_of


def warn_if_unplanned(data: Any, sampler: Any) -> None:
    """Warn if ``data`` was opened from a directory that was cut for another ``num_neighbors``.

    The partitioner ``frequency`` places nodes and lists what to cache by what sampling with its own
    ``num_neighbors`` reaches.

    Args:
        data: What the loader was given.
        sampler: Its sampler.
    """
    directory = directory_of(data)
    if directory is None or directory.meta.partition is None:
        return
    partition = directory.meta.partition
    planned, asked = partition.extra.get("num_neighbors"), getattr(sampler, "num_neighbors", None)
    if planned is None or not isinstance(asked, NumNeighbors):
        return
    values = asked.get_values()
    by_type = values.values() if isinstance(values, dict) else [values]
    found = [list(each) for each in by_type]
    if any(each != planned for each in found):
        warnings.warn(
            f"{directory.path} was partitioned by {partition.method!r} for num_neighbors="
            f"{planned}, the loader has {found[0] if len(found) == 1 else found}: nodes and cache "
            "lists fit less; partition again with option num_neighbors, or load with what it has",
            stacklevel=4,
        )
