"""Ranks that share the clusters, roots or steps of a loader get what one process would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch_geometric.data import Data

from pyg_scale.comm.base import Communicator
from pyg_scale.loader import (
    ClusterData,
    ClusterLoader,
    GraphSAINTRandomWalkSampler,
    RandomNodeLoader,
    ShaDowKHopSampler,
)
from tests.loader.batches import assert_same_batches
from tests.loader.ranks import in_turn, on_ranks

DATA = Data(
    x=torch.arange(40).view(-1, 1).float(),
    edge_index=torch.randint(40, (2, 160), generator=torch.Generator().manual_seed(1)),
)
CLUSTERS = {
    count: ClusterData(DATA, count, log=False, method="multilevel") for count in (2, 7)
}  # fewer than ranks, and not a multiple of them
MAKE: dict[str, Callable[..., Any]] = {
    "two clusters": lambda **kw: ClusterLoader(CLUSTERS[2], shuffle=True, **kw),
    "clusters": lambda **kw: ClusterLoader(CLUSTERS[7], batch_size=2, shuffle=True, **kw),
    "ShaDow": lambda **kw: ShaDowKHopSampler(DATA, 2, 3, batch_size=6, shuffle=True, **kw),
    "random nodes": lambda **kw: RandomNodeLoader(DATA, 7, shuffle=True, **kw),
    "GraphSAINT": lambda **kw: GraphSAINTRandomWalkSampler(
        DATA, 4, 2, num_steps=7, sample_coverage=2, log=False, **kw
    ),
}


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_three_ranks_get_what_one_process_would(make: Callable[..., Any]) -> None:
    def work(comm: Communicator) -> list[Any]:
        return list(make(seed=3, split_seeds="global", comm=comm, num_workers=comm.rank))

    assert_same_batches(in_turn(on_ranks(3, work)), make(seed=3))
