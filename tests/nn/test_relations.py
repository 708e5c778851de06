"""Edges grouped by relation and destination, of more edges than torch sorts at once on CUDA."""

from __future__ import annotations

import pytest
import torch

from pyg_scale.nn.relations import group_relations
from pyg_scale.ops import adjacency


@pytest.mark.parametrize("with_ids", [False, True])
def test_more_edges_than_one_sort_takes(with_ids: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    indptr = torch.tensor([0, 40, 40, 41, 100, 300])
    indices = torch.randint(0, 7, (300,), generator=generator)
    edge_id = torch.randperm(300, generator=generator) if with_ids else None
    edge_type = torch.randint(0, 4, (300,), generator=generator)
    graph = adjacency.Adjacency(indptr, indices, 7, edge_id)
    wanted = group_relations(graph, edge_type, 5)
    sizes: list[int] = []
    sort = torch.sort

    def counted(keys, **options):
        sizes.append(keys.numel())
        return sort(keys, **options)

    monkeypatch.setattr(adjacency, "_SORTABLE", 32)
    monkeypatch.setattr(torch, "sort", counted)
    monkeypatch.setattr(torch, "argsort", lambda keys, **options: counted(keys, **options)[1])
    found = group_relations(graph, edge_type, 5)
    assert max(sizes) <= 32
    assert found.row_counts == wanted.row_counts and sum(found.row_counts) == found.rows.num_dst
    for name in ("rows", "destinations"):
        ours, theirs = getattr(found, name), getattr(wanted, name)
        assert torch.equal(ours.indptr, theirs.indptr)
        assert torch.equal(ours.indices, theirs.indices)
    relation = edge_type if edge_id is None else edge_type[edge_id]
    order = sort(relation, stable=True).indices
    assert torch.equal(found.edge_type, relation[order])
    assert torch.equal(found.rows.indices, indices[order])
