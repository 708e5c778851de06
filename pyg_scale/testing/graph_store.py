"""Conformance of graph stores, which must return every edge with its id in any layout."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data, EdgeAttr, GraphStore, HeteroData
from torch_geometric.data.graph_store import EdgeLayout

from pyg_scale.sampler.reference import ReferenceSampler
from pyg_scale.store.base import is_read_only
from pyg_scale.testing import graphs
from pyg_scale.testing.draws import assert_equal

LAYOUTS = ["coo", "csr", "csc"]
BUYS, FOLLOWS = ("user", "buys", "item"), ("user", "follows", "user")


class GraphStoreTests:
    """Tests of a graph store that is initially empty.

    For a store that declares ``read_only = True`` as an attribute of its class, override
    :meth:`fill`.

    Example::

        class TestMyStore(GraphStoreTests):
            @pytest.fixture
            def graph_store(self):
                return MyStore()
    """

    @pytest.fixture
    def graph_store(self) -> GraphStore:
        """An empty store."""
        raise NotImplementedError("return an empty graph store, such as MyStore()")

    def fill(
        self,
        store: GraphStore,
        edges: Mapping[Any, Any],
        layout: str = "coo",
        is_sorted: bool = False,
        sizes: Mapping[Any, tuple[int, int]] | None = None,
    ) -> GraphStore:
        """A store with edges, given by type as a pair of tensors in a layout and their sizes."""
        for edge_type, (row, col) in edges.items():
            assert store.put_edge_index(
                (row, col),
                edge_type=edge_type,
                layout=layout,
                is_sorted=is_sorted,
                size=(sizes or SIZES)[edge_type],
            ), "put_edge_index must return True"
        return store

    def reopen(self, store: GraphStore) -> GraphStore | None:
        """A second store of the same content; override it for a persistent store."""
        return None

    def test_is_a_graph_store(self, graph_store: GraphStore) -> None:
        assert isinstance(graph_store, GraphStore)
        assert graph_store.get_all_edge_attrs() == [], "the store must be initially empty"

    @pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("edge_type", [None, BUYS], ids=str)
    def test_gives_what_was_put(
        self, graph_store: GraphStore, edge_type: Any, layout: str, dtype: torch.dtype
    ) -> None:
        pair = in_layout(edge_list(edge_type, dtype), SIZES[edge_type], layout)
        store = self.fill(graph_store, {edge_type: pair}, layout)
        (attr,) = store.get_all_edge_attrs()
        assert attr.edge_type == edge_type
        assert attr.layout == EdgeLayout(layout)
        assert tuple(attr.size) == SIZES[edge_type], "the sizes must be kept"
        for got, expected in zip(store.get_edge_index(attr), pair):
            assert got.dtype == expected.dtype
            assert torch.equal(got, expected)

    @pytest.mark.parametrize("wanted", LAYOUTS)
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_layouts(self, graph_store: GraphStore, layout: str, wanted: str) -> None:
        edges = {t: edge_list(t) for t in (BUYS, FOLLOWS)}
        pairs = {t: in_layout(edge, SIZES[t], layout) for t, edge in edges.items()}
        store = self.fill(graph_store, pairs, layout)
        row, col, perm = getattr(store, wanted)()
        assert set(row) == set(col) == set(edges)
        for t, pair in pairs.items():
            put = as_list(pair, layout)  # edge ids are positions in it
            got = as_list((row[t], col[t]), wanted)
            if wanted != "coo":
                pointers = row[t] if wanted == "csr" else col[t]
                assert pointers.numel() == SIZES[t][wanted == "csc"] + 1
            order = torch.arange(got.size(1)) if perm[t] is None else perm[t]
            assert torch.equal(got, put[:, order]), "the permutation does not restore the order"
            assert torch.equal(order.sort().values, torch.arange(put.size(1))), "an edge is lost"

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_one_type_without_a_name(self, graph_store: GraphStore, layout: str) -> None:
        store = self.fill(graph_store, {None: edge_list(None)})
        row, col, perm = getattr(store, layout)()
        order = torch.arange(row.numel()) if perm is None else perm
        assert torch.equal(as_list((row, col), layout), edge_list(None)[:, order])

    def test_edges_that_are_sorted(self, graph_store: GraphStore) -> None:
        edges = edge_list(BUYS)
        edges = edges[:, edges[1].argsort(stable=True)]
        store = self.fill(graph_store, {BUYS: edges}, is_sorted=True)
        (attr,) = store.get_all_edge_attrs()
        assert attr.is_sorted, "is_sorted must be kept"
        row, _, perm = store.csc()
        assert perm[BUYS] is None or torch.equal(perm[BUYS], torch.arange(edges.size(1)))
        assert torch.equal(row[BUYS], edges[0])

    def test_says_that_nothing_is_sorted_that_is_not(self, graph_store: GraphStore) -> None:
        store = self.fill(graph_store, {BUYS: edge_list(BUYS)})
        for attr in store.get_all_edge_attrs():
            _, col = store.get_edge_index(attr)
            assert not attr.is_sorted or bool((col.diff() >= 0).all()), "is_sorted is wrong"

    def test_no_edges(self, graph_store: GraphStore) -> None:
        none = torch.empty(2, 0, dtype=torch.int64)
        store = self.fill(graph_store, {BUYS: none})
        row, col, _ = store.csc()
        assert row[BUYS].numel() == 0
        assert col[BUYS].tolist() == [0] * (SIZES[BUYS][1] + 1)

    def test_some_types_only(self, graph_store: GraphStore) -> None:
        store = self.fill(graph_store, {t: edge_list(t) for t in (BUYS, FOLLOWS)})
        row, _, _ = store.csc([FOLLOWS])
        assert set(row) == {FOLLOWS}
        with pytest.raises(ValueError, match="not found"):
            store.csc([("user", "sells", "item")])

    def test_what_was_never_put(self, graph_store: GraphStore) -> None:
        store = self.fill(graph_store, {BUYS: edge_list(BUYS)})
        with pytest.raises(KeyError):
            store.get_edge_index(edge_type=FOLLOWS, layout="coo", size=SIZES[FOLLOWS])

    def test_removing(self, graph_store: GraphStore) -> None:
        if is_read_only(graph_store):
            pytest.skip("the store declares read_only = True")
        store = self.fill(graph_store, {t: edge_list(t) for t in (BUYS, FOLLOWS)})
        gone = EdgeAttr(BUYS, "coo", size=SIZES[BUYS])
        assert store.remove_edge_index(gone) is True
        with pytest.raises(KeyError):
            store.get_edge_index(gone)
        assert store.remove_edge_index(gone) is False, "there was nothing left to remove"
        assert [attr.edge_type for attr in store.get_all_edge_attrs()] == [FOLLOWS]

    def test_can_be_pickled(self, graph_store: GraphStore) -> None:
        store = self.fill(graph_store, {BUYS: edge_list(BUYS)})
        row, col, _ = pickle.loads(pickle.dumps(store)).coo()
        assert torch.equal(torch.stack([row[BUYS], col[BUYS]]), edge_list(BUYS))

    def test_is_there_when_opened_again(self, graph_store: GraphStore) -> None:
        store = self.reopen(self.fill(graph_store, {BUYS: edge_list(BUYS)}))
        if store is None:
            pytest.skip("the store ends with its process")
        (attr,) = store.get_all_edge_attrs()
        assert tuple(attr.size) == SIZES[BUYS]
        assert torch.equal(torch.stack(store.get_edge_index(attr)), edge_list(BUYS))

    def test_eight_threads_read(self, graph_store: GraphStore) -> None:
        store = self.fill(graph_store, {t: edge_list(t) for t in (BUYS, FOLLOWS)})
        row, col, _ = store.csc()
        with ThreadPoolExecutor(8) as pool:
            for other_row, other_col, _ in pool.map(lambda _: store.csc(), range(64)):
                for t in (BUYS, FOLLOWS):
                    assert torch.equal(other_row[t], row[t])
                    assert torch.equal(other_col[t], col[t])

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("graph", [graphs.hostile, graphs.hetero])
    def test_samplers_see_the_same_graph(
        self, graph_store: GraphStore, graph: Any, layout: str
    ) -> None:
        data: Data | HeteroData = graph()
        facts = graphs.EdgeLists.of(data)
        features, _ = graphs.stores(data)
        seeds = {t: torch.arange(3) for t in facts.num_nodes}
        if layout != "coo":  # ids are then in the order of the rows or columns
            facts = in_order(facts, layout)
            if isinstance(data, HeteroData):
                for t, pair in facts.edges.items():
                    data[t].edge_index = torch.stack(pair)
            else:
                data.edge_index = torch.stack(facts.edges[None])
        sizes = {
            t: (facts.num_nodes[facts.source_type(t)], facts.num_nodes[facts.destination_type(t)])
            for t in facts.edges
        }
        pairs = {
            t: in_layout(torch.stack(pair), sizes[t], layout) for t, pair in facts.edges.items()
        }
        store = self.fill(graph_store, pairs, layout, sizes=sizes)
        of_stores, of_data = (
            ReferenceSampler().bind(d, num_neighbors=[3, 2]).sample(seeds, None, 5)
            for d in ((features, store), data)
        )
        assert_equal(of_stores, of_data)


SIZES: dict[Any, tuple[int, int]] = {None: (30, 30), BUYS: (30, 20), FOLLOWS: (30, 30)}
"""Numbers of source and destination nodes; the last ones have no edges."""


def edge_list(edge_type: Any, dtype: torch.dtype = torch.int64) -> Tensor:
    """Unsorted edges, some of them parallel, ``[2, num_edges]``."""
    generator = torch.Generator().manual_seed(len(str(edge_type)))
    rows, cols = SIZES[edge_type]
    edges = torch.stack(
        [
            torch.randint(0, rows - 2, (90,), generator=generator),
            torch.randint(0, cols - 2, (90,), generator=generator),
        ]
    )
    return torch.cat([edges, edges[:, :10]], dim=1).to(dtype)


def in_layout(edges: Tensor, size: tuple[int, int], layout: str) -> tuple[Tensor, Tensor]:
    """An edge list converted to a layout of PyG's stores."""
    if layout == "coo":
        return edges[0], edges[1]
    by = int(layout == "csc")
    edges = edges[:, edges[by].argsort(stable=True)]
    count = torch.bincount(edges[by], minlength=size[by]).cumsum(0).to(edges.dtype)
    pointers = torch.cat([count.new_zeros(1), count])
    return (edges[0], pointers) if layout == "csc" else (pointers, edges[1])


def as_list(pair: tuple[Tensor, Tensor], layout: str) -> Tensor:
    """The edge list of a pair in a layout, in its order."""
    row, col = pair
    if layout == "csr":
        row = torch.repeat_interleave(torch.arange(row.numel() - 1).to(row.dtype), row.diff())
    elif layout == "csc":
        col = torch.repeat_interleave(torch.arange(col.numel() - 1).to(col.dtype), col.diff())
    return torch.stack([row, col])


def in_order(facts: graphs.EdgeLists, layout: str) -> graphs.EdgeLists:
    """The graph with its edges numbered in the order of the rows or columns."""
    by = int(layout == "csc")
    edges = {}
    for t, pair in facts.edges.items():
        order = pair[by].argsort(stable=True)
        edges[t] = (pair[0][order], pair[1][order])
    return graphs.EdgeLists(facts.num_nodes, edges)
