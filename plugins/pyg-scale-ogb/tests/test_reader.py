"""The reader's own promises: any chunks, any start, bounded memory, errors that name the file."""

import gzip
import pickle
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch

from pyg_scale_ogb import load, split
from pyg_scale_ogb.in_memory import _Scratch
from pyg_scale_ogb.reader import OGBReader

from . import layout


def prepared(name, root, folder):
    reader = OGBReader(name, root)
    scratch = _Scratch(folder)
    scratch.memory = 2000  # a few rows at a time
    reader.prepare(scratch)
    return reader


def cat(parts, columns=None):
    parts = list(parts)
    if columns is None:
        return torch.cat(parts) if parts else None
    return [torch.cat([part[i] for part in parts]) for i in range(columns)] if parts else None


@pytest.mark.parametrize("name", layout.FORMS)
def test_chunks_do_not_depend_on_their_size_or_where_they_begin(name, tmp_path):
    layout.FORMS[name](tmp_path / "root")
    data = load(name, tmp_path / "root")
    reader = prepared(name, tmp_path / "root", tmp_path)
    graph = reader.describe()
    for begin, rows in ((0, 7), (0, 1), (13, 10), (14, 3), (20, 1000)):
        for node_type, nodes in graph.nodes.items():
            store = data if node_type is None else data[node_type]
            assert nodes.num_nodes == store.num_nodes
            for attribute, spec in nodes.attributes.items():
                got = list(reader.node_attribute(node_type, attribute, begin, rows))
                assert all(0 < len(part) <= rows for part in got)
                wanted = store[attribute][begin:]
                assert str(wanted.dtype) == f"torch.{spec.dtype}"
                if wanted.numel():
                    got = cat(got)
                    assert got.dtype == wanted.dtype
                    assert torch.equal(got.nan_to_num(-1), wanted.nan_to_num(-1))
            for set_name, size in nodes.index_sets.items():
                ids = cat(reader.index_set(node_type, set_name, 0, rows))
                assert ids.numel() == size
                assert torch.equal(ids.sort().values, store[f"{set_name}_mask"].nonzero().view(-1))
        for edge_type, edges in graph.edges.items():
            store = data if edge_type is None else data[edge_type]
            assert edges.num_edges == store.edge_index.size(1)
            src, dst = cat(reader.edges(edge_type, begin, rows), 2)
            assert torch.equal(torch.stack([src, dst]), store.edge_index[:, begin:])
            for attribute in edges.attributes:
                got = cat(reader.edge_attribute(edge_type, attribute, begin, rows))
                assert torch.equal(got, store[attribute][begin:])


@pytest.mark.parametrize("half", [False, True])
def test_archives_with_and_without_compression_are_the_same(tmp_path, half):
    layout.papers100M(tmp_path / "a", half=half)
    layout.papers100M(tmp_path / "b", half=half, compressed=False)
    one, other = (load("ogbn-papers100M", tmp_path / root) for root in "ab")
    for key, value in one.to_dict().items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value.nan_to_num(-1), other[key].nan_to_num(-1)), key
    assert one.x.dtype == (torch.float16 if half else torch.float32)
    assert one.y.dtype == torch.float32 and int(one.y.isnan().sum()) == layout.NODES - 9


@pytest.mark.parametrize("compressed", [False, True])
def test_an_edge_index_by_columns(tmp_path, compressed):
    """What ``np.array(...).T`` is saved as."""
    folder = layout.papers100M(tmp_path, compressed=compressed)
    file = folder / "raw" / "data.npz"
    before = load("ogbn-papers100M", tmp_path)
    arrays = dict(np.load(file))
    arrays["edge_index"] = np.asfortranarray(arrays["edge_index"])
    arrays["node_feat"] = np.asfortranarray(arrays["node_feat"])
    (np.savez_compressed if compressed else np.savez)(file, **arrays)
    after = load("ogbn-papers100M", tmp_path)
    assert torch.equal(before.edge_index, after.edge_index) and torch.equal(before.x, after.x)


@pytest.mark.slow
def test_memory_is_bounded(tmp_path):
    """An archive of 190 MB of features and edges in far less."""
    folder = layout.papers100M(tmp_path)
    nodes, edges = 400_000, 3_000_000
    np.savez_compressed(
        folder / "raw" / "data.npz",
        edge_index=np.arange(2 * edges, dtype=np.int64).reshape(2, -1) % nodes,
        num_nodes_list=np.array([nodes]),
        num_edges_list=np.array([edges]),
        node_feat=np.zeros((nodes, 88), np.float32),
        node_year=np.zeros((nodes, 1), np.int64),
    )
    np.savez_compressed(folder / "raw" / "node-label.npz", node_label=np.zeros((nodes, 1)))
    code = (
        "import sys, torch; from pathlib import Path\n"
        "from pyg_scale_ogb.reader import OGBReader\n"
        "from pyg_scale_ogb.in_memory import _Scratch\n"
        "status = lambda: Path('/proc/self/status').read_text()\n"
        "peak = lambda: int(status().split('VmHWM:')[1].split()[0])\n"
        "reader = OGBReader('ogbn-papers100M', sys.argv[1]); before = peak()\n"
        "reader.prepare(_Scratch(Path(sys.argv[1])))\n"
        "rows = sum(len(p) for p in reader.node_attribute(None, 'x', 0, 10_000))\n"
        "rows += sum(len(p[0]) for p in reader.edges(None, 0, 100_000))\n"
        "print(rows, peak() - before)\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        check=True,
        timeout=100,
        capture_output=True,
        text=True,
    ).stdout.split()
    assert int(out[0]) == nodes + edges
    assert int(out[1]) < 45_000, "kilobytes"


# Errors ###################################################################################


def test_unknown_names_and_absent_folders(tmp_path):
    with pytest.raises(ValueError, match="unknown data set 'ogbn-arxive'; did you mean 'ogbn-arx"):
        load("ogbn-arxive", tmp_path)
    with pytest.raises(ValueError, match="it has many graphs"):
        load("ogbg-molhiv", tmp_path)
    with pytest.raises(FileNotFoundError, match="download http.*nodeproppred/arxiv.zip"):
        load("ogbn-arxiv", tmp_path)


def test_the_archive_as_it_unpacks_is_found(tmp_path):
    folder = layout.arxiv(tmp_path)
    before = load("ogbn-arxiv", tmp_path)
    folder.rename(tmp_path / "arxiv")
    assert torch.equal(load("ogbn-arxiv", tmp_path).x, before.x)


def test_another_version_is_refused(tmp_path):
    folder = layout.mag(tmp_path)
    (folder / "RELEASE_v2.txt").rename(folder / "RELEASE_v1.txt")
    with pytest.raises(ValueError, match="holds version 1 of ogbn-mag, expected 2"):
        load("ogbn-mag", tmp_path)


@pytest.mark.parametrize("name", ["ogbn-arxiv", "ogbn-mag", "ogbn-papers100M"])
def test_every_missing_or_truncated_file_is_named(name, tmp_path):
    folder = layout.FORMS[name](tmp_path)
    optional = ("node-feat/", "edge_reltype", "node-feat.csv.gz")
    for file in sorted((folder / "raw").rglob("*.*z")) + sorted((folder / "split").rglob("*.gz")):
        whole = file.read_bytes()
        file.write_bytes(whole[: len(whole) * 2 // 3])
        with pytest.raises(ValueError) as error:
            load(name, tmp_path)
        assert file.name in str(error.value)
        file.unlink()
        if not any(each in file.as_posix() for each in optional):
            with pytest.raises(FileNotFoundError, match=file.name):
                load(name, tmp_path)
        file.write_bytes(whole)
    load(name, tmp_path)


@pytest.mark.parametrize(
    ("file", "text", "match"),
    [
        ("raw/edge.csv.gz", "1,2\n3,x\n", "holds something else than numbers"),
        ("raw/edge.csv.gz", "1,2,3\n" * layout.EDGES, "must have two columns"),
        ("raw/edge.csv.gz", "1,2\n", "says 400 edges, but 1 are in the table"),
        ("raw/edge.csv.gz", "1,2\n3\n1,2,3,4\n", "edge.csv.gz is damaged"),
        ("raw/edge.csv.gz", "1,60\n" * layout.EDGES, "an edge with node 60, but there are 60"),
        ("raw/edge.csv.gz", "-1,2\n" * layout.EDGES, "an edge with node -1"),
        ("raw/num-node-list.csv.gz", "60\n60\n", "must hold one number"),
        ("raw/node-feat.csv.gz", "1.5\n", "has 1 rows of 'x', but there are 60 nodes"),
        ("raw/node-label.csv.gz", "", "has 0 rows of 'y'"),
        ("split/time/train.csv.gz", "60\n", "'train' of .* has node 60, but there are 60 nodes"),
        ("split/time/test.csv.gz", "a\n", "must hold one id in each row"),
    ],
)
def test_wrong_content_is_an_error(tmp_path, file, text, match):
    folder = layout.arxiv(tmp_path)
    with gzip.open(folder / file, "wt") as out:
        out.write(text)
    with pytest.raises(ValueError, match=match):
        load("ogbn-arxiv", tmp_path)


def test_a_damaged_archive_is_named(tmp_path):
    folder = layout.papers100M(tmp_path)
    file = folder / "raw" / "data.npz"
    with zipfile.ZipFile(file) as archive:
        info = archive.getinfo("node_feat.npy")
    content = bytearray(file.read_bytes())
    for offset in range(60, 200):
        content[info.header_offset + offset] ^= 0xFF
    file.write_bytes(content)
    with pytest.raises(ValueError, match="data.npz"):
        load("ogbn-papers100M", tmp_path)


def test_an_archive_of_objects_is_not_unpickled(tmp_path):
    folder = layout.papers100M(tmp_path)
    arrays = dict(np.load(folder / "raw" / "data.npz"))
    arrays["node_year"] = np.array([{"a": 1}], dtype=object)
    np.savez(folder / "raw" / "data.npz", **arrays)
    with pytest.raises(ValueError, match="holds Python objects"):
        load("ogbn-papers100M", tmp_path)


def test_splits_of_links_run_nothing(tmp_path):
    folder = layout.collab(tmp_path)
    made = tmp_path / "made"

    class Payload:
        def __reduce__(self):
            import os

            return os.mkdir, (str(made),)

    torch.save({"edge": Payload()}, folder / "split" / "time" / "train.pt")
    with pytest.raises(ValueError, match="train.pt is damaged, or holds more than tensors"):
        split("ogbl-collab", tmp_path)
    assert not made.exists()


def test_a_split_in_one_file(tmp_path):
    folder = layout.arxiv(tmp_path)
    wanted = split("ogbn-arxiv", tmp_path)
    torch.save({k: v.flip(0) for k, v in wanted.items()}, folder / "split/time/split_dict.pt")
    got = split("ogbn-arxiv", tmp_path)
    assert all(torch.equal(got[part], wanted[part].flip(0)) for part in wanted)
    torch.save({"train": torch.ones(1)}, folder / "split/time/split_dict.pt")
    with pytest.raises(ValueError, match="must hold train, valid, test"):
        split("ogbn-arxiv", tmp_path)


def test_files_and_options_are_what_decides(tmp_path):
    folder = layout.arxiv(tmp_path)
    reader = OGBReader("ogbn-arxiv", tmp_path)
    assert {file.relative_to(folder).as_posix() for file in reader.files()} == {
        file.relative_to(folder).as_posix() for file in folder.rglob("*.csv.gz")
    }
    assert reader.options() == {"data set": "ogbn-arxiv", "version": 1}
    pickle.dumps(reader.options())
