"""Random-walk partitioning: its embedding, its clusters, and the communities that it finds."""

import math

import numpy as np
import pytest
import torch

from pyg_scale import plugins
from pyg_scale.ops.random_walk import random_walk
from pyg_scale.partitioner.balanced_clusters import balanced_clusters
from pyg_scale.partitioner.base import equal_shares, imbalance
from pyg_scale.partitioner.random_walk import RandomWalkPartitioner, embed, visits
from tests.ops.undirected import barbell, cut_weight, held, planted, random_graph
from tests.partitioner.graphs import cut_share, partition_graph_of


def assign(graph, num_parts, seed=0, shares=None, **options):
    shares = equal_shares(num_parts) if shares is None else shares
    return RandomWalkPartitioner(**options).assign(graph, num_parts, seed=seed, shares=shares)


def mutual_information(a, b):
    """Normalised, by the mean of the two entropies."""
    table = torch.zeros(int(a.max()) + 1, int(b.max()) + 1, dtype=torch.float64)
    table.index_put_((a.long(), b.long()), torch.ones(a.numel()).double(), accumulate=True)
    joint = table / a.numel()

    def entropy(p):
        return -float((p[p > 0] * p[p > 0].log()).sum())

    both = entropy(joint)
    rows, columns = entropy(joint.sum(1)), entropy(joint.sum(0))
    return 2 * (rows + columns - both) / (rows + columns)


def test_the_measure_itself():
    a, b = torch.arange(100) % 4, torch.arange(100) // 25
    assert math.isclose(mutual_information(a, 3 - a), 1)
    assert mutual_information(a, b) < 0.02


def test_by_name():
    assert plugins.get("partitioner", "random_walk") is RandomWalkPartitioner


@pytest.mark.parametrize("passes", [0, 8])
@pytest.mark.parametrize("blocks", [4, 8])
def test_planted_blocks_are_found(blocks, passes):
    """At degree 20, of which 3 lead elsewhere; also by the clusters alone, without refinement."""
    edge_index, block = planted([250] * blocks, 17.0, 3.0, seed=1)
    graph = partition_graph_of(edge_index, 250 * blocks)
    found = assign(graph, blocks, passes=passes)
    assert mutual_information(found, block) > 0.9
    assert imbalance(found, graph.weights, equal_shares(blocks)) <= 1.1


def test_the_one_edge_of_a_barbell():
    graph = partition_graph_of(barbell(20), 40)
    assert cut_weight(graph.indptr, graph.indices, assign(graph, 2)) == 1


def test_visits_count_what_walks_visit():
    indptr, indices = random_graph(30, 60, 0)
    pointers, where, share = visits(indptr, indices, 4, 3, 7)
    walks = random_walk(indptr, indices, torch.arange(30).repeat_interleave(4), 3, key=7).node
    for node in range(30):
        nodes, count = walks[4 * node : 4 * node + 4, 1:].unique(return_counts=True)
        mine = slice(int(pointers[node]), int(pointers[node + 1]))
        assert where[mine].tolist() == nodes.tolist()
        assert torch.equal(share[mine], count.double() / 12)


def test_visits_do_not_depend_on_the_chunks(monkeypatch):
    indptr, indices = random_graph(100, 300, 0)
    found = visits(indptr, indices, 3, 4, 1)
    monkeypatch.setattr("pyg_scale.partitioner.random_walk._CHUNK", 7)
    for one, other in zip(found, visits(indptr, indices, 3, 4, 1)):
        assert torch.equal(one, other)


def test_the_embedding_brings_cliques_together():
    graph = partition_graph_of(barbell(10), 20)
    points = embed(graph.indptr, graph.indices, walks=8, length=4, dim=32, rounds=3, key=0)
    near = points @ points.T
    assert np.allclose(np.diag(near), 1)
    assert near[:10, :10].min() > 0.5 > -0.5 > near[:10, 10:].max()


def test_clusters_have_no_more_than_they_may():
    """Two dense clouds of 60 and 40 points for two clusters of 50, and of 80 and 30."""
    rng = np.random.default_rng(0)
    centre = np.repeat(np.eye(2, 5), [60, 40], axis=0)
    points = centre + 0.1 * rng.standard_normal((100, 5))
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    weights = torch.ones(100, 1, dtype=torch.int64)
    found = balanced_clusters(points, weights, torch.tensor([[50], [50]]), 0)
    assert torch.bincount(found).tolist() == [50, 50]
    assert len(set(found[60:].tolist())) == 1
    found = balanced_clusters(points, weights, torch.tensor([[30], [80]]), 0)
    assert torch.bincount(found)[1] >= 70 and set(found[:60].tolist()) == {1}
    roomy = balanced_clusters(points, weights, torch.tensor([[90], [90]]), 0)
    assert sorted(torch.bincount(roomy).tolist()) == [40, 60]


def test_every_column_is_balanced():
    edge_index, _ = planted([300] * 4, 14.0, 2.0, seed=1)
    generator = torch.Generator().manual_seed(0)
    columns = {
        "edges": torch.bincount(edge_index[1], minlength=1200),
        "train": (torch.rand(1200, generator=generator) < 0.05).long(),
        "rare": (torch.arange(1200) < 9).long(),
    }
    graph = partition_graph_of(edge_index, 1200, columns)
    found = assign(graph, 3)
    capacity = RandomWalkPartitioner().capacity(graph, equal_shares(3))
    assert bool((held(found, graph.weights, 3) <= capacity).all())
    assert cut_share(graph, found) < 0.4


def test_shares():
    edge_index, block = planted([600, 300, 300], 16.0, 2.0, seed=1)
    graph = partition_graph_of(edge_index, 1200)
    shares = torch.tensor([0.25, 0.5, 0.25], dtype=torch.float64)
    found = assign(graph, 3, shares=shares)
    assert mutual_information(found, block) > 0.9
    assert bool((torch.bincount(found) <= torch.tensor([330, 660, 330])).all())


def test_depends_on_the_seed_alone(monkeypatch):
    edge_index, _ = planted([50] * 4, 6.0, 4.0, seed=2)
    graph = partition_graph_of(edge_index, 200)
    found = assign(graph, 4, seed=3)
    assert torch.equal(found, assign(graph, 4, seed=3))
    assert not torch.equal(found, assign(graph, 4, seed=4))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(found, assign(graph, 4, seed=3))
    finally:
        torch.set_num_threads(threads)
    monkeypatch.setenv("PYG_SCALE_KERNELS", "never")
    assert torch.equal(found, assign(graph, 4, seed=3))


@pytest.mark.parametrize("num_parts", [2, 7, 20])
def test_hostile_graphs(num_parts):
    ends = torch.arange(1, 20)
    graphs = {
        "no edges": torch.empty(2, 0, dtype=torch.int64),
        "a star": torch.stack([torch.zeros_like(ends), ends]),
        "pairs": torch.arange(20).view(10, 2).t(),
    }
    for name, edge_index in graphs.items():
        graph = partition_graph_of(edge_index, 20)
        found = assign(graph, num_parts)
        capacity = RandomWalkPartitioner().capacity(graph, equal_shares(num_parts))
        assert bool((held(found, graph.weights, num_parts) <= capacity).all()), name
        assert torch.bincount(found, minlength=num_parts).min() > 0, name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"walks": 0}, "walks must be a number of at least 1"),
        ({"length": 2.5}, "length must be a number of at least 1"),
        ({"dim": True}, "dim must be"),
        ({"rounds": 0}, "rounds must be"),
        ({"passes": -1}, "passes must be a number of at least 0"),
        ({"max_imbalance": 0.5}, "max_imbalance must be at least 1"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        RandomWalkPartitioner(**options)
