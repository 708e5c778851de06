"""What fails on a rank fails the test."""

import threading

import pytest

from pyg_scale.testing.ranks import run_ranks


def test_an_error_that_did_not_come_fails():
    def work(group):
        if group.rank == 1:
            with pytest.raises(ValueError, match="never"):
                pass

    with pytest.raises(ExceptionGroup) as found:
        run_ranks(2, work)
    (error,) = found.value.exceptions
    assert isinstance(error, AssertionError) and "DID NOT RAISE" in str(error)


def test_a_rank_that_is_late_is_named_with_its_line():
    ended = threading.Event()

    def work(group):
        if group.rank == 1:
            ended.wait()

    with pytest.raises(TimeoutError, match=r"rank-1 did not end within 0.5 [\s\S]*ended\.wait\(\)"):
        run_ranks(2, work, limit=0.5)
    ended.set()
