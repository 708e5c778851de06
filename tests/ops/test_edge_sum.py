"""edge_sum: compiled, plain, and as a dense matrix."""

import pytest
import torch

from pyg_scale.ops.edge_sum import (
    NORMS,
    edge_sum,
    edge_sum_plain,
    run_weight_grad,
    weight_grad_plain,
)

NODES = 40
REPEATED = torch.tensor([[3], [5]]).expand(2, 4)


def graph(num_edges, seed=0, nodes=NODES):
    return torch.randint(nodes, (2, num_edges), generator=torch.Generator().manual_seed(seed))


def features(channels, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(NODES, channels, generator=generator, dtype=torch.float64).to(dtype)


def weights(num_edges, dtype=torch.float64):
    generator = torch.Generator().manual_seed(2)
    return torch.rand(num_edges, generator=generator, dtype=torch.float64).to(dtype)


def dense(edge_index, norm, num_dst=NODES, weight=None):
    """The matrix [num_dst, NODES], from its definition."""
    matrix = torch.zeros(num_dst, NODES, dtype=torch.float64)
    loops = torch.ones(NODES, dtype=torch.float64)
    count = torch.zeros(num_dst, 1, dtype=torch.float64)
    weight = torch.ones(edge_index.size(1)) if weight is None else weight
    for (source, target), of_edge in zip(edge_index.t().tolist(), weight.tolist(), strict=True):
        count[target] += 1
        if norm == "gcn" and source == target:
            loops[source] = of_edge
        else:
            matrix[target, source] += of_edge
    if norm == "mean":
        return matrix / count.clamp(min=1)
    if norm in ("gcn", "symmetric"):
        if norm == "gcn":
            matrix += loops.diag()
        degree = matrix.sum(dim=1)
        root = torch.where(degree == 0, 0.0, degree.rsqrt())
        return root.view(-1, 1) * matrix * root
    return matrix


@pytest.mark.parametrize("own", [0.0, -1.5])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("num_edges", [0, 1, 250])
def test_is_a_product_with_the_matrix(norm, num_edges, weighted, own):
    for channels in (1, 3, 8, 37):
        edge_index, x = graph(num_edges), features(channels)
        weight = weights(num_edges) if weighted else None
        matrix = dense(edge_index, norm, weight=weight) + own * torch.eye(NODES)
        found = edge_sum(x, edge_index, NODES, norm, weight, own)
        torch.testing.assert_close(found, matrix @ x, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("transposed", [False, True])
def test_compiled_and_plain_have_equal_bits(norm, dtype, transposed, weighted):
    for edge_index in (
        graph(300),
        graph(300).t().contiguous().t(),
        graph(600)[:, ::2],
        graph(0),
        REPEATED,
    ):
        size = edge_index.size(1)
        weight = weights(2 * size, dtype)[::2] - 0.25 if weighted else None
        for channels, own in ((0, 0.0), (1, 0.5), (5, 0.0), (16, -3.0), (33, 0.1)):
            x = features(channels, dtype)
            given = x, edge_index, weight, NODES
            found = torch.ops.pyg_scale.edge_sum(*given, NORMS.index(norm), own, transposed)
            plain = edge_sum_plain(*given, norm, own, transposed)
            torch.testing.assert_close(found, plain, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_compiled_gradient_of_weights(mean, transposed):
    for edge_index in (graph(300), graph(600)[:, ::2], graph(0), REPEATED):
        for channels in (0, 1, 5, 33):
            given = features(channels), features(channels).cos(), edge_index, mean, transposed
            found, expected = run_weight_grad(*given), weight_grad_plain(*given)
            torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


def test_one_edge_that_is_repeated_by_its_stride():
    x = features(2)
    assert torch.equal(edge_sum(x, REPEATED, NODES)[5], 4 * x[3])


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("norm", NORMS)
def test_gradients_of_any_order(norm, weighted):
    edge_index, x = graph(60, nodes=12), features(2)[:12].requires_grad_()
    weight = weights(60).requires_grad_(norm in ("sum", "mean")) if weighted else None
    function = lambda x, w: edge_sum(x, edge_index, 12, norm, w, 0.5)  # noqa: E731
    torch.autograd.gradcheck(function, (x, weight))
    torch.autograd.gradgradcheck(function, (x, weight))
    if weighted and norm in ("gcn", "symmetric"):
        with pytest.raises(NotImplementedError, match="no gradient of weight"):
            function(x, weights(60).requires_grad_())


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
        for norm, own in (("gcn", 0.0), ("symmetric", 0.0), ("sum", 1.0)):
            with pytest.raises(ValueError, match="as many destinations"):
                edge_sum(x, edge_index % 7, 7, norm, None, own)
        for weight in (weights(4), weights(5).float(), weights(5).view(5, 1)):
            with pytest.raises(ValueError, match="weight must be"):
                edge_sum(x, edge_index, NODES, "sum", weight)
        with pytest.raises(ValueError, match="norm must be one of"):
            edge_sum(x, edge_index, NODES, "max")
