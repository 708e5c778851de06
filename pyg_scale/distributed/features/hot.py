"""The choice of rows of other ranks that a rank keeps in memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from pyg_scale.distributed.features.plan import Splitter
from pyg_scale.files.byte_size import byte_size
from pyg_scale.store.cache.cached import POLICIES
from pyg_scale.store.cache.hot import hot_lists, hot_of, in_turn, neighbor_counts, order
from pyg_scale.store.directory import GraphDirectory
from pyg_scale.store.rows import TensorRows


def check_cache(cache: Any, cache_ratio: Any, policy: Any) -> None:
    """Refuse arguments that make no sense, before a graph is opened.

    Raises:
        ValueError: If both sizes are given, one is out of range, or the policy does not exist.
        TypeError: If one has a wrong type.
    """
    if policy not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(POLICIES)} (got {policy!r})")
    capacity_of(cache, cache_ratio, ())


def capacity_of(
    cache: int | str | None, cache_ratio: float | None, columns: Iterable[TensorRows]
) -> int:
    """Size of a cache in bytes, 0 for none.

    Args:
        cache: Bytes, or text such as ``"2GB"``.
        cache_ratio: Instead of ``cache``, the share of all features of the graph, from 0 to 1.
        columns: All features of the graph.

    Raises:
        ValueError: If both are given, or one is out of range.
        TypeError: If one has a wrong type.
    """
    if cache is not None and cache_ratio is not None:
        raise ValueError("cache= and cache_ratio= both set the size of the cache: pass one")
    if cache_ratio is not None:
        if isinstance(cache_ratio, bool) or not isinstance(cache_ratio, int | float):
            raise TypeError(f"cache_ratio must be a number (got {cache_ratio!r})")
        if not 0 <= cache_ratio <= 1:
            raise ValueError(f"cache_ratio must be from 0 to 1 (got {cache_ratio!r})")
        return int(cache_ratio * sum(column.num_rows * column.row_bytes for column in columns))
    return 0 if cache in (None, 0) else byte_size(cache, "cache")


def hot_rows(directory: GraphDirectory, split: Splitter, parts: Any, hot: Any) -> dict[Any, Tensor]:
    """The nodes of other ranks to keep, in order of priority.

    Args:
        directory: The directory.
        split: Tells which nodes are not local.
        parts: The local parts.
        hot: ``None``: first the nodes that the partitioner listed for these parts (``cache.npy``),
            then their halo nodes, by the number of edges of the parts that have them as the
            neighbour. Else original ids, see :class:`~pyg_scale.store.cache.Cached`.

    Returns:
        Original ids ``int64`` by node type.

    Raises:
        TypeError: If ``hot`` has another type.
        ValueError: If it has an id twice.
        IndexError: If it has an id that is not a node.
    """
    found, given = {}, None if hot is None else hot_lists(hot)
    counts = neighbor_counts(directory, parts) if given is None else {}
    for node_type, node in directory.meta.nodes.items():
        if given is not None:
            ids = hot_of(given, node_type)
            ids = torch.empty(0, dtype=torch.int64) if ids is None else ids
            if ids.numel() and int(ids.max()) >= node.num_nodes:
                raise IndexError(f"hot has the id {int(ids.max())}, of {node.num_nodes} nodes")
        else:
            lists = [directory.part(number).cache(node_type) for number in parts]
            count = counts.pop(node_type)
            halo = order(count)[: int((count > 0).sum())]
            first = in_turn(lists, node.num_nodes) if lists else halo[:0]
            ids = in_turn([torch.cat([first, halo])], node.num_nodes)
        found[node_type] = ids[~split.is_here(False, node_type, ids)]
    return found
