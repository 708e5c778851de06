"""edge_dot: products of both ends of every edge, against plain torch, with all derivatives."""

import pytest
import torch

from pyg_scale.ops.adjacency import from_edge_index
from pyg_scale.ops.aggregate import edge_dot
from pyg_scale.testing import graphs


@pytest.fixture
def edges():
    return graphs.hostile().edge_index


def features(size, dtype=torch.float64):
    generator = torch.Generator().manual_seed(size)
    return torch.randn(size, 2, 3, generator=generator, dtype=dtype).requires_grad_()


@pytest.mark.parametrize("kernels", ["auto", "never"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_is_the_product_of_rows(edges, dtype, kernels, monkeypatch):
    monkeypatch.setenv("PYG_SCALE_KERNELS", kernels)
    x, y = features(100, dtype), features(101, dtype)
    out = edge_dot(from_edge_index(edges, 100, 101), x, y)
    assert out.dtype == dtype
    exact = (x.double()[edges[0]] * y.double()[edges[1]]).sum(-1)
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=tolerance)


def test_derivatives():
    edges = torch.tensor([[0, 2, 1, 2, 2], [1, 0, 1, 1, 1]])
    graph = from_edge_index(edges, 3, 2)
    inputs = features(3), features(2)
    assert torch.autograd.gradcheck(lambda x, y: edge_dot(graph, x, y), inputs)
    assert torch.autograd.gradgradcheck(lambda x, y: edge_dot(graph, x, y), inputs)


def test_wrong_arguments(edges):
    graph = from_edge_index(edges, 100, 100)
    with pytest.raises(ValueError, match="100, heads, channels"):
        edge_dot(graph, features(100), features(99))
    with pytest.raises(TypeError, match="one type"):
        edge_dot(graph, features(100), features(100, torch.float32))
    with pytest.raises(TypeError, match="x must be"):
        edge_dot(graph, torch.ones(100, 2, 3, dtype=torch.int64), features(100))
