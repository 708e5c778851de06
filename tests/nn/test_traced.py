"""Layers whose propagate is fused: the user's own, subclasses, and what their messages may do."""

import copy
import io

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn

from pyg_scale.nn import FusedConv, accelerate, by_ends, fallbacks, restore
from pyg_scale.nn.conv import traced as conv_traced
from pyg_scale.nn.conv.traced import TracedConv, traced
from pyg_scale.nn.edges import gather
from pyg_scale.testing import graphs
from tests.nn.oracle import Square, distance, run

AGGREGATIONS = ["sum", "mean", "max", "min", "mul", "var", "std", "softmax", "powermean", "median"]


@pytest.fixture
def edge_index():
    return graphs.hostile().edge_index


@pytest.fixture
def x():
    generator = torch.Generator().manual_seed(1)
    return torch.rand(100, 8, generator=generator, dtype=torch.float64) + 0.5


@pytest.fixture
def weight(edge_index):
    generator = torch.Generator().manual_seed(2)
    return torch.rand(edge_index.size(1), generator=generator, dtype=torch.float64)


def compared(theirs, arguments, tolerance=1e-11):
    """The accelerated copy of a layer, after its results and gradients were those of the layer."""
    ours = copy.deepcopy(theirs)
    accelerate(ours)
    assert isinstance(ours, TracedConv)
    out, grads = run(theirs, arguments, {})
    out_ours, grads_ours = run(ours, arguments, {})
    assert out_ours.dtype == out.dtype
    assert distance(out_ours, out) < tolerance
    floor = max(float(g.norm()) for g in grads if g is not None) / 10
    for ours_, theirs_ in zip(grads_ours, grads, strict=True):
        assert distance(ours_, theirs_, floor) < tolerance
    return ours


class Own(pyg.MessagePassing):
    """A layer of the user: heads, both ends, numbers, and an update with another argument."""

    def __init__(self, aggr="sum", **kwargs):
        super().__init__(aggr=aggr, node_dim=0, **kwargs)
        self.lin = nn.Linear(8, 8).double()

    def forward(self, x, edge_index, weight):
        heads = self.lin(x).view(-1, 2, 4)
        out = self.propagate(edge_index, x=(heads, heads), scale=x[:, :1], w=weight, root=x)
        return out.view(-1, 8)

    def message(self, x_j, scale_i, w):
        return -x_j * scale_i.unsqueeze(-1) * w.view(-1, 1, 1) / 2

    def update(self, inputs, root):
        return inputs + root.view(-1, 2, 4)


class Doubled(pyg.SAGEConv):
    """A subclass of a layer that has a replacement."""

    def message(self, x_j):
        return 2 * x_j


class Changing(pyg.SimpleConv):
    """A message that changes its rows in place."""

    def message(self, x_j, edge_weight):
        x_j.mul_(edge_weight.view(-1, 1))
        x_j[:, 0] = 0
        return x_j * 3


class Custom(pyg.SimpleConv):
    """A message with a function that torch's functions do not show."""

    def message(self, x_j, edge_weight):
        return Square.apply(x_j) * edge_weight.view(-1, 1)


class Scattering(pyg.SimpleConv):
    """A layer with its own aggregation, by PyG's functions and by torch's."""

    def aggregate(self, inputs, index, dim_size):
        from torch_geometric.utils import scatter, softmax

        alpha = softmax(inputs.sum(-1), index, num_nodes=dim_size)
        out = inputs.new_zeros(dim_size, 8).index_add_(0, index, inputs * alpha.unsqueeze(-1))
        most = scatter(inputs * inputs, index, 0, dim_size, reduce="max")
        rows = most.index_select(0, index) * inputs
        return out + scatter(rows, index, 0, dim_size, "mean")


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("aggr", ["sum", "mean", ["sum", "mean"]])
def test_a_layer_of_the_user(x, edge_index, weight, aggr, flow):
    if isinstance(aggr, list):
        theirs = Weighted(aggr=aggr, flow=flow)
    else:
        theirs = Own(aggr, flow=flow)
    ours = compared(theirs, (x, edge_index, weight))
    assert not fallbacks(ours)


class Weighted(pyg.MessagePassing):
    def forward(self, x, edge_index, weight):
        return self.propagate(edge_index, x=x, weight=weight, size=None)

    def message(self, x_j, weight):
        return x_j * weight.unsqueeze(-1)


@pytest.mark.parametrize("aggr", AGGREGATIONS)
def test_aggregations_of_pyg(x, edge_index, weight, aggr):
    ours = compared(Weighted(aggr=aggr), (x, edge_index, weight), 1e-9)
    assert not any("raised" in why for why in fallbacks(ours).get("", {}))


@pytest.mark.parametrize("form", [(-1, 1), (-1, 8), (1,), (8,), ()])
def test_factors_of_any_form(x, edge_index, form):
    class Scaled(Weighted):
        def message(self, x_j, weight):
            return weight * x_j

    size = [edge_index.size(1) if each == -1 else each for each in form]
    factor = torch.rand(size, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    assert not fallbacks(compared(Scaled(), (x, edge_index, factor)))


def test_subclasses_of_layers_with_a_replacement(x, edge_index):
    ours = compared(Doubled(8, 4).double(), (x, edge_index))
    assert isinstance(ours, Doubled) and not fallbacks(ours)


def test_rows_changed_in_place(x, edge_index, weight):
    compared(Changing(), (x, edge_index, weight))


def test_functions_below_torch(x, edge_index, weight):
    ours = compared(Custom(), (x, edge_index, weight))
    (reason,) = fallbacks(ours)[""]
    assert reason == "features of edges are read with gradients disabled"


def test_own_aggregation(x, edge_index, weight):
    compared(Scattering(), (x, edge_index, weight), 1e-10)


@pytest.mark.parametrize("select", [torch.index_select, torch.Tensor.index_select])
def test_rows_that_a_message_selects_itself(x, edge_index, weight, select, monkeypatch):
    """PyG puts a function of its own in the place of ``torch.index_select``."""
    gathered = []
    monkeypatch.setattr(by_ends, "gather", lambda *given: gathered.append(1) or gather(*given))

    class Selecting(Weighted):
        def message(self, x_j, weight, index):
            total = torch.zeros(100, dtype=x_j.dtype).index_add_(0, index, weight)
            return x_j * (weight / select(total, 0, index)).unsqueeze(-1)

    assert not fallbacks(compared(Selecting(), (x, edge_index, weight)))
    assert gathered


def test_types_and_small_graphs(x, edge_index, weight):
    layer = pyg.SGConv(8, 4, K=2)
    compared(layer, (x.float(), edge_index, weight.float()), 1e-5)
    for edges in (edge_index[:, :0], edge_index[:, :1]):
        compared(pyg.SimpleConv(), (x, edges, weight[: edges.size(1)]))
    counts = torch.arange(100).view(-1, 1)
    ours = pyg.SimpleConv()
    expected = ours(counts, edge_index)
    accelerate(ours)
    assert torch.equal(ours(counts, edge_index), expected)


def test_static_graphs(x, edge_index, weight):
    features = torch.stack([x, x.flip(0), x * 2])
    assert not fallbacks(compared(pyg.SimpleConv(), (features, edge_index, weight)))


def test_bipartite(x, edge_index):
    edges = torch.stack([edge_index[0], edge_index[1] % 30])
    assert not fallbacks(compared(pyg.SimpleConv("mean"), ((x, x[:30]), edges)))


def test_errors_are_those_of_pyg(x, edge_index):
    wrong = edge_index.clone()
    wrong[0, 3] = 100
    layer = pyg.SimpleConv()
    accelerate(layer)
    with pytest.raises(IndexError, match="larger than 99"):
        layer(x, wrong)
    assert "do not exist" in next(iter(fallbacks(layer)[""]))
    with pytest.raises(ValueError, match="two-dimensional"):
        layer(x, edge_index[0])


def test_autocast_returns_what_pyg_returns(x, edge_index, weight):
    layer = pyg.SGConv(8, 4)
    layer.lin.weight.data.round_(decimals=2)
    ours = copy.deepcopy(layer)
    accelerate(ours)
    for each in (layer, ours):
        with torch.autocast("cpu", torch.bfloat16):
            hidden = each.propagate(edge_index, x=x.float(), edge_weight=weight.float())
            assert hidden.dtype == torch.float32
    assert not fallbacks(ours)


def test_second_derivatives(x, edge_index, weight):
    grads = []
    layer = pyg.AGNNConv(requires_grad=False)
    for _ in range(2):
        leaf, edges = x.clone().requires_grad_(), edge_index
        (first,) = torch.autograd.grad(layer(leaf, edges).sin().sum(), leaf, create_graph=True)
        grads += torch.autograd.grad(first.square().sum(), leaf)
        accelerate(layer)
    assert distance(grads[1], grads[0]) < 1e-10


def test_what_watches_the_steps_gets_them(x, edge_index, weight):
    theirs = Weighted()
    seen = []
    theirs.register_message_forward_hook(lambda layer, args, out: seen.append(type(out)))
    ours = compared(theirs, (x, edge_index, weight))
    assert fallbacks(ours) == {"": {"message hook": 1}}
    assert seen == [torch.Tensor] * 2


def test_explanations(x, edge_index, weight):
    """Whenever a layer is explained: its mask of edges counts."""
    for switched_first in (True, False):
        layer = Weighted()
        plain = layer(x, edge_index, weight)
        if switched_first:
            report = accelerate(layer)
        layer.explain = True
        layer._edge_mask, layer._apply_sigmoid = torch.zeros(edge_index.size(1)), False
        layer._loop_mask = edge_index[0] != edge_index[1]
        if not switched_first:
            report = accelerate(layer)
            assert report.layers[0].reason == "explain"
        assert float(layer(x, edge_index, weight).abs().max()) == 0
        assert fallbacks(layer) == {"": {"explain": 1}}
        layer.explain = False
        assert distance(layer(x, edge_index, weight), plain) < 1e-12
        assert fallbacks(layer) == {"": {"explain": 1}}
        layer.explain = True
        report.restore()
        assert float(layer(x, edge_index, weight).abs().max()) == 0
        layer.explain = False
        assert torch.equal(layer(x, edge_index, weight), plain)


def test_copies_and_files(x, edge_index, weight):
    layer = Own()
    state, name = list(layer.state_dict()), repr(layer)
    expected = layer(x, edge_index, weight)
    attributes = set(vars(layer))
    report = accelerate(layer)
    assert list(layer.state_dict()) == state and repr(layer) == name
    assert set(vars(layer)) == attributes
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for other in (copy.copy(layer), copy.deepcopy(layer), torch.load(file, weights_only=False)):
        assert type(other) is type(layer) is traced(Own) and isinstance(other, Own)
        assert distance(other(x, edge_index, weight), expected) < 1e-12
        assert not fallbacks(other)
        assert restore(other) == 1 and type(other) is Own
    report.restore()
    assert type(layer) is Own
    assert torch.equal(layer(x, edge_index, weight), expected)


def test_the_class_can_be_used_by_itself(x, edge_index, weight):
    layer = traced(pyg.SGConv)(8, 4, K=2).double()
    theirs = pyg.SGConv(8, 4, K=2).double()
    theirs.load_state_dict(layer.state_dict())
    assert distance(layer(x, edge_index, weight), theirs(x, edge_index, weight)) < 1e-12
    assert issubclass(traced(pyg.SGConv), (FusedConv, pyg.SGConv))


def test_a_propagate_of_the_user_is_left_alone(x, edge_index):
    class Mine(pyg.SimpleConv):
        def propagate(self, edge_index, size=None, **kwargs):
            return kwargs["x"][0] * 7

    layer, other = Mine(), pyg.SimpleConv()
    other.propagate = lambda *args, **kwargs: x
    for each in (layer, other):
        (found,) = accelerate(each).layers
        assert not found.switched and found.reason == "propagate is overridden"
    assert torch.equal(layer(x, edge_index), x * 7)


def test_small_inputs_are_gathered(x, edge_index, weight, monkeypatch):
    monkeypatch.setattr(FusedConv, "min_work", None)
    layer = Weighted()
    expected = layer(x, edge_index, weight)
    accelerate(layer)
    with monkeypatch.context() as patched:
        patched.setattr(conv_traced, "_propagate", None)
        assert distance(layer(x, edge_index, weight), expected) < 1e-12
    accelerate(layer, min_work=0)
    layer(x, edge_index, weight)
    assert not fallbacks(layer)


@pytest.mark.parametrize("aggr", AGGREGATIONS)
def test_aggregations_of_pyg_on_small_inputs(x, edge_index, weight, aggr, monkeypatch):
    monkeypatch.setattr(FusedConv, "min_work", None)
    assert not fallbacks(compared(Weighted(aggr=aggr), (x, edge_index, weight), 1e-9))


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
def test_small_inputs_of_layers_of_the_user(x, edge_index, weight, flow, monkeypatch):
    monkeypatch.setattr(FusedConv, "min_work", None)
    for theirs in (Own(flow=flow), Scattering(flow=flow), Changing(), Custom()):
        given = (x, edge_index[:, :200], weight[:200])
        assert not fallbacks(compared(theirs, given, 1e-10))
    pair = (x, x[:30]), torch.stack([edge_index[0], edge_index[1] % 30])
    assert not fallbacks(compared(pyg.SimpleConv(["mean", "min"]), pair))


def test_small_inputs_with_errors_have_those_of_pyg(x, edge_index, weight, monkeypatch):
    monkeypatch.setattr(FusedConv, "min_work", None)
    theirs = Weighted()
    ours = copy.deepcopy(theirs)
    accelerate(ours)
    for row, node in ((0, 100), (0, -101), (1, 100), (1, -101)):
        wrong = edge_index.clone()
        wrong[row, 3] = node
        for given in ((x, wrong, weight), (x, edge_index[0], weight), (x, edge_index, weight[:3])):
            with pytest.raises((IndexError, RuntimeError, ValueError)) as found:
                ours(*given)
            with pytest.raises(type(found.value)) as expected:
                theirs(*given)
            assert str(found.value) == str(expected.value)


def test_sparse_matrices_take_the_product_of_pyg(x, edge_index):
    layer = pyg.SimpleConv()
    dense = torch.zeros(100, 100, dtype=torch.float64).index_put((*edge_index,), x[0, 0])
    adj_t = dense.t().to_sparse_csr()
    expected = layer(x, adj_t)
    accelerate(layer)
    torch.testing.assert_close(layer(x, adj_t), expected, rtol=1e-14, atol=1e-14)
    assert fallbacks(layer) == {"": {"a sparse matrix": 1}}


def test_compiled_and_scripted_layers_are_those_of_pyg(x, edge_index, weight):
    layer = pyg.SGConv(8, 4, K=2).double()
    expected = layer(x, edge_index, weight)
    accelerate(layer)
    before = fallbacks().get("SGConv", {})
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    assert distance(compiled(x, edge_index, weight), expected) < 1e-12
    reasons = fallbacks()["SGConv"].keys() - before.keys()
    assert reasons == {"torch.compile or a CUDA graph"}
    scripted = torch.jit.script(layer)
    assert distance(scripted(x, edge_index, weight), expected) < 1e-12


class Missing(pyg.MessagePassing):
    """A message asks for features that are not passed."""

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j, norm_i=None):
        return x_j


class Number(pyg.MessagePassing):
    """A message asks for rows of what are no features."""

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x, k=3.0, m=(2.0, None))

    def message(self, x_j, k_j=5.0, m_j=6.0):
        return x_j if k_j is None and m_j is None else x_j * 7


@pytest.mark.parametrize("min_work", [0, None])
def test_arguments_of_nodes_that_are_no_tensors(x, edge_index, min_work, monkeypatch):
    monkeypatch.setattr(FusedConv, "min_work", None)
    theirs, ours = (Number(), Missing()), (Number(), Missing())
    for each in ours:
        accelerate(each, min_work=min_work)
    assert distance(ours[0](x, edge_index), theirs[0](x, edge_index)) < 1e-10
    assert not fallbacks(ours[0])
    for each in (theirs[1], ours[1]):
        with pytest.raises(NameError, match="norm"):
            each(x, edge_index)
