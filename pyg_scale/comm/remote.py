"""Requests between processes that are not ranks of one group: by address, with a shared secret.

The second half of a backend of the kind ``comm``, see :meth:`Communicator.listen
<pyg_scale.comm.Communicator.listen>` and :meth:`Communicator.connect
<pyg_scale.comm.Communicator.connect>`. Clients come and go; all that a server knows of them is the
requests that it has not answered yet.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError

from torch import Tensor

from pyg_scale.comm.base import Work
from pyg_scale.errors import CommError, CommTimeoutError

MAX_REQUEST = 1 << 30
"""Largest size of a request in bytes, by default."""
MAX_ANSWER = 1 << 34
"""Largest size of an answer in bytes, by default."""


class Reply(Work[list[Tensor]]):
    """The answer to a request, or its error.

    Args:
        where: The server, for messages.
        name: The handler that was asked.
        timeout: Seconds that the answer may take from now on.
    """

    def __init__(self, where: str, name: str, timeout: float) -> None:
        self.where, self.name = where, name
        self._timeout, self._begun = timeout, time.monotonic()
        self._future: Future[list[Tensor]] = Future()

    def wait(self, timeout: float | None = None) -> list[Tensor]:
        """The tensors of the answer.

        Args:
            timeout: Seconds from now on; by default the rest of the time limit of the request.

        Raises:
            RequestError: If the server says that it could not answer.
            CommTimeoutError: If no answer arrived in time.
            CommError: If the server is gone, or sent something that is not an answer.
        """
        if timeout is None:
            timeout = max(0.0, self._timeout - (time.monotonic() - self._begun))
        try:
            return self._future.result(timeout)
        except FutureTimeoutError as error:
            if self._future.done():
                raise
            waited = time.monotonic() - self._begun
            raise CommTimeoutError(
                f"{self.where} did not answer the request {self.name!r} within {waited:.3g} seconds"
            ) from error

    @property
    def done(self) -> bool:
        """Return True if the answer has arrived, or an error."""
        return self._future.done()

    @property
    def nbytes(self) -> int:
        """Size in bytes of the answer that has arrived."""
        ended = self._future.done() and not self._future.cancelled()
        if not ended or self._future.exception() is not None:
            return 0
        return sum(tensor.nbytes for tensor in self._future.result())

    def succeed(self, tensors: Sequence[Tensor]) -> None:
        """Called by the backend once, when the answer has arrived."""
        with contextlib.suppress(InvalidStateError):  # nobody waits any more
            self._future.set_result(list(tensors))

    def fail(self, error: Exception) -> None:
        """Called by the backend once, when no answer will arrive."""
        with contextlib.suppress(InvalidStateError):
            self._future.set_exception(error)

    def abandon(self) -> None:
        """Drop the answer, as nobody waits for it any more."""
        self._future.cancel()

    def when_done(self, function: Callable[[], object]) -> None:
        """Call ``function``, in any thread, when the answer has arrived or will not."""
        self._future.add_done_callback(lambda _: function())


class Listener(ABC):
    """A server: answers whoever has the secret.

    Attributes:
        address: The address at which it listens, with the actual port.
    """

    address: str

    @property
    def error(self) -> CommError | None:
        """The error that stopped it without a call of :meth:`close`; ``None`` if there is none."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Stop answering; may be called again. Requests under way are dropped."""

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Connection(ABC):
    """A client of servers. Several threads may use it at once.

    Requests to a server that cannot be reached (yet, or any more) fail at once; the next request
    tries it again.

    Attributes:
        addresses: Addresses of the servers.
        timeout: Seconds that an answer may take.
    """

    addresses: tuple[str, ...]
    timeout: float

    @abstractmethod
    def request(self, server: int, name: str, tensors: Sequence[Tensor]) -> Reply:
        """Send a request to a server; returns at once.

        Args:
            server: Its index in :attr:`addresses`.
            name: The handler.
            tensors: Its arguments, on the CPU. They must not be changed until the answer has
                arrived.

        Raises:
            ValueError: If the server does not exist, or tensors are too many or too large.
            TypeError: If a dtype cannot be sent.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the connection; may be called again. Requests under way fail."""

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
