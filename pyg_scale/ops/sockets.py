"""Transfer of tensors through a connected socket; chosen rows are sent and placed without a copy.

The compiled op (``csrc/sockets.cpp``) transfers a whole message in one call without the
interpreter's lock, which other threads of a rank need too.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyg_scale.ops import library, row_cache
from pyg_scale.ops.gather import gather
from pyg_scale.ops.raw_bytes import raw_bytes

_MOST_BUFFERS = 512  # of one sendmsg
_CLOSED = -1
_ABSENT = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True)
class GatheredRows:
    """Rows ``data[index]`` that are gathered while they are sent.

    Attributes:
        data: ``uint8`` ``[k, row_bytes]``, contiguous.
        index: ``int64`` or ``int32`` ``[n]``.
    """

    data: Tensor
    index: Tensor

    def tensor(self) -> Tensor:
        """The rows, ``uint8`` ``[n, row_bytes]``.

        Raises:
            IndexError: If one does not exist.
        """
        return gather(self.data, self.index)


@dataclass(frozen=True)
class RowPlaces:
    """The places of incoming rows.

    Attributes:
        out: ``uint8`` ``[n, row_bytes]``, contiguous.
        count: Number of incoming rows.
        position: ``int64`` ``[m]``: the rows of ``out`` to write, without repetition; empty for the
            first ones, in order.
        take: The incoming row for each of these, ascending, ``int64`` ``[m]``; one after the other
            if ``None``.
    """

    out: Tensor
    count: int
    position: Tensor
    take: Tensor | None


def send(connection: socket.socket, parts: Sequence[Tensor | GatheredRows]) -> None:
    """Send the bytes of tensors, one after the other.

    Args:
        connection: A connected socket.
        parts: Contiguous tensors on the CPU, or rows of such tensors.

    Raises:
        IndexError: If a row does not exist; then nothing was sent.
        OSError: If the connection is lost, or accepted no data within its time limit.
    """
    if not (connection.gettimeout() is None and library.compiled()):
        _send_plain(connection, parts)
        return
    data = [each.data if isinstance(each, GatheredRows) else each for each in parts]
    index = [each.index if isinstance(each, GatheredRows) else _ABSENT for each in parts]
    rows = [each.index.numel() if isinstance(each, GatheredRows) else -1 for each in parts]
    error = torch.ops.pyg_scale.socket_send(_open(connection), data, index, rows)
    if error:
        raise OSError(error, os.strerror(error))


def receive(connection: socket.socket, parts: Sequence[Tensor | RowPlaces]) -> None:
    """Fill tensors, or some of their rows, with incoming bytes.

    Args:
        connection: A connected socket.
        parts: Contiguous tensors on the CPU, or places in such tensors; written to.

    Raises:
        ValueError: If a place does not exist; then nothing was received. Only the compiled op
            checks it, as places are made by the caller that requests the rows.
        ConnectionResetError: If the connection was closed before all bytes arrived.
        OSError: If the connection is lost.
    """
    if not (connection.gettimeout() is None and library.compiled()):
        _receive_plain(connection, parts)
        return
    out, rows, position, take = [], [], [], []
    for each in parts:
        places = each if isinstance(each, RowPlaces) else RowPlaces(each, -1, _ABSENT, None)
        out.append(places.out)
        rows.append(places.count)
        position.append(places.position)
        take.append(_ABSENT if places.take is None else places.take)
    error = torch.ops.pyg_scale.socket_receive(_open(connection), out, rows, position, take)
    if error == _CLOSED:
        raise ConnectionResetError(_ENDED)
    if error:
        raise OSError(error, os.strerror(error))


def _open(connection: socket.socket) -> int:
    """The file descriptor of a socket; raises if another thread has closed it."""
    if (number := connection.fileno()) < 0:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    return number


_ENDED = "the connection was closed in the middle of a message"


def _send_plain(connection: socket.socket, parts: Sequence[Tensor | GatheredRows]) -> None:
    tensors = [each.tensor() if isinstance(each, GatheredRows) else each for each in parts]
    buffers = [_bytes(tensor) for tensor in tensors if tensor.nbytes]
    while buffers:
        sent = connection.sendmsg(buffers[:_MOST_BUFFERS])
        while buffers and sent >= buffers[0].nbytes:
            sent -= buffers.pop(0).nbytes
        if sent:
            buffers[0] = buffers[0][sent:]


def _receive_plain(connection: socket.socket, parts: Sequence[Tensor | RowPlaces]) -> None:
    for each in parts:
        if isinstance(each, Tensor):
            read_into(connection, each)
            continue
        rows = torch.empty((each.count, each.out.size(1)), dtype=torch.uint8)
        read_into(connection, rows)
        if each.position.numel():
            row_cache.scatter(rows, each.position, each.out, take=each.take)
        else:
            each.out[: each.count] = rows


def read_into(connection: socket.socket, tensor: Tensor) -> None:
    """Fill a contiguous tensor with incoming bytes.

    Raises:
        ConnectionResetError: If the connection was closed before all bytes arrived.
        OSError: If the connection is lost.
    """
    view = _bytes(tensor) if tensor.nbytes else memoryview(b"")
    while view.nbytes:
        size = connection.recv_into(view)
        if not size:
            raise ConnectionResetError(_ENDED)
        view = view[size:]


def _bytes(tensor: Tensor) -> memoryview:
    array: Any = raw_bytes(tensor).numpy()
    return memoryview(array)
