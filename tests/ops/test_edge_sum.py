"""edge_sum: compiled, plain, and as a dense matrix."""

import pytest
import torch

from pyg_scale.ops.edge_sum import NORMS, edge_sum, edge_sum_plain

NODES = 40
REPEATED = torch.tensor([[3], [5]]).expand(2, 4)


def graph(num_edges, seed=0, nodes=NODES):
    return torch.randint(nodes, (2, num_edges), generator=torch.Generator().manual_seed(seed))


def features(channels, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(NODES, channels, generator=generator, dtype=torch.float64).to(dtype)


def dense(edge_index, norm, num_dst=NODES):
    """The matrix [num_dst, NODES], from its definition."""
    matrix = torch.zeros(num_dst, NODES, dtype=torch.float64)
    for source, target in edge_index.t().tolist():
        if norm != "gcn" or source != target:
            matrix[target, source] += 1
    if norm == "mean":
        return matrix / matrix.sum(dim=1, keepdim=True).clamp(min=1)
    if norm == "gcn":
        matrix += torch.eye(NODES, dtype=torch.float64)
        root = matrix.sum(dim=1).rsqrt()
        return root.view(-1, 1) * matrix * root
    return matrix


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("channels", [1, 3, 8, 37])
@pytest.mark.parametrize("num_edges", [0, 1, 250])
def test_is_a_product_with_the_matrix(norm, channels, num_edges):
    edge_index, x = graph(num_edges), features(channels)
    torch.testing.assert_close(
        edge_sum(x, edge_index, NODES, norm), dense(edge_index, norm) @ x, rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("transposed", [False, True])
def test_compiled_and_plain_have_equal_bits(norm, dtype, transposed):
    for edge_index in (
        graph(300),
        graph(300).t().contiguous().t(),
        graph(600)[:, ::2],
        graph(0),
        REPEATED,
    ):
        for channels in (0, 1, 5, 16, 33):
            x = features(channels, dtype)
            found = torch.ops.pyg_scale.edge_sum(
                x, edge_index, NODES, NORMS.index(norm), transposed
            )
            assert torch.equal(found, edge_sum_plain(x, edge_index, NODES, norm, transposed))


def test_one_edge_that_is_repeated_by_its_stride():
    x = features(2)
    assert torch.equal(edge_sum(x, REPEATED, NODES)[5], 4 * x[3])


@pytest.mark.parametrize("norm", NORMS)
def test_gradients_of_any_order(norm):
    edge_index, x = graph(120), features(2).requires_grad_()
    function = lambda x: edge_sum(x, edge_index, NODES, norm)  # noqa: E731
    torch.autograd.gradcheck(function, x)
    torch.autograd.gradgradcheck(function, x)


@pytest.mark.parametrize("norm", ["sum", "mean"])
def test_two_sets_of_nodes(norm):
    edge_index = graph(200) % torch.tensor([[NODES], [7]])
    x = features(6).requires_grad_()
    out = edge_sum(x, edge_index, 7, norm)
    torch.testing.assert_close(out, dense(edge_index, norm, 7) @ x, rtol=1e-12, atol=1e-12)
    (grad,) = torch.autograd.grad(out.square().sum(), x)
    matrix = dense(edge_index, norm, 7)
    torch.testing.assert_close(grad, 2 * matrix.t() @ (matrix @ x), rtol=1e-12, atol=1e-12)


def test_wrong_arguments(monkeypatch):
    x, edge_index = features(3), graph(5)
    for kernels in ("require", "never"):
        monkeypatch.setenv("PYG_SCALE_KERNELS", kernels)
        for wrong in (NODES, -1, 2**62):
            bad = torch.tensor([[0], [wrong]])
            for each in (bad, bad.flip(0)):
                with pytest.raises(ValueError, match="edge_index"):
                    edge_sum(x, each, NODES)
        with pytest.raises(ValueError, match="x must be"):
            edge_sum(x.half(), edge_index, NODES)
        with pytest.raises(ValueError, match="x must be"):
            edge_sum(x[0], edge_index, NODES)
        with pytest.raises(ValueError, match="edge_index must be"):
            edge_sum(x, edge_index.int(), NODES)
        with pytest.raises(ValueError, match="as many destinations"):
            edge_sum(x, edge_index % 7, 7, "gcn")
        with pytest.raises(ValueError, match="norm must be one of"):
            edge_sum(x, edge_index, NODES, "max")
