"""Messages in chunks: PyG's results, never a row for every edge, and what is not cut."""

import copy
import math
import random
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pyg_scale.nn import accelerate, chunks, fallbacks
from pyg_scale.testing import graphs
from tests.nn.oracle import distance, run

CHANNELS = 6


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(chunks, "ELEMENTS", 300)
    monkeypatch.setattr(chunks, "LEAST", 4)


@pytest.fixture
def edge_index():
    return graphs.hostile().edge_index


@pytest.fixture
def x():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(100, CHANNELS, generator=generator, dtype=torch.float64)


class Difference(pyg.MessagePassing):
    """A message of both ends, which needs rows."""

    def __init__(self, aggr="sum", **kwargs):
        super().__init__(aggr=aggr, **kwargs)
        self.nn = nn.Sequential(nn.Linear(CHANNELS, 9), nn.ReLU(inplace=True), nn.Linear(9, 4))
        self.double()

    def forward(self, x, edge_index, *rest):
        return self.propagate(edge_index, x=x, size=None)

    def message(self, x_i, x_j):
        return self.nn(x_j - x_i).tanh() * torch.cat([x_i, x_j], dim=-1)[:, :4]


def compared(theirs, arguments, reason=None, tolerance=1e-11):
    """The accelerated copy, whose results and gradients were PyG's; cut if there is no reason."""
    ours = copy.deepcopy(theirs)
    accelerate(ours)
    torch.manual_seed(2)
    out, grads = run(theirs, arguments, {})
    torch.manual_seed(2)
    out_ours, grads_ours = run(ours, arguments, {})
    assert distance(out_ours, out) < tolerance
    floor = max(float(g.norm()) for g in grads if g is not None) / 10
    for ours_, theirs_ in zip(grads_ours, grads, strict=True):
        assert distance(ours_, theirs_, floor) < tolerance
    found = [why for reasons in fallbacks(ours).values() for why in reasons]
    assert not found if reason is None else any(reason in why for why in found), found
    return ours


AGGREGATIONS = ["sum", "mean", "max", "mul", "std", "softmax", "powermean", ["sum", "var"]]


@pytest.mark.parametrize("aggr", AGGREGATIONS)
@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
def test_results_are_those_of_pyg(x, edge_index, aggr, flow):
    layer = Difference(aggr, flow=flow)
    powers = "powermean" in aggr  # of negative messages, which are no numbers
    compared(layer, (x, edge_index), tolerance=float("inf") if powers else 1e-9)


def test_parameters_of_an_aggregation_get_gradients(x, edge_index):
    compared(Difference(pyg.aggr.SoftmaxAggregation(learn=True)), (x, edge_index), tolerance=1e-9)


def test_graphs_of_any_form(x, edge_index):
    by_destination = edge_index[:, edge_index[1].argsort(stable=True)]
    into_few = torch.stack([edge_index[0], edge_index[1] % 3])
    into_others = torch.stack([edge_index[0], edge_index[1] % 3 + 50])
    for edges in (by_destination, into_few, into_others, edge_index.clamp(max=90)):
        compared(Difference(), (x, edges))
    narrow = Difference().float()
    compared(narrow, (x.float(), edge_index), tolerance=1e-5)


class Largest(TorchDispatchMode):
    """The largest tensor that any function makes."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(each, torch.Tensor):
                self.numel = max(self.numel, each.numel())
        return out


def test_there_is_never_a_row_for_every_edge(edge_index):
    edges = torch.randint(100, (2, 4000), generator=torch.Generator().manual_seed(5))
    x = torch.randn(100, CHANNELS, dtype=torch.float64)
    layer = Difference()
    sizes = []
    for _ in range(2):
        with Largest() as largest:
            run(layer, (x, edges), {})
        sizes.append(largest.numel)
        accelerate(layer)
    assert sizes[0] >= 4000 * CHANNELS
    assert sizes[1] <= 2 * 4000  # the edges themselves
    assert not fallbacks(layer)


def test_random_numbers_are_drawn_again(x, edge_index):
    class Dropped(Difference):
        def message(self, x_i, x_j):
            return F.dropout(x_j - 2 * x_i, 0.5, self.training)

    layer = Dropped()
    accelerate(layer)
    outs = []
    for _ in range(2):
        torch.manual_seed(3)
        leaf = x.clone().requires_grad_()
        out = layer(leaf, edge_index)
        before = torch.get_rng_state()
        (grad,) = torch.autograd.grad(out, leaf, torch.ones_like(out))
        assert torch.equal(torch.get_rng_state(), before)
        # The layer is linear: the gradient along x is the result, if the same numbers were dropped.
        torch.testing.assert_close((grad * leaf).sum(), out.sum())
        outs.append(out)
    assert torch.equal(*outs)
    assert distance(outs[0], layer(x, edge_index)) > 0.1
    assert not fallbacks(layer)


class Scaled(Difference):
    """A message that depends on what its layer keeps; ``kept`` is what ``forward`` sets."""

    def __init__(self, message, **kept):
        super().__init__()
        self.of, self.kept, self.states = message, 1.0, [1.0]
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, CHANNELS, dtype=torch.float64))
        self.register_buffer("still", torch.ones(CHANNELS, dtype=torch.float64))
        self.norm, self.drop = nn.BatchNorm1d(CHANNELS).double(), nn.Dropout(0.5)
        self.unused = [nn.Linear(2, 2)]
        for name, value in kept.items():
            setattr(self, name, value)

    def forward(self, x, edge_index, kept=None):
        if kept is not None:
            self.kept = kept
            self.states[0] = kept
        return super().forward(x, edge_index)

    def message(self, x_i, x_j):
        return self.of(self, F.layer_norm(x_i - 2 * x_j, x_i.shape[-1:]) * self.scale)


def both(layer):
    """PyG's layer, and an accelerated copy."""
    ours = copy.deepcopy(layer)
    accelerate(ours)
    return layer, ours


def assert_same(results):
    for theirs, ours in zip(*results, strict=True):
        assert distance(ours, theirs) < 1e-10


SHARED = {
    "weight": lambda layer, rows: rows * F.dropout(layer.scale, 0.5, layer.training),
    "uniform": lambda layer, rows: rows * torch.rand(CHANNELS, dtype=rows.dtype),
    "like": lambda layer, rows: rows * torch.rand_like(layer.still),
    "permuted": lambda layer, rows: rows[:, torch.randperm(CHANNELS)] + rows,
    "both": lambda layer, rows: F.dropout(rows, 0.0) * torch.randn(1, dtype=rows.dtype),
    "python": lambda layer, rows: rows * random.random(),
    "numpy": lambda layer, rows: rows * float(np.random.rand()),
    "own": lambda layer, rows: rows * layer.own.random(),
    "of torch": lambda layer, rows: rows * torch.rand(1, generator=layer.own).double(),
}


@pytest.mark.parametrize("name", SHARED)
def test_random_numbers_that_edges_share_are_drawn_once(x, edge_index, name):
    results = []
    for layer in (Difference(), None):
        torch.manual_seed(3), random.seed(3), np.random.seed(3)
        own = torch.Generator().manual_seed(3) if name == "of torch" else random.Random(3)
        layer = Scaled(SHARED[name], own=own)
        if results:
            accelerate(layer)
        leaf = x.clone().requires_grad_()
        out = layer(leaf, edge_index)
        drawn = torch.rand(1), torch.tensor(random.random()), torch.tensor(np.random.rand())
        grads = torch.autograd.grad(out.square().sum(), [leaf, layer.scale])
        results.append((out, *drawn, *grads))
    assert_same(results)
    (reason,) = fallbacks(layer)[""]
    assert "random numbers" in reason


@pytest.mark.parametrize("kept", ["kept", "states"])
def test_gradients_are_those_of_the_layer_as_it_was_called(x, edge_index, kept):
    def message(layer, rows):
        return rows * (layer.kept if kept == "kept" else layer.states[0])

    results = []
    for layer in both(Scaled(message)):
        leaf = x.clone().requires_grad_()
        out = layer(leaf, edge_index, 2.0)
        layer(leaf, edge_index, 5.0)
        results.append((out, *torch.autograd.grad(out.square().sum(), [leaf, layer.scale])))
    assert_same(results)
    assert not fallbacks(layer) and chunks.is_cut(layer)


@pytest.mark.parametrize("module", [False, True])
def test_evaluation_between_a_call_and_its_gradients(x, edge_index, module):
    def message(layer, rows):
        return layer.drop(rows) if module else F.dropout(rows, 0.5, layer.training)

    layer = Scaled(message)
    accelerate(layer)
    out = layer(x, edge_index)
    layer.eval()
    with torch.no_grad():
        layer(x, edge_index)
    (grad,) = torch.autograd.grad(out.sum(), layer.scale)
    # The result is linear in the scale.
    torch.testing.assert_close((grad * layer.scale).sum(), out.sum())
    assert not fallbacks(layer) and chunks.is_cut(layer)


def test_changes_in_place_of_what_a_message_read_are_refused(x, edge_index):
    layer = Scaled(lambda layer, rows: rows * layer.still)
    accelerate(layer)
    out = layer(x, edge_index)
    layer.norm(x)  # changes buffers that the message does not read
    out.sum().backward(retain_graph=True)
    layer.still.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_hooks_on_parameters_see_whole_gradients(x, edge_index):
    results = []
    for layer in both(Scaled(lambda layer, rows: rows)):
        layer.scale.register_hook(lambda grad: 2 * grad)
        out = layer(x, edge_index)
        out.square().sum().backward()
        results.append((out, layer.scale.grad))
    assert_same(results)
    assert not fallbacks(layer)


TURNED = {
    "norm": (lambda layer, rows: layer.norm(rows) if layer.on else rows, "add_"),
    "noise": (lambda layer, rows: rows * torch.rand(1).double() if layer.on else rows, "random"),
    "gate": (lambda layer, rows: rows * torch.sigmoid(layer.gate), "neither an argument nor"),
    "film": (lambda layer, rows: rows * layer.gate, "neither an argument nor"),
    "buffer": (lambda layer, rows: rows * layer.still, "neither an argument nor"),
}


@pytest.mark.parametrize("name", TURNED)
def test_a_layer_is_watched_again_when_what_it_keeps_changes(x, edge_index, name):
    message, reason = TURNED[name]
    gate = torch.full((CHANNELS,), 0.5, dtype=torch.float64)
    results = []
    for layer in both(Scaled(message, on=False, gate=gate)):
        layer(x, edge_index)
        assert chunks.is_cut(layer) == bool(results) and not fallbacks(layer)
        layer.on, layer.gate = True, gate.clone().requires_grad_()
        if name == "buffer":
            layer.still = layer.gate
        torch.manual_seed(3)
        out = layer(x, edge_index)
        wanted = [layer.scale, layer.gate] if "argument" in reason else [layer.scale]
        grads = torch.autograd.grad(out.square().sum(), wanted)
        results.append((out, layer.norm.running_mean, *grads))
    assert_same(results)
    (found,) = fallbacks(layer)[""]
    assert reason in found


def test_a_layer_that_comes_to_need_rows_is_cut(x, edge_index):
    """And its gradients are the same; before, its messages were sums of steps."""

    class Turned(Difference):
        on = False

        def message(self, x_i, x_j):
            rows = torch.relu(x_i - x_j)
            return F.layer_norm(rows, rows.shape[-1:]) if self.on else rows

    results = []
    for layer in both(Turned()):
        layer(x, edge_index)
        layer.on = True
        layer(x, edge_index)
        results.append(run(layer, (x, edge_index), {})[1][:1])
    assert_same(results)
    assert chunks.is_cut(layer)


def test_what_messages_add_to_a_list_is_of_all_edges(x, edge_index):
    def message(layer, rows):
        layer.states.append(rows.shape)
        return rows

    results = both(Scaled(message))
    for layer in results:
        layer(x, edge_index)
    assert results[0].states == results[1].states
    assert "keeps something" in next(iter(fallbacks(layer)[""]))


def test_second_derivatives(x, edge_index):
    layer, grads = Difference(), []
    for _ in range(2):
        leaf = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(layer(leaf, edge_index).sum(), leaf, create_graph=True)
        second = torch.autograd.grad(first.square().sum(), [leaf, layer.nn[0].weight])
        grads.append(second)
        accelerate(layer)
    for ours, theirs in zip(grads[1], grads[0], strict=True):
        assert distance(ours, theirs) < 1e-10
    assert not fallbacks(layer)


def test_edge_features_get_gradients_under_autocast(x, edge_index):
    layer = pyg.GINEConv(nn.Linear(CHANNELS, 3), edge_dim=2)
    features = torch.randn(edge_index.size(1), 2, generator=torch.Generator().manual_seed(4))
    results = []
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            results.append(run(layer, (x.float(), edge_index, features), {}))
        accelerate(layer)
    assert results[0][0].dtype == results[1][0].dtype
    assert distance(results[1][0], results[0][0]) < 0.02
    for ours, theirs in zip(results[1][1], results[0][1], strict=True):
        assert distance(ours, theirs) < 0.02
    assert not fallbacks(layer)


NOT_BY_ROW = {
    "mean": lambda layer, x_i, x_j: x_i + x_j - (x_i + x_j).mean(0),
    "mean of all": lambda layer, x_i, x_j: (x_i + x_j) * (x_i - x_j).mean(),
    "order": lambda layer, x_i, x_j: (x_i + x_j).flip(0),
    "number": lambda layer, x_i, x_j: (x_i + x_j) * torch.arange(x_j.size(0)).view(-1, 1),
    "softmax": lambda layer, x_i, x_j: F.softmax(x_i + x_j, dim=0),
    "branch": lambda layer, x_i, x_j: x_i + x_j if float((x_i * 2 + x_j).max()) > 0 else x_j,
    "product": lambda layer, x_i, x_j: (x_i + x_j) @ (x_i + x_j).t() @ (x_i + x_j),
    "shift": lambda layer, x_i, x_j: (x_i + x_j)[1:].sum(0) + (x_i + x_j),
    "reshape": lambda layer, x_i, x_j: (x_i + x_j).t().reshape(x_j.shape),
    "share": lambda layer, x_i, x_j: torch.cos(x_i + x_j) / x_j.size(0),
    "factor": lambda layer, x_i, x_j: torch.cos(x_i + x_j) * (1.0 / len(x_j)),
    "logarithm": lambda layer, x_i, x_j: torch.cos(x_i + x_j) + math.log(x_j.numel()),
}


@pytest.mark.parametrize("name", NOT_BY_ROW)
def test_functions_of_several_edges_are_not_cut(x, edge_index, name):
    class Mine(Difference):
        def message(self, x_i, x_j):
            return NOT_BY_ROW[name](self, x_i, x_j)

    compared(Mine(), (x, edge_index), reason="")


WRITTEN = {
    "all of it": lambda x_j, e: F.elu(x_j, inplace=True),
    "a view": lambda x_j, e: F.elu(x_j.view(-1, 2, CHANNELS // 2), inplace=True),
    "columns": lambda x_j, e: F.elu(x_j[:, 1:3], inplace=True),
    "edges": lambda x_j, e: F.elu(e.view(-1), inplace=True),
    "what no dropout leaves": lambda x_j, e: F.elu(F.dropout(e, training=False), inplace=True),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_messages_that_change_an_argument_are_not_cut(x, edge_index, name):
    """A chunk computed again would change it again."""

    class Changing(Difference):  # PyG has one propagate for all classes of a name
        def forward(self, x, edge_index, edge_attr):
            return self.propagate(edge_index, x=x, edge_attr=edge_attr * 1, size=None)

        def message(self, x_i, x_j, edge_attr):
            WRITTEN[name](x_j, edge_attr)
            return torch.cos(x_i + x_j) + edge_attr

    edge_attr = torch.linspace(-2, 2, edge_index.size(1), dtype=torch.float64).view(-1, 1)
    compared(Changing(), (x, edge_index, edge_attr), reason="rows of all edges, for elu")


def test_the_number_of_edges_is_seen_if_the_first_node_has_many(x):
    """As in a dense graph: all edges that are watched are of one destination."""
    edge_index = torch.stack([torch.randint(40, (200,)), torch.arange(200) // 100])

    class Mine(Difference):
        def message(self, x_i, x_j):
            return torch.cos(x_i + x_j) / torch.numel(input=x_j)

    compared(Mine(), (x[:40], edge_index), reason="the number of edges")


def test_the_number_of_edges_may_be_a_size(x, edge_index):
    """As most layers of several heads ask for it; their messages do not change with it."""

    class Mine(Difference):
        def message(self, x_i, x_j):
            heads = torch.cos(x_i - x_j).view(x_j.size(0), 2, -1)
            return (heads * 2).view(len(x_j), -1)

    compared(Mine(), (x, edge_index))


def test_batch_norm_sees_all_edges_once(x, edge_index):
    layer = Difference()
    layer.nn[1] = nn.BatchNorm1d(9).double()
    ours = compared(layer, (x, edge_index), reason="for add_")
    assert distance(ours.nn[1].running_mean, layer.nn[1].running_mean) < 1e-12
    assert int(ours.nn[1].num_batches_tracked) == 1


def test_what_a_layer_keeps_is_of_all_edges(x, edge_index):
    class Keeping(Difference):
        def message(self, x_i, x_j):
            self.kept = nn.functional.layer_norm(x_i + x_j, x_i.shape[-1:])
            return self.kept

    ours = compared(Keeping(), (x, edge_index), reason="keeps something")
    assert ours.kept.size(0) == edge_index.size(1)


def test_tensors_that_are_no_arguments_get_gradients(x, edge_index):
    class Hidden(Difference):
        def forward(self, x, edge_index):
            self.scale = x.sum(0).sigmoid()
            return super().forward(x, edge_index)

        def message(self, x_i, x_j):
            return nn.functional.layer_norm(x_i + x_j, x_i.shape[-1:]) * self.scale

    layer = Hidden()
    compared(layer, (x, edge_index), reason="neither an argument nor a parameter")


class Live(TorchDispatchMode):
    """The largest number of bytes of all tensors that were made and live at once."""

    def __init__(self, given):
        super().__init__()
        self.peak, self.live, self.given = 0, {}, {each.untyped_storage()._cdata for each in given}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, torch.Tensor):
                storage = each.untyped_storage()
                if storage._cdata not in self.live and storage._cdata not in self.given:
                    self.live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.live = {k: known for k, known in self.live.items() if not known[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.live.values()))
        return out


def mlp(*sizes):
    layers = [nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in pairwise(sizes)]
    return nn.Sequential(*layers[:-1], layers[-1][0])


PER_EDGE = {
    "pointnet": (lambda: pyg.PointNetConv(mlp(67, 64, 64)), lambda x, e: (x, x[:, :3], e)),
    "edge": (lambda: pyg.EdgeConv(mlp(128, 64, 64)), lambda x, e: (x, e)),
    "nn": (
        lambda: pyg.NNConv(8, 8, mlp(4, 16, 64)),
        lambda x, e: (x[:, :8], e, x[e[0], :4]),
    ),
}


@pytest.mark.parametrize("name", PER_EDGE)
def test_live_tensors_are_a_third_of_those_of_pyg(name, monkeypatch):
    """Forward and backward, of layers with a network for every edge; 100 chunks."""
    make, inputs = PER_EDGE[name]
    generator = torch.Generator().manual_seed(5)
    edge_index = torch.randint(300, (2, 20_000), generator=generator)
    given = inputs(torch.randn(300, 64, generator=generator), edge_index)
    given = [each.contiguous().requires_grad_(each.is_floating_point()) for each in given]
    monkeypatch.setattr(chunks, "ELEMENTS", 20_000 * 64 // 100)
    monkeypatch.setattr(chunks, "LEAST", 64)  # of rows as wide as the network makes them
    layer, peaks = make(), []
    for _ in range(2):
        with Live([*given, *layer.parameters()]) as live:
            layer(*given).square().sum().backward()
        peaks.append(live.peak)
        accelerate(layer)
    assert chunks.is_cut(layer) and not fallbacks(layer)
    assert peaks[0] > 20_000 * 64 * 4 and 3 * peaks[1] <= peaks[0], peaks


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_hooks_on_modules_see_all_edges(x, edge_index, kind):
    layer, seen = Difference(), []
    plain = copy.deepcopy(layer)
    accelerate(plain)
    plain(x, edge_index)
    assert chunks.is_cut(plain)

    def hook(module, *rest):
        seen.append(rest[-1][0].size(0) if isinstance(rest[-1], tuple) else rest[-1].size(0))

    for each in (layer, plain):
        getattr(each.nn[2], f"register_{kind}_hook")(hook)
    run(plain, (x, edge_index), {})
    assert "hook" in next(iter(fallbacks(plain)[""]))
    compared(layer, (x, edge_index), reason="hook")
    assert seen == [edge_index.size(1)] * 3


def test_a_layer_is_watched_again_when_its_modules_change(x, edge_index):
    layer = Difference()
    accelerate(layer)
    layer(x, edge_index)
    assert not fallbacks(layer)
    layer.nn[1] = nn.BatchNorm1d(9).double()
    layer(x, edge_index)
    assert "for add_" in next(iter(fallbacks(layer)[""]))


def test_small_graphs_are_not_cut(x, edge_index, monkeypatch):
    monkeypatch.setattr(chunks, "ELEMENTS", 10_000)
    compared(Difference(), (x, edge_index), reason="rows of features gathered for relu")
