"""Graphs that come to be by appending, in steps, and the same graphs at once."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

import pyg_scale

Graph = Data | HeteroData


def in_order(data: Graph, steps: int) -> Graph:
    """A copy whose edges are in the order in which their nodes appear.

    Nodes of a type appear in ``steps`` equal shares, in the order of their ids, and edges as soon
    as both ends are there (or in a later step, for a third of them).
    """
    out = data.clone()
    for store in out.edge_stores:
        if store.num_edges:
            shown = torch.stack([_step(out, store, end, steps) for end in (0, 1)]).amax(0)
            late = torch.arange(store.num_edges) % 3 == 1
            shown = torch.where(late, (shown + 1).clamp(max=steps - 1), shown)
            order = shown.argsort(stable=True)
            for name in _rows(store, of_edges=True):
                store[name] = store[name][order]
            store.edge_index = store.edge_index[:, order]
    return out


def _step(data: Graph, store: Any, end: int, steps: int) -> Tensor:
    size = data.num_nodes if isinstance(data, Data) else data[store._key[2 * end]].num_nodes
    return (store.edge_index[end].long() * steps) // max(1, size)


def _rows(store: Any, *, of_edges: bool) -> list[str]:
    structure = ("edge_index", "num_nodes")
    test = store.is_edge_attr if of_edges else store.is_node_attr
    return [n for n in store.keys() if n not in structure and test(n)]  # noqa: SIM118


def first(data: Graph, step: int, steps: int) -> Graph:
    """What is there of a graph that is in order, after a step."""
    out = data.clone()
    sizes = {}
    for store, whole in zip(out.node_stores, data.node_stores, strict=True):
        size = -(-whole.num_nodes * (step + 1) // steps)
        sizes[store._key] = size
        for name in _rows(whole, of_edges=False):
            store[name] = whole[name][:size]
        if "num_nodes" in store:
            store.num_nodes = size
    for store, whole in zip(out.edge_stores, data.edge_stores, strict=True):
        types = (None, None) if whole._key is None else (whole._key[0], whole._key[2])
        row, col = whole.edge_index
        inside = (row < sizes[types[0]]) & (col < sizes[types[1]])
        late = (inside.logical_not()).nonzero().view(-1)
        size = int(late[0]) if late.numel() else inside.numel()
        for name in _rows(whole, of_edges=True):
            store[name] = whole[name][:size]
        store.edge_index = whole.edge_index[:, :size]
    return out


def between(before: Graph, after: Graph) -> Graph:
    """The rows of a graph that another one, its beginning, does not have."""
    out = type(after)()
    nodes = {store._key: store.num_nodes for store in before.node_stores}
    edges = {store._key: store.num_edges for store in before.edge_stores}
    for store in after.node_stores:
        mine = out._store if isinstance(out, Data) else out[store._key]
        for name in _rows(store, of_edges=False):
            mine[name] = store[name][nodes[store._key] :]
        mine.num_nodes = store.num_nodes - nodes[store._key]
    for store in after.edge_stores:
        mine = out._store if isinstance(out, Data) else out[store._key]
        for name in _rows(store, of_edges=True):
            mine[name] = store[name][edges[store._key] :]
        mine.edge_index = store.edge_index[:, edges[store._key] :]
    return out


def grown(data: Graph, path: Path, steps: int = 3, **recorded: Any) -> list[Graph]:
    """Make a directory that grows to a graph that is in order; the graph after each snapshot."""
    states = [first(data, step, steps) for step in range(steps)]
    pyg_scale.save(states[0], path, **recorded)
    for number, (before, after) in enumerate(itertools.pairwise(states)):
        new = between(before, after)
        assert pyg_scale.append(path, nodes=new, edges=new) == number + 1
    return states
