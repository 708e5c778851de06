"""Features from stores: of the right nodes and edges, in one request, from several threads."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.testing import MyFeatureStore, MyGraphStore

from pyg_scale.loader import NeighborLoader
from pyg_scale.testing import graphs
from tests.loader.batches import assert_same

BUYS = ("user", "buys", "item")


def feature_stores(data: Data, edge_group: Any) -> tuple[MyFeatureStore, MyGraphStore]:
    features, graph = graphs.stores(data)
    features.put_tensor(data.edge_attr, group_name=edge_group, attr_name="edge_attr", index=None)
    features.put_tensor(data.weight, group_name=edge_group, attr_name="weight", index=None)
    return features, graph


@pytest.mark.parametrize("edge_group", [(None, None), None])
@pytest.mark.parametrize("workers", [{}, {"num_workers": 2}], ids=str)
def test_stores_of_a_homogeneous_graph(edge_group: Any, workers: dict[str, int]) -> None:
    data = graphs.hostile()
    stores = feature_stores(data, edge_group)
    loader = NeighborLoader(stores, [4, 3], batch_size=20, seed=1, **workers)
    for expected, batch in zip(NeighborLoader(data, [4, 3], batch_size=20, seed=1), loader):
        del expected.when  # which is in no store
        assert_same(expected, batch)


def test_stores_of_a_heterogeneous_graph_have_edge_features_too() -> None:
    data = graphs.hetero()
    features, graph = graphs.stores(data)
    for edge_type in data.edge_types:
        features.put_tensor(
            data[edge_type].weight, group_name=edge_type, attr_name="weight", index=None
        )
    arguments: dict[str, Any] = {
        "num_neighbors": [3, 2],
        "input_nodes": "item",
        "batch_size": 4,
        "seed": 1,
    }
    seen = 0
    for batch in NeighborLoader((features, graph), **arguments, num_workers=1):
        for edge_type in data.edge_types:
            store = batch[edge_type]
            assert torch.equal(store.weight, data[edge_type].weight[store.e_id])
            seen += store.weight.numel()
        for node_type in data.node_types:
            store = batch[node_type]
            assert torch.equal(store.x, data[node_type].x[store.n_id])
            assert store.num_nodes == store.n_id.numel()
    assert seen > 0


@pytest.mark.parametrize("data", [graphs.hostile(), graphs.hetero()], ids=["homo", "hetero"])
def test_data_in_place_of_its_stores(data: Any) -> None:
    """Data and HeteroData are feature and graph stores, of node features only."""
    nodes = "item" if isinstance(data, HeteroData) else None
    arguments: dict[str, Any] = {"input_nodes": nodes, "batch_size": 6, "seed": 1}
    for expected, batch in zip(
        NeighborLoader(data, [3, 2], **arguments),
        NeighborLoader((data, data), [3, 2], **arguments),
    ):
        for store in expected.edge_stores:
            for name in ("when", "weight", "edge_attr"):
                store.pop(name, None)
        assert_same(expected, batch)


def test_custom_cls() -> None:
    class Mine(Data):
        pass

    stores = graphs.stores(graphs.hostile())
    assert type(NeighborLoader(stores, [2], batch_size=5, custom_cls=Mine)([1, 2])) is Mine


@pytest.mark.parametrize("data", [graphs.hostile(), graphs.hetero()], ids=["homo", "hetero"])
def test_features_of_data_from_another_store(data: Any) -> None:
    """A feature that the store has comes from there, the others from the data."""
    is_hetero = isinstance(data, HeteroData)
    group = "item" if is_hetero else None
    elsewhere = MyFeatureStore()
    x = torch.randn(data[group].num_nodes if is_hetero else data.num_nodes, 9)
    elsewhere.put_tensor(x, group_name=group, attr_name="x", index=None)
    edge_type = BUYS if is_hetero else (None, None)
    weight = torch.rand(data[BUYS].num_edges if is_hetero else data.num_edges)
    elsewhere.put_tensor(weight, group_name=edge_type, attr_name="weight", index=None)
    for batch in NeighborLoader(
        data, [3], input_nodes=group, batch_size=6, feature_store=elsewhere
    ):
        nodes = batch["item"] if is_hetero else batch
        edges = batch[BUYS] if is_hetero else batch
        assert torch.equal(nodes.x, x[nodes.n_id])
        assert torch.equal(edges.weight, weight[edges.e_id])
        assert torch.equal(nodes.time, (data["item"] if is_hetero else data).time[nodes.n_id])
        if is_hetero:
            assert torch.equal(batch["user"].x, data["user"].x[batch["user"].n_id])


@pytest.mark.parametrize("data", [graphs.hostile(), graphs.hetero()], ids=["homo", "hetero"])
@pytest.mark.parametrize("workers", [{}, {"num_workers": 2}], ids=str)
def test_a_store_by_name_is_filled_from_the_data(data: Any, workers: dict[str, int]) -> None:
    nodes = "item" if isinstance(data, HeteroData) else None
    arguments: dict[str, Any] = {"input_nodes": nodes, "batch_size": 6, "seed": 1, **workers}
    from_store = NeighborLoader(data, [3, 2], **arguments, feature_store="memory")
    assert from_store._features is not None and from_store._features.store is not data
    for expected, batch in zip(NeighborLoader(data, [3, 2], **arguments), from_store):
        assert_same(expected, batch)


def test_a_store_that_hands_out_the_same_descriptions_again_is_read_right_by_threads() -> None:
    class Same(MyFeatureStore):
        attrs: Any = None

        def get_all_tensor_attrs(self) -> Any:
            if self.attrs is None:
                self.attrs = super().get_all_tensor_attrs()
            return self.attrs

        def _multi_get_tensor(self, attrs: Any) -> Any:
            time.sleep(0.001)  # another thread asks meanwhile
            return super()._multi_get_tensor(attrs)

    data, store = graphs.hostile(), Same()
    for name in ("x", "y"):
        store.put_tensor(data[name], group_name=None, attr_name=name, index=None)
    for batch in NeighborLoader(data, [3], batch_size=4, num_workers=4, feature_store=store):
        assert torch.equal(batch.x, data.x[batch.n_id])
        assert torch.equal(batch.y, data.y[batch.n_id])


def test_all_features_are_asked_for_in_one_request() -> None:
    class Counting(MyFeatureStore):
        requests = 0

        def _multi_get_tensor(self, attrs: Any) -> Any:
            self.requests += 1
            return super()._multi_get_tensor(attrs)

    data = graphs.hostile()
    store = Counting()
    for name in ("x", "y", "time"):
        store.put_tensor(data[name], group_name=None, attr_name=name, index=None)
    loader = NeighborLoader(data, [2], batch_size=10, feature_store=store)
    assert len(list(loader)) == store.requests == 10
