"""What each reader makes of its files, and of wrong ones."""

import json

import numpy as np
import pytest
import torch

import pyg_scale
from pyg_scale import plugins
from pyg_scale.cli import main
from pyg_scale.convert import Tables, convert
from pyg_scale.datasets.read import read_npz
from tests.convert.graphs import Rows, content, graph, hetero, raw


def same_files(a, b):
    first, second = raw(a), raw(b)
    assert first.keys() == second.keys()
    for name in first:
        if name != "META.json":
            assert first[name] == second[name], name
    for key, value in first["META.json"].items():
        if key not in ("keys", "checksum", "nodes", "edges"):
            assert second["META.json"][key] == value, key


@pytest.mark.parametrize(
    ("data", "options"),
    [
        (graph(50, 400), {}),
        (graph(50, 400, kind="sorted", dtype=torch.int32), {}),
        (graph(50, 400), {"time_attr": "edge_time", "weight_attr": "edge_weight"}),
        (graph(50, 400), {"time_attr": "time"}),
        (hetero(), {}),
    ],
    ids=["plain", "sorted", "times", "node times", "hetero"],
)
def test_data_become_what_save_writes(tmp_path, data, options):
    pyg_scale.save(data, tmp_path / "saved", **options)
    convert(data, tmp_path / "converted", quiet=True, **options)
    same_files(tmp_path / "saved", tmp_path / "converted")


@pytest.mark.parametrize("name", ["cora", "tolokers", "dblp", "history"])
def test_real_graphs_become_what_save_writes(tmp_path, data_dir, name):
    data = read_npz(data_dir / f"{name}.npz")
    pyg_scale.save(data, tmp_path / "saved")
    convert(data_dir / f"{name}.npz", tmp_path / "converted", quiet=True)
    same_files(tmp_path / "saved", tmp_path / "converted")


def test_ids_of_any_kind_become_numbers(tmp_path):
    edges = Rows(
        tmp_path / "e", src=[b"bob", b"eve", b"bob"], dst=[b"eve", b"al", b"bob"], w=[1, 2, 0]
    )
    done = convert(Tables(edges), tmp_path / "g", weight_attr="w", quiet=True)
    assert done.num_nodes == {None: 3}
    assert np.load(tmp_path / "g/ids/nodes.npy").tolist() == [b"al", b"bob", b"eve"]
    data = pyg_scale.open(tmp_path / "g")
    assert data.edge_index.tolist() == [[1, 2, 1], [2, 0, 1]] and data.w.tolist() == [1, 2, 0]


def test_a_table_of_nodes_says_the_order(tmp_path):
    edges = Rows(tmp_path / "e", src=[30, 10], dst=[10, 20])
    nodes = Rows(tmp_path / "n", id=[20, 10, 30], age=[5.5, 6.5, 7.5])
    convert(Tables(edges, nodes), tmp_path / "g", quiet=True)
    data = pyg_scale.open(tmp_path / "g")
    assert data.edge_index.tolist() == [[2, 1], [1, 0]] and data.age.tolist() == [5.5, 6.5, 7.5]
    by_row = Tables(edges, {"": Rows(tmp_path / "m", age=np.arange(31))}, ids="position")
    convert(by_row, tmp_path / "h", quiet=True)
    assert pyg_scale.open(tmp_path / "h").edge_index.tolist() == [[30, 10], [10, 20]]


def test_ids_that_are_wrong_are_refused(tmp_path):
    edges = {"edges": Rows(tmp_path / "e", src=[1, 1], dst=[1, 2])}
    text, twice, few = [b"x"], [1, 1], [1]
    for ids, message in (
        (twice, "same id 1"),
        (few, "row 1 of .* has id 2, which is"),
        (text, "text"),
    ):
        nodes = Rows(tmp_path / "n", id=ids)
        with pytest.raises((ValueError, TypeError), match=message):
            convert(Tables(**edges, nodes=nodes), tmp_path / "g", quiet=True)
    np.save(tmp_path / "x.npy", np.zeros((2, 3)))
    with pytest.raises(ValueError, match="pass ids='position'"):
        Tables(**edges, nodes={"x": tmp_path / "x.npy"})


@pytest.mark.parametrize(
    "name", ["e.csv", "e.tsv.gz", "e.txt", "e.parquet", "e.arrow", "e.feather"]
)
def test_a_file_of_a_plugin_names_the_line_that_installs_it(tmp_path, capsys, monkeypatch, name):
    monkeypatch.setenv("PYG_SCALE_PLUGINS", "")
    built_in = plugins.Registry()
    monkeypatch.setattr(plugins, "get", built_in.get)
    monkeypatch.setattr(plugins, "names", built_in.names)
    (tmp_path / name).write_bytes(b"a,b")
    source, edges = str(tmp_path / name), f"a,to,b={tmp_path / name}"
    np.save(tmp_path / "e.npy", np.zeros((2, 1), "i8"))
    nodes = [str(tmp_path / "e.npy"), str(tmp_path / "g"), "--nodes", f"x={source}"]
    for rest in ([source, str(tmp_path / "g")], [str(tmp_path / "g"), "--edges", edges], nodes):
        assert main(["convert", *rest]) != 0
        assert "pip install pyg-scale-tables" in capsys.readouterr().err


def test_graph_of_several_files(tmp_path):
    np.save(tmp_path / "cites.npy", np.array([[0, 1], [1, 1]]))
    np.save(tmp_path / "writes.npy", np.array([[2, 1], [0, 1]]))
    np.save(tmp_path / "x.npy", np.eye(2, dtype=np.float32))
    arguments = [
        *("convert", str(tmp_path / "g"), "--quiet", "--json", "-o", "ids=position"),
        *("--edges", f"paper,cites,paper={tmp_path / 'cites.npy'}"),
        *("--edges", f"author,writes,paper={tmp_path / 'writes.npy'}"),
        *("--nodes", f"paper:x={tmp_path / 'x.npy'}", "--num-nodes", "author=4"),
    ]
    assert main(arguments) == 0
    data = pyg_scale.open(tmp_path / "g")
    assert data["author"].num_nodes == 4
    assert data["paper"].x.tolist() == [[1, 0], [0, 1]]
    assert data["author", "writes", "paper"].edge_index.tolist() == [[2, 1], [0, 1]]


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((3, 4), "i8"), r"must have the shape \[2, num_edges\]"),
        (np.zeros((2, 4)), "node ids must be integers"),
        (np.array([[{}], [{}]]), "holds Python objects"),
    ],
)
def test_wrong_npy_is_refused(tmp_path, array, message):
    np.save(tmp_path / "e.npy", array, allow_pickle=True)
    with pytest.raises((ValueError, TypeError), match=message):
        convert(tmp_path / "e.npy", tmp_path / "g", quiet=True)


def test_truncated_and_missing_files_are_named(tmp_path):
    np.save(tmp_path / "e.npy", np.zeros((2, 100), "i8"))
    data = (tmp_path / "e.npy").read_bytes()
    (tmp_path / "e.npy").write_bytes(data[:-8])
    with pytest.raises(ValueError, match=r"e\.npy has .* it is truncated"):
        convert(tmp_path / "e.npy", tmp_path / "g", quiet=True)
    with pytest.raises(FileNotFoundError, match=r"none\.npy"):
        convert(tmp_path / "none.npy", tmp_path / "g", quiet=True)
    (tmp_path / "e.npz").write_bytes(b"PK nothing")
    with pytest.raises(ValueError, match="no plain NumPy"):
        convert(tmp_path / "e.npz", tmp_path / "g", quiet=True)
    with pytest.raises(ValueError, match="no reader|unknown|reader"):
        convert("nothing:x", tmp_path / "g", quiet=True)


def test_names_that_hide_others_are_refused_before_edges_are_read(tmp_path):
    np.save(tmp_path / "e.npy", np.array([[0, 9], [1, 1]]))  # 9 is refused when edges are read
    np.save(tmp_path / "v.npy", np.zeros(2))
    e, v = tmp_path / "e.npy", tmp_path / "v.npy"
    for source, message in (
        (Tables(e, {"kind": v}, {"kind": v}), "have an attribute 'kind' each"),
        (Tables(e, None, {"edge_index": v}), "'edge_index' of the edges: PyG means"),
        (Tables(e, {"num_nodes": v}), "'num_nodes' of the nodes: PyG means"),
        (Tables({("a", "to", "a"): e}, {"a": {"num_nodes": v}}), "'num_nodes' of the nodes of 'a'"),
    ):
        with pytest.raises(ValueError, match=message):
            convert(source, tmp_path / "g", quiet=True)
    np.save(e, np.array([[0, 1], [1, 1]]))
    same = Tables({("a", "to", "b"): e}, {"a": {"kind": v}, "b": {"kind": v}})
    convert(same, tmp_path / "g", quiet=True)
    assert pyg_scale.open(tmp_path / "g")["b"].kind.tolist() == [0.0, 0.0]


def test_attributes_of_another_length_are_refused(tmp_path):
    np.save(tmp_path / "e.npy", np.zeros((2, 5), "i8"))
    np.save(tmp_path / "w.npy", np.zeros(4))
    source = Tables(tmp_path / "e.npy", edge_attributes={"w": tmp_path / "w.npy"})
    with pytest.raises(ValueError, match="'w' has 4 rows, expected 5"):
        convert(source, tmp_path / "g", quiet=True)


def test_the_command(tmp_path, capsys):
    np.save(tmp_path / "e.npy", np.array([[0, 1], [1, 2]]))
    np.save(tmp_path / "y.npy", np.arange(3))
    arguments = ["convert", str(tmp_path / "e.npy"), str(tmp_path / "g")]
    assert main([*arguments, "--nodes", f"y={tmp_path / 'y.npy'}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_nodes"] == {"": 3} and found["num_edges"] == {"": 2}
    assert content(tmp_path / "g")["part-0/nodes/attributes/y.npy"].tolist() == [0, 1, 2]
    assert main(arguments) == 1
    assert "is already a graph directory" in capsys.readouterr().err
    assert main([*arguments, "--overwrite", "--undirected"]) == 0
    assert "3 nodes, 4 edges" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["only"],
        ["a", "b", "--edges", "e.npy"],
        ["a", "b", "c"],
        ["a", "b", "--num-nodes", "x"],
        ["a", "b", "-o", "c"],
    ],
)
def test_wrong_usage(arguments):
    with pytest.raises(SystemExit) as error:
        main(["convert", *arguments])
    assert error.value.code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("g --edges a,b,c=1 --edges a,b,c=2", "--edges: a,b,c is given twice: 1 and 2"),
        ("g --edges 1 --edges 2", "--edges: the same without a type is given twice: 1 and 2"),
        ("e g --edges w=1 --edges w=2", "--edges: w is given twice"),
        ("g --edges a,b,c=e --edges a,b,c:w=1 --edges a,b,c:w=2", "--edges: a,b,c:w is given"),
        ("e g --nodes x=1 --nodes x=2", "--nodes: x is given twice: 1 and 2"),
        ("g --edges a,b,c=e --nodes a:x=1 --nodes a:x=2", "--nodes: a:x is given twice"),
        ("g --edges a,b,c=e --nodes a=1 --nodes a=2", "--nodes: a is given twice"),
        ("e g --index-set t=1 --index-set t=2", "--index-set: t is given twice: 1 and 2"),
        ("e g --index-set a:t=1 --index-set a:t=2", "--index-set: a:t is given twice"),
        ("e g --num-nodes 1 --num-nodes 2", "--num-nodes: the same without a type is given twice"),
        ("e g --num-nodes a=1 --num-nodes a=2", "--num-nodes: a is given twice: 1 and 2"),
        ("e g -o a=1 -o a=2", "--option: a is given twice: 1 and 2"),
        ("e g -o root=1 --root 2", "--root: root is given twice: 1 and 2"),
    ],
)
def test_what_is_given_twice_is_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as error:
        main(["convert", *arguments.split()])
    assert error.value.code == 2
    assert message in capsys.readouterr().err
