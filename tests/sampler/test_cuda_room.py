"""The memory of a device that a batch takes: bounded before it is asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch_geometric.data import HeteroData

from pyg_scale.errors import DeviceError
from pyg_scale.sampler import CudaSampler, NativeSampler, cuda
from pyg_scale.sampler.cuda import _Batch
from tests.ops import emulated
from tests.sampler.test_cuda_sampler import academic, assert_same

MARGIN = 64 << 10  # of small tensors


def peak(run: Any) -> int:
    """The most bytes that torch's allocator held at once, beside those that it held before."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        run()
    held = most = 0
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert events
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def few_and_many(kinds: int) -> HeteroData:
    """Many users, each of whom knows a few of five places, which many types of edges expand."""
    generator, data = torch.Generator().manual_seed(0), HeteroData()
    data["user"].num_nodes, data["place"].num_nodes = 4000, 5
    ends = torch.stack(
        [
            torch.randint(0, 5, (80_000,), generator=generator),
            torch.randint(0, 4000, (80_000,), generator=generator),
        ]
    )
    data["place", "of", "user"].edge_index = ends
    for kind in range(kinds):
        data["user", f"at{kind}", "place"].edge_index = ends.flip(0)[:, kind::100]
    return data


def steps(sampler: CudaSampler, seed: Any, time: Any = None) -> Any:
    """For each hop, its bound, the edges that it draws and the peak of its memory."""
    topology, hops = sampler.topology, sampler.hops()
    assert topology is not None and sampler._graph is not None
    depth = max(map(len, hops.values()))
    batch = _Batch(topology, sampler._graph, seed, time, sampler)
    batch.count_seeds({t: hops[t][0] for t in topology.edge_types})
    for hop in range(depth):
        wanted = None
        if hop + 1 < depth:
            wanted = {t: hops[t][hop + 1] for t in topology.edge_types}

        def run(hop: int = hop, wanted: Any = wanted) -> None:
            sampler._draw(batch, hop, 7)
            batch.end_hop(wanted)
            if wanted is None:
                out = batch.sample()
                sampler._graph.forget(out.node)

        bound = batch.bytes_of_hop(wanted is None)
        edges = sum(counted.total for counted in batch._counted.values())
        yield bound, edges, peak(run)


@pytest.mark.matrix(3)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"disjoint": True},
        {"weight_attr": "weight"},
        {"time_attr": "when", "weight_attr": "weight", "time_window": 20},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_no_hop_takes_more_than_its_bound(dtype, options) -> None:
    data = academic()
    for edge_type in data.edge_types:
        data[edge_type].edge_index = data[edge_type].edge_index.repeat(1, 12).to(dtype)
        for name in ("when", "weight"):
            data[edge_type][name] = data[edge_type][name].repeat(12)
    sampler = CudaSampler(data, [10, 10, 10], **options, device="cpu")
    seed = {"paper": torch.arange(300), "author": torch.arange(40)}
    time = None
    if "time_attr" in options:
        time = {t: torch.full((node.numel(),), 60) for t, node in seed.items()}
    with emulated.instead_of():
        for bound, edges, taken in steps(sampler, seed, time):
            assert edges > 0
            assert taken <= bound
            assert bound - MARGIN * len(data.edge_types) <= 4 * taken, "the bound says something"


@pytest.mark.parametrize("disjoint", [False, True])
def test_what_can_be_new_bounds_what_is_made_for_new_nodes(disjoint: bool) -> None:
    """Else a hop would take at least 24 bytes more for each edge and each type, here 720."""
    kinds = 30
    data = few_and_many(kinds)
    sampler = CudaSampler(data, [16, 2], device="cpu", disjoint=disjoint)
    seed = {"user": torch.arange(4000)}
    with emulated.instead_of():
        bound, edges, taken = next(steps(sampler, seed))
    assert edges >= 50_000
    new = 5 * (4000 if disjoint else 1)
    most = 300 * edges + 144 * (kinds + 1) * new + MARGIN * (kinds + 1)
    assert taken <= bound <= most
    assert disjoint or taken < 24 * kinds * edges / 4


def test_a_hash_table_is_as_large_as_what_can_differ() -> None:
    emulated.load()
    key = torch.arange(100_000) % 100
    find = torch.ops.pyg_scale_emulated.first_places
    assert torch.equal(find(key, 100), key)
    known, unknown = peak(lambda: find(key, 100)), peak(lambda: find(key, key.numel()))
    assert known <= 8 * key.numel() + 12 * 256
    assert unknown >= 8 * key.numel() + 12 * 2 * key.numel()


@pytest.mark.parametrize("disjoint", [False, True])
def test_seeds_that_are_given_twice_leave_room_for_all_nodes(disjoint: bool) -> None:
    data = few_and_many(2)
    native = NativeSampler(data, [-1, -1, -1], disjoint=disjoint)
    here = CudaSampler(data, [-1, -1, -1], disjoint=disjoint, device="cpu")
    seed = {"user": torch.tensor([3, 3, 9, 3]), "place": torch.tensor([1, 1, 1, 1, 1, 1, 0])}
    assert_same(here.sample(seed, None, 1), native.sample(seed, None, 1))


def test_a_hop_that_does_not_fit_is_refused_before_it_begins(monkeypatch) -> None:
    data = academic()
    here = CudaSampler(data, [4, 3], device="cpu")
    seed, left, asked = {"paper": torch.arange(100)}, [0], []

    def free(device: torch.device) -> int:
        asked.append(device)
        return left[0]

    monkeypatch.setattr(cuda, "free_bytes", free)
    wanted = NativeSampler(data, [4, 3]).sample(seed, None, 7)
    assert_same(here.sample(seed, None, 7), wanted)
    assert not asked, "memory of the host is not asked for"
    monkeypatch.setattr(cuda, "_small", lambda device: 0)
    bounds = [bound for bound, _, _ in steps(here, seed)]
    for hop, bound in enumerate(sorted(bounds)):
        left[0] = bound - 1
        with pytest.raises(
            DeviceError, match=rf"hop {hop} of the batch draws \d+ edges.* are left"
        ):
            here.sample(seed, None, 7)
    left[0] = max(bounds)
    assert_same(here.sample(seed, None, 7), wanted)
    monkeypatch.setattr(cuda, "_small", lambda device: 1 << 40)
    left[0] = 0
    assert_same(here.sample(seed, None, 7), wanted)


def test_memory_that_is_not_there_after_all_is_the_same_error(monkeypatch) -> None:
    here = CudaSampler(academic(), [4], device="cpu")

    def draw(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(cuda, "draw_along_types", draw)
    with pytest.raises(DeviceError, match="cpu: CUDA out of memory; use smaller batches or fewer"):
        here.sample({"paper": torch.arange(3)}, None, 1)
