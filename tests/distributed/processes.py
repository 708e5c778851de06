"""Ranks that are processes, each started with torchrun's environment."""

from __future__ import annotations

import os
import socket
import subprocess
import textwrap
from pathlib import Path

from tests import preloaded

ROOT = Path(__file__).parents[2]


def free_port() -> str:
    """A port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def start(folder: Path, code: str, world_size: int) -> list[subprocess.Popen[str]]:
    """Start a script on every rank; to be ended with :func:`end`."""
    script = folder / "script.py"
    script.write_text(textwrap.dedent(code))
    common = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
        "WORLD_SIZE": str(world_size),
    }
    return [
        subprocess.Popen(
            [preloaded.python(), str(script)],
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]


def end(processes: list[subprocess.Popen[str]], seconds: float = 90.0) -> list[tuple[int, str]]:
    """The exit code and the output of every rank; those that take longer are killed."""
    found = []
    try:
        for process in processes:
            output, _ = process.communicate(timeout=seconds)
            found.append((process.returncode, output))
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
    return found
