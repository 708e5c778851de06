"""A network of a given speed: the loopback of a network namespace, behind a token bucket.

What processes of one machine send each other is copied by its processors, which is not what limits
machines with a network between them. Needs root and iproute2 (``ip`` and ``tc``).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator

from pyg_scale.comm import Communicator

_LIMIT = 30.0
_BURST = ("burst", "4mb", "latency", "20ms")


def rate(text: str) -> str:
    """Bits per second as ``tc`` has them, such as ``10gbit``.

    Raises:
        ValueError: If it is something else.
    """
    if not re.fullmatch(r"[1-9]\d*[mg]bit", text):
        raise ValueError(f"a rate is a number of mbit or gbit (got {text!r})")
    return text


def missing() -> str | None:
    """Why there cannot be such a network here."""
    if os.geteuid() != 0:
        return "a network namespace needs root"
    lacking = [name for name in ("ip", "tc") if shutil.which(name) is None]
    return f"{' and '.join(lacking)} of iproute2 cannot be found" if lacking else None


@contextlib.contextmanager
def namespace() -> Iterator[list[str]]:
    """A network namespace, and what a command begins with that is to run in it.

    Raises:
        SystemExit: If there cannot be one; says why.
    """
    if reason := missing():
        raise SystemExit(f"pyg-scale bench dist --link: {reason}")
    name = f"pyg-scale-bench-{os.getpid()}"
    _run("ip", "netns", "add", name)
    try:
        _run("ip", "-n", name, "link", "set", "lo", "up")
        yield ["ip", "netns", "exec", name]
    finally:
        _run("ip", "netns", "delete", name)


@contextlib.contextmanager
def limited(comm: Communicator, speed: str) -> Iterator[None]:
    """Within it, ranks that run in a :func:`namespace` have a link of this speed, all together.

    Args:
        comm: The ranks; all of them call it.
        speed: See :func:`rate`.
    """
    link = ("dev", "lo", "root")
    comm.barrier()
    try:
        if comm.rank == 0:
            _run("tc", "qdisc", "add", *link, "tbf", "rate", speed, *_BURST)
        comm.barrier()
        yield
        comm.barrier()
    finally:
        if comm.rank == 0:
            _run("tc", "qdisc", "delete", *link)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT)
    if done.returncode:
        raise SystemExit(f"pyg-scale bench dist --link: {' '.join(command)}: {done.stderr.strip()}")
