"""Messages of steps on single numbers: results, gradients, and that no row is gathered."""

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import nn
from torch_geometric.nn import aggr as aggregations

from pyg_scale.nn import accelerate, chunks, elementwise, fallbacks
from pyg_scale.nn.edges import Edges
from pyg_scale.nn.elementwise import Elementwise
from pyg_scale.nn.lifted import Lifted
from pyg_scale.ops import edge_formula
from tests.nn.oracle import compared, distance


def of_edges(edge_index, *columns):
    generator = torch.Generator().manual_seed(2)
    return torch.randn(edge_index.size(1), *columns, generator=generator, dtype=torch.float64)


@pytest.fixture
def no_rows(monkeypatch):
    """A row that is gathered for an edge is an error."""

    def refuse(*args):
        raise AssertionError("rows are gathered")

    monkeypatch.setattr(elementwise, "gather", refuse)
    monkeypatch.setattr("pyg_scale.nn.lifted.gather", refuse)


def _pna(**options):
    how = ["mean", "max", "min", "std", "var", "sum"], ["identity", "amplification", "attenuation"]
    return pyg.PNAConv(8, 12, *how, torch.tensor([1, 2, 3, 2]), **options)


def _edge_conv(aggr, *after):
    return pyg.EdgeConv(nn.Sequential(nn.Linear(16, 5), *after), aggr=aggr)


LAYERS = {
    "gine": (lambda: pyg.GINEConv(nn.Linear(8, 5), train_eps=True), 8),
    "gine, mapped": (lambda: pyg.GINEConv(nn.Linear(8, 5), edge_dim=3), 3),
    "gen": (lambda: pyg.GENConv(8, 5, edge_dim=8), 8),
    "gen, no edges": (lambda: pyg.GENConv(8, 8), 0),
    "gen, learned": (lambda: pyg.GENConv(8, 5, learn_t=True, t=0.7, edge_dim=3), 3),
    "gen, mean": (lambda: pyg.GENConv(8, 5, aggr="mean"), 0),
    "resgated": (lambda: pyg.ResGatedGraphConv(8, 5), 0),
    "resgated, edges": (lambda: pyg.ResGatedGraphConv(8, 5, edge_dim=3), 3),
    "film": (lambda: pyg.FiLMConv(8, 5), 0),
    "cg": (lambda: pyg.CGConv(8, dim=3, aggr="mean"), 3),
    "cg, max": (lambda: pyg.CGConv(8, aggr="max"), 0),
    "edge": (lambda: pyg.EdgeConv(nn.Linear(16, 5)), 0),
    "edge, relu": (lambda: _edge_conv("max", nn.ReLU()), 0),
    "edge, sum": (lambda: _edge_conv("sum", nn.SiLU()), 0),
    "edge, several": (lambda: _edge_conv(["mean", "min"], nn.LeakyReLU(0.2)), 0),
    "le": (lambda: pyg.LEConv(8, 5), 0),
    "pna": (_pna, 0),
    "pna, edges": (lambda: _pna(edge_dim=3), 3),
    "pna, towers": (lambda: _pna(edge_dim=3, towers=2), 3),
    "pna, divided": (lambda: _pna(towers=2, divide_input=True, post_layers=2), 0),
    "point": (lambda: pyg.PointNetConv(nn.Linear(11, 5), add_self_loops=False), -1),
}


@pytest.mark.usefixtures("no_rows")
@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_pyg(name, x, edge_index):
    make, columns = LAYERS[name]
    given = (x, edge_index)
    if columns < 0:
        given = (x, x[:, :3] * 2, edge_index)
    elif columns:
        given = (x, edge_index, of_edges(edge_index, columns))
    assert not fallbacks(compared(make(), given))


@pytest.mark.parametrize("name", LAYERS)
def test_rows_end_with_the_call(name, x, edge_index):
    """They hold features, which would otherwise live until garbage is collected."""
    make, columns = LAYERS[name]
    layer = make().double()
    accelerate(layer)
    more = (of_edges(edge_index, columns),) if columns > 0 else ()
    given = (x, x[:, :3], edge_index) if columns < 0 else (x, edge_index, *more)
    layer(*given)
    kept = Edges, Lifted, Elementwise, elementwise._Inputs
    gc.collect()
    gc.disable()
    try:
        layer(*given).sum().backward()
        assert not [each for each in gc.get_objects() if type(each) in kept]
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["gine", "gen", "cg", "edge", "gen, no edges"])
def test_large_inputs_are_not_cut_into_chunks(name, x, edge_index, monkeypatch):
    monkeypatch.setattr(chunks, "ELEMENTS", 300)
    monkeypatch.setattr(chunks, "LEAST", 4)
    make, columns = LAYERS[name]
    more = (of_edges(edge_index, columns),) if columns else ()
    ours = compared(make(), (x, edge_index, *more))
    assert not fallbacks(ours) and not chunks.is_cut(ours)


class Message(pyg.MessagePassing):
    """A layer with any function as its message."""

    def __init__(self, function, aggr="sum", **kwargs):
        super().__init__(aggr=aggr, **kwargs)
        self.function = function

    def forward(self, x, edge_index, e):
        return self.propagate(edge_index, x=x, e=e)

    def message(self, x_i, x_j, e):
        return self.function(x_i, x_j, e)


STEPS = {
    "numbers": lambda i, j, e: 1 - (2 * (i + j) - 3) / 4 + (5 - e),
    "turned": lambda i, j, e: (1 / (j.abs() + e.abs() + 1)) + e / (i.square() + 2),
    "functions": lambda i, j, e: F.silu(i + e) + F.softplus(j - e) + torch.exp(-(i - j).abs()),
    "roots": lambda i, j, e: torch.sqrt((i * e).pow(2) + 1) + torch.log((j + e).pow(2) + 1),
    "extremes": lambda i, j, e: torch.maximum(i + e, j) - torch.minimum(i, e),
    "of a node": lambda i, j, e: (torch.tanh(j) + 1) * (i.sigmoid() + e),
    "one number": lambda i, j, e: (j - i) * e[:, :1] + e[:, 1:2],
    "a term of one number": lambda i, j, e: torch.relu(i + j + e[:, :1]),
    "a constant": lambda i, j, e: torch.relu(i + j + torch.arange(8.0).double()) * (i - e),
    "twice": lambda i, j, e: (lambda m: m * m + m)((i + e) * j),
    "dropout, off": lambda i, j, e: F.dropout(i + e, 0.5, training=False) * j,
}


@pytest.mark.usefixtures("no_rows")
@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("name", STEPS)
def test_functions_of_the_user(name, flow, x, edge_index):
    layer = Message(STEPS[name], flow=flow)
    assert not fallbacks(compared(layer, (x, edge_index, of_edges(edge_index, 8)), 1e-11))


SUMS = {
    "of both ends": lambda i, j, e: torch.tanh(i + j + e).sum(-1, keepdim=True) * j,
    "of heads": lambda i, j, e: (
        (F.leaky_relu(i + j).view(-1, 2, 4) * e[:, :2].unsqueeze(-1)).sum(-1, keepdim=True)
        * j.view(-1, 2, 4)
    ),
    "of a distance": lambda i, j, e: (i - j).square().sum(dim=1).view(-1, 1) * e,
    "of a product with edges": lambda i, j, e: (i * e).sum(-1, keepdim=True) * j,
    "mean": lambda i, j, e: (i * j * e).mean(-1, keepdim=True) * j,
    "mean of a sum": lambda i, j, e: (i - 2 * e).mean(-1, True) * j,
    "mean of each head": lambda i, j, e: (i.abs() - j).view(-1, 2, 4).mean(-1)[:, :1] * e,
    "of inputs of other shapes": lambda i, j, e: (
        ((i + e).unsqueeze(1) * torch.sin(e[:, :3]).unsqueeze(-1)).tanh().sum(-1)
    ),
    "twice": lambda i, j, e: (lambda m: m * m.sum(-1, keepdim=True))(torch.relu(i + j)),
    "of two dimensions": lambda i, j, e: (i * e).sum((-1,)).unsqueeze(-1) * j,
}


@pytest.mark.usefixtures("no_rows")
@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("name", SUMS)
def test_sums_over_channels(name, flow, x, edge_index):
    layer = Message(SUMS[name], flow=flow, node_dim=0)
    assert not fallbacks(compared(layer, (x, edge_index, of_edges(edge_index, 8)), 1e-11))


@pytest.mark.parametrize("after", [lambda e: e.add_(1), lambda e: e[:, 2:4].mul_(2)])
def test_what_sums_are_made_of_may_change_later(after, x, edge_index):
    """As in PyG, where the sums have a copy: of a tensor of the caller, or one that is new."""

    def message(i, j, e, of=lambda e: e):
        given = of(e)
        sums = (i + given).tanh().sum(-1, keepdim=True)
        after(given)
        return sums * j

    def squares(i, j, e):
        both = torch.cat([i, e], -1)
        made = both * both
        after(e)
        return made * both

    for function in (message, lambda i, j, e: message(i, j, e, lambda e: e * 2), squares):
        mine = Message(lambda i, j, e, of=function: of(i, j, e.clone()))
        compared(mine, (x, edge_index, of_edges(edge_index, 8)), 1e-11)


def _gated(rows):
    gate, value = rows
    return gate.sigmoid() * value


PARTS = {
    "columns": lambda i, j, e: (i + e)[:, 2:6] * j[:, :4] + j[..., -4:],
    "of one column": lambda i, j, e: (i + e)[:, 2:3] * j,
    "chunks": lambda i, j, e: _gated((i + j + e).chunk(2, -1)),
    "chunks of a node": lambda i, j, e: _gated(torch.chunk(j, 2, dim=1)) * e[:, :4],
    "chunks that are fewer": lambda i, j, e: (i + e).chunk(5, -1)[3] + j.chunk(3, dim=-1)[2],
    "split": lambda i, j, e: torch.cat((i * e).split([3, 5], -1)[::-1], -1) + j,
    "split evenly": lambda i, j, e: _gated((i - e).split(4, dim=-1)) * j.split(3, 1)[0][:, :1],
    "of several side by side": lambda i, j, e: (
        torch.cat([i + e, j, e], -1)[:, 4:20].tanh().narrow(1, 2, 8) * j
    ),
    "of one side by side": lambda i, j, e: torch.cat([i + e, j], -1)[:, 9:13] * i[:, 4:],
    "of an edge side by side": lambda i, j, e: torch.cat([i * 2, e], -1)[:, 9:13] * i[:, 4:],
    "heads": lambda i, j, e: (i + e).view(-1, 4, 2)[:, 1:3] * j.view(-1, 4, 2).narrow(1, -2, 2),
    "one head": lambda i, j, e: (i * e).view(-1, 2, 4).select(1, -1) - j.view(-1, 2, 4)[:, 0],
    "parts of heads": lambda i, j, e: (i + j).view(-1, 2, 4)[:, :, 1:3] * e[:, :2].unsqueeze(-1),
    "of a product with weights": lambda i, j, e: (
        torch.cat([(j * e[:, :1]).view(-1, 2, 4), (i + e).view(-1, 2, 4)], -1)[:, :, 2:6]
        + (j * e[:, 1:2]).view(-1, 2, 4)[:, 1:]
    ),
    "glu": lambda i, j, e: F.glu(i + e) + F.glu(j, dim=-1),
    "glu of heads": lambda i, j, e: F.glu((i * j + e).view(-1, 2, 4), 1),
    "a view of a part": lambda i, j, e: (i + e)[:, 2:6].view(-1, 2, 2) * j[:, :4].reshape(-1, 2, 2),
}


@pytest.mark.usefixtures("no_rows")
@pytest.mark.parametrize("name", PARTS)
def test_parts_of_rows(name, x, edge_index, monkeypatch):
    monkeypatch.setattr(elementwise, "_HEADS", 0)  # parts of few columns are no numbers of heads
    layer = Message(PARTS[name], node_dim=0)
    assert not fallbacks(compared(layer, (x, edge_index, of_edges(edge_index, 8)), 1e-11))


@pytest.mark.usefixtures("no_rows")
@pytest.mark.parametrize("aggr", ["mean", "max", "min", "softmax", ["sum", "std"]])
@pytest.mark.parametrize("after", [lambda rows, e: rows, lambda rows, e: rows * e[:, :1]])
def test_rows_side_by_side_are_reduced_by_themselves(after, aggr, x, edge_index):
    layer = Message(lambda i, j, e: after(torch.cat([j, e, (i - j).tanh()], -1), e), aggr)
    assert not fallbacks(compared(layer, (x, edge_index, of_edges(edge_index, 8)), 1e-9))


def _changed(part, rows, change=lambda part: part.mul_(2)):
    change(part)
    return part.sum(-1, keepdim=True) + rows


CHANGED = {
    "a part": lambda i, j, e: (lambda m: _changed(m[:, 2:6], m))(i + e),
    "a part of features": lambda i, j, e: _changed(j.narrow(-1, 4, 4), j),
    "a part of a part": lambda i, j, e: (lambda m: _changed(m[:, 1:6][:, 2:4], m))(i + e),
    "the whole": lambda i, j, e: (lambda m: _changed(m, m[:, 2:6].view(-1, 4)))(i + e)[:, :4],
    "a view of a part": lambda i, j, e: _changed(j[:, 2:6].view(-1, 2, 2)[:, 0], j),
    "a copy of a part": lambda i, j, e: _changed(j.view(-1, 2, 4)[:, :, :2].reshape(-1, 4), j),
    "a part before": lambda i, j, e: (lambda part: _changed(j, part))(j[:, 2:6]),
    "one of several": lambda i, j, e: (lambda m: _changed(j, m[:, 6:10]))(torch.cat([i, j], -1)),
}


@pytest.mark.parametrize("name", CHANGED)
def test_parts_share_the_memory_of_rows(name, x, edge_index):
    ours = compared(Message(CHANGED[name]), (x, edge_index, of_edges(edge_index, 8)), 1e-11)
    assert not [why for reasons in fallbacks(ours).values() for why in reasons if "raised" in why]


def test_a_part_that_is_no_view_is_refused_as_by_torch(x, edge_index):
    layer = Message(lambda i, j, e: (i + e).view(-1, 2, 4)[:, :, :2].view(-1, 4))
    given = x, edge_index, of_edges(edge_index, 8)
    accelerate(layer)
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        layer(*given)


ROWS = {
    "a norm": lambda i, j, e: F.layer_norm(i + e, (8,)) * j,
    "two maps": lambda i, j, e: F.linear(F.relu(i + j), torch.eye(8).double()) + e,
    "a flip": lambda i, j, e: (i + e).view(-1, 2, 4).flip(1).reshape(-1, 8) * j,
    "an index": lambda i, j, e: (i + e)[:, [2]] * j,
    "every other": lambda i, j, e: (i + e)[:, ::2] * e[:, :4],
    "in place of another": lambda i, j, e: (lambda m: (m.mul_(2), m + j)[1])(i + e),
    "cat": lambda i, j, e: torch.cat([i + e, j], -1)[:, ::2],
    "softplus, other": lambda i, j, e: F.softplus(i + e, beta=2) * j,
}


@pytest.mark.parametrize("name", ROWS)
def test_other_functions_gather_rows(name, x, edge_index):
    layer = Message(ROWS[name])
    ours = compared(layer, (x, edge_index, of_edges(edge_index, 8)), 1e-11)
    assert list(fallbacks(ours)) == [""]


def _difference(i, j, e):
    return (i - j + e).sigmoid()


@pytest.mark.usefixtures("no_rows")
@pytest.mark.parametrize("aggr", ["std", "var", ["sum", "std"], ["mean", "var", "max"]])
@pytest.mark.parametrize("message", [_difference, lambda i, j, e: j, lambda i, j, e: j * e[:, :1]])
def test_several_sums_of_the_same_messages(aggr, message, x, edge_index):
    given = x, edge_index, of_edges(edge_index, 8)
    assert not fallbacks(compared(Message(message, aggr), given, 1e-9))


@pytest.mark.parametrize("aggr", ["median", "mul", ["sum", "powermean"], [["std", "mul"]]])
def test_other_aggregations_gather_rows(aggr, x, edge_index):
    given = x, edge_index, of_edges(edge_index, 8)
    ours = compared(
        Message(_difference, aggr[0] if aggr == [["std", "mul"]] else aggr), given, 1e-9
    )
    assert list(fallbacks(ours)[""]) == ["rows of features gathered for aggregation"]


@pytest.mark.parametrize("kind", [aggregations.VarAggregation, aggregations.StdAggregation])
@pytest.mark.parametrize("several", [False, True])
def test_a_variance_without_its_gradient_gathers_rows(kind, several, x, edge_index):
    made = kind(semi_grad=True)
    given = x, edge_index, of_edges(edge_index, 8)
    ours = compared(Message(_difference, ["sum", made] if several else made), given, 1e-9)
    assert list(fallbacks(ours)[""]) == ["rows of features gathered for aggregation"]


def test_a_sum_is_computed_once(x, edge_index, monkeypatch):
    found = []
    monkeypatch.setattr(
        elementwise,
        "reduce_formula",
        lambda *given: found.append(given[1].how) or edge_formula.reduce_formula(*given),
    )
    layer = Message(_difference, ["sum", "std", "mean", "max"])
    accelerate(layer)
    layer(x, edge_index, of_edges(edge_index, 8))
    assert sorted(found) == ["max", "sum", "sum"]  # of messages and of their squares


HEADS = {
    "a view": lambda i, j, e: (i + e).view(-1, 2, 4) * j.view(-1, 2, 4),
    "a view of its size": lambda i, j, e: (i + e).view(e.size(0), 4, -1).relu().view(-1, 8),
    "a constant": lambda i, j, e: (i + e + torch.arange(8.0)).view(-1, 4, 2).tanh(),
    "one number": lambda i, j, e: (i * e[:, :1] + 1).view(-1, 2, 4) - j.reshape(-1, 2, 4),
    "a sum": lambda i, j, e: (i - e).view(-1, 2, 4).sum(-1, keepdim=True) * j.view(-1, 2, 4),
    "sums with weights": lambda i, j, e: (
        (
            ((2 * i + e - j).view(-1, 2, 4) * torch.arange(8.0).view(1, 2, 4) + 1).sum(dim=-1)
        ).unsqueeze(-1)
        * (i + e).view(-1, 2, 4)
    ),
    "heads of the same rows": lambda i, j, e: (i + j + e).unsqueeze(1) * e[:, :3].unsqueeze(-1),
    "summed heads": lambda i, j, e: (j.view(-1, 2, 4) * e[:, :2].unsqueeze(-1)).sum(dim=1),
    "summed heads of both": lambda i, j, e: (
        j.view(-1, 2, 2, 2) * i.view(-1, 2, 2, 2) * e[:, :2].view(-1, 2, 1, 1)
    ).sum(1),
}


@pytest.mark.usefixtures("no_rows")
def test_messages_narrower_than_features(x, edge_index):
    wide = x.repeat(1, 5)
    layer = pyg.EdgeConv(nn.Sequential(nn.Linear(80, 20), nn.ReLU()), aggr="mean")
    assert not fallbacks(compared(layer, (wide, edge_index)))


@pytest.mark.parametrize("aggr", ["mean", "max"])
@pytest.mark.parametrize("name", HEADS)
def test_heads_of_rows(name, aggr, x, edge_index):
    function = HEADS[name]
    layer = Message(lambda i, j, e: in_doubles(function, i, j, e), aggr, node_dim=0)
    given = x, edge_index, of_edges(edge_index, 8)
    assert not fallbacks(compared(layer, given))


class Towers(Message):
    """Features of two towers of four channels."""

    def __init__(self, function, aggr="sum"):
        super().__init__(function, aggr, node_dim=0)

    def forward(self, x, edge_index, e):
        return self.propagate(edge_index, x=x.view(-1, 2, 4), e=e)


TOWERS = {
    "steps": lambda i, j, e: torch.stack([(i * j + 1)[:, k].relu() + e for k in (0, -1)], 1),
    "products": lambda i, j, e: torch.stack([(i * j)[:, k] * e for k in (1, 0)], dim=1),
    "constants": lambda i, j, e: torch.stack(
        [(i + j + torch.arange(8.0).view(2, 4)).exp()[:, k] * e for k in (0, 1)], 1
    ),
    "a constant of one": lambda i, j, e: torch.stack(
        [(i + j + torch.arange(4.0)).tanh()[:, k] * e for k in (0, 1)], 1
    ),
    "maps": lambda i, j, e: torch.stack(
        [F.linear(torch.cat([i, j], -1)[:, k], torch.arange(24.0).view(3, 8)) for k in (0, 1)], 1
    ),
}


@pytest.mark.usefixtures("no_rows")
@pytest.mark.parametrize("name", TOWERS)
def test_towers(name, x, edge_index):
    function = TOWERS[name]
    doubles = Towers(lambda i, j, e: in_doubles(function, i, j, e))
    assert not fallbacks(compared(doubles, (x / 9, edge_index, of_edges(edge_index, 4))))


def in_doubles(function, *given):
    torch.set_default_dtype(torch.float64)
    try:
        return function(*given)
    finally:
        torch.set_default_dtype(torch.float32)


OTHER_TOWERS = {
    "other steps": lambda i, j, e: torch.stack([i[:, 0] + e, j[:, 1] - e], 1),
    "another dimension": lambda i, j, e: torch.stack([i[:, 0] + e, j[:, 1] + e], 2).transpose(1, 2),
    "a range": lambda i, j, e: (i + j)[:, 0:2] * 2.0,
    "of a sum": lambda i, j, e: (
        (i.unsqueeze(1) * j.unsqueeze(1) * e[:, :1].view(-1, 1, 1, 1)).sum(1)[:, 0] + e
    ),
    "of a view": lambda i, j, e: (j * e[:, :1].view(-1, 1, 1)).view(-1, 4, 2)[:, 3],
    "written to": lambda i, j, e: (lambda m: (m[:, 0].mul_(2), m)[1])((i + j) * 1.5),
    "written to before": lambda i, j, e: (lambda m, part: (m.mul_(2), j[:, 0] * part * e)[1])(
        *(lambda m: (m, m[:, 1]))((i + j) * 1.5)
    ),
    "written to after": lambda i, j, e: (lambda m, part: (m.mul_(2), part * e)[1])(
        *(lambda m: (m, m[:, 1]))(i * j + 1)
    ),
}


@pytest.mark.parametrize("name", OTHER_TOWERS)
def test_other_functions_of_towers_gather_rows(name, x, edge_index):
    compared(Towers(OTHER_TOWERS[name]), (x / 9, edge_index, of_edges(edge_index, 4)))


def test_heads(x, edge_index):
    class Heads(Message):
        def __init__(self):
            super().__init__(lambda i, j, e: (i + j).relu() * e.unsqueeze(-1) + 1, node_dim=0)

        def forward(self, x, edge_index, e):
            return self.propagate(edge_index, x=x.view(-1, 2, 4), e=e)

    assert not fallbacks(compared(Heads(), (x, edge_index, of_edges(edge_index, 2))))


def test_float32_and_autocast(x, edge_index):
    layer = pyg.GINEConv(nn.Linear(8, 5))
    given = (x.float(), edge_index, of_edges(edge_index, 8).float())
    ours = copy.deepcopy(layer)
    accelerate(ours)
    torch.testing.assert_close(ours(*given), layer(*given), rtol=1e-5, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        for each in (ours, pyg.CGConv(8)):
            theirs = copy.deepcopy(each)
            accelerate(each)
            out, right = (
                each(*given[:2], *given[2:][: each is ours]),
                theirs(*given[:2], *given[2:][: each is ours]),
            )
            assert out.dtype == right.dtype
            torch.testing.assert_close(out, right, rtol=0.05, atol=0.05)


def test_a_backward_pass_under_autocast(x, edge_index):
    """Gradients are added up in their own type, as PyG's scatters."""
    layer, e = Message(lambda i, j, e: (j + e).tanh()), of_edges(edge_index, 8)
    found = []
    for _ in range(2):
        leaf, values = x.float().requires_grad_(), e.float().requires_grad_()
        out = layer(leaf, edge_index, values).sin().sum()
        with torch.autocast("cpu", torch.bfloat16):
            out.backward()
        found.append([leaf.grad, values.grad])
        accelerate(layer)
    for mine, right in zip(*found, strict=True):
        assert distance(mine, right) < 1e-5


def test_second_derivatives(x, edge_index):
    e = of_edges(edge_index, 8)
    found = []
    layer = Message(STEPS["functions"])
    for _ in range(2):
        leaf, weight = x.clone().requires_grad_(), e.clone().requires_grad_()
        out = layer(leaf, edge_index, weight)
        first = torch.autograd.grad(out.sin().sum(), [leaf, weight], create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), [leaf, weight]))
        accelerate(layer)
    for mine, right in zip(*found, strict=True):
        assert distance(mine, right) < 1e-10
