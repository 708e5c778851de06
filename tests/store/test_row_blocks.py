"""Memory for rows: nobody shares it, and it is used again."""

from __future__ import annotations

import random

import pytest
import torch

from pyg_scale.store.read_ahead import BLOCK, Held, RowBlocks


@pytest.mark.parametrize("row_bytes", [1, 400, BLOCK // 2 + 1, 3 * BLOCK])
def test_rows_belong_to_one_holder_at_a_time(row_bytes: int) -> None:
    chance, blocks = random.Random(0), RowBlocks(row_bytes, 4 * BLOCK)
    most = max(3, 2 * BLOCK // row_bytes)
    held: list[tuple[Held, int]] = []
    for turn in range(60):
        for made in blocks.take([chance.randrange(1, most) for _ in range(chance.randrange(1, 4))]):
            made.rows[made.positions()] = turn
            held.append((made, turn))
        while len(held) > 6:
            made, turn = held.pop(chance.randrange(len(held)))
            assert made.positions().numel() == made.count
            assert made.num_bytes == made.count * row_bytes
            assert bool((made.rows[made.positions()] == turn).all())
            made.give_back()


def test_the_rows_of_a_call_lie_in_the_same_memory() -> None:
    blocks = RowBlocks(64, 10 * BLOCK)
    for _ in range(5):
        one, two = blocks.take([5000, 1])
        assert one.rows is two.rows
        assert torch.cat([one.positions(), two.positions()]).unique().numel() == 5001


def test_memory_is_used_again_and_what_was_too_much_is_dropped() -> None:
    blocks = RowBlocks(BLOCK, 4 * BLOCK)
    kept = blocks.take([3])[0]
    more = blocks.take([2])[0]
    assert more.rows is not kept.rows
    expected = blocks.take([1])[0]
    assert expected.rows is kept.rows and expected.positions().tolist() == [3]
    expected.give_back()
    more.give_back()
    again = blocks.take([1])[0]
    assert again.positions().tolist() == [3] and len(blocks._segments) == 1
