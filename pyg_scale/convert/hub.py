"""The edges of one destination that has more of them than memory holds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pyg_scale.convert.array_file import Array
from pyg_scale.convert.bucket_files import BucketFiles
from pyg_scale.files.place import naming

if TYPE_CHECKING:
    from pyg_scale.convert.group import GroupedFiles

Edges = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""Sources, edge ids, times and running sums of weights."""

_EDGE_BYTES = 160  # of an edge that is read, sorted and written


def hub_edges(files: BucketFiles, bucket: int, out: GroupedFiles, memory: int) -> Iterator[Edges]:
    """The edges in order: they lie by edge id; by time, they are sorted outside of memory.

    Args:
        files: Where they are.
        bucket: Their bucket.
        out: What is made of them.
        memory: Bytes to use.
    """
    step = max(1 << 10, memory // _EDGE_BYTES)
    parts = _in_order(files, bucket, out, step)
    largest = 0.0
    if out.has_weight:
        for begin in range(0, files.plan.edges[bucket], step):
            end = min(files.plan.edges[bucket], begin + step)
            largest = max(largest, float(files.read(bucket, "weight", begin, end).max()))
    total = 0
    for part in parts:
        prefix = None
        if out.has_weight:
            prefix = _fixed(torch.from_numpy(part["weight"]), largest).cumsum(0) + total
            total = int(prefix[-1])
        time = torch.from_numpy(part["time"]) if out.has_time else None
        yield torch.from_numpy(part["src"]), torch.from_numpy(part["id"]), time, prefix


def _fixed(weight: Tensor, largest: float) -> Tensor:
    """Weights as numbers below 2^32, see :func:`pyg_scale.ops.csc.weight_prefix`."""
    value = weight.to(torch.float64)
    fixed = (value / largest * 2.0**32).floor().clamp(min=1)
    return torch.where(value == 0, 0.0, fixed).to(torch.int64)


def _in_order(
    files: BucketFiles, bucket: int, out: GroupedFiles, step: int
) -> Iterator[dict[str, Array]]:
    chunks = _chunks(files, bucket, out, step)
    if not out.by_time:
        yield from chunks
        return
    runs: list[Path] = []
    try:
        dtype = np.dtype([])
        for number, chunk in enumerate(chunks):
            runs.append(files.file(bucket).with_suffix(f".{number}.run"))
            records = _records(chunk)[np.argsort(chunk["time"], kind="stable")]
            with naming(runs[-1]):
                runs[-1].write_bytes(records.view(np.uint8).data)
            dtype = records.dtype
        for merged in merge(runs, dtype, step):
            yield {name: np.ascontiguousarray(merged[name]) for name in dtype.names or ()}
    finally:
        for run in runs:
            run.unlink(missing_ok=True)


def _chunks(
    files: BucketFiles, bucket: int, out: GroupedFiles, step: int
) -> Iterator[dict[str, Array]]:
    size, blocks = files.plan.edges[bucket], files.blocks(bucket)
    for begin in range(0, size, step):
        end = min(size, begin + step)
        chunk = {
            "src": files.read(bucket, "src", begin, end),
            "id": files.edge_ids(bucket, blocks, begin, end),
        }
        if out.node_time is not None:
            src = torch.from_numpy(chunk["src"])
            chunk["time"] = out.node_time.of(src, step * _EDGE_BYTES // 4).numpy()
        elif out.by_time:
            chunk["time"] = files.read(bucket, "time", begin, end)
        if out.has_weight:
            chunk["weight"] = files.read(bucket, "weight", begin, end)
        yield chunk


def _records(chunk: dict[str, Array]) -> Array:
    out = np.empty(len(chunk["id"]), [(name, array.dtype) for name, array in chunk.items()])
    for name, array in chunk.items():
        out[name] = array
    return out


def merge(runs: list[Path], dtype: np.dtype[Any], step: int) -> Iterator[Array]:
    """Merge files of records with a ``time``, each sorted by it, as a stable sort would.

    Part of every run is in memory. What goes out at once is all that comes before the first end
    of a part behind which its run has more.

    Args:
        runs: The files; of equal times, those of earlier runs come first.
        dtype: Of a record.
        step: Records in memory.
    """
    size = max(1, step // max(1, len(runs)))
    left = [file.stat().st_size // dtype.itemsize for file in runs]
    taken = [0] * len(runs)
    parts = [np.empty(0, dtype) for _ in runs]
    while True:
        for i, file in enumerate(runs):
            if not len(parts[i]) and left[i]:
                count = min(size, left[i])
                parts[i] = np.fromfile(file, dtype, count, offset=taken[i] * dtype.itemsize)
                taken[i], left[i] = taken[i] + count, left[i] - count
        if not any(map(len, parts)):
            return
        ends = [(parts[i]["time"][-1], i) for i in range(len(runs)) if left[i]]
        out = []
        for i, part in enumerate(parts):
            cut = len(part)
            if ends:
                limit, run = min(ends)
                side: Any = "right" if i <= run else "left"
                cut = int(np.searchsorted(part["time"], limit, side=side))
            out.append(part[:cut])
            parts[i] = part[cut:]
        ready = np.concatenate(out)
        yield ready[np.argsort(ready["time"], kind="stable")]
