"""HGTLoader: what is on a batch, equal batches for any workers, and what it refuses."""

import pytest
import torch
import torch_geometric.loader
from torch_geometric.data import Data, HeteroData
from torch_geometric.testing import MyFeatureStore, MyGraphStore

from pyg_scale.loader import HGTLoader
from tests.loader.batches import assert_same_batches


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(0)
    data = HeteroData()
    data["paper"].x = torch.arange(100)[:, None].float()
    data["paper"].train_mask = torch.arange(100) % 3 == 0
    data["author"].x = torch.arange(60)[:, None].float()
    for a, name, b, count in (
        ("paper", "cites", "paper", 300),
        ("author", "writes", "paper", 200),
        ("paper", "rev_writes", "author", 200),
    ):
        sizes = data[a].num_nodes, data[b].num_nodes
        data[a, name, b].edge_index = torch.stack(
            [torch.randint(size, (count,), generator=generator) for size in sizes]
        )
        data[a, name, b].edge_attr = torch.arange(count)
    return data


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches(data, num_workers):
    loader = HGTLoader(
        data,
        {"paper": [8, 4], "author": [5, 5]},
        ("paper", data["paper"].train_mask),
        batch_size=10,
        seed=0,
        num_workers=num_workers,
    )
    assert isinstance(loader, torch_geometric.loader.HGTLoader)
    assert repr(loader) == "HGTLoader()"
    assert len(loader) == 4
    for batch in loader:
        size = batch["paper"].batch_size
        assert torch.equal(batch["paper"].n_id[:size], batch["paper"].input_id)
        assert bool(data["paper"].train_mask[batch["paper"].n_id[:size]].all())
        assert batch["paper"].num_nodes <= size + 12
        assert batch["author"].num_nodes <= 10
        assert "num_sampled_nodes" not in batch["paper"]
        for node_type in data.node_types:
            assert torch.equal(batch[node_type].x, data[node_type].x[batch[node_type].n_id])
        for a, name, b in data.edge_types:
            store, whole = batch[a, name, b], data[a, name, b]
            found = torch.stack(
                [batch[a].n_id[store.edge_index[0]], batch[b].n_id[store.edge_index[1]]]
            )
            assert torch.equal(found, whole.edge_index[:, store.e_id])
            assert torch.equal(store.edge_attr, whole.edge_attr[store.e_id])
            among = torch.isin(whole.edge_index[0], batch[a].n_id)
            among &= torch.isin(whole.edge_index[1], batch[b].n_id)
            assert torch.equal(store.e_id.sort().values, among.nonzero().view(-1))


def test_same_batches_for_any_workers(data):
    one, two, processes = (
        HGTLoader(data, [6, 6], ("author", None), batch_size=16, shuffle=True, seed=4, **options)
        for options in ({}, {"num_workers": 2}, {"num_workers": 2, "worker_type": "process"})
    )
    assert_same_batches(one, two)
    one.set_epoch(0)
    assert_same_batches(one, processes)


def test_stores(data):
    features, graph = MyFeatureStore(), MyGraphStore()
    for store in data.node_stores:
        features.put_tensor(store.x, group_name=store._key, attr_name="x", index=None)
    for store in data.edge_stores:
        graph.put_edge_index(
            store.edge_index, edge_type=store._key, layout="coo", size=store.size()
        )
    options = {"num_samples": [6, 6], "batch_size": 16, "seed": 4}
    loaders = [
        HGTLoader(d, input_nodes=("paper", torch.arange(100)), **options)
        for d in (data, (features, graph))
    ]
    for ours, theirs in zip(*loaders, strict=True):
        for node_type in data.node_types:
            # Stores name their edge types in another order, on which nothing depends here.
            assert set(ours[node_type].n_id.tolist()) == set(theirs[node_type].n_id.tolist())
            x = data[node_type].x[theirs[node_type].n_id]
            assert torch.equal(theirs[node_type].x, x)


def test_refuses(data):
    with pytest.raises(NotImplementedError, match="input_time: HGT"):
        HGTLoader(data, [2], "paper", input_time=torch.zeros(100))
    with pytest.raises(NotImplementedError, match="needs a graph with node types"):
        HGTLoader(Data(edge_index=torch.tensor([[0], [1]]), num_nodes=2), [2], None)
    for wrong in (8, "8"):
        with pytest.raises(TypeError, match="num_samples must be one integer per hop"):
            HGTLoader(data, wrong, "paper")
    with pytest.raises(ValueError, match="num_samples has 'shop'"):
        HGTLoader(data, {"shop": [1]}, "paper")
    with pytest.raises(ValueError, match="of which type"):
        HGTLoader(data, [2], None)
