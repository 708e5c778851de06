"""Ranks on hosts of their own: network namespaces with their own addresses, one of them cut off."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import pyg_scale
from pyg_scale.loader import NeighborLoader
from pyg_scale.testing import graphs
from tests.distributed.hosts import Hosts, reason

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if reason():
        pytest.skip(reason())
    with Hosts(3) as made:
        yield made


# What a rank does; the test tells it when the cable is pulled.
CUT_OFF = """
import sys, time, torch, torch.distributed as dist
from pyg_scale import distributed
from pyg_scale.comm import connect
from pyg_scale.errors import CommError

LIMIT = 4.0
context = distributed.init(device="cpu", start_timeout=60, timeout=60)
rank = context.rank
x = torch.ones(1)
dist.all_reduce(x)
assert int(x) == 3 and len(set(context.addresses)) == 3, context
comm = connect(timeout=LIMIT)
service = comm.serve({"echo": lambda tensors: tensors})
comm.barrier()
for other in range(3):
    assert service.request(other, "echo", [torch.ones(3)]).wait()[0].tolist() == [1, 1, 1]
comm.barrier()
print("ready", *context.addresses, flush=True)
sys.stdin.readline()

def fails(what, call):
    start = time.monotonic()
    try:
        call()
        said = "nothing"
    except CommError as error:
        said = f"{type(error).__name__}: {error}"
    took = time.monotonic() - start
    assert took < 4 * LIMIT, took
    print(what, said, flush=True)

large = torch.zeros(1 << 24)  # more than a socket's buffers hold
for other in range(3):
    if other != rank:
        fails(f"small {other}", lambda: service.request(other, "echo", [torch.ones(3)]).wait())
        fails(f"large {other}", lambda: service.request(other, "echo", [large]).wait())
fails("all_gather", lambda: comm.all_gather(torch.tensor([rank])))
fails("again", lambda: comm.barrier())
start = time.monotonic()
service.close()
comm.close()
distributed.shutdown(wait=1.0)
print("closed", time.monotonic() - start < 15, flush=True)
"""


def test_a_host_that_is_cut_off_is_named_by_everyone(hosts: Hosts) -> None:
    with hosts.ranks(CUT_OFF) as ranks:
        for rank in ranks:
            assert rank.until("ready").split()[1:] == hosts.addresses
        hosts.cut(2)
        for rank in ranks:
            rank.tell("")
        for number, rank in enumerate(ranks):
            for other in range(3):
                if other == number:
                    continue
                for size in ("small", "large"):
                    said = rank.until(f"{size} {other}")
                    if 2 in (number, other):
                        assert "Error" in said and f"rank {other} " in said, said
                    else:
                        assert said.endswith("nothing"), said
            late = ("rank 2 ",) if number != 2 else ("rank 0 ", "rank 1 ")
            said = rank.until("all_gather")
            assert "CommTimeoutError" in said and any(name in said for name in late), said
            assert "CommError" in rank.until("again")
        for rank in ranks:
            assert rank.until("closed") == "closed True"
            assert rank.status() == 0


SAMPLES = """
import hashlib, sys, torch
import pyg_scale
from pyg_scale import distributed
from pyg_scale.loader import NeighborLoader

context = distributed.init(device="cpu", start_timeout=60)
with pyg_scale.open(f"{sys.argv[1]}/{context.rank}", timeout=60) as data:
    loader = NeighborLoader(
        data, [4, 3], torch.arange(60), batch_size=10, shuffle=True, seed=3, split_seeds=False
    )
    found = hashlib.sha256()
    for batch in loader:
        for name in ("n_id", "e_id", "edge_index", "x", "input_id"):
            found.update(batch[name].contiguous().numpy().tobytes())
    print("batches", found.hexdigest(), flush=True)
distributed.shutdown()
"""


def test_hosts_that_have_a_part_each_sample_as_one_process_does(
    hosts: Hosts, tmp_path: Path
) -> None:
    data = graphs.hostile()
    pyg_scale.save(data, tmp_path / "graph")
    pyg_scale.partition(tmp_path / "graph", 3, "random", tmp_path / "parts")
    for rank in range(3):
        shutil.copytree(tmp_path / "parts", tmp_path / "hosts" / str(rank))
        for part in {0, 1, 2} - {rank}:
            shutil.rmtree(tmp_path / "hosts" / str(rank) / f"part-{part}")
    expected = hashlib.sha256()
    alone = NeighborLoader(data, [4, 3], torch.arange(60), batch_size=10, shuffle=True, seed=3)
    for batch in alone:
        for name in ("n_id", "e_id", "edge_index", "x", "input_id"):
            expected.update(batch[name].contiguous().numpy().tobytes())
    with hosts.ranks(SAMPLES, str(tmp_path / "hosts")) as ranks:
        for rank in ranks:
            assert rank.until("batches").split()[1] == expected.hexdigest()
        for rank in ranks:
            assert rank.status() == 0, rank.said


DOCTOR = """
import sys
from pyg_scale.cli import main
status = main(["doctor", "--dist", "--json"])
print("status", status, flush=True)
"""


def test_doctor_names_hosts_that_cannot_reach_each_other(hosts: Hosts) -> None:
    hosts.hide(1, 2)
    with hosts.ranks(DOCTOR) as ranks:
        assert ranks[0].until("status", 120) == "status 1"
        for rank in ranks[1:]:
            assert rank.until("status", 60) == "status 0"
        text = "\n".join(ranks[0].said[:-1])
    found = json.loads(text[text.index("{") :])
    whats = [each["what"] for each in found["findings"] if each["ok"] is False]
    assert any("rank 1 cannot reach rank 2 at 10.177.0.3 (net0" in what for what in whats), whats
    assert not any("rank 0 cannot" in what or "reach rank 0" in what for what in whats), whats


def test_a_host_that_does_not_come_is_named(hosts: Hosts) -> None:
    code = """
        import os, sys
        from pyg_scale import distributed
        from pyg_scale.errors import CommTimeoutError
        if os.environ["RANK"] == "1":
            sys.exit(0)
        try:
            distributed.init(device="cpu", start_timeout=15)
        except CommTimeoutError as error:
            print("late", error, flush=True)
    """
    with hosts.ranks(code) as ranks:
        for rank in (0, 2):
            said = ranks[rank].until("late")
            assert "rank 1 of 3 did not come within 15 seconds" in said, said
