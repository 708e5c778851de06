"""On a graph that ranks opened together they share its seeds without being told."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from pyg_scale.errors import CommTimeoutError
from pyg_scale.loader import LinkNeighborLoader, NeighborLoader
from pyg_scale.testing import graphs
from tests.distributed.across import in_parts, on_ranks, shares, spread


def bare(data: Any) -> Any:
    """The graph alone: features of other ranks are not what is looked at here."""
    for store in data.stores:
        for name in [name for name in store if name not in ("edge_index", "num_nodes", "y")]:
            if store.is_edge_attr(name) or store[name].dim() > 1:
                del store[name]
    return data


DATA = bare(graphs.hostile())
HETERO = bare(graphs.hetero())


def loader(data: Any, **kwargs: Any) -> NeighborLoader:
    kwargs = {"num_neighbors": [4, 3], "batch_size": 9, "seed": 1, "shuffle": True} | kwargs
    return NeighborLoader(data, **kwargs)


def assert_same_seeds_and_edges(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        for name in ("input_id", "n_id", "e_id", "edge_index"):
            assert torch.equal(one[name], other[name]), name


def in_turn(found: list[list[Any]]) -> list[Any]:
    return [batch for step in itertools.zip_longest(*found) for batch in step if batch is not None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("seeds")


@pytest.mark.parametrize(("world_size", "parts"), [(2, 2), (3, 4), (4, 2)])
def test_an_epoch_of_all_ranks_is_that_of_one_process(
    folder: Path, world_size: int, parts: int
) -> None:
    paths = spread(in_parts(DATA, folder, parts), shares(world_size, parts))

    def work(data: Any) -> list[Any]:
        own = loader(data, num_workers=data.ranks.rank % 2)
        return list(own)

    assert_same_seeds_and_edges(in_turn(on_ranks(paths, work)), list(loader(DATA)))


@pytest.mark.parametrize(("world_size", "parts"), [(2, 4), (4, 2)])
def test_by_part_seeds_are_where_their_edges_are(folder: Path, world_size: int, parts: int) -> None:
    paths = spread(in_parts(DATA, folder, parts), shares(world_size, parts))

    def work(data: Any) -> Any:
        own = loader(data, split_seeds="part", batch_size=5)
        book = data.graph_directory.books[None]
        found = list(own)
        mine = [set(book.part_of(batch.input_id).tolist()) for batch in found]
        here = sum(parts <= set(data.owners.owned()) for parts in mine)
        return found, here

    results = on_ranks(paths, work)
    ids = torch.cat([batch.input_id for found, _ in results for batch in found])
    assert sorted(ids.tolist()) == list(range(DATA.num_nodes))
    assert sum(here for _, here in results) >= 20 - parts - world_size


def test_one_rank_evaluates_alone_while_the_others_wait(folder: Path) -> None:
    paths = spread(in_parts(DATA, folder, 2), shares(2, 2))

    def work(data: Any) -> Any:
        train = loader(data)
        list(train)
        seen = []
        if data.ranks.rank == 0:
            seen = list(loader(data, split_seeds=False, shuffle=False))
        data.comm.barrier()
        return seen, list(train)

    found = on_ranks(paths, work)
    assert_same_seeds_and_edges(found[0][0], list(loader(DATA, shuffle=False)))
    alone = loader(DATA)
    alone.set_epoch(1)
    assert_same_seeds_and_edges(in_turn([again for _, again in found]), list(alone))


def test_one_rank_that_iterates_alone_is_told(folder: Path) -> None:
    paths = spread(in_parts(DATA, folder, 2), shares(2, 2))

    failed = threading.Event()

    def work(data: Any) -> None:
        own = loader(data)
        if data.ranks.rank == 1:
            with pytest.raises(CommTimeoutError, match="rank 0 did not begin to iterate"):
                next(iter(own))
            failed.set()
        assert failed.wait(30)
        assert len(list(loader(data))) == 6  # nothing is broken by that

    on_ranks(paths, work, timeout=5.0)


def test_types_and_links(folder: Path) -> None:
    target = HETERO.node_types[1]
    edge_type = HETERO.edge_types[0]
    seeds = (edge_type, HETERO[edge_type].edge_index)
    path = in_parts(HETERO, folder / "types", 2)

    def work(data: Any) -> Any:
        nodes = loader(data, input_nodes=target, batch_size=4)
        links = LinkNeighborLoader(
            data, [3], edge_label_index=seeds, batch_size=16, seed=2, neg_sampling="triplet"
        )
        return list(nodes), list(links)

    found = on_ranks(spread(path, shares(2, 2)), work)
    nodes = loader(HETERO, input_nodes=target, batch_size=4)
    links = LinkNeighborLoader(
        HETERO, [3], edge_label_index=seeds, batch_size=16, seed=2, neg_sampling="triplet"
    )
    for number, alone in enumerate((nodes, links)):
        for one, other in zip(in_turn([each[number] for each in found]), alone, strict=True):
            for node_type in HETERO.node_types:
                assert torch.equal(one[node_type].n_id, other[node_type].n_id)


def test_two_ranks_begin_and_three_go_on(folder: Path) -> None:
    path = in_parts(DATA, folder, 3)

    def begin(data: Any) -> Any:
        own = loader(data, split_seeds="part")
        return list(itertools.islice(own, 2)), own.state_dict()

    first = on_ranks(spread(path, shares(2, 3)), begin)
    state = first[0][1]
    assert state == first[1][1] and state["delivered"] == 4

    def go_on(data: Any) -> Any:
        own = loader(data, split_seeds="part")
        own.load_state_dict(state)
        return list(own), own.state_dict()

    second = on_ranks(spread(path, shares(3, 3)), go_on)
    ids = torch.cat([b.input_id for found, _ in [*first, *second] for b in found])
    assert sorted(ids.tolist()) == list(range(DATA.num_nodes))
