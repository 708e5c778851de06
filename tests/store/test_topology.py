"""The topology of ``Data`` and ``HeteroData`` is that of their edge lists."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data import Data, HeteroData

from pyg_scale.store import topology_of
from pyg_scale.store.topology import checked_source
from tests.store.edges import CITES, WRITES, E, N, assert_is, edge_index, hetero, sparse


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_edge_list(direction: str, dtype: torch.dtype) -> None:
    edges = edge_index(dtype=dtype)
    graph = topology_of(Data(edge_index=edges, num_nodes=N), direction=direction)
    src, dst = edges if direction == "forward" else edges.flip(0)
    assert_is(graph.csc[None], src, dst, N)
    assert graph.index_dtype == dtype and graph.direction == direction
    assert graph.node_types == graph.edge_types == (None,) and graph.num_nodes == {None: N}
    assert not graph.is_hetero and not graph.is_temporal


def test_kinds_of_edge_lists() -> None:
    edges = edge_index()
    ordered = edges[:, edges[1].argsort(stable=True)]
    for value, same in [
        (EdgeIndex(edges, sparse_size=(N, N)), edges),
        (EdgeIndex(ordered, sparse_size=(N, N), sort_order="col"), ordered),
        (edges.t().contiguous().t(), edges),
    ]:
        graph = topology_of(Data(edge_index=value, num_nodes=N))
        assert_is(graph.csc[None], *same, N)


@pytest.mark.parametrize("name", ["adj_t", "adj"])
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc], ids=str)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_sparse_matrices(direction: str, layout: Any, name: str) -> None:
    edges = edge_index().unique(dim=1)
    rows, cols = edges.flip(0) if name == "adj_t" else edges
    matrix = sparse(rows, cols, (N, N), layout)
    graph = topology_of(Data(**{name: matrix}, num_nodes=N), direction=direction)
    if layout != torch.sparse_coo:  # ids are positions in the matrix
        order = np.lexsort((cols, rows) if layout == torch.sparse_csr else (rows, cols))
        edges = edges[:, torch.from_numpy(order)]
    src, dst = edges if direction == "forward" else edges.flip(0)
    assert_is(graph.csc[None], src, dst, N)


def test_a_sparse_matrix_keeps_parallel_edges() -> None:
    matrix = torch.sparse_coo_tensor(torch.tensor([[1, 1, 0], [2, 2, 1]]), torch.ones(3), (3, 3))
    graph = topology_of(Data(adj_t=matrix, num_nodes=3))
    assert_is(graph.csc[None], torch.tensor([2, 2, 1]), torch.tensor([1, 1, 0]), 3)


def test_torch_sparse() -> None:
    pytest.importorskip("torch_sparse", reason="torch-sparse is not installed")
    from torch_geometric.transforms import ToSparseTensor

    edges = edge_index()
    data = ToSparseTensor(remove_edge_index=False)(Data(edge_index=edges, num_nodes=N))
    order = torch.from_numpy(np.lexsort((edges[0], edges[1])))
    del data.edge_index
    assert_is(topology_of(data).csc[None], *edges[:, order], N)


def test_no_nodes_no_edges() -> None:
    none = torch.empty(2, 0, dtype=torch.int32)
    for data, nodes in [
        (Data(edge_index=none, num_nodes=0), 0),
        (Data(edge_index=none, num_nodes=4), 4),
        (Data(num_nodes=4), 4),
        (Data(x=torch.zeros(5, 1)), 5),
    ]:
        graph = topology_of(data)
        assert graph.num_nodes == {None: nodes}
        assert graph.csc[None].indptr.tolist() == [0] * (nodes + 1)
        assert graph.csc[None].num_edges == 0


@pytest.mark.filterwarnings("ignore:Unable to accurately infer")
def test_number_of_nodes_is_inferred() -> None:
    assert topology_of(Data(edge_index=torch.tensor([[0, 7], [1, 2]]))).num_nodes == {None: 8}


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_ids_beyond_the_nodes(direction: str) -> None:
    edges = edge_index()
    edges[0, 9] = 70
    with pytest.raises(IndexError, match=f"edge 9 has source 70, but there are {N} source nodes"):
        topology_of(Data(edge_index=edges, num_nodes=N), direction=direction)
    edges[0, 9] = -1
    with pytest.raises(IndexError, match="edge 9 has source -1"):
        topology_of(Data(edge_index=edges, num_nodes=N), direction=direction)


@pytest.mark.parametrize(
    ("value", "error", "match"),
    [
        (torch.zeros(3, 4, dtype=torch.int64), ValueError, "edge_index must be .*2, num_edges"),
        (torch.zeros(4, dtype=torch.int64), ValueError, "edge_index must be"),
        (torch.zeros(2, 4), TypeError, "edge_index must be .*int64 or int32.*float32"),
        (torch.zeros(2, 4, dtype=torch.int16), TypeError, "int16"),
    ],
)
def test_wrong_edge_lists(value: Tensor, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        topology_of(Data(edge_index=value, num_nodes=4))


def test_wrong_arguments() -> None:
    with pytest.raises(TypeError, match="Data, HeteroData or .*got list"):
        topology_of([1, 2, 3])
    with pytest.raises(ValueError, match="direction must be"):
        topology_of(Data(num_nodes=1), direction="down")


def test_declared_sorted() -> None:
    edges = edge_index(dtype=torch.int32)
    data = Data(edge_index=edges, num_nodes=N)
    with pytest.raises(ValueError, match="is_sorted=True, but the edges are not sorted"):
        topology_of(data, is_sorted=True)
    data.edge_index = edges = edges[:, edges[1].argsort(stable=True)].contiguous()
    csc = topology_of(data, is_sorted=True).csc[None]
    assert csc.edge_id is None and csc.indices.data_ptr() == edges.data_ptr()
    csc = topology_of(data).csc[None]
    assert csc.edge_id is None and csc.indices.data_ptr() != edges.data_ptr()


@pytest.mark.parametrize(
    "options", [{"is_sorted": True}, {"weight_attr": "weight"}, {"weight_attr": "few"}], ids=str
)
def test_a_source_is_checked_as_a_topology(options: dict[str, Any]) -> None:
    data = Data(edge_index=edge_index(), num_nodes=N)
    data.weight, data.few = torch.arange(E) - 5.0, torch.ones(2)
    errors = []
    for read in (topology_of, checked_source):
        with pytest.raises(ValueError) as error:
            read(data, **options)
        errors.append(str(error.value))
    assert errors[0] == errors[1]
    assert checked_source(data, is_sorted=True, direction="backward").edges[None].num_edges == E
    data.edge_index[1, 3] = N
    with pytest.raises(IndexError, match=f"edge 3 has destination {N}"):
        checked_source(data)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32, torch.float64])
@pytest.mark.parametrize("of_edges", [False, True])
def test_times(of_edges: bool, dtype: torch.dtype) -> None:
    edges = edge_index()
    rng = np.random.default_rng(1)
    size = E if of_edges else N
    time = torch.from_numpy(rng.integers(-9, 9, size)).to(dtype) / (
        4 if dtype.is_floating_point else 1
    )
    time = time.to(dtype)
    graph = topology_of(Data(edge_index=edges, num_nodes=N, when=time), time_attr="when")
    when = (time if of_edges else time[edges[0]]).tolist()
    csc = graph.csc[None]
    assert_is(csc, *edges, N, when)
    assert graph.is_temporal and graph.has_edge_time == of_edges
    assert graph.float_time == dtype.is_floating_point
    if of_edges:
        assert csc.time is not None and not graph.node_time
        by_position = graph.to_time(time)[csc.original_id(torch.arange(E))]
        assert torch.equal(csc.time, by_position)
    else:
        assert csc.time is None
        assert torch.equal(graph.node_time[None], graph.to_time(time))


def test_floating_point_seed_times_of_integer_times() -> None:
    graph = topology_of(
        Data(edge_index=edge_index(), num_nodes=N, when=torch.arange(N)), time_attr="when"
    )
    least, most = -(2**63), 2**63 - 1
    seed = torch.tensor([1.5, 2.0, -0.5, 1e30, float("inf"), -float("inf")])
    assert graph.to_time(seed).tolist() == [1, 2, -1, most, most, least]
    with pytest.raises(ValueError, match="NaN"):
        graph.to_time(torch.tensor([float("nan")]))


def test_sorted_by_destination_and_time_needs_no_ids() -> None:
    edges = edge_index()
    time = torch.arange(E)
    order = torch.from_numpy(np.lexsort((time.numpy(), edges[1].numpy())))
    data = Data(edge_index=edges[:, order], num_nodes=N, edge_time=time[order])
    csc = topology_of(data, time_attr="edge_time", is_sorted=True).csc[None]
    assert csc.edge_id is None
    assert_is(csc, *data.edge_index, N, time[order].tolist())
    data.edge_time = time[order].flip(0)
    csc = topology_of(data, time_attr="edge_time", is_sorted=True).csc[None]
    assert_is(csc, *data.edge_index, N, data.edge_time.tolist())


def test_as_many_edges_as_nodes() -> None:
    edges = torch.tensor([[0, 1, 2], [1, 2, 0]])
    for name, of_edges in [("time", False), ("edge_time", True)]:
        data = Data(edge_index=edges, num_nodes=3, **{name: torch.tensor([3, 1, 2])})
        assert topology_of(data, time_attr=name).has_edge_time == of_edges


def test_columns() -> None:
    edges = edge_index()
    data = Data(edge_index=edges, num_nodes=N, w=torch.rand(E, 1), t=torch.rand(N, 1).numpy())
    graph = topology_of(data, time_attr="t", weight_attr="w")
    assert graph.node_time[None].shape == (N,)
    prefix = graph.csc[None].weight_prefix
    assert prefix is not None and prefix.shape == (E,)


def test_weights_follow_their_edges() -> None:
    edges = edge_index()
    weight = torch.randint(1, 9, (E,))
    csc = topology_of(Data(edge_index=edges, num_nodes=N, w=weight), weight_attr="w").csc[None]
    assert csc.weight_prefix is not None
    for v in range(N):
        begin, end = int(csc.indptr[v]), int(csc.indptr[v + 1])
        mine = weight[csc.original_id(torch.arange(begin, end))].tolist()
        fixed = [int(w / max(mine) * 2**32) for w in mine]
        assert csc.weight_prefix[begin:end].tolist() == np.cumsum(fixed).tolist()


@pytest.mark.parametrize(
    ("argument", "value", "error", "match"),
    [
        ("time_attr", None, ValueError, "time_attr='a': the graph has no such attribute"),
        ("time_attr", torch.zeros(7), ValueError, "7 entries; expected .*40 nodes.*300 edges"),
        ("time_attr", torch.zeros(N, 2), ValueError, r"shape \[n\] or \[n, 1\]"),
        ("time_attr", torch.full((N,), torch.nan), ValueError, "NaN"),
        ("weight_attr", None, ValueError, "weight_attr='a': the graph has no such attribute"),
        ("weight_attr", torch.zeros(7), ValueError, "7 weights for 300 edges"),
        ("weight_attr", torch.zeros(N), ValueError, "40 weights for 300 edges"),
        ("weight_attr", torch.zeros(E, 2), ValueError, r"shape \[n\] or \[n, 1\]"),
        ("weight_attr", -torch.ones(E), ValueError, "the weight of edge 0 is -1"),
        ("weight_attr", "none", TypeError, "tensor or an array"),
    ],
)
def test_wrong_times_and_weights(
    argument: str, value: Any, error: type[Exception], match: str
) -> None:
    data = Data(edge_index=edge_index(), num_nodes=N)
    if value is not None:
        data.a = value
    with pytest.raises(error, match=match):
        topology_of(data, **{argument: "a"})


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_types(direction: str) -> None:
    data = hetero()
    graph = topology_of(data, direction=direction)
    assert graph.node_types == ("paper", "author") and graph.edge_types == (WRITES, CITES)
    assert graph.num_nodes == {"paper": N, "author": 25} and graph.is_hetero
    for edge_type in (WRITES, CITES):
        src, dst = data[edge_type].edge_index
        if direction == "backward":
            src, dst = dst, src
        expanded = graph.expanded_type(edge_type)
        assert_is(graph.csc[edge_type], src, dst, graph.num_nodes[expanded])


@pytest.mark.filterwarnings("ignore:Unable to accurately infer")
def test_types_that_only_edges_name() -> None:
    data = HeteroData()
    data["a", "to", "b"].edge_index = torch.tensor([[0, 6], [2, 3]])
    graph = topology_of(data)
    assert graph.node_types == ("a", "b") and graph.num_nodes == {"a": 7, "b": 4}


def test_index_type_of_types() -> None:
    data = hetero(torch.int32)
    assert topology_of(data).index_dtype == torch.int32
    data["author", "likes", "paper"].edge_index = torch.empty(2, 0, dtype=torch.int64)
    assert topology_of(data).index_dtype == torch.int32  # nothing there that is int64
    data[CITES].edge_index = data[CITES].edge_index.long()
    assert topology_of(data).index_dtype == torch.int64


def test_times_of_types() -> None:
    data = hetero()
    data["paper"].time = torch.randint(0, 9, (N,))
    graph = topology_of(data, time_attr="time")
    assert set(graph.node_time) == {"paper"}
    src, dst = data[CITES].edge_index
    assert_is(graph.csc[CITES], src, dst, N, data["paper"].time[src].tolist())
    assert_is(graph.csc[WRITES], *data[WRITES].edge_index, N)  # authors have no time
    data[CITES].time = torch.rand(E)
    with pytest.raises(ValueError, match=r"time_attr='time' .* of nodes .* of edges"):
        topology_of(data, time_attr="time")
    del data["paper"].time
    graph = topology_of(data, time_attr="time")
    assert graph.csc[WRITES].time is None and graph.csc[CITES].time is not None
    assert_is(graph.csc[CITES], src, dst, N, data[CITES].time.tolist())
    data[CITES].time = torch.rand(E - 1)
    with pytest.raises(ValueError, match="299 times for 300 edges of .*cites"):
        topology_of(data, time_attr="time")
    with pytest.raises(ValueError, match="'nothing' is neither"):
        topology_of(data, time_attr="nothing")


BEYOND = 2**53 + 1  # the first integer that float64 rounds


def mixed_times(of_edges: bool, time: Tensor) -> HeteroData:
    data = hetero()
    if of_edges:
        data[CITES].time, data[WRITES].time = time.expand(E), torch.rand(data[WRITES].num_edges)
    else:
        data["paper"].time, data["author"].time = time.expand(N), torch.rand(25)
    return data


@pytest.mark.parametrize("time", [BEYOND, -BEYOND, 2**63 - 1])
@pytest.mark.parametrize("of_edges", [False, True])
def test_integer_times_are_not_rounded_among_floating_point_ones(of_edges: bool, time: int) -> None:
    data = mixed_times(of_edges, torch.tensor(time))
    kind = "edges of .*'cites'" if of_edges else "nodes of 'paper'"
    with pytest.raises(ValueError, match=f"times of {kind}.*: the integer {time} would be rounded"):
        topology_of(data, time_attr="time")


@pytest.mark.parametrize("time", [2**53, BEYOND + 1, -(2**63)])
@pytest.mark.parametrize("of_edges", [False, True])
def test_integer_times_that_float64_holds(of_edges: bool, time: int) -> None:
    graph = topology_of(mixed_times(of_edges, torch.tensor(time)), time_attr="time")
    found = graph.csc[CITES].time if of_edges else graph.node_time["paper"]
    assert graph.float_time and found is not None
    assert torch.equal(
        found, graph.to_time(torch.tensor([float(time)], dtype=torch.float64).expand_as(found))
    )


def test_weights_of_types() -> None:
    data = hetero()
    with pytest.raises(ValueError, match="weight_attr='w': no edge type"):
        topology_of(data, weight_attr="w")
    data[CITES].w = torch.ones(E)
    graph = topology_of(data, weight_attr="w")
    assert graph.csc[WRITES].weight_prefix is None
    assert graph.csc[CITES].weight_prefix is not None
    data[CITES].w[4] = torch.nan
    with pytest.raises(ValueError, match=r"cites.*the weight of edge 4 is nan"):
        topology_of(data, weight_attr="w")
