"""What lies on a device: as much as the budget allows, and never more."""

from __future__ import annotations

import itertools

import pytest
import torch

from pyg_scale.store.device.placement import GRAIN, DeviceShare, allotted, place
from pyg_scale.store.rows import TensorRows

X, Y, BIG = ("paper", "x"), ("paper", "y"), ("author", "x")
EDGES = (("paper", "cites", "paper"), "edge_attr")
TENSORS = {
    X: TensorRows(10_000, (16,), torch.float32),
    Y: TensorRows(10_000, (), torch.int64),
    BIG: TensorRows(3_000, (128,), torch.float32),
    EDGES: TensorRows(40_000, (2,), torch.float32),
}
SIZES = {key: rows.num_rows * rows.row_bytes for key, rows in TENSORS.items()}
LISTED = {X: 10_000, Y: 10_000, BIG: 3_000}


def test_all_that_fits_is_there() -> None:
    total = sum(allotted(size) for size in SIZES.values())
    for budget in (total, 10 * total):
        found = place(TENSORS, budget, {})
        assert found == {
            key: DeviceShare(rows.num_rows, True, allotted(SIZES[key]))
            for key, rows in TENSORS.items()
        }
    assert not all(each.whole for each in place(TENSORS, total - 1, LISTED).values())


def test_memory_is_given_out_in_pieces() -> None:
    assert [allotted(size) for size in (0, 1, 512, 513, 10_240)] == [0, 512, 512, 1024, 10_240]
    tensors = {X: TensorRows(100, (1,), torch.float32)}
    assert place(tensors, 511, {X: 100})[X] == DeviceShare(0, False, 0)
    assert place(tensors, 512, {})[X] == DeviceShare(100, True, 512)
    assert place({X: TensorRows(1000, (1,), torch.float32)}, 1535, {X: 1000})[X] == DeviceShare(
        256, False, 1024
    )


def test_nothing_fits_into_nothing() -> None:
    found = place(TENSORS, 0, LISTED)
    assert set(found.values()) == {DeviceShare(0, False, 0)}
    assert place({}, 100, {}) == {}
    assert place({X: TensorRows(0, (4,), torch.float32)}, 0, {})[X] == DeviceShare(0, True, 0)
    assert place({X: TensorRows(5, (0,), torch.float32)}, 0, {})[X] == DeviceShare(5, True, 0)


@pytest.mark.parametrize("there", [frozenset(), frozenset({X, BIG})], ids=["host", "device"])
def test_the_budget_is_kept(there: frozenset) -> None:
    for budget in [*range(0, 20_000, 777), *range(0, 3_000_000, 90_001)]:
        found = place(TENSORS, budget, LISTED, there)
        taken = 0
        for key, each in found.items():
            rows = TENSORS[key]
            table = 4 * rows.num_rows if key in there and 0 < each.rows < rows.num_rows else 0
            need = allotted(each.rows * rows.row_bytes) + allotted(table)
            assert each.num_bytes == need
            assert each.whole == (each.rows == rows.num_rows)
            taken += need
        assert taken <= budget
        if not all(each.whole for key, each in found.items() if key != EDGES):
            assert found[EDGES].rows == 0, "edges get what nodes leave"


def test_short_rows_come_first_and_the_last_gets_all_that_is_left() -> None:
    budget = 800_000
    found = place(TENSORS, budget, LISTED)
    assert found[Y].whole
    assert found[X].rows == (budget - found[Y].num_bytes) // 2 // GRAIN * GRAIN // 64
    left = budget - found[Y].num_bytes - found[X].num_bytes
    assert found[BIG].rows == left // GRAIN * GRAIN // 512


def test_more_budget_never_means_fewer_rows_of_a_single_tensor() -> None:
    for there in (frozenset(), frozenset({X})):
        counts = [
            place({X: TENSORS[X]}, budget, LISTED, there)[X].rows
            for budget in range(0, 700_000, 1_000)
        ]
        assert all(a <= b for a, b in itertools.pairwise(counts))
        assert counts[0] == 0 and counts[-1] == 10_000


def test_rows_that_nobody_listed_are_not_there_in_part() -> None:
    found = place(TENSORS, 500_000, {})
    assert found[Y].whole and found[X].rows == 0 and found[BIG].rows == 0
    assert place(TENSORS, 500_000, {X: 7})[X].rows == 7


def test_a_table_that_does_not_pay_is_not_made() -> None:
    tensors = {X: TensorRows(1_000_000, (1,), torch.int8)}
    assert place(tensors, 900_000, {X: 1_000_000}, frozenset({X}))[X] == DeviceShare(0, False, 0)
    assert place(tensors, 900_000, {X: 1_000_000})[X].rows > 0
