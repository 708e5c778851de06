"""The memory of a device that loaders take together, of a device whose memory is made up."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from pyg_scale.loader import NeighborLoader
from pyg_scale.loader.batch import placement
from pyg_scale.store import DeviceFeatures, MemoryFeatureStore
from pyg_scale.store.device.shares import SHARES, DeviceShares
from pyg_scale.store.device.target import budget_of
from pyg_scale.testing import graphs

CPU = torch.device("cpu")
TOTAL = 40 << 10


class Owner:
    """Whoever takes memory."""


class Memory:
    """A device with :data:`TOTAL` bytes."""

    def __init__(self) -> None:
        self.used: list[int] = []

    def free(self, device: torch.device) -> int:
        return TOTAL - sum(self.used)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    """The memory of the CPU, as if it were a device's."""
    gc.collect()
    made = Memory()
    monkeypatch.setattr(SHARES, "_free", made.free)
    monkeypatch.setattr(SHARES, "_held", {})
    return made


def test_takers_share_half_and_give_it_back() -> None:
    memory, cuda = Memory(), torch.device("cuda", 0)
    shares = DeviceShares(memory.free)
    first, second = Owner(), Owner()
    for owner, wanted, left in ((first, 8 << 10, 20 << 10), (second, 12 << 10, 12 << 10)):
        assert shares.left(cuda) == left
        shares.take(owner, cuda, wanted)
        memory.used.append(wanted)
    assert shares.left(cuda) == 0
    assert shares.left(torch.device("cuda", 1)) == (TOTAL - (20 << 10)) // 2  # another device
    memory.used.append(6 << 10)  # of somebody who has a size of its own
    assert shares.left(cuda) == 0
    del first, owner
    memory.used.remove(8 << 10)
    assert shares.left(cuda) == (TOTAL - (6 << 10)) // 2 - (12 << 10)


def test_stores_and_loaders_take_together(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "_no_kernels", lambda device: "")
    data = graphs.hostile()
    data.x = torch.randn(data.num_nodes, 40)

    def made(**more: Any) -> NeighborLoader:
        loader = NeighborLoader(data, [2], batch_size=8, device="cpu", **more)
        there = loader.stats()["device"]
        memory.used.append(there["used"] + there["sampling"]["bytes"])
        return loader

    first = made()
    assert 0 < memory.used[0] <= TOTAL // 2
    assert memory.used[0] > TOTAL // 4  # features do not fit as a whole
    second = made()
    assert 0 <= sum(memory.used) <= TOTAL // 2
    store = MemoryFeatureStore()
    store.put_tensor(data.x, group_name=None, attr_name="x", index=None)
    features = DeviceFeatures(store, "cpu")
    memory.used.append(features.used)
    assert sum(memory.used) <= TOTAL // 2
    made(device_memory=TOTAL // 3)  # as it was asked for, and not counted among them
    assert memory.used[-1] > TOTAL // 4
    taken = sum(memory.used[:3])
    assert budget_of(None, CPU) == max(0, (TOTAL - memory.used[-1]) // 2 - taken)
    assert budget_of(1000, CPU) == 1000
    del first, second, features
    gc.collect()
    memory.used = []
    assert budget_of(None, CPU) == TOTAL // 2
