"""A lazy x: the same bits in a layer that reads the table, and a tensor for everybody else."""

import copy
import pickle

import pytest
import torch
import torch_geometric.nn as pyg
from torch_geometric.data import HeteroData
from torch_geometric.testing import MyFeatureStore

import pyg_scale
from pyg_scale import nn
from pyg_scale.datasets import planted_communities
from pyg_scale.loader import NeighborLoader, SamplingOptions, ShaDowKHopSampler
from pyg_scale.nn import accelerate, fallbacks
from pyg_scale.ops.lazy_rows import LazyRows
from pyg_scale.store import MemoryFeatureStore, Mmap, Quantized
from pyg_scale.store.base import returns_views

CHANNELS = 12


@pytest.fixture(scope="module")
def data():
    return planted_communities(400, 4_000, num_classes=3, num_features=CHANNELS)


def batches(data, **options):
    return NeighborLoader(data, [6, 3], batch_size=64, seed=3, **options)


def pair(batch):
    """Sources and the destinations that have in-edges, as a first layer of a block takes them."""
    return batch.x, batch.x[: sum(batch.num_sampled_nodes[:2])]


LAYERS = {
    "sage": lambda: nn.SAGEConv(CHANNELS, 32),
    "sage, max": lambda: nn.SAGEConv(CHANNELS, 32, aggr="max"),
    "sage, lists": lambda: nn.SAGEConv(CHANNELS, 32, aggr=["mean", "min"]),
    "sage, normalized": lambda: nn.SAGEConv(CHANNELS, 32, normalize=True, root_weight=False),
    "graph": lambda: nn.GraphConv(CHANNELS, 32),
    "gin": lambda: nn.GINConv(torch.nn.Linear(CHANNELS, 32)),
}


def stepped(layer, x, edge_index):
    out = layer(x, edge_index)
    return [out, *torch.autograd.grad(out.square().sum(), list(layer.parameters()))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_has_the_same_bits_and_leaves_x_unread(name, dtype, data):
    torch.manual_seed(0)
    layer = LAYERS[name]().to(dtype)
    data = copy.copy(data)
    data.x = data.x.to(dtype)
    for usual, lazy in zip(batches(data), batches(data, lazy_x=True), strict=True):
        assert isinstance(lazy.x, LazyRows)
        expected = stepped(layer, pair(usual), usual.edge_index)
        found = stepped(layer, pair(lazy), lazy.edge_index)
        assert all(map(torch.equal, found, expected))
        assert lazy.x.unread() is not None
    assert not fallbacks(layer)


def test_weights_of_edges_have_their_gradient(data):
    layer = nn.GraphConv(CHANNELS, 32)
    usual, lazy = next(iter(batches(data))), next(iter(batches(data, lazy_x=True)))
    weight = torch.rand(usual.edge_index.size(1), requires_grad=True)
    found = [
        torch.autograd.grad(layer(pair(b), b.edge_index, weight).square().sum(), weight)[0]
        for b in (usual, lazy)
    ]
    assert torch.equal(*found) and lazy.x.unread() is not None


@pytest.mark.parametrize(
    "conv",
    [
        lambda: pyg.SAGEConv(CHANNELS, 5, project=True),
        lambda: pyg.GATConv((CHANNELS, CHANNELS), 5, add_self_loops=False),
        lambda: pyg.TransformerConv(CHANNELS, 5),
        lambda: pyg.EdgeConv(torch.nn.Linear(2 * CHANNELS, 5)),
        lambda: pyg.SAGEConv(CHANNELS, 64),  # its map comes first: 4 channels
        lambda: pyg.SAGEConv(CHANNELS, 4),
    ],
)
def test_other_layers_see_a_tensor(conv, data):
    """PyG's own, and ours; for pairs, and for all nodes at once."""
    torch.manual_seed(0)
    theirs = conv()
    ours = copy.deepcopy(theirs)
    accelerate(ours, min_work=0)
    usual, lazy = next(iter(batches(data))), next(iter(batches(data, lazy_x=True)))
    for layer in (theirs, ours):
        for of in (pair, lambda batch: batch.x):
            expected = layer(of(usual), usual.edge_index)
            assert torch.equal(layer(of(lazy), lazy.edge_index), expected)


def test_autocast_and_small_inputs_see_a_tensor(data, monkeypatch):
    layer = nn.SAGEConv(CHANNELS, 32)
    usual, lazy = next(iter(batches(data))), next(iter(batches(data, lazy_x=True)))
    with torch.autocast("cpu", torch.bfloat16):
        expected = layer(pair(usual), usual.edge_index)
        assert torch.equal(layer(pair(lazy), lazy.edge_index), expected)
    assert lazy.x.unread() is None
    monkeypatch.setattr(nn.FusedConv, "min_work", None)
    lazy = next(iter(batches(data, lazy_x=True)))
    expected = layer(pair(usual), usual.edge_index)
    assert torch.equal(layer(pair(lazy), lazy.edge_index), expected)


# The tensor ################################################################################


IDS = [7, 3, 3, 49, 0]


@pytest.fixture
def table():
    return torch.randn(50, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def lazy(table):
    return LazyRows(table, torch.tensor(IDS))


def test_what_needs_no_rows_reads_none(lazy):
    assert lazy.shape == (5, 4) and len(lazy) == 5 and lazy.numel() == 20 and lazy.dim() == 2
    assert lazy.dtype == torch.float32 and lazy.is_cpu and not lazy.requires_grad
    assert lazy.is_leaf and lazy.grad_fn is None and lazy.is_floating_point()
    for first in (lazy[:2], lazy[0:2], lazy.narrow(0, 0, 2), torch.narrow(lazy, 0, 0, 2)):
        assert isinstance(first, LazyRows) and first.shape == (2, 4)
    assert lazy[:9].shape == (5, 4) and lazy[:-1].shape == (4, 4)
    assert lazy.unread() is not None


TOUCHES = {
    "add": lambda x: x + 1,
    "matmul": lambda x: x @ torch.ones(4, 2),
    "linear": lambda x: torch.nn.functional.linear(x, torch.ones(3, 4)),
    "cat": lambda x: torch.cat([x, x]),
    "rows": lambda x: x[torch.tensor([4, 1])],
    "last rows": lambda x: x[2:],
    "every other row": lambda x: x[::2],
    "columns": lambda x: x[:, :2],
    "clone": lambda x: x.clone(),
    "to": lambda x: x.to(torch.float64),
    "numpy": lambda x: torch.from_numpy(x.numpy().copy()),
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "in place": lambda x: x.add_(1),
    "function": lambda x: _Twice.apply(x),
    "below Python": lambda x: torch._C._nn.gelu(x),
}


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x


@pytest.mark.parametrize("name", TOUCHES)
def test_a_touch_gives_what_the_rows_give(name, lazy, table):
    expected = TOUCHES[name](table[IDS])
    out = TOUCHES[name](lazy)
    assert type(out) is torch.Tensor and torch.equal(out, expected)
    assert lazy.unread() is None
    if name == "in place":
        assert torch.equal(lazy, expected)


def test_changes_stay_in_the_batch_and_are_seen_by_layers(lazy, table):
    before = table.clone()
    lazy[0] = 100.0
    layer = nn.SAGEConv(4, 3)
    edge_index = torch.tensor([[0, 1], [1, 0]])
    expected = layer((lazy.rows().clone(), lazy.rows()[:2].clone()), edge_index)
    assert torch.equal(layer((lazy, lazy[:2]), edge_index), expected)
    assert torch.equal(table, before) and float(lazy[0, 0]) == 100.0


def test_features_that_were_changed_since_are_refused(lazy, table):
    table.add_(1)
    layer, edge_index = nn.SAGEConv(4, 16), torch.zeros(2, 3, dtype=torch.int64)
    for use in (lambda: lazy + 1, lambda: layer((lazy, torch.zeros(2, 4)), edge_index)):
        with pytest.raises(RuntimeError, match="changed in place"):
            use()


def test_gradients_are_refused(lazy, table):
    for use in (
        lambda: lazy.requires_grad_(),
        lambda: setattr(lazy, "requires_grad", True),
        lambda: lazy.register_hook(print),
        lambda: lazy.backward(),
    ):
        with pytest.raises(RuntimeError, match="lazy"):
            use()
    given = (
        table.t(),
        table.int(),
        None,
        table[0],
        table.clone().requires_grad_(),
        table.to_sparse(),
    )
    for wrong in given:
        assert not LazyRows.takes(wrong)
        with pytest.raises(TypeError, match="contiguous floating point matrix"):
            LazyRows(wrong, torch.tensor([0]))


# Loaders ###################################################################################


def same(usual, lazy):
    for a, b in zip(usual, lazy, strict=True):
        assert isinstance(b.x, LazyRows)
        assert torch.equal(b.x, a.x) and torch.equal(b.edge_index, a.edge_index)


def test_stores_and_worker_threads(data, tmp_path):
    usual = list(batches(data))
    same(usual, batches(data, lazy_x=True, num_workers=2, worker_type="thread"))
    assert returns_views(MemoryFeatureStore())
    same(usual, batches(data, lazy_x=True, feature_store="memory"))
    pyg_scale.save(data, tmp_path / "graph")
    same(usual, batches(pyg_scale.open(tmp_path / "graph"), lazy_x=True))
    mapped = Mmap(tmp_path / "features")
    mapped.put_tensor(data.x, group_name=None, attr_name="x", index=None)
    same(usual, batches(data, lazy_x=True, feature_store=mapped))


def test_a_store_without_rows_to_be_read_in_place_is_refused(data, tmp_path):
    store = MyFeatureStore()
    store.put_tensor(data.x, group_name=None, attr_name="x", index=None)
    over = Quantized(MyFeatureStore())
    over.put_tensor(data.x, group_name=None, attr_name="x", index=None)
    numbers = MemoryFeatureStore()
    numbers.put_tensor(data.x.int(), group_name=None, attr_name="x", index=None)
    for wrong in (store, over, numbers):
        with pytest.raises(ValueError, match="cannot be read where it is.*Cached"):
            batches(data, lazy_x=True, feature_store=wrong)
    other = MyFeatureStore()  # x is that of data
    other.put_tensor(data.x[:, :2], group_name=None, attr_name="other", index=None)
    found = next(iter(batches(data, lazy_x=True, feature_store=other)))
    assert isinstance(found.x, LazyRows) and type(found.other) is torch.Tensor


def test_types_of_nodes(data):
    graph = HeteroData()
    graph["a"].x, graph["b"].x = data.x, data.x[:, :5].contiguous()
    graph["a", "to", "b"].edge_index = graph["b", "to", "a"].edge_index = data.edge_index
    given = {"num_neighbors": [3, 3], "input_nodes": "a", "batch_size": 32, "seed": 1}
    for a, b in zip(
        NeighborLoader(graph, **given), NeighborLoader(graph, lazy_x=True, **given), strict=True
    ):
        for kind in ("a", "b"):
            assert isinstance(b[kind].x, LazyRows) and torch.equal(b[kind].x, a[kind].x)


def test_statistics_say_what_stayed_where_it_is(data):
    store = MemoryFeatureStore()
    store.put_tensor(data.x, group_name=None, attr_name="x", index=None)
    counts = []
    for options in ({}, {"lazy_x": True}, {"lazy_x": True, "feature_store": store}):
        loader = batches(data, **options)
        rows = sum(batch.num_nodes for batch in loader)
        counts.append(loader.stats()["epoch"]["fetch"])
        assert counts[-1]["lent_rows"] == (rows if options else 0)
    assert counts[1]["lent_bytes"] == counts[2]["lent_bytes"] == rows * 4 * CHANNELS
    assert counts[0]["bytes"] - counts[1]["bytes"] == rows * 4 * CHANNELS
    assert counts[0]["rows"] == counts[1]["rows"] == counts[2]["rows"]


def test_options_that_gather_all_rows_are_refused(data):
    with pytest.raises(TypeError, match="lazy_x must be True or False"):
        batches(data, lazy_x=1)
    for kind in ("process", "ring"):
        with pytest.raises(ValueError, match="lazy_x=True needs worker threads"):
            batches(data, lazy_x=True, num_workers=1, worker_type=kind)
    for given in ({"device": "cpu"}, {"sampling": SamplingOptions(to_device="cpu")}):
        with pytest.raises(ValueError, match="leaves x where it is"):
            batches(data, lazy_x=True, **given)
    with pytest.raises(NotImplementedError, match="not for ShaDowKHopSampler"):
        ShaDowKHopSampler(data, depth=1, num_neighbors=2, lazy_x=True)
