"""What the two local stores of ``torch_geometric.distributed`` know of a part and its graph."""

from __future__ import annotations

from functools import cached_property
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from pyg_scale.errors import GraphDirectoryError
from pyg_scale.store.base import EdgeType, NodeType
from pyg_scale.store.directory import GraphDirectory, Part

READ_ONLY = (
    "a part of a graph directory is read-only, and loaders read the directory: change the graph "
    "before it is partitioned, or write the attribute with "
    "pyg_scale.store.directory.additions.add_node_attribute"
)


class PartInfo:
    """Mixin: a part and the books of its graph. Nothing is read before it is asked for."""

    def _open(self, root: str | PathLike[str], pid: int) -> None:
        self.directory = GraphDirectory.shared(root)
        self.part: Part = self.directory.part(pid)
        self.num_partitions = self.directory.meta.num_parts
        self.partition_idx = pid

    @property
    def is_hetero(self) -> bool:
        """Whether the graph has types."""
        return self.directory.meta.is_hetero

    @cached_property
    def meta(self) -> dict[str, Any]:
        """The words of PyG's ``META.json``: ``num_parts``, ``is_hetero``, types, ``is_sorted``."""
        meta = self.directory.meta
        return {
            "num_parts": meta.num_parts,
            "is_hetero": meta.is_hetero,
            "node_types": list(meta.nodes) if meta.is_hetero else None,
            "edge_types": list(meta.edges) if meta.is_hetero else None,
            "is_sorted": True,
        }

    @cached_property
    def node_pb(self) -> Any:
        """The part ``int64`` ``[num_nodes]`` of every node; by node type if there are types.

        Made when it is asked for: 8 bytes a node. :meth:`get_partition_ids_from_nids` needs none.
        """
        found = {name: book.assignment() for name, book in self.directory.books.items()}
        return found if self.is_hetero else found[None]

    @cached_property
    def edge_pb(self) -> Any:
        """The part ``int64`` ``[num_edges]`` of every edge; by edge type if there are types.

        Raises:
            GraphDirectoryError: If edges have no attributes, so that there is no such book, and
                parts that would say it are not here.
        """
        found = {name: self._edge_book(name).to(torch.int64) for name in self.directory.meta.edges}
        return found if self.is_hetero else found[None]

    def get_partition_ids_from_nids(self, ids: Tensor, node_type: NodeType = None) -> Tensor:
        """The parts ``int64`` ``[n]`` of nodes ``[n]``.

        Raises:
            KeyError: If there is no such node type.
        """
        return self.directory.books[node_type].part_of(ids)

    def get_partition_ids_from_eids(self, eids: Tensor, edge_type: EdgeType = None) -> Tensor:
        """The parts ``int64`` ``[n]`` of edges ``[n]``.

        Raises:
            KeyError: If there is no such edge type.
            GraphDirectoryError: As of :attr:`edge_pb`.
        """
        return self._edge_book(edge_type)[eids.to(torch.int64)].to(torch.int64)

    def _edge_book(self, edge_type: EdgeType) -> Tensor:
        found = self.directory.edge_book(edge_type)
        if found is not None:
            return found
        directory = self.directory
        sizes = directory.meta.edges[edge_type].part_edges
        filled = [part for part, size in enumerate(sizes) if size]
        if absent := [part for part in filled if part not in directory.parts and len(filled) > 1]:
            raise GraphDirectoryError(
                f"{directory.path} does not say the parts of the edges {edge_type}, as these have "
                f"no attributes, and part {absent[0]}, which would, is not here: copy it, or give "
                "the edges an attribute before the graph is partitioned"
            )
        book = torch.full((sum(sizes),), filled[0] if filled else 0, dtype=torch.int32)
        for part in filled[1:]:
            ids = directory.part(part).edge_ids(edge_type)
            assert ids is not None, "a graph of several parts has edge ids"
            book[ids.to(torch.int64)] = part
        return book

    def __repr__(self) -> str:
        path = str(self.directory.path)
        return f"{type(self).__name__}({path!r}, {self.partition_idx} of {self.num_partitions})"
