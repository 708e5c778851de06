"""Partitioners, which assign the nodes of a graph to parts."""

from pyg_scale.partitioner.adaptive import Repartition, repartition
from pyg_scale.partitioner.base import (
    BALANCES,
    Partition,
    Partitioner,
    PartitionGraph,
    equal_shares,
    imbalance,
)
from pyg_scale.partitioner.compare import compare
from pyg_scale.partitioner.counts import Quality
from pyg_scale.partitioner.cut import assign, partition
from pyg_scale.partitioner.graph import partition_graph
from pyg_scale.partitioner.induced import subgraphs
from pyg_scale.partitioner.measure import quality
from pyg_scale.partitioner.write import write_partition

__all__ = [
    "BALANCES",
    "Partition",
    "PartitionGraph",
    "Partitioner",
    "Quality",
    "Repartition",
    "assign",
    "compare",
    "equal_shares",
    "imbalance",
    "partition",
    "partition_graph",
    "quality",
    "repartition",
    "subgraphs",
    "write_partition",
]
