"""Requests for features, and their answers by the rank that has the rows.

A request is a text (JSON: for each entry ``true`` for edges, the type, the part and the names of
attributes) and, for each entry, the ids of its rows. An answer has a tensor of raw bytes for each
attribute of each entry.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_scale.distributed.features.parts import PartRows
from pyg_scale.graph.topology import EdgeType, NodeType
from pyg_scale.ops.sockets import GatheredRows
from pyg_scale.store.directory import GraphDirectory
from pyg_scale.store.directory_features import FeatureColumn, columns_of, described

FEATURES = "features"
"""The name of the request for features."""

MAX_TEXT = 1 << 16
MAX_BYTES = 1 << 34
"""Largest size of an answer in bytes."""


class ServedRows(NamedTuple):
    """Rows of one type and part, and the attributes to read.

    Attributes:
        of_edges: True for rows of edges.
        type: Node type or edge type.
        part: The part that has all the rows.
        names: Attributes.
        ids: Local ids of nodes, original ids of edges: ``int32`` or ``int64`` ``[n]``.
    """

    of_edges: bool
    type: NodeType | EdgeType
    part: int
    names: tuple[str, ...]
    ids: Tensor


def request_of(entries: Sequence[ServedRows]) -> list[Tensor]:
    """The tensors of a request.

    Raises:
        ValueError: If the names are too long to be sent.
    """
    plain = [[e.of_edges, e.type, e.part, list(e.names)] for e in entries]
    text = json.dumps(plain).encode()
    if len(text) > MAX_TEXT:
        raise ValueError(
            f"the names in a request for features have {len(text)} bytes, more than {MAX_TEXT}: "
            "ask for fewer attributes at a time"
        )
    return [torch.frombuffer(bytearray(text), dtype=torch.uint8), *(e.ids for e in entries)]


class FeatureAnswers:
    """Answers requests for the features of some parts; a handler of :data:`FEATURES`.

    Messages are not trusted: anything that is not a valid request raises, and the sender is told.

    Args:
        directory: The directory.
        parts: The parts that are served.
    """

    def __init__(self, directory: GraphDirectory, parts: Collection[int]) -> None:
        self.parts = frozenset(parts)
        self._directory = directory
        self._rows = PartRows(directory)
        self._columns = {(c.of_edges, c.type, c.name): c for c in columns_of(directory).values()}

    def __call__(self, tensors: list[Tensor]) -> list[Tensor]:
        """The requested rows, ``uint8`` ``[n, row_bytes]`` each.

        Raises:
            ValueError: If it is not a request, or asks for too many bytes.
            KeyError: If an attribute does not exist.
            IndexError: If a part is not served, or a row is not in it.
        """
        return [rows.tensor() for rows in self.rows(tensors)]

    def rows(self, tensors: list[Tensor]) -> list[GatheredRows]:
        """The same rows, to be chosen while they are sent."""
        entries = [self._checked(entry) for entry in entries_of(tensors)]
        size = sum(ids.numel() * c.row_bytes for _, columns, ids in entries for c in columns)
        if size > MAX_BYTES:
            raise ValueError(f"the requested rows have {size} bytes, more than {MAX_BYTES}")
        out = []
        for part, columns, ids in entries:
            place = ids
            if columns[0].of_edges:
                place = self._rows.place_of_edges(columns[0].type, part, ids)
            for column in columns:
                out.append(GatheredRows(self._rows.raw(column, part), place))
        return out

    def _checked(self, entry: ServedRows) -> tuple[int, list[FeatureColumn], Tensor]:
        what = described(entry.of_edges, entry.type)
        columns = []
        for name in entry.names:
            column = self._columns.get((entry.of_edges, entry.type, name))
            if column is None:
                raise KeyError(f"{self._directory.path} has no attribute {name!r} of {what}")
            columns.append(column)
        if entry.part not in self.parts:
            raise IndexError(f"part {entry.part} is not served, only {sorted(self.parts)}")
        ids = entry.ids
        if ids.dim() != 1 or ids.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"rows of {what} must be one-dimensional int64 or int32 tensors")
        if ids.numel():
            meta = self._directory.meta
            low, high = int(ids.min()), int(ids.max())
            size = (
                meta.edges[entry.type].num_edges  # type: ignore[index]
                if entry.of_edges
                else meta.nodes[entry.type].part_nodes[entry.part]  # type: ignore[index]
            )
            if low < 0 or high >= size:
                wrong = low if low < 0 else high
                raise IndexError(
                    f"row {wrong} of {what} of part {entry.part} does not exist, there are {size}"
                )
        return entry.part, columns, ids


def entries_of(tensors: Sequence[Tensor]) -> list[ServedRows]:
    """The entries of a request.

    Raises:
        ValueError: If it is none.
    """
    if not tensors or tensors[0].dtype != torch.uint8 or tensors[0].dim() != 1:
        raise ValueError("a request for features must begin with a text")
    if tensors[0].numel() > MAX_TEXT:
        raise ValueError(f"the text of a request for features may have at most {MAX_TEXT} bytes")
    try:
        found = json.loads(bytes(tensors[0].numpy()))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the text of a request for features is not JSON: {error}") from None
    if not isinstance(found, list) or len(found) != len(tensors) - 1:
        raise ValueError("a request for features must have one tensor for each entry of its text")
    return [_entry(plain, ids) for plain, ids in zip(found, tensors[1:])]


def _entry(plain: Any, ids: Tensor) -> ServedRows:
    if not isinstance(plain, list) or len(plain) != 4:
        raise ValueError("an entry of a request for features must have four fields")
    of_edges, kind, part, names = plain
    if isinstance(kind, list):
        kind = tuple(kind)
    right = (
        isinstance(of_edges, bool)
        and (kind is None or isinstance(kind, str) or _is_edge_type(kind))
        and type(part) is int
        and isinstance(names, list)
        and names
        and all(isinstance(name, str) for name in names)
    )
    if not right:
        raise ValueError("an entry of a request for features has fields of wrong types")
    return ServedRows(of_edges, kind, part, tuple(names), ids)


def _is_edge_type(kind: Any) -> bool:
    return isinstance(kind, tuple) and len(kind) == 3 and all(isinstance(k, str) for k in kind)
