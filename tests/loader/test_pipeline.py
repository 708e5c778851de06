"""Threads that work ahead: in order, bounded, and gone when nobody needs them."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from pyg_scale.loader.iterator import Failed, Inline
from pyg_scale.loader.stats import Stats
from pyg_scale.loader.workers.threads import Pipeline, WorkerThreads
from pyg_scale.ops.library import num_threads
from tests import preloaded

NAME = "pyg_scale-loader"


def threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith(NAME)]


def wait_until(true: Callable[[], bool], seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.005)
    return true()


def pipeline(work: Any, items: Any = range(20), num_workers: int = 3, **kwargs: Any) -> Pipeline:
    kwargs = {"owned": True, "limit": 2 * num_workers} | kwargs
    return Pipeline(iter(items), work, WorkerThreads(num_workers), **kwargs)


def value(source: Any) -> Any:
    """The next result, or its error, raised."""
    made = next(source)[1]
    if isinstance(made, Failed):
        raise made.error
    return made


def values(source: Any) -> Iterator[Any]:
    while True:
        try:
            yield value(source)
        except StopIteration:
            return


def double(item: int, stats: Stats) -> int:
    return 2 * item


def slow_at_first(item: int, stats: Stats) -> int:
    time.sleep(0.05 if item % 3 == 0 else 0)
    return 2 * item


def test_results_come_in_order_of_items() -> None:
    assert list(values(pipeline(slow_at_first))) == [2 * i for i in range(20)]


def test_the_same_without_threads() -> None:
    assert list(values(Inline(iter(range(20)), double))) == [2 * i for i in range(20)]


def test_out_of_order_gives_everything_and_first_what_is_finished_first() -> None:
    release = threading.Event()

    def work(item: int, stats: Stats) -> int:
        if item == 0:
            release.wait(10)
        return item

    source = pipeline(work, in_order=False)
    first = value(source)
    release.set()
    assert first != 0
    assert sorted([first, *values(source)]) == list(range(20))


def test_no_more_than_limit_items_are_taken_ahead() -> None:
    taken = []

    def items() -> Iterator[int]:
        for i in range(100):
            taken.append(i)
            yield i

    source = pipeline(double, items(), num_workers=2, limit=3)
    assert taken == [0, 1, 2]
    for count in range(1, 10):
        next(source)
        assert len(taken) == 3 + count


def test_items_are_taken_on_the_consumers_thread_and_work_is_not() -> None:
    seen = set()

    def items() -> Iterator[int]:
        for i in range(8):
            seen.add(threading.current_thread())
            yield i

    def work(item: int, stats: Stats) -> threading.Thread:
        return threading.current_thread()

    workers = set(values(pipeline(work, items())))
    assert seen == {threading.current_thread()}
    assert threading.current_thread() not in workers


def test_ops_in_a_worker_use_one_thread() -> None:
    assert set(values(pipeline(lambda item, stats: num_threads()))) == {1}


def test_work_is_done_by_several_threads_at_once() -> None:
    barrier = threading.Barrier(3, timeout=10)
    assert len(list(values(pipeline(lambda i, s: barrier.wait(), range(3))))) == 3


def test_an_error_is_raised_in_its_place_as_it_was_with_the_workers_traceback() -> None:
    def work(item: int, stats: Stats) -> int:
        if item == 3:
            raise LookupError("broken on purpose")
        return item

    source = pipeline(work)
    assert [value(source) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(LookupError, match="broken on purpose") as info:
        value(source)
    frames = [frame.name for frame in traceback.extract_tb(info.value.__traceback__)]
    assert frames[-1] == "work"
    assert NAME in info.value.__notes__[0]


def test_after_an_error_the_next_call_goes_on() -> None:
    def work(item: int, stats: Stats) -> int:
        if item == 3:
            raise LookupError("broken on purpose")
        return item

    source = pipeline(work)
    got = [value(source) for _ in range(3)]
    with pytest.raises(LookupError):
        value(source)
    source.pause()
    assert wait_until(lambda: not threads())  # though source and traceback are alive
    assert got + list(values(source)) == [0, 1, 2, *range(4, 20)]


def test_after_an_error_what_was_not_begun_is_not_done() -> None:
    begun = []

    def work(item: int, stats: Stats) -> int:
        begun.append(item)
        if item == 0:
            raise LookupError("broken on purpose")
        time.sleep(0.05)
        return item

    source = pipeline(work, range(1000), num_workers=2, limit=1000)
    with pytest.raises(LookupError):
        value(source)
    source.pause()
    assert wait_until(lambda: not threads())
    assert len(begun) < 20


def test_an_error_of_the_items_is_raised_after_what_was_taken_before() -> None:
    def items() -> Iterator[int]:
        yield 0
        yield 1
        raise LookupError("no more items")

    source = pipeline(double, items())
    assert [value(source), value(source)] == [0, 2]
    with pytest.raises(LookupError, match="no more items"):
        value(source)
    with pytest.raises(StopIteration):
        value(source)


def test_system_exit_in_a_worker_reaches_the_consumer() -> None:
    def work(item: int, stats: Stats) -> int:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        value(pipeline(work))


def test_a_timeout_names_what_was_waited_for() -> None:
    began, release = threading.Event(), threading.Event()
    of_first: list[str] = []

    def work(item: int, stats: Stats) -> int:
        with stats.stage("fetch"):
            if item == 0:
                of_first.append(threading.current_thread().name)
                began.set()
            release.wait(10)
        return item

    source = pipeline(work, timeout=0.5)
    assert began.wait(10)
    message = rf"0 was not ready after timeout=0\.5 .*in thread {of_first[0]}, stage 'fetch'"
    with pytest.raises(RuntimeError, match=message):
        next(source)
    release.set()
    assert list(values(source)) == list(range(20))


@pytest.mark.parametrize("how", ["exhausted", "closed", "dropped", "dropped_early"])
def test_no_thread_is_left(how: str) -> None:
    source = pipeline(double)
    assert len(threads()) == 3
    if how == "exhausted":
        list(values(source))
    elif how == "closed":
        next(source)
        source.close()
    else:
        if how == "dropped":
            next(source)
        del source
    assert not threads()


def test_dropping_does_not_wait_for_what_was_not_begun() -> None:
    done = []

    def work(item: int, stats: Stats) -> None:
        done.append(item)
        time.sleep(0.05)

    source = pipeline(work, range(1000), num_workers=2, limit=1000)
    del source
    assert not threads()
    assert len(done) <= 4


def test_a_delivered_result_is_kept_by_nobody() -> None:
    class Result:
        pass

    source = pipeline(lambda item, stats: Result())
    results: list[weakref.ref[Result]] = []
    for _ in range(10):
        results.append(weakref.ref(value(source)))
        assert wait_until(lambda: results[-1]() is None), gc.get_referrers(results[-1]())


def test_threads_that_are_stuck_do_not_hang_the_consumer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyg_scale.loader.workers.threads.JOIN_SECONDS", 0.05)
    release = threading.Event()
    source = pipeline(lambda item, stats: release.wait(10), num_workers=1)
    assert wait_until(lambda: bool(source._pending[0].worker))
    with pytest.warns(RuntimeWarning, match=f"{NAME}-0 are still busy"):
        source.close()
    release.set()
    assert wait_until(lambda: not threads())


def shared(crew: WorkerThreads) -> Pipeline:
    return Pipeline(iter(range(20)), slow_at_first, crew, owned=False, limit=4)


def test_shared_threads_serve_two_iterators_and_outlive_them() -> None:
    crew = WorkerThreads(2)
    start = partial(shared, crew)
    left, right = start(), start()
    both = list(zip(values(left), values(right)))
    assert both == [(2 * i, 2 * i) for i in range(20)]
    assert len(threads()) == 2
    abandoned = start()
    next(abandoned)
    del abandoned
    assert list(values(start())) == [2 * i for i in range(20)]
    ids = crew.native_ids
    assert list(values(start())) == [2 * i for i in range(20)]
    assert crew.native_ids == ids
    del left, right, crew, start
    assert wait_until(lambda: not threads())


def test_results_of_an_abandoned_iterator_are_kept_by_no_thread() -> None:
    class Result:
        pass

    results: list[weakref.ref[Result]] = []

    def work(item: int, stats: Stats) -> Result:
        result = Result()
        results.append(weakref.ref(result))
        return result

    crew = WorkerThreads(1)
    sources = [Pipeline(iter(range(4)), work, crew, owned=False, limit=4)]
    assert wait_until(lambda: len(results) == 4 and sources[0]._pending[-1].done)
    sources.clear()
    assert wait_until(lambda: not any(result() for result in results))
    assert len(crew.native_ids) == 1


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_finalizer_that_runs_in_a_worker_does_not_wait_for_that_worker() -> None:
    holder: dict[str, Any] = {}

    def work(item: int, stats: Stats) -> int:
        if item == 5:
            holder.clear()  # the last reference to the iterator whose worker this is
        return item

    gate = threading.Event()
    holder["source"] = pipeline(lambda i, s: (gate.wait(10), work(i, s)), num_workers=1, limit=6)
    gate.set()
    assert wait_until(lambda: not holder)
    assert wait_until(lambda: not threads())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_in_a_forked_child_the_iterator_says_so_and_threads_start_anew() -> None:
    crew = WorkerThreads(2)
    source = Pipeline(iter(range(20)), double, crew, owned=False, limit=4)
    next(source)
    pid = os.fork()
    if pid == 0:
        status = 1
        signal.alarm(20)  # a hang must not outlive the test
        try:
            try:
                next(source)
            except RuntimeError as error:
                fresh = Pipeline(iter(range(5)), double, crew, owned=False, limit=4)
                if "forked" in str(error) and list(values(fresh)) == [0, 2, 4, 6, 8]:
                    status = 0
                del fresh, source
                crew.stop()
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert len(list(values(source))) == 19


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_in_forked_children_threads_that_start_together_may_use_torch_at_once() -> None:
    """Torch makes its pool of threads anew there in the first call that uses it, without a lock."""
    program = (
        "import os, threading, torch\n"
        "from pyg_scale.loader.workers.threads import Pipeline, WorkerThreads\n"
        "torch.set_num_threads(2)\n"
        "for _ in range(12):\n"
        "    if (pid := os.fork()) == 0:\n"
        "        together = threading.Barrier(8)\n"
        "        def work(item, stats):\n"
        "            together.wait(20)\n"
        "            return float(torch.ones(70_000).sum())\n"
        "        crew = WorkerThreads(8)\n"
        "        source = Pipeline(iter(range(8)), work, crew, owned=True, limit=8)\n"
        "        found = [next(source)[1] for _ in range(8)]\n"
        "        os._exit(found != [70_000.0] * 8)\n"
        "    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0\n"
    )
    done = subprocess.run([sys.executable, "-c", program], timeout=120, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


SCRIPT = """
import signal, sys, threading, time
from pyg_scale.loader.workers.threads import Pipeline, WorkerThreads
def work(item, stats):
    time.sleep(0.02)
    return item
def start(n):
    return Pipeline(iter(range(n)), work, WorkerThreads(2), owned=True, limit=4)
"""


def run(python: str, script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, "-c", SCRIPT + script], capture_output=True, text=True, timeout=60
    )


@pytest.mark.slow
def test_the_interpreter_exits_with_an_iterator_alive() -> None:
    done = run(sys.executable, "source = start(1000); next(source); print('end')")
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


@pytest.mark.slow
def test_a_thread_that_is_busy_at_the_end_does_not_abort_the_process() -> None:
    done = run(
        sys.executable,
        "import torch, pyg_scale.loader.workers.threads as pipeline\n"
        "pipeline.JOIN_SECONDS = 0.05\n"
        "def compute(item, stats, mm=torch.mm, now=time.monotonic):\n"
        "    end, a = now() + 1.0 * bool(item), torch.rand(300, 300)\n"
        "    while now() < end: mm(a, a)\n"
        "source = Pipeline(iter(range(9)), compute, WorkerThreads(1), owned=True, limit=4)\n"
        "next(source)\n"
        "class Late:\n"  # Python takes its time to end: the thread comes back meanwhile
        "    def __del__(self, sleep=time.sleep): sleep(0.5)\n"
        "late = Late()\n"
        "print('end')\n",
    )
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr
    assert "still busy after 0.05 seconds" in done.stderr


def test_ctrl_c_while_waiting_reaches_the_consumer_at_once() -> None:
    done = run(
        preloaded.python(),
        "import os\n"
        # What a shell starts in the background ignores it, and so would all that comes after.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "release = threading.Event()\n"
        "def stuck(item, stats): release.wait(30)\n"
        "source = Pipeline(iter(range(9)), stuck, WorkerThreads(2), owned=True, limit=4)\n"
        "threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "try:\n"
        "    next(source)\n"
        "except KeyboardInterrupt:\n"
        "    source.pause(); release.set(); end = time.time() + 20\n"
        "    while any('pyg' in t.name for t in threading.enumerate()) and time.time() < end:\n"
        "        time.sleep(0.01)\n"
        "    print([t for t in threading.enumerate() if 'pyg' in t.name], len(source._pending))\n",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[] 4\n", "")


def test_threads_run_where_they_are_told() -> None:
    here = os.sched_getaffinity(0)
    core = min(here)
    crew = WorkerThreads(2, [[core], [core]])
    source = Pipeline(iter(range(4)), double, crew, owned=True, limit=4)
    assert [os.sched_getaffinity(thread) for thread in crew.native_ids] == [{core}, {core}]
    crew.set_cores(None)
    assert [os.sched_getaffinity(thread) for thread in crew.native_ids] == [here, here]
    assert os.sched_getaffinity(0) == here
    assert list(values(source)) == [0, 2, 4, 6]


def test_signals_are_left_alone() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGCHLD)
    list(values(pipeline(double)))
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGCHLD)) == before
