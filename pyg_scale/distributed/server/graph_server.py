"""A sampler server: answers requests for batches, and keeps no state of clients.

It keeps a bounded number of the records of loaders, by digest. A client that died leaves nothing
behind, and one that comes back is told to send its record again.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import HeteroData
from torch_geometric.sampler import EdgeSamplerInput, NodeSamplerInput

from pyg_scale import plugins
from pyg_scale.comm.service import Handler
from pyg_scale.distributed.server.fingerprint import Fingerprint
from pyg_scale.distributed.server.loader_record import HGT, LoaderRecord, RowsOf, digest, json_of
from pyg_scale.graph.base import directory_of
from pyg_scale.graph.topology import EdgeType, NodeType
from pyg_scale.loader import resolve
from pyg_scale.loader.batch import wire
from pyg_scale.loader.batch.build import select_rows
from pyg_scale.loader.batch.features import Features
from pyg_scale.loader.batch.source import features_of
from pyg_scale.loader.link_loader import check_link_sampler
from pyg_scale.loader.node_loader import check_has_time
from pyg_scale.loader.stats import Stats
from pyg_scale.ops.library import serial
from pyg_scale.sampler.hgt import HGTSampler
from pyg_scale.store.directory.lazy import EDGE_INDEX

_WHOLE = 1 << 64


class NotAgreed(LookupError):
    """Raised for a batch of a loader whose record the server does not have: it must be resent."""


class OtherGraph(RuntimeError):
    """Raised for a request of a client that opened another graph."""


@dataclass(frozen=True)
class _Loader:
    """A loader, as built from its record."""

    record: LoaderRecord
    sampler: Any
    features: Features | None
    from_store: frozenset[tuple[bool, Any, str]]


class GraphServer:
    """The handlers of a sampler server.

    Args:
        graph: The result of :func:`pyg_scale.open` for a path.
        num_clients: Number of clients after whose goodbye :attr:`finished` is set; 0 for never.
        feature_store: As for a loader: a name or a PyG ``FeatureStore``.
        parallel: Answer several requests at once, each with one thread.
        max_loaders: Number of records that are kept; the least recently used is dropped first.

    Raises:
        TypeError: If the graph was not opened from a directory.
        UnknownPluginError: If there is no feature store with the given name.

    Attributes:
        finished: Set when all clients have said goodbye.
    """

    def __init__(
        self,
        graph: Any,
        *,
        num_clients: int = 0,
        feature_store: Any = None,
        parallel: bool = True,
        max_loaders: int = 64,
    ) -> None:
        if directory_of(graph) is None:
            raise TypeError(
                f"a server serves what pyg_scale.open(path) returns (got {type(graph).__name__})"
            )
        if isinstance(feature_store, str):
            plugins.get("feature_store", feature_store)  # before clients come
        self._graph, self._directory = graph, graph.graph_directory
        self._feature_store, self._parallel = feature_store, parallel
        self._fingerprint = Fingerprint.of(self._directory.meta_to_send())
        self._num_clients, self._max_loaders = num_clients, max_loaders
        self._lock = threading.Lock()
        self._binding = threading.Lock()
        self._loaders: OrderedDict[bytes, _Loader] = OrderedDict()
        self._gone: set[bytes] = set()
        self._running = 0
        self._counts = {"batches": 0, "bytes": 0, "most_at_once": 0}
        self.finished = threading.Event()

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """The handlers, by name."""
        return {
            "hello": self._hello,
            "agree": self._agree,
            "nodes": self._nodes,
            "links": self._links,
            "rows": self._some_rows,
            "column": self._column,
            "index_set": self._index_set,
            "value": self._value,
            "bye": self._bye,
        }

    def counts(self) -> dict[str, int]:
        """Counts so far: ``batches``, their ``bytes``, ``most_at_once``, remembered ``loaders``,
        and clients ``gone``.
        """
        with self._lock:
            return self._counts | {"loaders": len(self._loaders), "gone": len(self._gone)}

    def linger(self, seconds: float = 0.5) -> None:
        """Wait until the last answers have been sent."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with self._lock:
                idle = self._running == 0
            time.sleep(0.05)
            if idle and deadline - time.monotonic() < seconds - 0.2:
                return

    # Clients ###############################################################################

    def _hello(self, message: list[Tensor]) -> list[Tensor]:
        return [wire.bytes_tensor(self._directory.meta_to_send().to_json().encode())]

    def _bye(self, message: list[Tensor]) -> list[Tensor]:
        (client,) = message
        with self._lock:
            if len(self._gone) < max(self._num_clients, 1):
                self._gone.add(wire.tensor_bytes(client)[:64])
            if self._num_clients and len(self._gone) >= self._num_clients:
                self.finished.set()
        return []

    # Loaders ###############################################################################

    def _agree(self, message: list[Tensor]) -> list[Tensor]:
        packed = self._of_this_graph(message)
        name = digest(packed)
        with self._binding:  # several batches of one loader may arrive at once
            if wire.tensor_bytes(name) not in self._loaders:
                loader = self._bind(LoaderRecord.unpack(packed))
                with self._lock:
                    self._loaders[wire.tensor_bytes(name)] = loader
                    while len(self._loaders) > self._max_loaders:
                        self._loaders.popitem(last=False)
        return [name]

    def _of_this_graph(self, message: list[Tensor]) -> list[Tensor]:
        """Check the fingerprint of the client's graph; return the rest of the message."""
        fingerprint, *rest = message
        if not self._fingerprint.fits(Fingerprint.unpack(fingerprint)):
            raise OtherGraph(
                f"{self._directory.path} is another graph than the one that the client opened: all "
                "servers must have the same"
            )
        return rest

    def _bind(self, record: LoaderRecord) -> _Loader:
        graph, options = self._graph, dict(record.options)
        sampler: Any
        if record.sampler == HGT:
            sampler = HGTSampler(graph, **options)
        else:
            sampler = resolve.resolve(record.sampler, graph, "neighbor_sampler", **options)
        method = sampler.sample_from_edges if record.links else sampler.sample_from_nodes
        if not resolve.takes_key(method):
            raise NotImplementedError(
                f"neighbor_sampler={record.sampler!r} takes no key, so several servers would draw "
                "different batches; 'native' does"
            )
        if record.links:
            check_link_sampler(sampler, record.negatives)
        else:
            timed = torch.empty(0) if record.timed else None
            check_has_time(sampler, record.seed_type, timed)  # type: ignore[arg-type]
        for row in record.rows:
            self._check_rows(row)
        features = features_of(graph, self._feature_store, sampler)
        names = frozenset(
            row
            for row in record.rows
            if features is not None and row[2] in features.names(row[0], row[1])
        )
        return _Loader(record, sampler, features, names)

    def _known(self, name: Tensor) -> _Loader:
        key = wire.tensor_bytes(name)
        with self._lock:
            if key not in self._loaders:
                raise NotAgreed("this server has no record of this loader: send it again")
            self._loaders.move_to_end(key)
            return self._loaders[key]

    # Batches ###############################################################################

    def _nodes(self, message: list[Tensor]) -> list[Tensor]:
        name, flags, node, *rest = message
        loader, (key, timed, _) = self._known(name), _flags(flags)
        if len(rest) != timed:
            raise ValueError("times do not fit the seeds")
        inputs = NodeSamplerInput(
            None, node, rest[0] if timed else None, input_type=loader.record.seed_type
        )
        return self._batch(loader, resolve.call, loader.sampler.sample_from_nodes, inputs, key)

    def _links(self, message: list[Tensor]) -> list[Tensor]:
        name, flags, row, col, *rest = message
        loader, (key, timed, labelled) = self._known(name), _flags(flags)
        if len(rest) != timed + labelled:
            raise ValueError("labels or times do not fit the links")
        inputs = EdgeSamplerInput(
            None,
            row,
            col,
            rest[0] if labelled else None,
            rest[-1] if timed else None,
            input_type=loader.record.seed_type,
        )
        negatives = loader.record.negatives

        def call(method: Any, inputs: Any, key: int) -> Any:
            return resolve.call(method, inputs, key, neg_sampling=negatives)

        return self._batch(loader, call, loader.sampler.sample_from_edges, inputs, key)

    def _batch(
        self, loader: _Loader, call: Any, method: Any, inputs: Any, key: int
    ) -> list[Tensor]:
        with self._working():
            out = call(method, inputs, key)
            node, edge = _ids_of(out)
            rows = self._rows(loader, node, edge)
            if not loader.record.links:
                out.metadata = None  # the client has its own
            text, tensors = wire.pack({"out": out, "rows": rows})
        answer = [wire.bytes_tensor(text), *tensors]
        with self._lock:
            self._counts["batches"] += 1
            self._counts["bytes"] += sum(tensor.nbytes for tensor in answer)
        return answer

    @contextlib.contextmanager
    def _working(self) -> Any:
        with self._lock:
            self._running += 1
            self._counts["most_at_once"] = max(self._counts["most_at_once"], self._running)
        try:
            with serial() if self._parallel else contextlib.nullcontext():
                yield
        finally:
            with self._lock:
                self._running -= 1

    def _rows(
        self,
        loader: _Loader,
        node: Mapping[NodeType, Tensor],
        edge: Mapping[EdgeType, Tensor | None],
    ) -> list[Tensor | None]:
        """The rows that the loader wants, in its order; ``None`` for edges without ids."""
        stats, found = Stats(), {}
        if loader.from_store:
            assert loader.features is not None
            for feature in loader.features.read(node, edge, stats):
                found[feature.of_edges, feature.type, feature.name] = feature.value
        out: list[Tensor | None] = []
        for row in loader.record.rows:
            if row in found:
                out.append(found[row])
                continue
            ids: Tensor | None = _NONE
            of_edges, kind, _ = row
            if of_edges:
                ids = edge.get(kind, _NONE)  # type: ignore[arg-type]
            else:
                ids = node.get(kind, _NONE)  # type: ignore[arg-type]
            out.append(None if ids is None else self._select(row, ids, stats))
        return out

    # Attributes ############################################################################

    def _select(self, row: RowsOf, ids: Tensor, stats: Stats) -> Tensor:
        store = self._store(row[1])
        value: Tensor = select_rows(store, row[2], store[row[2]], ids, stats)
        return value

    def _some_rows(self, message: list[Tensor]) -> list[Tensor]:
        what, ids = self._of_this_graph(message)
        row = _row_of(json_of(what))
        self._check_rows(row)
        count = self._count(row)
        if ids.dtype != torch.int64 or ids.dim() != 1:
            raise ValueError("ids must be int64 [n]")
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < count:
            raise IndexError(f"{row[2]!r} has only the rows 0 to {count - 1}")
        with self._working():
            return [self._select(row, ids, Stats())]

    def _column(self, message: list[Tensor]) -> list[Tensor]:
        what, between = self._of_this_graph(message)
        row = _row_of(json_of(what))
        begin, end = between.tolist()
        of_edges, kind, name = row
        if name != EDGE_INDEX:
            self._check_rows(row)
        elif not of_edges or kind not in self._directory.meta.edges:
            raise KeyError(f"there is no edge type {kind!r}")
        if not 0 <= begin <= end <= self._count(row):
            raise IndexError(f"{name!r} has only the rows 0 to {self._count(row) - 1}")
        value = self._store(kind)[name]
        return [value[:, begin:end] if name == EDGE_INDEX else value[begin:end]]

    def _index_set(self, message: list[Tensor]) -> list[Tensor]:
        (what,) = self._of_this_graph(message)
        node_type, name = json_of(what)
        return [self._directory.index_set(name, node_type)]

    def _value(self, message: list[Tensor]) -> list[Tensor]:
        (what,) = self._of_this_graph(message)
        file, dtype, shape = json_of(what)
        return [self._directory.array(file, dtype, tuple(shape))]

    def _store(self, kind: NodeType | EdgeType) -> Any:
        return self._graph[kind] if isinstance(self._graph, HeteroData) else self._graph._store

    def _check_rows(self, row: RowsOf) -> None:
        of_edges, kind, name = row
        meta = self._directory.meta
        types: Any = meta.edges if of_edges else meta.nodes
        if kind not in types or name not in types[kind].attributes:
            raise KeyError(f"{kind or 'the graph'} has no attribute {name!r}")

    def _count(self, row: RowsOf) -> int:
        of_edges, kind, _ = row
        meta: Any = self._directory.meta
        return meta.edges[kind].num_edges if of_edges else meta.nodes[kind].num_nodes


_NONE = torch.empty(0, dtype=torch.int64)


def _row_of(found: Sequence[Any]) -> RowsOf:
    of_edges, kind, name = found
    return bool(of_edges), tuple(kind) if isinstance(kind, list) else kind, str(name)


def _flags(flags: Tensor) -> tuple[int, bool, bool]:
    key, timed, labelled = flags.tolist()
    return key % _WHOLE, bool(timed), bool(labelled)


def _ids_of(out: Any) -> tuple[dict[NodeType, Tensor], dict[EdgeType, Tensor | None]]:
    """The original ids of the sampled nodes and edges."""
    if not isinstance(out.node, dict):
        return {None: out.node}, {None: _int64(out.edge)}
    edges = out.edge or {}
    return out.node, {t: _int64(edges.get(t)) for t in out.row}


def _int64(ids: Tensor | None) -> Tensor | None:
    return None if ids is None else ids.to(torch.int64)
