"""A matrix per edge that its relation chooses: results and gradients, and no matrix per edge."""

import copy
import gc

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn
from torch_geometric.nn.conv import MessagePassing

from pyg_scale.nn import accelerate, by_relation, fallbacks
from pyg_scale.nn.edges import Edges
from pyg_scale.nn.graph import edges_of
from pyg_scale.nn.lifted import Lifted
from pyg_scale.nn.relations import group_pairs
from pyg_scale.ops import adjacency
from tests.nn import oracle

RELATIONS, CHANNELS = 5, 8


@pytest.fixture(scope="module")
def edge_type(edge_index):
    generator = torch.Generator().manual_seed(2)
    return torch.randint(RELATIONS - 1, (edge_index.size(1),), generator=generator)  # not the last


@pytest.fixture
def no_matrices(monkeypatch):
    """A matrix that is gathered for an edge is an error."""

    def refuse(self):
        raise AssertionError("a matrix per edge")

    monkeypatch.setattr(by_relation.Matrices, "computed", refuse)


class Products(MessagePassing):
    """The layer of one's own: what it does with a matrix for every edge is ``how``."""

    def __init__(self, how, *shape, aggr="sum"):
        super().__init__(aggr=aggr)
        self.how = how
        self.weight = nn.Parameter(torch.randn(RELATIONS, *(shape or (CHANNELS, 4))))

    def forward(self, x, edge_index, edge_type, size=None):
        return self.propagate(edge_index, x=x, edge_type=edge_type, size=size)

    def message(self, x_i, x_j, edge_type):
        return self.how(x_i, x_j, self.weight, edge_type)


def compared(theirs, *arguments):
    torch.manual_seed(0)
    for each in theirs.parameters():
        nn.init.normal_(each)  # RGATConv leaves some without numbers
    return oracle.compared(theirs, arguments)


OF_PYG = {
    "rgat": lambda: pyg.RGATConv(CHANNELS, 6, RELATIONS, heads=2),
    "rgat, bases": lambda: pyg.RGATConv(CHANNELS, 6, RELATIONS, num_bases=2),
    "rgat, blocks": lambda: pyg.RGATConv(CHANNELS, 6, RELATIONS, num_blocks=2, heads=2),
    "rgat, within": lambda: pyg.RGATConv(
        CHANNELS, 6, RELATIONS, attention_mechanism="within-relation"
    ),
    "rgat, product": lambda: pyg.RGATConv(
        CHANNELS, 6, RELATIONS, attention_mode="multiplicative-self-attention"
    ),
    "rgat, additive": lambda: pyg.RGATConv(CHANNELS, 6, RELATIONS, mod="additive"),
    "rgat, scaled": lambda: pyg.RGATConv(CHANNELS, 6, RELATIONS, heads=2, mod="scaled"),
    "rgat, f-additive": lambda: pyg.RGATConv(CHANNELS, 6, RELATIONS, mod="f-additive"),
    "rgat, f-scaled": lambda: pyg.RGATConv(CHANNELS, 6, RELATIONS, mod="f-scaled", concat=False),
    "fast rgcn": lambda: pyg.FastRGCNConv(CHANNELS, 6, RELATIONS),
    "fast rgcn, sum": lambda: pyg.FastRGCNConv(CHANNELS, 6, RELATIONS, aggr="sum", num_bases=3),
}


@pytest.mark.parametrize("name", OF_PYG)
def test_layers_of_pyg(name, x, edge_index, edge_type, no_matrices):
    assert not fallbacks(compared(OF_PYG[name](), x, edge_index, edge_type))


def test_attention_between_edge_features_and_relations(x, edge_index, edge_type, no_matrices):
    layer = pyg.RGATConv(CHANNELS, 6, RELATIONS, heads=2, edge_dim=3)
    values = torch.randn(edge_index.size(1), 3, dtype=torch.float64)
    assert not fallbacks(compared(layer, x, edge_index, edge_type, values))


OWN = {
    "bmm": lambda i, j, w, t: torch.bmm(j.unsqueeze(1), w[t]).squeeze(1),
    "of destinations": lambda i, j, w, t: torch.bmm(i.unsqueeze(1), w[t]).squeeze(1),
    "matmul": lambda i, j, w, t: torch.matmul(j.unsqueeze(1), w[t]).squeeze(-2),
    "@": lambda i, j, w, t: (j.unsqueeze(1) @ w.index_select(0, t)).squeeze(1),
    "einsum": lambda i, j, w, t: torch.einsum("ec,ecd->ed", j, torch.index_select(w, 0, t)),
    "both ends": lambda i, j, w, t: (
        torch.einsum("ea,eab -> eb", i, w[t]) + torch.einsum("ea,eab->eb", j, w[t]).relu()
    ),
    "then a map": lambda i, j, w, t: torch.bmm(j.unsqueeze(1), w[t]).squeeze(1) @ w[0, :4],
    "then a vector": lambda i, j, w, t: (
        torch.bmm(j.unsqueeze(1), w[t]).squeeze(1).matmul(w[0, 0]).unsqueeze(-1) * j
    ),
}


@pytest.mark.parametrize("aggr", ["sum", "mean", "max"])
@pytest.mark.parametrize("name", OWN)
def test_layers_of_ones_own(name, aggr, x, edge_index, edge_type, no_matrices):
    ours = compared(Products(OWN[name], aggr=aggr), x, edge_index, edge_type)
    assert not any("raised" in why for why in fallbacks(ours).get("", {}))


def test_several_rows_of_each_edge(x, edge_index, edge_type, no_matrices):
    layer = Products(lambda i, j, w, t: torch.bmm(j.view(-1, 2, 4), w[t]).view(-1, 6), 4, 3)
    assert not fallbacks(compared(layer, x, edge_index, edge_type))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_types_of_edges(dtype, x, edge_index, edge_type, no_matrices):
    assert not fallbacks(compared(Products(OWN["bmm"]), x, edge_index, edge_type.to(dtype)))


def test_more_relations_than_edges(x, edge_index, monkeypatch, no_matrices):
    size = edge_index.size(1)
    layer = Products(OWN["bmm"])
    layer.weight = nn.Parameter(torch.empty(2 * size, CHANNELS, 4))
    types = torch.randperm(2 * size, generator=torch.Generator().manual_seed(0))[:size]
    assert not fallbacks(compared(layer, x, edge_index, types))


def test_destinations_are_other_nodes(x, edge_index, edge_type, no_matrices):
    layer = Products(OWN["both ends"])
    ours = compared(layer, (x, x[:60].clone()), edge_index % 60, edge_type)
    assert not any("raised" in why for why in fallbacks(ours).get("", {}))


def test_target_to_source(x, edge_index, edge_type, no_matrices):
    layer = Products(OWN["both ends"])
    layer.flow = "target_to_source"
    ours = compared(layer, x, edge_index, edge_type)
    assert not any("raised" in why for why in fallbacks(ours).get("", {}))


ROWS = {
    "the matrices": lambda i, j, w, t: w[t].sum(dim=1),
    "of the edges themselves": lambda i, j, w, t: torch.bmm((i * j).unsqueeze(1), w[t]).squeeze(1),
    "another sum": lambda i, j, w, t: torch.einsum("ec,fcd->ed", j, w[t]),
    "negative": lambda i, j, w, t: torch.bmm(j.unsqueeze(1), w[t - RELATIONS]).squeeze(1),
    "matrices changed in place": lambda i, j, w, t: torch.bmm(j.unsqueeze(1), w[t].mul_(2)).squeeze(
        1
    ),
    "matrices changed in place before": lambda i, j, w, t: (
        lambda m: (m.mul_(2), torch.bmm(j.unsqueeze(1), m))[1]
    )(w[t]).squeeze(1),
    "types changed in place": lambda i, j, w, t: changed_types(j, w, t),
}


def changed_types(j, w, types):
    types = types.clone()
    matrices = w.detach()[types]  # PyG has no gradient either
    types.zero_()
    return torch.bmm(j.unsqueeze(1), matrices).squeeze(1)


@pytest.mark.parametrize("name", ROWS)
def test_what_needs_matrices_is_pygs(name, x, edge_index, edge_type):
    compared(Products(ROWS[name]), x, edge_index, edge_type)


@pytest.mark.parametrize("types", [-1, RELATIONS])
def test_relations_that_do_not_exist(types, x, edge_index, edge_type):
    wrong = edge_type.clone()
    wrong[3] = types
    layer = pyg.RGATConv(CHANNELS, 6, RELATIONS).double()
    with pytest.raises((RuntimeError, IndexError)) as theirs:
        layer(x, edge_index, wrong)
    accelerate(layer)
    with pytest.raises(type(theirs.value)) as ours:
        layer(x, edge_index, wrong)
    assert str(ours.value) == str(theirs.value)


def test_new_relations_of_the_same_edges(x, edge_index, edge_type):
    layer = Products(OWN["bmm"]).double()
    ours = copy.deepcopy(layer)
    accelerate(ours)
    types = edge_type.clone()
    for _ in range(3):
        torch.testing.assert_close(ours(x, edge_index, types), layer(x, edge_index, types))
        types.add_(1).remainder_(RELATIONS)


def test_a_recorded_call_has_a_matrix_per_edge(x, edge_index, edge_type, monkeypatch):
    """A CUDA graph has sizes of its own; the number of pairs would be read while it is captured."""
    monkeypatch.setattr(by_relation, "recording", lambda: True)
    monkeypatch.setattr(by_relation, "group_pairs", None)
    compared(Products(OWN["bmm"]), x, edge_index, edge_type)


def test_nothing_is_kept_after_the_call(x, edge_index, edge_type):
    layer = OF_PYG["rgat"]().double()
    accelerate(layer)
    layer(x, edge_index, edge_type)
    gc.collect()
    gc.disable()
    try:
        layer(x, edge_index, edge_type).sum().backward()
        kept = Edges, Lifted, by_relation.Matrices, by_relation.EdgeTypes
        assert not [each for each in gc.get_objects() if type(each) in kept]
    finally:
        gc.enable()


def test_second_derivatives(x, edge_index, edge_type):
    layer = Products(lambda i, j, w, t: OWN["bmm"](i, j, w, t).sigmoid()).double()
    ours = copy.deepcopy(layer)
    accelerate(ours)
    found = []
    for each in (layer, ours):
        leaf = x.clone().requires_grad_()
        out = each(leaf, edge_index, edge_type)
        (first,) = torch.autograd.grad(out.square().sum(), leaf, create_graph=True)
        first.square().sum().backward()
        found.append([leaf.grad, each.weight.grad])
    for mine, right in zip(*reversed(found), strict=True):
        torch.testing.assert_close(mine, right)


@pytest.mark.parametrize("of_sources", [True, False])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_pairs(of_sources, dtype, edge_index, edge_type):
    graph = edges_of(edge_index.to(dtype), 100, 100)
    pairs = group_pairs(graph, edge_type, RELATIONS, of_sources)
    node = edge_index[0 if of_sources else 1]
    wanted = sorted({*zip(edge_type.tolist(), node.tolist(), strict=True)})
    relation = torch.arange(RELATIONS).repeat_interleave(torch.tensor(pairs.counts))
    assert [*zip(relation.tolist(), pairs.nodes.indices.tolist(), strict=True)] == wanted
    of_edge = pairs.edge_index[0]
    assert torch.equal(relation[of_edge], edge_type)
    assert torch.equal(pairs.nodes.indices[of_edge].long(), node)
    assert torch.equal(pairs.edge_index[1], edge_index[1])
    edges = pairs.edges
    at = torch.arange(edges.num_edges) if edges.edge_id is None else edges.edge_id.long()
    assert torch.equal(edges.indices.long(), of_edge[at])
    known, found = (
        edges.transpose(),
        adjacency.transpose(edges.indptr, edges.indices, edges.num_src),
    )
    assert torch.equal(known.indptr, found.indptr)
    for start, end in zip(known.indptr[:-1].tolist(), known.indptr[1:].tolist(), strict=True):
        ours, theirs = known.position[start:end].long(), found.position[start:end].long()
        assert torch.equal(ours.sort().values, theirs.sort().values)
        assert torch.equal(
            known.indices[start:end].sort().values, found.indices[start:end].sort().values
        )
    rows = adjacency.rows_of(edges.indptr, edges.num_edges)
    assert torch.equal(known.indices.long(), rows[known.position.long()])


def test_pairs_of_relations_that_do_not_exist(edge_index, edge_type):
    graph = edges_of(edge_index, 100, 100)
    assert group_pairs(graph, edge_type - 1, RELATIONS, True) is None
    assert group_pairs(graph, edge_type, int(edge_type.max()), True) is None
