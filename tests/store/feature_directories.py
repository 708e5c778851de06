"""Graph directories that hold given features and no edges worth mentioning."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyg_scale.files.npy import dtype_name
from pyg_scale.store.directory import (
    Attribute,
    DirectoryWriter,
    EdgeMeta,
    Meta,
    NodeMeta,
    PartitionBook,
)
from pyg_scale.store.directory.paths import attribute_file, edge_dir, node_dir


def write_features(
    path: Path, content: Mapping[tuple[Any, str], Tensor], assignment: Tensor | None = None
) -> Path:
    """A graph directory with features by group and name.

    Args:
        path: Where to write it.
        content: By group (a node type, an edge type, ``None`` or ``(None, None)``) and name.
        assignment: The part of each node, where all groups are of nodes and have so many rows.
    """
    typed = not content or any(group not in (None, (None, None)) for group, _ in content)
    meta = Meta({}, {}, is_hetero=typed)
    book = (
        None
        if assignment is None
        else PartitionBook.from_assignment(assignment, int(assignment.max()) + 1)
    )
    parts = 1 if book is None else book.num_parts
    meta.num_parts = parts
    with DirectoryWriter(path) as writer:
        for (group, name), tensor in content.items():
            spec = Attribute(dtype_name(tensor.dtype), tuple(tensor.shape[1:]))
            if isinstance(group, tuple):
                kind = None if group == (None, None) else group
                for end in (None,) if kind is None else kind[::2]:
                    meta.nodes.setdefault(end, _nodes(end, 1, book))
                edges = meta.edges.setdefault(
                    kind, EdgeMeta(kind, tensor.size(0), part_edges=[tensor.size(0)])
                )
                if edges.num_edges != tensor.size(0):
                    raise ValueError(f"{name} has a row more or less than there are edges")
                edges.attributes[name] = spec
                writer.write(attribute_file(edge_dir(kind, 0), name), tensor)
                continue
            node = meta.nodes.setdefault(group, _nodes(group, tensor.size(0), book))
            if book is None and not node.attributes:
                node.num_nodes, node.part_nodes = tensor.size(0), [tensor.size(0)]
            node.attributes[name] = spec
            for part in range(parts):
                rows = slice(None) if book is None else book.nodes_of(part)
                writer.write(attribute_file(node_dir(group, part), name), tensor[rows])
        if book is not None and book.part is not None:
            for group in meta.nodes:
                writer.write(f"{node_dir(group)}/part.npy", book.part)
                writer.write(f"{node_dir(group)}/local.npy", book.local)
                for part in range(parts):
                    writer.write(f"{node_dir(group, part)}/orig_id.npy", book.nodes_of(part))
        for kind, edge in meta.edges.items():  # all of them go from node 0 to node 0
            end = meta.nodes[None if kind is None else kind[2]]
            pointers = torch.full((end.num_nodes + 1,), edge.num_edges)
            pointers[0] = 0
            neighbors = torch.zeros(edge.num_edges, dtype=torch.int32)
            writer.write(f"{edge_dir(kind, 0)}/indptr.npy", pointers)
            writer.write(f"{edge_dir(kind, 0)}/indices.npy", neighbors)
        writer.commit(meta)
    return path


def _nodes(group: Any, count: int, book: PartitionBook | None) -> NodeMeta:
    sizes = [count] if book is None else torch.bincount(book.assignment()).tolist()
    halo = [0] * len(sizes)
    return NodeMeta(
        group, count, book=book is not None and book.part is not None,
        part_nodes=sizes, part_halo=halo,
    )  # fmt: skip
