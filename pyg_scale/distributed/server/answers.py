"""Checks that an answer is the requested batch: clients do not trust servers either."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric.sampler import EdgeSamplerInput, NodeSamplerInput

from pyg_scale.distributed.server.loader_record import RowsOf
from pyg_scale.files.npy import torch_dtype
from pyg_scale.loader.batch import wire
from pyg_scale.sampler.base import HeteroSamplerOutput, SamplerOutput
from pyg_scale.sampler.negative import NegativeSampling
from pyg_scale.store.directory.meta import Meta

_IDS = (torch.int64, torch.int32)


class AnswerCheck:
    """Turns an answer into a sampler's output, if it can be the requested batch.

    Args:
        meta: The graph.
        rows: The requested attributes.
        inputs: The seeds.
        negatives: Negative sampling of links.
    """

    def __init__(
        self,
        meta: Meta,
        rows: Sequence[RowsOf],
        inputs: NodeSamplerInput | EdgeSamplerInput,
        negatives: NegativeSampling | None = None,
    ) -> None:
        self._meta, self._rows, self._inputs, self._negatives = meta, rows, inputs, negatives

    def __call__(self, answer: list[Tensor]) -> Any:
        """The output, with ``collected`` rows and the seeds' own ids and times.

        Raises:
            ValueError: If it is not such an answer; says what is wrong.
        """
        text, *tensors = answer
        found = wire.unpack(wire.tensor_bytes(text), tensors)
        try:
            out, rows = found["out"], found["rows"]
            node, edge = self._subgraph(out)
            self._check_extras(out, node)
            out.collected = dict(zip(self._rows, self._checked_rows(rows, node, edge), strict=True))
            self._put_seeds(out, node)
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"it lacks a field ({type(error).__name__}: {error})") from None
        return out

    def _subgraph(self, out: Any) -> tuple[Mapping[Any, Tensor], Mapping[Any, Tensor | None]]:
        meta = self._meta
        if type(out) is not (HeteroSamplerOutput if meta.is_hetero else SamplerOutput):
            raise ValueError(f"{type(out).__name__} does not fit this graph")
        node = out.node if meta.is_hetero else {None: out.node}
        row = out.row if meta.is_hetero else {None: out.row}
        col = out.col if meta.is_hetero else {None: out.col}
        edge = (out.edge or {}) if meta.is_hetero else {None: out.edge}
        for node_type, ids in node.items():
            _check_ids(ids, meta.nodes[node_type].num_nodes, "a node")
        for edge_type in row:
            ends = (None, None) if edge_type is None else (edge_type[0], edge_type[2])
            if edge_type is not None and edge_type not in meta.edges:
                raise ValueError(f"there are no edges {edge_type}")
            for end, ids in zip(ends, (row[edge_type], col[edge_type]), strict=True):
                _check_ids(ids, node[end].numel() if end in node else 0, "an end of an edge")
            ids_of = edge.get(edge_type)
            if ids_of is not None:
                _check_ids(ids_of, meta.edges[edge_type].num_edges, "an edge")
                if ids_of.numel() != row[edge_type].numel():
                    raise ValueError("the numbers of edge ids and edges differ")
        return node, edge

    def _check_extras(self, out: Any, node: Mapping[Any, Tensor]) -> None:
        """Check the tensors that have an entry for each node or hop."""
        hetero = self._meta.is_hetero
        batch = out.batch if hetero or out.batch is None else {None: out.batch}
        for node_type, of in (batch or {}).items():
            if of.shape != node[node_type].shape:
                raise ValueError("batch does not fit the nodes")
        sizes: Any = out.num_sampled_nodes
        for node_type, numbers in (sizes if hetero and sizes else {None: sizes}).items():
            if numbers is not None and sum(map(int, numbers)) != node[node_type].numel():
                raise ValueError("num_sampled_nodes does not fit the nodes")
        row = out.row if hetero else {None: out.row}
        counts: Any = out.num_sampled_edges
        for edge_type, numbers in (counts if hetero and counts else {None: counts}).items():
            if numbers is not None and sum(map(int, numbers)) > row[edge_type].numel():
                raise ValueError("num_sampled_edges does not fit the edges")

    def _checked_rows(
        self,
        rows: Any,
        node: Mapping[Any, Tensor],
        edge: Mapping[Any, Tensor | None],
    ) -> list[Tensor | None]:
        if not isinstance(rows, list) or len(rows) != len(self._rows):
            raise ValueError(f"rows of {len(self._rows)} attributes were requested")
        for (of_edges, kind, name), value in zip(self._rows, rows, strict=True):
            types: Any = self._meta.edges if of_edges else self._meta.nodes
            spec = types[kind].attributes[name]
            ids: Any = (edge if of_edges else node).get(kind, _NONE)
            if (ids is None) != (value is None):
                raise ValueError(f"rows of {name!r} do not fit the ids")
            if value is None:
                continue
            shape = (ids.numel(), *spec.row)
            if tuple(value.shape) != shape or value.dtype != torch_dtype(spec.dtype):
                raise ValueError(
                    f"{name!r} is {value.dtype} {list(value.shape)}, but {spec.dtype} "
                    f"{list(shape)} was requested"
                )
        return rows

    def _put_seeds(self, out: Any, node: Mapping[Any, Tensor]) -> None:
        inputs = self._inputs
        if isinstance(inputs, NodeSamplerInput):
            seeds, found = inputs.node, node[inputs.input_type]
            if not torch.equal(found[: seeds.numel()].to(seeds.dtype), seeds):
                raise ValueError("it has other seeds")
            out.metadata = (inputs.input_id, inputs.time)
            return
        ends = (None, None) if inputs.input_type is None else inputs.input_type[::2]
        _, *rest = out.metadata
        triplet = self._negatives is not None and self._negatives.is_triplet()
        if len(rest) != (4 if triplet else 3):
            raise ValueError("the fields of its links are wrong")
        places = rest[:3] if triplet else rest[0]
        kinds = (ends[0], ends[1], ends[1]) if triplet else ends
        if len(places) != len(kinds):
            raise ValueError("links have two ends")
        for place, end in zip(places, kinds, strict=True):
            _check_ids(place.reshape(-1), node[end].numel(), "an end of a seed link")
        links = inputs.row.numel()
        for place, wanted, end in zip(places, (inputs.row, inputs.col), ends):
            found = node[end][place[:links].to(torch.int64)]
            if not torch.equal(found.to(wanted.dtype), wanted):
                raise ValueError("it has other links")
        out.metadata = (inputs.input_id, *rest)


_NONE = torch.empty(0, dtype=torch.int64)


def _check_ids(ids: Any, count: int, what: str) -> None:
    """Refuse tensors that are not ids below ``count``."""
    if not isinstance(ids, Tensor) or ids.dim() != 1 or ids.dtype not in _IDS:
        raise ValueError(f"{what} is an integer")
    if ids.numel():
        low, high = (int(v) for v in torch.aminmax(ids))
        if low < 0 or high >= count:
            raise ValueError(f"{what} is {low if low < 0 else high}, of {count}")
