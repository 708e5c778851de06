"""Division of requested rows among the groups of parts that have them (``csrc/split_rows.cpp``)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pyg_scale.ops import library

_ABSENT = torch.empty(0, dtype=torch.int64)


class Share(NamedTuple):
    """The rows of one group.

    Attributes:
        group: The number of the group.
        ids: Its rows, ``int64`` or ``int32`` ``[k]``, one for each position. If distinct rows were
            requested and some are repeated, each row once, ascending.
        position: Their positions in ``index``, ``int64`` ``[m]``; ascending, unless ``ids`` is.
        take: Index into ``ids`` for each position, ascending, ``int64`` ``[m]``; ``None`` if they
            correspond one to one.
    """

    group: int
    ids: Tensor
    position: Tensor
    take: Tensor | None


def split_rows(
    part: Tensor | None,
    local: Tensor | None,
    offsets: Tensor,
    index: Tensor,
    group: Tensor,
    distinct: Tensor,
    *,
    original: bool = False,
    narrow: bool = False,
) -> list[Share]:
    """Split rows by the group of the part that has them.

    Args:
        part: The part of every row, ``uint8`` or ``int32`` ``[num_rows]``; ``None`` if parts are
            ranges of rows.
        local: The place of every row in its part, ``int32`` or ``int64`` ``[num_rows]``; ``None``
            if ``part`` is, or with ``original``.
        offsets: ``int64`` ``[num_parts + 1]``: the first row of each part, if parts are ranges;
            else only its length counts.
        index: ``int64`` or ``int32`` ``[n]``.
        group: The group of each part, ``int64`` ``[num_parts]``.
        distinct: ``bool`` ``[num_groups]``, True for groups from which each row is requested once.
        original: If True, ``ids`` are original rows, not places in parts.
        narrow: If True, ``ids`` are ``int32``.

    Returns:
        The groups that have any of the rows, in their order.

    Raises:
        IndexError: If an index is not a row.
        ValueError: If the partition book contradicts itself, or ``narrow`` ids do not fit.
    """
    if library.compiled():
        counts, different, ids, position, take = torch.ops.pyg_scale.split_rows(
            _ABSENT if part is None else part,
            _ABSENT if local is None else local,
            offsets,
            index,
            group,
            distinct,
            original,
            narrow,
        )
    else:
        counts, different, ids, position, take = _plain(
            part, local, offsets, index.to(torch.int64), group, distinct, original
        )
        if narrow:
            if ids.numel() and int(ids.max()) >= 2**31:
                raise ValueError("a place does not fit into int32")
            ids = ids.to(torch.int32)
    shares, at, begin = [], 0, 0
    for number, (count, some) in enumerate(zip(counts.tolist(), different.tolist(), strict=True)):
        if count:
            places = slice(at, at + count)
            mine = ids[begin : begin + some]
            repeats = None if some == count else take[places]
            shares.append(Share(number, mine, position[places], repeats))
        at, begin = at + count, begin + some
    return shares


def _plain(
    part: Tensor | None,
    local: Tensor | None,
    offsets: Tensor,
    index: Tensor,
    group: Tensor,
    distinct: Tensor,
    original: bool,
) -> tuple[Tensor, ...]:
    num_rows = int(offsets[-1]) if part is None else part.numel()
    if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < num_rows:
        wrong = int(index[(index < 0) | (index >= num_rows)][0])
        raise IndexError(f"row {wrong} does not exist, there are only {num_rows} rows")
    if part is None:
        where = torch.searchsorted(offsets[1:], index, right=True)
    else:
        where = part[index].to(torch.int64)
    if original:
        row = index
    else:
        row = index - offsets[where] if local is None else local[index].to(torch.int64)
        if bool((row < 0).any()):
            wrong = int((row < 0).nonzero()[0])
            raise ValueError(
                f"the partition book has row {int(index[wrong])} at place {int(row[wrong])} of "
                f"part {int(where[wrong])}"
            )
    of, found = group[where], list[tuple[Tensor, ...]]()
    for number, once in enumerate(distinct.tolist()):
        position = (of == number).nonzero().view(-1)
        ids = row[position]
        take = torch.arange(ids.numel())
        if once and ids.unique().numel() < ids.numel():
            ordered, order = ids.sort(stable=True)
            ids, take = torch.unique_consecutive(ordered, return_inverse=True)
            position = position[order]
        found.append((torch.tensor([position.numel()]), torch.tensor([ids.numel()]), ids,
                      position, take))  # fmt: skip
    return tuple(torch.cat(each) for each in zip(*found, strict=True))
