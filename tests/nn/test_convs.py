"""Options and forms of input: every layer against PyG's layer with the same parameters."""

import itertools

import pytest
import torch
from torch import nn
from torch_geometric import EdgeIndex
from torch_geometric.nn import aggr
from torch_geometric.typing import SparseTensor

from pyg_scale.nn import (
    GATConv,
    GATv2Conv,
    GCNConv,
    GINConv,
    GraphConv,
    RGCNConv,
    SAGEConv,
    TransformerConv,
)
from pyg_scale.testing import graphs
from tests.nn.oracle import assert_equal, distance, pair, run

pytestmark = [pytest.mark.matrix(3), pytest.mark.usefixtures("products")]

NUM = 100


@pytest.fixture
def edge_index():
    return graphs.hostile().edge_index


@pytest.fixture
def x():
    return torch.randn(NUM, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def weight(edge_index):
    generator = torch.Generator().manual_seed(2)
    return torch.rand(edge_index.size(1), dtype=torch.float64, generator=generator) + 0.1


@pytest.fixture
def blocks():
    """Bipartite edges, more sources than destinations, in no order, with edges that coincide."""
    generator = torch.Generator().manual_seed(3)
    src = torch.randint(0, 40, (120,), generator=generator)
    dst = torch.randint(0, 24, (120,), generator=generator)  # destination 24 has none
    src[:5], dst[:5] = 3, 3
    return (
        torch.stack([src, dst]),
        torch.randn(40, 6, dtype=torch.float64, generator=generator),
        torch.randn(25, 4, dtype=torch.float64, generator=generator),
    )


def options(**choices):
    return [
        dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())
    ]


# GCN ###########################################################################################


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"improved": True},
        {"add_self_loops": False},
        {"normalize": False},
        {"cached": True},
        {"bias": False},
        {"flow": "target_to_source"},
        {"flow": "target_to_source", "add_self_loops": False, "improved": True},
        {"aggr": "max"},
        {"aggr": "mean"},
        {"node_dim": 0},
    ],
    ids=str,
)
def test_gcn(x, edge_index, weight, kwargs):
    for wide in (3, 12):
        build = lambda cls: cls(6, wide, **kwargs)  # noqa: B023, E731
        assert_equal(GCNConv, build, (x, edge_index))
        assert_equal(GCNConv, build, (x, edge_index, weight))


def test_gcn_with_weights_that_cancel(x, edge_index):
    """Degrees of zero, whose inverse root is infinite, count as zero."""
    theirs, ours = pair(GCNConv, lambda cls: cls(6, 4, add_self_loops=False))
    weight = torch.zeros(edge_index.size(1), dtype=torch.float64)
    weight[::2] = 1.0
    weight[edge_index[1] == 0] = 0.0
    assert distance(ours(x, edge_index, weight), theirs(x, edge_index, weight)) < 1e-12


def test_gcn_cached_ignores_later_edges(x, edge_index):
    theirs, ours = pair(GCNConv, lambda cls: cls(6, 4, cached=True))
    for layer in (theirs, ours):
        layer(x, edge_index)
        assert layer._cached_edge_index is not None
    again = edge_index[:, :10]
    assert distance(ours(x, again), theirs(x, again)) < 1e-12
    ours.reset_parameters()
    assert ours._cached_edge_index is None


def test_gcn_keeps_the_normalisation_and_sees_changed_weights(x, edge_index, weight):
    theirs, ours = pair(GCNConv, lambda cls: cls(6, 4))
    for factor in (1.0, 2.0, 0.5):
        weight[::3] *= factor
        for _ in range(2):
            assert distance(ours(x, edge_index, weight), theirs(x, edge_index, weight)) < 1e-12
    other = weight.flip(0)
    assert distance(ours(x, edge_index, other), theirs(x, edge_index, other)) < 1e-12


# SAGE, GIN, Graph ##############################################################################


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"project": True},
        {"normalize": True},
        {"root_weight": False},
        {"bias": False},
        {"flow": "target_to_source"},
    ],
    ids=str,
)
def test_sage(x, edge_index, kwargs):
    for reduce, wide in itertools.product(["mean", "sum", "add", "max", "min"], [2, 12]):
        build = lambda cls: cls(6, wide, aggr=reduce, **kwargs)  # noqa: B023, E731
        assert_equal(SAGEConv, build, (x, edge_index))


@pytest.mark.parametrize(
    "several",
    [
        ["mean", "max"],
        ["sum", "min", "mean"],
        aggr.MultiAggregation(["sum", "max"], mode="cat"),
        aggr.MeanAggregation(),
        aggr.MaxAggregation(),
    ],
    ids=str,
)
def test_sage_with_aggregation_modules(x, edge_index, several):
    assert_equal(SAGEConv, lambda cls: cls(6, 5, aggr=several), (x, edge_index))


@pytest.mark.parametrize("reduce", ["mean", "sum", "max"])
@pytest.mark.parametrize("conv", [SAGEConv, GraphConv])
def test_bipartite(blocks, conv, reduce):
    edge_index, src, dst = blocks
    for out, size in itertools.product((3, 12), (None, (40, 25))):
        build = lambda cls: cls((6, 4), out, aggr=reduce)  # noqa: B023, E731
        assert_equal(conv, build, ((src, dst), edge_index), {"size": size})


def test_bipartite_without_destinations(blocks):
    edge_index, src, _ = blocks
    for size in (None, (40, 25)):
        assert_equal(SAGEConv, lambda cls: cls(6, 5), ((src, None), edge_index), {"size": size})


@pytest.mark.parametrize("train_eps", [False, True])
def test_gin(x, edge_index, blocks, train_eps):
    def build(cls):
        torch.manual_seed(5)
        return cls(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), 0.3, train_eps)

    assert_equal(GINConv, build, (x, edge_index))
    edges, src, _ = blocks
    assert_equal(GINConv, build, ((src, src[:25]), edges))
    assert_equal(GINConv, build, ((src, None), edges), {"size": (40, 25)})


@pytest.mark.parametrize("reduce", ["add", "mean", "max"])
@pytest.mark.parametrize("wide", [2, 12], ids=["narrower", "wider"])
def test_graph_with_weights(x, edge_index, weight, reduce, wide):
    assert_equal(GraphConv, lambda cls: cls(6, wide, aggr=reduce), (x, edge_index, weight))


# Attention #####################################################################################

ATTENTION = options(heads=[1, 3], concat=[True, False])
SELF_LOOPS = [
    {"add_self_loops": False},
    {"bias": False},
    {"residual": True},
    {"negative_slope": 0.5},
]


@pytest.mark.parametrize("conv", [GATConv, GATv2Conv])
@pytest.mark.parametrize("kwargs", [*ATTENTION, *SELF_LOOPS], ids=str)
def test_gat(conv, x, edge_index, kwargs):
    assert_equal(conv, lambda cls: cls(6, 4, **kwargs), (x, edge_index))


@pytest.mark.parametrize("conv", [GATConv, GATv2Conv])
@pytest.mark.parametrize("loops", [True, False])
@pytest.mark.parametrize("fill", ["mean", "max", 0.5, torch.arange(3.0)], ids=str)
def test_gat_with_edge_features(conv, x, edge_index, loops, fill):
    edge_attr = torch.randn(edge_index.size(1), 3, dtype=torch.float64)
    assert_equal(
        conv,
        lambda cls: cls(6, 4, heads=2, edge_dim=3, fill_value=fill, add_self_loops=loops),
        (x, edge_index, edge_attr),
    )


@pytest.mark.parametrize("conv", [GATConv, GATv2Conv])
def test_gat_with_one_edge_feature(conv, x, edge_index, weight):
    assert_equal(conv, lambda cls: cls(6, 4, edge_dim=1), (x, edge_index, weight))


@pytest.mark.parametrize("conv", [GATConv, GATv2Conv, TransformerConv])
@pytest.mark.parametrize("wanted", [True, False])
def test_attention_weights(conv, x, edge_index, wanted):
    arguments = (x, edge_index)
    assert_equal(
        conv, lambda cls: cls(6, 4, heads=2), arguments, {"return_attention_weights": wanted}
    )


@pytest.mark.parametrize("conv", [GATConv, GATv2Conv, TransformerConv])
@pytest.mark.parametrize("loops", [True, False])
def test_attention_in_bipartite_graphs(conv, blocks, loops):
    edge_index, src, dst = blocks
    kwargs = {} if conv is TransformerConv else {"add_self_loops": loops, "residual": True}
    if conv is GATv2Conv:
        kwargs["share_weights"] = False
    assert_equal(conv, lambda cls: cls((6, 4), 4, heads=2, **kwargs), ((src, dst), edge_index))


def test_gat_without_destinations_and_with_sizes(blocks):
    edge_index, src, dst = blocks
    build = lambda cls: cls((6, 4), 4, heads=2)  # noqa: E731
    assert_equal(GATConv, build, ((src, None), edge_index), {"size": (40, 25)})
    assert_equal(GATConv, build, ((src, dst), edge_index), {"size": (40, 25)})
    shared = lambda cls: cls(6, 4, heads=2)  # noqa: E731
    assert_equal(GATConv, shared, ((src, src[:25]), edge_index))


def test_gatv2_with_shared_weights(x, edge_index):
    assert_equal(GATv2Conv, lambda cls: cls(6, 4, share_weights=True), (x, edge_index))


@pytest.mark.parametrize(
    "kwargs", [*ATTENTION, {"beta": True}, {"root_weight": False}, {"bias": False}], ids=str
)
@pytest.mark.parametrize("edges", [False, True])
def test_transformer(x, edge_index, kwargs, edges):
    edge_attr = torch.randn(edge_index.size(1), 3, dtype=torch.float64)
    assert_equal(
        TransformerConv,
        lambda cls: cls(6, 4, edge_dim=3 if edges else None, **kwargs),
        (x, edge_index, edge_attr) if edges else (x, edge_index),
    )


@pytest.mark.parametrize("conv", [GATConv, GATv2Conv, TransformerConv])
def test_dropout_of_attention(conv):
    """The expectation is what is computed without; a seed repeats it; the gradient has its mask."""
    torch.manual_seed(6)
    layer = conv(6, 4, heads=2, dropout=0.4).double()
    x = torch.randn(20, 6, dtype=torch.float64)
    edge_index = torch.randint(0, 20, (2, 300))
    with torch.no_grad():
        plain = layer.eval()(x, edge_index)
        layer.train()
        torch.manual_seed(7)
        first = layer(x, edge_index)
        mean = torch.stack([layer(x, edge_index) for _ in range(150)]).mean(0)
        torch.manual_seed(7)
        assert torch.equal(layer(x, edge_index), first)
    assert not torch.equal(first, plain)
    assert distance(mean, plain) < 0.1
    x.requires_grad_()

    def once(value):
        torch.manual_seed(8)
        return layer(value, edge_index)

    assert torch.autograd.gradcheck(once, (x,), fast_mode=True)


# Relations #####################################################################################


@pytest.mark.parametrize("reduce", ["mean", "sum", "max"])
@pytest.mark.parametrize("kwargs", [{}, {"num_bases": 3}, {"num_blocks": 2}], ids=str)
def test_rgcn(x, edge_index, reduce, kwargs):
    edge_type = torch.randint(0, 4, (edge_index.size(1),))  # relation 4 has no edges
    build = lambda cls: cls(6, 8, 5, aggr=reduce, **kwargs)  # noqa: E731
    assert_equal(RGCNConv, build, (x, edge_index, edge_type))


@pytest.mark.parametrize("kwargs", [{}, {"num_bases": 2}, {"root_weight": False, "bias": False}])
@pytest.mark.parametrize("reduce", ["mean", "sum", "max"])
def test_rgcn_of_embeddings(edge_index, kwargs, reduce):
    edge_type = torch.randint(0, 3, (edge_index.size(1),))
    build = lambda cls: cls(NUM, 8, 3, aggr=reduce, **kwargs)  # noqa: E731
    assert_equal(RGCNConv, build, (None, edge_index, edge_type))
    assert_equal(RGCNConv, build, (torch.randperm(NUM), edge_index, edge_type))


def test_rgcn_in_bipartite_graphs(blocks):
    edge_index, src, dst = blocks
    edge_type = torch.randint(0, 3, (edge_index.size(1),))
    assert_equal(RGCNConv, lambda cls: cls((6, 4), 5, 3), ((src, dst), edge_index, edge_type))


# Forms of edges ################################################################################


@pytest.mark.parametrize("order", ["col", "row", None])
@pytest.mark.parametrize("conv", [GCNConv, SAGEConv, GraphConv, GATConv, GATv2Conv])
def test_edge_index_of_pyg(x, edge_index, order, conv):
    edges = EdgeIndex(edge_index, sparse_size=(NUM, NUM))
    if order is not None:
        edges = edges.sort_by(order).values
    theirs, ours = pair(conv, lambda cls: cls(6, 4))
    out, grads = run(theirs, (x, edges.as_tensor()), {})
    out_ours, grads_ours = run(ours, (x, edges), {})
    assert distance(out_ours, out) < 1e-11
    for a, b in zip(grads_ours, grads, strict=True):
        assert distance(a, b) < 1e-10


@pytest.mark.parametrize("conv", [GCNConv, SAGEConv, GraphConv, GATConv, GATv2Conv])
def test_a_sorted_list_of_pairs_seen_the_other_way_round(x, edge_index, conv):
    pairs = edge_index.t()[edge_index[1].argsort(stable=True)].contiguous()
    assert_equal(conv, lambda cls: cls(6, 4), (x, pairs.t()))


@pytest.mark.parametrize("layout", ["coo", "csr", "csc"])
@pytest.mark.parametrize("conv", [GCNConv, SAGEConv, GraphConv, GINConv])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_sparse_tensors_of_torch(x, edge_index, weight, conv, layout, reduce):
    if conv is GCNConv and layout == "csc":
        pytest.skip("PyG raises")
    adj_t = torch.sparse_coo_tensor(edge_index.flip(0), weight, (NUM, NUM)).coalesce()
    adj_t = {"coo": adj_t, "csr": adj_t.to_sparse_csr(), "csc": adj_t.to_sparse_csc()}[layout]

    def build(cls):
        torch.manual_seed(5)
        if issubclass(cls, GINConv.replaces):
            return cls(nn.Linear(6, 4), aggr=reduce)
        return cls(6, 4, aggr=reduce)

    assert_equal(conv, build, (x, adj_t))


class Standin(SparseTensor):
    """As much of torch_sparse's matrix as the fused paths use."""

    def __init__(self, adj_t):
        self.adj_t = adj_t

    def size(self, dim):
        return self.adj_t.size(dim)

    def csr(self):
        return self.adj_t.crow_indices(), self.adj_t.col_indices(), self.adj_t.values()


def test_sparse_tensors_of_torch_sparse(x, edge_index, weight):
    """Values are weights for GraphConv; SAGEConv leaves them out, as PyG does."""
    adj_t = torch.sparse_coo_tensor(edge_index.flip(0), weight, (NUM, NUM)).coalesce()
    adj_t = adj_t.to_sparse_csr()
    edges = torch.stack([adj_t.col_indices(), _rows(adj_t)])
    theirs, ours = pair(GraphConv, lambda cls: cls(6, 4))
    expected = theirs(x, edges, adj_t.values())
    assert distance(ours(x, Standin(adj_t)), expected) < 1e-12
    theirs, ours = pair(SAGEConv, lambda cls: cls(6, 4))
    assert distance(ours(x, Standin(adj_t)), theirs(x, edges)) < 1e-12


class Shared(Standin):
    """A matrix in compressed rows that may have its columns in common with another one."""

    def __init__(self, indptr, indices, shape):
        self.parts, self.shape = (indptr, indices, None), shape

    def size(self, dim):
        return self.shape[dim]

    def csr(self):
        return self.parts


@pytest.mark.parametrize("cls", [SAGEConv, GraphConv])
@pytest.mark.parametrize("in_place", [False, True])
def test_matrices_that_share_their_columns(cls, in_place, x, fused_at_any_size):
    """As those of ``sparse_resize``; a change of the rows in place is seen as well."""
    indices = torch.tensor([0, 1, 1, 2])
    indptr = torch.tensor([0, 2, 3, 4])
    rows = [torch.tensor([0, 0, 1, 2]), torch.tensor([0, 1, 2, 2])]
    theirs, ours = pair(cls, lambda cls: cls(6, 4))
    for row, other in zip(rows, (indptr, torch.tensor([0, 1, 2, 4])), strict=True):
        first = Shared(indptr.copy_(other) if in_place else other, indices, (3, 3))
        edges = torch.stack([indices, row])
        assert distance(ours(x[:3], first), theirs(x[:3], edges)) < 1e-12
    more = Shared(torch.tensor([0, 1, 2, 4, 4]), indices, (4, 3))
    expected = theirs((x[:3], x[:4]), edges)
    assert distance(ours((x[:3], x[:4]), more), expected) < 1e-12


def _rows(adj_t):
    return torch.arange(NUM).repeat_interleave(adj_t.crow_indices().diff())
