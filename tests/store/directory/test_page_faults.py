"""Mapped in-edges that are larger than memory: what is read is what is asked for."""

import re
from pathlib import Path

import pytest
import torch

import pyg_scale
from pyg_scale.loader import NeighborLoader
from pyg_scale.ops import library
from pyg_scale.sampler import native
from pyg_scale.sampler.parts import parts_topology
from pyg_scale.store.directory import GraphDirectory, page_faults
from pyg_scale.store.directory.page_faults import usable_memory
from pyg_scale.testing import graphs
from tests.loader.batches import assert_same_batches


def advised(address: int) -> bool:
    """Whether the mapping that holds an address is marked for random reads, as Linux says."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        found = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if found:
            begin, end = (int(each, 16) for each in found.groups())
            inside = begin <= address < end
        elif inside and line.startswith("VmFlags:"):
            return "rr" in line.split()
    return False


@pytest.fixture
def seen(monkeypatch):
    """The tensors for which advice was given."""
    found, advise = [], page_faults.no_readahead
    monkeypatch.setattr(
        page_faults, "no_readahead", lambda tensor: (advise(tensor), found.append(tensor))
    )
    return found


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the system has no smaps")
@pytest.mark.parametrize("tight", [True, False])
def test_random_reads_are_advised_where_memory_is_tight(tmp_path, monkeypatch, seen, tight):
    data = graphs.hostile()
    pyg_scale.save(data, tmp_path / "graph")
    pyg_scale.partition(tmp_path / "graph", 2, "random", path=tmp_path / "parts")
    monkeypatch.setattr(page_faults, "usable_memory", lambda: 1 if tight else 1 << 60)
    waits, sample = [], native.neighbor_sample
    monkeypatch.setattr(
        native,
        "neighbor_sample",
        lambda graph, *rest, **more: (waits.append(graph.waits), sample(graph, *rest, **more))[1],
    )
    graph = pyg_scale.open(tmp_path / "graph")
    options = {"num_neighbors": [4, 3], "batch_size": 7, "seed": 1}
    assert_same_batches(NeighborLoader(data, **options), NeighborLoader(graph, **options))
    assert len(seen) == (3 if tight else 0)
    if library.compiled():
        assert set(waits) == ({False, True} if tight else {False})
    parts = parts_topology(GraphDirectory(tmp_path / "parts"))
    assert parts.router is not None and parts.router.parts_here() is not None
    assert len(seen) == (9 if tight else 0)
    assert all(advised(each.data_ptr()) for each in seen)


def test_what_a_process_may_use(tmp_path):
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    assert usable_memory(proc, groups) == 1 << 60  # nothing is known
    (proc / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    7000 kB\n")
    assert usable_memory(proc, groups) == 7_168_000
    (proc / "self" / "cgroup").write_text("4:memory:/a/b\n3:cpu,cpuacct:/a\n0::/job/step\n")
    for folder, name, text in (
        ("memory/a/b", "memory.limit_in_bytes", "9223372036854771712"),
        ("memory/a", "memory.limit_in_bytes", "6000000"),
        ("job/step", "memory.max", "max"),
        ("job", "memory.max", "5000000"),
    ):
        (groups / folder).mkdir(parents=True, exist_ok=True)
        (groups / folder / name).write_text(text + "\n")
    assert usable_memory(proc, groups) == 5_000_000
    (groups / "job" / "memory.max").write_text("max\n")
    assert usable_memory(proc, groups) == 6_000_000


def test_nothing_of_this_changes_values():
    some = torch.arange(5000)
    page_faults.no_readahead(some)
    assert torch.equal(some, torch.arange(5000))
