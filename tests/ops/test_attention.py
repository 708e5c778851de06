"""Attention against PyG's layers and plain torch in float64, and itself on other paths."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import leaky_relu
from torch_geometric.nn import GATConv, GATv2Conv, TransformerConv
from torch_geometric.utils import softmax

from pyg_scale.ops import keys
from pyg_scale.ops.adjacency import Adjacency
from pyg_scale.ops.attention import dot_product_attention, gat_attention, gatv2_attention
from pyg_scale.ops.attention_plain import keep_mask
from tests.ops import graphs
from tests.ops.test_aggregate import TOLERANCE, compiled, near, path, poison  # noqa: F401

pytestmark = pytest.mark.matrix(4)

KINDS = ("gat", "gatv2", "dot")


def inputs_of(kind, adjacency, heads, channels, *, edges, dtype=torch.float64, seed=0):
    """Features of a kind of attention, by the names of its arguments."""
    torch.manual_seed(seed)
    src, dst, num_edges = adjacency.num_src, adjacency.num_dst, adjacency.num_edges
    row = (heads, channels)
    shapes = {
        "gat": {"x": (src, *row), "a_src": (src, heads), "a_dst": (dst, heads)},
        "gatv2": {"x_src": (src, *row), "x_dst": (dst, *row), "att": row},
        "dot": {"query": (dst, *row), "key": (src, *row), "value": (src, *row)},
    }[kind]
    if edges:
        name = {"gat": "a_edge", "gatv2": "x_edge", "dot": "edge"}[kind]
        shapes[name] = (num_edges, heads) if kind == "gat" else (num_edges, *row)
    return {name: torch.randn(s).to(dtype).requires_grad_() for name, s in shapes.items()}


def attend(kind, adjacency, features, **options):
    op = {"gat": gat_attention, "gatv2": gatv2_attention, "dot": dot_product_attention}[kind]
    return op(adjacency, **features, **options)


def expected(kind, adjacency, f, keep: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """In float64, with PyG's softmax; ``keep`` is what dropout multiplies weights with, by id."""
    f = {name: tensor.double() for name, tensor in f.items()}
    src, dst = graphs.edge_index(adjacency.indptr, adjacency.indices)
    ids = adjacency.edge_id
    ids = torch.arange(src.numel()) if ids is None else ids.long()
    if kind == "gat":
        logits = f["a_src"][src] + f["a_dst"][dst]
        logits = leaky_relu(logits + f["a_edge"][ids] if "a_edge" in f else logits, 0.2)
        values = f["x"][src]
    elif kind == "gatv2":
        values = f["x_src"][src]
        both = values + f["x_dst"][dst]
        both = both + f["x_edge"][ids] if "x_edge" in f else both
        logits = (leaky_relu(both, 0.2) * f["att"]).sum(-1)
    else:
        term = f["edge"][ids] if "edge" in f else 0.0
        values = f["value"][src] + term
        logits = (f["query"][dst] * (f["key"][src] + term)).sum(-1) / values.size(-1) ** 0.5
    weights = softmax(logits, dst, num_nodes=adjacency.num_dst)
    if keep is not None:
        weights = weights * keep[ids]
    out = values.new_zeros(adjacency.num_dst, *values.shape[1:])
    out = out.index_add(0, dst, weights.unsqueeze(-1) * values)
    return out, torch.empty_like(weights).index_copy(0, ids, weights)


def make(name: str, permuted: bool, index=torch.int64) -> Adjacency:
    num_src, indptr, indices, edge_id = graphs.named(name)
    return Adjacency(indptr, indices.to(index), num_src, edge_id.to(index) if permuted else None)


@pytest.mark.parametrize("name", graphs.NAMES)
@pytest.mark.parametrize("edges", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_means_what_pyg_means(path, name, edges, kind):  # noqa: F811
    adjacency = make(name, permuted=edges)
    f = inputs_of(kind, adjacency, 2, 5, edges=edges)
    out, weights = attend(kind, adjacency, f, return_weights=True)
    exact, exact_weights = expected(kind, adjacency, f)
    torch.testing.assert_close(out, exact, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(weights, exact_weights, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(attend(kind, adjacency, f), out, rtol=0, atol=0)
    gradient, of_weights = torch.randn_like(out), torch.randn_like(weights)
    for ours, theirs, given in (
        ((out,), (exact,), (gradient,)),
        ((out, weights), (exact, exact_weights), (gradient, of_weights)),
    ):
        a = torch.autograd.grad(ours, list(f.values()), given, retain_graph=True)
        b = torch.autograd.grad(
            theirs, list(f.values()), given, retain_graph=True, allow_unused=True
        )
        for found, wanted in zip(a, b):
            wanted = torch.zeros_like(found) if wanted is None else wanted
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("shape", [(1, 1), (3, 4), (8, 8), (4, 16), (1, 33), (2, 64), (1, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_every_shape_and_type(path, shape, dtype, kind):  # noqa: F811
    adjacency = make("small", permuted=True, index=torch.int32)
    f = inputs_of(kind, adjacency, *shape, edges=True, dtype=dtype, seed=shape[1])
    out = attend(kind, adjacency, f)
    exact, _ = expected(kind, adjacency, f)
    assert out.dtype == dtype
    assert near(out, exact, TOLERANCE[dtype])
    gradient = torch.randn(out.shape).to(dtype)
    ours = torch.autograd.grad(out, list(f.values()), gradient)
    theirs = torch.autograd.grad(exact, list(f.values()), gradient.double())
    for name, a, b in zip(f, ours, theirs):
        # Gradients of logits are small differences of what is rounded to the short type.
        assert near(a, b, TOLERANCE[dtype] * (1 if dtype == torch.float32 else 3)), name


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_is_a_function_of_seed_edge_and_head(path, kind):  # noqa: F811
    adjacency = make("small", permuted=True)
    f = inputs_of(kind, adjacency, 2, 5, edges=True)
    seed = torch.tensor(7)
    kept = keep_mask(seed, torch.arange(adjacency.num_edges), 2, 0.6)
    key = keys.fold(0, keys.ATTENTION_DROPOUT, 7)
    word = keys.mix(key + (5 * 2 + 1 + 1) * keys.GOLDEN)
    assert bool(kept[5, 1]) == (word >> 32 >= int(0.6 * 2**32))
    options = {"dropout": 0.6, "seed": seed, "return_weights": True}
    out, weights = attend(kind, adjacency, f, **options)
    exact, exact_weights = expected(kind, adjacency, f, kept / 0.4)
    assert torch.equal(weights == 0, ~kept)
    torch.testing.assert_close(out, exact, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(weights, exact_weights, rtol=1e-11, atol=1e-12)
    given = torch.randn_like(out), torch.randn_like(weights)
    ours = torch.autograd.grad((out, weights), list(f.values()), given)
    theirs = torch.autograd.grad((exact, exact_weights), list(f.values()), given)
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)
    assert not torch.equal(attend(kind, adjacency, f, dropout=0.6, seed=8), out)
    assert attend(kind, adjacency, f, dropout=1.0).count_nonzero() == 0


def test_dropout_drops_as_often_as_said():
    kept = keep_mask(torch.tensor(3), torch.arange(100_000), 4, 0.3)
    rate = kept.double().mean(0)
    deviation = (0.3 * 0.7 / 100_000) ** 0.5
    assert bool(((rate - 0.7).abs() < 5 * deviation).all())


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_numerically_right(compiled, kind):  # noqa: F811
    adjacency = make("tiny", permuted=True)
    f = inputs_of(kind, adjacency, 2, 3, edges=True, seed=3)

    def run(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        features = dict(zip(f, tensors))
        return attend(kind, adjacency, features, dropout=0.2, seed=1, return_weights=True)

    assert torch.autograd.gradcheck(run, tuple(f.values()), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [1e4, -1e4])
def test_logits_may_be_huge(path, size, dtype):  # noqa: F811
    adjacency = make("pieces", permuted=False)
    f = inputs_of("gat", adjacency, 2, 4, edges=False, dtype=dtype)
    f["a_src"] = (f["a_src"].detach().float() + size).requires_grad_()
    out, weights = attend("gat", adjacency, f, return_weights=True)
    assert bool(out.isfinite().all()) and bool(weights.isfinite().all())
    exact, _ = expected("gat", adjacency, f)
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 2e-2}[dtype]
    assert near(out, exact, tolerance)
    for gradient in torch.autograd.grad(out.sum(), list(f.values())):
        assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_comes_through(path, kind):  # noqa: F811
    adjacency = make("small", permuted=False)
    f = inputs_of(kind, adjacency, 2, 8, edges=False)
    with torch.no_grad():
        next(iter(f.values()))[1] = float("nan")
    found, wanted = attend(kind, adjacency, f), expected(kind, adjacency, f)[0]
    assert torch.equal(found.isnan(), wanted.isnan()) and bool(found.isnan().any())


@pytest.mark.parametrize("layer", [GATConv, GATv2Conv, TransformerConv])
def test_is_the_layer_of_pyg(path, layer):  # noqa: F811
    adjacency = make("small", permuted=False)
    edges = graphs.edge_index(adjacency.indptr, adjacency.indices)
    size = adjacency.num_src, adjacency.num_dst
    torch.manual_seed(0)
    options = {"heads": 2, "bias": False}
    if layer is TransformerConv:
        options["root_weight"] = False
    else:
        options["add_self_loops"] = False
    conv = layer((6, 7), 4, **options).double()
    x = torch.randn(size[0], 6).double(), torch.randn(size[1], 7).double()
    wanted = conv(x, edges).view(size[1], 2, 4)
    if layer is GATConv:
        src, dst = (
            lin(one).view(-1, 2, 4)
            for lin, one in zip(
                (conv.lin_src, conv.lin_dst) if conv.lin is None else (conv.lin, conv.lin), x
            )
        )
        a_src, a_dst = (src * conv.att_src).sum(-1), (dst * conv.att_dst).sum(-1)
        found = gat_attention(adjacency, src, a_src, a_dst)
    elif layer is GATv2Conv:
        src, dst = conv.lin_l(x[0]).view(-1, 2, 4), conv.lin_r(x[1]).view(-1, 2, 4)
        found = gatv2_attention(adjacency, src, dst, conv.att[0])
    else:
        q, k = conv.lin_query(x[1]), conv.lin_key(x[0])
        rows = [t.view(-1, 2, 4) for t in (q, k, conv.lin_value(x[0]))]
        found = dot_product_attention(adjacency, *rows)
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)


def test_bad_input(path):  # noqa: F811
    adjacency = make("small", permuted=False)
    f = inputs_of("gat", adjacency, 2, 4, edges=False)
    with pytest.raises(ValueError, match=r"a_src must be of shape \[30, 2\]"):
        gat_attention(adjacency, f["x"], f["a_dst"], f["a_dst"])
    with pytest.raises(ValueError, match=r"x must be of shape \[30, heads, channels\]"):
        gat_attention(adjacency, f["x"][:-1], f["a_src"], f["a_dst"])
    with pytest.raises(TypeError, match="x must be float32"):
        gat_attention(adjacency, f["x"].long(), f["a_src"], f["a_dst"])
    with pytest.raises(ValueError, match="dropout must be a probability"):
        gat_attention(adjacency, **f, dropout=1.5)
    with pytest.raises(ValueError, match="seed must be one int64 number"):
        gat_attention(adjacency, **f, dropout=0.5, seed=torch.zeros(2))
    two = inputs_of("gatv2", adjacency, 2, 4, edges=False)
    with pytest.raises(ValueError, match=r"att must be of shape \[2, 4\]"):
        gatv2_attention(adjacency, two["x_src"], two["x_dst"], two["att"][:1])


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_for_any_number_of_threads_and_every_time(compiled, kind):  # noqa: F811
    generator = torch.Generator().manual_seed(0)
    degree = torch.randint(0, 30, (1500,), generator=generator)
    degree[17] = 7000  # in pieces
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degree.cumsum(0)])
    indices = (torch.rand(int(indptr[-1]), generator=generator).pow(3) * 1000).long()
    edge_id = torch.randperm(indices.numel(), generator=generator)
    adjacency = Adjacency(indptr, indices, 1000, edge_id)
    f = inputs_of(kind, adjacency, 3, 8, edges=True, dtype=torch.float32)
    threads, seen = torch.get_num_threads(), []
    try:
        for number in (1, 2, 2, 1):
            torch.set_num_threads(number)
            poison()
            out = attend(kind, adjacency, f, dropout=0.3, seed=5)
            gradients = torch.autograd.grad(out, list(f.values()), torch.ones_like(out))
            seen.append((out.detach(), *gradients))
    finally:
        torch.set_num_threads(threads)
    for other in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], other))
    exact, _ = expected(
        kind, adjacency, f, keep_mask(torch.tensor(5), torch.arange(indices.numel()), 3, 0.3) / 0.7
    )
    assert near(seen[0][0], exact, 1e-5)
    wanted = torch.autograd.grad(exact, list(f.values()), torch.ones_like(exact))
    for name, a, b in zip(f, seen[0][1:], wanted):
        assert near(a, b, 1e-5), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_hub(compiled, kind):  # noqa: F811
    num_src, indptr, indices = graphs.star()
    adjacency = Adjacency(indptr, indices, num_src)
    f = inputs_of(kind, adjacency, 1, 8, edges=False, dtype=torch.float32)
    out = attend(kind, adjacency, f)
    exact, _ = expected(kind, adjacency, f)
    assert near(out, exact, 1e-5) and near(out[0], exact[0], 1e-4)
    given = torch.randn_like(out)
    ours = torch.autograd.grad(out, list(f.values()), given)
    theirs = torch.autograd.grad(exact, list(f.values()), given.double())
    for name, a, b in zip(f, ours, theirs):
        # Over the hub's edges gradients of logits cancel out.
        close = (a - b).abs().max() < 1e-4 if name == "a_dst" else near(a, b, 1e-5)
        assert close, name


@pytest.mark.parametrize("kind", KINDS)
def test_operators_are_what_torch_expects(compiled, kind):  # noqa: F811
    adjacency = make("small", permuted=True)
    f = inputs_of(kind, adjacency, 2, 4, edges=True, dtype=torch.float32)
    attend(kind, adjacency, f)  # registers the rules
    edges = (adjacency.indptr, adjacency.indices, adjacency.edge_id)
    name = {"gat": "gat_attention", "gatv2": "gatv2_attention"}.get(kind, "dot_product_attention")
    op, grad = (getattr(torch.ops.pyg_scale, n).default for n in (name, f"{name}_grad"))
    number, seed = (0.5 if kind == "dot" else 0.2), torch.tensor(3)
    args = (*edges, *adjacency.transpose(), *f.values(), number, 0.5, seed, True)
    torch.library.opcheck(op, args)
    detached = [t.detach() for t in f.values()]
    out, lse, weights = op(*edges, None, None, None, *detached, number, 0.5, seed, True)
    by_source = () if kind == "dot" else adjacency.transpose()
    rest = (out, lse, weights, torch.randn_like(out), torch.randn_like(weights))
    given = (*edges, *by_source, *detached, number, 0.5, seed, *rest)
    torch.library.opcheck(grad, given)
    if kind == "dot":
        _, _, of_logits, weights = grad(*given)
        given = *adjacency.transpose(), detached[0], rest[3], of_logits, weights
        op = torch.ops.pyg_scale.dot_product_attention_grad_by_source.default
        torch.library.opcheck(op, given)


@pytest.mark.parametrize("kind", KINDS)
def test_compiles_and_exports_as_a_whole(compiled, kind):  # noqa: F811
    def layer(adjacency, f):
        return attend(kind, adjacency, {k: v * 1.5 for k, v in f.items()}, dropout=0.5, seed=2)

    traced = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for name in ("small", "more rows than sources"):
        adjacency = make(name, permuted=True)
        f = inputs_of(kind, adjacency, 2, 4, edges=True, dtype=torch.float32)
        both = [g(adjacency, f) for g in (layer, traced)]
        torch.testing.assert_close(both[1], both[0])
        ours, theirs = (torch.autograd.grad(y.sum(), list(f.values())) for y in both)
        for a, b in zip(ours, theirs):
            torch.testing.assert_close(a, b)

    class Layer(torch.nn.Module):
        def forward(self, *tensors: Tensor) -> Tensor:
            return layer(adjacency, dict(zip(f, tensors)))

    tensors = tuple(t.detach() for t in f.values())
    exported = torch.export.export(Layer(), tensors).module()
    torch.testing.assert_close(exported(*tensors), Layer()(*tensors))


@pytest.mark.parametrize("kind", KINDS)
def test_autocast(path, kind):  # noqa: F811
    adjacency = make("small", permuted=True)
    f = inputs_of(kind, adjacency, 2, 4, edges=True, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, weights = attend(kind, adjacency, f, return_weights=True)
    assert (out.dtype, weights.dtype) == (torch.bfloat16, torch.float32)
    assert near(out, expected(kind, adjacency, f)[0], 1e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_differentiated_again(compiled, kind):  # noqa: F811
    """With dropout, edge features and weights that are differentiated, too."""
    adjacency = make("small", permuted=True)
    f = inputs_of(kind, adjacency, 2, 3, edges=True)

    def both(*features):
        given = dict(zip(f, features, strict=True))
        return attend(kind, adjacency, given, dropout=0.4, seed=3, return_weights=True)

    assert torch.autograd.gradgradcheck(both, tuple(f.values()), fast_mode=True)


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_gradients_that_are_asked_for(compiled, kind):  # noqa: F811
    adjacency = make("small", permuted=True)
    f = inputs_of(kind, adjacency, 2, 4, edges=True)
    given = torch.randn(2, 4, adjacency.num_dst, dtype=torch.float64).permute(2, 0, 1)  # strided
    all_of_them = torch.autograd.grad(attend(kind, adjacency, f), list(f.values()), given)
    for name, wanted in zip(f, all_of_them):
        alone = {k: v if k == name else v.detach() for k, v in f.items()}
        (found,) = torch.autograd.grad(attend(kind, adjacency, alone), f[name], given)
        assert torch.equal(found, wanted), name
    assert attend(kind, adjacency, {k: v.detach() for k, v in f.items()}).grad_fn is None
