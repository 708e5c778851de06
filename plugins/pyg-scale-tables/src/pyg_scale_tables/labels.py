"""The label tables of tasks: seeds, their times and targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyg_scale.convert.array_file import save_array
from pyg_scale.convert.base import Workspace
from pyg_scale.convert.ids import check_memory
from pyg_scale.convert.table import Array
from pyg_scale.store.directory.paths import quoted
from pyg_scale.store.directory.tasks import SEED_TABLES
from pyg_scale.store.directory.values import tensor_in
from pyg_scale_tables.columns import nanoseconds
from pyg_scale_tables.keys import KeyIndex, RowName, plain_keys, shown
from pyg_scale_tables.manifest import TableSpec, TaskSpec
from pyg_scale_tables.records import ParquetRecords

_ROWS = 1 << 16
_ROW_NUMBER = "primary_key"  # RelBench's name for the rows of a table without one
_INTEGERS = "multiclass_classification"
_SEVERAL = "multilabel_classification"

Indexes = Callable[[str], KeyIndex]
"""The primary keys of a table."""


class LabelTables:
    """Reads the label tables of tasks.

    Args:
        work: Where files go.
        drop_missing: Whether a seed that does not exist is left out, or an error.
    """

    def __init__(self, work: Workspace, drop_missing: bool) -> None:
        self._work, self._drop_missing = work, drop_missing

    def read(
        self,
        task: TaskSpec,
        tables: Mapping[str, TableSpec],
        indexes: Indexes,
        prefix: str,
    ) -> dict[str, Any]:
        """Read one task.

        Args:
            task: The task.
            tables: The tables of the database.
            indexes: Gives the primary keys of a table.
            prefix: What the names of files begin with.

        Returns:
            ``seeds``, what :data:`~pyg_scale.store.directory.tasks.SEED_TABLES` says of the task,
            and ``files`` of the workspace, by their path in the graph directory.

        Raises:
            ValueError: If a column is missing, or a value is wrong; names the task, the file, the
                column and the row.
            TypeError: If a column holds something else.
        """
        files: dict[str, str] = {}
        splits = {}
        for split, path in task.files.items():
            found = _Split(self, task, path, tables[task.entity_table]).read(indexes)
            splits[split] = {
                name: self._saved(task, f"{split}-{name}", value, prefix, files)
                for name, value in found.items()
            }
        seeds = {
            "node_type": task.entity_table,
            "task_type": task.task_type,
            "destination_type": task.destination_table,
            "hidden": [list(pair) for pair in task.hidden],
            "splits": splits,
        }
        return {"seeds": seeds, "files": files}

    def _saved(
        self, task: TaskSpec, name: str, value: Array | None, prefix: str, files: dict[str, str]
    ) -> Any:
        if value is None:
            return None
        file = self._work.folder / f"{prefix}-{name}.npy"
        save_array(file, value)
        path = f"graph/{SEED_TABLES}/{quoted(task.name)}-{name}.npy"
        files[path] = file.name
        return tensor_in(path, str(value.dtype), value.shape)

    def rows(self, index: KeyIndex, keys: Array, name: Callable[[int], str], table: str) -> Array:
        """The row of each key, ``int64`` ``[n]``; -1 for one that is to be left out.

        Raises:
            ValueError: If there is no such row; names the seed.
            TypeError: If one is text and the other a number.
        """
        if len(keys) and len(index.keys) and (keys.dtype.kind == "S") != (index.kind == "text"):
            raise TypeError(f"{name(0)} and the primary key of {table!r} are not of one kind")
        found = index.rows(keys)
        if (found < 0).any() and not self._drop_missing:
            place = int((found < 0).argmax())
            raise ValueError(
                f"{name(place)} is {shown(keys[place])}, which no row of table {table!r} has as "
                "its primary key: correct it, or pass on_missing='drop' to leave out such seeds"
            )
        return found

    def check(self, size: int, path: Path) -> None:
        """Refuse a label table that does not fit into memory."""
        check_memory(4 * size, self._work.memory, path)


class _Split:
    """The label table of one split.

    Args:
        labels: Looks up rows.
        task: The task.
        path: The file.
        entity: The table of the entities.
    """

    def __init__(self, labels: LabelTables, task: TaskSpec, path: Path, entity: TableSpec) -> None:
        self._labels, self._task, self._path = labels, task, path
        try:
            self._records = ParquetRecords(path)
        except ValueError as error:
            raise ValueError(f"task {task.name!r}: {error}") from None
        self._entity_col = task.entity_col or entity.pkey or _ROW_NUMBER
        there = self._records.schema.names
        needed = [self._entity_col, task.time_col]
        for column in needed:
            if column is not None and column not in there:
                raise ValueError(
                    f"task {task.name!r}: {path} has no column {column!r}, only {', '.join(there)}"
                )
        self._target = task.target_col if task.target_col in there else None
        self._destination = task.destination_col if task.destination_col in there else None

    def _name(self, column: str) -> RowName:
        return lambda row: f"task {self._task.name!r}, column {column!r}, row {row} of {self._path}"

    def read(self, indexes: Indexes) -> dict[str, Array | None]:
        """Its arrays: ``ids``, ``time``, ``target``, and of pairs ``destinations``, ``pairs``."""
        task, ids, times, targets = self._task, list[Array](), list[Array](), list[Array]()
        destinations, pairs = list[Array](), list[Array]()
        index = indexes(task.entity_table)
        other = None if task.destination_table is None else indexes(task.destination_table)
        columns = [self._entity_col, task.time_col, self._target, self._destination]
        names = [name for name in dict.fromkeys(columns) if name is not None]
        begin = kept = size = 0
        for _, batch in self._records.batches(names, _ROWS):
            found = self._entities(index, batch, begin)
            stays = found >= 0
            ids.append(found[stays])
            if task.time_col is not None:
                name = self._name(task.time_col)
                times.append(nanoseconds(batch.column(task.time_col), begin, None, name)[stays])
            if self._target is not None:
                targets.append(self._targets(batch.column(self._target), begin)[stays])
                size += targets[-1].nbytes
            if other is not None and self._destination is not None:
                row, destination = self._pairs(other, batch.column(self._destination), begin)
                there = stays[row] & (destination >= 0)
                pairs.append((np.cumsum(stays) - 1)[row[there]] + kept)
                destinations.append(destination[there])
                size += 16 * int(there.sum())
            begin += batch.num_rows
            kept += int(stays.sum())
            self._labels.check(16 * kept + size, self._path)
        self._records.close()
        links = task.destination_table is not None
        return {
            "ids": _together(ids, "int64"),
            "time": None if task.time_col is None else _together(times, "int64"),
            "target": None if self._target is None else _together(targets, "float32"),
            "destinations": _together(destinations, "int64") if links else None,
            "pairs": _together(pairs, "int64") if links else None,
        }

    def _entities(self, index: KeyIndex, batch: Any, begin: int) -> Array:
        name = self._name(self._entity_col)
        keys, has = plain_keys(batch.column(self._entity_col), begin, name)
        if has is not None and not has.all():
            raise ValueError(f"{name(begin + int((~has).argmax()))} is missing")
        return self._labels.rows(
            index, keys, lambda place: name(begin + place), self._task.entity_table
        )

    def _targets(self, values: Any, begin: int) -> Array:
        task, name = self._task, self._name(str(self._target))
        if values.null_count:
            row = int(np.asarray(values.is_null()).argmax())
            raise ValueError(f"{name(begin + row)} is missing: leave out rows without a target")
        try:
            if task.task_type == _SEVERAL:
                lengths = pc.list_value_length(values).to_numpy(zero_copy_only=False)
                if len(lengths) and (lengths != lengths[0]).any():
                    row = int((lengths != lengths[0]).argmax())
                    raise ValueError(
                        f"{name(begin + row)} has {lengths[row]} labels, expected {lengths[0]}"
                    )
                flat = values.flatten().to_numpy(zero_copy_only=False)
                return flat.astype(np.float32).reshape(len(values), -1)
            if task.task_type == _INTEGERS:
                return np.asarray(pc.cast(values, pa.int64()))
            return np.asarray(pc.cast(values, pa.float64())).astype(np.float32)
        except (pa.ArrowException, AttributeError) as error:
            raise TypeError(
                f"{name(begin)} holds {values.type}, which is no target of "
                f"{task.task_type}: {error}"
            ) from None

    def _pairs(self, index: KeyIndex, lists: Any, begin: int) -> tuple[Array, Array]:
        """The row in the batch of each pair, and the row of its destination."""
        name = self._name(str(self._destination))
        if not hasattr(lists, "value_lengths"):
            raise TypeError(f"{name(begin)} holds {lists.type}, expected lists of keys")
        lengths = np.asarray(pc.fill_null(lists.value_lengths(), 0))
        row = np.repeat(np.arange(len(lists)), lengths)
        keys, has = plain_keys(lists.flatten(), 0, partial(self._pair_name, row, begin))
        if has is not None and not has.all():
            raise ValueError(f"{self._pair_name(row, begin, int((~has).argmax()))} is missing")
        assert self._task.destination_table is not None
        found = self._labels.rows(
            index, keys, partial(self._pair_name, row, begin), self._task.destination_table
        )
        return row, found

    def _pair_name(self, row: Array, begin: int, place: int) -> str:
        return self._name(str(self._destination))(begin + int(row[place]))


def _together(arrays: list[Array], dtype: str) -> Array:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype)
