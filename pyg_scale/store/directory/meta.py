"""The content of ``META.json``, as dataclasses."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from pyg_scale.errors import GraphDirectoryError
from pyg_scale.files.npy import open_regular
from pyg_scale.graph.topology import EdgeType, NodeType, sortable_time
from pyg_scale.store.directory.paths import attribute_file as attribute_file
from pyg_scale.store.directory.paths import edge_dir as edge_dir
from pyg_scale.store.directory.paths import node_dir as node_dir
from pyg_scale.store.directory.paths import set_file as set_file

FORMAT = "pyg_scale graph directory"
VERSION = 1
META = "META.json"
LONGEST_META = 1 << 26
"""The most bytes that ``META.json`` may have."""


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
        num_nodes: Number of nodes in all parts.
        attributes: Attributes by name, in the order of the user's graph.
        book: True if the book has an entry per node; else parts are ranges of original ids.
        part_nodes: Number of nodes of each part.
        part_halo: Number of halo nodes of each part.
        part_cache: Length of each part's list of nodes whose features to cache; empty if there are
            no lists.
        other: Values of the type other than attributes with a row per node, as JSON (see
            :mod:`pyg_scale.store.directory.values`).
        keys: The names of all values of the type in the user's graph, in its order, including
            ``num_nodes`` if the graph sets it; ``None`` for the usual order.
        listed: True if the user's graph has the type itself; else it only occurs in edge types.
    """

    name: NodeType
    num_nodes: int
    attributes: dict[str, Attribute] = field(default_factory=dict)
    book: bool = False
    part_nodes: list[int] = field(default_factory=list)
    part_halo: list[int] = field(default_factory=list)
    part_cache: list[int] = field(default_factory=list)
    other: dict[str, Any] = field(default_factory=dict)
    keys: list[str] | None = None
    listed: bool = True


@dataclass
class EdgeMeta:
    """One edge type. An edge is in the part of its destination (``by_dst``) or its source.

    Attributes:
        name: ``None`` in a homogeneous graph.
        num_edges: Number of edges in all parts.
        index_dtype: ``"int64"`` or ``"int32"``, the dtype of the user's edge index.
        indices_dtype: Dtype of ``indices.npy``.
        edge_id_dtype: Dtype of ``edge_id.npy``; ``None`` if the position is the original id.
        has_time: True if there is a ``time.npy`` (sortable, by position): times of the edges or, in
            parts of a graph whose nodes have times, of the neighbours.
        has_weight: True if there is a ``weight_prefix.npy``.
        attributes: Attributes by name.
        part_edges: Number of edges of each part.
        other: Values of the type other than attributes with a row per edge, as JSON.
        keys: As in :class:`NodeMeta`, with ``edge_index``.
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
    other: dict[str, Any] = field(default_factory=dict)
    keys: list[str] | None = None


@dataclass(frozen=True)
class FileMeta:
    """Size in bytes and CRC-32 (as in zlib) of a file, including its header."""

    bytes: int
    crc32: int


@dataclass
class PartitionMeta:
    """The partitioning of the graph.

    Attributes:
        method: The name of the partitioner.
        options: Its options, as JSON.
        seed: Its seed.
        edge_assign_strategy: ``"by_dst"`` (parts can serve in-edges) or ``"by_src"``.
        extra: Facts that a partitioner records, as JSON (such as ``num_neighbors``).
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
        edges: Edge types in the order of the user's metadata.
        num_parts: Number of parts.
        is_hetero: True if there are types.
        time_attr: The attribute by which in-edges are ordered; ``None`` if by edge id alone.
        time_of_edges: True if that is an attribute of edges.
        float_time: True if it is floating point.
        weight_attr: The attribute from which ``weight_prefix.npy`` was computed.
        graph_attributes: Values of the graph other than those of nodes and edges, as JSON.
        index_sets: ``{node type or "": {name: number of ids}}``.
        partition: ``None`` for a graph that was not cut.
        keys: As in :class:`NodeMeta`: of a homogeneous graph (of nodes, edges and the graph), or of
            the values of a heterogeneous one other than its types.
        files: All files except ``META.json``, by their POSIX paths in the directory.
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
    keys: list[str] | None = None
    files: dict[str, FileMeta] = field(default_factory=dict)

    def times_neighbors(self, edge_type: EdgeType) -> bool:
        """Return True if the edges of a type are ordered by the times of the neighbours."""
        if self.time_attr is None or self.time_of_edges:
            return False
        by_src = self.partition is not None and self.partition.edge_assign_strategy == "by_src"
        neighbor = None if edge_type is None else edge_type[2 if by_src else 0]
        return self.time_attr in self.nodes[neighbor].attributes

    def sortable(self, time: Tensor, of: NodeType | EdgeType = None) -> Tensor:
        """Times of :attr:`time_attr` as ``int64`` ``[n]`` that sort in the same order.

        Args:
            time: The times.
            of: The type that has them, for errors.

        Raises:
            ValueError: See :func:`pyg_scale.graph.topology.sortable_time`.
        """
        name = f"{self.time_attr!r}" if of is None else f"{self.time_attr!r} of {of!r}"
        return sortable_time(time, self.float_time, name).view(-1)

    def grouped_by(self, edge_type: EdgeType) -> NodeType:
        """The node type by whose nodes the edges of a type are grouped."""
        if edge_type is None:
            return None
        by_src = self.partition is not None and self.partition.edge_assign_strategy == "by_src"
        return edge_type[0 if by_src else 2]

    # JSON ##################################################################################

    def to_json(self) -> str:
        """The text of ``META.json``."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            **{k: v for k, v in vars(self).items() if k not in _NESTED},
            "nodes": [_plain(each) for each in self.nodes.values()],
            "edges": [_plain(each) for each in self.edges.values()],
            "partition": None if self.partition is None else _plain(self.partition),
            "files": {name: vars(file) for name, file in self.files.items()},
        }
        content = json.loads(json.dumps(content, default=_plain))
        return json.dumps({**content, "checksum": checksum(content)}, indent=1)

    @classmethod
    def from_json(cls, text: str, where: Path, *, draft: bool = False) -> Meta:
        """Read ``META.json``.

        Args:
            text: The text of the file.
            where: Its path in errors.
            draft: True for an incomplete directory, which has no files yet.

        Raises:
            GraphDirectoryError: If it is not such a file, has a newer version, was altered, or
                contradicts itself.
        """
        try:
            found = json.loads(text)
            check = found.pop("checksum", None) if isinstance(found, dict) else None
            intact = check == checksum(found)
        except (ValueError, RecursionError) as error:
            raise GraphDirectoryError(f"{where} is not JSON: {error}") from None
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
        if not intact:
            raise GraphDirectoryError(
                f"{where} does not match its checksum: it was altered; write the directory again"
            )
        try:
            meta = cls._from_dict(found)
            if not draft:
                meta.check()
            return meta
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise GraphDirectoryError(f"{where} is incomplete or wrong: {reason}") from None

    @classmethod
    def _from_dict(cls, found: Mapping[str, Any]) -> Meta:
        unknown = found.keys() - {"format", "version"} - cls.__dataclass_fields__.keys()
        if unknown:
            raise ValueError(f"unknown entry {min(unknown)!r}")
        values = {k: v for k, v in found.items() if k not in ("format", "version", *_NESTED)}
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
        if len(meta.nodes) != len(nodes) or len(meta.edges) != len(edges):
            raise ValueError("a type is repeated")
        return meta

    def check(self) -> None:
        """Refuse contradictions.

        Raises:
            ValueError: If there is one; names it.
            TypeError: If an entry has a wrong type; names it.
        """
        from pyg_scale.store.directory.check import check_meta  # imports this module

        check_meta(self)


def is_graph_directory(path: Path) -> bool:
    """Return True if ``META.json`` of a directory says that it is a graph directory.

    Other programs have files of that name too. One that is damaged says nothing.
    """
    try:
        with os.fdopen(open_regular(META, path), "rb") as file:
            text = file.read(LONGEST_META + 1)
        found = None if len(text) > LONGEST_META else json.loads(text)
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and found.get("format") == FORMAT


def checksum(content: Any) -> int:
    """CRC-32 of the content of ``META.json`` except its ``checksum``, whatever its spacing."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return zlib.crc32(text.encode())


_NESTED = ("nodes", "edges", "partition", "files")


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
