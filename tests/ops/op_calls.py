"""One call of every compiled op, and more of those that have several ways: where a fuzz begins.

:data:`CALLS` has the arguments by the names in the op's schema, made anew for every call. A name
may go on with what is special about the call: ``"csr_sum, long rows"``.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Arguments = dict[str, Any]

NODES, EDGES = 6, 10
LONG = 5000
"""Edges of a row that is cut into pieces."""
MANY = 140_000
"""Edges that several threads share."""


def longs(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def ints(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def none() -> Tensor:
    return torch.empty(0, dtype=torch.int64)


def indptr() -> Tensor:
    return longs(0, 2, 4, 7, 9, 10, 10)


def indices() -> Tensor:
    """Of a graph without directions, whose last node is alone."""
    return longs(1, 2, 0, 2, 0, 1, 3, 2, 4, 3)


def position() -> Tensor:
    """Where the edges by source are among those by destination."""
    return torch.argsort(indices(), stable=True)


def graph() -> Arguments:
    return {"indptr": indptr(), "indices": indices()}


def fused(edge_id: bool = True) -> Arguments:
    by_source = {"t_indptr": indptr(), "t_indices": indices(), "t_position": position()}
    return {**graph(), "edge_id": torch.arange(EDGES) if edge_id else None, **by_source}


def long_rows() -> Arguments:
    """A node with more edges than one task takes, and two with none."""
    pointers, sources = longs(0, 0, LONG, LONG), torch.arange(LONG) % 3
    order = torch.argsort(sources, stable=True)
    back = torch.cat([longs(0), torch.bincount(sources, minlength=3).cumsum(0)])
    return {
        "indptr": pointers,
        "indices": sources,
        "edge_id": None,
        "t_indptr": back,
        "t_indices": torch.ones(LONG, dtype=torch.int64),
        "t_position": order,
    }


def features(*shape: int) -> Tensor:
    return torch.linspace(-1, 1, max(1, torch.Size(shape).numel())).reshape(shape)


# Building and partitioning ######################################################################


def many_edges() -> Arguments:
    """Sorted by destination."""
    return {"dst": torch.arange(MANY) // 2, "src": torch.arange(MANY) % 7}


def cursor_of(dst: Tensor, num_dst: int) -> Tensor:
    ends = torch.bincount(dst, minlength=num_dst).cumsum(0)
    return torch.cat([longs(0, 0), ends])


def merged(first: Tensor, second: Tensor) -> Arguments:
    """Two lists of destinations; neighbours are the positions, which are the ids of the first."""
    size = int(torch.cat([first, second]).max()) + 1
    out: Arguments = {}
    for name, dst in (("first", first), ("second", second)):
        order = dst.argsort(stable=True)
        out[f"{name}_indptr"] = cursor_of(dst, size)[1:]
        out[f"{name}_indices"] = order.to(torch.int32)
        out[f"{name}_id"] = none() if name == "first" else order
    pair = torch.zeros(first.numel() + second.numel(), 2, dtype=torch.int64)
    return {**out, "pair": pair, "num_threads": 2}


def placed(dst: Tensor, src: Tensor, num_dst: int) -> Arguments:
    size = dst.numel()
    return {
        "dst": dst,
        "src": src,
        "cursor": cursor_of(dst, num_dst),
        "pair": torch.zeros(size, 2, dtype=torch.int64),
        "begin": 0,
        "end": size,
        "num_threads": 2,
    }


def timed(sort: bool, of_edges: bool = True) -> Arguments:
    time = longs(5, 3, 8, 1, 2, 9, 4, 7, 6, 0) if of_edges else longs(5, 3, 8, 1, 2, 9)
    ids = {"edge_id": torch.arange(EDGES), "time": time}
    return {**graph(), **ids, "of_edges": of_edges, "sort": sort, "num_threads": 2}


def of_one_table() -> Arguments:
    given = timed(True)
    pair = torch.stack([given["indices"], given["edge_id"]], dim=1)
    return {**given, "indices": pair[:, 0], "edge_id": pair[:, 1]}


def partition() -> Arguments:
    return {
        **graph(),
        "weights": torch.ones(NODES, 2, dtype=torch.int64),
        "order": longs(3, 1, 0, 2, 5, 4),
        "part": torch.tensor([0, -1, 1, -1, 0, -1], dtype=torch.int32),
        "load": longs(2, 2, 1, 1).view(2, 2),
        "capacity": torch.full((2, 2), 4, dtype=torch.int64),
        "coefficient": torch.full((2, 2), 1000.0, dtype=torch.float64),
        "ldg": False,
        "begin": 0,
        "end": NODES,
    }


def weighted() -> Arguments:
    return {**graph(), "edge_weights": torch.ones(EDGES, dtype=torch.int64)}


def of_nodes() -> Tensor:
    return torch.ones(NODES, 1, dtype=torch.int64)


def undirected(**more: Any) -> Arguments:
    cursor = longs(0, 0, 4, 8, 14, 18, 20, 20)
    where = {"rows": none(), "dst_offset": 0, "src_offset": 0, "begin": 0, "end": NODES}
    return {**graph(), **where, "cursor": cursor, **more}


# Caches #########################################################################################


def sieve() -> Arguments:
    """Three slots in use of three, of rows 4, 2 and 7 in this order."""
    return {
        "slot_of": ints(0, 0, 2, 0, 1, 0, 0, 3, 0),
        "owner": longs(4, 2, 7),
        "newer": ints(1, 2, -1),
        "older": ints(-1, 0, 1),
        "visited": torch.tensor([1, 0, 0], dtype=torch.uint8),
        "since": longs(0, 1, 2),
        "state": longs(3, 2, 0, -1, 3),
        "ids": longs(2, 5, 5, 8, 4, 0, 5),
    }


def belady() -> Arguments:
    return {
        "slot_of": ints(0, 0, 2, 0, 1, 0, 0, 3, 0),
        "coming": torch.tensor([0, 1, 6, 0, 0, 2, 0, 4, 0], dtype=torch.uint8),
        "owner": longs(4, 2, 7),
        "next": ints(2**31 - 1, 1, 2),
        "visited": torch.tensor([1, 0, 0], dtype=torch.uint8),
        "state": longs(3, 1),
        "ids": longs(2, 5, 5, 8, 4, 0, 5),
        "now": 1,
    }


def announced() -> Arguments:
    kept = {
        name: value for name, value in belady().items() if name in ("slot_of", "coming", "next")
    }
    return {**kept, "ids": longs(2, 5, 8), "batch": 3}


def byte_rows(count: int, size: int = 5) -> Tensor:
    return torch.arange(count * size, dtype=torch.uint8).view(count, size)


# Sampling #######################################################################################


def sample(**changes: Any) -> Arguments:
    size = len(changes.get("indptr", [0]))
    return {
        "indptr": [indptr()],
        "indices": [indices()],
        "edge_id": [none() for _ in range(size)],
        "edge_time": [none() for _ in range(size)],
        "weight_prefix": [none() for _ in range(size)],
        "node_time": [none()],
        "num_nodes": [NODES],
        "expanded_type": [0],
        "neighbor_type": [0],
        "edge_type_hash": [1],
        "seed": [longs(0, 2, 4)],
        "seed_time": [none()],
        "num_neighbors": [2, 2],
        "num_hops": 2,
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
        "by_source": False,
        "same_in_all_hops": False,
        "next_key": 0,
        "renewed": 0,
        "weighting": 0,
        "layers": False,
        **changes,
    }


def in_parts(**changes: Any) -> Arguments:
    """The first four nodes in one part, the other two in another."""
    return sample(
        indptr=[longs(0, 2, 4, 7, 9), longs(0, 1, 1)],
        indices=[indices()[:9].contiguous(), longs(3)],
        part=[torch.tensor([0, 0, 0, 0, 1, 1], dtype=torch.uint8)],
        local=[longs(0, 1, 2, 3, 0, 1)],
        offsets=[longs(0, 4, 6)],
        **changes,
    )


def prefix() -> Tensor:
    return longs(3, 5, 1, 2, 4, 5, 9, 2, 3, 1)


def temporal(**changes: Any) -> Arguments:
    time = {"edge_time": [torch.arange(EDGES)], "seed_time": [longs(5, 9, 7)]}
    return sample(disjoint=True, **{**time, **changes})


def wide_frontier(**changes: Any) -> Arguments:
    size = 6000
    around = {"indptr": [torch.arange(size + 1)], "indices": [torch.arange(size).flip(0)]}
    return sample(**around, num_nodes=[size], seed=[torch.arange(size)], num_threads=3, **changes)


def expand(**changes: Any) -> Arguments:
    return {
        **graph(),
        "edge_id": torch.arange(EDGES),
        "time": torch.arange(EDGES),
        "weight_prefix": none(),
        "place": longs(0, 2, 3),
        "node": longs(0, 2, 3),
        "seed": longs(0, 1, 1),
        "latest": longs(9, 5, 8),
        "after": none(),
        "num_neighbor_nodes": NODES,
        "key": 1,
        "num_neighbors": 2,
        "replace": False,
        "last": False,
        "by_source": False,
        "next_key": 0,
        "renewed": 0,
        "weighting": 0,
        **changes,
    }


def number(disjoint: bool) -> Arguments:
    return {
        "known": longs(3, 1),
        "known_seed": longs(0, 1),
        "node": longs(1, 5, 3, 5),
        "seed": longs(1, 0, 0, 0),
        "num_nodes": NODES,
        "num_seeds": 2,
        "disjoint": disjoint,
        "append": True,
    }


def hgt() -> Arguments:
    return {
        "indptr": [indptr()],
        "indices": [indices()],
        "edge_id": [torch.arange(EDGES)],
        "num_nodes": [NODES],
        "dst_type": [0],
        "src_type": [0],
        "node_type_hash": [1],
        "seed": [longs(0, 2)],
        "num_samples": [2, 1],
        "key": 1,
        "int32_output": False,
    }


def draw() -> Arguments:
    lists = {**graph(), "edge_id": torch.arange(EDGES), "node": longs(0, 2), "seed": longs(1, 0)}
    lists |= {"offset": longs(0, 2, 4), "num_edges": 4, "num_nodes": NODES}
    lists |= {"begin": none(), "end": none(), "weight_prefix": none()}
    lists |= {"key": 1, "num_neighbors": 2}
    return {**{name: [value] for name, value in lists.items()}, "replace": False}


def weight_sums() -> Tensor:
    """The running sums of weights within each node of the graph, one of which is 0."""
    return longs(2, 5, 1, 1, 4, 6, 9, 3, 5, 7)


def draw_by_weight() -> Arguments:
    """Two of the three in-edges of a node, and both of another."""
    changes = {"node": longs(2, 1), "offset": longs(0, 2, 4), "num_edges": 4}
    changes |= {"begin": longs(4, 2), "end": longs(7, 4), "weight_prefix": weight_sums()}
    return {**draw(), **{name: [value] for name, value in changes.items()}}


def choosing(**changes: Any) -> Arguments:
    lists = {**graph(), "time": longs(1, 3, 2, 2, 1, 4, 4, 0, 9, 5), "neighbor_time": none()}
    lists |= {"weight_prefix": weight_sums(), "node": longs(0, 2), "latest": longs(2, 4)}
    lists |= {"after": longs(0, 1), "num_neighbors": 1, **changes}
    return {**{name: [value] for name, value in lists.items()}, "replace": False, "last": False}


# Features, disks and sockets ####################################################################


def book() -> Arguments:
    return {
        "part": torch.tensor([0, 1, 0, 1], dtype=torch.uint8),
        "local": longs(0, 0, 1, 1),
        "offsets": longs(0, 2, 4),
    }


def split(**changes: Any) -> Arguments:
    groups = {"group": longs(0, 1), "distinct": torch.tensor([True, True])}
    index = {"index": longs(3, 0, 3, 2, 1, 0)}
    return {**book(), **index, **groups, "original": False, "narrow": False, **changes}


_kept: dict[str, Any] = {}


def disk(**changes: Any) -> Arguments:
    if "file" not in _kept:
        _kept["file"] = os.memfd_create("rows")
        os.write(_kept["file"], bytes(range(256)) * 64)
    return {
        "fd": _kept["file"],
        "offset": 16,
        "num_rows": 500,
        "rows": longs(7, 0, 499, 3),
        "position": longs(2, 0, 3, 1),
        "out": torch.zeros(4, 8, dtype=torch.uint8),
        "block": 64,
        "gap": 128,
        "longest": 4096,
        "num_threads": 2,
        **changes,
    }


def _pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets, neither of which waits for long; with 4 KiB for the first."""
    if "sockets" not in _kept:
        both = socket.socketpair()
        for one in both:
            one.settimeout(0.01)
            wait = b"\0" * 8 + (10_000).to_bytes(8, "little")  # microseconds
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, wait)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, wait)
            one.setblocking(True)
        _kept["sockets"] = both
    mine, other = _kept["sockets"]
    for one in (mine, other):
        try:
            while one.recv(1 << 20, socket.MSG_DONTWAIT):
                pass
        except BlockingIOError:
            pass
    other.send(bytes(4096), socket.MSG_DONTWAIT)
    return mine, other


def send() -> Arguments:
    data = [features(3), byte_rows(4)]
    return {
        "fd": _pair()[0].fileno(),
        "data": data,
        "index": [none(), longs(3, 0, 0)],
        "rows": [-1, 3],
    }


def receive() -> Arguments:
    return {
        "fd": _pair()[0].fileno(),
        "out": [features(3), byte_rows(4), byte_rows(4)],
        "rows": [-1, 3, 3],
        "position": [none(), longs(3, 0, 1), longs(0, 2, 1, 3)],
        "take": [none(), none(), longs(0, 1, 1, 2)],
    }


def walks(**changes: Any) -> Arguments:
    return {
        **graph(),
        "weight_prefix": None,
        "start": longs(0, 5, 3),
        "walk": longs(0, 1, 2),
        "length": 4,
        "key": 1,
        "positions": False,
        "num_threads": 2,
        **changes,
    }


def biased(**changes: Any) -> Arguments:
    odds = {"back": 2**61, "near": 2**62, "far": 2**60}
    return walks(**{"sorted": indices(), "positions": True, **odds, **changes})


# Layers #########################################################################################


def gat(make: Callable[[], Arguments], rows: int, edges: int, heads: int = 2) -> Arguments:
    return {
        **make(),
        "x": features(rows, heads, 3),
        "a_src": features(rows, heads),
        "a_dst": features(rows, heads),
        "a_edge": features(edges, heads),
        "negative_slope": 0.2,
        "dropout": 0.5,
        "seed": longs(7),
    }


def gatv2(make: Callable[[], Arguments], rows: int, edges: int) -> Arguments:
    x = features(rows, 2, 9)
    more = {"att": features(1, 2, 9), "x_edge": features(edges, 2, 9)}
    rest = {"negative_slope": 0.2, "dropout": 0.5, "seed": longs(7)}
    return {**make(), "x_src": x, "x_dst": x.clone(), **more, **rest}


def dot(make: Callable[[], Arguments], rows: int, edges: int) -> Arguments:
    kept = {k: v for k, v in make().items() if not k.startswith("t_")}
    x = features(rows, 2, 9)
    more = {"query": x, "key": x.clone(), "value": x.clone(), "edge": features(edges, 2, 9)}
    return {**kept, **more, "scale": 0.5, "dropout": 0.5, "seed": longs(7)}


def grad_of(arguments: Arguments, rows: int, edges: int, channels: int) -> Arguments:
    return {
        **arguments,
        "out": features(rows, 2, channels),
        "lse": features(rows, 2),
        "weights": features(edges, 2),
        "out_grad": features(rows, 2, channels),
        "weights_grad": features(edges, 2),
    }


def edge_list(**more: Any) -> Arguments:
    ends = torch.stack([longs(3, 1, 2, 2, 0), longs(1, 0, 2, 1, 5)])
    return {"edge_index": ends, "num_src": NODES, "num_dst": NODES, **more}


def by_source(make: Callable[[], Arguments], nodes: int, edges: int) -> Arguments:
    return {
        **{name: value for name, value in make().items() if name.startswith("t_")},
        "query": features(nodes, 2, 9),
        "out_grad": features(nodes, 2, 9),
        "logits_grad": features(edges, 2),
        "weights": features(edges, 2),
    }


def long_targets() -> Arguments:
    """A source with more edges than one task takes."""
    back = longs(0, 0, LONG, LONG)
    return {"t_indptr": back, "t_indices": torch.arange(LONG) % 3, "t_position": torch.arange(LONG)}


def no_source() -> Arguments:
    return {"t_indptr": None, "t_indices": None, "t_position": None}


def aggregate(make: Callable[[], Arguments], rows: int, edges: int, heads: int = 1) -> Arguments:
    return {**make(), "x": features(rows, 2 * heads), "weight": features(edges, heads)}


def stored(make: Callable[[], Arguments], edges: int, rows: Tensor) -> Arguments:
    """Rows by their places, of which the first two are in another matrix."""
    given = {k: v for k, v in make().items() if not k.startswith("t_")}
    given["indices"] = given["indices"] - 2
    return {
        **given,
        "rows": rows,
        "rest": rows[:2].clone(),
        "scale": None,
        "zero": None,
        "dtype": torch.float32,
        "weight": features(edges, 1),
    }


def by_column(make: Callable[[], Arguments], edges: int, rows: int) -> Arguments:
    scales = {"scale": features(3).double(), "zero": features(3).double(), "dtype": torch.float64}
    return {**stored(make, edges, byte_rows(rows, 3)), **scales, "weight": None}


def extreme_grad(make: Callable[[], Arguments], rows: int, edges: int) -> Arguments:
    given = make()
    kept = {k: given[k] for k in ("t_indptr", "t_indices", "t_position", "indptr", "edge_id")}
    arg = torch.zeros(rows, 4, dtype=torch.int32)
    return {**kept, "arg": arg, "grad": features(rows, 4), "weight": features(edges, 2)}


def weight_grad(make: Callable[[], Arguments], rows: int) -> Arguments:
    kept = {k: v for k, v in make().items() if not k.startswith("t_")}
    arg = torch.zeros(rows, 4, dtype=torch.int32)
    x = {"x": features(rows, 4), "grad": features(rows, 4)}
    return {**kept, **x, "arg": arg, "heads": 2, "mean": False}


CALLS: dict[str, Callable[[], Arguments]] = {
    "adjacency_facts": lambda: {**graph(), "begin": 0, "end": NODES, "num_threads": 2},
    "belady_announce": announced,
    "belady_plan": belady,
    "both_directions": lambda: {
        "row": longs(1, 2, 0, 3, 1),
        "col": longs(0, 0, 0, 1, 3),
        "edge": longs(7, 3, 1, 2, 5),
        "first": longs(0, 1, 2, 1),
    },
    "breadth_first": graph,
    "cache_copy": lambda: {
        "rows": byte_rows(3),
        "held": longs(4, 2, 7),
        "slot_at": ints(1, -1, 2, 0),
        "ids": longs(2, 5, 7, 3),
        "out": byte_rows(4),
    },
    "cache_fill": lambda: {
        "rows": byte_rows(3),
        "held": longs(4, 2, 7),
        "slots": ints(1, 2),
        "position": longs(3, 0),
        "ids": longs(8, 5, 7, 3),
        "out": byte_rows(4),
    },
    "cache_lookup": lambda: {"slot_of": ints(0, 2, 1, -3), "ids": longs(3, 1, 0)},
    "cache_pin": lambda: {
        "pins": ints(0, 2, 1),
        "held": longs(4, 2, 7),
        "place": longs(1, -1, 2, 0),
        "ids": longs(2, 5, 8, 4),
        "next": 1,
    },
    "cache_places": lambda: {
        "slot_at": ints(1, -1, 2, -1),
        "miss": longs(1),
        "fill_slot": ints(2),
        "again": longs(3),
        "same": longs(1),
        "num_slots": 3,
    },
    "cache_unpin": lambda: {"pins": ints(0, 2, 1), "place": longs(1, -1, 2, 1)},
    "cache_plan_placed": lambda: {
        "slot_of": ints(0, 2, 1, 3),
        "loaded": torch.tensor([1, 0, 0], dtype=torch.uint8),
        "ids": longs(3, 1, 0, 1, 2),
    },
    "cache_scatter": lambda: {
        "rows": byte_rows(3),
        "take": longs(2, 0, 2),
        "position": longs(0, 3, 1),
        "out": byte_rows(4),
    },
    "cluster_nodes": lambda: {
        **weighted(),
        "node_weights": of_nodes(),
        "limit": longs(3),
        "group": longs(0, 0, 0, 1, 1, 5),
        "order": torch.arange(NODES),
        "rounds": 3,
        "key": 1,
    },
    "contract_graph": lambda: {
        **weighted(),
        "cluster": longs(0, 0, 1, 1, 2, 2),
        "num_clusters": 3,
    },
    "csc_by_time": lambda: timed(True),
    "csc_by_time, of neighbours": lambda: timed(True, False),
    "csc_by_time, looked at": lambda: timed(False),
    "csc_by_time, of one table": of_one_table,
    "csc_cursor": lambda: {"dst": longs(2, 0, 1, 2), "num_dst": 3, "num_threads": 2},
    "csc_cursor, many": lambda: {"dst": many_edges()["dst"], "num_dst": MANY, "num_threads": 2},
    "csc_merge": lambda: merged(longs(2, 0, 1, 2), longs(0, 1, 2, 3)),
    "csc_merge, many": lambda: merged(many_edges()["dst"], many_edges()["dst"]),
    "csc_place": lambda: placed(longs(2, 0, 1, 2), longs(0, 1, 2, 3), 3),
    "csc_place, many": lambda: placed(**many_edges(), num_dst=MANY),
    "csc_pointers": lambda: {"dst": longs(0, 0, 2, 5), "num_dst": 7, "num_threads": 2},
    "csc_pointers, many": lambda: {"dst": many_edges()["dst"], "num_dst": MANY, "num_threads": 2},
    "csc_scan": lambda: {
        "dst": longs(2, 0, 1, 2),
        "src": longs(0, 1, 2, 3),
        "num_dst": 3,
        "num_src": 4,
        "num_threads": 2,
    },
    "csc_weight_prefix": lambda: {
        "indptr": indptr(),
        "edge_id": torch.arange(EDGES),
        "weight": torch.linspace(0, 2, EDGES, dtype=torch.float64),
        "num_threads": 2,
    },
    "csr_extreme": lambda: {**aggregate(fused, NODES, EDGES, 2), "minimum": False},
    "csr_extreme, long rows": lambda: {**aggregate(long_rows, 3, LONG), "minimum": True},
    "csr_extreme_grad": lambda: extreme_grad(fused, NODES, EDGES),
    "csr_extreme_grad, long rows": lambda: extreme_grad(long_rows, 3, LONG),
    "csr_sum": lambda: {**aggregate(fused, NODES, EDGES), "mean": True},
    "csr_sum, heads": lambda: {**aggregate(fused, NODES, EDGES, 4), "mean": False},
    "csr_sum, long rows": lambda: {**aggregate(long_rows, 3, LONG), "mean": False},
    "csr_group": lambda: edge_list(num_loops=-1, by_source=False),
    "csr_group, with loops": lambda: edge_list(num_loops=NODES - 1, by_source=True),
    "csr_group_padded": lambda: edge_list(num_loops=-1, by_source=False),
    "csr_group_padded, with loops": lambda: edge_list(num_loops=NODES - 1, by_source=True),
    "csr_transpose_few": lambda: {**graph(), "num_src": NODES},
    "csr_transpose": lambda: {**graph(), "num_src": NODES},
    "csr_weight_grad": lambda: weight_grad(fused, NODES),
    "csr_weight_grad, long rows": lambda: weight_grad(long_rows, 3),
    "cut_edges": lambda: {**graph(), "part": ints(0, 0, 1, 1, 0, 1), "num_threads": 2},
    "dense_product": lambda: {
        "a": features(5, 20),
        "b": features(20, 60),
        "bias": features(60),
        "out": features(5, 60),
        "add": False,
    },
    "dense_product, a long sum": lambda: {
        "a": features(5000, 3).t(),
        "b": features(5000, 300),
        "bias": None,
        "out": features(3, 300),
        "add": True,
    },
    "dense_product, two large ones": lambda: {
        "a": features(9, 1000),
        "b": features(400, 1000).t(),
        "bias": None,
        "out": features(9, 800)[:, :400],
        "add": False,
    },
    "dense_product_pays": dict,
    "dequantize": lambda: {
        "q": byte_rows(4, 12),
        "index": longs(3, 0, 3),
        "scale": torch.empty(0, 0),
        "zero": torch.empty(0, 0),
        "dtype": torch.float32,
        "num_threads": 2,
    },
    "dequantize, by column": lambda: {
        "q": byte_rows(4, 3),
        "index": longs(3, 0, 3),
        "scale": features(3).double(),
        "zero": features(3).double(),
        "dtype": torch.float64,
        "num_threads": 2,
    },
    "disk_read": disk,
    "disk_read, by row": lambda: disk(gap=0, longest=64, num_threads=0),
    "dot_product_attention": lambda: {
        **dot(fused, NODES, EDGES),
        **no_source(),
        "need_weights": True,
    },
    "dot_product_attention, long rows": lambda: {
        **dot(long_rows, 3, LONG),
        **no_source(),
        "need_weights": True,
    },
    "dot_product_attention_grad": lambda: grad_of(dot(fused, NODES, EDGES), NODES, EDGES, 9),
    "dot_product_attention_grad_by_source": lambda: by_source(fused, NODES, EDGES),
    "dot_product_attention_grad_by_source, long rows": lambda: by_source(long_targets, 3, LONG),
    "candidates": choosing,
    "candidates, times of nodes": lambda: choosing(
        time=none(), neighbor_time=longs(0, 1, 2, 3, 4, 5), weight_prefix=none()
    ),
    "draw_neighbors": draw,
    "draw_neighbors, by weight": draw_by_weight,
    "edge_buckets": lambda: {
        "dst": longs(5, 0, 3, 2),
        "src": longs(1, 2, 3, 4),
        "bounds": longs(0, 3, 6),
        "table": ints(0, -1, 1),
        "shift": 1,
        "block": 3,
        "wide": True,
    },
    "edge_group": lambda: {
        "dst": ints(1, 0, 1, 2),
        "src": longs(1, 2, 3, 4),
        "offset": torch.tensor([0, 2, 0, 1], dtype=torch.int16),
        "first": longs(0, 3),
        "count": longs(2, 2),
        "num_dst": 3,
        "wide": True,
    },
    "edge_formula": lambda: {
        **graph(),
        "edge_id": torch.arange(EDGES).flip(0),
        "inputs": [features(NODES, 12), features(NODES, 4), features(EDGES, 1)],
        "ends": [0, 1, 2],
        # sigmoid(x_j * e) + leaky(x_i), in a slot that is used again
        "program": [2, 0, 2, 0, 3, 15, 3, 3, 0, 3, 20, 1, 1, 1, 4, 0, 3, 4, 0, 3],
        "numbers": torch.tensor([0.0, 0.2]),
        "width": 12,
        "reduced": [3, 0],
        "reduce": 0,
        "kept": [3, 4],
        "kept_width": [12, 1],
    },
    "edge_formula, long rows": lambda: {
        "indptr": longs(0, LONG, LONG),
        "indices": torch.arange(LONG) % 3,
        "edge_id": None,
        "inputs": [features(3, 70)],
        "ends": [0],
        "program": [14, 0, 0, 0, 1, 16, 1, 1, 0, 1],
        "numbers": torch.tensor([0.0]),
        "width": 70,
        "reduced": [1],
        "reduce": 1,
        "kept": [],
        "kept_width": [],
    },
    "edge_sum": lambda: {
        "x": features(NODES, 3),
        "edge_index": torch.stack([longs(0, 1, 2, 2), longs(1, 0, 2, 1)]),
        "weight": None,
        "num_dst": NODES,
        "norm": 1,
        "own": 0.5,
        "transposed": False,
    },
    "edge_sum, gcn": lambda: {
        "x": features(NODES, 9),
        "edge_index": torch.stack([longs(0, 1, 2, 2), longs(1, 0, 2, 1)]),
        "weight": features(4, 1).view(-1),
        "num_dst": NODES,
        "norm": 2,
        "own": 0.0,
        "transposed": True,
    },
    "edge_sum_weight_grad": lambda: {
        "x": features(NODES, 9),
        "grad": features(NODES, 9),
        "edge_index": torch.stack([longs(0, 1, 2, 2), longs(1, 0, 2, 1)]),
        "mean": True,
        "transposed": False,
    },
    "expand_neighbors": expand,
    "expand_neighbors, by weight": lambda: expand(weight_prefix=prefix(), num_neighbors=1),
    "expand_neighbors, by node": lambda: expand(by_node=True),
    "expand_neighbors, in a window": lambda: expand(after=longs(1, -1, 6), last=True),
    "expand_neighbors, by source": lambda: expand(
        time=none(), seed=none(), latest=none(), by_source=True, renewed=2**31, weighting=2
    ),
    "expand_neighbors, replaced": lambda: expand(replace=True, weight_prefix=prefix()),
    "gat_attention": lambda: {**gat(fused, NODES, EDGES), "need_weights": True},
    "gat_attention, long rows": lambda: {**gat(long_rows, 3, LONG), "need_weights": False},
    "gat_attention_grad": lambda: grad_of(gat(fused, NODES, EDGES), NODES, EDGES, 3),
    "gat_attention_grad, long rows": lambda: grad_of(gat(long_rows, 3, LONG), 3, LONG, 3),
    "edge_formula_compiled": lambda: {
        "indptr": longs(0, 2, 2, 3),
        "indices": longs(1, 2, 0),
        "edge_id": None,
        "inputs": [features(3, 4), features(3, 4)],
        "ends": [0, 2],
        "module": "edge_formula_none",
        "numbers": [0.5],
        "width": 4,
        "reduced": 1,
        "kept": [1],
    },
    "first_places": lambda: {"key": longs(7, 0, 7, 2**40, 0), "distinct": 3},
    "gather": lambda: {"x": features(5, 3), "index": longs(4, 0, 2), "num_threads": 2},
    "gather_cached": lambda: {
        "cached": features(3, 2),
        "rest": features(5, 2),
        "index": longs(4, 0, 2),
        "slot_of": ints(0, -1, 2, -1, 1),
    },
    "gather_parts": lambda: {
        "x": [byte_rows(2), byte_rows(2), byte_rows(2, 3), byte_rows(2, 3)],
        **book(),
        "index": longs(3, 0, 1, 2),
        "num_threads": 2,
    },
    "gatv2_attention": lambda: {**gatv2(fused, NODES, EDGES), "need_weights": True},
    "gatv2_attention, long rows": lambda: {**gatv2(long_rows, 3, LONG), "need_weights": True},
    "gatv2_attention_grad": lambda: grad_of(gatv2(fused, NODES, EDGES), NODES, EDGES, 9),
    "gatv2_attention_grad, long rows": lambda: grad_of(gatv2(long_rows, 3, LONG), 3, LONG, 9),
    "grow_part": lambda: {
        **weighted(),
        "size": torch.ones(NODES, dtype=torch.int64),
        "order": torch.arange(NODES),
        "target": 3,
        "key": 1,
    },
    "hgt_sample": hgt,
    "hgt_take": lambda: {
        "neighbor": [longs(1, 2, 1), longs(4)],
        "counts": [longs(2, 1), longs(1)],
        "score": [longs(5, 3), longs(2)],
        "taken": longs(2),
        "num_nodes": NODES,
        "k": 1,
        "key": 1,
    },
    "huge_empty": lambda: {"sizes": [300, 1000], "dtype": torch.float32},
    "induced_edges": lambda: {
        "indptr": indptr(),
        "index": indices(),
        "edge_id": torch.arange(indices().numel()),
        "drawn": longs(5, 0, 2, 0),
    },
    "join_clusters": lambda: {
        "partptr": longs(0, 2, 3, 6),
        "indptr": indptr(),
        "index": indices(),
        "which": longs(2, 0),
        "own_first": True,
        "positions": True,
    },
    "labor_take": lambda: {
        "counts": longs(3, 0, 2, 1),
        "neighbor": longs(1, 2, 5, 2, 1, 4),
        "num_nodes": NODES,
        "k": 2,
        "rounds": -1,
        "key": 1,
        "next_key": 2,
        "renewed": 1 << 31,
    },
    "layer_take": lambda: {
        "counts": longs(3, 0, 2, 1),
        "neighbor": longs(1, 2, 5, 2, 1, 4),
        "theirs": longs(2, 1, 3, 1, 2, 5),
        "num_nodes": NODES,
        "k": 2,
        "weighting": 3,
        "key": 1,
    },
    "layer_take_by": lambda: {
        "neighbor": longs(1, 2, 5, 2, 1, 4),
        "share": torch.full((NODES,), 2.0**31, dtype=torch.float64),
        "key": 1,
    },
    "map_rows": lambda: {"x": features(4096), "device": 0},
    "insert_events": lambda: {
        "head": longs(0, 2, 1, 0, 0, 0),
        "log": torch.cat([longs(2, 0, 0, 1, 0, 0), torch.zeros(18, dtype=torch.int64)]),
        "src": longs(1, 3),
        "dst": longs(2, 3),
        "used": 2,
        "first_event": 1,
    },
    "is_edge": lambda: {**graph(), "src": longs(0, 3), "dst": longs(1, 1)},
    "keyed_draws": lambda: {"key": 1, "index": longs(0, 1), "size": longs(5, 0)},
    "keyed_draws_each": lambda: {"key": 1, "count": 3, "size": 5},
    "last_events": lambda: {
        "head": longs(0, 3, 4, 0, 0, 0),
        "log": longs(2, 0, 0, 1, 0, 0, 2, 1, 1, 1, 1, 2),
        "n_id": longs(2, 0, 2),
        "size": 2,
    },
    "neighbor_sample": sample,
    "neighbor_sample, in parts": in_parts,
    "neighbor_sample, in parts by weight": lambda: in_parts(
        weight_prefix=[prefix()[:9].contiguous(), longs(1)], replace=True
    ),
    "neighbor_sample, induced": lambda: temporal(induced=True, edge_id=[torch.arange(EDGES)]),
    "neighbor_sample, temporal": temporal,
    "neighbor_sample, in a window": lambda: temporal(after=[longs(1, 9, 2)], last=True),
    "neighbor_sample, induced in a window": lambda: temporal(
        after=[longs(1, 9, 2)], induced=True, strict=True
    ),
    "neighbor_sample, times of nodes": lambda: temporal(
        edge_time=[none()], node_time=[torch.arange(NODES)], last=True, times_of_neighbors=True
    ),
    "neighbor_sample, by weight": lambda: sample(weight_prefix=[prefix()], num_neighbors=[1, 1]),
    "neighbor_sample, by source": lambda: sample(
        by_source=True, weighting=3, num_neighbors=[1, 1], layers=True
    ),
    "neighbor_sample, by source and weight": lambda: sample(
        weight_prefix=[prefix()], num_neighbors=[1, 1], by_source=True, weighting=1
    ),
    "neighbor_sample, by source in parts": lambda: in_parts(
        by_source=True, weighting=3, num_neighbors=[1, 1], renewed=2**30, same_in_all_hops=True
    ),
    "neighbor_sample, many": wide_frontier,
    "neighbor_sample, many disjoint": lambda: wide_frontier(
        disjoint=True, waits=True, by_node=True
    ),
    "neighbor_sum": lambda: {
        **graph(),
        "weights": torch.ones(EDGES, dtype=torch.float64),
        "x": features(NODES, 3).double(),
        "num_threads": 2,
    },
    "nonzero_rows": lambda: {"x": features(5, 3)},
    "number_nodes": lambda: number(False),
    "number_nodes, disjoint": lambda: number(True),
    "pool_empty": lambda: {"sizes": [300, 1000], "dtype": torch.float32},
    "pool_stats": dict,
    "pool_trim": dict,
    "ppr": lambda: {
        **graph(),
        "seed": longs(0, 5, 3),
        "bounds": longs(0, 4, NODES),
        "alpha": 2**60,
        "eps": 2**40,
        "k": 3,
        "num_threads": 2,
    },
    "prefer_huge_pages": lambda: {"tensor": features(5)},
    "prefer_huge_pages, many": lambda: {"tensor": torch.zeros(1 << 20)},
    "random_walk": walks,
    "random_walk, by weight": lambda: walks(weight_prefix=prefix(), positions=True),
    "random_walk_biased": biased,
    "random_walk_biased, by weight": lambda: biased(weight_prefix=prefix(), sorted=None, back=1),
    "refine_partition": lambda: {
        **weighted(),
        "node_weights": of_nodes(),
        "assignment": longs(0, 1, 0, 1, 0, 1),
        "capacity": longs(4, 4).view(2, 1),
        "minimum": longs(2, 2).view(2, 1),
        "passes": 3,
        "patience": 5,
        "key": 1,
    },
    "sieve_plan": sieve,
    "socket_receive": receive,
    "socket_send": send,
    "sort_subgraphs": lambda: {
        "node": longs(5, 2, 4, 2, 5),
        "batch": longs(0, 1, 0, 0, 1),
        "row": longs(2, 3, 4, 0),
        "col": longs(0, 0, 1, 3),
        "edge": longs(7, 3, 1, 2),
        "num_graphs": 2,
    },
    "split_rows": split,
    "split_rows, by range": lambda: split(part=torch.empty(0, dtype=torch.uint8), local=none()),
    "stitch_edges": lambda: {
        "size": 4,
        "position": [longs(2, 0), longs(1, 3)],
        "take": [none(), longs(0, 0)],
        "counts": [longs(1, 2), longs(2)],
        "neighbor": [longs(4, 5, 6), longs(7, 8)],
        "edge": [ints(0, 1, 2), ints(3, 4)],
    },
    "stored_extreme": lambda: {**stored(fused, EDGES, byte_rows(NODES, 12)), "minimum": True},
    "stored_extreme, by column": lambda: {**by_column(fused, EDGES, NODES), "minimum": False},
    "stored_sum": lambda: {**stored(fused, EDGES, byte_rows(NODES, 12)), "mean": True},
    "stored_sum, as they are": lambda: {
        **stored(fused, EDGES, features(NODES, 4)),
        "mean": False,
    },
    "stored_sum, by column": lambda: {**by_column(fused, EDGES, NODES), "mean": True},
    "stored_sum, long rows": lambda: {
        **stored(long_rows, LONG, features(3, 9).half()),
        "mean": False,
    },
    "stream_partition": partition,
    "stream_partition, ldg": lambda: {
        **partition(),
        "ldg": True,
        "order": none(),
        "part": torch.full((NODES,), -1, dtype=torch.int8),
        "load": torch.zeros(2, 2, dtype=torch.int64),
    },
    "undirected_compact": lambda: {
        "indptr": indptr(),
        "kept": longs(0, 1, 3, 4, 6, 7, 7),
        "entries": indices(),
    },
    "undirected_count": undirected,
    "undirected_place": lambda: undirected(out=torch.zeros(20, dtype=torch.int64)),
    "undirected_sort": lambda: {
        "indptr": indptr(),
        "entries": indices().to(torch.int32),
        "begin": 0,
        "end": NODES,
        "degree": torch.zeros(NODES, dtype=torch.int64),
        "num_threads": 2,
    },
    "unmap_rows": lambda: {"x": features(4096), "device": 0},
    "walked_edges": lambda: {
        "indptr": indptr(),
        "index": indices(),
        "edge_id": torch.arange(indices().numel()),
        "count": 4,
        "length": 2,
        "start_key": 1,
        "key": 2,
        "num_threads": 1,
    },
}

NEED_A_DEVICE = {"edge_formula_compiled", "map_rows", "unmap_rows"}
"""Of these every call raises where there is no GPU."""
