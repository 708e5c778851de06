"""Ranks share the seeds of a loader: the batches are those of a single process."""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler

import pyg_scale
from pyg_scale.comm.base import Communicator
from pyg_scale.errors import CommError, CommTimeoutError
from pyg_scale.loader import HGTLoader, LinkNeighborLoader, NeighborLoader, ZipLoader
from pyg_scale.testing import graphs
from tests.loader.batches import assert_same, assert_same_batches, contents
from tests.loader.ranks import DATA, in_turn, loader, on_ranks, some_steps

pytestmark = pytest.mark.matrix(3)

HETERO = graphs.hetero()


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("graph")
    pyg_scale.save(DATA, folder / "whole")
    pyg_scale.partition(folder / "whole", 3, "hash", folder / "parts")
    return folder / "parts"


# The list ################################################################################

WORKERS: list[dict[str, Any]] = [
    {},
    {"num_workers": 2},
    {"num_workers": 1, "persistent_workers": True},
]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("kwargs", [{}, {"shuffle": False}, {"drop_last": True}], ids=str)
def test_global_batches_are_those_of_one_process(world_size: int, kwargs: dict[str, Any]) -> None:
    def work(comm: Communicator) -> list[Any]:
        own = loader(comm, **kwargs, **WORKERS[comm.rank % len(WORKERS)])
        epochs = [list(own), list(own)]
        assert [len(each) for each in epochs] == [len(own)] * 2
        return epochs

    found = on_ranks(world_size, work)
    alone = loader(**kwargs)
    for epoch in range(2):
        assert_same_batches(in_turn([each[epoch] for each in found]), alone)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_batches_by_part_are_the_same_for_any_number_of_ranks(parts: Path, world_size: int) -> None:
    def work(comm: Communicator) -> list[Any]:
        return list(loader(comm, pyg_scale.open(parts), split_seeds="part"))

    dealt = on_ranks(world_size, work)
    found = [batch for mine in dealt for batch in mine]
    (alone,) = on_ranks(1, work)
    assert len(found) == len(alone) == 12
    expected = {tuple(batch.input_id.tolist()): batch for batch in alone}
    for batch in found:
        assert_same(batch, expected.pop(tuple(batch.input_id.tolist())))
    assert sorted(torch.cat([b.input_id for b in found]).tolist()) == list(range(100))
    book = pyg_scale.open(parts).graph_directory.books[None]
    pure = [batch for batch in found if book.part_of(batch.input_id).unique().numel() == 1]
    assert len(pure) >= 12 - 3
    mine = [[int(book.part_of(b.input_id[:1])) % world_size for b in each] for each in dealt]
    owned = sum(part == rank for rank, each in enumerate(mine) for part in each)
    assert owned >= 9 or world_size == 4


def test_without_a_seed_that_of_rank_0_is_everyones(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = {0: iter([41, 42]), 1: iter([51, 52]), 2: iter([61, 62])}

    def work(comm: Communicator) -> list[Any]:
        own = loader(comm, seed=None)
        mine = drawn[comm.rank]
        own.generator = type("Draws", (), {"get_state": lambda self: None, "next": mine})()
        return [list(own), list(own)]

    monkeypatch.setattr(
        "pyg_scale.loader.seeds.state.draw_seed", lambda generator: next(generator.next)
    )
    found = on_ranks(3, work)
    for epoch, seed in enumerate((41, 42)):
        alone = loader(seed=seed)
        assert_same_batches(in_turn([each[epoch] for each in found]), alone)


def test_different_seeds_are_said_and_that_of_rank_0_holds() -> None:
    def work(comm: Communicator) -> list[Any]:
        own = loader(comm, seed=5 + comm.rank)
        epochs = [list(own), list(own)]
        assert own.seed == 5
        return epochs

    with pytest.warns(UserWarning, match=r"different seed= \(5, 6, ...\): that of rank 0"):
        found = on_ranks(2, work)
    alone = loader(seed=5)
    for epoch in range(2):
        assert_same_batches(in_turn([each[epoch] for each in found]), alone)


def test_links_and_negatives() -> None:
    def links(comm: Communicator | None = None) -> LinkNeighborLoader:
        return LinkNeighborLoader(
            DATA,
            [3, 2],
            batch_size=40,
            shuffle=True,
            neg_sampling="binary",
            seed=3,
            split_seeds=None if comm is None else "global",
            comm=comm,
        )

    found = on_ranks(3, lambda comm: list(links(comm)))
    assert_same_batches(in_turn(found), links())


def test_links_go_with_the_part_of_their_destination(parts: Path) -> None:
    def work(comm: Communicator) -> list[Any]:
        data = pyg_scale.open(parts)
        data.__dict__["comm"] = comm
        return list(LinkNeighborLoader(data, [3], batch_size=30, seed=3, split_seeds="part"))

    found = [batch for mine in on_ranks(2, work) for batch in mine]
    ids = torch.cat([batch.input_id for batch in found])
    assert sorted(ids.tolist()) == list(range(DATA.num_edges))
    part = pyg_scale.open(parts).graph_directory.books[None].part_of(DATA.edge_index[1])
    pure = [batch for batch in found if part[batch.input_id].unique().numel() == 1]
    assert len(pure) >= len(found) - 3


def test_hgt() -> None:
    def hgt(comm: Communicator | None = None) -> HGTLoader:
        return HGTLoader(
            HETERO,
            [5, 5],
            HETERO.node_types[0],
            batch_size=4,
            shuffle=True,
            seed=3,
            split_seeds=None if comm is None else "global",
            comm=comm,
        )

    found = on_ranks(2, lambda comm: list(hgt(comm)))
    assert_same_batches(in_turn(found), hgt())


def test_zipped_loaders_share_positions() -> None:
    def zipped(comm: Communicator | None = None, **kwargs: Any) -> ZipLoader:
        pair = [loader(comm, seed=4), loader(comm, seed=None, input_nodes=torch.arange(80))]
        return ZipLoader(pair, batch_size=9, shuffle=True, seed=6, comm=comm, **kwargs)

    found = in_turn(on_ranks(3, lambda comm: list(zipped(comm))))
    for batch, expected in zip(found, zipped(), strict=True):
        for one, other in zip(batch, expected, strict=True):
            assert_same(one, other)
    with pytest.raises(NotImplementedError, match="different parts"):
        zipped(split_seeds="part")


def test_worker_processes() -> None:
    workers: dict[str, Any] = {"num_workers": 1, "worker_type": "process"}
    (found,) = on_ranks(1, lambda comm: list(loader(comm, **workers)))
    assert_same_batches(found, loader())

    def work(comm: Communicator) -> list[Any]:
        return list(loader(comm, uneven="repeat", **(workers if comm.rank else {})))

    found = on_ranks(2, work)
    assert [batch.repeated for mine in found for batch in mine] == [False] * 12


# Uneven ends #############################################################################


def test_uneven_ends() -> None:
    def work(comm: Communicator) -> list[list[Any]]:
        made = [loader(comm, uneven=uneven) for uneven in ("join", "drop", "repeat")]
        return [list(each) for each in made] + [[len(each) for each in made]]

    found = on_ranks(5, work)  # 12 batches
    alone = list(loader())
    lengths = [each[3] for each in found]
    assert lengths == [[3, 2, 3]] * 2 + [[2, 2, 3]] * 3
    assert [list(map(len, each[:3])) for each in found] == lengths
    assert_same_batches(in_turn([each[0] for each in found]), alone)
    assert_same_batches(in_turn([each[1] for each in found]), alone[:10])
    marked = [[batch.repeated for batch in each[2]] for each in found]
    assert marked == [[False] * 3] * 2 + [[False, False, True]] * 3
    for rank, again in ((2, 0), (3, 1), (4, 2)):
        assert torch.equal(found[rank][2][2].n_id, alone[again].n_id)


def test_dropping_everything_is_said() -> None:
    with pytest.warns(UserWarning, match="leaves no batch: 1 for 2 ranks"):
        assert on_ranks(2, lambda c: list(loader(c, batch_size=100, uneven="drop"))) == [[], []]


def test_more_ranks_than_batches_and_no_seeds_at_all() -> None:
    found = on_ranks(4, lambda comm: list(loader(comm, batch_size=60)))
    assert [len(each) for each in found] == [1, 1, 0, 0]
    empty = on_ranks(2, lambda comm: list(loader(comm, input_nodes=torch.empty(0).long())))
    assert empty == [[], []]


# Resuming ################################################################################


@pytest.mark.parametrize("mode", ["global", "part"])
@pytest.mark.parametrize("steps", range(6))
def test_another_number_of_ranks_goes_on(parts: Path, mode: str, steps: int) -> None:
    def make(comm: Communicator) -> NeighborLoader:
        return loader(comm, pyg_scale.open(parts), split_seeds=mode)

    def first(comm: Communicator) -> Any:
        own = make(comm)
        list(own)  # an epoch before
        return some_steps(own, steps), own.state_dict()

    def then(steps: int, state: Any) -> Callable[[Communicator], Any]:
        def work(comm: Communicator) -> Any:
            own = make(comm)
            own.load_state_dict(state)
            return some_steps(own, steps), own.state_dict()

        return work

    two = on_ranks(2, first)
    assert two[0][1] == two[1][1]
    four = on_ranks(4, then(1, two[0][1]))
    one = on_ranks(1, then(99, four[0][1]))
    found = [batch for group in (two, four, one) for got, _ in group for batch in got]
    after = one[0][1]
    assert after["delivered"] == 0 and after["epoch"] == 2

    def reference(comm: Communicator) -> list[Any]:
        own = make(comm)
        own.set_epoch(1)
        return list(own)

    (alone,) = on_ranks(1, reference)
    expected = {tuple(batch.input_id.tolist()): batch for batch in alone}
    assert len(found) == len(expected)
    for batch in found:
        assert_same(batch, expected.pop(tuple(batch.input_id.tolist())))


@pytest.mark.parametrize("mode", ["global", "part"])
def test_the_same_ranks_go_on_exactly(parts: Path, mode: str) -> None:
    def make(comm: Communicator) -> NeighborLoader:
        return loader(comm, pyg_scale.open(parts), split_seeds=mode)

    def work(comm: Communicator) -> None:
        whole = list(make(comm))
        for steps in range(4):
            own = make(comm)
            some_steps(own, steps)
            state = torch_saved(own.state_dict())
            again = make(comm)
            again.load_state_dict(state)
            some_steps(again, 1)
            third = make(comm)
            third.load_state_dict(again.state_dict())
            assert_same_batches(third, whole[steps + 1 :])

    on_ranks(3, work)


def torch_saved(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_a_state_of_ranks_is_one_of_a_process_alone() -> None:
    def work(comm: Communicator) -> Any:
        own = loader(comm)
        return some_steps(own, 2), own.state_dict()

    found = on_ranks(3, work)
    state = found[0][1]
    assert state["delivered"] == 6 and all(isinstance(value, int) for value in state.values())
    alone = loader()
    alone.load_state_dict(state)
    everything = [*in_turn([got for got, _ in found]), *alone]
    assert_same_batches(everything, loader())


def test_ranks_that_load_different_states_are_told() -> None:
    def work(comm: Communicator) -> None:
        own = loader(comm)
        state = own.state_dict() | {"running": True, "delivered": 3 + comm.rank}
        own.load_state_dict(state)
        next(iter(own))

    with pytest.raises(ExceptionGroup) as error:
        on_ranks(2, work)
    for each in error.value.exceptions:
        assert "rank 1 begins an iteration of this NeighborLoader with delivered=4" in str(each)


def test_a_state_by_part_is_of_these_parts(parts: Path) -> None:
    grouped = loader(data=pyg_scale.open(parts), split_seeds="part")
    state = grouped.state_dict()
    with pytest.raises(ValueError, match="were grouped by part"):
        loader(data=pyg_scale.open(parts)).load_state_dict(state)
    with pytest.raises(ValueError, match="were not grouped by part"):
        grouped.load_state_dict(loader().state_dict())
    fewer = loader(data=pyg_scale.open(parts), split_seeds="part")
    fewer.load_state_dict(state)
    with pytest.raises(ValueError, match="of another partition"):
        fewer.load_state_dict(state | {"by_part": state["by_part"] + 1})


# Ranks that do not come, or mean something else ##########################################


def errors_of(
    world_size: int, work: Callable[[Communicator], Any], timeout: float = 30.0
) -> list[Exception]:
    with pytest.raises(ExceptionGroup) as error:
        on_ranks(world_size, work, timeout=timeout)
    return list(error.value.exceptions)


def test_one_rank_alone_never_sees_only_its_share(parts: Path) -> None:
    def work(comm: Communicator) -> None:
        data = pyg_scale.open(parts)
        data.__dict__["comm"] = comm
        own = loader(data=data)
        assert len(own) == 4
        if comm.rank == 0:
            next(iter(own))

    (error,) = errors_of(3, work, timeout=3.0)
    assert isinstance(error, CommTimeoutError)
    assert "ranks 1, 2 did not begin to iterate over this NeighborLoader" in str(error)
    assert "split_seeds=False" in str(error)


def test_a_rank_alone_may_iterate_by_itself(parts: Path) -> None:
    def work(comm: Communicator) -> int:
        data = pyg_scale.open(parts)
        data.__dict__["comm"] = comm
        if comm.rank == 0:
            assert len(list(loader(data=data, split_seeds=False))) == 12
        return len(list(loader(data=data)))

    assert on_ranks(2, work) == [6, 6]


def test_a_rank_that_makes_no_loader_is_named() -> None:
    (error,) = errors_of(2, lambda comm: len(loader(comm)) if comm.rank == 1 else None, 0.5)
    assert isinstance(error, CommTimeoutError)
    assert "rank 0 did not make this NeighborLoader within 0.5 seconds" in str(error)


def test_other_loaders_and_epochs_are_told_apart() -> None:
    for error in errors_of(2, lambda comm: list(loader(comm, batch_size=9 + comm.rank))):
        assert isinstance(error, CommError) and "rank 1 has batch_size=10, that of" in str(error)

    def epochs(comm: Communicator) -> None:
        own = loader(comm)
        if comm.rank:
            own.set_epoch(3)
        next(iter(own))

    for error in errors_of(2, epochs):
        assert isinstance(error, CommError) and "epoch=3, rank 0 with epoch=0" in str(error)


# Seeds that are split already ############################################################


def test_seeds_split_by_hand_are_not_split_again() -> None:
    def work(comm: Communicator) -> list[Any]:
        mine = torch.arange(comm.rank, 100, comm.world_size)
        own = loader(comm, input_nodes=mine, batch_size=8 + comm.rank)
        assert own.state_dict()["num_seeds"] == mine.numel()
        return [len(own), list(own), list(own)]

    with pytest.warns(UserWarning, match=r"different seeds \(34, 33, 33\)") as said:
        found = on_ranks(3, work)
    assert len(said) == 1
    for rank, (length, first, second) in enumerate(found):
        assert length == len(first) == len(second)
        expected = loader(input_nodes=torch.arange(rank, 100, 3), batch_size=8 + rank)
        assert_same_batches(first, expected)
        assert_same_batches(second, expected)


@pytest.mark.parametrize("split_seeds", ["global", False])
def test_a_rank_with_no_seeds_has_no_batch_and_disturbs_nobody(split_seeds: str | bool) -> None:
    seeds = torch.tensor([7, 30])  # of which rank 1 has one, and rank 2 none: both with a stride

    def work(comm: Communicator) -> Any:
        mine, links = seeds[comm.rank :: comm.world_size], DATA.edge_index[:, :2]
        own = loader(comm, input_nodes=mine, split_seeds=split_seeds)
        of_links = LinkNeighborLoader(
            DATA,
            [3],
            edge_label_index=links[:, comm.rank :: comm.world_size],
            seed=1,
            split_seeds=split_seeds,
            comm=comm,
        )
        return [len(own), list(own)], [len(of_links), list(of_links)]

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the ranks gave this")
        found = on_ranks(3, work)
    assert [[length, len(got)] for each in found for length, got in each] == [[1, 1]] * 4 + [
        [0, 0],
        [0, 0],
    ]
    for rank in range(2):
        assert_same_batches(found[rank][0][1], loader(input_nodes=seeds[rank : rank + 1]))


def test_no_seeds_by_part(parts: Path) -> None:
    nothing = torch.arange(1)[1::2]

    def work(comm: Communicator) -> Any:
        own = loader(comm, pyg_scale.open(parts), input_nodes=nothing, split_seeds="part")
        return list(own), own.state_dict()["num_seeds"]

    assert on_ranks(2, work) == [([], 0)] * 2


def test_a_sampler_of_the_user_keeps_its_split(parts: Path) -> None:
    def work(comm: Communicator) -> list[int]:
        data = pyg_scale.open(parts)
        data.__dict__["comm"] = comm
        split = DistributedSampler(range(100), comm.world_size, comm.rank, shuffle=False)
        own = loader(data=data, sampler=split, shuffle=None)
        return torch.cat([batch.input_id for batch in own]).tolist()

    found = on_ranks(2, work)
    assert found == [list(range(0, 100, 2)), list(range(1, 100, 2))]
    with pytest.raises(ValueError, match="order of its own"):
        loader(sampler=range(3), shuffle=None, split_seeds="global")


def test_the_same_seeds_on_every_rank_are_said_once() -> None:
    def work(comm: Communicator) -> int:
        own = loader(comm, split_seeds=False)
        return len(list(own)) + len(list(own))

    with pytest.warns(UserWarning, match="all 3 ranks iterate over the same 100 seeds") as said:
        assert on_ranks(3, work) == [24] * 3
    assert len(said) == 1


def test_other_seeds_and_ranks_alone_are_no_reason_to_say_something() -> None:
    def other(comm: Communicator) -> None:
        list(loader(comm, split_seeds=False, input_nodes=torch.arange(50) + comm.rank))

    def alone(comm: Communicator) -> None:
        if comm.rank == 0:
            list(loader(comm, split_seeds=False))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        on_ranks(2, other)
        on_ranks(2, alone)


# Arguments ###############################################################################


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"split_seeds": True}, ValueError, "'global', 'part', False or None"),
        ({"split_seeds": "rank"}, ValueError, "'global', 'part', False or None"),
        ({"uneven": "pad"}, ValueError, "join, drop, repeat"),
        ({"uneven": "drop"}, ValueError, "pass split_seeds="),
        ({"uneven": "drop", "split_seeds": False}, ValueError, "leave out one"),
        ({"comm": "gloo"}, TypeError, "must be a Communicator"),
        ({"split_seeds": "part"}, ValueError, "data is Data"),
        ({"split_batches": 1}, TypeError, "must be a bool"),
        ({"split_batches": True, "split_seeds": False}, ValueError, "leave out one"),
        ({"split_batches": True, "uneven": "drop"}, ValueError, "all have a piece"),
        ({"split_batches": True, "batch_size": None}, ValueError, "batch_size=None makes none"),
        ({"split_batches": True, "sampler": [0]}, ValueError, "sampler= or batch_sampler="),
    ],
    ids=str,
)
def test_wrong_arguments(kwargs: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        NeighborLoader(DATA, [2], **kwargs)


def test_alone_sharing_changes_nothing(parts: Path) -> None:
    assert_same_batches(loader(split_seeds="global", uneven="drop"), loader())
    loader(data=pyg_scale.open(parts), uneven="drop")  # the same script runs on several ranks
    assert "repeated" not in {name for _, name in contents(next(iter(loader())))}


def test_a_copy_in_another_process_says_that_nobody_knows_it() -> None:
    def work(comm: Communicator) -> None:
        own = loader(comm)
        copied = pickle.loads(pickle.dumps(own))
        with pytest.raises(CommError, match="copy in another process"):
            iter(copied)
        list(own)

    on_ranks(2, work)


def test_of_two_iterators_each_is_an_epoch() -> None:
    def work(comm: Communicator) -> list[Any]:
        own = loader(comm)
        pairs: Iterator[Any] = zip(own, own)
        return [list(each) for each in zip(*pairs)]

    found = on_ranks(2, work)
    alone = loader()
    for epoch in range(2):
        assert_same_batches(in_turn([each[epoch] for each in found]), alone)
