"""What ``META.json`` says, as checked values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

from pyg_scale.errors import GraphDirectoryError
from pyg_scale.store.base import EdgeType, NodeType
from pyg_scale.store.directory.array import DTYPES

FORMAT = "pyg_scale graph directory"
VERSION = 1
META = "META.json"


@dataclass(frozen=True)
class Attribute:
    """A tensor with one row per node or edge: its dtype and the shape of a row."""

    dtype: str
    row: tuple[int, ...] = ()


@dataclass
class NodeMeta:
    """One node type.

    Attributes:
        name: ``None`` in a homogeneous graph.
        num_nodes: In all parts.
        attributes: By name, in the order in which the user's graph has them.
        book: Whether the book has an entry per node; else parts are ranges of original ids.
        part_nodes: Nodes of each part.
        part_halo: Halo nodes of each part.
        part_cache: Nodes in each part's list of features to cache; empty where there are none.
    """

    name: NodeType
    num_nodes: int
    attributes: dict[str, Attribute] = field(default_factory=dict)
    book: bool = False
    part_nodes: list[int] = field(default_factory=list)
    part_halo: list[int] = field(default_factory=list)
    part_cache: list[int] = field(default_factory=list)


@dataclass
class EdgeMeta:
    """One edge type. An edge is in the part of its destination (``by_dst``) or its source.

    Attributes:
        name: ``None`` in a homogeneous graph.
        num_edges: In all parts.
        index_dtype: ``"int64"`` or ``"int32"``, what the user's edge index held.
        indices_dtype: Of ``indices.npy``.
        edge_id_dtype: Of ``edge_id.npy``; ``None`` where the position is the original id.
        has_time: Whether there is a ``time.npy`` (sortable, by position).
        has_weight: Whether there is a ``weight_prefix.npy``.
        attributes: By name.
        part_edges: Edges of each part.
    """

    name: EdgeType
    num_edges: int
    index_dtype: str = "int64"
    indices_dtype: str = "int32"
    edge_id_dtype: str | None = None
    has_time: bool = False
    has_weight: bool = False
    attributes: dict[str, Attribute] = field(default_factory=dict)
    part_edges: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class FileMeta:
    """Bytes and CRC-32 (as in zlib) of a file, header included."""

    bytes: int
    crc32: int


@dataclass
class PartitionMeta:
    """How the graph was cut.

    Attributes:
        method: The name of the partitioner.
        options: Its options, as JSON.
        seed: Its seed.
        edge_assign_strategy: ``"by_dst"`` (parts can serve in-edges) or ``"by_src"``.
        extra: What a partitioner wants to be kept, as JSON (such as ``num_neighbors``).
    """

    method: str
    options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    edge_assign_strategy: str = "by_dst"
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass
class Meta:
    """A whole graph.

    Attributes:
        nodes: Node types in the order of the user's metadata.
        edges: Edge types in that order.
        num_parts: Number of parts.
        is_hetero: Whether there are types.
        time_attr: The attribute by which in-edges are ordered, ``None`` for by edge id alone.
        time_of_edges: Whether that is an attribute of edges.
        float_time: Whether it is floating point.
        weight_attr: The attribute that ``weight_prefix.npy`` was made of.
        graph_attributes: What the graph has beside nodes and edges, as JSON.
        index_sets: ``{node type or "": {name: number of ids}}``.
        partition: ``None`` for a graph that was not cut.
        files: Every file but ``META.json`` by its POSIX path in the directory.
    """

    nodes: dict[NodeType, NodeMeta]
    edges: dict[EdgeType, EdgeMeta]
    num_parts: int = 1
    is_hetero: bool = False
    time_attr: str | None = None
    time_of_edges: bool = False
    float_time: bool = False
    weight_attr: str | None = None
    graph_attributes: dict[str, Any] = field(default_factory=dict)
    index_sets: dict[str, dict[str, int]] = field(default_factory=dict)
    partition: PartitionMeta | None = None
    files: dict[str, FileMeta] = field(default_factory=dict)

    # JSON ##################################################################################

    def to_json(self) -> str:
        """The text of ``META.json``."""
        return json.dumps(
            {
                "format": FORMAT,
                "version": VERSION,
                **{k: v for k, v in vars(self).items() if k not in _NESTED},
                "nodes": [_plain(each) for each in self.nodes.values()],
                "edges": [_plain(each) for each in self.edges.values()],
                "partition": None if self.partition is None else _plain(self.partition),
                "files": {name: vars(file) for name, file in self.files.items()},
            },
            indent=1,
            default=_plain,
        )

    @classmethod
    def from_json(cls, text: str, where: Path) -> Meta:
        """Read ``META.json``.

        Raises:
            GraphDirectoryError: If it is no such file, of a newer version, or contradicts itself.
        """
        try:
            found = json.loads(text)
        except ValueError as error:
            raise GraphDirectoryError(f"{where} is no JSON: {error}") from None
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise GraphDirectoryError(f"{where} does not say that it is a {FORMAT}")
        version = found.get("version")
        if type(version) is not int or version < 1:
            raise GraphDirectoryError(f"{where} has version {version!r}, expected {VERSION}")
        if version > VERSION:
            raise GraphDirectoryError(
                f"{where} has version {version}, this release reads up to {VERSION}: "
                "pip install --upgrade pyg-scale"
            )
        try:
            meta = cls._from_dict(found)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise GraphDirectoryError(f"{where} is incomplete or wrong: {reason}") from None
        return meta

    @classmethod
    def _from_dict(cls, found: Mapping[str, Any]) -> Meta:
        values = {k: found[k] for k in cls.__dataclass_fields__ if k in found and k not in _NESTED}
        nodes = [_node(each) for each in found["nodes"]]
        edges = [_edge(each) for each in found["edges"]]
        partition = found.get("partition")
        meta = cls(
            nodes={each.name: each for each in nodes},
            edges={each.name: each for each in edges},
            partition=None if partition is None else PartitionMeta(**partition),
            files={name: FileMeta(**file) for name, file in found["files"].items()},
            **values,
        )
        meta.check()
        return meta

    def check(self) -> None:
        """Refuse what contradicts itself.

        Raises:
            ValueError: Names what.
        """
        parts = _count(self.num_parts, "num_parts")
        if parts < 1:
            raise ValueError("num_parts must be at least 1")
        for node in self.nodes.values():
            if (node.name is None) == self.is_hetero:
                raise ValueError(f"node type {node.name!r} does not fit is_hetero")
            _check_parts(node.part_nodes, node.num_nodes, parts, f"nodes of {node.name!r}")
            if len(node.part_halo) != parts:
                raise ValueError(f"halo of {node.name!r} must have {parts} entries")
            if len(node.part_cache) not in (0, parts):
                raise ValueError(f"cache lists of {node.name!r} must have {parts} entries or none")
            for count in [*node.part_halo, *node.part_cache]:
                _count(count, f"halo or cache list of {node.name!r}")
            _check_attributes(node.attributes)
        for edge in self.edges.values():
            ends = (None, None) if edge.name is None else (edge.name[0], edge.name[2])
            if any(end not in self.nodes for end in ends):
                raise ValueError(f"edge type {edge.name!r} has a node type that is not there")
            _check_parts(edge.part_edges, edge.num_edges, parts, f"edges of {edge.name!r}")
            if edge.index_dtype not in _INDEX or edge.indices_dtype not in _INDEX:
                raise ValueError(f"edges of {edge.name!r} must be int64 or int32")
            if edge.edge_id_dtype not in (*_INDEX, None):
                raise ValueError(f"edge ids of {edge.name!r} must be int64 or int32")
            _check_attributes(edge.attributes)
        for name, file in self.files.items():
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or path.name == META or "\\" in name:
                raise ValueError(f"file {name!r} is not inside the directory")
            _count(file.bytes, f"bytes of {name}")
            _count(file.crc32, f"crc32 of {name}")


_NESTED = ("nodes", "edges", "partition", "files")
_INDEX = ("int64", "int32")


def _plain(value: Any) -> Any:
    return vars(value)


def _attributes(found: Mapping[str, Any]) -> dict[str, Attribute]:
    return {name: Attribute(a["dtype"], tuple(a["row"])) for name, a in found.items()}


def _node(found: Mapping[str, Any]) -> NodeMeta:
    return NodeMeta(**{**found, "attributes": _attributes(found["attributes"])})


def _edge(found: Mapping[str, Any]) -> EdgeMeta:
    name = found["name"]
    if name is not None:
        source, relation, destination = name
        name = (source, relation, destination)
    return EdgeMeta(**{**found, "name": name, "attributes": _attributes(found["attributes"])})


def _count(value: Any, what: str) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{what} must be a number >= 0 (got {value!r})")
    return value


def _check_parts(sizes: Any, total: Any, parts: int, what: str) -> None:
    _count(total, f"the number of {what}")
    if not isinstance(sizes, list) or len(sizes) != parts:
        raise ValueError(f"{what}: expected a size for each of the {parts} parts")
    if sum(_count(size, what) for size in sizes) != total:
        raise ValueError(f"{what}: the parts have {sum(sizes)}, in all there are {total}")


def _check_attributes(attributes: Mapping[str, Attribute]) -> None:
    for name, attribute in attributes.items():
        if attribute.dtype not in DTYPES:
            raise ValueError(f"attribute {name!r} has an unknown dtype {attribute.dtype!r}")
        for size in attribute.row:
            _count(size, f"the shape of attribute {name!r}")


# Paths ####################################################################################


def node_dir(node_type: NodeType, part: int | None = None) -> str:
    """Where the files of a node type are, of a part or (the book) of all parts."""
    root = "book" if part is None else f"part-{part}"
    return f"{root}/nodes" if node_type is None else f"{root}/nodes/{_quoted(node_type)}"


def edge_dir(edge_type: EdgeType, part: int) -> str:
    """Where the files of an edge type are."""
    if edge_type is None:
        return f"part-{part}/edges"
    return f"part-{part}/edges/{','.join(map(_quoted, edge_type))}"


def attribute_file(directory: str, name: str) -> str:
    """The file of an attribute in the directory of its type."""
    return f"{directory}/attributes/{_quoted(name)}.npy"


def set_file(node_type: NodeType, name: str) -> str:
    """The file of a named index set."""
    prefix = "sets" if node_type is None else f"sets/{_quoted(node_type)}"
    return f"{prefix}/{_quoted(name)}.npy"


def _quoted(name: str) -> str:
    """A name as a file name, whatever it holds; two names never share one."""
    quoted = quote(name, safe=" ")
    return (
        quoted.replace(".", "%2E") if quoted.strip(".") == "" or quoted.startswith(".") else quoted
    )
