"""Spectral partitioning: the Fiedler vector against scipy's, and the cuts that come of it."""

import itertools

import numpy as np
import pytest
import torch
from scipy.linalg import eigh

from pyg_scale import plugins
from pyg_scale.partitioner.base import equal_shares, imbalance
from pyg_scale.partitioner.coarsening import Level
from pyg_scale.partitioner.fiedler import fiedler_vector
from pyg_scale.partitioner.spectral import SpectralPartitioner
from tests.ops.undirected import barbell, cut_weight, held, planted, rows, symmetric_weights
from tests.partitioner.graphs import agreement, cut_share, partition_graph_of, real_graph


def assign(graph, num_parts, seed=0, shares=None, **options):
    shares = equal_shares(num_parts) if shares is None else shares
    return SpectralPartitioner(**options).assign(graph, num_parts, seed=seed, shares=shares)


def grid(height, width):
    node = torch.arange(height * width).view(height, width)
    down = torch.stack([node[:-1].reshape(-1), node[1:].reshape(-1)])
    right = torch.stack([node[:, :-1].reshape(-1), node[:, 1:].reshape(-1)])
    return torch.cat([down, right], dim=1)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("size", [20, 600])
def test_the_fiedler_vector_is_that_of_scipy(weighted, size):
    """A ladder of cliques in a row, also so large that it is coarsened."""
    clique = torch.combinations(torch.arange(5)).t()
    shift = 5 * torch.arange(size // 5).view(-1, 1, 1)
    chain = torch.stack([torch.arange(4, size - 1, 5), torch.arange(5, size, 5)])
    edges = torch.cat([(clique + shift).permute(1, 0, 2).reshape(2, -1), chain], dim=1)
    graph = partition_graph_of(edges, size)
    weights = symmetric_weights(graph.indptr, graph.indices.long()) if weighted else None
    level = Level(graph.indptr, graph.indices, graph.weights, weights)
    found = fiedler_vector(level, 0, products=400, tolerance=1e-6).numpy()
    matrix = np.zeros((size, size))
    matrix[rows(graph.indptr), graph.indices] = 1 if weights is None else weights
    degree = np.diag(matrix.sum(0))
    expected = eigh(degree - matrix, degree)[1][:, 1]
    cosine = found @ degree @ expected
    cosine /= np.sqrt((found @ degree @ found) * (expected @ degree @ expected))
    assert abs(cosine) > 0.999
    assert found[np.abs(found).argmax()] > 0


def test_by_name():
    assert plugins.get("partitioner", "spectral") is SpectralPartitioner


@pytest.mark.parametrize("size", [5, 30])
def test_the_one_edge_of_a_barbell(size):
    graph = partition_graph_of(barbell(size), 2 * size)
    assert cut_weight(graph.indptr, graph.indices, assign(graph, 2)) == 1


@pytest.mark.parametrize("passes", [1, 8])
def test_planted_blocks_are_found(passes):
    edge_index, block = planted([600, 600], 12.0, 3.0, seed=0)
    graph = partition_graph_of(edge_index, 1200)
    assert agreement(assign(graph, 2, passes=passes), block) >= 0.99


def test_a_long_grid_is_cut_across():
    graph = partition_graph_of(grid(8, 100), 800)
    assert cut_weight(graph.indptr, graph.indices, assign(graph, 2)) == 8
    assert cut_weight(graph.indptr, graph.indices, assign(graph, 4)) == 24
    shares = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    found = assign(graph, 3, shares=shares)
    assert torch.allclose(torch.bincount(found) / 800, shares.float(), rtol=0.11)
    assert cut_weight(graph.indptr, graph.indices, found) <= 20


def test_whole_components_stay_whole():
    """Of sizes 40, 30, 20 and 10: 40 and 10 on one side, and nothing is cut."""
    sizes = [40, 30, 20, 10]
    ends = np.cumsum([0, *sizes])
    edges = [torch.combinations(torch.arange(a, b)).t() for a, b in itertools.pairwise(ends)]
    graph = partition_graph_of(torch.cat(edges, dim=1), 100)
    found = assign(graph, 2)
    assert cut_weight(graph.indptr, graph.indices, found) == 0
    assert torch.bincount(found).tolist() == [50, 50]


def test_every_column_is_balanced():
    edge_index, _ = planted([300] * 4, 10.0, 2.0, seed=1)
    columns = {
        "edges": torch.bincount(edge_index[1], minlength=1200),
        "train": (torch.arange(1200) < 40).long(),
    }
    graph = partition_graph_of(edge_index, 1200, columns)
    found = assign(graph, 3)
    capacity = SpectralPartitioner().capacity(graph, equal_shares(3))
    assert bool((held(found, graph.weights, 3) <= capacity).all())
    assert cut_share(graph, found) < 0.4


def test_a_real_graph(data_dir, monkeypatch):
    monkeypatch.setenv("PYG_SCALE_KERNELS", "require")  # plain Python takes minutes
    graph = real_graph(data_dir, "facebook_pages")
    found = assign(graph, 4)
    assert imbalance(found, graph.weights, equal_shares(4)) <= 1.1
    assert cut_share(graph, found) < 0.1  # METIS: 0.055, random: 0.75


def test_depends_on_the_seed_alone(monkeypatch):
    edge_index, _ = planted([50] * 4, 6.0, 4.0, seed=2)
    graph = partition_graph_of(edge_index, 200)
    found = assign(graph, 4, seed=3)
    assert torch.equal(found, assign(graph, 4, seed=3))
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
        "all": torch.combinations(torch.arange(20)).t(),
    }
    for name, edge_index in graphs.items():
        graph = partition_graph_of(edge_index, 20)
        found = assign(graph, num_parts)
        capacity = SpectralPartitioner().capacity(graph, equal_shares(num_parts))
        assert bool((held(found, graph.weights, num_parts) <= capacity).all()), name
        assert torch.bincount(found, minlength=num_parts).min() > 0, name


def test_many_small_components():
    graph = partition_graph_of(torch.arange(6000).view(3000, 2).t(), 6000)
    found = assign(graph, 3)
    assert cut_weight(graph.indptr, graph.indices, found) <= 3
    assert imbalance(found, graph.weights, equal_shares(3)) <= 1.1


def test_too_many_edges_are_refused():
    graph = partition_graph_of(barbell(5), 10)
    with pytest.raises(
        ValueError, match=r"21 undirected edges.*max_edges=20.*'multilevel'.*'fennel'"
    ):
        assign(graph, 2, max_edges=20)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_edges": 0}, "max_edges must be a number of at least 1"),
        ({"products": 1.5}, "products must be"),
        ({"passes": True}, "passes must be"),
        ({"max_imbalance": 0.5}, "max_imbalance must be at least 1"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        SpectralPartitioner(**options)
