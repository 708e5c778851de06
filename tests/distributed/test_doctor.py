"""``pyg-scale doctor --dist``."""

from __future__ import annotations

import copy
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import pyg_scale
from pyg_scale.cli import main
from pyg_scale.cli.doctor import pairs
from pyg_scale.cli.doctor.diagnose import diagnose, name_ranks
from pyg_scale.cli.doctor.pairs import Pair, measure_pairs, rounds
from pyg_scale.cli.doctor.ranks import report
from pyg_scale.testing import graphs
from pyg_scale.testing.ranks import run_ranks
from tests import preloaded

ROOT = Path(__file__).parents[2]


def pair(rank: int, **given: Any) -> dict[str, Any]:
    return vars(Pair(rank, 1e-4, 1e9, 1e9, 0.0)) | given


def ranks(count: int = 4) -> list[dict[str, Any]]:
    """Ranks with whom all is well, two on each machine."""
    found = []
    for number in range(count):
        node = number // 2
        found.append(
            {
                "host": f"node-{node}",
                "machine": f"node-{node}/boot",
                "address": f"10.0.0.{node + 1}",
                "interface": "eth0",
                "interfaces": {"lo": ["127.0.0.1"], "eth0": [f"10.0.0.{node + 1}"]},
                "cpus": [0, 1, 2, 3],
                "cores": 4,
                "quota": None,
                "threads": 2,
                "device": "cpu",
                "device_error": None,
                "versions": {"python": "3.11.2", "torch": "2.13.0", "pyg_scale": "0.2.0"},
                "kernels": "abc",
                "kernels_missing": "",
                "kernels_fix": "",
                "directory": {
                    "path": "/data/graph",
                    "checksum": "c0ffee",
                    "num_parts": 4,
                    "parts": [2 * node, 2 * node + 1],
                    "files": 20,
                },
                "shared_memory": 8 << 30,
                "open_files": 65536,
                "collective": "",
                "pairs": [
                    # the lower rank measures
                    pair(other) if other > number else pair(other, sent=None, received=None)
                    for other in range(count)
                    if other != number
                ],
            }
        )
    return found


def test_nothing_to_say_of_ranks_that_agree() -> None:
    assert diagnose(ranks()) == []
    assert diagnose(ranks(1)) != []  # parts 2 and 3 are nowhere


def no_version(r: list[dict[str, Any]]) -> None:
    r[3]["versions"]["torch"] = "2.12.1"


def other_graph(r: list[dict[str, Any]]) -> None:
    r[1]["directory"]["checksum"] = "decaf"


def no_part(r: list[dict[str, Any]]) -> None:
    for each in r:
        each["directory"]["parts"] = [0, 1, 3]


def no_directory(r: list[dict[str, Any]]) -> None:
    r[2]["directory"] = {"path": "/data/graph", "error": "GraphDirectoryError: it is not there"}


def no_way(r: list[dict[str, Any]]) -> None:
    r[0]["pairs"][1] = pair(2, latency=None, sent=None, received=None, error="No route to host")
    r[2]["interfaces"]["ib0"] = ["10.1.0.2"]


def loopback(r: list[dict[str, Any]]) -> None:
    r[1]["address"] = "127.0.1.1"


def no_gloo(r: list[dict[str, Any]]) -> None:
    r[1]["collective"] = "no collectives by gloo: refused"


def files(r: list[dict[str, Any]]) -> None:
    r[0]["open_files"] = 64


def gpus(r: list[dict[str, Any]]) -> None:
    r[0]["device_error"] = "there are 4 ranks on this machine, but 2 GPUs: start with ..."


def kernels(r: list[dict[str, Any]]) -> None:
    r[1]["kernels"] = r[2]["kernels"] = "none"


def no_kernels(r: list[dict[str, Any]]) -> None:
    for each in r:
        each |= {"kernels": "none", "kernels_missing": "they are stale", "kernels_fix": "build"}


def slow(r: list[dict[str, Any]]) -> None:
    r[1]["pairs"][1]["sent"] = 1e8


def gigabit(r: list[dict[str, Any]]) -> None:
    for each in r:
        for one in each["pairs"]:
            if one["sent"] and r[one["rank"]]["machine"] != each["machine"]:
                one["sent"] = one["received"] = 0.12e9


def emulated(r: list[dict[str, Any]]) -> None:
    r[0]["pairs"][0]["sent"] = 0.12e9


def far(r: list[dict[str, Any]]) -> None:
    r[0]["pairs"][1]["latency"] = 0.03


def clock(r: list[dict[str, Any]]) -> None:
    r[0]["pairs"][2]["clock"] = -7.2


def shared_memory(r: list[dict[str, Any]]) -> None:
    r[2]["shared_memory"] = 64 << 20


def threads(r: list[dict[str, Any]]) -> None:
    r[2]["threads"] = r[3]["threads"] = 4


WRONG = [
    (no_version, False, "torch differs: 2.13.0 on ranks 0-2; 2.12.1 on rank 3", "torch==2.13.0"),
    (other_graph, False, "different graphs: META.json is c0ffee on ranks 0, 2-3; decaf", "rsync"),
    (no_part, False, "part 2 of /data/graph: no rank can read it", "copy part-2"),
    (no_directory, False, "rank 2: GraphDirectoryError: it is not there", "copy /data/graph"),
    (no_way, False, "rank 0 cannot reach rank 2 at 10.0.0.2 (eth0 of node-1): No", "E=ib0"),
    (loopback, False, "rank 1 gives its address as 127.0.1.1", "INTERFACE=eth0"),
    (no_gloo, False, "rank 1: no collectives by gloo: refused", "GLOO_SOCKET_IFNAME"),
    (files, False, "rank 0 may open 64 files; 308 may be needed", "ulimit -n 65536"),
    (gpus, False, "4 ranks on this machine, but 2 GPUs", ""),
    (kernels, None, "compiled kernels are missing on ranks 1-2", "pyg-scale build"),
    (no_kernels, None, "no rank uses compiled kernels, which is slower: they are stale", "build"),
    (slow, None, "1 of 8 links between machines are over 4 times slower", "ethtool eth0"),
    (gigabit, None, "8 of 8 links between machines have less than 1 GB/s: rank 0 to 2", "ethtool"),
    (gigabit, None, "0.12 GB/s, at which the rows of 100,000 nodes with 128 floats take 0.43", ""),
    (emulated, None, "1 of 4 links on one machine have less than 1 GB/s: rank 0 to 1", "top   #"),
    (far, None, "1 of 8 round trips between machines take over 2 ms: rank 0 to 2 30 ms", "ping"),
    (clock, None, "the clock of rank 3 is -7.2 s ahead of rank 0's", "set-ntp true   # on node-1"),
    (shared_memory, None, "/dev/shm has 64 MiB on rank 2", "--shm-size"),
    (threads, None, "node-1: 2 ranks of 4 threads on 4 cores", ""),
]


@pytest.mark.parametrize(("spoil", "ok", "what", "fix"), WRONG, ids=[w[0].__name__ for w in WRONG])
def test_what_is_wrong_is_found_and_named(spoil: Any, ok: bool | None, what: str, fix: str) -> None:
    spoiled = ranks()
    spoil(spoiled)
    found = [f for f in diagnose(spoiled) if what in f.what]
    assert len(found) == 1, diagnose(spoiled)
    assert found[0].ok is ok and fix in found[0].fix
    others = [f for f in diagnose(spoiled) if f.ok is False and f not in found]
    assert not others or spoil in (no_directory, no_part), others


def test_a_slow_link_of_two_ranks_is_not_all_well() -> None:
    """Two machines have two ways, too few for a median."""
    two = [ranks()[0], ranks()[2]]
    two[0]["pairs"], two[1]["pairs"] = [pair(1, sent=1.2e8, received=1.2e8)], [pair(0)]
    for each in two:
        each["pairs"][0]["rank"], each["directory"] = 1 - two.index(each), None
    two[1]["pairs"][0] |= {"sent": None, "received": None}
    two[0]["interfaces"]["ib0"] = ["10.1.0.1"]
    (found,) = diagnose(two)
    assert found.ok is None and "2 of 2 links between machines" in found.what
    assert found.fix.startswith("export PYG_SCALE_INTERFACE=ib0")


def test_the_worst_comes_first() -> None:
    spoiled = ranks()
    for spoil in (clock, no_gloo, threads):
        spoil(spoiled)
    assert [f.ok for f in diagnose(spoiled)] == [False, None, None]
    assert name_ranks([4, 1, 0, 2]) == "ranks 0-2, 4" and name_ranks([3]) == "rank 3"


def test_the_report_is_a_matrix_up_to_16_ranks() -> None:
    said = {"launcher": "slurm", "findings": [], "ranks": ranks(), "rank": 0, "ok": True}
    text = report(said)
    assert "4 ranks on 2 machines, launcher slurm" in text and "all is well" in text
    assert "/data/graph: 4 parts" in text and text.count("1.00") == 12
    assert "   0       -    1.00    1.00    1.00" in text
    many = copy.deepcopy(said)
    many["ranks"] = ranks(18)
    assert "the slowest of 306 directions" in report(many)


@pytest.mark.parametrize("world_size", range(1, 9))
def test_rounds_hold_every_pair_once_and_no_rank_twice(world_size: int) -> None:
    plan = rounds(world_size)
    found = [each for one in plan for each in one]
    assert sorted(found) == [(a, b) for a in range(world_size) for b in range(a + 1, world_size)]
    for one in plan:
        assert len({rank for each in one for rank in each}) == 2 * len(one)
    assert len(plan) <= world_size


def test_pairs_are_measured() -> None:
    found = run_ranks(3, lambda g: measure_pairs(g.store, g.rank, g.world_size, 0.3))
    for rank, told in enumerate(found):
        assert {each["rank"] for each in told} == {0, 1, 2} - {rank}
        for each in told:
            assert each["error"] is None and 0 < each["latency"] < 10
            assert (
                (each["sent"] is not None) == (each["rank"] > rank) == (each["clock"] is not None)
            )
            if each["rank"] > rank:
                assert each["sent"] > 0 and each["received"] > 0 and abs(each["clock"]) < 10


def test_a_rank_that_takes_no_part_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "_CONNECT_SECONDS", 1.0)

    def two_of_three(group: Any) -> Any:
        if group.rank == 2:
            return None
        return measure_pairs(group.store, group.rank, group.world_size, 0.2)

    found = run_ranks(3, two_of_three)
    for rank in (0, 1):
        errors = {each["rank"]: each["error"] for each in found[rank]}
        assert errors[1 - rank] is None and "did not take part in time" in errors[2]


def test_one_process_is_told_to_start_more(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    status = main(["doctor", "--dist", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert status == (0 if found["ok"] else 1)
    assert found["world_size"] == 1 and found["ranks"][0]["versions"]["torch"] == torch.__version__
    monkeypatch.setenv("RANK", "0")
    assert main(["doctor", "--dist"]) == 1
    assert "but not WORLD_SIZE, MASTER_ADDR, MASTER_PORT" in capsys.readouterr().err


def test_under_torchrun(tmp_path: Path) -> None:
    data = graphs.hostile()
    pyg_scale.save(data, tmp_path / "graph")
    pyg_scale.partition(tmp_path / "graph", 2, "random", tmp_path / "parts")
    command = [preloaded.python(), "-m", "torch.distributed.run", "--standalone"]
    command.append("--nproc-per-node=2")
    done = subprocess.run(
        [*command, "-m", "pyg_scale.cli", "doctor", "--json", "--dist", str(tmp_path / "parts")],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "PYTHON_EXEC": preloaded.python(),
        },
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    found = json.loads(done.stdout)
    assert found["ok"] and found["world_size"] == 2 and found["launcher"] == "torchrun"
    for rank in found["ranks"]:
        assert rank["directory"]["parts"] == [0, 1] and rank["collective"] == ""
    assert found["ranks"][0]["pairs"][0]["sent"] > 1e6
