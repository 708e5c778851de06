"""Buckets of edges to the files of a graph directory: grouped by destination, in order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_scale.convert.array_file import ArrayWriter
from pyg_scale.convert.bucket_files import BucketFiles
from pyg_scale.convert.hub import hub_edges
from pyg_scale.convert.journal import ConversionWorkspace
from pyg_scale.convert.node_time import NodeTime
from pyg_scale.convert.plan import Cost
from pyg_scale.ops.csc import Compressed, build_csc, order_by_time, weight_prefix
from pyg_scale.ops.edge_buckets import edge_group

_CHECKPOINT = 1 << 26  # bytes of edges between two entries in the journal


class EdgePiece(NamedTuple):
    """Edges of consecutive positions of the result."""

    indices: Tensor
    edge_id: Tensor
    time: Tensor | None = None
    weight_prefix: Tensor | None = None


@dataclass
class GroupedFiles:
    """The files that the edges of one type become.

    Attributes:
        folder: Where they are.
        num_src: Number of source nodes.
        num_dst: Number of destination nodes.
        num_edges: Number of edges.
        by_time: Whether edges of a destination are ordered by time first.
        node_time: The times of the source nodes, where these are what counts.
        has_time: Whether times of edges are written.
        has_weight: Whether weights are.
    """

    folder: Path
    num_src: int
    num_dst: int
    num_edges: int
    by_time: bool = False
    node_time: NodeTime | None = None
    has_time: bool = False
    has_weight: bool = False
    writers: dict[str, ArrayWriter] = field(default_factory=dict)

    @property
    def indices_dtype(self) -> str:
        return _narrow(self.num_src)

    @property
    def edge_id_dtype(self) -> str:
        return _narrow(self.num_edges)

    def cost(self, stored: int) -> Cost:
        """The bytes of a bucket in memory, given the bytes of an edge in its file."""
        edge = stored + (24 if "int64" in (self.indices_dtype, self.edge_id_dtype) else 16)
        edge += 8 if self.by_time or self.has_weight else 0
        edge += 48 if self.by_time else 0  # a destination's edges while they are sorted
        return Cost(edge + (8 if self.has_weight else 0), 24)

    def open(self, names: list[str], fresh: bool, stack: ExitStack) -> None:
        """Open files to write to, until ``stack`` is closed."""
        dtypes = {"indices": self.indices_dtype, "edge_id": self.edge_id_dtype}
        for name in names:
            size = self.num_dst + 1 if name == "indptr" else self.num_edges
            dtype = dtypes.get(name, "int64")
            writer = ArrayWriter(self.folder / f"{name}.npy", dtype, (size,), fresh=fresh)
            self.writers[name] = stack.enter_context(writer)

    def write(self, at: int, piece: EdgePiece) -> None:
        """Write edges from position ``at`` on."""
        for name, writer in self.writers.items():
            if name != "indptr":
                values = getattr(piece, name)
                writer.write(at, values.to(getattr(torch, self._dtype(name))))

    def sync(self) -> None:
        for writer in self.writers.values():
            writer.sync()

    def _dtype(self, name: str) -> str:
        return {"indices": self.indices_dtype, "edge_id": self.edge_id_dtype}.get(name, "int64")


def group(files: BucketFiles, out: GroupedFiles, work: ConversionWorkspace, step: str) -> bool:
    """Group every bucket in turn; a bucket's file is deleted when its edges are on the disk.

    Returns:
        Whether every edge is at the position of its id, so that ``edge_id.npy`` was left out.
    """
    reached = work.journal.reached(step)
    bucket, at, identity = (0, 0, True) if reached is None else reached
    names = ["indptr", "indices", "edge_id"]
    names += ["time"] if out.has_time else []
    names += ["weight_prefix"] if out.has_weight else []
    with ExitStack() as stack:
        bar = stack.enter_context(
            work.progress("Grouping edges by destination", out.num_edges, "edges", at)
        )
        out.open(names, reached is None, stack)
        pending: list[int] = []
        unsaved = 0
        for number in range(bucket, len(files.plan.edges)):
            begin = at
            first = files.plan.bounds[number]
            for indptr, piece in _pieces(files, number, out, work.memory):
                if indptr is not None:
                    out.writers["indptr"].write(first, indptr + begin)
                out.write(at, piece)
                size = piece.indices.numel()
                identity = identity and _is_range(piece.edge_id, at)
                at += size
                unsaved += size * files.edge_bytes
                bar.update(size)
            pending.append(number)
            if unsaved >= _CHECKPOINT:
                out.sync()
                work.journal.reach(step, [number + 1, at, identity])
                while pending:
                    files.remove(pending.pop())
                unsaved = 0
        out.sync()
    if identity:
        (out.folder / "edge_id.npy").unlink(missing_ok=True)
    return identity


def _pieces(
    files: BucketFiles, bucket: int, out: GroupedFiles, memory: int
) -> Iterator[tuple[Tensor | None, EdgePiece]]:
    """The edges of a bucket in order, with the first piece where each destination's begin."""
    size = files.plan.edges[bucket]
    nodes = files.plan.bounds[bucket + 1] - files.plan.bounds[bucket]
    if files.plan.hub[bucket]:
        pointers = torch.tensor([0, size])
        for number, piece in enumerate(hub_edges(files, bucket, out, memory)):
            yield pointers if number == 0 else None, EdgePiece(*piece)
        return
    blocks = files.blocks(bucket)
    dst = torch.from_numpy(files.read(bucket, "dst", 0, size))
    src = torch.from_numpy(files.read(bucket, "src", 0, size))
    step = max(1 << 14, min(1 << 22, memory // 256))
    none = torch.empty(0, dtype=torch.int64)
    if not out.by_time and not out.has_weight:
        offset = torch.from_numpy(files.read(bucket, "offset", 0, size).view(np.int16))
        first, count = map(torch.from_numpy, blocks)
        indptr, pair = edge_group(dst, src, offset, first, count, nodes)
        del dst, src, offset
        yield indptr, EdgePiece(none, none)
        for begin in range(0, size, step):
            part = pair[begin : begin + step]
            yield None, EdgePiece(part[:, 0], part[:, 1])
        return
    time = weight = None
    if out.node_time is not None:
        time = out.node_time.of(src, memory // 4)
    elif out.by_time:
        time = torch.from_numpy(files.read(bucket, "time", 0, size))
    csc = build_csc(dst, src, nodes, out.num_src)
    del dst, src
    if time is not None:
        csc = order_by_time(csc, time, of_edges=True)
    prefix = None
    if out.has_weight:
        weight = torch.from_numpy(files.read(bucket, "weight", 0, size))
        prefix = weight_prefix(csc, weight)
        del weight
    ids = torch.from_numpy(files.edge_ids(bucket, blocks, 0, size))
    yield csc.indptr, EdgePiece(none, none, none, none)
    for begin in range(0, size, step):
        yield None, _cut(csc, ids, time if out.has_time else None, prefix, begin, step)


def _cut(
    csc: Compressed, ids: Tensor, time: Tensor | None, prefix: Tensor | None, begin: int, step: int
) -> EdgePiece:
    indices = csc.indices[begin : begin + step]
    if csc.edge_id is None:
        local = torch.arange(begin, begin + indices.numel())
    else:
        local = csc.edge_id[begin : begin + step].to(torch.int64)
    return EdgePiece(
        indices,
        ids[local],
        None if time is None else time[local],
        None if prefix is None else prefix[begin : begin + step],
    )


def _is_range(values: Tensor, begin: int) -> bool:
    size = values.numel()
    return size == 0 or bool((values == torch.arange(begin, begin + size)).all())


def _narrow(size: int) -> str:
    return "int32" if size <= 2**31 - 1 else "int64"


def sorted_pointers(dst: Tensor, begin: int, seen: int, step: int) -> Iterator[tuple[int, Tensor]]:
    """The pointers of a chunk of edges sorted by destination.

    Args:
        dst: Destinations of the edges from id ``begin`` on, ascending.
        begin: The id of the first.
        seen: Destinations up to which pointers are written.
        step: The most pointers at a time.

    Yields:
        The first destination, and pointers ``int64`` ``[n]`` of it and those after it.
    """
    last = int(dst[-1])
    array = dst.numpy()
    for first in range(seen, last + 1, step):
        nodes = np.arange(first, min(last + 1, first + step), dtype=array.dtype)
        yield first, torch.from_numpy(np.searchsorted(array, nodes, side="left")) + begin
