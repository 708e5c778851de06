"""A time limit for calls that keep none of their own.

A ``TCPStore`` whose machine was cut off is one: when a wait has timed out it tells the server so,
and waits for the answer without any limit, while all other calls wait for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def within(seconds: float, function: Callable[..., T], *args: Any) -> T:
    """Call a function in a thread of its own, which is left behind if it does not end.

    Raises:
        TimeoutError: If it does not end in time.
    """
    found: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            found.append(function(*args))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, name="pyg_scale-limited", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError(f"it did not end within {seconds:g} seconds")
    if errors:
        raise errors[0]
    return found[0]
