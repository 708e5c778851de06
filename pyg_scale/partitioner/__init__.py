"""Partitioners: which part of a graph goes where."""

from pyg_scale.partitioner.base import (
    BALANCES,
    Partition,
    Partitioner,
    PartitionGraph,
    equal_shares,
    imbalance,
)
from pyg_scale.partitioner.cut import assign, partition
from pyg_scale.partitioner.graph import partition_graph

__all__ = [
    "BALANCES",
    "Partition",
    "PartitionGraph",
    "Partitioner",
    "assign",
    "equal_shares",
    "imbalance",
    "partition",
    "partition_graph",
]
