"""``pyg-scale bench recording``: epochs take turns, and the report says what recording costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pyg_scale.ops import library
from pyg_scale_bench import command, recording


@pytest.mark.skipif(not library.status()["loaded"], reason="the kernels are not compiled")
def test_the_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {name: tmp_path / "out" / f"r.{name}" for name in ("json", "png", "md")}
    args = ["--json", files["json"], "--png", files["png"], "--report", files["md"]]
    assert command.main(["recording", "--quick", "--batch-sizes", "8,32", *map(str, args)]) == 0
    found = json.loads(files["json"].read_text())
    assert list(found["cases"]) == ["8", "32"] and found["alone"] > 0
    for case in found["cases"].values():
        # The order of a pair is turned round, as what runs first may be slower.
        assert [list(pair) for pair in case["pairs"]] == [
            ["plain", "recorded"], ["recorded", "plain"],
        ]  # fmt: skip
        assert all(seconds > 0 for pair in case["pairs"] for seconds in pair["plain"].values())
        assert 200 < case["bytes_of_a_step"] < 4000, "each step is a line"
    for text in (capsys.readouterr().out, files["md"].read_text()):
        assert "2 pairs of epochs of 3 steps" in text
    assert files["png"].stat().st_size > 5000


def test_the_numbers_of_a_report() -> None:
    def pair(plain: float, recorded: float) -> dict[str, dict[str, float]]:
        return {"plain": {"cpu": plain}, "recorded": {"cpu": recorded}}

    case: dict[str, Any] = {"pairs": [pair(1, 1.5), pair(2, 2.2), pair(4, 4)]}
    assert recording.costs(case, "cpu") == pytest.approx((5, 10, 30))
