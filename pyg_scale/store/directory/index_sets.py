"""Named sets of nodes, such as ``train``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_scale.graph.source import of
from pyg_scale.graph.topology import NodeType

Sets = dict[NodeType, dict[str, Tensor]]


def checked_sets(index_sets: Mapping[str, Any], num_nodes: Mapping[NodeType, int]) -> Sets:
    """Sets by node type and name, as ids ``int64``.

    Args:
        index_sets: ``{name: ids or mask}``, in a heterogeneous graph
            ``{node type: {name: ids or mask}}``.
        num_nodes: Nodes of each type.

    Raises:
        TypeError: If a set is neither integers nor a mask.
        ValueError: If the node type does not exist, or a mask has another length.
        IndexError: If a node does not exist.
    """
    given: Mapping[NodeType, Any] = {t: index_sets[t] for t in index_sets}
    if None in num_nodes:
        given = {None: index_sets} if index_sets else {}
    out: Sets = {}
    for node_type, sets in given.items():
        if node_type not in num_nodes:
            raise ValueError(
                f"index_sets has the node type {node_type!r}; the graph has "
                f"{', '.join(map(repr, num_nodes))}"
            )
        if not isinstance(sets, Mapping):
            raise TypeError(
                f"index_sets{of(node_type)} must map names to ids (got {type(sets).__name__})"
            )
        for name, ids in sets.items():
            if isinstance(ids, Mapping):
                form = "{node type: {name: ids}}" if node_type is not None else "{name: ids}"
                raise TypeError(
                    f"index set {name!r}{of(node_type)} must be ids or a mask (got "
                    f"{type(ids).__name__}): this graph takes index_sets={form}"
                )
        out[node_type] = {
            name: checked_ids(ids, num_nodes[node_type], f"index set {name!r}{of(node_type)}")
            for name, ids in sets.items()
        }
    return out


def checked_ids(ids: Any, num_nodes: int, what: str) -> Tensor:
    """Ids ``int64`` ``[n]``, checked to exist, from ids or a mask.

    Raises:
        TypeError: If it is neither integers nor a mask.
        ValueError: If it is not one-dimensional, or a mask of another length.
        IndexError: If a node does not exist.
    """
    ids = torch.as_tensor(np.asarray(ids) if isinstance(ids, range) else ids).detach().cpu()
    if ids.dim() == 2 and ids.size(1) == 1:
        ids = ids.view(-1)
    if ids.dim() != 1:
        raise ValueError(f"{what} must be one-dimensional (got shape {list(ids.shape)})")
    if ids.dtype == torch.bool:
        if ids.numel() != num_nodes:
            raise ValueError(f"{what} is a mask of {ids.numel()} entries for {num_nodes} nodes")
        return ids.nonzero().view(-1)
    if ids.numel() == 0:
        return ids.new_empty(0, dtype=torch.int64)
    if ids.is_floating_point() or ids.is_complex():
        raise TypeError(f"{what} must be integer ids or a bool mask (got {ids.dtype})")
    ids = ids.to(torch.int64)
    low, high = (int(v) for v in torch.aminmax(ids))
    if low < 0 or high >= num_nodes:
        raise IndexError(
            f"{what} has node {low if low < 0 else high}, but there are {num_nodes} nodes"
        )
    return ids
