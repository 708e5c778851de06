"""Small calls: rows are added edge by edge, or a few edges grouped in one op; others are PyG's."""

import copy
import sys
from collections import Counter

import pytest
import torch
import torch_geometric.nn as pyg

from pyg_scale import nn
from pyg_scale.nn import FusedConv, accelerate, attention, fallbacks, restore
from pyg_scale.nn import small as small_calls
from pyg_scale.nn.check import convs
from pyg_scale.nn.conv import gat_conv, gatv2_conv, transformer_conv
from pyg_scale.nn.conv import traced as conv_traced
from pyg_scale.ops import colptr
from tests.nn.test_devices import LAYERS

SMALL = {"": {"small input": 1}}


@pytest.fixture(autouse=True)
def as_measured(fused, monkeypatch):
    """Here, small graphs are left to PyG."""
    monkeypatch.setattr(FusedConv, "min_work", None)


@pytest.fixture
def without_small_path(monkeypatch):
    """Layers that leave all small inputs to PyG, as others' layers do."""
    for layer in (nn.SAGEConv, nn.GCNConv):
        monkeypatch.setattr(layer, "fused_small", None)


def edges(num_edges, seed=0):
    return torch.randint(60, (2, num_edges), generator=torch.Generator().manual_seed(seed))


def features(channels=16):
    return torch.randn(60, channels, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", [name for name in LAYERS if name != "sage max"])
def test_no_layer_leaves_a_small_graph_to_pyg(name, monkeypatch):
    monkeypatch.setenv("PYG_SCALE_KERNELS", "require")
    torch.manual_seed(0)
    layer, x, edge_index = LAYERS[name]().eval(), features(6), edges(300)
    more = (torch.arange(300) % 3,) if name == "rgcn" else ()
    out = layer(x, edge_index, *more)
    assert not fallbacks(layer)
    theirs = type(layer).replaces.forward(layer, x, edge_index, *more)
    torch.testing.assert_close(out, theirs, rtol=1e-4, atol=1e-5)
    layer.min_work = 0
    torch.testing.assert_close(layer(x, edge_index, *more), out, rtol=1e-4, atol=1e-5)
    assert not fallbacks(layer)


BY_EDGE = {
    "gcn": (lambda: pyg.GCNConv(16, 8), True),
    "gcn, kept": (lambda: pyg.GCNConv(16, 8, cached=True), False),
    "gin": (lambda: pyg.GINConv(torch.nn.Linear(16, 8)), True),
    "gin, max": (lambda: pyg.GINConv(torch.nn.Linear(16, 8), aggr="max"), False),
    "sum": (lambda: pyg.SimpleConv(), True),
    "sum, several": (lambda: pyg.SimpleConv(aggr=["sum", "max"]), False),
}


@pytest.mark.parametrize("name", BY_EDGE)
def test_sums_are_added_up_edge_by_edge_for_longer(name, monkeypatch):
    """What is not covered is fused from the border on, not left to PyG."""
    make, covered = BY_EDGE[name]
    theirs, taken = make(), []
    layer = copy.deepcopy(theirs)
    accelerate(layer)
    monkeypatch.setattr(type(layer), "crossover", (1, 1))
    monkeypatch.setattr(type(layer), "by_edge", (10_000, 10_000))
    plain = small_calls.edge_sum
    monkeypatch.setattr(
        small_calls, "edge_sum", lambda *given, **more: taken.append(1) or plain(*given, **more)
    )
    for size, by_edge in ((90, True), (5000, False)):
        taken.clear()
        edge_index = edges(size)
        for each in (theirs, layer):
            each.__dict__.pop("_cached_edge_index", None)
            each._cached_edge_index = None
        out = layer(features(), edge_index)
        assert bool(taken) is (by_edge and covered)
        assert not fallbacks(layer)
        torch.testing.assert_close(out, theirs(features(), edge_index), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("without_small_path")
def test_the_border_is_edges_times_channels(monkeypatch):
    monkeypatch.setattr(nn.SAGEConv, "crossover", (1000, 520))
    layer, x = nn.SAGEConv(16, 4), features()

    def left_to_pyg(edge_index, x=x):
        nn.forget_fallbacks()
        layer(x, edge_index)
        return fallbacks(layer) == SMALL

    assert left_to_pyg(edges(99)) and not left_to_pyg(edges(100))  # 10 of 16 channels count
    assert left_to_pyg((edges(100)), (x, x)) is False
    for size, small in ((39, True), (40, False)):  # 13 of 16, in a batch
        batch = edges(size)
        batch = batch[:, batch[1].argsort()].contiguous()
        assert left_to_pyg(batch)
        count = torch.bincount(batch[1], minlength=60)
        colptr.remember(batch, torch.cat([count.new_zeros(1), count.cumsum(0)]))
        assert left_to_pyg(batch) is small
    layer.min_work = 100
    assert left_to_pyg(edges(9)) and not left_to_pyg(edges(10))
    monkeypatch.setattr(nn.SAGEConv, "crossover", (0, 0))
    del layer.min_work
    assert not left_to_pyg(edges(1), x) and not left_to_pyg(edges(0), x)


@pytest.mark.usefixtures("without_small_path")
def test_earlier_calls_do_not_count(monkeypatch):
    """Or a run that is resumed would go on with other bits."""
    layer, other, edge_index = nn.GCNConv(16, 4), nn.GCNConv(16, 4), edges(300)
    other.min_work = 0
    first = layer(features(), edge_index)
    other(features(), edge_index)
    assert torch.equal(layer(features(), edge_index), first)
    assert fallbacks(layer) == {"": {"small input": 2}} and not fallbacks(other)


def test_edges_whose_gradients_pyg_gets_wrong_are_not_left_to_it():
    layer = nn.SAGEConv(16, 4)
    layer(features(), edges(300).int())
    assert not fallbacks(layer)


@pytest.mark.usefixtures("without_small_path")
def test_a_model_says_from_where_on_it_is_fused():
    model = torch.nn.ModuleList([pyg.SAGEConv(16, 4), pyg.GCNConv(16, 4)])
    report = accelerate(model)
    for layer in model:
        layer(features(), edges(300))
    assert report.fallbacks() == {"0": {"small input": 1}, "1": {"small input": 1}}
    assert str(report).count("small input (1 calls)") == 2
    nn.forget_fallbacks()
    report = accelerate(model, min_work=0)
    for layer in copy.deepcopy(model):
        layer(features(), edges(300))
        assert not fallbacks(layer)
    restore(model)
    assert "min_work" not in vars(model[0])
    report = accelerate(model, min_work=0)
    report.restore()
    assert "min_work" not in vars(model[0])
    with pytest.raises(ValueError, match="edges times channels"):
        accelerate(model, min_work=-1)


@pytest.mark.usefixtures("without_small_path")
def test_the_doctor_takes_it_for_no_fault():
    nn.SAGEConv(16, 4)(features(), edges(300))
    check = convs()
    assert check.ok is not False
    assert "SAGEConv: small input" in check.detail


# Edge by edge ##############################################################################

COVERED = {
    "sage": lambda: pyg.SAGEConv(6, 5),
    "sage, sum": lambda: pyg.SAGEConv(6, 5, aggr="sum", root_weight=False, normalize=True),
    "graph": lambda: pyg.GraphConv(6, 5),
    "graph, mean": lambda: pyg.GraphConv(6, 5, aggr="mean"),
    "gin": lambda: pyg.GINConv(torch.nn.Linear(6, 5), train_eps=True),
    "gcn": lambda: pyg.GCNConv(6, 5),
    "gcn, no bias": lambda: pyg.GCNConv(6, 5, bias=False),
    "gcn, no loops": lambda: pyg.GCNConv(6, 5, add_self_loops=False),
    "gcn, improved": lambda: pyg.GCNConv(6, 5, improved=True),
    "gcn, as it is": lambda: pyg.GCNConv(6, 5, normalize=False),
    "sage, projected": lambda: pyg.SAGEConv(6, 5, project=True, bias=False),
    "gin, fixed": lambda: pyg.GINConv(torch.nn.Linear(6, 5), eps=0.3),
}
EXTREME = {
    "sage, max": lambda: pyg.SAGEConv(6, 5, aggr="max"),
    "graph, min": lambda: pyg.GraphConv(6, 5, aggr="min"),
    "gin, max": lambda: pyg.GINConv(torch.nn.Linear(6, 5), aggr="max"),
}
WEIGHTED = {
    "graph, weights": lambda: pyg.GraphConv(6, 5),
    "graph, mean, weights": lambda: pyg.GraphConv(6, 5, aggr="mean"),
    "gcn, weights": lambda: pyg.GCNConv(6, 5),
    "gcn, weights, no loops": lambda: pyg.GCNConv(6, 5, add_self_loops=False),
    "gcn, improved": lambda: pyg.GCNConv(6, 5, improved=True),
    "gcn, weights as they are": lambda: pyg.GCNConv(6, 5, normalize=False),
}
TYPED = {
    "rgcn": lambda: pyg.RGCNConv(6, 5, 3),
    "rgcn, sum": lambda: pyg.RGCNConv(6, 5, 3, aggr="sum", num_bases=2, root_weight=False),
    "rgcn, few edges": lambda: pyg.RGCNConv(6, 5, 40, bias=False),
    "rgcn, max": lambda: pyg.RGCNConv(6, 5, 3, aggr="max"),
    "rgcn, blocks": lambda: pyg.RGCNConv(6, 4, 3, num_blocks=2),
}
ATTENTION = {
    "gat": lambda: pyg.GATConv(6, 5),
    "gat, heads": lambda: pyg.GATConv(6, 5, 3, residual=True),
    "gat, averaged": lambda: pyg.GATConv(6, 5, 2, concat=False, add_self_loops=False),
    "gat, two maps": lambda: pyg.GATConv((6, 6), 5, 2, bias=False),
    "gatv2": lambda: pyg.GATv2Conv(6, 5),
    "gatv2, heads": lambda: pyg.GATv2Conv(6, 8, 2, concat=False, residual=True),
    "gatv2, shared": lambda: pyg.GATv2Conv(6, 5, 2, share_weights=True, add_self_loops=False),
    "transformer": lambda: pyg.TransformerConv(6, 5, 2),
    "transformer, beta": lambda: pyg.TransformerConv(6, 8, 2, concat=False, beta=True),
}


def grown(layer, x, edge_index, create_graph=False, weight=None):
    """Output, and gradients of the input, of weights and of all parameters."""
    x = x.clone().requires_grad_()
    if weight is None:
        more = (torch.arange(edge_index.size(1)) % 3,) if "RGCN" in type(layer).__name__ else ()
    else:
        more = (weight,)
    out = layer(x, edge_index, *more)
    rate = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    inputs = [x, *layer.parameters()]
    inputs += [each for each in more if each.requires_grad]
    grads = torch.autograd.grad((out.sin() * rate).sum(), inputs, create_graph=create_graph)
    if create_graph:
        return torch.autograd.grad(sum(g.square().sum() for g in grads), inputs)
    return [out, *grads]


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("num_edges", [0, 1, 300])
@pytest.mark.parametrize("name", COVERED | TYPED | ATTENTION | EXTREME)
def test_results_and_gradients_are_those_of_pyg(name, num_edges, create_graph):
    torch.manual_seed(0)
    theirs = (COVERED | TYPED | ATTENTION | EXTREME)[name]().double()
    ours = copy.deepcopy(theirs)
    accelerate(ours)
    x, edge_index = features(6).double(), edges(num_edges)  # with self-loops and edges twice
    expected = grown(theirs, x, edge_index, create_graph)
    found = grown(ours, x, edge_index, create_graph)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert not fallbacks(ours)


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("name", WEIGHTED)
def test_weights_of_edges(name, learned, create_graph):
    torch.manual_seed(0)
    theirs = WEIGHTED[name]().double()
    ours = copy.deepcopy(theirs)
    accelerate(ours)
    x, edge_index = features(6).double(), edges(300)
    edge_index = edge_index[:, (edge_index[0] != edge_index[1]) | (edge_index[0] % 9 == 0)]
    weight = torch.rand(edge_index.size(1), dtype=torch.float64).requires_grad_(learned)
    expected = grown(theirs, x, edge_index, create_graph, weight)
    found = grown(ours, x, edge_index, create_graph, weight)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert not fallbacks(ours)
    for wrong in (weight.float(), weight.half()):  # PyG promotes types
        torch.testing.assert_close(
            ours(x, edge_index, wrong), theirs(x, edge_index, wrong), rtol=1e-6, atol=1e-6
        )


@pytest.mark.parametrize("name", ["sage", "graph", "gin", "sage, projected", *EXTREME])
def test_two_sets_of_nodes(name):
    torch.manual_seed(0)
    theirs = (COVERED | EXTREME)[name]()
    ours = copy.deepcopy(theirs)
    accelerate(ours)
    src, dst, edge_index = features(6), features(6)[:20], edges(300) % torch.tensor([[60], [20]])
    grads = []
    for layer in (ours, theirs):
        out = layer((src, dst), edge_index)
        grads.append([out, *torch.autograd.grad(out.square().sum(), list(layer.parameters()))])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert grads[0][0].shape == (20, 5)
    for pair, size in (((src, dst), (60, 20)), ((src, None), (60, 20)), ((src, None), None)):
        out = ours(pair, edge_index, size=size)
        torch.testing.assert_close(out, theirs(pair, edge_index, size=size), rtol=1e-4, atol=1e-5)
    assert not fallbacks(ours)
    for size in ((61, 20), (60, 19)):
        with pytest.raises(ValueError) as found:
            ours((src, dst), edge_index, size=size)
        with pytest.raises(ValueError) as expected:
            theirs((src, dst), edge_index, size=size)
        assert str(found.value) == str(expected.value)
    assert fallbacks(ours) == {"": {"small input": 2}}


@pytest.mark.parametrize("name", ["sage", "sage, max", "graph", "gin", "gcn", "gcn, no loops"])
def test_what_is_not_covered_is_left_to_pyg(name):
    """Each of them gives what PyG gives, and is counted."""
    torch.manual_seed(0)
    theirs = (COVERED | EXTREME)[name]()
    ours = copy.deepcopy(theirs)
    accelerate(ours)
    x, edge_index = features(6), edges(300)
    for layer, given in ((ours, x.half()), (ours, x.bfloat16())):
        half = copy.deepcopy(layer).to(given.dtype)
        out = half(given, edge_index)
        assert torch.equal(out, copy.deepcopy(theirs).to(given.dtype)(given, edge_index))
        assert fallbacks(half) == SMALL
    back = copy.deepcopy(ours)
    back.flow = "target_to_source"
    torch.testing.assert_close(back(x, edge_index), theirs(x, edge_index.flip(0)))
    assert fallbacks(back) == SMALL
    seen = []
    handle = ours.register_message_forward_hook(lambda *a: seen.append(1))
    ours(x, edge_index)
    handle.remove()
    assert seen and fallbacks(ours) == {"": {"message hook": 1}}


@pytest.mark.parametrize("options", [{"cached": True}, {"aggr": "max"}])
def test_other_rules_of_gcn_are_left_to_pyg(options):
    theirs = pyg.GCNConv(6, 5, **options)
    ours = copy.deepcopy(theirs)
    accelerate(ours)
    expected = theirs(features(6), edges(300))
    assert torch.equal(ours(features(6), edges(300)), expected)
    assert fallbacks(ours) == SMALL


def test_hooks_and_autocast_are_seen_by_the_one_function_of_a_layer():
    torch.manual_seed(0)
    theirs = pyg.SAGEConv(6, 5)
    ours, x, edge_index = copy.deepcopy(theirs), features(6), edges(300)
    accelerate(ours)
    with torch.autocast("cpu", torch.bfloat16):
        out, expected = ours(x, edge_index), theirs(x, edge_index)
    assert out.dtype == expected.dtype == torch.bfloat16
    seen = []
    for linear in (ours.lin_l, ours.lin_r):
        linear.register_forward_hook(lambda *a: seen.append(a[2].shape))
    ours(x, edge_index)
    assert seen == [(60, 5), (60, 5)] and not fallbacks(ours)


@pytest.mark.parametrize("name", COVERED | {"gat": 0, "transformer": 0})
def test_edges_to_nodes_that_do_not_exist(name):
    """The error is PyG's."""
    layer = (COVERED | ATTENTION)[name]()
    accelerate(layer)
    for wrong in (60, -61, 2**40):
        for edge_index in (torch.tensor([[0, 1], [2, wrong]]), torch.tensor([[2, wrong], [0, 1]])):
            with pytest.raises((IndexError, RuntimeError, ValueError)) as found:
                layer(features(6), edge_index)
            with pytest.raises(type(found.value)) as expected:
                type(layer).replaces.forward(layer, features(6), edge_index)
            assert str(found.value) == str(expected.value)


# Attention #################################################################################


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_has_the_same_bits_with_kept_groups(name, dropout, monkeypatch):
    """No call crosses a border where bits change."""
    torch.manual_seed(0)
    layer = ATTENTION[name]()
    layer.dropout = dropout
    accelerate(layer)
    for x, edge_index in ((features(6), edges(300)), (features(6), edges(300)[:, :1])):
        found = []
        for few in (attention._FEW, 0):
            monkeypatch.setattr(attention, "_FEW", few)
            torch.manual_seed(1)
            found.append(grown(layer, x, edge_index))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert not fallbacks(layer)


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_from_one_set_of_nodes_to_another(name, monkeypatch):
    torch.manual_seed(0)
    theirs = ATTENTION[name]()
    ours = copy.deepcopy(theirs)
    accelerate(ours)
    x, edge_index = (features(6), features(6)[:20]), edges(300) % torch.tensor([[60], [20]])
    seen = []
    plain = attention.is_plain
    for module in (gat_conv, gatv2_conv, transformer_conv):
        monkeypatch.setattr(module, "is_plain", lambda *a: seen.append(plain(*a)) or seen[-1])
    out = ours(x, edge_index)
    torch.testing.assert_close(out, theirs(x, edge_index), rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        assert torch.equal(ours(x, edge_index), out)
    assert seen == [True, True] and not fallbacks(ours)


@pytest.mark.parametrize("name", ["gat", "gatv2", "transformer"])
def test_attention_takes_the_checked_path_for_the_rest(name):
    torch.manual_seed(0)
    theirs = ATTENTION[name]()
    ours = copy.deepcopy(theirs)
    accelerate(ours)
    x, edge_index = features(6), edges(300)
    assert attention.is_plain(ours, x, x, edge_index)
    for change in ({"flow": "target_to_source"}, {"aggr_module": pyg.aggr.MaxAggregation()}):
        other = copy.deepcopy(ours)
        for key, value in change.items():
            setattr(other, key, value)
        assert not attention.is_plain(other, x, x, edge_index)
    hooked = copy.deepcopy(ours)
    hooked.aggr_module.register_forward_hook(lambda *a: None)
    assert not attention.is_plain(hooked, x, x, edge_index)
    for given in (x.half(), x[0], x.int(), None):
        assert not attention.is_plain(ours, given, given, edge_index)
    for given in (edge_index.int(), edge_index[0], edges(5000), edge_index.tolist()):
        assert not attention.is_plain(ours, x, x, given)
    with torch.autocast("cpu", torch.bfloat16):
        assert not attention.is_plain(ours, x, x, edge_index)
        expected = theirs(x, edge_index)
        torch.testing.assert_close(ours(x, edge_index), expected, rtol=3e-2, atol=3e-2)
    out, (_, weights) = ours(x, edge_index, return_attention_weights=True)
    expected, (_, of_pyg) = theirs(x, edge_index, return_attention_weights=True)
    torch.testing.assert_close(weights, of_pyg, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(out, ours(x, edge_index), rtol=0, atol=0)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("conv", [pyg.GATConv, pyg.GATv2Conv])
def test_a_few_edges_with_features_and_loops(conv):
    theirs = conv(6, 5, edge_dim=3)
    ours = copy.deepcopy(theirs)
    accelerate(ours)
    edge_index, of_edges = edges(300), torch.rand(300, 3)
    out = ours(features(6), edge_index, of_edges)
    expected = theirs(features(6), edge_index, of_edges)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    assert not fallbacks(ours)


# Any other layer ###########################################################################

SUMS = {
    "sg": (lambda: pyg.SGConv(6, 5, K=2), None),
    "ssg": (lambda: pyg.SSGConv(6, 5, alpha=0.1, K=2), None),
    "appnp": (lambda: pyg.APPNP(2, 0.1), None),
    "tag": (lambda: pyg.TAGConv(6, 5, K=2), None),
    "simple": (lambda: pyg.SimpleConv("mean"), None),
    "simple, max": (lambda: pyg.SimpleConv("max"), None),
    "lg, weights": (lambda: pyg.LGConv(), 2),
}


@pytest.mark.parametrize("num_edges", [0, 200, 2000])
@pytest.mark.parametrize("name", SUMS)
def test_layers_whose_code_adds_weighted_rows(name, num_edges):
    torch.manual_seed(0)
    make, seed = SUMS[name]
    theirs = make().double()
    ours, x, edge_index = copy.deepcopy(theirs), features(6).double(), edges(num_edges)
    accelerate(ours)
    weight = None if seed is None else torch.rand(num_edges, dtype=torch.float64).requires_grad_()
    expected = grown(theirs, x, edge_index, False, weight)
    for a, b in zip(grown(ours, x, edge_index, False, weight), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert not fallbacks(ours)


class Doubled(pyg.MessagePassing):
    """Its message is not one that is known, but for a constant."""

    def forward(self, x, edge_index, edge_weight=None):
        return self.propagate(edge_index, x=x, edge_weight=edge_weight)

    def message(self, x_j, edge_weight):
        return edge_weight.view(-1, 2)[:, :1] * x_j


class Updated(pyg.LGConv):
    def update(self, out):
        return out + 1


def test_code_that_is_not_known_runs_as_it_is():
    x, edge_index, weight = features(6), edges(100), torch.rand(200)
    for theirs, given in ((Doubled(), (weight,)), (Updated(), ()), (pyg.SGConv(6, 5), ())):
        ours = copy.deepcopy(theirs)
        accelerate(ours)
        if isinstance(theirs, pyg.SGConv):
            ours.message = theirs.message = lambda x_j, edge_weight: x_j * 3
        torch.testing.assert_close(ours(x, edge_index, *given), theirs(x, edge_index, *given))
        assert not fallbacks(ours)
    plain = pyg.SGConv(6, 5)
    accelerate(plain)
    with pytest.raises(AttributeError, match="view"):  # PyG's error
        plain.propagate(edge_index, x=x, edge_weight=None)
    handle = plain.register_message_forward_hook(lambda *a: None)
    plain(x, edge_index)
    handle.remove()
    assert fallbacks(plain) == {"": {"message hook": 1}}


# Cost ######################################################################################

GATHERED = {  # layers whose small inputs are gathered, and the arguments after the edges
    "gine": (lambda: pyg.GINEConv(torch.nn.Linear(6, 5)), lambda n: (torch.ones(n, 6),)),
    "edge": (lambda: pyg.EdgeConv(torch.nn.Linear(12, 5)), lambda n: ()),
    "pna": (
        lambda: pyg.PNAConv(6, 5, ["mean"], ["identity"], torch.tensor([1, 2])),
        lambda n: (),
    ),
    "resgated": (lambda: pyg.ResGatedGraphConv(6, 5), lambda n: ()),
    "several": (lambda: pyg.SimpleConv(aggr=["mean", "max"]), lambda n: ()),
    "eg": (lambda: pyg.EGConv(6, 8, ["symnorm", "max", "std"], 4), lambda n: ()),
    "fast rgcn": (lambda: pyg.FastRGCNConv(6, 5, 3), lambda n: (torch.arange(n) % 3,)),
}


def entered(layer, *given):
    """The names of functions, of Python and of C, that a call enters."""
    names = []

    def look(frame, event, arg):
        if event == "call":
            names.append(frame.f_code.co_name)
        elif event == "c_call":
            names.append(arg.__name__)

    sys.setprofile(look)
    try:
        layer(*given)
    finally:
        sys.setprofile(None)
    return names[:-1]  # without setprofile


@pytest.mark.parametrize("num_edges", [200, 5000])
@pytest.mark.parametrize("name", GATHERED)
def test_a_few_edges_are_gathered_with_less_python_than_pyg(name, num_edges):
    make, more = GATHERED[name]
    theirs = make()
    ours, given = copy.deepcopy(theirs), (features(6), edges(num_edges), *more(num_edges))
    accelerate(ours)
    for layer in (ours, theirs, ours, theirs):
        layer(*given)  # caches of torch and PyG are filled
    mine, pygs = Counter(entered(ours, *given)), Counter(entered(theirs, *given))
    assert mine.total() < pygs.total()
    looked = 256 * num_edges >= ours.crossover[0]  # a look at the number of edges comes first
    assert ("_widest" in mine) == looked and (looked or num_edges == 200 or name == "gine")
    assert not fallbacks(ours)


@pytest.mark.parametrize("name", ["sage", "graph", "gcn", "gin"])
def test_a_small_step_enters_fewer_functions_than_pyg(name):
    theirs = COVERED[name]()
    ours, x, edge_index = copy.deepcopy(theirs), features(6), edges(200)
    accelerate(ours)

    def step(layer):
        layer(x, edge_index).sum().backward()

    for layer in (ours, theirs):
        step(layer)
    assert len(entered(step, ours)) < len(entered(step, theirs))


def test_a_gradient_of_attention_weights_alone():
    layer = nn.GATConv(6, 5, 2)
    x = features(6).requires_grad_()
    _, (_, weights) = layer(x, edges(300), return_attention_weights=True)
    (found,) = torch.autograd.grad(weights.square().sum(), x)
    of_pyg = type(layer).replaces.forward(layer, x, edges(300), return_attention_weights=True)
    (expected,) = torch.autograd.grad(of_pyg[1][1].square().sum(), x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_types_that_are_not_relations():
    layer = nn.RGCNConv(6, 5, 3)
    for wrong in (3, -1):
        kinds = torch.zeros(300, dtype=torch.int64)
        kinds[7] = wrong
        with pytest.raises(RuntimeError, match="out of bounds"):  # PyG's
            layer(features(6), edges(300), kinds)
    assert fallbacks(layer) == {"": {"edge_type has relations that do not exist": 2}}


class Renamed(pyg.MessagePassing):
    """A message of weighted rows whose weights are called otherwise."""

    def forward(self, x, edge_index, more):
        return self.propagate(edge_index, x=x, more=more)

    def message(self, x_j, more):
        return more.view(-1, 1) * x_j


class Ends(pyg.MessagePassing):
    """The same code, but the weights are features of sources or the destinations themselves."""

    def forward(self, x, edge_index, more):
        return self.propagate(edge_index, x=x, more=more)

    def message(self, x_j, more_j):
        return x_j if more_j is None else more_j.view(-1, 1) * x_j


class Numbered(pyg.MessagePassing):
    def forward(self, x, edge_index, more):
        return self.propagate(edge_index, x=x)

    def message(self, x_j, index):
        return x_j if index is None else index.view(-1, 1) * x_j


@pytest.mark.parametrize("cls", [Renamed, Ends, Numbered])
def test_only_weights_of_edges_are_taken_for_weights(cls, monkeypatch):
    theirs, ours, edge_index = cls(), cls(), edges(300)
    accelerate(ours)
    x = features(6).double()
    more = torch.rand((60, 1) if cls is Ends else 300, dtype=torch.float64)
    expected = theirs(x, edge_index, more)
    torch.testing.assert_close(ours(x, edge_index, more), expected, rtol=1e-12, atol=1e-12)
    monkeypatch.setattr(conv_traced, "propagate_gathered", None)
    if cls is Renamed:
        torch.testing.assert_close(ours(x, edge_index, more), expected, rtol=1e-12, atol=1e-12)
        assert not fallbacks(ours)
