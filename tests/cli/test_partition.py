"""``pyg-scale partition``: what it prints, writes and returns."""

import json

import numpy as np
import pytest
import torch

import pyg_scale
from pyg_scale.cli import main
from pyg_scale.datasets import read_npz
from pyg_scale.partitioner import quality
from pyg_scale.store.directory import GraphDirectory
from pyg_scale.testing import graphs


@pytest.fixture
def archive(tmp_path):
    """Two triangles joined by an edge, and a node by itself."""
    edges = np.array([[0, 1, 2, 3, 4, 5, 2], [1, 2, 0, 4, 5, 3, 3]])
    path = tmp_path / "graph.npz"
    np.savez(path, edge_index=edges, num_nodes=7, y=np.zeros(7, dtype=np.int64))
    return str(path)


@pytest.fixture
def directory(archive, tmp_path):
    """The same as a graph directory."""
    pyg_scale.save(read_npz(archive), tmp_path / "graph")
    return str(tmp_path / "graph")


def test_json(archive, capsys):
    arguments = ["--option", "passes=3", "--option", "order=natural", "--seed", "4", "--json"]
    assert main(["partition", archive, "2", *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["method"], found["seed"], found["out"]) == ("fennel", 4, None)
    assert found["options"]["passes"] == 3 and found["options"]["order"] == "natural"
    assert found["quality"]["num_parts"] == 2
    assert found["quality"]["node_types"][0]["nodes"] in ([4, 3], [3, 4])
    assert found["quality"]["cut"] == pytest.approx(1 / 7)


def test_writes_what_partition_gives(directory, tmp_path, capsys):
    out = tmp_path / "parts"
    arguments = ["--method", "ldg", "--out", str(out), "--edge-assign-strategy", "by_src"]
    assert main(["partition", directory, "2", *arguments]) == 0
    assert "ldg" in capsys.readouterr().out
    written = GraphDirectory(out)
    assert written.meta.partition.edge_assign_strategy == "by_src"
    expected = pyg_scale.partition(directory, 2, "ldg")
    assert torch.equal(written.books[None].assignment(), expected.long())
    assert main(["partition", directory, "2", "--out", str(out)]) == 1
    assert "already exists" in capsys.readouterr().err


def test_shares_and_balance(archive, capsys):
    arguments = ["--method", "range", "--balance", "edges", "--shares", "3,1", "--json"]
    assert main(["partition", archive, "2", *arguments]) == 0
    first, second = json.loads(capsys.readouterr().out)["quality"]["edge_types"][0]["edges"]
    assert first > second


def test_parts_from_a_file(archive, tmp_path, capsys):
    (tmp_path / "parts.txt").write_text("0\n0\n0\n1\n1\n1\n1\n")
    given = ["--assignment", str(tmp_path / "parts.txt")]
    assert main(["partition", archive, "2", *given, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["method"] == "imported"
    assert found["quality"]["node_types"][0]["nodes"] == [3, 4]
    (tmp_path / "parts.txt").write_text("0\n0\n0\n1\n2\n1\n1\n")
    assert main(["partition", archive, "2", *given]) == 1
    assert "parts.txt: line 5 is 2, expected a part from 0 to 1" in capsys.readouterr().err


def test_parts_of_types_from_files(tmp_path, capsys):
    data = graphs.hetero()
    pyg_scale.save(data, tmp_path / "graph")
    given = []
    for node_type, size in {"user": 20, "item": 12, "tag": 5, "ghost": 3}.items():
        np.save(tmp_path / f"{node_type}.npy", np.arange(size) % 2)
        given += ["--assignment", f"{node_type}={tmp_path / node_type}.npy"]
    assert main(["partition", str(tmp_path / "graph"), "2", *given, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["quality"]["node_types"]
    assert {each["name"]: each["nodes"] for each in found}["tag"] == [3, 2]
    assert main(["partition", str(tmp_path / "graph"), "2", *given[:2]]) == 1
    assert "there is no assignment of 'item'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["8"], "only 7 nodes"),
        (["0"], "at least 1"),
        (["2", "--method", "fenel"], "did you mean 'fennel'?"),
        (["2", "--option", "strength=1"], "no option 'strength'"),
        (["2", "--option", "passes=0"], "passes must be"),
        (["2", "--balance", "volume"], "balance must be"),
        (["2", "--shares", "1,2,3"], "shares must have"),
        (["2", "--assignment", "none.txt"], "no assignment file"),
        (["2", "--edge-assign-strategy", "by_src"], "give --out too"),
    ],
)
def test_failures(archive, arguments, message, capsys):
    assert main(["partition", archive, *arguments]) == 1
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == ""


def test_no_graph(tmp_path, capsys):
    assert main(["partition", str(tmp_path), "2"]) == 1
    assert "is not a graph directory" in capsys.readouterr().err
    assert main(["partition", str(tmp_path / "no.npz"), "2"]) == 1
    assert "there is no file" in capsys.readouterr().err


def test_an_archive_of_features_alone(tmp_path, capsys):
    path = tmp_path / "g.npz"
    np.savez(path, edge_index=np.array([[0, 1], [1, 0]]), x=np.zeros((3, 2), np.float32))
    assert main(["partition", str(path), "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(found["quality"]["node_types"][0]["nodes"]) == 3


@pytest.mark.parametrize(
    "arguments",
    [
        ["two"],
        ["2", "--option", "passes"],
        ["2", "--option", "passes=1", "--option", "passes=2"],
        ["2", "--shares", "a,b"],
        ["2", "--method", "ldg", "--assignment", "x.txt"],
        ["2", "--shares", "1,2", "--assignment", "x.txt"],
        ["2", "--balance", "nodes", "--assignment", "x.txt"],
        ["2", "--out", ""],
        ["2", "--compare", ""],
        ["2", "--batch-size", "16"],
        ["2", "--png", "/nope/x.png"],
        ["2", "--png", "x.foo"],
    ],
)
def test_wrong_usage(archive, arguments):
    with pytest.raises(SystemExit) as caught:
        main(["partition", archive, *arguments])
    assert caught.value.code == 2


def test_compares_methods(directory, tmp_path, capsys):
    png = str(tmp_path / "compared.png")
    options = ["--num-neighbors", "2,2", "--batch-size", "2"]
    assert main(["partition", directory, "2", "--compare", "random,fennel", *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["method", "random", "fennel"]
    assert "remote per batch" in lines[0]
    assert main(["partition", directory, "2", "--compare", "range", "--json", "--png", png]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["method"], found["num_parts"]) == ("range", 2) and found["cut"] == 2 / 7
    assert (tmp_path / "compared.png").read_bytes().startswith(b"\x89PNG")
    assert main(["partition", directory, "2", "--compare", "nothing"]) == 1
    assert "nothing" in capsys.readouterr().err


def test_comparing_writes_nothing(directory, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["partition", directory, "2", "--compare", "random", "--out", str(tmp_path / "p")])
    assert stop.value.code == 2 and "only measures" in capsys.readouterr().err


def test_what_was_measured_is_kept(directory, tmp_path, capsys):
    out = str(tmp_path / "parts")
    assert main(["partition", directory, "2", "--out", out, "--num-neighbors", "2"]) == 0
    kept = quality(out)
    assert kept.method == "fennel" and kept.remote.num_neighbors == [2] and kept.seconds > 0
