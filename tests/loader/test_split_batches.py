"""A batch size for each step of all ranks: they share the seeds of every step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import pyg_scale
from pyg_scale.comm.base import Communicator
from pyg_scale.errors import CommError
from pyg_scale.loader import LinkNeighborLoader, NeighborLoader, ZipLoader
from pyg_scale.testing import graphs
from tests.loader.batches import assert_same_batches
from tests.loader.ranks import DATA, loader, on_ranks, some_steps

WORKERS: list[dict[str, Any]] = [{}, {"num_workers": 2}]


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("graph")
    pyg_scale.save(DATA, folder / "whole")
    pyg_scale.partition(folder / "whole", 3, "hash", folder / "parts")
    return folder / "parts"


def split(comm: Communicator | None = None, data: Any = DATA, **kwargs: Any) -> NeighborLoader:
    return loader(comm, data, **{"batch_size": 30, "split_batches": True} | kwargs)


def seeds_of_steps(found: list[list[Any]]) -> list[list[int]]:
    """The seeds of every step, the pieces of ranks one after the other."""
    assert len({len(each) for each in found}) == 1
    return [torch.cat([piece.input_id for piece in step]).tolist() for step in zip(*found)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("kwargs", [{}, {"shuffle": False}, {"drop_last": True}], ids=str)
def test_steps_are_those_of_one_process(world_size: int, kwargs: dict[str, Any]) -> None:
    """Each rank has a run of every step's seeds, as long as those of the others or one longer."""

    def work(comm: Communicator) -> list[Any]:
        own = split(comm, **kwargs, **WORKERS[comm.rank % len(WORKERS)])
        epochs = [list(own), list(own)]
        assert [len(each) for each in epochs] == [len(own)] * 2
        return epochs

    found = on_ranks(world_size, work)
    alone = loader(batch_size=30, **kwargs)
    for epoch in range(2):
        expected = list(alone)
        pieces = [each[epoch] for each in found]
        assert seeds_of_steps(pieces) == [batch.input_id.tolist() for batch in expected]
        for step in zip(*pieces):
            sizes = [piece.batch_size for piece in step]
            assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)
        if world_size == 1:
            assert_same_batches(pieces[0], expected)


def in_edges_of_seeds(batches: list[Any]) -> dict[int, list[int]]:
    """The sampled in-edges of each seed, by their ids."""
    found = {}
    for batch in batches:
        for row, node in enumerate(batch.input_id.tolist()):
            found[node] = batch.e_id[batch.edge_index[1] == row].tolist()
    return found


@pytest.mark.parametrize("worker_type", ["thread", "process", "ring"])
def test_a_seed_draws_the_same_neighbours_in_every_piece(worker_type: str) -> None:
    one_hop = {"num_neighbors": [2], "batch_size": 50}
    workers = {"num_workers": 1, "worker_type": worker_type}

    def work(comm: Communicator) -> list[Any]:
        return list(split(comm, **one_hop, **(workers if comm.rank == 1 else {})))

    found = on_ranks(3, work)
    expected = in_edges_of_seeds(list(loader(**one_hop)))
    assert in_edges_of_seeds([batch for each in found for batch in each]) == expected


def test_what_is_drawn_by_place_differs_between_pieces() -> None:
    def links(comm: Communicator) -> LinkNeighborLoader:
        return LinkNeighborLoader(
            DATA, [3], batch_size=40, neg_sampling="binary", seed=3, split_batches=True, comm=comm
        )

    def negatives(batch: Any) -> list[list[int]]:
        return batch.n_id[batch.edge_label_index[:, batch.edge_label == 0]].tolist()

    two = on_ranks(2, lambda comm: list(links(comm)))
    (one,) = on_ranks(1, lambda comm: list(links(comm)))
    assert len(one) == len(two[0]) == len(two[1])
    for whole, first, second in zip(one, *two):
        ends = whole.n_id[whole.edge_label_index[:, whole.edge_label == 1]]
        both = [b.n_id[b.edge_label_index[:, b.edge_label == 1]] for b in (first, second)]
        assert torch.equal(torch.cat(both, dim=1), ends)
        assert negatives(first) != negatives(second)
    draws = on_ranks(2, lambda comm: [b.mark for b in split(comm, transform=marked)])
    assert not set(draws[0]) & set(draws[1])
    trees = on_ranks(2, lambda comm: list(split(comm, disjoint=True, input_nodes=[0] * 60)))
    for first, second in zip(*trees):
        assert first.e_id.tolist() != second.e_id.tolist()


def marked(batch: Any) -> Any:
    batch.mark = float(torch.rand(()))
    return batch


def test_a_last_step_of_few_seeds_is_empty_on_some_ranks() -> None:
    found = on_ranks(4, lambda comm: list(split(comm, input_nodes=torch.arange(32))))
    assert [[b.batch_size for b in each] for each in found] == [[8, 1], [8, 1], [7, 0], [7, 0]]
    last = found[3][1]
    assert last.num_nodes == 0 and last.num_edges == 0 and last.x.shape == (0, DATA.x.size(1))
    nothing = on_ranks(2, lambda comm: list(split(comm, input_nodes=torch.arange(1)[1::2])))
    assert nothing == [[], []]


def test_pieces_are_where_their_parts_are(parts: Path) -> None:
    """As far as ranks get equally many; the list of steps knows no parts."""
    book = pyg_scale.open(parts).graph_directory.books[None]

    def work(comm: Communicator) -> Any:
        own = split(comm, pyg_scale.open(parts), split_seeds="part")
        return list(own), own.state_dict()

    for world_size in (1, 2, 3):
        found = on_ranks(world_size, work)
        steps = seeds_of_steps([got for got, _ in found])
        expected = [batch.input_id.tolist() for batch in loader(batch_size=30)]
        assert [sorted(step) for step in steps] == [sorted(step) for step in expected]
        assert all(state == found[0][1] for _, state in found) and "by_part" not in found[0][1]
        if world_size == 3:
            owned = sum(
                int((book.part_of(batch.input_id) == rank).sum())
                for rank, (got, _) in enumerate(found)
                for batch in got
            )
            assert owned > 80


@pytest.mark.parametrize("mode", ["global", "part"])
def test_ranks_come_and_go_between_steps(parts: Path, mode: str) -> None:
    """The seeds of each step, whoever makes it, are those of a process that nobody disturbs."""

    def steps(count: int, state: Any) -> Callable[[Communicator], Any]:
        def work(comm: Communicator) -> Any:
            own = split(comm, pyg_scale.open(parts), split_seeds=mode, batch_size=12)
            if state is not None:
                own.load_state_dict(state)
            return some_steps(own, count), own.state_dict()

        return work

    state, found = None, []
    for world_size, count in ((1, 2), (3, 3), (2, 1), (4, 99)):
        got = on_ranks(world_size, steps(count, state))
        state = got[0][1]
        assert all(other == state for _, other in got)
        found += seeds_of_steps([batches for batches, _ in got])
    alone = loader(batch_size=12)
    expected = [batch.input_id.tolist() for batch in alone]
    assert [sorted(step) for step in found] == [sorted(step) for step in expected]
    if mode == "global":
        assert found == expected
    assert state == alone.state_dict()


def test_one_state_for_all_numbers_of_ranks_and_none() -> None:
    own = loader(batch_size=30)
    begun = some_steps(own, 2)
    state = own.state_dict()

    def work(comm: Communicator) -> Any:
        other = split(comm)
        other.load_state_dict(state)
        return list(other)

    rest = seeds_of_steps(on_ranks(3, work))
    assert [batch.input_id.tolist() for batch in begun] + rest == [
        batch.input_id.tolist() for batch in loader(batch_size=30)
    ]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_gradients_are_those_of_one_process(num_ranks: int) -> None:
    """Full neighbourhoods: the mean over a step's seeds, whoever has them."""
    data = graphs.hostile()
    torch.manual_seed(0)
    weight = torch.randn(data.x.size(1), 3, dtype=torch.float64)

    def gradient(batches: list[Any]) -> torch.Tensor:
        w, total = weight.clone().requires_grad_(), sum(batch.batch_size for batch in batches)
        for batch in batches:
            x = batch.x.double() @ w
            x = torch.zeros_like(x).index_add(0, batch.edge_index[1], x[batch.edge_index[0]])
            (x[: batch.batch_size].tanh().square().sum() / total).backward()
        assert w.grad is not None
        return w.grad

    options: dict[str, Any] = {"data": data, "num_neighbors": [-1], "batch_size": 33}
    found = on_ranks(num_ranks, lambda comm: list(split(comm, **options)))
    for pieces, whole in zip(zip(*found), loader(**options), strict=True):
        torch.testing.assert_close(
            gradient(list(pieces)), gradient([whole]), rtol=1e-12, atol=1e-12
        )


def test_zipped_loaders_share_the_seeds_of_steps() -> None:
    def zipped(comm: Communicator | None, **kwargs: Any) -> ZipLoader:
        of = [loader(num_neighbors=[2], seed=1), loader(num_neighbors=[2], seed=None)]
        return ZipLoader(of, batch_size=30, shuffle=True, seed=4, comm=comm, **kwargs)

    found = on_ranks(3, lambda comm: list(zipped(comm, split_batches=True)))
    for number in range(2):
        expected = in_edges_of_seeds([both[number] for both in zipped(None)])
        got = in_edges_of_seeds([both[number] for each in found for both in each])
        assert got == expected


def test_seeds_split_by_hand_have_no_common_steps() -> None:
    def work(comm: Communicator) -> None:
        own = split(comm, input_nodes=torch.arange(comm.rank, 100, 2))
        with pytest.raises(CommError, match=r"different seeds \(50, 50\), but with split_batches"):
            list(own)

    on_ranks(2, work)


def test_ranks_that_split_and_ranks_that_do_not() -> None:
    def work(comm: Communicator) -> None:
        with pytest.raises(CommError, match="has split_batches=False"):
            list(split(comm, split_batches=comm.rank == 0))

    on_ranks(2, work)
