"""Rows of features in parts that this rank reads itself."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch_geometric.data import FeatureStore, TensorAttr

from pyg_scale.distributed.features.parts import Column, Key, PartRows, raw_rows
from pyg_scale.distributed.features.plan import checked_rows, here_of
from pyg_scale.distributed.features.split import Rows
from pyg_scale.ops import memory, row_cache
from pyg_scale.ops.gather import gather
from pyg_scale.store.reading import count_local


def read_here(
    parts: PartRows,
    store: FeatureStore | None,
    rows: Rows,
    columns: Sequence[Column],
    out: dict[Key, Tensor],
) -> None:
    """Read the local ones of some rows.

    Args:
        parts: The mapped files.
        store: A store that reads them instead, or ``None``.
        rows: Rows of one type.
        columns: The attributes to read.
        out: Tensors of all rows by attribute; missing ones are created.
    """
    if store is not None:
        _read_store(store, rows, columns, out)
        return
    count = rows.index.numel()
    places = [
        (part, position, _place(parts, rows, part, ids)) for part, position, ids in rows.local
    ]
    for column in columns:
        if len(places) == 1 and places[0][1] is None:  # all of them, of one part
            raw = gather(parts.raw(column, places[0][0]), places[0][2])
            out[column.key] = raw.view(-1).view(column.dtype).view(count, *column.row)
        else:
            target = raw_rows(_made(column, count, out))
            for part, position, place in places:
                assert position is not None, "several parts have some rows each"
                row_cache.scatter(parts.raw(column, part), position, target, take=place)
        here = count - rows.absent.numel()
        count_local(here, here * column.row_bytes)


def _made(column: Column, count: int, out: dict[Key, Tensor]) -> Tensor:
    if column.key not in out:
        out[column.key] = memory.empty([count, *column.row], column.dtype)
    return out[column.key]


def _place(parts: PartRows, rows: Rows, part: int, ids: Tensor) -> Tensor:
    return parts.place_of_edges(rows.type, part, ids) if rows.of_edges else ids  # type: ignore[arg-type]


def _read_store(
    store: FeatureStore, rows: Rows, columns: Sequence[Column], out: dict[Key, Tensor]
) -> None:
    for column in columns:
        _made(column, rows.index.numel(), out)
    for position, index in here_of(rows):
        attrs = [TensorAttr(*column.key, index=index) for column in columns]
        for column, value in zip(columns, store.multi_get_tensor(attrs), strict=True):
            values = checked_rows(value, column, index.numel(), "local")
            row_cache.scatter(raw_rows(values), position, raw_rows(out[column.key]))
            count_local(index.numel(), values.nbytes)
