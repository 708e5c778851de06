"""The neighbour sampler on a CUDA device: the draws of the others, on a copy of the graph there."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from pyg_scale.graph.topology import EdgeType, NodeType, Topology
from pyg_scale.ops import keys
from pyg_scale.ops.draw_neighbors import Drawn, draw_neighbors
from pyg_scale.sampler.base import NeighborSampler
from pyg_scale.sampler.device_graph import DeviceGraph
from pyg_scale.sampler.output import Sample
from pyg_scale.store.device.target import device_of, send


class CudaSampler(NeighborSampler):
    """Samples neighbours uniformly on a device, with or without replacement.

    Returns the bits of the other built-in samplers, as tensors on the device. The graph is copied
    there when the sampler is bound, with 4 bytes for each node. Batches are sampled one at a time:
    a second thread waits. Each hop and edge type waits for the device twice, for how many edges and
    new nodes there are.

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
            graph = self._graph
            try:
                batch = _Batch(self._bound(), graph, seed)
                for hop in range(max(map(len, self.hops().values()), default=0)):
                    self._expand(graph, batch, hop, key)
                out = batch.sample()
                graph.forget(out.node)
            except BaseException:
                self._graph = None  # what it knows of the batch is of no use to the next one
                raise
            if self.device.type == "cuda":
                # The next batch, on another stream, uses the same memory.
                torch.cuda.current_stream(self.device).synchronize()
        return out

    def _expand(self, graph: DeviceGraph, batch: _Batch, hop: int, key: int) -> None:
        topology, hops = self._bound(), self.hops()
        frontier = batch.frontier()
        for edge_type in topology.edge_types:
            drawn = draw_neighbors(
                *graph.csc[edge_type],
                frontier[topology.expanded_type(edge_type)],
                topology.num_nodes[topology.neighbor_type(edge_type)],
                keys.fold(key, keys.NEIGHBOR, hop, keys.edge_type_hash(edge_type)),
                hops[edge_type][hop],
                replace=self.replace,
            )
            batch.add(edge_type, drawn)
        batch.end_hop()

    def _bound(self) -> Topology:
        assert self.topology is not None
        return self.topology

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_graph": None, "_turn": None, "device": str(self.device)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.device, self._turn = device_of(state["device"]), threading.Lock()


class _Batch:
    """A batch in the making."""

    def __init__(
        self, topology: Topology, graph: DeviceGraph, seed: Mapping[NodeType, Tensor]
    ) -> None:
        self._topology = topology
        self._nodes = {}
        for node_type in topology.node_types:
            given = seed.get(node_type, torch.empty(0, dtype=torch.int64)).to(torch.int64)
            self._nodes[node_type] = _Nodes(graph.row_of[node_type], send(given, graph.device))
        self._edges: dict[EdgeType, list[tuple[Drawn, Tensor, Tensor]]] = {
            edge_type: [] for edge_type in topology.edge_types
        }
        self._begin = dict.fromkeys(topology.node_types, 0)

    def frontier(self) -> dict[NodeType, Tensor]:
        """The nodes of each type that the hop before added."""
        return {t: nodes.all()[self._begin[t] :] for t, nodes in self._nodes.items()}

    def add(self, edge_type: EdgeType, drawn: Drawn) -> None:
        """Append the edges that the frontier got, and the nodes they lead to."""
        topology = self._topology
        col = drawn.row + self._begin[topology.expanded_type(edge_type)]
        row = self._nodes[topology.neighbor_type(edge_type)].rows(drawn.neighbor)
        self._edges[edge_type].append((drawn, row, col))

    def end_hop(self) -> None:
        """Let the next hop expand the nodes that this one added."""
        for node_type, nodes in self._nodes.items():
            self._begin[node_type] = sum(nodes.per_hop)
            nodes.per_hop.append(nodes.size - self._begin[node_type])

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
            counts = torch.cat([none.new_zeros(1), *(drawn.counts for drawn, _, _ in hops)])
            out.row[edge_type] = torch.cat([none, *(row for _, row, _ in hops)]).to(dtype)
            out.col[edge_type] = torch.cat([none, *(col for _, _, col in hops)]).to(dtype)
            out.edge[edge_type] = torch.cat([none, *(drawn.edge for drawn, _, _ in hops)])
            out.num_sampled_edges[edge_type] = [row.numel() for _, row, _ in hops]
            out.colptr[edge_type] = counts.cumsum(0)
        return out


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
        self._propose(seed, 0)

    def all(self) -> Tensor:
        """Their ids ``int64`` ``[size]``."""
        if len(self._parts) > 1:
            self._parts = [torch.cat(self._parts)]
        return self._parts[0]

    def rows(self, node: Tensor) -> Tensor:
        """The rows of nodes, ``int64``; a node that has none gets the next one."""
        first = self._propose(node, self.size)
        new = node[self._row_of[node] == first]
        self._row_of[new] = torch.arange(
            self.size, self.size + new.numel(), dtype=torch.int32, device=node.device
        )
        self._parts.append(new)
        self.size += new.numel()
        return self._row_of[node].to(torch.int64)

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
