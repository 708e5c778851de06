"""Arguments that no public function passes and that once led out of bounds: errors name them."""

from __future__ import annotations

import pytest
import torch

from pyg_scale.ops import library
from tests.ops.op_calls import CALLS, EDGES, indptr, ints, longs, none

pytestmark = pytest.mark.skipif(not library.compiled(), reason="the kernels are not compiled")

LARGE, MOST = 2**62, 2**63 - 1
WRONG = {
    "csc_pointers": [
        ({"dst": longs(0, 2, 1, 5)}, "dst must be sorted, from 0 to num_dst - 1 = 6"),
        ({"dst": longs(0, 0, 2, 7)}, "dst must be sorted"),
        ({"dst": longs(-2, 0, 2, 5)}, "dst must be sorted"),
        ({"num_dst": -1}, "num_dst must be from 0"),
        ({"num_dst": MOST}, "num_dst must be from 0"),
    ],
    "csc_cursor": [
        ({"dst": longs(2, 0, 3, 2)}, "dst must be from 0 to num_dst - 1 = 2"),
        ({"num_dst": MOST}, "num_dst must be from 0"),
    ],
    "csc_merge": [
        ({"first_indptr": longs(0, 1, 3, 2)}, "indptr must go from 0 to the number of edges"),
        ({"first_indptr": longs(0, 3, 2, 4, 4)}, "the pointers of node 1 are 3 and 2"),
        ({"second_indptr": longs(0, 9, 2, 4, 4)}, "the pointers of node 0 are 0 and 9"),
        ({"second_indptr": longs(0, 4)}, "both must have the same number of destinations"),
        ({"second_id": longs(0)}, "indptr must go from 0"),
        ({"pair": torch.zeros(7, 2, dtype=torch.int64)}, "with two numbers an edge"),
        ({"pair": torch.zeros(8, 2, dtype=torch.int16)}, "pair must be contiguous, int32 or int64"),
    ],
    "csc_place": [
        ({"cursor": longs(0, 0, 9, 2, 4)}, "cursor is not of these edges: it leads to place 9"),
        ({"cursor": longs(0)}, "cursor must hold two numbers more"),
        ({"dst": longs(2, 0, 1, 5)}, "dst has destinations that cursor has no place for"),
        ({"pair": torch.zeros(4, 2, dtype=torch.int16)}, "pair must be contiguous, int32 or int64"),
    ],
    "csc_by_time": [
        ({"indptr": longs(0, 2, 99, 7, 9, 10, 10)}, "the pointers of node 1 are 2 and 99"),
        ({"edge_id": 10 - torch.arange(10)}, r"edge_id\[0\] is 10, but there are only 10 times"),
        ({"indptr": none()}, "indptr must hold one number more"),
    ],
    "csc_by_time, of neighbours": [
        ({"indices": torch.full((10,), 6)}, r"indices\[0\] is 6, but there are only 6 times"),
    ],
    "csc_weight_prefix": [
        ({"indptr": none(), "weight": torch.empty(0)}, "indptr must hold one number more"),
        ({"weight": torch.full((10,), torch.inf)}, "weight must be finite"),
        ({"weight": torch.full((10,), torch.nan)}, "weight must be finite"),
    ],
    "sieve_plan": [
        ({"state": longs(3, 2, 5, -1, 3)}, "state: there is no slot 5; there are 3"),
        ({"state": longs(-1, 2, 0, -1, 3)}, "state: there are not so many slots in use"),
        ({"slot_of": torch.full((9,), 8, dtype=torch.int32)}, "slot_of: there is no slot 7"),
        ({"owner": longs(4, 99, 7)}, "owner: slot 1 has row 99, but there are only 9"),
        ({"newer": ints(7, 2, -1)}, "newer: there is no slot 7"),
    ],
    "belady_plan": [
        ({"slot_of": torch.full((9,), 8, dtype=torch.int32)}, "slot_of: there is no slot 7"),
        ({"slot_of": torch.full((9,), -8, dtype=torch.int32)}, "slot_of: there is no slot -8"),
        (
            {
                "owner": longs(-4, -99, -7),
                "visited": torch.zeros(3, dtype=torch.uint8),
                "ids": longs(5, 8),
            },
            "owner: slot 0 has row -4",
        ),
        ({"state": longs(4, 1)}, "state: there are not so many slots in use"),
        ({"state": longs(3, 9)}, "state: the hand is at no slot"),
        ({"now": LARGE}, "now must fit into 31 bits"),
        ({"coming": torch.zeros(9, dtype=torch.complex128)}, "coming must be uint8, int16"),
    ],
    "belady_announce": [
        ({"slot_of": torch.full((9,), 8, dtype=torch.int32)}, "slot_of: there is no slot 7"),
        ({"batch": LARGE}, "batch must fit into 31 bits"),
    ],
    "cache_plan_placed": [
        ({"slot_of": ints(0, 2, 9, 3)}, "slot_of: there is no slot 8; there are 3"),
        ({"slot_of": ints(-(2**31), 2, 1, 3)}, "slot_of: there is no slot"),
    ],
    "edge_buckets": [
        ({"bounds": longs(0, 9, 6)}, "bounds must rise from 0"),
        ({"bounds": longs(-3, 3, 6)}, "bounds must rise from 0"),
        ({"table": ints(0, 5, 1)}, "table has a range that there is not"),
        ({"shift": 64}, "shift must be from 0 to 62"),
        ({"shift": -1}, "shift must be from 0 to 62"),
    ],
    "undirected_place": [
        ({"cursor": longs(0, -9, 4, 8, 14, 18, 20, 20)}, "cursor is not of these edges"),
        ({"out": torch.zeros(20, dtype=torch.int8)}, "out must be contiguous, int32 or int64"),
        ({"dst_offset": MOST}, "dst_offset must be from 0"),
    ],
    "undirected_compact": [
        ({"entries": torch.zeros(10, dtype=torch.int16)}, "entries must be contiguous, int32"),
        ({"indptr": none(), "kept": none()}, "indptr must hold one number more"),
        ({"indptr": -indptr()}, "the pointers of node 0 are 0 and -2"),
    ],
    "breadth_first": [({"indptr": none()}, "indptr must hold one number more")],
    "stream_partition": [
        ({"load": torch.full((2, 2), LARGE)}, r"load must be from 0 to 2\*\*60 - 1"),
        (
            {"load": longs(0, 0, 0, 0).view(2, 2), "part": torch.zeros(6, dtype=torch.int32)},
            "load does not fit part and weights",
        ),
        ({"capacity": torch.full((2, 2), LARGE)}, r"capacity must be less than 2\*\*60"),
        ({"weights": torch.full((6, 2), LARGE)}, r"weights must be less than 2\*\*60"),
        ({"coefficient": torch.full((2, 2), torch.nan).double()}, "coefficient and load: nan"),
        ({"coefficient": torch.tensor([[1e300] * 2] * 2).double()}, "coefficient and load: inf"),
    ],
    "number_nodes": [({"known": longs(3, -1)}, "node -1 does not exist: there are 6")],
    "number_nodes, disjoint": [
        ({"seed": longs(1, LARGE, 0, 0)}, "seed 4611686018427387904 does not exist: there are 2"),
    ],
    "stitch_edges": [
        ({"counts": [longs(MOST, MOST), longs(2)]}, "counts must not be negative, and add up"),
        ({"size": LARGE}, "there must be one answer for each"),
    ],
    "ppr": [
        ({"alpha": 2**46 - 1}, r"alpha must be from 2\*\*46 to 2\*\*62 - 1"),
        ({"alpha": 2**62}, "alpha must be from"),
        ({"eps": 0}, r"eps must be from 2\*\*12 to 2\*\*62"),
        ({"k": -1}, "k must be from 0"),
        ({"seed": longs(6)}, "seed: node 6 does not exist: there are 6"),
        ({"indices": torch.full((EDGES,), 9)}, "neighbour 9 does not exist: there are 6"),
        ({"bounds": none()}, "bounds must hold one number more"),
    ],
    "random_walk": [({"length": MOST}, "length must be from 0")],
    "random_walk, by weight": [
        ({"weight_prefix": torch.full((EDGES,), -2)}, "weight_prefix must rise from 0"),
    ],
    "random_walk_biased": [
        ({"back": 0}, r"back must be from 1 to 2\*\*62"),
        ({"far": 2**62 + 1}, r"far must be from 1 to 2\*\*62"),
        ({"sorted": none()}, "sorted must have as many entries as indices"),
    ],
    "random_walk_biased, by weight": [
        ({"weight_prefix": torch.full((EDGES,), -2)}, "weight_prefix must rise from 0"),
        (
            {"weight_prefix": longs(3, 5, 1, 2, 4, -(2**63), 9, 2, 3, 1)},
            "weight_prefix must rise from 0 within a node, but does not at node 2",
        ),
    ],
    "insert_events": [
        ({"src": longs(1, 6)}, "node 6 does not exist: there are 6"),
        ({"used": 5}, "the log has no room"),
        ({"used": -1}, "the log has no room"),
        ({"log": torch.zeros(16, dtype=torch.int64)}, "with 3 numbers for each entry"),
        ({"first_event": MOST}, "first_event must be from 0"),
    ],
    "last_events": [
        ({"n_id": longs(-1)}, "node -1 does not exist: there are 6"),
        ({"head": longs(0, 3, 5, 0, 0, 0)}, "the log is damaged: entry 5 is not before entry 5"),
        (
            {"log": longs(2, 0, 0, 1, 0, 4, 2, 1, 1, 1, 1, 2)},
            "the log is damaged: entry 4 is not before entry 2",
        ),
        (
            {"log": longs(2, 0, 0, 9, 0, 0, 2, 1, 1, 1, 1, 2)},
            "the log is damaged: node 9 does not exist: there are 6",
        ),
        ({"size": -1}, "size must not be negative"),
    ],
    "hgt_sample": [({"num_nodes": [MOST]}, "num_nodes must be from 0")],
    "neighbor_sample": [
        ({"num_nodes": [MOST]}, "num_nodes must be from 0"),
        ({"num_hops": LARGE, "num_neighbors": []}, "num_hops must be from 0 to 1000"),
        (
            {"num_neighbors": [LARGE, 2], "replace": True},
            r"num_neighbors must be less than 2\*\*31",
        ),
    ],
    "neighbor_sample, by weight": [
        ({"weight_prefix": [longs(*range(10, 0, -1))]}, "weight_prefix must rise from 0"),
    ],
    "neighbor_sample, in parts by weight": [
        (
            {"weight_prefix": [none(), longs(1)]},
            "edge_time and weight_prefix must be there for all parts",
        ),
        ({"offsets": [longs(0)]}, "offsets must hold one number more"),
    ],
    "cluster_nodes": [
        ({"node_weights": torch.full((6, 1), LARGE)}, "node_weights must not be negative, and"),
        ({"edge_weights": torch.full((10,), LARGE)}, "edge_weights must not be negative, and"),
        ({"rounds": LARGE}, "rounds must be from 0 to 10000"),
    ],
    "contract_graph": [({"num_clusters": 2**31 - 1}, "num_clusters must be from 0")],
    "refine_partition": [
        ({"minimum": torch.full((2, 1), MOST)}, "minimum .* is too large"),
        ({"passes": LARGE}, "passes must be from 0 to 10000"),
    ],
    "disk_read": [
        ({"num_rows": 2**60}, "offset and num_rows lead beyond"),
        ({"fd": 2**32}, "fd must be the number of an open file"),
        ({"block": LARGE}, "block must be from 1"),
    ],
    "socket_send": [({"fd": 2**32 + 1}, "fd must be the number of an open file")],
}
CASES = [(name, case) for name, cases in WRONG.items() for case in range(len(cases))]


@pytest.mark.parametrize(("name", "case"), CASES)
def test_an_error_names_the_argument(name: str, case: int) -> None:
    changes, message = WRONG[name][case]
    op = getattr(torch.ops.pyg_scale, name.partition(", ")[0])
    with pytest.raises(ValueError, match=message):
        op(**{**CALLS[name](), **changes})


def test_more_threads_than_can_be_counted() -> None:
    call = CALLS["cut_edges"]()
    assert torch.ops.pyg_scale.cut_edges(**{**call, "num_threads": LARGE}) == 3
    call = CALLS["gather"]()
    out = torch.ops.pyg_scale.gather(**{**call, "num_threads": MOST})
    assert torch.equal(out, call["x"][call["index"]])


def test_what_is_written_may_not_be_what_is_read() -> None:
    call = CALLS["undirected_sort"]()
    pointers = call["indptr"]
    with pytest.raises(ValueError, match="degree must not share memory with another argument"):
        torch.ops.pyg_scale.undirected_sort(**{**call, "degree": pointers[1:]})
