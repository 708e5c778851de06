"""Several ranks hold a part: when one fails, another one is asked, and batches stay the same."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import pyg_scale
from pyg_scale.comm import Counting, Fault, Faulty, Group
from pyg_scale.comm.gloo import Gloo
from pyg_scale.distributed.failover import Health, Search
from pyg_scale.distributed.owners import Owners, share_out
from pyg_scale.errors import CommError, CommTimeoutError
from pyg_scale.loader import NeighborLoader
from pyg_scale.testing import graphs
from pyg_scale.testing.ranks import run_ranks
from tests.distributed.across import in_parts, spread
from tests.loader.batches import assert_same_batches

pytestmark = [
    pytest.mark.matrix(2),
    pytest.mark.filterwarnings("ignore:all . ranks iterate over the same:UserWarning"),
]

COPIES = [[0, 1], [1, 2], [2, 0]]
"""Three ranks, each part on two of them: rank 0 asks rank 2 for part 2, then rank 1."""


def owners(
    rank: int, readable: Sequence[Sequence[int]], num_parts: int, direct: Sequence[int] = ()
) -> Owners:
    held = tuple(map(tuple, readable))
    answer = share_out(readable, num_parts)
    return Owners(rank, len(readable), held, answer, frozenset(direct))


# Who is asked ##################################################################################


def test_the_order_of_holders() -> None:
    assert [owners(0, COPIES, 3).holders(part) for part in range(3)] == [(0, 2), (1, 0), (2, 1)]
    everything = [range(2)] * 4  # ranks 0 and 2 answer for part 0, 1 and 3 for part 1
    assert owners(0, everything, 2).holders(1) == (1, 3, 0, 2)
    assert owners(1, everything, 2).holders(0) == (2, 0, 1, 3)
    assert owners(3, [[0], [0], [], [1]], 2).holders(0) == (1, 0)


@dataclass
class Held:
    """Who holds which part."""

    of: dict[int, list[int]]
    direct: frozenset[int] = field(default_factory=frozenset)

    @property
    def num_parts(self) -> int:
        return len(self.of)

    def holders(self, part: int) -> list[int]:
        return self.of[part]


def test_a_search_goes_from_rank_to_rank() -> None:
    health = Health(60.0)
    held = Held({0: [1, 2, 3], 1: [2], 2: [0]}, frozenset([2]))
    search = Search(0, held, health, 9.0)
    route = search.route()
    assert route.rank_of.tolist() == [1, 2, 0] and route.chances == {1: 3, 2: 1, 0: 1}
    search.begin()
    assert search.patience(1, 1) > 2 * search.patience(1, 3) > 0
    search.failed(1, CommTimeoutError("rank 1 is late"))
    assert search.route().rank_of.tolist() == [2, 2, 0] and search.chances([0]) == 2
    other = Search(0, held, health, 9.0)  # rank 1 is asked last by everybody
    assert other.route().rank_of.tolist() == [2, 2, 0] and other.candidates(0, {1}) == [2, 3, 1]
    search.failed(2, CommTimeoutError("rank 2 is late"))
    with pytest.raises(CommTimeoutError, match="^rank 2 is late$"):
        raise search.given_up(1)
    search.failed(3, CommError("rank 3 is gone"))
    assert search.route().rank_of.tolist() == [-1, -1, 0]
    with pytest.raises(CommError, match="none of the 3 ranks that hold part 0 .*1.*2.*3") as error:
        search.rank_of(0)
    assert not isinstance(error.value, CommTimeoutError)
    health.answered(1, time.monotonic())
    assert health.ill() == {2, 3}


def test_a_rank_that_failed_gets_a_moment_and_not_the_whole_time_again() -> None:
    """Several requests are under way, and each would wait as long for a rank that stopped."""
    health = Health(60.0)
    held = Held({0: [1], 1: [2]})
    search, hasty = Search(0, held, health, 100.0), Search(0, held, health, 0.9)
    for each in (search, hasty):
        each.begin()
    assert search.patience(1, 1) > 90
    Search(0, held, health, 100.0).failed(1, CommTimeoutError("rank 1 is late"))
    assert 0 < search.patience(1, 1) <= 5 and search.patience(2, 1) > 90
    assert hasty.patience(1, 1) > 0.5, "time enough for a rank that is back"
    health.answered(1, time.monotonic())
    assert search.patience(1, 1) > 90


def test_an_answer_from_before_a_failure_does_not_make_a_rank_well() -> None:
    """It lay there unread: waiting once more for the whole time limit would double the limit."""
    held = Held({0: [1]})
    health = Health(60.0)
    early = Search(0, held, health, 9.0)
    Search(0, held, health, 9.0).failed(1, CommTimeoutError("rank 1 is late"))
    early.answered(1)
    assert health.ill() == {1}
    late = Search(0, held, health, 9.0)
    late.begin()
    assert late.patience(1, 1) <= 1.0
    late.answered(1)
    assert not health.ill()


def test_ranks_that_failed_are_asked_again_after_a_time() -> None:
    health = Health(0.0)
    health.failed(1)
    assert health.ill() == frozenset()
    held = Held({0: [1, 2]})
    assert Search(0, held, health, 1.0).rank_of(0) == 1


# Ranks #########################################################################################


def across(
    paths: Sequence[Path],
    faults: dict[int, list[Fault]],
    check: Callable[[Any], Any],
    *,
    timeout: float = 20.0,
    **options: Any,
) -> dict[str, Any]:
    """What rank 0 finds while other ranks have faults; the requests that it has made."""
    done = threading.Event()
    made: dict[str, Any] = {}

    def work(group: Group) -> None:
        with Counting(Faulty(Gloo.join(group), faults.get(group.rank, []))) as comm:
            data = pyg_scale.open(paths[group.rank], comm=comm, num_threads=6, **options)
            try:
                if group.rank == 0:
                    data.ranks.timeout = data.ranks.service.timeout = timeout
                    made["found"] = check(data)
                    made["traffic"] = comm.traffic()
            finally:
                if group.rank == 0:
                    done.set()
                assert done.wait(50)
                data.close(0.0)

    run_ranks(len(paths), work)
    return made


def loader(data: Any, **options: Any) -> NeighborLoader:
    plain = {"num_neighbors": [4, 3], "batch_size": 9, "seed": 4, "split_seeds": False}
    return NeighborLoader(data, input_nodes=torch.arange(40), **plain | options)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("action", ["drop", "raise", "garble", "close"])
def test_the_next_rank_answers(tmp_path: Path, action: str, num_workers: int) -> None:
    data = graphs.hostile()
    paths = spread(in_parts(data, tmp_path, 3), COPIES)
    expected = list(loader(data))
    call = 0 if action == "close" else None
    across(
        paths,
        {2: [Fault(action, call, of="answer")]},
        lambda g: assert_same_batches(expected, loader(g, num_workers=num_workers)),
        timeout=4.0,
    )


def test_a_rank_that_failed_is_asked_last(tmp_path: Path) -> None:
    data = graphs.hostile()
    paths = spread(in_parts(data, tmp_path, 3), COPIES)
    expected = list(loader(data))

    def check(found: Any) -> None:
        health, asked = found.ranks.health, []
        failed = health.failed
        health.failed = lambda rank: (asked.append(rank), failed(rank))
        assert_same_batches(expected, loader(found))
        # at most as often as batches are sampled at a time
        assert set(asked) == {2} and len(asked) <= 4

    across(paths, {2: [Fault("raise", of="answer")]}, check)


def test_times_and_columns_of_the_next_rank(tmp_path: Path) -> None:
    data = graphs.hostile()
    path = in_parts(data, tmp_path, 3, time_attr="time")
    expected = list(loader(data, time_attr="time"))

    def check(found: Any) -> None:
        found.ranks.health = Health(0.0)
        assert torch.equal(found.y, data.y)
        assert_same_batches(expected, loader(found, time_attr="time"))

    made = across(spread(path, COPIES), {2: [Fault("raise", of="answer")]}, check)
    assert {"request edges", "request column", "request features"} <= made["traffic"].keys()


def test_what_this_rank_can_read_itself_it_reads_at_last(tmp_path: Path) -> None:
    data = graphs.hostile()
    path = in_parts(data, tmp_path, 2)
    expected = list(loader(data))

    def check(found: Any) -> None:
        assert found.owners.direct == {0} and found.owners.holders(1) == (1, 0)
        assert torch.equal(found.y, data.y)
        assert_same_batches(expected, loader(found))

    across([path, path], {1: [Fault("close", 0, of="answer")]}, check, through="requests")


@pytest.mark.parametrize(
    ("first", "second", "error", "message"),
    [
        ("raise", "garble", CommError, "rank 1: .*could not answer.*rank 2: .*cannot be used"),
        ("drop", "drop", CommTimeoutError, "rank 1: .*did not answer.*rank 2: .*did not answer"),
    ],
)
def test_when_all_that_hold_a_part_fail_they_are_named(
    tmp_path: Path, first: str, second: str, error: type[Exception], message: str
) -> None:
    paths = spread(in_parts(graphs.hostile(), tmp_path, 2), [[0], [1], [1]])
    faults = {1: [Fault(first, of="answer")], 2: [Fault(second, of="answer")]}

    def check(found: Any) -> None:
        start = time.monotonic()
        with pytest.raises(error, match=f"none of the 2 ranks that hold part 1 .*{message}"):
            list(loader(found))
        with pytest.raises(error, match="rank 1.*rank 2"):
            found.y  # noqa: B018
        assert time.monotonic() - start < 30

    across(paths, faults, check, timeout=1.0)


def test_features_alone_of_the_next_rank(tmp_path: Path) -> None:
    """Rows are asked for ahead, and by many threads."""
    data = graphs.hostile()
    paths = spread(in_parts(data, tmp_path, 3), COPIES)

    def check(found: Any) -> None:
        features, rows = found.rank_features(), torch.arange(data.num_nodes).flip(0)
        assert torch.equal(features.get_tensor(None, "x", rows), data.x[rows])
        with_cache = found.rank_features(cache_ratio=0.5, policy="sieve")
        for _ in range(2):
            assert torch.equal(with_cache.get_tensor(None, "x", rows), data.x[rows])

    across(paths, {2: [Fault("garble", of="answer")]}, check)
