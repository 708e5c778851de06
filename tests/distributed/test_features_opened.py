"""Loaders of a graph that several ranks opened put everything on a batch, as one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.data import Data, HeteroData

import pyg_scale
from pyg_scale.distributed.features.store import RankFeatures
from pyg_scale.errors import CommError
from pyg_scale.loader import LinkNeighborLoader, NeighborLoader
from pyg_scale.partitioner import Partition, write_partition
from pyg_scale.store import Disk
from pyg_scale.testing import graphs
from tests.distributed.across import in_parts, on_ranks, shares, spread
from tests.distributed.test_features import edges_with_features
from tests.loader.batches import assert_same_batches

# Every rank takes all seeds here, to compare its batches with those of one process.
pytestmark = [
    pytest.mark.matrix(2),
    pytest.mark.filterwarnings("ignore:all . ranks iterate over the same"),
]
ARGUMENTS: dict[str, Any] = {
    "num_neighbors": [4, 3], "batch_size": 16, "seed": 3, "split_seeds": False
}  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return in_parts(edges_with_features(), tmp_path_factory.mktemp("opened"), 3)


@pytest.mark.matrix(2)
@pytest.mark.parametrize("options", [{}, {"cache_ratio": 0.2}, {"through": "requests"}], ids=str)
@pytest.mark.parametrize("data", [edges_with_features(), graphs.hetero()], ids=["homo", "hetero"])
def test_batches(tmp_path: Path, data: Any, options: dict[str, Any]) -> None:
    nodes = "item" if isinstance(data, HeteroData) else None
    everything = in_parts(data, tmp_path, 3)
    apart = spread(everything, shares(2, 3))
    expected = list(NeighborLoader(data, **ARGUMENTS, input_nodes=nodes))

    def work(opened: Any) -> dict[str, Any]:
        for workers in (0, 2):
            loader = NeighborLoader(opened, **ARGUMENTS, input_nodes=nodes, num_workers=workers)
            assert_same_batches(expected, loader)
        return loader.stats()["epoch"]["fetch"]

    paths = [everything] * 2 if options.get("through") else apart
    for counted in on_ranks(paths, work, **options):
        assert counted["local_rows"] > 0 and counted["remote_rows"] > 0
        assert (counted["cache_hits"] > 0) == ("cache_ratio" in options)
        total = counted["local_bytes"] + counted["remote_bytes"] + counted["cache_bytes"]
        if counted["cache_hits"]:  # what four batches miss is asked for at once, each row once
            assert total <= counted["bytes"]
        else:
            assert total == counted["bytes"], "no batch has a node twice here"


def test_links(tmp_path: Path) -> None:
    data = graphs.hostile()
    arguments = {
        **ARGUMENTS, "neg_sampling": "triplet", "edge_label_index": data.edge_index
    }  # fmt: skip
    expected = list(LinkNeighborLoader(data, **arguments))

    def work(opened: Any) -> None:
        assert_same_batches(expected, LinkNeighborLoader(opened, **arguments))

    on_ranks(spread(in_parts(data, tmp_path, 2), shares(3, 2)), work)


def test_ranks_that_read_every_part_ask_nobody(path: Path) -> None:
    data = edges_with_features()

    def work(opened: Any) -> None:
        loader = NeighborLoader(opened, **ARGUMENTS)
        assert_same_batches(NeighborLoader(data, **ARGUMENTS), loader)
        counted = loader.stats()["epoch"]["fetch"]
        assert counted["remote_rows"] == 0 and counted["local_bytes"] == counted["bytes"]

    on_ranks([path] * 2, work)


def test_what_was_replaced_comes_from_memory(path: Path) -> None:
    data = edges_with_features()
    data.x, data.extra = data.x * 2, torch.arange(300)
    del data.bits

    def work(opened: Any) -> None:
        opened.x, opened.extra = data.x, data.extra
        del opened.bits
        assert_same_batches(NeighborLoader(data, **ARGUMENTS), NeighborLoader(opened, **ARGUMENTS))

    on_ranks(spread(path, shares(2, 3)), work)


def test_loaders_share_a_cache(path: Path) -> None:
    def work(opened: Any) -> None:
        loaders = [NeighborLoader(opened, **ARGUMENTS) for _ in range(2)]
        stores = [loader._features.store for loader in loaders]
        assert stores[0] is stores[1] and isinstance(stores[0], RankFeatures)
        assert stores[0].cache is not None
        own = opened.rank_features(cache="1kB", policy="belady")
        assert own is not stores[0] and own.cache.capacity == 1000

    on_ranks(spread(path, shares(2, 3)), work, cache="4kB")


def test_a_store_of_its_own_for_what_is_here(path: Path) -> None:
    data = edges_with_features()

    def work(opened: Any) -> None:
        disk = Disk(opened.graph_directory, "2kB")
        store = opened.rank_features(local=disk)
        loader = NeighborLoader(opened, **ARGUMENTS, feature_store=store)
        assert_same_batches(NeighborLoader(data, **ARGUMENTS), loader)
        assert disk.stats()["hits"] > 0

    on_ranks(spread(path, shares(2, 3)), work)


@pytest.mark.parametrize("name", ["memory", "disk", "cached", "quantized"])
def test_stores_that_need_all_of_the_graph_are_refused(path: Path, name: str) -> None:
    def work(opened: Any) -> None:
        with pytest.raises(ValueError, match=r"on other ranks: .*data\.rank_features"):
            NeighborLoader(opened, **ARGUMENTS, feature_store=name)

    on_ranks(spread(path, shares(2, 3)), work)


def test_wrong_arguments_of_open(path: Path) -> None:
    for error, message, options in (
        (ValueError, "pass one", {"cache": 1, "cache_ratio": 0.1}),
        (ValueError, "cache must be", {"cache": "many"}),
        (ValueError, "policy must be one of", {"cache_policy": "lru"}),
    ):
        with pytest.raises(error, match=message):
            pyg_scale.open(path, **options)


def test_after_the_graph_was_closed(path: Path) -> None:
    kept: list[Any] = []

    def work(opened: Any) -> None:
        kept.append(opened.rank_features())

    on_ranks(spread(path, shares(2, 3)), work)
    for store in kept:
        with pytest.raises(CommError, match="closed"):
            store.get_tensor(None, "x", torch.arange(300))


def test_a_rank_without_nodes(tmp_path: Path) -> None:
    data = Data(x=torch.rand(6, 2), edge_index=torch.tensor([[0, 1, 2], [3, 4, 5]]))
    pyg_scale.save(data, tmp_path / "whole")
    assignment = {None: torch.zeros(6, dtype=torch.int64)}
    write_partition(tmp_path / "whole", Partition(assignment, 2, "m"), tmp_path / "parts")
    expected = list(NeighborLoader(data, [-1], batch_size=4, split_seeds=False))

    def work(opened: Any) -> None:
        loader = NeighborLoader(opened, [-1], batch_size=4, split_seeds=False)
        assert_same_batches(expected, loader)

    on_ranks(spread(tmp_path / "parts", [[0], [1]]), work)
