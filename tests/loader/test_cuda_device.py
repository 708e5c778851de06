"""Loaders with ``device="cuda"``, where there is one: batches of the CPU, within the budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pyg_scale.loader import NeighborLoader
from pyg_scale.ops import fused
from pyg_scale.ops.gather_cached import gather_cached, plain
from pyg_scale.ops.mapped_rows import MappedRows
from pyg_scale.sampler import CudaSampler, NativeSampler
from pyg_scale.store import DeviceFeatures, MemoryFeatureStore
from pyg_scale.testing import graphs
from tests.loader.batches import assert_same
from tests.ops.gathers import DTYPES, SHAPES, rows

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LOADER: dict[str, Any] = {"num_neighbors": [4, 3], "batch_size": 20, "seed": 1, "shuffle": True}


@pytest.mark.parametrize("memory", [0, 4096, "1MB"], ids=str)
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_those_of_the_cpu(memory: Any, workers: int) -> None:
    data = graphs.hostile()
    loader = NeighborLoader(
        data, **LOADER, device="cuda", device_memory=memory, num_workers=workers
    )
    for expected, batch in zip(NeighborLoader(data, **LOADER), loader, strict=True):
        assert all(value.is_cuda for value in batch.to_dict().values() if torch.is_tensor(value))
        assert_same(expected, batch.cpu())
    assert loader.stats()["device"]["used"] <= loader.stats()["device"]["budget"]


@pytest.mark.parametrize("host", ["mapped", "staged"])
def test_rows_from_every_place_and_no_more_memory_than_the_budget(host: str) -> None:
    if host == "mapped" and not fused.usable(torch.empty(0, device="cuda")):
        pytest.skip("needs the kernels for CUDA")
    x = torch.randn(100_000, 33)
    store = MemoryFeatureStore()
    store.put_tensor(x, group_name=None, attr_name="x", index=None)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    made = DeviceFeatures(store, "cuda", "5MB", torch.randperm(100_000), host=host)
    assert torch.cuda.memory_allocated() - before <= 5_000_000
    assert made.stats()["tensors"]["x"]["where"] == host
    for seed in range(5):
        index = torch.randint(0, 100_000, (7_001,), generator=torch.Generator().manual_seed(seed))
        for asked in (index, index.cuda()):
            assert torch.equal(made[None, "x", asked].cpu(), x[index])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_means_what_its_meaning_means(dtype: torch.dtype, shape: tuple) -> None:
    made = rows(dtype, shape)
    cached, index, slot_of = made.cached.cuda(), made.index.cuda(), made.slot_of.cuda()
    for gather in (gather_cached, plain):
        found = gather(cached, made.table.cuda(), index, slot_of)
        assert torch.equal(found.cpu(), made.expected)
        staged, place = made.staged()
        assert torch.equal(gather(cached, staged.cuda(), place.cuda()).cpu(), made.expected)
    if fused.usable(cached) and made.table.numel():
        mapped = MappedRows(made.table.contiguous(), torch.device("cuda", 0))
        assert torch.equal(gather_cached(cached, mapped, index, slot_of).cpu(), made.expected)


@pytest.mark.parametrize("host", ["never", "mapped"])
@pytest.mark.parametrize("name", ["homogeneous", "heterogeneous"])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"replace": True},
        {"disjoint": True},
        {"sample_direction": "backward"},
        {"weight_attr": "weight"},
        {"weight_attr": "weight", "replace": True},
        {"time_attr": "time"},
        {"time_attr": "when", "temporal_strategy": "last"},
        {"time_attr": "when", "time_window": 3, "weight_attr": "weight"},
    ],
    ids=str,
)
def test_samples_of_the_device_are_those_of_the_cpu(
    name: str, more: dict[str, Any], host: str
) -> None:
    if host == "mapped" and not fused.usable(torch.empty(0, device="cuda")):
        pytest.skip("needs the kernels for CUDA")
    data = graphs.hostile() if name == "homogeneous" else graphs.hetero()
    options: dict[str, Any] = {"num_neighbors": [4, 3, -1], **more}
    native, there = NativeSampler(data, **options), CudaSampler(data, **options, host=host)
    assert (there.host_bytes > 0) == (host == "mapped")
    kind = None if name == "homogeneous" else "item"
    for key in range(20):
        generator = torch.Generator().manual_seed(key)
        seed = {kind: torch.randint(0, native.topology.num_nodes[kind], (9,), generator=generator)}
        time = None
        if native.topology.is_temporal:
            time = {kind: torch.randint(-1, 9, (9,), generator=generator)}
        wanted, found = native.sample(seed, time, key), there.sample(seed, time, key)
        for field in ("node", "row", "col", "edge", "batch", "colptr"):
            for each, value in (getattr(found, field) or {}).items():
                assert value.is_cuda
                assert torch.equal(value.cpu(), getattr(wanted, field)[each]), (field, each)
        assert found.num_sampled_nodes == wanted.num_sampled_nodes
        assert found.num_sampled_edges == wanted.num_sampled_edges


def test_the_device_samples_if_it_has_the_kernels() -> None:
    loader = NeighborLoader(graphs.hostile(), **LOADER, device="cuda", device_memory="1MB")
    usable = fused.usable(torch.empty(0, device="cuda"))
    assert loader.stats()["device"]["sampling"]["where"] == ("cuda:0" if usable else "cpu")


def test_a_model_that_trains_meanwhile_reads_whole_batches() -> None:
    data = graphs.hostile()
    loader = NeighborLoader(data, **LOADER, device="cuda", device_memory=0, num_workers=2)
    weight = torch.randn(2048, 2048, device="cuda")
    sums = []
    for batch in loader:
        for _ in range(5):  # keeps the stream of the training busy
            weight = torch.nn.functional.normalize(weight @ weight)
        sums.append(batch.x.double().sum())
        del batch  # its memory goes back while the sum is still to be made
    expected = [batch.x.double().sum() for batch in NeighborLoader(data, **LOADER)]
    torch.testing.assert_close(torch.stack(sums).cpu(), torch.stack(expected))
