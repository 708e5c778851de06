"""Edges in temporary files, one for each range of destinations.

An edge takes ten bytes where there are fewer than 2^31 nodes: its destination within the range,
its source, and its place within a block of at most 65,536 edges. How many edges of each block
went to each range stands in one more file, which makes edge ids of that.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_scale.convert.array_file import Array, read_into, write_all
from pyg_scale.convert.edge_stream import EdgeStream, StreamPosition
from pyg_scale.convert.journal import ConversionWorkspace
from pyg_scale.convert.plan import BucketPlan
from pyg_scale.files.npy import as_array
from pyg_scale.files.place import naming
from pyg_scale.graph.topology import sortable_time
from pyg_scale.ops.edge_buckets import Ranges, edge_buckets

BLOCK = 1 << 16
_CHECKPOINT = 1 << 26  # edges between two entries in the journal


class BucketFiles:
    """The files of one edge type.

    Args:
        folder: Where they are.
        key: What their names begin with.
        plan: The ranges.
        wide: Whether a source takes eight bytes.
        extra: More columns: ``{name: dtype}`` of eight or four bytes.
    """

    def __init__(
        self, folder: Path, key: str, plan: BucketPlan, wide: bool, extra: dict[str, str]
    ) -> None:
        self.plan = plan
        self._folder, self._key = folder, key
        self.dtypes = {
            "dst": np.dtype("i4"),
            "src": np.dtype("i8" if wide else "i4"),
            "offset": np.dtype("u2"),
            **{name: np.dtype(dtype) for name, dtype in extra.items()},
        }
        # one entry for each block: the id of its first edge, and its edges in each bucket
        self._block = np.dtype([("first", "i8"), ("count", "i4", (len(plan.edges),))])

    @property
    def edge_bytes(self) -> int:
        """The bytes of an edge."""
        return sum(dtype.itemsize for dtype in self.dtypes.values())

    def file(self, bucket: int) -> Path:
        return self._folder / f"{self._key}-{bucket}.bucket"

    @property
    def blocks_file(self) -> Path:
        return self._folder / f"{self._key}.blocks"

    # Writing ###############################################################################

    def begin(self) -> None:
        """Make the files, empty."""
        for bucket in range(len(self.plan.edges)):
            self.file(bucket).write_bytes(b"")
        self.blocks_file.write_bytes(b"")

    def write(self, bucket: int, first: int, columns: dict[str, Array]) -> None:
        """Write columns of consecutive edges of a bucket from number ``first`` on."""
        file = self.file(bucket)
        handle = os.open(file, os.O_WRONLY)
        try:
            for name, values in columns.items():
                write_all(handle, values, self._place(bucket, name, first), file)
        finally:
            os.close(handle)

    def write_blocks(self, number: int, first: Array, counts: Array) -> int:
        """Write blocks from ``number`` on; returns how many there are then."""
        blocks = np.empty(len(first), self._block)
        blocks["first"], blocks["count"] = first, counts
        handle = os.open(self.blocks_file, os.O_WRONLY)
        try:
            write_all(handle, blocks, number * self._block.itemsize, self.blocks_file)
        finally:
            os.close(handle)
        return number + len(first)

    def forget_blocks(self, number: int) -> None:
        """Keep only the first blocks."""
        os.truncate(self.blocks_file, number * self._block.itemsize)

    def sync(self) -> None:
        """Return when everything is on the disk."""
        for file in [*map(self.file, range(len(self.plan.edges))), self.blocks_file]:
            handle = os.open(file, os.O_RDONLY)
            try:
                with naming(file):
                    os.fdatasync(handle)
            finally:
                os.close(handle)

    def _place(self, bucket: int, name: str, number: int) -> int:
        """The offset of a column's entry in the file of a bucket: columns follow one another."""
        place = 0
        for each, dtype in self.dtypes.items():
            if each == name:
                return place + number * dtype.itemsize
            place += self.plan.edges[bucket] * dtype.itemsize
        raise KeyError(name)

    # Reading ###############################################################################

    def read(self, bucket: int, name: str, begin: int, end: int) -> Array:
        """Entries ``[begin, end)`` of a column of a bucket."""
        out = np.empty(end - begin, self.dtypes[name])
        handle = os.open(self.file(bucket), os.O_RDONLY)
        try:
            return read_into(handle, out, self._place(bucket, name, begin), self.file(bucket))
        finally:
            os.close(handle)

    def blocks(self, bucket: int) -> tuple[Array, Array]:
        """The first edge id of every block that has edges in a bucket, and how many it has."""
        first, count = [], []
        step = max(1, (1 << 22) // self._block.itemsize)
        with self.blocks_file.open("rb") as file:
            while data := file.read(step * self._block.itemsize):
                blocks = np.frombuffer(data, self._block)
                counts = blocks["count"][:, bucket]
                used = counts > 0
                first.append(blocks["first"][used])
                count.append(counts[used].astype(np.int64))
        none = np.empty(0, np.int64)
        return np.concatenate([none, *first]), np.concatenate([none, *count])

    def edge_ids(self, bucket: int, blocks: tuple[Array, Array], begin: int, end: int) -> Array:
        """The ids ``int64`` of the edges ``[begin, end)`` of a bucket, ascending."""
        first, count = blocks
        total = np.cumsum(count)
        low = int(np.searchsorted(total, begin, side="right"))
        high = int(np.searchsorted(total, end, side="left")) + 1
        part = count[low:high].copy()
        if len(part):
            part[-1] -= max(0, int(total[low : low + len(part)][-1]) - end)
            part[0] -= begin - (int(total[low - 1]) if low else 0)
        ids = np.repeat(first[low : low + len(part)], part)
        ids += self.read(bucket, "offset", begin, end)
        return ids

    def remove(self, bucket: int) -> None:
        self.file(bucket).unlink(missing_ok=True)


def scatter(
    stream: EdgeStream,
    files: BucketFiles,
    shift: int,
    rows: int,
    extra: Sequence[tuple[str, str]],
    work: ConversionWorkspace,
    step: str,
    *,
    float_time: bool,
) -> None:
    """Read all edges and write each to the file of its range.

    Args:
        stream: The edges.
        files: Where to.
        shift: Width of the bins by which a range is looked up.
        rows: Edges to read at a time.
        extra: Columns and the attributes of edges that they are made of.
        work: For the journal, and progress.
        step: The step's name in the journal.
        float_time: Whether times of this graph are floating point numbers.
    """
    reached: dict[str, Any] | None = work.journal.reached(step)
    if reached is None:
        files.begin()
        reached = {"at": StreamPosition(), "filled": [0] * len(files.plan.edges), "blocks": 0}
    else:
        files.forget_blocks(int(reached["blocks"]))
    filled, blocks, at = (
        list(reached["filled"]),
        int(reached["blocks"]),
        StreamPosition(*reached["at"]),
    )
    ranges = Ranges.of(torch.tensor(files.plan.bounds, dtype=torch.int64), shift)
    wide = files.dtypes["src"].itemsize == 8
    last = at.edges
    total = sum(files.plan.edges)
    with work.progress("Distributing edges", total, "edges", at.edges) as bar:
        for chunk in stream.chunks(rows, [attribute for _, attribute in extra], at):
            if chunk.dst.numel():
                dst, src = (
                    each.to(torch.promote_types(chunk.src.dtype, chunk.dst.dtype))
                    for each in (chunk.dst, chunk.src)
                )
                grouped = edge_buckets(dst, src, ranges, BLOCK, wide=wide)
                order = grouped.order
                columns = {
                    "dst": grouped.dst.numpy(),
                    "src": grouped.src.numpy(),
                    "offset": order.numpy().astype(np.uint16),
                }
                for (name, attribute), values in zip(extra, chunk.extra):
                    what = f"{attribute!r} of {stream.edge_type!r}"
                    column = _column(name, values.reshape(-1), float_time, what)
                    columns[name] = as_array(column[order.to(torch.int64)]).astype(
                        files.dtypes[name], copy=False
                    )
                begin = 0
                for bucket, count in enumerate(grouped.counts.sum(0).tolist()):
                    if count:
                        part = slice(begin, begin + count)
                        files.write(
                            bucket, filled[bucket], {k: v[part] for k, v in columns.items()}
                        )
                        filled[bucket] += count
                        begin += count
                first = chunk.first + BLOCK * np.arange(grouped.counts.size(0))
                blocks = files.write_blocks(blocks, first, grouped.counts.numpy())
            bar.update(chunk.dst.numel())
            if chunk.after.edges - last >= _CHECKPOINT:
                last = chunk.after.edges
                files.sync()
                state = {"at": chunk.after, "filled": filled, "blocks": blocks}
                work.journal.reach(step, state)
    if filled != files.plan.edges:
        raise ValueError(
            f"the edges of {stream.edge_type!r} were not the same when they were read again: "
            "something writes to the input; convert it when it is complete"
        )
    files.sync()


def _column(name: str, values: Tensor, float_time: bool, what: str) -> Tensor:
    if name == "time":
        return sortable_time(values, float_time, what)
    if values.dtype in (torch.float16, torch.bfloat16):
        return values.to(torch.float32)
    return values if values.dtype in (torch.float32, torch.float64) else values.to(torch.float64)
