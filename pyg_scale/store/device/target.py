"""Finding the device of a request, checking it, and copying tensors to it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyg_scale.errors import DeviceError
from pyg_scale.files.byte_size import byte_size
from pyg_scale.store.device.shares import SHARES

_PIECE = 1 << 22  # numbers


def device_of(device: Any) -> torch.device:
    """The device for an argument, with its index.

    Args:
        device: ``"cuda"``, ``"cuda:1"``, a ``torch.device``, or ``"cpu"``.

    Raises:
        DeviceError: If it is not available; says what is missing.
        TypeError: If it is not a device.
    """
    if not isinstance(device, str | torch.device):
        raise TypeError(f"device must be 'cuda', 'cuda:0', ... or 'cpu' (got {device!r})")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise DeviceError(f"device={device!r} is not a device: {error}") from None
    if found.type == "cpu":
        return torch.device("cpu")
    if found.type != "cuda":
        raise DeviceError(f"device={str(device)!r}: only CUDA devices and 'cpu' are supported")
    if torch.version.cuda is None:
        raise DeviceError(
            f"device={str(device)!r}: torch {torch.__version__} was built without CUDA; install a "
            "build of torch with CUDA, or leave device= out"
        )
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        raise DeviceError(
            f"device={str(device)!r}: torch {torch.__version__} finds no CUDA device; check that "
            "nvidia-smi lists one and CUDA_VISIBLE_DEVICES does not hide it"
        )
    index = torch.cuda.current_device() if found.index is None else found.index
    if index >= count:
        raise DeviceError(f"device={str(device)!r}: this machine has only {count} CUDA devices")
    return torch.device("cuda", index)


def budget_of(memory: int | str | None, device: torch.device, name: str = "memory") -> int:
    """The memory of a device in bytes that features may take.

    Args:
        memory: Bytes, 0 for none, or text such as ``"4GB"``; ``None``: what is left of the half
            of a CUDA device that :class:`.DeviceShares` gives out, and 0 for the CPU.
        device: The device.
        name: Its name in errors.

    Raises:
        TypeError: If it is neither a number nor text.
        ValueError: If it is not an amount of memory.
        DeviceError: If the device has less.
    """
    if memory is None:
        return SHARES.left(device)
    if memory == 0 and not isinstance(memory, bool):
        return 0
    wanted = byte_size(memory, name)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        if wanted > total:
            raise DeviceError(
                f"{name}={memory!r} is more than the {total} bytes that {device} has "
                f"({free} are free)"
            )
    return wanted


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device; only work on the same stream waits for the copy.

    It uses pinned memory of torch, which is reused when the copy is done.
    """
    if tensor.device == device or device.type == "cpu":
        return tensor.to(device)
    return pinned(tensor).to(device, non_blocking=True)


def send_large(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a contiguous tensor to a device piece by piece, so that little memory is pinned."""
    held = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    if tensor.numel():
        for to, piece in zip(held.split(_PIECE), tensor.split(_PIECE), strict=True):
            to.copy_(pinned(piece) if device.type == "cuda" else piece, non_blocking=True)
    return held


def read_here(*tensors: Tensor | None) -> None:
    """Say that the current stream reads tensors: their memory, once freed, waits for it.

    Else a table that nobody refers to any more is given to another tensor while kernels of a
    loader's stream still read it.
    """
    for tensor in tensors:
        if tensor is not None and tensor.device.type == "cuda":
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def pinned(tensor: Tensor) -> Tensor:
    """A tensor in pinned memory: itself if it is pinned, else a copy."""
    if tensor.device.type != "cpu" or tensor.is_pinned():
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)


def host_rows(sizes: list[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised memory on the host, pinned if it is to be copied to a CUDA device."""
    return torch.empty(sizes, dtype=dtype, pin_memory=device.type == "cuda")
