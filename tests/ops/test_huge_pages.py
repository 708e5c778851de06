"""Memory that a graph shares with its owner is moved to huge pages where that is possible."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from pyg_scale.ops import library

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


def test_private_memory_is_moved_and_keeps_its_content() -> None:
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not enabled.exists() or "[never]" in enabled.read_text():
        pytest.skip("the system has no transparent huge pages")
    tensor = torch.arange(SIZE // 4, dtype=torch.int32)
    before = mapping(tensor).get("AnonHugePages", 0)
    torch.ops.pyg_scale.prefer_huge_pages(tensor)
    assert torch.equal(tensor, torch.arange(SIZE // 4, dtype=torch.int32))
    after = mapping(tensor).get("AnonHugePages", 0)
    if after <= before:
        pytest.skip("the kernel cannot collapse pages on request (Linux 6.1)")
    assert after >= SIZE // 1024 - 4 * 2048


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
