"""Two processes prove to each other that they have the same key, before either listens.

The caller sends its number, the number of the process that it calls, and a nonce; the called
process answers with a nonce. Each side then sends an HMAC-SHA256 (RFC 2104) of its role, both
nonces, both numbers and the called address, the caller first. A stranger who only connects receives
nothing derived from the key; recorded messages are of no use, as nonces are fresh; and a relay is
noticed, since its address is another one. What follows on the connection is neither encrypted nor
authenticated: this keeps strangers out, but not someone who can change packets on the network.

One thread serves all callers. Each caller has a time limit and a fixed number of bytes, and the
number of callers at a time is limited: the oldest is dropped for the next, since a caller that has
the key needs milliseconds.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

from pyg_scale.comm.service import join
from pyg_scale.errors import AccessError, CommError

HELLO_SECONDS = 5.0
"""Seconds that a caller has to prove that it has the key."""
MOST_CALLERS = 128
"""Callers that are served at a time, unless there are many ranks."""

_MARK = b"pygs-hi1"
_HELLO = struct.Struct("<8sII32s")  # mark, caller, called, nonce
_CHALLENGE = struct.Struct("<8s32s")  # mark, nonce
_PROOF = struct.Struct("<32s")
_VERDICT = struct.Struct("<B32s")  # 1 if the caller is known, and the proof of the called process
_PAUSE = 0.05  # seconds between two tries to accept while no file descriptors are left


def introduce(
    connection: socket.socket, key: bytes, caller: int, called: int, seconds: float
) -> None:
    """Prove to the called process that this one has the key, and have it prove the same.

    Args:
        connection: A connected socket; blocking afterwards.
        key: The key that both have.
        caller: The number of this process.
        called: The number of the other one.
        seconds: Time limit for the whole handshake.

    Raises:
        AccessError: If the other one has another key.
        CommError: If it speaks another protocol.
        TimeoutError: If it is too slow.
        OSError: If the connection is lost.
    """
    deadline = time.monotonic() + seconds
    hello = _HELLO.pack(_MARK, caller, called, secrets.token_bytes(32))
    connection.settimeout(seconds)
    connection.sendall(hello)
    mark, nonce = _CHALLENGE.unpack(_exactly(connection, _CHALLENGE.size, deadline))
    if mark != _MARK:
        raise CommError("the other process speaks another protocol, or another version of it")
    address = _address(connection.getpeername())
    connection.sendall(_proof(key, b"caller", hello, nonce, address))
    known, proof = _VERDICT.unpack(_exactly(connection, _VERDICT.size, deadline))
    if not known or not hmac.compare_digest(proof, _proof(key, b"called", hello, nonce, address)):
        raise AccessError("it has another key")
    connection.settimeout(None)


class Acceptor:
    """Accepts connections, and hands over those whose callers proved that they have the key.

    Args:
        listener: The listening socket; owned by this object from now on.
        key: The key that callers must have.
        number: The number of this process.
        num_callers: Callers have numbers below this.
        admit: Called in the acceptor's thread with a connection, blocking again, and its caller's
            number; an exception that it raises ends only that connection.
    """

    def __init__(
        self,
        listener: socket.socket,
        key: bytes,
        number: int,
        num_callers: int,
        admit: Callable[[socket.socket, int], object],
    ) -> None:
        self._listener, self._key, self._number = listener, key, number
        self._num_callers, self._admit = num_callers, admit
        self._most = max(MOST_CALLERS, 2 * num_callers)
        self._heard: dict[socket.socket, _Caller] = {}  # the oldest is first
        # Unlike an epoll selector, it has no kernel state that a forked process would share.
        self._selector = selectors.PollSelector()
        self._wake, self._waker = socket.socketpair()
        self._process, self._closed = os.getpid(), False
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self.thread = threading.Thread(target=self._run, name="pyg_scale-accept", daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Accept no more callers; may be called again, and does nothing in a forked process."""
        if self._process != os.getpid() or self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError):
            self._waker.send(b"x")
        join([self.thread])

    # The thread ############################################################################

    def _run(self) -> None:
        try:
            while not self._closed:
                for found, _ in self._selector.select(self._patience()):
                    if found.fileobj is self._listener:
                        self._accept()
                    elif found.data is not None:
                        self._hear(found.data)
                self._drop_late()
        finally:
            for caller in list(self._heard.values()):
                self._drop(caller)
            self._selector.close()
            for each in (self._listener, self._wake, self._waker):
                each.close()

    def _patience(self) -> float | None:
        first = next(iter(self._heard.values()), None)
        return None if first is None else max(0.0, first.deadline - time.monotonic())

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):
            return  # the caller is already gone
        except OSError:  # no file descriptors or no memory: the oldest caller gives up its own
            if self._heard:
                self._drop(next(iter(self._heard.values())))
            else:
                time.sleep(_PAUSE)
            return
        connection.setblocking(False)
        if len(self._heard) >= self._most:
            self._drop(next(iter(self._heard.values())))
        caller = _Caller(connection, self._number, self._num_callers, self._key)
        self._heard[connection] = caller
        self._selector.register(connection, selectors.EVENT_READ, caller)

    def _hear(self, caller: _Caller) -> None:
        if caller.connection not in self._heard:  # dropped for another caller in the same round
            return
        try:
            proved = caller.hear()
        except (OSError, ValueError):
            self._drop(caller)
            return
        if proved:
            self._forget(caller)
            try:
                caller.connection.setblocking(True)
                self._admit(caller.connection, caller.number)
            except Exception:
                caller.connection.close()

    def _drop_late(self) -> None:
        now = time.monotonic()
        while (first := next(iter(self._heard.values()), None)) and first.deadline <= now:
            self._drop(first)

    def _drop(self, caller: _Caller) -> None:
        self._forget(caller)
        caller.connection.close()

    def _forget(self, caller: _Caller) -> None:
        del self._heard[caller.connection]
        self._selector.unregister(caller.connection)


class _Caller:
    """A connection whose caller has proved nothing yet."""

    def __init__(
        self, connection: socket.socket, called: int, num_callers: int, key: bytes
    ) -> None:
        self.connection, self.number = connection, -1
        self.deadline = time.monotonic() + HELLO_SECONDS
        self._called, self._num_callers, self._key = called, num_callers, key
        self._said = b""
        self._hello, self._nonce = b"", b""

    def hear(self) -> bool:
        """Read the bytes available; return True once the caller has proved that it has the key.

        Raises:
            ValueError: If it sent something else.
            OSError: If it is gone.
        """
        size = _PROOF.size if self._hello else _HELLO.size
        # One byte more than is allowed: a caller that sends more before it is answered is not ours.
        try:
            more = self.connection.recv(size + 1 - len(self._said))
        except (BlockingIOError, InterruptedError):
            return False
        self._said += more
        if not more or len(self._said) > size:
            raise ValueError("it has ended, or says too much")
        if len(self._said) < size:
            return False
        said, self._said = self._said, b""
        if not self._hello:
            self._challenge(said)
            return False
        return self._judge(said)

    def _challenge(self, hello: bytes) -> None:
        mark, caller, called, _ = _HELLO.unpack(hello)
        if mark != _MARK or caller >= self._num_callers or called != self._called:
            raise ValueError("it is not one of ours, or calls another process")
        self._hello, self._nonce, self.number = hello, secrets.token_bytes(32), caller
        self._send(_CHALLENGE.pack(_MARK, self._nonce))

    def _judge(self, proof: bytes) -> bool:
        address = _address(self.connection.getsockname())
        expected = _proof(self._key, b"caller", self._hello, self._nonce, address)
        if not hmac.compare_digest(proof, expected):
            self._send(_VERDICT.pack(0, bytes(32)))
            raise ValueError("it has another key")
        own = _proof(self._key, b"called", self._hello, self._nonce, address)
        self._send(_VERDICT.pack(1, own))
        return True

    def _send(self, said: bytes) -> None:
        if self.connection.send(said) < len(said):  # a few bytes always fit if the other side reads
            raise ValueError("it reads nothing")


def _proof(key: bytes, role: bytes, hello: bytes, nonce: bytes, address: bytes) -> bytes:
    return hmac.digest(key, b"pyg_scale " + role + hello + nonce + address, "sha256")


def _address(name: Any) -> bytes:
    """An address as both ends see it, without the IPv6 zone that only one of them has."""
    if isinstance(name, tuple):
        return f"{str(name[0]).partition('%')[0]} {name[1]}".encode()
    return b""


def _exactly(connection: socket.socket, size: int, deadline: float) -> bytes:
    found = b""
    while len(found) < size:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("it did not answer in time")
        connection.settimeout(left)
        more = connection.recv(size - len(found))
        if not more:
            raise ConnectionResetError("it ended the connection before it had answered")
        found += more
    return found
