"""The common settings of the sockets of both sides."""

from __future__ import annotations

import contextlib
import socket as sockets

import zmq
from zmq.utils import z85

from pyg_scale.comm.secret import derive_key
from pyg_scale.errors import CommError

HEARTBEAT_SECONDS = 2.0
"""Seconds between heartbeats of a side."""
SILENCE_SECONDS = 10.0
"""Seconds without heartbeats after which the other side is lost, such as by an unplugged cable."""
HANDSHAKE_SECONDS = 5.0
"""Time limit in seconds to prove the secret."""
IO_THREADS = 4
"""Number of ZeroMQ's threads that encrypt; each connection is handled by one of them."""
DOMAIN = b"pyg_scale"
_CURVE_BYTES = 64  # upper bound of the bytes that CURVE adds to a frame
_GREETING_SECONDS = 1.0
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)


def tune(socket: zmq.Socket, max_bytes: int) -> None:
    """Set time and size limits.

    Args:
        socket: The socket, not yet bound or connected.
        max_bytes: Largest size in bytes of a frame from the wire.
    """
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, max_bytes + _CURVE_BYTES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(HEARTBEAT_SECONDS * 1000))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(SILENCE_SECONDS * 1000))
    socket.setsockopt(zmq.HEARTBEAT_TTL, int(SILENCE_SECONDS * 1000))
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_SECONDS * 1000))
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)


def require_curve() -> None:
    """Refuse a ZeroMQ that cannot encrypt.

    Raises:
        CommError: If libzmq was built without CURVE.
    """
    if not zmq.has("curve"):
        raise CommError(
            f"libzmq {zmq.zmq_version()} was built without CURVE, by which servers and clients "
            "know each other: pip install --force-reinstall pyzmq has one with it"
        )


def keys_of(secret: str, side: str) -> tuple[bytes, bytes]:
    """The long-term keys of one side, derived from the secret, so that both sides know them.

    Args:
        secret: Secret of the job.
        side: ``"server"`` or ``"client"``.

    Returns:
        The public and the secret key of Curve25519, as text in Z85 (ZeroMQ's RFC 32).
    """
    own = z85.encode(derive_key(secret, f"zmq {side}"))
    return zmq.curve_public(own), own


def greets_with_curve(address: str) -> bool:
    """Return True if a server at an address begins like ours, with CURVE (ZMTP, RFC 37).

    A server with another key ends the connection silently, as do many other programs.
    """
    with contextlib.suppress(OSError), sockets.socket(*_family(address)) as probe:
        probe.settimeout(_GREETING_SECONDS)
        if address.startswith("ipc://"):
            probe.connect(address.removeprefix("ipc://"))
        else:
            host, _, port = address.removeprefix("tcp://").rpartition(":")
            probe.connect((host.strip("[]"), int(port)))
        probe.sendall(_GREETING)
        said = b""
        while len(said) < len(_GREETING) and (more := probe.recv(len(_GREETING) - len(said))):
            said += more
        return said[:1] == b"\xff" and said[9:11] == b"\x7f\x03" and said[12:32] == _GREETING[12:32]
    return False


def _family(address: str) -> tuple[int]:
    if address.startswith("ipc://"):
        return (sockets.AF_UNIX,)
    return (sockets.AF_INET6 if "[" in address else sockets.AF_INET,)
