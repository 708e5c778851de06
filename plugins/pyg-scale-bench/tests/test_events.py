"""``pyg-scale bench events``: every way reads the stream, and the report says how fast."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pyg_scale.ops import library
from pyg_scale_bench import command, events


@pytest.mark.skipif(not library.status()["loaded"], reason="the kernels are not compiled")
def test_the_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {name: tmp_path / "out" / f"r.{name}" for name in ("json", "png", "md")}
    args = ["--json", files["json"], "--png", files["png"], "--report", files["md"]]
    assert command.main(["events", "--quick", "--workers", "0,1", *map(str, args)]) == 0
    printed = capsys.readouterr().out
    rounds = json.loads(files["json"].read_text())["rounds"]
    assert list(rounds) == [
        "pyg", "buffer", "one-hop, 0 workers", "one-hop, 1 workers",
        "two-hops, 0 workers", "two-hops, 1 workers",
    ]  # fmt: skip
    edges = {name: result[0]["edges"] for name, result in rounds.items()}
    assert edges["one-hop, 0 workers"] == edges["one-hop, 1 workers"]
    assert edges["two-hops, 0 workers"] == edges["two-hops, 1 workers"]
    assert edges["two-hops, 0 workers"] > edges["one-hop, 0 workers"] > 2_000
    assert edges["buffer"] > 2_000
    for text in (printed, files["md"].read_text()):
        assert "NeighborLoader, two hops, 1 worker" in text
    assert files["png"].stat().st_size > 5000


def test_the_numbers_of_a_report() -> None:
    def case(*seconds: float) -> list[dict[str, float]]:
        return [{"seconds": each, "cpu": 2 * each, "edges": 7.0} for each in seconds]

    found: dict[str, Any] = {"rounds": {"pyg": case(2, 4, 8), "buffer": case(1, 1, 4)}}
    assert events.of_pyg(found, "buffer") == 0.5
    assert events.middle_of(found, "buffer", "cpu") == 2
    assert events.label("one-hop, 2 workers") == "NeighborLoader, one hop, 2 workers"
