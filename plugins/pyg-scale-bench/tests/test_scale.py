"""``pyg-scale bench scale``: every step runs, and what others left in the page cache is dropped."""

from __future__ import annotations

import ctypes
import json
import mmap
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pyg_scale.ops import library
from pyg_scale_bench import command, graphs, scale
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


GRAPH = {"nodes": 20_000, "edges": 100_000, "features": 8}


@pytest.mark.skipif(not library.status()["loaded"], reason="the kernels are not compiled")
def test_one_batch_of_two_hops(tmp_path: Path) -> None:
    path = str(tmp_path / "graph")
    next(graphs.converted(path, GRAPH))
    (found,) = scale.train(path, "1MB", 1, 0, [3, 2], 8)
    assert found["batches"] == 1 and found["batches_per_s"] > 0
    assert found["last_loss"] == found["first_loss"] > 1
    again = scale.train(path, "1MB", 1, 0, [3, 2, 2, 1], 8)
    assert next(again)["batches"] == 1


def test_more_batches_than_an_epoch_has_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["scale", "--nodes", "20000", "--edges", "1e5", "--dir", str(tmp_path)])
    assert ended.value.code == 2
    assert "220 nodes to train on are 1 batches" in capsys.readouterr().err


@pytest.mark.skipif(not library.status()["loaded"], reason="the kernels are not compiled")
def test_what_was_found_is_written_after_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(target: Callable[..., Iterator[Any]], options: dict[str, Any], group: Any) -> Any:
        if target is scale.train:
            raise KeyboardInterrupt
        return next(target(**options))

    monkeypatch.setattr(scale, "call", call)
    path, kept = tmp_path / "r.json", tmp_path / "d"
    sizes = [f"--{name}={value}" for name, value in GRAPH.items()]
    more = ["--batches=1", "--warmup=0", "--parts=1", "--memory=4e9", f"--json={path}"]
    for turn in (sizes, ["--reuse"]):
        with pytest.raises(KeyboardInterrupt):
            command.main(["scale", *turn, *more, f"--dir={kept}", "--keep"])
        found = json.loads(path.read_text())
        assert [step["name"] for step in found["steps"]] == (["convert"] if turn is sizes else [])
        assert found["settings"].items() >= GRAPH.items()  # those of the graph, if it is reused
        assert "20,000 nodes, 100,000" in scale.report(found).terminal()
    with pytest.raises(SystemExit, match="nodes to train on are 1 batches"):
        command.main(["scale", "--reuse", f"--dir={kept}"])


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
