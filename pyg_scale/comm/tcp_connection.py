"""A connection between two ranks: its reader thread, pending answers, and writers."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from torch import Tensor

from pyg_scale.comm import frames
from pyg_scale.comm.frames import BYE, ERROR, REPLY, REQUEST, Frame
from pyg_scale.comm.landing import Landing, Landings
from pyg_scale.comm.service import Answer
from pyg_scale.errors import CommError, CommTimeoutError

if TYPE_CHECKING:
    from pyg_scale.comm.tcp import TcpService

MAX_BYTES = 1 << 36
_WITHDRAW_SECONDS = 5.0


class TcpAnswer(Answer):
    """An answer whose rows can be written to their places as they arrive."""

    def __init__(
        self,
        future: Future[list[Tensor]],
        rank: int,
        name: str,
        timeout: float,
        landings: Landings,
        number: int,
    ) -> None:
        super().__init__(future, rank, name, timeout)
        self._landings, self._number = landings, number

    def land(self, landings: Sequence[Landing | None]) -> None:
        self._landings.expect(self._number, landings)

    def withdraw(self) -> None:
        self._landings.withdraw(self._number, _WITHDRAW_SECONDS)


class TcpConnection:
    """A socket, the thread that reads it, and the requests that wait for answers.

    Only that thread closes the socket: otherwise a file descriptor that another thread still uses
    could be reused for another file.
    """

    def __init__(self, connection: socket.socket, rank: int, service: TcpService) -> None:
        self._socket, self.rank, self._service = connection, rank, service
        self._writing = threading.Lock()
        self._replies: deque[Frame] = deque()
        self._waiting: dict[int, Future[list[Tensor]]] = {}
        self._waiting_lock = threading.Lock()
        self._landing: int | None = None
        self._broken: str | None = None
        self.asked = self.said_bye = False
        name = f"pyg_scale-rank-{rank}"
        self.reader = threading.Thread(target=self._read, name=name, daemon=True)

    def start(self) -> None:
        self.reader.start()

    def ask(self, frame: Frame, future: Future[list[Tensor]]) -> None:
        with self._waiting_lock:
            if self._broken is not None:
                raise CommError(self._broken)
            self._waiting[frame.number] = future
        try:
            self.send(frame)
        except (TypeError, ValueError, IndexError):
            with self._waiting_lock:
                self._waiting.pop(frame.number, None)
            raise

    def send(self, frame: Frame) -> None:
        with self._writing:
            self._send(frame)
        self._send_replies()

    def reply(self, frame: Frame) -> None:
        """Send an answer; if another thread is already sending, leave it to that one.

        A rank that stopped reading thus blocks one of the answering threads, not all of them.
        """
        self._replies.append(frame)
        self._send_replies()

    def _send_replies(self) -> None:
        # A thread that finds the lock taken leaves: its owner looks once more after releasing it.
        while self._replies and self._writing.acquire(blocking=False):
            try:
                while self._replies:
                    frame = self._replies.popleft()
                    try:
                        self._send(frame)
                    except (TypeError, ValueError, IndexError) as refused:  # cannot be sent
                        reason = f"{type(refused).__name__}: {refused}"
                        self._send(Frame(ERROR, frame.number, reason))
            finally:
                self._writing.release()

    def _send(self, frame: Frame) -> None:
        try:
            frames.send(self._socket, frame)
        except BlockingIOError:
            seconds = self._service.timeout
            reason = f"rank {self.rank} received nothing of a message for {seconds:g} seconds"
            self._break(reason, CommTimeoutError)
        except OSError as error:
            self._break(f"the connection to rank {self.rank} is lost ({error})")

    def _read(self) -> None:
        reason = f"the connection to rank {self.rank} is lost (it ended or was closed)"
        try:
            while (frame := self._receive()) is not None:
                self._take(frame)
                del frame
        except Exception as error:  # also out of memory: those who wait must be told
            reason = f"the connection to rank {self.rank} is lost ({error})"
        self._landed()
        self._break(reason)
        with self._writing:
            self._socket.close()

    def _receive(self) -> Frame | None:
        frame = frames.receive(self._socket, MAX_BYTES, self._landings_of)
        self._landed()
        return frame

    def _landings_of(self, kind: int, number: int) -> Sequence[Landing | None]:
        if kind != REPLY:
            return ()
        self._landing = number
        return self._service.landings.begin(number, self.close)

    def _landed(self) -> None:
        if self._landing is not None:
            self._service.landings.done(self._landing)
            self._landing = None

    def _take(self, frame: Frame) -> None:
        if frame.kind == REQUEST:
            self.asked = True
            self._service.serve(self, frame)
            return
        if frame.kind == BYE:
            self.said_bye = True
            self._service.said_bye(self.rank)
            return
        with self._waiting_lock:
            future = self._waiting.pop(frame.number, None)
        if future is None:
            return
        if frame.kind == REPLY:
            future.set_result(list(frame.tensors))
        else:
            future.set_exception(CommError(f"rank {self.rank} could not answer: {frame.text}"))

    def _break(self, reason: str, kind: type[CommError] = CommError) -> None:
        with self._waiting_lock:
            self._broken = self._broken or reason
            waiting, self._waiting = list(self._waiting.values()), {}
        for future in waiting:
            future.set_exception(kind(reason))
        self._service.lost(self)
        self.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


def tune(connection: socket.socket, seconds: float) -> None:
    """Send without delay, and detect within the time limit that a machine or its cable is gone."""
    # A stopped rank reads nothing: those who send to it must not wait for ever.
    limit = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; elsewhere only the answer's time limit helps
        whole = max(1, int(seconds))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, whole // 2))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, whole // 6))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * whole)
