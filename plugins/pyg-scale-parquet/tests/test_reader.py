import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import pyg_scale
from pyg_scale.convert import Tables, convert
from pyg_scale.testing import ReaderTests
from pyg_scale_parquet.reader import ParquetReader, ParquetTable

RANDOM = np.random.default_rng(0)
SRC, DST = RANDOM.integers(0, 20, (2, 100))


def write(path, **columns):
    pq.write_table(pa.table(columns), path, row_group_size=13)
    return path


class TestParquetReader(ReaderTests):
    @pytest.fixture(params=["map", "position", "text"])
    def reader(self, request, tmp_path):
        ends = {"src": SRC, "dst": DST}
        if request.param == "text":
            ends = {name: [f"né{v}" for v in values] for name, values in ends.items()}
            ends["src"] = pa.array(ends["src"]).dictionary_encode()
        vectors = pa.array(list(RANDOM.random((100, 3), dtype=np.float32)))
        file = write(tmp_path / "e.parquet", **ends, w=RANDOM.random(100), v=vectors)
        return ParquetReader(file, ids="position" if request.param == "position" else "map")


def test_a_graph_is_what_was_written(tmp_path):
    features = RANDOM.random((20, 4), dtype=np.float32)
    edges = write(tmp_path / "e.parquet", w=RANDOM.random(100), src=SRC, dst=DST)
    flat = pa.FixedSizeListArray.from_arrays(pa.array(features.reshape(-1)), 4)
    nodes = write(tmp_path / "n.parquet", id=np.arange(20)[::-1], x=flat, ok=[True, False] * 10)
    source = Tables(ParquetTable(edges, columns=["src", "dst", "w"]), {"": ParquetTable(nodes)})
    convert(source, tmp_path / "g", quiet=True)
    data = pyg_scale.open(tmp_path / "g")
    assert data.edge_index.tolist() == [(19 - SRC).tolist(), (19 - DST).tolist()]
    assert np.array_equal(data.x.numpy(), features)
    assert data.ok.tolist() == [True, False] * 10


@pytest.mark.parametrize("name", ["string", "large_string", "string_view"])
def test_ids_are_text_of_any_layout(tmp_path, name):
    if not hasattr(pa, name):
        pytest.skip(f"this pyarrow has no {name}")
    kind = getattr(pa, name)()
    ends = {"a": ["x", "né" * 20], "b": ["né" * 20, "x"]}
    edges = write(tmp_path / "e.parquet", **{k: pa.array(v, kind) for k, v in ends.items()})
    convert(edges, tmp_path / "g", quiet=True)
    assert pyg_scale.open(tmp_path / "g").edge_index.tolist() == [[1, 0], [0, 1]]


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
def test_wrong_columns_are_refused(tmp_path, columns, message):
    file = write(tmp_path / "e.parquet", a=[0, 1, 2], b=[0, 0, 0], **columns)
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
