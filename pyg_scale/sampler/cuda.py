"""The neighbour sampler on a CUDA device: the draws of the others, on a copy of the graph there."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from pyg_scale.errors import DeviceError
from pyg_scale.files.byte_size import byte_size
from pyg_scale.graph.topology import EdgeType, NodeType, Topology
from pyg_scale.ops import keys
from pyg_scale.ops.candidates import Candidates, Choosing, candidates_along_types
from pyg_scale.ops.draw_neighbors import Counted, Drawn, Wanted, draw_along_types, offsets_of
from pyg_scale.sampler.base import NeighborSampler, Sample, one_of
from pyg_scale.sampler.device_graph import DeviceGraph, graph_bytes, place, pointer_bytes
from pyg_scale.sampler.device_nodes import DeviceNodes, Met, NodesByHash, NodesInTable, joined
from pyg_scale.sampler.times import TimeLimits, rows_of
from pyg_scale.store.device.placement import GRAIN
from pyg_scale.store.device.shares import SHARES, free_bytes
from pyg_scale.store.device.target import budget_of, device_of, send

_HOST = ("auto", "mapped", "never")
_SMALL = 1 / 64  # of a device's memory: of hops that take less nobody asks whether they fit
_GRAINS = 64  # tensors of an edge type, each of which is rounded up


class CudaSampler(NeighborSampler):
    """Samples neighbours on a device, uniformly or by weight, within the times of seeds.

    Returns the bits of the other built-in samplers, as tensors on the device. The graph is copied
    there when the sampler is bound: its in-edges, their times and weights, the times of nodes, and
    4 bytes for each node unless batches are disjoint. What does not fit stays on the host, in
    locked pages that the device reads over the bus (UVA): the parts that are read least for their
    size (:func:`.place`). Parts in mapped files are copied into memory for that, if they take no
    more than half of what is free. Batches are sampled one at a time: a second thread waits. Each
    hop waits for the device once, for how many nodes are new and how many edges they get.

    A hop takes no more of the device than :meth:`.DeviceNodes.bytes_to_meet` and the edges that it
    draws say, which is known before it begins.

    Args:
        args: See :class:`NeighborSampler`, as for ``kwargs``.
        device: ``"cuda"``, ``"cuda:1"``, a ``torch.device``; ``"cpu"`` does the same without a
            device.
        memory: What the graph may take of the device: bytes, or text such as ``"4GB"``; ``None``:
            what is left of the half that loaders and stores without a budget share, and the
            pointers and rows in any case.
        host: ``"auto"``: what does not fit stays on the host. ``"mapped"``: all but pointers and
            rows does. ``"never"``: all is on the device; ``memory=None`` is then no limit.
        kwargs: See there.

    Raises:
        DeviceError: If the device is not there, says what is missing; if the graph does not fit; if
            what does not fit cannot be mapped.
        TypeError: If ``memory`` is neither a number nor text.
        ValueError: If it is not an amount of memory, or ``host`` is not one of these.
    """

    supports: ClassVar[frozenset[str]] = frozenset(
        {
            *("hetero", "replace", "disjoint", "weighted", "node_time", "edge_time", "last"),
            *("window", "strict", "backward", "fixed", "links"),
        }
    )

    def __init__(
        self,
        *args: Any,
        device: Any = "cuda",
        memory: int | str | None = None,
        host: str = "auto",
        **kwargs: Any,
    ) -> None:
        self.device = device_of(device)
        self.memory = None if memory is None else byte_size(memory, "memory")
        self.host = one_of("host", host, _HOST)
        self._graph: DeviceGraph | None = None
        self._turn = threading.Lock()
        self._done: Any = None
        super().__init__(*args, **kwargs)

    @property
    def draws_by_node(self) -> bool:
        """See :class:`.DrawsByNode`; if disjoint, seeds count, too."""
        return not self.disjoint or not self.redraw

    def _attach(self, data: Any) -> None:
        super()._attach(data)
        self._turn = threading.Lock()
        self._graph = self._there()

    def _there(self) -> DeviceGraph:
        topology, rows = self._bound(), not self.disjoint
        least, all_of_it = pointer_bytes(topology, rows=rows), graph_bytes(topology, rows=rows)
        budget = all_of_it
        if self.memory is not None:
            budget = budget_of(self.memory, self.device)
        elif self.host != "never" and self.device.type == "cuda":
            budget = max(least, budget_of(None, self.device))
        wanted = all_of_it if self.host == "never" else least
        if wanted > budget:
            which = "graph takes" if self.host == "never" else "graph's pointers and rows take"
            raise DeviceError(
                f"the {which} {wanted} bytes of {self.device}, more than memory={self.memory}: "
                "give more, or sample on the CPU (neighbor_sampler='native')"
            )
        budget = least if self.host == "mapped" else budget
        there = place(topology, budget, self.hops(), rows=rows)
        graph = DeviceGraph(topology, self.device, rows=rows, there=there)
        if self.memory is None:
            SHARES.take(graph, self.device, graph.num_bytes)
        return graph

    @classmethod
    def like(
        cls,
        sampler: NeighborSampler,
        device: Any = "cuda",
        memory: int | str | None = None,
    ) -> CudaSampler:
        """One with the graph and the options of a sampler that is bound.

        Raises:
            NotImplementedError: If it has options that this one does not support.
            DeviceError: If the graph does not fit, see the class.
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
            redraw=sampler.redraw,
            time_window=sampler.time_window,
            strictly_earlier=sampler.strictly_earlier,
            device=device,
            memory=memory,
        )
        made.topology = sampler.topology
        made._check_reach(made._bound())
        made._check_supported()
        made._graph = made._there()
        return made

    @property
    def num_bytes(self) -> int:
        """Bytes of the device that the graph takes."""
        return 0 if self._graph is None else self._graph.num_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of the graph that the device reads from the host."""
        return 0 if self._graph is None else self._graph.host_bytes

    def sample(
        self,
        seed: Mapping[NodeType, Tensor],
        seed_time: Mapping[NodeType, Tensor] | None,
        key: int,
    ) -> Sample:
        """See :meth:`NeighborSampler.sample <pyg_scale.sampler.base.NeighborSampler.sample>`.

        Raises:
            ValueError: If the batch has more nodes and edges than can be numbered.
            DeviceError: If a hop takes more memory than the device has left.
        """
        with self._turn:
            if self._graph is None or not self._graph.is_here:  # in another process
                self._graph = self._there()
            graph, topology = self._graph, self._bound()
            if self._done is not None:  # the batch before, on another stream, uses the same memory
                torch.cuda.current_stream(self.device).wait_event(self._done)
            try:
                batch = _Batch(topology, graph, seed, seed_time, self)
                hops = self.hops()
                depth = max(map(len, hops.values()), default=0)
                for hop in range(depth):
                    if hop == 0:
                        batch.count_seeds({t: hops[t][0] for t in topology.edge_types})
                    batch.check_room(hop, hop + 1 == depth)
                    self._draw(batch, hop, key)
                    wanted = None
                    if hop + 1 < depth:
                        wanted = {t: hops[t][hop + 1] for t in topology.edge_types}
                    batch.end_hop(wanted)
                out = batch.sample()
                graph.forget(out.node)
            except BaseException as error:
                self._graph = None  # what it knows of the batch is of no use to the next one
                if isinstance(error, torch.OutOfMemoryError):
                    raise DeviceError(f"{self.device}: {error}; {_TRY}") from error
                raise
            if self.device.type == "cuda":
                self._done = torch.cuda.Event()
                self._done.record(torch.cuda.current_stream(self.device))
        return self._finish(out)

    def _draw(self, batch: _Batch, hop: int, key: int) -> None:
        hops = self.hops()
        own = {
            t: keys.fold(key, keys.NEIGHBOR, hop, keys.edge_type_hash(t))
            for t in self._bound().edge_types
        }
        batch.draw(own, {t: hops[t][hop] for t in own})

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


_TRY = "use smaller batches or fewer neighbours, or give the graph less of the device (memory=)"


class _Batch:
    """A batch in the making."""

    def __init__(
        self,
        topology: Topology,
        graph: DeviceGraph,
        seed: Mapping[NodeType, Tensor],
        seed_time: Mapping[NodeType, Tensor] | None,
        sampler: NeighborSampler,
    ) -> None:
        self._topology, self._graph, self._replace = topology, graph, sampler.replace
        self._last = sampler.temporal_strategy == "last"
        self._draws_by_seed = sampler.disjoint and sampler.redraw
        none = torch.empty(0, dtype=torch.int64)
        self._seed = {t: seed.get(t, none).to(torch.int64) for t in topology.node_types}
        self._limits_here = None if seed_time is None else _limits(sampler, self._seed, seed_time)
        self._limits = _there(self._limits_here, graph.device)
        self._nodes: dict[NodeType, DeviceNodes] = {}
        num_seeds = sum(node.numel() for node in self._seed.values())
        position = 0
        for node_type, given in self._seed.items():
            node, size = send(given, graph.device), topology.num_nodes[node_type]
            end = position + given.numel()
            if not sampler.disjoint and graph.row_of:
                self._nodes[node_type] = NodesInTable(node, graph.row_of[node_type])
            else:
                of = torch.arange(position, end, device=graph.device) if sampler.disjoint else None
                self._nodes[node_type] = NodesByHash(node, of, size, num_seeds)
            position = end
        self._edges: dict[EdgeType, list[tuple[Drawn, Tensor, Tensor]]] = {
            edge_type: [] for edge_type in topology.edge_types
        }
        self._counted: dict[EdgeType, Counted] = {}
        self._drawn: dict[EdgeType, Drawn] = {}
        self._num_edges = 0  # of the hops before

    def count_seeds(self, wanted: Mapping[EdgeType, int]) -> None:
        """Count the edges that the seeds get; their number is found on the CPU, without waiting.

        Args:
            wanted: Number of draws for each node along every edge type.
        """
        totals = _edges_of_seeds(
            self._topology, self._seed, self._limits_here, wanted, self._replace, self._last
        )
        nodes = {t: self._nodes[self._topology.expanded_type(t)] for t in wanted}
        asked = {
            t: self._choosing(t, nodes[t].frontier, nodes[t].frontier_seed, k)
            for t, k in wanted.items()
            if nodes[t].frontier.numel()
        }
        for edge_type, found in self._candidates(asked).items():
            offset = offsets_of(found.counts)
            given = found.counts, offset, totals[edge_type], found.begin, found.end
            self._counted[edge_type] = Counted(*given)

    def _choosing(self, edge_type: EdgeType, node: Tensor, of: Tensor | None, k: int) -> Choosing:
        """The choice of nodes; ``of`` has the positions of their seeds, if disjoint."""
        graph = self._graph
        return _choosing(self._topology, graph, self._limits, edge_type, node, of, k)

    def _candidates(self, asked: Mapping[EdgeType, Choosing]) -> dict[EdgeType, Candidates]:
        found = candidates_along_types([*asked.values()], self._replace, self._last)
        return dict(zip(asked, found, strict=True))

    def check_room(self, hop: int, last: bool) -> None:
        """Refuse a hop for which the device has no memory, before it begins.

        Raises:
            DeviceError: If it takes more than is left.
        """
        wanted, device = self.bytes_of_hop(last), self._graph.device
        if wanted < _small(device):
            return
        left = free_bytes(device)
        if wanted > left:
            edges = sum(counted.total for counted in self._counted.values())
            raise DeviceError(
                f"hop {hop} of the batch draws {edges} edges, which may take {wanted} bytes of "
                f"{device}, and {left} are left: {_TRY}"
            )

    def bytes_of_hop(self, last: bool) -> int:
        """The most memory that the hop that was counted takes, and the batch after it.

        Of each edge 40 bytes are kept, of each node that may be new 32, and unless the hop is the
        last one 72 more for each edge type that expands it. The nodes of one type at a time take
        :meth:`.DeviceNodes.bytes_to_meet`. The batch has 40 bytes for each edge and node.
        """
        topology = self._topology
        edges = {t: counted.total for t, counted in self._counted.items()}
        so_far, found = self._num_edges + sum(edges.values()), 40 * sum(edges.values())
        transient = 0
        for node_type, nodes in self._nodes.items():
            met = sum(n for t, n in edges.items() if topology.neighbor_type(t) == node_type)
            expanding = sum(topology.expanded_type(t) == node_type for t in topology.edge_types)
            new = nodes.most_new(met)
            found += (32 + 72 * expanding * (not last)) * new + 40 * (nodes.size + new)
            transient = max(transient, nodes.bytes_to_meet(met))
        return found + transient + 40 * so_far + _GRAINS * GRAIN * len(topology.edge_types)

    def draw(
        self,
        key: Mapping[EdgeType, int],
        num_neighbors: Mapping[EdgeType, int],
    ) -> None:
        """Draw the edges that the frontier gets, along all edge types at once."""
        topology, wanted = self._topology, {}
        for edge_type, own in key.items():
            counted = self._counted.get(edge_type)
            nodes = self._nodes[topology.expanded_type(edge_type)]
            frontier = nodes.frontier
            if counted is None or counted.total == 0:
                none = frontier.new_empty(0)
                counts = none if counted is None else counted.counts
                self._drawn[edge_type] = Drawn(counts, none, none, none)
                continue
            size = topology.num_nodes[topology.neighbor_type(edge_type)]
            k = num_neighbors[edge_type]
            by_seed = nodes.frontier_seed if self._draws_by_seed else None
            csc = self._graph.csc[edge_type]
            wanted[edge_type] = Wanted(
                csc.indptr,
                csc.indices,
                csc.edge_id,
                frontier,
                size,
                own,
                k,
                counted,
                by_seed,
                csc.weight_prefix,
            )
        self._drawn |= dict(zip(wanted, draw_along_types([*wanted.values()], self._replace)))

    def end_hop(self, wanted: Mapping[EdgeType, int] | None) -> None:
        """Give rows to the nodes that the hop met, and count the edges that they get in the next.

        Waits for the device once. Until then, all edges that lead to a node type may lead to new
        nodes, so everything is made for as many, but for no more than are not in the batch yet:
        see :meth:`bytes_of_hop`.

        Args:
            wanted: Number of draws for each new node along every edge type; ``None`` after the last
                hop.
        """
        topology = self._topology
        met: dict[NodeType, Met] = {}
        for node_type, nodes in self._nodes.items():
            types = [t for t in self._drawn if topology.neighbor_type(t) == node_type]
            sizes = [self._drawn[t].row.numel() for t in types]
            rows: list[Tensor] = [self._drawn[t].neighbor for t in types]
            if sum(sizes):
                node = joined(rows[0], rows)
                met[node_type] = nodes.meet(node, self._seeds_of(types))
                rows = list(met[node_type].row.split(sizes))
            for edge_type, row in zip(types, rows, strict=True):
                col = self._drawn[edge_type].row
                begin = self._nodes[topology.expanded_type(edge_type)].begin
                if begin and col.numel():
                    col = col + begin
                self._edges[edge_type].append((self._drawn[edge_type], row, col))
            self._num_edges += sum(sizes)
        sizes_met = [each.size for each in met.values()]
        asked = {}
        for edge_type, k in (wanted or {}).items():
            here = met.get(topology.expanded_type(edge_type))
            if here is not None:
                asked[edge_type] = self._choosing(edge_type, here.new, here.new_seed, k)
        counts: dict[EdgeType, tuple[Candidates, Tensor, Tensor]] = {}
        for edge_type, found in self._candidates(asked).items():
            given = found.counts * met[topology.expanded_type(edge_type)].is_new
            counts[edge_type] = found, given, offsets_of(given)
            sizes_met.append(counts[edge_type][2][-1])
        self._counted = {}
        numbers = iter(torch.stack(sizes_met).tolist() if sizes_met else [])  # waits
        for node_type, nodes in self._nodes.items():
            size = next(numbers) if node_type in met else 0
            there = met.get(node_type)
            if there is None:
                none = nodes.frontier.new_empty(0)
                nodes.add(none, none)
            else:
                nodes.add(there.new[:size], _first(there.new_seed, size))
        for edge_type, (found, given, offset) in counts.items():
            size = self._nodes[topology.expanded_type(edge_type)].frontier.numel()
            self._counted[edge_type] = Counted(
                given[:size],
                offset[: size + 1],
                next(numbers),
                _first(found.begin, size),
                _first(found.end, size),
            )
        self._drawn = {}

    def _seeds_of(self, edge_types: Sequence[EdgeType]) -> Tensor | None:
        """The positions of the seeds of all edges that were drawn along some types."""
        found = []
        for edge_type in edge_types:
            of = self._nodes[self._topology.expanded_type(edge_type)].frontier_seed
            row = self._drawn[edge_type].row
            if of is None:
                return None
            found.append(of[row] if row.numel() else row)
        return joined(found[0], found)

    def sample(self) -> Sample:
        """The result in the dtypes that the contract asks for."""
        dtype = self._topology.index_dtype
        nodes = {t: nodes.all() for t, nodes in self._nodes.items()}
        of = {t: each.all_seeds() for t, each in self._nodes.items()}
        seeds = {t: each for t, each in of.items() if each is not None}
        out = Sample(
            node={t: node.to(dtype) for t, node in nodes.items()},
            row={},
            col={},
            edge={},
            batch=seeds or None,
            num_sampled_nodes={t: nodes.per_hop for t, nodes in self._nodes.items()},
            num_sampled_edges={},
            colptr={},
        )
        assert out.num_sampled_edges is not None and out.colptr is not None
        for edge_type, hops in self._edges.items():
            none = nodes[self._topology.expanded_type(edge_type)].new_empty(0)
            out.row[edge_type] = joined(none, [row for _, row, _ in hops]).to(dtype)
            out.col[edge_type] = joined(none, [col for _, _, col in hops]).to(dtype)
            out.edge[edge_type] = joined(none, [drawn.edge for drawn, _, _ in hops])
            out.num_sampled_edges[edge_type] = [row.numel() for _, row, _ in hops]
            out.colptr[edge_type] = offsets_of(joined(none, [drawn.counts for drawn, _, _ in hops]))
        return out


def _small(device: torch.device) -> float:
    if device.type != "cuda":
        return math.inf
    return float(torch.cuda.get_device_properties(device).total_memory * _SMALL)


def _first(tensor: Tensor | None, size: int) -> Tensor | None:
    return None if tensor is None else tensor[:size]


def _limits(
    sampler: NeighborSampler, seed: Mapping[NodeType, Tensor], seed_time: Mapping[NodeType, Tensor]
) -> TimeLimits:
    """The limits of all seeds, on the CPU."""
    given = [seed_time[t].to("cpu", torch.int64) for t, node in seed.items() if node.numel()]
    return sampler.time_limits(torch.cat(given) if given else torch.empty(0, dtype=torch.int64))


def _there(limits: TimeLimits | None, device: torch.device) -> TimeLimits | None:
    if limits is None:
        return None
    after = {edge_type: send(each, device) for edge_type, each in limits.after.items()}
    return TimeLimits(send(limits.latest, device), after, limits.strict)


def _choosing(
    topology: Topology,
    graph: Topology | DeviceGraph,
    limits: TimeLimits | None,
    edge_type: EdgeType,
    node: Tensor,
    of: Tensor | None,
    k: int,
) -> Choosing:
    """The choice of nodes, in a graph wherever that is; see :meth:`_Batch._choosing`."""
    csc = graph.csc[edge_type]
    out = Choosing(csc.indptr, csc.indices, node, k, weight_prefix=csc.weight_prefix)
    if limits is None or not topology.is_timed(edge_type):
        return out
    return out._replace(
        time=csc.time,
        neighbor_time=graph.node_time.get(topology.neighbor_type(edge_type)),
        latest=rows_of(limits.latest, of),
        after=rows_of(limits.after.get(edge_type), of),
    )


def _edges_of_seeds(
    topology: Topology,
    seed: Mapping[NodeType, Tensor],
    limits: TimeLimits | None,
    wanted: Mapping[EdgeType, int],
    replace: bool,
    last: bool,
) -> dict[EdgeType, int]:
    """Number of edges that seeds get along each edge type, by the graph on the CPU."""
    position, of = 0, {}
    for node_type, node in seed.items():
        of[node_type] = torch.arange(position, position + node.numel())
        position += node.numel()
    asked = []
    for edge_type, k in wanted.items():
        kind = topology.expanded_type(edge_type)
        node = seed[kind].to(topology.csc[edge_type].indptr.device)
        asked.append(_choosing(topology, topology, limits, edge_type, node, of[kind], k))
    found = candidates_along_types(asked, replace, last)
    return {t: int(each.counts.sum()) for t, each in zip(wanted, found, strict=True)}
