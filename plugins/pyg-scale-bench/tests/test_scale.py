"""``pyg-scale bench scale``: every step runs, and what others left in the page cache is dropped."""

from __future__ import annotations

import ctypes
import json
import mmap
import shlex
import subprocess
from pathlib import Path

import pytest
import torch

from pyg_scale.ops import library
from pyg_scale_bench import command
from pyg_scale_bench.memory import evict

SMALL = shlex.split(
    "--nodes 400000 --edges 800000 --features 16 --parts 3 --batches 3 --warmup 1 "
    "--num-neighbors 4,3,2 --hidden 8 --limit 4e9 --memory "
    # The libraries of a torch that is built for CUDA take 850 MB before anything is done.
    + ("500e6" if torch.version.cuda is None else "1e9")
)


@pytest.mark.slow
@pytest.mark.skipif(not library.status()["loaded"], reason="the kernels are not compiled")
def test_the_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {name: tmp_path / "out" / f"r.{name}" for name in ("json", "png", "md")}
    args = ["--json", files["json"], "--png", files["png"], "--report", files["md"]]
    folder = tmp_path / "work"
    assert command.main(["scale", *SMALL, "--dir", str(folder), *map(str, args)]) == 0
    assert not folder.exists()
    found = json.loads(files["json"].read_text())
    convert, partition, train = found["steps"]
    assert [step["name"] for step in found["steps"]] == ["convert", "partition", "train"]
    assert 400_000 * (16 * 2 + 8) < found["file_bytes"] < 40_000_000
    assert 0 < partition["result"]["cut"] < 1 <= partition["result"]["balance"] <= 1.1
    assert train["result"]["batches"] == 3
    x = train["result"]["store"]["tensors"]["x"]
    assert x["hits"] > 0 and x["misses"] > 0
    if found["limited"]:
        assert all(0 < step["peak_with_page_cache"] <= 4e9 for step in (convert, partition, train))
    printed, report = capsys.readouterr().out, files["md"].read_text()
    for text in (printed, report):
        assert "400,000 nodes, 800,000 directed edges" in text and "rows of features" in text
        assert ("NOT ENFORCED" in text) is not found["limited"]
    assert str(folder) not in report + files["json"].read_text()
    assert files["png"].stat().st_size > 5000


def test_what_the_disk_cannot_hold_is_refused_and_nothing_is_deleted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "kept"
    kept.write_text("something")
    with pytest.raises(SystemExit):
        command.main(["scale", "--edges", "1e15", "--dir", str(tmp_path)])
    assert "are needed in --dir" in capsys.readouterr().err
    assert kept.exists()


def _in_memory(file: Path) -> int:
    """How many pages of a file the page cache has."""
    libc = ctypes.CDLL(None, use_errno=True)
    size = file.stat().st_size
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), size) as mapped:
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), pages) == 0
        return sum(page & 1 for page in pages)


def test_files_are_dropped_from_the_page_cache(tmp_path: Path) -> None:
    kind = subprocess.run(
        ["stat", "--file-system", "--format=%T", tmp_path], capture_output=True, text=True
    ).stdout.strip()
    if kind in ("tmpfs", "ramfs"):
        pytest.skip("files are in memory here")
    file = tmp_path / "inner" / "file"
    file.parent.mkdir()
    file.write_bytes(bytes(64 * mmap.PAGESIZE))
    assert _in_memory(file) == 64
    evict(tmp_path)
    assert _in_memory(file) == 0
