"""Requests between processes that are no ranks of one group: by address, with a shared secret.

The second half of a backend of the kind ``comm``, see :meth:`Communicator.listen
<pyg_scale.comm.Communicator.listen>` and :meth:`Communicator.connect
<pyg_scale.comm.Communicator.connect>`. Clients come and go; a server knows nothing of them but
the requests that it has not answered yet.
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
"""Bytes that a request may have, if not said otherwise."""
MAX_ANSWER = 1 << 34
"""Bytes that an answer may have, if not said otherwise."""


class Reply(Work[list[Tensor]]):
    """The answer to a request, or what went wrong.

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
            timeout: Seconds from now on; by default what is left of those from the beginning.

        Raises:
            RequestError: If the server says that it could not answer.
            CommTimeoutError: If no answer came in time.
            CommError: If the server is gone, or what it sent is no answer.
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
        """Whether the answer is here, or an error."""
        return self._future.done()

    @property
    def nbytes(self) -> int:
        """Bytes of the answer that is here."""
        ended = self._future.done() and not self._future.cancelled()
        if not ended or self._future.exception() is not None:
            return 0
        return sum(tensor.nbytes for tensor in self._future.result())

    def succeed(self, tensors: Sequence[Tensor]) -> None:
        """Called by the backend once, when the answer is here."""
        with contextlib.suppress(InvalidStateError):  # nobody waits any more
            self._future.set_result(list(tensors))

    def fail(self, error: Exception) -> None:
        """Called by the backend once, when there will be no answer."""
        with contextlib.suppress(InvalidStateError):
            self._future.set_exception(error)

    def abandon(self) -> None:
        """Nobody waits any more."""
        self._future.cancel()

    def when_done(self, function: Callable[[], object]) -> None:
        """Call ``function`` when the answer is here or will not come, in whatever thread."""
        self._future.add_done_callback(lambda _: function())


class Listener(ABC):
    """A server: answers whoever has the secret.

    Attributes:
        address: Where it listens, with the port that it got.
    """

    address: str

    @property
    def error(self) -> CommError | None:
        """Why it answers no more, though nobody closed it; ``None`` where all is well."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Answer no more; may be called again. Requests under way are dropped."""

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Connection(ABC):
    """A client: asks servers. May be used by several threads at once.

    A server that is not there (yet), or not any more, fails requests at once, and is asked again
    when the next request comes.

    Attributes:
        addresses: Of the servers.
        timeout: Seconds that an answer may take.
    """

    addresses: tuple[str, ...]
    timeout: float

    @abstractmethod
    def request(self, server: int, name: str, tensors: Sequence[Tensor]) -> Reply:
        """Ask a server; returns at once.

        Args:
            server: Its place in :attr:`addresses`.
            name: The handler.
            tensors: What it is called with, on the CPU. They must not be changed until the answer
                is there.

        Raises:
            ValueError: If there is no such server, or tensors are too many or too large.
            TypeError: If a dtype cannot be sent.
        """

    @abstractmethod
    def close(self) -> None:
        """Ask no more; may be called again. Requests under way fail."""

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
