"""Memory of graphs and features is moved to huge pages, where it lies, if that is possible."""

from __future__ import annotations

import mmap
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_geometric.data import Data, HeteroData

from pyg_scale.loader import ClusterData, ClusterLoader, GraphSAINTNodeSampler, NeighborLoader
from pyg_scale.ops import library
from pyg_scale.store import MemoryFeatureStore

pytestmark = pytest.mark.skipif(
    not library.status()["loaded"], reason="the kernels are not compiled"
)
SIZE = 32 << 20


def mapping(tensor: torch.Tensor) -> dict[str, int]:
    """KiB by name, of the mapping that holds the middle of a tensor."""
    smaps, at = Path("/proc/self/smaps"), tensor.data_ptr() + tensor.nbytes // 2
    if not smaps.exists():
        pytest.skip("the system does not say which pages a mapping has")
    found: dict[str, int] = {}
    inside = False
    for line in smaps.read_text().splitlines():
        if head := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(head[1], 16) <= at < int(head[2], 16)
        elif inside and (value := re.match(r"(\w+): +(\d+) kB", line)):
            found[value[1]] = int(value[2])
    return found


def in_huge_pages(tensor: torch.Tensor) -> int:
    return mapping(tensor).get("AnonHugePages", 0)


def in_small_pages(size: int) -> torch.Tensor:
    """Bytes `[size]` that are all 1, whatever the system and the allocator have huge pages for."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).fill_(1)


@pytest.fixture
def moves() -> None:
    """Skip where the kernel does not move pages on request."""
    if not hasattr(mmap, "MADV_NOHUGEPAGE"):
        pytest.skip("the system has no huge pages")
    tensor = in_small_pages(SIZE)
    before = in_huge_pages(tensor)
    torch.ops.pyg_scale.prefer_huge_pages(tensor)
    if in_huge_pages(tensor) <= before:
        pytest.skip("the system has no huge pages, or does not collapse on request (Linux 6.1)")


@pytest.mark.usefixtures("moves")
def test_private_memory_is_moved_and_keeps_its_content() -> None:
    tensor = torch.arange(SIZE // 4, dtype=torch.int32)
    torch.ops.pyg_scale.prefer_huge_pages(tensor)
    assert torch.equal(tensor, torch.arange(SIZE // 4, dtype=torch.int32))
    assert in_huge_pages(tensor) >= SIZE // 1024 - 4 * 2048


@pytest.mark.usefixtures("moves")
def test_memory_that_a_forked_process_has_too_is_left_alone() -> None:
    tensor = in_small_pages(SIZE)
    assert in_huge_pages(tensor) == 0
    ends, waits = os.pipe()
    child = os.fork()
    if child == 0:  # waits until its parent closes the pipe, and has all pages meanwhile
        os.close(waits)
        os.read(ends, 1)
        os._exit(0)
    try:
        torch.ops.pyg_scale.prefer_huge_pages(tensor)
        assert in_huge_pages(tensor) == 0
    finally:
        os.close(waits)
        os.close(ends)
        os.waitpid(child, 0)
    torch.ops.pyg_scale.prefer_huge_pages(tensor)
    assert in_huge_pages(tensor) >= SIZE // 1024 - 4 * 2048


def test_memory_that_was_never_touched_is_not_allocated() -> None:
    tensor = torch.empty(4 * SIZE, dtype=torch.uint8)
    before = mapping(tensor)["Rss"]
    torch.ops.pyg_scale.prefer_huge_pages(tensor)
    assert mapping(tensor)["Rss"] <= before + 2048


@pytest.mark.usefixtures("moves")
@pytest.mark.parametrize("kind", ["data", "hetero", "store", "saint", "cluster"])
def test_large_features_of_a_loader_are_moved(kind: str) -> None:
    x = in_small_pages(80 << 20).view(torch.int32).view(-1, 80)
    edge_index = torch.tensor([[0, 1], [1, 0]])
    if kind == "hetero":
        hetero = HeteroData({"v": {"x": x}, ("v", "to", "v"): {"edge_index": edge_index}})
        NeighborLoader(hetero, [2], input_nodes="v")
    elif kind == "store":
        MemoryFeatureStore().put_tensor(x, group_name=None, attr_name="x", index=None)
    elif kind == "cluster":
        clusters = ClusterData(Data(x=x, edge_index=edge_index), 2, log=False, method="random")
        ClusterLoader(clusters)
        x = clusters.data.x
    else:
        data = Data(x=x, edge_index=edge_index)
        _ = NeighborLoader(data, [2]) if kind == "data" else GraphSAINTNodeSampler(data, 2)
    assert in_huge_pages(x) >= x.nbytes // 2048
    assert bool((x.view(torch.uint8) == 1).all())


def test_a_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    np.save(path, np.zeros(SIZE // 4, np.int32))
    tensor = torch.from_numpy(np.load(path, mmap_mode="c"))
    before = mapping(tensor)
    torch.ops.pyg_scale.prefer_huge_pages(tensor)
    assert mapping(tensor)["Rss"] == before["Rss"], "the file was read"


def test_what_has_no_huge_page_is_left_alone() -> None:
    for tensor in (torch.empty(0), torch.ones(5), torch.ones(SIZE // 8, 2)[:, 0]):
        torch.ops.pyg_scale.prefer_huge_pages(tensor)
