"""Tables of rows in two places, and the rows that a gather must find in them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
SHAPES = [(), (1,), (3,), (4,), (5,), (32,), (33,), (128,), (2, 7), (1000,)]


class Rows(NamedTuple):
    """A table, cut in two.

    Attributes:
        table: ``[num_rows, ...]``
        cached: Some of its rows.
        slot_of: Where each row is in ``cached``, -1 if it is not there.
        index: Ids, some more than once, ``int64``.
    """

    table: Tensor
    cached: Tensor
    slot_of: Tensor
    index: Tensor

    @property
    def expected(self) -> Tensor:
        return self.table[self.index]

    def staged(self) -> tuple[Tensor, Tensor]:
        """The rows that are not cached, in order of the request, and the places of all."""
        place = self.slot_of[self.index].to(torch.int64)
        missing = place < 0
        place[missing] = -1 - torch.arange(int(missing.sum()))
        return self.table[self.index[missing]], place


def rows(
    dtype: torch.dtype,
    shape: tuple[int, ...],
    num_rows: int = 50,
    num_slots: int = 17,
    count: int = 200,
    seed: int = 0,
) -> Rows:
    """Random bits of a dtype; every row is another."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        table = torch.rand(num_rows, *shape, generator=generator) < 0.5
    elif dtype.is_floating_point:
        table = torch.randn(num_rows, *shape, generator=generator).to(dtype)
    else:
        table = torch.randint(0, 200, (num_rows, *shape), generator=generator).to(dtype)
    order = torch.randperm(num_rows, generator=generator)[:num_slots]
    slot_of = torch.full((num_rows,), -1, dtype=torch.int32)
    slot_of[order] = torch.arange(num_slots, dtype=torch.int32)
    index = torch.randint(0, max(num_rows, 1), (count if num_rows else 0,), generator=generator)
    return Rows(table, table[order], slot_of, index)
