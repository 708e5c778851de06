"""Messages: a frame with the description, then one frame of raw bytes for each tensor.

All data from the wire is checked against limits before it is used. Nothing is pickled. Frames of
tensors are not copied when they are sent nor, if they are large, when they are received: the tensor
is in ZeroMQ's memory.
"""

from __future__ import annotations

import struct
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import zmq
from torch import Tensor

from pyg_scale.comm.base import MAX_DIMS
from pyg_scale.comm.message import DTYPES, announced_bytes, dtype_code
from pyg_scale.errors import CommError
from pyg_scale.ops.raw_bytes import raw_bytes

REQUEST, REPLY, ERROR = range(3)
MAX_TENSORS = 4096
MAX_TEXT = 4096
MAX_HEAD = 1 << 20
_MARK = b"pygz"
_HEAD = struct.Struct("<4sBxHIQ")  # mark, kind, length of the text, number of tensors, number
_SPEC = struct.Struct("<BB6xQ")  # dtype, dimensions, bytes
_COPY_BELOW = 1 << 15


@dataclass
class Message:
    """A request or an answer.

    Attributes:
        kind: :data:`REQUEST`, :data:`REPLY` or :data:`ERROR`.
        number: Number of the request, or of the request that it answers.
        text: The handler's name, or the error.
        tensors: The tensors of the message.
    """

    kind: int
    number: int
    text: str = ""
    tensors: Sequence[Tensor] = ()


def frames_of(message: Message) -> list[Any]:
    """The frames of a message.

    Raises:
        ValueError: If there are too many tensors, or one has too many dimensions.
        TypeError: If a value is not a tensor, or has a dtype that cannot be sent.
    """
    if len(message.tensors) > MAX_TENSORS:
        raise ValueError(f"a message may have {MAX_TENSORS} tensors (got {len(message.tensors)})")
    text = message.text.encode()[:MAX_TEXT]
    head = [_HEAD.pack(_MARK, message.kind, len(text), len(message.tensors), message.number), text]
    payload: list[Any] = []
    for tensor in message.tensors:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"a message has tensors (got {type(tensor).__name__})")
        if tensor.layout != torch.strided or tensor.dim() > MAX_DIMS:
            raise ValueError(f"dense tensors of up to {MAX_DIMS} dimensions can be sent")
        tensor = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg()
        head.append(_SPEC.pack(dtype_code(tensor.dtype), tensor.dim(), tensor.nbytes))
        head.append(struct.pack(f"<{tensor.dim()}Q", *tensor.shape))
        if tensor.nbytes:
            payload.append(memoryview(raw_bytes(tensor).numpy()))
    return [b"".join(head), *payload]


def message_of(frames: Sequence[zmq.Frame], max_bytes: int) -> Message:
    """Parse the frames of a message.

    Args:
        frames: The frames, uncopied.
        max_bytes: Largest total size of the tensors in bytes.

    Raises:
        CommError: If it is not a message, or is too large.
    """
    if not frames or not _HEAD.size <= len(frames[0]) <= MAX_HEAD:
        raise CommError("what came is no message of pyg_scale")
    head = bytes(frames[0].buffer)
    mark, kind, length, count, number = _HEAD.unpack_from(head)
    if mark != _MARK or kind > ERROR or length > MAX_TEXT or count > MAX_TENSORS:
        raise CommError("what came is no message of pyg_scale")
    at = _HEAD.size + length
    text = head[_HEAD.size : at].decode(errors="replace")
    payload, total, tensors = iter(frames[1:]), 0, []
    try:
        for _ in range(count):
            code, dims, size = _SPEC.unpack_from(head, at)
            at += _SPEC.size
            if code >= len(DTYPES) or dims > MAX_DIMS:
                raise CommError("what came has a tensor of no known form")
            shape = struct.unpack_from(f"<{dims}Q", head, at)
            at += 8 * dims
            expected = announced_bytes(DTYPES[code], shape)
            total += size
            if size != expected or total > max_bytes:
                raise CommError(
                    f"a tensor of {expected} bytes was announced with {size}; a message may have "
                    f"{max_bytes}"
                )
            frame = next(payload) if size else None
            tensors.append(_tensor(frame, size, DTYPES[code], shape))
    except (struct.error, StopIteration):
        raise CommError("what came ends in the middle of a message") from None
    if at != len(head) or next(payload, None) is not None:
        raise CommError("what came is longer than it says")
    return Message(kind, number, text, tensors)


def _tensor(frame: zmq.Frame | None, size: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    if frame is None:
        return torch.empty(shape, dtype=dtype)
    if len(frame) != size:
        raise CommError(f"a tensor of {size} bytes came with {len(frame)}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the memory is only ours, and writable
        found = torch.frombuffer(frame.buffer, dtype=torch.uint8)
    if size < _COPY_BELOW or found.data_ptr() % max(8, dtype.itemsize):
        found = found.clone()
    return found.view(dtype).view(shape)
