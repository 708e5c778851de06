import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import feather

import pyg_scale
from pyg_scale.convert import Tables, convert
from pyg_scale.testing import ReaderTests
from pyg_scale_tables.columnar import ArrowReader, ArrowTable, ParquetReader, ParquetTable

RANDOM = np.random.default_rng(0)
SRC, DST = RANDOM.integers(0, 20, (2, 100))


FORMATS = {
    "parquet": ParquetTable,
    "arrow": ArrowTable,
    "feather": ArrowTable,
    "stream": ArrowTable,
}


def write(path, **columns):
    """Write a file of the format that its suffix names, with 13 rows a piece."""
    table = pa.table(columns)
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=13)
    elif path.suffix == ".feather":
        feather.write_feather(table, path, compression="lz4", chunksize=13)
    else:
        new = pa.ipc.new_stream if path.suffix == ".stream" else pa.ipc.new_file
        with new(path, table.schema) as out:
            out.write_table(table, max_chunksize=13)
    return path


class Readers(ReaderTests):
    @pytest.fixture(params=["map", "position", "text"])
    def reader(self, request, tmp_path):
        ends = {"src": SRC, "dst": DST}
        if request.param == "text":
            ends = {name: [f"né{v}" for v in values] for name, values in ends.items()}
            ends["src"] = pa.array(ends["src"]).dictionary_encode()
        vectors = pa.array(list(RANDOM.random((100, 3), dtype=np.float32)))
        file = write(tmp_path / f"e.{self.suffix}", **ends, w=RANDOM.random(100), v=vectors)
        return self.kind(file, ids="position" if request.param == "position" else "map")


class TestParquetReader(Readers):
    kind, suffix = ParquetReader, "parquet"


class TestArrowReader(Readers):
    kind, suffix = ArrowReader, "arrow"


class TestFeatherReader(Readers):
    kind, suffix = ArrowReader, "feather"


@pytest.mark.parametrize("form", FORMATS)
def test_a_graph_is_what_was_written(tmp_path, form):
    features = RANDOM.random((20, 4), dtype=np.float32)
    edges = write(tmp_path / f"e.{form}", w=RANDOM.random(100), src=SRC, dst=DST)
    flat = pa.FixedSizeListArray.from_arrays(pa.array(features.reshape(-1)), 4)
    nodes = write(tmp_path / f"n.{form}", id=np.arange(20)[::-1], x=flat, ok=[True, False] * 10)
    table = FORMATS[form]
    source = Tables(table(edges, columns=["src", "dst", "w"]), {"": table(nodes)})
    convert(source, tmp_path / "g", quiet=True)
    data = pyg_scale.open(tmp_path / "g")
    assert data.edge_index.tolist() == [(19 - SRC).tolist(), (19 - DST).tolist()]
    assert np.array_equal(data.x.numpy(), features)
    assert data.ok.tolist() == [True, False] * 10


@pytest.mark.parametrize("form", ["parquet", "arrow"])
@pytest.mark.parametrize("name", ["string", "large_string", "string_view"])
def test_ids_are_text_of_any_layout(tmp_path, name, form):
    kind = getattr(pa, name)()
    ends = {"a": ["x", "né" * 20], "b": ["né" * 20, "x"]}
    edges = write(tmp_path / f"e.{form}", **{k: pa.array(v, kind) for k, v in ends.items()})
    convert(edges, tmp_path / "g", quiet=True)
    assert pyg_scale.open(tmp_path / "g").edge_index.tolist() == [[1, 0], [0, 1]]


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_ids_that_end_in_nul_are_refused(tmp_path, form):
    columns = {"src": ["a", "b", "b\0"], "dst": ["b", "a", "a\0b"]}
    write(tmp_path / f"edges.{form}", **columns)
    with pytest.raises(ValueError, match="row 2 of .*, column 'src', ends in a NUL byte"):
        convert(tmp_path / f"edges.{form}", tmp_path / "graph", quiet=True)


def test_ids_may_be_hashes_of_64_bits(tmp_path):
    ids = np.array([2**63 + 5, 3, 2**64 - 1, 2**63 + 6], dtype="u8")
    edges = write(tmp_path / "e.parquet", a=ids[[0, 1, 2]], b=ids[[1, 2, 3]])
    nodes = write(tmp_path / "n.parquet", id=ids, x=[0.0, 1.0, 2.0, 3.0])
    convert(Tables(ParquetTable(edges), {"": ParquetTable(nodes)}), tmp_path / "g", quiet=True)
    assert pyg_scale.open(tmp_path / "g").edge_index.tolist() == [[0, 1, 2], [1, 2, 3]]
    convert(edges, tmp_path / "h", quiet=True)
    assert pyg_scale.open(tmp_path / "h").num_nodes == 4
    unknown = write(tmp_path / "u.parquet", a=ids[:1], b=np.array([2**63 + 9], dtype="u8"))
    with pytest.raises(ValueError, match=f"id {2**63 + 9}, which is not in"):
        convert(
            Tables(ParquetTable(unknown), {"": ParquetTable(nodes)}), tmp_path / "i", quiet=True
        )


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"w": pa.array([1, None, 2])}, "row 1 of .* has no value in column 'w'"),
        ({"w": [[1.0], [2.0], [3.0, 4.0]]}, "row 2 of .* has 2 numbers in column 'w', expected 1"),
        ({"w": [[1.0], [None], [3.0]]}, "row 1 of .* lacks a number"),
        ({"w": ["a", "b", "c"]}, "holds text"),
        ({"w": pa.array([1, 2, 3], pa.timestamp("s"))}, "neither numbers nor text"),
    ],
)
@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_wrong_columns_are_refused(tmp_path, columns, message, form):
    file = write(tmp_path / f"e.{form}", a=[0, 1, 2], b=[0, 0, 0], **columns)
    with pytest.raises((ValueError, TypeError), match=message):
        convert(file, tmp_path / "g", ids="position", quiet=True)
    assert not (tmp_path / "g").exists()


def test_wrong_files_are_refused(tmp_path):
    (tmp_path / "e.parquet").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="is no Parquet file"):
        ParquetTable(tmp_path / "e.parquet")
    with pytest.raises(FileNotFoundError, match=r"none\.parquet"):
        ParquetTable(tmp_path / "none.parquet")
    file = write(tmp_path / "e.parquet", a=[0], b=[0])
    with pytest.raises(ValueError, match="has no column 'c', only a, b"):
        ParquetReader(file, columns=["c"])


def test_wrong_arrow_files_are_refused(tmp_path):
    whole = write(tmp_path / "whole.arrow", a=np.arange(100), b=np.arange(100)).read_bytes()
    file = tmp_path / "e.arrow"
    for data, message in (
        (b"", "it is empty"),
        (b"nothing", "is no Arrow file"),
        (b"FEA1 old", "Feather file of version 1"),
        (whole[:-300], "is no Arrow file"),
    ):
        file.write_bytes(data)
        with pytest.raises(ValueError, match=f"e.arrow .*{message}"):
            ArrowTable(file)
    file = write(file, a=pa.array(["x" * 9, "y"]), b=[0, 1])
    data = file.read_bytes()
    offsets = np.array([0, 9, 10], "i4").tobytes()
    assert data.count(offsets) == 1
    file.write_bytes(data.replace(offsets, np.array([0, 1 << 30, 10], "i4").tobytes()))
    with pytest.raises(ValueError, match="behind row 0"):
        [*ArrowTable(file).read(["a"], 0, 10)]
    with pytest.raises(ValueError, match="its own name"):
        ArrowTable(whole_file := tmp_path / "whole.arrow", columns=["a", "a"])
    assert ArrowTable(whole_file).num_rows == 100


@pytest.mark.parametrize("form", FORMATS)
def test_rows_are_the_same_from_anywhere_and_in_any_pieces(tmp_path, form):
    table = FORMATS[form](
        write(tmp_path / f"e.{form}", a=np.arange(100), t=list(map(str, range(100))))
    )
    for begin in (0, 5, 13, 99, 100):
        for rows in (4, 13, 200):
            chunks = [*table.read(["t", "a"], begin, rows)]
            assert all(0 < len(chunk[0]) <= rows for chunk in chunks)
            assert [int(v) for t, _ in chunks for v in t] == list(range(begin, 100))
            assert [v for _, a in chunks for v in a] == list(range(begin, 100))


def test_a_mapped_file_does_not_stay_in_memory(tmp_path):
    """Of one record batch of 64 MB, a few pieces at a time are resident."""
    file = tmp_path / "e.arrow"
    table = pa.table({"a": np.arange(1 << 22), "b": np.arange(1 << 22)})
    with pa.ipc.new_file(file, table.schema) as out:
        out.write_table(table, max_chunksize=1 << 22)
    del table

    def resident():
        with open("/proc/self/smaps", encoding="ascii") as lines:
            text = lines.read()
        part = text[text.index(str(file)) :]
        return int(part[part.index("Rss:") :].split()[1]) * 1024

    table = ArrowTable(file)
    sizes = [resident() for _ in table.read(["a", "b"], 0, 1 << 17)]
    assert len(sizes) == 32 and max(sizes) < 16 << 20
