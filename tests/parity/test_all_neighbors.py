"""With all neighbours, batches of real graphs are what the edge list says."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.utils import k_hop_subgraph

from pyg_scale.datasets import read_npz
from pyg_scale.loader import LinkNeighborLoader, NeighborLoader
from tests.parity.neighborhood import assert_is, neighborhood


@pytest.fixture(scope="module")
def pages(data_dir: Path) -> Data:
    data = read_npz(data_dir / "facebook_pages.npz")
    data.x = data.x[:, :8].contiguous()
    return data


@pytest.fixture(scope="module")
def dblp(data_dir: Path) -> HeteroData:
    return read_npz(data_dir / "dblp.npz")


@pytest.fixture(scope="module")
def history(data_dir: Path) -> HeteroData:
    return read_npz(data_dir / "history.npz")


@pytest.mark.parametrize("workers", [0, 2])
def test_homogeneous(pages: Data, workers: int) -> None:
    loader = NeighborLoader(
        pages, [-1, -1], pages.val_mask, batch_size=30, shuffle=True, num_workers=workers, seed=1
    )
    for batch in islice(loader, 3):
        assert_is(batch, pages, neighborhood(pages, {None: batch.input_id}, 2))
        assert torch.equal(batch.n_id[:30], batch.input_id)
        nodes = k_hop_subgraph(batch.input_id, 2, pages.edge_index, num_nodes=pages.num_nodes)[0]
        assert torch.equal(batch.n_id.sort().values, nodes)
        for name in ("x", "y", "train_mask"):
            assert batch[name].dtype == pages[name].dtype
            assert torch.equal(batch[name], pages[name][batch.n_id])


@pytest.mark.parametrize("node_type", ["author", "paper", "conference"])
def test_heterogeneous(dblp: HeteroData, node_type: str) -> None:
    loader = NeighborLoader(dblp, [-1, -1], node_type, batch_size=3, shuffle=True, seed=1)
    for batch in islice(loader, 3):
        assert (batch.node_types, batch.edge_types) == (dblp.node_types, dblp.edge_types)
        assert_is(batch, dblp, neighborhood(dblp, {node_type: batch[node_type].input_id}, 2))
        assert torch.equal(batch["author"].y, dblp["author"].y[batch["author"].n_id])


def test_neighbors_of_some_edge_types_only(dblp: HeteroData) -> None:
    wanted = ("paper", "to", "author"), ("conference", "rev_to", "paper")
    some = HeteroData({t: {"num_nodes": dblp[t].num_nodes} for t in dblp.node_types})
    for edge_type in wanted:
        some[edge_type].edge_index = dblp[edge_type].edge_index
    numbers = {t: [-1, -1] if t in wanted else [0, 0] for t in dblp.edge_types}
    loader = NeighborLoader(dblp, numbers, "author", batch_size=50)
    batch = next(iter(loader))
    assert_is(batch, dblp, _with_the_others(dblp, some, batch["author"].input_id))


def _with_the_others(data: HeteroData, part: HeteroData, seeds: torch.Tensor) -> Any:
    expected = neighborhood(part, {"author": seeds}, 2)
    none = torch.empty(0, dtype=torch.int64)
    for hop in expected.edges:
        hop.update({t: none for t in data.edge_types if t not in hop})
    return expected


def test_temporal(history: HeteroData) -> None:
    """Every seed sees what was there in its time, and all of that."""
    seeds = torch.arange(0, 7997, 800)
    loader = NeighborLoader(
        history, [-1, -1], ("commit", seeds), time_attr="time", batch_size=5, num_workers=1
    )
    cut_off = 0
    for batch in loader:
        for position, seed in enumerate(batch["commit"].n_id[: batch["commit"].batch_size]):
            time = int(history["commit"].time[seed])
            expected = neighborhood(history, {"commit": seed.view(1)}, 2, no_later_than=time)
            for node_type in history.node_types:
                store = batch[node_type]
                mine = store.n_id[store.batch == position].sort().values
                nodes = torch.cat([hop[node_type] for hop in expected.nodes]).sort().values
                assert torch.equal(mine, nodes)
            for edge_type in history.edge_types:
                of_mine = batch[edge_type[2]].batch[batch[edge_type].edge_index[1]] == position
                edges = torch.cat([hop[edge_type] for hop in expected.edges]).sort().values
                assert torch.equal(batch[edge_type].e_id[of_mine].sort().values, edges)
            whole = neighborhood(history, {"commit": seed.view(1)}, 2)
            cut_off += sum(len(ids) for hop in whole.nodes for ids in hop.values())
            cut_off -= sum(len(ids) for hop in expected.nodes for ids in hop.values())
    assert cut_off > 0  # there was a future to leave out


@pytest.mark.parametrize("neg_sampling", [None, "binary", "triplet"])
def test_links(pages: Data, neg_sampling: str | None) -> None:
    links = pages.edge_index[:, ::5000]
    loader = LinkNeighborLoader(
        pages, [-1], links, neg_sampling=neg_sampling, batch_size=20, shuffle=True
    )
    for batch in islice(loader, 3):
        if neg_sampling == "triplet":
            given = batch.n_id[torch.stack([batch.src_index, batch.dst_pos_index])]
            ends = torch.cat([batch.src_index, batch.dst_pos_index, batch.dst_neg_index])
        else:
            given = batch.n_id[batch.edge_label_index[:, : batch.input_id.numel()]]
            ends = batch.edge_label_index.view(-1)
        assert torch.equal(given, links[:, batch.input_id])
        seeds = batch.n_id[ends].unique()
        assert torch.equal(batch.n_id[: len(seeds)], seeds)
        assert_is(batch, pages, neighborhood(pages, {None: seeds}, 1))
        if neg_sampling == "binary":
            assert batch.edge_label.tolist() == [1.0] * 20 + [0.0] * 20
        assert "batch_size" not in batch


def test_links_between_types(dblp: HeteroData) -> None:
    kind = ("paper", "to", "term")
    loader = LinkNeighborLoader(dblp, [-1, -1], kind, batch_size=4, shuffle=True, seed=2)
    for batch in islice(loader, 3):
        index = batch[kind].edge_label_index
        ends = batch["paper"].n_id[index[0]], batch["term"].n_id[index[1]]
        assert torch.equal(torch.stack(ends), dblp[kind].edge_index[:, batch[kind].input_id])
        seeds = {"paper": ends[0], "term": ends[1]}
        assert_is(batch, dblp, neighborhood(dblp, seeds, 2))
