"""The training nodes of a graph: the index set ``train``, else ``train_mask``."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from pyg_scale.graph.topology import NodeType
from pyg_scale.partitioner.assigned import Assigned
from pyg_scale.partitioner.whole import directory_of
from pyg_scale.store.directory.assemble import node_attribute


def train_nodes_of(data: Any) -> dict[NodeType, Tensor]:
    """The ids ``int64`` of training nodes, ascending, for the node types that have any.

    Args:
        data: ``Data``, ``HeteroData``, or a graph directory or its path.
    """
    directory = directory_of(data)
    found: dict[NodeType, Tensor] = {}
    if directory is not None:
        for node_type, node in directory.meta.nodes.items():
            if "train" in directory.meta.index_sets.get(node_type or "", {}):
                found[node_type] = directory.index_set("train", node_type)
            elif "train_mask" in node.attributes:
                found[node_type] = _ids(node_attribute(directory, node_type, "train_mask"))
    elif isinstance(data, Data):
        if isinstance(data.get("train_mask"), Tensor):
            found[None] = _ids(data.train_mask)
    elif isinstance(data, HeteroData):
        for node_type in data.node_types:
            if isinstance(data[node_type].get("train_mask"), Tensor):
                found[node_type] = _ids(data[node_type].train_mask)
    return {name: ids.unique() for name, ids in found.items() if ids.numel()}


def _ids(mask: Tensor) -> Tensor:
    """The training nodes of any split of a mask ``[n]`` or ``[n, splits]``."""
    mask = mask.bool()
    return (mask if mask.dim() == 1 else mask.flatten(1).any(1)).nonzero().view(-1)


def count_train(train: dict[NodeType, Tensor], assigned: Assigned) -> dict[NodeType, list[int]]:
    """Number of training nodes of each part, by node type."""
    return {
        name: np.bincount(assigned.part[name][ids].numpy(), minlength=assigned.num_parts).tolist()
        for name, ids in train.items()
    }
