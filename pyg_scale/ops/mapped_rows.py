"""Tensors in the memory of the host that a CUDA device reads itself, over the bus.

The pages are locked and mapped for the device in place (``cuMemHostRegister``): nothing is copied.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from pyg_scale.errors import DeviceError
from pyg_scale.ops import fused, library
from pyg_scale.ops.mapped_file import in_file


class _Lock:
    """Pages that stay locked while this object lives; all users of the same pages share it."""

    def __init__(self, tensor: Tensor, device: torch.device) -> None:
        index = device.index or 0
        try:
            torch.ops.pyg_scale.map_rows(tensor, index)
        except RuntimeError as error:
            raise DeviceError(
                f"{tensor.nbytes} bytes of host memory cannot be locked for {device}: {error}"
            ) from error
        _locked.add(_range(tensor))
        # The memory lives as long as its pages are locked; at exit, CUDA may be gone before this
        # object.
        owner = os.getpid()
        weakref.finalize(self, _unmap, tensor.detach(), index, owner).atexit = False


_locks: weakref.WeakValueDictionary[tuple[int, int], _Lock] = weakref.WeakValueDictionary()
_locking = threading.Lock()
_locked: set[tuple[int, int]] = set()  # ranges, also of unused pages that are not unlocked yet
_to_unlock: deque[tuple[Tensor, int]] = deque()

_SHARES_PAGES = 32 << 20  # larger tensors have pages of their own: malloc maps them


class MappedRows:
    """A tensor on the CPU that devices read. Its pages stay locked while this object lives.

    Args:
        tensor: A contiguous tensor in memory of this process, not in a mapped file, whose pages
            would all be read and kept.
        device: A CUDA device.

    Raises:
        ValueError: If the tensor is unsuitable.
        KernelsError: If the kernels for CUDA are not compiled.
        DeviceError: If CUDA refuses, with its reason.
    """

    def __init__(self, tensor: Tensor, device: torch.device) -> None:
        reason = why_not_mapped(tensor, device)
        if reason:
            raise ValueError(f"the tensor cannot be mapped for {device}: {reason}")
        self.tensor = tensor
        self.device = device
        self._lock: _Lock | None = None
        if tensor.numel() == 0:
            return
        _unlock()
        begin, end = _range(tensor)
        with _locking:
            for (first, last), lock in _locks.items():
                if first <= begin and end <= last:
                    self._lock = lock
            # Memory pinned by torch is already mapped; but torch also takes pages locked by us for
            # pinned.
            ours = any(first < end and begin < last for first, last in [*_locks, *_locked])
            if self._lock is None and (ours or not tensor.is_pinned()):
                self._lock = _locks[begin, end] = _Lock(tensor, device)


class HostNumbers(NamedTuple):
    """Numbers of the host that devices read, and their pages, which are locked meanwhile."""

    tensor: Tensor
    pages: MappedRows | None


def map_numbers(tensor: Tensor, device: torch.device, spare: int) -> HostNumbers:
    """Let a device read numbers of the host: where they are, or from a copy.

    Numbers in a mapped file are copied into memory, as pages of a file cannot stay where they are.
    So are those of a small tensor that shares a page with one that is locked already.

    Args:
        tensor: ``[n]`` on the CPU, at any distance from each other.
        device: The device; the CPU reads them anyway.
        spare: The bytes of host memory that a copy may take.

    Raises:
        DeviceError: If they cannot be mapped, with the reason.
    """
    if device.type == "cpu":
        return HostNumbers(tensor, None)
    if not in_file(tensor):
        # Of numbers side by side with others all are locked, once.
        whole = tensor
        if not tensor.is_contiguous():
            whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        try:
            return HostNumbers(tensor, _mapped(whole, device))
        except DeviceError:
            if whole.nbytes > _SHARES_PAGES:
                raise
    if tensor.nbytes > spare:
        raise DeviceError(
            f"{tensor.nbytes} bytes would have to be copied into memory to be locked for {device}, "
            f"which has room for {max(0, spare)}"
        )
    copy = _in_pages_of_its_own(tensor)
    return HostNumbers(copy, _mapped(copy, device))


def _mapped(tensor: Tensor, device: torch.device) -> MappedRows:
    try:
        return MappedRows(tensor, device)
    except ValueError as error:
        if isinstance(error, DeviceError):
            raise
        raise DeviceError(str(error)) from None


def _in_pages_of_its_own(tensor: Tensor) -> Tensor:
    page, size = mmap.PAGESIZE, tensor.numel() * tensor.element_size()
    room = torch.empty(-(-size // page) * page + page, dtype=torch.uint8)
    begin = -room.data_ptr() % page
    return room[begin : begin + size].view(tensor.dtype).copy_(tensor)


def why_not_mapped(tensor: Tensor, device: torch.device) -> str:
    """The reason why the rows of a tensor cannot be mapped for a device; empty if they can."""
    if device.type != "cuda":
        return f"{device} can read host memory anyway"
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return "it is not a contiguous tensor on the CPU"
    if in_file(tensor):
        return "it is in a mapped file, all of which would be read into memory and locked"
    if not library.compiled() or not fused.usable(torch.empty(0, device=device)):
        return "there are no kernels for CUDA, and only these can read it"
    return ""


def _range(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def _unmap(tensor: Tensor, device: int, owner: int) -> None:
    if os.getpid() != owner:  # a fork has the object, but neither the device nor the locked pages
        return
    _to_unlock.append((tensor, device))
    _unlock()


def _unlock() -> None:
    """Unlock unused pages; while a stream records a graph, none, which are left to the next call.

    May run at any time, even within itself, as it waits for no lock.
    """
    for _ in range(len(_to_unlock)):
        try:
            tensor, device = _to_unlock.popleft()
        except IndexError:
            return
        if torch.ops.pyg_scale.unmap_rows(tensor, device):
            _locked.discard(_range(tensor))
        else:
            _to_unlock.append((tensor, device))
