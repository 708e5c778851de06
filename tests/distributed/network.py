"""Servers and clients in one process, and what can go wrong between them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pyg_scale.comm import Communicator, Connection, Listener, Reply
from pyg_scale.errors import CommError, RequestError


class Network:
    """Where servers listen. A backend of the kind ``comm``, but for joining groups.

    ``fault[address]`` is called with the number of a request, its handler's name and the answer,
    and returns what is sent instead: another answer, an error, or ``None`` for nothing at all.
    """

    def __init__(self) -> None:
        self.servers: dict[str, _Server] = {}
        self.fault: dict[str, Callable[[int, str, Any], Any]] = {}
        self.asked: list[tuple[str, str]] = []

    def listen(self, address, handlers, *, token, num_threads=2, max_bytes=1 << 30):
        return _Server(self, address, handlers, token, num_threads)

    def connect(self, addresses, *, token, timeout=60.0):
        return _Client(self, addresses, token, timeout)

    def join(self, group):
        return Communicator()


class _Server(Listener):
    def __init__(self, network, address, handlers, token, num_threads):
        self.network, self.address, self.handlers, self.token = network, address, handlers, token
        self.pool = ThreadPoolExecutor(num_threads, "pyg_scale-network")
        self.waiting: list[Reply] = []
        network.servers[address] = self

    def answer(self, number, name, tensors, reply):
        try:
            found = list(self.handlers[name](tensors))
        except Exception as error:
            found = RequestError(self.address, type(error).__name__, str(error))
        fault = self.network.fault.get(self.address)
        if fault is not None:
            found = fault(number, name, found)
        if found is None:
            return
        if isinstance(found, Exception):
            reply.fail(found)
        else:
            reply.succeed([tensor.clone() for tensor in found])

    def close(self):
        self.network.servers.pop(self.address, None)
        for reply in self.waiting:
            reply.fail(CommError(f"{self.address}: the connection is lost"))
        self.pool.shutdown(wait=False, cancel_futures=True)


class _Client(Connection):
    def __init__(self, network, addresses, token, timeout):
        self.network, self.addresses, self.token = network, tuple(addresses), token
        self.timeout, self.closed, self.count = timeout, False, 0
        self.lock = threading.Lock()

    def request(self, server, name, tensors):
        reply = Reply(self.addresses[server], name, self.timeout)
        if self.closed:
            raise CommError("this connection was closed")
        found = self.network.servers.get(self.addresses[server])
        if found is None:
            reply.fail(CommError(f"{self.addresses[server]}: it cannot be reached"))
            return reply
        with self.lock:
            number, self.count = self.count, self.count + 1
            self.network.asked.append((found.address, name))
        if self.token != found.token:
            reply.fail(RequestError(found.address, "PermissionError", "it has another secret"))
            return reply
        found.waiting.append(reply)
        with contextlib.suppress(RuntimeError):
            found.pool.submit(found.answer, number, name, list(tensors), reply)
        return reply

    def close(self):
        self.closed = True


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for something to be so."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to be"
        time.sleep(0.01)
