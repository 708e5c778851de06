"""Reads missing rows of announced requests in the background, while earlier rows are in use.

The missing rows of several requests are read in one pass over the file, section by section: the
more rows of a section are wanted, the closer they are, and the less is read in vain. A section is
read once there is room for it. When the rows of a request have been taken, the next pass fills
their memory; it is returned to the system when no request is left. No thread waits for room: it
ends, and the thread that frees memory starts another one.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from pyg_scale.ops import row_cache
from pyg_scale.ops.gather import gather
from pyg_scale.store.cache.pending import LIMIT, Read

SECTIONS = 16
"""Largest number of sections of a pass."""
LEAST = 4 << 20
"""Smallest size of the rows of a section in bytes."""

_LOOK = 0.1
_SAMPLE = 64
"""Number of rows of each section that are sampled to find its end."""


class ReadAhead:
    """Passes over files, one after the other, by one thread at a time.

    Attributes:
        held: Bytes of rows that were read but not taken yet.
    """

    def __init__(self) -> None:
        self.held = 0
        self._lock = threading.Lock()
        self._passes: list[_Pass] = []
        self._coming = 0  # number of requests whose rows were neither taken nor forgotten
        self._blocks: dict[int, RowBlocks] = {}  # by the size of a row
        self._reader: threading.Thread | None = None

    def ask(
        self, rows: Sequence[Tensor], row_bytes: int, read: Read, room: int
    ) -> list[ReadAheadBatch]:
        """Start to read rows of a file for the next requests; returns at once.

        Args:
            rows: The missing rows of each request, ``int64``.
            row_bytes: Size of a row in bytes.
            read: Reads rows of the file.
            room: Bytes of rows that may be kept. Rows that a thread waits for are read in any case.

        Returns:
            For each request an object that supplies its rows; it must be taken or forgotten.
        """
        made = _Pass(self, rows, row_bytes, read, room)
        with self._lock:
            self._passes.append(made)
            self._coming += len(made.coming)
            self._go_on()
        return made.coming

    # Called by ReadAheadBatch ##################################################################

    def want(self, found: _Pass) -> bool:
        """Read a pass next, even without room for it; return True if a thread reads."""
        with self._lock:
            found.wanted = True
            self._go_on()
            return self._reader is not None

    def let_go(self, coming: ReadAheadBatch) -> None:
        """Release the memory of a request, once."""
        with self._lock:
            if coming.forgotten:
                return
            coming.forgotten = True
            for held in coming.held:
                self.held -= held.num_bytes
                held.give_back()
            coming.held.clear()
            self._coming -= 1
            if not self._coming:
                self._blocks.clear()
            self._go_on()

    # The thread that reads ###################################################################

    def _go_on(self) -> None:
        """Start a thread if there are rows to read and no thread reads."""
        # after the end of the script, start nothing for which the interpreter would wait
        ended = not threading.main_thread().is_alive()
        if self._reader is None and not ended and self._next() is not None:
            reader = threading.Thread(target=self._work, name="pyg_scale-read-ahead")
            with contextlib.suppress(RuntimeError):  # no more threads can be started
                reader.start()
                self._reader = reader

    def _next(self) -> _Pass | None:
        self._passes = [each for each in self._passes if each.goes_on()]
        wanted = [each for each in self._passes if each.wanted]
        for each in wanted or self._passes[:1]:
            if each.wanted or self.held + each.section_bytes <= each.room or not self.held:
                return each
        return None

    def _work(self) -> None:
        while True:
            with self._lock:
                found = self._next() if threading.main_thread().is_alive() else None
                if found is None:
                    self._reader = None
                    return
            found.read_section()
            with self._lock:
                self.held += found.count_section()

    def room_for(self, counts: Sequence[int], row_bytes: int, room: int) -> list[Held]:
        """Allocate memory for the given numbers of rows."""
        with self._lock:
            blocks = self._blocks.get(row_bytes)
            if blocks is None:
                blocks = self._blocks[row_bytes] = RowBlocks(row_bytes, room)
            return blocks.take(counts)


class ReadAheadBatch:
    """The rows of one request.

    Args:
        of: The pass that reads them.
        number: The index of the request in the pass.
        rows: The rows, ``int64``.
    """

    def __init__(self, of: _Pass, number: int, rows: Tensor) -> None:
        self.of, self.number, self.rows = of, number, rows
        self.order: Tensor = rows  # unsorted at first
        self.held: list[Held] = []  # the rows read, in that order
        self.failed = self.forgotten = False
        self.there = threading.Event()

    def take(self, position: Tensor, out: Tensor, given_up: Callable[[], bool]) -> bool:
        """Wait for the rows and write them.

        Args:
            position: ``int64``, the position of each of the request's rows in ``out``.
            out: ``uint8`` ``[n, row_bytes]``, written to.
            given_up: Called from time to time; True ends the wait.

        Returns:
            True if they were written; otherwise they must be read again.
        """
        if self.forgotten:
            return False
        deadline = time.monotonic() + LIMIT
        try:
            reads = self.there.is_set() or self.of.ahead.want(self.of)
            while reads and not self.there.wait(_LOOK):
                late = given_up() or time.monotonic() > deadline
                reads = not late and self.of.ahead.want(self.of)
            if not self.there.is_set() or self.failed or self.forgotten:
                return False
            end = 0
            for held in list(self.held):
                begin, end = end, end + held.count
                to = gather(position, self.order[begin:end])
                row_cache.scatter(held.rows, to, out, take=held.positions())
            return not self.forgotten  # the memory may have been reused meanwhile
        finally:
            self.forget()

    def forget(self) -> None:
        """Release the rows, as nobody needs them any more."""
        self.of.ahead.let_go(self)


class _Pass:
    """One pass over a file. Everything except reading holds the lock of ``ahead``."""

    def __init__(
        self, ahead: ReadAhead, rows: Sequence[Tensor], row_bytes: int, read: Read, room: int
    ) -> None:
        self.ahead, self.room = ahead, room
        self.wanted = False
        self._read, self._row_bytes = read, row_bytes
        self._num_rows = sum(each.numel() for each in rows)
        self.coming = [ReadAheadBatch(self, i, each) for i, each in enumerate(rows)]
        for each in self.coming:
            if not each.rows.numel():
                each.there.set()
        size = self._num_rows * row_bytes
        self._num_sections = max(1, min(SECTIONS, size // LEAST))
        self._section = 0
        self._ends: list[np.ndarray] = []  # rows of each request by section
        self._section_held: list[tuple[ReadAheadBatch, Held]] = []

    @property
    def section_bytes(self) -> int:
        """Mean size of a section in bytes."""
        return self._num_rows * self._row_bytes // self._num_sections

    def goes_on(self) -> bool:
        """Return True if there are rows left to read."""
        left = self._section < self._num_sections and self._num_rows > 0
        return left and any(not each.forgotten for each in self.coming)

    def read_section(self) -> None:
        """Read the next section for the requests that still need it."""
        mine = [each for each in self.coming if not (each.forgotten or each.failed)]
        if not mine:
            return
        try:
            if not self._ends:
                self._find_sections()
            begin, end = self._ends[self._section : self._section + 2]
            mine = [each for each in mine if begin[each.number] < end[each.number]]
            if mine:
                counts = [int(end[each.number] - begin[each.number]) for each in mine]
                made = self.ahead.room_for(counts, self._row_bytes, self.room)
                self._section_held = list(zip(mine, made))
                order = [each.order[begin[each.number] : end[each.number]] for each in mine]
                index = [each.rows.numpy()[one.numpy()] for each, one in zip(mine, order)]
                position = [held.positions().numpy() for held in made]
                self._read(_joined(index), _joined(position), made[0].rows)
        except Exception:  # the requests get the error when they read the rows themselves
            for each in mine:
                each.failed = True

    def count_section(self) -> int:
        """Mark requests that now have all their rows; return the number of bytes added."""
        bytes_held, self._section = 0, self._section + 1
        for each, held in self._section_held:
            if each.forgotten or each.failed:
                held.give_back()
            else:
                each.held.append(held)
                bytes_held += held.num_bytes
        self._section_held = []
        for each in self.coming:
            if each.failed or self._section == self._num_sections:
                each.there.set()
        return bytes_held

    def _find_sections(self) -> None:
        """Find the ends of the sections."""
        # NumPy, as torch would start threads for this in addition to those of the loader.
        rows = [each.rows.numpy() for each in self.coming]
        step = max(1, self._num_rows // (self._num_sections * _SAMPLE))
        sample = np.sort(np.concatenate([each[::step] for each in rows]))
        at = np.arange(1, self._num_sections) * sample.size // self._num_sections
        bounds = sample[at]
        ends = [np.zeros(len(rows), dtype=np.int64)]
        for each, mine in zip(self.coming, rows):
            each.order = torch.from_numpy(np.argsort(mine))
        for bound in bounds:
            ends.append(
                np.array(
                    [
                        np.searchsorted(mine, bound, sorter=each.order.numpy())
                        for each, mine in zip(self.coming, rows)
                    ]
                )
            )
        ends.append(np.array([mine.size for mine in rows]))
        self._ends = ends


def _joined(each: Sequence[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate(each))


BLOCK = 128 << 10
"""Size of a block in bytes, unless a single row is larger."""


class Held:
    """Memory for some rows, until it is released.

    Attributes:
        count: Number of rows.
        rows: ``uint8`` ``[n, row_bytes]``, the memory that contains them.
    """

    def __init__(self, of: _Segment, blocks: list[int], count: int) -> None:
        self.count, self.rows = count, of.rows
        self._of, self._blocks = of, blocks

    @property
    def num_bytes(self) -> int:
        """Size of the rows in bytes."""
        return self.count * self.rows.size(1)

    def positions(self) -> Tensor:
        """Their indices in ``rows``, ``int64`` ``[count]``."""
        # NumPy, as torch would start threads for this.
        first = np.array(self._blocks, dtype=np.int64) * self._of.block_rows
        found = first[:, None] + np.arange(self._of.block_rows)
        return torch.from_numpy(found.reshape(-1)[: self.count])

    def give_back(self) -> None:
        """Release the memory, which nobody reads or writes any more."""
        self._of.free += reversed(self._blocks)
        self._blocks = []


class RowBlocks:
    """Blocks for rows of one size. Not thread-safe.

    Args:
        row_bytes: Size of a row in bytes.
        room: Expected maximum of bytes in use; untouched memory costs nothing.
    """

    def __init__(self, row_bytes: int, room: int) -> None:
        self._row_bytes = row_bytes
        self._block_rows = max(1, BLOCK // row_bytes)
        self._expected = -(-room // (self._block_rows * row_bytes))
        self._segments: list[_Segment] = []

    def take(self, counts: Sequence[int]) -> list[Held]:
        """Allocate the given numbers of rows, all in the same memory."""
        blocks = [-(-count // self._block_rows) for count in counts]
        needed = sum(blocks)
        # memory beyond the expected maximum is returned to the system when free
        self._segments[1:] = [each for each in self._segments[1:] if each.in_use]
        segment = next((each for each in self._segments if len(each.free) >= needed), None)
        if segment is None:
            expected = 0 if self._segments else self._expected
            segment = _Segment(max(needed, expected), self._block_rows, self._row_bytes)
            self._segments.append(segment)
        return [segment.take(number, count) for number, count in zip(blocks, counts)]


class _Segment:
    """Consecutive blocks; the one released last is used first."""

    def __init__(self, num_blocks: int, block_rows: int, row_bytes: int) -> None:
        self.block_rows, self._num_blocks = block_rows, num_blocks
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        mapped = mmap.mmap(-1, max(1, num_blocks * block_rows * row_bytes), flags=flags)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            mapped.madvise(mmap.MADV_HUGEPAGE)
        self.rows = torch.frombuffer(mapped, dtype=torch.uint8).view(-1, row_bytes)
        self.free = list(reversed(range(num_blocks)))

    @property
    def in_use(self) -> bool:
        return len(self.free) < self._num_blocks

    def take(self, number: int, count: int) -> Held:
        first = len(self.free) - number
        blocks = self.free[first:][::-1]
        del self.free[first:]
        return Held(self, blocks, count)
