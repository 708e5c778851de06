"""What fused paths do not cover is PyG's, and is said by its name."""

import pytest
import torch
import torch_geometric.nn
from torch import nn
from torch.autograd import forward_ad

import pyg_scale.nn
from pyg_scale.cli.doctor.command import examine
from pyg_scale.nn import (
    GATConv,
    GATv2Conv,
    GCNConv,
    RGCNConv,
    SAGEConv,
    TransformerConv,
    accelerate,
    fallbacks,
    forget_fallbacks,
)
from pyg_scale.testing import graphs
from tests.nn.oracle import distance, pair


@pytest.fixture(autouse=True)
def from_zero():
    forget_fallbacks()


@pytest.fixture
def edge_index():
    return graphs.hostile().edge_index


@pytest.fixture
def x():
    return torch.randn(100, 6, generator=torch.Generator().manual_seed(1))


def reasons(layer):
    return list(fallbacks(layer).get("", {}))


def test_counts_are_by_class_and_by_layer(x, edge_index):
    model = nn.ModuleDict({"one": SAGEConv(6, 4, aggr="median"), "two": SAGEConv(6, 4)})
    for _ in range(3):
        model["one"](x, edge_index)
        model["two"](x, edge_index)
    assert fallbacks() == {"SAGEConv": {"aggr=median": 3}}
    assert fallbacks(model) == {"one": {"aggr=median": 3}}
    forget_fallbacks()
    assert fallbacks() == fallbacks(model) == {}


def test_other_aggregations(x, edge_index):
    for aggr in ("median", "std", "softmax", "mul", ["mean", "std"]):
        torch.manual_seed(0)
        theirs = SAGEConv.replaces(6, 4, aggr=aggr)
        ours = SAGEConv(6, 4, aggr=aggr)
        ours.load_state_dict(theirs.state_dict())
        assert distance(ours(x, edge_index), theirs(x, edge_index)) < 1e-6
        assert reasons(ours) == [f"aggr={ours.aggr}"]
    ours = SAGEConv(6, 4, aggr="lstm")
    with pytest.raises(ValueError, match="not sorted"):
        ours(x, edge_index)


@pytest.mark.parametrize(
    "family", ["propagate", "message", "aggregate", "message_and_aggregate", "edge_update"]
)
@pytest.mark.parametrize("when", ["pre_hook", "hook"])
def test_hooks_between(x, edge_index, family, when):
    layer = GATConv(6, 4)
    register = getattr(layer, f"register_{family}_forward_{when}")
    handle = register(lambda *args: None)
    layer(x, edge_index)
    assert reasons(layer) == [f"{family} hook"]
    handle.remove()
    forget_fallbacks()
    layer(x, edge_index)
    assert reasons(layer) == []


def test_hooks_on_modules_are_called_on_either_path(x, edge_index):
    """A listener sees the same product as with PyG: its place is not changed then."""
    theirs, ours = pair(SAGEConv, lambda cls: cls(6, 2), torch.float32)
    seen = []
    for layer in (theirs, ours):
        layer.lin_l.register_forward_hook(lambda module, args, out: seen.append(args[0]))
        layer.register_forward_hook(lambda module, args, out: seen.append(out))
        layer(x, edge_index)
    assert distance(seen[2], seen[0]) < 1e-5 and distance(seen[3], seen[1]) < 1e-5
    assert reasons(ours) == []


def test_explanations_and_decompositions(x, edge_index):
    layer = GCNConv(6, 4, decomposed_layers=2)
    layer(x, edge_index)
    assert reasons(layer) == ["decomposed_layers"]
    layer = SAGEConv(6, 4)
    layer.explain = True
    layer._edge_mask, layer._apply_sigmoid = torch.zeros(edge_index.size(1)), False
    masked = layer(x, edge_index)
    assert torch.allclose(masked, layer.lin_l.bias + layer.lin_r(x), atol=1e-6)
    assert reasons(layer) == ["explain"]


class Doubled(SAGEConv):
    """Somebody's own messages."""

    def message(self, x_j):
        return 2 * x_j


class Named(SAGEConv):
    """Changes nothing between the edges and the result."""

    def __init__(self, channels):
        super().__init__(channels, channels)


def test_subclasses_that_override_methods_are_obeyed(x, edge_index):
    layer, plain = Doubled(6, 4), SAGEConv(6, 4)
    plain.load_state_dict(layer.state_dict())
    expected = plain.lin_l(2 * _mean(x, edge_index)) + plain.lin_r(x)
    assert distance(layer(x, edge_index), expected) < 1e-5
    assert reasons(layer) == ["message is overridden"]
    own = Named(6)
    own(x, edge_index)
    assert reasons(own) == []


def test_methods_that_an_instance_overrides_are_obeyed(x, edge_index):
    layer = SAGEConv(6, 4)
    layer.update = lambda inputs: inputs * 0
    out = layer(x, edge_index)
    assert torch.allclose(out, layer.lin_l.bias + layer.lin_r(x), atol=1e-6)
    assert reasons(layer) == ["update is overridden"]


def test_inputs_that_are_not_covered(x, edge_index):
    several = torch.stack([x, x + 1])  # static graphs
    for conv, arguments, reason in (
        (GCNConv, (several, edge_index), "features are not of shape [num_nodes, channels]"),
        (GCNConv, (x.to_sparse(), edge_index), "features are sparse"),
        (GCNConv, (x, edge_index, torch.ones(edge_index.size(1)).double()), "edge_weight is"),
        (SAGEConv, (several, edge_index), "features are not of shape [num_nodes, channels]"),
        (GATConv, (x, _adj_t(edge_index)), "attention over a sparse matrix"),
        (GATv2Conv, (x, _adj_t(edge_index)), "attention over a sparse matrix"),
        (TransformerConv, (x, _adj_t(edge_index)), "attention over a sparse matrix"),
    ):
        theirs, ours = pair(conv, lambda cls: cls(6, 4), torch.float32)
        assert distance(ours(*arguments), theirs(*arguments)) < 1e-5
        (found,) = reasons(ours)
        assert found.startswith(reason)


def test_other_flows(x, edge_index):
    for conv in (GATConv, GATv2Conv, TransformerConv):
        theirs, ours = pair(conv, lambda cls: cls(6, 4, flow="target_to_source"), torch.float32)
        assert distance(ours(x, edge_index), theirs(x, edge_index)) < 1e-5
        assert reasons(ours) == ["flow='target_to_source'"]
    theirs, ours = pair(SAGEConv, lambda cls: cls(6, 4, flow="target_to_source"), torch.float32)
    assert distance(ours((x, x + 1), edge_index), theirs((x, x + 1), edge_index)) < 1e-5
    assert reasons(ours) == ["two sets of features with flow='target_to_source'"]


@pytest.mark.parametrize(
    ("conv", "arguments"),
    [
        (GCNConv, ((torch.ones(3, 6), torch.ones(3, 6)), torch.tensor([[0], [1]]))),
        (SAGEConv, (torch.ones(3, 6), torch.tensor([[0.0], [1.0]]))),
        (SAGEConv, (torch.ones(3, 6), torch.tensor([0, 1]))),
        (SAGEConv, (torch.ones(3, 6), torch.tensor([[0], [1], [2]]))),
        (SAGEConv, (torch.ones(3, 6), "edges")),
        (SAGEConv, ((torch.ones(3, 6), torch.ones(4, 6)), torch.tensor([[0], [1]]), (3, 3))),
        (GATConv, (torch.ones(2, 3, 6), torch.tensor([[0], [1]]))),
        (GATv2Conv, ((torch.ones(3, 6), None), torch.tensor([[0], [1]]))),
        (RGCNConv, (torch.ones(3, 6), torch.tensor([[0], [1]]))),
    ],
)
def test_bad_input_raises_what_pyg_raises(conv, arguments):
    build = lambda cls: cls(6, 4, 2) if conv is RGCNConv else cls(6, 4)  # noqa: E731
    theirs, ours = pair(conv, build, torch.float32)
    errors = []
    for layer in (theirs, ours):
        with pytest.raises(Exception) as error:
            layer(*arguments)
        errors.append((error.type, str(error.value)))
    assert errors[0] == errors[1]


def test_relations_that_are_not_there(x, edge_index):
    _, ours = pair(RGCNConv, lambda cls: cls(6, 4, 2), torch.float32)
    with pytest.raises((IndexError, RuntimeError)):
        ours(x, edge_index, torch.full((edge_index.size(1),), 2))
    assert reasons(ours) == ["edge_type has relations that do not exist"]


def test_lazy_channels(x, edge_index):
    for conv in (GCNConv, SAGEConv, GATConv):
        layer = conv(-1, 4)
        layer(x, edge_index)
        theirs, _ = pair(conv, lambda cls: cls(6, 4), torch.float32)
        theirs.load_state_dict(layer.state_dict())
        assert distance(layer(x, edge_index), theirs(x, edge_index)) < 1e-5


def test_changes_in_place_are_seen(x, edge_index):
    layer = SAGEConv(6, 4)
    layer(x, edge_index)
    edge_index[1] = edge_index[1].flip(0)
    assert torch.equal(layer(x, edge_index), layer(x, edge_index.clone()))
    with torch.inference_mode():
        inside = edge_index.clone()
        layer(x, inside)
        inside[0] = inside[0].flip(0)
        assert torch.equal(layer(x, inside), layer(x, inside.clone()))


def test_func_transforms(x, edge_index):
    layer = SAGEConv(6, 4)
    grad = torch.func.grad(lambda value: layer(value, edge_index).sum())(x)
    value = x.clone().requires_grad_()
    layer(value, edge_index).sum().backward()
    assert distance(grad, value.grad) < 1e-5
    assert reasons(layer) == ["torch.func"]


@pytest.mark.parametrize("name", ["GCNConv", "SAGEConv", "GraphConv", "GATConv", "TransformerConv"])
def test_forward_mode(x, edge_index, name):
    torch.manual_seed(0)
    ours, tangents = getattr(pyg_scale.nn, name)(6, 4).requires_grad_(False), []
    theirs = type(ours).replaces(6, 4).requires_grad_(False)
    theirs.load_state_dict(ours.state_dict())
    for layer in (ours, theirs):
        with forward_ad.dual_level():
            out = layer(forward_ad.make_dual(x, torch.ones_like(x)), edge_index)
            tangents.append(forward_ad.unpack_dual(out).tangent)
    assert torch.equal(*tangents)
    assert reasons(ours) == ["forward-mode differentiation"]


def test_traces_do_not_keep_the_edges(x, edge_index):
    layer = SAGEConv(6, 4).eval()
    traced = torch.jit.trace(layer, (x, edge_index), check_trace=False)
    other = edge_index.flip(0)
    assert distance(traced(x, other), layer(x, other)) < 1e-5
    assert reasons(layer) == ["torch.jit.trace"]


@pytest.mark.parametrize("name", ["GCNConv", "SAGEConv", "GINConv", "GraphConv"])
def test_scripts_are_of_the_path_of_pyg(x, edge_index, name):
    layer = getattr(pyg_scale.nn, name)(*((nn.Linear(6, 4),) if name == "GINConv" else (6, 4)))
    assert distance(torch.jit.script(layer)(x, edge_index), layer(x, edge_index)) < 1e-5


def test_scripts_of_relations_and_of_attention(x, edge_index):
    edge_type = torch.arange(edge_index.size(1)) % 3
    for kwargs in ({}, {"num_bases": 2}):
        layer = RGCNConv(6, 4, 3, **kwargs)
        scripted = torch.jit.script(layer)(x, edge_index, edge_type)
        assert distance(scripted, layer(x, edge_index, edge_type)) < 1e-5
    model = nn.ModuleList([pyg_scale.nn.TransformerConv(6, 4), SAGEConv(6, 4)])
    with pytest.raises(NotImplementedError, match=r"TransformerConv.*pyg_scale\.nn\.restore"):
        torch.jit.script(model)
    assert type(model[0]) is pyg_scale.nn.TransformerConv
    pyg_scale.nn.restore(model)
    torch.jit.script(model[0])


def test_doctor_says_what_happened(x, edge_index):
    SAGEConv(6, 4, aggr="median")(x, edge_index)
    check = examine()["checks"]["convs"]
    assert check["ok"] is not False
    assert "SAGEConv: aggr=median (1 calls)" in check["detail"]
    assert "GATv2Conv" in check["detail"]


def _mean(x, edge_index):
    total = torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]])
    count = torch.bincount(edge_index[1], minlength=x.size(0)).clamp(min=1)
    return total / count.unsqueeze(1)


def _adj_t(edge_index):
    values = torch.ones(edge_index.size(1))
    return torch.sparse_coo_tensor(edge_index.flip(0), values, (100, 100)).coalesce()


WRONG = {
    "no features": lambda: (torch_geometric.nn.SAGEConv(4, 3), None, EDGES),
    "no features, traced": lambda: (torch_geometric.nn.SimpleConv(), None, EDGES),
    "one of a pair": lambda: (torch_geometric.nn.GraphConv(4, 3), (X,), EDGES),
    "a list": lambda: (torch_geometric.nn.GCNConv(4, 3), X, EDGES.tolist()),
    "an array": lambda: (torch_geometric.nn.GCNConv(4, 3), X, EDGES.numpy()),
    "channels": lambda: (torch_geometric.nn.RGCNConv(6, 3, 2), X, EDGES, EDGES[0] * 0),
}
X, EDGES = torch.ones(5, 4), torch.tensor([[0, 1, 2], [1, 1, 0]])


@pytest.mark.parametrize("min_work", [0, None])
@pytest.mark.parametrize("name", WRONG)
def test_errors_of_wrong_input_are_those_of_pyg(name, min_work):
    layer, *given = WRONG[name]()
    with pytest.raises(Exception) as expected:
        layer(*given)
    accelerate(layer, min_work=min_work)
    with pytest.raises(type(expected.value)) as found:
        layer(*given)
    assert str(found.value) == str(expected.value)


def test_a_wider_eps_promotes_the_features():
    layer = torch_geometric.nn.GINConv(torch.nn.Linear(4, 3)).double()
    right = layer(X, EDGES)
    for min_work in (0, None):
        accelerate(layer, min_work=min_work)
        torch.testing.assert_close(layer(X, EDGES), right, rtol=1e-12, atol=1e-12)
