"""What ``META.json`` says, as values."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyg_scale.errors import GraphDirectoryError
from pyg_scale.graph.topology import EdgeType, NodeType, sortable_time
from pyg_scale.store.directory.paths import attribute_file as attribute_file
from pyg_scale.store.directory.paths import edge_dir as edge_dir
from pyg_scale.store.directory.paths import node_dir as node_dir
from pyg_scale.store.directory.paths import set_file as set_file

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
        other: What the type has beside attributes with a row per node, as JSON (see
            :mod:`pyg_scale.store.directory.values`).
        keys: The names of all that the user's graph has of the type, in its order, ``num_nodes``
            among them where the graph says that itself; ``None`` for the usual order.
        listed: Whether the user's graph has the type itself; else only edges name it.
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
        num_edges: In all parts.
        index_dtype: ``"int64"`` or ``"int32"``, what the user's edge index held.
        indices_dtype: Of ``indices.npy``.
        edge_id_dtype: Of ``edge_id.npy``; ``None`` where the position is the original id.
        has_time: Whether there is a ``time.npy`` (sortable, by position): times of the edges or,
            in parts of a graph whose nodes have times, of the neighbours.
        has_weight: Whether there is a ``weight_prefix.npy``.
        attributes: By name.
        part_edges: Edges of each part.
        other: What the type has beside attributes with a row per edge, as JSON.
        keys: As of :class:`NodeMeta`, with ``edge_index``.
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
        keys: As of :class:`NodeMeta`: of a homogeneous graph (of nodes, edges and the graph
            together), or of what a heterogeneous one has beside its types.
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
    keys: list[str] | None = None
    files: dict[str, FileMeta] = field(default_factory=dict)

    def times_neighbors(self, edge_type: EdgeType) -> bool:
        """Whether the edges of a type are ordered by the times of the neighbours."""
        if self.time_attr is None or self.time_of_edges:
            return False
        by_src = self.partition is not None and self.partition.edge_assign_strategy == "by_src"
        neighbor = None if edge_type is None else edge_type[2 if by_src else 0]
        return self.time_attr in self.nodes[neighbor].attributes

    def sortable(self, time: Tensor) -> Tensor:
        """Times of :attr:`time_attr` as ``int64`` ``[n]`` in the same order."""
        return sortable_time(time.to(torch.float64) if self.float_time else time).view(-1)

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
            text: What is in it.
            where: What errors call it.
            draft: Whether it is that of a directory that is not complete, which has no files yet.

        Raises:
            GraphDirectoryError: If it is no such file, of a newer version, was altered, or
                contradicts itself.
        """
        try:
            found = json.loads(text)
            check = found.pop("checksum", None) if isinstance(found, dict) else None
            intact = check == checksum(found)
        except (ValueError, RecursionError) as error:
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
        if not intact:
            raise GraphDirectoryError(
                f"{where} does not fit its own checksum: it was altered; write the directory again"
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
            raise ValueError("a type is there twice")
        return meta

    def check(self) -> None:
        """Refuse what contradicts itself.

        Raises:
            ValueError: Names what.
            TypeError: Names what.
        """
        from pyg_scale.store.directory.check import check_meta  # which needs this module

        check_meta(self)


def checksum(content: Any) -> int:
    """CRC-32 of the content of ``META.json`` but for its ``checksum``, whatever its spacing."""
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
