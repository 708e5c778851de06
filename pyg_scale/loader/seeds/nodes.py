"""The arguments ``data`` and ``input_nodes``, checked before any work."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, FeatureStore, GraphStore, HeteroData, remote_backend_utils
from torch_geometric.sampler import NodeSamplerInput

from pyg_scale.graph.topology import NodeType
from pyg_scale.ops.mapped_file import in_file


def check_data(data: Any) -> None:
    """Refuse what is no graph.

    Raises:
        TypeError: If it is neither ``Data`` nor ``HeteroData`` nor two stores.
    """
    if isinstance(data, Data | HeteroData):
        return
    got = type(data).__name__
    if isinstance(data, list | tuple) and len(data) == 2:
        if isinstance(data[0], FeatureStore) and isinstance(data[1], GraphStore):
            return
        got = f"{got} of {type(data[0]).__name__} and {type(data[1]).__name__}"
    raise TypeError(f"data must be Data, HeteroData or (FeatureStore, GraphStore) (got {got})")


class _MappedNodes(NodeSamplerInput):
    """Nodes of which those of a batch are read, and looked at, when it is made."""

    num_nodes = 0

    def __getitem__(self, index: Any) -> NodeSamplerInput:
        found: NodeSamplerInput = super().__getitem__(index)
        _check_range(found.node, self.num_nodes)
        return found


def num_nodes_of(data: Any, node_type: NodeType) -> int:
    """The number of nodes of a type in ``Data``, ``HeteroData`` or ``(FeatureStore, GraphStore)``.

    Raises:
        ValueError: If there is no such type or its size is not known.
    """
    if isinstance(data, Data):
        count = data.num_nodes
    elif isinstance(data, HeteroData):
        if node_type not in data.node_types:
            raise ValueError(
                f"input_nodes has the node type {node_type!r}; the graph has "
                f"{', '.join(map(repr, data.node_types))}"
            )
        count = data[node_type].num_nodes
    elif node_type is None:
        count = _num_nodes_of_stores(*data)
    else:
        count = remote_backend_utils.num_nodes(*data, node_type)
    if count is None:
        raise ValueError(f"the graph does not say how many nodes {node_type!r} has: set num_nodes")
    return int(count)


def _num_nodes_of_stores(feature_store: Any, graph_store: Any) -> int:
    if isinstance(graph_store, Data):
        return num_nodes_of(graph_store, None)
    for attr in graph_store.get_all_edge_attrs():
        if attr.size is not None:
            return int(max(size for size in attr.size if size is not None))
    raise ValueError(
        "the graph store does not say how many nodes there are: put edges with size=(n, n)"
    )


def seed_nodes_of(
    data: Any, input_nodes: Any, input_time: Any, input_id: Tensor | None
) -> NodeSamplerInput:
    """The seeds that a loader's arguments stand for, as a sampler takes them.

    A mask stands for its nodes, and their ids are then the input ids unless those are given, as in
    PyG. Ids in a mapped file stay there: a batch reads its own.

    Args:
        data: ``Data``, ``HeteroData`` or ``(FeatureStore, GraphStore)``.
        input_nodes: ``None`` (all), ids or a mask; in a heterogeneous graph a node type, or
            ``(node_type, None or ids or mask)``.
        input_time: Times of the seeds ``[num_seeds]``.
        input_id: What to call the seeds in batches.

    Raises:
        TypeError: If ``data`` is no graph, ids are not integers, or times no numbers.
        ValueError: If a node type, or one too many, is given, or lengths differ.
        IndexError: If an id is out of range; of mapped ids, when a batch has it.
    """
    check_data(data)
    node_type, nodes = _split(data, input_nodes)
    num_nodes = num_nodes_of(data, node_type)
    mapped = False
    if nodes is None:
        ids: Tensor = torch.arange(num_nodes)
    else:
        ids = _tensor(nodes)
        if ids.dtype == torch.bool:
            if ids.numel() != num_nodes:
                raise ValueError(
                    f"input_nodes is a mask of {ids.numel()} entries, but there are "
                    f"{num_nodes} nodes"
                )
            ids = ids.nonzero().view(-1)
            input_id = ids if input_id is None else input_id
        mapped = in_file(ids)
        if not mapped:
            _check_range(ids, num_nodes)
    if input_id is not None:
        input_id = _tensor(input_id, "input_id")
        if input_id.numel() != ids.numel():
            raise ValueError(
                f"input_id has {input_id.numel()} entries for {ids.numel()} input_nodes"
            )
    time = check_time(input_time, ids)
    if not mapped:
        return NodeSamplerInput(input_id, ids, time, node_type)
    found = _MappedNodes(input_id, ids, time, node_type)
    found.num_nodes = num_nodes
    return found


def check_time(time: Any, ids: Tensor, name: str = "input_time") -> Tensor | None:
    """Seed times, one number per seed.

    Raises:
        TypeError: If they are not numbers.
        ValueError: If there are too few or too many, or one is NaN.
    """
    if time is None:
        return None
    time = torch.as_tensor(time)
    if time.dtype == torch.bool or time.is_complex():
        raise TypeError(f"{name} must be integers or floating point numbers (got {time.dtype})")
    if time.dim() != 1 or time.numel() != ids.numel():
        raise ValueError(
            f"{name} must be one time per seed (got shape {list(time.shape)} for "
            f"{ids.numel()} seeds)"
        )
    if time.is_floating_point() and bool(time.isnan().any()):
        raise ValueError(f"{name} has NaN in it: give every seed a time")
    return time


def _split(data: Any, input_nodes: Any) -> tuple[NodeType, Any]:
    named = input_nodes if isinstance(input_nodes, list | tuple) else (input_nodes, None)
    typed = len(named) == 2 and isinstance(named[0], str)
    if typed and not _is_hetero(data):
        raise ValueError(
            f"input_nodes names the node type {named[0]!r}, but the graph has no types"
        )
    if typed:
        return named[0], named[1]
    if _is_hetero(data):
        raise ValueError(
            "input_nodes must say of which type the seeds are: pass 'paper' for all nodes of a "
            f"type, or ('paper', ids or mask) (got {type(input_nodes).__name__})"
        )
    return None, input_nodes


def _is_hetero(data: Any) -> bool:
    if isinstance(data, Data | HeteroData):
        return isinstance(data, HeteroData)
    return any(attr.edge_type is not None for attr in data[1].get_all_edge_attrs())


def _tensor(nodes: Any, name: str = "input_nodes") -> Tensor:
    if not isinstance(nodes, Tensor):
        if isinstance(nodes, range):
            nodes = np.arange(nodes.start, nodes.stop, nodes.step)
        try:
            nodes = torch.as_tensor(nodes)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"{name} must be ids, a bool mask, a node type, or a node type and one of these "
                f"(got {type(nodes).__name__}: {error})"
            ) from None
        if nodes.numel() == 0:
            nodes = nodes.reshape(-1).to(torch.int64)
    if nodes.dim() != 1:
        raise ValueError(f"{name} must be one-dimensional (got shape {list(nodes.shape)})")
    if nodes.dtype in (torch.bool, torch.int64, torch.int32):
        return nodes.cpu()
    if nodes.dtype in (torch.int16, torch.int8):
        return nodes.to("cpu", torch.int64)
    raise TypeError(
        f"{name} must be integer ids or a bool mask (got {nodes.dtype}): use .long() or .bool()"
    )


def _check_range(ids: Tensor, num_nodes: int) -> None:
    if ids.numel() == 0:
        return
    low, high = (int(each) for each in ids.aminmax())
    if low < 0 or high >= num_nodes:
        raise IndexError(
            f"input_nodes has node {low if low < 0 else high}, but there are {num_nodes} nodes"
        )
