"""edge_formula: compiled, plain, and its gradients beside those of torch."""

import pytest
import torch

from pyg_scale.ops import edge_formula as ops
from pyg_scale.ops.adjacency import from_edge_index
from pyg_scale.ops.edge_formula import EDGE, NEIGHBOR, OWN, Formula, Reduction, reduce_formula

SOURCES, DESTINATIONS, EDGES = 50, 40, 300
TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6}


def graph(num_edges=EDGES, hub=0):
    """Edges in any order, of which the last ``hub`` lead to one node; some nodes have none."""
    generator = torch.Generator().manual_seed(0)
    source = torch.randint(SOURCES, (num_edges,), generator=generator)
    target = torch.randint(DESTINATIONS - 5, (num_edges,), generator=generator)
    target[num_edges - hub :] = 3
    return from_edge_index(torch.stack([source, target]), SOURCES, DESTINATIONS)


def numbers(rows, columns, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64).to(dtype)


def everything(width, dtype, num_edges=EDGES):
    """A formula with every instruction that has a gradient, and its inputs of all kinds."""
    ends = [NEIGHBOR, OWN, EDGE, EDGE, OWN]
    inputs = [
        numbers(SOURCES, width, dtype, 1),
        numbers(DESTINATIONS, width, dtype, 2),
        numbers(num_edges, width, dtype, 3).abs() + 0.5,
        numbers(num_edges, 1, dtype, 4),
        numbers(DESTINATIONS, 4 if width % 4 == 0 else 1, dtype, 5),
    ]
    f = Formula(ends)
    out = f.add("sigmoid", f.add("add", 0, 1))
    out = f.add("mul", out, f.add("softplus", f.add("tanh", f.add("mul", 0, 3))))
    out = f.add("sub", f.add("div", out, 2), f.add("leaky", 4, number=0.2))
    out = f.add("max", out, f.add("log", 2))
    out = f.add("min", out, f.add("add_number", f.add("neg", 1), number=3.0))
    out = f.add("add", out, f.add("sqrt", f.add("abs", 0)))
    out = f.add("add", out, f.add("exp", f.add("mul_number", f.add("reciprocal", 2), number=-0.5)))
    return f, out, inputs


def grown(run, inputs):
    """The result of a function of inputs, and their gradients."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = run(leaves)
    rate = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out, *torch.autograd.grad((out * rate).sum(), leaves)]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("how", ["sum", "max", "min", "softmax", "edge"])
@pytest.mark.parametrize("width", [1, 5, 8, 24, 64, 130])
def test_results_and_gradients_are_those_of_torch(width, how, dtype):
    edges = graph()
    f, slot, inputs = everything(width, dtype)
    reduction = Reduction(f, slot, how, width, 0.7, 2 - width % 2)

    def plain(given):
        return ops._forward(edges, reduction, given, ops.run_formula_plain)[0]

    found = grown(lambda given: reduce_formula(edges, reduction, given), inputs)
    for mine, right in zip(found, grown(plain, inputs), strict=True):
        difference = (mine - right).detach().norm()
        assert float(difference) <= TOLERANCE[dtype] * float(right.detach().norm())


@pytest.mark.parametrize(("num_edges", "hub"), [(5000, 4500), (1, 0)])
@pytest.mark.parametrize("how", ["sum", "max", "softmax", "edge"])
def test_rows_that_are_cut_and_edges_that_are_not_there(how, num_edges, hub):
    edges = graph(num_edges, hub)
    f, slot, inputs = everything(8, torch.float64, num_edges)
    reduction = Reduction(f, slot, how, 8)
    found = grown(lambda given: reduce_formula(edges, reduction, given), inputs)
    right = grown(
        lambda given: ops._forward(edges, reduction, given, ops.run_formula_plain)[0], inputs
    )
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_bits_are_the_same_for_any_number_of_threads():
    edges = graph(5000, 4500)
    f, slot, inputs = everything(16, torch.float32, 5000)
    reduction, found = Reduction(f, slot, "softmax", 16), []
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            found.append(grown(lambda given: reduce_formula(edges, reduction, given), inputs))
    finally:
        torch.set_num_threads(threads)
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("how", ["sum", "softmax", "edge"])
def test_gradients_of_any_order(how):
    edges = graph(12)
    f = Formula([NEIGHBOR, OWN, EDGE])
    slot = f.add("sigmoid", f.add("mul", f.add("add", 0, 1), 2))
    inputs = [
        numbers(rows, columns, torch.float64, k).requires_grad_()
        for k, (rows, columns) in enumerate([(SOURCES, 4), (DESTINATIONS, 2), (12, 1)])
    ]
    run = lambda *given: reduce_formula(edges, Reduction(f, slot, how, 4), given)  # noqa: E731
    torch.autograd.gradcheck(run, inputs, fast_mode=True)
    torch.autograd.gradgradcheck(run, inputs, fast_mode=True)


def test_sums_of_edges_are_by_their_ids():
    edges = from_edge_index(torch.tensor([[2, 0, 1], [1, 0, 1]]), 3, 2)
    x, e = torch.tensor([[1.0, 2.0, 3.0, 4.0]] * 3), torch.tensor([[10.0], [20.0], [30.0]])
    f = Formula([NEIGHBOR, EDGE])
    reduction = Reduction(f, f.add("add", 0, 1), "edge", 4, columns=2)
    found = reduce_formula(edges, reduction, [x * torch.tensor([[1.0], [2.0], [3.0]]), e])
    assert found.tolist() == [[29.0, 41.0], [43.0, 47.0], [66.0, 74.0]]


def test_edges_that_share_an_extreme_share_its_gradient():
    edges = from_edge_index(torch.tensor([[0, 1, 2], [0, 0, 0]]), 3, 1)
    x = torch.tensor([[1.0], [2.0], [2.0]], requires_grad=True)
    reduce_formula(edges, Reduction(Formula([NEIGHBOR]), 0, "max", 1), [x]).sum().backward()
    assert x.grad.view(-1).tolist() == [0.0, 0.5, 0.5]


@pytest.mark.parametrize("code", ["exp", "log", "tanh", "sigmoid", "softplus", "sqrt"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_functions_of_one_number(code, dtype):
    x = torch.cat([torch.linspace(-100, 100, 4001), torch.linspace(-1, 1, 4001)]).to(dtype)
    x = torch.cat([x, torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0]).to(dtype)])
    size = x.numel()
    edges = from_edge_index(torch.zeros(2, size, dtype=torch.int64), 1, 1)
    f = Formula([EDGE])
    slot = f.add(code, 0)
    (found,) = ops.run_formula(edges, f, [x.view(-1, 1)], 1, [], kept=[(slot, 1)])
    right = ops._PLAIN[code](x.double(), x, 0.0).to(dtype)
    torch.testing.assert_close(
        found.view(-1), right, rtol=1e-14 if dtype == torch.float64 else 1e-6, atol=1e-37,
        equal_nan=True,
    )  # fmt: skip


def test_what_is_not_a_number_is_not_lost():
    edges = from_edge_index(torch.tensor([[0, 1, 2], [0, 0, 1]]), 3, 2)
    x = torch.tensor([[torch.nan], [2.0], [3.0]])
    for how in ("sum", "max", "min"):
        out = reduce_formula(edges, Reduction(Formula([NEIGHBOR]), 0, how, 1), [x])
        assert out[0].isnan() and out[1] == 3


def test_programs_that_read_what_is_not_there():
    edges, x = graph(), torch.zeros(SOURCES, 4)
    given = edges.indptr, edges.indices, None, [x], [NEIGHBOR]
    for program, message in (
        ([0, 0, 2, 0, 1], "before it is written"),
        ([99, 0, 0, 0, 1], "unknown code"),
        ([0, 0, 0, 7, 1], "number that is missing"),
        ([0, 0, 0, 0, 0], "out of range"),
        ([0, 0, 0, 0, 3], "leaves out a slot"),
        ([0, 0, 0], "5 numbers"),
    ):
        with pytest.raises(ValueError, match=message):
            torch.ops.pyg_scale.edge_formula(*given, program, torch.zeros(1), 4, [0], 0, [], [])
