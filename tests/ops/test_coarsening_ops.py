"""The steps of multilevel partitioning: compiled against their meaning, and what they promise."""

import pytest
import torch

from pyg_scale.ops import keys, library
from pyg_scale.ops.cluster_nodes import cluster_nodes
from pyg_scale.ops.contract_graph import contract_graph
from pyg_scale.ops.grow_part import grow_part
from tests.ops.undirected import (
    barbell,
    held,
    planted,
    random_graph,
    rows,
    symmetric_weights,
    undirected,
)


@pytest.fixture(params=["plain", "compiled"])
def path(request, monkeypatch):
    if request.param == "plain":
        monkeypatch.setenv("PYG_SCALE_KERNELS", "never")
    elif not library.compiled():
        pytest.skip("the kernels are not compiled")


def both(monkeypatch, function, *args, **options):
    """What the compiled op and the plain one give."""
    if not library.compiled():
        pytest.skip("the kernels are not compiled")
    compiled = function(*args, **options)
    with monkeypatch.context() as patch:
        patch.setenv("PYG_SCALE_KERNELS", "never")
        return compiled, function(*args, **options)


def star(leaves):
    ends = torch.arange(1, leaves + 1)
    return undirected(torch.stack([torch.zeros_like(ends), ends]), leaves + 1)


# cluster_nodes ##########################################################################


@pytest.mark.parametrize("seed", range(8))
def test_clusters_compiled_are_the_meaning(seed, monkeypatch):
    indptr, indices = random_graph(80, 120, seed)
    weights = torch.randint(4, (80, 2), generator=torch.Generator().manual_seed(seed))
    options = {
        "edge_weights": symmetric_weights(indptr, indices) if seed % 2 else None,
        "group": torch.arange(80) % 3 if seed % 3 == 0 else None,
        "rounds": 1 + seed % 3,
        "key": seed,
    }
    order = keys.permutation(seed, 80)
    limit = torch.tensor([12, 9])
    compiled, plain = both(
        monkeypatch, cluster_nodes, indptr, indices.int(), weights, limit, order, **options
    )
    assert torch.equal(compiled, plain)
    assert int(compiled.max()) < 60


def test_clusters_keep_to_the_limit_and_to_groups(path):
    indptr, indices = random_graph(100, 400, 1)
    weights = torch.stack([torch.ones(100).long(), indptr.diff()], dim=1)
    group, limit = torch.arange(100) % 2, torch.tensor([5, 60])
    cluster = cluster_nodes(indptr, indices, weights, limit, keys.permutation(0, 100), group=group)
    size = int(cluster.max()) + 1
    assert 20 <= size < 70
    assert bool((held(cluster, weights, size) <= limit).all())
    assert torch.unique(cluster * 2 + group).numel() == size
    first = torch.stack([(cluster == c).nonzero()[0, 0] for c in range(size)])
    assert torch.equal(first, first.sort().values)


def test_cliques_become_clusters(path):
    indptr, indices = undirected(barbell(6), 12)
    ones = torch.ones(12, 1, dtype=torch.int64)
    cluster = cluster_nodes(indptr, indices, ones, torch.tensor([6]), keys.permutation(4, 12))
    assert cluster.tolist() == [0] * 6 + [1] * 6


def test_leaves_of_a_hub_and_isolated_nodes_come_together(path):
    indptr, indices = star(40)
    indptr = torch.cat([indptr, indptr[-1:].expand(20)])  # and twenty isolated nodes
    ones = torch.ones(61, 1, dtype=torch.int64)
    cluster = cluster_nodes(indptr, indices, ones, torch.tensor([10]), torch.arange(61))
    assert int(cluster.max()) + 1 <= 8
    assert int(torch.bincount(cluster).max()) <= 10
    assert not set(cluster[:41].tolist()) & set(cluster[41:].tolist())


def test_a_node_heavier_than_the_limit_stays_alone(path):
    indptr, indices = star(4)
    weights = torch.tensor([[50], [1], [1], [1], [1]])
    cluster = cluster_nodes(indptr, indices, weights, torch.tensor([4]), torch.arange(5))
    assert cluster.tolist() == [0, 1, 1, 1, 1]


# contract_graph #########################################################################


@pytest.mark.parametrize("weighted", [False, True])
def test_contraction_against_a_dense_matrix(path, weighted):
    indptr, indices = random_graph(50, 200, 2)
    weights = symmetric_weights(indptr, indices) if weighted else None
    cluster = torch.arange(50) % 7
    pointers, neighbors, sums = contract_graph(
        indptr, indices.int(), cluster, 7, edge_weights=weights
    )
    dense = torch.zeros(50, 50, dtype=torch.int64)
    dense[rows(indptr), indices] = 1 if weights is None else weights
    member = torch.nn.functional.one_hot(cluster)
    expected = (member.T @ dense @ member).fill_diagonal_(0)
    found = torch.zeros(7, 7, dtype=torch.int64)
    found[rows(pointers), neighbors.long()] = sums
    assert torch.equal(found, expected)
    assert torch.equal(neighbors, expected.nonzero()[:, 1].int())
    assert (neighbors.dtype, sums.dtype, pointers.dtype) == (torch.int32, torch.int64, torch.int64)


def test_contraction_to_one_node_and_of_nothing(path):
    indptr, indices = random_graph(10, 20, 2)
    pointers, neighbors, weights = contract_graph(indptr, indices, torch.zeros(10).long(), 1)
    assert (pointers.tolist(), neighbors.tolist(), weights.tolist()) == ([0, 0], [], [])
    none = torch.empty(0, dtype=torch.int64)
    assert contract_graph(torch.zeros(1).long(), none, none, 0)[0].tolist() == [0]


# grow_part ##############################################################################


@pytest.mark.parametrize("seed", range(6))
def test_growing_compiled_is_the_meaning(seed, monkeypatch):
    indptr, indices = random_graph(60, 100, seed)
    size = torch.randint(5, (60,), generator=torch.Generator().manual_seed(seed))
    weights = symmetric_weights(indptr, indices) if seed % 2 else None
    compiled, plain = both(
        monkeypatch,
        grow_part,
        indptr,
        indices.int(),
        size,
        keys.permutation(seed, 60),
        50,
        edge_weights=weights,
        key=seed,
    )
    assert torch.equal(compiled, plain)
    assert 45 <= int(size[compiled].sum()) <= 55


def test_grows_a_clique_first(path):
    indptr, indices = undirected(barbell(6), 12)
    order = torch.cat([torch.tensor([9]), torch.arange(12)])[:12]
    grown = grow_part(indptr, indices, torch.ones(12).long(), order, 6)
    assert grown.nonzero().view(-1).tolist() == [6, 7, 8, 9, 10, 11]


def test_grows_on_in_another_component(path):
    edges = torch.tensor([[0, 2, 4], [1, 3, 5]])
    indptr, indices = undirected(edges, 6)
    grown = grow_part(indptr, indices, torch.ones(6).long(), torch.arange(6), 4)
    assert grown.tolist() == [True, True, True, True, False, False]


def test_leaves_out_what_is_too_heavy(path):
    indptr, indices = star(4)
    grown = grow_part(
        indptr, indices, torch.tensor([50, 1, 1, 1, 1]), torch.tensor([1, 0, 2, 3, 4]), 3
    )
    assert grown.tolist() == [False, True, True, True, False]


def test_compiled_refuses_what_is_no_graph_or_order():
    if not library.compiled():
        pytest.skip("the kernels are not compiled")
    indptr, indices, ones = torch.tensor([0, 1, 2]), torch.tensor([1, 0]), torch.ones(2).long()
    with pytest.raises(ValueError, match="order must be of nodes"):
        grow_part(indptr, indices, ones, torch.tensor([0, 2]), 1)
    with pytest.raises(ValueError, match="cluster must be from 0"):
        contract_graph(indptr, indices, torch.tensor([0, 2]), 2)
    with pytest.raises(ValueError, match=r"indices\[0\] is 5"):
        contract_graph(indptr, torch.tensor([5, 0]), torch.tensor([0, 1]), 2)


def test_planted_blocks_are_not_mixed(path):
    edge_index, block = planted([50] * 4, 12.0, 1.0, seed=0)
    indptr, indices = undirected(edge_index, 200)
    ones = torch.ones(200, 1, dtype=torch.int64)
    cluster = cluster_nodes(indptr, indices, ones, torch.tensor([10]), keys.permutation(0, 200))
    size = int(cluster.max()) + 1
    count = torch.zeros(size, 4).index_put_((cluster, block), torch.ones(200), accumulate=True)
    assert float(count.amax(1).sum()) / 200 > 0.9
