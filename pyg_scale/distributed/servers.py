"""Several servers that have one graph: whoever answers will do.

Draws are keyed, so a batch is the same whoever makes it: what a server that died, hangs or answers
garbage was asked for is asked of another one.
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
"""What a server calls a loader that it has not heard of, or not lately."""

_ERRORS = {
    error.__name__: error
    for error in (IndexError, KeyError, NotImplementedError, PermissionError, TypeError, ValueError)
}
"""Errors of whoever asks: every server would say the same."""
_DIRECTORY = GraphDirectoryError.__name__
_SAME_SECRET = f": give this process that of the server, by token=, {SECRET} or {SECRET_FILE}"
_PAUSES = (0.05, 5.0)  # seconds that a server which failed is left alone, at first and at most
_TIMES_ASKED = 10  # that a server which fails at once is asked within the time of a request


def addresses_of(text: str) -> list[str]:
    """The addresses in ``tcp://host:port,tcp://host2:port,...``.

    Raises:
        ValueError: If one is there twice, or empty.
    """
    found = [each.strip() for each in text.split(",")]
    if not all(found) or len(set(found)) < len(found):
        raise ValueError(
            f"servers are given as tcp://host:port,tcp://host2:port, each once (got {text!r})"
        )
    scheme = found[0].partition("://")[0]
    return [each if "://" in each else f"{scheme}://{each}" for each in found]


def secret_of(token: str | None) -> str:
    """The secret that was given, or that of the environment.

    Raises:
        ValueError: If there is none, or a wrong one, see :mod:`pyg_scale.comm.secret`.
        OSError: If its file cannot be read.
    """
    found = known_secret() if token is None else checked_secret(token)
    if found is None:
        raise ValueError(
            f"servers want a secret: pass token=, or set {SECRET} or {SECRET_FILE} (pyg-scale "
            "serve --secret-file makes such a file)"
        )
    return found


class Servers:
    """Asks servers, and another one if the first does not answer.

    Args:
        addresses: Of the servers.
        token: Their secret.
        timeout: Seconds that are waited for a request before it raises because no server has
            answered. Each server gets an equal share of them before another one is asked.
        transport: A name of the kind ``comm``, or such a class.

    Raises:
        UnknownPluginError: If there is no such transport; says how to install it.
        ValueError: If an address or the secret is none.
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
    ) -> Asked:
        """Ask the server that has least to do; returns at once.

        Args:
            name: The handler.
            tensors: What it is called with.
            among: Which servers may be asked; all by default.
            check: Makes the result of an answer; a ``ValueError`` of it says that the answer is
                garbage.
            agree: Called with a server that says that it does not know what is asked of it, and
                the seconds that it has.
        """
        return Asked(self, name, tensors, among or range(len(self)), check, agree)

    def call(self, name: str, tensors: Sequence[Tensor] = (), **options: Any) -> Any:
        """Ask, and wait; arguments and errors as of :meth:`ask` and :meth:`Asked.wait`."""
        return self.ask(name, tensors, **options).wait()

    def call_one(
        self, server: int, name: str, tensors: Sequence[Tensor] = (), seconds: float | None = None
    ) -> list[Tensor]:
        """Ask this server and no other.

        Raises:
            CommError: If it does not answer.
        """
        return self._connection.request(server, name, tensors).wait(seconds)

    def tell(self, server: int, name: str, tensors: Sequence[Tensor]) -> Reply:
        """Ask this server and no other; returns at once."""
        return self._connection.request(server, name, tensors)

    def close(self) -> None:
        """Ask no more."""
        self._connection.close()

    # Which #################################################################################

    def _choose(self, among: Sequence[int], tried: set[int]) -> int | None:
        """The one with least to do of those that have not failed lately; ``None`` if all have."""
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
            # Shorter than a request lasts: whoever is back must be asked before it is given up.
            most = min(most, self.timeout / _TIMES_ASKED)
            pause = min(most, first * 2 ** min(self._failures[server], 20))
            self._failures[server] += 1
            self._alone_until[server] = time.monotonic() + pause


class Asked:
    """A request that moves from server to server until one answers.

    Waited for by one thread.
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
        self._deadline = 0.0  # of the wait, from its beginning
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
        except Exception as error:  # raised by who waits
            self._error = error

    @property
    def answered(self) -> bool:
        """Whether the answer is here, or nothing is waited for."""
        return self._ended or self._reply is None or self._reply.done

    @property
    def nbytes(self) -> int:
        """Bytes of the answer that is here."""
        return self._nbytes if self._reply is None else self._reply.nbytes

    def abandon(self) -> None:
        """Nobody waits any more."""
        self._end()

    def wait(self) -> Any:
        """The answer, as ``check`` made it.

        Raises:
            ValueError: If the servers say that what was asked is wrong; so for ``TypeError``,
                ``IndexError``, ``KeyError``, ``NotImplementedError`` and ``PermissionError``.
            GraphDirectoryError: If no server's directory has it.
            CommTimeoutError: If no server answered in time; says of each one why.
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
                reason = f"{self._servers.addresses[server]} sent what is no answer: {error}"
                self._failed(server, CommError(reason))
            else:
                self._servers._well(server)
                self._nbytes = sum(tensor.nbytes for tensor in found)
                return result

    def _told(self, server: int, error: RequestError) -> None:
        """The server answered that it cannot."""
        if error.kind == NOT_AGREED and self._agree is not None and server not in self._agreed:
            self._release()
            self._agreed.add(server)
            self._sent = time.monotonic()  # it answered: its share of the time begins again
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
        """Whether a server said that its directory does not have what is asked for."""
        reason = self._reasons.get(server)
        return isinstance(reason, RequestError) and reason.kind == _DIRECTORY

    def _failed(self, server: int, error: CommError) -> None:
        late = isinstance(error, CommTimeoutError) and time.monotonic() >= self._deadline
        if not (late and server in self._reasons):  # the end of all time says less than it did
            self._reasons[server] = error
        self._servers._ill(server)
        self._release()
        self._tried.add(server)
        self._agreed.discard(server)  # it may be another process when it is asked again
        self._next()

    def _next(self) -> None:
        """Ask the next server, if there is one that may be asked now."""
        self._server = self._servers._choose(self._among, self._tried)
        if self._server is None:
            self._tried.clear()  # whoever failed may be back
            return
        self._sent = time.monotonic()
        self._reply = self._servers._send(self._server, self._name, self._tensors)

    def _pause(self) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise self._given_up()
        time.sleep(min(left, _PAUSES[0]))

    def _patience(self) -> float:
        """Seconds that the server which was asked still has."""
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
