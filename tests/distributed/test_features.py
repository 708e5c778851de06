"""Features of other ranks: to the bit those in memory, each row asked for once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data, TensorAttr

import pyg_scale
from pyg_scale.datasets import read_npz
from pyg_scale.distributed.features.store import RankFeatures
from pyg_scale.errors import GraphDirectoryError
from pyg_scale.loader import LinkNeighborLoader, NeighborLoader
from pyg_scale.partitioner import Partition, write_partition
from pyg_scale.store import Cached, Disk
from pyg_scale.store.directory import GraphDirectory
from pyg_scale.store.reading import take_reads
from pyg_scale.testing import graphs
from tests.distributed.rank_features import Ranks, content_of, ranks, some_rows
from tests.loader.batches import assert_same_batches

pytestmark = pytest.mark.matrix(3)

PARTS = 4


def edges_with_features() -> Data:
    g = torch.Generator().manual_seed(1)
    n, e = 300, 2_000
    return Data(
        x=torch.randn(n, 5, generator=g),
        bits=torch.randn(n, 2, 3, generator=g).to(torch.bfloat16),
        y=torch.randint(0, 3, (n,), generator=g),
        edge_index=torch.randint(0, n - 7, (2, e), generator=g),  # the last nodes have no edge
        edge_attr=torch.randn(e, 3, generator=g),
        kind=torch.randint(0, 5, (e,), generator=g).to(torch.uint8),
        train_mask=torch.rand(n, generator=g) < 0.3,
        none=torch.empty(n, 0),
    )


def pages(data_dir: Path) -> Data:
    data = read_npz(data_dir / "facebook_pages.npz")
    data.x = data.x[:, :24].clone()
    return data


def dblp(data_dir: Path) -> Any:
    data = read_npz(data_dir / "dblp.npz")
    for number, store in enumerate(data.node_stores):
        x = some_rows(1000, store.num_nodes * 3, number).view(-1, 3)
        store.x = x.to([torch.float32, torch.float16, torch.int32, torch.bfloat16][number % 4])
    for number, edge_type in enumerate(data.edge_types):
        if number % 2:
            data[edge_type].edge_attr = torch.arange(data[edge_type].num_edges) * 3
    return data


def parts_of(data: Any, folder: Path, num_parts: int = PARTS, kind: str = "random") -> Path:
    whole, path = folder / "whole", folder / "parts"
    pyg_scale.save(data, whole)
    if kind != "random":
        pyg_scale.partition(whole, num_parts, kind, path)
        return path
    g = torch.Generator().manual_seed(num_parts)
    nodes = GraphDirectory(whole).meta.nodes
    parts = {t: torch.randint(num_parts, (n.num_nodes,), generator=g) for t, n in nodes.items()}
    write_partition(whole, Partition(parts, num_parts, "random"), path)
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Data, Path]:
    data = edges_with_features()
    return data, parts_of(data, tmp_path_factory.mktemp("small"))


# Values ########################################################################################


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", ["small", "pages", "dblp"])
def test_values_are_those_in_memory(
    tmp_path: Path, request: pytest.FixtureRequest, name: str, world_size: int
) -> None:
    if name == "small":
        data, kind = edges_with_features(), "random"
    else:
        made = {"pages": pages, "dblp": dblp}[name]
        data, kind = made(request.getfixturevalue("data_dir")), "random"
    content = content_of(data)
    with ranks(parts_of(data, tmp_path, kind=kind), world_size) as made_ranks:
        for rank, store in enumerate(made_ranks.features):
            assert {(a.group_name, a.attr_name) for a in store.get_all_tensor_attrs()} == set(
                content
            )
            indices: dict[Any, Tensor] = {}
            attrs = []
            for (group, attr), tensor in content.items():
                count = min(3 * len(tensor), 4000)
                index = indices.setdefault(group, some_rows(len(tensor), count, rank))
                attrs.append(TensorAttr(group, attr, index))
            for attr, found in zip(attrs, store.multi_get_tensor(attrs), strict=True):
                expected = content[attr.group_name, attr.attr_name][attr.index]
                assert found.dtype == expected.dtype and torch.equal(found, expected)


def test_parts_that_are_ranges_of_ids(tmp_path: Path) -> None:
    data = edges_with_features()
    path = parts_of(data, tmp_path, kind="range")
    assert not GraphDirectory(path).meta.nodes[None].book
    with ranks(path, 2) as made:
        for (group, name), tensor in content_of(data).items():
            index = some_rows(len(tensor), 500, 5)
            assert torch.equal(made.features[1][group, name, index], tensor[index])


# What travels ##################################################################################


def test_exactly_the_unique_rows_of_others_travel_in_one_request_per_rank(
    small: tuple[Data, Path],
) -> None:
    path = small[1]
    part = GraphDirectory(path).books[None].assignment()
    with ranks(path, 3) as made:
        store, service = made.features[0], made.services[0]
        index = some_rows(300, 400, 0)
        names = ["x", "bits", "y", "train_mask", "none"]
        take_reads()
        store.multi_get_tensor([TensorAttr(None, name, index) for name in names])
        asked, received = service.take()
        assert sorted(asked) == [1, 2], "one request for each rank that has rows"
        absent = np.unique(index[part[index] % 3 != 0].numpy())
        row_bytes = 5 * 4 + 2 * 3 * 2 + 8 + 1 + 0
        assert received == absent.size * row_bytes
        counted = take_reads()
        assert (counted.remote_rows, counted.remote_bytes) == (absent.size * 5, received)
        here = int((part[index] % 3 == 0).sum())
        assert (counted.local_rows, counted.local_bytes) == (here * 5, here * row_bytes)


def test_exactly_the_unique_edges_of_others_travel(small: tuple[Data, Path]) -> None:
    data, path = small
    directory = GraphDirectory(path)
    own = torch.cat([directory.part(p).edge_ids(None) for p in (1, 3)])
    with ranks(path, 2) as made:
        index = some_rows(2_000, 900, 0)
        found = made.features[1][(None, None), "edge_attr", index]
        assert torch.equal(found, data.edge_attr[index])
        asked, received = made.services[1].take()
        absent = np.setdiff1d(index.numpy(), own.numpy())
        assert asked == [0] and received == absent.size * 12


def test_nobody_is_asked_for_what_is_here_or_nothing(small: tuple[Data, Path]) -> None:
    data, path = small
    own = GraphDirectory(path).part(1).orig_id(None)
    with ranks(path, 4) as made:
        assert torch.equal(made.features[1][None, "x", own], data.x[own])
        assert made.features[1][None, "x", own[:0]].shape == (0, 5)
        assert made.services[1].take() == ([], 0)


def test_more_attributes_than_a_message_holds(tmp_path: Path) -> None:
    data = Data(num_nodes=20, edge_index=torch.zeros(2, 1, dtype=torch.int64))
    for number in range(300):
        data[f"node_{number}"] = torch.arange(20) * number
    with ranks(parts_of(data, tmp_path, 2), 2) as made:
        index = torch.arange(20).flip(0)
        attrs = made.features[0].get_all_tensor_attrs()
        assert len(attrs) == 300
        for attr in attrs:
            attr.index = index
        for attr, found in zip(attrs, made.features[0].multi_get_tensor(attrs), strict=True):
            assert torch.equal(found, data[attr.attr_name][index])
        assert made.services[0].take()[0] == [1, 1]


def test_a_directory_without_the_book_of_edges(
    small: tuple[Data, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GraphDirectory, "edge_book", lambda *_: None)
    with ranks(small[1], 2) as made, pytest.raises(GraphDirectoryError, match="partition the gr"):
        made.features[0][(None, None), "edge_attr", torch.tensor([0])]


# A cache #######################################################################################


def test_placed_rows_travel_once(small: tuple[Data, Path]) -> None:
    data, path = small
    directory = GraphDirectory(path)
    part = directory.books[None].assignment()
    degree = torch.zeros(300, dtype=torch.int64)  # edges of the parts of rank 0
    own_edges = part[data.edge_index[1]] % 2 == 0
    degree += torch.bincount(data.edge_index[0][own_edges], minlength=300)
    absent = part % 2 == 1
    wanted = degree.masked_fill(~absent, -1).sort(descending=True, stable=True).indices[:10]
    with ranks(path, 2, cache=10 * 20, attributes=["x"]) as made:
        store, service = made.features[0], made.services[0]
        assert torch.equal(store[None, "x", wanted], data.x[wanted])
        assert service.take()[1] == 10 * 20
        index = torch.arange(300)
        for _ in range(2):
            assert torch.equal(store[None, "x", index], data.x[index])
            assert service.take()[1] == (int(absent.sum()) - 10) * 20
        assert store.stats()["cached_bytes"] == 200


@pytest.mark.parametrize("policy", ["placed", "belady", "sieve"])
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_with_a_cache(small: tuple[Data, Path], policy: str, workers: int) -> None:
    data, path = small
    arguments: dict[str, Any] = {"num_neighbors": [4, 3], "batch_size": 16, "seed": 3}
    received = {}
    for ratio in (None, 0.1):
        options = {} if ratio is None else {"cache_ratio": ratio, "policy": policy}
        with ranks(path, 2, **options) as made:
            loader = NeighborLoader(
                data, **arguments, feature_store=made.features[1], num_workers=workers
            )
            assert_same_batches(NeighborLoader(data, **arguments), loader)
            counted = loader.stats()["epoch"]["fetch"]
            received[ratio] = made.services[1].take()[1]
            assert counted["remote_bytes"] == received[ratio]
            assert (counted["cache_hits"] > 0) == (ratio is not None)
    assert received[0.1] < 0.9 * received[None]


def test_a_cache_of_its_own_over_all_rows(small: tuple[Data, Path]) -> None:
    data, path = small
    arguments: dict[str, Any] = {"num_neighbors": [4, 3], "batch_size": 16, "seed": 3}
    with ranks(path, 2) as made:
        store = Cached(made.features[0], "4kB")
        assert store.look_ahead >= 4
        loader = NeighborLoader(data, **arguments, feature_store=store)
        assert_same_batches(NeighborLoader(data, **arguments), loader)
        assert store.stats()["hits"] > 0 and store.stats()["late"] == 0


# Coming batches ################################################################################


@pytest.mark.parametrize(
    ("options", "at_least"),
    [({"in_flight": 1}, 1), ({}, 4), ({"in_flight": 6}, 6), ({"cache": "8kB"}, 8)],
    ids=str,
)
def test_so_many_batches_are_in_flight_without_workers(
    small: tuple[Data, Path], options: dict[str, Any], at_least: int
) -> None:
    data, path = small
    with ranks(path, 2, attributes=["x"], **options) as made:
        service, sent = made.services[0], []
        service.on_wait = lambda: sent.append(len(service.requests))
        loader = NeighborLoader(
            Data(edge_index=data.edge_index, num_nodes=300), [4], batch_size=10, seed=0,
            feature_store=made.features[0],
        )  # fmt: skip
        for number, batch in enumerate(loader):
            assert torch.equal(batch.x, data.x[batch.n_id])
            if number == 0 and "cache" not in options:
                assert sent == [at_least], "requests that were sent before the first was waited for"
            elif number == 0:  # of four batches each
                assert sent == [2]
        assert len(service.requests) <= 30


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("kind", ["nodes", "links", "hetero", "temporal"])
def test_batches_of_every_loader(tmp_path: Path, kind: str, workers: int) -> None:
    data = graphs.hetero() if kind == "hetero" else graphs.hostile()
    arguments: dict[str, Any] = {"num_neighbors": [3, 2], "batch_size": 7, "seed": 3}
    cls: Any = NeighborLoader
    if kind == "links":
        cls, arguments["neg_sampling"] = LinkNeighborLoader, "binary"
    elif kind == "hetero":
        arguments |= {"input_nodes": "item", "shuffle": True}
    elif kind == "temporal":
        arguments |= {"time_attr": "time", "input_time": data.time}
    with ranks(parts_of(data, tmp_path, 3), 3) as made:
        loader = cls(data, **arguments, feature_store=made.features[2], num_workers=workers)
        assert_same_batches(cls(data, **arguments), loader)


def test_leaving_early_leaves_nothing(small: tuple[Data, Path]) -> None:
    data, path = small
    with ranks(path, 2) as made:
        for workers in (0, 2):
            loader = NeighborLoader(
                data, [4], batch_size=10, feature_store=made.features[0], num_workers=workers
            )
            for _ in loader:
                break
            assert len(list(loader)) == 30


# Rows that are here ############################################################################


def test_rows_that_are_here_come_from_another_store(small: tuple[Data, Path]) -> None:
    data, path = small
    arguments: dict[str, Any] = {"num_neighbors": [4, 3], "batch_size": 16, "seed": 3}
    for workers in (0, 2):
        disk = Disk(path, "2kB")
        with ranks(path, 2, local=disk, cache="2kB", policy="belady") as made:
            loader = NeighborLoader(
                data, **arguments, feature_store=made.features[0], num_workers=workers
            )
            assert_same_batches(NeighborLoader(data, **arguments), loader)
            assert disk.stats()["hits"] > 0 and made.features[0].stats()["hits"] > 0


def test_arguments_that_contradict_each_other(small: tuple[Data, Path]) -> None:
    path = small[1]
    for error, message, options in (
        (ValueError, "pass one", {"cache": 1, "cache_ratio": 0.1}),
        (ValueError, "from 0 to 1", {"cache_ratio": 1.5}),
        (TypeError, "must be a number", {"cache_ratio": "a"}),
        (ValueError, "in_flight must be", {"in_flight": 0}),
        (ValueError, "pass cache= too", {"hot": [1]}),
        (ValueError, "policy must be one of", {"cache": 100, "policy": "lru"}),
        (IndexError, "hot has the id 300", {"cache": 100, "hot": [300]}),
        (KeyError, "no attribute 'z'", {"attributes": ["z"]}),
        (TypeError, "local must be", {"local": 3}),
        (ValueError, "local has no 'y'", {"local": Disk(path, 100, attributes=["x"])}),
    ):
        made = Ranks(path, 2, asking=[])
        try:
            directory = GraphDirectory(path)
            with pytest.raises(error, match=message):
                RankFeatures(directory, made.services[0], made.owners[0], **options)
        finally:
            made.close()
