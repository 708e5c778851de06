"""Batches around the nodes of requests: those that a loader would give, node by node."""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler.base import SubgraphType

from pyg_scale.graph.topology import CSC, EdgeType, NodeType, Topology
from pyg_scale.loader.batch.build import build, edge_index_of
from pyg_scale.loader.batch.features import Features
from pyg_scale.loader.batch.source import features_of, sizes_of
from pyg_scale.loader.resolve import fixed_key, resolve
from pyg_scale.loader.seeds.nodes import check_data
from pyg_scale.loader.stats import Stats
from pyg_scale.ops import colptr
from pyg_scale.ops.gather import gather
from pyg_scale.sampler.base import check_nodes
from pyg_scale.sampler.hop import HopSampler
from pyg_scale.serving.forward import Block
from pyg_scale.serving.new_rows import GraphWithNewRows, NewRows
from pyg_scale.store.directory.data import RecordedAttributes
from pyg_scale.store.directory.opening import open_graph


class Neighborhoods:
    """Samples the neighbourhoods of nodes at times, and reads their rows.

    A batch is that of ``NeighborLoader(..., disjoint=True, redraw=False, seed=seed)`` with the same
    nodes and times as seeds: the neighbourhood of a node at a time does not depend on what else is
    in a batch.

    Args:
        graph: ``Data``, ``HeteroData``, ``(FeatureStore, GraphStore)`` or the path of a graph
            directory.
        num_neighbors: See :class:`~pyg_scale.loader.NeighborLoader`, as for ``options``.
        input_type: The type of the nodes, in a graph with types.
        seed: The ``seed=`` of the loader.
        feature_store: See there.
        attributes: The attributes that batches have, by name; ``None``: all.
        options: Further arguments of the sampler.

    Raises:
        NotImplementedError: If the graph is sampled elsewhere.
        TypeError: If an argument has a wrong type.
        ValueError: If arguments contradict each other or do not fit the graph.
    """

    def __init__(
        self,
        graph: Any,
        num_neighbors: Any,
        *,
        input_type: NodeType = None,
        seed: int = 0,
        feature_store: Any = None,
        attributes: Sequence[str] | None = None,
        **options: Any,
    ) -> None:
        if isinstance(graph, str | Path):
            graph = open_graph(graph)
        check_data(graph)
        sampler = resolve(
            "native",
            graph,
            "neighbor_sampler",
            num_neighbors=num_neighbors,
            disjoint=True,
            redraw=False,
            **options,
        )
        if not isinstance(sampler, HopSampler) or sampler.topology is None:
            raise NotImplementedError(
                "predictions are made where the graph is: open its directory in this process"
            )
        self._sampler, self._graph = sampler, sampler.topology
        if input_type not in self._graph.node_types:
            known = ", ".join(repr(t) for t in self._graph.node_types)
            raise ValueError(f"input_type={input_type!r} is no node type of the graph: {known}")
        self.input_type = input_type
        self._key = fixed_key(operator.index(seed))
        self._whole = self._data = graph
        only = None
        if attributes is not None:
            only = _names(graph, attributes)
            self._data = _with_only(graph, only)
        self._features = features_of(graph, feature_store, sampler, only)
        if attributes is not None:
            _check_names(attributes, self._data, self._features)
        self._only_x: Features | None = None
        if self._features is not None and "x" in self._features.names(False, None):
            self._only_x = Features(self._features.store, *sizes_of(graph, sampler), {"x"})
        self._in_edges: dict[EdgeType, CSC] = {}

    @property
    def num_nodes(self) -> int:
        """Number of nodes for which there are predictions."""
        return self._graph.num_nodes[self.input_type]

    @property
    def is_temporal(self) -> bool:
        """True if neighbourhoods are those at a time."""
        return self._graph.is_temporal

    @property
    def needs_time(self) -> bool:
        """True if nodes have no times of their own, so that requests must say one."""
        return self._graph.is_temporal and not self._graph.has_times_of(self.input_type)

    def check_time(self, time: Tensor) -> None:
        """Refuse times of a request that would be rounded among those of the graph.

        Raises:
            ValueError: If so; names one.
        """
        self._graph.check_time(time, "time")

    def own_times(self, ids: Tensor) -> Tensor | None:
        """The times ``[n]`` of nodes themselves, as a request says them: ``int64`` or ``float64``.

        Args:
            ids: Nodes ``[n]``.

        Returns:
            ``None`` if they have none, or if the graph is a pair of stores.
        """
        if not isinstance(self._whole, Data | HeteroData):
            return None
        store = self._whole._store if self.input_type is None else self._whole[self.input_type]
        name = self._sampler.time_attr
        if name not in store or not self._graph.has_times_of(self.input_type):
            return None
        times: Tensor = store[name][ids]
        return times.to(torch.float64 if times.is_floating_point() else torch.int64)

    def dtypes(self, kind: NodeType | EdgeType) -> dict[str, torch.dtype]:
        """The dtypes of what new nodes or edges of a type may bring along, by name.

        These are the attributes of batches, and those by which neighbours are drawn: times and
        weights.

        Args:
            kind: The type; ``None`` in a graph without types, for nodes and edges.
        """
        if not isinstance(self._data, Data | HeteroData):
            return {}
        found = {}
        drawn_by = {self._sampler.time_attr, self._sampler.weight_attr}
        for graph, names in ((self._whole, drawn_by), (self._data, None)):
            store = graph._store if kind is None else graph[kind]
            for name in store.keys():  # noqa: SIM118
                if name not in ("edge_index", "adj_t") and (names is None or name in names):
                    value = store[name]
                    if isinstance(value, Tensor):
                        found[name] = value.dtype
        return found

    def check(self, ids: Tensor) -> None:
        """Refuse what is not a list of nodes.

        Raises:
            TypeError: If it is no one-dimensional integer tensor.
            IndexError: If a node does not exist.
        """
        check_nodes(ids, self._graph, self.input_type, "ids")

    def with_new_rows(self, rows: NewRows) -> Topology:
        """The graph with nodes that a request brings along.

        Raises:
            NotImplementedError: If the graph has several parts.
            ValueError: If the rows do not fit the graph; likewise ``IndexError``, ``TypeError``.
        """
        graph = self._graph
        if graph.router is not None:
            raise NotImplementedError(
                "new rows need a graph of one part: open a directory that is not partitioned"
            )
        if graph.direction != "forward":
            raise NotImplementedError("new rows need sample_direction='forward'")
        if not self._in_edges:
            self._in_edges = {t: self._with_times(t) for t in graph.edge_types}
        self._check_rows(rows)
        options = self._sampler.time_attr, self._sampler.weight_attr
        made = GraphWithNewRows(graph, self._in_edges, self.input_type, rows, *options)
        return made.topology()

    def _with_times(self, edge_type: EdgeType) -> CSC:
        """In-edges with the times of their neighbours, once for all requests with new rows."""
        csc = self._graph.csc[edge_type]
        times = self._graph.node_time.get(self._graph.neighbor_type(edge_type))
        if times is None:
            return csc
        return replace(csc, time=torch.index_select(times, 0, csc.indices.to(torch.int64)))

    def _check_rows(self, rows: NewRows) -> None:
        """Refuse new rows that lack attributes of the graph, or have others."""
        if not isinstance(self._data, Data | HeteroData):
            return
        stores: dict[Any, tuple[Mapping[str, Tensor], bool]]
        stores = {self.input_type: (rows.attributes, True)}
        for edge_type, edges in rows.edges(self._graph.edge_types).items():
            stores[edge_type] = (rows.attributes_of(edge_type, edges.size(1)), False)
        for kind, (given, of_nodes) in stores.items():
            store = self._data._store if kind is None else self._data[kind]
            names = {
                name
                for name in store.keys()  # noqa: SIM118
                if name not in ("edge_index", "adj_t", "num_nodes")
                and (store.is_node_attr(name) if of_nodes else store.is_edge_attr(name))
            }
            what = "new rows" if of_nodes else "edges of new rows"
            for name in names & given.keys():
                _check_row(what, name, given[name], store[name])
            if missing := sorted(names - given.keys()):
                raise ValueError(
                    f"{what} lack {', '.join(missing)}: give them, or say in attributes= what the "
                    "model reads"
                )

    def batch(
        self, ids: Tensor, time: Tensor | None = None, rows: NewRows | None = None
    ) -> Data | HeteroData:
        """The batch around nodes, and around new rows after them.

        Args:
            ids: Nodes ``[n]``; may repeat.
            time: Times ``[n + num_new]``, in a graph with times; that of each node if ``None``.
            rows: Nodes that are not in the graph.

        Returns:
            A batch as that of a loader; its first ``n + num_new`` nodes of the type are those.
            Its ``seed_time`` is ``time``, or else the times of the nodes.
        """
        sampler, graph = self._sampler, self._graph
        if rows is not None:
            sampler, graph = copy.copy(sampler), self.with_new_rows(rows)
            sampler.topology = graph
            ids = torch.cat([ids.to(torch.int64), self.num_nodes + torch.arange(rows.num_rows)])
        seed = {self.input_type: ids}
        seed_time = None if time is None else {self.input_type: time}
        out = sampler.sample_checked(seed, seed_time, self._key).to_output()
        if rows is None:
            batch = build(self._data, out, features=self._features)
        else:
            batch = self._build_with(rows, out)
        store = batch if self.input_type is None else batch[self.input_type]
        store.input_id, store.batch_size = ids, ids.numel()
        store.seed_time = self.own_times(ids) if time is None and rows is None else time
        return batch

    def block(self, ids: Tensor, time: Tensor | None = None) -> Block | None:
        """``x`` and ``edge_index`` of :meth:`batch`, without what else batches have.

        Args:
            ids: See there, as for ``time``.
            time: See there.

        Returns:
            ``None`` where only a batch has them: with types, of a graph in parts, or before ``x``
            of a graph directory was looked at.
        """
        x = self._x_in_memory() if self._features is None else None
        if not self._has_blocks or (x is None and self._only_x is None):
            return None
        seed_time = None if time is None else {self.input_type: time}
        sample = self._sampler.sample_checked({self.input_type: ids}, seed_time, self._key)
        node, nodes, edges = sample.node[None], sample.num_sampled_nodes, sample.num_sampled_edges
        assert nodes is not None
        assert edges is not None
        edge_index = edge_index_of(sample.row[None], sample.col[None])
        if sample.colptr is not None:
            colptr.remember(edge_index, sample.colptr[None])
        if x is not None:
            rows = gather(x, node)
        else:
            assert self._only_x is not None
            (found,) = self._only_x.read({None: node}, {}, Stats())
            rows = found.value
        return Block(rows, edge_index, ids.numel(), nodes[None], edges[None])

    @property
    def _has_blocks(self) -> bool:
        """True if ``edge_index`` of a batch is what was sampled, hop by hop."""
        return (
            isinstance(self._data, Data)
            and "adj_t" not in self._data._store
            and "edge_index" in self._data._store
            and self._graph.router is None
            and self._sampler.subgraph_type == SubgraphType.directional
        )

    def _x_in_memory(self) -> Tensor | None:
        """``x`` of the nodes, if it is a tensor in memory or mapped."""
        if not isinstance(self._data, Data):
            return None
        store = self._data._store
        if "x" not in store or (isinstance(store, RecordedAttributes) and store.is_waiting("x")):
            return None
        x = store["x"]
        usual = type(x) is Tensor and x.is_cpu and x.layout == torch.strided and x.dim() > 0
        return x if usual and x.size(0) == self.num_nodes else None

    def _build_with(self, rows: NewRows, out: Any) -> Data | HeteroData:
        """A batch in which new nodes and edges have the rows that the request brought along."""
        graph, given = self._graph, rows.edges(self._graph.edge_types)
        typed = graph.is_hetero
        nodes = out.node if typed else {None: out.node}
        edges = out.edge if typed else {None: out.edge}
        first = {t: graph.csc[t].num_edges for t in graph.edge_types}
        inside_nodes = {t: _within(n, graph.num_nodes[t]) for t, n in nodes.items()}
        inside_edges = {t: e if e is None else _within(e, first[t]) for t, e in edges.items()}
        out.node = inside_nodes if typed else inside_nodes[None]
        out.edge = inside_edges if typed else inside_edges[None]
        batch = build(self._data, out, features=self._features)
        store = batch[self.input_type] if typed else batch
        _put(store, nodes[self.input_type], self.num_nodes, rows.attributes, "n_id")
        for edge_type, edge_index in given.items():
            attributes = rows.attributes_of(edge_type, edge_index.size(1))
            store = batch[edge_type] if typed else batch
            edge = edges[edge_type]
            if edge is not None:
                _put(store, edge, first[edge_type], attributes, "e_id")
        return batch


def _names(graph: Any, attributes: Sequence[str]) -> set[str]:
    """The names of attributes; of a ``TensorFrame`` also those of its arrays."""
    if isinstance(attributes, str):
        raise TypeError(f"attributes must be a list of names (got {attributes!r})")
    names = set(attributes)
    for store in graph.stores if isinstance(graph, Data | HeteroData) else ():
        for name in attributes if isinstance(store, RecordedAttributes) else ():
            columns = store.frame_columns(name)
            names.update(() if columns is None else columns.parts)
    return names


def _with_only(graph: Any, names: set[str]) -> Any:
    """A graph with its edges and some of its attributes; stores as they are."""
    if not isinstance(graph, Data | HeteroData):
        return graph
    bare = copy.copy(graph)
    for store in bare.stores:
        for name in list(store.keys()):
            if name not in names and name not in ("edge_index", "adj_t", "num_nodes"):
                if store.is_node_attr(name):
                    store.num_nodes = store.num_nodes  # which may be known from this one alone
                del store[name]
    return bare


def _check_names(attributes: Sequence[str], graph: Any, features: Features | None) -> None:
    """Refuse attributes that neither the graph nor its feature store has."""
    missing = set(attributes)
    if isinstance(graph, Data | HeteroData):
        missing.difference_update(*(store.keys() for store in graph.stores))
    if features is not None:
        missing -= {attr.attr_name for attr in features.store.get_all_tensor_attrs()}
    if missing:
        raise ValueError(f"attributes: the graph has no {', '.join(sorted(missing))}")


def _within(index: Tensor, size: int) -> Tensor:
    """Ids of the graph; those beyond it, which have rows of their own, become some node."""
    if size == 0 and index.numel():
        raise NotImplementedError("new rows need a graph that has nodes and edges of each type")
    return torch.where(index < size, index, 0)


def _put(store: Any, index: Tensor, first: int, attributes: Mapping[str, Tensor], ids: str) -> None:
    """Give the rows of new nodes or edges their values."""
    new = (index >= first).nonzero().view(-1)
    store[ids] = index
    if not new.numel():
        return
    rows = index[new].to(torch.int64) - first
    for name, value in attributes.items():
        if name not in store or not isinstance(store[name], Tensor):
            continue
        _check_row("new rows", name, value, store[name])
        store[name][new] = value[rows]


def _check_row(what: str, name: str, given: Any, ours: Any) -> None:
    """Refuse an attribute whose rows are not as those of the graph."""
    if not isinstance(ours, Tensor):
        return
    if ours.shape[1:] != given.shape[1:] or ours.dtype != given.dtype:
        raise ValueError(
            f"attribute {name!r} of {what} must be {ours.dtype} with rows of shape "
            f"{list(ours.shape[1:])} (got {given.dtype}, {list(given.shape[1:])})"
        )
