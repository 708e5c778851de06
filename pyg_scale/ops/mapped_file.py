"""Tensors whose memory is a mapped file, read without filling memory.

Reading all of a mapping makes every page of it resident. Code that reads a large tensor once, from
end to end, reads its file piece by piece instead.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_scale.ops.raw_bytes import raw_bytes

_PROC = Path("/proc/self")
_AT_ONCE = 1 << 22  # bytes


class _Mapping(NamedTuple):
    """A line of the system's list of mappings."""

    begin: int
    end: int
    permissions: str
    offset: int
    inode: int
    path: str


def in_file(tensor: Tensor, maps: Path = _PROC / "maps") -> bool:
    """Return True if the memory of a CPU tensor is a mapped file (including one in shared memory).

    Args:
        tensor: A tensor on the CPU.
        maps: The system's list of mappings; without it, the result is False.
    """
    found = _mapping_of(tensor, maps)
    return found is not None and found.inode != 0


def pieces(tensor: Tensor, proc: Path = _PROC) -> Iterator[Tensor]:
    """Consecutive pieces of a tensor's elements, one-dimensional, 4 MiB or less each.

    Pieces of a mapped file are read from the file, so that its pages do not become resident. If
    this process has changed pages (which the file does not have), or the file is gone, the mapping
    is read.

    Args:
        tensor: A tensor on the CPU. A piece is overwritten when the next one is requested.
        proc: The folder ``/proc`` of this process.
    """
    step = max(1, _AT_ONCE // tensor.element_size())
    mapping = _mapping_of(tensor, proc / "maps")
    file = None if mapping is None else _unchanged_file(mapping, tensor, proc)
    if file is None:
        flat = tensor if tensor.dim() == 1 else tensor.reshape(-1)
        yield from (piece.contiguous() for piece in flat.split(step))
        return
    try:
        assert mapping is not None
        at = mapping.offset + tensor.data_ptr() - mapping.begin
        buffer = torch.empty(min(step, tensor.numel()), dtype=tensor.dtype)
        for begin in range(0, tensor.numel(), step):
            piece = buffer[: min(step, tensor.numel() - begin)]
            array: Any = raw_bytes(piece).numpy()
            view, where = memoryview(array), at + begin * tensor.element_size()
            while view.nbytes:
                read = os.preadv(file, [view], where)
                if not read:
                    raise OSError(f"{mapping.path} has become shorter since it was mapped")
                view, where = view[read:], where + read
            yield piece
    finally:
        os.close(file)


def _mapping_of(tensor: Tensor, maps: Path) -> _Mapping | None:
    if tensor.numel() == 0 or not maps.is_file():
        return None
    address = tensor.data_ptr()
    for line in maps.read_text().splitlines():
        begin, _, end = line.partition(" ")[0].partition("-")
        if int(begin, 16) <= address < int(end, 16):
            _, permissions, offset, _, inode, *path = line.split(maxsplit=5)
            named = path[0] if path else ""
            number = int(inode) if named else 0
            return _Mapping(
                int(begin, 16), int(end, 16), permissions, int(offset, 16), number, named
            )
    return None


def _unchanged_file(mapping: _Mapping, tensor: Tensor, proc: Path) -> int | None:
    """A descriptor of the file that has the content of a tensor, if there is one."""
    ends = tensor.data_ptr() + tensor.nbytes
    if not mapping.inode or not tensor.is_contiguous() or ends > mapping.end:
        return None
    private_and_writable = mapping.permissions[1] == "w" and mapping.permissions[3] == "p"
    if private_and_writable and _has_pages_of_its_own(mapping, proc / "smaps"):
        return None
    try:
        file = os.open(mapping.path, os.O_RDONLY)
    except OSError:
        return None
    if os.fstat(file).st_ino == mapping.inode:
        return file
    os.close(file)
    return None


def _has_pages_of_its_own(mapping: _Mapping, smaps: Path) -> bool:
    """Return True if a private mapping has pages that were written to, or if that is unknown."""
    try:
        lines = iter(smaps.read_text().splitlines())
    except OSError:
        return True
    head = f"{mapping.begin:x}-{mapping.end:x}"
    for line in lines:
        if line.partition(" ")[0].lstrip("0") == head.lstrip("0"):
            break
    for line in lines:
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) > 0
    return True
