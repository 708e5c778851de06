"""Ranks that are started again meet each other, and nobody who was there before."""

from __future__ import annotations

import threading

import pytest
from torch.distributed import HashStore

from pyg_scale.comm.attempt import this_attempt
from pyg_scale.errors import CommTimeoutError


def attempt(store, world_size, start=lambda rank: None):
    """What each rank of an attempt finds in its store after it has written its rank there."""
    found, errors = {}, []

    def work(rank):
        try:
            start(rank)
            mine = this_attempt(store, rank, world_size, 10.0)
            assert not mine.check([f"here/{rank}"]), "an earlier attempt wrote here"
            mine.set(f"here/{rank}", "yes")
            mine.wait([f"here/{other}" for other in range(world_size)])
            found[rank] = mine.prefix if hasattr(mine, "prefix") else True
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not errors, errors
    return found


def test_attempts_in_one_store_do_not_see_each_other():
    store = HashStore()
    for world_size in (3, 3, 2, 4):
        assert len(attempt(store, world_size)) == world_size


def test_ranks_that_come_before_rank_0_do_not_take_the_last_attempt_for_theirs():
    store = HashStore()
    attempt(store, 3)
    last = store.get("attempt")
    others_asked = threading.Event()

    def start(rank):
        if rank == 0:  # comes when the others have answered the last attempt's rank 0 already
            assert others_asked.wait(5)
        else:
            threading.Timer(0.1, others_asked.set).start()

    attempt(store, 3, start)
    assert store.get("attempt") != last


@pytest.mark.parametrize(("rank", "missing"), [(0, 1), (1, 0)])
def test_who_does_not_come_is_named(rank, missing):
    with pytest.raises(CommTimeoutError, match=f"rank {missing} did not"):
        this_attempt(HashStore(), rank, 2, 0.2)
