"""Damaged directories: a typed error that names the file, never a crash, never wrong data."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch_geometric.data import Data

import pyg_scale
from pyg_scale.errors import GraphDirectoryError
from pyg_scale.loader import NeighborLoader
from pyg_scale.partitioner.base import Partition
from pyg_scale.partitioner.write import write_partition
from pyg_scale.store import Mmap, MmapGraph, topology_of
from pyg_scale.store.directory import GraphDirectory
from pyg_scale.store.directory.assemble import FilledPlaces
from pyg_scale.store.directory.meta import checksum
from pyg_scale.testing import graphs
from tests.store.directory.test_data import assert_same_graph

RECORDED = {"time_attr": "when", "weight_attr": "weight"}
EDGES, NODES = Path("part-0/edges"), Path("part-0/nodes")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory to be copied, and damaged in the copy."""
    path = tmp_path_factory.mktemp("saved") / "graph"
    data = graphs.hostile()
    data.name = "n"
    sets = {"train": [1, 2]}
    return pyg_scale.save(data, path, time_attr="when", weight_attr="weight", index_sets=sets)


@pytest.fixture
def graph(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "graph"))


def use(path: Path, verify: bool = False) -> Data:
    """Everything that one can ask of a directory."""
    found = pyg_scale.open(path, verify=verify)
    topology_of(found, **{k: v for k, v in RECORDED.items() if v in found._store})
    for name in found.graph_directory.meta.index_sets.get("", {}):
        found.index_set(name)
    found.to_dict()
    return found


def test_no_directory(tmp_path: Path) -> None:
    cases: list[Callable[[], Path]] = [
        lambda: tmp_path / "nothing",
        lambda: tmp_path,
        lambda: (tmp_path / "file").write_text("x") and tmp_path / "file",  # type: ignore[return-value]
    ]
    for case in cases:
        with pytest.raises(GraphDirectoryError, match="is not a graph directory.*pyg_scale.save"):
            pyg_scale.open(case())
    (tmp_path / "META.json").mkdir()
    with pytest.raises(GraphDirectoryError, match=r"META.json is not a regular file"):
        pyg_scale.open(tmp_path)
    with pytest.raises(GraphDirectoryError, match="cannot be opened"):
        pyg_scale.open("a\0b")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("{}", "does not say that it is"),
        ("[1]", "does not say that it is"),
        ('{"format": "other"}', "does not say that it is"),
        ('{"format": "pyg_scale graph directory", "version": "1"}', "version '1', expected 1"),
        ('{"format": "pyg_scale graph directory", "version": 2}', "reads up to 1.*upgrade"),
        ('{"format": "pyg_scale graph directory", "version": 1}', "its checksum"),
    ],
)
def test_no_meta(graph: Path, text: str, message: str) -> None:
    (graph / "META.json").write_text(text)
    with pytest.raises(GraphDirectoryError, match=message) as caught:
        use(graph)
    assert "META.json" in str(caught.value)


def test_meta_that_is_no_text(graph: Path) -> None:
    (graph / "META.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(GraphDirectoryError, match="META.json is not text"):
        use(graph)
    with (graph / "META.json").open("wb") as file:
        file.truncate(1 << 40)  # sparse
    with pytest.raises(GraphDirectoryError, match="longer than any"):
        use(graph)


def test_any_file_missing_cut_or_longer(saved: Path, tmp_path: Path) -> None:
    for name in GraphDirectory(saved).meta.files:
        path = Path(shutil.copytree(saved, tmp_path / "graph"))
        size = (path / name).stat().st_size
        for length in (0, 1, size - 1, size + 1):
            os.truncate(path / name, length)
            with pytest.raises(GraphDirectoryError, match=f"{name} has {length} bytes, META"):
                use(path)
        (path / name).unlink()
        with pytest.raises(GraphDirectoryError, match=f"{name} is missing"):
            use(path)
        (path / name).mkdir()
        with pytest.raises(GraphDirectoryError, match=name):
            use(path)
        shutil.rmtree(path)


def test_any_file_altered_is_found_by_verify(saved: Path, tmp_path: Path) -> None:
    for name in GraphDirectory(saved).meta.files:
        path = Path(shutil.copytree(saved, tmp_path / "graph"))
        content = bytearray((path / name).read_bytes())
        content[-1] ^= 1
        (path / name).write_bytes(content)
        with pytest.raises(GraphDirectoryError, match=f"{name} does not have its checksum"):
            use(path, verify=True)
        shutil.rmtree(path)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((100, 6), ">f4"),
        np.zeros((100, 6), "<i4"),
        np.zeros((6, 100), "<f4"),
        np.asfortranarray(np.zeros((100, 6), "<f4")),
        np.zeros(2400, "V1"),
    ],
    ids=str,
)
def test_files_of_the_same_length_that_hold_something_else(graph: Path, array: Any) -> None:
    file = graph / NODES / "attributes" / "x.npy"
    before = file.stat().st_size
    np.save(file, array)
    assert file.stat().st_size == before
    with pytest.raises(GraphDirectoryError, match=r"x.npy holds .*META.json says float32"):
        use(graph)


def test_other_headers_of_npy_files_are_read_too(graph: Path) -> None:
    """Of later versions of the format, and as other programs write them."""
    x = np.load(graph / NODES / "attributes" / "x.npy")
    for version in ((1, 0), (2, 0), (3, 0)):
        with (graph / NODES / "attributes" / "x.npy").open("wb") as file:
            np.lib.format.write_array(file, x, version)
        _rewrite(graph, str(NODES / "attributes" / "x.npy"), lambda a: None, keep=True)
        assert np.array_equal(pyg_scale.open(graph).x.numpy(), x)
    text = b'{"shape":(100,6),"fortran_order":False,"descr":"<f4"}\n'
    content = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + x.tobytes()
    (graph / NODES / "attributes" / "x.npy").write_bytes(content)
    _rewrite(graph, str(NODES / "attributes" / "x.npy"), lambda a: None, keep=True)
    assert np.array_equal(pyg_scale.open(graph, verify=True).x.numpy(), x)


@pytest.mark.parametrize("header", [b"garbage", b"\x93NUMPY\x01\x00v\x00" + b"(" * 200])
def test_headers_that_are_none(graph: Path, header: bytes) -> None:
    file = graph / NODES / "attributes" / "x.npy"
    content = file.read_bytes()
    file.write_bytes(header + content[len(header) :])
    with pytest.raises(GraphDirectoryError, match="x.npy cannot be read as .npy"):
        use(graph)


# What no checksum says: somebody wrote it so ##################################################


def _rewrite(
    graph: Path, name: str, change: Callable[[np.ndarray], object], keep: bool = False
) -> None:
    """Change a file, unless it is to be kept as it is, and ``META.json`` with it."""
    if not keep:
        array = np.load(graph / name)
        change(array)
        np.save(graph / name, array)
    meta = json.loads((graph / "META.json").read_text())
    content = (graph / name).read_bytes()
    meta["files"][name] = {"bytes": len(content), "crc32": zlib.crc32(content)}
    _write_meta(graph, meta)


def _write_meta(graph: Path, meta: dict[str, Any]) -> None:
    meta.pop("checksum", None)
    (graph / "META.json").write_text(json.dumps({**meta, "checksum": checksum(meta)}))


def _set(index: Any, value: Any) -> Callable[[np.ndarray], object]:
    return lambda array: array.__setitem__(index, value)


def _reverse(array: np.ndarray) -> None:
    array[:] = array[::-1].copy()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("part-0/edges/indptr.npy", _set(0, 1), "does not go from 0"),
        ("part-0/edges/indptr.npy", _set(-1, 459), "does not go from 0"),
        ("part-0/edges/indptr.npy", _set(50, 0), "goes down"),
        ("part-0/edges/indices.npy", _set(7, 100), "has 100, expected 0 to 99"),
        ("part-0/edges/indices.npy", _set(7, -1), "has -1, expected"),
        ("part-0/edges/edge_id.npy", _set(0, 460), "has 460, expected 0 to 459"),
        ("part-0/edges/edge_id.npy", _reverse, "out of order within a node"),
        ("part-0/edges/time.npy", _reverse, "goes down within a node"),
        ("part-0/edges/weight_prefix.npy", _set(3, 2**62), "goes down within a node"),
        ("sets/train.npy", _set(0, 100), "has 100, expected 0 to 99"),
    ],
)
def test_ids_and_orders_that_make_no_sense(
    graph: Path, name: str, change: Any, message: str
) -> None:
    _rewrite(graph, name, change)
    with pytest.raises(GraphDirectoryError, match=f"{name} .*{message}"):
        pyg_scale.open(graph, verify=True)


@pytest.mark.parametrize("value", [-1, 460, 2**40])
@pytest.mark.parametrize("subgraph_type", ["directional", "induced"])
def test_pointers_that_are_followed_out_of_the_edges(
    tmp_path: Path, subgraph_type: str, value: int
) -> None:
    graph = pyg_scale.save(graphs.hostile(), tmp_path / "graph")
    _rewrite(graph, "part-0/edges/indptr.npy", _set(50, value))
    found = pyg_scale.open(graph)  # does not look at them all
    seed = torch.tensor([50])
    loader = NeighborLoader(found, [-1], input_nodes=seed, subgraph_type=subgraph_type, seed=0)
    with pytest.raises(ValueError, match=f"the pointers of node 50 are {value} and"):
        next(iter(loader))
    with pytest.raises(GraphDirectoryError, match="indptr.npy goes down"):
        found.to_dict()


@pytest.mark.parametrize(
    ("name", "index", "value"),
    [
        ("indptr.npy", -1, 2**40),
        ("indptr.npy", 50, 2**40),
        ("indptr.npy", 0, -1),
        ("indices.npy", 7, 100),
        ("indices.npy", 7, -1),
    ],
)
@pytest.mark.parametrize("num_parts", [1, 2])
def test_ends_of_edges_that_cannot_be(
    tmp_path: Path, name: str, index: int, value: int, num_parts: int
) -> None:
    """The file is named before anything is made of it, such as memory of that size."""
    graph = pyg_scale.save(graphs.hostile(), tmp_path / "graph")
    if num_parts > 1:
        assignment = {None: torch.arange(100, dtype=torch.int32) // 60}
        write_partition(graph, Partition(assignment, 2, "m"), tmp_path / "parts")
        graph = tmp_path / "parts"
    _rewrite(graph, f"part-0/edges/{name}", _set(index, value))
    found = pyg_scale.open(graph)
    with pytest.raises(GraphDirectoryError, match=f"part-0/edges/{name} "):
        _ = found.edge_index
    if num_parts > 1:
        with pytest.raises(GraphDirectoryError, match=f"part-0/edges/{name} "):
            topology_of(found)
    else:
        with pytest.raises(GraphDirectoryError, match=f"part-0/edges/{name} "):
            MmapGraph(graph).get_edge_index(edge_type=None, layout="coo")


def test_damaged_pointers_are_named_where_edges_were_appended(tmp_path: Path) -> None:
    data = Data(edge_index=torch.tensor([[0, 1], [1, 0]]), num_nodes=2)
    graph = pyg_scale.save(data, tmp_path / "graph")
    pyg_scale.append(graph, edges={"edge_index": torch.tensor([[0], [0]])})
    np.save(graph / "part-0/edges/indptr.npy", np.array([0, 2**40, 2]))
    with pytest.raises(GraphDirectoryError, match=r"part-0/edges/indptr.npy"):
        topology_of(pyg_scale.open(graph))


def test_an_edge_that_is_there_twice(tmp_path: Path) -> None:
    edge_index = torch.tensor([[0, 1, 2, 0], [2, 1, 0, 1]])
    graph = pyg_scale.save(Data(edge_index=edge_index, num_nodes=3), tmp_path / "graph")
    _rewrite(graph, "part-0/edges/edge_id.npy", _set(0, 0))
    with pytest.raises(GraphDirectoryError, match="edge_id.npy has a repeated edge id"):
        pyg_scale.open(graph, verify=True)


def test_memory_that_nobody_wrote_is_never_handed_out(tmp_path: Path) -> None:
    """What is put together by ids has a gap where one is there twice: that is an error."""
    data = graphs.hostile()
    data.edge_attr = torch.arange(460.0)
    edge_index, edge_attr, x = ("edge_index", "edge_attr", "x")
    pyg_scale.save(data, tmp_path / "whole")
    assignment = torch.arange(100, dtype=torch.int32) % 2
    write_partition(tmp_path / "whole", Partition({None: assignment}, 2, "m"), tmp_path / "parts")
    twice, beyond, negative = _set(0, 1), _set(0, 460), _set(0, -1)
    cases: list[tuple[str, str, Any, str]] = [
        ("whole", "part-0/edges/edge_id.npy", twice, edge_index),
        ("whole", "part-0/edges/edge_id.npy", beyond, edge_index),
        ("whole", "part-0/edges/edge_id.npy", negative, edge_index),
        ("parts", "part-1/edges/edge_id.npy", lambda a: a.__setitem__(0, a[1]), edge_index),
        ("parts", "part-1/edges/ids.npy", lambda a: a.__setitem__(0, a[1]), edge_attr),
        ("parts", "part-1/edges/ids.npy", negative, edge_attr),
        ("parts", "part-1/nodes/orig_id.npy", _set(0, 0), x),
        ("parts", "part-1/nodes/orig_id.npy", _set(-1, 100), x),
    ]
    for whole, name, change, attribute in cases:
        graph = Path(shutil.copytree(tmp_path / whole, tmp_path / "graph"))
        _rewrite(graph, name, change)
        found = pyg_scale.open(graph)
        with pytest.raises(GraphDirectoryError, match=r"damaged or of two graphs"):
            getattr(found, attribute)
        if attribute == edge_index and whole == "whole":
            with pytest.raises(GraphDirectoryError, match=r"damaged or of two graphs"):
                MmapGraph(graph).get_edge_index(edge_type=None, layout="coo")
        if attribute == x:
            with pytest.raises(GraphDirectoryError, match=r"the nodes of .* damaged or of two"):
                topology_of(found)
        shutil.rmtree(graph)


def test_places_are_filled_once() -> None:
    places = FilledPlaces(4, "it")
    places.fill(slice(0, 2))
    places.fill(torch.tensor([3, 2]))
    places.check()
    places = FilledPlaces(4, "it")
    places.fill(torch.tensor([0, 1, 1, 3]))
    with pytest.raises(GraphDirectoryError, match="no value for the id 2, and repeated"):
        places.check()
    places = FilledPlaces(2, "it")
    places.fill(slice(0, 2))
    places.fill(slice(1, 2))
    with pytest.raises(GraphDirectoryError, match="it has a repeated id"):
        places.check()


# Files that are none ##########################################################################


def _assert_ends(action: Callable[[], object], match: str) -> None:
    """Within a few seconds, which a reader of a FIFO does not."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive(), "it waits for ever"
    assert [type(error) for error in errors] == [GraphDirectoryError]
    assert re.search(match, str(errors[0])), errors[0]


@pytest.mark.parametrize("name", ["META.json", "part-0/nodes/attributes/x.npy"])
@pytest.mark.parametrize("kind", ["fifo", "device", "directory"])
def test_a_file_that_is_none_is_refused(graph: Path, name: str, kind: str) -> None:
    file = graph / name
    file.unlink()
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "directory":
        file.mkdir()
    else:
        file.symlink_to("/dev/zero")
    _assert_ends(lambda: pyg_scale.open(graph), f"{file.name} is not a regular file")


@pytest.mark.parametrize("name", ["part-0/nodes/attributes/x.npy", "part-0/nodes", "META.json"])
def test_a_link_that_leads_out_is_refused(graph: Path, tmp_path: Path, name: str) -> None:
    moved = (graph / name).rename(tmp_path / "elsewhere")
    (graph / name).symlink_to(moved)
    message = f"{Path(name).name} is a link that leads out of the directory, to {moved}"
    for use_it in (pyg_scale.open, GraphDirectory):
        with pytest.raises(GraphDirectoryError, match=message):
            use_it(graph)


def test_what_was_regular_when_it_was_opened(graph: Path, tmp_path: Path) -> None:
    """Files that are mapped later are looked at again."""
    found = GraphDirectory(graph)
    file = graph / "part-0/nodes/attributes/x.npy"
    moved = file.rename(tmp_path / "x.npy")
    file.symlink_to(moved)
    with pytest.raises(GraphDirectoryError, match="leads out of the directory"):
        found.part(0).node_attribute(None, "x")
    file.unlink()
    os.mkfifo(file)
    _assert_ends(lambda: found.part(0).node_attribute(None, "x"), "is not a regular file")


def test_links_within_a_directory_and_to_it(graph: Path, tmp_path: Path) -> None:
    file = graph / "part-0/nodes/attributes/x.npy"
    file.rename(file.with_name("other.npy"))
    file.symlink_to("other.npy")
    (tmp_path / "link").symlink_to(graph)
    use(tmp_path / "link")
    moved = graph.rename(tmp_path / "moved")  # under a link that leads nowhere now
    use(moved)


def test_a_directory_of_tensors_has_files_alone(tmp_path: Path) -> None:
    store = Mmap(tmp_path / "tensors")
    store[None, "x", None] = torch.ones(3)
    index, (file,) = tmp_path / "tensors" / "STORE.json", (tmp_path / "tensors").glob("*.npy")
    moved = file.rename(tmp_path / "x.npy")
    file.symlink_to(moved)
    with pytest.raises(GraphDirectoryError, match="leads out of the directory"):
        Mmap(tmp_path / "tensors")[None, "x", None]
    index.unlink()
    os.mkfifo(index)
    _assert_ends(lambda: Mmap(tmp_path / "tensors"), "STORE.json is not a regular file")


def test_books_and_halos_that_make_no_sense(tmp_path: Path) -> None:
    data = graphs.hostile()
    pyg_scale.save(data, tmp_path / "whole")
    assignment = torch.arange(100, dtype=torch.int32) % 2
    write_partition(tmp_path / "whole", Partition({None: assignment}, 2, "m"), tmp_path / "parts")
    cases: list[tuple[str, Any, str]] = [
        ("book/nodes/part.npy", _set(0, 2), "has 2, expected 0 to 1"),
        ("book/nodes/part.npy", _set(0, 1), "nodes in the parts"),
        ("book/nodes/local.npy", _set(0, 3), "does not fit the partition book"),
        ("part-0/nodes/orig_id.npy", _set(3, 0), "does not rise"),
        ("part-1/nodes/orig_id.npy", _set(0, 0), "does not fit the partition book"),
        ("part-1/nodes/halo.npy", _set(0, 1), "has a node of the part itself|does not rise"),
        ("part-0/nodes/halo.npy", _set(-1, 100), "has 100, expected"),
        ("part-0/edges/edge_id.npy", _set(0, 99999), "has 99999, expected"),
        ("book/edges/part.npy", _set(0, 2), "has 2, expected 0 to 1"),
        ("book/edges/part.npy", _reverse, "does not fit the book of edges"),
        ("book/edges/part.npy", _set(slice(None), 0), "edges in the parts"),
    ]
    for name, change, message in cases:
        graph = Path(shutil.copytree(tmp_path / "parts", tmp_path / "graph"))
        _rewrite(graph, name, change)
        with pytest.raises(GraphDirectoryError, match=message):
            pyg_scale.open(graph, verify=True)
        shutil.rmtree(graph)


# META.json of somebody else ###################################################################


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path]
    if isinstance(value, dict):
        for key in value:
            found += _paths(value[key], (*path, key))
    elif isinstance(value, list):
        for i in range(len(value)):
            found += _paths(value[i], (*path, i))
    return found


_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 200),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.sampled_from(["", "x", "int32", "int64", "float32", "bfloat16", "../..", "/", "when", "\0"]),
    st.text(max_size=3),
    st.lists(st.integers(-1, 500), max_size=3),
    st.dictionaries(
        st.sampled_from(["", "x", "name", "dtype", "$tensor"]), st.integers(), max_size=2
    ),
)


@settings(
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(choices=st.data(), with_checksum=st.booleans())
def test_any_other_meta(saved: Path, choices: st.DataObject, with_checksum: bool) -> None:
    """One entry removed, changed or added: an error, or the graph as it is."""
    text = (saved / "META.json").read_text()
    meta = json.loads(text)
    *way, last = choices.draw(st.sampled_from(_paths(meta)[1:]))
    inside = meta
    for step in way:
        inside = inside[step]
    action = choices.draw(st.sampled_from(["remove", "set", "add"]))
    if action == "remove":
        del inside[last]
    elif action == "set" or isinstance(inside, list):
        inside[last] = choices.draw(_VALUES)
    else:
        inside[choices.draw(st.text(max_size=3))] = choices.draw(_VALUES)
    if with_checksum:
        meta.pop("checksum", None)
        meta["checksum"] = checksum(meta)
    try:
        (saved / "META.json").write_text(json.dumps(meta))
        refused = _refused(saved, str(saved))
    finally:
        (saved / "META.json").write_text(text)
    assert refused or with_checksum or meta == json.loads(text)


def _refused(path: Path, names: str, right: bool = False) -> bool:
    """Whether a directory is refused, by an error with the right name in it.

    Args:
        path: The directory.
        names: A regular expression of what the error must name.
        right: Whether one that is not refused must be the graph that was saved.
    """
    try:
        found = use(path)
    except GraphDirectoryError as error:
        assert re.search(names, str(error)), error  # noqa: PT017
        return True
    if right:
        data = graphs.hostile()
        data.name = "n"
        assert_same_graph(found, data)
    return False


@settings(max_examples=100)
@given(position=st.integers(0, 10**6), new=st.binary(max_size=3), cut=st.integers(0, 3))
def test_any_other_bytes_of_meta(saved: Path, position: int, new: bytes, cut: int) -> None:
    content = (saved / "META.json").read_bytes()
    at = position % len(content)
    try:
        (saved / "META.json").write_bytes(content[:at] + new + content[at + cut :])
        _refused(saved, str(saved), right=True)
    finally:
        (saved / "META.json").write_bytes(content)


@settings(max_examples=60)
@given(choices=st.data())
def test_any_other_lengths(saved: Path, choices: st.DataObject) -> None:
    """A file of another length, which ``META.json`` says it has."""
    meta = GraphDirectory(saved).meta
    name = choices.draw(st.sampled_from(sorted(meta.files)))
    length = choices.draw(st.integers(0, 2 * meta.files[name].bytes))
    text = (saved / "META.json").read_text()
    content = (saved / name).read_bytes()
    found = json.loads(text)
    found["files"][name]["bytes"] = length
    try:
        os.truncate(saved / name, length)
        _write_meta(saved, found)
        refused = _refused(saved, f"{re.escape(name)}|META.json")
    finally:
        (saved / name).write_bytes(content)
        (saved / "META.json").write_text(text)
    assert refused or length == len(content)


def test_numbers_that_nobody_can_hold(saved: Path, tmp_path: Path) -> None:
    """Nothing is allocated because ``META.json`` says so."""
    for change in (
        {"num_parts": 10**12},
        {"num_parts": 10**12, "nodes": [], "edges": [], "keys": None, "index_sets": {}},
        {"index_sets": {"": {"train": 2**61}}},
    ):
        graph = Path(shutil.copytree(saved, tmp_path / "graph"))
        _write_meta(graph, json.loads((graph / "META.json").read_text()) | change)
        with pytest.raises(GraphDirectoryError, match="META.json is incomplete or wrong"):
            use(graph)
        shutil.rmtree(graph)
    empty = torch.empty(0, 3)
    graph = pyg_scale.save(Data(x=empty, edge_index=torch.empty(2, 0).long()), tmp_path / "graph")
    meta = json.loads((graph / "META.json").read_text())
    meta["nodes"][0]["attributes"]["x"]["row"] = [2**40, 2**40]
    _write_meta(graph, meta)
    with pytest.raises(GraphDirectoryError, match="x.npy holds"):
        use(graph)
