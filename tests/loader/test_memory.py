"""Resident memory of a loader stays near what its consumer and its workers hold."""

from __future__ import annotations

import gc
from typing import Any

import psutil
import pytest
import torch
from torch_geometric.data import Data

from pyg_scale.loader import NeighborLoader
from pyg_scale.ops import library, memory

MIB = 1 << 20
NODES, EDGES = 30_000, 300_000


def resident() -> int:
    return psutil.Process().memory_info().rss


def size(batch: Any) -> int:
    return sum(value.nbytes for _, value in batch if isinstance(value, torch.Tensor))


@pytest.mark.skipif(not library.status()["loaded"], reason="the kernels are not compiled")
@pytest.mark.matrix(3)
@pytest.mark.parametrize("keeps", [False, True], ids=["", "every tenth batch is kept for a while"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_resident_memory_stays_near_what_is_live(num_workers: int, keeps: bool) -> None:
    gc.collect()
    generator = torch.Generator().manual_seed(0)
    data = Data(
        x=torch.ones(NODES, 512),
        edge_index=torch.randint(NODES, (2, EDGES), generator=generator),
    )
    loader = NeighborLoader(data, [8, 5], batch_size=200, num_workers=num_workers, seed=0)
    loader(range(200))  # what the first batch needs once
    gc.collect()
    memory.trim()
    start, kept, largest, most = resident(), [], 0, 0
    number = 0
    for _ in range(2):
        for batch in loader:
            number += 1
            largest = max(largest, size(batch))
            if number > 50:
                most = max(most, resident() - start)
            if keeps and number % 10 == 0:
                kept = [*kept[-3:], batch]
    # What is ready or being made, what was just handed out and what before it, what is kept.
    live = 2 * num_workers + 2 + (4 if keeps else 0)
    assert number == 300 and largest > 8 * MIB
    # Beside the batches: small tensors, tables of the sampler, a free block of each size.
    assert most <= 1.1 * live * largest + 24 * MIB
