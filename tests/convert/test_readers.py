"""What each reader makes of its files, and of wrong ones."""

import gzip
import json

import numpy as np
import pytest
import torch

import pyg_scale
from pyg_scale.cli import main
from pyg_scale.convert import Tables, convert
from pyg_scale.datasets.read import read_npz
from pyg_scale.store.directory import GraphDirectory
from tests.convert.graphs import content, graph, hetero, raw


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


def csv(path, text):
    path.write_text(text)
    return path


def test_csv_with_ids_of_any_kind(tmp_path):
    edges = csv(tmp_path / "e.csv", "from,to,weight\nbob,eve,1.5\nälva,bob,2\nbob,bob,0\n")
    done = convert(edges, tmp_path / "g", weight_attr="weight", quiet=True)
    assert done.num_nodes == {None: 3}
    ids = np.load(tmp_path / "g/ids/nodes.npy")
    assert [each.decode() for each in ids] == ["bob", "eve", "älva"]
    part = GraphDirectory(tmp_path / "g").part(0)
    assert part.csc(None).indptr.tolist() == [0, 2, 3, 3]
    assert part.csc(None).indices.tolist() == [2, 0, 0]
    assert part.edge_attribute(None, "weight").tolist() == [1.5, 2.0, 0.0]


def test_csv_with_a_table_of_nodes(tmp_path):
    edges = csv(tmp_path / "e.tsv", "a\tb\n30\t10\n10\t20\n")
    nodes = csv(tmp_path / "n.csv", "id,age,label\n20,5.5,1\n10,6.5,0\n30,7.5,2\n")
    convert(Tables(edges, nodes), tmp_path / "g", quiet=True)
    part = GraphDirectory(tmp_path / "g").part(0)
    assert part.csc(None).indices.tolist() == [1, 2]
    assert part.node_attribute(None, "label").tolist() == [1, 0, 2]
    assert part.node_attribute(None, "age").dtype == torch.float64
    assert np.load(tmp_path / "g/ids/nodes.npy").tolist() == [20, 10, 30]


def test_row_numbers_stay_what_they_are(tmp_path):
    edges = csv(tmp_path / "e.csv", "a,b\n5,1\n")
    done = convert(edges, tmp_path / "g", ids="position", num_nodes=9, quiet=True)
    assert done.num_nodes == {None: 9} and not (tmp_path / "g/ids").exists()
    assert GraphDirectory(tmp_path / "g").part(0).csc(None).indices.tolist() == [5]


def test_leading_zeros_are_part_of_an_id(tmp_path):
    text = "a,b,w\n00123,123,1\n123,007,2\n"
    convert(csv(tmp_path / "e.csv", text), tmp_path / "g", quiet=True)
    assert pyg_scale.open(tmp_path / "g").num_nodes == 3
    later = "a,b\n" + "1,2\n" * 1500 + "1,02\n"
    with pytest.raises(ValueError, match=r"row 1501, column 'b': '02' is no int64"):
        convert(csv(tmp_path / "l.csv", later), tmp_path / "h", quiet=True)
    numbers = {"dtypes": {"a": "int64", "b": "int64"}}
    convert(tmp_path / "l.csv", tmp_path / "h", quiet=True, **numbers)
    assert pyg_scale.open(tmp_path / "h").num_nodes == 2


def test_ids_of_csv_may_be_hashes_of_64_bits(tmp_path):
    text = f"a,b\n{2**63 + 5},3\n3,{2**64 - 1}\n{2**64 - 1},7\n"
    convert(csv(tmp_path / "e.csv", text), tmp_path / "g", quiet=True)
    ids = np.load(tmp_path / "g/ids/nodes.npy").view("u8")
    assert ids[pyg_scale.open(tmp_path / "g").edge_index].tolist() == [
        [2**63 + 5, 3, 2**64 - 1],
        [3, 2**64 - 1, 7],
    ]
    late = csv(tmp_path / "late.csv", "a,b\n" + "1,2\n" * 1500 + f"{2**63},2\n")
    with pytest.raises(ValueError, match="row 1501, column 'a'.* is no int64"):
        convert(late, tmp_path / "h", quiet=True)
    convert(late, tmp_path / "h", quiet=True, dtypes={"a": "uint64"})
    assert pyg_scale.open(tmp_path / "h").num_nodes == 3


def test_a_header_is_not_taken_for_an_edge(tmp_path):
    edges = csv(tmp_path / "e.txt", "from to weight\n1 2 0.5\n2 3 1\n")
    with pytest.raises(ValueError, match="'from to weight' above rows of numbers.*header=True"):
        convert(edges, tmp_path / "g", quiet=True)
    convert(edges, tmp_path / "g", quiet=True, header=True)
    assert pyg_scale.open(tmp_path / "g").weight.tolist() == [0.5, 1.0]
    words = csv(tmp_path / "w.txt", "a b\n1 2\n2 x\n")  # some ids are words: this is an edge
    convert(words, tmp_path / "h", quiet=True)
    assert pyg_scale.open(tmp_path / "h").num_edges == 3


def test_options_of_csv(tmp_path):
    edges = tmp_path / "e.csv.gz"
    edges.write_bytes(gzip.compress(b"7;8;1\n8;7;2\n"))
    options = {"delimiter": ";", "header": False, "dtypes": {"2": "float32"}}
    convert(edges, tmp_path / "g", quiet=True, **options)
    part = GraphDirectory(tmp_path / "g").part(0)
    assert part.edge_attribute(None, "2").tolist() == [1.0, 2.0]
    assert part.edge_attribute(None, "2").dtype == torch.float32


SNAP = "# Directed graph\n# FromNodeId\tToNodeId\n30\t10\n10   20\n30 20\n\n"


def test_edge_lists_of_snap(tmp_path):
    convert(csv(tmp_path / "roads.txt", SNAP), tmp_path / "g", quiet=True)
    assert np.load(tmp_path / "g/ids/nodes.npy").tolist() == [10, 20, 30]
    assert pyg_scale.open(tmp_path / "g").edge_index.tolist() == [[2, 0, 2], [0, 1, 1]]
    edges = csv(tmp_path / "e.csv", "# said\n\na,b\n#1,2\n2,#1\n\n")
    done = convert(edges, tmp_path / "h", quiet=True)  # only what is above the header
    assert done.num_edges == {None: 2}
    with pytest.raises(ValueError, match="row 2 has 0 columns"):
        convert(csv(tmp_path / "gap.csv", "a,b\n1,2\n\n2,1\n"), tmp_path / "i", quiet=True)


def test_options_of_the_command_line(tmp_path):
    edges = csv(tmp_path / "e.csv", "0,1\n1,2\n2,0\n")
    for number, value in enumerate(("False", "false")):
        arguments = ["convert", str(edges), str(tmp_path / f"{number}"), "--quiet"]
        assert main([*arguments, "-o", f"header={value}"]) == 0
        assert pyg_scale.open(tmp_path / f"{number}").num_edges == 3


def test_graph_of_several_files(tmp_path):
    np.save(tmp_path / "cites.npy", np.array([[0, 1], [1, 1]]))
    csv(tmp_path / "writes.csv", "author,paper\n2,0\n1,1\n")
    np.save(tmp_path / "x.npy", np.eye(2, dtype=np.float32))
    arguments = [
        *("convert", str(tmp_path / "g"), "--quiet", "--json", "-o", "ids=position"),
        *("--edges", f"paper,cites,paper={tmp_path / 'cites.npy'}"),
        *("--edges", f"author,writes,paper={tmp_path / 'writes.csv'}"),
        *("--nodes", f"paper:x={tmp_path / 'x.npy'}", "--num-nodes", "author=4"),
    ]
    assert main(arguments) == 0
    data = pyg_scale.open(tmp_path / "g")
    assert data["author"].num_nodes == 4
    assert data["paper"].x.tolist() == [[1, 0], [0, 1]]
    assert data["author", "writes", "paper"].edge_index.tolist() == [[2, 1], [0, 1]]


BAD = {
    "ragged": (
        "a,b\n1,2\n3\n",
        {},
        "row 2 has 1 columns, expected 2",
    ),
    "text": ("a,b,w\n1,2,3\n1,2,x\n", {}, "column 'w' holds text"),
    "late text": ("a,b,w\n" + "1,2,3\n" * 1000 + "1,2,x\n", {}, "row 1001, column 'w': 'x'"),
    "nan": ("a,b,w\n1,2,1\n1,2,nan\n", {"weight_attr": "w"}, "row 2 is nan"),
    "negative weight": ("a,b,w\n1,2,-1\n", {"weight_attr": "w"}, "row 1 is -1"),
    "negative id": ("a,b\n-1,2\n", {"ids": "position"}, "row 1 has source -1, but ids begin at 0"),
    "too large": (
        "a,b\n1,2\n1,9\n",
        {"ids": "position", "num_nodes": 4},
        "row 2 has destination 9, but there are 4",
    ),
    "no header": ("0,1\n1,2\n2,0\n", {}, r"begins with numbers \(0, 1\).*header=False"),
    "delimiter": ("a,b\n1,2\n", {"delimiter": "--"}, "one character or 'whitespace'"),
    "one column": ("a\n1\n", {}, "two columns"),
    "empty": ("", {}, "is empty"),
    "same names": ("a,a\n1,2\n", {}, "its own name"),
    "option": ("a,b\n1,2\n", {"colour": 1}, "no file takes the option 'colour'"),
    "ids": ("a,b\n1,2\n", {"ids": "none"}, "ids must be"),
    "text position": ("a,b\nx,y\n", {"ids": "position"}, "pass ids='map'"),
    "unclosed": ('a,b\n"1,2\n', {}, "row 0: unexpected end"),
    "dtype": ("a,b\n1,2\n", {"dtypes": {"c": "int64"}}, "columns of .* are a, b"),
    "float ids": ("a,b\n1.5,2\n", {}, r"'a' holds float64: .*dtypes=\{'a': 'text'\}"),
    "same bits": (f"a,b\n-1,{2**64 - 1}\n", {}, r"'b' has ids from 2\*\*63 on and .*'a' negative"),
    "mixed ids": ("a,b\nx,1\n", {}, "some ids are text, some numbers: make all of them text"),
    "time": ("a,b,t\n1,2,nan\n", {"time_attr": "t"}, "row 1 is NaN"),
    "no time": ("a,b\n1,2\n", {"time_attr": "t"}, "neither an attribute of nodes nor"),
    "no weight": ("a,b\n1,2\n", {"weight_attr": "w"}, "no edge type has this attribute"),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_csv_is_refused_and_leaves_nothing(tmp_path, case):
    text, options, message = BAD[case]
    edges = csv(tmp_path / "edges.csv", text)
    with pytest.raises((ValueError, IndexError, TypeError), match=message):
        convert(edges, tmp_path / "g", quiet=True, **options)
    assert [each.name for each in tmp_path.iterdir()] == ["edges.csv"]


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
    (tmp_path / "latin.csv").write_bytes("a,b\n\xe9,1\n".encode("latin1"))
    with pytest.raises(ValueError, match=r"latin\.csv, at its beginning: .*decode"):
        convert(tmp_path / "latin.csv", tmp_path / "g", quiet=True)
    (tmp_path / "e.csv.gz").write_bytes(b"a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"e\.csv\.gz, at its beginning: Not a gzipped"):
        convert(tmp_path / "e.csv.gz", tmp_path / "g", quiet=True)


def test_features_and_mapped_ids_do_not_go_together(tmp_path):
    edges = csv(tmp_path / "e.csv", "a,b\n1,2\n")
    np.save(tmp_path / "x.npy", np.zeros((2, 3)))
    with pytest.raises(ValueError, match="pass ids='position'"):
        Tables(edges, {"x": tmp_path / "x.npy"})


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


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ("id,y\n1,0\n1,1\n", "rows 0 and 1 have the same id 1"),
        ("id,y\n1,0\n", "row 2 has id 2, which is not in"),
        ("id,y\nx,0\n", "has numbers as ids, .* has text"),
    ],
)
def test_wrong_tables_of_nodes_are_refused(tmp_path, nodes, message):
    edges = csv(tmp_path / "e.csv", "a,b\n1,1\n1,2\n")
    with pytest.raises((ValueError, TypeError), match=message):
        convert(Tables(edges, csv(tmp_path / "n.csv", nodes)), tmp_path / "g", quiet=True)


def test_the_command(tmp_path, capsys):
    np.save(tmp_path / "e.npy", np.array([[0, 1], [1, 2]]))
    np.save(tmp_path / "y.npy", np.arange(3))
    arguments = ["convert", str(tmp_path / "e.npy"), str(tmp_path / "g")]
    assert main([*arguments, "--nodes", f"y={tmp_path / 'y.npy'}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_nodes"] == {"": 3} and found["num_edges"] == {"": 2}
    assert content(tmp_path / "g")["part-0/nodes/attributes/y.npy"].tolist() == [0, 1, 2]
    assert main(arguments) == 1
    assert "is a graph directory already" in capsys.readouterr().err
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
