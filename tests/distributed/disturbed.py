"""Epochs that are disturbed: what was delivered of them, and going on after an error."""

from __future__ import annotations

import gc
import hashlib
import math
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import pyg_scale
from pyg_scale.comm import Fault, Faulty, Group
from pyg_scale.comm.gloo import Gloo
from pyg_scale.distributed.failover import Health
from pyg_scale.errors import CommError
from pyg_scale.loader import NeighborLoader
from pyg_scale.testing.ranks import run_ranks
from tests.loader.batches import assert_same

SEEDS = torch.arange(96)
PATIENCE = 0.6
"""Seconds after which a rank that does not answer is an error."""
LIMIT = 60.0
"""Seconds that one round may take: a hang is an error that says who hangs."""


def make_loader(data: Any, **options: Any) -> NeighborLoader:
    """Twelve batches, the same wherever they are made."""
    plain = {"num_neighbors": [4, 3], "batch_size": 8, "shuffle": True, "seed": 4}
    return NeighborLoader(data, input_nodes=SEEDS, **plain | options)


def digest(batch: Any) -> str:
    """A few letters that are the same for the same batch."""
    found = hashlib.blake2b(digest_size=12)
    for name, value in sorted(batch.to_dict().items()):
        found.update(name.encode())
        if isinstance(value, torch.Tensor):
            found.update(f"{value.dtype} {list(value.shape)}".encode())
            found.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


@dataclass
class Outcome:
    """What an attempt to iterate came to on one rank.

    Attributes:
        taken: The batches, each with how much of the epoch was delivered after it.
        state: That of the loader.
        error: What ended it.
    """

    taken: list[tuple[int, Any]] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)
    error: Exception | None = None


def iterate(loader: NeighborLoader, during: Callable[[int], None] = lambda step: None) -> Outcome:
    """Iterate until the end or an error.

    Args:
        loader: The loader.
        during: Called with the number of each batch, before it is asked for.
    """
    out, step = Outcome(), 0
    try:
        iterator = iter(loader)
        while True:
            during(step)
            batch = next(iterator, None)
            if batch is None:
                break
            out.taken.append((loader.state_dict()["delivered"], batch))
            step += 1
    except RuntimeError as error:
        out.error = bare(error)
    out.state = loader.state_dict()
    return out


def bare(error: BaseException) -> Any:
    """An error without the frames that it came through, which hold loaders and graphs."""
    for other in (error.__cause__, error.__context__):
        if other is not None:
            bare(other)
    return error.with_traceback(None)


def bounded(function: Callable[[], Any]) -> Any:
    """What a function returns, within the limit."""
    return run_ranks(1, lambda _: function(), limit=LIMIT)[0]


class Epoch:
    """What was delivered of an epoch that is taken up again after every error.

    Args:
        expected: The batches of the epoch when nothing disturbs it.
        state: That of a loader that has not begun.
    """

    def __init__(self, expected: Sequence[Any], state: dict[str, Any]) -> None:
        self._expected = {tuple(batch.input_id.tolist()): batch for batch in expected}
        assert len(self._expected) == len(expected), "batches have seeds of their own"
        self._counts: Counter[tuple[int, ...]] = Counter()
        self.state, self.finished = state, False
        self.errors: list[Exception] = []

    def take(self, outcomes: Sequence[Outcome]) -> None:
        """Add what the ranks have made; every batch is compared.

        Ranks that came further than others make these batches once more: the state that made least
        progress is everyone's.
        """
        failed = [each for each in outcomes if each.error is not None]
        self.errors += [each.error for each in failed if each.error is not None]
        until = math.inf
        if failed:
            begun = [each.state for each in outcomes if each.state["running"]]
            if all(each.state["running"] for each in failed):
                self.state = min(begun, key=lambda state: state["delivered"])
            until = self.state["delivered"]
        for outcome in outcomes:
            for delivered, batch in outcome.taken:
                seeds = tuple(batch.input_id.tolist())
                assert_same(batch, self._expected[seeds])
                if delivered <= until:
                    self._counts[seeds] += 1
        self.finished = not failed

    def check(self) -> None:
        """Every seed came once."""
        lost = self._expected.keys() - self._counts.keys()
        doubled = [seeds for seeds, count in self._counts.items() if count > 1]
        assert not lost and not doubled, f"lost: {lost}, doubled: {doubled}"


class Ranks:
    """Ranks that iterate together, and go on after errors in the same session.

    Args:
        paths: The directory of each.
        epoch: What they are at.
        faults: What happens, by rank.
        loader: Options of the loader.
        opened: Options of ``pyg_scale.open``.
        closes: Whether one of them ends, so that the session cannot go on.
        patience: Seconds after which a rank that does not answer is an error.
        pause: Seconds that a rank which failed is left alone, if others have its parts.
        timeout: Seconds to meet.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        epoch: Epoch,
        faults: Sequence[Sequence[Fault]],
        *,
        loader: dict[str, Any] | None = None,
        opened: dict[str, Any] | None = None,
        closes: bool = False,
        patience: float = PATIENCE,
        pause: float = 0.0,
        timeout: float = 30.0,
    ) -> None:
        self._paths, self._epoch, self._faults = paths, epoch, faults
        self._loader, self._closes, self._timeout = loader or {}, closes, timeout
        self._opened = opened or {}
        self._patience, self._pause = patience, pause
        self._outcomes = [Outcome() for _ in paths]
        self._together = threading.Barrier(len(paths))
        self._most = 3 + sum(len(each) for each in faults)
        self.happened = 0

    def run(self) -> list[Outcome]:
        """Iterate until the epoch is finished, or the session cannot go on."""
        run_ranks(len(self._paths), self._work, timeout=self._timeout, limit=LIMIT)
        return self._outcomes

    def _work(self, group: Group) -> None:
        rank, faults = group.rank, self._faults[group.rank]
        with Faulty(Gloo.join(group), faults) as comm:
            try:
                threads = 2 + len(faults)  # an answer that is dropped keeps one
                path, options = self._paths[rank], self._opened
                data = pyg_scale.open(path, comm=comm, num_threads=threads, **options)
                try:
                    data.ranks.health = Health(self._pause)
                    data.ranks.timeout = data.ranks.service.timeout = self._patience
                    self._iterate(rank, make_loader(data, **self._loader))
                finally:
                    data.close(0.0)
            finally:
                self.happened += len(comm.happened)

    def _iterate(self, rank: int, loader: NeighborLoader) -> None:
        for _ in range(self._most):
            loader.load_state_dict(self._epoch.state)
            outcome = self._outcomes[rank] = iterate(loader)
            if outcome.error is not None:
                _check_error(outcome.error)
            if self._together.wait(LIMIT) == 0:
                self._epoch.take(self._outcomes)
            self._together.wait(LIMIT)
            if self._epoch.finished or self._closes:
                return
        raise AssertionError(f"not finished after {self._most} attempts: {self._epoch.errors}")


def _check_error(error: Exception) -> None:
    assert isinstance(error, CommError), f"{type(error).__name__}: {error}"
    assert re.search(r"rank \d|was closed", str(error)), f"it names nobody: {error}"


# What is left ##################################################################################


class Left:
    """Sockets and shared memory of this process that were not there before."""

    def __init__(self) -> None:
        self._before = _open_now()

    def check(self, seconds: float = 10.0) -> None:
        """Wait until nothing is left; fail if something stays."""
        deadline = time.monotonic() + seconds
        while left := _open_now() - self._before:
            gc.collect()
            assert time.monotonic() < deadline, f"left open: {sorted(left)}"
            time.sleep(0.02)


def _open_now() -> set[str]:
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            link = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if link.startswith(("socket:", "/memfd:pyg_scale", "/dev/shm")):
            found.add(link)
    return found | {n for n in os.listdir("/dev/shm") if f"_{os.getpid()}_" in n}
