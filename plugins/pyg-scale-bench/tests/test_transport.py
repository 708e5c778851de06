"""``pyg-scale bench transport``: every way brings the same rows, and the report says how fast."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pyg_scale.ops import library
from pyg_scale_bench import command, transport
from pyg_scale_bench.transport_ways import MODULES, WAYS, Request


@pytest.mark.skipif(not library.status()["loaded"], reason="the kernels are not compiled")
def test_the_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {name: tmp_path / "out" / f"r.{name}" for name in ("json", "png", "md")}
    args = ["--json", files["json"], "--png", files["png"], "--report", files["md"]]
    assert command.main(["transport", "--quick", *map(str, args)]) == 0
    printed = capsys.readouterr().out
    found = json.loads(files["json"].read_text())
    missing = {way for way, name in MODULES.items() if not _is_there(name)}
    for rank in found["ranks"]:
        assert set(rank["missing"]) == missing
        assert set(rank["places"]) == {"loopback"}
        for size in ("50", "500"):
            cases = rank["places"]["loopback"][size]
            assert set(cases) == set(WAYS) - missing
            assert {len(each["seconds"]) for each in cases.values()} == {1}
    report = files["md"].read_text()
    for text in (printed, report):
        assert "of the rows per second of pyg_scale" in text
        assert ("UCX (TCP): not measured" in text) == ("ucx" in missing)
    assert files["png"].stat().st_size > 5000


def _is_there(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


def test_the_numbers_of_a_report() -> None:
    def rank(ours: list[float], other: list[float], cpu: float) -> dict[str, Any]:
        ways = {"ours": ours, "zmq": other}
        cases = {way: {"seconds": each, "cpu": [cpu] * 3} for way, each in ways.items()}
        return {"places": {"loopback": {"10": cases}}, "missing": {}, "versions": {}}

    ranks = [rank([9, 9, 9], [9, 9, 9], 1.0), rank([1.0, 2.0, 4.0], [2.0, 2.0, 2.0], 3.0)]
    settings = {"rows": [10], "rows_in_all": 25, "features": 5, "ways": ["ours", "zmq"]}
    settings |= {"nodes": 7, "in_flight": 2, "threads": 1, "rounds": 3}
    found = {"settings": settings, "ranks": ranks}
    case = "loopback", 10
    assert transport.speed_of(found, *case, "ours") == [20.0, 10.0, 5.0]  # two whole requests
    assert transport.work_of(found, *case, "zmq") == pytest.approx([4.0 / 400e-9] * 3)
    assert transport.of_ours(found, transport.speed_of, *case, "zmq") == 1.0
    assert "ZeroMQ: 1.00 to 1.00 of the rows" in transport.report(found).lines[0]
    assert "within a tenth in both in 1 of 1 cases" in transport.report(found).lines[0]


def test_rows_at_wrong_places_are_noticed() -> None:
    ids, position = torch.tensor([3, 5]), torch.tensor([1, 0])
    right = torch.tensor([[5.0, 5.0], [3.0, 3.0]])
    request = Request(ids, position, right.view(torch.uint8))
    transport._check("a way", [request])
    assert not request.out.any(), "cleared for the next way"
    wrong = Request(ids, position, right.flip(0).contiguous().view(torch.uint8))
    with pytest.raises(RuntimeError, match="a way wrote rows to wrong places"):
        transport._check("a way", [wrong])


def test_wrong_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong, message in (
        (["--link", "fast"], "--link: a rate is a number of mbit or gbit (got 'fast')"),
        (["--ways", "pigeons"], "'pigeons' is not one of ours"),
        (["--rows", "0"], "--rows must be at least 1"),
    ):
        with pytest.raises(SystemExit):
            command.main(["transport", *wrong])
        assert message in capsys.readouterr().err
