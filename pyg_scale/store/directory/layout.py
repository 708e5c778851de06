"""The files that a graph directory must have, and their dtypes and shapes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from pyg_scale.store.directory.meta import EdgeMeta, Meta, NodeMeta
from pyg_scale.store.directory.paths import attribute_file, edge_dir, node_dir, set_file


class Expected(NamedTuple):
    """A file that a graph directory must have."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def expected_files(meta: Meta, parts: Iterable[int]) -> Iterator[Expected]:
    """All files that parts of a graph must have, and those that belong to no part."""
    for node in meta.nodes.values():
        if node.book:
            yield from _book(node, meta.num_parts)
        for part in parts:
            yield from _nodes(node, part)
    for edge in meta.edges.values():
        if (book := f"{edge_dir(edge.name)}/part.npy") in meta.files:
            yield Expected(book, book_dtype(meta.num_parts), (edge.num_edges,))
        for part in parts:
            yield from _edges(meta, edge, part)
    for node_type, sets in meta.index_sets.items():
        for name, size in sets.items():
            yield Expected(set_file(node_type or None, name), "int64", (size,))


def book_dtype(num_parts: int) -> str:
    """The dtype of part numbers in a book."""
    return "uint8" if num_parts <= 256 else "int32"


def _book(node: NodeMeta, parts: int) -> Iterator[Expected]:
    folder, shape = node_dir(node.name), (node.num_nodes,)
    yield Expected(f"{folder}/part.npy", book_dtype(parts), shape)
    wide = "int32" if node.num_nodes < 2**31 else "int64"
    yield Expected(f"{folder}/local.npy", wide, shape)


def _nodes(node: NodeMeta, part: int) -> Iterator[Expected]:
    folder, size = node_dir(node.name, part), node.part_nodes[part]
    for name, attribute in node.attributes.items():
        yield Expected(attribute_file(folder, name), attribute.dtype, (size, *attribute.row))
    if node.book:
        yield Expected(f"{folder}/orig_id.npy", "int64", (size,))
    if node.part_halo[part]:
        yield Expected(f"{folder}/halo.npy", "int64", (node.part_halo[part],))
    if node.part_cache and node.part_cache[part]:
        yield Expected(f"{folder}/cache.npy", "int64", (node.part_cache[part],))


def _edges(meta: Meta, edge: EdgeMeta, part: int) -> Iterator[Expected]:
    folder, size = edge_dir(edge.name, part), edge.part_edges[part]
    grouped_by = meta.nodes[meta.grouped_by(edge.name)]
    yield Expected(f"{folder}/indptr.npy", "int64", (grouped_by.part_nodes[part] + 1,))
    yield Expected(f"{folder}/indices.npy", edge.indices_dtype, (size,))
    if edge.edge_id_dtype is not None:
        yield Expected(f"{folder}/edge_id.npy", edge.edge_id_dtype, (size,))
    if edge.has_time:
        yield Expected(f"{folder}/time.npy", "int64", (size,))
    if edge.has_weight:
        yield Expected(f"{folder}/weight_prefix.npy", "int64", (size,))
    for name, attribute in edge.attributes.items():
        yield Expected(attribute_file(folder, name), attribute.dtype, (size, *attribute.row))
