"""A database as a graph: a node type per table, two edge types per foreign key."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_scale.convert.array_file import ArrayReader, save_array
from pyg_scale.convert.base import Description, EdgeList, Nodes, Reader, Workspace
from pyg_scale.convert.ids import check_memory
from pyg_scale.files.npy import as_tensor
from pyg_scale.graph.topology import EdgeType, NodeType
from pyg_scale.store.directory.frame import COLUMNS
from pyg_scale.store.directory.meta import Attribute
from pyg_scale.store.directory.paths import quoted
from pyg_scale.store.directory.tasks import SEED_TABLES
from pyg_scale_tables.columns import TextEmbedder
from pyg_scale_tables.keys import KeyIndex, read_keys
from pyg_scale_tables.labels import LabelTables
from pyg_scale_tables.manifest import Manifest, TableSpec
from pyg_scale_tables.queries import check_query, copy_query
from pyg_scale_tables.records import TableRecords, copy_text, is_text, open_files
from pyg_scale_tables.table_pass import TIME, ForeignKey, TableFiles, TablePass

_KEY_ROWS = 1 << 16  # rows of a batch of keys


class RelationalReader(Reader):
    """Reads a database that a manifest describes, in RelBench's layout or a wider one.

    A table becomes a node type whose nodes are its rows, in their order. A foreign key ``col`` of
    table ``child`` to table ``parent`` becomes the edge types ``(child, "f2p_col", parent)`` and
    ``(parent, "rev_f2p_col", child)``, as in :func:`torch_geometric.contrib.utils.from_relbench`;
    edge ``i`` of both is that of the ``i``-th row that has such a key. ``time`` holds UTC
    nanoseconds. Other columns are ``tf``, a ``TensorFrame``.

    Args:
        source: ``manifest.yaml``, or the folder that has it.
        on_missing: ``"fail"`` or ``"drop"``: what to do about a foreign key that no row has, and
            about a seed of a task that does not exist. A key that is NULL never is an edge.
        text_embedder: Embeds texts: ``[n, length]`` numbers of a list of ``n`` texts, for columns
            of stype ``text_embedded``.

    Raises:
        FileNotFoundError: If the manifest or a file is missing.
        ValueError: If the manifest is wrong; names the entry.

    Example::

        convert(RelationalReader("rel-f1/manifest.yaml"), "graph")
    """

    def __init__(
        self,
        source: str | os.PathLike[str],
        *,
        on_missing: str = "fail",
        text_embedder: TextEmbedder | None = None,
    ) -> None:
        if on_missing not in ("fail", "drop"):
            raise ValueError(f"on_missing must be 'fail' or 'drop' (got {on_missing!r})")
        if text_embedder is not None and not callable(text_embedder):
            raise TypeError(f"text_embedder must be a function (got {text_embedder!r})")
        self.manifest = Manifest.read(source)
        self._drop_missing, self._embedder = on_missing == "drop", text_embedder
        self._records: dict[str, TableRecords] = {}
        self._indexes: dict[str, KeyIndex] = {}
        self._tables: dict[str, TableFiles] = {}
        self._keys: dict[str, Path] = {}
        self._ids: dict[str, Path] = {}
        self._seeds: dict[str, Any] = {}
        self._files: dict[str, Path] = {}
        self._columns: dict[EdgeType, tuple[str, str, bool]] = {}
        for spec in self.manifest.tables.values():
            for column, parent in spec.fkeys.items():
                self._columns[spec.name, f"f2p_{column}", parent] = (spec.name, column, False)
                self._columns[parent, f"rev_f2p_{column}", spec.name] = (spec.name, column, True)
            self._open(spec)

    def _open(self, spec: TableSpec) -> None:
        """Open what can be read at once, which checks it."""
        if spec.query is not None:
            check_query(spec, self.manifest)
        elif not any(map(is_text, spec.files)):
            self._records[spec.name] = open_files(spec, spec.files)

    def files(self) -> list[Path]:
        return self.manifest.files

    def options(self) -> Mapping[str, Any]:
        embedder = self._embedder
        name = None if embedder is None else getattr(embedder, "__qualname__", repr(embedder))
        return {
            "tables": [spec.identity() for spec in self.manifest.tables.values()],
            "tasks": list(self.manifest.tasks),
            "database": self.manifest.database,
            "on_missing": "drop" if self._drop_missing else "fail",
            "text_embedder": name,
        }

    # Before the graph is described #########################################################

    def prepare(self, work: Workspace) -> None:
        specs = self.manifest.tables
        for number, spec in enumerate(specs.values()):
            if spec.name not in self._records:
                self._records[spec.name] = self._copied(spec, f"table-{number}", work)
        for number, spec in enumerate(specs.values()):
            if spec.pkey is not None:
                file = work.folder / f"keys-{number}.npy"
                step = partial(self._read_keys, spec, file, work)
                if not work.once(f"keys {spec.name}", step):
                    self._ids[spec.name] = file
                self._keys[spec.name] = file
        for number, spec in enumerate(specs.values()):
            prefix = f"table-{number}"
            step = partial(self._read_table, spec, prefix, work)
            found = work.once(f"table {spec.name}", step)
            self._tables[spec.name] = TableFiles(work.folder, prefix, found)
            self._report(spec)
        labels = LabelTables(work, self._drop_missing)
        for number, task in enumerate(self.manifest.tasks.values()):
            step = partial(
                labels.read,
                task,
                self.manifest.tables,
                lambda table: self._index(table, work),
                f"task-{number}",
            )
            found = work.once(f"task {task.name}", step)
            self._seeds[task.name] = found["seeds"]
            self._files |= {path: work.folder / name for path, name in found["files"].items()}
        self._indexes.clear()

    def _copied(self, spec: TableSpec, prefix: str, work: Workspace) -> TableRecords:
        """The rows of text files or a query, copied to files that are read again quickly."""
        files, originals = [], {}
        if spec.query is not None:
            files.append(work.folder / f"{prefix}.arrow")
            step = partial(copy_query, spec, self.manifest, files[0], work.memory // 2)
            work.once(f"copy {spec.name}", step)
            originals[files[0]] = "the result of its query"
        for number, path in enumerate(spec.files):
            if is_text(path):
                files.append(work.folder / f"{prefix}-{number}.arrow")
                originals[files[-1]] = str(path)
                step = partial(copy_text, spec, path, files[-1])
                work.once(f"copy {spec.name} {number}", step)
            else:
                files.append(path)
        return open_files(spec, files, originals)

    def _read_keys(self, spec: TableSpec, file: Path, work: Workspace) -> bool:
        """Write the primary keys of a table; returns True if they are the numbers of its rows."""
        assert spec.pkey is not None
        records = self._records[spec.name]
        name = partial(records.row_name, column=spec.pkey)
        keys = read_keys(
            records.batches([spec.pkey], _KEY_ROWS),
            name,
            lambda size: check_memory(4 * size, work.memory, self.manifest.path),
        )
        index = KeyIndex(keys, name, records.place)  # refuses keys that are there twice
        save_array(file, keys)
        return index.is_positions

    def _index(self, table: str, work: Workspace) -> KeyIndex:
        """The primary keys of a table, of which as many are kept as fit into half of the memory."""
        if table not in self._indexes:
            spec, records = self.manifest.tables[table], self._records[table]
            if spec.pkey is None:
                keys = np.arange(records.num_rows)
            else:
                keys = np.load(self._keys[table], allow_pickle=False)
            check_memory(4 * keys.nbytes, work.memory, self.manifest.path)
            while self._indexes and 8 * keys.nbytes + self._index_bytes() > work.memory:
                del self._indexes[next(iter(self._indexes))]
            name = partial(records.row_name, column=spec.pkey)
            self._indexes[table] = KeyIndex(keys, name, records.place)
        return self._indexes[table]

    def _index_bytes(self) -> int:
        return 8 * sum(index.keys.nbytes for index in self._indexes.values())

    def _read_table(self, spec: TableSpec, prefix: str, work: Workspace) -> dict[str, Any]:
        foreign = {
            column: ForeignKey(parent, self._index(parent, work))
            for column, parent in spec.fkeys.items()
        }
        return TablePass(
            self._records[spec.name],
            prefix,
            work,
            foreign,
            drop_missing=self._drop_missing,
            embedder=self._embedder,
        ).run()

    def _report(self, spec: TableSpec) -> None:
        """Say what of a table is not in the graph."""
        result = self._tables[spec.name].result
        for column, counts in result.edges.items():
            if counts["missing"]:
                warnings.warn(
                    f"table {spec.name!r}, column {column!r}: {counts['missing']:,} keys are of no "
                    f"row of {spec.fkeys[column]!r}, and no edges",
                    RuntimeWarning,
                    stacklevel=2,
                )
        if result.left_out:
            warnings.warn(
                f"table {spec.name!r}: {', '.join(map(repr, result.left_out))} left out, as they "
                "are neither numbers, times nor categories: give them stypes in the manifest, or "
                "list them under drop",
                RuntimeWarning,
                stacklevel=2,
            )

    # The graph #############################################################################

    def describe(self) -> Description:
        nodes: dict[NodeType, Nodes] = {}
        for name, table in self._tables.items():
            result = table.result
            attributes = {a: Attribute(d, tuple(row)) for a, (d, row) in result.arrays.items()}
            nodes[name] = Nodes(result.num_rows, attributes, other={COLUMNS: result.other})
        edges: dict[EdgeType, EdgeList] = {}
        for edge_type, (table, column, _) in self._columns.items():
            edges[edge_type] = EdgeList(self._tables[table].result.edges[column]["edges"])
        timed = any(spec.time_col is not None for spec in self.manifest.tables.values())
        graph = {SEED_TABLES: {"$dict": self._seeds}} if self._seeds else {}
        return Description(nodes, edges, graph, TIME if timed else None)

    def edges(self, edge_type: EdgeType, begin: int, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
        table, column, reverse = self._columns[edge_type]
        files = self._tables[table]
        size, children = files.result.edges[column]["edges"], files.children(column)
        parents = ArrayReader(files.parents(column))
        own = None if children is None else ArrayReader(children)
        try:
            for first in range(begin, size, rows):
                last = min(size, first + rows)
                parent = torch.from_numpy(parents.rows(first, last))
                if own is None:
                    child = torch.arange(first, last, dtype=_narrow(size))
                else:
                    child = torch.from_numpy(own.rows(first, last))
                yield (parent, child) if reverse else (child, parent)
        finally:
            parents.close()
            if own is not None:
                own.close()

    def node_attribute(
        self, node_type: NodeType, name: str, begin: int, rows: int
    ) -> Iterator[Tensor]:
        assert node_type is not None
        files = self._tables[node_type]
        reader = ArrayReader(files.file(name))
        try:
            for first in range(begin, reader.shape[0], rows):
                values = reader.rows(first, min(reader.shape[0], first + rows))
                yield as_tensor(values, files.result.arrays[name][0])
        finally:
            reader.close()

    def node_attribute_file(self, node_type: NodeType, name: str) -> Path | None:
        assert node_type is not None
        return self._tables[node_type].file(name)

    def edge_name(self, edge_type: EdgeType, row: int) -> str:
        table, column, _ = self._columns[edge_type]
        return f"edge {row} of table {table!r}, column {column!r}"

    def result_files(self) -> Mapping[str, Path]:
        found = {f"ids/{quoted(table)}.npy": file for table, file in self._ids.items()}
        for table in self._tables.values():
            found |= table.details()
        return found | self._files

    def close(self) -> None:
        for records in self._records.values():
            records.close()


def _narrow(size: int) -> torch.dtype:
    return torch.int32 if size < 2**31 else torch.int64
