"""Rows of a file by number: sorted, merged into few long reads, and read by several threads.

With ``O_DIRECT`` the kernel reads whole blocks of the device into aligned memory and keeps no copy
of them. The same op also reads through the page cache, for file systems without ``O_DIRECT``.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from pyg_scale.ops import library

BLOCK = 4096
"""Reads begin and end at multiples of this, which suits every common device."""

GAP = 20 << 10
"""Longest gap in bytes that is read and dropped rather than begin another read: the bytes that a
device delivers in the time of one more read. Measured on a virtual disk: 1.5 GB/s, and 42,000
(90,000) reads of 4 KB per second with 16 (64) at a time, so 36 (17) KB; a read by a thread also
takes 7 us of CPU time.
"""

LONGEST = 1 << 20
"""Largest size of a read in bytes, unless a single row is longer."""

TRUNCATED = -1


class Read(NamedTuple):
    """The counts of a call."""

    reads: int
    """Number of reads issued."""
    num_bytes: int
    """Number of bytes read from the file."""
    error: int = 0
    """0, :data:`TRUNCATED` if the file ends before a row does, or the number of a system error."""
    first: int = 0
    """First row of the read that failed."""
    last: int = 0
    """Last row of the read that failed."""


def disk_read(
    fd: int,
    offset: int,
    num_rows: int,
    rows: Tensor,
    position: Tensor,
    out: Tensor,
    *,
    block: int = BLOCK,
    gap: int = GAP,
    longest: int = LONGEST,
    num_threads: int | None = None,
) -> Read:
    """Write row ``rows[i]`` of a file to ``out[position[i]]``.

    Args:
        fd: An open file; with ``O_DIRECT`` or without.
        offset: Position of row 0 in the file, in bytes.
        num_rows: Number of rows that the file should have.
        rows: ``int64`` ``[n]``, in any order; repeats allowed.
        position: ``int64`` ``[n]``, without repetition.
        out: ``uint8`` ``[m, row_bytes]``, contiguous. Other rows of it are left as they are.
        block: Reads begin and end at multiples of this many bytes.
        gap: Rows at most this many bytes apart are read together.
        longest: Largest size of a read in bytes.
        num_threads: Number of threads, each with one read at a time. ``None``: with ``O_DIRECT``
            one thread with up to 128 reads at a time through io_uring, if the kernel allows it;
            else 16 threads.

    Returns:
        The counts of the call. After an error ``out`` may be partly written.

    Raises:
        ValueError: If a row or a position is out of range.
    """
    if library.compiled():
        return Read(
            *torch.ops.pyg_scale.disk_read(
                fd, offset, num_rows, rows, position, out, block, gap, longest, num_threads or 0
            )
        )
    return _plain(fd, offset, num_rows, rows, position, out, block, gap, longest)


def _plain(
    fd: int,
    offset: int,
    num_rows: int,
    rows: Tensor,
    position: Tensor,
    out: Tensor,
    block: int,
    gap: int,
    longest: int,
) -> Read:
    """The same reads, one after the other."""
    row_bytes = out.size(1)
    if rows.numel() == 0 or row_bytes == 0:
        return Read(0, 0)
    for index, size in ((rows, num_rows), (position, out.size(0))):
        if int(index.min()) < 0 or int(index.max()) >= size:
            raise ValueError("rows and position must be rows of the file and of out")
    ordered, order = rows.sort(stable=True)
    begin = offset + ordered * row_bytes
    first = begin // block * block
    last = (begin + row_bytes + block - 1) // block * block
    runs = list(_runs(first.tolist(), last.tolist(), gap, longest))
    total = 0
    size = max(stop - start for _, _, start, stop in runs)
    with mmap.mmap(-1, max(size, mmap.PAGESIZE)) as memory, memoryview(memory) as buffer:
        for i, j, start, stop in runs:
            failed = int(ordered[i]), int(ordered[j - 1])
            try:
                got = _read_fully(fd, buffer[: stop - start], start, block)
            except OSError as error:
                return Read(len(runs), total, error.errno or TRUNCATED, *failed)
            total += got
            if offset + (failed[1] + 1) * row_bytes - start > got:
                return Read(len(runs), total, TRUNCATED, *failed)
            chunk = torch.frombuffer(bytearray(buffer[:got]), dtype=torch.uint8)
            at = (begin[i:j] - start)[:, None] + torch.arange(row_bytes)
            out[position[order[i:j]]] = chunk[at]
    return Read(len(runs), total)


def _runs(
    first: list[int], last: list[int], gap: int, longest: int
) -> Iterator[tuple[int, int, int, int]]:
    """Ranges ``i`` to ``j - 1`` of sorted rows that are read together, and their bytes."""
    i, start, stop = 0, first[0], last[0]
    for j in range(1, len(first)):
        if first[j] - stop <= gap and last[j] - start <= longest:
            stop = max(stop, last[j])
            continue
        yield i, j, start, stop
        i, start, stop = j, first[j], last[j]
    yield i, len(first), start, stop


def _read_fully(fd: int, buffer: memoryview, at: int, block: int) -> int:
    """Read until the buffer is full or the file ends; return the number of bytes."""
    got = 0
    while got < len(buffer):
        more = os.preadv(fd, [buffer[got:]], at + got)
        got += more
        if more == 0 or got % block:  # only the last block of a file can be incomplete
            break
    return got
