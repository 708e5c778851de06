"""Edges among drawn nodes: compiled and plain alike, and as PyG's ``subgraph``."""

from __future__ import annotations

import pytest
import torch
from torch_geometric.utils import subgraph

from pyg_scale.ops import keys, library
from pyg_scale.ops.induced_edges import induced_edges, walked_edges
from pyg_scale.ops.random_walk import random_walk

pytestmark = pytest.mark.matrix(3)


def graph(seed, num_nodes=150, degree=6, dtype=torch.int64, pairs=False):
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 2 * degree, (num_nodes,), generator=generator)
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    size = int(indptr[-1])
    index = torch.randint(num_nodes, (size,), generator=generator)
    columns = [index.to(dtype), torch.randperm(size, generator=generator).to(dtype)]
    return (indptr, *(torch.stack(columns, 1).unbind(1) if pairs else columns))


@pytest.mark.parametrize("kernels", ["auto", "never"])
@pytest.mark.parametrize(
    "drawn", [[], [7], [64, 0, 63, 149, 64, 127, 128], range(150), range(149, 0, -2)]
)
def test_edges_are_those_of_the_subgraph(drawn, kernels, monkeypatch):
    monkeypatch.setenv("PYG_SCALE_KERNELS", kernels)
    indptr, index, edge_id = graph(1)
    drawn = torch.tensor(list(drawn), dtype=torch.int64)
    found = induced_edges(indptr, index, edge_id, drawn)
    assert found.node.tolist() == sorted(set(drawn.tolist()))
    edges = torch.stack([torch.arange(150).repeat_interleave(indptr.diff()), index])
    inside, edge = subgraph(found.node, edges, edge_id, relabel_nodes=True, num_nodes=150)
    assert torch.equal(found.edge_index, inside)
    assert torch.equal(found.edge, edge)


def test_compiled_and_plain_are_equal(monkeypatch):
    if not library.compiled():
        pytest.skip(f"needs the compiled kernels: {library.status()['command']}")
    for seed in range(40):
        size = 1 + 13 * seed
        drawn = torch.randint(size, (5 * seed,), generator=torch.Generator().manual_seed(seed))
        stored = [torch.int32, torch.int64][seed % 2], seed % 4 < 2
        degree = [6, 30, 90][seed % 3]  # rows are read and written sixteen numbers at a time
        compiled = induced_edges(*graph(seed, size, degree, *stored), drawn)
        with monkeypatch.context() as patch:
            patch.setenv("PYG_SCALE_KERNELS", "never")
            plain = induced_edges(*graph(seed, size, degree), drawn)
        indptr, index, _ = graph(seed, size, degree, *stored)
        bare = induced_edges(indptr, index, None, drawn)
        assert bare.edge is None and all(map(torch.equal, bare[:2], plain[:2]))
        for one, other in zip(compiled, plain, strict=True):
            assert torch.equal(one, other) and one.dtype == other.dtype


@pytest.mark.parametrize("kernels", ["auto", "never"])
@pytest.mark.parametrize("drawn", [[150, 149], [-1, 3]])
def test_nodes_that_are_refused(drawn, kernels, monkeypatch):
    monkeypatch.setenv("PYG_SCALE_KERNELS", kernels)
    with pytest.raises(ValueError, match="drawn: node"):
        induced_edges(*graph(1), torch.tensor(drawn))


@pytest.mark.parametrize("kernels", ["auto", "never"])
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("index", torch.full_like(graph(1)[1], 150), "index: node 150 does not exist"),
        ("index", torch.full_like(graph(1)[1], -1), "index: node -1 does not exist"),
        ("index", None, "index: node 150 does not exist"),  # the last one, in 32 bits
        ("indptr", graph(1)[0] + 9, "the pointers of node"),
        ("edge_id", graph(1)[2][1:], "edge_id has"),
    ],
)
def test_what_leads_out_of_the_graph_is_refused(name, value, message, kernels, monkeypatch):
    monkeypatch.setenv("PYG_SCALE_KERNELS", kernels)
    arguments = dict(zip(("indptr", "index", "edge_id"), graph(1), strict=True))
    if value is None:
        value = arguments["index"].int()
        value[-1], arguments["edge_id"] = 150, arguments["edge_id"].int()
    arguments[name] = value
    with pytest.raises(ValueError, match=message):
        induced_edges(**arguments, drawn=torch.arange(150))


@pytest.mark.parametrize("value", [150, -1, 2**31 - 1, -(2**31)])
def test_a_wrong_end_is_found_at_every_place_of_a_vector(value):
    indptr, index, _ = graph(1, degree=60, dtype=torch.int32)
    for place in range(int(indptr[7]), int(indptr[7]) + 40):
        wrong = index.clone()
        wrong[place] = value
        with pytest.raises(ValueError, match=f"index: node {value} does not exist"):
            induced_edges(indptr, wrong, None, torch.arange(150))


@pytest.mark.parametrize("name", ["index", "edge_id"])
def test_columns_of_two_dtypes_are_refused(name):
    if not library.compiled():
        pytest.skip(f"needs the compiled kernels: {library.status()['command']}")
    arguments = dict(zip(("indptr", "index", "edge_id"), graph(1), strict=True))
    arguments[name] = arguments[name].int()
    with pytest.raises(ValueError, match="one dtype"):
        induced_edges(**arguments, drawn=torch.arange(150))


@pytest.mark.parametrize("kernels", ["auto", "never"])
@pytest.mark.parametrize(("count", "length"), [(0, 3), (1, 0), (40, 2), (300, 1), (7, 20)])
@pytest.mark.parametrize(
    "stored", [(torch.int64, False), (torch.int32, False), (torch.int32, True)]
)
def test_edges_of_walks_are_those_among_their_nodes(stored, count, length, kernels, monkeypatch):
    for seed in range(4):
        indptr, index, edge_id = graph(seed, 150, 2, *stored)  # some nodes have no edges
        monkeypatch.setenv("PYG_SCALE_KERNELS", "never")
        start = keys.draws_each(seed, count, 150)
        walks = random_walk(indptr, index, start, length, key=keys.fold(seed, keys.WALK))
        wanted = induced_edges(indptr, index, edge_id, walks.node.view(-1))
        monkeypatch.setenv("PYG_SCALE_KERNELS", kernels)
        found = walked_edges(indptr, index, edge_id, count, length, seed)
        assert found.node.numel() > 0 or count == 0
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one, other)
        bare = walked_edges(indptr, index, None, count, length, seed)
        assert bare.edge is None and all(map(torch.equal, bare[:2], found[:2]))


@pytest.mark.parametrize("kernels", ["auto", "never"])
@pytest.mark.parametrize(("name", "value"), [("count", -1), ("length", -1), ("indptr", None)])
def test_walks_that_are_refused(name, value, kernels, monkeypatch):
    monkeypatch.setenv("PYG_SCALE_KERNELS", kernels)
    indptr, index, _ = graph(1)
    given = {"indptr": indptr, "index": index, "edge_id": None, "count": 3, "length": 2, "key": 1}
    if name == "indptr":
        given |= {"indptr": torch.zeros(1, dtype=torch.int64), "index": index[:0]}
    else:
        given[name] = value
    with pytest.raises(ValueError, match="a node to begin at" if name == "indptr" else name):
        walked_edges(**given)
