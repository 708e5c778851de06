"""A ring of shared memory: one process writes messages of tensors, another one reads them.

The writer waits while the ring is full, so it bounds what is ahead of the reader; a message may be
larger than the ring, and then comes through it in pieces. The memory has no name: it is there as
long as one of the two processes is, and nothing stays in ``/dev/shm``, whoever is killed. What
tells the two sides how much was written and read is a pipe, whose end says that the other is gone.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from torch import Tensor

from pyg_scale.comm.base import MAX_DIMS
from pyg_scale.comm.message import DTYPES, dtype_code
from pyg_scale.ops import memory
from pyg_scale.ops.raw_bytes import raw_bytes

HEAD, WRITTEN, READ = b"H", b"W", b"R"
_COUNT = struct.Struct("<cQ")
_PIECE = 1 << 20  # at most at a time, so that the two sides work at once


class Ring:
    """The memory, as one process sees it.

    Args:
        size: Bytes.
        fd: Of the memory; ``None`` to make it.
    """

    def __init__(self, size: int, fd: int | None = None) -> None:
        self.size = size
        self.fd = os.memfd_create("pyg_scale-ring", os.MFD_CLOEXEC) if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, size)
        self._memory = mmap.mmap(self.fd, size)
        self._at = 0

    def pieces(self, count: int) -> list[memoryview]:
        """The next ``count`` bytes; two pieces where the ring ends."""
        view, at = memoryview(self._memory), self._at
        self._at = (at + count) % self.size
        first = min(count, self.size - at)
        return [view[at : at + first], view[: count - first]]

    def close(self) -> None:
        """Give back the memory; the other process keeps its own."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class RingWriter:
    """The writing end.

    Args:
        ring: The memory.
        pipe: Says how much was written.
    """

    def __init__(self, ring: Ring, pipe: Connection) -> None:
        self._ring, self._pipe = ring, pipe
        self._free = ring.size
        self._changed = threading.Condition()
        self._sending = threading.Lock()

    def freed(self, count: int) -> None:
        """The other side has read so many bytes."""
        with self._changed:
            self._free += count
            self._changed.notify()

    def write(self, head: bytes, tensors: Sequence[Tensor]) -> None:
        """Write a message; waits while the ring is full.

        Args:
            head: Of :func:`message_of`.
            tensors: Of :func:`message_of`.

        Raises:
            OSError: If the reader is gone.
        """
        self._send(head)
        for tensor in tensors:
            if tensor.numel():
                self._write(bytes_of(tensor))

    def _write(self, view: memoryview) -> None:
        while view.nbytes:
            with self._changed:
                while self._free == 0:
                    self._changed.wait()
                count = min(self._free, view.nbytes, _PIECE)
                self._free -= count
            for piece in self._ring.pieces(count):
                piece[:] = view[: piece.nbytes]
                view = view[piece.nbytes :]
            self._send(_COUNT.pack(WRITTEN, count))

    def _send(self, message: bytes) -> None:
        with self._sending:
            self._pipe.send_bytes(message)


class RingReader:
    """The reading end.

    Args:
        ring: The memory.
        pipe: Says how much was read.
    """

    def __init__(self, ring: Ring, pipe: Connection) -> None:
        self._ring, self._pipe = ring, pipe
        self.written = 0  # bytes that were announced and not read yet

    def head(self, message: bytes) -> tuple[Any, list[Tensor]]:
        """The head of a message, and the tensors that are to be read."""
        head, specs = json.loads(message[1:])
        tensors = []
        for code, shape in specs:
            if not 0 <= code < len(DTYPES) or len(shape) > MAX_DIMS:
                raise ValueError("a worker announced a tensor of no known form")
            tensors.append(memory.empty(shape, DTYPES[code]))
        return head, tensors

    def read_into(self, view: memoryview) -> int:
        """Read what is there, at most what fits.

        Returns:
            How many bytes were read.
        """
        count = min(self.written, view.nbytes)
        at = 0
        for piece in self._ring.pieces(count):
            view[at : at + piece.nbytes] = piece
            at += piece.nbytes
        self.written -= count
        if count:
            self._pipe.send_bytes(_COUNT.pack(READ, count))
        return count

    def announced(self, message: bytes) -> None:
        """The writer says that more is there."""
        self.written += _COUNT.unpack(message)[1]


def message_of(head: Any, tensors: Sequence[Tensor]) -> tuple[bytes, list[Tensor]]:
    """A message to write: what it begins with, and its tensors. Only what can be sent becomes one.

    Args:
        head: Plain values, as JSON.
        tensors: Of any device.

    Raises:
        TypeError: If a tensor is of a dtype that cannot be sent.
        ValueError: If it has too many dimensions.
    """
    plain = [tensor.detach().cpu().contiguous() for tensor in tensors]
    dims = max((tensor.dim() for tensor in plain), default=0)
    if dims > MAX_DIMS:
        raise ValueError(f"tensors of up to {MAX_DIMS} dimensions can be sent (got one of {dims})")
    specs = [[dtype_code(tensor.dtype), list(tensor.shape)] for tensor in plain]
    text = json.dumps([head, specs], separators=(",", ":")).encode()
    return HEAD + text, plain


def count_of(message: bytes) -> int:
    """The number in a message of :data:`WRITTEN` or :data:`READ`."""
    count: int = _COUNT.unpack(message)[1]
    return count


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor that is not empty."""
    array: Any = raw_bytes(tensor).numpy()
    return memoryview(array)
