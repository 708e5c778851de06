"""``pyg-scale bench conv``: every side of every comparison runs, and the report says what was."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from pyg_scale.datasets import planted_communities
from pyg_scale.loader import NeighborLoader
from pyg_scale.nn import FusedConv, chunks, fallbacks, forget_fallbacks
from pyg_scale.ops import colptr, library
from pyg_scale_bench import command, conv, small, training
from pyg_scale_bench.steps import OPS, Case, Gauge, Graph

SMALL = shlex.split(
    "--nodes 500 --edges 4000 --channels 8 --heads 2 --batch-size 16 --num-neighbors 3,2 "
    "--rounds 2 --hidden 8 --threads 1 --sizes 20,30 --small-channels 8 --small-seconds 0"
)


SOME = shlex.split("--ops sum,gatv2 --layers RGCNConv --steps sage-trimmed,first --small MFConv")


@pytest.mark.skipif(not library.status()["loaded"], reason="the kernels are not compiled")
@pytest.mark.parametrize("choice", [SOME, pytest.param([], marks=pytest.mark.slow)])
def test_the_whole_run(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    choice: list[str],
) -> None:
    monkeypatch.setenv("PYG_SCALE_KERNELS", "require")
    monkeypatch.setattr(conv, "_SHORT_SECONDS", 0.0)
    files = {name: tmp_path / "out" / f"r.{name}" for name in ("json", "png", "md")}
    args = ["--json", files["json"], "--png", files["png"], "--report", files["md"]]
    threads = torch.get_num_threads()
    try:
        assert command.main(["conv", *SMALL, *choice, *map(str, args)]) == 0
    finally:
        torch.set_num_threads(threads)
    printed = capsys.readouterr().out
    found = json.loads(files["json"].read_text())
    chosen = found["settings"]
    graphs = ["whole graph", "block of 2 hops", "batches"]
    assert [graph["name"] for graph in found["graphs"]] == graphs
    assert not [case for case in found["cases"] if case["error"]]
    assert all(len(case["seconds"]) == 2 for case in found["cases"])
    entries = conv.comparisons(found)
    if not choice:
        assert set(chosen["ops"]) == set(OPS) and set(chosen["layers"]) == set(conv.LAYERS)
        assert set(chosen["steps"]) == set(conv.STEPS | conv.FIRST)
        assert set(chosen["small"]) == set(small.NAMES)
    both = len(chosen["ops"]) + len(chosen["layers"])
    assert len(entries) == 2 * 2 * both + len(chosen["steps"])
    assert {(e["layer"], e["nodes"]) for e in found["small"]} == {
        (name, size) for name in chosen["small"] for size in (20, 30)
    }
    assert all(e["low"] <= e["times"] <= e["high"] and e["rounds"] >= 7 for e in found["small"])
    for entry in entries:
        assert entry["times PyG"] > 0
        assert ("times torch.sparse.mm" in entry) == (entry["op"] == "sum")
    for row in ("gatv2|whole graph|both", "RGCNConv|block of 2 hops|forward"):
        assert row.replace("|", " | ") in files["md"].read_text()
        assert re.search(row.replace("|", " +"), printed)
    for text in (printed, files["md"].read_text()):
        assert re.search(r"sage-trimmed[ |]+batches[ |]+step", text)
        assert "copying memory" in text and "intervals below 1: " in text
        assert re.search(r"MFConv[ |]+[0-9.]+ \([0-9.]+ to [0-9.]+\)", text)
    assert files["png"].stat().st_size > 5000


@pytest.mark.skipif(not library.status()["loaded"], reason="the kernels are not compiled")
def test_every_layer_of_pyg(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FusedConv, "min_work", 0)
    monkeypatch.setattr(chunks, "ELEMENTS", 1000)
    monkeypatch.setattr(chunks, "LEAST", 4)
    names = ("SGConv", "GINEConv", "SAGEConv", "NNConv", "FastRGCNConv")
    monkeypatch.setattr(conv, "EVERY_LAYER", {name: conv.EVERY_LAYER[name] for name in names})
    file = tmp_path / "r.json"
    threads = torch.get_num_threads()
    try:
        assert command.main(["conv", "--all", *SMALL, "--json", str(file)]) == 0
    finally:
        torch.set_num_threads(threads)
    found = json.loads(file.read_text())
    assert not [case for case in found["cases"] if case["error"]]
    assert found["how"] == {
        "SGConv": "fused messages",
        "GINEConv": "fused messages",
        "SAGEConv": "a layer of ours",
        "NNConv": "in chunks",
        "FastRGCNConv": "fused messages",
    }
    printed = capsys.readouterr().out
    three = " +[0-9.]+ +[0-9.]+ +[0-9.]+x"
    assert re.search(rf"SGConv +fused messages{three}{three}", printed)
    assert re.search(rf"SAGEConv +a layer of ours{three} +[0-9]+ +[0-9]+\n", printed)
    assert "XConv: looks for nearest neighbours" in printed


@pytest.mark.skipif(not library.status()["loaded"], reason="the kernels are not compiled")
def test_layers_of_ones_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FusedConv, "min_work", 0)
    file = tmp_path / "r.json"
    threads = torch.get_num_threads()
    try:
        assert command.main(["conv", "--own", *SMALL, "--json", str(file)]) == 0
    finally:
        torch.set_num_threads(threads)
    found = json.loads(file.read_text())
    assert not [case for case in found["cases"] if case["error"]]
    assert found["how"] == dict.fromkeys(conv.OWN, "fused messages")
    printed = capsys.readouterr().out
    assert re.search(r"SideBySide +fused messages( +[0-9.]+ +[0-9.]+ +[0-9.]+x){2}", printed)
    assert "not measured" not in printed


@pytest.mark.skipif(not library.status()["loaded"], reason="the kernels are not compiled")
def test_a_call_that_takes_the_steps_of_pyg_is_not_called_fused() -> None:
    data = planted_communities(200, 2000, 4, 1)
    graph = Graph.of("g", data.edge_index, 200, 200)
    cases, layer = conv.every_layer_cases("GMMConv", graph, 8)
    for case in cases:
        case.step()
    assert conv.how_fused(layer) == "PyG's steps at this size"


@pytest.mark.parametrize("name", ["SGConv", "FAConv", "EdgeConv", "HGTConv", "NNConv", *conv.OWN])
def test_messages_alone_are_the_same(name: str) -> None:
    data = planted_communities(200, 2000, 4, 1)
    cases, _ = conv.every_layer_cases(name, Graph.of("g", data.edge_index, 200, 200), 8)
    assert [case.about["op"] for case in cases] == [name] * 2 + [name + conv.ALONE] * 2
    compare(cases[2:])


@pytest.mark.parametrize("op", OPS)
def test_sides_compute_the_same(op: str) -> None:
    data = planted_communities(200, 2000, 4, 1)
    graph = Graph.of("g", data.edge_index, 200, 200)
    torch.manual_seed(0)
    compare(conv.op_cases(op, graph, 8, 2))


def compare(cases: list[Case]) -> None:
    """All sides return the same, forward and gradients."""
    sides: dict[bool, list] = {False: [], True: []}
    for case in cases:
        out = case.step()
        backward = case.about["backward"]
        sides[backward].append(out if backward else (out,))
    for found in sides.values():
        for other in found[1:]:
            for a, b in zip(found[0], other):
                torch.testing.assert_close(a.view(b.shape), b, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def block() -> Graph:
    data = planted_communities(400, 6000, 4, 1)
    batch = next(iter(NeighborLoader(data, [4, 3], batch_size=10, seed=0)))
    size = batch.num_nodes, sum(batch.num_sampled_nodes[:-1])
    return Graph.of("block", batch.edge_index, *size, is_block=True)


@pytest.mark.parametrize("name", conv.LAYERS)
@pytest.mark.usefixtures("fused_at_any_size")
def test_layers_compute_the_same_in_the_fused_path(name: str, block: Graph) -> None:
    data = planted_communities(200, 2000, 4, 1)
    forget_fallbacks()
    torch.manual_seed(0)
    for graph in (Graph.of("whole", data.edge_index, 200, 200), block):
        compare(conv.layer_cases(name, graph, 8, 2))
    assert fallbacks() == {}


@pytest.mark.parametrize("name", small.NAMES)
def test_two_layers_compute_the_same_on_a_small_graph(name: str) -> None:
    torch.manual_seed(0)
    forget_fallbacks()
    found = []
    for step in small.steps(name, 60, 8):
        torch.manual_seed(1)
        found.append(step())
    assert len(found[0]) == len(found[1]) > 1
    floor = max(float(each.abs().max()) for each in found[1])
    for ours, theirs in zip(*found):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4 * max(floor, 1))
    assert fallbacks() == {}


def test_intervals_hold_the_median_as_often_as_they_say() -> None:
    """Of samples of a distribution far from normal, whose median is 1."""
    generator = torch.Generator().manual_seed(0)
    for count in (7, 20, 151):
        samples = torch.randn(4000, count, generator=generator).exp().tolist()
        held = [low <= 1 <= high for low, high in map(small.interval, samples)]
        assert 0.945 <= sum(held) / len(held) <= 0.99
    assert small.interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert small.interval([*range(100)]) == (39, 60)  # ranks 40 and 61, as in tables


def test_a_ratio_of_a_step_to_one_of_half_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def takes(seconds: float) -> small.Step:
        return lambda: clock.__setitem__(0, clock[0] + seconds)

    monkeypatch.setattr(small.time, "process_time", lambda: clock[0])
    monkeypatch.setattr(small, "steps", lambda *_: (takes(2e-4), takes(3e-4)))
    found = small.compare("MFConv", 10, 8, 0.0)
    assert found["times"] == pytest.approx(1.5) and found["rounds"] == 7
    assert found["seconds"] == pytest.approx(2e-4)
    assert found["PyG seconds"] == pytest.approx(3e-4)


def test_what_seems_slower_is_measured_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three layers one is slower by chance, one is slower, and one is not."""
    seen = {"SAGEConv": [0.98, 1.01], "GCNConv": [0.97, 0.96], "GINConv": [1.02]}
    for_seconds = []

    def compare(name: str, size: int, channels: int, seconds: float) -> dict[str, Any]:
        for_seconds.append(seconds)
        times = seen[name].pop(0)
        high = times + 0.01
        return {"layer": name, "nodes": size, "times": times, "low": times - 0.01, "high": high}

    monkeypatch.setattr(small, "compare", compare)
    found = small.measure([*seen], [60], 64, 0.5)
    assert for_seconds == [0.5, 0.5, 0.5, 2.5, 2.5] and not any(seen.values())
    _, at_first, both_times = small.lines(found, 64)
    assert "below 1: 2 of 3, " in at_first and "SAGEConv (60) 1.01 (1.00 to 1.02), " in at_first
    assert both_times == "below 1 both times: GCNConv (60)"
    del found[1]["again"]  # as in reports of earlier versions, which say nothing of a second time
    assert small.lines(found, 64)[1:] == [
        "intervals below 1: 2 of 3, of which one in 40 is so by chance: SAGEConv (60), GCNConv (60)"
    ]


def test_a_step_of_a_block_meets_edges_it_has_not_seen(block: Graph) -> None:
    first, second = block.fresh_edge_index(), block.fresh_edge_index()
    assert first is not second and torch.equal(first, second)
    assert colptr.recall(second) is not None


@pytest.mark.parametrize("name", conv.STEPS)
@pytest.mark.usefixtures("fused_at_any_size")
def test_steps_lose_the_same(name: str) -> None:
    data = planted_communities(400, 6000, 4, 1)
    batches = training.batches(data, [4, 3], 10)
    torch.manual_seed(0)
    forget_fallbacks()
    ours, theirs = conv.step_cases(name, batches, 16)
    losses = [[float(case.step()) for _ in range(6)] for case in (ours, theirs)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert losses[0][4] < losses[0][0]  # the first batch again
    assert fallbacks() == {}


@pytest.mark.parametrize("name", conv.FIRST)
@pytest.mark.usefixtures("fused_at_any_size")
def test_first_layers_have_the_same_result(name: str) -> None:
    data = planted_communities(400, 6000, 4, 1)
    torch.manual_seed(0)
    ours, theirs = conv.first_layer_cases(name, data, [4, 3], 50, 16)
    for _ in range(3):
        assert ours.step() == pytest.approx(theirs.step(), rel=1e-3)


def test_lazy_and_gathered_first_layers_take_turns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    turns: list[list[tuple[str, str]]] = []

    def measure(_: Gauge, cases: list[Case], *args: Any) -> None:
        turns.append([(case.about["op"], case.side) for case in cases])
        for case in cases:
            case.seconds.append(1.0)

    monkeypatch.setattr(Gauge, "measure", measure)
    steps = "--ops none --layers none --small none --steps first,sage,first-lazy"
    threads = torch.get_num_threads()
    try:
        assert command.main(["conv", *SMALL, *steps.split()]) == 0
    finally:
        torch.set_num_threads(threads)
    capsys.readouterr()
    names = [{name for name, _ in together} for together in turns]
    assert names == [{"sage"}, {"first", "first-lazy"}]
    assert [len(together) for together in turns] == [2, 4]


def test_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["conv", "--channels", "10", "--heads", "4"])
    with pytest.raises(SystemExit):
        command.main(["conv", "--ops", "sum,nothing"])
    with pytest.raises(SystemExit):
        command.main(["conv", "--layers", "SAGE"])
    with pytest.raises(SystemExit):
        command.main(["conv", "--small-channels", "10"])
    said = capsys.readouterr().err
    assert "--small-channels 10 must be a multiple of 4" in said
    assert "'SAGE' is not one of GCNConv, SAGEConv" in said
    assert "must be a multiple of --heads" in said and "'nothing' is not one of" in said
