"""Batches of a served graph are those of the graph in memory, to the bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.data import Data

from pyg_scale.datasets import load
from pyg_scale.loader import (
    HGTLoader,
    LinkNeighborLoader,
    NeighborLoader,
    SamplingOptions,
)
from pyg_scale.sampler import NegativeSampling
from tests.distributed.served import Served, graph, hetero
from tests.loader.batches import assert_same, assert_same_batches

pytestmark = pytest.mark.matrix(3)

NODES: dict[str, Any] = {"num_neighbors": [4, 3], "batch_size": 64, "seed": 7, "shuffle": True}

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "replace": {"replace": True},
    "disjoint": {"disjoint": True},
    "induced": {"subgraph_type": "induced"},
    "bidirectional": {"subgraph_type": "bidirectional"},
    "all": {"num_neighbors": [-1]},
    "weighted": {"weight_attr": "weight"},
    "timed": {"time_attr": "time"},
    "last": {"time_attr": "time", "temporal_strategy": "last"},
    "window": {"time_attr": "time", "time_window": 9, "strictly_earlier": True},
    "reference": {"neighbor_sampler": "reference"},
    "workers": {"num_workers": 2, "prefetch_factor": 3},
    "one worker": {"num_workers": 1, "persistent_workers": True},
    "transform": {"transform": lambda batch: batch.sort()},
    "sampled": {"transform_sampler_output": lambda out: out},
    "consumer": {"filter_per_worker": False, "num_workers": 2},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option(serve: Callable[..., Any], name: str) -> None:
    data, options = graph(), NODES | OPTIONS[name]
    timed = {"time_attr": "time"} if "time_attr" in options else {}
    weighted = {"weight_attr": "weight"} if "weight_attr" in options else {}
    served = serve(data, **timed, **weighted).open()
    if name == "timed":
        options["input_time"] = torch.arange(data.num_nodes) % 60
    expected, found = NeighborLoader(data, **options), NeighborLoader(served, **options)
    for _ in range(2):
        assert_same_batches(expected, found)


LINKS: dict[str, dict[str, Any]] = {
    "none": {},
    "binary": {"neg_sampling": "binary", "edge_label": torch.arange(100) % 3},
    "triplet": {"neg_sampling": ("triplet", 2)},
    "excluded": {"neg_sampling": NegativeSampling("binary", 1.5, exclude_positives=True)},
    "weighted": {"neg_sampling": NegativeSampling("triplet", 1, dst_weight=torch.arange(300.0))},
    "disjoint": {"neg_sampling": "binary", "disjoint": True},
    "timed": {"time_attr": "time", "edge_label_time": torch.arange(100) % 50},
}


@pytest.mark.parametrize("name", LINKS)
def test_links(serve: Callable[..., Any], name: str) -> None:
    data, options = graph(), LINKS[name]
    timed = {"time_attr": "time"} if "time_attr" in options else {}
    served = serve(data, **timed).open()
    options = NODES | {"edge_label_index": data.edge_index[:, ::30]} | options
    assert_same_batches(LinkNeighborLoader(data, **options), LinkNeighborLoader(served, **options))


def test_all_edges_as_seeds(serve: Callable[..., Any]) -> None:
    data = graph()
    served = serve(data).open()
    options = NODES | {"batch_size": 900, "neg_sampling": NegativeSampling("binary", 0.5)}
    assert_same_batches(LinkNeighborLoader(data, **options), LinkNeighborLoader(served, **options))
    assert torch.equal(served.edge_index, data.edge_index)


@pytest.mark.parametrize("name", ["plain", "disjoint", "bidirectional", "by type"])
def test_types(serve: Callable[..., Any], name: str) -> None:
    data = hetero()
    served = serve(data).open()
    assert served.metadata() == data.metadata()
    assert served["paper"].num_features == 5
    options: dict[str, Any] = NODES | {"input_nodes": "paper"} | OPTIONS.get(name, {})
    if name == "by type":
        options["num_neighbors"] = {t: [2, 1] for t in data.edge_types}
    assert_same_batches(NeighborLoader(data, **options), NeighborLoader(served, **options))


def test_links_of_a_type(serve: Callable[..., Any]) -> None:
    data = hetero()
    served = serve(data).open()
    options = NODES | {"edge_label_index": ("author", "writes", "paper"), "neg_sampling": "binary"}
    assert_same_batches(LinkNeighborLoader(data, **options), LinkNeighborLoader(served, **options))


def test_hgt(serve: Callable[..., Any]) -> None:
    data = hetero()
    served = serve(data).open()
    options: dict[str, Any] = {"input_nodes": "paper", "batch_size": 50, "seed": 3}
    assert_same_batches(
        HGTLoader(data, [20, 20], **options), HGTLoader(served, [20, 20], **options)
    )


@pytest.mark.parametrize("name", ["facebook_pages", "dblp", "history"])
def test_real_graphs_from_two_servers(serve: Callable[..., Any], data_dir: Path, name: str) -> None:
    data = load(str(data_dir / f"{name}.npz"))
    options: dict[str, Any] = NODES | {"batch_size": 700}
    saving: dict[str, Any] = {}
    if name == "facebook_pages":
        data.x = data.x[:, :16].contiguous()
    if name == "dblp":
        options["input_nodes"] = "author"
    if name == "history":
        options |= {"input_nodes": "commit", "time_attr": "time"}
        saving["time_attr"] = "time"
    servers = serve(data, 2, **saving)
    served = servers.open()
    assert_same_batches(NeighborLoader(data, **options), NeighborLoader(served, **options))
    assert min(servers.counts()) > 0  # both took part


def test_a_graph_in_parts(tmp_path: Path) -> None:
    import pyg_scale

    data = graph()
    pyg_scale.partition(data, 3, "hash", tmp_path / "parts")
    servers = Served(tmp_path / "parts", 1)
    try:
        served = servers.open()
        assert_same_batches(NeighborLoader(data, **NODES), NeighborLoader(served, **NODES))
    finally:
        servers.close()


def test_what_the_client_changes_is_the_clients(serve: Callable[..., Any]) -> None:
    data = graph()
    servers = serve(data)
    served = servers.open()
    for each in (data, served):
        each.x = torch.arange(600.0).view(300, 2)  # replaced
        each.more = torch.arange(300)  # added
        del each.weight
        each.y[3] = 17  # fetched, and changed in place
        each.note = "mine"
    assert_same_batches(NeighborLoader(data, **NODES), NeighborLoader(served, **NODES))
    twin = copy.copy(served)
    twin.x = twin.x + 1
    data.x = data.x + 1
    assert_same_batches(NeighborLoader(data, **NODES), NeighborLoader(twin, **NODES))


def test_a_feature_store_of_the_client(serve: Callable[..., Any]) -> None:
    from pyg_scale.store.memory import MemoryFeatureStore

    data = graph()
    servers = serve(data)
    store = MemoryFeatureStore()
    store.put_tensor(data.x + 1, group_name=None, attr_name="x", index=None)
    options: dict[str, Any] = NODES | {"feature_store": store}
    expected = list(NeighborLoader(data, **options))
    assert_same_batches(expected, NeighborLoader(servers.open(), **options))


def test_a_feature_store_of_the_server(serve: Callable[..., Any]) -> None:
    data = graph()
    served = serve(data, server={"feature_store": "disk"}).open()
    assert_same_batches(NeighborLoader(data, **NODES), NeighborLoader(served, **NODES))


def test_resuming_in_the_middle(serve: Callable[..., Any]) -> None:
    data = graph()
    served = serve(data).open()
    whole = list(NeighborLoader(data, **NODES))
    first = NeighborLoader(served, **NODES)
    iterator = iter(first)
    next(iterator), next(iterator)
    state = first.state_dict()
    iterator.close()
    second = NeighborLoader(served, **NODES, sampling=SamplingOptions(prefetch_size=1))
    second.load_state_dict(state)
    assert_same_batches(whole[2:], second)


def test_a_call_and_statistics(serve: Callable[..., Any]) -> None:
    data = graph()
    served = serve(data).open()
    ours, theirs = (NeighborLoader(d, **NODES) for d in (served, data))
    assert_same(ours([3, 1, 4]), theirs([3, 1, 4]))
    list(ours), list(theirs)
    for stage in ("sample", "fetch"):
        for count in ("rows", "bytes"):
            assert ours.stats()["epoch"][stage][count] == theirs.stats()["epoch"][stage][count]


def test_without_features(serve: Callable[..., Any]) -> None:
    data = graph()
    servers = serve(data)
    options = NODES | {"sampling": SamplingOptions(collect_features=False)}
    found = list(NeighborLoader(servers.open(), **options))
    few = servers.counts("bytes")[0]
    assert_same_batches(NeighborLoader(data, **options), found)
    for batch, full in zip(found, NeighborLoader(data, **NODES)):
        assert "x" not in batch and "edge_attr" not in batch and "y" not in batch
        assert torch.equal(batch.n_id, full.n_id) and torch.equal(batch.edge_index, full.edge_index)
        assert torch.equal(data.x[batch.n_id], full.x) and batch.name == "some"
    list(NeighborLoader(servers.opened[0], **NODES))
    assert few < 0.7 * (servers.counts("bytes")[0] - few)


def test_no_seeds_and_no_edges(serve: Callable[..., Any]) -> None:
    data = Data(x=torch.randn(4, 2), edge_index=torch.empty(2, 0, dtype=torch.int64))
    served = serve(data).open()
    for seeds in (torch.empty(0, dtype=torch.int64), torch.tensor([2, 2, 0])):
        options = NODES | {"input_nodes": seeds}
        assert_same_batches(NeighborLoader(data, **options), NeighborLoader(served, **options))


def test_seeds_by_part_are_refused(serve: Callable[..., Any]) -> None:
    served, shared = serve(graph()).open(), {"batch_size": 8, "split_seeds": "part"}
    links = torch.zeros(2, 9, dtype=torch.int64)
    with pytest.raises(ValueError, match="of a graph directory.*split_seeds='global'"):
        NeighborLoader(served, [2], **shared)
    with pytest.raises(ValueError, match="of a graph directory.*split_seeds='global'"):
        LinkNeighborLoader(served, [2], edge_label_index=links, **shared)
