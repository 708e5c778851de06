"""The compiled kernels, loaded once, on first use, and only if compiled from the current sources.

``PYG_SCALE_KERNELS`` says what to do without them: ``auto`` (the default) takes the plain-torch
path and says so once, ``never`` always takes it, ``require`` raises.

A loader with k workers has k threads that each make their own batch; an op that also split its work
would only slow them down: :func:`serial`. Results never depend on the number of threads.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyg_scale.errors import KernelsError
from pyg_scale.ops import cuda_modules
from pyg_scale.ops.sources import (
    COMMAND,
    built_for,
    built_from,
    cache_dir,
    locations,
    require_own,
    source_dir,
    source_hash,
)

_MODES = ("auto", "never", "require")
_AGAIN_SECONDS = 1.0


class _Library:
    """The state of the library. Loading is retried after a failure, as it may be built later."""

    def __init__(self) -> None:
        self.path: Path | None = None
        self.loaded = False
        self.stale = False
        self.reason = "the kernels are not compiled"
        self._looked = -_AGAIN_SECONDS
        self._lock = threading.Lock()

    def load(self) -> bool:
        if self.loaded:
            return True
        with self._lock:
            if not self.loaded and time.monotonic() - self._looked >= _AGAIN_SECONDS:
                self._load()
                self._looked = time.monotonic()
        return self.loaded

    def _load(self) -> None:
        self.path, self.stale, self.reason = None, False, "the kernels are not compiled"
        try:
            source = source_dir()
            expected = source_hash(source)
            places = locations(source)
        except (KernelsError, OSError) as error:
            self.reason = str(error)
            return
        for path in places:
            if not path.is_file():
                continue
            try:
                if path.is_relative_to(cache_dir()):
                    require_own(path)
                digest = built_from(path)
            except (KernelsError, OSError) as error:
                self.reason = str(error)
                continue
            self.path, self.stale = path, digest != expected
            if self.stale:
                self.reason = f"the kernels in {path} were compiled from other sources"
                continue
            import torch

            try:
                torch.ops.load_library(path)
            except (OSError, RuntimeError) as error:
                self.reason = f"torch {torch.__version__} cannot load {path}: {error}"
            else:
                if torch.version.cuda:
                    cuda_modules.answer_for(path)
                self.loaded, self.reason = True, ""
                return


_library = _Library()
_said = threading.Event()


def compiled() -> bool:
    """Return True if compiled ops may be called; loads them on first use.

    Raises:
        KernelsError: If they cannot be used and ``PYG_SCALE_KERNELS=require``.
        ValueError: If ``PYG_SCALE_KERNELS`` is none of ``auto``, ``never`` and ``require``.
    """
    mode = _mode()
    if mode == "never":
        return False
    if _library.load():
        return True
    if mode == "require":
        raise KernelsError(f"PYG_SCALE_KERNELS=require, but {_library.reason}. Run: {_command()}")
    return False


def load() -> None:
    """Load the compiled ops, for code that cannot do without.

    Raises:
        KernelsError: If they cannot be used, or must not be (``PYG_SCALE_KERNELS=never``).
        ValueError: If ``PYG_SCALE_KERNELS`` is none of ``auto``, ``never`` and ``require``.
    """
    if not compiled():
        state = status()
        fix = f". Run: {state['command']}" if state["command"] else ""
        raise KernelsError(f"this needs the compiled kernels, but {state['reason']}{fix}")


def status() -> dict[str, Any]:
    """The state that :func:`compiled` would find; never raises.

    Returns:
        ``mode`` (of ``PYG_SCALE_KERNELS``, or ``"invalid"``), ``path`` (of the library found, or
        ``None``), ``loaded``, ``stale`` (compiled from other sources), ``reason`` (why it is not
        loaded, or empty) and ``command`` (the remedy, or empty).
    """
    state: dict[str, Any] = {"mode": "auto", "path": None, "loaded": False, "stale": False}
    try:
        state["mode"] = _mode()
    except ValueError as error:
        return state | {
            "mode": "invalid",
            "reason": str(error),
            "command": "unset PYG_SCALE_KERNELS",
        }
    if state["mode"] == "never":
        return state | {"reason": "PYG_SCALE_KERNELS=never forbids them", "command": ""}
    _library.load()
    return state | {
        "path": str(_library.path) if _library.path else None,
        "loaded": _library.loaded,
        "stale": _library.stale,
        "reason": _library.reason,
        "command": "" if _library.loaded else _command(),
    }


def cuda() -> str:
    """The compute capabilities for which the loaded library has kernels, such as ``80;90``."""
    return built_for(_library.path) if _library.loaded and _library.path else ""


def way_on_cuda(capability: int) -> tuple[str, str]:
    """The way to compile kernels for a CUDA device, see :func:`pyg_scale.ops.cuda_modules.way`.

    Args:
        capability: Compute capability of the device, ``90`` for 9.0.

    Raises:
        ValueError: If ``PYG_SCALE_CUDA`` is invalid.
    """
    if not _library.loaded or _library.path is None:
        return "", f"{_library.reason}. Run: {_command()}"
    return cuda_modules.way(_library.path, capability)


def why_not_on_cuda(capability: int) -> str:
    """The reason why a CUDA device gets no kernels, and the remedy; else empty. Tries one kernel.

    Args:
        capability: Compute capability of the device, ``90`` for 9.0.

    Raises:
        ValueError: If ``PYG_SCALE_CUDA`` is invalid.
    """
    if not _library.loaded or _library.path is None:
        return f"{_library.reason}. Run: {_command()}"
    return cuda_modules.why_not(_library.path, capability)


def why_not_generated_on_cuda(capability: int) -> str:
    """The same as :func:`why_not_on_cuda` for kernels of sources that are generated.

    Args:
        capability: Compute capability of the device, ``90`` for 9.0.

    Raises:
        ValueError: If ``PYG_SCALE_CUDA`` is invalid.
    """
    if not _library.loaded or _library.path is None:
        return f"{_library.reason}. Run: {_command()}"
    return cuda_modules.why_not_generated(capability)


def warn_plain_path(what: str, reason: str = "") -> None:
    """Warn once per process that something takes the plain-torch path, and name the remedy.

    Args:
        what: Name of the caller that takes it, such as ``"NeighborLoader"``.
        reason: The reason and the remedy; if empty, those of :func:`status`.
    """
    if _said.is_set() or _mode() == "never":
        return
    _said.set()
    reason = reason or f"{_library.reason}. Run: {_command()}"
    warnings.warn(
        f"{what} takes the plain-torch path, which is slower: {reason} "
        "(PYG_SCALE_KERNELS=never silences this)",
        RuntimeWarning,
        stacklevel=3,
    )


def required() -> bool:
    """Return True if ``PYG_SCALE_KERNELS=require`` forbids the plain-torch path."""
    return _mode() == "require"


def to_signed(word: int) -> int:
    """The ``int64`` with the bits of an unsigned 64-bit ``word``, as ops take it."""
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >> 63 else word


def _mode() -> str:
    mode = os.environ.get("PYG_SCALE_KERNELS") or "auto"
    if mode not in _MODES:
        raise ValueError(f"PYG_SCALE_KERNELS must be one of {', '.join(_MODES)} (got {mode!r})")
    return mode


def _command() -> str:
    # A library of the current sources that does not load was compiled for another machine.
    return COMMAND + (" --force" if _library.path and not _library.stale else "")


# Threads ##########################################################################################

WAITING = 32
"""Number of threads of an op that mostly waits for a disk: a disk delivers several times as much
with this many requests at a time.
"""


class _Thread(threading.local):
    serial = False  # of every thread, until it says otherwise


_thread = _Thread()


def num_threads() -> int:
    """Number of threads for an op that this thread calls now."""
    if _thread.serial:
        return 1
    import torch

    return torch.get_num_threads()


@contextlib.contextmanager
def serial() -> Iterator[None]:
    """A context in which ops called by this thread use one thread."""
    before, _thread.serial = _thread.serial, True
    try:
        yield
    finally:
        _thread.serial = before


_forked = False  # since torch made its pool of threads
_renewing = threading.Lock()


def _note_fork() -> None:
    global _forked, _renewing
    _forked, _renewing = True, threading.Lock()


os.register_at_fork(after_in_child=_note_fork)


def renew_pool_after_fork() -> None:
    """Have torch make its thread pool anew in a fork; call it before threads that use torch.

    Torch does so without a lock in the first call that uses the pool: if a second thread makes such
    a call meanwhile, it raises "Invalid thread pool!".
    """
    global _forked
    with _renewing:
        if _forked:
            import torch

            torch.set_num_threads(torch.get_num_threads())
            _forked = False
