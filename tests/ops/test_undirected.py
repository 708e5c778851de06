"""Undirected graphs and what is true of an adjacency: compiled, plain, and against scipy."""

import pytest
import scipy.sparse
import torch

from pyg_scale.ops import library, undirected
from pyg_scale.ops.undirected import Block, facts, sort_rows, undirected_reference


@pytest.fixture(params=["compiled", "plain"])
def path(request, monkeypatch):
    if request.param == "compiled" and not library.compiled():
        pytest.skip("the kernels are not compiled")
    if request.param == "plain":
        monkeypatch.setenv("PYG_SCALE_KERNELS", "never")
    monkeypatch.setattr(undirected, "_CHUNK", 37)  # many steps
    return request.param


def csr(rows, cols, num_rows):
    """Pointers and columns, by row, within one in the order given."""
    order = rows.argsort(stable=True)
    count = torch.bincount(rows, minlength=num_rows)
    return torch.cat([count.new_zeros(1), count.cumsum(0)]), cols[order]


def random_edges(num_dst, num_src, num_edges, seed):
    generator = torch.Generator().manual_seed(seed)
    dst = torch.randint(num_dst, (num_edges,), generator=generator)
    return dst, torch.randint(num_src, (num_edges,), generator=generator)


def expected(edges, num_nodes):
    """Scipy's answer."""
    dst, src = torch.cat(edges, dim=1).numpy()
    matrix = scipy.sparse.coo_matrix((dst * 0 + 1, (dst, src)), shape=(num_nodes, num_nodes))
    matrix = (matrix + matrix.T).tocsr()
    matrix.setdiag(0)
    matrix.eliminate_zeros()
    matrix.sort_indices()
    return matrix.indptr.tolist(), matrix.indices.tolist()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_one_type(path, dtype):
    dst, src = random_edges(50, 50, 400, 1)
    indptr, indices = csr(dst, src.to(dtype), 50)
    wide = torch.stack([indices, indices], 1)[:, 0]  # strided
    found = undirected.undirected([Block(indptr, wide)], 50)
    assert found[0].dtype == torch.int64 and found[1].dtype == torch.int32
    assert (found[0].tolist(), found[1].tolist()) == expected([torch.stack([dst, src])], 50)


def test_several_types_in_pieces(path):
    """Users 0-29, items 30-49; one relation is given in two pieces whose rows have names."""
    follows, buys = random_edges(30, 30, 90, 2), random_edges(20, 30, 70, 3)
    blocks = [Block(*csr(*follows, 30))]
    indptr, indices = csr(*buys, 20)
    for rows in (torch.arange(0, 20, 2), torch.arange(1, 20, 2)):
        mine = [indices[indptr[v] : indptr[v + 1]] for v in rows]
        count = torch.tensor([0] + [len(each) for each in mine]).cumsum(0)
        blocks.append(Block(count, torch.cat(mine), 30, 0, rows))
    found = undirected.undirected(blocks, 50)
    edges = [torch.stack(follows), torch.stack([buys[0] + 30, buys[1]])]
    assert (found[0].tolist(), found[1].tolist()) == expected(edges, 50)


def test_nothing(path):
    indptr, indices = undirected.undirected([], 3)
    assert indptr.tolist() == [0] * 4 and indices.tolist() == []
    indptr, indices = undirected.undirected([], 0)
    assert indptr.tolist() == [0] and indices.tolist() == []


def test_nodes_that_do_not_exist(path):
    block = Block(torch.tensor([0, 1]), torch.tensor([7]))
    with pytest.raises(ValueError, match="no"):
        undirected.undirected([block], 3)


def test_facts_of_an_undirected_graph(path):
    indptr, indices = undirected_reference(
        [Block(*csr(*random_edges(40, 40, 300, 4), 40))], 40, torch.int32
    )
    assert facts(indptr, indices) == (True, True, True)
    reverse = indices.clone()
    for v in range(40):
        reverse[indptr[v] : indptr[v + 1]] = indices[indptr[v] : indptr[v + 1]].flip(0)
    assert facts(indptr, reverse) == (False, True, True)
    assert torch.equal(sort_rows(indptr, reverse), indices)


@pytest.mark.parametrize(
    ("rows", "undirected", "simple"),
    [
        ([[1], []], False, True),  # one direction
        ([[1, 1], [0, 0]], True, False),  # copies
        ([[1, 1], [0]], False, False),  # twice in one direction, once in the other
        ([[1, 2, 1], [0, 0], [0]], True, False),  # copies that are not side by side
        ([[0, 1], [0]], True, False),  # a loop
        ([[1], [2], [0]], False, True),  # as many in as out, in a circle
    ],
)
def test_facts_of_others(path, rows, undirected, simple):
    indptr = torch.tensor([0] + [len(row) for row in rows]).cumsum(0)
    indices = torch.tensor([u for row in rows for u in row], dtype=torch.int32)
    assert facts(indptr, indices)[1:] == (undirected, simple)


def test_one_copy_among_many_neighbours(path):
    """A star whose centre has its neighbours in no order, and one of them twice."""
    near = torch.randperm(3000, generator=torch.Generator().manual_seed(5)) + 1
    indptr, indices = csr(
        *torch.cat([torch.stack([near * 0, near]), torch.stack([near, near * 0])], 1), 3001
    )
    assert facts(indptr, indices) == (False, True, True)
    once = near[[*range(3000), 7]]
    indptr, indices = csr(
        *torch.cat([torch.stack([once * 0, once]), torch.stack([once, once * 0])], 1), 3001
    )
    assert facts(indptr, indices) == (False, True, False)


def test_facts_refuse_what_is_no_graph(path):
    with pytest.raises(ValueError, match="neighbour"):
        facts(torch.tensor([0, 1]), torch.tensor([1]))
    with pytest.raises(ValueError, match="pointers"):
        facts(torch.tensor([0, 2, 1, 3]), torch.tensor([1, 0, 1]))


def test_the_sums_are_the_same_compiled_and_plain():
    if not library.compiled():
        pytest.skip("the kernels are not compiled")
    indptr, indices = csr(*random_edges(30, 30, 200, 5), 30)
    found = torch.ops.pyg_scale.adjacency_facts(indptr, indices, 3, 25, 2)
    assert tuple(found) == undirected.facts_reference(indptr, indices, 3, 25)
