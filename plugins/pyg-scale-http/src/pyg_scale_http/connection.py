"""Connections whose clients must send the head of a request in time."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEAD_SECONDS = 10.0
_LATE = b"the head of a request did not come in time\n"
_ANSWER = (
    b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-type: text/plain\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(_LATE), _LATE)
)
_Base: Any = AutoHTTPProtocol


class PunctualProtocol(_Base):  # type: ignore[misc]
    """The protocol of uvicorn, with a limit to the seconds until a head is complete.

    uvicorn ends a connection that is idle between two requests, and waits for ever for the rest of
    a head that has begun, and for the first head of a connection.

    Attributes:
        head_seconds: The limit, from the opening of a connection, or from the first bytes of a
            later request on. A connection that exceeds it gets an answer 408, and is closed.
    """

    head_seconds = HEAD_SECONDS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limit: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """See :class:`asyncio.Protocol`."""
        super().connection_made(transport)
        self._begin()

    def data_received(self, data: bytes) -> None:
        """See :class:`asyncio.Protocol`."""
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before or self._answers():
            self._end()
        elif self._limit is None:
            self._begin()

    def connection_lost(self, exc: Exception | None) -> None:
        """See :class:`asyncio.Protocol`."""
        self._end()
        super().connection_lost(exc)

    def _answers(self) -> bool:
        """Return True if a request is under way."""
        return self.cycle is not None and not self.cycle.response_complete

    def _begin(self) -> None:
        self._limit = self.loop.call_later(self.head_seconds, self._too_late)

    def _end(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None

    def _too_late(self) -> None:
        self._limit = None
        if not self._answers() and not self.transport.is_closing():
            self.transport.write(_ANSWER)
            self.transport.close()
