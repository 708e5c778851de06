"""The neighbour sampler on a CUDA device: the draws of the others, on a copy of the graph there."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from pyg_scale.graph.topology import EdgeType, NodeType, Topology
from pyg_scale.ops import keys
from pyg_scale.ops.draw_neighbors import (
    Counted,
    Drawn,
    counts_of,
    draw_neighbors,
    offsets_of,
)
from pyg_scale.sampler.base import NeighborSampler, Sample
from pyg_scale.sampler.device_graph import DeviceGraph
from pyg_scale.store.device.target import device_of, send


class CudaSampler(NeighborSampler):
    """Samples neighbours uniformly on a device, with or without replacement.

    Returns the bits of the other built-in samplers, as tensors on the device. The graph is copied
    there when the sampler is bound, with 4 bytes for each node. Batches are sampled one at a time:
    a second thread waits. Each hop waits for the device once, for how many nodes are new and how
    many edges they get.

    Args:
        args: See :class:`NeighborSampler`, as for ``kwargs``.
        device: ``"cuda"``, ``"cuda:1"``, a ``torch.device``; ``"cpu"`` does the same without a
            device.
        kwargs: See there.

    Raises:
        DeviceError: If the device is not there; says what is missing.
    """

    supports: ClassVar[frozenset[str]] = frozenset({"hetero", "replace"})

    draws_by_node: ClassVar[bool] = True  # it knows no disjoint ones

    def __init__(self, *args: Any, device: Any = "cuda", **kwargs: Any) -> None:
        self.device = device_of(device)
        self._graph: DeviceGraph | None = None
        self._turn = threading.Lock()
        self._done: Any = None
        super().__init__(*args, **kwargs)

    def _attach(self, data: Any) -> None:
        super()._attach(data)
        self._turn = threading.Lock()
        self._graph = DeviceGraph(self._bound(), self.device)

    @classmethod
    def like(cls, sampler: NeighborSampler, device: Any = "cuda") -> CudaSampler:
        """One with the graph and the options of a sampler that is bound.

        Raises:
            NotImplementedError: If it has options that this one does not support.
        """
        made = cls(
            None,
            sampler.num_neighbors,
            sampler.subgraph_type,
            sampler.replace,
            sampler._disjoint,
            sampler.temporal_strategy,
            sampler.time_attr,
            sampler.weight_attr,
            sample_direction=sampler.sample_direction,
            device=device,
        )
        made.topology = sampler.topology
        made._check_reach(made._bound())
        made._check_supported()
        made._graph = DeviceGraph(made._bound(), made.device)
        return made

    @property
    def num_bytes(self) -> int:
        """Bytes of the device that the graph takes."""
        return 0 if self._graph is None else self._graph.num_bytes

    def sample(
        self,
        seed: Mapping[NodeType, Tensor],
        seed_time: Mapping[NodeType, Tensor] | None,
        key: int,
    ) -> Sample:
        """See :meth:`NeighborSampler.sample <pyg_scale.sampler.base.NeighborSampler.sample>`.

        Raises:
            ValueError: If the batch has more nodes and edges than can be numbered.
        """
        with self._turn:
            if self._graph is None:  # in another process
                self._graph = DeviceGraph(self._bound(), self.device)
            graph, topology = self._graph, self._bound()
            if self._done is not None:  # the batch before, on another stream, uses the same memory
                torch.cuda.current_stream(self.device).wait_event(self._done)
            try:
                batch = _Batch(topology, graph, seed, self.replace)
                hops = self.hops()
                depth = max(map(len, hops.values()), default=0)
                for hop in range(depth):
                    if hop == 0:
                        batch.count_seeds({t: hops[t][0] for t in topology.edge_types})
                    self._draw(graph, batch, hop, key)
                    wanted = None
                    if hop + 1 < depth:
                        wanted = {t: hops[t][hop + 1] for t in topology.edge_types}
                    batch.end_hop(wanted)
                out = batch.sample()
                graph.forget(out.node)
            except BaseException:
                self._graph = None  # what it knows of the batch is of no use to the next one
                raise
            if self.device.type == "cuda":
                self._done = torch.cuda.Event()
                self._done.record(torch.cuda.current_stream(self.device))
        return out

    def _draw(self, graph: DeviceGraph, batch: _Batch, hop: int, key: int) -> None:
        hops = self.hops()
        for edge_type in self._bound().edge_types:
            batch.draw(
                edge_type,
                graph.csc[edge_type],
                keys.fold(key, keys.NEIGHBOR, hop, keys.edge_type_hash(edge_type)),
                hops[edge_type][hop],
            )

    def _bound(self) -> Topology:
        assert self.topology is not None
        return self.topology

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {
            "_graph": None,
            "_turn": None,
            "_done": None,
            "device": str(self.device),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.device, self._turn = device_of(state["device"]), threading.Lock()


class _Batch:
    """A batch in the making."""

    def __init__(
        self,
        topology: Topology,
        graph: DeviceGraph,
        seed: Mapping[NodeType, Tensor],
        replace: bool,
    ) -> None:
        self._topology, self._graph, self._replace = topology, graph, replace
        none = torch.empty(0, dtype=torch.int64)
        self._seed = {t: seed.get(t, none).to(torch.int64) for t in topology.node_types}
        self._nodes = {
            t: _Nodes(graph.row_of[t], send(given, graph.device)) for t, given in self._seed.items()
        }
        self._edges: dict[EdgeType, list[tuple[Drawn, Tensor, Tensor]]] = {
            edge_type: [] for edge_type in topology.edge_types
        }
        self._counted: dict[EdgeType, Counted] = {}
        self._drawn: dict[EdgeType, Drawn] = {}

    def count_seeds(self, wanted: Mapping[EdgeType, int]) -> None:
        """Count the edges that the seeds get; their number is found on the CPU, without waiting.

        Args:
            wanted: Number of draws for each node along every edge type.
        """
        totals = _edges_of_seeds(self._topology, self._seed, wanted, self._replace)
        for edge_type, k in wanted.items():
            indptr = self._graph.csc[edge_type][0]
            node = self._nodes[self._topology.expanded_type(edge_type)].frontier
            if node.numel():
                counts = counts_of(indptr, node, k, self._replace)
                given = counts, offsets_of(counts), totals[edge_type]
                self._counted[edge_type] = Counted(*given)

    def draw(
        self,
        edge_type: EdgeType,
        csc: tuple[Tensor, Tensor, Tensor | None],
        key: int,
        num_neighbors: int,
    ) -> None:
        """Draw the edges that the frontier gets along an edge type."""
        topology, counted = self._topology, self._counted.get(edge_type)
        frontier = self._nodes[topology.expanded_type(edge_type)].frontier
        if counted is None or counted.total == 0:
            none = frontier.new_empty(0)
            counts = none if counted is None else counted.counts
            self._drawn[edge_type] = Drawn(counts, none, none, none)
            return
        self._drawn[edge_type] = draw_neighbors(
            *csc,
            frontier,
            topology.num_nodes[topology.neighbor_type(edge_type)],
            key,
            num_neighbors,
            replace=self._replace,
            counted=counted,
        )

    def end_hop(self, wanted: Mapping[EdgeType, int] | None) -> None:
        """Give rows to the nodes that the hop met, and count the edges that they get in the next.

        Waits for the device once. Until then, all edges that lead to a node type may lead to new
        nodes, so everything is made for as many.

        Args:
            wanted: Number of draws for each new node along every edge type; ``None`` after the last
                hop.
        """
        topology = self._topology
        met: dict[NodeType, _Met] = {}
        for node_type, nodes in self._nodes.items():
            types = [t for t in self._drawn if topology.neighbor_type(t) == node_type]
            sizes = [self._drawn[t].row.numel() for t in types]
            rows: list[Tensor] = [self._drawn[t].neighbor for t in types]
            if sum(sizes):
                met[node_type] = nodes.meet(torch.cat([row for row in rows if row.numel()]))
                rows = list(met[node_type].row.split(sizes))
            for edge_type, row in zip(types, rows, strict=True):
                col = self._drawn[edge_type].row
                begin = self._nodes[topology.expanded_type(edge_type)].begin
                if begin and col.numel():
                    col = col + begin
                self._edges[edge_type].append((self._drawn[edge_type], row, col))
        found = [each.size for each in met.values()]
        counts: dict[EdgeType, tuple[Tensor, Tensor]] = {}
        for edge_type, k in (wanted or {}).items():
            here = met.get(topology.expanded_type(edge_type))
            if here is not None:
                given = counts_of(self._graph.csc[edge_type][0], here.new, k, self._replace)
                given = given * here.is_new
                counts[edge_type] = given, offsets_of(given)
                found.append(counts[edge_type][1][-1])
        self._counted = {}
        numbers = iter(torch.stack(found).tolist() if found else [])  # waits
        for node_type, nodes in self._nodes.items():
            none = nodes.frontier.new_empty(0)
            nodes.add(met[node_type].new[: next(numbers)] if node_type in met else none)
        for edge_type, (given, offset) in counts.items():
            size = self._nodes[topology.expanded_type(edge_type)].frontier.numel()
            self._counted[edge_type] = Counted(given[:size], offset[: size + 1], next(numbers))
        self._drawn = {}

    def sample(self) -> Sample:
        """The result in the dtypes that the contract asks for."""
        dtype = self._topology.index_dtype
        nodes = {t: nodes.all() for t, nodes in self._nodes.items()}
        out = Sample(
            node={t: node.to(dtype) for t, node in nodes.items()},
            row={},
            col={},
            edge={},
            num_sampled_nodes={t: nodes.per_hop for t, nodes in self._nodes.items()},
            num_sampled_edges={},
            colptr={},
        )
        assert out.num_sampled_edges is not None and out.colptr is not None
        for edge_type, hops in self._edges.items():
            none = nodes[self._topology.expanded_type(edge_type)].new_empty(0)
            out.row[edge_type] = _joined(none, [row for _, row, _ in hops]).to(dtype)
            out.col[edge_type] = _joined(none, [col for _, _, col in hops]).to(dtype)
            out.edge[edge_type] = _joined(none, [drawn.edge for drawn, _, _ in hops])
            out.num_sampled_edges[edge_type] = [row.numel() for _, row, _ in hops]
            out.colptr[edge_type] = offsets_of(
                _joined(none, [drawn.counts for drawn, _, _ in hops])
            )
        return out


def _joined(none: Tensor, parts: list[Tensor]) -> Tensor:
    """Tensors one after the other; those without entries cost nothing."""
    parts = [part for part in parts if part.numel()] or [none]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _edges_of_seeds(
    topology: Topology,
    seed: Mapping[NodeType, Tensor],
    wanted: Mapping[EdgeType, int],
    replace: bool,
) -> dict[EdgeType, int]:
    """Number of edges that seeds get along each edge type, by the pointers on the CPU."""
    found = {}
    for edge_type, k in wanted.items():
        indptr = topology.csc[edge_type].indptr
        node = seed[topology.expanded_type(edge_type)].to(indptr.device)
        found[edge_type] = int(counts_of(indptr, node, k, replace).sum())
    return found


class _Met(NamedTuple):
    """The nodes that the edges of a hop lead to, and their rows."""

    row: Tensor
    """Of each of them, ``int64`` ``[m]``."""
    new: Tensor
    """Those that had none, ``int64`` ``[m]``, of which the first ``size`` are meant."""
    is_new: Tensor
    """True where an entry of ``new`` is meant, ``bool`` ``[m]``."""
    size: Tensor
    """Number of these, ``int64``."""


class _Nodes:
    """The nodes of one type in the batch.

    The row of a node is the least of the numbers that were proposed for it: those of the batch
    before it, or the places of the edges that lead to it, counted on from there. A minimum does
    not depend on the order in which it is taken, so the rows are those of a loop over the edges.
    """

    def __init__(self, row_of: Tensor, seed: Tensor) -> None:
        self._row_of = row_of
        self._parts = [seed]
        self.size = seed.numel()
        self.per_hop = [self.size]
        if self.size:
            self._propose(seed, 0)

    @property
    def frontier(self) -> Tensor:
        """The ids of those that the hop before added, ``int64``."""
        return self._parts[-1]

    @property
    def begin(self) -> int:
        """The row of the first of these."""
        return self.size - self.per_hop[-1]

    def all(self) -> Tensor:
        """Their ids ``int64`` ``[size]``."""
        return _joined(self._parts[0], self._parts)

    def meet(self, node: Tensor) -> _Met:
        """Give every node that has no row the next one; nobody waits for how many there are."""
        count, nobody = node.numel(), self._row_of.numel() - 1
        place = self._propose(node, self.size)
        is_first = self._row_of[node] == place
        rank = is_first.cumsum(0)
        row = (rank + (self.size - 1)).to(torch.int32)
        self._row_of.scatter_(0, torch.where(is_first, node, nobody), row)
        new = node.new_zeros(count + 1)
        new.scatter_(0, torch.where(is_first, rank - 1, count), node)
        rows = self._row_of[node].to(torch.int64)
        return _Met(rows, new[:count], place < rank[-1] + self.size, rank[-1])

    def add(self, node: Tensor) -> None:
        """Append the new ones."""
        self._parts.append(node)
        self.size += node.numel()
        self.per_hop.append(node.numel())

    def _propose(self, node: Tensor, begin: int) -> Tensor:
        end = begin + node.numel()
        if end >= 2**31 - 1:
            raise ValueError(
                f"the batch has {end} nodes and edges of a hop, more than 2**31: use smaller "
                "batches or fewer neighbours"
            )
        place = torch.arange(begin, end, dtype=torch.int32, device=node.device)
        self._row_of.scatter_reduce_(0, node, place, "amin")
        return place
