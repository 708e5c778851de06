"""The main promise: batches on any number of ranks are those of one process, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.data import Data, HeteroData

from pyg_scale.datasets.read import read_npz
from pyg_scale.loader import LinkNeighborLoader, NeighborLoader
from pyg_scale.sampler import NativeSampler, NegativeSampling, ReferenceSampler
from pyg_scale.testing import graphs
from tests.cases import shown
from tests.distributed.across import in_parts, on_ranks, shares, spread
from tests.loader.batches import assert_same_batches

pytestmark = [
    pytest.mark.matrix(3),
    pytest.mark.filterwarnings("ignore:all . ranks iterate over the same:UserWarning"),
]

WAYS: list[dict[str, Any]] = [
    {},
    {"replace": True},
    {"disjoint": True},
    {"subgraph_type": "induced"},
    {"subgraph_type": "induced", "disjoint": True},
    {"subgraph_type": "bidirectional"},
    {"num_neighbors": [-1, -1]},
    {"num_workers": 2},
    {"neighbor_sampler": ReferenceSampler()},
]
TIMED: list[dict[str, Any]] = [
    {},
    {"temporal_strategy": "last"},
    {"num_neighbors": [-1, 2]},
    {"replace": True},
    {"subgraph_type": "induced", "input_time": 3},
    {"time_window": 4, "temporal_strategy": "last"},
    {"time_window": 6, "strictly_earlier": True, "subgraph_type": "induced"},
]


def _neighbors(data: Any, nodes: Any, **options: Any) -> NeighborLoader:
    plain = {"num_neighbors": [4, 3], "batch_size": 9, "shuffle": True, "seed": 4}
    return NeighborLoader(data, input_nodes=nodes, split_seeds=False, **plain | options)


def _everywhere(data: Any, path: Path, world_size: int, num_parts: int, make: Any) -> None:
    """Compare batches on ranks that have their parts only, and on ranks that have all of them."""
    _compare(data, spread(path, shares(world_size, num_parts)), make)
    _compare(data, [path, path], make)


def _compare(expected: Any, paths: list[Path], make: Any, **options: Any) -> None:
    batches = list(make(expected))
    for found in on_ranks(paths, lambda data: list(make(data)), **options):
        assert_same_batches(batches, found)


@pytest.mark.parametrize("options", WAYS, ids=shown)
def test_every_option_of_a_homogeneous_graph(tmp_path: Path, options: dict[str, Any]) -> None:
    data = graphs.hostile()
    path = in_parts(data, tmp_path, 3)
    seeds = torch.tensor([5, 7, 5, 99, 0, 41, 63, 12, 7, 30, 31])
    _everywhere(data, path, 2, 3, lambda graph: _neighbors(graph, seeds, **options))


@pytest.mark.matrix(2)
@pytest.mark.parametrize("options", WAYS, ids=shown)
def test_every_option_of_a_heterogeneous_graph(tmp_path: Path, options: dict[str, Any]) -> None:
    data = graphs.hetero()
    path = in_parts(data, tmp_path, 2)
    _everywhere(data, path, 3, 2, lambda graph: _neighbors(graph, ("item", None), **options))


@pytest.mark.matrix(3)
@pytest.mark.parametrize("options", TIMED, ids=str)
@pytest.mark.parametrize("time_attr", ["time", "when"])
def test_times(tmp_path: Path, time_attr: str, options: dict[str, Any]) -> None:
    data = graphs.hostile()
    path = in_parts(data, tmp_path, 3, time_attr=time_attr)
    seeds = torch.arange(0, 100, 3)
    if time_attr == "when" or "input_time" in options:
        options = options | {"input_time": torch.full((len(seeds),), options.get("input_time", 5))}

    def make(graph: Any) -> NeighborLoader:
        return _neighbors(graph, seeds, time_attr=time_attr, **options)

    _everywhere(data, path, 2, 3, make)


def test_times_of_some_node_types(tmp_path: Path) -> None:
    data = graphs.hetero()
    paths = spread(in_parts(data, tmp_path, 3, time_attr="time"), shares(2, 3))

    def make(graph: Any) -> NeighborLoader:
        return _neighbors(graph, ("item", torch.arange(12)), time_attr="time")

    _compare(data, paths, make)


@pytest.mark.parametrize("options", [{}, {"replace": True}, {"time_attr": "time"}], ids=str)
def test_weights(tmp_path: Path, options: dict[str, Any]) -> None:
    data = graphs.hostile()
    saved = {"weight_attr": "weight", "time_attr": options.get("time_attr")}
    path = in_parts(data, tmp_path, 3, **saved)
    seeds = torch.arange(40)

    def make(graph: Any) -> NeighborLoader:
        return _neighbors(graph, seeds, weight_attr="weight", **options)

    _everywhere(data, path, 2, 3, make)
    if not options:  # what has weights can be sampled without them
        _everywhere(data, path, 2, 3, lambda g: _neighbors(g, seeds))


@pytest.mark.parametrize("temporal", [False, True])
def test_out_edges(tmp_path: Path, temporal: bool) -> None:
    data = graphs.hostile()
    time_attr = "time" if temporal else None
    path = in_parts(data, tmp_path, 3, strategy="by_src", time_attr=time_attr)

    def make(graph: Any) -> NeighborLoader:
        sampler = NativeSampler(sample_direction="backward")
        return _neighbors(graph, torch.arange(30), neighbor_sampler=sampler, time_attr=time_attr)

    _compare(data, spread(path, shares(2, 3)), make)


@pytest.mark.parametrize("exclude", [False, True])
@pytest.mark.parametrize("mode", [None, "binary", "triplet"])
def test_links(tmp_path: Path, mode: str | None, exclude: bool) -> None:
    data = graphs.hostile()
    paths = spread(in_parts(data, tmp_path, 3), shares(2, 3))

    def make(graph: Any) -> LinkNeighborLoader:
        negatives = None
        if mode is not None:
            negatives = NegativeSampling(mode, 2, exclude_positives=exclude)
        links = data.edge_index[:, :40]
        return LinkNeighborLoader(
            graph,
            [3, 2],
            links,
            neg_sampling=negatives,
            batch_size=8,
            shuffle=True,
            seed=2,
            split_seeds=False,
        )

    _compare(data, paths, make)


def test_links_and_times(tmp_path: Path) -> None:
    data = graphs.hostile()
    paths = spread(in_parts(data, tmp_path, 3, time_attr="time"), shares(2, 3))

    def make(graph: Any) -> LinkNeighborLoader:
        return LinkNeighborLoader(
            graph,
            [3, 2],
            data.edge_index[:, :40],
            time_attr="time",
            edge_label_time=torch.full((40,), int(data.time.max())),
            neg_sampling=NegativeSampling("binary", 1),
            batch_size=8,
            seed=2,
            split_seeds=False,
        )

    _compare(data, paths, make)


GRAPHS = {"facebook_pages": None, "dblp": "author", "history": "commit"}


@pytest.mark.matrix(3)
@pytest.mark.parametrize("method", ["random", "ldg"])
@pytest.mark.parametrize("name", GRAPHS)
def test_real_graphs(tmp_path: Path, data_dir: Path, name: str, method: str) -> None:
    data: Data | HeteroData = read_npz(data_dir / f"{name}.npz", reverse=name == "dblp")
    time_attr = "time" if name == "history" else None
    if name == "facebook_pages":
        data.x = data.x[:, :16].contiguous()
    kind = GRAPHS[name]
    size = (data if kind is None else data[kind]).num_nodes
    nodes: Any = torch.arange(0, size, max(1, size // 100))

    def make(graph: Any) -> NeighborLoader:
        seeds = nodes if kind is None else (kind, nodes)
        return NeighborLoader(
            graph, [10, 5], seeds, batch_size=64, time_attr=time_attr, seed=1, split_seeds=False
        )

    for num_parts in (2, 3) if method == "random" else (5,):
        path = in_parts(data, tmp_path, num_parts, method, time_attr=time_attr)
        for world_size in (2, 3, 4):
            _compare(data, spread(path, shares(world_size, num_parts)), make)
        _compare(data, [path, path], make, through="requests")
    _compare(data, [path], make)
