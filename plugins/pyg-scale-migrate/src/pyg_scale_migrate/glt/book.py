"""Partition books of GraphLearn-for-PyTorch (GLT): the part of every node or edge."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyg_scale.files.plain_pickle import load_plain

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class _Object:
    """The attributes of an object of GLT."""


def stand_in(module: str, name: str) -> Any:
    """The stand-in for GLT's own classes, for :mod:`pyg_scale.files.plain_pickle`."""
    if module.partition(".")[0] != "graphlearn_torch":
        return None
    return {
        "GLTPartitionBook": Tensor,
        "RangePartitionBook": _Object,
        "OffsetId2Index": _Object,
    }.get(name)


def read_book(file: str | PathLike[str]) -> Tensor:
    """The parts ``[n]`` in a ``.pt`` file: a tensor, or one of GLT's partition books.

    Args:
        file: The file, such as GLT's ``node_pb.pt``. No code in it is run.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is damaged or has other content; names it.
    """
    path = Path(file)
    found = load_plain(path, stand_in=stand_in)
    if isinstance(found, _Object):
        found = _of_ranges(getattr(found, "partition_bounds", None))
    if not isinstance(found, Tensor) or found.dim() != 1 or found.dtype not in INTEGERS:
        got = type(found).__name__
        if isinstance(found, Tensor):
            got = f"{found.dtype} of shape {list(found.shape)}"
        raise ValueError(f"{path} must hold the part of each id, integers [n] (got {got})")
    return found


def _of_ranges(bounds: Any) -> Any:
    """The part of each id, where part ``i`` ends before ``bounds[i]``."""
    if not isinstance(bounds, Tensor) or bounds.dim() != 1 or not bounds.numel():
        return None
    sizes = torch.diff(bounds, prepend=bounds.new_zeros(1))
    if bool((sizes < 0).any()):
        return None
    return torch.repeat_interleave(torch.arange(bounds.numel(), dtype=torch.int32), sizes)
