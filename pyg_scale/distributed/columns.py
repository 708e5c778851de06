"""Attributes with one number per node, gathered from all ranks on first access."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pyg_scale.comm import Work
from pyg_scale.distributed.ranks import Ranks
from pyg_scale.distributed.records import to_record
from pyg_scale.errors import CommError, GraphDirectoryError
from pyg_scale.files.npy import torch_dtype
from pyg_scale.graph.source import of
from pyg_scale.graph.topology import NodeType
from pyg_scale.store.directory import GraphDirectory
from pyg_scale.store.directory.assemble import FilledPlaces
from pyg_scale.store.directory.lazy import EDGE_INDEX, read_stored

COLUMN = "column"
"""The request for an attribute of all nodes of a part."""


class Columns:
    """Reads attributes for the graph that several ranks opened.

    Labels, masks and times are small compared with a graph, and scripts read them as a whole.
    Larger attributes come by loaders, a batch at a time.

    Args:
        ranks: The ranks that have the graph open.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def __call__(self, directory: GraphDirectory, of_edges: bool, kind: Any, name: str) -> Tensor:
        """See :data:`~pyg_scale.store.directory.lazy.Read`.

        Raises:
            GraphDirectoryError: If the attribute is too large to be gathered; says what to do.
            CommError: If a rank is gone or sends a wrong answer; names it.
            CommTimeoutError: If a rank does not answer in time; names it.
        """
        owners = self._ranks.owners
        if owners.all_direct:
            return read_stored(directory, of_edges, kind, name)
        if not of_edges:
            row = directory.meta.nodes[kind].attributes[name].row
            if math.prod(row) <= 1:
                return self.gather(directory, kind, name)
        elsewhere = sorted(set(range(owners.num_parts)) - owners.direct)
        what = "the edge list" if name == EDGE_INDEX and of_edges else f"{name!r}"
        of = "" if kind is None else f" of {kind!r}"
        raise GraphDirectoryError(
            f"{what}{of} is spread over ranks (part {', '.join(map(str, elsewhere[:8]))}"
            f"{', ...' if len(elsewhere) > 8 else ''} of {directory.path} is not read by rank "
            f"{owners.rank}) and is not gathered: a loader, as NeighborLoader(data, ...), adds "
            "it to every batch; data.graph_directory.part(p) has that of a local part"
        )

    def gather(self, directory: GraphDirectory, node_type: NodeType, name: str) -> Tensor:
        """An attribute of all nodes of a type, ``[num_nodes, ...]`` by original id."""
        node, owners = directory.meta.nodes[node_type], self._ranks.owners
        spec, book = node.attributes[name], directory.books[node_type]
        dtype = torch_dtype(spec.dtype)
        out = torch.empty((node.num_nodes, *spec.row), dtype=dtype)
        places = FilledPlaces(node.num_nodes, f"{name!r}{of(node_type)} of {directory.path}")
        search, under_way = self._ranks.search(), []

        def ask(part: int) -> tuple[int, Work[list[Tensor]] | CommError]:
            rank, service = search.rank_of(part), self._ranks.service
            asked = to_record({"type": node_type, "name": name, "part": part})
            try:
                return rank, service.request(rank, COLUMN, [asked])
            except CommError as error:
                return rank, error

        def take(part: int, rank: int, work: Work[list[Tensor]] | CommError) -> Tensor:
            if isinstance(work, CommError):
                raise work
            found = work.wait(search.patience(rank, search.chances([part])))
            shape = (node.part_nodes[part], *spec.row)
            if len(found) != 1 or found[0].dtype != dtype or found[0].shape != shape:
                raise CommError(
                    f"rank {rank} sent something other than {name!r} of part {part} of "
                    f"{directory.path}"
                )
            return found[0]

        for part in range(owners.num_parts):
            if part not in owners.direct and node.part_nodes[part]:
                under_way.append((part, *ask(part)))
        for part in sorted(owners.direct):
            here = directory.part(part)
            ids = here.orig_id(node_type)
            places.fill(ids)
            out[ids] = here.node_attribute(node_type, name)
        for part, rank, work in under_way:
            search.begin()
            while True:
                if not search.has_failed(rank):
                    try:
                        rows = take(part, rank, work)
                        break
                    except CommError as error:
                        search.failed(rank, error)
                rank, work = ask(part)
            ids = book.nodes_of(part)
            places.fill(ids)
            out[ids] = rows
        places.check()
        return out
