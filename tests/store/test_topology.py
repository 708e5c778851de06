"""The topology of every kind of input is that of its edge list."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data import Data, HeteroData

from pyg_scale.ops import library
from pyg_scale.store import CSC, MemoryFeatureStore, MemoryGraphStore, Topology, topology_of

N, E = 40, 300
WRITES, CITES = ("author", "writes", "paper"), ("paper", "cites", "paper")


@pytest.fixture(autouse=True, params=["never", "require"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "require" and not library.status()["loaded"]:
        pytest.skip("the kernels are not compiled")
    monkeypatch.setenv("PYG_SCALE_KERNELS", request.param)


def edge_index(num_src: int = N, num_dst: int = N, seed: int = 0, dtype: Any = None) -> Tensor:
    rng = np.random.default_rng(seed)
    edges = np.stack([rng.integers(0, num_src, E), rng.integers(0, num_dst - 3, E)])
    return torch.from_numpy(edges).to(dtype or torch.int64)


def in_edges(csc: CSC, dst: int) -> list[tuple[int, int]]:
    """(edge id, source) of each in-edge, in order."""
    at = torch.arange(int(csc.indptr[dst]), int(csc.indptr[dst + 1]))
    return list(zip(csc.original_id(at).tolist(), csc.indices[at].tolist()))


def assert_is(csc: CSC, src: Tensor, dst: Tensor, num_dst: int, when: Any = None) -> None:
    """That the CSC holds these edges, of each node in the order of (time, id)."""
    assert csc.indptr.numel() == num_dst + 1 and int(csc.indptr[-1]) == src.numel()
    for v in range(num_dst):
        expected = [e for e in range(src.numel()) if int(dst[e]) == v]
        if when is not None:
            expected.sort(key=lambda e: (when[e], e))
        assert in_edges(csc, v) == [(e, int(src[e])) for e in expected]


def sparse(matrix_rows: Tensor, matrix_cols: Tensor, size: tuple[int, int], layout: Any) -> Tensor:
    values = torch.ones(matrix_rows.numel())
    coo = torch.sparse_coo_tensor(torch.stack([matrix_rows, matrix_cols]), values, size)
    return coo if layout == torch.sparse_coo else coo.coalesce().to_sparse(layout=layout)


# Data #####################################################################################


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


# Times and weights ########################################################################


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


# HeteroData ###############################################################################


def hetero(dtype: Any = None) -> HeteroData:
    data = HeteroData()
    data["paper"].num_nodes = N
    data["author"].num_nodes = 25
    data[WRITES].edge_index = edge_index(25, N, 1, dtype)
    data[CITES].edge_index = edge_index(N, N, 2, dtype)
    return data


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


# Stores ###################################################################################


def in_layout(edges: Tensor, layout: str, size: tuple[int, int]) -> tuple[tuple, Tensor]:
    """The edges as a store holds them, and the edge list in the order of their ids."""
    if layout == "coo":
        return (edges[0], edges[1]), edges
    by = 1 if layout == "csc" else 0
    edges = edges[:, edges[by].argsort(stable=True)]
    pointers = torch.from_numpy(np.searchsorted(edges[by].numpy(), np.arange(size[by] + 1)))
    return ((edges[0], pointers) if by else (pointers, edges[1])), edges


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("layout", ["coo", "csr", "csc"])
@pytest.mark.parametrize("with_size", [False, True])
@pytest.mark.parametrize("is_hetero", [False, True])
def test_stores(is_hetero: bool, with_size: bool, layout: str, direction: str) -> None:
    features, store = MemoryFeatureStore(), MemoryGraphStore()
    size = (25, N) if is_hetero else (N, N)
    pair, edges = in_layout(edge_index(*size), layout, size)
    edge_type = WRITES if is_hetero else None
    store.put_edge_index(pair, edge_type=edge_type, layout=layout, size=size if with_size else None)
    groups = ("paper", "author") if is_hetero else (None,)
    for group in groups:
        features[group, "x", None] = torch.zeros(25 if group == "author" else N, 2)
    graph = topology_of((features, store), direction=direction)
    assert graph.node_types == groups and graph.edge_types == (edge_type,)
    src, dst = edges if direction == "forward" else edges.flip(0)
    assert graph.num_nodes[groups[0]] == N
    assert_is(graph.csc[edge_type], src, dst, size[direction == "forward"])


def test_number_of_nodes_of_stores() -> None:
    features, store = MemoryFeatureStore(), MemoryGraphStore()
    edges = edge_index(25, N)
    store.put_edge_index((edges[0], edges[1]), edge_type=WRITES, layout="coo")
    least = int(edges[0].max()) + 1, int(edges[1].max()) + 1
    graph = topology_of((features, store))
    assert graph.num_nodes == {"author": least[0], "paper": least[1]}
    features["paper", "x", None] = torch.zeros(90, 1)
    assert topology_of((features, store)).num_nodes["paper"] == 90
    # edge features of a homogeneous graph do not count its nodes
    homogeneous = MemoryGraphStore()
    homogeneous.put_edge_index((edges[0], edges[1]), edge_type=None, layout="coo")
    features = MemoryFeatureStore()
    features[None, "edge_attr", None] = torch.zeros(E, 1)
    features[(None, None), "more", None] = torch.zeros(E, 1)
    assert topology_of((features, homogeneous)).num_nodes == {None: max(least)}
    assert topology_of((MemoryFeatureStore(), MemoryGraphStore())).num_nodes == {None: 0}


def test_order_of_types_in_stores() -> None:
    features, store = MemoryFeatureStore(), MemoryGraphStore()
    for name in ("d", "b"):
        features[name, "x", None] = torch.zeros(5, 1)
    types = [(s, "to", d) for s, d in ("ab", "dc", "ca", "ba")]
    for edge_type in types:
        store.put_edge_index(
            (torch.tensor([1]), torch.tensor([2])), edge_type=edge_type, layout="coo", size=(5, 5)
        )
    graph = topology_of((features, store))
    assert graph.edge_types == tuple(types) and graph.node_types == ("d", "b", "a", "c")


def test_the_layout_named_first_has_the_ids() -> None:
    store = MemoryGraphStore()
    edges = edge_index()
    store.put_edge_index((edges[0], edges[1]), edge_type=WRITES, layout="coo", size=(N, N))
    store.csc(store=True)
    assert len(store.get_all_edge_attrs()) == 2
    assert_is(topology_of((MemoryFeatureStore(), store)).csc[WRITES], *edges, N)


@pytest.mark.parametrize(
    ("name", "group", "size", "of_edges"),
    [("time", None, N, False), ("when", None, N, False), ("time", None, E, True),
     ("when", None, E, True), ("time", (None, None), E, True)],
)  # fmt: skip
def test_times_of_a_homogeneous_store(name: str, group: Any, size: int, of_edges: bool) -> None:
    features, store = MemoryFeatureStore(), MemoryGraphStore()
    edges = edge_index()
    store.put_edge_index((edges[0], edges[1]), edge_type=None, layout="coo", size=(N, N))
    time = torch.randint(0, 9, (size,))
    features[group, name, None] = time
    graph = topology_of((features, store), time_attr=name)
    assert graph.has_edge_time == of_edges
    when = (time if of_edges else time[edges[0]]).tolist()
    assert_is(graph.csc[None], *edges, N, when)


@pytest.mark.parametrize(("name", "of_edges"), [("time", False), ("when", True)])
def test_as_many_edges_as_nodes_in_stores(name: str, of_edges: bool) -> None:
    """Then PyG's rule holds: 'time' is that of nodes."""
    features, store = MemoryFeatureStore(), MemoryGraphStore()
    pair = torch.tensor([0, 1, 2]), torch.tensor([1, 2, 0])
    store.put_edge_index(pair, edge_type=None, layout="coo", size=(3, 3))
    features[None, name, None] = torch.tensor([3, 1, 2])
    assert topology_of((features, store), time_attr=name).has_edge_time == of_edges


def test_times_and_weights_of_typed_stores() -> None:
    features, store = MemoryFeatureStore(), MemoryGraphStore()
    edges = edge_index()
    store.put_edge_index((edges[0], edges[1]), edge_type=CITES, layout="coo", size=(N, N))
    features["paper", "t", None] = torch.randint(0, 9, (N,))
    features[CITES, "w", None] = torch.ones(E, 1)
    features[CITES, "u", None] = torch.rand(E)
    graph = topology_of((features, store), time_attr="t", weight_attr="w")
    assert set(graph.node_time) == {"paper"}
    assert graph.csc[CITES].weight_prefix is not None
    graph = topology_of((features, store), time_attr="u")
    assert_is(graph.csc[CITES], *edges, N, features[CITES, "u", None].tolist())
    for argument in ("time_attr", "weight_attr"):
        with pytest.raises(ValueError, match="no attribute 'nothing'"):
            topology_of((features, store), **{argument: "nothing"})
    with pytest.raises(ValueError, match="'t' is not an attribute of edges"):
        topology_of((features, store), weight_attr="t")
    features[CITES, "t", None] = torch.rand(E)
    with pytest.raises(ValueError, match=r"of nodes \('paper'\) and of edges"):
        topology_of((features, store), time_attr="t")


def test_pygs_own_data_as_stores() -> None:
    data = hetero()
    data["paper"].time = torch.randint(0, 9, (N,))
    of_stores = topology_of((data, data), time_attr="time")
    of_data = topology_of(data, time_attr="time")
    assert of_stores.num_nodes == of_data.num_nodes
    for edge_type in (WRITES, CITES):
        for v in range(N):
            assert in_edges(of_stores.csc[edge_type], v) == in_edges(of_data.csc[edge_type], v)
    one = Data(x=torch.zeros(N, 1), edge_index=edge_index())
    assert_is(topology_of((one, one)).csc[None], *one.edge_index, N)


def test_a_store_that_says_sorted_is_checked() -> None:
    class Careless(MemoryGraphStore):
        def _get_edge_index(self, edge_attr: Any) -> Any:
            row, col = super()._get_edge_index(edge_attr)
            return row, col.flip(0)

    store = Careless()
    pair = torch.tensor([3, 1]), torch.tensor([0, 2])
    store.put_edge_index(pair, edge_type=WRITES, layout="coo", is_sorted=True, size=(5, 5))
    with pytest.raises(ValueError, match=r"is_sorted=True, but .* edge 1 of .*writes.* has 0"):
        topology_of((MemoryFeatureStore(), store))


# Sharing ##################################################################################


def test_one_topology_while_somebody_holds_it() -> None:
    data = Data(edge_index=edge_index(), num_nodes=N, t=torch.arange(N), w=torch.ones(E))
    graph = topology_of(data)
    assert topology_of(data) is graph
    assert topology_of(copy.copy(data)) is graph
    assert topology_of(Data(edge_index=data.edge_index, num_nodes=N)) is graph
    others = [
        topology_of(data, direction="backward"),
        topology_of(data, time_attr="t"),
        topology_of(data, weight_attr="w"),
        topology_of(Data(edge_index=data.edge_index, num_nodes=N + 1)),
        topology_of(data.clone()),
    ]
    assert all(other is not graph for other in others)
    data.edge_index[0, 0] = (data.edge_index[0, 0] + 1) % N
    changed = topology_of(data)
    assert changed is not graph
    assert_is(changed.csc[None], *data.edge_index, N)


@pytest.mark.parametrize("attribute", ["t", "w"])
def test_a_changed_attribute_is_another_topology(attribute: str) -> None:
    data = Data(edge_index=edge_index(), num_nodes=N, t=torch.arange(N), w=torch.ones(E))
    graph = topology_of(data, time_attr="t", weight_attr="w")
    assert topology_of(data, time_attr="t", weight_attr="w") is graph
    data[attribute][0] += 5
    assert topology_of(data, time_attr="t", weight_attr="w") is not graph


def test_stores_share_too() -> None:
    features, store = MemoryFeatureStore(), MemoryGraphStore()
    edges = edge_index()
    store.put_edge_index((edges[0], edges[1]), edge_type=CITES, layout="coo", size=(N, N))
    features["paper", "t", None] = torch.arange(N)
    graph = topology_of((features, store), time_attr="t")
    assert topology_of((features, store), time_attr="t") is graph


def test_nothing_is_kept_for_nobody() -> None:
    import gc
    import weakref

    from pyg_scale.store import topology as module

    gc.collect()
    before = len(module._built)
    data = Data(edge_index=edge_index(), num_nodes=N)
    graph = topology_of(data)
    ref = weakref.ref(graph)
    assert len(module._built) == before + 1
    del data
    gc.collect()
    assert len(module._built) == before and ref() is not None
    del graph
    gc.collect()
    assert ref() is None
    for seed in range(50):  # ids of dead tensors come back
        data = Data(edge_index=edge_index(seed=seed), num_nodes=N)
        graph = topology_of(data)
        assert in_edges(graph.csc[None], 1) == [
            (e, int(data.edge_index[0, e])) for e in range(E) if int(data.edge_index[1, e]) == 1
        ]
    del data, graph
    gc.collect()
    assert len(module._built) == before


def test_a_failed_build_leaves_nothing() -> None:
    data = Data(edge_index=edge_index(), num_nodes=5)
    for _ in range(2):
        with pytest.raises(IndexError):
            topology_of(data)


def test_threads_get_the_same() -> None:
    from concurrent.futures import ThreadPoolExecutor

    data = Data(edge_index=edge_index(), num_nodes=N)
    with ThreadPoolExecutor(4) as pool:
        graphs = list(pool.map(lambda _: topology_of(data), range(16)))
    assert all(graph is graphs[0] for graph in graphs)


def full(graph: Topology) -> list[Any]:
    out: list[Any] = [graph.node_types, graph.edge_types, dict(graph.num_nodes), graph.index_dtype]
    for csc in graph.csc.values():
        out += [t if t is None else t.tolist() for t in vars(csc).values()]
    return out + [t.tolist() for t in graph.node_time.values()]


def test_shared_memory_and_pickling() -> None:
    data = hetero()
    data["paper"].time = torch.randint(0, 9, (N,))
    data[CITES].w = torch.rand(E)
    graph = topology_of(data, time_attr="time", weight_attr="w")
    expected = full(graph)
    assert full(pickle.loads(pickle.dumps(graph))) == expected
    assert graph.share_memory_() is graph
    csc = graph.csc[CITES]
    for tensor in (*vars(csc).values(), graph.node_time["paper"]):
        if tensor is csc.time:
            continue  # papers have times, edges have none
        assert tensor is not None and tensor.is_shared()
    assert csc.edge_id is not None and csc.indices.stride() == (2,)
    assert csc.edge_id.data_ptr() - csc.indices.data_ptr() == 4
    assert full(graph) == expected


def _in_child(graph: Topology, queue: Any) -> None:
    csc = graph.csc[None]
    assert csc.edge_id is not None
    side_by_side = csc.edge_id.data_ptr() - csc.indices.data_ptr() == 4
    queue.put((full(graph), side_by_side, csc.indices.is_shared()))


def test_another_process_gets_it_by_reference() -> None:
    from multiprocessing.reduction import ForkingPickler

    import torch.multiprocessing as mp

    edges = torch.randint(0, 9000, (2, 200_000))
    graph = topology_of(Data(edge_index=edges, num_nodes=9000)).share_memory_()
    assert len(ForkingPickler.dumps(graph)) < 5000, "the tensors themselves are pickled"
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    process = context.Process(target=_in_child, args=(graph, queue))
    process.start()
    content, side_by_side, shared = queue.get()
    process.join(60)
    assert content == full(graph) and side_by_side and shared
