"""``pyg-scale bench dist``: ranks find what the report says that they found."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from pyg_scale.cli import bench
from pyg_scale.cli.bench import dist_report
from pyg_scale.cli.bench.dist_steps import STAGES

SMALL = shlex.split("--quick --nodes 600 --edges 5000 --batches 3 --latency-batches 4 --latency 0")


@pytest.mark.slow
def test_the_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {name: tmp_path / "out" / f"r.{name}" for name in ("json", "png", "md")}
    args = ["--json", files["json"], "--png", files["png"], "--report", files["md"]]
    folder = tmp_path / "work"
    assert bench.main(["dist", *SMALL, "--dir", str(folder), *map(str, args)]) == 0
    assert not folder.exists()
    printed = capsys.readouterr().out
    found = json.loads(files["json"].read_text())
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    for rank in found["ranks"]:
        assert len(rank["bandwidth"]["tcp"]) == len(rank["bandwidth"]["features"]) == 1
        epochs = rank["caches"]
        assert {each["batches"] for each in epochs.values()} == {3}
        assert len({each["bytes"] for each in epochs.values()}) == 1, "the same batches"
        none, placed = epochs["none"]["fetch"], epochs["placed"]["fetch"]
        assert none["cache_bytes"] == 0
        assert none["remote_bytes"] + none["local_bytes"] == epochs["none"]["bytes"]
        assert placed["cache_hits"] > 0 and placed["remote_bytes"] < none["remote_bytes"]
        assert set(epochs["none"]["timeline"][0]) == {*STAGES, "end"}
        assert [each["batches"] for each in rank["in_flight"].values()] == [4, 4]
        assert rank["shared"]["batches"] == 6 and len(rank["shared"]["one"]) == 1
    report = files["md"].read_text()
    for text in (printed, report):
        assert "of plain sockets" in text and "bytes from other ranks" in text
    assert str(tmp_path / "work") not in report + files["json"].read_text()
    assert files["png"].stat().st_size > 5000


def test_the_numbers_of_a_report() -> None:
    def rank(tcp: list[float], ours: list[float], remote: int, seconds: float) -> dict[str, Any]:
        epoch = {"batches": 2, "fetch": {"remote_bytes": remote}}
        return {
            "bandwidth": {"tcp": tcp, "features": ours},
            "caches": {"none": epoch},
            "in_flight": {"1": {"seconds": 3 * seconds}, "4": {"seconds": seconds}},
            "shared": {"one": [9.0, 8.0], "ranks": [10.0, 10.0]},
        }

    ranks = [rank([4, 8], [1, 6], 30, 1), rank([4, 2], [3, 4], 10, 2)]
    found = {"settings": {"in_flight": 4}, "ranks": ranks}
    assert dist_report.share_of_tcp(found) == [0.5, 1.0]
    assert dist_report.remote_bytes(found, "none") == 10
    assert dist_report.gain_of_flight(found) == 3
    assert dist_report.share_of_one(found) == [0.9, 0.8]


def test_wrong_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong, message in (
        (["--ranks", "1"], "--ranks must be at least 2"),
        (["--cache", "0"], "--cache must be a share"),
        (["--in-flight", "0"], "--in-flight must be at least 1"),
    ):
        with pytest.raises(SystemExit):
            bench.main(["dist", "--dir", "x", *wrong])
        assert message in capsys.readouterr().err
