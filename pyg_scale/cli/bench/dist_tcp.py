"""How fast bytes go between ranks, without anything of ours: plain sockets, memory used again."""

from __future__ import annotations

import socket
import threading

import torch

from pyg_scale.comm import Communicator

_LIMIT = 60.0


class Ring:
    """A connection from every rank to the next one.

    Args:
        comm: The ranks; all of them make one at the same time.
        num_bytes: Of a message.
    """

    def __init__(self, comm: Communicator, num_bytes: int) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        listener.settimeout(_LIMIT)
        ports = comm.all_gather(torch.tensor([listener.getsockname()[1]]))
        to = int(ports[(comm.rank + 1) % comm.world_size])
        self._out = socket.create_connection(("127.0.0.1", to), timeout=_LIMIT)
        self._into, _ = listener.accept()
        listener.close()
        for each in (self._out, self._into):
            each.settimeout(_LIMIT)
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Written to, as memory that never was is one page of zeros, which costs nothing to read.
        self._sent = b"\1" * num_bytes
        self._received = bytearray(num_bytes)

    def turn(self, messages: int) -> None:
        """Send so many messages while as many come."""
        sender = threading.Thread(target=self._send, args=(messages,), daemon=True)
        sender.start()
        view = memoryview(self._received)
        for _ in range(messages):
            done = 0
            while done < len(view):
                size = self._into.recv_into(view[done:])
                if not size:
                    raise ConnectionResetError("the rank before this one is gone")
                done += size
        sender.join(_LIMIT)

    def _send(self, messages: int) -> None:
        for _ in range(messages):
            self._out.sendall(self._sent)

    def close(self) -> None:
        """Close both connections."""
        self._out.close()
        self._into.close()
