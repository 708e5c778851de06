"""What fails on a rank fails the test."""

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
