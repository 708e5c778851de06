"""Bytes of tensors whose strides say nothing, as they have no more than one element."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pyg_scale.comm.message import DTYPES
from pyg_scale.loader.seeds.sharding import fingerprint
from pyg_scale.loader.workers.ring import bytes_of
from pyg_scale.ops.raw_bytes import raw_bytes
from pyg_scale.store.rows import raw_rows

EMPTY = torch.arange(1)[1::2]
ONE = torch.arange(6)[3::4]
STRIDED = {
    "empty": EMPTY,
    "one": ONE,
    "no rows": torch.arange(12).view(3, 4)[1:1, ::2],
    "no columns": torch.arange(12).view(3, 4)[:, 1:1],
    "one of a matrix": torch.arange(12).view(3, 4)[::2, 1:][1:, ::4],
    "expanded": torch.tensor(7).expand(1, 1),
    "a number": torch.tensor(7),
}


@pytest.mark.parametrize("tensor", STRIDED.values(), ids=STRIDED)
def test_bytes_are_those_of_a_copy(tensor: Tensor) -> None:
    assert tensor.is_contiguous()
    expected = tensor.numpy().tobytes()
    assert raw_bytes(tensor).numpy().tobytes() == expected
    assert raw_bytes(tensor).data_ptr() == tensor.data_ptr()
    plain = torch.tensor(tensor.tolist(), dtype=tensor.dtype).view(tensor.shape)
    assert fingerprint([tensor]) == fingerprint([plain])
    if tensor.dim():
        row_bytes = tensor.dtype.itemsize * tensor.shape[1:].numel()
        assert raw_rows(tensor).shape == (tensor.size(0), row_bytes)
    if tensor.numel():
        assert bytes(bytes_of(tensor)) == expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype: torch.dtype) -> None:
    tensor = torch.zeros(5, dtype=dtype)
    assert raw_bytes(tensor).numel() == tensor.nbytes
    assert raw_bytes(tensor[3::4]).numel() == dtype.itemsize


def test_what_is_not_contiguous_is_refused() -> None:
    with pytest.raises(RuntimeError, match="view"):
        raw_bytes(torch.arange(6)[::2])
