"""A graph of any form and size to a graph directory, in bounded memory."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from pyg_scale.convert.attributes import (
    IndexFile,
    RowStream,
    copy_index_set,
    copy_rows,
    copy_times,
    link_rows,
)
from pyg_scale.convert.base import Description, Reader
from pyg_scale.convert.edge_stream import EdgeStream, edge_streams
from pyg_scale.convert.edges import EdgeWork
from pyg_scale.convert.journal import ConversionWorkspace
from pyg_scale.convert.node_time import NodeTime
from pyg_scale.convert.options import Options
from pyg_scale.convert.plan import check_space, estimate
from pyg_scale.convert.scan import Scan, check_column
from pyg_scale.files.npy import torch_dtype
from pyg_scale.graph.source import of, one_level
from pyg_scale.graph.topology import EdgeType, NodeType
from pyg_scale.store.directory.meta import (
    Attribute,
    EdgeMeta,
    Meta,
    NodeMeta,
    attribute_file,
    edge_dir,
    node_dir,
    set_file,
)


@dataclass
class Conversion:
    """The steps from a reader to the files of a graph directory.

    Args:
        reader: The graph.
        root: Where the files go.
        work: Journal, temporary folder, memory.
        options: What the user wants.
    """

    reader: Reader
    root: Path
    work: ConversionWorkspace
    options: Options
    description: Description = field(init=False)
    num_nodes: dict[NodeType, int] = field(init=False)

    def run(self) -> Meta:
        """Do what is not done yet; returns what ``META.json`` is to say."""
        self.reader.prepare(self.work)
        self.description = self.reader.describe()
        if self.options.time_attr is None:
            self.options = replace(self.options, time_attr=self.description.time_attr)
        self._check_options()
        streams = edge_streams(
            self.reader,
            self.description,
            undirected=self.options.undirected,
            remove_self_loops=self.options.remove_self_loops,
        )
        edge_work = self._edge_work(streams)
        self._check_space(streams)
        scans = self._scan(edge_work)
        self.num_nodes = self._count_nodes(scans)
        meta = self._meta(edge_work, scans)
        for node_type in self.num_nodes:
            self._copy_node_attributes(node_type, meta)
        for edge_type, each in edge_work.items():
            self._write_edges(edge_type, each, scans[edge_type], meta)
        self._copy_index_sets(meta)
        self._keep_files()
        return meta

    # Checks ################################################################################

    def _check_options(self) -> None:
        description, options = self.description, self.options
        _check_names(description)
        for edge_type in description.edges:
            for end in () if edge_type is None else (edge_type[0], edge_type[2]):
                if end not in description.nodes:
                    raise ValueError(f"edge type {edge_type!r} has an unknown node type {end!r}")
        for node_type, num_nodes in options.num_nodes.items():
            if node_type not in description.nodes:
                raise ValueError(f"num_nodes: there is no node type {node_type!r}")
            known = description.nodes[node_type].num_nodes
            if known is not None and known != num_nodes:
                raise ValueError(
                    f"num_nodes is {num_nodes}{of(node_type)}, but there are {known} rows"
                )
            description.nodes[node_type].num_nodes = num_nodes
        for node_type, name in options.index_sets:
            if node_type not in description.nodes:
                raise ValueError(f"index set {name!r}: there is no node type {node_type!r}")
        if not any(FEATURES in nodes.attributes for nodes in description.nodes.values()):
            for name in ("feature_dtype", "link_features"):
                if value := getattr(options, name):
                    raise ValueError(
                        f"{name}={value!r} is about the attribute {FEATURES!r} of nodes, and no "
                        "nodes have it: leave it out, or name the features so"
                    )
        if options.time_attr is not None:
            one_level(options.time_attr, self._timed_nodes, self._timed_edges)
            for node_type in self._timed_nodes:
                _check_time(description.nodes[node_type].attributes, options.time_attr, node_type)
        if options.weight_attr is not None and not any(
            options.weight_attr in edges.attributes for edges in description.edges.values()
        ):
            raise ValueError(
                f"weight_attr={options.weight_attr!r}: no edge type has this attribute"
            )

    def _check_space(self, streams: dict[EdgeType, EdgeStream]) -> None:
        needed = estimate(
            self.description,
            streams,
            time_attr=self.options.time_attr,
            weight_attr=self.options.weight_attr,
            linked=FEATURES if self.options.link_features else None,
        )
        check_space(self.root, needed)

    @property
    def _timed_nodes(self) -> list[NodeType]:
        name, nodes = self.options.time_attr, self.description.nodes
        return [each for each in nodes if name in nodes[each].attributes]

    @property
    def _timed_edges(self) -> list[EdgeType]:
        name, edges = self.options.time_attr, self.description.edges
        return [each for each in edges if name in edges[each].attributes]

    @property
    def _float_time(self) -> bool:
        name = self.options.time_attr
        if name is None:
            return False
        of_nodes = [self.description.nodes[each].attributes for each in self._timed_nodes]
        of_edges = [self.description.edges[each].attributes for each in self._timed_edges]
        dtypes = [each[name].dtype for each in (*of_nodes, *of_edges)]
        return any(torch_dtype(dtype).is_floating_point for dtype in dtypes)

    # Edges #################################################################################

    def _edge_work(self, streams: dict[EdgeType, EdgeStream]) -> dict[EdgeType, EdgeWork]:
        out = {}
        for number, (edge_type, stream) in enumerate(streams.items()):
            each = EdgeWork(stream, f"edges-{number}", self.work, float_time=self._float_time)
            for attribute in ("time_attr", "weight_attr"):
                name = getattr(self.options, attribute)
                if name is not None and name in stream.edges.attributes:
                    check_column(stream, name, attribute)
                    setattr(each, attribute, name)
            out[edge_type] = each
        return out

    def _scan(self, edge_work: dict[EdgeType, EdgeWork]) -> dict[EdgeType, Scan]:
        scans = {}
        for edge_type, each in edge_work.items():
            src, dst = (self.description.nodes[end].num_nodes for end in _ends(edge_type))
            scans[edge_type] = each.scan(src, dst)
        return scans

    def _count_nodes(self, scans: dict[EdgeType, Scan]) -> dict[NodeType, int]:
        counts = dict.fromkeys(self.description.nodes, 0)
        for edge_type, found in scans.items():
            for end, needed in zip(_ends(edge_type), (found.num_src, found.num_dst)):
                counts[end] = max(counts[end], needed)
        for node_type, nodes in self.description.nodes.items():
            if nodes.num_nodes is not None:
                counts[node_type] = nodes.num_nodes
            elif 8 * counts[node_type] > (free := shutil.disk_usage(self.root).free):
                raise ValueError(
                    f"ids of nodes{of(node_type)} reach {counts[node_type] - 1:,}, and 8 bytes for "
                    f"each node up to there are more than the {free / 1e9:.0f} GB that are free: "
                    "correct the edge, number the nodes anew, or write to a larger disk"
                )
            else:
                self._warn_of_gaps(node_type, counts[node_type], scans)
        return counts

    def _warn_of_gaps(self, node_type: NodeType, count: int, scans: dict[EdgeType, Scan]) -> None:
        """Say it where most of the nodes cannot have an edge: ids are row numbers here."""
        ends = sum(scan.num_edges * _ends(t).count(node_type) for t, scan in scans.items())
        if count > _FEW_NODES and count > _GAPS * ends:
            warnings.warn(
                f"ids of nodes{of(node_type)} reach {count - 1:,}, but edges name at most {ends:,} "
                f"of them: the graph gets {count:,} nodes, and 8 bytes for each "
                f"({8 * count / 1e9:.1f} GB). If that is not meant, number the nodes 0, 1, ..., "
                "or give the edges as CSV or Parquet, whose ids may be anything; if it is, "
                "num_nodes (--num-nodes) says so",
                RuntimeWarning,
                stacklevel=2,
            )

    def _write_edges(self, edge_type: EdgeType, each: EdgeWork, found: Scan, meta: Meta) -> None:
        src, dst = _ends(edge_type)
        node_time = self._node_time(src)
        try:
            meta.edges[edge_type].edge_id_dtype = each.write(
                found, self.num_nodes[src], self.num_nodes[dst], node_time, self.root
            )
        finally:
            if node_time is not None:
                node_time.close()
        for name, attribute in each.stream.edges.attributes.items():
            read = partial(each.stream.attribute, name)
            rows = RowStream(f"{name!r}{of(edge_type)}", attribute, found.num_edges, read)
            file = self.root / attribute_file(edge_dir(edge_type, 0), name)
            step = f"attribute {each.key} {name}"
            self.work.journal.once(step, partial(copy_rows, rows, file, self.work, step))

    def _node_time(self, node_type: NodeType) -> NodeTime | None:
        name = self.options.time_attr
        if name is None or node_type not in self._timed_nodes:
            return None
        rows = self._rows(node_type, name, None)
        number = list(self.description.nodes).index(node_type)
        file = self.work.folder / f"time-{number}.npy"
        self.work.journal.once(
            f"time nodes-{number}", lambda: copy_times(rows, file, self._float_time)
        )
        return NodeTime(file)

    # Nodes #################################################################################

    def _rows(self, node_type: NodeType, name: str, dtype: str | None) -> RowStream:
        attribute = self.description.nodes[node_type].attributes[name]
        read = partial(self.reader.node_attribute, node_type, name)
        return RowStream(
            f"{name!r}{of(node_type)}", attribute, self.num_nodes[node_type], read, dtype
        )

    def _copy_node_attributes(self, node_type: NodeType, meta: Meta) -> None:
        number = list(self.description.nodes).index(node_type)
        for name, attribute in meta.nodes[node_type].attributes.items():
            given = self.description.nodes[node_type].attributes[name]
            dtype = None if attribute.dtype == given.dtype else attribute.dtype
            rows = self._rows(node_type, name, dtype)
            file = self.root / attribute_file(node_dir(node_type, 0), name)
            step = f"attribute nodes-{number} {name}"
            source = self.reader.node_attribute_file(node_type, name)
            own = source is not None and dtype is None and self.work.folder in source.parents
            if own or (self.options.link_features and name == FEATURES):
                if source is None:
                    raise ValueError(
                        f"link_features=True: {name!r}{of(node_type)} is not a .npy file of its "
                        "own: leave it out, to copy"
                    )
                self.work.journal.once(step, partial(link_rows, rows, source, file))
            else:
                self.work.journal.once(step, partial(copy_rows, rows, file, self.work, step))

    # The rest ##############################################################################

    def _meta(self, edge_work: dict[EdgeType, EdgeWork], scans: dict[EdgeType, Scan]) -> Meta:
        nodes, edges = {}, {}
        for node_type, described in self.description.nodes.items():
            size = self.num_nodes[node_type]
            nodes[node_type] = NodeMeta(
                node_type,
                size,
                {name: self._stored(name, each) for name, each in described.attributes.items()},
                part_nodes=[size],
                part_halo=[0],
                other=dict(described.other),
            )
        for edge_type, each in edge_work.items():
            size = scans[edge_type].num_edges
            num_src = self.num_nodes[_ends(edge_type)[0]]
            edges[edge_type] = EdgeMeta(
                edge_type,
                size,
                index_dtype=self.options.index_dtype or each.stream.edges.index_dtype,
                indices_dtype="int32" if num_src <= 2**31 - 1 else "int64",
                has_time=each.time_attr is not None,
                has_weight=each.weight_attr is not None,
                attributes=dict(each.stream.edges.attributes),
                part_edges=[size],
            )
        return Meta(
            nodes,
            edges,
            is_hetero=self.description.is_hetero,
            time_attr=self.options.time_attr,
            time_of_edges=self.options.time_attr is not None and bool(self._timed_edges),
            float_time=self._float_time,
            weight_attr=self.options.weight_attr,
            graph_attributes=dict(self.description.graph_attributes),
        )

    def _stored(self, name: str, attribute: Attribute) -> Attribute:
        wanted = self.options.feature_dtype
        if name != FEATURES or wanted is None:
            return attribute
        if not torch_dtype(attribute.dtype).is_floating_point:
            raise ValueError(
                f"feature_dtype={wanted!r}: {name!r} holds {attribute.dtype}, no floating point "
                "numbers: leave it out"
            )
        return Attribute(wanted, attribute.row)

    def _copy_index_sets(self, meta: Meta) -> None:
        for node_type, nodes in self.description.nodes.items():
            for name, size in nodes.index_sets.items():
                read = partial(self.reader.index_set, node_type, name, 0, 1 << 16)
                self._copy_index_set(node_type, name, size, read, meta)
        for (node_type, name), path in self.options.index_sets.items():
            file = IndexFile(path)
            self._copy_index_set(node_type, name, file.size, file.chunks, meta)

    def _copy_index_set(
        self, node_type: NodeType, name: str, size: int, read: Any, meta: Meta
    ) -> None:
        sets = meta.index_sets.setdefault(node_type or "", {})
        if name in sets:
            raise ValueError(f"there are two index sets {name!r}{of(node_type)}: name one anew")
        sets[name] = size
        file = self.root / set_file(node_type, name)

        def copy() -> None:
            what = f"index set {name!r}{of(node_type)}"
            copy_index_set(what, read(), size, self.num_nodes[node_type], file)

        self.work.journal.once(f"set {node_type or ''} {name}", copy)

    def _keep_files(self) -> None:
        """Files that the reader adds to the directory."""
        for name, source in self.reader.result_files().items():

            def keep(name: str = name, source: Path = source) -> None:
                file = self.root / name
                file.parent.mkdir(parents=True, exist_ok=True)
                if self.work.folder in source.parents:
                    file.unlink(missing_ok=True)
                    os.link(source, file)
                else:
                    shutil.copyfile(source, file)

            self.work.journal.once(f"file {name}", keep)


FEATURES = "x"
"""The attribute that ``feature_dtype`` and ``link_features`` are about."""


def _ends(edge_type: EdgeType) -> tuple[NodeType, NodeType]:
    return (None, None) if edge_type is None else (edge_type[0], edge_type[2])


def _check_names(description: Description) -> None:
    """Refuse names that would hide what PyG looks up by them, or each other."""
    levels = [
        *((each.attributes, f"nodes{of(name)}") for name, each in description.nodes.items()),
        *((each.attributes, f"edges{of(name)}") for name, each in description.edges.items()),
    ]
    for attributes, what in levels:
        if taken := [name for name in attributes if name in _RESERVED]:
            raise ValueError(
                f"attribute {taken[0]!r} of the {what}: PyG means something else by this name: "
                "give the column or the file another one"
            )
    if not description.is_hetero:
        names = [name for attributes, _ in levels for name in attributes]
        names += description.graph_attributes
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(
                f"nodes, edges or the graph have an attribute {twice[0]!r} each, and a homogeneous "
                "graph has room for one: give one of the columns or files another name"
            )


_FEW_NODES, _GAPS = 1 << 20, 16
_RESERVED = frozenset({"edge_index", "adj_t", "num_nodes", "num_edges"})


def _check_time(attributes: Mapping[str, Attribute], name: str, node_type: NodeType) -> None:
    attribute = attributes[name]
    dtype = torch_dtype(attribute.dtype)
    if attribute.row not in ((), (1,)) or dtype.is_complex or attribute.dtype == "bool":
        raise ValueError(
            f"time_attr={name!r}{of(node_type)} must hold one number a node (it is "
            f"{attribute.dtype} with rows of shape {list(attribute.row)})"
        )
