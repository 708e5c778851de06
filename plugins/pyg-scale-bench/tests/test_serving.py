"""``pyg-scale bench serving``: every way answers, and latencies count from the due moment."""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path

import pytest
import torch

from pyg_scale.ops import library
from pyg_scale_bench import command, serving

needs_kernels = pytest.mark.skipif(
    not library.status()["loaded"], reason="the kernels are not compiled"
)


@pytest.mark.slow
@needs_kernels
def test_the_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {name: tmp_path / "out" / f"r.{name}" for name in ("json", "png", "md")}
    args = ["--json", files["json"], "--png", files["png"], "--report", files["md"]]
    folder = tmp_path / "work"
    assert command.main(["serving", "--quick", "--dir", str(folder), *map(str, args)]) == 0
    assert not folder.exists()
    found = json.loads(files["json"].read_text())
    expected = {"memory", "disk", "http", "loop"} - set(found["missing"])
    assert set(found["rounds"]) == expected
    assert ("http" in found["missing"]) == (importlib.util.find_spec("pyg_scale_http") is None)
    for (result,) in found["rounds"].values():
        assert 0 < result["p50"] <= result["p90"] <= result["p99"] <= result["max"]
        assert result["capacity"] > 0
        assert result["per_core"] > 0
    assert "in this process, from memory" in capsys.readouterr().out
    assert str(folder) not in files["md"].read_text() + files["json"].read_text()
    assert files["png"].stat().st_size > 5000


def test_a_request_that_is_late_counts_from_when_it_was_due() -> None:
    class Slow:
        def submit(self, ids: list[int]) -> object:
            time.sleep(0.03)  # so that the third request is sent 0.06 s late
            future: torch.futures.Future = torch.futures.Future()
            future.set_result(None)
            future.result = future.value  # type: ignore[attr-defined]
            return future

    found = serving.InProcess(Slow()).run([1, 2, 3], [0.0, 0.0, 0.0])  # type: ignore[arg-type]
    assert found[2] >= 0.09
    assert found == sorted(found)
