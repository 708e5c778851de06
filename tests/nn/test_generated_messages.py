"""Messages that nobody wrote: random programs, whose results and gradients are those of PyG."""

import copy
import random

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import nn
from torch_geometric.utils import scatter, softmax

from pyg_scale.nn import FusedConv, accelerate, chunks, fallbacks
from pyg_scale.testing import graphs
from tests.nn.oracle import distance

# Arguments and results are rows "R" [num_edges, 8], heads "H" [num_edges, 2, 4], a number for each
# head "T" [num_edges, 2], a column "S" [num_edges, 1], and numbers "N" [num_edges].
ARGUMENTS = {"R": ["x_j", "x_i", "edge_attr"], "H": ["h_j", "h_i"], "T": [], "S": [], "N": ["w"]}
OF_ANY = (
    *("torch.relu({0})", "{0}.tanh()", "F.softplus({0})", "-{0}", "{0}.sigmoid()", "{0}.abs()"),
    *("torch.exp({0} * 0.1)", "({0} * {0} + 0.5).sqrt()", "F.leaky_relu({0}, 0.2)", "F.silu({0})"),
    *("F.gelu({0})", "{0} ** 2", "2 * {0}", "{0} + 0", "1 - {0}", "{0} / 2", "{0} * self.scale"),
    *("1 / ({0}.abs() + 1)", "{0}.clamp(min=-1)", "F.dropout({0}, 0.5, training=False)"),
    *("{0}.contiguous()", "{0}.clone()", "torch.where({0} > 0, {0}, 0.1 * {0})", "{0}.detach()"),
    *("{0} - {0}.mean(-1, keepdim=True)", "{0}.softmax(-1)", "{0} * torch.tensor(2)"),
)
OF_TWO = (
    *("{0} + {1}", "{0} - {1}", "{0} * {1}", "{0} / ({1}.abs() + 1)", "torch.maximum({0}, {1})"),
    *("torch.minimum({0}, {1})", "torch.add({0}, {1}, alpha=0.5)", "{0}.sigmoid() * {1}"),
    *("torch.lerp({0}, {1}, 0.3)", "torch.where({0} > {1}, {0}, {1})"),
)
STEPS = [  # the kind of the result, those of the operands, and functions
    *((kind, kind, OF_ANY) for kind in "RHTS"),
    *((kind, kind * 2, OF_TWO) for kind in "RHTSN"),
    ("R", "R", ("{0} * self.p", "self.p - {0}", "{0} @ self.W", "self.lin({0})", "self.mlp({0})")),
    ("R", "R", ("softmax({0}, index, num_nodes=size_i)", "{0} * t.view(-1, 1)")),
    ("R", "R", ("scatter({0}, index, 0, size_i, reduce='mean')[index]", "{0} + self.Mr[t]")),
    ("R", "R", ("torch.bmm({0}.unsqueeze(1), self.M[t]).squeeze(1)",)),
    ("R", "R", ("torch.einsum('ec,ecd->ed', {0}, self.M.index_select(0, t))",)),
    ("R", "RR", ("self.lin2(torch.cat([{0}, {1}], dim=-1))", "torch.cat([{0}, {1}], -1)[:, 4:12]")),
    ("R", "RR", ("torch.stack([{0}, {1}], 1).sum(1)", "torch.stack([{0}, {1}], 1)[:, 1]")),
    ("R", "RR", ("torch.cat([{0}[:, 2:], {1}[..., :2]], -1)", "F.glu(torch.cat([{0}, {1}], -1))")),
    ("R", "RR", ("(torch.cat([{0}, {1}], -1) * w.view(-1, 1)).tanh().narrow(1, 5, 8)",)),
    ("R", "RR", ("torch.cat([{0}.chunk(2, -1)[1], {1}.split([3, 5], -1)[1]], -1)[:, 1:]",)),
    ("R", "RS", ("{0} * {1}", "{1} - {0}", "torch.maximum({0}, {1})", "{0} / ({1}.abs() + 1)")),
    ("R", "RN", ("{0} * {1}.view(-1, 1)", "{1}.unsqueeze(-1) * {0}", "{0} + {1}[:, None]")),
    ("R", "H", ("{0}.view(-1, 8)", "{0}.flatten(1)", "torch.cat([{0}[:, 0], {0}[:, 1]], -1)")),
    ("H", "R", ("{0}.view(-1, 2, 4)", "{0}.reshape(-1, 2, 4)")),
    ("H", "R", ("{0}.view(-1, 4, 2).transpose(1, 2)",)),
    ("H", "H", ("{0} * self.P", "{0} + self.P[0]", "{0} @ self.D")),
    ("H", "H", ("torch.bmm({0}, self.Md[t])", "torch.einsum('ehc,ecd->ehd', {0}, self.Md[t])")),
    ("H", "H", ("{0}.transpose(1, 2).reshape(-1, 2, 4)",)),
    ("H", "HH", ("torch.stack([{0}[:, 1], {1}[:, 0]], 1)", "{0} * {1}[:, :1]")),
    ("H", "HT", ("{0} * {1}.unsqueeze(-1)", "{1}.view(-1, 2, 1) * {0}", "{0} + {1}[..., None]")),
    ("H", "HN", ("{0} * {1}.view(-1, 1, 1)",)),
    ("T", "H", ("{0}.sum(-1)", "({0} * self.P).sum(dim=-1)", "{0}[:, :, 0]", "({0} + 1).mean(-1)")),
    ("T", "HH", ("({0} * {1}).sum(-1)", "(({0} + {1}).tanh() * self.P).sum(-1)")),
    ("T", "HH", ("({0} - {1}).square().mean(-1)", "({0}[:, :, :2] * {1}[:, :, 1:3]).sum(-1)")),
    ("H", "H", ("torch.cat([{0}[:, 1:], {0}[:, :1]], 1)", "{0}.select(1, 1).unsqueeze(1) - {0}")),
    ("H", "H", ("torch.cat([{0}[:, :, 2:], {0}[:, :, :2]], -1)", "{0}[:, :, 1:2] * {0}")),
    ("T", "T", ("softmax({0}, index, num_nodes=size_i)", "{0} * self.P[:, 0]")),
    ("T", "TS", ("{0} * {1}", "{0} + {1}")),
    ("S", "R", ("{0}.sum(-1, keepdim=True)", "{0}[:, 0:1]", "{0} @ self.p.view(-1, 1)")),
    ("S", "RR", ("({0} * {1}).sum(-1, keepdim=True)", "({0} - {1}).norm(dim=-1, keepdim=True)")),
    ("S", "N", ("{0}.view(-1, 1)", "{0}.unsqueeze(-1)")),
    ("N", "R", ("{0}.sum(-1)", "{0} @ self.p", "{0}[:, 0]", "({0} + self.p).sum(-1)")),
    ("N", "RR", ("({0} * {1}).sum(-1)", "torch.einsum('ec,ec->e', {0}, {1})")),
    ("N", "T", ("{0}.sum(-1)", "{0}[:, 1]")),
    ("N", "N", ("torch.relu({0})", "softmax({0}, index, num_nodes=size_i)", "1 - {0}")),
]
WRITES = {
    "R": (
        "{0} += {1}",
        "{0}[:, 0] = 0",
        "{0}[:, 2:6].mul_(2)",
        "F.relu({0}, inplace=True)",
        "{0}.copy_({1})",
    ),
    "H": ("{0} *= 2", "{0}[:, 0].add_(1)", "{0} += {1}"),
    "T": ("{0}[:, 0] = 0",),
    "S": ("{0}.neg_()",),
}
AGGREGATIONS = ("sum", "sum", "mean", "max", "softmax", "mul", "powermean", ["sum", "min"])
FEATURES = (("x", "h"), ("x", "h"), ("(x, x * 2)", "(h, h)"), ("x", "x.view(-1, 2, 4)"))

# PyG has one propagate for all classes of a name, so they have the same arguments.
LAYER = """
class Generated(Weights):
    def __init__(self):
        super().__init__(aggr={aggr!r}, node_dim=0, flow={flow!r})

    def forward(self, x, h, edge_index, edge_attr, w, t):
        return self.propagate(edge_index, x={x}, h={h}, edge_attr=edge_attr, w=w, t=t, size=None)

    def message(self, x_j, x_i, h_j, h_i, edge_attr, w, t, index, size_i):
        {body}
"""


class Weights(pyg.MessagePassing):
    """The parameters that a program may name."""

    def __init__(self, **options):
        super().__init__(**options)
        generator = torch.Generator().manual_seed(5)
        shapes = {"p": (8,), "P": (2, 4), "W": (8, 8), "D": (4, 4), "scale": (1,)}
        shapes |= {"M": (3, 8, 8), "Mr": (3, 8), "Md": (3, 4, 4)}
        for name, shape in shapes.items():
            values = torch.randn(shape, generator=generator)
            self.register_parameter(name, nn.Parameter(values / 2))
        self.lin, self.lin2 = nn.Linear(8, 8), nn.Linear(16, 8)
        self.mlp = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


def program(draw):
    """The lines of a message: steps on arguments and on earlier results, and a few writes."""
    have = {kind: [*names] for kind, names in ARGUMENTS.items()}
    lines = []
    while len(lines) < draw.randint(1, 7):
        if draw.random() < 0.08:
            kind = draw.choice([kind for kind in WRITES if have[kind]])
            lines.append(draw.choice(WRITES[kind]).format(*draw.choices(have[kind], k=2)))
            continue
        ready = [step for step in STEPS if all(have[kind] for kind in step[1])]
        result, kinds, functions = draw.choice(ready)
        near = [have[k][-1] if draw.random() < 0.6 else draw.choice(have[k]) for k in kinds]
        lines.append(f"v{len(lines)} = {draw.choice(functions).format(*near)}")
        have[result].append(lines[-1].split()[0])
    last = draw.choice("RH")
    factor = {"R": "{0} * {1}.view(-1, 1)", "H": "{0} * {1}.view(-1, 1, 1)"}[last]
    return [*lines, "return " + factor.format(have[last][-1], have["N"][-1])]


def layer_of(seed):
    draw = random.Random(seed)
    (x, h), aggr = draw.choice(FEATURES), draw.choice(AGGREGATIONS)
    flow = draw.choice(["source_to_target", "target_to_source"])
    body = "\n        ".join(program(draw))
    text = LAYER.format(aggr=aggr, flow=flow, x=x, h=h, body=body)
    names = {"__name__": __name__, "Weights": Weights, "torch": torch, "F": F}
    names |= {"softmax": softmax, "scatter": scatter}
    exec(text, names)
    torch.manual_seed(seed)
    return names["Generated"]().double(), text


def edges_of(seed):
    """A hostile graph, one in order, one of as many edges as nodes, and tiny ones."""
    generator = torch.Generator().manual_seed(seed)
    hostile = graphs.hostile().edge_index
    others = [hostile, hostile, hostile[:, hostile[1].argsort(stable=True)]]
    others += [torch.randint(100, (2, size), generator=generator) for size in (100, seed % 4)]
    return others[seed % 5]


def arguments_of(seed):
    """Leaves with gradients, and copies of them, which a message may change."""
    generator, edge_index = torch.Generator().manual_seed(seed), edges_of(seed)
    size = edge_index.size(1)
    shapes = (100, 8), (100, 2, 4), (size, 8), (size,)
    leaves = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    leaves = [each.requires_grad_() for each in leaves]
    x, h, edge_attr, w = (each.clone() for each in leaves)
    return leaves, [x, h, edge_index, edge_attr, w, torch.randint(3, (size,), generator=generator)]


def gradients(layer, leaves, out):
    rate = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out).cos()
    wanted = [*leaves, *layer.parameters()]
    return torch.autograd.grad((out * rate).sum(), wanted, allow_unused=True)


def assert_alike(seed):
    """Return the accelerated layer of a program; ``None`` if PyG cannot run it."""
    theirs, text = layer_of(seed)
    ours = copy.deepcopy(theirs)
    accelerate(ours)
    (leaves, right), (my_leaves, found) = arguments_of(seed), arguments_of(seed)
    try:
        right.append(theirs(*right))
    except RuntimeError as error:
        with pytest.raises(type(error)):
            ours(*found)
        return None
    found.append(ours(*found))
    try:
        right += gradients(theirs, leaves, right[-1])
    except RuntimeError:  # as a message changed what gradients need: of ours they may need less
        return None
    found += gradients(ours, my_leaves, found[-1])
    for mine, plain in zip(found, right, strict=True):
        if mine is None or plain is None:
            assert distance(mine, plain) == 0, text
            continue
        assert torch.equal(mine.isnan(), plain.isnan()), text
        clean = [each.detach().nan_to_num(0, 0, 0) for each in (mine, plain)]
        assert distance(*clean, floor=1e-3) < 1e-8, text
    return ours


@pytest.mark.matrix(10)
@pytest.mark.parametrize("first", range(0, 500, 50))
@pytest.mark.parametrize("path", ["fused", "chunks", "small"])
def test_results_and_gradients_are_those_of_pyg(path, first, monkeypatch):
    if path == "chunks":
        monkeypatch.setattr(chunks, "ELEMENTS", 300)
        monkeypatch.setattr(chunks, "LEAST", 4)
    if path == "small":
        monkeypatch.setattr(FusedConv, "min_work", None)
    layers = [assert_alike(seed) for seed in range(first, first + 50)]
    fused = [each for each in layers if each is not None and not fallbacks(each)]
    assert len(fused) >= (5 if path == "fused" else 20)
