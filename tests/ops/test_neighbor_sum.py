"""Sums over neighbours against a dense product; and components against scipy."""

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import connected_components as of_scipy

from pyg_scale.ops import library
from pyg_scale.ops.components import connected_components
from pyg_scale.ops.neighbor_sum import neighbor_sum, neighbor_sum_plain
from tests.ops.undirected import random_graph, rows


@pytest.fixture(params=["plain", "compiled"])
def path(request, monkeypatch):
    if request.param == "plain":
        monkeypatch.setenv("PYG_SCALE_KERNELS", "never")
    elif not library.compiled():
        pytest.skip("the kernels are not compiled")


@pytest.mark.parametrize("shape", [(60,), (60, 1), (60, 5), (60, 0)])
@pytest.mark.parametrize("weighted", [False, True])
def test_is_a_matrix_product(path, shape, weighted):
    indptr, indices = random_graph(60, 200, 0)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64, generator=generator)
    weights = torch.rand(indices.numel(), dtype=torch.float64, generator=generator)
    matrix = torch.zeros(60, 60, dtype=torch.float64)
    matrix[rows(indptr), indices] = weights if weighted else 1.0
    for layout in (indices, indices.int(), torch.stack([indices, indices], 1)[:, 0]):
        found = neighbor_sum(indptr, layout, x, weights=weights if weighted else None)
        assert found.shape == shape
        torch.testing.assert_close(found, matrix @ x, rtol=1e-12, atol=1e-12)


def test_the_same_bits_whoever_computes_them():
    if not library.compiled():
        pytest.skip("the kernels are not compiled")
    indptr, indices = random_graph(5000, 200_000, 1)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5000, 3, dtype=torch.float64, generator=generator)
    weights = torch.rand(indices.numel(), dtype=torch.float64, generator=generator)
    plain = neighbor_sum_plain(indptr, indices, x, weights)
    threads = torch.get_num_threads()
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            assert torch.equal(neighbor_sum(indptr, indices, x, weights=weights), plain)
    finally:
        torch.set_num_threads(threads)


def test_bad_input():
    indptr, indices, x = torch.tensor([0, 1, 2]), torch.tensor([1, 0]), torch.ones(2).double()
    with pytest.raises(ValueError, match="x must be float64"):
        neighbor_sum(indptr, indices, x.float())
    with pytest.raises(ValueError, match=r"weights must be float64 of shape \[2\]"):
        neighbor_sum(indptr, indices, x, weights=x[:1])
    if library.compiled():
        with pytest.raises(ValueError, match=r"indices\[1\] is 0, but x has 0 rows|is 1, but x"):
            neighbor_sum(indptr, indices, x[:1])


@pytest.mark.parametrize("num_edges", [0, 30, 70, 100, 300])
def test_components(num_edges):
    indptr, indices = random_graph(120, num_edges, num_edges)
    found = connected_components(indptr, indices.int()).numpy()
    size = indptr.numel() - 1
    matrix = csr_matrix((np.ones(indices.numel()), indices.numpy(), indptr.numpy()), (size, size))
    count, expected = of_scipy(matrix, directed=False)
    assert len(np.unique(found)) == count
    assert len(np.unique(np.stack([found, expected]), axis=1)[0]) == count
    assert (np.unique(found, return_index=True)[1] == np.sort(np.unique(found, True)[1])).all()


def test_components_of_a_long_path_and_of_nothing():
    order = torch.randperm(2000, generator=torch.Generator().manual_seed(0))
    pairs = torch.stack([order[:-1], order[1:]])
    both = torch.cat([pairs, pairs.flip(0)], dim=1)
    both = both[:, both[0].argsort(stable=True)]
    indptr = torch.cat([torch.zeros(1).long(), torch.bincount(both[0]).cumsum(0)])
    assert connected_components(indptr, both[1]).unique().tolist() == [0]
    none = torch.empty(0, dtype=torch.int64)
    assert connected_components(torch.zeros(1).long(), none).shape == (0,)
