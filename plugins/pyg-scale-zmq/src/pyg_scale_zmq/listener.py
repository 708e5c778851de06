"""The server side: one thread owns the sockets, others answer."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any

import zmq
import zmq.utils.garbage  # registers its own end at exit when imported
from torch import Tensor
from zmq.utils import z85

from pyg_scale.comm import Listener
from pyg_scale.comm.service import Handler, Handlers
from pyg_scale.errors import CommError
from pyg_scale_zmq.messages import ERROR, REPLY, REQUEST, Message, frames_of, message_of
from pyg_scale_zmq.settings import DOMAIN, IO_THREADS, keys_of, require_curve, tune
from pyg_scale_zmq.wake import Wake

MAX_WAITING = 1024
"""Largest number of requests that wait for a thread; clients send further ones to other servers."""
_JOIN_SECONDS = 5.0


class ZmqListener(Listener):
    """Answers requests at an address.

    Args:
        address: Address to listen on.
        handlers: The handlers by name.
        secret: The secret; clients without it are disconnected before any message is read.
        num_threads: Number of requests that are answered at a time.
        max_bytes: Largest size of a request in bytes.

    Raises:
        CommError: If it cannot listen at the address.
    """

    def __init__(
        self,
        address: str,
        handlers: Mapping[str, Handler],
        secret: str,
        num_threads: int,
        max_bytes: int,
    ) -> None:
        self._inside = _Inside(address, handlers, secret, num_threads, max_bytes)
        self.address = self._inside.address
        self._finalizer = weakref.finalize(self, self._inside.stop)
        # Before PyZMQ's end, after which nothing large can be sent; finalizers would run later.
        atexit.register(self._finalizer)

    @property
    def error(self) -> CommError | None:
        return self._inside.error

    def close(self) -> None:
        self._finalizer()
        atexit.unregister(self._finalizer)


class _Inside:
    """The state of the thread; it must not keep the listener alive."""

    def __init__(
        self,
        address: str,
        handlers: Mapping[str, Handler],
        secret: str,
        num_threads: int,
        max_bytes: int,
    ) -> None:
        require_curve()
        self._max_bytes = max_bytes
        self._clients = z85.decode(keys_of(secret, "client")[0])  # the key of all clients
        self._context = zmq.Context(IO_THREADS)
        self._socket = self._context.socket(zmq.ROUTER)
        tune(self._socket, max_bytes)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # raises for a lost client
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys_of(secret, "server")[1])
        self._socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        self._socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # every client is checked
        self._socket.setsockopt(zmq.IPV6, int("[" in address))
        self._zap = self._context.socket(zmq.REP)
        self._zap.setsockopt(zmq.LINGER, 0)
        self._zap.bind("inproc://zeromq.zap.01")
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise CommError(f"cannot listen at {address}: {error}") from None
        self.address = self._socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
        self._handlers = Handlers(handlers, num_threads)
        self._waiting = 0
        self.error: CommError | None = None
        self._answers: SimpleQueue[tuple[bytes, int, Future[list[Tensor]]] | None] = SimpleQueue()
        self._wake = Wake()
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="pyg_scale-zmq", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        if self._process != os.getpid():  # a fork must not touch the sockets of its parent
            return
        self._answers.put(None)
        self._wake.up()
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_SECONDS)
        self._handlers.close()

    # The thread ############################################################################

    def _run(self) -> None:
        poller = zmq.Poller()
        for each in (self._socket, self._zap, self._wake.fd):
            poller.register(each, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())
                if self._zap in ready:
                    self._admit()
                if self._wake.fd in ready:
                    self._wake.clear()
                    if not self._send_answers():
                        return
                if self._socket in ready:
                    self._receive()
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            self.error = CommError(f"what answers at {self.address} has ended by {what}")
            raise
        finally:
            self._wake.close()
            self._context.destroy(linger=0)

    def _admit(self) -> None:
        """Answer ZeroMQ's requests to authenticate clients (its RFC 27)."""
        asked = self._zap.recv_multipart()
        known = len(asked) == 7 and asked[5] == b"CURVE" and asked[6] == self._clients
        status = (b"200", b"OK") if known else (b"400", b"the secret is another one")
        number = asked[1] if len(asked) > 1 else b""
        self._zap.send_multipart([b"1.0", number, *status, b"", b""])

    def _receive(self) -> None:
        for _ in range(64):  # then answers have their turn
            try:
                client, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            who = bytes(client.buffer)
            try:
                message = message_of(frames, self._max_bytes)
            except Exception:  # including MemoryError; it may lack a number to answer to
                continue
            if message.kind == REQUEST:
                self._begin(who, message)

    def _begin(self, who: bytes, message: Message) -> None:
        if self._waiting >= MAX_WAITING:
            refused: Future[list[Tensor]] = Future()
            refused.set_exception(CommError(f"{MAX_WAITING} requests are waiting already"))
            self._send(who, message.number, refused)
            return
        self._waiting += 1
        future = self._handlers.submit(message.text, list(message.tensors))
        future.add_done_callback(partial(self._answered, who, message.number))

    def _answered(self, who: bytes, number: int, future: Future[list[Tensor]]) -> None:
        self._answers.put((who, number, future))
        self._wake.up()

    def _send_answers(self) -> bool:
        while not self._answers.empty():
            answer = self._answers.get()
            if answer is None:
                return False
            who, number, future = answer
            self._waiting -= 1
            if not future.cancelled():
                self._send(who, number, future)
            del answer, future
        return True

    def _send(self, who: bytes, number: int, future: Future[list[Tensor]]) -> None:
        try:
            frames: list[Any] = frames_of(_message(number, future))
        except Exception as refused:  # the result of the handler cannot be sent
            reason = f"{type(refused).__name__}: {refused}"
            frames = frames_of(Message(ERROR, number, reason))
        # A client that is lost, or has a thousand waiting answers, gets none.
        with contextlib.suppress(zmq.Again, zmq.ZMQError):
            self._socket.send_multipart([who, *frames], zmq.NOBLOCK, copy=False)


def _message(number: int, future: Future[list[Tensor]]) -> Message:
    error = future.exception()
    if error is None:
        return Message(REPLY, number, "", future.result())
    reason = error.args[0] if isinstance(error, KeyError) and error.args else error
    return Message(ERROR, number, f"{type(error).__name__}: {reason}")
