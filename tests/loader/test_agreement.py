"""What ranks tell each other about a loader, where the process with the store is stopped."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection

import pytest
import torch
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from pyg_scale.comm import Group
from pyg_scale.errors import CommError, CommTimeoutError
from pyg_scale.loader.seeds.agreement import Agreement
from pyg_scale.loader.seeds.duplicates import DuplicateSeedCheck

LIMIT = timedelta(seconds=30)


def hold(port: Connection) -> None:
    store = TCPStore("127.0.0.1", 0, None, True, LIMIT, wait_for_workers=False)
    port.send(store.port)
    time.sleep(120)


@pytest.fixture
def held() -> Iterator[tuple[TCPStore, int]]:
    """A store, and the process that it is in."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=hold, args=(there,), daemon=True)
    process.start()
    assert process.pid is not None and here.poll(60)
    yield TCPStore("127.0.0.1", here.recv(), None, False, LIMIT), process.pid
    process.kill()
    process.join()


@pytest.mark.slow
def test_a_store_that_does_not_answer_is_an_error_in_time(held: tuple[TCPStore, int]) -> None:
    store, process = held
    agreement = Agreement(Group(store, 1, 2, 2.0), "NeighborLoader", "")
    agreement.publish("made", {})
    errors: list[BaseException] = []

    def work() -> None:
        try:
            agreement.collect("made", "make")
        except BaseException as error:
            errors.append(error)

    os.kill(process, signal.SIGSTOP)
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(15)
    assert not thread.is_alive()
    with pytest.raises(CommTimeoutError, match=r"rank 0\) did not answer rank 1 within 2 seconds"):
        raise errors[0]


def test_a_rank_that_fails_says_so_and_nobody_waits_for_it() -> None:
    store = HashStore()
    first, other = (Agreement(Group(store, rank, 2, 60.0), "inference", "") for rank in (0, 1))
    first.publish("step", {})
    other.leave_word(OSError("no space left on device"))
    other.leave_word(CommError("a later one"))
    expected = "rank 1 failed in this inference: OSError: no space left on device .*by rank 0"
    with pytest.raises(CommError, match=expected):
        first.collect("step", "come to", patient=True)


def test_nobody_waits_for_a_warning(
    held: tuple[TCPStore, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyg_scale.loader.seeds.duplicates._SECONDS", 1.0, raising=False)
    store, process = held
    unsplit = DuplicateSeedCheck("NeighborLoader", Group(store, 1, 2, 2.0), [torch.arange(3)])
    os.kill(process, signal.SIGSTOP)
    thread = threading.Thread(target=unsplit.look, daemon=True)
    thread.start()
    thread.join(15)
    assert not thread.is_alive()
