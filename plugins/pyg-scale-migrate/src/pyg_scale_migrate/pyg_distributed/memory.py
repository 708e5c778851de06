"""Stores of tensors as a graph directory in memory, of which each rank has its part.

Ranks exchange descriptions of their parts, and the ids of their edges. All ranks refuse parts that
do not fit together.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyg_scale.comm import Communicator
from pyg_scale.distributed.records import from_record, to_record
from pyg_scale.files.npy import dtype_name
from pyg_scale.graph.source import one_level
from pyg_scale.graph.topology import EdgeType, NodeType
from pyg_scale.ops.csc import Compressed, build_csc, order_by_time, weight_prefix
from pyg_scale.store.directory import Attribute, EdgeMeta, Meta, NodeMeta
from pyg_scale.store.directory.assemble import FilledPlaces
from pyg_scale.store.directory.in_memory import MemoryDirectory
from pyg_scale.store.directory.layout import book_dtype
from pyg_scale.store.directory.meta import PartitionMeta, attribute_file, edge_dir, node_dir
from pyg_scale_migrate.pyg_distributed.feature_store import LocalFeatureStore
from pyg_scale_migrate.pyg_distributed.graph_store import LocalGraphStore
from pyg_scale_migrate.pyg_distributed.held import Held, HeldEdges, Rows, read_held

_INT32 = 2**31


def directory_in_memory(
    features: LocalFeatureStore,
    graph: LocalGraphStore,
    comm: Communicator | None,
    *,
    time_attr: str | None = None,
    weight_attr: str | None = None,
) -> MemoryDirectory:
    """Make a directory of the share of a graph on this rank. All ranks call it.

    Features are not copied if their rows are those of the part's nodes in ascending order.

    Args:
        features: Rows of at least the nodes and edges of the part.
        graph: The edges that lead to them, and the part of every node.
        comm: The communicator; ``None`` for a single rank.
        time_attr: The attribute of nodes or of edges by which edges are ordered.
        weight_attr: The attribute of edges that holds weights.

    Raises:
        ValueError: If the content of a rank contradicts itself or that of another rank; names the
            contradiction.
        IndexError: If an edge has a node that does not exist.
    """
    try:
        own = read_held(features, graph, 1 if comm is None else comm.world_size)
        said = own.said()
    except (ValueError, IndexError, KeyError, TypeError) as error:
        if comm is not None:
            comm.all_gather(to_record({"error": str(error)}))
        raise
    found = [said]
    if comm is not None:
        found = [
            from_record(record, f"what rank {rank} holds")
            for rank, record in enumerate(comm.all_gather(to_record(said)))
        ]
        _check_agreement(found)
    found.sort(key=lambda each: each["part"])
    return _assemble(own, found, comm, time_attr, weight_attr)


def _check_agreement(found: list[dict[str, Any]]) -> None:
    """Refuse ranks that hold different graphs.

    Raises:
        ValueError: If there are any; names the first such rank, and the difference.
    """
    for rank, each in enumerate(found):
        if each["error"]:
            raise ValueError(f"rank {rank}: {each['error']}")
    what = {
        "num_parts": "num_partitions",
        "is_hetero": "meta['is_hetero']",
        "nodes": "node types, node_pb, or the names, dtypes and shapes of features",
        "edges": "edge types, or the names, dtypes and shapes of their features",
    }
    for rank, each in enumerate(found):
        for name, meaning in what.items():
            if each[name] != found[0][name]:
                raise ValueError(f"rank {rank} and rank 0 differ in {meaning}")
    parts = [each["part"] for each in found]
    if sorted(parts) != list(range(found[0]["num_parts"])):
        raise ValueError(
            f"ranks hold the parts {parts} (partition_idx), expected each of the "
            f"{found[0]['num_parts']} (num_partitions) once"
        )


# Assembling #######################################################################################


def _assemble(
    own: Held,
    found: list[dict[str, Any]],
    comm: Communicator | None,
    time_attr: str | None,
    weight_attr: str | None,
) -> MemoryDirectory:
    of_edges = _times_edges(own, time_attr)
    meta = Meta(
        nodes={},
        edges={},
        num_parts=own.num_parts,
        is_hetero=own.is_hetero,
        time_attr=time_attr,
        time_of_edges=of_edges,
        float_time=time_attr is not None
        and any(
            rows[time_attr].is_floating_point()
            for rows in [*own.nodes.values(), *(each.attributes for each in own.edges.values())]
            if time_attr in rows
        ),
        weight_attr=weight_attr,
        partition=PartitionMeta("memory") if own.num_parts > 1 else None,
    )
    tensors: dict[str, Tensor] = {}
    halo = _halo(own)
    sizes_of_halo = [each.numel() for each in halo.values()]
    gathered = _gathered(comm, {"part": own.part, "halo": sizes_of_halo})
    part_halo = {each["part"]: each["halo"] for each in gathered}
    times: dict[NodeType, Tensor] = {}
    for number, (name, book) in enumerate(own.books.items()):
        rows, folder = own.nodes[name], node_dir(name, own.part)
        meta.nodes[name] = NodeMeta(
            name,
            book.num_nodes,
            attributes=_attributes(rows),
            book=book.part is not None,
            part_nodes=book.offsets.diff().tolist(),
            part_halo=[part_halo[part][number] for part in range(own.num_parts)],
        )
        tensors |= {attribute_file(folder, key): value for key, value in rows.items()}
        if halo[name].numel():
            tensors[f"{folder}/halo.npy"] = halo[name]
        if book.part is not None and book.local is not None:
            tensors[f"{node_dir(name)}/part.npy"] = book.part
            tensors[f"{node_dir(name)}/local.npy"] = book.local
            tensors[f"{folder}/orig_id.npy"] = own.orig_id[name]
        if time_attr in rows and not of_edges:
            times[name] = _all_times(own, name, meta.sortable(rows[time_attr]), comm)
    for number, (edge_type, edges) in enumerate(own.edges.items()):
        sizes = [each["part_edges"][number] for each in found]
        meta.edges[edge_type] = _add_edges(tensors, own, meta, edge_type, edges, sizes, times)
        edge_book = _edge_book(comm, edge_type, edges.ids, own, sum(sizes))
        if own.num_parts > 1:
            tensors[f"{edge_dir(edge_type)}/part.npy"] = edge_book
    name = f"the graph in memory of {own.num_parts} ranks"
    return MemoryDirectory(meta, tensors, [own.part], name)


def _times_edges(own: Held, time_attr: str | None) -> bool:
    if time_attr is None:
        return False
    nodes = [name for name, rows in own.nodes.items() if time_attr in rows]
    edges = [name for name, each in own.edges.items() if time_attr in each.attributes]
    one_level(time_attr, nodes, edges)
    return bool(edges)


def _attributes(rows: Rows) -> dict[str, Attribute]:
    return {
        name: Attribute(dtype_name(value.dtype), tuple(value.shape[1:]))
        for name, value in rows.items()
    }


def _halo(own: Held) -> dict[NodeType, Tensor]:
    """Neighbours that other parts own, ascending."""
    met: dict[NodeType, list[Tensor]] = {name: [] for name in own.books}
    for edge_type, edges in own.edges.items():
        source = None if edge_type is None else edge_type[0]
        met[source].append(edges.src[own.books[source].part_of(edges.src) != own.part])
    none = torch.empty(0, dtype=torch.int64)
    return {name: torch.cat([none, *each]).unique() for name, each in met.items()}


def _gathered(comm: Communicator | None, value: dict[str, Any]) -> list[dict[str, Any]]:
    if comm is None:
        return [value]
    return [from_record(each, "a rank's numbers") for each in comm.all_gather(to_record(value))]


def _all_times(own: Held, name: NodeType, mine: Tensor, comm: Communicator | None) -> Tensor:
    """The times of all nodes of a type, in the form of :meth:`Meta.sortable`."""
    if comm is None:
        return mine
    book = own.books[name]
    out = torch.empty(book.num_nodes, dtype=torch.int64)
    places = FilledPlaces(book.num_nodes, f"the times of {name!r} of all ranks")
    tagged = torch.cat([torch.tensor([own.part]), mine])
    for each in comm.all_gather(tagged):
        ids = book.nodes_of(int(each[0]))
        places.fill(ids)
        out[ids] = each[1:]
    places.check()
    return out


def _add_edges(
    tensors: dict[str, Tensor],
    own: Held,
    meta: Meta,
    edge_type: EdgeType,
    edges: HeldEdges,
    sizes: list[int],
    times: dict[NodeType, Tensor],
) -> EdgeMeta:
    """Group the edges of a type by destination; return their description in the directory."""
    source, target = (None, None) if edge_type is None else (edge_type[0], edge_type[2])
    num_src, num_edges = own.books[source].num_nodes, sum(sizes)
    csc = build_csc(edges.dst, edges.src, own.orig_id[target].numel(), num_src)
    has_time = meta.time_of_edges and meta.time_attr in edges.attributes
    when = None
    if has_time:
        when = meta.sortable(edges.attributes[str(meta.time_attr)])
        csc = order_by_time(csc, when, of_edges=True)
    elif source in times:
        csc = order_by_time(csc, times[source], of_edges=False)
        has_time = own.num_parts > 1
    position = torch.arange(edges.ids.numel()) if csc.edge_id is None else csc.edge_id.long()
    folder = edge_dir(edge_type, own.part)
    indices = torch.int32 if num_src < _INT32 else torch.int64
    wide = torch.int32 if num_edges < _INT32 else torch.int64
    tensors[f"{folder}/indptr.npy"] = csc.indptr
    tensors[f"{folder}/indices.npy"] = csc.indices.to(indices).contiguous()
    tensors[f"{folder}/edge_id.npy"] = edges.ids[position].to(wide)
    if own.num_parts > 1:
        tensors[f"{folder}/ids.npy"] = edges.ids.to(wide)
    if has_time:
        by_position = times[source][csc.indices.long()] if when is None else when[position]
        tensors[f"{folder}/time.npy"] = by_position
    weights = edges.attributes.get(meta.weight_attr or "")
    if meta.weight_attr is not None:
        if weights is None:
            raise ValueError(f"edges {edge_type} have no weight_attr={meta.weight_attr!r}")
        tensors[f"{folder}/weight_prefix.npy"] = _prefix(csc, weights, edges, edge_type)
    for key, value in edges.attributes.items():
        tensors[attribute_file(folder, key)] = value
    return EdgeMeta(
        edge_type,
        num_edges,
        indices_dtype=dtype_name(indices),
        edge_id_dtype=dtype_name(wide),
        has_time=has_time,
        has_weight=weights is not None,
        attributes=_attributes(edges.attributes),
        part_edges=sizes,
    )


def _prefix(csc: Compressed, weights: Tensor, edges: HeldEdges, edge_type: EdgeType) -> Tensor:
    flat = weights.reshape(edges.ids.numel(), -1)
    if flat.size(1) != 1 and flat.numel():
        raise ValueError(f"weights of edges {edge_type} must be one number per edge")
    return weight_prefix(csc, flat.reshape(-1))


def _edge_book(
    comm: Communicator | None, edge_type: EdgeType, ids: Tensor, own: Held, num_edges: int
) -> Tensor:
    """The part of every edge.

    Raises:
        ValueError: If ids are not 0 to ``num_edges - 1``, each on one rank; names one.
    """
    dtype = getattr(torch, book_dtype(own.num_parts))
    book, seen = torch.zeros(num_edges, dtype=dtype), torch.zeros(num_edges, dtype=torch.bool)
    tagged = torch.cat([torch.tensor([own.part]), ids])
    for rank, each in enumerate([tagged] if comm is None else comm.all_gather(tagged)):
        of_rank = each[1:]
        wrong = of_rank[(of_rank < 0) | (of_rank >= num_edges)]
        if not wrong.numel():
            wrong = of_rank[seen[of_rank]]
        if wrong.numel():
            raise ValueError(
                f"edge {int(wrong[0])} {edge_type or ''} of rank {rank}: ids of edges must be 0 to "
                f"{num_edges - 1}, as ranks hold {num_edges}, each id on one of them"
            )
        seen[of_rank] = True
        book[of_rank] = int(each[0])
    return book
