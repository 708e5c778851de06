"""Ranks on cores of machines that are made up."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pyg_scale.distributed.launch.binding import plan_binding
from pyg_scale.distributed.launch.cpu_topology import (
    cpu_quota,
    format_cpus,
    gpu_node,
    parse_cpus,
    read_topology,
)
from pyg_scale.distributed.launch.threads import are_apart, check, complaint, that_fit


def machine(
    root: Path, sockets: int, nodes_per_socket: int, cores_per_node: int, threads: int = 1
) -> Path:
    """A machine as Linux numbers one: second hardware threads come after all first ones."""
    cores = sockets * nodes_per_socket * cores_per_node
    for core in range(cores):
        siblings = ",".join(str(core + thread * cores) for thread in range(threads))
        for thread in range(threads):
            folder = root / "cpu" / f"cpu{core + thread * cores}" / "topology"
            folder.mkdir(parents=True)
            (folder / "thread_siblings_list").write_text(siblings + "\n")
            socket = core // (nodes_per_socket * cores_per_node)
            (folder / "physical_package_id").write_text(f"{socket}\n")
    for node in range(sockets * nodes_per_socket):
        first = range(node * cores_per_node, (node + 1) * cores_per_node)
        cpus = [core + thread * cores for core in first for thread in range(threads)]
        folder = root / "node" / f"node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(format_cpus(cpus) + "\n")
    return root


def plan(root: Path, allowed: str, ranks: int, mode: str = "exclusive", gpus=None) -> list[str]:
    topology = read_topology(parse_cpus(allowed), root)
    return [format_cpus(each.cpus) for each in plan_binding(topology, ranks, mode, gpus)]


def test_each_rank_has_cores_of_one_node(tmp_path: Path) -> None:
    root = machine(tmp_path, sockets=2, nodes_per_socket=1, cores_per_node=4, threads=2)
    assert plan(root, "0-15", 2) == ["0-3,8-11", "4-7,12-15"]
    assert plan(root, "0-15", 4) == ["0-1,8-9", "2-3,10-11", "4-5,12-13", "6-7,14-15"]
    assert plan(root, "0-15", 1) == ["0-15"]
    assert plan(root, "0-15", 3) == ["0-1,8-9", "2-3,10-11", "4-7,12-15"]
    assert plan(root, "0-15", 8)[7] == "7,15"


@pytest.mark.parametrize("ranks", range(1, 17))
def test_no_core_is_shared_or_left_out(tmp_path: Path, ranks: int) -> None:
    root = machine(tmp_path, sockets=2, nodes_per_socket=2, cores_per_node=4)
    topology = read_topology(range(16), root)
    found = plan_binding(topology, ranks)
    assert sorted(cpu for each in found for cpu in each.cpus) == list(range(16))
    sizes = [each.num_cores for each in found]
    assert ranks in (3, 5, 6, 7) or max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 1 and max(sizes) <= 2 * min(sizes)
    if ranks >= 4:
        assert all(len(each.nodes) == 1 for each in found)


def test_modes_that_share(tmp_path: Path) -> None:
    root = machine(tmp_path, sockets=2, nodes_per_socket=2, cores_per_node=2)
    assert plan(root, "0-7", 4, "node") == ["0-1", "2-3", "4-5", "6-7"]
    assert plan(root, "0-7", 8, "node") == ["0-1"] * 2 + ["2-3"] * 2 + ["4-5"] * 2 + ["6-7"] * 2
    assert plan(root, "0-7", 4, "socket") == ["0-3", "0-3", "4-7", "4-7"]
    assert plan(root, "0-7", 9, "node")[0] == "0-1"


def test_only_cpus_that_may_be_used(tmp_path: Path) -> None:
    root = machine(tmp_path, sockets=2, nodes_per_socket=1, cores_per_node=4, threads=2)
    # six cores, one of them with one thread only
    assert plan(root, "2-6,10-11,13", 2) == ["2-3,10-11", "4-6,13"]
    assert plan(root, "4-7", 2) == ["4-5", "6-7"]


def test_ranks_go_where_their_gpus_are(tmp_path: Path) -> None:
    root = machine(tmp_path, sockets=2, nodes_per_socket=1, cores_per_node=4)
    assert plan(root, "0-7", 3, gpus=[1, 1, 0]) == ["4-5", "6-7", "0-3"]
    assert plan(root, "0-7", 2, "node", gpus=[1, 1]) == ["4-7", "4-7"]
    assert plan(root, "0-7", 2, gpus=[None, 1]) == ["0-3", "4-7"]
    assert plan(root, "0-3", 2, gpus=[1, 1]) == ["0-1", "2-3"]  # node 1 is not ours
    with pytest.raises(ValueError, match="5 ranks are on a NUMA node with 4 cores"):
        plan(root, "0-7", 5, gpus=[0] * 5)


def test_more_ranks_than_cores(tmp_path: Path) -> None:
    root = machine(tmp_path, sockets=1, nodes_per_socket=1, cores_per_node=2, threads=2)
    with pytest.raises(ValueError, match="start 2 ranks or fewer, or use mode 'node'"):
        plan(root, "0-3", 3)
    with pytest.raises(ValueError, match="mode must be one of"):
        plan(root, "0-3", 2, "numa")
    with pytest.raises(ValueError, match="not allowed to use any CPU"):
        read_topology([], root)


def test_a_system_that_says_nothing_has_one_node(tmp_path: Path) -> None:
    assert plan(tmp_path, "0-3", 2) == ["0-1", "2-3"]
    assert gpu_node("0000:01:00.0", tmp_path) is None
    (tmp_path / "0000:01:00.0").mkdir()
    for text, node in (("1\n", 1), ("-1\n", None)):
        (tmp_path / "0000:01:00.0" / "numa_node").write_text(text)
        assert gpu_node("0000:01:00.0", tmp_path) == node


def test_lists_of_cpus() -> None:
    assert parse_cpus("0-3,8\n") == {0, 1, 2, 3, 8} and parse_cpus("\n") == set()
    assert format_cpus({8, 0, 1, 2, 3}) == "0-3,8" and format_cpus([]) == ""
    with pytest.raises(ValueError, match="not a list of CPUs"):
        parse_cpus("0..3")


def test_the_limit_of_a_container(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) is None
    for text, quota in (("max 100000\n", None), ("250000 100000\n", 2.5)):
        (tmp_path / "cpu.max").write_text(text)
        assert cpu_quota(tmp_path) == quota


def test_threads_beyond_the_cores_are_told_the_number_that_fits() -> None:
    assert complaint([4, 4], 8) is None
    said = complaint([8, 8, 8, 8], 8)
    assert said is not None and "4 ranks of 8 threads on 8 cores" in said
    assert "OMP_NUM_THREADS=2 fits" in said
    said = complaint([1] * 5, 4)
    assert said is not None and "5 ranks share 4 cores: start at most 4" in said
    said = complaint([4, 4], 8, quota=2.5)
    assert said is not None and "2 cores (of 8, limited by the container)" in said
    assert "OMP_NUM_THREADS=1" in said
    assert "a rank of 16 threads on 2 cores" in str(complaint([16], 2))
    assert [that_fit(8, n) for n in (1, 2, 3, 8, 9)] == [8, 4, 2, 1, 1]


def test_ranks_that_a_launcher_bound_already() -> None:
    assert are_apart([frozenset({0}), frozenset({1, 2})])
    assert not are_apart([frozenset({0, 1}), frozenset({1, 2})])
    assert not are_apart([frozenset({0})])


def test_numbers_of_threads_are_checked() -> None:
    for good in (None, "fit", 1):
        check(good)
    for bad in (0, -1, True, "all", 1.5):
        with pytest.raises(ValueError, match="num_threads must be"):
            check(bad)  # type: ignore[arg-type]


@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="needs two CPUs to bind to",
)
def test_all_threads_of_a_process_are_bound() -> None:
    code = """
import os, threading, time
cpus = sorted(os.sched_getaffinity(0))
other = threading.Thread(target=time.sleep, args=(60,), daemon=True)
placed = threading.Thread(target=lambda: (os.sched_setaffinity(0, cpus[:1]), time.sleep(60)),
                          daemon=True)
other.start(), placed.start()
time.sleep(0.1)
from pyg_scale.distributed import bind
found = bind(1, 2)
assert os.sched_getaffinity(0) == found.cpus != set(cpus), found
assert os.sched_getaffinity(other.native_id) == found.cpus
assert os.sched_getaffinity(placed.native_id) == set(cpus[:1])
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
