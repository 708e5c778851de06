"""Limits how much of a mapped file the system reads at a page fault.

It reads about 128 KB around a missing page. That fills memory quickly, but is far too much for a
file that does not fit: pages are dropped again before they are used.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import Tensor

from pyg_scale.graph.topology import CSC
from pyg_scale.ops.mapped_file import in_file

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
_FITS = 0.5  # of the memory; the rest is for features, batches and the model
_NO_LIMIT = 1 << 60

_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def no_readahead_beyond_memory(csc: CSC, count: int = 1) -> bool:
    """Turn off readahead for mapped in-edges that do not fit into memory with everything else.

    This suits sampling. Sequential reads need readahead, and a mapping of their own.

    Args:
        csc: The in-edges; all their tensors must be mapped from files.
        count: Number of in-edges of about this size.

    Returns:
        True if it was turned off.
    """
    tensors = [
        each
        for each in (csc.indptr, csc.indices, csc.edge_id, csc.time, csc.weight_prefix)
        if each is not None and each.numel()
    ]
    num_bytes = count * sum(each.numel() * each.element_size() for each in tensors)
    if not exceeds_memory(num_bytes):
        return False
    for each in tensors:
        no_readahead(each)
    return True


def exceeds_memory(num_bytes: int) -> bool:
    """Return True if a file does not fit into memory with everything else."""
    return num_bytes > _FITS * usable_memory()


def usable_memory(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """Memory in bytes that this process may use: available and allowed by its control groups.

    Args:
        proc: The file system of processes.
        cgroups: The file system of control groups.

    Returns:
        The minimum of these; a very large number if nothing is known.
    """
    found = [_NO_LIMIT]
    for line in _lines(proc / "meminfo"):
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) * 1024)
    for line in _lines(proc / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, name = cgroups, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = cgroups / "memory", "memory.limit_in_bytes"
        else:
            continue
        folder = root / path.strip().lstrip("/")
        for group in (folder, *folder.parents):
            found += [int(text) for text in _lines(group / name) if text.strip().isdigit()]
            if group == root:
                break
    return min(found)


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


def no_readahead(tensor: Tensor) -> None:
    """Advise the system to read only the accessed pages of a mapped file."""
    _advise(tensor, "MADV_RANDOM")


@contextlib.contextmanager
def random_reads(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Turn off readahead for tensors in mapped files, for as long as this lasts."""
    mapped = [each for each in tensors if each.numel() and in_file(each)]
    for each in mapped:
        no_readahead(each)
    try:
        yield
    finally:
        for each in mapped:
            _advise(each, "MADV_NORMAL")


def read_soon(tensor: Tensor) -> None:
    """Have the system begin to read a range of a mapped file; does nothing for other tensors."""
    _advise(tensor, "MADV_WILLNEED")


def _advise(tensor: Tensor, name: str) -> None:
    advice = getattr(mmap, name, None)
    if tensor.numel() and advice is not None and tensor.device.type == "cpu":
        begin = tensor.data_ptr() - tensor.data_ptr() % mmap.PAGESIZE
        end = tensor.data_ptr() + tensor.numel() * tensor.element_size()
        _madvise(begin, end - begin, advice)  # if refused, results are the same
