"""PyG's context managers for workers: cores, threads, memory."""

from __future__ import annotations

import logging
import os
import threading
from typing import Any

import pytest

from pyg_scale.loader import NeighborLoader
from pyg_scale.testing import graphs


def loader(**kwargs: Any) -> NeighborLoader:
    return NeighborLoader(graphs.hostile(), [4, 3], batch_size=9, seed=5, **kwargs)


def threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("pyg_scale-loader")]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs thread affinity")
def test_cpu_affinity_moves_worker_threads_and_nothing_else() -> None:
    here = os.sched_getaffinity(0)
    core = min(here)
    pinned = loader(num_workers=2, persistent_workers=True)
    iterator = iter(pinned)

    def cores() -> list[set[int]]:
        return [os.sched_getaffinity(thread) for thread in pinned._threads.native_ids]

    assert cores() == [here, here]
    with pinned.enable_cpu_affinity([core, [core]]):
        assert cores() == [{core}, {core}]
        assert os.sched_getaffinity(0) == here
        assert pinned.worker_init_fn is None and pinned.worker_type == "thread"
    assert cores() == [here, here]
    assert len(list(iterator)) == 12
    fresh = loader(num_workers=1)
    with fresh.enable_cpu_affinity():
        iterator = iter(fresh)
        assert [
            len(os.sched_getaffinity(t.native_id))
            for t in threads()
            if t.native_id not in pinned._threads.native_ids
        ] == [1]


def test_cpu_affinity_refuses_what_cannot_be() -> None:
    with pytest.raises(ValueError, match="one entry per worker"):
        loader(num_workers=2).enable_cpu_affinity([0]).__enter__()
    with pytest.raises(ValueError, match="at least one worker"):
        loader().enable_cpu_affinity([0]).__enter__()
    missing = loader(num_workers=1)
    with missing.enable_cpu_affinity([10_000]), pytest.raises(OSError):
        iter(missing)


def test_cpu_affinity_of_processes_is_pygs() -> None:
    core = min(os.sched_getaffinity(0))
    processes = loader(num_workers=1, worker_type="process")
    with processes.enable_cpu_affinity([core]):
        assert len(list(processes)) == 12


def test_multithreading_is_for_processes() -> None:
    with pytest.raises(NotImplementedError, match="several threads already"):
        loader(num_workers=2).enable_multithreading(2).__enter__()
    with pytest.raises(ValueError, match="spawn"):
        loader(num_workers=2, worker_type="process").enable_multithreading(1).__enter__()


def test_memory_log(caplog: pytest.LogCaptureFixture) -> None:
    logged = loader(num_workers=2)
    with caplog.at_level(logging.DEBUG), logged.enable_memory_log():
        assert logged.worker_type == "thread"
        list(logged)
    assert any("2 loader threads @ PID" in record.getMessage() for record in caplog.records)
