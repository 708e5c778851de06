"""What every test gets: real graphs where they are, and a check that nothing is left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import psutil
import pytest
import torch

from tests import preloaded

ROOT = Path(__file__).resolve().parent.parent
PATIENCE = 5.0
"""Seconds that threads and processes get to end after a test."""

MANY_MODULES = 20
"""Number of new modules after which all that was imported leaves collections of garbage."""

# The same examples in every run, and none that fails for want of time, as hypothesis has it for CI.
hypothesis.settings.load_profile("ci")

_frozen_modules = 0


def pytest_sessionstart() -> None:
    """Look for no garbage while tests are read: a million objects come, and hardly one goes."""
    gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the cases of matrices as slow, but for one in so many.

    Files whose slow tests may take longest come first: none is left when others have ended.
    """
    cases: Counter[tuple[Path, str]] = Counter()
    for item in items:
        marker = item.get_closest_marker("matrix")
        if marker and isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            place = item.path, f"{item.parent and item.parent.name}.{item.originalname}"
            if cases[place] % marker.args[0]:
                item.add_marker(pytest.mark.slow)
            cases[place] += 1
    seconds: Counter[Path] = Counter()
    usual = float(config.getini("timeout"))
    for item in items:
        if item.get_closest_marker("slow"):
            limit = item.get_closest_marker("timeout")
            seconds[item.path] += limit.args[0] if limit else usual
    items.sort(key=lambda item: -seconds[item.path])


def pytest_collection_finish() -> None:
    """Look for garbage again, but not among what was imported."""
    _freeze()
    gc.enable()


def _freeze() -> None:
    """Take what was imported out of collections: to look through it takes a second each time."""
    global _frozen_modules
    if len(sys.modules) >= _frozen_modules + MANY_MODULES:
        gc.collect()
        gc.freeze()
        _frozen_modules = len(sys.modules)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The directory of the real graphs; skips where they are not."""
    named = os.environ.get("PYG_SCALE_TEST_DATA")
    path = Path(named) if named else ROOT.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip(f"no real graphs in {path}; PYG_SCALE_TEST_DATA says where they are")
    return path


@pytest.fixture
def fused_at_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers take their fused paths on small graphs, too, which they leave to PyG otherwise."""
    from pyg_scale.nn import FusedConv

    monkeypatch.setattr(FusedConv, "min_work", 0)


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Fails a test that leaves a thread of ours, a process, or another environment."""
    _freeze()
    threads, processes = set(_threads()), set(_processes())
    environment, settings = _environment(), _torch_settings()
    yield
    left = _until_empty(lambda: set(_threads()) - threads)
    assert not left, f"left threads running: {sorted(map(str, left))}"
    left = _until_empty(lambda: set(_processes()) - processes)
    assert not left, f"left processes running: {sorted(map(str, left))}"
    assert _environment() == environment, "changed os.environ"
    assert _torch_settings() == settings, "changed torch's threads, dtype, device or autocast"


def _threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith(("pyg_scale", "pyg-scale"))]


def _processes() -> list[psutil.Process]:
    """The processes below this one, without those that are kept until the end.

    These are multiprocessing's own and the server of tests.preloaded, but not what it has forked.
    """
    found = []
    kept_pid = preloaded.server_pid()
    for pid in _below(os.getpid()):
        try:
            process = psutil.Process(pid)
            command = " ".join(process.cmdline())
            if (
                pid != kept_pid
                and process.status() != psutil.STATUS_ZOMBIE
                and not any(
                    kept in command
                    for kept in ("resource_tracker", "forkserver", "torch_shm_manager")
                )
            ):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def _below(pid: int) -> list[int]:
    """The processes below another."""
    try:
        listed = list(Path(f"/proc/{pid}/task").glob("*/children"))
    except FileNotFoundError:  # it has just ended
        return []
    if not listed:  # psutil looks at every process of the machine, twice in every test
        with contextlib.suppress(psutil.NoSuchProcess):
            return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    children = []
    for path in listed:
        with contextlib.suppress(OSError):
            children += [int(child) for child in path.read_text().split()]
    return [one for child in children for one in (child, *_below(child))]


def _environment() -> dict[str, str]:
    # pytest itself writes PYTEST_*, Ray and torch the others when they are first used.
    written = (
        "PYTEST_",
        "RAY_CLIENT_MODE",
        "TORCHINDUCTOR_",
        "TRITON_",
        "KMP_",
        "CUDA_MODULE_LOADING",
    )
    return {k: v for k, v in os.environ.items() if not k.startswith(written)}


def _torch_settings() -> tuple[object, ...]:
    autocast = [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")]
    defaults = torch.get_default_dtype(), torch.get_default_device()
    return torch.get_num_threads(), *defaults, *autocast


def _until_empty(find: Callable[[], set]) -> set:
    start = time.monotonic()
    deadline = start + PATIENCE
    while (left := find()) and time.monotonic() < min(deadline, start + 12 * PATIENCE):
        # An iterator that a failed test still holds ends its threads when it goes.
        if not _collect():
            deadline = time.monotonic() + PATIENCE
        time.sleep(0.05)
    return left


def _collect() -> bool:
    """Collect garbage; returns False if nothing was done, as another thread is about it."""
    threads = []

    def note(phase: str, info: dict[str, int]) -> None:
        threads.append(threading.get_ident())

    gc.callbacks.append(note)
    gc.collect()
    gc.callbacks.remove(note)
    return threading.get_ident() in threads
