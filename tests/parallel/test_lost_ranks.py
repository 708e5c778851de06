"""Ranks that are killed or late are named by the others, wherever these wait for them."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pyg_scale import parallel
from pyg_scale.comm import roll_call
from pyg_scale.errors import CommError, CommTimeoutError
from pyg_scale.testing.processes import WaitingProcesses

SECONDS = 4.0


@pytest.fixture(scope="module")
def ranks() -> Iterator[WaitingProcesses]:
    with WaitingProcesses(4) as started:
        yield started


class Net(nn.Module):
    """Its buffers are sent in every forward."""

    def __init__(self, buffers: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 30_000)
        self.norm = nn.BatchNorm1d(30_000) if buffers else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)).square().mean()


def lose_rank_2(how: str, where: str) -> None:
    """Rank 2 goes or does not come after two steps, and the others are told."""
    rank = dist.get_rank()
    model: Any = parallel.wrap(Net(where == "forward"), "ddp", static_graph=where == "static")
    x, step = torch.ones(3, 2), torch.optim.SGD(model.parameters(), lr=0.1)
    if how == "late":
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=SECONDS))
    else:
        roll_call._GRACE = 1.0

    def train(number: int) -> None:
        loss = model(x)
        if rank == 2 and number == 2:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(2.5 * SECONDS)
        elif number == 2:
            time.sleep(0.3 * rank)  # ranks are not at the same place
        if where == "plain":
            loss.backward()
        else:
            model.backward(loss, 3)
        model.zero_grad()

    def epochs() -> None:
        if where == "join":  # rank 0 has nothing more to do but to take part
            with model.join(step):
                for number in range(6 if rank else 2):
                    train(number)
        for number in range(6):
            train(number)

    with pytest.raises(CommError) as raised:
        epochs()
    error, said = type(raised.value), str(raised.value)
    if how == "killed":
        assert error is CommError and said.startswith("rank 2 ended while the others"), said
    elif rank == 2:
        assert error is CommTimeoutError and "came too late" in said, said
    else:
        assert error is CommTimeoutError, said
        assert re.match(
            rf"rank 2 did not come within 4 seconds \(waited for by rank {rank}\)", said
        )


def see_a_time_limit_expire() -> None:
    """What waits of a rank say after another one of its waits has taken too long."""
    error = RuntimeError("Application timeout caused pair closure")
    assert dist.group.WORLD is not None
    found = roll_call.RollCall(dist.group.WORLD).explain(error)
    assert isinstance(found, CommTimeoutError), found


_slow = pytest.mark.slow


def test_an_error_that_does_not_name_gloo_is_explained(ranks: WaitingProcesses) -> None:
    ranks.run(see_a_time_limit_expire)


@pytest.mark.parametrize(
    "where",
    [
        "plain",
        *(pytest.param(each, marks=_slow) for each in ("backward", "forward", "join", "static")),
    ],
)
def test_a_rank_that_is_killed_is_named(ranks: WaitingProcesses, where: str) -> None:
    with pytest.raises(ExceptionGroup) as raised:
        ranks.run(lose_rank_2, "killed", where)
    (error,) = raised.value.exceptions
    assert str(error) == "the process of rank 2 ended (-9)"


@_slow
@pytest.mark.parametrize("where", ["backward", "join"])
def test_a_rank_that_is_late_is_named_and_told(ranks: WaitingProcesses, where: str) -> None:
    ranks.run(lose_rank_2, "late", where)
