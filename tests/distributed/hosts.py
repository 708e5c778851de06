"""Machines of a test: network namespaces with addresses of their own, joined by a bridge."""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import shutil
import subprocess
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from tests import preloaded

ROOT = Path(__file__).parents[2]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)


@functools.lru_cache
def reason() -> str:
    """Why there cannot be any here, or nothing."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need the command ip (iproute2)"
    try:
        with Hosts(1):
            return ""
    except subprocess.CalledProcessError as error:
        return f"no network namespaces here: {error.stderr.decode().strip()}"


class Hosts:
    """Several hosts, ``10.177.0.1`` and so on; nothing of it is seen in the machine's own network.

    Args:
        count: How many.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.switch = f"pgs-{os.getpid()}-sw"
        self.names = [f"pgs-{os.getpid()}-{i}" for i in range(count)]
        self.addresses = [f"10.177.0.{i + 1}" for i in range(count)]

    def __enter__(self) -> Hosts:
        try:
            ip("netns", "add", self.switch)
            ip("-n", self.switch, "link", "add", "bridge", "type", "bridge")
            ip("-n", self.switch, "link", "set", "bridge", "up")
            for i, name in enumerate(self.names):
                ip("netns", "add", name)
                ip("-n", self.switch, "link", "add", f"port{i}", "type", "veth",
                   "peer", "name", "net0", "netns", name)  # fmt: skip
                ip("-n", self.switch, "link", "set", f"port{i}", "master", "bridge", "up")
                ip("-n", name, "addr", "add", f"{self.addresses[i]}/24", "dev", "net0")
                ip("-n", name, "link", "set", "lo", "up")
                ip("-n", name, "link", "set", "net0", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in (*self.names, self.switch):
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", name)

    def cut(self, host: int) -> None:
        """Pull the cable of a host."""
        ip("-n", self.switch, "link", "set", f"port{host}", "down")

    def hide(self, host: int, other: int) -> None:
        """Take a host's way to another; its neighbours go on."""
        ip("-n", self.names[host], "route", "add", "prohibit", f"{self.addresses[other]}/32")

    @contextlib.contextmanager
    def ranks(self, code: str, *arguments: str) -> Iterator[list[Rank]]:
        """Run code as one rank on each host."""
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "TORCHEL"))}
        environ |= {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            "WORLD_SIZE": str(self.count),
            "MASTER_ADDR": self.addresses[0],
            "MASTER_PORT": "29500",
        }
        command = [preloaded.python(), "-c", textwrap.dedent(code), *arguments]
        started = []
        try:
            for rank, name in enumerate(self.names):
                started.append(
                    Rank(["ip", "netns", "exec", name, *command], environ | {"RANK": str(rank)})
                )
            yield started
        finally:
            for each in started:
                each.end()


class Rank:
    """A process whose lines are read as they come."""

    def __init__(self, command: list[str], environ: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.said: list[str] = []
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def until(self, start: str, seconds: float = 100.0) -> str:
        """The next line that begins so."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                line = self._lines.get(timeout=max(0.1, deadline - time.monotonic()))
            except queue.Empty:
                line = None
            if line is None:
                raise AssertionError(f"no line {start!r}; it said:\n" + "\n".join(self.said))
            self.said.append(line)
            if line.startswith(start):
                return line

    def tell(self, line: str) -> None:
        """Write to its input."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def status(self, seconds: float = 60.0) -> int:
        """Wait until it has ended."""
        return self.process.wait(seconds)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(10)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
