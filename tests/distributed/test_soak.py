"""Hundreds of things that go wrong: nothing hangs, is lost, doubled or changed, and all is named.

Which faults there are is a function of the number of the round. The quick form has the same rounds
as the slow one, but fewer of them.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import pyg_scale
from pyg_scale.comm import Fault
from pyg_scale.errors import CommError, CommTimeoutError, RequestError
from pyg_scale.loader.options import SamplingOptions
from pyg_scale.loader.workers.ring_workers import WorkerDiedError
from pyg_scale.testing import graphs
from tests.distributed.across import in_parts, shares, spread
from tests.distributed.disturbed import (
    PATIENCE,
    Epoch,
    Left,
    Ranks,
    bounded,
    digest,
    iterate,
    make_loader,
)
from tests.distributed.processes import end, start
from tests.distributed.served import Served

ANSWERS = ("delay", "drop", "raise", "garble")
REQUESTS = ("delay", "drop", "raise")
CACHES: list[dict[str, Any]] = [
    {},
    {"cache": "2kB"},
    {"cache": "2kB", "cache_policy": "belady"},
    {"cache": "2kB", "cache_policy": "sieve"},
]
LONG_PATIENCE = 6.0
"""Where another rank must answer in what is left of the time, on a busy machine too."""
COPIES = [[0, 1], [1, 2], [2, 0]]
"""Three ranks, each part on two of them."""


class Setting:
    """A graph in parts, and what its batches are.

    Args:
        folder: Where its files are.
    """

    def __init__(self, folder: Path) -> None:
        self.data, self.folder = graphs.hostile(), folder
        self.expected = list(make_loader(self.data))
        self.fresh = make_loader(self.data).state_dict()
        alone = pyg_scale.open(in_parts(self.data, folder, 3))
        self._by_part = make_loader(alone, split_seeds="part")
        self._expected_by_part = list(make_loader(alone, split_seeds="part"))

    def epoch(self, split_seeds: str = "global") -> Epoch:
        """One that has not begun."""
        if split_seeds == "part":
            return Epoch(self._expected_by_part, self._by_part.state_dict())
        return Epoch(self.expected, self.fresh)

    @property
    def whole(self) -> Path:
        """A directory of one part."""
        path = self.folder / "served"
        if not path.exists():
            pyg_scale.save(self.data, path)
        return path

    def paths(self, parts: Sequence[Sequence[int]]) -> list[Path]:
        """A directory for each rank, with its parts."""
        folder = self.folder / str(len(parts)) / str(sum(map(len, parts)))
        folder.mkdir(parents=True, exist_ok=True)
        return spread(in_parts(self.data, folder, 3), parts)


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(tmp_path)


def some_faults(
    choice: random.Random, count: int, *, of: Sequence[str] = ("answer", "request"), calls: int = 12
) -> list[Fault]:
    """Faults of different calls."""
    found = []
    for where, call in choice.sample([(w, c) for w in of for c in range(calls)], count):
        action = choice.choice(ANSWERS if where == "answer" else REQUESTS)
        seconds = choice.choice([0.01, 0.05, 1.5 * PATIENCE]) if action == "delay" else 0.0
        found.append(Fault(action, call, seconds, of=where))
    return found


# Rounds ########################################################################################


def transient(setting: Setting, choice: random.Random) -> int:
    """Ranks that fail and are there again: whoever hears of it goes on with the same loader."""
    world_size = choice.choice([2, 3])
    faults = [some_faults(choice, 3) for _ in range(world_size)]
    split_seeds = choice.choice(["global", "part"])
    options = {"num_workers": choice.choice([0, 2]), "split_seeds": split_seeds}
    epoch = setting.epoch(split_seeds)
    paths = setting.paths(shares(world_size, 3))
    ranks = Ranks(paths, epoch, faults, loader=options, opened=choice.choice(CACHES))
    ranks.run()
    assert epoch.finished
    epoch.check()
    return ranks.happened


def copies(setting: Setting, choice: random.Random) -> int:
    """One of two ranks that hold a part fails: nobody hears of it."""
    bad = choice.randrange(3)
    faults: list[list[Fault]] = [[], [], []]
    faults[bad] = some_faults(choice, 6, of=("answer",), calls=14)
    epoch = setting.epoch()
    options = {"num_workers": choice.choice([0, 2])}
    pause = choice.choice([0.0, 0.0, 30.0])
    paths = setting.paths(COPIES)
    ranks = Ranks(
        paths,
        epoch,
        faults,
        loader=options,
        opened=choice.choice(CACHES),
        patience=LONG_PATIENCE,
        pause=pause,
    )
    ranks.run()
    assert epoch.finished and not epoch.errors, epoch.errors
    epoch.check()
    return ranks.happened


def gone(setting: Setting, choice: random.Random) -> int:
    """A rank ends. Where others have its parts only its share is late, else all hear of it."""
    held = choice.choice([COPIES, shares(3, 3)])
    last = choice.randrange(3)
    faults: list[list[Fault]] = [[], [], []]
    faults[last] = [Fault("close", choice.randrange(6), of=choice.choice(["answer", "request"]))]
    epoch = setting.epoch()
    ranks = Ranks(setting.paths(held), epoch, faults, patience=LONG_PATIENCE, closes=True)
    outcomes = ranks.run()
    if held is COPIES:
        wrong = [each.error for rank, each in enumerate(outcomes) if rank != last]
        assert wrong == [None, None], wrong
    if not epoch.finished:  # who is left goes on, or as many as before, from a new start
        parts = shares(choice.choice([2, 3]), 3)
        Ranks(setting.paths(parts), epoch, [[] for _ in parts]).run()
    assert epoch.finished
    epoch.check()
    return ranks.happened


def opening(setting: Setting, choice: random.Random) -> int:
    """A rank fails while all open the graph: all hear of it, and can begin again."""
    action = choice.choice(["delay", "drop", "raise"])
    bad, call = choice.randrange(2), choice.randrange(2)
    faults: list[list[Fault]] = [[], []]
    faults[bad] = [Fault(action, call, 0.05)]
    epoch = setting.epoch()
    paths = setting.paths(shares(2, 3))
    first = Ranks(paths, epoch, faults, timeout=2.0)
    if action == "delay":
        first.run()
    else:
        with pytest.raises(ExceptionGroup) as caught:
            first.run()
        assert len(caught.value.exceptions) == 2, caught.value.exceptions
        for error in caught.value.exceptions:
            assert isinstance(error, CommError) and "rank" in str(error), error
        Ranks(paths, epoch, [[], []]).run()
    assert epoch.finished
    epoch.check()
    return first.happened


class Unreliable:
    """What servers do instead of answering; counts what it did.

    Args:
        served: The servers.
        choice: Chooses.
    """

    def __init__(self, served: Served, choice: random.Random) -> None:
        self.served, self.happened = served, 0
        self._lock = threading.Lock()
        self._left: dict[tuple[int, int], str] = {}
        self._numbers = [0] * len(served.addresses)
        for server, address in enumerate(served.addresses[:-1]):  # the last one is well
            calls = choice.sample(range(8), 3)
            for call in calls:
                self._left[server, call] = choice.choice(["drop", "garble", "error", "late"])
            served.network.fault[address] = self._fault_of(server)

    def _fault_of(self, server: int) -> Callable[[int, str, Any], Any]:
        def fault(_: int, name: str, answer: Any) -> Any:
            if name != "nodes":
                return answer
            with self._lock:
                number = self._numbers[server]
                self._numbers[server] += 1
                action = self._left.pop((server, number), None)
                self.happened += action is not None
            if action == "late":
                time.sleep(0.05)
            return {
                "drop": None,
                "garble": [torch.zeros(3)],
                "error": RequestError(self.served.addresses[server], "MemoryError", "none left"),
            }.get(action or "", answer)

        return fault


def servers(setting: Setting, choice: random.Random) -> int:
    """Of three servers one is killed, others fail; then all are, and come back."""
    served = Served(setting.whole, 3)
    try:
        unreliable = Unreliable(served, choice)
        epoch = setting.epoch()
        loader = make_loader(served.open(timeout=3 * PATIENCE), num_workers=choice.choice([0, 2]))
        killed, all_gone = choice.randrange(1, 3), choice.randrange(3, 6)
        dead = choice.randrange(3)

        def during(step: int) -> None:
            if step == killed:
                served.listeners[dead].close()
                unreliable.happened += 1
            if step == all_gone:
                for each in served.listeners:
                    each.close()
                unreliable.happened += 2

        outcome = bounded(lambda: iterate(loader, during))
        epoch.take([outcome])
        assert isinstance(outcome.error, CommTimeoutError), outcome.error
        for address in served.addresses:
            assert address in str(outcome.error), outcome.error
        served.listeners = [served.listen(number) for number in range(3)]
        loader.load_state_dict(epoch.state)
        epoch.take([bounded(lambda: iterate(loader))])
        assert epoch.finished, epoch.errors
        epoch.check()
        return unreliable.happened
    finally:
        served.close()


def workers(setting: Setting, choice: random.Random) -> int:
    """A sampler process is killed: it is named, and another one goes on."""
    sampling = SamplingOptions(num_workers=2, channel_size="1MB")
    loader = make_loader(setting.data, sampling=sampling)
    epoch = setting.epoch()
    when, happened = choice.randrange(6), 0

    def during(step: int) -> None:
        nonlocal happened
        if step == when:
            victim = choice.choice(_sampler_processes())
            os.kill(victim, signal.SIGKILL)
            happened += 1

    outcome = bounded(lambda: iterate(loader, during))
    assert outcome.error is None or isinstance(outcome.error, WorkerDiedError), outcome.error
    epoch.take([outcome])
    if not epoch.finished:
        loader.load_state_dict(epoch.state)
        epoch.take([bounded(lambda: iterate(loader))])
    assert epoch.finished
    epoch.check()
    return happened


def _sampler_processes() -> list[int]:
    return [
        each.pid
        for each in multiprocessing.active_children()
        if each.name.startswith("pyg_scale-sampler") and each.pid is not None
    ]


ROUNDS = (transient, copies, gone, servers, opening)


PROCESS = """
import json, os, sys
import pyg_scale
from pyg_scale.comm import Fault, Faulty, connect
from pyg_scale.errors import CommError
from tests.distributed.disturbed import digest, make_loader

rank, state, faults = int(os.environ["RANK"]), {state!r}, {faults!r}
comm = Faulty(connect(timeout=60), [Fault(*each) for each in faults[rank]])
data = pyg_scale.open({paths!r}[rank], comm=comm)
loader = make_loader(data)
loader.load_state_dict(state)
error = None
try:
    for batch in loader:
        print("took", json.dumps([digest(batch), loader.state_dict()]), flush=True)
except CommError as found:
    error = str(found)
print("ended", json.dumps(error), flush=True)
data.close(60 if error is None else 0)
comm.close()
"""


def processes(setting: Setting, held: list[list[int]], victim: int, call: int) -> None:
    """Ranks that are processes, one of which is killed in the middle of a request."""
    paths = [str(path) for path in setting.paths(held)]
    faults: list[list[Any]] = [[] for _ in held]
    faults[victim] = [("kill", call, 0.0, "answer")]
    code = PROCESS.format(state=setting.fresh, faults=faults, paths=paths)
    found = end(start(setting.folder, code, len(held)))
    assert found[victim][0] == -signal.SIGKILL, found
    assert all(each[0] == 0 for rank, each in enumerate(found) if rank != victim), found
    left = [output for rank, (_, output) in enumerate(found) if rank != victim]
    errors = [json.loads(line) for output in left for line in _lines(output, "ended")]
    if held is COPIES:  # the victim may have had all its batches, and answer others still
        assert errors == [None, None]
    else:
        assert any(f"rank {victim}" in (error or "") for error in errors), errors
    # All go on from the last step that every rank had made: what came after it comes again.
    took = [[json.loads(line) for line in _lines(output, "took")] for _, output in found]
    last = [each[-1][1] if each else setting.fresh for each in took]
    state = min(last, key=lambda each: each["delivered"])
    before = [name for each in took for name, at in each if at["delivered"] <= state["delivered"]]
    code = PROCESS.format(state=state, faults=[[]] * len(held), paths=paths)
    again = end(start(setting.folder, code, len(held)))
    assert all(each[0] == 0 for each in again), again
    after = [json.loads(line)[0] for _, output in again for line in _lines(output, "took")]
    assert sorted(before + after) == sorted(digest(batch) for batch in setting.expected)


def _lines(output: str, name: str) -> list[str]:
    """What a process said under a name."""
    return [each[len(name) + 1 :] for each in output.splitlines() if each.startswith(f"{name} ")]


def soak(setting: Setting, rounds: Sequence[Callable[..., int]], faults: int) -> None:
    """Rounds in turn, until so many faults have happened."""
    left, happened, number = Left(), 0, 0
    while happened < faults or number < len(rounds):
        assert number < faults + len(rounds), f"only {happened} faults in {number} rounds"
        done = rounds[number % len(rounds)](setting, random.Random(number))
        happened, number = happened + done, number + 1
        left.check()


@pytest.mark.filterwarnings("ignore:all . ranks iterate over the same:UserWarning")
@pytest.mark.filterwarnings("ignore:.*are still busy after:RuntimeWarning")
def test_a_few_faults(setting: Setting) -> None:
    soak(setting, ROUNDS, 20)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:all . ranks iterate over the same:UserWarning")
@pytest.mark.filterwarnings("ignore:.*are still busy after:RuntimeWarning")
def test_hundreds_of_faults(setting: Setting) -> None:
    soak(setting, (*ROUNDS, workers), 300)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("copied", [True, False])
def test_processes_that_are_killed(setting: Setting, copied: bool) -> None:
    processes(setting, COPIES if copied else shares(3, 3), victim=1, call=4)
