"""Graphs in ``.npz`` archives, in the layout of :func:`pyg_scale.datasets.read.read_npz`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_scale.convert.base import Description, EdgeList, Nodes, Reader
from pyg_scale.convert.npy import column_of
from pyg_scale.convert.npz_member import Member, open_archive
from pyg_scale.files.npy import as_tensor
from pyg_scale.graph.topology import EdgeType, NodeType
from pyg_scale.store.directory.meta import Attribute

_SPLITS = ("train", "val", "test")
_SPARSE = ("x_indptr", "x_indices", "x_data", "x_shape")
_KNOWN = ("edge_index", "num_nodes", *_SPARSE, *(f"{split}_idx" for split in _SPLITS))


class NpzReader(Reader):
    """``graph.npz``: what :func:`pyg_scale.datasets.read.read_npz` reads, without unpacking it.

    A homogeneous archive may have more: arrays called ``edge_...`` with a row for each edge, and
    others with a row for each node, are attributes. Sparse features become dense rows. Members
    that are not compressed are read where they lie, others as a stream.

    Args:
        source: The archive.
        reverse: Add a type ``(dst, "rev_" + relation, src)`` to every heterogeneous edge type.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is no plain archive, or holds no graph.
    """

    def __init__(self, source: str | os.PathLike[str], reverse: bool = True) -> None:
        self._path = Path(source)
        if not isinstance(reverse, bool):
            raise ValueError(f"reverse must be True or False (got {reverse!r})")
        self._reverse = reverse
        self._members = open_archive(self._path)
        self._edges: dict[EdgeType, tuple[Member, bool]] = {}
        self._nodes: dict[NodeType, dict[str, Member | str]] = {}
        self._edge_attributes: dict[str, Member] = {}
        self._sizes: dict[NodeType, int] = {}
        if "edge_index" in self._members:
            self._homogeneous()
        elif any("__" in name for name in self._members):
            self._heterogeneous()
        else:
            found = ", ".join(sorted(self._members)) or "nothing"
            raise ValueError(
                f"{self._path} holds no graph: expected 'edge_index' or 'SRC__RELATION__DST' "
                f"(found {found})"
            )
        for member, _ in self._edges.values():
            if member.dtype.kind not in "iu" or len(member.shape) != 2 or member.shape[0] != 2:
                raise ValueError(
                    f"{member.name} must be integers [2, num_edges] (it is {member.dtype} of shape "
                    f"{list(member.shape)})"
                )

    def _homogeneous(self) -> None:
        members, edges = self._members, self._members["edge_index"]
        self._edges[None] = edges, False
        if "num_nodes" in members:
            size = members["num_nodes"].number()
        elif named := [members[name] for name in ("y", "x") if name in members]:
            size = named[0].shape[0]
        else:
            raise ValueError(f"{self._path} must have 'num_nodes', 'x' or 'y'")
        self._sizes[None] = size
        nodes: dict[str, Member | str] = {}
        if "x" in members:
            nodes["x"] = members["x"]
        elif "x_indptr" in members:
            nodes["x"] = "x_"
            missing = [name for name in _SPARSE if name not in members]
            if missing:
                raise ValueError(f"{self._path}: sparse features need {missing[0]!r} as well")
        if "y" in members:
            nodes["y"] = members["y"]
        nodes.update(self._masks())
        self._nodes[None] = nodes
        for name, member in members.items():
            if name in _KNOWN or name in nodes:
                continue
            rows = member.shape[0] if member.shape else -1
            if name.startswith("edge_") and rows == edges.shape[-1]:
                self._edge_attributes[name] = member
            elif rows == size:
                nodes[name] = member
            else:
                raise ValueError(
                    f"{member.name} of shape {list(member.shape)} has neither a row for each node "
                    "nor, called edge_..., for each edge: remove it"
                )

    def _heterogeneous(self) -> None:
        types = [name[4:] for name in self._members if name.startswith("num_")]
        for node_type in types:
            self._sizes[node_type] = self._members[f"num_{node_type}"].number()
            self._nodes[node_type] = {}
        for name, member in self._members.items():
            if "__" in name:
                parts = name.split("__")
                if len(parts) not in (2, 3) or {parts[0], parts[-1]} - set(types):
                    raise ValueError(
                        f"{member.name}: an edge list is called SRC__RELATION__DST, and there must "
                        "be num_SRC and num_DST"
                    )
                src, relation, dst = parts if len(parts) == 3 else (parts[0], "to", parts[1])
                self._edges[src, relation, dst] = member, False
                if self._reverse:
                    self._edges[dst, f"rev_{relation}", src] = member, True
                continue
            node_type, _, attribute = name.partition("_")
            if node_type in types:
                self._nodes[node_type][attribute] = member
                if attribute == "y":
                    self._nodes[node_type].update(self._masks())

    def _masks(self) -> dict[str, Member | str]:
        return {f"{split}_mask": split for split in _SPLITS if f"{split}_idx" in self._members}

    # Reading ###############################################################################

    def files(self) -> list[Path]:
        return [self._path]

    def options(self) -> Mapping[str, Any]:
        return {"reverse": self._reverse}

    def describe(self) -> Description:
        nodes = {
            each: Nodes(self._sizes[each], {n: self._attribute(m) for n, m in members.items()})
            for each, members in self._nodes.items()
        }
        extra = {name: self._attribute(member) for name, member in self._edge_attributes.items()}
        edges = {
            each: EdgeList(member.shape[1], "int64", extra if each is None else {})
            for each, (member, _) in self._edges.items()
        }
        return Description(nodes, edges)

    def _attribute(self, member: Member | str) -> Attribute:
        if isinstance(member, Member):
            column = column_of(member.dtype, tuple(member.shape[1:]), member.name)
            return Attribute(column.dtype, column.row)
        if member == "x_":
            width = int(self._members["x_shape"].whole()[1])
            return Attribute("float32", (width,))
        return Attribute("bool")

    def edges(self, edge_type: EdgeType, begin: int, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
        member, reverse = self._edges[edge_type]
        for src, dst in member.columns(begin, rows):
            ends = _index(src), _index(dst)
            yield ends[::-1] if reverse else ends

    def node_attribute(
        self, node_type: NodeType, name: str, begin: int, rows: int
    ) -> Iterator[Tensor]:
        member = self._nodes[node_type][name]
        if isinstance(member, Member):
            return _rows(member, begin, rows)
        if member == "x_":
            return self._dense(begin, rows)
        return self._mask(member, self._sizes[node_type], begin, rows)

    def edge_attribute(
        self, edge_type: EdgeType, name: str, begin: int, rows: int
    ) -> Iterator[Tensor]:
        return _rows(self._edge_attributes[name], begin, rows)

    def _dense(self, begin: int, rows: int) -> Iterator[Tensor]:
        indptr, indices, data, shape = (self._members[name] for name in _SPARSE)
        size, width = map(int, shape.whole())
        with indptr.open(begin) as pointers:
            first = int(pointers.take(1)[0])
            with indices.open(first) as columns, data.open(first) as values:
                for at in range(begin, size, rows):
                    ends = pointers.take(min(rows, size - at)).astype(np.int64)
                    counts = np.diff(ends, prepend=first)
                    first = int(ends[-1])
                    out = np.zeros((len(ends), width), dtype=np.float32)
                    row = np.repeat(np.arange(len(ends)), counts)
                    column = columns.take(int(counts.sum()))
                    if len(column) and not (column.min() >= 0 and column.max() < width):
                        raise ValueError(f"{indices.name} has a column outside of 0 to {width - 1}")
                    out[row, column] = values.take(len(column))
                    yield torch.from_numpy(out)

    def _mask(self, split: str, size: int, begin: int, rows: int) -> Iterator[Tensor]:
        member = self._members[f"{split}_idx"]
        ids = member.whole().astype(np.int64)
        if len(ids) and not (ids.min() >= 0 and ids.max() < size):
            raise IndexError(f"{member.name} has a node outside of 0 to {size - 1}")
        mask = np.zeros(size, dtype=bool)
        mask[ids] = True
        for first in range(begin, size, rows):
            yield torch.from_numpy(mask[first : first + rows])

    def edge_name(self, edge_type: EdgeType, row: int) -> str:
        return f"edge {row} of {self._edges[edge_type][0].name}"


def _rows(member: Member, begin: int, rows: int) -> Iterator[Tensor]:
    dtype = column_of(member.dtype, (), member.name).dtype
    for values in member.rows(begin, rows):
        yield as_tensor(values, dtype)


def _index(values: Any) -> Tensor:
    kept = values.dtype in (np.int32, np.int64)
    return torch.from_numpy(np.ascontiguousarray(values if kept else values.astype("i8")))
