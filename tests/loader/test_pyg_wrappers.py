"""PyG's loaders around loaders, and its samplers of seeds, with the loaders here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch_geometric.data import Data

from pyg_scale.loader import (
    Budget,
    CachedLoader,
    ClusterData,
    ClusterLoader,
    DynamicBatchSampler,
    GraphSAINTNodeSampler,
    ImbalancedSampler,
    NeighborLoader,
    PrefetchLoader,
    RandomNodeLoader,
    ShaDowKHopSampler,
)
from pyg_scale.testing import graphs
from tests.loader.batches import assert_same_batches

DATA = graphs.hostile()
EDGES = Data(x=DATA.x, edge_index=DATA.edge_index, y=torch.arange(DATA.num_nodes) % 3)
SEEDED: dict[str, Any] = {"seed": 1, "shuffle": True}


def cluster_loader(**kwargs: Any) -> ClusterLoader:
    clusters = ClusterData(EDGES, 10, method="hash", log=False)
    return ClusterLoader(clusters, batch_size=3, **SEEDED, **kwargs)


LOADERS: dict[str, Any] = {
    "neighbours": lambda **k: NeighborLoader(DATA, [3, 2], batch_size=20, **SEEDED, **k),
    "budget": lambda **k: NeighborLoader(
        DATA, [3, 2], batch_cost=Budget("nodes", 60), **SEEDED, **k
    ),
    "padded": lambda **k: NeighborLoader(
        DATA, [3, 2], batch_size=20, pad_to="buckets", **SEEDED, **k
    ),
    "clusters": cluster_loader,
    "saint": lambda **k: GraphSAINTNodeSampler(EDGES, 20, 4, log=False, seed=1, **k),
    "shadow": lambda **k: ShaDowKHopSampler(DATA, 1, 3, batch_size=20, **SEEDED, **k),
    "random": lambda **k: RandomNodeLoader(DATA, 5, **SEEDED, **k),
}


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_cached_and_prefetched(name: str, num_workers: int) -> None:
    expected = list(LOADERS[name]())
    cached = CachedLoader(LOADERS[name](num_workers=num_workers))
    assert_same_batches(expected, cached)
    assert_same_batches(expected, cached)  # epoch 0 again, from memory
    cached.clear()
    second = LOADERS[name]()
    list(second)
    assert_same_batches(second, cached)
    prefetched = PrefetchLoader(LOADERS[name](num_workers=num_workers), torch.device("cpu"))
    assert len(prefetched) == len(expected)
    assert_same_batches(expected, prefetched)


def test_a_transform_of_the_cache_runs_once() -> None:
    calls = []

    def note(batch: Any) -> Any:
        calls.append(1)
        return batch

    cached = CachedLoader(LOADERS["neighbours"](), transform=note)
    list(cached), list(cached)
    assert len(calls) == len(cached)


def test_the_loader_under_a_wrapper_is_resumed() -> None:
    own = LOADERS["neighbours"](num_workers=2)
    found = []
    for batch in PrefetchLoader(own, torch.device("cpu")):
        found.append(batch)
        if len(found) == 2:
            # A prefetcher has one batch more than it has handed out.
            state = own.state_dict()
            break
    assert state["delivered"] == 3
    resumed = LOADERS["neighbours"]()
    resumed.load_state_dict(state)
    assert_same_batches(list(LOADERS["neighbours"]())[3:], PrefetchLoader(resumed))


@pytest.mark.parametrize("name", ["neighbours", "shadow"])
def test_imbalanced_seeds(name: str) -> None:
    """Torch's generator decides, whatever the number of workers; the state has it."""

    def made(**kwargs: Any) -> Any:
        sampler = ImbalancedSampler(EDGES.y, num_samples=60)
        if name == "neighbours":
            return NeighborLoader(EDGES, [3], batch_size=20, sampler=sampler, seed=1, **kwargs)
        return ShaDowKHopSampler(EDGES, 1, 3, batch_size=20, sampler=sampler, seed=1, **kwargs)

    torch.manual_seed(5)
    expected = list(made())
    torch.manual_seed(5)
    own = made(num_workers=2)
    iterator = iter(own)
    next(iterator)
    state = own.state_dict()
    assert_same_batches(expected[1:], iterator)
    resumed = made()
    resumed.load_state_dict(state)
    assert_same_batches(expected[1:], resumed)


def test_dynamic_batches_are_of_whole_graphs() -> None:
    """It asks a data set of graphs for their sizes, and seeds have none."""
    sizes = [graphs.nothing(5), graphs.nothing(7), graphs.nothing(3)]
    whole = iter(DynamicBatchSampler(sizes, 10))  # type: ignore[arg-type]
    assert [next(whole), next(whole)] == [[0], [1, 2]]
    sampler = DynamicBatchSampler(EDGES.x, max_num=10)  # type: ignore[arg-type]
    own = NeighborLoader(EDGES, [3], batch_sampler=sampler)
    with pytest.raises(AttributeError, match="num_nodes"):
        next(iter(own))
