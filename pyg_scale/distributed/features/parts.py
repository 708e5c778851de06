"""The features of a partitioned directory, and their rows in the parts that this rank reads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyg_scale.errors import GraphDirectoryError
from pyg_scale.files.npy import torch_dtype
from pyg_scale.graph.topology import EdgeType, NodeType
from pyg_scale.ops.gather import gather
from pyg_scale.ops.gather_parts import gather_parts
from pyg_scale.ops.raw_bytes import raw_bytes
from pyg_scale.store.directory import Attribute, GraphDirectory

Key = tuple[Any, str]
"""Group (as in PyG's feature stores) and name."""


@dataclass(frozen=True)
class FeatureColumn:
    """One attribute of the nodes or edges of a type.

    Attributes:
        of_edges: True if it has a row per edge.
        type: The node type or edge type, ``None`` in a homogeneous graph.
        name: Its name.
        num_rows: Number of rows in all parts.
        row: Shape of a row.
        dtype: Its dtype.
    """

    of_edges: bool
    type: NodeType | EdgeType
    name: str
    num_rows: int
    row: tuple[int, ...]
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Size of a row in bytes."""
        return self.dtype.itemsize * math.prod(self.row)

    @property
    def key(self) -> Key:
        """Its group and name in a feature store; edges of a homogeneous graph have a group too."""
        if self.of_edges and self.type is None:
            return (None, None), self.name
        return self.type, self.name

    def __str__(self) -> str:
        return f"{self.name!r} of {described(self.of_edges, self.type)}"


def described(of_edges: bool, kind: NodeType | EdgeType) -> str:
    """The name of a type in errors."""
    what = "edges" if of_edges else "nodes"
    return f"the {what}" if kind is None else f"{what} {kind!r}"


def columns_of(
    directory: GraphDirectory, attributes: Sequence[str | Key] | None = None
) -> dict[Key, FeatureColumn]:
    """All attributes with a row per node or edge, or those selected by name, or group and name.

    Raises:
        KeyError: If an attribute does not exist.
    """
    found: dict[Key, FeatureColumn] = {}
    wanted = None if attributes is None else set(attributes)

    def add(of_edges: bool, kind: Any, rows: int, named: dict[str, Attribute]) -> None:
        for name, spec in named.items():
            dtype = torch_dtype(spec.dtype)
            column = FeatureColumn(of_edges, kind, name, rows, tuple(spec.row), dtype)
            if wanted is None or name in wanted or column.key in wanted:
                found[column.key] = column

    for node in directory.meta.nodes.values():
        add(False, node.name, node.num_nodes, node.attributes)
    for edge in directory.meta.edges.values():
        add(True, edge.name, edge.num_edges, edge.attributes)
    if missing := (wanted or set()) - {name for _, name in found} - found.keys():
        known = ", ".join(sorted({name for _, name in found})) or "none"
        raise KeyError(
            f"{directory.path} has no attribute {', '.join(sorted(map(repr, missing)))} "
            f"(found: {known})"
        )
    return found


def raw_rows(tensor: Tensor) -> Tensor:
    """A contiguous tensor ``[n, ...]`` as ``uint8`` ``[n, row_bytes]``, the same memory."""
    row_bytes = tensor.dtype.itemsize * math.prod(tensor.shape[1:])
    return raw_bytes(tensor).view(tensor.size(0), row_bytes)


class PartRows:
    """Rows of the parts that this process can read, mapped.

    Rows are found by *place*: the local id of a node; of an edge, its rank by original id among
    the edges of its part.

    Args:
        directory: The directory.
    """

    def __init__(self, directory: GraphDirectory) -> None:
        self.directory = directory
        self._raw: dict[tuple[Key, int], Tensor] = {}
        self._edge_ids: dict[tuple[EdgeType, int], Tensor | None] = {}

    def raw(self, column: FeatureColumn, part: int) -> Tensor:
        """All rows of a part, ``uint8`` ``[n, row_bytes]``.

        Raises:
            GraphDirectoryError: If the part is not local, or a file is damaged.
        """
        known = self._raw.get((column.key, part))
        if known is None:
            opened, kind = self.directory.part(part), column.type
            if column.of_edges:
                known = raw_rows(opened.edge_attribute(kind, column.name))  # type: ignore[arg-type]
            else:
                known = raw_rows(opened.node_attribute(kind, column.name))  # type: ignore[arg-type]
            self._raw[column.key, part] = known
        return known

    def of_nodes(self, columns: Sequence[FeatureColumn], index: Tensor) -> list[Tensor]:
        """Rows of nodes by original id; all their parts must be local.

        Args:
            columns: Attributes of the nodes of one type.
            index: Original ids, ``int64`` or ``int32`` ``[n]``, which exist.
        """
        book = self.directory.books[columns[0].type]  # type: ignore[index]
        rows = [[self.raw(column, part) for part in range(book.num_parts)] for column in columns]
        found = gather_parts(rows, book.part, book.local, book.offsets, index)
        return [
            each.view(-1).view(column.dtype).view(index.numel(), *column.row)
            for each, column in zip(found, columns, strict=True)
        ]

    def place_of_edges(self, edge_type: EdgeType, part: int, ids: Tensor) -> Tensor:
        """The places of edges in their part.

        Args:
            edge_type: Their type.
            part: The part.
            ids: Original ids, ``int64`` or ``int32`` ``[n]``.

        Returns:
            ``int64`` ``[n]``.

        Raises:
            IndexError: If one is not an edge of the part.
        """
        if (edge_type, part) not in self._edge_ids:
            self._edge_ids[edge_type, part] = self.directory.part(part).edge_ids(edge_type)
        known = self._edge_ids[edge_type, part]
        if known is None:
            return ids.to(torch.int64)
        at = torch.searchsorted(known, ids.to(known.dtype))
        found = at < known.numel()
        if known.numel():
            found &= gather(known, at.clamp(max=known.numel() - 1)) == ids
        if not bool(found.all()):
            wrong = int(ids[~found][0])
            raise IndexError(f"edge {wrong} is not in {described(True, edge_type)} of part {part}")
        return at


def edge_book(directory: GraphDirectory, edge_type: EdgeType) -> Tensor | None:
    """The part of every edge; ``None`` if there is only one part.

    Raises:
        GraphDirectoryError: If the directory was written without this information.
    """
    book = directory.edge_book(edge_type)
    if book is None and directory.meta.num_parts > 1:
        raise GraphDirectoryError(
            f"{directory.path} does not say in which part each of {described(True, edge_type)} is, "
            "so their features cannot be requested from other ranks: an older release wrote it; "
            "partition the graph again"
        )
    return book
