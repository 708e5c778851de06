"""Both directions of every edge, against PyG's and against sets of edges; exchanged directions."""

from __future__ import annotations

import random

import pytest
import torch
import torch_geometric.sampler as pyg

from pyg_scale.sampler.base import Sample
from pyg_scale.sampler.subgraph import swap_directions, to_bidirectional

FORWARD, NAMED = ("a", "x", "b"), ("b", "rev_x", "a")
OTHER_WAY, LOOP, LONELY = ("c", "back", "a"), ("b", "to", "b"), ("b", "of", "c")


def random_sample(edge_types, seed: int, count: int = 60) -> Sample:
    rng = random.Random(seed)
    node_types = sorted({t for e in edge_types for t in (e[0], e[2])}) if edge_types[0] else [None]
    size = {t: rng.randrange(3, 12) for t in node_types}

    def rows(edge_type, end):
        most = size[None if edge_type is None else edge_type[end]]
        return torch.tensor([rng.randrange(most) for _ in range(count)], dtype=torch.int64)

    return Sample(
        node={t: torch.arange(size[t]) for t in node_types},
        row={e: rows(e, 0) for e in edge_types},
        col={e: rows(e, 2).sort().values for e in edge_types},
        edge={e: torch.randperm(count, generator=torch.Generator().manual_seed(seed))
              for e in edge_types},
        num_sampled_nodes={t: [size[t]] for t in node_types},
        num_sampled_edges={e: [count] for e in edge_types},
        colptr={e: torch.tensor([0, count]) for e in edge_types},
    )  # fmt: skip


def pairs(row, col) -> list[tuple[int, int]]:
    return list(zip(row.tolist(), col.tolist()))


def assert_pointers(out: Sample, edge_type) -> None:
    col, ptr = out.col[edge_type], out.colptr[edge_type]
    for node in range(out.node[None if edge_type is None else edge_type[2]].numel()):
        assert set(col[ptr[node] : ptr[node + 1]].tolist()) <= {node}
    assert int(ptr[-1]) == col.numel()


@pytest.mark.parametrize("seed", range(10))
def test_homogeneous(seed):
    sample = random_sample([None], seed, count=seed * 8)
    row, col, edge = (x[None] for x in (sample.row, sample.col, sample.edge))
    smallest: dict[tuple[int, int], int] = {}
    for source, destination, number in zip(row.tolist(), col.tolist(), edge.tolist()):
        for pair in ((source, destination), (destination, source)):
            smallest[pair] = min(number, smallest.get(pair, number))
    out = to_bidirectional(sample)
    found = list(zip(out.col[None].tolist(), out.edge[None].tolist(), out.row[None].tolist()))
    assert found == sorted((pair[1], number, pair[0]) for pair, number in smallest.items())
    assert out.num_sampled_nodes is None
    assert out.num_sampled_edges is None
    assert_pointers(out, None)
    theirs = pyg.SamplerOutput(sample.node[None], row, col, edge).to_bidirectional()
    assert set(pairs(theirs.row, theirs.col)) == set(pairs(out.row[None], out.col[None]))


@pytest.mark.parametrize("edge_types", [
    [FORWARD, NAMED], [NAMED, FORWARD], [FORWARD, ("b", "of", "a")], [LOOP],
    [FORWARD, NAMED, LOOP, OTHER_WAY],
    [("b", "x", "b"), ("b", "rev_x", "b")],
])  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_heterogeneous(edge_types):
    sample = random_sample(edge_types, len(edge_types))
    out = to_bidirectional(sample)
    theirs = pyg.HeteroSamplerOutput(sample.node, sample.row, sample.col, sample.edge)
    theirs = theirs.to_bidirectional()
    assert list(out.row) == list(sample.row)
    for edge_type in edge_types:
        mine = pairs(out.row[edge_type], out.col[edge_type])
        assert sorted(mine) == sorted(pairs(theirs.row[edge_type], theirs.col[edge_type]))
        assert (out.edge[edge_type] is None) == (theirs.edge[edge_type] is None)
        if out.edge[edge_type] is None:
            assert mine == sorted(set(mine), key=lambda pair: pair[::-1])
            assert_pointers(out, edge_type)


def test_without_a_reverse_edge_type():
    sample = random_sample([FORWARD, LONELY, ("c", "x", "b"), ("c", "y", "b")], 3)
    with pytest.warns(UserWarning, match=r"\('b', 'of', 'c'\) has no reverse .* name .* 'rev_of'"):
        out = to_bidirectional(sample)
    for name in ("row", "col", "edge"):
        assert torch.equal(getattr(out, name)[LONELY], getattr(sample, name)[LONELY])


def test_swap_directions():
    sample = random_sample([None], 1)
    out = swap_directions(sample)
    assert pairs(out.row[None], out.col[None]) == pairs(sample.col[None], sample.row[None])
    assert torch.equal(out.edge[None], sample.edge[None])
    assert out.colptr is None  # edges are no longer in order of their destination
    assert out.num_sampled_nodes == sample.num_sampled_nodes


def test_keeps_the_dtype_of_indices():
    sample = random_sample([None], 2)
    sample.row = {None: sample.row[None].int()}
    sample.col = {None: sample.col[None].int()}
    out = to_bidirectional(sample)
    assert out.row[None].dtype == out.col[None].dtype == torch.int32
    assert out.edge[None].dtype == torch.int64
