"""Reading a mapped tensor piece by piece, from its file where the file has the same."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pyg_scale.loader.seeds.sharding import fingerprint
from pyg_scale.ops import mapped_file
from pyg_scale.ops.mapped_file import in_file, pieces


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(mapped_file, "_AT_ONCE", 4096)
    path = tmp_path / "a folder" / "values.npy"
    path.parent.mkdir()
    np.save(path, np.arange(20_000).reshape(2, 10_000))
    return path


def read(tensor: Tensor, *arguments: Any) -> list[int]:
    found = []
    for piece in pieces(tensor, *arguments):
        assert piece.nbytes <= 4096
        found += piece.tolist()
    return found


@pytest.mark.parametrize("mode", ["c", "r+"])
def test_what_is_mapped_is_read_from_the_file(
    file: Path, mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = torch.from_numpy(np.load(file, mmap_mode=mode))
    assert in_file(whole) and in_file(whole[1])
    before = fingerprint([whole[1]])
    assert before == fingerprint([torch.arange(10_000, 20_000)])
    asked: list[int] = []
    preadv = mapped_file.os.preadv

    def short(file: int, views: list[memoryview], at: int) -> int:
        asked.append(at)
        return preadv(file, [views[0][:1000]], at)

    monkeypatch.setattr(mapped_file.os, "preadv", short)
    assert read(whole[1]) == list(range(10_000, 20_000))
    assert len(asked) > 80 and asked == sorted(asked)
    asked.clear()
    assert read(whole[:, ::3]) == whole[:, ::3].flatten().tolist() and not asked
    whole[1, 7] = -1  # with "c" the file has it not
    assert read(whole[1])[:8] == [*range(10_000, 10_007), -1]
    assert bool(asked) == (mode == "r+")


def test_what_is_not_there_any_more_is_read_from_memory(file: Path, tmp_path: Path) -> None:
    whole = torch.from_numpy(np.load(file, mmap_mode="c"))
    np.save(file.with_name("other.npy"), np.zeros((2, 10_000), np.int64))
    file.with_name("other.npy").rename(file)
    assert read(whole[0]) == list(range(10_000))
    file.unlink()
    assert read(whole[0]) == list(range(10_000))
    assert read(whole[0], tmp_path / "no such system") == list(range(10_000))


def test_other_memory(file: Path) -> None:
    assert read(torch.arange(3000)) == list(range(3000))
    assert read(torch.arange(10)[::3]) == [0, 3, 6, 9] and read(torch.arange(0)) == []
    with mmap.mmap(-1, 8000) as shared:
        tensor = torch.frombuffer(shared, dtype=torch.int64)
        assert read(tensor) == [0] * 1000
        del tensor


def test_a_file_that_became_shorter_is_an_error(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = torch.from_numpy(np.load(file, mmap_mode="c"))
    monkeypatch.setattr(mapped_file.os, "preadv", lambda *_: 0)
    with pytest.raises(OSError, match=r"values\.npy has become shorter"):
        read(whole)
