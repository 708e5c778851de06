"""Several servers that have one graph, any of which can answer.

Draws are keyed, so a batch is the same on every server: if a server died, hangs or sends garbage,
its requests go to another one.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from pyg_scale import plugins
from pyg_scale.comm import Connection, Reply
from pyg_scale.comm.secret import SECRET, SECRET_FILE, checked_secret, known_secret
from pyg_scale.errors import CommError, CommTimeoutError, GraphDirectoryError, RequestError

NOT_AGREED = "NotAgreed"
"""The error kind for a loader that the server does not know, or no longer."""

_ERRORS = {
    error.__name__: error
    for error in (IndexError, KeyError, NotImplementedError, PermissionError, TypeError, ValueError)
}
"""Errors caused by the request itself: every server would raise the same."""
_DIRECTORY = GraphDirectoryError.__name__
_SAME_SECRET = f": give this process the server's secret by token=, {SECRET} or {SECRET_FILE}"
_PAUSES = (0.05, 5.0)  # seconds for which a failed server is avoided, at first and at most
_TIMES_ASKED = 10  # tries of a server that fails at once within the time of a request


def addresses_of(text: str) -> list[str]:
    """The addresses in ``tcp://host:port,tcp://host2:port,...``.

    Raises:
        ValueError: If one is repeated or empty.
    """
    found = [each.strip() for each in text.split(",")]
    if not all(found) or len(set(found)) < len(found):
        raise ValueError(
            f"servers must be given as tcp://host:port,tcp://host2:port, each once (got {text!r})"
        )
    scheme = found[0].partition("://")[0]
    return [each if "://" in each else f"{scheme}://{each}" for each in found]


def secret_of(token: str | None) -> str:
    """The given secret, or that of the environment.

    Raises:
        ValueError: If there is none, or it is not valid, see :mod:`pyg_scale.comm.secret`.
        OSError: If its file cannot be read.
    """
    found = known_secret() if token is None else checked_secret(token)
    if found is None:
        raise ValueError(
            f"servers need a secret: pass token=, or set {SECRET} or {SECRET_FILE} (pyg-scale "
            "serve --secret-file makes such a file)"
        )
    return found


class Servers:
    """Sends requests to servers, and to another one if the first does not answer.

    Args:
        addresses: Addresses of the servers.
        token: Their secret.
        timeout: Seconds after which a request raises because no server has answered. Each server
            gets an equal share of them before another one is asked.
        transport: A name of the kind ``comm``, or such a class.

    Raises:
        UnknownPluginError: If the transport is not installed; says how to install it.
        ValueError: If an address or the secret is not valid.
    """

    def __init__(
        self, addresses: Sequence[str], token: str, timeout: float, transport: Any = "zmq"
    ) -> None:
        if not timeout > 0:
            raise ValueError(f"timeout must be above 0 seconds (got {timeout!r})")
        backend = plugins.get("comm", transport) if isinstance(transport, str) else transport
        self.addresses = tuple(addresses)
        self.timeout = float(timeout)
        self._connection: Connection = backend.connect(addresses, token=token, timeout=timeout)
        self._turn = itertools.count()
        self._prepare()

    def _prepare(self) -> None:
        self._lock = threading.Lock()
        self._failures = [0] * len(self.addresses)
        self._alone_until = [0.0] * len(self.addresses)
        self._busy = [0] * len(self.addresses)

    def __len__(self) -> int:
        return len(self.addresses)

    def __repr__(self) -> str:
        return f"Servers({', '.join(self.addresses)})"

    def __getstate__(self) -> dict[str, Any]:
        out = {k: v for k, v in self.__dict__.items() if not k.startswith("_")}
        return out | {"_connection": self._connection}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._turn = itertools.count()
        self._prepare()

    def ask(
        self,
        name: str,
        tensors: Sequence[Tensor],
        *,
        among: Sequence[int] | None = None,
        check: Callable[[list[Tensor]], Any] | None = None,
        agree: Callable[[int, float], None] | None = None,
    ) -> ServerRequest:
        """Send a request to the least busy server; returns at once.

        Args:
            name: The handler.
            tensors: Its arguments.
            among: The servers that may be asked; all by default.
            check: Turns an answer into the result; raises ``ValueError`` if the answer is garbage.
            agree: Called if a server does not know the loader, with the server and its remaining
                seconds.
        """
        return ServerRequest(self, name, tensors, among or range(len(self)), check, agree)

    def call(self, name: str, tensors: Sequence[Tensor] = (), **options: Any) -> Any:
        """Send a request and wait; see :meth:`ask` and :meth:`ServerRequest.wait`."""
        return self.ask(name, tensors, **options).wait()

    def call_one(
        self, server: int, name: str, tensors: Sequence[Tensor] = (), seconds: float | None = None
    ) -> list[Tensor]:
        """Send a request to this server only, and wait.

        Raises:
            CommError: If it does not answer.
        """
        return self._connection.request(server, name, tensors).wait(seconds)

    def tell(self, server: int, name: str, tensors: Sequence[Tensor]) -> Reply:
        """Send a request to this server only; returns at once."""
        return self._connection.request(server, name, tensors)

    def close(self) -> None:
        """Close the connections; later requests fail."""
        self._connection.close()

    # Choice #################################################################################

    def _choose(self, among: Sequence[int], tried: set[int]) -> int | None:
        """The least busy server of those that have not failed recently; ``None`` if all have."""
        turn, now = next(self._turn), time.monotonic()
        with self._lock:
            left = [s for s in among if s not in tried and self._alone_until[s] <= now]
            if not left:
                return None
            return min(left, key=lambda s: (self._busy[s], (s - turn) % len(self)))

    def _send(self, server: int, name: str, tensors: Sequence[Tensor]) -> Reply:
        with self._lock:
            self._busy[server] += 1
        try:
            return self._connection.request(server, name, tensors)
        except BaseException:
            self._ended(server)
            raise

    def _ended(self, server: int) -> None:
        with self._lock:
            self._busy[server] -= 1

    def _well(self, server: int) -> None:
        with self._lock:
            self._failures[server], self._alone_until[server] = 0, 0.0

    def _ill(self, server: int) -> None:
        with self._lock:
            first, most = _PAUSES
            # Shorter than a request lasts: a server that is back must be asked before the request
            # fails.
            most = min(most, self.timeout / _TIMES_ASKED)
            pause = min(most, first * 2 ** min(self._failures[server], 20))
            self._failures[server] += 1
            self._alone_until[server] = time.monotonic() + pause


class ServerRequest:
    """A request that moves from server to server until one answers.

    One thread waits for it.
    """

    def __init__(
        self,
        servers: Servers,
        name: str,
        tensors: Sequence[Tensor],
        among: Sequence[int],
        check: Callable[[list[Tensor]], Any] | None,
        agree: Callable[[int, float], None] | None,
    ) -> None:
        self._servers, self._name, self._tensors = servers, name, tensors
        self._among, self._check, self._agree = list(among), check, agree
        self._sent = time.monotonic()
        self._deadline = 0.0  # of the wait, set when it begins
        self._share = servers.timeout / len(self._among)
        self._tried: set[int] = set()
        self._agreed: set[int] = set()
        self._reasons: dict[int, CommError] = {}
        self._server: int | None = None
        self._reply: Reply | None = None
        self._result: Any = None
        self._nbytes = 0
        self._error: Exception | None = None
        self._ended = False
        try:
            self._next()
        except Exception as error:  # raised in the thread that waits
            self._error = error

    @property
    def answered(self) -> bool:
        """Return True if the answer has arrived, or no request is under way."""
        return self._ended or self._reply is None or self._reply.done

    @property
    def nbytes(self) -> int:
        """Size in bytes of the answer that has arrived."""
        return self._nbytes if self._reply is None else self._reply.nbytes

    def abandon(self) -> None:
        """Drop the answer, as nobody waits for it any more."""
        self._end()

    def wait(self) -> Any:
        """Wait for the answer and return the result of ``check``.

        Raises:
            ValueError: If the servers refuse the request; likewise ``TypeError``, ``IndexError``,
                ``KeyError``, ``NotImplementedError`` and ``PermissionError``.
            GraphDirectoryError: If no server's directory has the requested data.
            CommTimeoutError: If no server answered in time; gives the reason of each.
            CommError: If this connection was closed.
        """
        if self._error is not None:
            raise self._error
        if not self._ended:
            try:
                self._result = self._wait()
            except Exception as error:
                self._error = error
                raise
            finally:
                self._end()
                self._tensors, self._check, self._agree = (), None, None
        return self._result

    def _wait(self) -> Any:
        self._deadline = time.monotonic() + self._servers.timeout
        while True:
            if self._ended:
                raise CommError(f"nobody waits for the request {self._name!r} any more")
            if self._reply is None or self._server is None:
                self._pause()
                self._next()
                continue
            server = self._server
            try:
                found = self._reply.wait(self._patience())
                result = found if self._check is None else self._check(found)
            except RequestError as error:
                self._told(server, error)
            except CommError as error:
                self._failed(server, error)
            except ValueError as error:
                reason = f"{self._servers.addresses[server]} sent an invalid answer: {error}"
                self._failed(server, CommError(reason))
            else:
                self._servers._well(server)
                self._nbytes = sum(tensor.nbytes for tensor in found)
                return result

    def _told(self, server: int, error: RequestError) -> None:
        """Handle a server's answer that it cannot do the request."""
        if error.kind == NOT_AGREED and self._agree is not None and server not in self._agreed:
            self._release()
            self._agreed.add(server)
            self._sent = time.monotonic()  # it answered: its share of the time starts again
            try:
                self._agree(server, self._patience())
                self._sent, self._server = time.monotonic(), server
                self._reply = self._servers._send(server, self._name, self._tensors)
            except RequestError as refused:
                self._told(server, refused)
            except CommError as lost:
                self._failed(server, lost)
        elif error.kind == PermissionError.__name__:
            hint = _SAME_SECRET if "secret" in error.reason else ""
            raise PermissionError(f"{error.where}: {error.reason}{hint}") from error
        elif error.kind in _ERRORS:
            raise _ERRORS[error.kind](error.reason) from error
        else:
            self._reasons[server] = error
            if error.kind == _DIRECTORY and all(self._lacks(each) for each in self._among):
                raise GraphDirectoryError(error.reason) from error
            self._failed(server, error)

    def _lacks(self, server: int) -> bool:
        """Return True if a server said that its directory lacks the requested data."""
        reason = self._reasons.get(server)
        return isinstance(reason, RequestError) and reason.kind == _DIRECTORY

    def _failed(self, server: int, error: CommError) -> None:
        late = isinstance(error, CommTimeoutError) and time.monotonic() >= self._deadline
        if not (late and server in self._reasons):  # the last timeout says less
            self._reasons[server] = error
        self._servers._ill(server)
        self._release()
        self._tried.add(server)
        self._agreed.discard(server)  # it may be another process by the next request
        self._next()

    def _next(self) -> None:
        """Send the request to the next server, if one may be asked now."""
        self._server = self._servers._choose(self._among, self._tried)
        if self._server is None:
            self._tried.clear()  # a failed server may be back
            return
        self._sent = time.monotonic()
        self._reply = self._servers._send(self._server, self._name, self._tensors)

    def _pause(self) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise self._given_up()
        time.sleep(min(left, _PAUSES[0]))

    def _patience(self) -> float:
        """Seconds that the asked server still has."""
        until = min(self._deadline, self._sent + self._share)
        return max(0.0, until - time.monotonic())

    def _given_up(self) -> CommTimeoutError:
        names = self._servers.addresses
        why = "; ".join(
            str(self._reasons[s]) if s in self._reasons else f"{names[s]}: was not asked"
            for s in self._among
        )
        return CommTimeoutError(
            f"no server answered the request {self._name!r} within {self._servers.timeout:g} "
            f"seconds. {why}"
        )

    def _release(self) -> None:
        if self._reply is not None:
            self._reply.abandon()
            self._reply = None
            assert self._server is not None
            self._servers._ended(self._server)

    def _end(self) -> None:
        self._release()
        self._ended = True
