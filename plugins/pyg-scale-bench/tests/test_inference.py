"""``pyg-scale bench inference``: both ways give one result, and limits are said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pyg_scale.ops import library
from pyg_scale_bench import command, inference


@pytest.mark.slow
@pytest.mark.skipif(not library.status()["loaded"], reason="the kernels are not compiled")
def test_the_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {name: tmp_path / "out" / f"r.{name}" for name in ("json", "png", "md")}
    args = ["--json", files["json"], "--png", files["png"], "--report", files["md"]]
    folder = tmp_path / "work"
    assert command.main(["inference", "--quick", "--dir", str(folder), *map(str, args)]) == 0
    assert not folder.exists()
    found = json.loads(files["json"].read_text())
    for model in ("sage", "gat"):
        (streamed,), (gathered,) = (
            found["rounds"][f"{model} {way}"] for way in ("streamed", "gathered")
        )
        assert streamed["sum"] == pytest.approx(gathered["sum"], rel=1e-4)
        assert streamed["seconds"] > 0 and gathered["seconds"] > 0
    assert "rows streamed" in capsys.readouterr().out
    assert ("NOT ENFORCED" in files["md"].read_text()) is not found["limited"]
    assert str(folder) not in files["md"].read_text() + files["json"].read_text()
    assert files["png"].stat().st_size > 5000


def test_nothing_is_said_of_gathering_that_was_not_measured() -> None:
    page = Path(__file__).parents[3] / "docs" / "benchmarks" / "inference.json"
    found = json.loads(page.read_text())
    for name in [name for name in found["rounds"] if name.endswith("gathered")]:
        del found["rounds"][name]
    (table,) = inference.report(found).tables
    assert table.rows
    assert {row[table.header.index("times gathering")] for row in table.rows} == {""}
