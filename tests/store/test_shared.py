"""Stores in shared memory: one copy per machine, and nothing left of it afterwards."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

from pyg_scale.files import segment
from pyg_scale.loader import NeighborLoader
from pyg_scale.store import (
    MemoryFeatureStore,
    MemoryGraphStore,
    Shared,
    SharedGraph,
    topology_of,
)
from tests.store.edges import CITES, E, N, assert_is, edge_index

pytestmark = pytest.mark.filterwarnings("ignore:.*plain-torch path.*:RuntimeWarning")

RANKS = 4


@pytest.fixture(autouse=True)
def kernels() -> None:
    """Once is enough here: nothing depends on the kernels."""


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    gc.collect()
    left = [p.name for p in segment.memory_root().glob(f"pyg_scale-{os.getuid()}-*test*")]
    assert not left, f"left in shared memory: {left}"


def name() -> str:
    return f"test-{os.getpid()}-{time.monotonic_ns()}"


def test_who_comes_first_makes_it() -> None:
    calls: list[int] = []

    def make() -> Any:
        calls.append(1)
        return {(None, "x"): torch.eye(3), ("paper", "y"): np.arange(4)}

    called = name()
    first, second = Shared(called, make), Shared(called, make)
    assert len(calls) == 1 and first.name == called
    assert torch.equal(second[None, "x", None], torch.eye(3))
    second["paper", "y", None] = torch.zeros(2)
    assert first["paper", "y", None].tolist() == [0, 0], "what one puts, all see"
    other = MemoryFeatureStore()
    other["paper", "z", None] = torch.ones(3, 2)
    assert torch.equal(Shared(name(), lambda: other)["paper", "z", None], torch.ones(3, 2))
    path = first.path
    del first
    gc.collect()
    assert path.is_dir()
    second.close()
    assert not path.exists() and not path.with_name(path.name + ".lock").exists()


def test_stores_of_one_name_are_one_directory() -> None:
    called, edges = name(), edge_index()
    data = Data(edge_index=edges, num_nodes=N)
    features = Shared(called, lambda: {(None, "x"): torch.arange(N)})
    graph = SharedGraph(called, lambda: data)
    assert features.path == graph.path
    assert_is(topology_of((features, graph)).csc[None], *edges, N)
    batch = next(iter(NeighborLoader((features, graph), [2], batch_size=N)))
    assert torch.equal(batch.x, batch.n_id)


@pytest.mark.parametrize("cls", [Shared, SharedGraph])
def test_wrong_arguments(cls: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs a name"):
        cls(make=dict)
    with pytest.raises(NotADirectoryError, match="not a directory"):
        cls(name(), root=tmp_path / "nowhere")
    with pytest.raises(TypeError, match="make must return .*got int"):
        cls(name(), lambda: 3)


def test_a_make_that_fails_is_called_again() -> None:
    called = name()
    store = Shared(called)

    def fail() -> Any:
        raise RuntimeError("no such file")

    with pytest.raises(RuntimeError, match="no such file"):
        Shared(called, fail)
    Shared(called, lambda: {("paper", "x"): torch.ones(1)})
    assert store["paper", "x", 0] == 1


def _slow(called: str, ready: Any, go: Any, seen: Any) -> None:
    def make() -> Any:
        ready.set()
        go.wait(30)
        return {("paper", "x"): torch.full((3,), 7.0)}

    store = Shared(called, make)
    seen.wait(30)
    store.close()


@pytest.mark.parametrize("killed", [False, True])
def test_others_wait_for_who_makes_it(killed: bool) -> None:
    called, context = name(), multiprocessing.get_context("fork")
    ready, go, seen = context.Event(), context.Event(), context.Event()
    process = context.Process(target=_slow, args=(called, ready, go, seen), daemon=True)
    process.start()
    assert ready.wait(30)
    with pytest.raises(TimeoutError, match=f"process {process.pid} has been at it"):
        Shared(called, dict, timeout=0.2)
    if killed:
        os.kill(process.pid, signal.SIGKILL)  # type: ignore[arg-type]
        process.join(10)
        store = Shared(called, lambda: {("paper", "x"): torch.zeros(3)}, timeout=20)
        assert store["paper", "x", None].tolist() == [0, 0, 0]
        return
    go.set()
    store = Shared(called, dict, timeout=20)
    assert store["paper", "x", None].tolist() == [7, 7, 7]
    seen.set()
    process.join(20)
    assert process.exitcode == 0
    assert store.path.is_dir(), "not while somebody has it"


def _hold(called: str, ready: Any) -> None:
    store = Shared(called, lambda: {("paper", "x"): torch.ones(1000)})
    store["paper", "x", None].sum()
    ready.set()
    time.sleep(60)


def test_a_killed_process_leaves_nothing_that_stays() -> None:
    called, context = name(), multiprocessing.get_context("fork")
    processes = []
    for _ in range(2):
        ready = context.Event()
        processes.append(context.Process(target=_hold, args=(called, ready), daemon=True))
        processes[-1].start()
        assert ready.wait(30)
    path = segment.memory_root() / f"pyg_scale-{os.getuid()}-{called}"
    os.kill(processes[0].pid, signal.SIGKILL)  # type: ignore[arg-type]
    processes[0].join(10)
    Shared().close()  # cleans what nobody has
    assert path.is_dir(), "the other one has it"
    os.kill(processes[1].pid, signal.SIGKILL)  # type: ignore[arg-type]
    processes[1].join(10)
    assert path.is_dir(), "nobody was there to remove it"
    Shared().close()
    assert not path.exists(), "the next store of the machine removes it"


@pytest.mark.parametrize(
    "end", [pytest.param("", marks=pytest.mark.slow), "os.kill(os.getpid(), 2)"]
)
def test_a_process_that_ends_removes_it(end: str) -> None:
    called = name()
    code = (
        "import os, signal, torch\n"
        "from pyg_scale.store.shared import Shared\n"
        # a shell's background job ignores it, and so do its children
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"store = Shared({called!r}, lambda: {{('paper', 'x'): torch.ones(9)}})\n"
        "assert store.path.is_dir()\n"
        f"{end}\n"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, text=True)
    assert (done.returncode == 0) == (end == ""), done.stderr
    assert not (segment.memory_root() / f"pyg_scale-{os.getuid()}-{called}").exists()


def _reads(store: Shared, go: Any) -> None:
    assert go.wait(30)
    assert store["paper", "x", None].tolist() == [0, 1, 2] and store.path.is_dir()


def test_a_forked_child_keeps_it() -> None:
    store = Shared(name())
    store["paper", "x", None] = torch.arange(3)
    path, context = store.path, multiprocessing.get_context("fork")
    go = context.Event()
    process = context.Process(target=_reads, args=(store, go), daemon=True)
    process.start()
    store.close()
    assert path.is_dir(), "the child has it"
    go.set()
    process.join(30)
    assert process.exitcode == 0 and not path.exists()


def test_a_pickled_store_is_a_reference() -> None:
    store = Shared()
    store["paper", "x", None] = torch.randn(10_000)
    sent = pickle.dumps(store)
    assert len(sent) < 1000
    again = pickle.loads(sent)
    assert torch.equal(again["paper", "x", None], store["paper", "x", None])
    graph = SharedGraph()
    edges = edge_index()
    graph.put_edge_index((edges[0], edges[1]), edge_type=CITES, layout="coo", size=(N, N))
    topology = topology_of((MemoryFeatureStore(), graph))
    assert topology.csc[CITES].num_edges == E
    assert pickle.loads(pickle.dumps(topology)) is topology
    store.close()
    again.close()
    with pytest.raises(FileNotFoundError, match="is gone"):
        pickle.loads(sent)


def test_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    from pyg_scale.files import tensor_directory

    store = Shared()
    store["paper", "x", None] = torch.ones(3)

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tensor_directory, "save_array", full)
    with pytest.raises(OSError, match="--shm-size"):
        store["paper", "x", None] = torch.zeros(5)
    assert store["paper", "x", None].tolist() == [1, 1, 1]


# Four ranks ###############################################################################


def _graph() -> Data:
    generator = torch.Generator().manual_seed(0)
    nodes, edges = 20_000, 600_000
    return Data(
        x=torch.randn(nodes, 128, generator=generator),
        edge_index=torch.randint(0, nodes, (2, edges), generator=generator),
        num_nodes=nodes,
    )


def _stores(kind: str, called: str, data: Data) -> tuple[Any, Any]:
    """Shared by all ranks; or, to see that the measurement tells, copies of each rank."""
    if kind == "a topology each":
        features = Shared(called, lambda: {(None, "x"): data.x})
        graph: Any = MemoryGraphStore()
    elif kind == "features each":
        features = Shared()
        features[None, "x", None] = data.x
        graph = SharedGraph(called)
    else:
        features = Shared(called, lambda: {(None, "x"): data.x})
        graph = SharedGraph(called)
    row, col = data.edge_index
    if not graph.get_all_edge_attrs():
        size = (data.num_nodes, data.num_nodes)
        graph.put_edge_index((row, col), edge_type=None, layout="coo", size=size)
    return features, graph


def _rank(kind: str, called: str, turn: Any, barrier: Any, queue: Any) -> None:
    torch.set_num_threads(1)  # the threads of the parent are not here
    with turn:
        features, graph = _stores(kind, called, _graph())
        topology = topology_of((features, graph))
    csc = topology.csc[None]
    tensors = [features[None, "x", None], csc.indptr, csc.indices, csc.edge_id]
    sums = [tensor.sum().item() for tensor in tensors]  # touches every page
    barrier.wait(60)
    queue.put((_pss({tensor.data_ptr() for tensor in tensors}), sums))
    barrier.wait(60)


def _pss(addresses: set[int]) -> int:
    """Bytes of the mappings that hold these addresses, wherever these are: files, shared memory
    or memory of this process alone. A page that several processes map counts in parts."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        fields = line.split()
        if not fields[0].endswith(":"):
            begin, end = (int(x, 16) for x in fields[0].split("-"))
            ours = any(begin <= address < end for address in addresses)
        elif ours and fields[0] == "Pss:":
            total += int(fields[1]) * 1024
    return total


def _measure(kind: str, ranks: int) -> tuple[int, list[Any]]:
    called, context = name(), multiprocessing.get_context("fork")
    turn, barrier, queue = context.Lock(), context.Barrier(ranks), context.Queue()
    processes = [
        context.Process(target=_rank, args=(kind, called, turn, barrier, queue), daemon=True)
        for _ in range(ranks)
    ]
    for process in processes:
        process.start()
    found = [queue.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    return sum(pss for pss, _ in found), [sums for _, sums in found]


NEEDED = 20_000 * 128 * 4 + 600_000 * 8 + 20_001 * 8
"""Bytes of the features, of neighbours with edge ids, and of pointers."""


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs /proc")
@pytest.mark.parametrize(
    ("kind", "least"),
    [("shared", 0.0), ("features each", 2.5), ("a topology each", 1.5)],
)
def test_four_ranks_hold_one_topology_and_one_feature_table(kind: str, least: float) -> None:
    """The last two say that the measurement sees copies, in files and in private memory."""
    one, (alone,) = _measure(kind, 1)
    four, sums = _measure(kind, RANKS)
    assert all(each == alone for each in sums)
    assert one >= NEEDED, "all that is used is counted"
    if kind != "a topology each":  # private mappings are merged with others beside them
        assert one <= 1.1 * NEEDED, "and little else"
    assert four <= 1.05 * one if kind == "shared" else four >= least * one
