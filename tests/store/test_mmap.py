"""Mapped stores: directories of tensors, graph directories, other processes, damage."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import pickle
import signal
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data, HeteroData

import pyg_scale
from pyg_scale.errors import GraphDirectoryError
from pyg_scale.loader import NeighborLoader
from pyg_scale.store import MemoryFeatureStore, MemoryGraphStore, Mmap, MmapGraph, topology_of
from pyg_scale.store.directory import (
    Attribute,
    DirectoryWriter,
    EdgeMeta,
    Meta,
    NodeMeta,
)
from tests.store.edges import CITES, E, N, assert_is, edge_index

pytestmark = [
    pytest.mark.matrix(2),
    pytest.mark.filterwarnings("ignore:.*plain-torch path.*:RuntimeWarning"),
]


def graph_directory(path: Path, *, dtype: torch.dtype = torch.int64) -> Data:
    """A homogeneous graph in memory and, at ``path``, as a graph directory."""
    data = Data(
        x=torch.randn(N, 5),
        y=torch.arange(N),
        edge_index=edge_index().to(dtype),
        edge_attr=torch.randn(E, 2),
        num_nodes=N,
    )
    assert data.edge_index is not None
    csc = topology_of(data).csc[None]
    assert csc.edge_id is not None
    name = str(dtype).removeprefix("torch.")
    with DirectoryWriter(path) as writer:
        writer.write("part-0/nodes/attributes/x.npy", data.x)
        writer.write("part-0/nodes/attributes/y.npy", data.y)
        writer.write("part-0/edges/attributes/edge_attr.npy", data.edge_attr)
        writer.write("part-0/edges/indptr.npy", csc.indptr)
        writer.write("part-0/edges/indices.npy", csc.indices)
        writer.write("part-0/edges/edge_id.npy", csc.edge_id)
        nodes = NodeMeta(
            None,
            N,
            {"x": Attribute("float32", (5,)), "y": Attribute("int64")},
            part_nodes=[N],
            part_halo=[0],
        )
        edges = EdgeMeta(
            None,
            E,
            index_dtype=name,
            indices_dtype="int32",
            edge_id_dtype="int32",
            attributes={"edge_attr": Attribute("float32", (2,))},
            part_edges=[E],
        )
        writer.commit(Meta({None: nodes}, {None: edges}))
    return data


def test_features_of_a_graph_directory(tmp_path: Path) -> None:
    data = graph_directory(tmp_path / "g")
    store = Mmap(tmp_path / "g", readahead=False)
    assert store.read_only
    index = torch.tensor([5, 0, 5])
    assert torch.equal(store[None, "x", index], data.x[index])
    assert torch.equal(store[(None, None), "edge_attr", index], data.edge_attr[index])
    assert torch.equal(store[None, "y", None], data.y)
    listed = {(a.group_name, a.attr_name) for a in store.get_all_tensor_attrs()}
    assert listed == {(None, "x"), (None, "y"), ((None, None), "edge_attr")}
    with pytest.raises(PermissionError, match="graph directory"):
        store[None, "x", None] = data.x
    with pytest.raises(PermissionError):
        store.remove_tensor(None, "x", None)
    with pytest.raises(KeyError, match="'z' is not in the store"):
        store[None, "z", None]
    store[None, "x", None].zero_()  # copy-on-write: the file is as it was
    assert torch.equal(Mmap(tmp_path / "g")[None, "x", None], data.x)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_topology_of_a_graph_directory_is_mapped(
    tmp_path: Path, direction: str, dtype: torch.dtype
) -> None:
    data = graph_directory(tmp_path / "g", dtype=dtype)
    store = MmapGraph(tmp_path / "g")
    row, col = store.get_edge_index(store.get_all_edge_attrs()[0])
    assert torch.equal(torch.stack([row, col]), data.edge_index) and row.dtype == dtype
    pair = (Mmap(tmp_path / "g"), store)
    if direction == "backward":
        with pytest.warns(UserWarning, match="built in the memory .* in-edges of nodes"):
            graph = topology_of(pair, direction=direction)
        assert_is(graph.csc[None], *data.edge_index.flip(0), N)
        return
    graph = topology_of(pair)
    assert_is(graph.csc[None], *data.edge_index, N)
    assert graph.index_dtype == dtype and graph.num_nodes == {None: N}
    assert _maps_of(tmp_path / "g", graph.csc[None].indices.data_ptr())
    again = topology_of((MemoryFeatureStore(), MmapGraph(tmp_path / "g")))
    assert again is graph, "one topology per process"
    assert len(pickle.dumps(graph)) < 1000 and pickle.loads(pickle.dumps(graph)) is graph
    assert graph.share_memory_() is graph


def _maps_of(path: Path, address: int) -> bool:
    """Whether the memory at an address is a file below a path."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(x, 16) for x in line.split()[0].split("-"))
        if begin <= address < end:
            return str(path) in line
    return False


def test_another_time_or_weight_is_built_in_memory(tmp_path: Path) -> None:
    graph_directory(tmp_path / "g")
    features = MemoryFeatureStore()
    features[None, "t", None] = torch.randint(0, 5, (N,))
    features[(None, None), "w", None] = torch.rand(E)
    pair = (features, MmapGraph(tmp_path / "g"))
    for options, why in (({"time_attr": "t"}, "time_attr=None"), ({"weight_attr": "w"}, "weights")):
        with pytest.warns(UserWarning, match=why):
            graph = topology_of(pair, **options)
        assert graph.is_temporal == ("time_attr" in options)


@pytest.mark.parametrize("layout", ["coo", "csc"])
def test_a_topology_is_built_once_and_written(tmp_path: Path, layout: str) -> None:
    edges = edge_index()
    pair: Any = (edges[0], edges[1])
    if layout == "csc":
        edges = edges[:, edges[1].argsort(stable=True)]
        pair = edges[0], torch.from_numpy(np.searchsorted(edges[1].numpy(), np.arange(N + 1)))
    store = MmapGraph(tmp_path)
    store.put_edge_index(pair, edge_type=CITES, layout=layout, size=(N, N))
    features = MemoryFeatureStore()
    features["paper", "t", None] = torch.randint(0, 9, (N,))
    graph = topology_of((features, store))
    assert_is(graph.csc[CITES], *edges, N)
    files = sorted(p.name for p in tmp_path.iterdir())
    assert _maps_of(tmp_path, graph.csc[CITES].indptr.data_ptr())
    assert topology_of((features, MmapGraph(tmp_path))) is graph
    assert pickle.loads(pickle.dumps(graph)) is graph
    timed = topology_of((features, store), time_attr="t")
    assert timed.is_temporal and timed is topology_of((features, store), time_attr="t")
    features["paper", "t", None] = torch.randint(0, 9, (N,))
    other = topology_of((features, store), time_attr="t")
    assert other is not timed, "other times are another topology"
    assert_is(other.csc[CITES], *edges, N, features["paper", "t", None][edges[0]].tolist())
    backward = topology_of((features, store), direction="backward")
    assert_is(backward.csc[CITES], *edges.flip(0), N)
    again = edges.flip(1).clone()
    del graph, timed, other, backward
    gc.collect()
    store.remove_edge_index(edge_type=CITES, layout=layout)
    store.put_edge_index((again[0], again[1]), edge_type=CITES, layout="coo", size=(N, N))
    assert_is(topology_of((features, store)).csc[CITES], *again, N)
    assert not set(files) - {"STORE.json", ".lock"} <= {p.name for p in tmp_path.iterdir()}


WORKERS: dict[str, Any] = {
    "none": {},
    "threads": {"num_workers": 2},
    "fork": {"num_workers": 1, "multiprocessing_context": "fork"},
    "spawn": {"num_workers": 1, "multiprocessing_context": "spawn"},
}


@pytest.mark.parametrize(
    "workers",
    [w if w != "spawn" else pytest.param(w, marks=pytest.mark.slow) for w in WORKERS],
)
def test_batches_are_the_same_as_in_memory(tmp_path: Path, workers: str) -> None:
    if workers == "spawn" and os.environ["PYG_SCALE_KERNELS"] == "never":
        pytest.skip("once is enough: the process takes seconds to start")
    data = graph_directory(tmp_path / "g")
    options: Any = {"num_neighbors": [3, 2], "batch_size": 16, "seed": 3}
    expected = list(NeighborLoader(data, **options))
    options |= WORKERS[workers]
    bare = Data(edge_index=data.edge_index, num_nodes=N)
    for given, extra in (
        ((Mmap(tmp_path / "g"), MmapGraph(tmp_path / "g")), {}),
        (bare, {"feature_store": Mmap(tmp_path / "g")}),
    )[: 1 if workers == "spawn" else 2]:
        for batch, wanted in zip(NeighborLoader(given, **options, **extra), expected, strict=True):
            for name in ("n_id", "e_id", "edge_index", "x", "y", "edge_attr"):
                assert torch.equal(batch[name], wanted[name]), name


def test_by_name(kernels: None) -> None:
    data = Data(x=torch.randn(N, 3), y=torch.arange(N), edge_index=edge_index(), num_nodes=N)
    for name in ("mmap", "shared"):
        loader = NeighborLoader(data, [2], batch_size=N, feature_store=name)
        batch = next(iter(loader))
        assert torch.equal(batch.x, data.x[batch.n_id]) and torch.equal(batch.y, batch.n_id)
        path = loader._features.store.path
        assert path.is_dir()
        del loader, batch
        gc.collect()
        assert not path.exists(), "a store without a name goes with the last who has it"


def test_a_directory_stays_and_is_opened_again(tmp_path: Path) -> None:
    x = torch.randn(7, 3).bfloat16()
    store = Mmap(tmp_path / "new")
    store["a/../b", "x.y", None] = x
    store[CITES, "w", None] = torch.arange(4)
    for other in (Mmap(tmp_path / "new"), pickle.loads(pickle.dumps(store))):
        assert torch.equal(other["a/../b", "x.y", None], x)
        assert other[CITES, "w", 2].item() == 2
    old = store["a/../b", "x.y", None]
    Mmap(tmp_path / "new")["a/../b", "x.y", None] = -x
    assert torch.equal(store["a/../b", "x.y", None], -x) and torch.equal(old, x)
    assert sorted(p.suffix for p in (tmp_path / "new").iterdir()) == ["", ".json", ".npy", ".npy"]


def test_what_is_no_directory_of_tensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("")
    for wrong, why in (("file", "is a file"), ("other", "thesis.tex")):
        for cls in (Mmap, MmapGraph):
            with pytest.raises(GraphDirectoryError, match=why):
                cls(tmp_path / wrong)


@pytest.mark.parametrize("damage", ["cut", "gone", "json", "version", "outside", "other"])
def test_damage_is_named(tmp_path: Path, damage: str) -> None:
    Mmap(tmp_path)["paper", "x", None] = torch.ones(9, 3)
    file, index = next(tmp_path.glob("*.npy")), tmp_path / "STORE.json"
    found = json.loads(index.read_text())
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    elif damage == "gone":
        file.unlink()
    elif damage == "other":
        np.save(file, np.ones((9, 3)))
    elif damage == "json":
        index.write_text(index.read_text()[:-9])
    elif damage == "version":
        index.write_text(json.dumps(found | {"version": 99}))
    else:
        found["entries"][0]["arrays"]["rows"][0] = "../x.npy"
        index.write_text(json.dumps(found))
    match = index.name if damage in ("json", "version", "outside") else file.name
    with pytest.raises(GraphDirectoryError, match=match):
        Mmap(tmp_path)["paper", "x", None]


def test_a_failed_write_leaves_the_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Mmap(tmp_path)
    store["paper", "x", None] = torch.ones(3)
    before = sorted(p.name for p in tmp_path.iterdir())

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        store["paper", "x", None] = torch.zeros(5)
    monkeypatch.undo()
    assert Mmap(tmp_path)["paper", "x", None].tolist() == [1, 1, 1]
    assert sorted(p.name for p in tmp_path.iterdir()) in (before, [".STORE.json.partial", *before])


def _rewrite(path: str, ready: Any) -> None:
    store, number = Mmap(path), 0
    while True:
        store["paper", "x", None] = torch.full((20_000,), float(number))
        number += 1
        if number == 3:
            ready.set()


def test_a_writer_that_is_killed_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    for _ in range(6):
        ready = context.Event()
        process = context.Process(target=_rewrite, args=(str(tmp_path), ready), daemon=True)
        process.start()
        assert ready.wait(30)
        os.kill(process.pid, signal.SIGKILL)  # type: ignore[arg-type]
        process.join(10)
        found = Mmap(tmp_path)["paper", "x", None]
        assert found.shape == (20_000,) and found.unique().numel() == 1
    Mmap(tmp_path)["paper", "x", None] = torch.ones(2)  # the lock went with the process
    assert Mmap(tmp_path)["paper", "x", None].tolist() == [1, 1]


def _add_rows(path: str, number: int) -> None:
    store = Mmap(path)
    for row in range(number, 60, 3):
        store.put_tensor(torch.tensor([float(row)]), "paper", "x", torch.tensor([row]))


def test_processes_that_write_rows_lose_none(tmp_path: Path) -> None:
    Mmap(tmp_path)["paper", "x", None] = torch.full((60,), -1.0)
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_add_rows, args=(str(tmp_path), i)) for i in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert Mmap(tmp_path)["paper", "x", None].tolist() == list(range(60))


def test_heterogeneous_stores_with_mmap(tmp_path: Path) -> None:
    data = HeteroData()
    data["paper"].x, data["author"].x = torch.randn(N, 3), torch.randn(25, 2)
    data["author", "writes", "paper"].edge_index = edge_index(25, N)
    features, graph = Mmap(tmp_path / "f"), MmapGraph(tmp_path / "g")
    memory: Any = (MemoryFeatureStore(), MemoryGraphStore())
    for f, g in ((features, graph), memory):
        f["paper", "x", None], f["author", "x", None] = data["paper"].x, data["author"].x
        row, col = data["author", "writes", "paper"].edge_index
        g.put_edge_index((row, col), edge_type=("author", "writes", "paper"), layout="coo",
                         size=(25, N))  # fmt: skip
    options: Any = {"num_neighbors": [2], "input_nodes": "paper", "seed": 1, "batch_size": 50}
    for batch, wanted in zip(
        NeighborLoader((features, graph), **options), NeighborLoader(memory, **options), strict=True
    ):
        for node_type in ("paper", "author"):
            assert torch.equal(batch[node_type].x, wanted[node_type].x)


@pytest.mark.parametrize("options", [{}, {"time_attr": "t"}, {"weight_attr": "w"}], ids=str)
@pytest.mark.parametrize("typed", [False, True])
def test_saved_graphs_give_the_batches_of_memory(
    tmp_path: Path, typed: bool, options: dict[str, str]
) -> None:
    data: Any = HeteroData() if typed else Data()
    nodes, edges = (data["paper"], data[CITES]) if typed else (data, data)
    nodes.x, nodes.num_nodes = torch.randn(N, 3), N
    nodes.t = torch.randint(0, 9, (N,))
    edges.edge_index, edges.w = edge_index(), torch.rand(E)
    pyg_scale.save(data, tmp_path / "g", **options)
    pair = (Mmap(tmp_path / "g"), MmapGraph(tmp_path / "g"))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # nothing is built in memory
        warnings.filterwarnings("ignore", ".*plain-torch path", RuntimeWarning)
        graph = topology_of(pair, **options)
        assert _maps_of(tmp_path / "g", graph.csc[CITES if typed else None].indices.data_ptr())
        arguments: Any = {
            "num_neighbors": [3, 2],
            "input_nodes": "paper" if typed else None,
            "batch_size": 8,
            "seed": 5,
            **options,
        }
        for got, expected in zip(
            NeighborLoader(pair, **arguments), NeighborLoader(data, **arguments), strict=True
        ):
            for store, wanted in zip(got.stores, expected.stores, strict=True):
                for name in ("n_id", "x", "t", "edge_index", "e_id", "w"):
                    assert (name in store) == (name in wanted), name
                    if name in store:
                        assert torch.equal(store[name], wanted[name]), name
