"""The part of a federated client, with sums of the features of neighbours at other clients.

Before training, clients give each other, for each node that has neighbours there, the sum of these
neighbours' features: no row of a single neighbour where there are several, and nothing later. The
first layer then computes what it would on the whole graph. It is FedGCN (Yao et al., NeurIPS 2023)
with sums of one hop, without its encryption.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric import nn as pyg
from torch_geometric.data import Data
from torch_geometric.nn.conv import MessagePassing

from pyg_scale.comm import Communicator
from pyg_scale.parallel.shard import directory_of
from pyg_scale.store.directory import GraphDirectory

AGGREGATES = ("sum", "mean", "gcn")
"""Aggregations of neighbours' features: the last has weights of ``GCNConv``."""


class ClientPart:
    """The nodes of a client, the edges among them, and what all neighbours' features add up to.

    Args:
        graph: What :func:`pyg_scale.open` returned, with a part for each client.
        comm: All clients, each of which calls it; client ``r`` has part ``r``.
        aggregate: ``"sum"``, ``"mean"`` or ``"gcn"``, as the first layer of the model: see
            :data:`AGGREGATES`.

    Raises:
        TypeError: If ``graph`` is not an opened graph, or ``comm`` no communicator.
        ValueError: If there is no such aggregation, the graph has another number of parts, nodes of
            several types, features that are no floating-point numbers, or out-edges in its parts.
        CommError: If a client is gone or late; names it.

    Attributes:
        data: The attributes of its nodes, ``edge_index`` by local numbers of edges between them,
            and original ids ``n_id`` ``[num_own]``.
        aggregated: The aggregate of all neighbours' features ``[num_own, channels]``.
        aggregate: Its name.
    """

    def __init__(self, graph: Any, comm: Communicator, aggregate: str = "mean") -> None:
        directory = _checked(graph, comm, aggregate)
        self.aggregate = aggregate
        part, book, rank = directory.part(comm.rank), directory.books[None], comm.rank
        csc = part.csc(None)
        degrees = csc.indptr.diff()
        dst = torch.arange(degrees.numel()).repeat_interleave(degrees)
        src = csc.indices.to(torch.int64)
        x = part.node_attribute(None, "x")
        own_ids = book.nodes_of(rank)
        owner, local = book.part_of(src), book.local_of(src)
        inside = owner == rank
        scale = torch.ones(len(own_ids), 1, dtype=x.dtype)
        used = torch.ones_like(inside)
        if aggregate == "gcn":  # which has one self-loop at every node
            used = src != own_ids[dst]
            count = torch.bincount(dst[used], minlength=len(own_ids)) + 1
            scale = count.to(x.dtype).rsqrt().view(-1, 1)
        near = inside & used
        total = torch.zeros_like(x).index_add(0, dst[near], (x * scale)[local[near]])
        asked = [dst[used & ~inside & (owner == r)].unique() for r in range(comm.world_size)]
        pairs = [
            torch.stack([torch.searchsorted(nodes, dst[mask]), local[mask]])
            for r, nodes in enumerate(asked)
            for mask in [used & ~inside & (owner == r)]
        ]
        sums = comm.all_to_all([_sums(x * scale, each) for each in comm.all_to_all(pairs)])
        for nodes, found in zip(asked, sums, strict=True):
            total.index_add_(0, nodes, found)
        if aggregate == "mean":
            total = total / degrees.clamp(min=1).view(-1, 1).to(x.dtype)
        elif aggregate == "gcn":
            total = scale * (total + scale * x)
        names = directory.meta.nodes[None].attributes
        self.data = Data(**{name: part.node_attribute(None, name) for name in names})
        self.data.x, self.data.n_id = x, own_ids
        self.data.edge_index = torch.stack([local[inside], dst[inside]])
        self.aggregated = total
        self._itself = torch.arange(len(own_ids)).repeat(2, 1)

    @contextmanager
    def within(self, module: nn.Module) -> Iterator[None]:
        """Within it, a layer that is given the part's features and edges has the aggregate.

        Raises:
            ValueError: If the layer aggregates something else.
            RuntimeError: At the end, if there was no such layer.
        """
        used: list[Any] = []

        def given(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            values = [*args, *kwargs.values()]
            if not values or values[0] is not self.data.x:
                return None
            if len(values) != 2 or values[1] is not self.data.edge_index:
                raise ValueError(
                    f"{type(layer).__name__}: a first layer with sums of neighbours takes the x "
                    "and the edge_index of the part, and nothing else"
                )
            if (kind := _aggregate_of(layer)) != self.aggregate:
                suits = "none" if kind is None else f"aggregate={kind!r}"
                raise ValueError(
                    f"{type(layer).__name__} is the first layer, for which {suits} suits, and the "
                    f"part has aggregate={self.aggregate!r}"
                )
            used.append(layer)
            # Of one neighbour each, whose features are the aggregate, it makes what it would of
            # all of them. GCNConv, whose weights are in the aggregate, has the node itself.
            both = self.aggregated if kind == "gcn" else (self.aggregated, self.data.x)
            return (both, self._itself), {}

        with ExitStack() as stack:
            for layer in module.modules():
                if isinstance(layer, MessagePassing):
                    hook = layer.register_forward_pre_hook(given, with_kwargs=True)
                    stack.callback(hook.remove)
            yield
        if not used:
            raise RuntimeError(
                "no layer was given the part's own x and edge_index, for which there are sums of "
                "neighbours: call model(part.data.x, part.data.edge_index)"
            )


def _sums(rows: Tensor, pairs: Tensor) -> Tensor:
    """The sums of rows for a client, ``[number of its nodes, channels]``.

    Args:
        rows: Rows of own nodes.
        pairs: ``[2, n]``: for which of its nodes, and which row.
    """
    number = int(pairs[0].max()) + 1 if pairs.numel() else 0
    inside = not pairs.numel() or (int(pairs.min()) >= 0 and int(pairs[1].max()) < len(rows))
    if pairs.dim() != 2 or pairs.size(0) != 2 or not inside or number > pairs.size(1):
        raise ValueError("a client asks for sums of nodes that are not here")
    return rows.new_zeros(number, rows.size(1)).index_add(0, pairs[0], rows[pairs[1]])


def _aggregate_of(layer: Any) -> str | None:
    """The aggregation of a layer's own input; ``None`` if it is none of :data:`AGGREGATES`."""
    if isinstance(layer, pyg.GCNConv):
        plain = layer.normalize and layer.add_self_loops and not layer.improved
        return "gcn" if plain and layer.aggr == "add" else None
    if isinstance(layer, pyg.SAGEConv | pyg.GraphConv | pyg.GINConv):
        projects = isinstance(layer, pyg.SAGEConv) and layer.project
        known = {"add": "sum", "sum": "sum", "mean": "mean"}
        return known.get(layer.aggr) if isinstance(layer.aggr, str) and not projects else None
    return None


def _checked(graph: Any, comm: Any, aggregate: str) -> GraphDirectory:
    if aggregate not in AGGREGATES:
        raise ValueError(f"aggregate must be one of {', '.join(AGGREGATES)} (got {aggregate!r})")
    if not isinstance(comm, Communicator):
        raise TypeError(f"comm must be a Communicator (got {type(comm).__name__})")
    directory = directory_of(graph)
    meta = directory.meta
    if meta.is_hetero:
        raise ValueError("nodes have types, for which there are no sums of neighbours")
    if meta.num_parts != comm.world_size or comm.rank not in directory.parts:
        raise ValueError(
            f"{directory.path} has {meta.num_parts} parts for {comm.world_size} clients, and this "
            f"one can read {directory.parts}: client {comm.rank} needs part {comm.rank}"
        )
    if meta.partition is not None and meta.partition.edge_assign_strategy == "by_src":
        raise ValueError("a client needs the in-edges of its nodes: edge_assign_strategy='by_dst'")
    if "x" not in meta.nodes[None].attributes:
        raise ValueError(f"the nodes of {directory.path} have no x")
    return directory
