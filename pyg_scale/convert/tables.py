"""A graph in several files: an edge list for each edge type, attributes of nodes and edges."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote

import numpy as np
import torch
from torch import Tensor

from pyg_scale import plugins
from pyg_scale.convert.array_file import save_array
from pyg_scale.convert.base import Description, EdgeList, Nodes, Reader, Workspace, suffix
from pyg_scale.convert.ids import IdMap, collect, in_order
from pyg_scale.convert.table import Table
from pyg_scale.convert.table_copy import copy_table
from pyg_scale.errors import UnknownPluginError
from pyg_scale.files.npy import as_tensor
from pyg_scale.graph.source import of
from pyg_scale.graph.topology import EdgeType, NodeType
from pyg_scale.store.directory.meta import Attribute


class Tables(Reader):
    """Edge lists, tables of nodes and arrays of attributes, each in a file.

    Args:
        edges: The edge list, or one for each edge type: a file, two (``"src.npy,dst.npy"``), or a
            :class:`~pyg_scale.convert.table.Table`. Its first two columns are sources and
            destinations, further ones attributes of edges.
        nodes: Attributes of nodes, by node type if there are types: ``{"x": "features.npy"}``,
            one row a node, or a table; both together as ``{"": "nodes.csv", "x": ...}``.
        edge_attributes: More attributes of edges, ``{"edge_attr": "file.npy"}``, by edge type if
            there are types.
        ids: What the ids of files with named columns (CSV, Parquet, Arrow) are. ``"map"``:
            anything; they become 0, 1, ... in the order of the node table's rows (whose first
            column is the id), or else in ascending order. ``"position"``: row numbers already, as
            in ``.npy`` files.
        **options: For the files' readers, such as ``delimiter``.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If files do not fit each other, or an option is unknown.
        TypeError: If a file holds something else.

    Example::

        Tables({("author", "writes", "paper"): "writes.npy"}, {"paper": {"x": "features.npy"}})
    """

    table_options: ClassVar[frozenset[str]] = frozenset()
    """The options that files of this kind take."""

    def __init__(
        self,
        edges: Any,
        nodes: Any = None,
        edge_attributes: Any = None,
        ids: str = "map",
        **options: Any,
    ) -> None:
        if ids not in ("map", "position"):
            raise ValueError(f"ids must be 'map' or 'position' (got {ids!r})")
        self._ids = ids
        self._options = options
        self._files = _Files.of(edges, nodes, edge_attributes, options)
        self._maps: dict[NodeType, Path] = {}
        self._check()

    @classmethod
    def open_edges(cls, source: str, options: Mapping[str, Any]) -> Table:
        """Open an edge list of this kind.

        Raises:
            ValueError: If files of this kind hold none.
        """
        raise ValueError(f"{source} is no edge list")

    @classmethod
    def open_nodes(cls, source: str, options: Mapping[str, Any]) -> Table:
        """Open attributes of nodes or edges of this kind.

        Raises:
            ValueError: If files of this kind hold none.
        """
        raise ValueError(f"{source} holds no attributes")

    def files(self) -> list[Path]:
        return [file for table in self._files.tables() for file in table.files]

    def options(self) -> Mapping[str, Any]:
        types = [[list(t or ()), str(e.path)] for t, e in self._files.edges.items()]
        return {"ids": self._ids, "types": types, **{k: repr(v) for k, v in self._options.items()}}

    # Checks ################################################################################

    def _mapped(self, table: Table) -> bool:
        return self._ids == "map" and not table.positions

    def _check(self) -> None:
        for edge_type, table in self._files.edges.items():
            if len(table.columns) < 2:
                raise ValueError(f"{table.path} must have two columns: source and destination ids")
            names = list(table.columns)
            for name in names[:2]:
                column = table.columns[name]
                if not self._mapped(table) and not column.dtype.startswith(("int", "uint")):
                    raise TypeError(
                        f"{table.path}, column {name!r} holds {column.dtype}; ids='position' "
                        "takes row numbers: pass ids='map'"
                    )
            _check_numbers(table, names[2:])
            twice = set(names[2:]) & set(self._files.edge_arrays.get(edge_type, {}))
            if twice:
                raise ValueError(f"edge attribute {twice.pop()!r}{of(edge_type)} is given twice")
        for table in self._files.node_tables.values():
            _check_numbers(table, list(table.columns)[1 if self._mapped(table) else 0 :])
        for node_type, arrays in self._files.node_arrays.items():
            has_ids = any(
                self._mapped(table) and node_type in _ends(edge_type)
                for edge_type, table in self._files.edges.items()
            )
            if arrays and has_ids and node_type not in self._files.node_tables:
                array = next(iter(arrays.values()))
                raise ValueError(
                    f"{array.path} has a row for each node by its number, but the ids of the edges "
                    "are mapped to numbers: pass ids='position' if they are row numbers, or give "
                    "a table of nodes whose rows are in the same order"
                )

    # Before the graph is described #########################################################

    def prepare(self, work: Workspace) -> None:
        rows = max(1 << 10, min(1 << 17, work.memory // 2000))
        files, maps = self._files, self._prepare_ids(work, rows)
        for number, (node_type, table) in enumerate(files.node_tables.items()):
            skip = list(table.columns)[:1] if self._mapped(table) else []
            if len(table.columns) > len(skip):
                files.node_tables[node_type] = copy_table(
                    table, f"nodes-{number}", {}, skip, work, rows
                )
        for number, (edge_type, table) in enumerate(files.edges.items()):
            ends = dict(zip(table.columns, _ends(edge_type)))
            use = {name: maps[end] for name, end in ends.items()} if self._mapped(table) else {}
            if use or not table.fast:
                files.edges[edge_type] = copy_table(table, f"table-{number}", use, [], work, rows)

    def _prepare_ids(self, work: Workspace, rows: int) -> dict[NodeType, IdMap]:
        maps = {}
        for number, node_type in enumerate(self._files.node_types()):
            columns = [
                (table, name)
                for edge_type, table in self._files.edges.items()
                for name, end in zip(table.columns, _ends(edge_type))
                if end == node_type and self._mapped(table)
            ]
            table = self._files.node_tables.get(node_type)
            listed = table is not None and self._mapped(table)
            if not columns and not listed:
                continue
            file = work.folder / f"ids-{number}.npy"

            def make(
                columns: list[tuple[Table, str]] = columns,
                table: Table | None = table,
                listed: bool = listed,
                file: Path = file,
            ) -> None:
                if listed and table is not None:
                    name = next(iter(table.columns))
                    ids = in_order(table, name, work.memory, rows)
                else:
                    ids = collect(columns, work.memory, rows)
                save_array(file, ids)

            work.once(f"ids {number}", make)
            ids = np.load(file, allow_pickle=False)
            if listed and table is not None:
                maps[node_type] = IdMap(ids, str(table.path), table.row_name)
            else:
                maps[node_type] = IdMap(ids, "the ids of the edges")
            self._maps[node_type] = file
            if len(columns) < sum(
                end == node_type for each in self._files.edges for end in _ends(each)
            ):
                raise ValueError(
                    f"nodes{of(node_type)} have ids in one file and row numbers in another: pass "
                    "ids='position', or give all with ids"
                )
        return maps

    # The graph #############################################################################

    def describe(self) -> Description:
        nodes = {
            t: Nodes(self._num_nodes(t), self._attributes(t)) for t in self._files.node_types()
        }
        edges = {}
        for edge_type, table in self._files.edges.items():
            attributes = {
                name: Attribute(column.dtype, column.row)
                for name, column in list(table.columns.items())[2:]
            }
            for name, array in self._files.edge_arrays.get(edge_type, {}).items():
                attributes[name] = _attribute(array)
            edges[edge_type] = EdgeList(table.num_rows, "int64", attributes)
        return Description(nodes, edges)

    def _num_nodes(self, node_type: NodeType) -> int | None:
        if node_type in self._maps:
            return int(np.load(self._maps[node_type], mmap_mode="r").shape[0])
        table = self._files.node_tables.get(node_type)
        arrays = self._files.node_arrays.get(node_type, {})
        sizes = [each for each in (table, *arrays.values()) if each is not None]
        return sizes[0].num_rows if sizes else None

    def _attributes(self, node_type: NodeType) -> dict[str, Attribute]:
        table = self._files.node_tables.get(node_type)
        found = {}
        if table is not None and table.positions:
            found = {n: Attribute(c.dtype, c.row) for n, c in table.columns.items()}
        for name, array in self._files.node_arrays.get(node_type, {}).items():
            if name in found:
                raise ValueError(f"attribute {name!r}{of(node_type)} is given twice")
            found[name] = _attribute(array)
        return found

    def edges(self, edge_type: EdgeType, begin: int, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
        table = self._files.edges[edge_type]
        for src, dst in table.read(list(table.columns)[:2], begin, rows):
            yield _index(src), _index(dst)

    def node_attribute(
        self, node_type: NodeType, name: str, begin: int, rows: int
    ) -> Iterator[Tensor]:
        array = self._files.node_arrays.get(node_type, {}).get(name)
        table = self._files.node_tables[node_type] if array is None else array
        yield from _column(table, name if array is None else _only(array), begin, rows)

    def edge_attribute(
        self, edge_type: EdgeType, name: str, begin: int, rows: int
    ) -> Iterator[Tensor]:
        array = self._files.edge_arrays.get(edge_type, {}).get(name)
        table = self._files.edges[edge_type] if array is None else array
        yield from _column(table, name if array is None else _only(array), begin, rows)

    def node_attribute_file(self, node_type: NodeType, name: str) -> Path | None:
        array = self._files.node_arrays.get(node_type, {}).get(name)
        return None if array is None else array.column_file(_only(array))

    def edge_name(self, edge_type: EdgeType, row: int) -> str:
        return self._files.edges[edge_type].row_name(row)

    def result_files(self) -> Mapping[str, Path]:
        return {
            f"ids/{quote(node_type or 'nodes', safe=' ')}.npy": file
            for node_type, file in self._maps.items()
        }

    def close(self) -> None:
        for table in self._files.tables():
            table.close()


def _ends(edge_type: EdgeType) -> tuple[NodeType, NodeType]:
    return (None, None) if edge_type is None else (edge_type[0], edge_type[2])


def _check_numbers(table: Table, names: list[str]) -> None:
    for name in names:
        if table.columns[name].dtype == "text":
            raise TypeError(
                f"{table.path}, column {name!r} holds text, which no tensor can: give numbers, or "
                "leave the column out"
            )


def _only(array: Table) -> str:
    return next(iter(array.columns))


def _attribute(array: Table) -> Attribute:
    column = array.columns[_only(array)]
    return Attribute(column.dtype, column.row)


def _index(values: Any) -> Tensor:
    return torch.from_numpy(values if values.dtype in (np.int32, np.int64) else values.astype("i8"))


def _column(table: Table, name: str, begin: int, rows: int) -> Iterator[Tensor]:
    dtype = table.columns[name].dtype
    for (values,) in table.read([name], begin, rows):
        yield as_tensor(values, dtype)


@dataclass
class _Files:
    """The opened files of a graph.

    Attributes:
        edges: The edge list of each type.
        node_tables: Tables of nodes.
        node_arrays: Attributes of nodes that have a file each.
        edge_arrays: Attributes of edges that have a file each.
    """

    edges: dict[EdgeType, Table] = field(default_factory=dict)
    node_tables: dict[NodeType, Table] = field(default_factory=dict)
    node_arrays: dict[NodeType, dict[str, Table]] = field(default_factory=dict)
    edge_arrays: dict[EdgeType, dict[str, Table]] = field(default_factory=dict)

    @classmethod
    def of(cls, edges: Any, nodes: Any, edge_attributes: Any, options: Mapping[str, Any]) -> _Files:
        """Open what the user named.

        Raises:
            FileNotFoundError: If a file is missing.
            ValueError: If there is no reader for a file, it does not take an option, or an edge
                type is none.
        """
        out = cls()
        used: set[str] = set()
        hetero = isinstance(edges, Mapping)
        for name, file in (edges if hetero else {None: edges}).items():
            out.edges[_edge_type(name)] = _open_table(file, True, options, used)
        typed = hetero and None not in out.edges
        for node_type, files in _by_type(nodes, typed).items():
            arrays = out.node_arrays.setdefault(node_type, {})
            for name, file in (files if isinstance(files, Mapping) else {"": files}).items():
                table = _open_table(file, False, options, used)
                if not name and not table.positions:
                    out.node_tables[node_type] = table
                else:
                    arrays[name or next(iter(table.columns))] = _single(table)
        for key, files in _by_type(edge_attributes, typed).items():
            edge_type = _edge_type(key)
            if edge_type not in out.edges:
                raise ValueError(f"edge_attributes: there is no edge type {key!r}")
            out.edge_arrays[edge_type] = {
                name: _single(_open_table(file, False, options, used))
                for name, file in files.items()
            }
        if unknown := set(options) - used:
            raise ValueError(f"no file takes the option {unknown.pop()!r}")
        return out

    def tables(self) -> Iterator[Table]:
        """All of them."""
        yield from self.edges.values()
        yield from self.node_tables.values()
        for arrays in (*self.node_arrays.values(), *self.edge_arrays.values()):
            yield from arrays.values()

    def node_types(self) -> list[NodeType]:
        """In the order in which they are named, those with attributes first."""
        ends = [
            end for each in self.edges for end in ((None,) if each is None else (each[0], each[2]))
        ]
        return list(dict.fromkeys([*self.node_arrays, *self.node_tables, *ends]))


def _open_table(file: Any, is_edges: bool, options: Mapping[str, Any], used: set[str]) -> Table:
    """Open a file with the reader of its suffix.

    Args:
        file: The file, or a table that is open.
        is_edges: Open it as an edge list, not as attributes.
        options: Of the user.
        used: Gets the options that the reader takes.

    Raises:
        FileNotFoundError: If it is missing.
        ValueError: If no reader of tables has its suffix.
    """
    if isinstance(file, Table):
        return file
    if not isinstance(file, str | os.PathLike):
        raise TypeError(f"expected a file or a Table (got {type(file).__name__})")
    text = os.fspath(file)
    first = text if Path(text).exists() else text.partition(",")[0]
    if not Path(first).is_file():
        raise FileNotFoundError(f"there is no file {first!r}")
    name = suffix(Path(first))
    try:
        reader = plugins.get("reader", name)
    except (UnknownPluginError, ValueError) as error:
        raise ValueError(f"{first!r} cannot be read: {error}") from None
    if not (isinstance(reader, type) and issubclass(reader, Tables)):
        raise ValueError(f"{first!r}: the reader {name!r} reads whole graphs, no tables")
    taken = {key: value for key, value in options.items() if key in reader.table_options}
    used.update(taken)
    return (reader.open_edges if is_edges else reader.open_nodes)(text, taken)


def _single(table: Table) -> Table:
    if len(table.columns) != 1 or not table.fast:
        raise ValueError(
            f"{table.path} must be one array, as in a .npy file: a table is given without a name "
            "of an attribute"
        )
    return table


def _edge_type(name: Any) -> EdgeType:
    if name is None:
        return None
    parts = tuple(name.split(",")) if isinstance(name, str) else tuple(name)
    if len(parts) != 3 or not all(isinstance(part, str) and part for part in parts):
        raise ValueError(f"an edge type is (source, relation, destination) (got {name!r})")
    return parts[0], parts[1], parts[2]


def _by_type(values: Any, typed: bool) -> Mapping[Any, Any]:
    if values is None:
        return {}
    return values if typed else {None: values}
