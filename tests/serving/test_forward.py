"""Models on neighbourhoods: the same rows as from all of a batch, with less of it computed."""

import copy

import pytest
import torch
from torch_geometric.nn import GAT, GCN, GIN, GraphNorm, GraphSAGE

from pyg_scale.datasets import planted_communities
from pyg_scale.nn import accelerate, restore
from pyg_scale.nn.conv.sage_conv import SAGEConv
from pyg_scale.ops import library
from pyg_scale.serving import Neighborhoods, Predictor
from pyg_scale.serving.forward import of_block, usual_forward

HOPS = [4, 3]
IDS = torch.tensor([3, 400, 77, 3])


@pytest.fixture(scope="module")
def data():
    made = planted_communities(500, 6_000, num_classes=4, num_features=8)
    made.x = made.x.double()
    return made


def made(kind, **options):
    torch.manual_seed(0)
    model = kind(8, 16, out_channels=4, **{"num_layers": 2} | options).double()
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm1d) and module.track_running_stats:
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return model.eval()


BY_HOPS = {
    "sage": (GraphSAGE, {}),
    "sage-max": (GraphSAGE, {"aggr": "max", "normalize": True}),
    "project": (GraphSAGE, {"project": True, "act": "elu"}),
    "gat": (GAT, {"heads": 2}),
    "gatv2": (GAT, {"v2": True, "heads": 2, "residual": True}),
    "batch-norm": (GraphSAGE, {"norm": "batch_norm"}),
    "layer-norm": (
        GraphSAGE,
        {"norm": "layer_norm", "norm_kwargs": {"mode": "node"}, "act_first": True},
    ),
    "one-layer": (GraphSAGE, {"num_layers": 1}),
    "three-layers": (GAT, {"num_layers": 3}),
    "four-layers": (GraphSAGE, {"num_layers": 4}),
}
WHOLE = {
    "gcn": (GCN, {}),
    "gin": (GIN, {}),
    "jumping": (GraphSAGE, {"jk": "cat"}),
    "graph-norm": (GraphSAGE, {"norm": GraphNorm(16)}),
    "layer-norm": (GraphSAGE, {"norm": "layer_norm"}),
    "batch-statistics": (
        GraphSAGE,
        {"norm": "batch_norm", "norm_kwargs": {"track_running_stats": False}},
    ),
    "softmax": (GraphSAGE, {"act": torch.nn.Softmax(dim=0)}),
    "any-act": (GraphSAGE, {"act": lambda x: x - x.mean(0)}),
}


def rows_of_layers(model):
    """The rows for which each layer is called, by hooks."""
    found = []
    for conv in model.convs:
        conv.register_forward_hook(lambda _module, _given, out: found.append(out.size(0)))
    return found


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", BY_HOPS)
@torch.no_grad()
def test_layers_compute_what_the_next_ones_read(data, name, fused):
    kind, options = BY_HOPS[name]
    model = made(kind, **options)
    batch = Neighborhoods(data, HOPS).batch(IDS)
    expected = model(batch.x, batch.edge_index)[: IDS.numel()]
    served = copy.deepcopy(model)
    if fused:
        accelerate(served)
    block = Neighborhoods(data, HOPS).block(IDS)
    rows = rows_of_layers(served)
    torch.testing.assert_close(of_block(served, block), expected, rtol=1e-12, atol=1e-12)
    sizes = batch.num_sampled_nodes
    assert rows == [sum(sizes[: model.num_layers - i]) for i in range(model.num_layers)]


@pytest.mark.parametrize("name", WHOLE)
@torch.no_grad()
def test_other_models_are_called_as_they_are(data, name):
    kind, options = WHOLE[name]
    model = made(kind, **options)
    batch = Neighborhoods(data, HOPS).batch(IDS)
    expected = model(batch.x, batch.edge_index)[: IDS.numel()]
    rows = rows_of_layers(model)
    assert torch.equal(of_block(model, Neighborhoods(data, HOPS).block(IDS)), expected)
    assert rows == [batch.num_nodes] * 2


@torch.no_grad()
def test_what_was_put_on_a_model_is_called(data):
    model = made(GraphSAGE, dropout=0.5)
    block = Neighborhoods(data, HOPS).block(IDS)
    model.dropout.train()  # as for estimates of uncertainty
    assert not torch.equal(of_block(model, block), of_block(model, block))
    model.dropout.eval()
    plain = of_block(model, block)
    hook = model.register_forward_hook(lambda _module, _given, out: out + 1)
    torch.testing.assert_close(of_block(model, block), plain + 1)
    hook.remove()
    model.forward = lambda x, edge_index: x
    assert torch.equal(of_block(model, block), block.x[: IDS.numel()])


def test_a_predictor_serves_them(data):
    model = made(GraphSAGE)
    batch = Neighborhoods(data, HOPS).batch(IDS)
    expected = model(batch.x, batch.edge_index)[: IDS.numel()].detach()
    with Predictor(model, data, HOPS) as predictor:
        rows = rows_of_layers(model)
        torch.testing.assert_close(predictor.predict(IDS), expected, rtol=1e-12, atol=1e-12)
    assert rows == [sum(batch.num_sampled_nodes[:2]), IDS.numel()]


PREPARED = {
    "mean": {},
    "sum": {"aggr": "sum"},
    "no-root": {"root_weight": False},
    "no-bias": {"bias": False},
    "batch-norm": {"norm": "batch_norm"},
    "act-first": {"norm": "layer_norm", "norm_kwargs": {"mode": "node"}, "act_first": True},
    "no-act": {"act": None},
    "one-layer": {"num_layers": 1},
    "three-layers": {"num_layers": 3},
}


@pytest.fixture
def calls(monkeypatch):
    """The layers that were called with all of their checks."""
    if not library.compiled():
        pytest.skip("without kernels all layers are")
    found, run = [], SAGEConv.run

    def noted(layer, *args, **kwargs):
        found.append(layer)
        return run(layer, *args, **kwargs)

    monkeypatch.setattr(SAGEConv, "run", noted)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", PREPARED)
@torch.no_grad()
def test_layers_that_were_looked_at_once_give_the_same_bits(data, calls, name, dtype):
    model = made(GraphSAGE, **PREPARED[name]).to(dtype)
    accelerate(model)
    neighborhoods, forward = Neighborhoods(data, HOPS), usual_forward(None)
    for ids in (IDS, IDS[:1], torch.arange(40)):
        block = neighborhoods.block(ids)
        block = block._replace(x=block.x.to(dtype))
        expected = of_block(model, block)
        calls.clear()
        assert torch.equal(forward(model, block), expected)
        assert not calls


def test_grad_mode_and_large_inputs_take_the_whole_way(data, calls):
    model = made(GraphSAGE)
    accelerate(model)
    block, forward = Neighborhoods(data, HOPS).block(IDS), usual_forward(None)
    forward(model, block)
    assert calls == [*model.convs]
    calls.clear()
    model.convs[0].min_work = 0
    with torch.no_grad():
        forward(model, block)
    assert calls == [model.convs[0]]


CHANGES = {
    "in-place": lambda model: model.convs[0].lin_l.weight.mul_(2),
    "data": lambda model: setattr(model.convs[0].lin_l.weight, "data", torch.ones(16, 8).double()),
    "parameter": lambda model: setattr(
        model.convs[1].lin_r, "weight", torch.nn.Parameter(torch.ones(4, 16).double())
    ),
    "attribute": lambda model: setattr(model.convs[0], "normalize", True),
    "layer": lambda model: setattr(model.convs, "1", copy.deepcopy(model.convs[1])),
    "linear": lambda model: setattr(model.convs[0], "lin_l", torch.nn.Linear(8, 16).double()),
    "act": lambda model: setattr(model, "act", torch.nn.Tanh()),
    "no-act": lambda model: setattr(model, "act", None),
    "class": restore,
    "float32": lambda model: model.float(),
    "hook-of-layer": lambda model: model.convs[0].register_forward_hook(lambda m, i, out: out + 1),
    "hook-of-linear": lambda model: model.convs[0].lin_l.register_forward_hook(
        lambda m, i, out: out + 1
    ),
    "hook-of-model": lambda model: model.register_forward_hook(lambda m, i, out: out + 1),
    "hook-of-message": lambda model: model.convs[0].register_message_forward_hook(
        lambda m, i, out: out * 2
    ),
    "forward": lambda model: setattr(model, "forward", lambda x, edge_index: x),
    "forward-of-layer": lambda model: setattr(
        model.convs[1], "forward", lambda x, edge_index: x[1][:, :4]
    ),
}


@pytest.mark.parametrize("name", CHANGES)
@torch.no_grad()
def test_a_layer_that_changed_is_looked_at_again(data, name):
    model = made(GraphSAGE)
    accelerate(model)
    block, forward = Neighborhoods(data, HOPS).block(IDS), usual_forward(None)
    before = forward(model, block)
    CHANGES[name](model)
    block = block._replace(x=block.x.to(model.convs[0].lin_l.weight.dtype))
    expected = of_block(model, block)
    found = forward(model, block)
    assert torch.equal(found, expected)
    if name not in ("layer", "class"):
        assert found.dtype != before.dtype or not torch.equal(found, before)


@torch.no_grad()
def test_hooks_of_all_modules_are_called(data):
    model = made(GraphSAGE)
    accelerate(model)
    block, forward = Neighborhoods(data, HOPS).block(IDS), usual_forward(None)
    forward(model, block)
    seen = []
    hook = torch.nn.modules.module.register_module_forward_hook(lambda m, i, out: seen.append(m))
    try:
        forward(model, block)
    finally:
        hook.remove()
    assert set(seen) >= {*model.convs, *(conv.lin_l for conv in model.convs)}
