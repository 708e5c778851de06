"""What the sockets of both sides have in common."""

from __future__ import annotations

import zmq

HEARTBEAT_SECONDS = 2.0
"""How often a side says that it is there."""
SILENCE_SECONDS = 10.0
"""After so long without a sign the other side is given up, as when a cable was pulled."""
USER = b"pyg_scale"
DOMAIN = b"pyg_scale"


def tune(socket: zmq.Socket, max_bytes: int) -> None:
    """Set limits of time and size.

    Args:
        socket: Before it is bound or connected.
        max_bytes: The most that a frame from the wire may have.
    """
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(HEARTBEAT_SECONDS * 1000))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(SILENCE_SECONDS * 1000))
    socket.setsockopt(zmq.HEARTBEAT_TTL, int(SILENCE_SECONDS * 1000))
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(SILENCE_SECONDS * 1000))
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
