"""Who gets which batch: every seed once, the same list for any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyg_scale.loader.seeds.share import (
    UNEVEN,
    Epoch,
    EpochSegment,
    SharingRanks,
    Turn,
    deal,
    default_owners,
    num_steps,
    order_by_part,
)

COUNTS = st.integers(0, 40)
WORLDS = st.integers(1, 6)
QUICK = settings(max_examples=40)


def turns(epoch: Epoch, ranks: SharingRanks, uneven: str = "join") -> list[list[Turn]]:
    return [list(epoch.turns(ranks, rank, uneven)) for rank in range(ranks.world_size)]


def owners_of(num_parts: int, world_size: int, drawn: Sequence[int]) -> SharingRanks:
    lists = [tuple(sorted({d % world_size for d in drawn[p::num_parts]})) for p in range(num_parts)]
    return SharingRanks(world_size, tuple(lists))


@QUICK
@given(COUNTS, WORLDS)
def test_without_parts_ranks_take_turns(count: int, world_size: int) -> None:
    for rank, mine in enumerate(turns(Epoch(count), SharingRanks(world_size))):
        assert [turn.number for turn in mine] == list(range(rank, count, world_size))
        assert len(mine) == num_steps(count, world_size, rank, "join")


@QUICK
@given(
    COUNTS,
    WORLDS,
    st.integers(1, 5),
    st.lists(st.integers(0, 99), min_size=1, max_size=12),
    st.integers(0, 1000),
)
def test_with_parts_every_batch_goes_to_one_rank(
    count: int, world_size: int, num_parts: int, drawn: list[int], seed: int
) -> None:
    part = torch.randint(num_parts, (count,), generator=torch.Generator().manual_seed(seed))
    ranks = owners_of(num_parts, world_size, drawn)
    dealt = turns(Epoch(count, part), ranks)
    assert sorted(t.number for mine in dealt for t in mine) == list(range(count))
    for rank, mine in enumerate(dealt):
        assert len(mine) == num_steps(count, world_size, rank, "join")
        assert [t.step for t in mine] == list(range(len(mine)))
        assert [t.number for t in mine] == sorted(t.number for t in mine)
    # As many as possible are with their owners: no rank has a batch that is not of its parts
    # while an owner of that part has one that is not of its own.
    strangers = {
        rank: [t.number for t in mine if rank not in ranks.owners[int(part[t.number])]]
        for rank, mine in enumerate(dealt)
    }
    if all(len(each) == 1 for each in ranks.owners):
        for numbers in strangers.values():
            for number in numbers:
                (owner,) = ranks.owners[int(part[number])]
                assert not strangers[owner]


def test_owners_get_their_parts_where_these_are_equal() -> None:
    part = torch.tensor([0, 1, 2, 3] * 5)
    for rank, mine in enumerate(turns(Epoch(20, part), SharingRanks(2, default_owners(4, 2)))):
        assert {int(part[t.number]) % 2 for t in mine} == {rank}
    shared = turns(Epoch(20, part % 2), SharingRanks(4, default_owners(2, 4)))
    assert [{int(part[t.number]) % 2 for t in mine} for mine in shared] == [{0}, {1}, {0}, {1}]


def test_a_part_that_nobody_owns_fills_the_others_up() -> None:
    part = torch.tensor([0, 2, 2, 1, 2, 0])
    dealt = deal(torch.arange(6), SharingRanks(2, ((1,), (0,), ())), part)
    assert dealt.tolist() == [[1, 0], [2, 4], [3, 5]]


@QUICK
@given(COUNTS, WORLDS, st.booleans())
def test_uneven_ends(count: int, world_size: int, parts: bool) -> None:
    part = torch.arange(count) * 7 % 3 if parts else None
    ranks = SharingRanks(world_size, default_owners(3, world_size) if parts else ())
    found = {uneven: turns(Epoch(count, part), ranks, uneven) for uneven in UNEVEN}
    for uneven, dealt in found.items():
        lengths = [len(mine) for mine in dealt]
        assert lengths == [num_steps(count, world_size, r, uneven) for r in range(world_size)]
        assert uneven == "join" or len(set(lengths)) == 1
    for rank in range(world_size):
        joined = found["join"][rank]
        assert found["drop"][rank] == joined[: count // world_size]
        assert found["repeat"][rank][: len(joined)] == joined
        for turn in found["repeat"][rank][len(joined) :]:
            assert turn.repeated and 0 <= turn.number < count
            assert turn.number not in [t.number for t in joined]
    once = [t.number for mine in found["repeat"] for t in mine if not t.repeated]
    assert sorted(once) == list(range(count))


def test_what_is_repeated_is_what_torch_would_repeat() -> None:
    (_, one, two) = turns(Epoch(7), SharingRanks(3), "repeat")
    assert (one[-1].number, two[-1].number) == (0, 1)


@QUICK
@given(
    COUNTS,
    st.lists(st.tuples(WORLDS, st.integers(0, 6)), min_size=1, max_size=4),
    st.booleans(),
    st.integers(0, 1000),
)
def test_an_epoch_is_gone_on_with_by_other_ranks(
    count: int, plan: list[tuple[int, int]], parts: bool, seed: int
) -> None:
    part = None
    if parts:
        part = torch.randint(4, (count,), generator=torch.Generator().manual_seed(seed))
    delivered, segments = 0, ()
    seen: list[int] = []
    for world_size, steps in [*plan, (1, 10**6)]:
        ranks = SharingRanks(world_size, default_owners(4, world_size) if parts else ())
        epoch = Epoch(count, part, delivered, segments).joined_by(ranks)
        begun = epoch.segments[-1].steps if parts else 0
        made = [mine[:steps] for mine in turns(epoch, ranks)]
        seen += [t.number for mine in made for t in mine]
        last = max((mine[-1] for mine in made if mine), key=lambda t: t.step, default=None)
        if last is not None:
            assert last.step < begun + steps
            delivered = last.delivered
            assert delivered == len(seen)
        if parts:
            done = begun if last is None else last.step + 1
            segments = (*epoch.segments[:-1], EpochSegment(ranks, done))
            assert [EpochSegment.from_list(each.to_list()) for each in segments] == list(segments)
    assert sorted(seen) == list(range(count))


@QUICK
@given(COUNTS, WORLDS, st.integers(0, 8), st.booleans(), st.sampled_from(UNEVEN))
def test_the_same_ranks_go_on_as_if_nothing_had_happened(
    count: int, world_size: int, steps: int, parts: bool, uneven: str
) -> None:
    part = torch.arange(count) * 5 % 3 if parts else None
    ranks = SharingRanks(world_size, default_owners(3, world_size) if parts else ())
    whole = turns(Epoch(count, part).joined_by(ranks), ranks, uneven)
    steps = min(steps, count // world_size)
    epoch = Epoch(count, part, steps * world_size, (EpochSegment(ranks, steps),) if parts else ())
    for rank, mine in enumerate(turns(epoch, ranks, uneven)):
        rest = whole[rank][steps:]
        assert [(t.number, t.delivered, t.repeated) for t in mine] == [
            (t.number, t.delivered, t.repeated) for t in rest
        ]


@QUICK
@given(st.integers(0, 90), st.integers(1, 12), st.integers(1, 5), st.integers(0, 1000))
def test_batches_hold_seeds_of_one_part(
    num_seeds: int, batch_size: int, num_parts: int, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    part = torch.randint(num_parts, (num_seeds,), generator=random)
    ordered = torch.randperm(num_seeds, generator=random)
    found = order_by_part(part, batch_size, ordered)
    assert found.sort().values.tolist() == list(range(num_seeds))
    place = ordered.argsort()
    batches = found.split(batch_size)
    pure = [batch for batch in batches if part[batch].unique().numel() == 1]
    counts = torch.bincount(part, minlength=num_parts)
    assert len(pure) >= int((counts // batch_size).sum())
    for p in range(num_parts):  # each part in the order of the epoch
        seeds = torch.cat([b for b in pure if int(part[b[0]]) == p] or [found[:0]])
        assert place[seeds].diff().ge(0).all()
    full = [int(place[batch[0]]) for batch in batches if batch.numel() == batch_size]
    assert full == sorted(full)


def test_one_part_changes_nothing() -> None:
    ordered = torch.randperm(23, generator=torch.Generator().manual_seed(1))
    assert torch.equal(order_by_part(torch.zeros(23, dtype=torch.int64), 4, ordered), ordered)


def test_a_segment_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="does not say which ranks"):
        EpochSegment.from_list([2, 3])
