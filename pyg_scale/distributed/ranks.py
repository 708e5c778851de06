"""The ranks that have a graph open together, from ``open()`` to ``close()``.

A rank answers the others for as long as any of them may ask, whatever its own script does: leave a
loop, evaluate alone, drop the graph, or end. Only a script that failed stops at once, so that the
others notice.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import weakref
from pathlib import Path

from pyg_scale.comm import Communicator, Service
from pyg_scale.distributed.failover import Health, Search
from pyg_scale.distributed.owners import Owners
from pyg_scale.errors import CommError, CommTimeoutError

_log = logging.getLogger("pyg_scale")
_LONGEST = 24 * 3600.0  # seconds for which a rank serves after its script has ended
_AT_ONCE = 1e-3  # long enough to announce that it was closed
_NOTICE = 10.0  # seconds after which it logs that it still serves

_lock = threading.Lock()
_serving: set[_Serving] = set()
_waiter: threading.Thread | None = None
_failed = False  # Python itself does not tell of sys.exit(1)


class Ranks:
    """The ranks that opened a graph, as the graph uses them.

    Attributes:
        comm: Collectives between them; give calls a tag if ranks may call in another order.
        service: Requests between them.
        owners: The ranks that answer for each part.
        path: The directory, for errors.
        timeout: Seconds that an answer may take.
        health: The ranks that failed recently.
    """

    def __init__(
        self,
        comm: Communicator,
        service: Service,
        owners: Owners,
        path: Path,
        *,
        owns_comm: bool,
    ) -> None:
        self.comm, self.owners, self.path = comm, owners, path
        self.timeout = comm.timeout
        self.health = Health(self.timeout)
        self._service = service
        self._process = os.getpid()
        self._serving = _Serving(service, comm if owns_comm else None, path)
        self._finalizer = weakref.finalize(self, _dropped, self._serving)
        self._finalizer.atexit = False
        _begin(self._serving)

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return self.owners.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.owners.world_size

    @property
    def closed(self) -> bool:
        """True if :meth:`close` was called."""
        return not self._finalizer.alive

    def owns(self, comm: Communicator) -> None:
        """Also close the communicator when the graph is closed."""
        self._serving.owned = comm

    @property
    def service(self) -> Service:
        """Requests to the other ranks.

        Raises:
            CommError: If the graph was closed, or this process is a fork of the one that opened it.
        """
        if self.closed:
            raise CommError(
                f"{self.path} was closed on this rank: open it again, on all ranks, or close it "
                "after its last use"
            )
        if os.getpid() != self._process:
            raise CommError(
                f"{self.path} was opened in another process, which alone can ask other "
                "ranks: use threads as workers (worker_type='thread')"
            )
        return self._service

    def search(self) -> Search:
        """A search for a request that moves on to the next rank when one fails."""
        return Search(self.rank, self.owners, self.health, self.timeout)

    def close(self, timeout: float | None = None) -> None:
        """Serve until all ranks have closed the graph, then stop. May be called again.

        Args:
            timeout: Seconds to wait for the others, by default those of the communicator; 0 to
                stop at once, which fails the requests of others.

        Ranks that ended without closing it are an error, unless others have all their parts: those
        did what they were there for, and a warning is logged.

        Raises:
            CommTimeoutError: If not all ranks closed it in time; names those that did not.
            CommError: If ranks have ended without closing it; names them.
        """
        if self._finalizer.detach() is None or os.getpid() != self._process:
            return
        seconds = self.timeout if timeout is None else timeout
        start = time.monotonic()
        missing = self._serving.finish(max(seconds, _AT_ONCE))
        if not missing or seconds <= 0:
            return
        names = f"{'rank' if len(missing) == 1 else 'ranks'} {', '.join(map(str, missing))}"
        if time.monotonic() - start < seconds:
            said = f"{names} ended without closing {self.path}: killed, or failed (see its output)"
            if not self._are_replaced(missing):
                raise CommError(said)
            _log.warning("%s; other ranks have its parts", said)
            return
        raise CommTimeoutError(
            f"{names} did not close {self.path} within {seconds:g} seconds; rank {self.rank} "
            "stopped serving its parts"
        )

    def _are_replaced(self, ranks: list[int]) -> bool:
        """Return True if other ranks have all parts that some ranks have."""
        gone = set(ranks)
        parts = range(self.owners.num_parts)
        return all(set(self.owners.holders(part)) - gone for part in parts)

    def __reduce__(self) -> tuple:
        raise TypeError(
            f"{self.path} was opened on several ranks, which only this process can reach: use "
            "threads as workers (worker_type='thread'), or open it with comm='local' there"
        )


class _Serving:
    """A service that continues after its graph was dropped."""

    def __init__(self, service: Service, comm: Communicator | None, path: Path) -> None:
        self.service, self.path = service, path
        self.owned, self._process = comm, os.getpid()
        self._finishing = threading.Lock()
        self._done = False

    def finish(self, seconds: float) -> list[int]:
        """Serve until all ranks are done, then stop; return the ranks that were not done.

        With 0 seconds this also ends a call under way.
        """
        if os.getpid() != self._process:  # a forked process has the sockets, but does not own them
            return []
        if seconds <= 0:
            self.service.close(0.0)
        with self._finishing:
            if self._done:
                return []
            try:
                return self.service.close(seconds)
            finally:
                self._done = True
                if self.owned is not None:
                    self.owned.close()
                with _lock:
                    _serving.discard(self)


def script_failed() -> None:
    """Stop serving when the script ends, as it is about to fail."""
    global _failed
    _failed = True


def _begin(serving: _Serving) -> None:
    global _waiter, _failed
    with _lock:
        _failed = False  # the script continued after the failure: it tries again
        _serving.add(serving)
        if _waiter is None:
            # A thread that is not a daemon waits for the end of the script: when functions of
            # atexit are called, no thread can be started any more.
            _waiter = threading.Thread(target=_serve_after_the_end, name="pyg_scale-end")
            _waiter.start()


def _serve_after_the_end() -> None:
    global _waiter
    script = threading.main_thread()
    while script.is_alive():
        with _lock:
            if not _serving:
                _waiter = None
                return
        script.join(0.2)
    failed = _failed or getattr(sys, "last_value", None) is not None
    with _lock:
        left = list(_serving)
    threads = [threading.Thread(target=_finish_all, args=(each, failed)) for each in left]
    for thread in threads:
        thread.start()


def _finish_all(serving: _Serving, failed: bool) -> None:
    if failed:
        serving.finish(0.0)
        return
    timer = threading.Timer(_NOTICE, _say, args=(serving.path,))
    timer.daemon = True
    timer.start()
    start = time.monotonic()
    missing = serving.finish(_LONGEST)
    timer.cancel()
    timer.join()  # a daemon that releases objects during exit aborts the process
    if missing:
        _log.warning(
            "rank %s ended without closing %s, or had not closed it after %.0f s",
            ", ".join(map(str, missing)),
            serving.path,
            time.monotonic() - start,
        )


def _say(path: Path) -> None:
    _log.warning("the script has ended; serving %s until all ranks are done", path)


def _forget() -> None:
    """Reset the state in a forked process, which has none of the threads."""
    global _lock, _serving, _waiter
    _lock, _serving, _waiter = threading.Lock(), set(), None


os.register_at_fork(after_in_child=_forget)


def _dropped(serving: _Serving) -> None:
    """Handle a graph that this process dropped, while other ranks may still use it."""
    # The local variables of a failing script are dropped before it ends.
    seconds = 0.0 if _failed else _LONGEST
    thread = threading.Thread(target=serving.finish, args=(seconds,), name="pyg_scale-linger")
    try:
        thread.start()
    except RuntimeError:  # the interpreter is ending
        serving.finish(0.0)
