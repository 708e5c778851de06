"""The features of a graph directory by original ids, behind PyG's interface."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch_geometric.data import TensorAttr

from pyg_scale.files.npy import torch_dtype
from pyg_scale.graph.topology import EdgeType, NodeType
from pyg_scale.store.directory import Attribute, GraphDirectory
from pyg_scale.store.rows import Key, ReadOnlyFeatures, TensorRows, key_of, unknown


@dataclass(frozen=True)
class FeatureColumn(TensorRows):
    """One attribute of the nodes or edges of a type.

    Attributes:
        num_rows: Number of rows in all parts.
        row: Shape of a row.
        dtype: Its dtype.
        of_edges: True if it has a row per edge.
        type: The node type or edge type, ``None`` in a homogeneous graph.
        name: Its name.
    """

    of_edges: bool
    type: Any  # a NodeType or an EdgeType, as of_edges says
    name: str

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
    names: set[str] = set()
    wanted = None if attributes is None else set(attributes)

    def add(of_edges: bool, kind: Any, rows: int, named: dict[str, Attribute]) -> None:
        names.update(named)
        for name, spec in named.items():
            dtype = torch_dtype(spec.dtype)
            column = FeatureColumn(rows, tuple(spec.row), dtype, of_edges, kind, name)
            if wanted is None or name in wanted or column.key in wanted:
                found[column.key] = column

    for node in directory.meta.nodes.values():
        add(False, node.name, node.num_nodes, node.attributes)
    for edge in directory.meta.edges.values():
        add(True, edge.name, edge.num_edges, edge.attributes)
    if missing := (wanted or set()) - {name for _, name in found} - found.keys():
        known = ", ".join(sorted(names)) or "none"
        raise KeyError(
            f"{directory.path} has no attribute {', '.join(sorted(map(repr, missing)))} "
            f"(found: {known})"
        )
    return found


class DirectoryFeatures(ReadOnlyFeatures):
    """The features of nodes and edges of a graph directory, which nobody writes.

    Groups are as in :class:`~pyg_scale.store.MemoryFeatureStore`.

    Args:
        directory: The directory.
        attributes: Names of the attributes to serve, or groups and names; ``None`` for all.

    Raises:
        KeyError: If an attribute does not exist.
    """

    why_read_only = (
        "the files of a graph directory are read only: pyg_scale.save(data, path) writes another "
        "one"
    )

    def __init__(
        self, directory: GraphDirectory, attributes: Sequence[str | Key] | None = None
    ) -> None:
        super().__init__()
        self.directory = directory
        self.columns = columns_of(directory, attributes)

    def column(self, attr: TensorAttr) -> FeatureColumn:
        """The attribute that a request is for.

        Raises:
            KeyError: If it does not exist; names those that do.
        """
        found = self.columns.get(key_of(attr))
        if found is None:
            raise unknown(attr, self.columns)
        return found

    def _get_tensor_size(self, attr: TensorAttr) -> tuple[int, ...] | None:
        column = self.columns.get(key_of(attr))
        return None if column is None else (column.num_rows, *column.row)

    def get_all_tensor_attrs(self) -> list[TensorAttr]:
        """Every attribute with a row per node or edge."""
        return [self._tensor_attr_cls(group, name) for group, name in self.columns]
