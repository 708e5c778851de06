"""The device of a rank, and the backend for it."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch


def choose_device(
    wanted: str | torch.device | None,
    local_rank: int,
    local_world_size: int,
    *,
    num_gpus: int | None = None,
    visible: str | None = None,
) -> torch.device:
    """Choose the device of a rank.

    Args:
        wanted: The user's choice. ``None`` and ``"cuda"`` mean the GPU of the local rank; ``None``
            without a GPU means the CPU.
        local_rank: Local rank of the rank.
        local_world_size: Number of ranks of this machine.
        num_gpus: Number of GPUs that this process can see; counted by default.
        visible: Value of ``CUDA_VISIBLE_DEVICES``; read by default.

    Returns:
        The device, with an index if it is a GPU.

    Raises:
        ValueError: If there are more ranks than GPUs, or the GPU does not exist.
    """
    count = torch.cuda.device_count() if num_gpus is None else num_gpus
    device = torch.device(wanted) if wanted is not None else None
    if device is not None and device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be 'cpu' or 'cuda' (got {str(device)!r})")
    if device is not None and device.type == "cpu":
        return device
    if count == 0:
        if device is None:
            return torch.device("cpu")
        raise ValueError(f"device={str(device)!r}: this machine has no GPU; pass device='cpu'")
    if device is not None and device.index is not None:
        if device.index >= count:
            raise ValueError(f"device={str(device)!r}: this process sees {count} GPUs, from 0")
        return device
    if local_rank < count and local_world_size <= count:
        return torch.device("cuda", local_rank)
    seen = os.environ.get("CUDA_VISIBLE_DEVICES") if visible is None else visible
    if count == 1 and seen and "," not in seen:  # the launcher gave each rank its own GPU
        return torch.device("cuda", 0)
    raise ValueError(
        f"there are {local_world_size} ranks on this machine, but {count} GPUs: start with "
        f"--nproc-per-node={count}, or pass device='cpu'"
    )


def choose_backend(wanted: str | None, device: torch.device) -> str:
    """Choose the backend of ``torch.distributed`` for a device.

    Args:
        wanted: The user's choice; by default ``"cpu:gloo,cuda:nccl"`` with a GPU, else ``"gloo"``.
        device: Device of this rank.

    Raises:
        ValueError: If the backend cannot send tensors on the device, or is not available.
    """
    if wanted is None:
        wanted = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    if "nccl" in wanted:
        if device.type != "cuda":
            raise ValueError(f"backend={wanted!r} needs a GPU; this rank is on {str(device)!r}")
        if not torch.distributed.is_nccl_available():
            raise ValueError(f"backend={wanted!r}: this build of torch has no NCCL; use 'gloo'")
    return wanted


def gpu_name(device: torch.device) -> str:
    """An identifier of a GPU on its machine; empty for the CPU."""
    if device.type != "cuda":
        return ""
    properties = torch.cuda.get_device_properties(device)
    return str(getattr(properties, "uuid", "")) or str(device.index)


def check_gpus(gpus: Sequence[str], hosts: Sequence[str], backend: str) -> None:
    """Check that each rank has a GPU of its own, which NCCL needs.

    Raises:
        ValueError: If two ranks share one; names them.
    """
    if "nccl" not in backend:
        return
    owner: dict[tuple[str, str], int] = {}
    for rank, where in enumerate(zip(hosts, gpus, strict=True)):
        if not where[1]:
            continue
        if where in owner:
            raise ValueError(
                f"ranks {owner[where]} and {rank} have the same GPU ({where[1]} of {where[0]}), "
                f"which NCCL does not support: start fewer ranks there, or pass backend='gloo'"
            )
        owner[where] = rank
