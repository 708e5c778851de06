"""Edges and their opposites: as Python collects and sorts them."""

from __future__ import annotations

import pytest
import torch

from pyg_scale.ops import library
from pyg_scale.ops.both_directions import both_directions

pytestmark = pytest.mark.matrix(3)


def edges(seed, nodes=7, dtype=torch.int64):
    generator = torch.Generator().manual_seed(seed)
    size = 4 * nodes
    row = torch.randint(nodes, (size,), generator=generator)
    col = torch.randint(nodes, (size,), generator=generator)
    ids = [2**40, 5][seed % 2]  # of few ids, many edges have the same
    edge = torch.randint(ids, (size,), generator=generator)
    first = torch.arange(nodes)
    first[nodes // 2 :] = torch.randint(nodes, (nodes - nodes // 2,), generator=generator)
    return row.to(dtype), col.to(dtype), edge, first


@pytest.mark.parametrize("kernels", ["auto", "never"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_every_pair_has_its_smallest_id(kernels, dtype, monkeypatch):
    monkeypatch.setenv("PYG_SCALE_KERNELS", kernels)
    for seed in range(12):
        row, col, edge, first = edges(seed, seed + 1, dtype)
        found = both_directions(row, col, edge, first)
        smallest: dict[tuple[int, int], int] = {}
        for u, v, e in zip(row.tolist(), col.tolist(), edge.tolist(), strict=True):
            for pair in ((v, u), (u, int(first[v]))):
                smallest[pair] = min(e, smallest.get(pair, e))
        wanted = sorted((v, e, u) for (v, u), e in smallest.items())
        given = (found.col.tolist(), found.edge.tolist(), found.row.tolist())
        assert list(zip(*given, strict=True)) == wanted
        assert (found.row.dtype, found.col.dtype, found.edge.dtype) == (dtype, dtype, torch.int64)


@pytest.mark.parametrize("kernels", ["auto", "never"])
def test_no_edges(kernels, monkeypatch):
    monkeypatch.setenv("PYG_SCALE_KERNELS", kernels)
    none = torch.empty(0, dtype=torch.int64)
    for first in (none, torch.arange(3)):
        assert all(each.numel() == 0 for each in both_directions(none, none, none, first))


@pytest.mark.parametrize(
    ("number", "value", "message"),
    [
        (0, 7, "row: node 7 does not exist: there are 7"),
        (0, -1, "row: node -1 does not exist"),
        (1, 7, "col: node 7 does not exist"),
        (3, 9, "first: node 9 does not exist"),
    ],
)
def test_nodes_that_do_not_exist_are_refused(number, value, message):
    if not library.compiled():
        pytest.skip(f"needs the compiled kernels: {library.status()['command']}")
    arguments = list(edges(1))
    arguments[number][-1] = value
    with pytest.raises(ValueError, match=message):
        both_directions(*arguments)
