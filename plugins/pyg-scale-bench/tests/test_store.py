"""``pyg-scale bench store``: both sides train on the same batches, and the report says what was."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from pyg_scale.ops import library
from pyg_scale_bench import command, graphs, store

SMALL = shlex.split(
    "--nodes 2000 --edges 20000 --features 8 --batches 3 --batch-size 32 --num-neighbors 5,3,2 "
    "--hidden 8 --warmup 1 --rounds 1 --limit 4e9"
)


@pytest.mark.slow
@pytest.mark.skipif(not library.status()["loaded"], reason="the kernels are not compiled")
def test_the_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {name: tmp_path / "out" / f"r.{name}" for name in ("json", "png", "md")}
    args = ["--json", files["json"], "--png", files["png"], "--report", files["md"]]
    folder = tmp_path / "work"
    assert command.main(["store", *SMALL, "--dir", str(folder), *map(str, args)]) == 0
    assert not folder.exists()
    printed = capsys.readouterr().out
    found = json.loads(files["json"].read_text())
    for memory, disk in zip(found["memory"], found["disk"], strict=True):
        assert memory["batches"] == disk["batches"] == 3
        assert memory["nodes"] == disk["nodes"]
        assert memory["loss"] == pytest.approx(disk["loss"], rel=1e-3)
        assert disk["hits"] + disk["misses"] == disk["nodes"]
        assert disk["misses"] > 0 and disk["read_bytes"] > 0
    assert found["cache_bytes"] == int(0.15 * found["feature_bytes"])
    report = files["md"].read_text()
    for text in (printed, report):
        assert "times one in memory" in text
        assert ("NOT ENFORCED" in text) is not found["limited"]
    assert str(tmp_path / "work") not in report + files["json"].read_text()
    assert files["png"].stat().st_size > 5000


def found_of(seconds: list[tuple[float, float]], **extra: Any) -> dict[str, Any]:
    """What a run might find, with seconds of each epoch in memory and on disk."""
    stages = {name: {"seconds": 1.0} for name in ("sample", "fetch", "wait")}
    common = {
        "first_batch": 0.1,
        "batches": 2,
        "nodes": 100,
        "loss": 1.0,
        "stages": stages,
        "resident": 10**9,
    }
    common["load_average"] = 1.0
    counts = {"hits": 60, "misses": 40, "reads": 5, "read_bytes": 10**9, "index_bytes": 10**6}
    counts |= {"late": 0, "evictions": 0}
    return {
        "benchmark": "store",
        "command": "pyg-scale bench store --dir DIR",
        "settings": {
            "nodes": 10, "edges": 20, "features": 4, "dtype": "float32", "cache": 0.15,
            "policy": "belady", "hidden": 8, "batches": 2, "batch_size": 4,
            "num_neighbors": [2], "workers": 2, "trim": False,
        },
        "environment": {
            "quiet": True, "cpu": "a", "cpus": 2, "threads": 2,
            "memory_bytes": 2**30, "system": "s",
            "load_average_before": 0.1, "load_average_after": 2.0, "versions": {"torch": "2"},
            "commit": "c", "date": "d", "kernels": {"path": "k.so", "reason": ""},
        },
        "file_bytes": 2 * 10**9, "cache_bytes": 10**8, "read_ahead_bytes": 10**8,
        "limit_bytes": 10**9, "limited": True,
        "peak_with_page_cache": 9 * 10**8,
        "memory": [{**common, "seconds": m, "warmup": i == 0} for i, (m, _) in enumerate(seconds)],
        "disk": [
            {**common, **counts, "seconds": d, "warmup": i == 0, "direct": True}
            for i, (_, d) in enumerate(seconds)
        ],
        **extra,
    }  # fmt: skip


def test_the_ratio_is_the_median_of_rounds_after_the_warm_up() -> None:
    found = found_of([(1.0, 9.0), (2.0, 2.2), (2.0, 2.6), (1.0, 1.2)])
    assert store.ratios(found) == pytest.approx([1.1, 1.3, 1.2])
    text = store.report(found).terminal()
    assert "takes 1.20 times one in memory (rounds: 1.10, 1.30, 1.20)" in text
    assert "60% of the rows were in it" in text and "past the page cache" in text


@pytest.mark.skipif(not library.status()["loaded"], reason="the kernels are not compiled")
def test_layers_are_as_many_as_hops_and_sizes_those_of_the_graph(tmp_path: Path) -> None:
    sizes = {"nodes": 2_000, "edges": 20_000, "features": 8, "dtype": "float16"}
    next(graphs.converted(str(tmp_path / "graph"), {**sizes, "classes": 47}))
    common = {"policy": "belady", "batches": 2, "batch_size": 32, "hidden": 8}
    common |= {"workers": 0, "prefetch": 1, "trim": True, "num_neighbors": [3, 2]}
    side = store.epochs(str(tmp_path / "graph"), 0, 0, **common)
    next(side)
    assert next(side)["batches"] == 2
    side.close()
    asked: dict[str, Any] = dict.fromkeys(sizes, 7)
    for reuse, expected in ((False, asked), (True, sizes)):
        args, found = (
            argparse.Namespace(**asked, reuse=reuse, dir=tmp_path),
            {"settings": {**asked}},
        )
        assert graphs.reused(args, found) is reuse
        assert found["settings"] == expected
        assert {name: getattr(args, name) for name in sizes} == expected


def test_what_was_not_so_is_said() -> None:
    found = found_of([(1.0, 1.0), (1.0, 1.0)], limited=False, why_not="no root")
    found["disk"][-1]["direct"] = False
    found["environment"]["quiet"] = False
    text = store.report(found).terminal()
    for said in ("NOT ENFORCED: no root", "THROUGH THE PAGE CACHE", "NOT QUIET"):
        assert said in text


@pytest.mark.parametrize(
    "wrong",
    [
        *(["--cache", "0"], ["--batches", "0"], ["--cache", "1.5"]),
        *(["--policy", "nonsense"], ["--warmup", "-1"]),
    ],
)
def test_wrong_arguments(wrong: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as end:
        command.main(["store", "--dir", str(tmp_path), *wrong])
    assert end.value.code == 2
