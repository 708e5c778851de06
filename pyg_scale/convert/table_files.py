"""Which file holds what of a graph: the arguments of :class:`~pyg_scale.convert.tables.Tables`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyg_scale import plugins
from pyg_scale.convert.table import Table
from pyg_scale.errors import UnknownPluginError
from pyg_scale.store.base import EdgeType, NodeType


@dataclass
class Files:
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
    def of(cls, edges: Any, nodes: Any, edge_attributes: Any, options: Mapping[str, Any]) -> Files:
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
            out.edges[_edge_type(name)] = open_table(file, "open_edges", options, used)
        typed = hetero and None not in out.edges
        for node_type, files in _by_type(nodes, typed).items():
            arrays = out.node_arrays.setdefault(node_type, {})
            for name, file in (files if isinstance(files, Mapping) else {"": files}).items():
                table = open_table(file, "open_nodes", options, used)
                if not name and not table.positions:
                    out.node_tables[node_type] = table
                else:
                    arrays[name or next(iter(table.columns))] = _single(table)
        for key, files in _by_type(edge_attributes, typed).items():
            edge_type = _edge_type(key)
            if edge_type not in out.edges:
                raise ValueError(f"edge_attributes: there is no edge type {key!r}")
            out.edge_arrays[edge_type] = {
                name: _single(open_table(file, "open_nodes", options, used))
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


def open_table(file: Any, method: str, options: Mapping[str, Any], used: set[str]) -> Table:
    """Open a file with the reader of its suffix.

    Args:
        file: The file, or a table that is open.
        method: ``open_edges`` or ``open_nodes``.
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
    path = Path(first)
    name = (path.with_suffix("") if path.suffix == ".gz" else path).suffix[1:].lower()
    try:
        reader = plugins.get("reader", name)
    except (UnknownPluginError, ValueError) as error:
        raise ValueError(f"{first!r} cannot be read: {error}") from None
    if not hasattr(reader, method):
        raise ValueError(f"{first!r}: the reader {name!r} reads whole graphs, no tables")
    taken = {key: value for key, value in options.items() if key in reader.table_options}
    used.update(taken)
    return getattr(reader, method)(text, taken)


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
