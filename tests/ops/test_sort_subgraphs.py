"""Subgraphs in order: as Python sorts them."""

from __future__ import annotations

import pytest
import torch

from pyg_scale.ops import library
from pyg_scale.ops.sort_subgraphs import sort_subgraphs

pytestmark = pytest.mark.matrix(3)


def subgraphs(seed, graphs=4, dtype=torch.int64):
    generator = torch.Generator().manual_seed(seed)
    batch = torch.randint(graphs, (6 * graphs,), generator=generator)
    ids = [2**31 - 1, 3][seed % 2]  # of few ids, many are equal
    node = torch.randint(ids, batch.shape, generator=generator).to(dtype)
    size = 5 * batch.numel()
    row = torch.randint(batch.numel(), (size,), generator=generator)
    col = torch.randint(batch.numel(), (size,), generator=generator).sort().values
    return node, batch, row.to(dtype), col.to(dtype), torch.randperm(size, generator=generator)


@pytest.mark.parametrize("kernels", ["auto", "never"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_nodes_and_edges_are_in_order(kernels, dtype, monkeypatch):
    monkeypatch.setenv("PYG_SCALE_KERNELS", kernels)
    for seed in range(8):
        node, batch, row, col, edge = subgraphs(seed, seed + 1, dtype)
        found = sort_subgraphs(node, batch, row, col, edge, seed + 1)
        wanted = sorted(zip(batch.tolist(), node.tolist(), range(len(node)), strict=True))
        assert list(zip(found.batch.tolist(), found.node.tolist(), strict=True)) == [
            each[:2] for each in wanted
        ]
        place = {before: now for now, (_, _, before) in enumerate(wanted)}
        assert found.place.tolist() == [place[i] for i in range(len(node))]
        moved = [(place[r], place[c]) for r, c in zip(row.tolist(), col.tolist(), strict=True)]
        order = sorted(range(len(moved)), key=lambda e: moved[e])  # a stable sort
        ends = zip(found.row.tolist(), found.col.tolist(), strict=True)
        assert list(ends) == [moved[e] for e in order]
        assert found.edge.tolist() == edge[order].tolist()
        assert {each.dtype for each in found} == {torch.int64}


@pytest.mark.parametrize("kernels", ["auto", "never"])
def test_nothing_is_sorted(kernels, monkeypatch):
    monkeypatch.setenv("PYG_SCALE_KERNELS", kernels)
    none = torch.empty(0, dtype=torch.int64)
    assert all(each.numel() == 0 for each in sort_subgraphs(none, none, none, none, none, 0))


@pytest.mark.parametrize(
    ("number", "value", "message"),
    [
        (0, -1, "node must not be negative"),
        (1, 4, "batch: graph 4 does not exist: there are 4"),
        (2, 24, "row: node 24 does not exist: there are 24"),
        (2, -1, "row: node -1 does not exist"),
        (3, 24, "col: node 24 does not exist"),
        (3, 0, "col must not decrease"),
    ],
)
def test_what_leads_out_of_the_subgraphs_is_refused(number, value, message):
    if not library.compiled():
        pytest.skip(f"needs the compiled kernels: {library.status()['command']}")
    arguments = list(subgraphs(1))
    arguments[number][-1] = value
    with pytest.raises(ValueError, match=message):
        sort_subgraphs(*arguments, 4)
