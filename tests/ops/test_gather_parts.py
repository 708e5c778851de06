"""Rows that lie in parts are those of plain indexing, compiled or not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pyg_scale.ops import library
from pyg_scale.ops.gather_parts import gather_parts
from pyg_scale.store.directory import PartitionBook


@pytest.fixture(params=["never", "require"], autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "require" and not library.status()["loaded"]:
        pytest.skip("the kernels are not compiled")
    monkeypatch.setenv("PYG_SCALE_KERNELS", request.param)


def _split(x: Tensor, book: PartitionBook) -> list[Tensor]:
    return [x[book.nodes_of(part)].contiguous() for part in range(book.num_parts)]


@pytest.mark.parametrize("num_parts", [1, 3, 300])
@pytest.mark.parametrize("row_bytes", [0, 1, 8, 37, 2000])
@pytest.mark.parametrize("ranges", [False, True])
def test_rows_of_parts(num_parts: int, row_bytes: int, ranges: bool) -> None:
    generator = torch.Generator().manual_seed(row_bytes)
    x = torch.randint(256, (1000, row_bytes), dtype=torch.uint8, generator=generator)
    part = torch.randint(num_parts, (1000,), generator=generator)
    book = PartitionBook.from_assignment(part.sort().values if ranges else part, num_parts)
    assert (book.part is None) == (ranges or num_parts == 1)
    for dtype in (torch.int64, torch.int32):
        index = torch.randint(1000, (517,), generator=generator).to(dtype)
        for some in (index, index[:0], index[::2]):
            both = [_split(x, book), _split(x[:, :5].contiguous(), book)]
            found = gather_parts(both, book.part, book.local, book.offsets, some)
            for rows, expected in zip(found, (x, x[:, :5]), strict=True):
                assert rows.dtype == torch.uint8 and torch.equal(rows, expected[some.long()])
    assert gather_parts([], book.part, book.local, book.offsets, index) == []


def test_many_rows() -> None:
    x = torch.arange(3000).to(torch.uint8).view(1000, 3)
    book = PartitionBook.from_assignment(torch.arange(1000) % 2, 2)
    index = torch.randint(1000, (70_000,), generator=torch.Generator().manual_seed(0))
    (found,) = gather_parts([_split(x, book)], book.part, book.local, book.offsets, index)
    assert torch.equal(found, x[index])
    index[-1] = 1000
    with pytest.raises(IndexError, match="1000"):
        gather_parts([_split(x, book)], book.part, book.local, book.offsets, index)


@pytest.mark.parametrize("row_bytes", [65, 256, 400, 1601])
def test_outputs_larger_than_the_caches(row_bytes: int) -> None:
    """They are written by lines, of which several rows, blocks and threads may have a part."""
    generator = torch.Generator().manual_seed(row_bytes)
    x = torch.randint(256, (2000, row_bytes), dtype=torch.uint8, generator=generator)
    part = torch.randint(3, (2000,), generator=generator)
    book = PartitionBook.from_assignment(part, 3)
    index = torch.randint(2000, ((9 << 20) // row_bytes,), generator=generator)
    both = [_split(x, book), _split(x[:, :5].contiguous(), book)]
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            wide, narrow = gather_parts(both, book.part, book.local, book.offsets, index)
            assert torch.equal(wide, x[index]) and torch.equal(narrow, x[index][:, :5])
    finally:
        torch.set_num_threads(threads)


def test_what_is_no_row_is_refused() -> None:
    x = torch.arange(40, dtype=torch.uint8).view(10, 4)
    book = PartitionBook.from_assignment(torch.tensor([0, 1] * 5), 2)
    for wrong in (-1, 10):
        index = torch.tensor([3, wrong, 4])
        with pytest.raises(IndexError, match=str(wrong)):
            gather_parts([_split(x, book)], book.part, book.local, book.offsets, index)
