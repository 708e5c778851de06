"""Opening of the graph of two local stores by the ranks of a ``DistContext``."""

from __future__ import annotations

import copy
import os
from typing import Any, Protocol, runtime_checkable

from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch_geometric.data import HeteroData

from pyg_scale import plugins
from pyg_scale.comm.connect import Group
from pyg_scale.comm.meeting import meet, open_store
from pyg_scale.distributed.opening import open_graph, open_on_ranks
from pyg_scale.store.directory.opening import graph_of
from pyg_scale_migrate.pyg_distributed.feature_store import LocalFeatureStore
from pyg_scale_migrate.pyg_distributed.graph_store import LocalGraphStore, checked_integer
from pyg_scale_migrate.pyg_distributed.memory import directory_in_memory
from pyg_scale_migrate.pyg_distributed.part import PartInfo


@runtime_checkable
class Context(Protocol):
    """The place of a process in a group, as in the ``DistContext`` of PyG and of this package.

    Attributes:
        rank: Its rank.
        world_size: Number of ranks.
        group_name: Loaders of one group meet under this name.
    """

    rank: int
    world_size: int
    group_name: str


def address_of(master_addr: str | None, master_port: int | str | None) -> tuple[str, int]:
    """The address where ranks meet: the given one, else ``MASTER_ADDR`` and ``MASTER_PORT`` + 1.

    Raises:
        ValueError: If neither is set, or the port is invalid.
    """
    if master_addr is None:
        master_addr = os.environ.get("MASTER_ADDR")
    if master_port is None and "MASTER_PORT" in os.environ:
        master_port = int(os.environ["MASTER_PORT"]) + 1  # MASTER_PORT is DDP's
    for name, value in (("master_addr", master_addr), ("master_port", master_port)):
        if value is None:
            raise ValueError(f"{name} is missing: pass it, or set {name.upper()}")
    try:
        port = int(master_port)  # type: ignore[arg-type]
    except ValueError:
        port = 0
    if not 0 < port < 65536:
        raise ValueError(f"master_port must be from 1 to 65535 (got {master_port!r})")
    return str(master_addr), port


def stores_of(data: Any) -> tuple[LocalFeatureStore, LocalGraphStore]:
    """Check the pair of stores.

    Raises:
        TypeError: If it is something else.
        ValueError: If they are of different directories or parts.
    """
    if (
        not isinstance(data, tuple | list)
        or len(data) != 2
        or not isinstance(data[0], LocalFeatureStore)
        or not isinstance(data[1], LocalGraphStore)
    ):
        raise TypeError(
            "data must be (LocalFeatureStore, LocalGraphStore) of pyg_scale.distributed (got "
            f"{data if not isinstance(data, tuple | list) else [type(v).__name__ for v in data]})"
        )
    features, graph = data
    in_memory = [not isinstance(each, PartInfo) for each in data]
    differ = in_memory[0] != in_memory[1] or (
        # For stores of tensors, users set the part only on the graph store.
        not in_memory[0]
        and (features.directory.path, features.partition_idx)
        != (graph.directory.path, graph.partition_idx)
    )
    if differ:
        raise ValueError(f"data are different parts: {features!r} and {graph!r}")
    return features, graph


def open_together(
    features: LocalFeatureStore,
    graph_store: LocalGraphStore,
    address: tuple[str, int],
    context: Context,
    num_threads: int,
    timeout: float,
    time_attr: str | None,
    weight_attr: str | None,
) -> Any:
    """Open a graph with all ranks of a context; loaders with the same address share it.

    Args:
        features: The features of the part.
        graph_store: The edges of the part.
        address: The address where ranks meet; rank 0 listens there.
        context: The ``rank``, ``world_size`` and ``group_name`` of this process.
        num_threads: Number of requests of other ranks that this one answers at a time.
        timeout: Time limit in seconds for the others to join and to answer.
        time_attr: ``time_attr`` of the loader, by which stores of tensors are ordered.
        weight_attr: ``weight_attr`` of the loader.

    Raises:
        TypeError: If it is no context.
        ValueError: If the context contradicts itself, loaders at one address differ, or stores of
            tensors do not fit together.
        CommError: If rank 0 cannot use the port.
        CommTimeoutError: If some ranks do not join in time; names them.
        GraphDirectoryError: If no rank has a part.
    """
    if not isinstance(context, Context):
        raise TypeError(
            f"current_ctx must be a DistContext of pyg_scale.distributed (got {context!r})"
        )
    rank = checked_integer("rank of current_ctx", context.rank)
    world_size = checked_integer("world_size of current_ctx", context.world_size)
    if not 0 <= rank < world_size:
        raise ValueError(f"current_ctx: rank {rank} of {world_size} ranks is none of them")
    path = graph_store.directory.path if isinstance(graph_store, PartInfo) else None
    order = {"time_attr": time_attr, "weight_attr": weight_attr}
    if world_size == 1:
        if path is not None:
            return open_graph(path, comm="local")
        return graph_of(directory_in_memory(features, graph_store, None, **order))
    options = (rank, world_size, num_threads, timeout, *(order.values() if path is None else ()))
    content = [] if path is not None else [*features.contents(), *graph_store.contents()]
    known = graph_store.opened.get(address)
    if known is not None and not known[0].ranks.closed:
        if known[1] != options:
            raise ValueError(
                f"a loader at {address[0]}:{address[1]} has another current_ctx, num_rpc_threads, "
                "rpc_timeout or (of stores of tensors) time_attr or weight_attr: loaders share the "
                "connection there; take another master_port"
            )
        if not _same(known[2], content):
            raise ValueError(
                f"a loader at {address[0]}:{address[1]} was made with another feature store, or "
                "the stores were changed since: loaders share the graph there; take another "
                "master_port"
            )
        return known[0]
    store = open_store(*address, rank, hosted=_is_agents(address), timeout=timeout)
    store = PrefixStore(f"pyg_scale/loader/{context.group_name}", store)
    store = meet(store, rank, world_size, timeout=timeout).store
    comm = plugins.get("comm", "gloo").join(Group(store, rank, world_size, timeout))
    try:
        source = path or directory_in_memory(features, graph_store, comm, **order)
        graph: Any = open_on_ranks(source, comm, num_threads=num_threads)
    except BaseException:
        comm.close()
        raise
    graph.ranks.owns(comm)
    graph_store.opened[address] = (graph, options, content)
    return graph


def _same(one: list[tuple[Any, Any]], two: list[tuple[Any, Any]]) -> bool:
    """Return True if two stores hold the same tensor objects."""
    return len(one) == len(two) and all(a[0] == b[0] and a[1] is b[1] for a, b in zip(one, two))


def _is_agents(address: tuple[str, int]) -> bool:
    """Return True if torchrun's agent already has a store at the address."""
    there = (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"))
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return shared and there == (address[0], str(address[1]))


def with_labels(data: Any, features: LocalFeatureStore, node_type: str | None) -> Any:
    """The graph with the labels set by the user, if any, as ``y``.

    Args:
        data: The opened graph, which is not changed.
        features: The store with the labels.
        node_type: The node type of the seeds.

    Raises:
        ValueError: If the numbers of labels and nodes differ, or the labelled nodes are not known.
        KeyError: If they have a node type that does not exist.
    """
    features.labels_are_used = True
    labels = features.labels
    if labels is None:
        return data
    data = copy.copy(data)
    if not isinstance(data, HeteroData):
        _check(labels, data.num_nodes, "the graph")
        data.y = labels
        return data
    if not isinstance(labels, dict):
        if node_type is None:
            raise ValueError(
                "labels of a graph with types: a dictionary by node type, as seeds that are links "
                "do not say which nodes they label"
            )
        labels = {node_type: labels}
    for name, values in labels.items():
        if name not in data.node_types:
            raise KeyError(f"labels name the node type {name!r}, there are {data.node_types}")
        _check(values, data[name].num_nodes, repr(name))
        data[name].y = values
    return data


def _check(labels: Any, num_nodes: int, what: str) -> None:
    if not isinstance(labels, Tensor) or labels.dim() == 0 or labels.size(0) != num_nodes:
        shape = list(labels.shape) if isinstance(labels, Tensor) else type(labels).__name__
        raise ValueError(
            f"labels of {what} must be a tensor with a row for each of {num_nodes} nodes, by "
            f"original id (got {shape})"
        )
