"""Memory is recycled, never while a tensor is on it, and goes back after a peak."""

from __future__ import annotations

import gc
import random
import resource
import subprocess
import sys
import threading

import pytest
import torch

from pyg_scale.ops import library, memory

MIB = 1 << 20

pytestmark = pytest.mark.skipif(
    not library.status()["loaded"], reason="the kernels are not compiled"
)


@pytest.fixture(autouse=True)
def empty_pool() -> None:
    gc.collect()
    memory.trim()


def empty(num_bytes: int) -> torch.Tensor:
    return torch.ops.pyg_scale.pool_empty([num_bytes], torch.uint8)


def touched(num_bytes: int) -> torch.Tensor:
    """Memory whose pages are really there."""
    out = empty(num_bytes)
    out[::4096] = 1
    return out


def delta(before: memory.PoolStats) -> memory.PoolStats:
    return memory.PoolStats(*(a - b for a, b in zip(memory.stats(), before)))


def resident() -> int:
    """Bytes of private memory that are really there."""
    with open("/proc/self/smaps_rollup") as file:
        lines = dict(line.split(":", 1) for line in file if ":" in line)
    return int(lines["Anonymous"].split()[0]) * 1024


def test_memory_is_used_again_only_when_the_last_tensor_is_gone() -> None:
    before = memory.stats()
    first = empty(3 * MIB)
    address, view = first.data_ptr(), first[5:]
    del first
    second = empty(3 * MIB)
    assert second.data_ptr() != address
    view.fill_(7)
    second.fill_(1)
    assert view.eq(7).all()
    del view
    assert empty(3 * MIB).data_ptr() == address
    assert delta(before).maps == 2 and delta(before).reuses == 1
    assert delta(before).live_bytes == 3 * MIB


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32, torch.complex128])
def test_sizes_and_types(dtype: torch.dtype) -> None:
    out = torch.ops.pyg_scale.pool_empty([3, 500, 1000], dtype)
    assert out.shape == (3, 500, 1000) and out.dtype == dtype and out.is_contiguous()
    assert out.fill_(1).eq(1).all()
    assert torch.ops.pyg_scale.pool_empty([4, 0], dtype).shape == (4, 0)


def test_small_tensors_are_not_in_the_pool() -> None:
    before = memory.stats()
    kept = empty(200_000)
    assert delta(before) == (0, 0, 0, 0, 0)
    del kept


def test_impossible_sizes() -> None:
    before = memory.stats()
    for sizes in ([2**62, 2**62], [2**58]):
        with pytest.raises((MemoryError, RuntimeError)):
            torch.ops.pyg_scale.pool_empty(sizes, torch.float32)
    with pytest.raises((ValueError, RuntimeError), match="negative"):
        torch.ops.pyg_scale.pool_empty([-1], torch.float32)
    assert delta(before).live_bytes == 0


def test_the_most_recently_freed_block_comes_first() -> None:
    tensors = [empty(4 * MIB) for _ in range(3)]
    addresses = [t.data_ptr() for t in tensors]
    tensors.pop(0)
    tensors.pop(1)
    assert empty(4 * MIB).data_ptr() == addresses[2]


def test_a_steady_loop_maps_nothing() -> None:
    sizes = random.Random(0)
    batch = None
    for step in range(200):
        # a batch is made while the one before it is still there
        batch = [empty(int(m * MIB * sizes.uniform(0.97, 1.03))) for m in (20, 3, 3, 1)]
        if step == 20:
            before = memory.stats()
    assert batch is not None
    assert delta(before).reuses == 4 * 179 - delta(before).maps
    assert delta(before).maps <= 8


def test_steps_of_few_sizes_map_nothing() -> None:
    """Two large tensors, then two of other sizes in their place, as a layer and its gradients."""
    for step in range(60):
        first, second = touched(38 * MIB), touched(38 * MIB)
        del first
        third = touched(22 * MIB)
        del second
        fourth, fifth = touched(22 * MIB), touched(12 * MIB)
        del third, fourth, fifth
        if step == 20:
            before = memory.stats()
    assert delta(before).maps == 0 and delta(before).reuses == 5 * 39


def test_free_memory_is_bounded_and_goes_back_after_a_peak() -> None:
    kept = [touched(10 * MIB) for _ in range(40)]
    high = resident()
    del kept
    for _ in range(600):  # life goes on with one tensor at a time
        touched(10 * MIB)
    assert memory.stats().free_bytes <= 32 * MIB
    assert high - resident() >= 320 * MIB


def test_resident_memory_stays_near_what_is_live() -> None:
    """Batches of varying size, three of them at a time, every tenth one kept for a while."""
    sizes = random.Random(1)
    start = resident()

    def batch() -> list[torch.Tensor]:
        scale = sizes.uniform(0.9, 1.1)
        return [touched(int(m * MIB * scale)) for m in (40, 4, 4, 2)]

    window, kept, live, most = [], [], 0, 0
    for step in range(250):
        window.append(batch())
        if step >= 50:
            now = {id(b): sum(t.nbytes for t in b) for b in window + kept}
            live = max(live, sum(now.values()))
            most = max(most, resident() - start)
        if step % 10 == 0:
            kept.append(window[-1])
        window, kept = window[-3:], kept[-4:]
    assert most <= 1.1 * live


def test_a_larger_block_gives_back_what_a_smaller_tensor_does_not_need() -> None:
    tensors = [touched(47 * MIB) for _ in range(4)]
    high = resident()
    del tensors
    reuses = memory.stats().reuses
    tensors = [touched(33 * MIB) for _ in range(4)]
    assert len(tensors) == 4 and memory.stats().reuses == reuses + 4
    assert high - resident() >= 4 * 11 * MIB


def test_batches_of_unequal_sizes_fault_nothing_in() -> None:
    sizes = random.Random(2)
    batch = None
    for step in range(300):
        # features and edges of the same number of clusters
        parts = [(5, 0.9, 1.1), (1.7, 0.65, 1.45)]
        batch = [touched(int(m * MIB * sizes.uniform(low, high))) for m, low, high in parts]
        if step == 100:
            before = memory.stats()
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    assert batch is not None and delta(before).maps == 0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults < 2_000  # of 340,000 pages


def test_trim_gives_everything_back() -> None:
    before = resident()
    del_me = [touched(20 * MIB) for _ in range(3)]
    kept = empty(20 * MIB).fill_(3)
    del del_me
    memory.trim()
    after = resident()  # before comparing, whose result malloc may keep
    assert memory.stats().free_bytes == 0 and kept.eq(3).all()
    assert after - before <= 24 * MIB


def test_many_threads_never_share_memory() -> None:
    wrong: list[int] = []
    handed_over: list[torch.Tensor] = []

    def work(name: int) -> None:
        mine: list[torch.Tensor] = []
        draw = random.Random(name)
        for _ in range(200):
            mine.append(empty(draw.randrange(300_000, 900_000)).fill_(name))
            if len(mine) > 5:
                tensor = mine.pop(draw.randrange(5))
                if not bool(tensor.eq(name).all()):
                    wrong.append(name)
                handed_over.append(tensor)  # dies on another thread
            if len(handed_over) > 20:
                del handed_over[:10]
        if not all(bool(t.eq(name).all()) for t in mine):
            wrong.append(name)

    threads = [threading.Thread(target=work, args=(i + 1,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


FORKED = """
import os, signal, torch
from pyg_scale.ops import library, memory
library.load()
torch.set_num_threads(1)  # OpenMP's threads do not survive a fork

def empty(size):
    return torch.ops.pyg_scale.pool_empty([size], torch.uint8)

kept, freed = empty(2 << 20).fill_(1), empty(2 << 20)
del freed
assert memory.stats().free_bytes == 2 << 20
child = os.fork()
if child == 0:
    signal.alarm(30)
    ok = memory.stats().free_bytes == 0
    mine = empty(2 << 20).fill_(9)
    kept.fill_(5)
    ok = ok and bool(mine.eq(9).all())
    del mine, kept
    os._exit(0 if ok and memory.stats().live_bytes == 0 else 1)
assert os.waitpid(child, 0)[1] == 0
assert kept.eq(1).all() and memory.stats().free_bytes == 2 << 20
"""

OUTLIVES = """
import torch
from pyg_scale.ops import library
library.load()
torch.kept = torch.ops.pyg_scale.pool_empty([1 << 20], torch.float32)
"""


@pytest.mark.parametrize("code", [FORKED, OUTLIVES], ids=["forked", "outlives"])
def test_in_a_process_of_its_own(code: str) -> None:
    """A forked child has a pool of its own; a tensor may outlive the interpreter."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_without_kernels_there_is_no_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYG_SCALE_KERNELS", "never")
    assert memory.stats() == (0, 0, 0, 0, 0)
    memory.trim()
