"""``pyg-scale info``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import pyg_scale
from pyg_scale.cli import main
from pyg_scale.partitioner.base import Partition
from pyg_scale.partitioner.write import write_partition
from pyg_scale.testing import graphs


def test_a_homogeneous_graph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = graphs.hostile()
    data.image = torch.zeros(100, 2, 3, dtype=torch.bfloat16)
    data.name, data.prototypes = "n", torch.ones(2)
    path = pyg_scale.save(
        data, tmp_path / "graph", time_attr="time", index_sets={"train": range(10)}
    )
    assert main(["info", str(path)]) == 0
    out = capsys.readouterr().out
    for line in (
        f"{path}: a homogeneous graph in 1 part, ",
        "nodes: 100 (",
        "edges: 460 (",
        "  image: bfloat16 x 2 x 3",
        "  x: float32 x 6",
        "  y: int64",
        "  set train: 10",
        "  edge_index: int64 [2, 460], made on demand",
        "time_attr: time",
        "attribute of the graph: name",
    ):
        assert f"\n{line}" in f"\n{out}", line
    assert "verified" not in out and "weight_attr" not in out

    assert main(["info", str(path), "--json", "--verify"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verified"] and found["nodes"][0]["num_nodes"] == 100
    assert found["nodes"][0]["attributes"]["image"] == {"dtype": "bfloat16", "row": [2, 3]}
    files = list(path.rglob("*.npy"))
    assert found["bytes"] == found["bytes_here"] == sum(file.stat().st_size for file in files)
    kinds = found["nodes"][0]["bytes"] + found["edges"][0]["bytes"]
    rest = [*path.glob("sets/*.npy"), *path.glob("graph/*.npy")]
    assert kinds == found["bytes"] - sum(file.stat().st_size for file in rest)


def test_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = graphs.hetero()
    pyg_scale.save(data, tmp_path / "whole")
    parts = {t: torch.arange(data[t].num_nodes, dtype=torch.int32) % 2 for t in data.node_types}
    partition = Partition(parts, 2, "some", {"option": 3}, seed=7)
    write_partition(tmp_path / "whole", partition, tmp_path / "parts")
    assert main(["info", str(tmp_path / "parts"), "--verify"]) == 0
    out = capsys.readouterr().out
    for line in (
        "a heterogeneous graph in 2 parts, ",
        "nodes of 'item': 12 (",
        "edges (user, buys, item): 70 (",
        "  nodes in parts: 6, 6\n",
        "  halo nodes in parts: ",
        "partitioned by some (seed 7), edges by_dst\n  option=3",
        "verified: ",
    ):
        assert line in out, line
    (tmp_path / "parts" / "part-1").rename(tmp_path / "elsewhere")
    assert main(["info", str(tmp_path / "parts")]) == 0
    assert "parts here: 0 (" in capsys.readouterr().out


def test_what_is_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(tmp_path)]) == 1
    assert "is not a graph directory" in capsys.readouterr().err
    path = pyg_scale.save(graphs.hostile(), tmp_path / "graph")
    file = path / "part-0" / "nodes" / "attributes" / "x.npy"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert main(["info", str(path)]) == 0
    capsys.readouterr()
    assert main(["info", str(path), "--verify"]) == 1
    assert "x.npy does not have its checksum" in capsys.readouterr().err
