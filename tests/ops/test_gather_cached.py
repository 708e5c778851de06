"""Rows of a cache and of the rest: those that torch's own indexing gives."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
import torch

from pyg_scale.ops.gather_cached import gather_cached
from pyg_scale.ops.mapped_file import in_file
from pyg_scale.ops.mapped_rows import MappedRows, why_not_mapped
from tests.ops.gathers import DTYPES, SHAPES, rows


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32], ids=str)
def test_looked_up_by_id(
    dtype: torch.dtype, shape: tuple[int, ...], index_dtype: torch.dtype
) -> None:
    made = rows(dtype, shape)
    got = gather_cached(made.cached, made.table, made.index.to(index_dtype), made.slot_of)
    assert got.dtype == dtype
    assert torch.equal(got, made.expected)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_by_place(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    made = rows(dtype, shape)
    staged, place = made.staged()
    assert torch.equal(gather_cached(made.cached, staged, place), made.expected)


@pytest.mark.parametrize("num_slots", [0, 50])
@pytest.mark.parametrize("count", [0, 1, 9])
def test_nothing_or_everything_is_cached(num_slots: int, count: int) -> None:
    made = rows(torch.float32, (3,), num_slots=num_slots, count=count)
    assert torch.equal(
        gather_cached(made.cached, made.table, made.index, made.slot_of), made.expected
    )
    staged, place = made.staged()
    assert staged.size(0) == (0 if num_slots else count)
    assert torch.equal(gather_cached(made.cached, staged, place), made.expected)


def test_the_rest_is_not_read_where_a_row_is_cached() -> None:
    made = rows(torch.float32, (3,))
    rest = made.table.clone()
    rest[made.slot_of >= 0] = float("nan")
    assert torch.equal(gather_cached(made.cached, rest, made.index, made.slot_of), made.expected)


@pytest.mark.parametrize("columns", [33, 64])
def test_outputs_larger_than_the_caches(columns: int) -> None:
    """Rows of whole lines are written past the caches."""
    made = rows(torch.float32, (columns,), count=(9 << 20) // (4 * columns))
    looked_up = gather_cached(made.cached, made.table, made.index, made.slot_of)
    assert torch.equal(looked_up, made.expected)
    staged, place = made.staged()
    assert torch.equal(gather_cached(made.cached, staged, place), made.expected)
    place[-2] = -1 - staged.size(0)
    where = rf"index\[{place.numel() - 2}\] leads to row {staged.size(0)} of rest"
    with pytest.raises(IndexError, match=where):
        gather_cached(made.cached, staged, place)


def test_rows_of_no_bytes() -> None:
    made = rows(torch.float32, (0,))
    assert gather_cached(made.cached, made.table, made.index, made.slot_of).shape == (
        made.index.numel(),
        0,
    )
    with pytest.raises(IndexError, match=r"index\[0\] leads to row 17 of cached"):
        gather_cached(made.cached, made.table, torch.tensor([17, 0]))


def test_numbers_that_are_no_rows() -> None:
    made = rows(torch.float32, (3,))
    with pytest.raises(IndexError, match=r"index\[1\] leads to row 50 of slot_of, which has 50"):
        gather_cached(made.cached, made.table, torch.tensor([0, 50]), made.slot_of)
    with pytest.raises(IndexError, match=r"index\[0\] leads to row 17 of cached"):
        gather_cached(made.cached, made.table, torch.tensor([17, 0]))
    with pytest.raises(IndexError, match=r"index\[2\] leads to row 50 of rest"):
        gather_cached(made.cached, made.table, torch.tensor([0, -50, -51]))


def test_wrong_arguments() -> None:
    made = rows(torch.float32, (3,))
    with pytest.raises(TypeError, match="index must be a one-dimensional int64 or int32"):
        gather_cached(made.cached, made.table, torch.tensor([0.0]))
    with pytest.raises(ValueError, match="rows alike"):
        gather_cached(made.cached, made.table[:, :2], made.index)
    with pytest.raises(ValueError, match="rows alike"):
        gather_cached(made.cached, made.table.double(), made.index)
    with pytest.raises(TypeError, match="slot_of must be a one-dimensional int32"):
        gather_cached(made.cached, made.table, made.index, made.slot_of.long())
    with pytest.raises(ValueError, match="an entry for each of 50 rows"):
        gather_cached(made.cached, made.table, made.index, made.slot_of[:-1])


def test_mapped_files_are_recognised(tmp_path) -> None:
    path = tmp_path / "x.npy"
    np.save(path, np.zeros((5000, 4), dtype=np.float32))
    mapped = torch.from_numpy(np.load(path, mmap_mode="c"))
    assert in_file(mapped) and in_file(mapped[4000:])
    assert not in_file(torch.zeros(5000, 4)) and not in_file(torch.zeros(0))
    anonymous = mmap.mmap(-1, 8192, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    assert not in_file(torch.frombuffer(anonymous, dtype=torch.uint8))
    assert not in_file(mapped, tmp_path / "there is no such list")


def test_what_cannot_be_mapped_says_why(tmp_path) -> None:
    path = tmp_path / "x.npy"
    np.save(path, np.zeros((5000, 4), dtype=np.float32))
    mapped = torch.from_numpy(np.load(path, mmap_mode="c"))
    cuda, x = torch.device("cuda", 0), torch.zeros(6, 4)
    assert "can read host memory anyway" in why_not_mapped(x, torch.device("cpu"))
    assert "not a contiguous tensor" in why_not_mapped(x.t(), cuda)
    assert "in a mapped file" in why_not_mapped(mapped, cuda)
    with pytest.raises(ValueError, match="cannot be mapped for cuda:0: it is in a mapped file"):
        MappedRows(mapped, cuda)
