"""Directories as GLT writes them, put together again, and never trusted."""

import os
import pickle

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

import pyg_scale
from pyg_scale.convert import convert
from pyg_scale.partitioner.cut import partition
from pyg_scale.store.directory.reader import GraphDirectory
from pyg_scale_migrate.glt.reader import GLTReader, assignment

from .glt_directory import save, write_glt

NODES, EDGES = 50, 300
WRITES = ("author", "writes", "paper")
CITES = ("paper", "cites", "paper")


class Work:
    """A workspace that forgets."""

    memory = 1 << 20

    def __init__(self, folder):
        self.folder = folder

    def once(self, name, work):
        return work()

    def progress(self, what, total, unit):
        from tqdm import tqdm

        return tqdm(disable=True)


@pytest.fixture
def random():
    return torch.Generator().manual_seed(3)


@pytest.fixture
def homogeneous(random):
    return {
        "num_nodes": {None: NODES},
        "edge_index": {None: torch.randint(NODES, (2, EDGES), generator=random)},
        "parts": {None: torch.randint(3, (NODES,), generator=random)},
        "node_feat": {None: torch.randn(NODES, 4, generator=random)},
        "edge_feat": {None: torch.randn(EDGES, 2, generator=random).to(torch.bfloat16)},
        "weights": {None: torch.rand(EDGES, generator=random)},
    }


@pytest.fixture
def hetero(random):
    return {
        "num_nodes": {"paper": NODES, "author": 20},
        "edge_index": {
            WRITES: torch.stack([torch.randint(n, (90,), generator=random) for n in (20, NODES)]),
            CITES: torch.randint(NODES, (2, 120), generator=random),
        },
        "parts": {
            "paper": torch.randint(2, (NODES,), generator=random),
            "author": torch.randint(2, (20,), generator=random),
        },
        "node_feat": {"paper": torch.randn(NODES, 3, generator=random)},
        "edge_feat": {
            CITES: torch.randn(120, 1, generator=random),
            WRITES: torch.arange(90)[:, None],
        },
    }


def check(path, graph, tmp_path, **options):
    reader = GLTReader(path, **options)
    reader.prepare(Work(tmp_path / "work"))
    found = reader.describe()
    feats = graph.get("node_feat", {}), graph.get("edge_feat", {})
    assert {t: n.num_nodes for t, n in found.nodes.items()} == graph["num_nodes"]
    for begin, rows in ((0, 1000), (0, 11), (17, 5)):
        for kind, nodes in found.nodes.items():
            assert ("x" in nodes.attributes) == (kind in feats[0])
            if kind in feats[0]:
                got = torch.cat(list(reader.node_attribute(kind, "x", begin, rows)))
                assert torch.equal(got, feats[0][kind][begin:])
                assert nodes.attributes["x"].row == tuple(got.shape[1:])
        for kind, edges in found.edges.items():
            index = graph["edge_index"][kind]
            assert edges.num_edges == index.size(1)
            chunks = list(reader.edges(kind, begin, rows))
            assert all(0 < len(src) <= rows for src, _ in chunks)
            assert torch.equal(torch.cat([torch.stack(c) for c in chunks], 1), index[:, begin:])
            for values, name in (
                (feats[1], "edge_attr"),
                (graph.get("weights", {}), "edge_weight"),
            ):
                assert (name in edges.attributes) == (kind in values)
                if kind in values:
                    got = torch.cat(list(reader.edge_attribute(kind, name, begin, rows)))
                    assert got.dtype == values[kind].dtype
                    assert torch.equal(got, values[kind][begin:])
    reader.close()
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"strategy": "by_dst"},
        {"old": True},
        {"shuffled": True},
        {"caching": True},
        {"caching": True, "shuffled": True},
    ],
    ids=str,
)
def test_the_graph_comes_back(homogeneous, hetero, tmp_path, options):
    for name, graph in (("one", homogeneous), ("types", hetero)):
        write_glt(tmp_path / name, **graph, **options)
        check(tmp_path / name, graph, tmp_path / f"{name}-work")


def test_the_whole_graph_without_ids_is_in_the_order_of_the_parts(homogeneous, tmp_path):
    del homogeneous["edge_feat"], homogeneous["weights"]
    write_glt(tmp_path / "glt", **homogeneous, caching=True)
    part = homogeneous["parts"][None][homogeneous["edge_index"][None][0]]
    order = part.sort(stable=True).indices
    homogeneous["edge_index"][None] = homogeneous["edge_index"][None][:, order]
    check(tmp_path / "glt", homogeneous, tmp_path)


def test_the_partition_is_kept(homogeneous, hetero, tmp_path):
    write_glt(tmp_path / "one", **homogeneous)
    found = assignment(tmp_path / "one")
    assert found.dtype == torch.int32 and torch.equal(found.long(), homogeneous["parts"][None])
    data = Data(edge_index=homogeneous["edge_index"][None], num_nodes=NODES)
    for given in (found, tmp_path / "one" / "node_pb.pt"):
        assert torch.equal(partition(data, 3, assignment=given), found)
    convert(f"glt:{tmp_path / 'one'}", tmp_path / "graph", quiet=True)
    opened = pyg_scale.open(tmp_path / "graph")
    assert torch.equal(opened.edge_index, homogeneous["edge_index"][None])
    assert torch.equal(opened.x, homogeneous["node_feat"][None])
    assert torch.equal(opened.edge_weight, homogeneous["weights"][None])
    partition(tmp_path / "graph", 3, assignment=found, path=tmp_path / "parts")
    for number in range(3):
        mine = GraphDirectory(tmp_path / "parts").part(number).orig_id(None)
        assert torch.equal(mine, (found == number).nonzero().view(-1))
    write_glt(tmp_path / "types", **hetero)
    found = assignment(tmp_path / "types")
    assert list(found) == ["paper", "author"]
    assert all(torch.equal(found[kind].long(), hetero["parts"][kind]) for kind in found)


def test_labels(homogeneous, hetero, tmp_path):
    write_glt(tmp_path / "one", **homogeneous)
    write_glt(tmp_path / "types", **hetero)
    label = torch.arange(NODES)
    save(label, tmp_path / "labels.pt")
    np.save(tmp_path / "labels.npy", label[:, None].numpy())
    for source, kind, given, wanted in (
        ("one", None, f"{tmp_path}/labels.pt", label),
        ("one", None, f"{tmp_path}/labels.npy", label[:, None]),
        ("types", "paper", f"paper={tmp_path}/labels.pt", label),
    ):
        reader = GLTReader(tmp_path / source, labels=given)
        reader.prepare(Work(tmp_path / "work"))
        assert reader.describe().nodes[kind].attributes["y"].row == tuple(wanted.shape[1:])
        assert torch.equal(torch.cat(list(reader.node_attribute(kind, "y", 4, 7))), wanted[4:])
    with pytest.raises(ValueError, match="labels must be like paper=labels.pt"):
        GLTReader(tmp_path / "types", labels="labels.pt")
    with pytest.raises(FileNotFoundError, match="there is no file 'nothing.pt'"):
        GLTReader(tmp_path / "one", labels="nothing.pt")
    reader = GLTReader(tmp_path / "types", labels=f"author={tmp_path}/labels.pt")
    with pytest.raises(ValueError, match="a label for each of 20 nodes"):
        reader.prepare(Work(tmp_path / "work"))
    (tmp_path / "labels.pt").rename(tmp_path / "run=2.pt")
    GLTReader(tmp_path / "types", labels=f"paper={tmp_path}/run=2.pt").prepare(Work(tmp_path))
    twice = f"paper={tmp_path}/run=2.pt,paper={tmp_path}/labels.npy"
    with pytest.raises(ValueError, match="labels names two files of 'paper'"):
        GLTReader(tmp_path / "types", labels=twice)
    for wrong in (5, {"paper": "labels.pt"}, tmp_path / "labels.npy"):
        with pytest.raises(TypeError, match=r"labels must be text like 'labels.pt' \(got"):
            GLTReader(tmp_path / "types", labels=wrong)
    with pytest.raises(FileNotFoundError, match="there is no file 'aaa"):
        GLTReader(tmp_path / "types", labels=f"paper={'a' * 300}")


@pytest.mark.parametrize(
    ("labels", "error", "match"),
    [
        (np.asfortranarray(np.arange(2.0 * NODES).reshape(NODES, 2)), ValueError, "Fortran order"),
        (np.array(["one"] * NODES), TypeError, "holds <U3, which torch does not have"),
        (np.zeros(NODES, np.longdouble), TypeError, "holds float128, which torch does not have"),
        (np.array(1.0), ValueError, "must have one row a node"),
    ],
    ids=["fortran", "text", "longdouble", "number"],
)
def test_labels_that_cannot_be_read(homogeneous, tmp_path, labels, error, match):
    write_glt(tmp_path / "glt", **homogeneous)
    np.save(tmp_path / "labels.npy", labels)
    reader = GLTReader(tmp_path / "glt", labels=f"{tmp_path}/labels.npy")
    with pytest.raises(error, match=f"labels.npy .*{match}"):
        reader.prepare(Work(tmp_path / "work"))


@pytest.mark.parametrize("dtype", [torch.uint16, torch.float8_e4m3fn, torch.uint64])
@pytest.mark.parametrize("old", [False, True])
def test_features_of_new_dtypes(homogeneous, tmp_path, dtype, old):
    values = torch.arange(NODES * 2).view(NODES, 2)
    homogeneous["node_feat"][None] = values.to(torch.float32).to(dtype)
    write_glt(tmp_path / "glt", **homogeneous, old=old)
    reader = GLTReader(tmp_path / "glt")
    reader.prepare(Work(tmp_path / "work"))
    got = torch.cat([rows.view(torch.uint8) for rows in reader.node_attribute(None, "x", 0, 20)])
    assert torch.equal(got, homogeneous["node_feat"][None].view(torch.uint8))


@pytest.mark.parametrize("old", [False, True])
def test_types_without_edges_keep_their_attributes(hetero, tmp_path, old):
    none = ("author", "cites", "author")
    hetero["edge_index"][none] = torch.empty(2, 0, dtype=torch.int64)
    hetero["edge_feat"][none] = torch.empty(0, 3)
    write_glt(tmp_path / "glt", **hetero, old=old)
    convert(f"glt:{tmp_path / 'glt'}", tmp_path / "graph", quiet=True)
    found = pyg_scale.open(tmp_path / "graph")
    assert found[none].edge_attr.shape == (0, 3)
    assert torch.equal(found[CITES].edge_attr, hetero["edge_feat"][CITES])


def test_a_part_without_nodes_decides_no_shape(homogeneous, tmp_path):
    homogeneous["parts"][None].clamp_(min=1)
    write_glt(tmp_path / "glt", **homogeneous, old=True)
    save(torch.empty(0), tmp_path / "glt" / "part0" / "node_feat" / "feats.pt")
    check(tmp_path / "glt", homogeneous, tmp_path)


# Bad input ################################################################################


def prepare(path, tmp_path):
    GLTReader(path).prepare(Work(tmp_path / "work"))


class Payload:
    def __init__(self, made):
        self.made = str(made)

    def __reduce__(self):
        return os.mkdir, (self.made,)


def test_no_file_runs_anything(homogeneous, tmp_path):
    path, made = tmp_path / "glt", tmp_path / "made"
    write_glt(path, **homogeneous)
    files = [
        *(file for file in path.rglob("*") if file.is_file()),
    ]
    read = 0
    for file in files:
        whole = file.read_bytes()
        if file.suffix == ".pt":
            save(Payload(made), file)
        else:
            file.write_bytes(pickle.dumps(Payload(made)))
        if file.name.startswith(("edge_pb", "cache_")):  # not needed, so not read
            prepare(path, tmp_path)
        else:
            with pytest.raises(ValueError, match=f"{file.name} is damaged, or holds more"):
                prepare(path, tmp_path)
            read += 1
        assert not made.exists(), file
        file.write_bytes(whole)
    assert read == 2 + 3 * (4 + 2 + 2)


def test_every_missing_or_truncated_file_is_named(homogeneous, tmp_path):
    path = tmp_path / "glt"
    write_glt(path, **homogeneous)
    for file in sorted(file for file in path.rglob("*") if file.is_file()):
        if file.name.startswith(("edge_pb", "cache_")):
            continue
        whole = file.read_bytes()
        file.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(ValueError, match=file.name):
            prepare(path, tmp_path)
        file.unlink()
        with pytest.raises(FileNotFoundError, match=file.name):
            prepare(path, tmp_path)
        file.write_bytes(whole)
    prepare(path, tmp_path)
    (path / "part1").rename(tmp_path / "away")
    with pytest.raises(FileNotFoundError, match="has 3 parts, but no part1"):
        prepare(path, tmp_path)


def test_partitioned_twice_into_one_directory(homogeneous, tmp_path):
    write_glt(tmp_path / "glt", **homogeneous)
    homogeneous["parts"][None] = homogeneous["parts"][None].roll(1)
    write_glt(tmp_path / "glt", **homogeneous)
    with pytest.raises(ValueError, match="a row that is there already: GLT appends"):
        prepare(tmp_path / "glt", tmp_path)


def test_parts_of_two_partitions(homogeneous, tmp_path):
    write_glt(tmp_path / "a", **homogeneous)
    homogeneous["parts"][None] = homogeneous["parts"][None].roll(1)
    write_glt(tmp_path / "b", **homogeneous)
    (tmp_path / "a" / "part2").rename(tmp_path / "away")
    (tmp_path / "b" / "part2").rename(tmp_path / "a" / "part2")
    with pytest.raises(ValueError, match="an edge is there twice|a part is missing or old"):
        prepare(tmp_path / "a", tmp_path)


@pytest.mark.parametrize(
    ("file", "value", "match"),
    [
        ("node_pb.pt", torch.full((NODES,), 3), "0 is in part 3, META says 3 parts"),
        ("part0/graph/rows.pt", torch.zeros(2).long(), "cols.pt has .* edges, rows.pt 2"),
        ("part0/graph/cols.pt", torch.zeros(2), "must hold int64 or int32"),
        ("part1/graph/rows.pt", {"a": 1}, "must hold a tensor of shape"),
    ],
)
def test_files_that_do_not_fit(homogeneous, tmp_path, file, value, match):
    path = tmp_path / "glt"
    write_glt(path, **homogeneous)
    save(value, path / file)
    with pytest.raises(ValueError, match=match):
        prepare(path, tmp_path)


@pytest.mark.parametrize(
    "meta",
    [
        [],
        {"num_parts": "3", "data_cls": "homo"},
        {"num_parts": 3, "data_cls": "hetero", "node_types": None, "edge_types": None},
        {"num_parts": 3, "data_cls": "hetero", "node_types": ["a"], "edge_types": [("a", "b")]},
    ],
)
def test_meta_that_is_none(homogeneous, tmp_path, meta):
    write_glt(tmp_path / "glt", **homogeneous)
    (tmp_path / "glt" / "META").write_bytes(pickle.dumps(meta))
    with pytest.raises(ValueError, match="META is not what GLT writes"):
        GLTReader(tmp_path / "glt")
    with pytest.raises(FileNotFoundError, match="is not a partition of GLT"):
        GLTReader(tmp_path)


@pytest.mark.parametrize(("name", "dtype"), [("weights", "float64"), ("rows", "int32")])
def test_parts_of_other_dtypes(homogeneous, tmp_path, name, dtype):
    path = tmp_path / "glt"
    write_glt(path, **homogeneous)
    file = path / "part1" / "graph" / f"{name}.pt"
    save(torch.load(file).to(getattr(torch, dtype)), file)
    with pytest.raises(ValueError, match=f"part1/graph/{name}.pt holds torch.{dtype}, .*part0"):
        prepare(path, tmp_path)


def test_a_type_with_a_name_that_no_file_can_have(hetero, tmp_path):
    write_glt(tmp_path / "glt", **hetero)
    meta = pickle.loads((tmp_path / "glt" / "META").read_bytes())
    meta["node_types"].append("a" * 300)
    (tmp_path / "glt" / "META").write_bytes(pickle.dumps(meta))
    with pytest.raises(ValueError, match="META has a type .* name is too long: aaa"):
        GLTReader(tmp_path / "glt")


def test_features_of_other_rows(homogeneous, tmp_path):
    path = tmp_path / "glt"
    write_glt(path, **homogeneous, old=True)
    folder = path / "part1" / "node_feat"
    ids = torch.load(folder / "ids.pt")
    feats = torch.load(folder / "feats.pt")
    for new_ids, new_feats, match in (
        (ids + NODES, feats, "has a row of id"),
        (ids + 0.7, feats, "must be integers .got torch.float32"),
        (ids[1:], feats[1:], "no part has the node_feat of"),
        (ids[1:], feats, "ids and .* features"),
        (ids, feats.double(), "torch.float64 rows"),
        (ids[[0] * len(ids)], feats, "a row that is there already"),
    ):
        save(new_ids, folder / "ids.pt")
        save(new_feats, folder / "feats.pt")
        with pytest.raises(ValueError, match=match):
            prepare(path, tmp_path)
