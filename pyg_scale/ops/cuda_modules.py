"""The kernels of a CUDA device: compiled by nvcc, or by NVRTC at first use.

The compiled library launches both through the CUDA driver (``csrc/cuda/driver.cpp``). A file of
kernels is compiled for one type of features when it is first needed, in about a second, and kept in
the user's cache for all processes and runs. ``PYG_SCALE_CUDA`` is ``auto`` (the default: nvcc's if
the library has them for the device, else NVRTC's), ``nvrtc`` (NVRTC's), ``1`` (nvcc's or none) or
``0`` (none: CUDA tensors take the plain-torch path). Sources that are generated while a program
runs (:func:`keep_source`) are always NVRTC's.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from pyg_scale.errors import KernelsError
from pyg_scale.ops import nvcc, nvrtc
from pyg_scale.ops.sources import (
    COMMAND,
    built_for,
    cache_dir,
    private_dir,
    require_own,
    source_dir,
)

NVCC, NVRTC = "nvcc", "NVRTC"
"""The two ways of :func:`way`."""

OPTIONS = ("--std=c++17", "-DNDEBUG")
LOCK_SECONDS = 300.0
"""Seconds to wait for another process that compiles the same file, which takes seconds."""

_log = logging.getLogger("pyg_scale")
OF_GENERATED = ("--fmad=false",)
"""Options of generated sources, whose numbers have the same bits in every kernel that computes
them."""
_generated: dict[str, str] = {}
_MAGIC = b"pyg_scale module 1\n"
_KEEP_SECONDS = 30 * 24 * 3600
_PROBE = "first_places"  # a small file
_HELD, _MODULE, _ERROR = 0, 1, 2  # as in csrc/cuda/driver.h
_CALLBACK = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_void_p
)
_kept: list[object] = []
_saying = threading.Lock()
_said = False


# Which of the two #########################################################################


def way(library: Path, capability: int) -> tuple[str, str]:
    """The way in which kernels for a device would be compiled; compiles nothing.

    Args:
        library: The compiled library.
        capability: Compute capability of the device, ``90`` for 9.0.

    Returns:
        :data:`NVCC` or :data:`NVRTC`, and an empty text; or an empty text, and the reason and
        remedy.

    Raises:
        ValueError: If ``PYG_SCALE_CUDA`` is invalid.
    """
    switch = nvcc.switch()
    if switch == "0":
        return "", "PYG_SCALE_CUDA=0 forbids kernels for CUDA. Unset it"
    held = built_for(library)
    if switch != "nvrtc" and _serves(held, capability):
        return NVCC, ""
    if not held:
        lacks = f"{library} holds no kernels for CUDA"
        fix = f"PYG_SCALE_CUDA=1 {COMMAND}   # with the CUDA toolkit's nvcc on the PATH"
    else:
        lacks = f"{library} holds kernels for compute capability {held} (got {capability})"
        fix = f"PYG_SCALE_CUDA_ARCH={capability} {COMMAND}   # with nvcc on the PATH"
    if switch == "1":
        return "", f"{lacks}, and PYG_SCALE_CUDA=1 requires those of nvcc. Run: {fix}"
    try:
        compiler = nvrtc.find()
        if compiler is None:
            return (
                "",
                f"{lacks}, and there is no NVRTC to compile them. Run: {nvrtc.FIX}. Or: {fix}",
            )
        compiler.target(capability)
    except KernelsError as error:
        return "", f"{lacks}, and {error}. Or run: {fix}"
    return NVRTC, ""


def way_of_generated(capability: int) -> tuple[str, str]:
    """The same as :func:`way` for sources that are generated: :data:`NVRTC` or none.

    Args:
        capability: Compute capability of the device, ``90`` for 9.0.

    Raises:
        ValueError: If ``PYG_SCALE_CUDA`` is invalid.
    """
    switch = nvcc.switch()
    if switch in ("0", "1"):
        only = "forbids kernels for CUDA" if switch == "0" else "requires those of nvcc"
        return "", f"PYG_SCALE_CUDA={switch} {only}. Unset it"
    try:
        compiler = nvrtc.find()
        if compiler is None:
            return "", f"there is no NVRTC to compile kernels for CUDA. Run: {nvrtc.FIX}"
        compiler.target(capability)
    except KernelsError as error:
        return "", str(error)
    return NVRTC, ""


def why_not(library: Path, capability: int) -> str:
    """The reason why a device gets no kernels, and the remedy; else empty. Tries NVRTC once."""
    found, reason = way(library, capability)
    return _why_not_compiled(capability) if found == NVRTC else reason


def why_not_generated(capability: int) -> str:
    """The same as :func:`why_not` for sources that are generated."""
    found, reason = way_of_generated(capability)
    return _why_not_compiled(capability) if found else reason


def _why_not_compiled(capability: int) -> str:
    try:
        module(_PROBE, "", capability)
    except (KernelsError, OSError) as error:
        return str(error)
    return ""


def _serves(held: str, capability: int) -> bool:
    """Return True if a library compiled for ``80;90`` has code that a device can run."""
    names = held.split(";") if held else []
    for name in names:
        known = int(name.rstrip("af"))
        if name.endswith("a"):  # its code and PTX run on this device only
            runs = capability == known
        else:  # code runs on later devices of its major version, PTX on all later ones
            later = known // 10 == capability // 10 or (name == names[-1] and name[-1] != "f")
            runs = capability >= known and later
        if runs:
            return True
    return False


def answer_for(path: Path) -> None:
    """Serve a loaded library with the modules of kernels that it asks for.

    Args:
        path: The library that torch has loaded. A module is compiled when it asks for it.
    """
    library = ctypes.CDLL(str(path))
    library.pyg_scale_cuda_answer.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t)

    def asked(file: bytes, kind: bytes, capability: int, answer: int) -> int:
        try:
            if file.decode() in _generated:
                found, reason = way_of_generated(capability)
            else:
                found, reason = way(path, capability)
            if found == NVCC:
                return _HELD
            code = _MODULE if found else _ERROR
            given = module(file.decode(), kind.decode(), capability) if found else reason.encode()
        except BaseException as error:  # the calling C++ code raises the error
            code, given = _ERROR, f"{type(error).__name__}: {error}".encode()
        library.pyg_scale_cuda_answer(answer, given, len(given))
        return code

    callback = _CALLBACK(asked)
    library.pyg_scale_cuda_compile_with(callback)
    _kept.append((library, callback))


# Compiling ################################################################################


def keep_source(name: str, text: str) -> None:
    """Keep a generated source, of which a module is compiled when its kernel is launched.

    Args:
        name: Of the module, in place of that of a file; no other text may have it.
        text: The source, see :mod:`pyg_scale.ops.edge_formula_source`.
    """
    _generated[name] = text


def module(file: str, kind: str, capability: int) -> bytes:
    """The module of a file of kernels for a device: from the cache, or compiled and put there.

    One process of a machine compiles, the others wait for it.

    Args:
        file: Name of the file, ``"sum"`` for ``csrc/cuda/sum.cu``, or of a generated source.
        kind: The type of features, as ``csrc/cuda/launch.h`` names it; empty if there is none. Of a
            generated source: the bytes of a load.
        capability: Compute capability, ``90`` for 9.0.

    Raises:
        KernelsError: If there is no NVRTC, if it fails (with its log), if another process takes too
            long to compile the same file, or if others can write to the cache.
    """
    compiler = nvrtc.find()
    if compiler is None:
        raise KernelsError(f"there is no NVRTC to compile kernels for CUDA. Run: {nvrtc.FIX}")
    target = compiler.target(capability)
    options = [f"--gpu-architecture={target}", *OPTIONS]
    headers, digest = _sources()
    text = _generated.get(file)
    if text is None:
        text, options = headers[f"{file}.cu"], options + [f"-DPYG_SCALE_TYPE={kind}"] * bool(kind)
        identity = "\0".join([digest, str(compiler.version), *options])
    else:
        options += [*OF_GENERATED, f"-DPYG_SCALE_BYTES={kind}"]
        identity = "\0".join([digest, str(compiler.version), *options, text])
    name = "-".join(filter(None, (file, kind, target)))
    place = cache_dir() / "cuda" / f"{name}-{hashlib.sha256(identity.encode()).hexdigest()[:24]}"

    def compiled() -> bytes:
        _say(compiler, target)
        start = time.perf_counter()
        made = compiler.compile(f"{file}.cu", text, headers, options)
        _log.info("%s compiled %s in %.1f s", compiler, name, time.perf_counter() - start)
        return made

    return _once(place, compiled)


@functools.cache
def _sources() -> tuple[dict[str, str], str]:
    """All device code by file name, and its hash."""
    folder = source_dir() / "cuda"
    paths = sorted(path for end in ("*.cu", "*.cuh", "*.h") for path in folder.glob(end))
    texts = {path.name: path.read_text() for path in paths}
    digest = hashlib.sha256("\0".join(part for pair in texts.items() for part in pair).encode())
    return texts, digest.hexdigest()


def _say(compiler: nvrtc.Compiler, target: str) -> None:
    """Tell the user once why the first steps take longer."""
    global _said
    with _saying:
        if _said:
            return
        _said = True
    where = cache_dir() / "cuda"
    text = f"compiling CUDA kernels for {target} with {compiler}, once: they are kept in {where}"
    _log.info(text)
    if sys.stderr.isatty() and os.environ.get("RANK", "0") == "0":
        print(f"pyg_scale: {text}", file=sys.stderr)


# The cache ################################################################################


def _once(place: Path, make: Callable[[], bytes]) -> bytes:
    """The content of a file of the cache, which is made if it is missing or damaged."""
    if (found := _read(place)) is not None:
        return found
    from filelock import FileLock, Timeout  # comes with torch

    lock = place.with_suffix(".lock")
    try:
        private_dir(place.parent)
        with FileLock(lock, timeout=LOCK_SECONDS):
            if (found := _read(place)) is None:  # the lock's holder made it
                found = make()
                _write(place, found)
            return found
    except Timeout:
        raise KernelsError(
            f"another process has held {lock} for {LOCK_SECONDS:g} s to compile kernels for CUDA; "
            "wait for it or end it"
        ) from None
    except OSError as error:
        warnings.warn(
            f"kernels for CUDA cannot be kept in {place.parent} ({error}): they are compiled in "
            "every process. Set XDG_CACHE_HOME to another folder",
            RuntimeWarning,
            stacklevel=2,
        )
        return make() if found is None else found


def _read(place: Path) -> bytes | None:
    try:
        require_own(place)
        data = place.read_bytes()
    except OSError:
        return None
    checksum, body = data[len(_MAGIC) :][:32], data[len(_MAGIC) + 32 :]
    if not data.startswith(_MAGIC) or hashlib.sha256(body).digest() != checksum:
        _log.warning("%s is damaged and is compiled again", place)
        return None
    with contextlib.suppress(OSError):
        os.utime(place)  # still in use, see _write
    return body


def _write(place: Path, body: bytes) -> None:
    fresh = place.with_suffix(f".{os.getpid()}.tmp")
    try:
        with fresh.open("wb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(_MAGIC + hashlib.sha256(body).digest() + body)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, place)
    finally:
        fresh.unlink(missing_ok=True)
    old = time.time() - _KEEP_SECONDS
    for path in place.parent.iterdir():
        if path != place and path.stat().st_mtime < old:
            path.unlink(missing_ok=True)
