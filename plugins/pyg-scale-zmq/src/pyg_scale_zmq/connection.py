"""The client side: one thread owns a socket for each server."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

import zmq
from torch import Tensor
from zmq.utils.monitor import parse_monitor_message

from pyg_scale.comm import Connection, Reply
from pyg_scale.comm.remote import MAX_ANSWER
from pyg_scale.errors import CommError, RequestError
from pyg_scale_zmq.messages import ERROR, REPLY, REQUEST, Message, frames_of, message_of
from pyg_scale_zmq.settings import IO_THREADS, greets_with_curve, keys_of, require_curve, tune
from pyg_scale_zmq.wake import Wake

CONNECT_SECONDS = 5.0
_JOIN_SECONDS = 5.0
_TIDY_EVERY = 256  # requests that wait for answers, some of which are abandoned
_LOST = zmq.EVENT_DISCONNECTED
_FAILED = zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED
_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH
_STRANGER = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_HANDSHAKE_FAILED = _REFUSED | _STRANGER | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_NO_SERVER = "what is there is no server of pyg_scale, or of another version"
_READY = zmq.EVENT_HANDSHAKE_SUCCEEDED


class ZmqConnection(Connection):
    """Sends requests to servers; in a forked or unpickled process it connects anew.

    Args:
        addresses: Addresses of the servers.
        secret: Secret of the servers.
        timeout: Time limit of an answer in seconds.
    """

    def __init__(self, addresses: tuple[str, ...], secret: str, timeout: float) -> None:
        require_curve()
        self.addresses, self.timeout = addresses, timeout
        self._secret = secret
        self._lock = threading.Lock()
        self._inside: _Inside | None = None
        self._closed = False
        self._numbers = itertools.count()

    def request(self, server: int, name: str, tensors: Sequence[Tensor]) -> Reply:
        if not 0 <= server < len(self.addresses):
            raise ValueError(f"there is no server {server}, only 0 to {len(self.addresses) - 1}")
        number = next(self._numbers)
        frames = frames_of(Message(REQUEST, number, name, tensors))
        reply = Reply(self.addresses[server], name, self.timeout)
        self._own().ask(server, number, frames, reply)
        return reply

    def _own(self) -> _Inside:
        """The sockets of this process, not those of the process it was forked from."""
        with self._lock:
            if self._closed:
                raise CommError("this connection was closed")
            if self._inside is None or self._inside.pid != os.getpid():
                self._inside = _Inside(self.addresses, self._secret)
                self._finalizer = weakref.finalize(self, self._inside.stop)
            return self._inside

    def close(self) -> None:
        with self._lock:
            self._closed = True
            inside, self._inside = self._inside, None
        if inside is not None:
            self._finalizer.detach()
            inside.stop()

    def __getstate__(self) -> dict[str, Any]:
        return {
            "addresses": self.addresses,
            "timeout": self.timeout,
            "_secret": self._secret,
            "_closed": self._closed,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()
        self._inside = None
        self._numbers = itertools.count()


class _Server:
    """The state of a server in the thread."""

    def __init__(self, context: zmq.Context, address: str, secret: str) -> None:
        self.address = address
        self.ready = False
        self.waiting: dict[int, Reply] = {}
        self.unsent: deque[tuple[int, list[Any], Reply]] = deque()
        self._failing = False  # the handshake; the connection ends next
        self._refusal: CommError | None = None
        self._idle = False  # ZeroMQ does not connect
        self.socket = context.socket(zmq.DEALER)
        tune(self.socket, MAX_ANSWER)
        self.socket.setsockopt(zmq.IPV6, 1)
        self.socket.setsockopt(zmq.IMMEDIATE, 1)  # no queue for absent servers
        self.socket.setsockopt(zmq.CONNECT_TIMEOUT, int(CONNECT_SECONDS * 1000))
        self.socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        public, own = keys_of(secret, "client")
        self.socket.setsockopt(zmq.CURVE_SERVERKEY, keys_of(secret, "server")[0])
        self.socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
        self.socket.setsockopt(zmq.CURVE_SECRETKEY, own)
        self.monitor = self.socket.get_monitor_socket(_LOST | _FAILED | _HANDSHAKE_FAILED | _READY)
        self.socket.connect(address)

    def watch(self) -> None:
        """Handle events of the connection."""
        while True:
            try:
                event = parse_monitor_message(self.monitor.recv_multipart(zmq.NOBLOCK))["event"]
            except zmq.Again:
                return
            if event == _READY:
                self.ready, self._refusal = True, None
                self.flush()
            elif event & _HANDSHAKE_FAILED:
                self._failing = True
                self._handshake_failed(event)
            elif event == _LOST:
                if self.ready:
                    self.lose("the connection is lost")
                elif not self._failing:  # no handshake was tried
                    self._refuse(CommError(f"{self.address}: {_NO_SERVER}"))
                self._failing = False
            elif not self.ready:
                self.fail(self._refusal or CommError(f"{self.address}: it cannot be reached"))

    def _handshake_failed(self, event: int) -> None:
        if event == _STRANGER:
            self._refuse(CommError(f"{self.address}: {_NO_SERVER}"))
        elif event == _REFUSED or greets_with_curve(self.address):
            self._refuse(RequestError(self.address, "PermissionError", "it has another secret"))
        else:
            self.lose("it ended the connection in the handshake")

    def _refuse(self, error: CommError) -> None:
        """Stop connecting until the next request."""
        self._refusal, self._idle = error, True
        self._disconnect()
        self.fail(error)

    def _disconnect(self) -> None:
        with contextlib.suppress(zmq.ZMQError):
            self.socket.disconnect(self.address)

    def ask(self, number: int, frames: list[Any], reply: Reply) -> None:
        self.unsent.append((number, frames, reply))
        if self._idle:
            self._idle = False
            self.socket.connect(self.address)
        self.flush()

    def flush(self) -> None:
        """Send queued requests as far as possible."""
        while self.ready and self.unsent:
            number, frames, reply = self.unsent[0]
            if reply.done:  # the caller has given up
                self.unsent.popleft()
                continue
            try:
                self.socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            except RuntimeError as error:  # PyZMQ has ended with the interpreter
                self.lose(str(error))
                return
            self.unsent.popleft()
            self.waiting[number] = reply
            if len(self.waiting) % _TIDY_EVERY == 0:
                self.waiting = {k: v for k, v in self.waiting.items() if not v.done}

    def receive(self) -> None:
        for _ in range(64):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                message = message_of(frames, MAX_ANSWER)
            except Exception as error:  # including MemoryError
                self.lose(f"it sent what is no answer ({error})")
                continue
            reply = self.waiting.pop(message.number, None)
            if reply is None:
                continue
            if message.kind == REPLY:
                reply.succeed(message.tensors)
            elif message.kind == ERROR:
                kind, _, reason = message.text.partition(": ")
                reply.fail(RequestError(self.address, kind, reason))
            else:
                reply.fail(CommError(f"{self.address} sent a request instead of an answer"))

    def lose(self, reason: str) -> None:
        self.ready = self.ready and reason.startswith("it sent")
        self.fail(CommError(f"{self.address}: {reason}"))

    def fail(self, error: Exception) -> None:
        """Fail all open requests."""
        gone = [*self.waiting.values(), *(reply for _, _, reply in self.unsent)]
        self.waiting.clear()
        self.unsent.clear()
        for reply in gone:
            reply.fail(error)


class _Inside:
    """The state of the thread; it must not keep the connection alive."""

    def __init__(self, addresses: Sequence[str], secret: str) -> None:
        self.pid = os.getpid()
        self._context = zmq.Context(min(IO_THREADS, len(addresses)))
        self._servers = [_Server(self._context, address, secret) for address in addresses]
        self._asked: SimpleQueue[tuple[int, int, list[Any], Reply] | None] = SimpleQueue()
        self._wake = Wake()
        self._stopped = False
        self._end = CommError("this connection was closed")
        self._thread = threading.Thread(target=self._run, name="pyg_scale-zmq", daemon=True)
        self._thread.start()

    def ask(self, server: int, number: int, frames: list[Any], reply: Reply) -> None:
        self._asked.put((server, number, frames, reply))
        self._wake.up()
        if self._stopped:
            reply.fail(self._end)

    def stop(self) -> None:
        if self.pid != os.getpid():
            return
        self._stopped = True
        self._asked.put(None)
        self._wake.up()
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_SECONDS)

    # The thread ############################################################################

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake.fd, zmq.POLLIN)
        for server in self._servers:
            poller.register(server.monitor, zmq.POLLIN)
            poller.register(server.socket, zmq.POLLIN)
        try:
            while True:
                # Unsent messages are retried: sockets are rarely full.
                blocked = any(server.ready and server.unsent for server in self._servers)
                ready = dict(poller.poll(20 if blocked else None))
                if self._wake.fd in ready:
                    self._wake.clear()
                    if not self._take():
                        return
                for server in self._servers:
                    if server.socket in ready:
                        server.receive()
                    if server.monitor in ready:
                        server.watch()
                    server.flush()
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            self._end = CommError(f"the thread of this connection has ended by {what}")
            raise
        finally:
            self._stopped = True  # first, so that later requests fail in their caller
            self._wake.close()
            while not self._asked.empty():
                if (asked := self._asked.get()) is not None:
                    asked[-1].fail(self._end)
            for server in self._servers:
                server.fail(self._end)
                with contextlib.suppress(zmq.ZMQError):
                    server.socket.disable_monitor()
            self._context.destroy(linger=0)

    def _take(self) -> bool:
        """Take over new requests; return False to end."""
        while not self._asked.empty():
            asked = self._asked.get()
            if asked is None:
                return False
            server, number, frames, reply = asked
            self._servers[server].ask(number, frames, reply)
        return True
