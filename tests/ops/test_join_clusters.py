"""Clusters that are joined: compiled and plain alike, and as PyG's ``subgraph``."""

from __future__ import annotations

import pytest
import torch
from torch_geometric.utils import subgraph

from pyg_scale.ops import library
from pyg_scale.ops.join_clusters import join_clusters

pytestmark = pytest.mark.matrix(3)


def graph(seed, sizes=(3, 0, 7, 1, 12), degree=4):
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.tensor(sizes)
    num_nodes = int(sizes.sum())
    partptr = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    counts = torch.randint(0, 2 * degree, (num_nodes,), generator=generator)
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    index = torch.randint(num_nodes, (int(indptr[-1]),), generator=generator)
    return partptr, indptr, index


@pytest.mark.parametrize("kernels", ["auto", "never"])
@pytest.mark.parametrize("which", [[], [2], [4, 0], [1], [0, 1, 2, 3, 4], [3, 4, 2]])
def test_edges_are_those_of_the_subgraph(which, kernels, monkeypatch):
    monkeypatch.setenv("PYG_SCALE_KERNELS", kernels)
    partptr, indptr, index = graph(1)
    found = join_clusters(partptr, indptr, index, torch.tensor(which, dtype=torch.int64))
    node = [v for c in which for v in range(int(partptr[c]), int(partptr[c + 1]))]
    assert found.node.tolist() == node
    num_nodes = indptr.numel() - 1
    source = torch.arange(num_nodes).repeat_interleave(indptr.diff())
    edges = torch.stack([source, index])
    inside, edge = subgraph(found.node, edges, torch.arange(index.numel()), num_nodes=num_nodes)
    order = edge[torch.isin(edge, found.edge)]
    assert sorted(found.edge.tolist()) == order.tolist()
    assert torch.equal(edges[:, found.edge], found.node[found.edge_index])
    assert inside.size(1) == found.edge.numel()
    assert bool((found.edge_index[0].diff() >= 0).all())


def test_compiled_and_plain_are_equal(monkeypatch):
    if not library.compiled():
        pytest.skip(f"needs the compiled kernels: {library.status()['command']}")
    for seed in range(30):
        arguments = graph(seed, sizes=[seed % 5, 40, seed, 3], degree=4 + seed)
        which = torch.randperm(4, generator=torch.Generator().manual_seed(seed))[: seed % 4 + 1]
        *pointers, index = arguments
        stored = index.to([torch.int32, torch.int64][seed % 3 == 0])
        own_first = seed % 2 == 0
        compiled = join_clusters(*pointers, stored, which, own_first=own_first)
        with monkeypatch.context() as patch:
            patch.setenv("PYG_SCALE_KERNELS", "never")
            plain = join_clusters(*arguments, which, own_first=own_first)
            bare = join_clusters(*arguments, which, own_first=own_first, positions=False)
        for one, other in zip(compiled, plain, strict=True):
            assert torch.equal(one, other) and one.dtype == other.dtype
        options = {"own_first": own_first, "positions": False}
        for found in (bare, join_clusters(*pointers, stored, which, **options)):
            assert found.edge is None
            assert all(map(torch.equal, found[:2], plain[:2]))


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 20, 21, 30])
def test_any_number_of_clusters(count, monkeypatch):
    """Next to each other, apart, or repeated: a few are compared, of many each node has a bit."""
    if not library.compiled():
        pytest.skip(f"needs the compiled kernels: {library.status()['command']}")
    generator = torch.Generator().manual_seed(count)
    partptr, indptr, index = graph(count, sizes=[7, 0, 40, 1, 12] * 8, degree=9)
    pointers, stored = (partptr, indptr), index.to(torch.int32)
    for which in (
        torch.arange(3, 3 + count),
        torch.arange(3, 3 + count).flip(0),
        torch.randperm(40, generator=generator)[:count],
        torch.randint(40, (count,), generator=generator),
    ):
        compiled = join_clusters(*pointers, stored, which)
        with monkeypatch.context() as patch:
            patch.setenv("PYG_SCALE_KERNELS", "never")
            plain = join_clusters(*pointers, index, which)
        assert all(map(torch.equal, compiled, plain))
        assert compiled.edge.numel() > 0 or count < 3


@pytest.mark.parametrize("which", [[0, 2], [2, 0]])
def test_clusters_that_overlap_end_in_their_last_copy(which):
    """As a file could say: nodes 5 to 9 are in both, so that ranges must not be bisected."""
    if not library.compiled():
        pytest.skip(f"needs the compiled kernels: {library.status()['command']}")
    _, indptr, index = graph(1, sizes=[20], degree=6)
    partptr = torch.tensor([0, 10, 5, 20])
    found = join_clusters(partptr, indptr, index.int(), torch.tensor(which))
    node = [v for c in which for v in range(int(partptr[c]), int(partptr[c + 1]))]
    last = {v: i for i, v in enumerate(node)}
    wanted = [
        (i, last[int(index[e])], e)
        for i, v in enumerate(node)
        for e in range(int(indptr[v]), int(indptr[v + 1]))
        if int(index[e]) in last
    ]
    assert found.node.tolist() == node
    given = (*found.edge_index.tolist(), found.edge.tolist())
    assert list(zip(*given, strict=True)) == wanted


@pytest.mark.parametrize("own_first", [True, False])
def test_many_edges(own_first, monkeypatch):
    """So many that they are written past the caches, of nodes with any number of edges."""
    if not library.compiled():
        pytest.skip(f"needs the compiled kernels: {library.status()['command']}")
    partptr, indptr, index = graph(1, sizes=[900, 1, 800, 0, 1500], degree=60)
    hub = torch.randint(3201, (5000,), generator=torch.Generator().manual_seed(2))
    indptr = torch.cat([indptr[:1000], indptr[1000:] + hub.numel()])
    index = torch.cat([index[: indptr[999]], hub, index[indptr[999] :]])
    which = torch.tensor([4, 2, 0])
    compiled = join_clusters(partptr, indptr, index.int(), which, own_first=own_first)
    with monkeypatch.context() as patch:
        patch.setenv("PYG_SCALE_KERNELS", "never")
        plain = join_clusters(partptr, indptr, index, which, own_first=own_first)
    assert compiled.edge.numel() > 150_000
    assert all(map(torch.equal, compiled, plain))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("which", torch.tensor([5]), "which: cluster 5 does not exist: there are 5"),
        ("partptr", torch.tensor([0, 3, 2, 10, 11, 23]), "partptr must rise"),
        ("index", torch.full_like(graph(1)[2], 23), "index: node 23 does not exist"),
        ("indptr", torch.cat([graph(1)[1][:-1], torch.tensor([9999])]), "the pointers of node 22"),
        ("index", torch.full_like(graph(1)[2], 23).int(), "index: node 23 does not exist"),
        ("index", graph(1)[2].short(), "index must be int32 or int64"),
    ],
)
def test_what_leads_out_of_the_graph_is_refused(name, value, message):
    if not library.compiled():
        pytest.skip(f"needs the compiled kernels: {library.status()['command']}")
    arguments = dict(zip(("partptr", "indptr", "index"), graph(1), strict=True))
    arguments |= {"which": torch.tensor([0, 1, 2, 3, 4]), name: value}
    with pytest.raises(ValueError, match=message):
        join_clusters(**arguments)
