"""``pyg-scale bench conv``: every side of every comparison runs, and the report says what was."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from pyg_scale.cli import bench
from pyg_scale.cli.bench import conv, conv_cases, conv_report
from pyg_scale.ops import library

SMALL = shlex.split(
    "--nodes 500 --edges 4000 --channels 8 --heads 2 --batch-size 16 --num-neighbors 3,2 --rounds 2"
)


@pytest.mark.skipif(not library.status()["loaded"], reason="the kernels are not compiled")
def test_the_whole_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYG_SCALE_KERNELS", "require")
    monkeypatch.setattr(conv, "_SHORT_SECONDS", 0.0)
    files = {name: tmp_path / "out" / f"r.{name}" for name in ("json", "png", "md")}
    args = ["--json", files["json"], "--png", files["png"], "--report", files["md"]]
    assert bench.main(["conv", *SMALL, *map(str, args)]) == 0
    printed = capsys.readouterr().out
    found = json.loads(files["json"].read_text())
    assert [graph["name"] for graph in found["graphs"]] == ["whole graph", "block of 2 hops"]
    assert not [case for case in found["cases"] if case["error"]]
    assert all(len(case["seconds"]) == 2 for case in found["cases"])
    entries = conv_report.comparisons(found)
    assert len(entries) == 2 * 2 * len(conv_cases.OPS)
    for entry in entries:
        assert entry["times PyG"] > 0
        assert ("times torch.sparse.mm" in entry) == (entry["op"] == "sum")
    for text in (printed, files["md"].read_text()):
        assert "| gatv2 | whole graph | both |" in text
        assert "copying memory" in text
    assert files["png"].stat().st_size > 5000


@pytest.mark.parametrize("op", conv_cases.OPS)
def test_sides_compute_the_same(op: str) -> None:
    import torch

    from pyg_scale.datasets import planted_communities

    data = planted_communities(200, 2000, 4, 1)
    graph = conv_cases.Graph("g", data.edge_index, 200, 200)
    torch.manual_seed(0)
    sides: dict[bool, list] = {False: [], True: []}
    for case in conv_cases.cases(graph, 8, 2, [op]):
        out = case.step()
        sides[case.backward].append(out if case.backward else (out,))
    for found in sides.values():
        for other in found[1:]:
            for a, b in zip(found[0], other):
                torch.testing.assert_close(a.view(b.shape), b, rtol=1e-4, atol=1e-5)


def test_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["conv", "--channels", "10", "--heads", "4"])
    with pytest.raises(SystemExit):
        bench.main(["conv", "--ops", "sum,nothing"])
    said = capsys.readouterr().err
    assert "must be a multiple of --heads" in said and "'nothing' is none of" in said
