"""An opened graph is PyG's own: attributes, copies, transforms, changes, other processes."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.multiprocessing as mp
import torch_geometric.transforms as transforms
from torch import Tensor
from torch_geometric.data import Batch, Data, HeteroData

import pyg_scale
from pyg_scale.files.npy import npy_header, num_bytes
from pyg_scale.loader import NeighborLoader
from pyg_scale.store import Disk, Mmap, topology_of
from pyg_scale.store.directory import (
    Attribute,
    EdgeMeta,
    FileMeta,
    Meta,
    NodeMeta,
    opening,
    reader,
)
from pyg_scale.store.directory.layout import expected_files
from pyg_scale.testing import graphs
from tests import preloaded
from tests.cases import shown
from tests.loader.batches import assert_same, assert_same_batches
from tests.store.directory.graphs import bits, edge_list_was_made, everything, opened


def assert_same_graph(found: Any, data: Any) -> None:
    """All attributes, in their order, to the bit."""
    assert len(found.stores) == len(data.stores)
    for ours, theirs in zip(found.stores, data.stores):
        assert list(ours.keys()) == list(theirs.keys())
        for name, value in theirs.items():
            other = ours[name]
            assert type(other) is type(value), name
            if isinstance(value, Tensor):
                assert other.dtype == value.dtype and other.shape == value.shape, name
                assert torch.equal(bits(other), bits(value)), name
            else:
                assert other == value, name


@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("time_attr", [None, "time", "when"])
def test_everything_is_there(tmp_path: Path, index_dtype: torch.dtype, time_attr: Any) -> None:
    data = everything(index_dtype)
    found = opened(data, tmp_path / "graph", time_attr=time_attr)
    assert isinstance(found, Data)
    assert_same_graph(found, data)
    typed = graphs.hetero(index_dtype)
    typed.name, typed["item"].kind, typed["user", "buys", "item"].unit = "n", "k", 3
    typed["item"].prototypes = torch.arange(6).view(2, 3)
    found = opened(typed, tmp_path / "typed", time_attr=time_attr)
    assert isinstance(found, HeteroData)
    assert found.metadata() == typed.metadata()
    assert_same_graph(found, typed)


def test_looking_makes_no_edge_list(tmp_path: Path) -> None:
    data = everything()
    found = opened(data, tmp_path / "graph")
    assert repr(found) == repr(data).replace("Data(", "DirectoryData(")
    assert found.num_nodes == 100 and found.num_edges == data.num_edges
    assert found.num_features == 6 and found.num_edge_features == data.num_edge_features
    assert set(found.keys()) == set(data.keys()) and len(found) == len(data)
    assert "edge_index" in found and "edge_index" in found._store and "nothing" not in found
    assert sorted(found.node_attrs()) == sorted(data.node_attrs())
    assert sorted(found.edge_attrs()) == sorted(data.edge_attrs())
    assert found.size() == (100, 100) and not found.is_cuda
    assert found.get_all_tensor_attrs() == data.get_all_tensor_attrs()
    other = copy.copy(found)
    other.to("cpu").cpu()
    pickle.loads(pickle.dumps(found))
    copy.deepcopy(found)
    normalize = transforms.NormalizeFeatures()  # x is not contiguous in memory: other rounding
    assert torch.allclose(normalize(copy.copy(found)).x, normalize(data.clone()).x)
    assert not edge_list_was_made(found) and not edge_list_was_made(other)
    assert torch.equal(found.edge_index, data.edge_index)
    assert other.edge_index is found.edge_index  # as copies share tensors in PyG


def test_looking_makes_no_edge_list_of_a_type(tmp_path: Path) -> None:
    data = graphs.hetero()
    found = opened(data, tmp_path / "graph")
    assert repr(found) == repr(data).replace("HeteroData(", "DirectoryHeteroData(")
    assert found.num_nodes == data.num_nodes and found.num_edges == data.num_edges
    assert found.num_features == data.num_features
    assert found.num_edge_features == data.num_edge_features
    assert found["user", "buys", "item"].size() == (20, 12)
    assert found["buys"].num_edges == 70 and "edge_index" in found["buys"]
    assert found.node_type_subgraph(["user", "item"]).metadata()[0] == ["user", "item"]
    assert set(found.x_dict) == set(data.x_dict)
    copy.copy(found).to("cpu")
    pickle.loads(pickle.dumps(found))
    assert not edge_list_was_made(found)
    for edge_type, edge_index in data.edge_index_dict.items():
        assert torch.equal(found[edge_type].edge_index, edge_index)


def test_pyg_does_with_it_what_it_does_with_any(tmp_path: Path) -> None:
    data = everything()
    for name in ("eighth", "complex", "name"):
        del data[name]
    found = opened(data, tmp_path / "graph")
    assert found.validate() and found.is_directed() and found.has_self_loops()
    pairs: list[tuple[Any, Any]] = [
        (found.clone(), data.clone()),
        (copy.deepcopy(found), copy.deepcopy(data)),
        (found.subgraph(torch.arange(20)), data.subgraph(torch.arange(20))),
        (Data.from_dict(found.to_dict()), Data.from_dict(data.to_dict())),
        (found.sort(), data.sort()),
    ]
    for ours, theirs in pairs:
        assert_same_graph(ours, theirs)
    assert Data(**found.to_dict()).num_nodes == 100
    assert Batch.from_data_list([found, found]).num_nodes == 200
    assert found.clone().x.data_ptr() != found.x.data_ptr()


def _change(data: Data, change: str) -> Data:
    if change == "another edge list":
        data.edge_index = data.edge_index.flip(0)
    elif change == "edges in place":
        data.edge_index[0] = 0
    elif change == "by name":
        data["edge_index"] = data["edge_index"][:, torch.arange(data.num_edges).flip(0)]
    elif change == "through the storage":
        data._store["edge_index"] = data._store["edge_index"].roll(5, 1)
    elif change == "a transform":
        return transforms.ToUndirected()(data)
    elif change == "in the copy of a copy":
        return transforms.RemoveDuplicatedEdges(["weight"])(copy.copy(copy.copy(data)))
    elif change == "more nodes":
        data.num_nodes, data.time = 120, torch.cat([data.time, data.time[:20]])
    elif change == "a permutation":
        return data.sort()
    elif change == "times in place":
        data.time.fill_(3)
    elif change == "other times":
        data.time = data.time.flip(0)
    elif change == "weights in place":
        data.weight.copy_(torch.arange(data.num_edges) % 3)
    elif change == "other weights":
        data.weight = torch.ones(data.num_edges)
    elif change == "nothing":
        data.edge_index = data.edge_index
    return data


CHANGES = (
    "another edge list",
    "edges in place",
    "by name",
    "through the storage",
    "a transform",
    "in the copy of a copy",
    "more nodes",
    "a permutation",
    "times in place",
    "other times",
    "weights in place",
    "other weights",
    "nothing",
)


@pytest.mark.filterwarnings("ignore:.*in the memory of this process:UserWarning")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("options", [{}, {"time_attr": "time", "weight_attr": "weight"}], ids=str)
def test_a_changed_graph_is_sampled_as_it_is(
    tmp_path: Path, change: str, options: dict[str, Any]
) -> None:
    data = graphs.hostile()
    data = Data(**{k: data[k] for k in ("edge_index", "num_nodes", "time", "weight")})
    found = opened(data, tmp_path / "graph", **options)
    before = topology_of(found, **options)
    theirs, ours = _change(data.clone(), change), _change(found, change)

    def loader(graph: Any) -> NeighborLoader:
        nodes = torch.arange(0, 100, 7)
        return NeighborLoader(graph, [4, 3], nodes, batch_size=5, seed=1, **options)

    assert_same_batches(loader(theirs), loader(ours))
    same = change == "nothing" or (("times" in change or "weights" in change) and not options)
    assert (topology_of(ours, **options) is before) == same


def test_a_changed_type_leaves_the_others_mapped(tmp_path: Path) -> None:
    data = graphs.hetero()
    found = opened(data, tmp_path / "graph")
    for graph in (data, found):
        graph["buys"].edge_index = graph["buys"].edge_index[:, :30].clone()
        graph["buys"].when = graph["buys"].when[:30]
        graph["buys"].weight = graph["buys"].weight[:30]
        del graph["user", "likes", "item"]

    def loader(graph: Any) -> NeighborLoader:
        return NeighborLoader(graph, [4, 3], "item", batch_size=5, seed=1)

    assert_same_batches(loader(data), loader(found))
    made = [t for t, s in found.edge_items() if s._mapping.entry("edge_index") is None]
    assert made == [("user", "buys", "item")]
    assert not found["follows"]._mapping.entry("edge_index").made


def test_writes_stay_in_the_process(tmp_path: Path) -> None:
    data = everything()
    found = opened(data, tmp_path / "graph")
    found.x += 1
    found.train_mask[:] = True
    found.brain.zero_()
    found.edge_index[:] = 0
    found.y.numpy()[:] = 9
    assert torch.equal(found.x, data.x + 1) and found.train_mask.all()
    again = pyg_scale.open(tmp_path / "graph", verify=True)
    assert_same_graph(again, data)


def test_one_topology_and_one_mapping_for_all_of_a_process(tmp_path: Path) -> None:
    data = everything()
    options: dict[str, Any] = {"time_attr": "time", "weight_attr": "weight"}
    first = opened(data, tmp_path / "graph", **options)
    second = pyg_scale.open(tmp_path / "graph")
    graph = topology_of(first, **options)
    assert topology_of(second, **options) is graph
    assert topology_of(copy.copy(second), **options) is graph
    assert topology_of(first) is topology_of(second)
    name = str(tmp_path / "graph" / "part-0" / "edges" / "indices.npy")
    assert _maps(name) == 1
    assert graph.csc[None].indices.is_contiguous()
    del graph, first, second
    gc.collect()
    assert _maps(str(tmp_path)) == 0


def _maps(name: str) -> int:
    return sum(name in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_mappings_reserve_no_memory_and_hold_no_file_open(tmp_path: Path) -> None:
    """Else the system refuses to map a file that is larger than its memory."""
    found = opened(everything(), tmp_path / "graph")
    topology_of(found)
    text = Path("/proc/self/smaps").read_text()
    flags = re.findall(rf"{re.escape(str(tmp_path))}.*?VmFlags:([^\n]*)", text, re.DOTALL)
    assert len(flags) >= 10 and all("nr" in f.split() and "ac" not in f.split() for f in flags)
    held = [Path(f"/proc/self/fd/{fd}") for fd in Path("/proc/self/fd").iterdir()]
    files = [str(link.readlink()) for link in held if link.is_symlink()]
    assert not [name for name in files if name.startswith(str(tmp_path)) and name.endswith(".npy")]


def test_rows_of_large_files_begin_at_pages(tmp_path: Path) -> None:
    x = torch.randn(300, 1024)
    small = torch.randn(300, 8)
    data = Data(x=x, small=small, edge_index=torch.tensor([[0], [1]]))
    part = pyg_scale.save(data, tmp_path / "graph") / "part-0/nodes/attributes"
    assert (part / "x.npy").stat().st_size == 4096 + x.numel() * 4
    assert (part / "small.npy").stat().st_size == 128 + small.numel() * 4
    assert np.array_equal(np.load(part / "x.npy"), x.numpy())
    found = pyg_scale.open(tmp_path / "graph", verify=True)
    assert torch.equal(found.x, x) and found.x.data_ptr() % 4096 == 0
    for features in (Disk(tmp_path / "graph", "1MB"), Mmap(tmp_path / "graph")):
        assert torch.equal(features.get_tensor(None, "x", index=torch.arange(0, 300, 7)), x[::7])


def test_a_directory_of_any_size_opens_and_nothing_is_copied(tmp_path: Path) -> None:
    """A graph of terabytes, whose files have no content: opening reads none of it."""
    nodes, edges = 2**29, 2**31 + 7
    node = NodeMeta(None, nodes, {"x": Attribute("float32", (1000,))}, False, [nodes], [0])
    edge = EdgeMeta(None, edges, edge_id_dtype="int64", part_edges=[edges])
    meta = Meta({None: node}, {None: edge})
    for name, dtype, shape in expected_files(meta, [0]):
        file, header = tmp_path / name, npy_header(dtype, shape)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(header)
        os.truncate(file, len(header) + num_bytes(dtype, shape))
        meta.files[name] = FileMeta(file.stat().st_size, 0)
    (tmp_path / "META.json").write_text(meta.to_json())
    before = psutil.Process().memory_full_info().uss
    found = pyg_scale.open(tmp_path)
    graph = topology_of(found)
    assert repr(found) == f"DirectoryData(x=[{nodes}, 1000], edge_index=[2, {edges}])"
    assert graph.csc[None].indices.shape == (edges,) and found.x[nodes - 1, 999] == 0
    assert psutil.Process().memory_full_info().uss - before < 5_000_000


def _in_another_process(data: Any, loader: Any, queue: Any) -> None:
    topology = loader.node_sampler.topology
    stored = data.graph_directory.grouped[None]
    queue.put(
        (
            pickle.dumps([batch.n_id.numpy() for batch in loader]),
            topology.csc[None].indices is stored.indices,
            edge_list_was_made(data),
            float(data.x[0, 0]),
        )
    )


def test_another_process_opens_the_directory(tmp_path: Path) -> None:
    found = opened(everything(), tmp_path / "graph", weight_attr="weight")
    found.x[0, 0] = 77.0  # a change goes along
    loader = NeighborLoader(found, [3, 2], batch_size=50, weight_attr="weight", seed=1)
    small = pickle.dumps(pyg_scale.open(tmp_path / "graph"))
    assert len(small) < 20_000
    context = mp.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_in_another_process, args=(found, loader, queue))
    with preloaded.spawning():
        process.start()
    try:
        batches, is_mapped, made, changed = queue.get(timeout=60)
    finally:
        process.join(60)
        process.kill()
    expected = [batch.n_id.numpy() for batch in loader]
    assert all(map(np.array_equal, pickle.loads(batches), expected))
    assert is_mapped and not made and changed == 77.0


def test_another_process_refuses_another_graph(tmp_path: Path) -> None:
    found = opened(everything(), tmp_path / "graph")
    gone = pickle.dumps(found)
    pyg_scale.save(graphs.hostile(), tmp_path / "graph", overwrite=True)
    with pytest.raises(pyg_scale.errors.GraphDirectoryError, match="was replaced since"):
        pickle.loads(gone)


def test_a_replaced_directory_is_never_mixed_with_the_new_one(tmp_path: Path) -> None:
    data = everything()
    found = opened(data, tmp_path / "graph")
    other = everything()
    other.edge_index = other.edge_index.flip(0)  # files of the same lengths
    pyg_scale.save(other, tmp_path / "graph", overwrite=True)
    assert torch.equal(found.x, data.x)  # was mapped before
    with pytest.raises(pyg_scale.errors.GraphDirectoryError, match="was replaced or removed"):
        topology_of(found)
    assert torch.equal(pyg_scale.open(tmp_path / "graph").edge_index, other.edge_index)


@pytest.mark.parametrize("place", ["read_head", "graph_of", "check_lengths", "listdir"])
@pytest.mark.parametrize("times", [1, 2])
def test_a_directory_that_is_replaced_while_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, times: int
) -> None:
    """The new one is opened: of the old one, files may be gone, or whole parts."""
    path, old, new = tmp_path / "graph", everything(), graphs.hostile()
    pyg_scale.save(old, path)
    kept = pyg_scale.open(path) if place == "check_lengths" else None  # opened once more
    owner: Any = {"graph_of": opening, "check_lengths": reader.GraphDirectory, "listdir": os}
    owner = owner.get(place, reader)
    real = getattr(owner, place)
    left = times

    def replacing(*args: Any) -> Any:
        nonlocal left
        if left:
            left -= 1
            with monkeypatch.context() as inner:
                inner.setattr(owner, place, real)
                pyg_scale.save(new, path, overwrite=True)
        return real(*args)

    monkeypatch.setattr(owner, place, replacing)
    found = pyg_scale.open(path)
    assert not left
    assert_same_graph(found, new)
    del kept


def test_a_directory_that_is_damaged_is_opened_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = pyg_scale.save(everything(), tmp_path / "graph")
    (path / "part-0/edges/edge_id.npy").unlink()
    calls: list[Any] = []
    real = reader.read_head
    monkeypatch.setattr(reader, "read_head", lambda *args: calls.append(args) or real(*args))
    with pytest.raises(pyg_scale.errors.GraphDirectoryError, match=r"edge_id.npy is missing"):
        pyg_scale.open(path)
    assert len(calls) == 1


def test_under_inference_mode(tmp_path: Path) -> None:
    data = everything()
    path = pyg_scale.save(data, tmp_path / "graph")
    with torch.inference_mode():
        found = pyg_scale.open(path)
        loader = NeighborLoader(found, [2], batch_size=50, seed=1)
        assert_same_batches(NeighborLoader(data, [2], batch_size=50, seed=1), loader)


def test_what_pyg_guesses_is_recorded(tmp_path: Path) -> None:
    data = Data(edge_index=torch.tensor([[0, 3], [1, 2]]), y=torch.arange(4))
    with pytest.warns(UserWarning, match="Unable to accurately infer"):
        path = pyg_scale.save(data, tmp_path / "graph")
    found = pyg_scale.open(path)
    assert found.num_nodes == 4 and list(found._store.keys()) == ["edge_index", "y"]

    typed = HeteroData()
    typed["a", "to", "b"].edge_index = torch.tensor([[0, 3], [1, 2]])
    typed["b"].x = torch.ones(5, 2)
    found = opened(typed, tmp_path / "typed")
    assert found.metadata() == typed.metadata() == (["b"], [("a", "to", "b")])
    assert topology_of(found).num_nodes == topology_of(typed).num_nodes == {"b": 5, "a": 4}
    assert_same_batches(
        NeighborLoader(typed, [2], "b", batch_size=2, seed=0),
        NeighborLoader(found, [2], "b", batch_size=2, seed=0),
    )


@pytest.mark.parametrize("typed", [False, True])
def test_stores(tmp_path: Path, typed: bool) -> None:
    data: Any = graphs.hetero() if typed else graphs.hostile()
    found = opened(graphs.stores(data), tmp_path / "graph")
    for ours, theirs in zip(found.edge_stores, data.edge_stores):
        assert torch.equal(ours.edge_index, theirs.edge_index)
    for ours, theirs in zip(found.node_stores, data.node_stores):
        assert ours.num_nodes == theirs.num_nodes and torch.equal(ours.x, theirs.x)


def test_what_is_not_stored_as_it_is_asked_for_is_said(tmp_path: Path) -> None:
    found = opened(graphs.hostile(), tmp_path / "graph", time_attr="time")
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "order of time_attr='time', but that of edge id is requested"),
        ({"time_attr": "when"}, "times differ"),
        ({"direction": "backward"}, "out-edges are requested"),
    ]
    for options, message in cases:
        with pytest.warns(UserWarning, match=f"in the memory of this process.*{message}"):
            topology_of(found, **options)
    found.time[0] = 99
    with pytest.warns(UserWarning, match="times differ"):
        topology_of(found, time_attr="time")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        topology_of(pyg_scale.open(tmp_path / "graph"), time_attr="time")
        topology_of(pyg_scale.open(tmp_path / "graph"), time_attr="time", weight_attr="weight")
    with pytest.raises(ValueError, match="not sorted by destination"):
        topology_of(found, is_sorted=True)


def test_shared_memory_is_for_what_is_in_no_file(tmp_path: Path) -> None:
    found = opened(graphs.hostile(), tmp_path / "graph")
    graph = topology_of(found, weight_attr="weight").share_memory_()
    csc = graph.csc[None]
    assert not csc.indices.is_shared() and csc.weight_prefix.is_shared()
    again = pickle.loads(pickle.dumps(csc))
    assert torch.equal(again.weight_prefix, csc.weight_prefix) and again.time is None
    assert again.indices is found.graph_directory.grouped[None].indices


def test_graphs_without_edge_lists(tmp_path: Path) -> None:
    data = Data(x=torch.ones(3, 2))
    found = opened(data, tmp_path / "graph")
    assert_same_graph(found, data)
    assert found.num_edges == 0 and "edge_index" not in found
    found = opened(HeteroData(), tmp_path / "nothing")
    assert found.metadata() == ([], [])
    empty = Data(x=torch.empty(0, 4), edge_index=torch.empty(2, 0, dtype=torch.int64))
    found = opened(empty, tmp_path / "empty")
    assert_same_graph(found, empty)


NAMES = ["a/b", "..", ".x", "ä ö", "x" * 60, "a,b", "attributes", "%2F", "CON", "a.npy", "x", "X"]


def test_names_of_any_kind(tmp_path: Path) -> None:
    data = HeteroData()
    for i, name in enumerate(NAMES):
        data[name].x = torch.full((3, 1), float(i))
        data[name][name] = torch.arange(3)
        edge_type = (name, name, NAMES[0])
        data[edge_type].edge_index = torch.tensor([[0, 1, 2], [2, 1, 0]])
        data[edge_type][name] = torch.full((3,), i)
    data.graph = torch.arange(2)
    found = opened(data, tmp_path / "graph", index_sets={n: {n: [1]} for n in NAMES})
    assert_same_graph(found, data)
    pyg_scale.open(tmp_path / "graph", verify=True)
    everywhere = [path.resolve() for path in tmp_path.rglob("*")]
    assert all(p.is_relative_to(tmp_path / "graph") for p in everywhere)


def test_values_of_a_graph(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "text": "täxt",
        "number": 3,
        "ratio": 0.1,
        "large": 2**70,
        "flag": False,
        "infinite": float("inf"),
        "list": [1, "a", None, [True]],
        "tuple": (1, (2, [3])),
        "dict": {"a": {"b": (1,)}, "$tuple": 3},
        "scalar": torch.tensor(2.5),
        "matrix": torch.ones(2, 3, dtype=torch.bfloat16),
        "empty": torch.empty(0, 7),
        "nested": [torch.arange(2), {"t": torch.tensor(True)}],
        "array": np.arange(5, dtype=">i4"),
        "np_number": np.float32(1.5),
    }
    data = Data(x=torch.ones(30, 1), edge_index=torch.tensor([[0], [1]]))
    for name, value in values.items():
        data[name] = value
    found = opened(data, tmp_path / "graph")
    for name in ("text", "number", "ratio", "large", "flag", "infinite", "list", "tuple", "dict"):
        assert found[name] == values[name] and type(found[name]) is type(values[name]), name
    for name in ("scalar", "matrix", "empty"):
        assert torch.equal(found[name], values[name]) and found[name].dtype == values[name].dtype
    assert torch.equal(found.nested[0], torch.arange(2)) and found.nested[1]["t"].item() is True
    assert torch.equal(found.array, torch.arange(5, dtype=torch.int32))
    assert found.np_number == 1.5
    found.matrix.zero_()
    assert torch.equal(pyg_scale.open(tmp_path / "graph").matrix, values["matrix"])


@pytest.mark.parametrize(
    "value",
    [
        object(),
        {1: 2},
        {1, 2},
        [object()],
        np.array(["a"]),
        np.array([object()]),
        torch.eye(3).to_sparse(),
        lambda: 1,
        b"bytes",
    ],
    ids=shown,
)
@pytest.mark.parametrize("typed", [False, True])
def test_what_cannot_be_held_is_named(tmp_path: Path, value: Any, typed: bool) -> None:
    data: Any = graphs.hetero() if typed else graphs.hostile()
    (data["item"] if typed else data).strange = value
    with pytest.raises(TypeError, match="'strange'" + (" of 'item'" if typed else "")):
        pyg_scale.save(data, tmp_path / "graph")
    assert list(tmp_path.iterdir()) == []


def test_a_dictionary_by_numbers_is_named_so(tmp_path: Path) -> None:
    data = graphs.hostile()
    data.names = {"a": 1, 0: "b"}
    with pytest.raises(TypeError, match="'names' is a dictionary with the key 0, .* use str"):
        pyg_scale.save(data, tmp_path / "graph")


def test_wrong_arguments(tmp_path: Path) -> None:
    data = graphs.hostile()
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"time_attr": "nothing"}, ValueError, "time_attr='nothing'"),
        ({"weight_attr": "nothing"}, ValueError, "weight_attr='nothing'"),
        ({"index_sets": {"train": [100]}}, IndexError, "'train' has node 100"),
        ({"index_sets": {"train": torch.ones(9, dtype=torch.bool)}}, ValueError, "mask of 9"),
        ({"index_sets": {"train": [0.5]}}, TypeError, "integer ids"),
        ({"index_sets": {"train": [[1, 2]]}}, ValueError, "one-dimensional"),
    ]
    for options, error, message in cases:
        with pytest.raises(error, match=message):
            pyg_scale.save(data, tmp_path / "graph", **options)
    with pytest.raises(TypeError, match="must be Data, HeteroData or"):
        pyg_scale.save([data], tmp_path / "graph")
    with pytest.raises(ValueError, match="node type 'nothing'"):
        pyg_scale.save(graphs.hetero(), tmp_path / "graph", index_sets={"nothing": {}})
    with pytest.raises(TypeError, match="'adj_t' is a sparse matrix"):
        pyg_scale.save(Data(adj_t=torch.eye(3).to_sparse_csr(), num_nodes=3), tmp_path / "graph")
    bad = Data(edge_index=torch.tensor([[0], [7]]), num_nodes=3)
    with pytest.raises(IndexError, match="edge 0"):
        pyg_scale.save(bad, tmp_path / "graph")
    assert list(tmp_path.iterdir()) == []
    path = pyg_scale.save(data, tmp_path / "graph")
    with pytest.raises(FileExistsError, match="overwrite=True"):
        pyg_scale.save(data, path)
    with pytest.raises(FileExistsError, match="is not a graph directory"):
        pyg_scale.save(data, tmp_path, overwrite=True)
    assert_same(pyg_scale.open(path), data)


@pytest.mark.filterwarnings("error")
def test_edges_that_came_in_the_order_of_time_are_mapped_without_times_too(tmp_path: Path) -> None:
    data = graphs.hostile()
    data.time = torch.arange(data.num_nodes) // 3
    order = data.time[data.edge_index[0]].argsort(stable=True)
    data.edge_index, data.weight = data.edge_index[:, order], data.weight[order]
    found = opened(data, tmp_path / "graph", time_attr="time", weight_attr="weight")
    (csc,) = topology_of(found).csc.values()
    (timed,) = topology_of(found, time_attr="time").csc.values()
    assert csc.indices.data_ptr() == timed.indices.data_ptr()
    for options in ({}, {"weight_attr": "weight"}, {"disjoint": True}):
        options = {"input_nodes": torch.arange(100), "batch_size": 9, "seed": 1, **options}
        assert_same_batches(*(NeighborLoader(graph, [3, 2], **options) for graph in (data, found)))
