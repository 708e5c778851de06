"""Sets and labels from other people's files."""

from __future__ import annotations

import os
import pickle
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pyg_scale
from pyg_scale.errors import GraphDirectoryError
from pyg_scale.partitioner.base import Partition
from pyg_scale.partitioner.write import write_partition
from pyg_scale.store.directory import DirectoryWriter
from pyg_scale.store.directory.additions import add_index_sets, add_node_attribute, read_tensor
from pyg_scale.testing import graphs


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool, torch.bfloat16])
def test_files(tmp_path: Path, dtype: torch.dtype) -> None:
    value = (torch.arange(100) % 2).to(dtype)
    torch.save(value, tmp_path / "a.pt")
    assert torch.equal(read_tensor(tmp_path / "a.pt"), value)
    if dtype != torch.bfloat16:
        np.save(tmp_path / "a.npy", value.numpy())
        assert torch.equal(read_tensor(str(tmp_path / "a.npy")), value)


def test_a_file_per_part(tmp_path: Path) -> None:
    pieces = [torch.tensor([5, 7]), torch.empty(0, dtype=torch.int64), *torch.arange(9).split(1)]
    folder = tmp_path / "train"
    folder.mkdir()
    for number, ids in enumerate(pieces):
        torch.save(ids, folder / f"partition{number}.pt")
    assert torch.equal(read_tensor(folder), torch.cat(pieces))
    (folder / "partition1.pt").unlink()
    with pytest.raises(ValueError, match="no file of part 1"):
        read_tensor(folder)
    np.save(folder / "x1.npy", np.arange(2))
    np.save(folder / "y2.npy", np.arange(2))
    with pytest.raises(ValueError, match="two files of part 2"):
        read_tensor(folder)


class _Runs:
    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


def test_nothing_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(_Runs(), "a.pt")
    (tmp_path / "b.pt").write_bytes(pickle.dumps(_Runs()))
    np.save("c.npy", np.array([_Runs()], dtype=object), allow_pickle=True)
    torch.save({"x": torch.ones(2)}, "d.pt")
    (tmp_path / "e.pt").write_bytes(b"")
    (tmp_path / "f.csv").write_text("1")
    for name in ("a.pt", "b.pt", "c.npy", "d.pt", "e.pt", "f.csv"):
        with pytest.raises(ValueError, match=name):
            read_tensor(name)
    assert not (tmp_path / "ran").exists()
    with pytest.raises(FileNotFoundError):
        read_tensor("g.pt")


def test_sets(tmp_path: Path) -> None:
    path = pyg_scale.save(graphs.hostile(), tmp_path / "graph", index_sets={"test": [1]})
    before = pyg_scale.open(path)
    torch.save(torch.tensor([3, 2]), tmp_path / "train.pt")
    add_index_sets(path, {"train": tmp_path / "train.pt", "val": torch.arange(100) < 4})
    found = pyg_scale.open(path, verify=True)
    assert found.index_set("train").tolist() == [3, 2]
    assert found.index_set("val").tolist() == [0, 1, 2, 3]
    assert found.index_set("test").tolist() == [1]
    assert sorted(before.graph_directory.meta.index_sets[""]) == ["test"]
    with pytest.raises(ValueError, match="index set 'train' already"):
        add_index_sets(path, {"other": [1], "train": [1]})
    with pytest.raises(IndexError, match="'other' has node 100"):
        add_index_sets(path, {"other": [100]})
    assert sorted(pyg_scale.open(path).graph_directory.meta.index_sets[""]) == [
        *("test", "train", "val"),
    ]
    with pytest.raises(TypeError, match=r"'item' must be ids or a mask \(got dict\).*{name: ids}"):
        add_index_sets(path, {"item": {"train": [1]}})
    typed = pyg_scale.save(graphs.hetero(), tmp_path / "typed")
    add_index_sets(typed, {"item": {"train": [1]}, "user": {"train": [2]}})
    found = pyg_scale.open(typed)
    with pytest.raises(KeyError, match="exists for item, user"):
        found.index_set("train")
    assert found.index_set("train", "user")[1].tolist() == [2]


def test_labels(tmp_path: Path) -> None:
    data = graphs.hostile()
    labels = data.y.clone()
    del data.y
    path = pyg_scale.save(data, tmp_path / "graph")
    torch.save(labels, tmp_path / "label.pt")
    add_node_attribute(path, "y", tmp_path / "label.pt")
    assert torch.equal(pyg_scale.open(path, verify=True).y, labels)
    for name in ("y", "x", "edge_attr", "edge_index", "num_nodes"):
        with pytest.raises(ValueError, match=f"has '{name}' already"):
            add_node_attribute(path, name, labels)
    with pytest.raises(ValueError, match="expected 100 rows"):
        add_node_attribute(path, "z", labels[:5])
    with pytest.raises(ValueError, match="no node type 'item'"):
        add_node_attribute(path, "z", labels, "item")
    typed = pyg_scale.save(graphs.hetero(), tmp_path / "typed")
    add_node_attribute(typed, "y", torch.eye(12), "item")
    assert torch.equal(pyg_scale.open(typed)["item"].y, torch.eye(12))


@pytest.mark.parametrize("kind", ["random", "range"])
def test_labels_of_parts(tmp_path: Path, kind: str) -> None:
    pyg_scale.save(graphs.hostile(), tmp_path / "whole")
    assignment = torch.randint(3, (100,), generator=torch.Generator().manual_seed(0)).int()
    assignment = assignment.sort().values if kind == "range" else assignment
    write_partition(tmp_path / "whole", Partition({None: assignment}, 3, "m"), tmp_path / "parts")
    labels = torch.randn(100, 2)
    add_node_attribute(tmp_path / "parts", "z", labels)
    assert torch.equal(pyg_scale.open(tmp_path / "parts", verify=True).z, labels)
    part = pyg_scale.open(tmp_path / "parts", part=1)
    assert torch.equal(part.node_attribute(None, "z"), labels[part.orig_id(None)])
    (tmp_path / "parts" / "part-0").rename(tmp_path / "away")
    with pytest.raises(GraphDirectoryError, match="lacks parts"):
        add_node_attribute(tmp_path / "parts", "zz", labels)


def test_what_fails_changes_nothing(tmp_path: Path) -> None:
    path = pyg_scale.save(graphs.hostile(), tmp_path / "graph")
    meta = (path / "META.json").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for size in (100, 1000, 2000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            with pytest.raises(GraphDirectoryError, match="cannot be written"):
                add_node_attribute(path, "z", torch.ones(100))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert (path / "META.json").read_bytes() == meta
        pyg_scale.open(path, verify=True)
    with DirectoryWriter(path, overwrite=True), pytest.raises(GraphDirectoryError, match="another"):
        add_node_attribute(path, "z", torch.ones(100))
    add_node_attribute(path, "z", torch.ones(100))
    assert pyg_scale.open(path, verify=True).z.sum() == 100
    assert os.listdir(tmp_path) == ["graph"]
    with pytest.raises(GraphDirectoryError, match="is not a graph directory"):
        add_index_sets(tmp_path / "nothing", {"a": [1]})
    assert os.listdir(tmp_path) == ["graph"]
