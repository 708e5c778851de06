"""HGT batches of a graph in parts are those of the whole graph, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.sampler import EdgeSamplerInput

from pyg_scale.datasets.read import read_npz
from pyg_scale.distributed.router import RankRouter
from pyg_scale.loader import HGTLoader
from pyg_scale.ops import library
from pyg_scale.sampler.hgt import HGTSampler
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
    {"num_samples": [-1, -1]},
    {"num_samples": [3, 0, 2]},
    {"num_samples": []},
    {"num_samples": {"user": [2, 1], "item": [1, 3], "tag": [4, 4], "ghost": [1, 1]}},
    {"num_samples": {"user": [2, 1], "item": [1, 3], "tag": [4, 4], "ghost": [-1, -1]}},
    {"input_nodes": "ghost"},
    {"num_workers": 2},
]


def _loader(data: Any, **options: Any) -> HGTLoader:
    plain: dict[str, Any] = {
        "num_samples": [4, 3],
        "input_nodes": ("item", torch.tensor([5, 7, 5, 11, 0, 5, 3, 9])),
        "batch_size": 3,
        "seed": 4,
    }
    return HGTLoader(data, split_seeds=False, **plain | options)


def _compare(expected: Any, paths: list[Path], **options: Any) -> None:
    batches = list(_loader(expected, **options))
    for found in on_ranks(paths, lambda data: list(_loader(data, **options))):
        assert_same_batches(batches, found)


@pytest.mark.matrix(3)
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("options", WAYS, ids=shown)
def test_every_option_on_ranks(
    tmp_path: Path, options: dict[str, Any], index_dtype: torch.dtype
) -> None:
    data = graphs.hetero(index_dtype)
    path = in_parts(data, tmp_path, 3)
    _compare(data, spread(path, shares(2, 3)), **options)
    _compare(data, [path, path], **options)


@pytest.mark.parametrize("options", WAYS[:3], ids=shown)
def test_without_compiled_kernels(
    tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = graphs.hetero()
    path = in_parts(data, tmp_path, 3)
    batches = list(_loader(data, **options))
    monkeypatch.setattr(library, "compiled", lambda: False)
    monkeypatch.setattr(library, "warn_plain_path", lambda who: None)
    for found in on_ranks(spread(path, shares(2, 3)), lambda data: list(_loader(data, **options))):
        assert_same_batches(batches, found)


def test_links_are_seeds_too(tmp_path: Path) -> None:
    data = graphs.hetero()
    edge_type = ("user", "buys", "item")
    row, col = data[edge_type].edge_index[:, 5:25]
    links = EdgeSamplerInput(None, row, col, input_type=edge_type)

    def sample(graph: Any) -> Any:
        return HGTSampler(graph, [3, 2]).sample_from_edges(links, "binary", key=3)

    expected = sample(data)
    for found in on_ranks(spread(in_parts(data, tmp_path, 3), shares(3, 3)), sample):
        for name in ("node", "row", "col", "edge"):
            theirs = getattr(found, name)
            for each, value in getattr(expected, name).items():
                assert torch.equal(value, theirs[each]), (name, each)


def test_a_real_graph(tmp_path: Path, data_dir: Path) -> None:
    data = read_npz(data_dir / "dblp.npz", reverse=True)
    options: dict[str, Any] = {
        "num_samples": [40, 40, 20],
        "input_nodes": ("author", torch.arange(0, data["author"].num_nodes, 40)),
        "batch_size": 32,
    }
    for num_parts in (2, 3):
        path = in_parts(data, tmp_path, num_parts)
        for world_size in (1, 2, 3, 4):
            _compare(data, spread(path, shares(world_size, num_parts)), **options)


def test_in_edges_of_a_node_are_asked_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, int]] = []
    expand = RankRouter.expand

    def counted(self: Any, sampler: Any, asks: Any) -> Any:
        if self._ranks.rank == 0:
            asked.extend((ask.edge_type, node) for ask in asks for node in ask.node.tolist())
        return expand(self, sampler, asks)

    def sample(found: Any) -> Any:
        return next(iter(_loader(found, input_nodes=("item", torch.arange(12)), batch_size=12)))

    data = graphs.hetero()
    monkeypatch.setattr(RankRouter, "expand", counted)
    batch, _ = on_ranks(spread(in_parts(data, tmp_path, 2), shares(2, 2)), sample)
    assert set(asked) == {(t, n) for t in data.edge_types for n in batch[t[2]].n_id.tolist()}
    assert len(asked) == len(set(asked))
