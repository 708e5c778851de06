"""``pyg-scale bench parallel``: every wrapper runs, and the report says what was found."""

from __future__ import annotations

import contextlib
import json
import math
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from pyg_scale.ops import library
from pyg_scale_bench import command, parallel, parallel_rank
from pyg_scale_bench.parallel_rank import WAYS, bytes_received
from pyg_scale_bench.report import Report

PAGES = Path(__file__).parents[3] / "docs" / "benchmarks"
needs_kernels = pytest.mark.skipif(
    not library.status()["loaded"], reason="the kernels are not compiled"
)


@pytest.mark.slow
@needs_kernels
def test_the_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {name: tmp_path / "out" / f"r.{name}" for name in ("json", "png", "md")}
    args = ["--json", files["json"], "--png", files["png"], "--report", files["md"]]
    folder = tmp_path / "work"
    assert command.main(["parallel", "--quick", "--dir", str(folder), *map(str, args)]) == 0
    assert not folder.exists()
    found = json.loads(files["json"].read_text())
    assert set(found["graphs"]) == {
        "mesh",
        "power law",
        "like Reddit",
        "like products",
        "small world",
    }
    for graph in found["graphs"]:
        ways = parallel.numbers(found, graph)
        assert set(ways) == {name for name, way in WAYS.items() if way.ranks <= 2}
        assert all(each["seconds"] > 0 and each["received"] > 0 for each in ways.values())
        assert ways["halo+bf16"]["received"] < ways["halo"]["received"]
        assert not parallel.different_losses(found, graph)
        # Two steps of the full graph a round, one epoch of batches.
        seconds = {n: len(each["seconds"]) for n, each in found["ranks"][0][graph].items()}
        assert seconds == {n: 2 if WAYS[n].full else 1 for n in ways}
    by_name = found["ranks"][0]["small world"]
    losses = [by_name[name]["curve"] for name in ("halo", "halo+stale", "halo+smooth")]
    assert [len(each) for each in losses] == [3] * 3
    # Nothing is smoothed in the first two steps: in the second what came is used as it is.
    assert losses[0] != losses[1] and losses[1][:2] == losses[2][:2]
    assert all(0 <= a <= 1 for each in by_name.values() for a in each.get("accuracy", ()))
    exact, sampled = (by_name[name]["formula"] for name in ("halo", "halo+sample=0.1"))
    assert abs(sampled - 0.1 * exact) <= 2 * 8 * 4  # a row of 8 numbers each way, at most
    assert not any("curve" in each for each in found["ranks"][0]["mesh"].values())
    assert found["graphs"]["mesh"]["advised"] == "halo"
    report = files["md"].read_text()
    for text in (capsys.readouterr().out, report):
        assert "advise says 'halo'" in text and "halo+remat" in text
        assert "Convergence on the full graph" in text
    assert str(folder) not in report + files["json"].read_text()
    assert files["png"].stat().st_size > 5000


def found(seconds: dict[str, list[float]], losses: dict[str, float]) -> dict[str, Any]:
    def rank(slower: float) -> dict[str, Any]:
        return {
            "mesh": {
                name: {
                    "seconds": [slower * s for s in each],
                    "received": [10],
                    "peak": [5],
                    "exact": name != "halo+stale",
                    "loss": losses[name],
                }
                for name, each in seconds.items()
            }
        }

    return {"graphs": {"mesh": {"advised": "halo"}}, "ranks": [rank(1.0), rank(2.0)]}


def test_the_numbers_of_a_report() -> None:
    seconds = {"ddp": [0.1], "halo": [2.0, 3.0, 9.0], "halo+stale": [1.0], "feature": [1.0]}
    losses = {"ddp": 9.0, "halo": 1.0, "halo+stale": 4.0, "feature": 1.1}
    results = found(seconds, losses)
    halo = parallel.numbers(results, "mesh")["halo"]
    assert halo["seconds"] == 6.0 and halo["spread"] == [5.0, 12.0] and halo["advised"]
    assert parallel.place_of_advised(results, "mesh") == (2, 2, [])
    assert parallel.different_losses(results, "mesh") == ["feature"]


@pytest.mark.parametrize("lost", [math.nan, math.inf, None])
def test_a_loss_that_is_not_finite_is_wrong(lost: Any) -> None:
    names = ["halo", "halo+remat", "feature"]
    seconds = {name: [1.0] for name in names}
    for name, wrong in (("halo+remat", ["halo+remat"]), ("halo", names)):
        losses = dict.fromkeys(names, 1.0) | {name: lost}
        assert parallel.different_losses(found(seconds, losses), "mesh") == wrong


def test_a_curve_that_is_not_finite_is_said_and_drawn(tmp_path: Path) -> None:
    results = json.loads((PAGES / "parallel.json").read_text())
    for rank in results["ranks"]:
        for ways in rank.values():
            for each in ways.values():
                if "curve" in each:
                    each["curve"][-1] = None
    report = parallel.report(results)
    assert "not finite (" in report.terminal()
    drawn = Report(results, [], panels=[parallel.drawn_curves(results)])
    drawn.draw(str(tmp_path / "r.png"))


def test_what_is_of_no_use_on_so_many_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["parallel", "--ways", "mesh", "--dir", str(tmp_path)])
    assert ended.value.code == 2
    assert "none of --ways is of use on 2 ranks" in capsys.readouterr().err
    for page, said in (("parallel", "mesh (from 4"), ("parallel-4", "layer (at most 2")):
        results = json.loads((PAGES / f"{page}.json").read_text())
        assert f"left out on {len(results['ranks'])} ranks: {said} ranks" in "\n".join(
            parallel.report(results).lines
        )


def test_the_first_pass_over_all_wrappers_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the first wrapper would have the memory of all that is loaded at first use."""
    done: list[str] = []

    def once(way: Any, graph: Any, settings: Any, each: dict[str, Any]) -> None:
        done.append(way.method)
        each["peak"].append(len(done))

    comm = contextlib.nullcontext(type("Comm", (), {"world_size": 2}))
    monkeypatch.setattr(parallel_rank, "_once", once)
    monkeypatch.setattr(parallel_rank, "connect", lambda timeout: comm)
    monkeypatch.setattr(
        parallel_rank.pyg_scale, "open", lambda path, comm: contextlib.nullcontext(path)
    )
    settings = {"ways": ["ddp", "mesh", "feature"], "rounds": 2, "timeout": 1.0}
    results = parallel_rank._of_graph("p", settings, False)
    assert done == ["ddp", "feature"] * 3
    assert {name: each["peak"] for name, each in results.items()} == {
        "ddp": [3, 5],
        "feature": [4, 6],
    }


def test_what_is_equal_within_quartiles_is_said() -> None:
    seconds = {
        "halo": [1.0, 1.1, 1.2, 1.3, 9.0],  # quartiles 1.1 and 1.3
        "halo+remat": [1.0, 1.05, 1.15, 1.2, 1.2],  # the median is less
        "feature": [1.31, 1.32, 1.33, 1.4, 1.5],
    }
    results = found(seconds, dict.fromkeys(seconds, 1.0))
    assert parallel.place_of_advised(results, "mesh") == (2, 3, ["halo+remat"])
    assert parallel.numbers(found({"halo": [1.0]}, {"halo": 1.0}), "mesh")["halo"]["spread"] == [
        2.0,
        2.0,
    ]


def test_options_and_the_shape_of_a_mesh_are_part_of_an_advice() -> None:
    names = ("halo", "halo+remat", "mesh")
    results = found({name: [1.0] for name in names}, dict.fromkeys(names, 1.0))
    results["ranks"] *= 2  # four
    for about, name in (
        ({"advised": "halo"}, "halo"),
        ({"advised": "halo", "options": {"remat": True}}, "halo+remat"),
        ({"advised": "halo", "options": {"remat": True}, "mesh": None}, "halo+remat"),
        ({"advised": "halo", "options": {"quantize": "int8"}}, None),
        ({"advised": "mesh", "mesh": (2, 2)}, "mesh"),
        ({"advised": "mesh", "mesh": [2, 2]}, "mesh"),  # from a file
        ({"advised": "mesh", "mesh": [1, 4]}, None),
    ):
        results["graphs"]["mesh"] = about
        ways = parallel.numbers(results, "mesh")
        assert [n for n, each in ways.items() if each["advised"]] == ([name] if name else [])


def test_the_graphs() -> None:
    edges = parallel.square(4)
    assert edges.size(1) == 2 * (12 + 12 + 9) and int(edges.max()) == 15
    ring = parallel.small_world(100, 2, 0.0)
    assert ring.size(1) == 400 and torch.bincount(ring[0]).tolist() == [4] * 100
    near = (ring[0] - ring[1]).abs()
    assert int(torch.minimum(near, 100 - near).max()) == 2
    far = parallel.small_world(1_000, 4, 0.1)
    step = (far[0] - far[1]).abs()
    assert 0.07 < float((torch.minimum(step, 1_000 - step) > 4).float().mean()) < 0.13
    power = parallel.power_law(2_000, 4)
    degrees = torch.bincount(power[0])
    assert degrees.numel() == 2_000 and 7 < float(degrees.float().mean()) <= 8
    assert int(degrees.max()) > 15 * float(degrees.float().mean())  # a few nodes have many


def test_bytes_of_this_process_are_counted() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as out,
        listener.accept()[0] as into,
    ):
        before, left = bytes_received(), 5_000
        out.sendall(bytes(left))
        while left:
            left -= len(into.recv(left))
        assert bytes_received() - before == 5_000
