"""The topology of a feature store and a graph store, in any layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data

from pyg_scale.store import MemoryFeatureStore, MemoryGraphStore, topology_of
from tests.store.edges import CITES, WRITES, E, N, assert_is, edge_index, hetero, in_edges


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
