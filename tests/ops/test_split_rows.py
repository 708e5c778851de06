"""Who has which rows: every row once in its group, and what repeats is asked for once."""

from __future__ import annotations

import pytest
import torch

from pyg_scale.ops import library
from pyg_scale.ops.split_rows import split_rows
from pyg_scale.store.directory import PartitionBook

ROWS = 3000


@pytest.fixture(params=["never", "require"], autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "require" and not library.status()["loaded"]:
        pytest.skip("the kernels are not compiled")
    monkeypatch.setenv("PYG_SCALE_KERNELS", request.param)


def numbers(size: int, count: int, seed: int) -> torch.Tensor:
    return torch.randint(size, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("num_parts", [1, 3, 300])
@pytest.mark.parametrize("ranges", [False, True])
@pytest.mark.parametrize("original", [False, True])
@pytest.mark.parametrize("count", [0, 1, 700, 5000])
def test_every_row_is_in_its_group(
    num_parts: int, ranges: bool, original: bool, count: int
) -> None:
    part = numbers(num_parts, ROWS, 1)
    book = PartitionBook.from_assignment(part.sort().values if ranges else part, num_parts)
    group = numbers(4, num_parts, 2)
    distinct = torch.tensor([True, False, True, False])
    for dtype in (torch.int64, torch.int32):
        index = numbers(ROWS, count, 3).to(dtype)
        local = None if original else book.local
        shares = split_rows(
            book.part, local, book.offsets, index, group, distinct, original=original
        )
        of = group[book.part_of(index)]
        assert [share.group for share in shares] == of.unique().tolist()
        for share in shares:
            rows = (of == share.group).nonzero().view(-1)
            assert torch.equal(share.position.sort().values, rows)
            ids = share.ids if share.take is None else share.ids[share.take]
            wanted = index[share.position].long()
            assert torch.equal(ids, wanted if original else book.local_of(wanted))
            if not distinct[share.group]:
                assert share.take is None and torch.equal(share.position, rows)
            elif num_parts == 1 or original:  # else rows of several parts have equal places
                assert torch.equal(share.ids.sort().values, ids.unique())
                if share.take is not None:
                    assert torch.equal(share.ids, ids.unique())
                    assert bool((share.take.diff() >= 0).all())


def test_rows_that_ascend_are_left_as_they_are() -> None:
    index = torch.arange(0, 3000, 7)
    (share,) = split_rows(
        None,
        None,
        torch.tensor([0, 3000]),
        index,
        torch.zeros(1, dtype=torch.int64),
        torch.tensor([True]),
    )
    assert torch.equal(share.ids, index) and share.take is None
    assert torch.equal(share.position, torch.arange(index.numel()))


@pytest.mark.parametrize("size", [500, 1 << 20])  # beside which 400 ids are many, or few
@pytest.mark.parametrize("repeats", [False, True])
def test_what_repeats_is_sorted_and_the_rest_stays(size: int, repeats: bool) -> None:
    index = torch.randperm(size, generator=torch.Generator().manual_seed(0))[:400]
    if repeats:
        index = index[numbers(400, 400, 1)]
    offsets = torch.tensor([0, size])
    (share,) = split_rows(None, None, offsets, index, torch.tensor([0]), torch.tensor([True]))
    if not repeats:
        assert torch.equal(share.ids, index) and share.take is None
        assert torch.equal(share.position, torch.arange(400))
        return
    assert share.take is not None
    assert torch.equal(share.ids, index.unique())
    assert torch.equal(index[share.position], share.ids[share.take])
    assert torch.equal(share.position, index.sort(stable=True).indices)


@pytest.mark.parametrize("repeats", [False, True])
def test_narrow_ids_are_those_that_fit(repeats: bool) -> None:
    book = PartitionBook.from_assignment(numbers(3, ROWS, 1), 3)
    index = numbers(ROWS, 4000, 2) if repeats else torch.randperm(ROWS)
    rest = (
        book.part, book.local, book.offsets, index, torch.arange(3),
        torch.tensor([False, True, True]),
    )  # fmt: skip
    narrow, wide = split_rows(*rest, narrow=True), split_rows(*rest)
    for mine, expected in zip(narrow, wide, strict=True):
        assert mine.ids.dtype == torch.int32 and torch.equal(mine.ids.long(), expected.ids)
        assert torch.equal(mine.position, expected.position)
        assert (mine.take is None) == (expected.take is None)
        if mine.take is not None:
            assert repeats and torch.equal(mine.take, expected.take)
    offsets, index = torch.tensor([0, 2**40]), torch.tensor([1, 2**31])
    with pytest.raises(ValueError, match="does not fit into int32"):
        split_rows(None, None, offsets, index, torch.tensor([0]), torch.tensor([True]), narrow=True)


def test_large_ids_are_sorted() -> None:
    offsets = torch.tensor([0, 2**50])
    index = torch.tensor([2**49 + 5, 3, 2**49 + 5, 2**33, 0, 3])
    (share,) = split_rows(None, None, offsets, index, torch.tensor([0]), torch.tensor([True]))
    assert share.ids.tolist() == [0, 3, 2**33, 2**49 + 5]
    assert share.take is not None and share.take.tolist() == [0, 1, 1, 2, 3, 3]
    assert share.position.tolist() == [4, 1, 5, 3, 0, 2]


@pytest.mark.parametrize("wrong", [-1, ROWS])
def test_what_is_no_row_is_refused(wrong: int) -> None:
    book = PartitionBook.from_assignment(numbers(2, ROWS, 1), 2)
    index = torch.tensor([3, wrong, 4])
    with pytest.raises(IndexError, match=f"row {wrong} does not exist"):
        split_rows(
            book.part,
            book.local,
            book.offsets,
            index,
            torch.tensor([0, 1]),
            torch.tensor([False, False]),
        )


@pytest.mark.parametrize("ranges", [False, True])
def test_a_book_with_places_before_the_first(ranges: bool) -> None:
    """They would be asked for, or, where rows repeat, be counted outside of all memory."""
    part, local = torch.tensor([0, 1, 0], dtype=torch.uint8), torch.tensor([0, 0, -1])
    offsets = torch.tensor([1, 2, 3] if ranges else [0, 2, 3])
    group = torch.zeros(offsets.numel() - 1, dtype=torch.int64)
    book = (None, None) if ranges else (part, local)
    index = torch.tensor([2, 1, 0])
    refused = "place -|offsets must rise from 0" if ranges else "place -"
    with pytest.raises(ValueError, match=refused):
        split_rows(*book, offsets, index, group, torch.tensor([False]))
