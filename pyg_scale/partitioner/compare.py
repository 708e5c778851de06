"""Cut a graph by several methods and measure each result."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from pyg_scale.partitioner.base import Partitioner
from pyg_scale.partitioner.counts import Quality
from pyg_scale.partitioner.cut import assign
from pyg_scale.partitioner.graph import Train, partition_graph
from pyg_scale.partitioner.measure import quality


def compare(
    data: Any,
    num_parts: int,
    methods: Sequence[str | Partitioner],
    *,
    seed: int = 0,
    shares: Sequence[float] | Tensor | None = None,
    balance: str | Sequence[str] = ("nodes",),
    train: Train | None = None,
    num_neighbors: Sequence[int] | None = None,
    batch_size: int = 1024,
    num_batches: int = 64,
    edge_assign_strategy: str = "by_dst",
    memory: int | str = "1GB",
) -> list[Quality]:
    """Partition a graph by several methods, for :func:`~pyg_scale.partitioner.report.table`.

    The graph is read and made undirected once, outside of the time of each method.

    Args:
        data: As in :func:`pyg_scale.partition`, but whole: in memory, or a directory of one part.
        num_parts: Number of parts.
        methods: Names of partitioners, or instances with options.
        seed: Seed of all random choices.
        shares: As in :func:`pyg_scale.partition`.
        balance: As there.
        train: As there.
        num_neighbors: See :func:`~pyg_scale.partitioner.measure.quality`, also for the following.
        batch_size: As there.
        num_batches: As there.
        edge_assign_strategy: As there.
        memory: As there.

    Raises:
        ValueError: If no method is given, or as :func:`pyg_scale.partition`.
        UnknownPluginError: If a method does not exist.
    """
    if isinstance(methods, str) or not methods:
        raise ValueError(f"methods must be a list of partitioners (got {methods!r})")
    graph = partition_graph(data, balance=balance, train=train)
    found = []
    for method in methods:
        start = time.perf_counter()
        partition, _ = assign(
            data, num_parts, method, seed, shares=shares, balance=balance, train=train, graph=graph
        )
        seconds = time.perf_counter() - start
        each = quality(
            data,
            partition,
            edge_assign_strategy=edge_assign_strategy,
            num_neighbors=num_neighbors,
            batch_size=batch_size,
            num_batches=num_batches,
            cache=partition.cache,
            seed=seed,
            memory=memory,
        )
        each.seconds = seconds
        found.append(each)
    return found
