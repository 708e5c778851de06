"""Rows that the next layer does not read are not computed, and nothing else changes."""

import copy
import io

import pytest
import torch
import torch_geometric.nn as pyg
import torch_geometric.utils
from torch import nn
from torch_geometric.nn.models.basic_gnn import BasicGNN

import pyg_scale.nn
from pyg_scale.datasets import planted_communities
from pyg_scale.loader import NeighborLoader
from pyg_scale.nn import accelerate, fallbacks, restore, trim
from pyg_scale.nn.trim import TrimmedGNN, trim_to_layer
from tests.nn.oracle import distance

HOPS = [5, 4, 3]


def sample(seed=3, batch_size=16, **kwargs):
    data = planted_communities(3_000, 30_000, num_classes=4, num_features=8, seed=1)
    data.x = data.x.double()
    generator = torch.Generator().manual_seed(5)
    data.edge_attr = torch.rand(data.num_edges, 3, dtype=torch.float64, generator=generator)
    return next(iter(NeighborLoader(data, HOPS, batch_size=batch_size, seed=seed, **kwargs)))


@pytest.fixture(scope="module")
def batch():
    return sample()


@pytest.fixture(autouse=True)
def few_rows_count(monkeypatch):
    """However few rows a batch has, they are left out."""
    monkeypatch.setattr(trim, "_LEAST_CUT", 0)


class Edges(BasicGNN):
    """A model of any layer, with features of edges."""

    supports_edge_weight = False
    supports_edge_attr = True

    def init_conv(self, in_channels, out_channels, conv, **kwargs):
        if conv is pyg.GINEConv:
            return conv(nn.Linear(in_channels, out_channels), **kwargs)
        return conv(in_channels, out_channels, **kwargs)


class Weights(Edges):
    """A model of any layer, with weights of edges."""

    supports_edge_weight = True
    supports_edge_attr = False


def mean_of_two(**kwargs):
    norm = {"norm": "layer_norm", "norm_kwargs": {"mode": "node"}}
    return pyg.GraphSAGE(8, 12, **kwargs, **norm, aggr=["mean", "max"], act="elu")


MODELS = {
    "SAGE": lambda **kwargs: pyg.GraphSAGE(8, 12, **kwargs),
    "SAGE, two reductions": mean_of_two,
    "SAGE, projected": lambda **kwargs: pyg.GraphSAGE(8, 12, **kwargs, project=True, act=None),
    "SAGE, last": lambda **kwargs: pyg.GraphSAGE(8, 12, **kwargs, jk="last"),
    "GIN": lambda **kwargs: pyg.GIN(8, 12, **kwargs, train_eps=True),
    "GAT": lambda **kwargs: pyg.GAT(8, 12, **kwargs, heads=3),
    "GAT, edges": lambda **kwargs: pyg.GAT(8, 12, **kwargs, heads=3, edge_dim=3, residual=True),
    "GATv2": lambda **kwargs: pyg.GAT(8, 12, **kwargs, heads=3, v2=True, edge_dim=3),
    "Edge": lambda **kwargs: pyg.EdgeCNN(8, 12, **kwargs),
    "Graph": lambda **kwargs: Weights(8, 12, **kwargs, conv=pyg.GraphConv),
    "GINE": lambda **kwargs: Edges(8, 12, **kwargs, conv=pyg.GINEConv, edge_dim=3),
    "Transformer": lambda **kwargs: Edges(8, 12, **kwargs, conv=pyg.TransformerConv, edge_dim=3),
    "ResGated": lambda **kwargs: Edges(8, 12, **kwargs, conv=pyg.ResGatedGraphConv, edge_dim=3),
}
MODELS_OF_ALL_ROWS = {
    "GCN": lambda **kwargs: pyg.GCN(8, 12, **kwargs),
    "PNA": lambda **kwargs: pyg.PNA(
        8, 12, **kwargs, aggregators=["mean", "std"], scalers=["identity"], deg=torch.ones(5).long()
    ),
    "batch norm": lambda **kwargs: pyg.GraphSAGE(8, 12, **kwargs, norm="batch_norm"),
    "batch norm inside": lambda **kwargs: pyg.GIN(8, 12, **kwargs, norm="batch_norm"),
    "graph norm": lambda **kwargs: pyg.GraphSAGE(8, 12, **kwargs, norm="graph_norm"),
    "softmax": lambda **kwargs: pyg.GraphSAGE(8, 12, **kwargs, act=nn.Softmax(dim=0)),
    "function": lambda **kwargs: pyg.GraphSAGE(8, 12, **kwargs, act=lambda x: x - x.mean(0)),
    "target to source": lambda **kwargs: pyg.GraphSAGE(8, 12, **kwargs, flow="target_to_source"),
}


def arguments(model, batch, trim=True):
    given = {}
    if model.supports_edge_weight:
        given["edge_weight"] = batch.edge_attr[:, 0]
    elif model.supports_edge_attr and "edge_dim" in str(vars(model.convs[0])):
        given["edge_attr"] = batch.edge_attr if model.convs[0].edge_dim else None
    elif isinstance(model, Edges):
        given["edge_attr"] = batch.edge_attr
    if trim:
        given["num_sampled_nodes_per_hop"] = batch.num_sampled_nodes
        given["num_sampled_edges_per_hop"] = batch.num_sampled_edges
    return given


def outcome(model, batch, trim=True):
    """Scores of the seeds, and the gradients of the features and parameters."""
    model.zero_grad()
    x = batch.x.detach().clone().requires_grad_()
    out = model(x, batch.edge_index, **arguments(model, batch, trim))[: batch.batch_size]
    generator = torch.Generator().manual_seed(7)
    out.backward(torch.randn(out.shape, generator=generator, dtype=out.dtype))
    return [out.detach(), x.grad, *(p.grad for p in model.parameters())]


def far(found, expected):
    scale = max(float(each.norm()) for each in expected if each is not None)
    return max(distance(a, b, scale / 10) for a, b in zip(found, expected, strict=True))


def pair(make, **kwargs):
    torch.manual_seed(0)
    theirs = make(**kwargs).double()
    ours = copy.deepcopy(theirs)
    accelerate(ours)
    return theirs, ours


def rows_of(model, batch):
    """The number of rows that each layer computed."""
    seen, forwards = [], {}
    for kind in {type(conv) for conv in model.convs}:
        forwards[kind] = kind.forward

        def forward(self, *args, kind=kind, **kwargs):
            out = forwards[kind](self, *args, **kwargs)
            seen.append(out.size(0))
            return out

        kind.forward = forward
    try:
        model(batch.x, batch.edge_index, **arguments(model, batch))
    finally:
        for kind, before in forwards.items():
            kind.forward = before
    return seen


@pytest.mark.parametrize("num_layers", [1, 2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_seeds_get_what_the_whole_batch_gives_them(batch, name, num_layers):
    theirs, ours = pair(MODELS[name], num_layers=num_layers, out_channels=4)
    # A layer more than hops needs what was not sampled, trimmed or not.
    expected = outcome(theirs, batch, trim=num_layers > len(HOPS))
    assert far(outcome(ours, batch), expected) < 1e-12
    assert set(fallbacks(ours).get("", {})) == set()
    nodes = batch.num_sampled_nodes
    fewer = [sum(nodes[: max(3 - i, 1)]) for i in range(num_layers)]
    assert rows_of(ours, batch) == fewer
    all_rows = [sum(nodes[: 4 - i]) for i in range(num_layers)]
    assert rows_of(theirs, batch) == all_rows and sum(fewer) < 0.75 * sum(all_rows)


@pytest.mark.parametrize("least", [0, 1500, 3000, 10_000])
@pytest.mark.parametrize("name", ["SAGE", "GIN", "GAT", "GCN"])
def test_few_rows_are_left_to_pyg(batch, name, least, monkeypatch):
    """Each layer by itself, and the result has the same rows, whatever layers computed."""
    monkeypatch.setattr(trim, "_LEAST_CUT", least)
    theirs, ours = pair((MODELS | MODELS_OF_ALL_ROWS)[name], num_layers=3, out_channels=4)
    assert far(outcome(ours, batch), outcome(theirs, batch)) < 1e-12
    nodes, widths = batch.num_sampled_nodes, (8, 12, 12)
    sizes = [sum(nodes[: 4 - i]) for i in range(3)]
    cut = [0 if name == "GCN" else nodes[3 - i] for i in range(3)]
    left_out = [n * width >= least for n, width in zip(cut, widths, strict=True)]
    wanted = [size - n * out for size, n, out in zip(sizes, cut, left_out, strict=True)]
    assert rows_of(ours, batch) == wanted
    out = ours(batch.x, batch.edge_index, **arguments(ours, batch))
    assert len(out) == nodes[0]


def test_a_size_of_ones_own_and_the_one_that_was_measured(batch, monkeypatch):
    monkeypatch.undo()
    theirs, ours = pair(MODELS["SAGE"], num_layers=2, out_channels=4)
    assert rows_of(ours, batch) == rows_of(theirs, batch)
    accelerate(ours, min_work=0)
    assert rows_of(ours, batch)[0] < rows_of(theirs, batch)[0]
    restore(ours)
    assert "min_work" not in vars(ours._trim)
    accelerate(ours)
    large = sample(batch_size=400)
    assert 8 * large.num_sampled_nodes[-1] < 24_000 < 100 * large.num_sampled_nodes[-1]
    large.x = torch.randn(large.num_nodes, 100, dtype=torch.float64)
    wide = pyg.GraphSAGE(100, 12, num_layers=2, out_channels=4).double()
    accelerate(wide)
    assert rows_of(ours, sample(batch_size=400))[0] == large.num_nodes
    assert rows_of(wide, large)[0] < large.num_nodes


@pytest.mark.parametrize("name", MODELS_OF_ALL_ROWS)
def test_what_would_change_is_left_to_pyg(batch, name):
    theirs, ours = pair(MODELS_OF_ALL_ROWS[name], num_layers=2, out_channels=4)
    assert far(outcome(ours, batch), outcome(theirs, batch)) < 1e-11
    (reason,) = {each.partition(".")[0] for each in fallbacks(ours)[""]}
    assert reason.startswith("rows that are cut off are computed")
    assert rows_of(ours, batch)[0] == batch.num_nodes


@pytest.mark.parametrize("jk", ["cat", "max", "lstm"])
def test_jumping_knowledge_raises_as_in_pyg(batch, jk):
    theirs, ours = pair(lambda **kw: pyg.GraphSAGE(8, 12, **kw), num_layers=2, jk=jk)
    messages = []
    for model in (theirs, ours):
        with pytest.raises(RuntimeError, match=r"must match|equal size") as raised:
            outcome(model, batch)
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


def test_only_the_layers_that_change_compute_all_rows(batch):
    model = pyg.GraphSAGE(8, 12, num_layers=3, norm="batch_norm").double()
    accelerate(model)
    nodes = batch.num_sampled_nodes
    assert rows_of(model, batch) == [sum(nodes), sum(nodes[:3]), sum(nodes[:1])]
    assert fallbacks(model)[""] == {
        f"rows that are cut off are computed: norms.{i} is a BatchNorm": 1 for i in range(2)
    }
    model.eval()  # statistics are known, so rows are kept apart
    assert rows_of(model, batch) == [sum(nodes[:3]), sum(nodes[:2]), sum(nodes[:1])]


def test_whoever_looks_sees_all_rows(batch):
    for place in ("convs", "norms", "act", "dropout", "convs.0.lin_l"):
        theirs, ours = pair(lambda **kw: pyg.GraphSAGE(8, 12, **kw), num_layers=2)
        sizes = []
        for model in (theirs, ours):
            module = model.get_submodule(place)
            module = module[0] if isinstance(module, nn.ModuleList) else module
            module.register_forward_hook(lambda m, args, out, seen=sizes: seen.append(len(out)))
            model(batch.x, batch.edge_index, **arguments(model, batch))
        half = len(sizes) // 2
        if place == "convs.0.lin_l":
            assert fallbacks(ours)[""]
        else:
            assert sizes[:half] == sizes[half:]


def test_padding_has_edges_among_rows_that_are_cut_off():
    plain = sample()
    padded = sample(pad_to="buckets")
    theirs, ours = pair(MODELS["SAGE"], num_layers=3, out_channels=4)
    expected = outcome(theirs, plain)
    found = outcome(ours, padded)
    assert padded.num_nodes > plain.num_nodes
    assert rows_of(ours, padded)[0] == padded.num_nodes
    assert far([found[0], *found[2:]], [expected[0], *expected[2:]]) < 1e-12


def test_edges_to_the_last_hop_keep_all_rows(batch):
    """As of a sampler of other subgraphs."""
    other = batch.clone()
    other.edge_index = batch.edge_index.flip(0).contiguous()
    theirs, ours = pair(MODELS["SAGE"], num_layers=2, out_channels=4)
    assert far(outcome(ours, other), outcome(theirs, other)) < 1e-12


def test_states_copies_files_and_back(batch):
    theirs, ours = pair(MODELS["SAGE"], num_layers=2, out_channels=4)
    report = accelerate(ours)
    assert report.trimmed == [""] and "trimmed ahead: (model)" in str(report)
    assert type(ours).__name__ == "GraphSAGE" and isinstance(ours, pyg.GraphSAGE)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    expected = outcome(theirs, batch)
    assert restore(theirs) == 0
    for each in (copy.deepcopy(ours), torch.load(file, weights_only=False)):
        assert isinstance(each, TrimmedGNN) and type(each) is type(ours)
        assert far(outcome(each, batch), expected) < 1e-12
        assert restore(each) == 2 and type(each) is pyg.GraphSAGE
        assert type(each._trim) is type(theirs._trim)
        assert rows_of(each, batch) == rows_of(theirs, batch)
    kinds = [type(module) for module in theirs.modules()]
    accelerate(theirs).restore()
    assert [type(module) for module in theirs.modules()] == kinds


def test_models_that_are_not_pygs_loop_stay():
    class Own(pyg.GraphSAGE):
        def forward(self, x, edge_index):
            return super().forward(x, edge_index)

    model = Own(8, 8, 2)
    assert accelerate(model).trimmed == [] and type(model) is Own


def test_a_heterogeneous_model_of_an_accelerated_one(batch):
    metadata = ["n"], [("n", "to", "n")]
    torch.manual_seed(0)
    model = pyg.GraphSAGE(8, 12, 2, 4).double()
    plain = pyg.to_hetero(copy.deepcopy(model), metadata)
    accelerate(model)
    ours = pyg.to_hetero(model, metadata)
    edges = {("n", "to", "n"): batch.edge_index}
    assert distance(ours({"n": batch.x}, edges)["n"], plain({"n": batch.x}, edges)["n"]) < 1e-12


def test_lazy_features_are_read_where_they_are():
    plain, lazy = sample(), sample(lazy_x=True)
    torch.manual_seed(0)
    model = pyg.GraphSAGE(8, 12, 3, 4).double()
    accelerate(model, min_work=0)
    found = [model(b.x, b.edge_index, **arguments(model, b)) for b in (plain, lazy)]
    assert torch.equal(*found)
    assert lazy.x.unread() is not None


# trim_to_layer ############################################################################


class ByHand(nn.Module):
    def __init__(self, convs, trim):
        super().__init__()
        self.convs, self.trim = nn.ModuleList(convs), trim

    def forward(self, x, edge_index, num_sampled_nodes_per_hop, num_sampled_edges_per_hop):
        hops = num_sampled_nodes_per_hop, num_sampled_edges_per_hop
        for i, conv in enumerate(self.convs):
            x, edge_index, _ = self.trim(i, *hops, x, edge_index)
            x = conv(x, edge_index).relu()
        return x

    supports_edge_weight = supports_edge_attr = False


@pytest.mark.parametrize("kind", ["SAGEConv", "GraphConv", "GATConv", "GATv2Conv"])
def test_trim_to_layer_in_a_model_of_ones_own(batch, kind):
    torch.manual_seed(0)
    convs = [getattr(pyg, kind)(8, 8) for _ in range(3)]
    theirs = ByHand(convs, torch_geometric.utils.trim_to_layer).double()
    expected = outcome(theirs, batch)
    ours = ByHand(copy.deepcopy(convs), pyg_scale.nn.trim_to_layer)
    nodes = batch.num_sampled_nodes
    for _ in range(2):
        assert far(outcome(ours, batch), expected) < 1e-12
        assert rows_of(ours, batch) == [sum(nodes[:3]), sum(nodes[:2]), nodes[0]]
        accelerate(ours, min_work=0)
    assert not fallbacks(ours)


def test_what_trim_to_layer_returns(batch):
    nodes, edges = batch.num_sampled_nodes, batch.num_sampled_edges
    x, edge_index, values = batch.x, batch.edge_index, batch.edge_attr
    for layer in range(4):
        of_pyg = torch_geometric.utils.trim_to_layer(layer, nodes, edges, x, edge_index, values)
        for given in (x, x[: sum(nodes[: 4 - layer])]):  # with rows to cut off, and without
            both, left, rest = trim_to_layer(layer, nodes, edges, given, edge_index, values)
            assert torch.equal(both[0], of_pyg[0])
            assert torch.equal(both[1], x[: sum(nodes[: max(3 - layer, 1)])])
            assert torch.equal(left, of_pyg[1]) and torch.equal(rest, of_pyg[2])
        x, edge_index, values = of_pyg
    with pytest.raises(IndexError):
        trim_to_layer(5, nodes, edges, x, edge_index)


def test_numbers_that_are_not_those_of_the_batch_cut_nothing_more_than_pyg():
    x, none = torch.randn(3, 4), torch.empty(2, 0, dtype=torch.int64)
    for layer, nodes, edges in ((0, [1, 9], [0]), (1, [1], [0, 0]), (0, [], [])):
        of_pyg = torch_geometric.utils.trim_to_layer(layer, nodes, edges, x, none)
        (left, kept), _, _ = trim_to_layer(layer, nodes, edges, x, none)
        assert torch.equal(left, of_pyg[0]) and kept is left


@pytest.mark.parametrize("kind", [pyg.GraphSAGE, pyg.GIN, pyg.GAT])
def test_tiny_batches(kind):
    none = torch.empty(2, 0, dtype=torch.int64)
    cases = (
        (0, [0, 0, 0], [0, 0], none),
        (1, [1, 0, 0], [0, 0], none),
        (2, [2, 0, 0], [0, 0], none),
        (3, [1, 2, 0], [2, 0], torch.tensor([[1, 2], [0, 0]])),
        (3, [1, 1, 1], [1, 1], torch.tensor([[1, 2], [0, 1]])),
    )
    for size, nodes, edges, edge_index in cases:
        theirs, ours = pair(lambda **more: kind(4, 4, **more), num_layers=2)
        given = {"num_sampled_nodes_per_hop": nodes, "num_sampled_edges_per_hop": edges}
        x = torch.randn(size, 4, dtype=torch.float64)
        found = ours(x, edge_index, **given)
        assert found.shape == (nodes[0], 4)
        assert distance(found, theirs(x, edge_index, **given)[: nodes[0]]) < 1e-12


def test_other_edges_have_all_nodes_as_destinations(batch):
    nodes, edges = batch.num_sampled_nodes, batch.num_sampled_edges
    for edge_index in (batch.edge_index.flip(0), pyg_edge_index(batch)):
        both, _, _ = trim_to_layer(0, nodes, edges, batch.x, edge_index)
        assert both[0] is batch.x and both[1] is batch.x


def pyg_edge_index(batch):
    return torch_geometric.EdgeIndex(batch.edge_index, sparse_size=(batch.num_nodes,) * 2)


def test_a_heterogeneous_batch_is_trimmed_as_by_pyg(batch):
    given = (
        {"n": batch.num_sampled_nodes},
        {("n", "to", "n"): batch.num_sampled_edges},
        {"n": batch.x},
        {("n", "to", "n"): batch.edge_index},
    )
    found = trim_to_layer(1, *given)
    expected = torch_geometric.utils.trim_to_layer(1, *given)
    assert torch.equal(found[0]["n"], expected[0]["n"])
    assert torch.equal(found[1]["n", "to", "n"], expected[1]["n", "to", "n"])


def test_pointers_of_the_sampler_are_handed_on(batch, monkeypatch):
    """No edges are looked at again to see that they are sorted."""
    from pyg_scale.ops import colptr

    nodes, edges = batch.num_sampled_nodes, batch.num_sampled_edges
    edge_index = batch.edge_index
    for layer in range(3):
        _, edge_index, _ = trim_to_layer(
            layer, nodes, edges, batch.x[: sum(nodes[: 4 - layer])], edge_index
        )
        known = colptr.recall(edge_index)
        size = sum(nodes[: 3 - layer])
        assert known is not None
        counted = torch.bincount(edge_index[1], minlength=size).cumsum(0)
        assert torch.equal(known[1 : size + 1], counted)
