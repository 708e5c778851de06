"""CPU cores, threads and memory of workers: PyG's context managers, with a meaning for threads."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any

from torch_geometric.loader.mixin import (
    AffinityMixin,
    LogMemoryMixin,
    MultithreadingMixin,
    get_numa_nodes_cores,
    psutil,
)


class WorkerControls:
    """``enable_cpu_affinity``, ``enable_multithreading`` and ``enable_memory_log`` of loaders.

    With worker processes they are PyG's. With worker threads they never touch the process, which
    is the trainer's.
    """

    num_workers: int
    worker_type: str
    _cores: list[list[int]] | None
    _log_memory: bool
    _threads: Any

    @contextlib.contextmanager
    def enable_cpu_affinity(
        self, loader_cores: Sequence[Sequence[int]] | Sequence[int] | None = None
    ) -> Iterator[None]:
        """Within it, workers run on given CPU cores.

        Args:
            loader_cores: One core, or a list of cores, for each worker. By default one core per
                worker of the first NUMA node, out of those that this process may use.

        Raises:
            ValueError: If there are no workers, or not as many entries as workers.
            OSError: When iteration starts, if there is no such core.
            NotImplementedError: With threads where the system cannot pin one; with
                ``worker_type="ring"``.
        """
        self._refuse_ring("enable_cpu_affinity")
        if self.num_workers == 0 or self.worker_type == "process":
            with AffinityMixin.enable_cpu_affinity(self, loader_cores):
                yield
            return
        if not hasattr(os, "sched_setaffinity"):
            raise NotImplementedError(
                "this system cannot pin threads to cores: leave out enable_cpu_affinity, or pass "
                "worker_type='process'"
            )
        before, self._cores = self._cores, self._cores_of(loader_cores)
        try:
            if self._threads is not None:
                self._threads.set_cores(self._cores)
            yield
        finally:
            self._cores = before
            if self._threads is not None:
                self._threads.set_cores(before)

    def _refuse_ring(self, name: str) -> None:
        if self.num_workers > 0 and self.worker_type == "ring":
            raise NotImplementedError(
                f"{name} is not for sampler processes with a ring: pass worker_type='process'"
            )

    def _cores_of(self, cores: Sequence[Any] | None) -> list[list[int]]:
        if not cores:
            allowed = os.sched_getaffinity(0)
            first_node = get_numa_nodes_cores().get(0, [])
            one_per_core = [min(threads) for _, threads in first_node]
            cores = sorted(allowed.intersection(one_per_core))
            if len(cores) < self.num_workers:
                cores = sorted(allowed)
            if len(cores) < self.num_workers:
                raise ValueError(
                    f"num_workers={self.num_workers} is more than the {len(cores)} cores that this "
                    f"process may use: pass loader_cores"
                )
            cores = cores[: self.num_workers]
        if len(cores) != self.num_workers:
            raise ValueError(
                f"loader_cores must have one entry per worker (got {len(cores)} for "
                f"num_workers={self.num_workers})"
            )
        return [[c] if isinstance(c, int) else list(c) for c in cores]

    @contextlib.contextmanager
    def enable_multithreading(self, worker_threads: int | None = None) -> Iterator[None]:
        """Within it, each worker process uses several threads; as in PyG, for ``spawn`` only.

        Raises:
            NotImplementedError: With worker threads. Each of them works on a batch of its own;
                ``num_workers=0`` uses all of torch's threads on one batch.
            ValueError: As in PyG.
        """
        self._refuse_ring("enable_multithreading")
        if self.num_workers > 0 and self.worker_type == "thread":
            raise NotImplementedError(
                "enable_multithreading is for worker processes: worker threads are several threads "
                "already. Raise num_workers, or use num_workers=0, which works on one batch with "
                "all of torch's threads"
            )
        with MultithreadingMixin.enable_multithreading(self, worker_threads):
            yield

    @contextlib.contextmanager
    def enable_memory_log(self) -> Iterator[None]:
        """Within it, the memory of workers is logged (level DEBUG) when iteration starts.

        Threads share this process's memory, so that is one line for all of them.
        """
        if self.num_workers > 0 and self.worker_type == "process":
            with LogMemoryMixin.enable_memory_log(self):
                yield
            return
        before, self._log_memory = self._log_memory, True
        try:
            yield
        finally:
            self._log_memory = before


def log_memory(num_workers: int) -> None:
    """Log the resident memory of this process, as PyG logs that of a worker process."""
    process = psutil.Process()
    resident = process.memory_info().rss / (1024 * 1024)
    logging.getLogger(__name__).debug(
        "%d loader threads @ PID %d: %.2f MB", num_workers, process.pid, resident
    )
