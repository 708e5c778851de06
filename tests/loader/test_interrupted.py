"""An exception that comes from outside, at any place of ``next()``: the pass goes on exactly.

It is raised where a line of the loader begins, one line after the other, as Ctrl-C or a signal's
handler would; and by the handler of a real timer.
"""

from __future__ import annotations

import contextlib
import inspect
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch_geometric.data import Data

import pyg_scale.loader
from pyg_scale.loader import NeighborLoader, ZipLoader
from pyg_scale.loader.batch.source import filled
from pyg_scale.loader.iterator import EpochIterator
from pyg_scale.loader.workers.pace import Course, Pace
from pyg_scale.store import Cached, MemoryFeatureStore
from pyg_scale.testing import graphs
from tests.loader.batches import assert_same

DATA = graphs.hostile()
HERE = str(Path(pyg_scale.loader.__file__).parent)


class Stop(BaseException):
    """Such as ``KeyboardInterrupt``."""


class Alarm(Exception):
    """Such as a handler of ``SIGALRM`` raises."""


class Interrupts:
    """Raises where a line of the loader begins, in this thread, once at each.

    Args:
        every: At each so many-th line only.
        folders: Of the modules whose lines count.
    """

    def __init__(self, every: int, folders: tuple[str, ...] = (HERE,)) -> None:
        self.every, self.came, self.folders = every, 0, folders
        self._seen: set[Any] = set()
        self._calm, self._raised = True, False

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Within it one call is interrupted, if it comes by a line where none was.

        Calls after one that was interrupted, which begin again, have lines of their own.
        """
        again, self._raised = self._raised, False
        if again and self._calm:  # lets a call pass now and then
            self._calm = False
            yield
            return
        self._calm, self._again = True, again
        before = sys.gettrace()
        sys.settrace(self._called)
        try:
            yield
        finally:
            sys.settrace(before)

    def _called(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        # CPython 3.11 loses references where a trace function raises in a generator.
        ours = (
            code.co_filename.startswith(self.folders) and not code.co_flags & inspect.CO_GENERATOR
        )
        return self._line if ours and not _in_finalizer(frame) else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        where = self._again, frame.f_code, frame.f_lineno
        if event == "line" and not self._raised and where not in self._seen:
            self._seen.add(where)
            if len(self._seen) % self.every == 0:
                self.came += 1
                self._raised = True
                raise (Stop if self.came % 2 else Alarm)
        return self._line


def _in_finalizer(frame: FrameType | None) -> bool:
    """An exception that leaves a finalizer is lost, and with it what was left to do."""
    while frame is not None:
        if frame.f_code is weakref.finalize.__call__.__code__:
            return True
        frame = frame.f_back
    return False


def add_noise(batch: Data) -> Data:
    batch.noise = torch.rand(3)
    return batch


def plain(**kwargs: Any) -> NeighborLoader:
    kwargs = {"num_neighbors": [3, 2], "batch_size": 1, "seed": 5, "shuffle": True} | kwargs
    return NeighborLoader(DATA, transform=add_noise, **kwargs)


def small() -> NeighborLoader:
    """A loader that changes often who makes its batches."""
    loader = plain(num_workers=2)
    loader._pace = Changing()
    return loader


class Changing(Pace):
    def course(self, ahead: int) -> Course:
        step = 0
        while True:
            yield step % 5 in (1, 2)
            step += 1


def cached(**kwargs: Any) -> NeighborLoader:
    store = Cached(filled(MemoryFeatureStore(), DATA), 400, "belady")
    return plain(feature_store=store, **kwargs)


def zipped(**kwargs: Any) -> ZipLoader:
    return ZipLoader([plain(), plain(seed=6)], batch_size=1, seed=7, shuffle=True, **kwargs)


KINDS: dict[str, Callable[[], Any]] = {
    "inline": plain,
    "threads": lambda: plain(num_workers=2),
    "small": lambda: small(),
    "persistent": lambda: plain(num_workers=2, persistent_workers=True),
    "look ahead": cached,
    "look ahead, threads": lambda: cached(num_workers=2),
    "on device": lambda: plain(num_workers=2, device="cpu"),
    "zip": lambda: zipped(num_workers=1),
}
PROCESSES: dict[str, Callable[[], Any]] = {
    "process": lambda: plain(num_workers=1, worker_type="process"),
    "persistent process": lambda: plain(
        num_workers=1, worker_type="process", persistent_workers=True
    ),
    "ring": lambda: plain(num_workers=1, worker_type="ring"),
}


def equal(found: Any, wanted: Any) -> None:
    if isinstance(wanted, tuple):
        for each, other in zip(found, wanted, strict=True):
            assert_same(each, other)
    else:
        assert_same(found, wanted)


def go_on(loader: Any, wanted: list[Any], interrupts: Interrupts) -> None:
    """A pass whose calls are interrupted, compared with a pass that was not."""
    iterator, number = iter(loader), 0
    while True:
        try:
            with interrupts.call():
                batch = next(iterator)
        except (Stop, Alarm):
            state = loader.state_dict()
            assert state["delivered"] == number if state["running"] else number == len(wanted)
            continue
        except StopIteration:
            break
        equal(batch, wanted[number])
        number += 1
        assert loader.state_dict()["delivered"] == number
    assert number == len(wanted)
    assert loader.stats()["epoch"]["batches"] == number
    assert not loader.state_dict()["running"]
    assert next(iterator, None) is None


@pytest.mark.parametrize("every", [19, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_at_every_line(kind: str, every: int) -> None:
    run(KINDS[kind], every)


@pytest.mark.parametrize("every", [31, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", PROCESSES)
def test_processes(kind: str, every: int) -> None:
    run(PROCESSES[kind], every)


def run(make: Callable[[], Any], every: int) -> None:
    loader, wanted = make(), list(make())
    interrupts, before = Interrupts(every), -1
    while interrupts.came > before:
        before = interrupts.came
        loader.set_epoch(0)
        go_on(loader, wanted, interrupts)
    assert interrupts.came > 60 / every
    loader.set_epoch(0)
    for batch, other in zip(loader, wanted, strict=True):
        equal(batch, other)
    if loader._threads is not None:  # a frame that CPython lost may keep the loader
        loader._threads.stop()


@pytest.mark.parametrize("kind", ["inline", "threads", "look ahead", "ring"])
def test_by_the_handler_of_a_timer(kind: str) -> None:
    make = (KINDS | PROCESSES)[kind]
    loader, wanted, came = make(), list(make()), 0

    def handler(signum: int, frame: FrameType | None) -> None:
        nonlocal came
        while frame is not None and frame.f_code is not EpochIterator.__next__.__code__:
            frame = frame.f_back
        if frame is not None:  # it is within next()
            came += 1
            raise Alarm

    before = signal.signal(signal.SIGALRM, handler)
    try:
        iterator = iter(loader)
        for number in range(len(wanted)):
            if kind != "ring" or number % 10 == 0:  # which begins new processes
                signal.setitimer(signal.ITIMER_REAL, 1e-5 * (1 + number))
            with contextlib.suppress(Alarm):
                equal(next(iterator), wanted[number])
                continue
            equal(next(iterator), wanted[number])
        signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert next(iterator, None) is None
    assert came > 1


def test_a_loop_goes_on_where_it_was_left() -> None:
    wanted, loader, found = list(plain()), plain(num_workers=2), []
    iterator = iter(loader)
    for at in range(1, 200, 7):
        with contextlib.suppress(Stop), _one_at(at):
            for batch in iterator:
                found.append(batch)
                if len(found) % 3 == 0:
                    break
    found.extend(iterator)
    for batch, other in zip(found, wanted, strict=True):
        equal(batch, other)


def test_an_error_of_a_batch_is_raised_once_and_that_of_a_handler_is_none() -> None:
    """Both may be a ``TimeoutError``: the handler's has nothing to do with the batch."""
    wanted = list(plain())
    left = ["batch", "handler"]

    def transform(batch: Data) -> Data:
        batch = add_noise(batch)
        if int(batch.input_id) == int(wanted[3].input_id) and left:
            if left.pop() == "batch":
                raise TimeoutError
            signal.raise_signal(signal.SIGALRM)
        return batch

    def handler(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, handler)
    try:
        loader = plain()
        loader.transform = transform
        iterator = iter(loader)
        for number in range(3):
            equal(next(iterator), wanted[number])
        for _ in range(2):  # the handler's, and when batch 3 is made again, its own
            with pytest.raises(TimeoutError):
                next(iterator)
        for batch, other in zip(iterator, wanted[4:], strict=True):
            equal(batch, other)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_stop_iteration_of_a_transform_is_not_the_end() -> None:
    def transform(batch: Data) -> Data:
        return next(iter([]))

    with pytest.raises(RuntimeError, match="raised StopIteration"):
        list(NeighborLoader(DATA, [2], transform=transform, batch_size=20))


class Order:
    """An own sampler whose order nobody else knows."""

    def __iter__(self) -> Iterator[int]:
        for seed in range(0, 60, 2):
            if seed == 20 and self.left:
                self.left -= 1
                raise Stop
            yield seed

    def __len__(self) -> int:
        return 30

    left = 1


def test_an_own_sampler_goes_on_unless_it_was_interrupted_itself() -> None:
    def make() -> NeighborLoader:
        return plain(shuffle=False, sampler=Order(), num_workers=2)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Order, "left", 0)
        wanted = list(make())
        loader, found = make(), []
        iterator = iter(loader)
        for at in range(1, 300, 11):
            with contextlib.suppress(Stop), _one_at(at, "iterator.py"):
                found.append(next(iterator))
        found.extend(iterator)
        for batch, other in zip(found, wanted, strict=True):
            equal(batch, other)
    iterator, found = iter(make()), []

    def go_on() -> None:
        while True:
            with contextlib.suppress(Stop):
                found.append(next(iterator))

    with pytest.raises(RuntimeError, match=r"left the sampler=.*iter\(loader\) begins anew"):
        go_on()
    assert len(found) == 10  # those that were drawn before
    for batch, other in zip(found, wanted, strict=False):
        equal(batch, other)
    for _ in range(3):
        with pytest.raises(RuntimeError, match=r"iter\(loader\) begins anew"):
            next(iterator)


@contextlib.contextmanager
def _one_at(at: int, file: str = "") -> Iterator[None]:
    """Raises at the ``at``-th line of the loader that begins within it."""
    left = at

    def line(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal left
        left -= event == "line"
        if event == "line" and left == 0:
            raise Stop
        return line

    def called(frame: FrameType, event: str, arg: Any) -> Any:
        name = frame.f_code.co_filename
        return line if name.startswith(HERE) and name.endswith(file) else None

    before = sys.gettrace()
    sys.settrace(called)
    try:
        yield
    finally:
        sys.settrace(before)


# Several threads ###############################################################################


def test_an_iterator_is_for_one_thread_at_a_time() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def transform(batch: Data) -> Data:
        begun.set()
        assert go_on.wait(20)
        return batch

    wanted = list(NeighborLoader(DATA, [2], seed=1, batch_size=10))
    loader = NeighborLoader(DATA, [2], seed=1, batch_size=10, transform=transform, num_workers=2)
    iterator, found = iter(loader), []
    other = threading.Thread(target=lambda: found.extend(iterator))
    other.start()
    assert begun.wait(20)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="one thread at a time"):
            next(iterator)
    go_on.set()
    other.join(20)
    for batch, same in zip(found, wanted, strict=True):  # who was first lost nothing
        equal(batch, same)


def test_threads_that_race_get_each_batch_once_or_are_refused() -> None:
    loader, found, errors = plain(num_workers=2), [], []
    iterator = iter(loader)

    def take() -> None:
        while True:
            try:
                found.append(next(iterator))
            except StopIteration:
                return
            except RuntimeError as error:
                errors.append(str(error))
                time.sleep(1e-4)  # else those who are refused take all of the processor

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all("one thread at a time" in error for error in errors)
    assert sorted(int(b.input_id) for b in found) == list(range(len(loader)))


def test_interrupted_in_one_thread_it_can_be_asked_by_another() -> None:
    wanted, iterator, found = list(plain()), iter(plain(num_workers=2)), []
    for at in (1, 3, 5, 8, 20, 60):
        with contextlib.suppress(Stop), _one_at(at):
            found.append(next(iterator))
        other = threading.Thread(target=lambda: found.append(next(iterator)))
        other.start()
        other.join(20)
    found.extend(iterator)
    for batch, same in zip(found, wanted, strict=True):
        equal(batch, same)


def test_closing_ends_a_call_of_another_thread() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def stuck(*args: Any) -> Any:
        begun.set()
        go_on.wait(20)
        return NeighborLoader._sample(*args)

    loader = NeighborLoader(DATA, [2], seed=1, batch_size=10, num_workers=1)
    loader._sample = stuck.__get__(loader)  # type: ignore[method-assign]
    iterator, found = iter(loader), []
    other = threading.Thread(target=lambda: found.extend(iterator))
    other.start()
    assert begun.wait(20)
    threading.Timer(0.1, go_on.set).start()
    iterator.close()
    other.join(20)
    assert not other.is_alive()
    assert next(iterator, None) is None
