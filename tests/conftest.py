"""What every test gets: real graphs where they are, and a check that nothing is left behind."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
PATIENCE = 5.0
"""Seconds that threads and processes get to end after a test."""


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The directory of the real graphs; skips where they are not."""
    named = os.environ.get("PYG_SCALE_TEST_DATA")
    path = Path(named) if named else ROOT.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip(f"no real graphs in {path}; PYG_SCALE_TEST_DATA says where they are")
    return path


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Fails a test that leaves a thread of ours, a process, or another environment."""
    threads, processes = set(_threads()), set(_processes())
    environment, settings = _environment(), _torch_settings()
    yield
    left = _until_empty(lambda: set(_threads()) - threads)
    assert not left, f"left threads running: {sorted(map(str, left))}"
    left = _until_empty(lambda: set(_processes()) - processes)
    assert not left, f"left processes running: {sorted(map(str, left))}"
    assert _environment() == environment, "changed os.environ"
    assert _torch_settings() == settings, "changed torch's settings: threads, dtype or device"


def _threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith(("pyg_scale", "pyg-scale"))]


def _processes() -> list[psutil.Process]:
    """The processes below this one, without those that multiprocessing keeps until the end."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            command = " ".join(process.cmdline())
            if process.status() != psutil.STATUS_ZOMBIE and not any(
                kept in command for kept in ("resource_tracker", "forkserver", "torch_shm_manager")
            ):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def _environment() -> dict[str, str]:
    # pytest itself writes PYTEST_*, and torch writes the others when it is first used.
    written = ("PYTEST_", "TORCHINDUCTOR_", "TRITON_", "KMP_", "CUDA_MODULE_LOADING")
    return {k: v for k, v in os.environ.items() if not k.startswith(written)}


def _torch_settings() -> tuple[object, ...]:
    return torch.get_num_threads(), torch.get_default_dtype(), torch.get_default_device()


def _until_empty(find: Callable[[], set]) -> set:
    deadline = time.monotonic() + PATIENCE
    while (left := find()) and time.monotonic() < deadline:
        gc.collect()  # an iterator that a failed test still holds ends its threads when it goes
        time.sleep(0.05)
    return left
