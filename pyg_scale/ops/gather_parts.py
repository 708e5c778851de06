"""Rows by index from a tensor that is stored in several parts (``csrc/gather_parts.cpp``)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyg_scale.ops import library

_ABSENT = torch.empty(0, dtype=torch.int64)


def gather_parts(
    x: Sequence[Sequence[Tensor]],
    part: Tensor | None,
    local: Tensor | None,
    offsets: Tensor,
    index: Tensor,
) -> list[Tensor]:
    """Select rows of attributes: row ``v`` of one is row ``local[v]`` of its ``x[part[v]]``.

    Args:
        x: For each attribute, its rows in every part, contiguous ``uint8`` ``[n, row_bytes]``.
        part: The part of every row, ``uint8`` or ``int32`` ``[num_rows]``; ``None`` if parts are
            ranges of rows.
        local: The place of every row in its part, ``int32`` or ``int64`` ``[num_rows]``; ``None``
            if ``part`` is.
        offsets: ``int64`` ``[num_parts + 1]``: the first row of each part, if parts are ranges;
            else only its length counts.
        index: ``int64`` or ``int32`` ``[n]``.

    Returns:
        For each attribute ``uint8`` ``[n, row_bytes]``, on recycled memory.

    Raises:
        IndexError: If an index is not a row, or is in no part according to the partition book.
        ValueError: If the partition book does not match ``x``.
    """
    if not x:
        return []
    if library.compiled():
        return torch.ops.pyg_scale.gather_parts(
            [rows for attribute in x for rows in attribute],
            _ABSENT if part is None else part,
            _ABSENT if local is None else local,
            offsets,
            index,
            library.num_threads(),
        )
    num_rows = sum(each.size(0) for each in x[0])
    index = index.to(torch.int64).contiguous()
    if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < num_rows:
        wrong = int(index[(index < 0) | (index >= num_rows)][0])
        raise IndexError(f"index has {wrong}, there are {num_rows} rows")
    if part is None or local is None:
        where = torch.searchsorted(offsets[1:], index, right=True)
        row = index - offsets[where]
    else:
        where, row = part[index].to(torch.int64), local[index].to(torch.int64)
    found = []
    for attribute in x:
        out = torch.empty((index.numel(), attribute[0].size(1)), dtype=torch.uint8)
        for number, rows in enumerate(attribute):
            mine = (where == number).nonzero().view(-1)
            out[mine] = rows[row[mine]]
        found.append(out)
    return found
