"""The messages of ranks about edges: a fixed layout, checked by the receiver.

A request has six tensors:

* a record: the sampler (:mod:`pyg_scale.distributed.described`), and true if edges have weights;
* the asks, ``int64`` ``[k, 6]``: number of the edge type, hop, ``num_neighbors``, key, number of
  nodes, and 1 if the nodes have components, plus 2 if they have times, plus 4 if they have a
  window;
* their nodes, one ask after the other, ``int32`` if all node types are small enough, else
  ``int64``;
* the components of those that have them, ``int32`` or ``int64`` likewise;
* the times of those that have them, ``int64``;
* the times that edges must be after, of those that have a window, ``int64``.

The answer has four tensors and one for each extra attribute of edges: the record of the names of
these, the number of edges of each node (``int64``), neighbours, and edge ids (``int32`` or
``int64``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyg_scale.distributed.records import from_record, to_record
from pyg_scale.errors import CommError
from pyg_scale.graph.topology import EdgeType
from pyg_scale.ops.keys import to_signed
from pyg_scale.sampler.choose import Ask, Picked
from pyg_scale.store.directory.meta import Meta

_COLUMNS = 6
_COMPONENT, _LATEST, _AFTER = 1, 2, 4
_INT64 = torch.int64


class Layout:
    """The layout for a graph.

    Args:
        meta: The graph.
    """

    def __init__(self, meta: Meta) -> None:
        self.edge_types: list[EdgeType] = list(meta.edges) if meta.is_hetero else [None]
        self._number = {edge_type: i for i, edge_type in enumerate(self.edge_types)}
        self._num_nodes = {t: node.num_nodes for t, node in meta.nodes.items()}
        self._num_edges = {t: edge.num_edges for t, edge in meta.edges.items()}
        by_src = meta.partition is not None and meta.partition.edge_assign_strategy == "by_src"
        self._ends = {
            t: (None, None) if t is None else (t[0], t[2]) if by_src else (t[2], t[0])
            for t in self.edge_types
        }
        self._node = _narrow(max(self._num_nodes.values(), default=0))
        self._edge = _narrow(max(self._num_edges.values(), default=0))

    # Requests ##############################################################################

    def request(self, record: Tensor, asks: Sequence[Ask]) -> list[Tensor]:
        """The tensors of a request."""
        none = torch.empty(0, dtype=_INT64)
        rows = []
        for ask in asks:
            flags = _COMPONENT * (ask.component is not None) + _LATEST * (ask.latest is not None)
            flags += _AFTER * (ask.after is not None)
            number, key = self._number[ask.edge_type], to_signed(ask.key)
            rows.append([number, ask.hop, ask.num_neighbors, key, ask.node.numel(), flags])
        return [
            record,
            torch.tensor(rows, dtype=_INT64).view(-1, _COLUMNS),
            torch.cat([none, *[ask.node for ask in asks]]).to(self._node),
            torch.cat([none, *[a.component for a in asks if a.component is not None]]).to(
                self._node
            ),
            torch.cat([none, *[ask.latest for ask in asks if ask.latest is not None]]),
            torch.cat([none, *[ask.after for ask in asks if ask.after is not None]]),
        ]

    def read_request(self, tensors: Sequence[Tensor]) -> tuple[Tensor, list[Ask]]:
        """The record and the asks of a request.

        Raises:
            CommError: If it is not a request.
        """
        _check(len(tensors) == 6, f"it has {len(tensors)} tensors instead of 6")
        record, rows, *columns = tensors
        _check(rows.dtype == _INT64 and rows.dim() == 2 and rows.size(1) == _COLUMNS, "its asks")
        for values, dtype in zip(columns, (self._node, self._node, _INT64, _INT64), strict=True):
            _check(values.dtype == dtype and values.dim() == 1, "a dtype or a shape")
        asks, at = [], [0] * len(columns)
        for number, hop, num_neighbors, key, size, flags in rows.tolist():
            _check(0 <= number < len(self.edge_types), f"edge type number {number}")
            _check(hop >= 0 and num_neighbors >= -1 and size >= 0 and 0 <= flags <= 7, "an ask")
            _check(not flags & _AFTER or bool(flags & _LATEST), "a window without times")
            pieces: list[Tensor | None] = []
            there = (True, flags & _COMPONENT, flags & _LATEST, flags & _AFTER)
            for i, values in enumerate(columns):
                pieces.append(values[at[i] : at[i] + size] if there[i] else None)
                at[i] += size if there[i] else 0
                _check(at[i] <= values.numel(), "too few nodes")
            edge_type = self.edge_types[number]
            nodes, component = _wide(pieces[0]), pieces[1]
            assert nodes is not None
            _in_range(nodes, self._num_nodes[self._ends[edge_type][0]], "node")
            _check(component is None or not size or int(component.min()) >= 0, "a component")
            asks.append(
                Ask(
                    edge_type,
                    hop,
                    num_neighbors,
                    key % 2**64,
                    nodes,
                    _wide(component),
                    pieces[2],
                    pieces[3],
                )
            )
        _check(at == [values.numel() for values in columns], "too many nodes")
        return record, asks

    # Answers ###############################################################################

    def answer(self, found: Sequence[Picked]) -> list[Tensor]:
        """The tensors of an answer.

        Raises:
            NotImplementedError: If extra attributes of edges differ between edge types.
        """
        none = torch.empty(0, dtype=_INT64)
        names = list(dict.fromkeys(name for each in found for name in each.attrs))
        if any(list(each.attrs) != names for each in found):
            raise NotImplementedError("the sampler returns extra tensors for some edge types only")
        return [
            to_record(names),
            torch.cat([none, *[each.counts for each in found]]),
            torch.cat([none, *[each.neighbor for each in found]]).to(self._node),
            torch.cat([none, *[each.edge for each in found]]).to(self._edge),
            *[torch.cat([each.attrs[name] for each in found]) for name in names],
        ]

    def read_answer(self, tensors: Sequence[Tensor], asks: Sequence[Ask]) -> list[Picked]:
        """The edges picked for each ask.

        Raises:
            CommError: If it is not an answer to them.
        """
        _check(len(tensors) >= 4, f"it has {len(tensors)} tensors")
        record, counts, neighbor, edge, *extra = tensors
        names = from_record(record, "an answer")
        _check(isinstance(names, list) and len(names) == len(extra), "its names")
        for values, dtype in ((counts, _INT64), (neighbor, self._node), (edge, self._edge)):
            _check(values.dtype == dtype and values.dim() == 1, "a dtype or a shape")
        sizes = [ask.node.numel() for ask in asks]
        _check(counts.numel() == sum(sizes), "it has another number of nodes")
        _check(not counts.numel() or int(counts.min()) >= 0, "a count")
        total = int(counts.sum())
        for values in (neighbor, edge, *extra):
            _check(values.dim() > 0 and values.size(0) == total, "it has another number of edges")
        out, begin = [], 0
        for ask, mine in zip(asks, counts.split(sizes), strict=True):
            end = begin + int(mine.sum())
            nodes, edges = _wide(neighbor[begin:end]), _wide(edge[begin:end])
            assert nodes is not None and edges is not None
            _in_range(nodes, self._num_nodes[self._ends[ask.edge_type][1]], "neighbour")
            _in_range(edges, self._num_edges.get(ask.edge_type, 0), "edge")
            attrs = {n: v[begin:end] for n, v in zip(names, extra, strict=True)}
            out.append(Picked(mine, nodes, edges, attrs))
            begin = end
        return out


def _narrow(size: int) -> torch.dtype:
    return torch.int32 if size < 2**31 else torch.int64


def _wide(values: Tensor | None) -> Tensor | None:
    return None if values is None else values.to(_INT64)


def _in_range(values: Tensor, size: int, what: str) -> None:
    if values.numel():
        low, high = (int(v) for v in torch.aminmax(values))
        wrong: Any = low if low < 0 else high
        _check(low >= 0 and high < size, f"{what} {wrong}, but there are only {size}")


def _check(fits: bool, what: str) -> None:
    if not fits:
        raise CommError(f"the message is not valid for edges: {what}")
