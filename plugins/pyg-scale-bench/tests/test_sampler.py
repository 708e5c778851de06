"""``pyg-scale bench sampler``: every part is measured, and the report says what was found."""

from __future__ import annotations

import argparse
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.data import Data

from pyg_scale.ops import library
from pyg_scale_bench import command, graphs, sampler, sampler_training

needs_kernels = pytest.mark.skipif(
    not library.status()["loaded"], reason="the kernels are not compiled"
)


@pytest.mark.slow
@needs_kernels
def test_the_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {name: tmp_path / "out" / f"r.{name}" for name in ("json", "png", "md")}
    args = ["--json", files["json"], "--png", files["png"], "--report", files["md"]]
    folder = tmp_path / "work"
    assert command.main(["sampler", "--quick", "--dir", str(folder), *map(str, args)]) == 0
    assert not folder.exists()
    found = json.loads(files["json"].read_text())
    names = [case["name"] for case in found["batches"]]
    assert names[:2] == ["neighbours", "LABOR"] and {"LADIES", "FastGCN"} < set(names)
    nodes = {case["name"]: case["rounds"][0]["nodes"] for case in found["batches"]}
    assert nodes["LABOR, layers dependent"] < nodes["LABOR"] < nodes["neighbours"]
    for case in found["batches"]:
        (turn,) = case["rounds"]
        assert turn["feature_bytes"] == turn["nodes"] * 16 * 4
    for ending in ("of 20", "of 20, 2 workers"):
        clusters = [each for each in found["subgraphs"]["cases"] if each["name"].endswith(ending)]
        assert [case["side"] for case in clusters] == ["pyg_scale", "PyG"]
        assert not clusters[1]["error"]  # PyG's merges our clusters with PyPI alone
        assert len({case["rounds"][0]["nodes"] for case in clusters}) == 1
    for case in found["subgraphs"]["cases"][::2]:
        assert 0 < case["rounds"][0]["copy_seconds"] < 100 * case["rounds"][0]["seconds"]
    for case in found["disk"]["cases"]:
        assert case["hits"] + case["misses"] == case["rows"] > 0
        assert case["read_bytes"] > 0
    for case in found["cost"]["cases"]:
        assert 1 <= case["planned"] < case["by_number"]
    printed = capsys.readouterr().out
    for text in (printed, files["md"].read_text()):
        assert all(title in text for title in ("Batches", "Training", "From a disk", "Walks"))
    assert str(folder) not in files["md"].read_text() + files["json"].read_text()
    assert files["png"].stat().st_size > 5000


def test_factors_are_medians_of_rounds() -> None:
    base = {"rounds": [{"seconds": s, "batches": 2} for s in (1.0, 2.0, 9.0)]}
    case = {"rounds": [{"seconds": s, "batches": 2} for s in (0.5, 2.0, 3.0)]}
    assert sampler.factor(case, base) == 2.0
    assert sampler.rate(case, "batches") == 1.0


def test_equal_time_counts_whole_epochs() -> None:
    run = [(1.0, 0.5), (2.0, 0.7), (3.0, 0.6)]
    assert sampler_training.accuracy_at(run, 2.5) == 0.7
    assert sampler_training.accuracy_at(run, 3.0) == 0.6
    assert sampler_training.accuracy_at(run, 0.5) == 0


def test_points_apart_pair_the_seeds() -> None:
    assert sampler_training.points_apart([0.90, 0.92], [0.91, 0.91]) == "+0.00 ± 1.00"
    assert sampler_training.points_apart([0.80, 0.82], [0.81, 0.83]) == "-1.00 ± 0.00"
    assert sampler_training.points_apart([0.80], [0.81]) == "-1.00"


def test_a_layer_for_each_hop() -> None:
    given: dict[str, Any] = {"data": None, "train_nodes": 600, "train_edges": 6000}
    given |= {"train_share": 0.1, "train_signal": 0.4}
    how = {"epochs": 2, "repeats": 1, "hidden": 8, "train_batch_size": 32}
    args = argparse.Namespace(train_neighbors=[4, 3, 2], labor_alone=True, **given, **how)
    assert 30 < int(sampler_training._data(args).train_mask.sum()) < 90  # a tenth, about
    found = sampler_training.measure(args, Data)
    assert list(found["runs"]) == ["neighbours", "LABOR", "LABOR, layers dependent"]
    assert all(len(run) >= 2 for (run,) in found["runs"].values())
    torch.manual_seed(0)
    model = sampler_training.Sums(5, 8, 8, 3)
    edges, weight = torch.tensor([[0, 1, 2], [1, 2, 3]]), torch.ones(3)
    x = torch.randn(4, 5, requires_grad=True)
    model(x, edges, weight)[3].sum().backward()
    assert x.grad is not None and x.grad[0].abs().sum() > 0  # three hops away


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--cache", "0"], "--cache must be a share, above 0, at most 1"),
        (["--parts", "none"], "--parts"),
        (["--rounds", "0"], "--rounds must be at least 1"),
        (["--train-share", "0"], "--train-share must be a share, above 0, at most 0.75"),
        (["--train-share", "0.8"], "--train-share must be a share, above 0, at most 0.75"),
        (["--train-neighbors", "0,5"], "--train-neighbors must be numbers of at least 1"),
        (["--workers", "0,-1"], "--workers must be numbers of at least 0"),
    ],
)
def test_wrong_arguments(
    wrong: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command.main(["sampler", "--dir", "x", *wrong])
    assert message in capsys.readouterr().err


def test_weights_of_means() -> None:
    weight = sampler_training.mean_weights(torch.tensor([[0, 1, 2], [1, 2, 2]]), 3)
    assert weight.tolist() == [1.0, 0.5, 0.5]


def test_popular_sources() -> None:
    """The share of the k-th most popular source is k ** -0.5 of that of the first."""
    data = graphs.power_law(40, 400_000, 3, 0.5)
    counts = data.edge_index[0].bincount(minlength=40).sort(descending=True).values
    expected = torch.arange(1, 41) ** -0.5
    expected *= 400_000 / expected.sum()
    # The standard error of the rarest is 2 %, of which all are within five.
    assert bool(((counts / expected - 1).abs() < 0.1).all())
    to = data.edge_index[1].bincount(minlength=40)
    assert bool(((to / 10_000 - 1).abs() < 0.06).all())
    assert data.x.shape == (40, 3) and data.num_edges == 400_000


def test_a_star_and_a_power_law() -> None:
    data: Data = sampler.star_and_power_law(100, 20)
    degree = torch.bincount(data.edge_index[1], minlength=121)
    assert data.num_nodes == 121
    assert degree[120] == 20 and degree[100:120].tolist() == [1] * 20


PEER = """
import torch

library = torch.library.Library("{}", "DEF")
library.define("random_walk(Tensor p, Tensor c, Tensor s, int n, float p_, float q) -> Tensor")
library.impl("random_walk", lambda p, c, s, n, p_, q: s[:, None].repeat(1, n + 1), "CPU")
"""


@pytest.mark.parametrize(
    ("peer", "module", "ops", "installed"),
    [
        ("torch-cluster", "torch_cluster", "torch_cluster", find_spec("torch_cluster")),
        ("pyg-lib", "pyg_lib", "pyg", find_spec("pyg_lib")),
    ],
)
@pytest.mark.parametrize("text", [PEER, "raise ImportError('another torch')"])
def test_walks_beside_others(
    peer: str,
    module: str,
    ops: str,
    installed: object,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their ops are known once they were imported; if that fails, the table has the reason."""
    if installed:
        pytest.skip(f"{peer} is installed")
    (tmp_path / f"{module}.py").write_text(text.format(ops))
    monkeypatch.syspath_prepend(tmp_path)
    found, page = tmp_path / "found.json", tmp_path / "found.md"
    arguments = ["sampler", "--quick", "--parts", "walks", "--json", str(found)]
    arguments += ["--report", str(page), "--dir", str(tmp_path)]
    try:
        assert command.main(arguments) == 0
    finally:
        sys.modules.pop(module, None)
    cases = json.loads(found.read_text())["walks"]["cases"]
    uniform, weighted, second = (case for case in cases if case["side"] == peer)
    assert weighted["error"] == f"{peer} has no weights"
    for case in (uniform, second):
        assert case["error"] == ("" if text == PEER else "ImportError: another torch"), case
        assert bool(case["rounds"]) == (text == PEER)
    assert weighted["error"] in page.read_text()
