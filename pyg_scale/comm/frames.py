"""Requests and replies on a socket: lengths that are checked, then raw bytes. No pickle."""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyg_scale.comm.base import MAX_DIMS
from pyg_scale.comm.message import DTYPES, dtype_code
from pyg_scale.errors import CommError
from pyg_scale.ops import memory

REQUEST, REPLY, ERROR, BYE = range(4)
_HEAD = struct.Struct("<4sBBHQ")  # mark, kind, number of tensors, length of the text, id
_SPEC = struct.Struct("<BB6xQ")  # dtype, dimensions, bytes
_MARK = b"pygs"
_MOST_BUFFERS = 512  # of one sendmsg

MAX_TENSORS = 255
MAX_TEXT = 4096


@dataclass
class Frame:
    """One message.

    Attributes:
        kind: :data:`REQUEST`, :data:`REPLY`, :data:`ERROR` or :data:`BYE`.
        number: Which request it is, or belongs to.
        text: The handler's name, or what went wrong.
        tensors: What it carries.
    """

    kind: int
    number: int
    text: str = ""
    tensors: Sequence[Tensor] = ()


def send(connection: socket.socket, frame: Frame) -> None:
    """Send a message; the memory of its tensors is not copied.

    Raises:
        ValueError: If there are too many tensors.
        TypeError: If a dtype cannot be sent.
        OSError: If the connection is gone.
    """
    if len(frame.tensors) > MAX_TENSORS:
        raise ValueError(f"a message may have {MAX_TENSORS} tensors (got {len(frame.tensors)})")
    text = frame.text.encode()[:MAX_TEXT]
    head = [_HEAD.pack(_MARK, frame.kind, len(frame.tensors), len(text), frame.number), text]
    payload = []
    for tensor in frame.tensors:
        tensor = tensor.detach().cpu().contiguous()
        head.append(_SPEC.pack(dtype_code(tensor.dtype), tensor.dim(), tensor.nbytes))
        head.append(struct.pack(f"<{tensor.dim()}Q", *tensor.shape))
        if tensor.nbytes:
            payload.append(_bytes(tensor))
    buffers = [memoryview(b"".join(head)), *payload]
    while buffers:
        sent = connection.sendmsg(buffers[:_MOST_BUFFERS])
        while buffers and sent >= buffers[0].nbytes:
            sent -= buffers.pop(0).nbytes
        if sent:
            buffers[0] = buffers[0][sent:]


def receive(connection: socket.socket, max_bytes: int) -> Frame | None:
    """Receive a message; ``None`` if the connection was closed between two.

    Args:
        connection: A blocking socket.
        max_bytes: The most that a message may carry.

    Raises:
        CommError: If what comes is no message, or a larger one.
        OSError: If the connection is gone.
    """
    first = connection.recv(_HEAD.size)
    if not first:
        return None
    mark, kind, count, length, number = _HEAD.unpack(
        first + _exactly(connection, _HEAD.size - len(first))
    )
    if mark != _MARK or kind > BYE or length > MAX_TEXT:
        raise CommError("what came over the connection is no message of pyg_scale")
    text = _exactly(connection, length).decode(errors="replace")
    tensors, total = [], 0
    specs = []
    for _ in range(count):
        code, dims, size = _SPEC.unpack(_exactly(connection, _SPEC.size))
        if code >= len(DTYPES) or dims > MAX_DIMS:
            raise CommError("what came over the connection is no tensor")
        shape = struct.unpack(f"<{dims}Q", _exactly(connection, 8 * dims))
        expected = DTYPES[code].itemsize
        for extent in shape:
            expected *= extent
        total += size
        if size != expected or total > max_bytes:
            raise CommError(
                f"a tensor of {expected} bytes was announced with {size}; a message may carry "
                f"{max_bytes}"
            )
        specs.append((shape, DTYPES[code]))
    for shape, dtype in specs:
        tensor = memory.empty(shape, dtype)
        if tensor.nbytes:
            _into(connection, _bytes(tensor))
        tensors.append(tensor)
    return Frame(kind, number, text, tensors)


def _bytes(tensor: Tensor) -> memoryview:
    array: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _exactly(connection: socket.socket, size: int) -> bytes:
    found = bytearray(size)
    _into(connection, memoryview(found))
    return bytes(found)


def _into(connection: socket.socket, view: memoryview) -> None:
    while view.nbytes:
        size = connection.recv_into(view)
        if not size:
            raise ConnectionResetError("the connection was closed in the middle of a message")
        view = view[size:]
