"""CSV, TSV and text files: what is read, what is refused, and how an error says where."""

import gzip

import numpy as np
import pytest
import torch

import pyg_scale
import pyg_scale_tables.text
from pyg_scale.cli import main
from pyg_scale.convert import Tables, convert
from pyg_scale.store.directory import GraphDirectory
from pyg_scale.testing import ReaderTests
from pyg_scale_tables.text import CsvReader, CsvTable

RANDOM = np.random.default_rng(0)
EDGES = RANDOM.integers(0, 20, (2, 100))


class TestCsvReader(ReaderTests):
    @pytest.fixture(params=["map", "position", "gz", "txt"])
    def reader(self, request, tmp_path):
        text = "src,dst,weight\n" + "".join(f"{s},{d},{s / 3}\n" for s, d in EDGES.T)
        if request.param == "gz":
            file = tmp_path / "edges.csv.gz"
            file.write_bytes(gzip.compress(text.encode()))
            return CsvReader(file)
        if request.param == "txt":
            file = tmp_path / "edges.txt"
            file.write_text(text.partition("\n")[2].replace(",", " \t"))
            return CsvReader(file)
        file = tmp_path / "edges.csv"
        file.write_text(text)
        return CsvReader(file, ids=request.param)


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


@pytest.mark.parametrize("text", ["a,b\n", "a,b", "# no edge\na,b\n\n\n"])
def test_a_header_alone_is_a_graph_without_edges(tmp_path, text):
    convert(csv(tmp_path / "e.csv", text), tmp_path / "g", ids="position", quiet=True)
    assert pyg_scale.open(tmp_path / "g").edge_index.shape == (2, 0)


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
    with pytest.raises(ValueError, match="row 2 is empty"):
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
    "no id": ("src,dst\na,b\n,c\n", {}, r"e.*csv, row 2 has no value in column 'src'"),
    "no number as id": ("src,dst\n1,2\n3,\n", {}, "row 2 has no value in column 'dst'"),
    "no position": ("a,b\n1,2\n,3\n", {"ids": "position"}, "row 2 has no value in column 'a'"),
    "empty weight": ("a,b,w\n1,2,0.5\n2,3,\n", {}, "row 2 has no value in column 'w'"),
    "late, no id": ("a,b\n" + "x,y\n" * 1000 + "x,\n", {}, "row 1001 has no value in column 'b'"),
    "dtypes": ("a,b\n1,2\n", {"dtypes": 5}, r"dtypes must map names .*got 5"),
    "unclosed": ('a,b\n"1,2\n', {}, "row 1 has a quotation mark that is not closed"),
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


def test_features_and_mapped_ids_do_not_go_together(tmp_path):
    edges = csv(tmp_path / "e.csv", "a,b\n1,2\n")
    np.save(tmp_path / "x.npy", np.zeros((2, 3)))
    with pytest.raises(ValueError, match="pass ids='position'"):
        Tables(edges, {"x": tmp_path / "x.npy"})


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ("id,y\n1,0\n1,1\n", "n.csv, row 1 and .*n.csv, row 2 have the same id 1"),
        ("id,y\n1,0\n", "row 2 has id 2, which is not in"),
        ("id,y\nx,0\n", "has numbers as ids, .* has text"),
    ],
)
def test_wrong_tables_of_nodes_are_refused(tmp_path, nodes, message):
    edges = csv(tmp_path / "e.csv", "a,b\n1,1\n1,2\n")
    with pytest.raises((ValueError, TypeError), match=message):
        convert(Tables(edges, csv(tmp_path / "n.csv", nodes)), tmp_path / "g", quiet=True)


def test_damaged_files_are_named(tmp_path):
    (tmp_path / "latin.csv").write_bytes("a,b\n\xe9,1\n".encode("latin1"))
    with pytest.raises(ValueError, match=r"latin\.csv, at its beginning: .*decode"):
        convert(tmp_path / "latin.csv", tmp_path / "g", quiet=True)
    (tmp_path / "e.csv.gz").write_bytes(b"a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"e\.csv\.gz, at its beginning: Not a gzipped"):
        convert(tmp_path / "e.csv.gz", tmp_path / "g", quiet=True)
    late = b"a,b\n" + b"1,2\n" * 5000 + b"1,\xe9\n"
    (tmp_path / "late.csv").write_bytes(late)
    with pytest.raises(ValueError, match=r"late\.csv, row 5001 .* no UTF-8"):
        convert(tmp_path / "late.csv", tmp_path / "g", quiet=True)
    (tmp_path / "cut.csv.gz").write_bytes(gzip.compress(RANDOM.bytes(99).hex().encode())[:-9])
    with pytest.raises(ValueError, match=r"cut\.csv\.gz, at its beginning: .*ended before"):
        convert(tmp_path / "cut.csv.gz", tmp_path / "g", quiet=True)
    packed = gzip.compress(b"a,b\n" + "".join(f"{v},1\n" for v in RANDOM.random(9999)).encode())
    (tmp_path / "cut.csv.gz").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(ValueError, match=r"cut\.csv\.gz, behind row \d+: .*ended before"):
        convert(tmp_path / "cut.csv.gz", tmp_path / "g", quiet=True, dtypes={"a": "text"})


def values(table, rows=1 << 17, begin=0):
    """The columns of a table, read in pieces."""
    chunks = [*table.read(list(table.columns), begin, rows)]
    assert all(0 < len(chunk[0]) <= rows for chunk in chunks)
    return [np.concatenate(column).tolist() for column in zip(*chunks)]


@pytest.mark.parametrize("block", [16, 64, 1 << 20])
def test_rows_and_their_numbers_do_not_depend_on_how_much_is_parsed_at_a_time(
    tmp_path, monkeypatch, block
):
    monkeypatch.setattr(pyg_scale_tables.text, "_BLOCK", block)
    text = "\ufeff# é\r\n\r\nname,n\r\n" + "".join(f'"a ""{i}""\r\n,b",{i}\r\n' for i in range(60))
    (tmp_path / "t.csv").write_bytes((text + "\r\n\r\n").encode())
    table = CsvTable(tmp_path / "t.csv")
    names = [f'a "{i}"\r\n,b'.encode() for i in range(60)]
    for begin in (0, 1, 37, 60):
        found = values(table, 7, begin) if begin < 60 else [[], []]
        assert found == [names[begin:], list(range(begin, 60))]
    (tmp_path / "r.csv").write_bytes((text + "only\r\n").encode())
    with pytest.raises(ValueError, match=r"r\.csv, row 61 has 1 columns"):
        values(CsvTable(tmp_path / "r.csv"))
    (tmp_path / "w.txt").write_text("".join(f" {i}\t{i + 1} \n" for i in range(60)) + "7\n")
    with pytest.raises(ValueError, match=r"w\.txt, row 61 has 1 columns"):
        values(CsvTable(tmp_path / "w.txt"))


FORMS = [
    "0",
    "-5",
    "+7",
    " 8 ",
    "-0012",
    "9223372036854775807",
    "1.5",
    "-.5",
    "+1e3",
    " nan",
    "inf",
]
NONE = ["x", "1_0", "0x10", "--1", "1 2", "\u0661x", "1e", "0x1p3", "+", "1,5"]


@pytest.mark.parametrize("form", FORMS + NONE)
def test_numbers_are_those_of_python(tmp_path, form):
    """Python's int and float say what is a number, without its underscores."""

    def parsed(number):
        try:
            return None if "_" in form else number(form)
        except ValueError:
            return None

    wanted, dtype = next(
        (
            (found, name)
            for number, name in ((int, "int64"), (float, "float64"))
            if (found := parsed(number)) is not None
        ),
        (form.encode(), "text"),
    )
    table = CsvTable(csv(tmp_path / "t.csv", f'a,b\n"{form}",0\n'))
    assert table.columns["a"].dtype == dtype
    (found,), _ = values(table)
    assert found == wanted or (found != found and wanted != wanted)


@pytest.mark.parametrize(
    ("dtype", "good", "bad"),
    [
        ("int32", 2**31 - 1, 2**31),
        ("int64", -(2**63), 2**63),
        ("uint64", 2**64 - 1, -1),
        ("float32", 0.5, "half"),
    ],
)
def test_a_value_that_does_not_fit_is_named(tmp_path, dtype, good, bad):
    text = "a,b\n" + f"{good},0\n" * 1500
    options = {"dtypes": {"a": dtype}}
    assert set(values(CsvTable(csv(tmp_path / "t.csv", text), **options))[0]) == {good}
    table = CsvTable(csv(tmp_path / "t.csv", text + f"{bad},0\n{good},0\n"), **options)
    with pytest.raises(ValueError, match=rf"t\.csv, row 1501, column 'a': '{bad}' is no {dtype}"):
        values(table)


def test_delimiters_beyond_ascii(tmp_path):
    table = CsvTable(csv(tmp_path / "t.csv", "a§b\né§1\nx§2\n"), delimiter="§")
    assert values(table) == [["é".encode(), b"x"], [1, 2]]
    with pytest.raises(ValueError, match="quotation marks need a delimiter that is an ASCII"):
        CsvTable(csv(tmp_path / "t.csv", 'a§b\n"x"§1\n'), delimiter="§")


def test_a_mark_that_is_not_closed_takes_no_more_memory_than_the_longest_row(tmp_path, monkeypatch):
    monkeypatch.setattr(pyg_scale_tables.text, "_BLOCK", 64)
    monkeypatch.setattr(pyg_scale_tables.text, "_LONGEST", 1 << 12)
    file = csv(tmp_path / "t.csv", "a,b\n" + "1,2\n" * 2000 + '"1,2\n' + "1,2\n" * 2000)
    with pytest.raises(ValueError, match=r"behind row 2\d\d\d?: a row is longer.*not closed"):
        values(CsvTable(file))


@pytest.mark.parametrize("row", ["1234567", "123,567", "12,\n,67"])
def test_rows_that_end_where_a_block_does_are_read_in_blocks(tmp_path, monkeypatch, row):
    """No row is longer than a block here, wherever empty lines may have ended the file."""
    monkeypatch.setattr(pyg_scale_tables.text, "_BLOCK", 64)
    monkeypatch.setattr(pyg_scale_tables.text, "_LONGEST", 64)
    text = row.replace("\n", "\n\n") if "\n" in row else row
    quoted = f'"{text}"' if "\n" in text else text
    file = csv(tmp_path / "t.csv", f"{quoted}\n" * 1000 + "\n" * 200)
    found = values(CsvTable(file, header=False, delimiter=";"))
    assert found == [[int(text)] * 1000 if text.isdigit() else [text.encode()] * 1000]
