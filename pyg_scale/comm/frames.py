"""Requests and replies on a socket: lengths that are checked, then raw bytes. No pickle."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyg_scale.comm.base import MAX_DIMS
from pyg_scale.comm.landing import Landing
from pyg_scale.comm.message import DTYPES, announced_bytes, dtype_code
from pyg_scale.errors import CommError
from pyg_scale.ops import memory, sockets
from pyg_scale.ops.sockets import GatheredRows, RowPlaces

REQUEST, REPLY, ERROR, BYE = range(4)
_HEAD = struct.Struct("<4sBBHIQ")  # mark, kind, number of tensors, length of the text, of specs, id
_SPEC = struct.Struct("<BB6xQ")  # dtype, dimensions, bytes; then the shape
_MARK = b"pygs"

MAX_TENSORS = 255
MAX_TEXT = 4096
_MAX_SPECS = MAX_TENSORS * (_SPEC.size + 8 * MAX_DIMS)


@dataclass
class Frame:
    """One message.

    Attributes:
        kind: :data:`REQUEST`, :data:`REPLY`, :data:`ERROR` or :data:`BYE`.
        number: The number of the request, or of the request that it answers.
        text: The handler's name, or the error.
        tensors: Its tensors. Rows that are chosen while they are sent are received as a tensor.
    """

    kind: int
    number: int
    text: str = ""
    tensors: Sequence[Any] = ()


def send(connection: socket.socket, frame: Frame) -> None:
    """Send a message, without copying the memory of its tensors.

    Raises:
        ValueError: If there are too many tensors.
        TypeError: If a dtype cannot be sent.
        IndexError: If a row does not exist.
        OSError: If the connection is gone.
    """
    if len(frame.tensors) > MAX_TENSORS:
        raise ValueError(f"a message may have {MAX_TENSORS} tensors (got {len(frame.tensors)})")
    text = frame.text.encode()[:MAX_TEXT]
    specs, payload = [], list[Tensor | GatheredRows]()
    for each in frame.tensors:
        if isinstance(each, GatheredRows):
            shape = each.index.numel(), each.data.size(1)
            specs.append(_SPEC.pack(dtype_code(torch.uint8), 2, shape[0] * shape[1]))
            specs.append(struct.pack("<2Q", *shape))
            payload.append(each)
            continue
        tensor = each.detach().cpu().contiguous()
        specs.append(_SPEC.pack(dtype_code(tensor.dtype), tensor.dim(), tensor.nbytes))
        specs.append(struct.pack(f"<{tensor.dim()}Q", *tensor.shape))
        if tensor.nbytes:
            payload.append(tensor)
    said = b"".join(specs)
    head = _HEAD.pack(_MARK, frame.kind, len(frame.tensors), len(text), len(said), frame.number)
    first = torch.frombuffer(bytearray(head + text + said), dtype=torch.uint8)
    sockets.send(connection, [first, *payload])


def receive(
    connection: socket.socket,
    max_bytes: int,
    landings: Callable[[int, int], Sequence[Landing | None]] = lambda kind, number: (),
) -> Frame | None:
    """Receive a message; ``None`` if the connection was closed between two.

    Args:
        connection: A blocking socket.
        max_bytes: The largest size of a message.
        landings: Called with the kind and number of a message, returns the places to which rows of
            its tensors are written; see :class:`~pyg_scale.comm.landing.Landing`.

    Raises:
        CommError: If the bytes are not a message, or the message is larger.
        OSError: If the connection is gone.
    """
    first = connection.recv(_HEAD.size)
    if not first:
        return None
    mark, kind, count, length, size, number = _HEAD.unpack(
        first + _exactly(connection, _HEAD.size - len(first))
    )
    if mark != _MARK or kind > BYE or length > MAX_TEXT or size > _MAX_SPECS:
        raise CommError("received bytes that are not a message of pyg_scale")
    said = _exactly(connection, length + size)
    specs = _specs(said[length:], count, max_bytes)
    places = landings(kind, number)
    tensors, payload, landed = [], list[Tensor | RowPlaces](), []
    for i, (shape, dtype) in enumerate(specs):
        landing = places[i] if i < len(places) else None
        if landing is not None and landing.takes(shape, dtype):
            tensors.append(landing.stand_in())
            payload.append(landing.places)
            landed.append(landing)
        else:
            tensors.append(memory.empty(shape, dtype))
            if tensors[-1].nbytes:
                payload.append(tensors[-1])
    if payload:
        sockets.receive(connection, payload)
    for landing in landed:
        landing.landed = True
    return Frame(kind, number, said[:length].decode(errors="replace"), tensors)


def _specs(said: bytes, count: int, max_bytes: int) -> list[tuple[tuple[int, ...], Any]]:
    """Shapes and dtypes, before memory is taken for them."""
    found, total, at = [], 0, 0
    for _ in range(count):
        if at + _SPEC.size > len(said):
            raise CommError(_NO_TENSOR)
        code, dims, size = _SPEC.unpack_from(said, at)
        at += _SPEC.size
        if code >= len(DTYPES) or dims > MAX_DIMS or at + 8 * dims > len(said):
            raise CommError(_NO_TENSOR)
        shape = struct.unpack_from(f"<{dims}Q", said, at)
        at += 8 * dims
        expected = announced_bytes(DTYPES[code], shape)
        total += size
        if size != expected or total > max_bytes:
            raise CommError(
                f"a tensor of {expected} bytes was announced with {size}; a message may carry "
                f"{max_bytes}"
            )
        found.append((shape, DTYPES[code]))
    if at != len(said):
        raise CommError(_NO_TENSOR)
    return found


_NO_TENSOR = "received a message whose tensor is not valid"


def _exactly(connection: socket.socket, size: int) -> bytes:
    found = bytearray(size)
    view = memoryview(found)
    while view.nbytes:
        got = connection.recv_into(view)
        if not got:
            raise ConnectionResetError("the connection was closed in the middle of a message")
        view = view[got:]
    return bytes(found)
