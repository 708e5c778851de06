"""Requests and replies over TCP: a connection for each pair of ranks, made when it is needed.

Unlike gloo's, these waits can time out without harm, so a rank may be idle for any time. The loss
of a rank is noticed at once by the ranks that wait for its answers.
"""

from __future__ import annotations

import atexit
import itertools
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

from torch import Tensor

from pyg_scale.comm.address import own_address
from pyg_scale.comm.base import Work
from pyg_scale.comm.connect import Group
from pyg_scale.comm.frames import BYE, ERROR, REPLY, REQUEST, Frame
from pyg_scale.comm.handshake import HELLO_SECONDS, MOST_CALLERS, Acceptor, introduce
from pyg_scale.comm.landing import Landings
from pyg_scale.comm.meeting import store_failure
from pyg_scale.comm.secret import SECRET, SECRET_FILE, derive_key
from pyg_scale.comm.service import Answer, Handler, Handlers, Service, join
from pyg_scale.comm.tcp_connection import TcpAnswer, TcpConnection, tune
from pyg_scale.comm.time_limit import within
from pyg_scale.errors import AccessError, CommError, CommTimeoutError

_PAUSE = 0.05
_NEWS_SECONDS = 1.0  # to read the last messages of a rank that ended
_DROPPED_SECONDS = 2 * HELLO_SECONDS  # to call a rank again that drops this one


class TcpService(Service):
    """Serves other ranks at a port of its own, on the interface by which they reach this one.

    A caller and this rank must prove to each other that they have the group's secret before any
    message is read, see :mod:`pyg_scale.comm.handshake`. The group's store, which everyone can
    read, has the address of this rank and a token that tells the ranks of one job from those of
    another. The token is not a secret: without a secret, everyone who can read the store is
    answered.

    Args:
        group: The ranks.
        handlers: The handlers of this rank.
        num_threads: Number of requests that it answers at a time.

    Raises:
        CommTimeoutError: If rank 0 does not come in time.
    """

    def __init__(self, group: Group, handlers: Mapping[str, Handler], num_threads: int) -> None:
        self.rank, self.world_size, self.timeout = group.rank, group.world_size, group.timeout
        self._store = group.store
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._peers: dict[int, TcpConnection] = {}
        self._connections: set[TcpConnection] = set()
        self._unsent: dict[int, list[tuple[Frame, Future[list[Tensor]]]]] = {}
        self._addresses: dict[int, tuple[str, int]] = {}
        self.landings = Landings()
        self._said_bye: set[int] = set()
        self._gone: set[int] = set()  # those that said bye, and those that ended without
        self._all_gone = threading.Condition(self._lock)
        self._closed = self._closing = False
        self._handlers = Handlers(handlers, num_threads)
        try:
            self._key = derive_key(group.secret or "", f"ranks {self._share_token()}")
            self._acceptor = self._listen()
        except BaseException:
            self._handlers.close()
            raise
        _close_at_exit(self)

    # Asking ################################################################################

    def request(self, rank: int, name: str, tensors: Sequence[Tensor]) -> Work[list[Tensor]]:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"there is no rank {rank}, only 0 to {self.world_size - 1}")
        if self._closed:
            raise CommError("this service was closed")
        if rank == self.rank:
            return Answer(self._handlers.submit(name, list(tensors)), rank, name, self.timeout)
        future: Future[list[Tensor]] = Future()
        number, first = next(self._numbers), False
        frame = Frame(REQUEST, number, name, tensors)
        self.landings.open(number)
        future.add_done_callback(lambda _: self.landings.done(number))
        with self._lock:
            peer = self._peers.get(rank)
            if peer is None:
                self._unsent.setdefault(rank, []).append((frame, future))
                first = len(self._unsent[rank]) == 1
        if peer is not None:
            peer.ask(frame, future)
        elif first:  # in a thread, as a machine that was cut off makes callers wait
            threading.Thread(
                target=self._call, args=(rank,), name=f"pyg_scale-call-{rank}", daemon=True
            ).start()
        return TcpAnswer(future, rank, name, self.timeout, self.landings, number)

    def _call(self, rank: int) -> None:
        """Connect, and send the requests made in the meantime."""
        peer, reason = None, None
        try:
            peer = self._peer(rank, self.timeout)
        except Exception as error:
            reason = error
        with self._lock:
            unsent = self._unsent.pop(rank)
        for frame, future in unsent:
            try:
                if peer is None:
                    raise reason or CommError(f"rank {rank} cannot be reached")
                peer.ask(frame, future)
            except Exception as error:
                future.set_exception(error)

    def _peer(self, rank: int, seconds: float) -> TcpConnection:
        with self._lock:
            peer = self._peers.get(rank)
        if peer is not None:
            return peer
        connection = self._connect(rank, seconds)
        with self._lock:
            if self._closed:
                connection.close()
                raise CommError("this service was closed")
            if rank in self._peers:
                connection.close()
                return self._peers[rank]
            peer = TcpConnection(connection, rank, self)
            self._peers[rank] = peer
            self._connections.add(peer)
        peer.start()
        return peer

    def _connect(self, rank: int, seconds: float) -> socket.socket:
        where = f"rank {rank}"
        try:
            if rank not in self._addresses:
                self._addresses[rank] = within(seconds + 1.0, self._look_up, rank, seconds)
            return self._call_at(self._addresses[rank], rank, seconds)
        except AccessError:
            host, port = self._addresses[rank]
            raise AccessError(
                f"{where} at {host}:{port} has another secret than rank {self.rank}, or one of the "
                f"two has none: give all ranks the same by {SECRET} or {SECRET_FILE}"
            ) from None
        except CommError as error:
            raise CommError(f"{where} cannot be reached: {error}") from None
        except TimeoutError:
            reason = f"{where} cannot be reached in {round(seconds, 2):g} s"
            raise CommTimeoutError(reason) from None
        except OSError as error:
            raise CommError(f"{where} cannot be reached: {error}") from None
        except RuntimeError as error:
            failure = store_failure(error, f"it did not come in {seconds:g} seconds")
            raise type(failure)(f"{where} cannot be found: {failure}") from None

    def _call_at(self, address: tuple[str, int], rank: int, seconds: float) -> socket.socket:
        """Connect, and try again if dropped: too many may have called at the same time."""
        deadline = time.monotonic() + seconds
        until = deadline - seconds + min(seconds, _DROPPED_SECONDS)
        while True:
            left = max(_PAUSE, deadline - time.monotonic())
            connection = socket.create_connection(address, timeout=left)
            try:
                introduce(connection, self._key, self.rank, rank, left)
                tune(connection, self.timeout)
                return connection
            except ConnectionError:
                connection.close()
                if time.monotonic() > until:
                    raise
                time.sleep(_PAUSE)
            except BaseException:
                connection.close()
                raise

    def _look_up(self, rank: int, seconds: float) -> tuple[str, int]:
        self._store.wait([f"address/{rank}"], timedelta(seconds=seconds))
        host, port = self._store.get(f"address/{rank}").decode().split()
        return host, int(port)

    # Serving ###############################################################################

    def _listen(self) -> Acceptor:
        address = own_address()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        backlog = max(MOST_CALLERS, self.world_size)
        listener = socket.create_server((address, 0), family=family, backlog=backlog)
        port = listener.getsockname()[1]
        acceptor = Acceptor(listener, self._key, self.rank, self.world_size, self._welcome)
        self._store.set(f"address/{self.rank}", f"{address} {port}")
        return acceptor

    def _welcome(self, connection: socket.socket, rank: int) -> None:
        tune(connection, self.timeout)
        peer = TcpConnection(connection, rank, self)
        with self._lock:
            if self._closed:
                connection.close()
                return
            self._connections.add(peer)
        peer.start()

    def serve(self, connection: TcpConnection, frame: Frame) -> None:
        future = self._handlers.submit(frame.text, list(frame.tensors), rows=True)

        def reply(done: Future[list[Any]]) -> None:
            if done.cancelled():
                return
            error = done.exception()
            if error is None:
                answer = Frame(REPLY, frame.number, "", done.result())
            else:
                answer = Frame(ERROR, frame.number, f"{type(error).__name__}: {error}")
            connection.reply(answer)

        future.add_done_callback(reply)

    def said_bye(self, rank: int) -> None:
        with self._lock:
            self._said_bye.add(rank)
            self._leave(rank)

    def _leave(self, rank: int) -> None:
        self._gone.add(rank)
        self._all_gone.notify_all()

    def lost(self, connection: TcpConnection) -> None:
        with self._lock:
            self._connections.discard(connection)
            if self._peers.get(connection.rank) is connection:
                del self._peers[connection.rank]
            if self._closing or connection.said_bye or connection.asked:
                self._leave(connection.rank)

    def close(self, wait: float = 0.0) -> list[int]:
        others = set(range(self.world_size)) - {self.rank}
        missing: list[int] = []
        if not self._closed and wait > 0:
            deadline = time.monotonic() + wait
            self._closing = True  # ranks that are lost from now on are not waited for
            for rank in sorted(others):
                left = max(0.1, deadline - time.monotonic())
                try:
                    self._peer(rank, left).send(Frame(BYE, 0))
                except CommTimeoutError:
                    continue
                except (CommError, OSError):  # it is gone, or cannot be found
                    if not self._hears_from(rank):
                        with self._lock:
                            self._leave(rank)
            with self._all_gone:
                while others - self._gone and not self._closed and time.monotonic() < deadline:
                    self._all_gone.wait(max(0.0, deadline - time.monotonic()))
                # The last message of a rank may still be on its way on another of its connections.
                self._all_gone.wait_for(
                    lambda: self._closed or self._gone <= self._said_bye, min(wait, _NEWS_SECONDS)
                )
                missing = sorted(others - self._said_bye)  # before this call closes connections
        self._closed = True
        self._acceptor.close()
        with self._lock:
            connections = list(self._connections)
            self._all_gone.notify_all()  # for a call that waits
        for connection in connections:
            connection.close()
        self._handlers.close()
        join([connection.reader for connection in connections])
        return missing

    def _hears_from(self, rank: int) -> bool:
        """Return True if there is a connection whose loss will show that the rank is gone."""
        with self._lock:
            return any(each.rank == rank for each in self._connections)

    def _share_token(self) -> str:
        if self.rank == 0:
            self._store.set("token", secrets.token_hex(16))
        try:
            self._store.wait(["token"], timedelta(seconds=self.timeout))
        except RuntimeError as error:
            late = f"rank 0 did not come in {self.timeout:g} seconds"
            raise store_failure(error, late) from None
        return str(self._store.get("token").decode())


_open: weakref.WeakSet[TcpService] = weakref.WeakSet()
_opening = threading.Lock()
_process: int | None = None  # the process that closes them at its end


def _close_at_exit(service: TcpService) -> None:
    """Close a service at exit: daemons that the interpreter ends inside C++ abort the process."""
    global _process
    with _opening:
        if _process != os.getpid():
            _process = os.getpid()
            _open.clear()  # those of the process that this one was forked from
            atexit.register(_close_all, _process)
        _open.add(service)


def _close_all(process: int) -> None:
    if process == os.getpid():
        for service in list(_open):
            service.close()
