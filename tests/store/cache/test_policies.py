"""What a store with look-ahead saves: its own counts on real batches, and what they should be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data

from pyg_scale.loader import NeighborLoader
from pyg_scale.ops import library
from pyg_scale.store import Cached, MemoryFeatureStore
from pyg_scale.store.cache.schedule import ENOUGH
from tests.store.cache.oracles import WindowedCache, min_misses, sieve_misses

BATCHES, SHARE = 40, 0.15


@pytest.fixture(autouse=True)
def compiled(kernels: None) -> None:
    if not library.compiled():
        pytest.skip("takes a minute; plain plans are tested in tests/ops/test_cache_plans.py")


@pytest.fixture(scope="module")
def graph(data_dir: Path) -> Data:
    with np.load(data_dir / "facebook_pages.npz") as stored:
        edge_index = torch.from_numpy(stored["edge_index"]).long()
    return Data(edge_index=edge_index, num_nodes=int(edge_index.max()) + 1)


def store_of(graph: Data, policy: str) -> Cached:
    features = MemoryFeatureStore()
    x = torch.arange(graph.num_nodes * 2.0).view(-1, 2)
    features.put_tensor(x, group_name=None, attr_name="x", index=None)
    return Cached(features, int(SHARE * graph.num_nodes) * 8, policy)


def epoch(graph: Data, batch_size: int, store: Cached, **kwargs: int) -> list[Tensor]:
    """Forty batches, and whether each has the features of its nodes."""
    loader = NeighborLoader(
        graph,
        [15, 10, 5],
        input_nodes=torch.arange(batch_size * BATCHES) * 7 % graph.num_nodes,
        batch_size=batch_size,
        shuffle=True,
        seed=1,
        feature_store=store,
        **kwargs,
    )
    found = []
    for batch in loader:
        assert torch.equal(batch.x, 2.0 * batch.n_id[:, None] + torch.tensor([0.0, 1.0]))
        found.append(batch.n_id)
    assert len(found) == BATCHES
    return found


def windowed(batches: list[list[int]], slots: int, look_ahead: int) -> WindowedCache:
    """What is announced: ``look_ahead`` batches, fewer if they have four times the rows."""
    cache = WindowedCache(slots)
    for b, rows in enumerate(batches):
        window: list[list[int]] = []
        for coming in batches[b + 1 : b + 1 + look_ahead]:
            if sum(map(len, window)) >= ENOUGH * slots:
                break
            window.append(coming)
        cache.request(rows, window)
    return cache


def test_misses_are_at_most_seven_tenths_of_sieves(graph: Data) -> None:
    """A batch touches 29 % of the nodes, the cache has room for 15 %."""
    ahead, behind = store_of(graph, "belady"), store_of(graph, "sieve")
    batches = [each.tolist() for each in epoch(graph, 64, ahead, num_workers=2)]
    epoch(graph, 64, behind)
    slots = int(SHARE * graph.num_nodes)
    expected = windowed(batches, slots, ahead.look_ahead)
    counts = ahead.stats()
    assert counts["misses"] == expected.misses
    assert counts["hits"] == expected.hits
    assert counts["evictions"] == expected.evictions
    assert counts["late"] == 0
    assert behind.stats()["misses"] == sieve_misses(batches, slots)
    assert counts["misses"] <= 0.7 * behind.stats()["misses"]
    assert counts["misses"] <= 1.01 * min_misses(batches, slots)


def test_small_batches_that_touch_four_percent(graph: Data) -> None:
    store = store_of(graph, "belady")
    batches = [each.tolist() for each in epoch(graph, 4, store, num_workers=3)]
    slots = int(SHARE * graph.num_nodes)
    expected = windowed(batches, slots, store.look_ahead)
    assert store.stats()["misses"] == expected.misses
    assert store.stats()["misses"] <= 0.75 * sieve_misses(batches, slots)
