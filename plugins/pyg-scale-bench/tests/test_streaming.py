"""``pyg-scale bench streaming``: every number is there, and the page of an earlier run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pyg_scale.ops import library
from pyg_scale_bench import command, streaming

needs_kernels = pytest.mark.skipif(
    not library.status()["loaded"], reason="the kernels are not compiled"
)


@pytest.mark.slow
@needs_kernels
def test_the_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {name: tmp_path / "out" / f"r.{name}" for name in ("json", "png", "md")}
    args = ["--json", files["json"], "--png", files["png"], "--report", files["md"]]
    folder = tmp_path / "work"
    assert command.main(["streaming", "--quick", "--dir", str(folder), *map(str, args)]) == 0
    assert not folder.exists()
    (found,) = json.loads(files["json"].read_text())["rounds"]
    assert all(found[name] > 0 for name in streaming._ROWS if name != "bulk_during_compaction")
    assert "edges appended in bulk, per second" in capsys.readouterr().out
    assert "pyg-scale bench streaming" in files["md"].read_text()
    assert str(folder) not in files["md"].read_text() + files["json"].read_text()
    assert files["png"].stat().st_size > 5000


@needs_kernels
def test_both_sides_are_the_same_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sides: list[list[tuple[list[int], int]]] = []

    def drain(loader: Any) -> None:
        sides.append([(b.n_id[: b.batch_size].tolist(), b.num_edges) for b in loader])

    monkeypatch.setattr(streaming, "_drain", drain)
    sizes = "--nodes 2000 --edges 20000 --features 4 --bulk 100 --updates 100 --batch-size 32"
    options = ["--batches", "2", "--repeats", "2", *sizes.split(), "--dir", str(tmp_path / "work")]
    assert command.main(["streaming", "--quick", *options]) == 0
    assert len(sides) == 8 and all(a == b for a, b in zip(sides[::2], sides[1::2]))
    assert sides[0] != sides[4], "another round has other seeds"
