"""A snapshot is the graph that would have been saved at that time: files, batches, errors."""

from __future__ import annotations

import filecmp
import itertools
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data, HeteroData

import pyg_scale
from pyg_scale.datasets.read import read_npz
from pyg_scale.errors import GraphDirectoryError
from pyg_scale.files.place import Lock
from pyg_scale.loader import (
    HGTLoader,
    LinkNeighborLoader,
    NeighborLoader,
    RandomNodeLoader,
    ShaDowKHopSampler,
    ZipLoader,
)
from pyg_scale.ops.mapped_file import in_file
from pyg_scale.sampler import NegativeSampling
from pyg_scale.store import Disk, Mmap, MmapGraph
from pyg_scale.store.directory import GraphDirectory
from pyg_scale.store.directory.additions import add_index_sets
from pyg_scale.store.disk_features import DiskFeatures
from pyg_scale.testing import graphs
from tests.loader.batches import assert_same_batches
from tests.store.directory.appended import between, first, grown, in_order
from tests.store.directory.graphs import bits, everything
from tests.store.directory.test_batches import WAYS

STEPS = 3
EDGE = torch.zeros(2, 1, dtype=torch.int64)


@pytest.fixture(autouse=True)
def no_waiting_for_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test of this file could see that something was not flushed."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def recorded(options: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in options.items() if k in ("time_attr", "weight_attr")}


def batches(graph: Any, kind: str | None, size: int, **options: Any) -> Any:
    seeds = torch.arange(0, size, 2)
    if "input_time" in options:
        options["input_time"] = torch.full((len(seeds),), options["input_time"])
    nodes = seeds if kind is None else (kind, seeds)
    return NeighborLoader(graph, [4, 3], nodes, batch_size=9, shuffle=True, seed=4, **options)


def stores_of(path: Path, snapshot: int) -> Any:
    return Mmap(path, snapshot=snapshot), MmapGraph(path, snapshot=snapshot)


def same_files(left: Path, right: Path) -> None:
    """Two directories have the same files, the folder of appended rows aside."""
    names = [
        sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file())
        for root in (left, right)
    ]
    names[0] = [name for name in names[0] if not name.startswith("delta/")]
    assert names[0] == names[1]
    assert filecmp.cmpfiles(left, right, names[0], shallow=False)[1:] == ([], [])


# Batches ##################################################################################


@pytest.mark.matrix(8)
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("options", WAYS, ids=str)
def test_homogeneous(tmp_path: Path, options: dict[str, Any], index_dtype: torch.dtype) -> None:
    data = in_order(everything(index_dtype), STEPS)
    states = grown(data, tmp_path / "graph", STEPS, **recorded(options))
    for number, state in enumerate(states):
        found = pyg_scale.open(tmp_path / "graph", snapshot=number)
        for graph in (found, stores_of(tmp_path / "graph", number)):
            if graph is not found and options.get("num_workers"):
                continue
            size = state.num_nodes
            left, right = (batches(g, None, size, **options) for g in (state, graph))
            if graph is found:
                assert_same_batches(left, right)
            else:
                assert [b.n_id.tolist() for b in left] == [b.n_id.tolist() for b in right]
    assert_same_batches(batches(data, None, 100, **options), batches(found, None, 100, **options))


@pytest.mark.matrix(6)
@pytest.mark.parametrize("sampler", ["native", "reference"])
@pytest.mark.parametrize("options", WAYS, ids=str)
def test_heterogeneous(tmp_path: Path, options: dict[str, Any], sampler: str) -> None:
    data = in_order(graphs.hetero(), STEPS)
    states = grown(data, tmp_path / "graph", STEPS, **recorded(options))
    for number, state in enumerate(states):
        found = pyg_scale.open(tmp_path / "graph", snapshot=number)
        size = state["item"].num_nodes
        given = options | {"neighbor_sampler": sampler}
        assert_same_batches(
            batches(state, "item", size, **options), batches(found, "item", size, **given)
        )


@pytest.mark.parametrize("name", ["cora", "history"])
def test_real_graphs(tmp_path: Path, data_dir: Path, name: str) -> None:
    data = in_order(read_npz(data_dir / f"{name}.npz"), STEPS)
    kind, time_attr = ("commit", "time") if name == "history" else (None, None)
    states = grown(data, tmp_path / "graph", STEPS, time_attr=time_attr)
    for number, state in enumerate(states):
        found = pyg_scale.open(tmp_path / "graph", snapshot=number)
        seeds = torch.arange(0, (state if kind is None else state[kind]).num_nodes, 29)
        common: dict[str, Any] = {"batch_size": 100, "shuffle": True, "seed": 4}
        common |= {"num_neighbors": [10, 5], "time_attr": time_attr}
        common["input_nodes"] = seeds if kind is None else (kind, seeds)
        assert_same_batches(NeighborLoader(state, **common), NeighborLoader(found, **common))


def test_other_loaders(tmp_path: Path) -> None:
    """Links with negatives, types, induced subgraphs, layers: all see the merged in-edges."""
    data = in_order(everything(), STEPS)
    typed = in_order(graphs.hetero(), STEPS)
    grown(data, tmp_path / "plain", STEPS)
    grown(typed, tmp_path / "typed", STEPS)
    found = pyg_scale.open(tmp_path / "plain")
    seeds = torch.arange(20)
    negative = NegativeSampling("binary", 1.0)
    common = {"batch_size": 7, "seed": 4, "shuffle": True}
    for make in (
        lambda graph: LinkNeighborLoader(graph, [4, 3], neg_sampling=negative, **common),
        lambda graph: ShaDowKHopSampler(graph, 2, 3, seeds, **common),
        lambda graph: NeighborLoader(graph, [9, 9], seeds, neighbor_sampler="labor", **common),
        lambda graph: NeighborLoader(graph, [9, 9], seeds, neighbor_sampler="ladies", **common),
        lambda graph: RandomNodeLoader(graph, 4, seed=4),
    ):
        assert_same_batches(make(data), make(found))
    node = ("item", torch.arange(12))
    found = pyg_scale.open(tmp_path / "typed")
    expected = HGTLoader(typed, [4, 3], node, **common)
    assert_same_batches(expected, HGTLoader(found, [4, 3], node, **common))


@pytest.mark.matrix(2)
@pytest.mark.parametrize("name", ["plain", "times", "times of edges", "weights", "types", "floats"])
def test_compaction_writes_what_saving_the_graph_would(tmp_path: Path, name: str) -> None:
    options: dict[str, Any] = {
        "times": {"time_attr": "time", "weight_attr": "weight"},
        "times of edges": {"time_attr": "when"},
        "weights": {"weight_attr": "weight"},
        "types": {"time_attr": "when", "weight_attr": "weight"},
        "floats": {"time_attr": "time"},
    }.get(name, {})
    data: Any = graphs.hetero() if name == "types" else everything()
    if name == "floats":
        data.time = data.time.double() - 3.5
    data = in_order(data, STEPS)
    sets = {"item": {"train": torch.arange(3)}} if name == "types" else {"train": torch.arange(9)}
    grown(data, tmp_path / "graph", STEPS, index_sets=sets, **options)
    pyg_scale.save(data, tmp_path / "whole", index_sets=sets, **options)
    assert pyg_scale.compact(tmp_path / "graph") == STEPS - 1
    same_files(tmp_path / "graph", tmp_path / "whole")
    found = pyg_scale.open(tmp_path / "graph", verify=True)
    assert found.graph_directory.snapshot == STEPS - 1
    assert pyg_scale.compact(tmp_path / "graph") == STEPS - 1  # nothing to do


def test_attributes_and_the_edge_list(tmp_path: Path) -> None:
    data = in_order(everything(), STEPS)
    grown(data, tmp_path / "graph", STEPS)
    found = pyg_scale.open(tmp_path / "graph", verify=True)
    assert list(found.keys()) == list(pyg_scale.open(tmp_path / "graph", snapshot=0).keys())
    for name, value in data.items():
        if isinstance(value, torch.Tensor):
            assert found[name].dtype == value.dtype
            assert torch.equal(bits(found[name]), bits(value)), name
        else:
            assert found[name] == value
    assert (found.num_nodes, found.num_edges) == (data.num_nodes, data.num_edges)


@pytest.mark.parametrize("cuts", [[100_003, 100_004, 210_000, 300_000], [3_000, 9_001, 9_005]])
def test_rows_of_many_pages_are_mapped(tmp_path: Path, cuts: list[int]) -> None:
    """Those of a small base, whose pages are not those of the rows, are read."""
    x = torch.arange(cuts[-1] * 5, dtype=torch.float32).view(-1, 5)
    none = torch.empty(2, 0, dtype=torch.int64)
    pyg_scale.save(Data(x=x[: cuts[0]], edge_index=none), tmp_path / "graph")
    for begin, end in itertools.pairwise(cuts):
        pyg_scale.append(tmp_path / "graph", {"x": x[begin:end]})
    for number, end in enumerate(cuts):
        found = pyg_scale.open(tmp_path / "graph", snapshot=number)
        assert torch.equal(found.x, x[:end])
        if number and end > 10_000:
            assert in_file(found.x) and in_file(found.x[-5_000:])
        found.x += 1  # stays in this process
    again = pyg_scale.open(tmp_path / "graph")
    rows = torch.randint(0, len(x), (500,))
    disk = DiskFeatures(again.graph_directory)
    assert torch.equal(disk.get_tensor(None, "x", index=rows), x[rows])
    disk.close()


def test_disk(tmp_path: Path) -> None:
    data = in_order(graphs.hetero(), STEPS)
    grown(data, tmp_path / "graph", STEPS)
    found = pyg_scale.open(tmp_path / "graph", snapshot=1)
    state = first(data, 1, STEPS)
    given = {"feature_store": Disk(found.graph_directory, cache="1MB")}
    assert_same_batches(batches(state, "item", 8), batches(found, "item", 8, **given))
    store = Disk(found.graph_directory, look_ahead=0)
    given = {"feature_store": store, "num_workers": 1, "worker_type": "process"}
    assert_same_batches(batches(state, "item", 8), batches(found, "item", 8, **given))


def test_worker_processes_keep_the_snapshot(tmp_path: Path) -> None:
    data = in_order(everything(), STEPS)
    states = grown(data, tmp_path / "graph", STEPS)
    found = pyg_scale.open(tmp_path / "graph", snapshot=1)
    again = pickle.loads(pickle.dumps(found))
    assert again.graph_directory.snapshot == 1
    loader = batches(found, None, 60, num_workers=2, worker_type="process")
    assert_same_batches(batches(states[1], None, 60), loader)


def test_other_numbers_of_attributes(tmp_path: Path) -> None:
    """Types without attributes, an empty base, and lists that stay sorted."""
    data = HeteroData()
    data["a"].num_nodes, data["b"].x = 0, torch.empty(0, 2)
    data["a", "to", "b"].edge_index = torch.empty(2, 0, dtype=torch.int64)
    pyg_scale.save(data, tmp_path / "graph")
    kind = ("a", "to", "b")
    assert pyg_scale.append(tmp_path / "graph") == 0
    assert pyg_scale.append(tmp_path / "graph", {"a": {"num_nodes": 3}}) == 1
    nodes = {"b": {"x": np.ones((2, 2), np.float32)}}
    assert pyg_scale.append(tmp_path / "graph", nodes, {kind: torch.tensor([[2, 1], [0, 1]])}) == 2
    found = pyg_scale.open(tmp_path / "graph", verify=True)
    assert found["a"].num_nodes == 3
    assert found[kind].edge_index.tolist() == [[2, 1], [0, 1]]
    assert found.graph_directory.part(0).csc(kind).edge_id is None
    assert found["b"].x.tolist() == [[1, 1], [1, 1]]
    pyg_scale.append(tmp_path / "graph", edges={kind: {"edge_index": torch.tensor([[0], [0]])}})
    assert pyg_scale.open(tmp_path / "graph").graph_directory.part(0).csc(kind).edge_id is not None


def test_partition_takes_the_newest_snapshot(tmp_path: Path) -> None:
    data = in_order(everything(), STEPS)
    grown(data, tmp_path / "graph", STEPS)
    pyg_scale.partition(tmp_path / "graph", 2, "random", tmp_path / "parts")
    pyg_scale.partition(data, 2, "random", tmp_path / "expected")
    same_files(tmp_path / "parts", tmp_path / "expected")
    with pytest.raises(NotImplementedError, match="is partitioned"):
        pyg_scale.append(tmp_path / "parts", {"x": torch.ones(1, 6)})


def test_a_state_belongs_to_a_snapshot(tmp_path: Path) -> None:
    data = in_order(everything(), STEPS)
    path = tmp_path / "graph"
    states = grown(data, path, STEPS)
    seeds = torch.arange(0, 30)

    def loader(graph: Any) -> NeighborLoader:
        return NeighborLoader(graph, [4, 3], seeds, batch_size=9, shuffle=True, seed=4)

    first_one, second = loader(pyg_scale.open(path, snapshot=1)), loader(pyg_scale.open(path))
    steps = iter(first_one)
    next(steps)
    state, rest = first_one.state_dict(), list(steps)
    assert state["snapshot"] == 1
    for other in (second, loader(states[1]), loader(stores_of(path, 2))):
        with pytest.raises(ValueError, match="taken at snapshot 1 of the graph, this loader has"):
            other.load_state_dict(state)
    with pytest.raises(ValueError, match="taken at snapshot 0 of the graph, this loader has"):
        second.load_state_dict(loader(pyg_scale.open(path, snapshot=0)).state_dict())
    again = loader(pyg_scale.open(path, snapshot=1))
    again.load_state_dict(state)
    assert_same_batches(rest, again)
    zipped = ZipLoader([second, second])
    assert zipped.state_dict()["snapshot"] == [2, 2]
    with pytest.raises(ValueError, match=r"taken at snapshot \[2, 2\]"):
        ZipLoader([first_one, first_one]).load_state_dict(zipped.state_dict())


# Single rows ##############################################################################


def test_single_rows_in_groups(tmp_path: Path) -> None:
    data = in_order(graphs.hetero(), STEPS)
    pyg_scale.save(first(data, 0, STEPS), tmp_path / "graph", time_attr="when")
    new = between(first(data, 0, STEPS), data)
    with pyg_scale.Appender(tmp_path / "graph", max_rows=40) as appender:
        for kind, store in new.node_items():
            for row in range(store.num_nodes):
                values = {n: store[n][row] for n in ("x", "time") if n in store}
                if "time" in values and row % 2:
                    values["time"] = int(values["time"])
                assert appender.add_node(kind, **values) == data[kind].num_nodes - (
                    store.num_nodes - row
                )
        for kind, store in new.edge_items():
            for row, (src, dst) in enumerate(store.edge_index.t().tolist()):
                when, weight = int(store.when[row]), float(store.weight[row])
                appender.add_edge(src, dst, kind, when=when, weight=weight)
        assert appender.snapshot > 2
        before = appender.snapshot
        assert appender.commit() == before + 1
        assert appender.commit() == before + 1  # nothing waits
    pyg_scale.save(data, tmp_path / "whole", time_attr="when")
    pyg_scale.compact(tmp_path / "graph")
    same_files(tmp_path / "graph", tmp_path / "whole")


def test_rows_of_a_block_that_fails_are_dropped(tmp_path: Path) -> None:
    pyg_scale.save(graphs.one_loop(), tmp_path / "graph")

    def fails(appender: pyg_scale.Appender) -> None:
        with appender:
            appender.add_edge(0, 0)
            raise KeyError

    appender = pyg_scale.Appender(tmp_path / "graph")
    with pytest.raises(KeyError):
        fails(appender)
    assert pyg_scale.open(tmp_path / "graph").num_edges == 1
    with pytest.raises(ValueError, match="is closed"):
        appender.add_edge(0, 0)


def test_rows_after_some_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("pyg_scale.store.directory.appending.clock.monotonic", lambda: now[0])
    pyg_scale.save(graphs.one_loop(), tmp_path / "graph")
    with pyg_scale.Appender(tmp_path / "graph", max_seconds=2) as appender:
        appender.add_edge(0, 0)
        now[0] = 1.9
        appender.add_edge(0, 0)
        assert appender.snapshot == 0
        now[0] = 2.0
        appender.add_edge(0, 0)
        assert appender.snapshot == 1
    assert pyg_scale.open(tmp_path / "graph").num_edges == 4


# Writers and readers ######################################################################


def test_writers_exclude_each_other(tmp_path: Path) -> None:
    pyg_scale.save(graphs.one_loop(), tmp_path / "graph")
    appender = pyg_scale.Appender(tmp_path / "graph")
    with pytest.raises(GraphDirectoryError, match=rf"process {os.getpid()} on .* within 0.05"):
        pyg_scale.append(tmp_path / "graph", {"x": torch.ones(1, 1)}, timeout=0.05)
    appender.close()
    lock = Lock(tmp_path / "graph")
    with pytest.raises(GraphDirectoryError, match="another process is writing"):
        pyg_scale.append(tmp_path / "graph", {"x": torch.ones(1, 1)}, timeout=0)
    lock.release()
    done = []

    def append() -> None:
        done.append(pyg_scale.append(tmp_path / "graph", {"x": torch.ones(1, 1)}))

    with pyg_scale.Appender(tmp_path / "graph") as appender:
        thread = threading.Thread(target=append)
        thread.start()  # waits
        appender.append({"x": torch.zeros(1, 1)})
    thread.join(30)
    assert done == [2]
    assert pyg_scale.open(tmp_path / "graph").x.view(-1).tolist() == [1, 0, 1]
    assert os.listdir(tmp_path) == ["graph"]


def test_compaction_removes_only_what_compactions_left(tmp_path: Path) -> None:
    data = everything()
    path = pyg_scale.save(data, tmp_path / "g[ab]")
    others = (".ga.before-0123abcd", ".g[ab].before-upgrade")
    for name in (*others, ".g[ab].before-0123abcd"):
        (tmp_path / name).mkdir()
    pyg_scale.compact(path)
    assert {p.name for p in tmp_path.iterdir()} == {"g[ab]", *others}


def test_readers_keep_their_snapshot(tmp_path: Path) -> None:
    data = in_order(everything(), STEPS)
    states = [first(data, step, STEPS) for step in range(STEPS)]
    pyg_scale.save(states[0], tmp_path / "graph")
    held, loaders = [], []
    for number, state in enumerate(states):
        if number:
            new = between(states[number - 1], state)
            pyg_scale.append(tmp_path / "graph", new, new)
        held.append(pyg_scale.open(tmp_path / "graph"))
        loaders.append(iter(batches(held[-1], None, state.num_nodes)))
        next(loaders[-1])
    pyg_scale.compact(tmp_path / "graph")
    pyg_scale.append(tmp_path / "graph", edges=states[0])
    pyg_scale.compact(tmp_path / "graph")  # what is held is not removed
    for state, graph, loader in zip(states, held, loaders, strict=True):
        expected = list(batches(state, None, state.num_nodes))
        assert_same_batches(expected, batches(graph, None, state.num_nodes))
        assert_same_batches(expected[1:], loader)
        assert torch.equal(graph.edge_index, state.edge_index)
    assert pyg_scale.open(tmp_path / "graph").num_edges == data.num_edges + states[0].num_edges
    with pytest.raises(GraphDirectoryError, match="no snapshot 1: compaction has folded it"):
        pyg_scale.open(tmp_path / "graph", snapshot=1)
    with pytest.raises(GraphDirectoryError, match="no snapshot 4: the newest is 3; open 3 to 3"):
        pyg_scale.open(tmp_path / "graph", snapshot=4)


def test_what_compaction_leaves_is_removed_by_the_next(tmp_path: Path) -> None:
    pyg_scale.save(graphs.one_loop(), tmp_path / "graph")
    held = GraphDirectory(tmp_path / "graph")
    for _ in range(2):
        pyg_scale.append(tmp_path / "graph", edges=EDGE)
        pyg_scale.compact(tmp_path / "graph")
        assert len(os.listdir(tmp_path)) == 2
    assert held.part(0).csc(None).num_edges == 1
    held.let_go()
    pyg_scale.compact(tmp_path / "graph")
    assert os.listdir(tmp_path) == ["graph"]


def test_an_appender_goes_on_after_compaction(tmp_path: Path) -> None:
    data = in_order(everything(), STEPS)
    states = [first(data, step, STEPS) for step in range(STEPS)]
    pyg_scale.save(states[0], tmp_path / "graph")
    with pyg_scale.Appender(tmp_path / "graph") as appender:
        for before, after in itertools.pairwise(states):
            new = between(before, after)
            appender.append(new, new)
            assert pyg_scale.compact(tmp_path / "graph") == appender.snapshot
    pyg_scale.save(data, tmp_path / "whole")
    same_files(tmp_path / "graph", tmp_path / "whole")


def test_rows_appended_during_compaction_are_carried_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyg_scale.store.directory import compacting

    data = in_order(everything(), 4)
    states = grown(data, tmp_path / "graph", 4)[:2]
    pyg_scale.save(states[0], tmp_path / "other")
    path = tmp_path / "other"
    new = between(states[0], states[1])
    pyg_scale.append(path, new, new)
    save = compacting.save

    def slow(*args: Any, **options: Any) -> Any:
        out = save(*args, **options)
        for step in (1, 2):
            new = between(first(data, step, 4), first(data, step + 1, 4))
            pyg_scale.append(path, new, new)
        return out

    monkeypatch.setattr(compacting, "save", slow)
    assert pyg_scale.compact(path) == 1
    for number in (1, 2, 3):
        found = pyg_scale.open(path, snapshot=number, verify=True)
        state = first(data, number, 4)
        assert_same_batches(
            batches(state, None, state.num_nodes), batches(found, None, state.num_nodes)
        )
    monkeypatch.setattr(compacting, "save", save)
    assert pyg_scale.compact(path) == 3
    pyg_scale.save(data, tmp_path / "whole")
    same_files(path, tmp_path / "whole")


def test_a_graph_that_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyg_scale.store.directory import compacting

    path = pyg_scale.save(graphs.one_loop(), tmp_path / "graph")
    appender = pyg_scale.Appender(path)
    appender.add_edge(0, 0)
    pyg_scale.save(graphs.nothing(3), path, overwrite=True)
    with pytest.raises(GraphDirectoryError, match="was replaced by another graph"):
        appender.commit()
    appender.close()
    pyg_scale.append(path, edges=EDGE)
    save = compacting.save

    def replaced(*args: Any, **options: Any) -> None:
        save(*args, **options)
        save(graphs.one_loop(), path, overwrite=True)

    monkeypatch.setattr(compacting, "save", replaced)
    with pytest.raises(GraphDirectoryError, match="was changed while it was compacted"):
        pyg_scale.compact(path)
    assert pyg_scale.open(path).num_edges == 1
    assert os.listdir(tmp_path) == ["graph"]


def test_sets_are_added_to_the_base(tmp_path: Path) -> None:
    path = pyg_scale.save(graphs.one_loop(), tmp_path / "graph")
    pyg_scale.append(path, {"x": torch.ones(1, 1)})
    with pytest.raises(GraphDirectoryError, match="has appended rows.*compact"):
        add_index_sets(path, {"train": torch.tensor([1])})
    pyg_scale.compact(path)
    add_index_sets(path, {"train": torch.tensor([1])})
    assert pyg_scale.open(path).index_set("train").tolist() == [1]
    assert pyg_scale.append(path, {"x": torch.ones(1, 1)}) == 2


# Bad input ################################################################################


@pytest.mark.parametrize(
    ("nodes", "edges", "error", "words"),
    [
        ({"x": torch.ones(1, 6)}, None, ValueError, "lack 'time', 'y'"),
        ({"z": torch.ones(1)}, None, ValueError, "lack 'time', 'x', 'y'"),
        ({"z": torch.ones(1), "y": 0}, None, ValueError, "have 'z', the graph has"),
        ({"x": torch.ones(1, 6).double()}, None, TypeError, "'x' .* must be float32 .*float64"),
        ({"x": torch.ones(1, 5)}, None, ValueError, r"has the shape \[1, 5\]"),
        ({"x": torch.ones(2, 6)}, None, ValueError, "differ in their number of rows"),
        ({"x": [[1.0] * 6]}, None, TypeError, "'x' .* must be a tensor"),
        ({"num_nodes": 2}, None, ValueError, "differ in their number"),
        ({"num_nodes": -1}, None, TypeError, "num_nodes"),
        ({"time": torch.tensor([float("nan")])}, None, ValueError, "'time' .* must not be NaN"),
        (torch.ones(1, 6), None, TypeError, "nodes must be Data or a mapping"),
        (HeteroData(), None, TypeError, "nodes must be Data or a mapping"),
        (Data(edge_index=EDGE), None, ValueError, "pass the same graph as edges="),
        (None, torch.tensor([[0], [100]]), IndexError, "destination 100, but there are 100 nodes"),
        (None, torch.tensor([[-1], [0]]), IndexError, "source -1"),
        (None, EDGE.float(), TypeError, "must be int64 or int32"),
        (None, EDGE[0], TypeError, "must be int64 or int32"),
        (None, {}, ValueError, "lack edge_index"),
        (None, {"edge_index": EDGE, "weight": None}, TypeError, "'weight' .* must be a tensor"),
        (None, {"weight": torch.tensor([-1.0])}, ValueError, "must be finite, 0 or more"),
        (None, {"weight": torch.tensor([float("inf")])}, ValueError, "must be finite"),
        (None, {"weight": torch.ones(2)}, ValueError, "has 2 rows, edge_index 1"),
        (None, {"new": torch.ones(1)}, ValueError, "have 'new'"),
        ({"a": {}}, None, ValueError, "have 'a'"),
    ],
    ids=str,
)
def test_bad_input(tmp_path: Path, nodes: Any, edges: Any, error: Any, words: str) -> None:
    data = graphs.hostile()
    data.time = data.time.float()
    del data.when
    del data.num_nodes
    path = pyg_scale.save(data, tmp_path / "graph", time_attr="time", weight_attr="weight")
    good = {"x": torch.ones(1, 6), "y": torch.ones(1).long(), "time": torch.ones(1)}
    if isinstance(nodes, dict) and "lack" not in words:
        nodes = good | nodes
    good = {"edge_index": EDGE, "weight": torch.ones(1), "edge_attr": EDGE[0]}
    if isinstance(edges, dict) and "lack" not in words:
        edges = good | edges
    elif isinstance(edges, torch.Tensor):
        edges = good | {"edge_index": edges}
    with pytest.raises(error, match=words):
        pyg_scale.append(path, nodes, edges)
    assert not (path / "delta").exists()


def test_integer_times_are_not_rounded_among_floating_point_ones(tmp_path: Path) -> None:
    data = HeteroData()
    data["a"].num_nodes = data["b"].num_nodes = 3
    data["a"].time, data["b"].time = torch.arange(3), torch.rand(3)
    data["a", "to", "b"].edge_index = EDGE
    path = pyg_scale.save(data, tmp_path / "graph", time_attr="time")
    rounded = "'time' of the new nodes? of 'a'.* 9007199254740993 would be rounded"
    with pytest.raises(ValueError, match=rounded):
        pyg_scale.append(path, {"a": {"time": torch.tensor([2**53 + 1])}})
    with pyg_scale.Appender(path) as appender:
        with pytest.raises(ValueError, match=rounded):
            appender.add_node("a", time=2**53 + 1)
        appender.add_node("a", time=2**53)
    assert pyg_scale.open(path)["a"].time.tolist() == [0, 1, 2, 2**53]


def test_bad_types(tmp_path: Path) -> None:
    path = pyg_scale.save(graphs.hetero(), tmp_path / "graph")
    with pytest.raises(ValueError, match="has the type 'nobody', the graph has 'user'"):
        pyg_scale.append(path, {"nobody": {"x": torch.ones(1)}})
    with pytest.raises(TypeError, match="edges must be HeteroData or a mapping by type"):
        pyg_scale.append(path, edges=EDGE)
    with pytest.raises(ValueError, match="the new edges of .* lack 'weight', 'when'"):
        pyg_scale.append(path, edges={("user", "buys", "item"): EDGE})
    with pyg_scale.Appender(path) as appender:
        with pytest.raises(ValueError, match="no node type 'nobody'"):
            appender.add_node("nobody")
        with pytest.raises(ValueError, match="no edge type None"):
            appender.add_edge(0, 0)
        with pytest.raises(ValueError, match="the new node of 'tag' lack 'x'"):
            appender.add_node("tag")
        with pytest.raises(TypeError, match="'x' .* must be a tensor, torch.float32"):
            appender.add_node("tag", x=1.0)
        with pytest.raises(TypeError, match="'time' .* must be a number or a tensor, torch.int64"):
            appender.add_node("user", x=torch.ones(4), time=1.5)
        with pytest.raises(ValueError, match="'time' .* must fit torch.int64"):
            appender.add_node("user", x=torch.ones(4), time=2**63)
        kind = ("user", "buys", "item")
        with pytest.raises(IndexError, match="the source .* is 20, but there are 20 nodes"):
            appender.add_edge(20, 0, kind, when=0, weight=0.0)
        with pytest.raises(TypeError, match="the destination .* must be a node's number"):
            appender.add_edge(0, 0.0, kind, when=0, weight=0.0)  # type: ignore[arg-type]
    assert pyg_scale.open(path).graph_directory.snapshot == 0


def test_what_is_no_directory(tmp_path: Path) -> None:
    for call in (pyg_scale.append, pyg_scale.Appender, pyg_scale.compact):
        with pytest.raises(GraphDirectoryError, match="not a graph directory"):
            call(tmp_path / "nothing")
    with pytest.raises(ValueError, match="no graph directory"):
        Mmap(tmp_path, snapshot=1)
    assert os.listdir(tmp_path) == []
