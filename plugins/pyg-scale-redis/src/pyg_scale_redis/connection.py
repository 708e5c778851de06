"""A connection to a Redis server, made anew in every process, with a limit on every wait."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import redis
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

DEFAULT_URL = "redis://localhost:6379/0"
_ATTEMPTS = 2  # after the first: a connection that the server closed while idle


def default_url() -> str:
    """``PYG_SCALE_REDIS_URL``, or Redis's default port on this machine."""
    return os.environ.get("PYG_SCALE_REDIS_URL", DEFAULT_URL)


class Connection:
    """The connection of a store to a server. Threads share it; a pickled one connects anew.

    Args:
        url: ``redis://[user:password@]host:port/db``, ``rediss://...`` (TLS) or
            ``unix:///path/of/the.socket``.
        timeout: Seconds to wait for a connection, for a free one, and for each reply.
        max_connections: Largest number of connections of the threads of one process.

    Raises:
        ValueError: If redis-py does not accept the URL, or a number is not positive.
    """

    def __init__(self, url: str, timeout: float, max_connections: int) -> None:
        if timeout <= 0 or max_connections < 1:
            raise ValueError(
                f"timeout must be above 0 and max_connections at least 1 "
                f"(got {timeout} and {max_connections})"
            )
        self.url = url
        self.timeout = timeout
        self.max_connections = max_connections
        self._lock = threading.Lock()
        self._client: Any = None
        self._make_pool().disconnect()  # raises if the URL is wrong

    @property
    def shown(self) -> str:
        """The URL without its password."""
        parts = urlsplit(self.url)
        place = parts.netloc.rpartition("@")[2]
        return urlunsplit((parts.scheme, place, parts.path, "", ""))

    def __getstate__(self) -> dict[str, Any]:
        return {
            "url": self.url,
            "timeout": self.timeout,
            "max_connections": self.max_connections,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()
        self._client = None

    @contextlib.contextmanager
    def client(self) -> Iterator[Any]:
        """A context with redis-py's client, whose errors become standard ones that name the server.

        Raises:
            TimeoutError: If the server did not answer in time.
            ConnectionError: If it cannot be reached.
            PermissionError: If it refuses the user or the password.
            MemoryError: If it has no memory left.
            RuntimeError: If it refuses a command for another reason.
        """
        if self._client is None:
            with self._lock:
                if self._client is None:
                    self._client = redis.Redis(connection_pool=self._make_pool())
        try:
            yield self._client
        except redis.exceptions.WatchError:
            raise
        except redis.exceptions.TimeoutError as error:
            raise TimeoutError(
                f"the Redis server {self.shown} did not answer within {self.timeout:g} seconds: "
                f"is it overloaded? timeout= sets the limit ({error})"
            ) from error
        except (
            redis.exceptions.AuthenticationError,
            redis.exceptions.NoPermissionError,
        ) as error:
            raise PermissionError(
                f"the Redis server {self.shown} refuses the user or password of the URL, or what "
                f"the user may do: {error}"
            ) from error
        except redis.exceptions.ConnectionError as error:
            raise ConnectionError(
                f"the Redis server {self.shown} cannot be reached: {error}"
            ) from error
        except redis.exceptions.OutOfMemoryError as error:
            raise MemoryError(
                f"the Redis server {self.shown} has no memory left (its setting maxmemory): {error}"
            ) from error
        except redis.exceptions.RedisError as error:
            raise RuntimeError(
                f"the Redis server {self.shown} refused: {type(error).__name__}: {error}"
            ) from error

    def _make_pool(self) -> Any:
        try:
            pool = redis.BlockingConnectionPool.from_url(
                self.url,
                max_connections=self.max_connections,
                timeout=self.timeout,
                socket_timeout=self.timeout,
                socket_connect_timeout=self.timeout,
                health_check_interval=30,
                retry=Retry(ExponentialBackoff(cap=0.5, base=0.05), _ATTEMPTS),
                retry_on_error=[redis.exceptions.ConnectionError],
            )
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"url must be like {DEFAULT_URL} (got {self.shown!r}: {error})"
            ) from None
        pool.connection_kwargs["decode_responses"] = False  # rows are bytes, whatever the URL says
        return pool
