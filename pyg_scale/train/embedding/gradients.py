"""Gradients of rows, on their way to the ranks that own the rows.

A step exchanges one message between each two ranks: a header, the ids of the touched rows that the
receiver owns, and their gradients. The owner adds up those of all ranks in the order of the ranks,
so the sums are the same bits in every run with as many ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from pyg_scale.comm import Communicator
from pyg_scale.errors import CommError
from pyg_scale.graph.topology import NodeType
from pyg_scale.ops.raw_bytes import raw_bytes
from pyg_scale.parallel.base import StepMean, differentiating, means_under_way
from pyg_scale.train.embedding.table import Table

_IDLE, _DIVIDED, _COUNTED, _UNCOUNTED, _MIXED = range(5)
"""The gradients of a rank: none; divided by all seeds; of a sum of seeds; of a mean of its own."""

_INT64 = torch.int64


class _Pending(NamedTuple):
    ids: Tensor
    gradient: Tensor


class Gradients:
    """Gradients that were computed since the last step.

    Args:
        tables: By node type.
        comm: The ranks.
    """

    def __init__(self, tables: Mapping[NodeType, Table], comm: Communicator) -> None:
        self._tables, self._comm = tables, comm
        self.clear()

    def clear(self) -> None:
        """Forget them."""
        self._pending: dict[NodeType, list[_Pending]] = {kind: [] for kind in self._tables}
        self._means: list[StepMean | None] = []
        self._seeds = 0

    def add(self, kind: NodeType, ids: Tensor, gradient: Tensor) -> None:
        """Add the gradient of some rows.

        Args:
            kind: The node type.
            ids: Original ids ``int64`` ``[n]``, on the CPU.
            gradient: ``[n, channels]``.
        """
        self._pending[kind].append(_Pending(ids, gradient.detach().cpu()))
        means = means_under_way()
        mean = means[-1] if means else None
        if not any(mean is each for each in self._means):
            self._means.append(mean)

    @contextmanager
    def counting(self, num_seeds: int) -> Iterator[None]:
        """While the gradient of a sum of seeds is computed without a wrapped model."""
        with differentiating(self):
            yield
        self._seeds += num_seeds
        if not any(self is each for each in self._means):
            self._means.append(self)  # seeds count, too, if they touched no row

    @property
    def all_seeds(self) -> float:
        """See :class:`~pyg_scale.parallel.base.StepMean`: the owners of rows divide."""
        return 1.0

    def exchange(self) -> None:
        """Give each row's gradient to its owner, as ``grad`` of the weights. All ranks call it.

        A table that no rank has looked at keeps no gradient, and its optimizer makes no step.

        Raises:
            RuntimeError: If ranks did not all count seeds in the same way. The same on all ranks.
            CommError: If a rank is gone, late or sent something else; names it.
        """
        try:
            messages = self._messages(self._mode())
        finally:
            self.clear()
        found = [
            _Message.read(raw, rank, self._tables)
            for rank, raw in enumerate(self._comm.all_to_all(messages))
        ]
        _check_modes([each.mode for each in found])
        seeds = sum(each.seeds for each in found if each.mode == _COUNTED)
        divisor = float(max(1, seeds))
        for number, table in enumerate(self._tables.values()):
            table.weight.grad = None
            if any(each.touched[number] for each in found):
                ids = torch.cat([each.ids[number] for each in found])
                values = torch.cat([each.values[number] for each in found])
                if divisor != 1:
                    values = values / divisor
                table.weight.grad = _sparse(table, ids, values)

    def _mode(self) -> int:
        if len(self._means) != 1:
            return _MIXED if self._means else _IDLE
        (mean,) = self._means
        return _COUNTED if mean is self else _UNCOUNTED if mean is None else _DIVIDED

    def _messages(self, mode: int) -> list[Tensor]:
        divisor = 1.0
        if mode == _DIVIDED:
            (mean,) = self._means
            assert mean is not None
            divisor = mean.all_seeds
        size = self._comm.world_size
        heads = [[mode, self._seeds] for _ in range(size)]
        ids: list[list[Tensor]] = [[] for _ in range(size)]
        values: list[list[Tensor]] = [[] for _ in range(size)]
        for kind, table in self._tables.items():
            pending = self._pending[kind]
            rows, sums = _added_up(
                torch.cat([torch.empty(0, dtype=_INT64), *[each.ids for each in pending]]),
                torch.cat([table.weight.detach()[:0], *[each.gradient for each in pending]]),
            )
            if divisor != 1:
                sums = sums / divisor
            for rank, position in enumerate(table.layout.by_owner(rows)):
                heads[rank] += [int(bool(pending)), position.numel()]
                ids[rank].append(rows[position])
                values[rank].append(sums[position])
        return [
            torch.cat([raw_bytes(torch.tensor(head)), *map(raw_bytes, [*mine, *those])])
            for head, mine, those in zip(heads, ids, values, strict=True)
        ]


class _Message(NamedTuple):
    """The message of a rank: for each table whether it was looked at, and rows of this rank."""

    mode: int
    seeds: int
    touched: list[bool]
    ids: list[Tensor]
    values: list[Tensor]

    @classmethod
    def read(cls, raw: Tensor, rank: int, tables: Mapping[NodeType, Table]) -> _Message:
        """Read the message of a rank.

        Raises:
            CommError: If it is not such a message; names the rank.
        """
        wrong = CommError(f"rank {rank} sent something else than gradients of {len(tables)} tables")
        head_bytes = 8 * (2 + 2 * len(tables))
        if raw.dtype != torch.uint8 or raw.dim() != 1 or raw.numel() < head_bytes:
            raise wrong
        mode, seeds, *rest = raw[:head_bytes].view(_INT64).tolist()
        counts = rest[1::2]
        sizes = [8 * count for count in counts]
        sizes += [n * t.column.row_bytes for n, t in zip(counts, tables.values(), strict=True)]
        if not (_IDLE <= mode <= _MIXED and seeds >= 0 and min(counts, default=0) >= 0):
            raise wrong
        if math.fsum(sizes) != raw.numel() - head_bytes:
            raise wrong
        pieces = raw[head_bytes:].split(sizes)
        ids = [piece.view(_INT64) for piece in pieces[: len(tables)]]
        values = [
            piece.view(table.column.dtype).view(-1, *table.column.row)
            for piece, table in zip(pieces[len(tables) :], tables.values(), strict=True)
        ]
        try:
            for some, table in zip(ids, tables.values(), strict=True):
                table.layout.places(some)
        except IndexError as error:
            raise CommError(f"rank {rank} sent gradients of other rows: {error}") from None
        return cls(mode, seeds, [bool(each) for each in rest[::2]], ids, values)


def _check_modes(modes: list[int]) -> None:
    if _MIXED in modes:
        raise RuntimeError(
            f"rank {modes.index(_MIXED)}: the gradients of a step come from backward() of several "
            "models, or of none and one: call one of them for all losses of a step"
        )
    if _UNCOUNTED in modes and len(modes) > 1:
        raise RuntimeError(
            f"rank {modes.index(_UNCOUNTED)} called loss.backward(), which does not say how many "
            "seeds its mean is over: call backward(loss, num_seeds) of the wrapped model, or of "
            "the embedding if there is no other model"
        )
    if _DIVIDED in modes and _COUNTED in modes:
        raise RuntimeError(
            "some ranks called backward() of the wrapped model in this step, and others that of "
            "the embedding: all must do the same"
        )


def _added_up(ids: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Each row once, ascending, with the sum of its values in their order."""
    rows, inverse = torch.unique(ids, return_inverse=True)
    if rows.numel() == ids.numel():
        return rows, values[inverse.argsort()]
    sums = values.new_zeros(rows.numel(), values.size(1))
    return rows, sums.index_add_(0, inverse, values)


def _sparse(table: Table, ids: Tensor, values: Tensor) -> Tensor:
    rows, sums = _added_up(table.layout.places(ids), values)
    shape = list(table.weight.shape)
    return torch.sparse_coo_tensor(
        rows[None], sums, shape, check_invariants=False, is_coalesced=True
    )
