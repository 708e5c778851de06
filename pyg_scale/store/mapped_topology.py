"""Topologies in files: mapped once per process, never copied, pickled as a reference."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch_geometric.data import FeatureStore

from pyg_scale.files.tensor_directory import TensorDirectory, TensorEntry
from pyg_scale.graph.base import TopologyOptions
from pyg_scale.graph.source import GraphSource
from pyg_scale.graph.topology import CSC, EdgeType, Topology
from pyg_scale.store.directory.page_faults import no_readahead_beyond_memory
from pyg_scale.store.directory.reader import GraphDirectory


@runtime_checkable
class KeepsTopology(Protocol):
    """A graph store that already has the in-edges of nodes, or keeps them once they are built."""

    def keep_topology(
        self,
        features: FeatureStore,
        options: TopologyOptions,
        read: Callable[[], GraphSource],
        build: Callable[[GraphSource], Topology],
    ) -> Topology:
        """The topology of the edges, shared by all processes that have the store.

        Args:
            features: The feature store paired with it, which may have times and weights.
            options: The options of the topology.
            read: Reads the edges of the store, and times and weights.
            build: Makes a topology in memory.
        """


@dataclass(frozen=True)
class MappedTopology(Topology):
    """A topology whose tensors are mapped files.

    Attributes:
        store: The graph store that has it.
        key: The key by which the store finds it.
    """

    store: Any = None
    key: Any = None

    def share_memory_(self) -> Topology:
        """Do nothing: all processes that map the files share the pages."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _find_again, (self.store, self.key)


def _find_again(store: Any, key: Any) -> Topology:
    return store.kept_topology(key)


_lock = threading.RLock()
_known: weakref.WeakValueDictionary[Any, Topology] = weakref.WeakValueDictionary()


def once(key: Any, make: Callable[[], Topology]) -> Topology:
    """The topology of a key; made again if it is not in use in this process."""
    with _lock:
        found = _known.get(key)
        if found is None:
            found = _known[key] = make()
        return found


# Of a graph directory #####################################################################


def of_graph_directory(
    directory: GraphDirectory, options: TopologyOptions, store: Any = None, key: Any = None
) -> Topology:
    """The in-edges of a graph directory of one part, mapped.

    Args:
        directory: A graph of one part.
        options: ``time_attr`` must be that of the directory, ``weight_attr`` too or ``None``, and
            the direction ``"forward"``; see :func:`why_not`.
        store: The graph store to which :class:`MappedTopology` refers.
        key: The key by which it finds the topology.
    """
    meta, part = directory.meta, directory.part(0)
    csc: dict[EdgeType, CSC] = {}
    for edge_type in meta.edges:
        found = part.csc(edge_type)
        waits = no_readahead_beyond_memory(found)
        csc[edge_type] = CSC(
            indptr=found.indptr,
            indices=found.indices,
            edge_id=found.edge_id,
            time=found.time if meta.time_of_edges and options.time_attr is not None else None,
            weight_prefix=found.weight_prefix if options.weight_attr is not None else None,
            waits=waits,
        )
    node_time = {}
    if options.time_attr is not None and not meta.time_of_edges:
        for node_type, node in meta.nodes.items():
            if options.time_attr in node.attributes:
                time = part.node_attribute(node_type, options.time_attr)
                node_time[node_type] = meta.sortable(time, node_type)
    dtypes = [e.index_dtype for e in meta.edges.values() if e.num_edges]
    dtypes = dtypes or [e.index_dtype for e in meta.edges.values()]
    return MappedTopology(
        node_types=tuple(meta.nodes),
        edge_types=tuple(meta.edges),
        num_nodes={t: node.num_nodes for t, node in meta.nodes.items()},
        csc=csc,
        node_time=node_time,
        index_dtype=torch.int32 if dtypes and set(dtypes) == {"int32"} else torch.int64,
        float_time=meta.float_time and options.time_attr is not None,
        store=store,
        key=key,
    )


def why_not(
    directory: GraphDirectory, options: TopologyOptions, features: FeatureStore | None
) -> str:
    """The reason why a directory does not have the requested topology; empty if it does."""
    meta = directory.meta
    by_src = meta.partition is not None and meta.partition.edge_assign_strategy == "by_src"
    held = "backward" if by_src else "forward"
    if options.direction != held:
        return f"it holds the {'out' if by_src else 'in'}-edges of nodes, direction={held!r}"
    if options.time_attr != meta.time_attr:
        return f"its edges are ordered for time_attr={meta.time_attr!r}"
    if options.weight_attr not in (None, meta.weight_attr):
        return f"its weights are of weight_attr={meta.weight_attr!r}"
    names = {options.time_attr, options.weight_attr} - {None}
    if features is not None and names:
        return _other_values(directory, names, features)
    return ""


def _other_values(directory: GraphDirectory, names: set[Any], features: FeatureStore) -> str:
    """Describe times or weights of the feature store that differ from the directory's, if any."""
    part = directory.part(0)
    found: list[tuple[Any, str, Tensor]] = []
    for node in directory.meta.nodes.values():
        found += [
            (node.name, n, part.node_attribute(node.name, n)) for n in names & set(node.attributes)
        ]
    for edge in directory.meta.edges.values():
        found += [
            (edge.name or (None, None), n, part.edge_attribute(edge.name, n))
            for n in names & set(edge.attributes)
        ]
    for group, name, value in found:
        if features.get_tensor_size(group_name=group, attr_name=name) != tuple(value.shape):
            return f"the feature store has another {name!r} of {group!r}"
        other = features.get_tensor(group_name=group, attr_name=name, index=None)
        if other.data_ptr() != value.data_ptr() and not torch.equal(other.to(value.dtype), value):
            return f"the feature store has another {name!r} of {group!r}"
    return ""


# In a directory of tensors ################################################################


def write_topology(directory: TensorDirectory, key: Any, graph: Topology) -> None:
    """Write a topology, with neighbours and edge ids interleaved."""
    arrays: dict[str, Tensor] = {}
    for number, csc in enumerate(graph.csc.values()):
        arrays[f"{number}.indptr"] = csc.indptr
        if csc.edge_id is None:
            arrays[f"{number}.indices"] = csc.indices
        else:
            arrays[f"{number}.pair"] = _pair(csc.indices, csc.edge_id)
        if csc.time is not None:
            arrays[f"{number}.time"] = csc.time
        if csc.weight_prefix is not None:
            arrays[f"{number}.weight_prefix"] = csc.weight_prefix
    for number, node_type in enumerate(graph.node_types):
        if node_type in graph.node_time:
            arrays[f"time.{number}"] = graph.node_time[node_type]
    info = {
        "node_types": graph.node_types,
        "edge_types": graph.edge_types,
        "num_nodes": [graph.num_nodes[t] for t in graph.node_types],
        "int32": graph.index_dtype == torch.int32,
        "direction": graph.direction,
        "float_time": graph.float_time,
    }
    directory.write(key, arrays, info)


def read_topology(directory: TensorDirectory, entry: TensorEntry, store: Any) -> Topology:
    """Map a topology that :func:`write_topology` wrote."""
    found, info = directory.tensors(entry.key), entry.info
    assert found is not None
    node_types = tuple(info["node_types"])
    edge_types = tuple(None if t is None else tuple(t) for t in info["edge_types"])
    csc: dict[EdgeType, CSC] = {}
    for number, edge_type in enumerate(edge_types):
        pair = found.get(f"{number}.pair")
        csc[edge_type] = CSC(
            indptr=found[f"{number}.indptr"],
            indices=found[f"{number}.indices"] if pair is None else pair[:, 0],
            edge_id=None if pair is None else pair[:, 1],
            time=found.get(f"{number}.time"),
            weight_prefix=found.get(f"{number}.weight_prefix"),
        )
    return MappedTopology(
        node_types=node_types,
        edge_types=edge_types,
        num_nodes=dict(zip(node_types, info["num_nodes"])),
        csc=csc,
        node_time={t: found[f"time.{n}"] for n, t in enumerate(node_types) if f"time.{n}" in found},
        index_dtype=torch.int32 if info["int32"] else torch.int64,
        direction=info["direction"],
        float_time=info["float_time"],
        store=store,
        key=entry.key,
    )


def _pair(indices: Tensor, edge_id: Tensor) -> Tensor:
    """Neighbours and edge ids ``[num_edges, 2]``; not copied if they are interleaved."""
    size = indices.element_size()
    together = (
        indices.dtype == edge_id.dtype
        and indices.stride() == edge_id.stride() == (2,)
        and edge_id.data_ptr() - indices.data_ptr() == size
    )
    if together:
        return indices.as_strided((indices.numel(), 2), (2, 1))
    wide = indices.dtype if indices.element_size() >= edge_id.element_size() else edge_id.dtype
    return torch.stack([indices.to(wide), edge_id.to(wide)], dim=1)
