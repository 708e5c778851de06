"""From OGB's files to a graph directory, and to batches."""

import pytest
import torch
from torch_geometric.data import HeteroData

import pyg_scale
from pyg_scale import plugins
from pyg_scale.cli import main
from pyg_scale.convert import convert
from pyg_scale.loader import NeighborLoader
from pyg_scale.testing import ReaderTests
from pyg_scale_ogb import load

from . import layout


class TestOGBReader(ReaderTests):
    @pytest.fixture(params=layout.FORMS)
    def reader(self, request, tmp_path):
        layout.FORMS[request.param](tmp_path)
        return plugins.get("reader", "ogb")(request.param, root=tmp_path)


def stores_of(data):
    if isinstance(data, HeteroData):
        return {store._key: store for store in (*data.node_stores, *data.edge_stores)}
    return {None: data}


@pytest.mark.parametrize("name", layout.FORMS)
def test_a_converted_graph_is_the_loaded_one(name, tmp_path):
    layout.FORMS[name](tmp_path / "root")
    convert(f"ogb:{name}", tmp_path / "graph", root=tmp_path / "root", quiet=True)
    wanted, found = load(name, tmp_path / "root"), pyg_scale.open(tmp_path / "graph")
    assert isinstance(found, type(wanted))
    for key, store in stores_of(wanted).items():
        other = stores_of(found)[key]
        for attribute in store.keys():  # noqa: SIM118
            if attribute == "num_nodes":
                assert other.num_nodes == store.num_nodes
                continue
            assert other[attribute].dtype == store[attribute].dtype, attribute
            got, expected = other[attribute].nan_to_num(-1), store[attribute].nan_to_num(-1)
            assert torch.equal(got, expected), attribute


def test_batches_of_both(tmp_path):
    layout.products(tmp_path / "root")
    convert("ogb:ogbn-products", tmp_path / "graph", root=str(tmp_path / "root"), quiet=True)
    data = load("ogbn-products", tmp_path / "root")
    ours, wanted = (
        list(NeighborLoader(graph, [3, 3], graph.train_mask, batch_size=7, seed=1, shuffle=True))
        for graph in (pyg_scale.open(tmp_path / "graph"), data)
    )
    for a, b in zip(ours, wanted, strict=True):
        assert torch.equal(a.n_id, b.n_id) and torch.equal(a.edge_index, b.edge_index)
        assert torch.equal(a.x, b.x) and torch.equal(a.y, b.y)


def test_on_the_command_line(tmp_path, capsys):
    layout.arxiv(tmp_path / "root")
    graph = tmp_path / "graph"
    assert main(["convert", "ogb:ogbn-arxiv", str(graph), "--root", str(tmp_path / "root")]) == 0
    assert f"{layout.NODES} nodes, {layout.EDGES} edges" in capsys.readouterr().out
    assert main(["convert", "ogb:ogbn-arxiv", str(tmp_path / "b"), "-o", f"root={tmp_path}"]) == 1
    assert "download http" in capsys.readouterr().err


def test_features_of_an_archive_become_half(tmp_path):
    layout.papers100M(tmp_path / "root")
    options = {"root": tmp_path / "root", "feature_dtype": "float16", "quiet": True}
    convert("ogb:ogbn-papers100M", tmp_path / "graph", **options)
    found = pyg_scale.open(tmp_path / "graph").x
    assert torch.equal(found, load("ogbn-papers100M", tmp_path / "root").x.half())
