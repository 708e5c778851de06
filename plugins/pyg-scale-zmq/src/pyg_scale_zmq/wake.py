"""Wake-up of a thread that waits for sockets."""

from __future__ import annotations

import contextlib
import os
import threading


class Wake:
    """A signal that a poller can wait for and any thread can raise."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._closed = False

    def up(self) -> None:
        """Wake the waiting thread; does nothing once closed."""
        with self._lock:
            if not self._closed:
                os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        """Reset the signal."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def close(self) -> None:
        """Close the file descriptor."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self.fd)
