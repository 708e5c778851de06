"""Pinned memory, from torch's own allocator."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.utils.data._utils.pin_memory import pin_memory
from torch_geometric.data import Data, HeteroData

from pyg_scale.loader.stats import Stats
from pyg_scale.ops import colptr


def pins(loader: Any) -> bool:
    """Return True if a loader pins its batches. Without an accelerator torch warns and does not."""
    if not loader.pin_memory:
        return False
    if loader.pin_memory_device:
        warnings.warn(
            f"pin_memory_device is deprecated, the current accelerator will be used as the device; "
            f"ignored: pin_memory_device={loader.pin_memory_device!r}",
            stacklevel=5,
        )
    if not torch.accelerator.is_available():
        warnings.warn(
            "'pin_memory' argument is set as true but no accelerator is found, then device pinned "
            "memory won't be used.",
            stacklevel=5,
        )
        return False
    device = torch.accelerator.current_accelerator()
    return device is not None and device.type != "mps"  # which torch cannot pin for


def pin_batch(batch: Any, stats: Stats) -> Any:
    """Copy a batch (or a tuple of them) to pinned memory."""
    with stats.stage("pin"):
        pointers = [colptr.recall(store.edge_index) for store in _stores(batch)]
        batch = pin_memory(batch)
        for store, known in zip(_stores(batch), pointers, strict=True):
            if known is not None:
                colptr.remember(store.edge_index, known)
    stats.count("pin", rows=1, num_bytes=_bytes(batch))
    return batch


def move_batch(batch: Any, device: Any, pinned: bool) -> Any:
    """Bring a batch (or a tuple of them) to a device; what is there stays as it is.

    Args:
        batch: The batch.
        device: Where to.
        pinned: Whether it is in pinned memory, so that nobody need wait for the copy.
    """
    if isinstance(batch, tuple):
        return tuple(move_batch(each, device, pinned) for each in batch)
    if torch.device(device).type == "cpu" or not hasattr(batch, "to"):
        return batch
    pointers = [colptr.recall(store.edge_index) for store in _stores(batch)]
    batch = batch.to(device, non_blocking=pinned)
    for store, known in zip(_stores(batch), pointers, strict=True):
        if known is not None:
            colptr.remember(store.edge_index, known)
    return batch


def _stores(batch: Any) -> list[Any]:
    """The parts of a batch that hold edges, in an order that pinning keeps."""
    if isinstance(batch, tuple):
        return [store for each in batch for store in _stores(each)]
    if isinstance(batch, Data | HeteroData):
        return [store for store in batch.edge_stores if "edge_index" in store]
    return []


def _bytes(batch: Any) -> int:
    if isinstance(batch, tuple):
        return sum(_bytes(each) for each in batch)
    if not isinstance(batch, Data | HeteroData):
        return 0
    tensors = [v for store in batch.stores for v in store.values() if isinstance(v, torch.Tensor)]
    return sum(t.numel() * t.element_size() for t in tensors)
