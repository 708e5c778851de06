"""Edge membership against a dense matrix, in plain torch and compiled."""

import pytest
import torch

from pyg_scale.ops import library
from pyg_scale.ops.is_edge import in_edges, is_edge, is_edge_reference

NUM_SRC, NUM_DST = 40, 30


@pytest.fixture
def graph():
    """Pointers, sources (a hub, parallel edges and nodes without edges among them), the matrix."""
    generator = torch.Generator().manual_seed(0)
    dst = torch.cat([torch.randint(3, 20, (150,), generator=generator), torch.full((60,), 7)])
    dst = dst.sort().values
    src = torch.randint(NUM_SRC, dst.shape, generator=generator)
    count = torch.bincount(dst, minlength=NUM_DST)
    matrix = torch.zeros(NUM_SRC, NUM_DST, dtype=torch.bool)
    matrix[src, dst] = True
    return torch.cat([count.new_zeros(1), count.cumsum(0)]), src, matrix


def layouts(src):
    return {"int64": src, "int32": src.int(), "strided": torch.stack([src, -src], dim=1)[:, 0]}


@pytest.mark.parametrize("layout", ["int64", "int32", "strided"])
@pytest.mark.parametrize("path", ["plain", "compiled"])
def test_every_pair(graph, layout, path, monkeypatch):
    if path == "compiled" and not library.compiled():
        pytest.skip("the kernels are not compiled")
    function = is_edge if path == "compiled" else is_edge_reference
    indptr, src, matrix = graph
    pairs = torch.cartesian_prod(torch.arange(NUM_SRC), torch.arange(NUM_DST))
    found = function(indptr, layouts(src)[layout], pairs[:, 0].clone(), pairs[:, 1].clone())
    assert found.dtype == torch.bool
    assert torch.equal(found.view(NUM_SRC, NUM_DST), matrix)


def test_nothing_asked_and_nothing_there(graph):
    indptr, src, _ = graph
    none = torch.empty(0, dtype=torch.int64)
    assert is_edge(indptr, src, none, none).shape == (0,)
    zeros = torch.zeros(3, dtype=torch.int64)
    assert is_edge(torch.zeros(2, dtype=torch.int64), none, zeros, zeros).tolist() == [False] * 3


def test_in_edges_repeats_and_keeps_order(graph):
    indptr, _, _ = graph
    place, position = in_edges(indptr, torch.tensor([7, 0, 4, 7]))
    hub = list(range(int(indptr[7]), int(indptr[8])))
    other = list(range(int(indptr[4]), int(indptr[5])))
    assert position.tolist() == hub + other + hub
    assert place.tolist() == [0] * len(hub) + [2] * len(other) + [3] * len(hub)


def test_compiled_refuses_a_node_that_is_none(graph):
    if not library.compiled():
        pytest.skip("the kernels are not compiled")
    indptr, src, _ = graph
    with pytest.raises(ValueError, match="dst: node 30 is out of range"):
        is_edge(indptr, src, torch.tensor([0]), torch.tensor([NUM_DST]))
