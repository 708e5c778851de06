"""``LocalGraphStore``: the edges of a process, as PyG's store.

A store made of tensors holds these, and can be written to. ``from_partition`` returns the store of
one part of a graph directory, see :mod:`pyg_scale_migrate.pyg_distributed.part`.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Mapping
from os import PathLike
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import EdgeAttr, GraphStore

from pyg_scale.graph.topology import EdgeType, NodeType

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class LocalGraphStore(GraphStore):
    """The edges of one part, which lead to its nodes, with original ids.

    It replaces ``torch_geometric.distributed.LocalGraphStore``. Loaders of several ranks need
    :attr:`node_pb`, :attr:`num_partitions` and :attr:`partition_idx`, which :meth:`from_partition`
    sets; users of :meth:`from_data` set them.

    Attributes:
        num_partitions: Number of parts of the graph.
        partition_idx: The number of this part.
        node_pb: The part ``[num_nodes]`` of every node of the graph; by node type if there are
            types. ``None``: all nodes are in this store.
        edge_pb: The part ``[num_edges]`` of every edge; by edge type if there are types. Only
            :meth:`get_partition_ids_from_eids` needs it.
        meta: The entries of PyG's ``META.json``, of which only ``is_hetero`` is needed.
        is_sorted: True if edges are sorted by destination.
        opened: The graphs that loaders opened with other ranks, by address.
    """

    num_partitions: int = 1
    partition_idx: int = 0
    node_pb: Any = None
    edge_pb: Any = None
    meta: Any = None
    is_sorted: bool | None = None

    def __init__(self) -> None:
        super().__init__()
        self.opened: dict[tuple[str, int], Any] = {}
        self._edge_index: dict[tuple[EdgeType, str], Any] = {}
        self._edge_attr: dict[tuple[EdgeType, str], EdgeAttr] = {}
        self._edge_id: dict[tuple[EdgeType, str], Tensor] = {}

    @classmethod
    def from_data(
        cls, edge_id: Tensor, edge_index: Tensor, num_nodes: int, is_sorted: bool = False
    ) -> LocalGraphStore:
        """Make a store of edges in memory.

        Args:
            edge_id: The original id ``int64`` ``[num_edges]`` of every edge.
            edge_index: ``int64`` ``[2, num_edges]``, with original node ids.
            num_nodes: Number of nodes of the graph, in all parts.
            is_sorted: True if edges are sorted by destination; otherwise they are sorted.

        Raises:
            TypeError: If ids or edges are no tensors of integers, or ``num_nodes`` is no integer.
            ValueError: If there are not as many ids as edges.
        """
        out = cls()
        out.meta = {"is_hetero": False}
        size = checked_integer("num_nodes", num_nodes)
        out._add(None, edge_index, edge_id, (size, size), is_sorted)
        return out

    @classmethod
    def from_hetero_data(
        cls,
        edge_id_dict: Mapping[tuple[str, str, str], Tensor],
        edge_index_dict: Mapping[tuple[str, str, str], Tensor],
        num_nodes_dict: Mapping[str, int],
        is_sorted: bool = False,
    ) -> LocalGraphStore:
        """Make a store of edges with types in memory; see :meth:`from_data`.

        Args:
            edge_id_dict: Original ids of edges, by edge type.
            edge_index_dict: Edges, by edge type.
            num_nodes_dict: Number of nodes of each type, in all parts.
            is_sorted: True if edges of all types are sorted by destination.

        Raises:
            TypeError: As of :meth:`from_data`.
            ValueError: If there are not as many ids as edges.
            KeyError: If an edge type has no ids, or the number of nodes of a type is missing.
        """
        out = cls()
        out.meta = {"is_hetero": True}
        for edge_type, edge_index in edge_index_dict.items():
            source, _, target = edge_type
            for end in (source, target):
                if end not in num_nodes_dict:
                    raise KeyError(f"num_nodes_dict lacks the node type {end!r} of {edge_type}")
            if edge_type not in edge_id_dict:
                raise KeyError(f"edge_id_dict lacks the edge type {edge_type}")
            size = (
                checked_integer(f"num_nodes_dict[{source!r}]", num_nodes_dict[source]),
                checked_integer(f"num_nodes_dict[{target!r}]", num_nodes_dict[target]),
            )
            out._add(edge_type, edge_index, edge_id_dict[edge_type], size, is_sorted)
        return out

    @classmethod
    def from_partition(cls, root: str | PathLike[str], pid: int) -> LocalGraphStore:
        """Open one part of a graph directory; data is read only when requested.

        Args:
            root: The directory.
            pid: The number of the part.

        Raises:
            GraphDirectoryError: If it is not a graph directory, or the part is not on this machine.
            TypeError: If ``pid`` is no integer.
            IndexError: If there is no such part.
        """
        from pyg_scale_migrate.pyg_distributed.part import PartGraphStore

        return PartGraphStore(root, pid)

    def _add(
        self,
        edge_type: EdgeType,
        edge_index: Tensor,
        edge_id: Tensor,
        size: tuple[int, int],
        is_sorted: bool,
    ) -> None:
        of = "" if edge_type is None else f" of {edge_type}"
        check_integers(f"edge_id{of}", edge_id)
        check_integers(f"edge_index{of}", edge_index)
        if edge_id.dim() != 1 or tuple(edge_index.shape) != (2, edge_id.numel()):
            raise ValueError(
                f"edge_id{of} must be [num_edges] and edge_index [2, num_edges] (got "
                f"{list(edge_id.shape)} and {list(edge_index.shape)})"
            )
        if not is_sorted:
            order = edge_index[1].argsort(stable=True)
            edge_index, edge_id = edge_index[:, order], edge_id[order]
        attr = {"edge_type": edge_type, "layout": "coo", "size": size, "is_sorted": True}
        self.put_edge_index(edge_index, **attr)
        self.put_edge_id(edge_id, **attr)

    @property
    def is_hetero(self) -> bool:
        """True if the graph has types."""
        if self.meta is not None and "is_hetero" in self.meta:
            return bool(self.meta["is_hetero"])
        return any(attr.edge_type is not None for attr in self.get_all_edge_attrs())

    @staticmethod
    def key(attr: EdgeAttr) -> tuple[EdgeType, str]:
        """The key of edges."""
        return attr.edge_type, attr.layout.value

    def get_partition_ids_from_nids(self, ids: Tensor, node_type: NodeType = None) -> Tensor:
        """The parts ``[n]`` of nodes ``[n]``.

        Raises:
            KeyError: If there is no such node type.
            ValueError: If :attr:`node_pb` was not set.
        """
        return _looked_up("node_pb", self.node_pb, node_type, ids)

    def get_partition_ids_from_eids(self, eids: Tensor, edge_type: EdgeType = None) -> Tensor:
        """The parts ``[n]`` of edges ``[n]``.

        Raises:
            KeyError: If there is no such edge type.
            ValueError: If :attr:`edge_pb` was not set.
        """
        return _looked_up("edge_pb", self.edge_pb, edge_type, eids)

    def put_edge_id(self, edge_id: Tensor, *args: Any, **kwargs: Any) -> bool:
        """Set the original ids ``int64`` ``[num_edges]`` of edges, in the order of the edges."""
        attr: Any = self._edge_attr_cls.cast(*args, **kwargs)
        self._edge_id[self.key(attr)] = edge_id
        return True

    def get_edge_id(self, *args: Any, **kwargs: Any) -> Tensor | None:
        """The original ids ``int64`` ``[num_edges]`` of edges; ``None`` if there are none."""
        attr: Any = self._edge_attr_cls.cast(*args, **kwargs)
        return self._edge_id.get(self.key(attr))

    def remove_edge_id(self, *args: Any, **kwargs: Any) -> bool:
        """Remove the ids of edges; return True if there were any."""
        attr: Any = self._edge_attr_cls.cast(*args, **kwargs)
        return self._edge_id.pop(self.key(attr), None) is not None

    def get_all_edge_attrs(self) -> list[EdgeAttr]:
        """The attributes of all edges."""
        return [self._edge_attr[key] for key in self._edge_index]

    def _put_edge_index(self, edge_index: Any, edge_attr: EdgeAttr) -> bool:
        self._edge_index[self.key(edge_attr)] = edge_index
        self._edge_attr[self.key(edge_attr)] = edge_attr
        return True

    def _get_edge_index(self, edge_attr: EdgeAttr) -> Any:
        return self._edge_index.get(self.key(edge_attr))

    def _remove_edge_index(self, edge_attr: EdgeAttr) -> bool:
        self._edge_attr.pop(self.key(edge_attr), None)
        return self._edge_index.pop(self.key(edge_attr), None) is not None

    def contents(self) -> list[tuple[Any, Any]]:
        """All tensors that loaders read, with their names."""
        return [*self._edge_index.items(), *self._edge_id.items()]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.partition_idx} of {self.num_partitions}, in memory)"


def checked_integer(name: str, value: Any) -> int:
    """A number that was given as an argument.

    Raises:
        TypeError: If it is no integer, or a bool.
    """
    with contextlib.suppress(TypeError):
        if not isinstance(value, bool):
            return operator.index(value)
    raise TypeError(f"{name} must be an integer (got {value!r})")


def check_integers(name: str, value: Any) -> None:
    """Check ids that were given as an argument.

    Raises:
        TypeError: If they are no tensor of integers.
    """
    found = value.dtype if isinstance(value, Tensor) else type(value).__name__
    if not isinstance(value, Tensor) or value.dtype not in _INTEGERS:
        raise TypeError(f"{name} must be a tensor of integers (got {found})")


def _looked_up(name: str, book: Any, kind: Any, ids: Tensor) -> Tensor:
    if book is None:
        raise ValueError(f"{name} was not set: a store made of tensors does not know other parts")
    found = book[kind] if isinstance(book, Mapping) else book
    parts: Tensor = found[ids]
    return parts
