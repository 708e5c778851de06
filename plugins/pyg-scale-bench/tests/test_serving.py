"""``pyg-scale bench serving``: every way answers, and latencies count from the due moment."""

from __future__ import annotations

import importlib.util
import json
import os
import time
import weakref
from concurrent.futures import Future
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
    expected = {"memory", "disk", "http", "loop", "wake"} - set(found["missing"])
    assert set(found["rounds"]) == expected
    assert ("http" in found["missing"]) == (importlib.util.find_spec("pyg_scale_http") is None)
    for name, (result,) in found["rounds"].items():
        assert 0 < result["p50"] <= result["p90"] <= result["p99"] <= result["max"]
        if name == "wake":
            assert result["rate"] == max(r[0].get("rate", 0) for r in found["rounds"].values())
            continue
        assert result["capacity"] > 0
        assert result["per_core"] > 0
    assert "in this process, from memory" in capsys.readouterr().out
    assert str(folder) not in files["md"].read_text() + files["json"].read_text()
    assert files["png"].stat().st_size > 5000


class Slow:
    """Answers at once, and takes long to take a request."""

    def __init__(self) -> None:
        self.made: list[weakref.ref[Future[torch.Tensor]]] = []
        self.most = 0

    def submit(self, ids: list[int]) -> Future[torch.Tensor]:
        time.sleep(0.03)  # so that the third request is sent 0.06 s late
        self.most = max(self.most, sum(each() is not None for each in self.made))
        future: Future[torch.Tensor] = Future()
        self.made.append(weakref.ref(future))
        if ids == [7]:
            future.set_exception(RuntimeError("seven"))
        else:
            future.set_result(torch.zeros(1))
        return future


def test_a_request_that_is_late_counts_from_when_it_was_due() -> None:
    found = serving.InProcess(Slow()).run([1, 2, 3], [0.0, 0.0, 0.0])  # type: ignore[arg-type]
    assert found[2] >= 0.09
    assert found == sorted(found)


def test_no_answer_is_kept_for_the_collector_of_garbage() -> None:
    slow = Slow()
    serving.InProcess(slow).run(range(6), [0.0] * 6)  # type: ignore[arg-type]
    assert slow.most <= 1


def test_a_request_that_fails_ends_the_run() -> None:
    with pytest.raises(RuntimeError, match="seven"):
        serving.InProcess(Slow()).run([6, 7, 8], [0.0] * 3)  # type: ignore[arg-type]


def test_processor_time_of_a_server_is_finer_than_ticks() -> None:
    server = serving.OverHttp(0, os.getpid())
    outer = time.process_time()
    begin = server.cpu_seconds()
    inner = time.process_time()
    while time.process_time() - inner < 1e-3:
        pass
    inner = time.process_time() - inner
    used = server.cpu_seconds() - begin
    assert inner <= used <= time.process_time() - outer
