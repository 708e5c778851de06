"""Small records between ranks: JSON as a tensor of bytes."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_scale.errors import CommError

_LONGEST = 1 << 20


def to_record(value: Any) -> Tensor:
    """A value that JSON can represent, as ``uint8`` ``[n]``."""
    text = json.dumps(value, separators=(",", ":"), sort_keys=True).encode()
    return torch.from_numpy(np.frombuffer(bytearray(text), dtype=np.uint8))


def from_record(record: Tensor, what: str) -> Any:
    """The value that :func:`to_record` was given.

    Args:
        record: The received tensor.
        what: Its name in errors.

    Raises:
        CommError: If it is not a record, or too long.
    """
    if record.dtype != torch.uint8 or record.dim() != 1 or record.numel() > _LONGEST:
        raise CommError(f"{what} is not a record (got {record.dtype} of {list(record.shape)})")
    try:
        return json.loads(record.numpy().tobytes())
    except (ValueError, RecursionError) as error:
        raise CommError(f"{what} is not a record: {error}") from None
