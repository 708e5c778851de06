"""Finds contradictions in a ``META.json``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Any

from pyg_scale.files.npy import DTYPES, LONGEST_HEADER, num_bytes
from pyg_scale.store.directory import values
from pyg_scale.store.directory.layout import expected_files
from pyg_scale.store.directory.meta import (
    META,
    Attribute,
    EdgeMeta,
    Meta,
    NodeMeta,
    PartitionMeta,
)

_INDEX = ("int64", "int32")
_LARGEST = 2**62  # the sum of two counts fits int64


def check_meta(meta: Meta) -> None:
    """Refuse contradictions. Files are not read.

    Raises:
        ValueError: If there is one; names it.
        TypeError: If an entry has a wrong type; names it.
    """
    parts = _count(meta.num_parts, "num_parts")
    if parts < 1 or (parts > 1 and not meta.nodes):
        raise ValueError("num_parts must be at least 1, and 1 for a graph without nodes")
    for name in ("is_hetero", "time_of_edges", "float_time"):
        _is(getattr(meta, name), bool, name)
    for name in ("time_attr", "weight_attr"):
        _is(getattr(meta, name), (str, type(None)), name)
    if not meta.is_hetero and set(meta.nodes) != {None}:
        raise ValueError("a homogeneous graph must have the one node type null")
    for node in meta.nodes.values():
        _check_node(node, meta, parts)
    for edge in meta.edges.values():
        _check_edge(edge, meta, parts)
    _is(meta.graph_attributes, dict, "graph_attributes")
    values.check(meta.graph_attributes, meta.files, "graph_attributes")
    _check_sets(meta)
    if meta.partition is not None:
        _check_partition(meta.partition)
    _check_all_keys(meta)
    _check_files(meta, parts)


def _check_node(node: NodeMeta, meta: Meta, parts: int) -> None:
    what = "the nodes" if node.name is None else f"node type {node.name!r}"
    if meta.is_hetero:
        _name(node.name, "a node type")
    elif node.name is not None:
        raise ValueError("a homogeneous graph has no node types")
    _is(node.book, bool, f"book of {what}")
    _is(node.listed, bool, f"listed of {what}")
    _is(node.other, dict, f"other of {what}")
    values.check(node.other, meta.files, f"other of {what}")
    _check_parts(node.part_nodes, node.num_nodes, parts, what)
    _is(node.part_halo, list, f"part_halo of {what}")
    _is(node.part_cache, list, f"part_cache of {what}")
    if len(node.part_halo) != parts:
        raise ValueError(f"part_halo of {what} must have {parts} entries")
    if len(node.part_cache) not in (0, parts):
        raise ValueError(f"part_cache of {what} must have {parts} entries or none")
    for count in [*node.part_halo, *node.part_cache]:
        _count(count, f"part_halo or part_cache of {what}")
    _check_attributes(node.attributes, what)


def _check_edge(edge: EdgeMeta, meta: Meta, parts: int) -> None:
    what = "the edges" if edge.name is None else f"edge type {edge.name!r}"
    ends = (None, None) if edge.name is None else (edge.name[0], edge.name[2])
    if any(end not in meta.nodes for end in ends):
        raise ValueError(f"{what} has a node type that does not exist")
    for part in edge.name or ():
        _is(part, str, f"the name of {what}")
    _is(edge.other, dict, f"other of {what}")
    values.check(edge.other, meta.files, f"other of {what}")
    _check_parts(edge.part_edges, edge.num_edges, parts, what)
    if edge.index_dtype not in _INDEX or edge.indices_dtype not in _INDEX:
        raise ValueError(f"{what} must be int64 or int32")
    if edge.edge_id_dtype not in (*_INDEX, None):
        raise ValueError(f"the edge ids of {what} must be int64 or int32")
    if edge.edge_id_dtype is None and parts > 1 and edge.num_edges:
        raise ValueError(f"{what} must have edge ids, as there are several parts")
    _is(edge.has_time, bool, f"has_time of {what}")
    _is(edge.has_weight, bool, f"has_weight of {what}")
    if edge.has_time and not (
        meta.times_neighbors(edge.name) or (meta.time_attr is not None and meta.time_of_edges)
    ):
        raise ValueError(f"{what} has times, unlike time_attr and time_of_edges")
    if edge.has_weight and meta.weight_attr is None:
        raise ValueError(f"{what} has weights, unlike weight_attr")
    _check_attributes(edge.attributes, what)


def _check_sets(meta: Meta) -> None:
    _is(meta.index_sets, dict, "index_sets")
    for node_type, sets in meta.index_sets.items():
        if (node_type or None) not in meta.nodes:
            raise ValueError(f"index_sets has the node type {node_type!r}, which does not exist")
        _is(sets, dict, "index_sets")
        for name, size in sets.items():
            _name(name, "an index set")
            _count(size, f"the size of index set {name!r}")


def _check_partition(partition: PartitionMeta) -> None:
    _is(partition.method, str, "method of partition")
    _is(partition.seed, int, "seed of partition")
    _is(partition.options, dict, "options of partition")
    _is(partition.extra, dict, "extra of partition")
    if partition.edge_assign_strategy not in ("by_dst", "by_src"):
        raise ValueError("edge_assign_strategy must be 'by_dst' or 'by_src'")


def _check_all_keys(meta: Meta) -> None:
    if meta.is_hetero:
        _check_keys(meta.keys, meta.graph_attributes, "the graph")
        for node in meta.nodes.values():
            _check_keys(node.keys, [*node.attributes, *node.other, "num_nodes"], repr(node.name))
        for edge in meta.edges.values():
            _check_keys(edge.keys, [*edge.attributes, *edge.other, "edge_index"], repr(edge.name))
            _check_edge_index(edge.keys, edge)
        return
    nodes, edges = meta.nodes[None], meta.edges.get(None)
    names = [*nodes.attributes, *nodes.other, *meta.graph_attributes]
    if edges is not None:
        names += [*edges.attributes, *edges.other]
    if len(set(names)) != len(names):
        raise ValueError("nodes, edges and the graph have attributes of the same name")
    if edges is not None:
        _check_edge_index(meta.keys, edges)
    _check_keys(meta.keys, [*names, "num_nodes", "edge_index"], "the graph")


def _check_edge_index(keys: Any, edge: EdgeMeta) -> None:
    if keys is not None and "edge_index" not in keys and edge.num_edges:
        raise ValueError(f"keys lacks 'edge_index', but there are {edge.num_edges} edges")


def _check_keys(keys: Any, names: Iterable[str], what: str) -> None:
    if keys is None:
        return
    _is(keys, list, f"keys of {what}")
    known = set(names)
    if len(set(keys)) != len(keys) or not set(keys) <= known:
        raise ValueError(f"keys of {what} has a repeated or an unknown name")
    if left := known - set(keys) - {"num_nodes", "edge_index"}:
        raise ValueError(f"keys of {what} lacks {min(left)!r}")


def _check_files(meta: Meta, parts: int) -> None:
    for name, file in meta.files.items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or path.name == META or "\\" in name:
            raise ValueError(f"file {name!r} is not inside the directory")
        if "\0" in name or not name:
            raise ValueError(f"file {name!r} is not valid")
        _count(file.bytes, f"bytes of {name}")
        _count(file.crc32, f"crc32 of {name}")
    for expected in expected_files(meta, range(parts)):
        if expected.name not in meta.files:
            raise ValueError(f"files lacks {expected.name}")
        header = meta.files[expected.name].bytes - num_bytes(expected.dtype, expected.shape)
        if not 10 <= header <= LONGEST_HEADER:
            raise ValueError(
                f"{expected.name} has {meta.files[expected.name].bytes} bytes, which does not fit "
                f"{expected.dtype} of shape {list(expected.shape)}"
            )


def _check_parts(sizes: Any, total: Any, parts: int, what: str) -> None:
    _count(total, f"the size of {what}")
    if not isinstance(sizes, list) or len(sizes) != parts:
        raise ValueError(f"{what}: expected a size for each of the {parts} parts")
    if sum(_count(size, what) for size in sizes) != total:
        raise ValueError(f"{what}: the parts have {sum(sizes)}, in all there are {total}")


def _check_attributes(attributes: Mapping[str, Attribute], what: str) -> None:
    for name, attribute in attributes.items():
        _name(name, f"an attribute of {what}")
        if attribute.dtype not in DTYPES:
            raise ValueError(f"attribute {name!r} has an unknown dtype {attribute.dtype!r}")
        for size in attribute.row:
            _count(size, f"the shape of attribute {name!r}")


def _count(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value < _LARGEST:
        raise ValueError(f"{what} must be a number >= 0 (got {value!r})")
    return value


def _name(value: Any, what: str) -> None:
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError(f"the name of {what} must be a string that is not empty (got {value!r})")


def _is(value: Any, kind: type | tuple[type, ...], what: str) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{what} has the wrong type {type(value).__name__}")
