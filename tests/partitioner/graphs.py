"""Graphs for the tests of partitioners."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pyg_scale.partitioner.base import PartitionGraph
from tests.ops.undirected import cut_weight, undirected


def partition_graph_of(
    edge_index: Tensor, num_nodes: int, columns: dict[str, Tensor] | None = None
) -> PartitionGraph:
    """What a partitioner sees of a graph; balanced are nodes, and what else there is."""
    indptr, indices = undirected(edge_index, num_nodes)
    weights = {"nodes": torch.ones(num_nodes, dtype=torch.int64), **(columns or {})}
    return PartitionGraph(
        indptr,
        indices.to(torch.int32),
        {None: (0, num_nodes)},
        torch.stack(list(weights.values()), dim=1),
        tuple(weights),
    )


def real_graph(data_dir, name: str) -> PartitionGraph:
    with np.load(data_dir / f"{name}.npz", allow_pickle=False) as archive:
        edge_index = torch.from_numpy(archive["edge_index"]).long()
    return partition_graph_of(edge_index, int(edge_index.max()) + 1)


def cut_share(graph: PartitionGraph, assignment: Tensor) -> float:
    return cut_weight(graph.indptr, graph.indices, assignment) / graph.num_edges


def agreement(found: Tensor, expected: Tensor) -> float:
    """The share of the nodes that are where they should be, whatever parts are called (two)."""
    same = float((found.long() == expected).double().mean())
    return max(same, 1 - same)
