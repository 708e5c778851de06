"""Small graphs as graph directories, written file by file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from pyg_scale.store.directory import Attribute, DirectoryWriter, EdgeMeta, Meta, NodeMeta
from pyg_scale.store.directory.array import dtype_name
from pyg_scale.store.directory.meta import attribute_file, edge_dir, node_dir
from pyg_scale.store.topology import topology_of


def save(data: Any, path: Path, **options: Any) -> None:
    """Write a graph of one part; ``options`` are those of ``topology_of``."""
    graph = topology_of(data, **options)
    nodes, edges = {}, {}
    with DirectoryWriter(path) as writer:
        for name in graph.node_types:
            size = graph.num_nodes[name]
            store = data if name is None else data[name]
            kept = _attributes(writer, store, node_dir(name, 0), store.is_node_attr)
            nodes[name] = NodeMeta(name, size, kept, False, [size], [0])
        for name, csc in graph.csc.items():
            store = data if name is None else data[name]
            columns = {
                column: getattr(csc, column)
                for column in ("indptr", "indices", "edge_id", "time", "weight_prefix")
                if getattr(csc, column) is not None
            }
            for column, values in columns.items():
                writer.write(f"{edge_dir(name, 0)}/{column}.npy", values)
            edges[name] = EdgeMeta(
                name,
                csc.num_edges,
                dtype_name(graph.index_dtype),
                dtype_name(csc.indices.dtype),
                None if csc.edge_id is None else dtype_name(csc.edge_id.dtype),
                "time" in columns,
                "weight_prefix" in columns,
                _attributes(writer, store, edge_dir(name, 0), store.is_edge_attr),
                [csc.num_edges],
            )
        writer.commit(
            Meta(
                nodes,
                edges,
                is_hetero=graph.is_hetero,
                time_attr=options.get("time_attr"),
                time_of_edges=graph.has_edge_time,
                float_time=graph.float_time,
                weight_attr=options.get("weight_attr"),
            )
        )


def _attributes(writer: DirectoryWriter, store: Any, folder: str, is_one: Any) -> dict:
    found = {}
    for name, value in store.items():
        if isinstance(value, Tensor) and name != "edge_index" and is_one(name):
            found[name] = Attribute(dtype_name(value.dtype), tuple(value.shape[1:]))
            writer.write(attribute_file(folder, name), value)
    return found
