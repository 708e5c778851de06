"""The graph in a ``(FeatureStore, GraphStore)`` as ``Data`` or ``HeteroData``."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, FeatureStore, GraphStore, HeteroData

from pyg_scale.graph.topology import CSC
from pyg_scale.store.directory.assemble import Places, fill_edge_list
from pyg_scale.store.topology import topology_of


def data_of_stores(feature_store: FeatureStore, graph_store: GraphStore) -> Data | HeteroData:
    """All features and edges, in memory; edges in the order of their ids.

    Raises:
        ValueError: If the edges do not form a graph, or two features have the same name.
        TypeError: If the edges are not integers.
        IndexError: If an edge has a node that does not exist.
    """
    topology = topology_of((feature_store, graph_store))
    out: Any = HeteroData() if topology.is_hetero else Data()
    for node_type in topology.node_types:
        _of(out, node_type).num_nodes = topology.num_nodes[node_type]
    for attr in feature_store.get_all_tensor_attrs():
        attr = copy.copy(attr)
        attr.index = None
        group = attr.group_name if attr.is_set("group_name") else None
        group = tuple(group) if isinstance(group, list) else group
        store = _of(out, None if group == (None, None) else group)
        if attr.attr_name in store:
            raise ValueError(f"{attr.attr_name!r} is stored for nodes and for edges: rename one")
        store[attr.attr_name] = feature_store.get_tensor(attr)
    for edge_type, csc in topology.csc.items():
        _of(out, edge_type).edge_index = _edge_list(csc, topology.index_dtype)
    return out


def _of(data: Any, kind: Any) -> Any:
    return data._store if isinstance(data, Data) else data[kind]


def _edge_list(csc: CSC, dtype: torch.dtype) -> Tensor:
    out = torch.empty(2, csc.num_edges, dtype=dtype)
    places = Places(csc.num_edges, "the edge list of the graph store")
    fill_edge_list(csc, out[1], out[0], places)
    places.check()
    return out
