"""Ranks that are processes of their own, to the end of their scripts."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from pyg_scale.testing import graphs
from tests import preloaded
from tests.distributed.across import in_parts, shares, spread
from tests.distributed.processes import end, free_port, start

BATCHES = """
import hashlib, os, sys, time
import torch
import pyg_scale
from pyg_scale.loader import NeighborLoader

def digest(batch):
    found = hashlib.blake2b(digest_size=8)
    for name, value in sorted(batch.to_dict().items()):
        if isinstance(value, torch.Tensor):
            raw = value.contiguous().view(-1).view(torch.uint8)
            found.update(name.encode() + raw.numpy().tobytes())
    return found.hexdigest()

def loader(data, **options):
    return NeighborLoader(data, [4, 3], batch_size=9, shuffle=True, seed=4, **options)
"""


def test_batches_and_ends_of_scripts(tmp_path: Path) -> None:
    """Scripts end at different times, without closing anything; the store goes with rank 0."""
    data = graphs.hostile()
    paths = spread(in_parts(data, tmp_path, 3), shares(3, 3))
    code = f"""{BATCHES}
rank = int(os.environ["RANK"])
data = pyg_scale.open({[str(p) for p in paths]!r}[rank], timeout=60)
for batch in loader(data):
    print("share", digest(batch))
if rank == 2:
    time.sleep(2)
if rank > 0:
    for batch in loader(data, split_seeds=False, num_workers=2):
        print("all", digest(batch))
"""
    found = end(start(tmp_path, code, 3))
    assert [code for code, _ in found] == [0, 0, 0], found
    scope: dict = {}
    exec(BATCHES, scope)
    expected = [scope["digest"](batch) for batch in scope["loader"](data)]
    for rank, (_, output) in enumerate(found):
        lines = [line.split() for line in output.splitlines()]
        assert [d for what, *d in lines if what == "share"] == [[e] for e in expected[rank::3]]
        if rank:
            assert [d for what, *d in lines if what == "all"] == [[e] for e in expected]


def test_what_a_fork_has_opened_is_served_until_all_are_done(tmp_path: Path) -> None:
    """Forks that are ranks as well, of processes that have a graph open on ranks."""
    data = graphs.hostile()
    paths = spread(in_parts(data, tmp_path, 2), shares(2, 2))
    code = f"""{BATCHES}
import multiprocessing
rank = int(os.environ["RANK"])
path = {[str(p) for p in paths]!r}[rank]
data = pyg_scale.open(path, timeout=60)

def fork():
    os.environ["MASTER_PORT"] = "{free_port()}"
    mine = pyg_scale.open(path, timeout=60)
    mine.comm.barrier()
    if rank:
        time.sleep(1)
        for batch in loader(mine, split_seeds=False):
            print(digest(batch), flush=True)
    kept.append(mine)

kept = []
process = multiprocessing.get_context("fork").Process(target=fork)
process.start()
process.join()
sys.exit(process.exitcode)
"""
    (first, said), (second, output) = end(start(tmp_path, code, 2))
    assert (first, second) == (0, 0), said + output
    scope: dict = {}
    exec(BATCHES, scope)
    assert output.split() == [scope["digest"](batch) for batch in scope["loader"](data)]


@pytest.mark.slow
def test_a_killed_rank_is_named_by_the_others(tmp_path: Path) -> None:
    paths = spread(in_parts(graphs.hostile(), tmp_path, 2), shares(2, 2))
    code = f"""{BATCHES}
import signal
rank = int(os.environ["RANK"])
data = pyg_scale.open({[str(p) for p in paths]!r}[rank], timeout=60)
if rank == 1:
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)
while True:
    for batch in loader(data, split_seeds=False):
        pass
"""
    (code_0, output), (code_1, _) = end(start(tmp_path, code, 2))
    assert code_1 == -signal.SIGKILL and code_0 == 1
    assert "CommError" in output and "rank 1" in output.splitlines()[-1], output


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_rank_that_stops_is_named_in_time(tmp_path: Path, num_workers: int) -> None:
    """Once for all that was under way, and not for each request anew."""
    paths = spread(in_parts(graphs.hostile(), tmp_path, 2), shares(2, 2))
    code = f"""{BATCHES}
rank = int(os.environ["RANK"])
data = pyg_scale.open({[str(p) for p in paths]!r}[rank], timeout=60)
data.ranks.timeout = data.ranks.service.timeout = 8.0
print("open", flush=True)
if rank == 1:
    time.sleep(100)
while True:
    for batch in loader(data, split_seeds=False, num_workers={num_workers}):
        pass
"""
    processes = start(tmp_path, code, 2)
    assert processes[1].stdout is not None
    try:
        assert processes[1].stdout.readline() == "open\n"
        time.sleep(2)
        os.kill(preloaded.pid_behind(processes[1]), signal.SIGSTOP)
        stopped = time.monotonic()
        output, _ = processes[0].communicate(timeout=60)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert processes[0].returncode == 1 and time.monotonic() - stopped < 15, "twice were 16"
    assert "CommTimeoutError" in output and "rank 1 did not answer" in output
