"""Ranks as processes of one script."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pyg_scale import distributed
from pyg_scale.errors import CommError, CommTimeoutError
from tests import preloaded


@pytest.fixture(autouse=True)
def soon() -> Iterator[None]:
    """Processes begin soon."""
    with preloaded.spawning():
        yield


def work(folder: str, how: str) -> None:
    rank = int(os.environ["RANK"])
    if how == "sum":
        with distributed.init(device="cpu", start_timeout=60) as context:
            x = torch.tensor([context.rank + 1])
            dist.all_reduce(x)
            with socket.socket() as other:  # the store is for this machine alone, at one address
                closed = other.connect_ex(("127.0.0.2", int(os.environ["MASTER_PORT"]))) != 0
            said = f"{int(x)} {torch.get_num_threads()} {closed}"
            (Path(folder) / f"{rank}").write_text(said)
        return
    (Path(folder) / f"{rank}").write_text(str(os.getpid()))
    if rank == 1 and how == "raise":
        raise ValueError("no such luck")
    if rank == 1 and how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1 or how != "hang":
        time.sleep(600)


def is_running(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    return True


def test_ranks_need_no_launcher(tmp_path: Path) -> None:
    distributed.spawn(work, 2, (str(tmp_path), "sum"), timeout=90, num_threads=1)
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["3 1 True"] * 2


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("raise", CommError, "rank 1 failed: .*ValueError: no such luck"),
        pytest.param("kill", CommError, "rank 1 ended by signal SIGKILL", marks=pytest.mark.slow),
        pytest.param(
            "hang",
            CommTimeoutError,
            "rank 1 of 2 was running after 12 seconds",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_rank_that_fails_is_named_and_nobody_is_left(
    tmp_path: Path, how: str, error: type[Exception], message: str
) -> None:
    limit = 12 if how == "hang" else 90
    with pytest.raises(error, match=f"(?s){message}"):
        distributed.spawn(work, 2, (str(tmp_path), how), timeout=limit)
    assert not [file for file in tmp_path.iterdir() if is_running(file.read_text())]


def test_numbers_are_checked() -> None:
    with pytest.raises(ValueError, match="nprocs must be 1 or more"):
        distributed.spawn(work, 0)
    with pytest.raises(ValueError, match="timeout must be above 0"):
        distributed.spawn(work, 1, timeout=0)
