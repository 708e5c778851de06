"""Sampler processes and their rings of shared memory."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from pyg_scale.files.npy import DTYPES, torch_dtype
from pyg_scale.loader import HGTLoader, LinkNeighborLoader, NeighborLoader, SamplingOptions
from pyg_scale.loader.workers.ring_workers import WorkerDiedError
from tests import preloaded
from tests.cases import shown
from tests.distributed.served import graph, hetero
from tests.loader.batches import assert_same_batches

NODES: dict[str, Any] = {"num_neighbors": [4, 3], "batch_size": 20, "seed": 7, "shuffle": True}
RING: dict[str, Any] = {"worker_type": "ring", "num_workers": 2}


def noisy(batch: Any) -> Any:
    batch.x = batch.x + torch.rand(())
    return batch


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_workers": 1, "prefetch_factor": 7},
        {"transform": noisy},
        {"filter_per_worker": False, "transform": noisy},
        {"subgraph_type": "bidirectional"},
        {"disjoint": True},
        {"sampling": SamplingOptions(channel_size=1000)},  # much less than a batch
        {"sampling": SamplingOptions(num_workers=2, worker_concurrency=3), "num_workers": 0},
    ],
    ids=shown,
)
def test_batches_are_the_same(options: dict[str, Any]) -> None:
    data = graph()
    data.orders = {"a": (1, 2.5, None), "b": ["text", True]}
    plain = {k: v for k, v in options.items() if k in ("transform", "subgraph_type", "disjoint")}
    expected = NeighborLoader(data, **NODES | plain)
    found = NeighborLoader(data, **NODES | RING | options)
    for _ in range(2):
        assert_same_batches(expected, found)


def test_types_links_and_hgt() -> None:
    data = hetero()
    options = NODES | {"input_nodes": "paper"}
    assert_same_batches(NeighborLoader(data, **options), NeighborLoader(data, **options | RING))
    links = NODES | {"edge_label_index": ("author", "writes", "paper"), "neg_sampling": "binary"}
    assert_same_batches(LinkNeighborLoader(data, **links), LinkNeighborLoader(data, **links | RING))
    hgt: dict[str, Any] = {"input_nodes": "paper", "batch_size": 50, "seed": 1}
    assert_same_batches(HGTLoader(data, [9, 9], **hgt), HGTLoader(data, [9, 9], **hgt, **RING))


@pytest.mark.slow
def test_a_spawned_process() -> None:
    options = NODES | {"batch_size": 100}
    found = NeighborLoader(graph(), **options | RING, multiprocessing_context="spawn")
    assert_same_batches(NeighborLoader(graph(), **options), found)


class Count:
    """A transform that counts how often it was called, in whatever process."""

    def __init__(self) -> None:
        self.calls = torch.zeros(1, dtype=torch.int64).share_memory_()

    def __call__(self, batch: Any) -> Any:
        self.calls += 1
        return batch


@pytest.mark.parametrize(("ring", "ahead"), [("4KB", (1, 4)), ("64MB", (14, 15))])
def test_a_worker_waits_while_its_ring_is_full(ring: str, ahead: tuple[int, int]) -> None:
    count = Count()
    loader = NeighborLoader(
        graph(),
        **NODES,
        transform=count,
        prefetch_factor=40,
        sampling=SamplingOptions(num_workers=1, channel_size=ring),
    )
    iterator = iter(loader)
    next(iterator)
    deadline = time.monotonic() + 20
    while int(count.calls) < ahead[0] and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.3)  # for those that should not come
    assert ahead[0] <= int(count.calls) <= ahead[1]
    assert len(list(iterator)) == len(loader) - 1


def fail(batch: Any) -> Any:
    raise IndexError("the transform failed")


def test_an_error_keeps_its_type_and_says_where() -> None:
    iterator = iter(NeighborLoader(graph(), **NODES | RING, transform=fail))
    for _ in range(2):
        with pytest.raises(IndexError, match="the transform failed") as found:
            next(iterator)
        (note,) = found.value.__notes__
        assert "pid" in note and "batch" in note and "in fail" in note


def test_what_cannot_be_sent_without_pickle_is_said() -> None:
    loader = NeighborLoader(graph(), **NODES | RING, transform=lambda batch: Count())
    with pytest.raises(
        TypeError, match="Count, which worker_type='ring' cannot send: use 'thread'"
    ):
        next(iter(loader))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_a_sparse_matrix_is_named() -> None:
    def sparse(batch: Any) -> Any:
        batch.adj_t = torch.eye(2).to_sparse_csr()
        return batch

    loader = NeighborLoader(graph(), **NODES | RING, transform=sparse)
    said = r"^the batch\['adj_t'\] is sparse, which worker_type='ring' cannot send: use 'thread' or"
    with pytest.raises(TypeError, match=said):
        next(iter(loader))


def every_dtype(batch: Any) -> Any:
    batch.some = {name: torch.arange(6).view(2, 3).to(torch_dtype(name)) for name in DTYPES}
    return batch


def test_every_dtype_of_a_graph_directory_is_sent() -> None:
    loader = NeighborLoader(graph(), **NODES | RING, transform=every_dtype, timeout=30)
    found = next(iter(loader)).some
    for name, tensor in every_dtype(graph()).some.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


def nine_dimensions(batch: Any) -> Any:
    batch.x = torch.zeros([1] * 9)
    return batch


def test_a_tensor_that_cannot_be_sent_is_an_error_of_its_batch() -> None:
    loader = NeighborLoader(graph(), **NODES | RING, transform=nine_dimensions, timeout=30)
    iterator = iter(loader)
    for _ in range(3):
        with pytest.raises(ValueError, match=r"up to 8 dimensions .*got one of 9") as found:
            next(iterator)
        assert "pid" in found.value.__notes__[0]


def leave(batch: Any) -> Any:
    raise SystemExit


def test_a_worker_that_can_send_no_more_ends_and_is_named() -> None:
    loader = NeighborLoader(graph(), **NODES | RING, transform=leave, timeout=30)
    with pytest.raises(WorkerDiedError, match=r"pyg_scale-sampler-\d, pid \d+, ended by exit code"):
        next(iter(loader))


def test_a_killed_worker_is_named() -> None:
    loader = NeighborLoader(graph(), **NODES | RING | {"num_workers": 1}, prefetch_factor=1)
    iterator = iter(loader)
    next(iterator)
    (child,) = multiprocessing.active_children()
    os.kill(child.pid or 0, signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match=f"pid {child.pid}, ended by signal SIGKILL"):
        list(iterator)
    state = loader.state_dict()
    again = NeighborLoader(graph(), **NODES)
    again.load_state_dict(state)
    assert_same_batches(list(NeighborLoader(graph(), **NODES))[state["delivered"] :], again)


CONSUMER = """
import sys, time, psutil
from pyg_scale.loader import NeighborLoader, SamplingOptions
from tests.distributed.served import graph
loader = NeighborLoader(graph(), [4, 3], batch_size=5, sampling=SamplingOptions(
    num_workers=2, channel_size="4KB"))
iterator = iter(loader)
next(iterator)
print(*[p.pid for p in psutil.Process().children()], flush=True)
time.sleep(100)
"""


def is_nobodys(name: str) -> bool:
    """Return True for a semaphore that no process has: their names do not say whose they are."""
    if not name.startswith("sem."):
        return False
    try:
        inode = f" {os.stat(f'/dev/shm/{name}').st_ino} "  # it was mapped under another name
    except FileNotFoundError:
        return False
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if any(inode in line and "/dev/shm/sem." in line for line in maps.open()):
                return False
        except OSError:  # that process has ended
            continue
    return True


def test_nothing_is_left_of_a_killed_consumer() -> None:
    before = set(os.listdir("/dev/shm"))
    root = Path(__file__).resolve().parents[2]
    consumer = subprocess.Popen(
        [preloaded.python(), "-c", CONSUMER],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(root)},
    )
    try:
        assert consumer.stdout is not None
        workers = [psutil.Process(int(pid)) for pid in consumer.stdout.readline().split()]
        assert len(workers) == 2
    finally:
        consumer.kill()
        consumer.communicate()
    gone, alive = psutil.wait_procs(workers, timeout=20)
    assert len(gone) == 2 and not alive
    pids = {str(process) for process in (consumer.pid, *(worker.pid for worker in workers))}
    until = time.monotonic() + 30
    while any(is_nobodys(name) for name in set(os.listdir("/dev/shm")) - before):
        assert time.monotonic() < until, "a semaphore is left"
        time.sleep(0.05)
    for name in set(os.listdir("/dev/shm")) - before:  # other tests make some meanwhile
        assert name.startswith(("pyg_scale-", "torch_", "sem.")), name
        assert not pids & set(re.split(r"\D+", name)), name


def slow(batch: Any) -> Any:
    time.sleep(30)
    return batch


def test_waits_have_a_limit() -> None:
    loader = NeighborLoader(graph(), **NODES | RING, timeout=0.5, transform=slow)
    iterator = iter(loader)
    with pytest.raises(RuntimeError, match="timed out: batch 0.*pid"):
        next(iterator)
    for child in multiprocessing.active_children():
        child.kill()


def test_arguments_that_contradict_each_other() -> None:
    data = graph()
    two = SamplingOptions(num_workers=2)
    for wrong in (
        {"num_workers": 3, "sampling": two},
        {"worker_type": "thread", "sampling": two},
        {"persistent_workers": True, **RING},
        {"worker_init_fn": print, **RING},
        {"in_order": False, **RING},
    ):
        with pytest.raises(ValueError, match="leave"):
            NeighborLoader(data, **NODES, **wrong)
    with (
        pytest.raises(NotImplementedError, match="worker_type='process'"),
        NeighborLoader(data, **NODES | RING).enable_cpu_affinity(),
    ):
        pass
