"""Small batches made by the consumer's thread, where that is measured to be faster."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from torch_geometric.data import Data

from pyg_scale.loader import NeighborLoader
from pyg_scale.loader.iterator import Failed
from pyg_scale.loader.stats import Stats
from pyg_scale.loader.workers import pace
from pyg_scale.loader.workers.pace import REST, SMALL_SECONDS, WINDOW, Course, Pace
from pyg_scale.loader.workers.threads import Pipeline, WorkerThreads
from pyg_scale.testing import graphs
from tests.loader.batches import assert_same_batches

AHEAD = 4  # batches that the threads have under way
TRIAL = 2 * (AHEAD + 1 + WINDOW) + 2 * (1 + WINDOW)


def run(course: Course, batches: int, seconds: dict[bool, float], made: float) -> list[bool]:
    """Who makes each batch, if one by the consumer and one by threads take so many seconds."""
    now, here, who = 0.0, next(course), []
    for _ in range(batches):
        who.append(here)
        now += seconds[here]
        here = course.send((now, made))
    return who


@pytest.mark.parametrize("faster", [False, True])
def test_the_faster_way_is_used_until_the_next_trial(faster):
    seconds = {faster: 1.0, (not faster): 1.5}
    who = run(Pace().course(AHEAD), TRIAL + REST + TRIAL, seconds, made=SMALL_SECONDS / 2)
    windows = [(here, len(list(group))) for here, group in itertools.groupby(who[:TRIAL])]
    # Once the consumer has taken longer than the threads, a window of its own ends.
    own = 1 + (WINDOW if faster else next(n for n in range(1, 99) if 1.5 * n > WINDOW))
    assert windows[:3] == [(False, AHEAD + 1 + WINDOW), (True, own), (False, AHEAD + 1 + WINDOW)]
    trial = 2 * (AHEAD + 1 + WINDOW + own)
    assert who[trial : trial + REST] == [faster] * REST
    assert who[trial + REST : trial + REST + AHEAD] == [False] * AHEAD


def test_one_slow_batch_does_not_decide():
    course, now = Pace().course(AHEAD), 0.0
    here, who = next(course), []
    for step in range(TRIAL + 8):
        who.append(here)
        now += (1.0 if here else 1.2) + (1000.0 if step == AHEAD + 1 + WINDOW + 3 else 0.0)
        here = course.send((now, 0.0))
    assert who[-1] is True


def test_large_batches_are_left_to_the_threads():
    who = run(Pace().course(AHEAD), 2000, {False: 3.0, True: 1.0}, made=SMALL_SECONDS * 1.01)
    assert not any(who)


def test_the_result_holds_for_the_next_pass():
    kept = Pace()
    run(kept.course(AHEAD), TRIAL + 1, {False: 2.0, True: 1.0}, made=0.0)
    assert all(run(kept.course(AHEAD), REST // 2, {False: 2.0, True: 1.0}, made=0.0))
    assert not all(run(kept.course(AHEAD), REST // 2, {False: 2.0, True: 1.0}, made=0.0))


# Pipelines ################################################################################


def given(*who: bool) -> Course:
    """A course that measures nothing; the last one goes on."""
    step = 0
    while True:
        yield who[min(step, len(who) - 1)]
        step += 1


def values(source: Any) -> Iterator[Any]:
    while True:
        try:
            _, made, stats = next(source)
        except StopIteration:
            return
        yield (made.error if isinstance(made, Failed) else made), stats.in_consumer


TURNS = [False] * 3 + [True] * 4 + [False] * 5 + [True]


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize(("turns", "expected"), [(TURNS, 26), ([True], 40), ([False], 0)])
def test_every_item_comes_once_whoever_makes_it(turns, expected, in_order):
    def work(item: int, stats: Stats) -> tuple[int, int]:
        return item, threading.get_ident()

    threads = WorkerThreads(2)
    source = Pipeline(
        iter(range(40)),
        work,
        threads,
        owned=True,
        limit=4,
        in_order=in_order,
        course=given(*turns),
    )
    found = list(values(source))
    items = [item for (item, _), _ in found]
    assert (items if in_order else sorted(items)) == list(range(40))
    for (_, thread), in_consumer in found:
        assert (thread == threading.get_ident()) == bool(in_consumer)
    assert sum(own for _, own in found) == expected
    assert not threads.native_ids
    with pytest.raises(StopIteration):
        next(source)


def test_an_error_has_its_place_and_the_pass_goes_on():
    def work(item: int, stats: Stats) -> int:
        if item == 5:
            raise LookupError("five")
        return item

    source = Pipeline(
        iter(range(9)), work, WorkerThreads(1), owned=True, limit=2, course=given(False, True)
    )
    found = [made for made, _ in values(source)]
    assert isinstance(found.pop(5), LookupError)
    assert found == [0, 1, 2, 3, 4, 6, 7, 8]


# Loaders ##################################################################################


def noted(data: Data) -> Data:
    data.came = True
    return data


def loader(**kwargs: Any) -> NeighborLoader:
    kwargs = {"num_neighbors": [4, 3], "batch_size": 3, "shuffle": True, "seed": 5} | kwargs
    return NeighborLoader(graphs.hostile(), transform=noted, **kwargs)


@pytest.fixture
def turns(monkeypatch):
    """All loaders change who makes batches at the same places."""
    monkeypatch.setattr(Pace, "course", lambda self, ahead: given(*TURNS))


@pytest.mark.parametrize("persistent", [False, True])
def test_batches_are_those_without_workers(turns, persistent):
    mixed, plain = loader(num_workers=2, persistent_workers=persistent), loader()
    for _ in range(2):
        assert_same_batches(mixed, plain)
    counts = mixed.stats()["epoch"]
    assert 4 <= counts["in_consumer"] < counts["batches"] == len(plain)


@pytest.mark.parametrize("seen", [2, 5, 8, 11, 20])
def test_a_pass_resumes_wherever_it_was_left(turns, seen):
    first = loader(num_workers=2)
    passed = iter(first)
    for _ in range(seen):
        next(passed)
    state = first.state_dict()
    passed.close()
    resumed, whole = loader(num_workers=2), list(loader())
    resumed.load_state_dict(state)
    rest = list(resumed)
    assert_same_batches(rest, whole[seen:])


@pytest.mark.parametrize(
    "told", [{"worker_type": "thread"}, {"timeout": 60}, {"device": "cpu"}], ids=str
)
def test_threads_that_were_asked_for_make_all(turns, told):
    asked = loader(num_workers=2, **told)
    assert len(list(asked)) == asked.stats()["epoch"]["batches"]
    assert asked.stats()["epoch"]["in_consumer"] == 0


def test_threads_on_cores_of_their_own_make_all(turns):
    pinned = loader(num_workers=1)
    with pinned.enable_cpu_affinity([0]):
        assert len(list(pinned)) > 0
    assert pinned.stats()["epoch"]["in_consumer"] == 0


def test_a_batch_that_is_cheap_in_the_consumer_is_made_there(monkeypatch):
    """With threads that are always late, the trial itself chooses the consumer."""
    monkeypatch.setattr(pace, "SMALL_SECONDS", 10.0)
    slow = loader(num_workers=1, batch_size=1)
    work = slow._work

    def late(batch: Any, stats: Stats, pin: bool) -> Any:
        if threading.current_thread().name.startswith("pyg_scale-loader"):
            time.sleep(0.02)
        return work(batch, stats, pin)

    monkeypatch.setattr(slow, "_work", late)
    assert len(list(slow)) == 100
    assert slow.stats()["epoch"]["in_consumer"] > 50
