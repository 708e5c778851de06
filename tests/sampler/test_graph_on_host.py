"""Graphs of which a device reads a part from the host: the same bits, and what lies where."""

from __future__ import annotations

import dataclasses
import gc
import os
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import pyg_scale
from pyg_scale.errors import DeviceError
from pyg_scale.graph.topology import CSC, Topology
from pyg_scale.ops import mapped_rows
from pyg_scale.ops.mapped_rows import HostNumbers, map_numbers
from pyg_scale.sampler import CudaSampler, NativeSampler, cuda, device_graph
from pyg_scale.sampler.device_graph import graph_bytes, place, pointer_bytes
from pyg_scale.store.device.shares import DeviceShares
from pyg_scale.testing import graphs
from tests.ops import emulated

CUDA = torch.device("cuda", 0)
HOPS = [4, 3, -1]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"replace": True},
    {"disjoint": True},
    {"sample_direction": "backward"},
    {"weight_attr": "weight"},
    {"weight_attr": "weight", "replace": True},
    {"time_attr": "time"},
    {"time_attr": "when", "temporal_strategy": "last"},
    {"time_attr": "when", "time_window": 3, "weight_attr": "weight"},
]


@pytest.fixture
def mapping(monkeypatch):
    """Samplers run in the emulator, and what is on the host is mapped for its device."""

    def for_cuda(tensor: Tensor, device: torch.device, spare: int) -> HostNumbers:
        return map_numbers(tensor, CUDA, spare)

    monkeypatch.setattr(device_graph, "map_numbers", for_cuda)
    monkeypatch.setattr(mapped_rows, "why_not_mapped", lambda tensor, device: "")
    with emulated.instead_of():
        yield
    gc.collect()
    assert not mapped_rows._locked and not mapped_rows._to_unlock


def tensors_of(csc: CSC) -> dict[str, Tensor]:
    named = {field.name: getattr(csc, field.name) for field in dataclasses.fields(csc)}
    return {name: each for name, each in named.items() if isinstance(each, Tensor)}


def copy_of(topology: Topology) -> Topology:
    return dataclasses.replace(
        topology,
        csc={
            t: dataclasses.replace(csc, **{n: x.clone() for n, x in tensors_of(csc).items()})
            for t, csc in topology.csc.items()
        },
        node_time={t: time.clone() for t, time in topology.node_time.items()},
    )


def overwrite(topology: Topology) -> None:
    for csc in topology.csc.values():
        for each in tensors_of(csc).values():
            each.zero_()
    for time in topology.node_time.values():
        time.zero_()


def requests(native: NativeSampler, kind: str | None) -> list[tuple[Any, Any, int]]:
    found: list[tuple[Any, Any, int]] = []
    for key in range(6):
        generator = torch.Generator().manual_seed(key)
        count = native.topology.num_nodes[kind]
        seed = {kind: torch.randint(0, count, (12,), generator=generator)}
        time = None
        if native.topology.is_temporal:
            time = {kind: torch.randint(-1, 9, (12,), generator=generator)}
        found.append((seed, time, key))
    return found


def assert_same(found: Any, wanted: Any) -> None:
    for field in ("node", "row", "col", "edge", "batch", "colptr"):
        ours, theirs = getattr(found, field), getattr(wanted, field)
        assert (ours is None) == (theirs is None), field
        for each in ours or ():
            assert torch.equal(ours[each], theirs[each]), (field, each)
    assert found.num_sampled_nodes == wanted.num_sampled_nodes
    assert found.num_sampled_edges == wanted.num_sampled_edges


@pytest.mark.matrix(4)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", ["homogeneous", "heterogeneous"])
def test_the_same_bits_wherever_the_graph_lies(mapping, monkeypatch, name, options) -> None:
    """What the host has is overwritten after it was mapped: the emulated device has it as it was.

    On a device the addresses differ, too.
    """
    count = cuda._edges_of_seeds
    seen = set()
    for part in (0, 0.55, 1):
        data = graphs.hostile() if name == "homogeneous" else graphs.hetero()
        native = NativeSampler(data, HOPS, **options)
        wanted = [
            (request, native.sample(*request))
            for request in requests(native, None if name == "homogeneous" else "item")
        ]
        topology, rows = native.topology, not native.disjoint
        least, whole = pointer_bytes(topology, rows=rows), graph_bytes(topology, rows=rows)
        memory = int(least + part * (whole - least))
        here = CudaSampler(data, HOPS, **options, device="cpu", memory=memory)
        assert here.num_bytes <= memory
        assert (here.num_bytes == least) == (part == 0)
        assert (here.host_bytes == 0) == (part == 1)
        seen.add(here.host_bytes)
        kept = copy_of(here.topology)
        monkeypatch.setattr(cuda, "_edges_of_seeds", lambda _, *rest, of=kept: count(of, *rest))
        overwrite(here.topology)
        for request, expected in wanted:
            assert_same(here.sample(*request), expected)
        del here
    assert len(seen) == 3, "all, a part and nothing"


def test_pages_are_locked_once_and_as_long_as_a_sampler_wants_them(mapping) -> None:
    data = graphs.hetero()
    first = CudaSampler(data, [3, 2], device="cpu", host="mapped")
    ours = [
        csc for csc in first.topology.csc.values() if csc.num_edges > 1 and csc.edge_id is not None
    ]
    assert ours and all(csc.indices.stride(0) == 2 for csc in ours), "ids beside neighbours"
    locked = len(mapped_rows._locked)
    assert 0 < locked <= 2 * len(first.topology.csc)
    assert locked < sum(len(tensors_of(csc)) - 1 for csc in first.topology.csc.values())
    second = CudaSampler.like(first, "cpu", pointer_bytes(first.topology))
    assert len(mapped_rows._locked) == locked and second.host_bytes == first.host_bytes > 0
    del first
    gc.collect()
    assert len(mapped_rows._locked) == locked
    there = pickle.loads(pickle.dumps(second))
    assert there.host_bytes == 0 and there.host == "auto" and there.memory == second.memory
    del second
    gc.collect()
    assert not mapped_rows._locked


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_neither_uses_nor_unlocks_what_is_not_its_own(mapping) -> None:
    sampler = CudaSampler(graphs.hostile(), [3], device="cpu", host="mapped")
    graph = sampler._graph
    assert graph is not None and graph.is_here
    child = os.fork()
    if child == 0:
        locked = len(mapped_rows._locked)
        used = graph.is_here
        del sampler, graph
        gc.collect()
        os._exit(1 if used or len(mapped_rows._locked) != locked else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_files_are_copied_if_memory_has_room(mapping, monkeypatch, tmp_path) -> None:
    data = graphs.hostile()
    del data.when
    pyg_scale.save(data, tmp_path / "graph")
    opened = pyg_scale.open(tmp_path / "graph")
    native = NativeSampler(opened, [4, 3])
    here = CudaSampler(opened, [4, 3], device="cpu", host="mapped")
    assert here.host_bytes > 0 and mapped_rows._locked
    for request in requests(native, None):
        assert_same(here.sample(*request), native.sample(*request))
    monkeypatch.setattr(device_graph, "usable_memory", lambda: 100)
    with pytest.raises(
        DeviceError, match="would have to be copied .* which has room for 50; raise"
    ):
        CudaSampler(opened, [4, 3], device="cpu", host="mapped")


def test_who_shares_a_page_with_others_is_copied(mapping, monkeypatch) -> None:
    data = graphs.hostile()
    native = NativeSampler(data, [4, 3])
    indices = native.topology.csc[None].indices
    whole = torch.empty(0, dtype=torch.uint8).set_(indices.untyped_storage())
    torch.ops.pyg_scale.map_rows(whole[:8], 0)  # somebody else's, on the same page
    try:
        here = CudaSampler(data, [4, 3], device="cpu", host="mapped")
        assert here.topology.csc[None].indices.data_ptr() == indices.data_ptr()
        for request in requests(native, None):
            assert_same(here.sample(*request), native.sample(*request))
        monkeypatch.setattr(mapped_rows, "_SHARES_PAGES", 100)
        with pytest.raises(
            DeviceError, match=r"indices cannot be read .*registered already.*limit"
        ):
            CudaSampler(data, [4, 3], device="cpu", host="mapped")
        del here
    finally:
        gc.collect()
        torch.ops.pyg_scale.unmap_rows(whole[:8], 0)


def test_where_nothing_can_be_mapped_it_is_said(monkeypatch) -> None:
    data = graphs.hostile()
    for_cuda = lambda tensor, device, spare: map_numbers(tensor, CUDA, spare)  # noqa: E731
    monkeypatch.setattr(device_graph, "map_numbers", for_cuda)
    monkeypatch.setattr(mapped_rows, "why_not_mapped", lambda *_: "there are no kernels for CUDA")
    with pytest.raises(DeviceError, match="cannot be read .* no kernels for CUDA.*memory=.*native"):
        CudaSampler(data, [3], device="cpu", host="mapped")


def test_the_graph_does_not_fit() -> None:
    data = graphs.hostile()
    topology = NativeSampler(data, [3]).topology
    least, whole = pointer_bytes(topology), graph_bytes(topology)
    with pytest.raises(DeviceError, match=f"pointers and rows take {least} bytes .* give more"):
        CudaSampler(data, [3], device="cpu", memory=least - 1)
    with pytest.raises(DeviceError, match=f"the graph takes {whole} bytes of cpu"):
        CudaSampler(data, [3], device="cpu", memory=whole - 1, host="never")
    assert CudaSampler(data, [3], device="cpu", host="never").num_bytes == whole
    assert CudaSampler(data, [3], device="cpu").num_bytes == whole
    assert CudaSampler(data, [3], device="cpu", host="mapped").num_bytes == least
    with pytest.raises(ValueError, match="host must be .*'staged'"):
        CudaSampler(device="cpu", host="staged")
    with pytest.raises(ValueError, match="memory must be bytes or text"):
        CudaSampler(device="cpu", memory="some")


def test_what_nobody_waits_for_keeps_its_memory(monkeypatch) -> None:
    here = CudaSampler(graphs.hetero(), [3], device="cpu")
    assert here._graph is not None
    kept: list[Tensor] = []
    monkeypatch.setattr(device_graph, "read_here", lambda *tensors: kept.extend(tensors))
    here.sample({"item": torch.arange(3)}, None, 1)
    assert [id(each) for each in kept] == [id(each) for each in here._graph.row_of.values()]


def test_samplers_share_what_others_without_a_budget_take(monkeypatch) -> None:
    shares, data = DeviceShares(lambda device: 1 << 20), graphs.hostile()
    monkeypatch.setattr(cuda, "SHARES", shares)
    cpu = torch.device("cpu")
    first = CudaSampler(data, [3], device="cpu")
    held = first.num_bytes
    assert 0 < held < shares.left(cpu) + held == ((1 << 20) + held) // 2
    CudaSampler(data, [3], device="cpu", memory=held)
    assert shares.left(cpu) + held == ((1 << 20) + held) // 2, "it has a budget of its own"
    del first
    gc.collect()
    assert shares.left(cpu) == 1 << 19


def numbers(size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.int64)


def two_types() -> Topology:
    """The in-edges of 100 users and 100 items, four and forty of each."""
    buys, likes = ("item", "to", "user"), ("user", "to", "item")
    return Topology(
        node_types=("user", "item"),
        edge_types=(buys, likes),
        num_nodes={"user": 100, "item": 100},
        csc={
            buys: CSC(numbers(101), numbers(400), numbers(400), None, numbers(400)),
            likes: CSC(numbers(101), numbers(4000), numbers(4000), numbers(4000)),
        },
    )


BUYS, LIKES = ("item", "to", "user"), ("user", "to", "item")
ORDER = [
    ("weight_prefix", BUYS),  # every draw searches
    ("time", LIKES),  # every node searches
    ("indices", BUYS),  # all in-edges are drawn, of forty four
    ("edge_id", BUYS),
    ("indices", LIKES),
    ("edge_id", LIKES),
]


def test_what_is_read_most_for_its_size_is_on_the_device() -> None:
    topology = two_types()
    sizes = {"user": 3584, "item": 32256}  # 3200 and 32000 bytes in pieces of 512
    budget = pointer_bytes(topology)
    hops = {BUYS: [4], LIKES: [4]}
    assert place(topology, budget, hops) == frozenset()
    assert place(topology, budget - 1, hops) == frozenset()
    taken = set()
    for part in (ORDER[0], ORDER[2], ORDER[3]):  # the large ones do not fit yet
        assert place(topology, budget + sizes["user"] - 1, hops) == taken
        budget += sizes["user"]
        taken.add(part)
        assert place(topology, budget, hops) == taken
    for part in (ORDER[1], ORDER[4], ORDER[5]):
        assert place(topology, budget + sizes["item"] - 1, hops) == taken
        budget += sizes["item"]
        taken.add(part)
        assert place(topology, budget, hops) == taken
    assert budget == graph_bytes(topology)


def test_the_most_wanted_come_first_where_sizes_are_alike() -> None:
    topology = two_types()
    budget = pointer_bytes(topology) + 32256
    hops = {BUYS: [4], LIKES: [4]}
    large = {part for part in place(topology, budget, hops) if part[1] == LIKES}
    assert large <= {("time", LIKES)}
    untimed = CSC(numbers(101), numbers(4000))
    timed = dataclasses.replace(
        topology,
        csc={BUYS: topology.csc[BUYS], LIKES: untimed},
        node_time={"user": numbers(100), "item": numbers(100)},
    )
    times = place(timed, pointer_bytes(timed) + 1024, hops)
    assert times == {("node_time", "user")}, "items' times are looked up along fewer edges"
    never = place(topology, pointer_bytes(topology) + 3584, {BUYS: [0, 0], LIKES: [4, -1]})
    assert never <= {("weight_prefix", BUYS), ("indices", BUYS), ("edge_id", BUYS)}
