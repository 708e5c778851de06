"""Directories that are converted hold what is built in memory, whatever the memory."""

import errno
import os
import re
import resource
import warnings
import zipfile

import numpy as np
import pytest
import torch
from torch_geometric.data import Data, HeteroData

import pyg_scale
from pyg_scale import cli
from pyg_scale.convert import convert
from pyg_scale.convert.array_file import save_array
from pyg_scale.convert.data import DataReader
from pyg_scale.convert.npy import NpyReader
from pyg_scale.convert.options import Options
from pyg_scale.convert.run import run
from pyg_scale.store.directory import GraphDirectory
from tests.convert.graphs import content, expected, graph, hetero, raw, same

pytestmark = pytest.mark.matrix(2)

OPTIONS = [
    {},
    {"time_attr": "time"},
    {"time_attr": "edge_time"},
    {"weight_attr": "edge_weight"},
    {"time_attr": "edge_time", "weight_attr": "edge_weight"},
    {"time_attr": "time", "weight_attr": "edge_weight"},
]
KINDS = ["random", "hub", "sorted", "multi", "loops"]


def topology(path):
    found = content(path, "/edges/")
    return {name: value for name, value in found.items() if "/attributes/" not in name}


def converted(reader, path, memory=1 << 26, **options):
    return run(reader, path, Options(**options), memory, overwrite=False, quiet=True)


@pytest.mark.parametrize("memory", [1 << 12, 1 << 26])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda each: "-".join(each.values()))
@pytest.mark.parametrize("kind", KINDS)
def test_edges_are_those_of_the_graph_in_memory(tmp_path, kind, options, memory):
    data = graph(60, 700, kind=kind)
    converted(DataReader(data), tmp_path / "graph", memory, **options)
    same(topology(tmp_path / "graph"), expected(data, **options))
    assert [each.name for each in tmp_path.iterdir()] == ["graph"]


@pytest.mark.parametrize("undirected", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda each: "-".join(each.values()))
def test_a_hub_that_is_read_and_sorted_in_many_pieces(tmp_path, options, undirected):
    data = graph(60, 9000, kind="hub")
    converted(DataReader(data), tmp_path / "graph", 1 << 12, undirected=undirected, **options)
    if undirected:
        other = data.edge_index[0] != data.edge_index[1]
        for name in ("edge_time", "edge_weight"):
            data[name] = torch.cat([data[name], data[name][other]])
        reverse = data.edge_index.flip(0)[:, other]
        data.edge_index = torch.cat([data.edge_index, reverse], dim=1)
        del data.edge_attr
    same(topology(tmp_path / "graph"), expected(data, **options))


@pytest.mark.parametrize("options", OPTIONS, ids=lambda each: "-".join(each.values()))
def test_without_compiled_kernels(tmp_path, monkeypatch, options):
    data = graph(100, 1500, kind="hub", seed=1)
    wanted = expected(data, **options)
    monkeypatch.setenv("PYG_SCALE_KERNELS", "never")
    converted(DataReader(data), tmp_path / "graph", 1 << 13, **options)
    same(topology(tmp_path / "graph"), wanted)


@pytest.mark.parametrize(("num_nodes", "num_edges"), [(0, 0), (1, 0), (1, 5), (5000, 3), (7, 1)])
@pytest.mark.parametrize("memory", [1 << 12, 1 << 26])
def test_small_and_empty_graphs(tmp_path, num_nodes, num_edges, memory):
    data = graph(num_nodes, num_edges)
    converted(DataReader(data), tmp_path / "graph", memory)
    same(topology(tmp_path / "graph"), expected(data))


@pytest.mark.parametrize("memory", [1 << 13, 1 << 26])
@pytest.mark.parametrize("weight_attr", [None, "edge_weight"])
def test_heterogeneous_graphs(tmp_path, memory, weight_attr):
    data = hetero()
    converted(DataReader(data), tmp_path / "graph", memory, weight_attr=weight_attr)
    same(topology(tmp_path / "graph"), expected(data, weight_attr=weight_attr))
    part = GraphDirectory(tmp_path / "graph").part(0)
    assert torch.equal(part.node_attribute("paper", "x"), data["paper"].x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32])
def test_floating_point_and_integer_times(tmp_path, dtype):
    data = graph(50, 800, kind="hub")
    data.edge_time = (data.edge_time.to(torch.float64) - 2.5).to(dtype)
    converted(DataReader(data), tmp_path / "graph", 1 << 13, time_attr="edge_time")
    same(topology(tmp_path / "graph"), expected(data, time_attr="edge_time"))
    meta = GraphDirectory(tmp_path / "graph").meta
    assert (meta.float_time, meta.time_of_edges) == (dtype.is_floating_point, True)


@pytest.mark.parametrize("of_edges", [False, True])
def test_integer_times_are_not_rounded_among_floating_point_ones(tmp_path, of_edges):
    data = HeteroData()
    data["a"].num_nodes = data["b"].num_nodes = 3
    ends = torch.tensor([[0, 1, 2], [1, 2, 0]])
    data["a", "to", "b"].edge_index = data["b", "to", "a"].edge_index = ends
    stores = (data["a", "to", "b"], data["b", "to", "a"]) if of_edges else (data["a"], data["b"])
    stores[0].time, stores[1].time = torch.full((3,), 2**53 + 1), torch.rand(3)
    with pytest.raises(ValueError, match=r"'?time'? of .*'a'.*the integer 9007199254740993 would"):
        converted(DataReader(data), tmp_path / "graph", 1 << 13, time_attr="time")


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float16, torch.bfloat16, torch.float64, torch.int64),
        *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    ],
)
def test_weights_of_any_dtype(tmp_path, dtype):
    data = graph(50, 800, kind="hub")
    data.edge_weight = data.edge_weight.to(dtype)
    converted(DataReader(data), tmp_path / "graph", 1 << 13, weight_attr="edge_weight")
    same(topology(tmp_path / "graph"), expected(data, weight_attr="edge_weight"))


def test_in_order_already_needs_no_edge_ids(tmp_path):
    data = graph(60, 500, kind="sorted")
    data.edge_time = torch.arange(500)
    meta, _ = converted(DataReader(data), tmp_path / "a")
    assert meta.edges[None].edge_id_dtype is None
    meta, _ = converted(DataReader(data), tmp_path / "b", time_attr="edge_time")
    assert meta.edges[None].edge_id_dtype is None
    meta, _ = converted(DataReader(data), tmp_path / "c", weight_attr="edge_weight")
    assert meta.edges[None].edge_id_dtype is None


def test_attributes_of_every_dtype(tmp_path):
    dtypes = [torch.bool, torch.uint8, torch.int16, torch.bfloat16, torch.float16, torch.complex64]
    data = Data(edge_index=torch.randint(20, (2, 50)), num_nodes=20)
    for number, dtype in enumerate(dtypes):
        data[f"a{number}"] = torch.randint(2, (20, 3)).to(dtype)
    converted(DataReader(data), tmp_path / "graph", 1 << 14)
    part = GraphDirectory(tmp_path / "graph").part(0)
    for number in range(len(dtypes)):
        found = part.node_attribute(None, f"a{number}")
        assert found.dtype == dtypes[number] and torch.equal(found, data[f"a{number}"])


def test_undirected_adds_reverse_edges_behind_the_others(tmp_path):
    data = graph(40, 300, kind="loops")
    converted(DataReader(data), tmp_path / "graph", 1 << 13, undirected=True)
    src, dst = data.edge_index
    other = src != dst
    both = Data(
        edge_index=torch.cat([data.edge_index, data.edge_index.flip(0)[:, other]], dim=1),
        num_nodes=40,
    )
    same(topology(tmp_path / "graph"), expected(both))
    part = GraphDirectory(tmp_path / "graph").part(0)
    wanted = torch.cat([data.edge_attr, data.edge_attr[other]])
    assert torch.equal(part.edge_attribute(None, "edge_attr"), wanted)


def test_undirected_of_two_types_is_another_type(tmp_path):
    data = hetero()
    del data["paper", "by", "author"]
    converted(DataReader(data), tmp_path / "graph", undirected=True)
    meta = GraphDirectory(tmp_path / "graph").meta
    assert list(meta.edges) == [
        ("author", "writes", "paper"),
        ("paper", "cites", "paper"),
        ("paper", "rev_writes", "author"),
    ]
    data["paper", "rev_writes", "author"].edge_index = data[
        "author", "writes", "paper"
    ].edge_index.flip(0)
    wanted = expected(data)
    found = topology(tmp_path / "graph")
    for name, value in wanted.items():
        if "cites" not in name:
            np.testing.assert_array_equal(found[name], value)


def test_self_loops_are_left_out(tmp_path):
    data = graph(40, 300, kind="loops")
    converted(DataReader(data), tmp_path / "graph", 1 << 13, remove_self_loops=True)
    keep = data.edge_index[0] != data.edge_index[1]
    kept = Data(edge_index=data.edge_index[:, keep], num_nodes=40)
    same(topology(tmp_path / "graph"), expected(kept))
    part = GraphDirectory(tmp_path / "graph").part(0)
    assert torch.equal(part.edge_attribute(None, "edge_attr"), data.edge_attr[keep])


def test_features_are_converted_or_linked(tmp_path):
    edges, x = np.zeros((2, 4), "i8"), np.random.default_rng(0).random((9, 3), dtype=np.float32)
    np.save(tmp_path / "edges.npy", edges)
    np.save(tmp_path / "x.npy", x)
    options = {"nodes": {"x": tmp_path / "x.npy"}, "quiet": True}
    convert(tmp_path / "edges.npy", tmp_path / "half", feature_dtype=torch.float16, **options)
    found = content(tmp_path / "half")["part-0/nodes/attributes/x.npy"]
    assert np.array_equal(found, x.astype(np.float16))
    convert(tmp_path / "edges.npy", tmp_path / "link", link_features=True, **options)
    file = tmp_path / "link/part-0/nodes/attributes/x.npy"
    assert file.samefile(tmp_path / "x.npy")
    np.save(tmp_path / "x.npy", x * 1e6)
    with pytest.raises(ValueError, match="row 0, has .*too large for float16"):
        convert(tmp_path / "edges.npy", tmp_path / "big", feature_dtype="float16", **options)
    assert not (tmp_path / "big").exists()


@pytest.mark.parametrize("option", [{"feature_dtype": "float16"}, {"link_features": True}])
def test_options_of_features_that_are_not_there_are_refused(tmp_path, option):
    np.save(tmp_path / "edges.npy", np.zeros((2, 4), "i8"))
    np.save(tmp_path / "f.npy", np.zeros((9, 3)))
    nodes = {"features": tmp_path / "f.npy"}
    with pytest.raises(ValueError, match="is about the attribute 'x' of nodes, and no nodes have"):
        convert(tmp_path / "edges.npy", tmp_path / "g", nodes=nodes, quiet=True, **option)


def test_index_sets(tmp_path):
    np.save(tmp_path / "edges.npy", np.zeros((2, 4), "i4"))
    np.save(tmp_path / "train.npy", np.array([3, 1], "i4"))
    torch.save(torch.tensor([2]), tmp_path / "test.pt")
    done = convert(
        tmp_path / "edges.npy",
        tmp_path / "graph",
        num_nodes=4,
        index_sets={"train": tmp_path / "train.npy", "test": tmp_path / "test.pt"},
        quiet=True,
    )
    assert done.num_nodes == {None: 4} and done.num_edges == {None: 4}
    opened = GraphDirectory(tmp_path / "graph")
    assert opened.index_set("train").tolist() == [3, 1]
    assert opened.index_set("test").tolist() == [2]
    np.save(tmp_path / "mask.npy", np.array([True, False, True, False]))
    sets = {"train": tmp_path / "mask.npy"}
    with pytest.raises(ValueError, match=r"holds bool, shape \[4\]: .* of a mask .*nonzero"):
        convert(tmp_path / "edges.npy", tmp_path / "m", index_sets=sets, quiet=True)


@pytest.mark.parametrize("memory", [1 << 12, 1 << 26])
def test_few_destinations_of_many_nodes(tmp_path, memory):
    """Bins that are as wide as the edges need are made as wide as the number of nodes needs."""
    edge_index = torch.randint(0, 50, (2, 4000), generator=torch.Generator().manual_seed(1))
    edge_index[0, 7] = 300_000
    data = Data(edge_index=edge_index, num_nodes=700_001)
    converted(DataReader(data), tmp_path / "a", memory)
    pyg_scale.save(data, tmp_path / "b")
    same(topology(tmp_path / "a"), topology(tmp_path / "b"))


def test_an_id_that_is_far_too_large_is_said_before_anything_is_written(tmp_path):
    np.save(tmp_path / "edges.npy", np.array([[0, 10**13], [1, 2]]))
    with pytest.raises(ValueError, match="ids of nodes reach 10,000,000,000,000, and 8 bytes"):
        convert(tmp_path / "edges.npy", tmp_path / "graph", quiet=True)
    assert [each.name for each in tmp_path.iterdir()] == ["edges.npy"]


def test_a_directory_within_a_directory_is_refused(tmp_path):
    np.save(tmp_path / "edges.npy", np.array([[0], [1]]))
    convert(tmp_path / "edges.npy", tmp_path / "graph", quiet=True)
    with pytest.raises(FileExistsError, match="is inside the graph directory"):
        convert(tmp_path / "edges.npy", tmp_path / "graph" / "more", quiet=True)


@pytest.mark.parametrize(
    ("name", "message"), [("graph", "is a graph directory already"), ("data.pt", "load it in")]
)
def test_what_is_no_list_of_edges_is_said(tmp_path, name, message):
    pyg_scale.save(Data(edge_index=torch.tensor([[0], [1]])), tmp_path / "graph")
    (tmp_path / "data.pt").touch()
    with pytest.raises(ValueError, match=message):
        convert(tmp_path / name, tmp_path / "other", quiet=True)


@pytest.mark.parametrize("make", [graph, hetero])
def test_an_opened_graph_is_converted_as_the_one_that_was_saved(tmp_path, make):
    data = make()
    opened = pyg_scale.open(pyg_scale.save(data, tmp_path / "graph"))
    for name, each in (("a", data), ("b", opened)):
        convert(each, tmp_path / name, undirected=True, feature_dtype="float16", quiet=True)
    same(content(tmp_path / "b"), content(tmp_path / "a"))


def test_the_largest_id_is_the_number_of_nodes(tmp_path):
    np.save(tmp_path / "edges.npy", np.array([[0, 9], [4, 1]]))
    done = convert(tmp_path / "edges.npy", tmp_path / "graph", quiet=True)
    assert done.num_nodes == {None: 10}


def test_index_dtype_is_what_batches_hold(tmp_path):
    np.save(tmp_path / "edges.npy", np.array([[0], [1]], "i4"))
    for name, dtype in (("a", None), ("b", "int32")):
        convert(tmp_path / "edges.npy", tmp_path / name, index_dtype=dtype, quiet=True)
        assert GraphDirectory(tmp_path / name).meta.edges[None].index_dtype == dtype or "int64"


def test_a_directory_is_replaced_only_if_asked(tmp_path):
    np.save(tmp_path / "edges.npy", np.array([[0], [1]]))
    convert(tmp_path / "edges.npy", tmp_path / "graph", quiet=True)
    before = raw(tmp_path / "graph")
    with pytest.raises(FileExistsError, match="overwrite=True"):
        convert(tmp_path / "edges.npy", tmp_path / "graph", num_nodes=7, quiet=True)
    assert raw(tmp_path / "graph") == before
    convert(tmp_path / "edges.npy", tmp_path / "graph", num_nodes=7, overwrite=True, quiet=True)
    assert GraphDirectory(tmp_path / "graph").meta.nodes[None].num_nodes == 7


def test_too_little_memory_is_said_at_once(tmp_path):
    np.save(tmp_path / "edges.npy", np.array([[0], [1]]))
    with pytest.raises(ValueError, match="memory is 100 MB.*give at least"):
        convert(tmp_path / "edges.npy", tmp_path / "graph", memory="100MB")
    assert not list(tmp_path.glob(".*"))


def test_too_little_disk_is_said_at_once(tmp_path, monkeypatch):
    np.save(tmp_path / "edges.npy", np.zeros((2, 1000), "i4"))
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(pyg_scale.convert.plan.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(OSError, match="need up to .* GB, there are") as error:
        converted(NpyReader(tmp_path / "edges.npy"), tmp_path / "graph")
    assert error.value.errno == 28


def test_a_disk_that_fills_up_is_said_and_gone_on_with(tmp_path, monkeypatch):
    np.save(tmp_path / "edges.npy", np.zeros((2, 1000), "i4"))
    write = os.pwrite

    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match=r"the disk is full: .*same command.*\.g\.partial") as error:
        convert(tmp_path / "edges.npy", tmp_path / "g", quiet=True)
    assert error.value.errno == errno.ENOSPC
    monkeypatch.setattr(os, "pwrite", write)
    convert(tmp_path / "edges.npy", tmp_path / "g", quiet=True)
    assert pyg_scale.open(tmp_path / "g", verify=True).num_edges == 1000


@pytest.mark.parametrize("size", [600, 3_000, 100_000, 170_000])
def test_files_that_must_not_grow_are_named_and_gone_on_with(tmp_path, size, capsys):
    edges = np.random.default_rng(0).integers(0, 20_000, (2, 40_000))
    np.save(tmp_path / "edges.npy", edges)
    given = ["convert", str(tmp_path / "edges.npy"), str(tmp_path / "g"), "--quiet"]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        assert cli.main(given) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    said = capsys.readouterr().err
    assert re.match(rf"pyg-scale convert: {tmp_path}/\S*\.g\.\S+: .*File too large", said)
    assert cli.main(given) == 0
    assert pyg_scale.open(tmp_path / "g", verify=True).num_edges == 40_000


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array([b"a", b"bc"]),
        np.array(["a", "bc"]),
        np.empty((0, 3), np.int32),
        np.array(2.5),
        np.arange(8)[::2],
    ],
    ids=str,
)
def test_an_array_is_saved_as_by_numpy(tmp_path, array):
    save_array(tmp_path / "a.npy", array)
    found = np.load(tmp_path / "a.npy")
    assert found.dtype == array.dtype and found.shape == array.shape
    assert np.array_equal(found, array)


def test_an_id_far_beyond_the_others_is_said(tmp_path):
    """A node id is a row number in a `.npy` file: each up to the largest one takes 8 bytes."""
    edges = np.stack([np.arange(300), np.arange(300) + 1])
    edges[0, 7] = 1 << 21
    np.save(tmp_path / "e.npy", edges)
    with pytest.warns(RuntimeWarning, match=r"reach 2,097,152, but edges name at most 600"):
        convert(tmp_path / "e.npy", tmp_path / "g", quiet=True)
    assert GraphDirectory(tmp_path / "g").meta.nodes[None].num_nodes == (1 << 21) + 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert(tmp_path / "e.npy", tmp_path / "h", quiet=True, num_nodes=(1 << 21) + 1)


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '<i8', 'fortran_order': False, 'shape': (2, 300), ",  # TokenError
        "{'descr': '<i8', 'fortran_order': False, 'shape': (2, -300), }",
        "{'descr': '<i8', 'fortran_order': False, 'shape': (True, 300), }",
        "{'descr': '<i8', 'fortran_order': False, 'shape': 2, }",
        "{'descr': 'nothing', 'fortran_order': False, 'shape': (2, 300), }",
        "(" * 100,
        "-" * 5000,
    ],
)
@pytest.mark.parametrize("suffix", ["npy", "npz"])
def test_a_damaged_header_is_named(tmp_path, header, suffix):
    text = header.encode() + b"\n"
    content = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(4800)
    file = tmp_path / f"e.{suffix}"
    if suffix == "npy":
        file.write_bytes(content)
    else:
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("edge_index.npy", content)
    with pytest.raises(ValueError, match=r"cannot be read as \.npy: its header is damaged"):
        convert(file, tmp_path / "g", quiet=True)
