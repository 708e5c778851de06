"""Compiled ops and pointers that leave the edges: an error, and nothing is read from there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pyg_scale.ops import library

pytestmark = pytest.mark.skipif(not library.compiled(), reason="the kernels are not compiled")

EDGES = 4
# The second node has more than there is; both ends are right.
POINTERS = [
    torch.tensor([0, 2, 9, EDGES]),
    torch.tensor([0, -3, 2, EDGES]),
    torch.tensor([0, 3, 2, EDGES]),
]
NONE = torch.empty(0, dtype=torch.int64)
ALL = torch.tensor([0, 1, 2])
ops = torch.ops.pyg_scale


def indices() -> Tensor:
    """Four numbers in the middle of memory that may be read, so that reading more is no crash."""
    return torch.zeros(20, dtype=torch.int64)[8:12]


def sample(indptr: Tensor, **changes: object) -> object:
    arguments = {
        "indptr": [indptr],
        "indices": [indices()],
        "edge_id": [NONE],
        "edge_time": [NONE],
        "weight_prefix": [NONE],
        "node_time": [NONE],
        "num_nodes": [3],
        "expanded_type": [0],
        "neighbor_type": [0],
        "edge_type_hash": [1],
        "seed": [ALL],
        "seed_time": [NONE],
        "num_neighbors": [2],
        "num_hops": 1,
        "replace": False,
        "disjoint": False,
        "last": False,
        "induced": False,
        "key": 1,
        "int32_output": False,
        "num_threads": 1,
        "part": [],
        "local": [],
        "offsets": [],
        "after": [],
        "times_of_neighbors": False,
        "waits": False,
    }
    return ops.neighbor_sample(**{**arguments, **changes})


def expand(indptr: Tensor) -> object:
    graph = (indptr, indices(), NONE, NONE, NONE)
    return ops.expand_neighbors(*graph, ALL, ALL, NONE, NONE, NONE, 3, 1, 2, False, False)


def induce(indptr: Tensor) -> object:
    return sample(indptr, num_neighbors=[], num_hops=0, induced=True)


def hgt(indptr: Tensor) -> object:
    return ops.hgt_sample([indptr], [indices()], [NONE], [3], [0], [0], [1], [ALL], [2], 1, False)


def place(indptr: Tensor) -> object:
    weights, load = torch.ones(3, 1, dtype=torch.int64), torch.zeros(2, 1, dtype=torch.int64)
    part = torch.full((3,), -1, dtype=torch.int32)
    price = torch.zeros(2, 1, dtype=torch.float64)
    order = torch.tensor([1, 0, 2])
    return ops.stream_partition(
        indptr, indices(), weights, order, part, load, load + 9, price, True, 0, 1
    )


def draw(indptr: Tensor) -> object:
    offset = torch.tensor([0, 2])
    lists = [indptr], [indices()], [NONE], [ALL[1:2]], [NONE], [offset], [NONE], [NONE], [NONE]
    return ops.draw_neighbors(*lists, [2], [3], [1], [2], False)


def choose(indptr: Tensor) -> object:
    lists = [indptr], [indices()], [NONE], [NONE], [NONE], [ALL[1:2]], [NONE], [NONE]
    return ops.candidates(*lists, [2], False, False)


CALLS = {
    "neighbor_sample": sample,
    "expand_neighbors": expand,
    "induced": induce,
    "hgt_sample": hgt,
    "stream_partition": place,
    "draw_neighbors": draw,
    "candidates": choose,
    "breadth_first": lambda indptr: ops.breadth_first(indptr, indices()),
    "is_edge": lambda indptr: ops.is_edge(indptr, indices(), ALL, ALL),
    "random_walk": lambda indptr: ops.random_walk(indptr, indices(), None, ALL, ALL, 2, 1, True, 1),
    "random_walk_biased": lambda indptr: ops.random_walk_biased(
        indptr, indices(), None, None, ALL, ALL, 2, 1, 1, 2, 3, True, 1
    ),
    "ppr": lambda indptr: ops.ppr(indptr, indices(), ALL, torch.tensor([0, 3]), 2**60, 2**40, 2, 1),
    "adjacency_facts": lambda indptr: ops.adjacency_facts(indptr, indices(), 0, 3, 1),
    "undirected_count": lambda indptr: ops.undirected_count(
        indptr, indices(), NONE, 0, 0, 0, 3, torch.zeros(5, dtype=torch.int64)
    ),
    "csc_weight_prefix": lambda indptr: ops.csc_weight_prefix(indptr, NONE, torch.ones(EDGES), 1),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("which", range(len(POINTERS)))
def test_an_op_refuses_them(name: str, which: int) -> None:
    with pytest.raises(ValueError, match=r"the pointers of node [01] are -?\d+ and -?\d+, but"):
        CALLS[name](POINTERS[which])


def test_a_row_that_ends_far_away_is_refused_before_it_is_cut_into_pieces() -> None:
    indptr = torch.tensor([0, 2**26, EDGES])
    with pytest.raises(ValueError, match=r"indptr\[1\] is 67108864, but there are only 4 edges"):
        ops.csr_transpose(indptr, indices(), 3)


def test_neighbours_whose_times_do_not_exist() -> None:
    times = torch.arange(20)[8:11]
    changes = {"node_time": [times], "seed_time": [ALL + 99], "disjoint": True}
    with pytest.raises(ValueError, match="neighbour 5 is not a node; there are 3"):
        sample(
            torch.tensor([0, 4, 4, 4]), indices=[torch.full((4,), 5)], num_neighbors=[0], **changes
        )


def test_draws_fill_every_place() -> None:
    indptr, offset = torch.tensor([0, 2, 3, EDGES]), torch.tensor([1, 3])
    with pytest.raises(ValueError, match="offset must go from 0"):
        ops.draw_neighbors(
            *([indptr], [indices()], [NONE], [ALL[:1]], [NONE], [offset], [NONE], [NONE], [NONE]),
            *([3], [3], [1], [2], False),
        )


def test_draws_that_are_too_many_together() -> None:
    pointers = [torch.tensor([0, 2, 3, EDGES])] * 2
    offset, none = torch.tensor([0, 2]), [NONE] * 2
    others = [indices()] * 2, none, [ALL[:1]] * 2, none, [offset] * 2, none, none, none
    with pytest.raises(ValueError, match="num_edges are too many together"):
        ops.draw_neighbors(pointers, *others, [2**62] * 2, [3] * 2, [1, 2], [2] * 2, False)


def test_edge_ids_of_weights_that_do_not_exist() -> None:
    ids = torch.tensor([0, 1, 2, 5])
    with pytest.raises(ValueError, match="edge_id must be of edges"):
        ops.csc_weight_prefix(torch.tensor([0, 2, 3, EDGES]), ids, torch.ones(20)[8:12], 1)
