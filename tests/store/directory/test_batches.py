"""Batches from an opened directory are those from memory, bit for bit, in every loader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import NegativeSampling

import pyg_scale
from pyg_scale.datasets.read import read_npz
from pyg_scale.loader import HGTLoader, LinkNeighborLoader, NeighborLoader
from pyg_scale.testing import graphs
from tests.loader.batches import assert_same_batches
from tests.store.directory.graphs import edge_list_was_made, everything, opened

pytestmark = pytest.mark.matrix(3)

IN_MEMORY = "ignore:.*in the memory of this process:UserWarning"
WAYS: list[dict[str, Any]] = [
    {},
    {"replace": True},
    {"disjoint": True},
    {"subgraph_type": "induced"},
    {"subgraph_type": "bidirectional"},
    {"num_workers": 2},
    {"time_attr": "time"},
    {"time_attr": "time", "temporal_strategy": "last"},
    {"time_attr": "when", "input_time": 5},
    {"weight_attr": "weight"},
    {"weight_attr": "weight", "time_attr": "time"},
]


def _neighbors(data: Any, nodes: Any, **options: Any) -> NeighborLoader:
    if "input_time" in options:
        options["input_time"] = torch.full((len(nodes[1]),), options["input_time"])
    nodes = nodes if isinstance(data, HeteroData) else nodes[1]
    return NeighborLoader(data, [4, 3], nodes, batch_size=9, shuffle=True, seed=4, **options)


def _recorded(options: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in options.items() if k in ("time_attr", "weight_attr")}


@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("options", WAYS, ids=str)
def test_homogeneous(tmp_path: Path, options: dict[str, Any], index_dtype: torch.dtype) -> None:
    data = everything(index_dtype)
    found = opened(data, tmp_path / "graph", **_recorded(options))
    nodes = (None, torch.arange(0, 100, 2))
    loader = _neighbors(found, nodes, **options)
    assert_same_batches(_neighbors(data, nodes, **options), loader)
    assert not edge_list_was_made(found)
    assert type(next(iter(loader))) is Data
    assert loader.node_sampler.topology.csc[None].indices.dtype == torch.int32


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_heterogeneous(tmp_path: Path, options: dict[str, Any]) -> None:
    data = graphs.hetero()
    found = opened(data, tmp_path / "graph", **_recorded(options))
    nodes = ("item", torch.arange(12))
    loader = _neighbors(found, nodes, **options)
    assert_same_batches(_neighbors(data, nodes, **options), loader)
    assert not edge_list_was_made(found)
    assert type(next(iter(loader))) is HeteroData


@pytest.mark.filterwarnings(IN_MEMORY)
@pytest.mark.parametrize("options", [*WAYS, {"is_sorted": True}], ids=str)
@pytest.mark.parametrize(
    "recorded", [{}, {"time_attr": "time"}, {"weight_attr": "weight"}], ids=str
)
def test_times_and_weights_that_are_not_recorded(
    tmp_path: Path, options: dict[str, Any], recorded: dict[str, Any]
) -> None:
    data = graphs.hostile()
    if "is_sorted" in options:
        data = data.sort(sort_by_row=False)
    found = opened(data, tmp_path / "graph", **recorded)
    nodes = (None, torch.arange(50))
    assert_same_batches(_neighbors(data, nodes, **options), _neighbors(found, nodes, **options))


@pytest.mark.parametrize("name", sorted(graphs.HOMOGENEOUS))
def test_graphs_that_are_hardly_any(tmp_path: Path, name: str) -> None:
    data = graphs.HOMOGENEOUS[name]()
    found = opened(data, tmp_path / "graph")
    nodes = (None, torch.arange(data.num_nodes))
    assert_same_batches(_neighbors(data, nodes), _neighbors(found, nodes))


@pytest.mark.parametrize("negative", [None, "binary", "triplet"])
def test_links(tmp_path: Path, negative: str | None) -> None:
    data = graphs.hostile()
    found = opened(data, tmp_path / "graph")
    links = data.edge_index[:, :40]

    def loader(graph: Any) -> LinkNeighborLoader:
        sampling = None if negative is None else NegativeSampling(negative, 1)
        return LinkNeighborLoader(
            graph, [3, 2], links, neg_sampling=sampling, batch_size=8, shuffle=True, seed=2
        )

    assert_same_batches(loader(data), loader(found))
    assert not edge_list_was_made(found)


def test_links_of_a_type(tmp_path: Path) -> None:
    data = graphs.hetero()
    found = opened(data, tmp_path / "graph")

    def loader(graph: Any) -> LinkNeighborLoader:
        return LinkNeighborLoader(graph, [3, 2], ("user", "buys", "item"), batch_size=8, seed=2)

    assert_same_batches(loader(data), loader(found))  # all edges are seeds: their list is made


def test_hgt(tmp_path: Path) -> None:
    data = graphs.hetero()
    found = opened(data, tmp_path / "graph")

    def loader(graph: Any) -> HGTLoader:
        return HGTLoader(graph, [6, 4], "item", batch_size=5, seed=2, num_workers=1)

    assert_same_batches(loader(data), loader(found))
    assert not edge_list_was_made(found)


@pytest.mark.parametrize("worker_type", ["thread", "process"])
def test_workers(tmp_path: Path, worker_type: str) -> None:
    data = everything()
    found = opened(data, tmp_path / "graph")

    def loader(graph: Any, **options: Any) -> NeighborLoader:
        return NeighborLoader(graph, [3, 2], batch_size=25, seed=2, **options)

    workers = loader(found, num_workers=2, worker_type=worker_type)
    assert_same_batches(loader(data), workers)


@pytest.mark.parametrize("name", ["facebook_pages", "dblp", "history"])
def test_real_graphs(tmp_path: Path, data_dir: Path, name: str) -> None:
    data = read_npz(data_dir / f"{name}.npz", reverse=name == "dblp")
    time_attr = "time" if name == "history" else None
    if name == "facebook_pages":
        data.x = data.x[:, :32].contiguous()
    found = opened(data, tmp_path / "graph", time_attr=time_attr)
    kind = {"facebook_pages": None, "dblp": "author", "history": "commit"}[name]
    size = (data if kind is None else data[kind]).num_nodes
    nodes: Any = torch.arange(0, size, max(1, size // 200))

    def loader(graph: Any) -> NeighborLoader:
        seeds = nodes if kind is None else (kind, nodes)
        return NeighborLoader(graph, [10, 5], seeds, batch_size=64, time_attr=time_attr, seed=1)

    assert_same_batches(loader(data), loader(found))
    assert not edge_list_was_made(found)


def test_index_sets_are_seeds(tmp_path: Path) -> None:
    data = everything()
    sets = {"train": data.train_mask, "val": [3, 1, 2]}
    found = opened(data, tmp_path / "graph", index_sets=sets)
    assert found.index_set("val").tolist() == [3, 1, 2]
    assert torch.equal(found.index_set("train"), data.train_mask.nonzero().view(-1))
    ours = NeighborLoader(found, [2], found.index_set("val"), batch_size=2, seed=1)
    assert_same_batches(NeighborLoader(data, [2], [3, 1, 2], batch_size=2, seed=1), ours)

    typed = graphs.hetero()
    found = opened(typed, tmp_path / "typed", index_sets={"item": {"train": range(5)}})
    assert found.index_set("train")[0] == "item"
    ours = NeighborLoader(found, [2], found.index_set("train"), batch_size=2, seed=1)
    theirs = NeighborLoader(typed, [2], ("item", torch.arange(5)), batch_size=2, seed=1)
    assert_same_batches(theirs, ours)
    with pytest.raises(KeyError, match="no index set 'test', only: train"):
        found.index_set("test")


def test_a_saved_directory_of_an_opened_graph(tmp_path: Path) -> None:
    data = everything()
    found = opened(data, tmp_path / "graph", time_attr="time")
    again = opened(found, tmp_path / "again", time_attr="time")
    assert not edge_list_was_made(found)
    first, second = (
        pyg_scale.open(d).graph_directory for d in (found.graph_directory.path, tmp_path / "again")
    )
    assert first.meta.files == second.meta.files and first.meta.keys == second.meta.keys
    nodes = (None, torch.arange(30))
    assert_same_batches(_neighbors(data, nodes), _neighbors(again, nodes))


def test_without_compiled_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYG_SCALE_KERNELS", "never")
    test_homogeneous(tmp_path, {"time_attr": "time", "weight_attr": "weight"}, torch.int32)
