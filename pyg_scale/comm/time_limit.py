"""A time limit for calls that have none of their own.

An example is a ``TCPStore`` whose machine was cut off: after a wait has timed out, it tells the
server so and waits for the answer without a limit, and all other calls wait for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_END_SECONDS = 10.0
_local = threading.local()


class Unwanted(RuntimeError):
    """Raised in a thread whose result nobody waits for any more."""


def check() -> None:
    """Called now and then by long-running functions under a time limit.

    Raises:
        Unwanted: If nobody waits for the result any more.
    """
    unwanted: threading.Event | None = getattr(_local, "unwanted", None)
    if unwanted is not None and unwanted.is_set():
        raise Unwanted("the time limit is over")


def within(seconds: float, function: Callable[..., T], *args: Any) -> T:
    """Call a function in a thread of its own, which is abandoned if it does not end in time.

    If the wait is interrupted, as by Ctrl-C, a function that calls :func:`check` has ended by then:
    threads left inside C++ abort the process at exit.

    Raises:
        TimeoutError: If it does not end in time.
    """
    found: list[T] = []
    errors: list[BaseException] = []
    unwanted, ended = threading.Event(), threading.Event()

    def work() -> None:
        _local.unwanted = unwanted
        try:
            check()
            found.append(function(*args))
        except BaseException as error:
            errors.append(error)
        finally:
            ended.set()

    thread = threading.Thread(target=work, name="pyg_scale-limited", daemon=True)
    try:
        thread.start()  # waits, too, and can be interrupted after the thread has begun
        thread.join(seconds)
    except BaseException:
        unwanted.set()
        if thread.ident is not None and ended.wait(_END_SECONDS):  # otherwise it has not begun
            thread.join(_END_SECONDS)
        raise
    unwanted.set()
    if thread.is_alive():
        raise TimeoutError(f"it did not end within {seconds:g} seconds")
    if errors:
        raise errors[0]
    return found[0]
