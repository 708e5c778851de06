"""What a batch with all neighbours must contain, from the edge list alone."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData


class Neighborhood(NamedTuple):
    """Nodes that each hop adds (the seeds first) and the edges that it takes, by type."""

    nodes: list[dict[Any, Tensor]]
    edges: list[dict[Any, Tensor]]


def neighborhood(
    data: Data | HeteroData,
    seeds: dict[Any, Tensor],
    hops: int,
    no_later_than: int | None = None,
) -> Neighborhood:
    """Expand all in-edges of what the hop before added, by marking nodes in masks.

    Args:
        data: A graph with ``edge_index``; homogeneous ones have the type ``None``.
        seeds: Node ids by type.
        hops: How often.
        no_later_than: Leave out neighbours of a later ``time``, where a type has one.
    """
    is_hetero = isinstance(data, HeteroData)
    node_types = data.node_types if is_hetero else [None]
    edges = data.edge_index_dict if is_hetero else {None: data.edge_index}
    store = {t: data[t] if is_hetero else data for t in node_types}
    known = {t: torch.zeros(store[t].num_nodes, dtype=torch.bool) for t in node_types}
    frontier = {t: mask.clone() for t, mask in known.items()}
    for node_type, ids in seeds.items():
        frontier[node_type][ids] = True
    found = Neighborhood([frontier], [])
    for _ in range(hops):
        for t in node_types:
            known[t] |= frontier[t]
        reached = {t: torch.zeros_like(mask) for t, mask in known.items()}
        taken = {}
        for edge_type, (row, col) in edges.items():
            source, destination = (None, None) if edge_type is None else edge_type[::2]
            hit = frontier[destination][col]
            if no_later_than is not None and "time" in store[source]:
                hit &= store[source].time[row] <= no_later_than
            taken[edge_type] = hit
            reached[source][row[hit]] = True
        frontier = {t: reached[t] & ~known[t] for t in node_types}
        found.nodes.append(frontier)
        found.edges.append(taken)
    as_ids = [[{t: m.nonzero().view(-1) for t, m in hop.items()} for hop in part] for part in found]
    return Neighborhood(*as_ids)


def assert_is(batch: Data | HeteroData, data: Data | HeteroData, expected: Neighborhood) -> None:
    """The batch has these nodes and edges and no others, each once, hop after hop."""
    is_hetero = isinstance(data, HeteroData)
    for node_type in expected.nodes[0]:
        store = batch[node_type] if is_hetero else batch
        hops = [hop[node_type] for hop in expected.nodes]
        assert store.num_sampled_nodes == [len(ids) for ids in hops]
        for ids, part in zip(hops, store.n_id.split(store.num_sampled_nodes)):
            assert torch.equal(part.sort().values, ids)
    for edge_type in expected.edges[0]:
        store = batch[edge_type] if edge_type is not None else batch
        source, destination = (None, None) if edge_type is None else edge_type[::2]
        hops = [hop[edge_type] for hop in expected.edges]
        assert store.num_sampled_edges == [len(ids) for ids in hops]
        for ids, part in zip(hops, store.e_id.split(store.num_sampled_edges)):
            assert torch.equal(part.sort().values, ids)
        original = data[edge_type].edge_index if edge_type is not None else data.edge_index
        row = (batch if source is None else batch[source]).n_id[store.edge_index[0]]
        col = (batch if destination is None else batch[destination]).n_id[store.edge_index[1]]
        assert torch.equal(torch.stack([row, col]), original[:, store.e_id])
