"""Compile ``csrc/`` into one library, with the compilers that are available.

The sources use torch's stable ABI, so the library depends neither on the version of Python nor on
that of torch (from 2.11 on), and a file compiles in seconds. This module does not import torch; it
only looks for its headers. Kernels for CUDA, ``csrc/cuda/*.cu``, are compiled if nvcc is found
(:mod:`pyg_scale.ops.nvcc`); the library that holds them serves torch with and without CUDA.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

from pyg_scale.errors import KernelsError
from pyg_scale.ops import nvcc
from pyg_scale.ops.sources import (
    CUDA_MARK,
    FLAGS,
    LIBRARIES,
    MARK,
    NAME,
    built_for,
    built_from,
    cache_dir,
    locations,
    private_dir,
    require_own,
    source_dir,
    source_hash,
)

_COMPILERS = ("c++", "g++", "clang++")
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
_STEP_SECONDS = 600
_KEEP_SECONDS = 14 * 24 * 3600
_NOTES = ".txt"


def find_compiler() -> list[str] | None:
    """The C++ compiler, as the start of a command: ``CXX``, else the first one found."""
    if wanted := shlex.split(os.environ.get("CXX", "")):
        return wanted if shutil.which(wanted[0]) else None
    found = next(filter(None, map(shutil.which, _COMPILERS)), None)
    return [found] if found else None


def _torch_dir() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise KernelsError(
            "the kernels are compiled against torch's headers, and torch is not installed: "
            "pip install torch (when installing from source, add --no-build-isolation)"
        )
    torch = Path(spec.submodule_search_locations[0])
    found = re.search(r"__version__ = '(\d+)\.(\d+)", (torch / "version.py").read_text())
    if found and (int(found[1]), int(found[2])) < (2, 11):
        raise KernelsError(
            f"the kernels need torch 2.11 or later (got {found[1]}.{found[2]}): "
            "pip install -U torch"
        )
    return torch


def _compiler() -> list[str]:
    if sys.platform != "linux":
        raise KernelsError(
            f"the kernels are compiled on Linux only (this is {sys.platform}); everything works "
            "without them, only slower"
        )
    compiler = find_compiler()
    if compiler is None:
        wanted = os.environ.get("CXX")
        looked = (
            f"CXX={wanted} cannot be found" if wanted else f"looked for {', '.join(_COMPILERS)}"
        )
        raise KernelsError(
            f"there is no C++ compiler: {looked}. Install one (apt install g++, dnf install "
            "gcc-c++, conda install cxx-compiler) or set CXX; everything works without the "
            "kernels, only slower"
        )
    return compiler


# Building #################################################################################


def build(
    *,
    source: Path | None = None,
    output: Path | None = None,
    force: bool = False,
    jobs: int | None = None,
    progress: Callable[[int, int, str], None] | None = None,
    timeout: float = 600,
) -> Path:
    """Compile the kernels, unless there is a library of the same sources.

    Files that did not change since an earlier build are not compiled again.

    Args:
        source: The directory of the sources; by default that of the package.
        output: The library to write; by default in the package if that is writable, else in the
            user's cache.
        force: Compile everything again.
        jobs: Number of compilers that run at once; one per core if ``None``.
        progress: Called with (files done, files in all, last file done).
        timeout: Seconds to wait for another build.

    Returns:
        The path of the library.

    Raises:
        KernelsError: If there are no sources, no compiler or no torch, if the compiler fails, or if
            another build holds the lock for too long; if ``PYG_SCALE_CUDA=1`` and there is no nvcc;
            or if others can write to the user's cache.
        ValueError: If ``PYG_SCALE_CUDA`` or ``PYG_SCALE_CUDA_ARCH`` is invalid.
    """
    source = Path(source) if source else source_dir()
    if not next(source.glob("*.cpp"), None):
        raise KernelsError(f"there is nothing to compile: {source} has no *.cpp")
    digest = source_hash(source)
    places = [Path(output)] if output else locations(source)
    cuda = nvcc.wanted(source)
    if not force and (ready := _ready(places, digest, cuda)):
        return ready
    torch = _torch_dir()
    from filelock import FileLock, Timeout  # comes with torch

    output = places[0] if output or os.access(places[0].parent, os.W_OK) else places[1]
    try:
        private_dir(cache_dir())
        if _in_cache(output):
            private_dir(output.parent)
        else:
            output.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(cache_dir() / "build.lock", timeout=timeout):
            if not force and (ready := _ready(places, digest, cuda)):  # the lock's holder made it
                return ready
            _build(torch, source, output, force, jobs, progress or (lambda *_: None))
    except Timeout:
        raise KernelsError(
            f"another build has held {cache_dir() / 'build.lock'} for {timeout:g} s; "
            "wait for it or end it"
        ) from None
    except OSError as error:
        raise KernelsError(f"the kernels could not be written: {error}") from error
    return output


def clean() -> list[Path]:
    """Remove the library and everything kept from earlier builds; returns what was removed."""
    removed = [path for path in (locations()[0], cache_dir()) if path.exists()]
    for path in removed:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return removed


def _in_cache(path: Path) -> bool:
    return path.is_relative_to(cache_dir())


def _ready(places: Sequence[Path], digest: str, cuda: str | None) -> Path | None:
    def fits(path: Path) -> bool:
        if _in_cache(path):
            require_own(path)
        return built_from(path) == digest and cuda in (None, built_for(path))

    return next((p for p in places if p.is_file() and fits(p)), None)


def _build(
    torch: Path,
    source: Path,
    output: Path,
    force: bool,
    jobs: int | None,
    progress: Callable[[int, int, str], None],
) -> None:
    compiler = _compiler()
    digest = source_hash(source)
    command = [*compiler, *FLAGS]
    versions = [_run([*compiler, "--version"]), (torch / "version.py").read_text()]
    identity = "\0".join([platform.machine(), *versions, *command])
    # Two environments with one torch share objects: their headers are the same.
    cpp = _Step([*command, f"-isystem{torch / 'include'}"], identity)
    host = [path for folder in ("*.cpp", "cuda/*.cpp") for path in sorted(source.glob(folder))]
    tasks, architectures = [(cpp, path) for path in host], ""
    if nvcc.wanted(source) and (found := nvcc.find_nvcc()):
        cuda = _cuda_step(found, compiler)
        tasks = [*((cuda, path) for path in sorted(source.glob("cuda/*.cu"))), *tasks]  # slowest
        architectures = nvcc.architectures()
    objects = private_dir(cache_dir() / "objects")
    total = len(tasks) + 2
    progress(0, total, "")
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".build-") as scratch:
        with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
            waiting = {
                pool.submit(_compile, step, path, objects, force): path for step, path in tasks
            }
            try:
                for done, future in enumerate(as_completed(waiting), start=1):
                    future.result()
                    progress(done, total, waiting[future].name)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        made = [(path, future.result()) for future, path in waiting.items()]
        modules = {path.stem: file for path, file in made if file.suffix == ".fatbin"}
        parts = [str(file) for _, file in made if file.suffix == ".o"]
        stamp = Path(scratch) / "sources.cpp"
        stamp.write_text(_held(digest, architectures, modules))
        parts.append(str(_compile(cpp, stamp, objects, force)))
        progress(total - 1, total, stamp.name)
        linked = Path(scratch) / NAME
        libraries = [f"-L{torch / 'lib'}", *LIBRARIES]
        _run([*compiler, "-shared", "-pthread", "-s", "-o", str(linked), *parts, *libraries])
        if source_hash(source) != digest:
            raise KernelsError(f"{source} changed while it was compiled: build again")
        if _in_cache(output):
            _only_own(linked)
        os.replace(linked, output)
    progress(total, total, output.name)
    _prune(objects)


def _held(digest: str, architectures: str, modules: dict[str, Path]) -> str:
    """C++ source that holds the hash of a library's sources and its modules for CUDA (driver.h)."""
    lines = [
        f'extern "C" const char pyg_scale_sources[] = "{MARK.decode()}{digest}";',
        f'extern "C" const char pyg_scale_cuda[] = "{CUDA_MARK.decode()}{architectures}";',
        "struct Image { const char* file; const void* data; };",
    ]
    for name, path in modules.items():
        symbol, file = f"pyg_scale_module_{name}", json.dumps(json.dumps(str(path)))[1:-1]
        lines += [
            f'asm(".section .rodata\\n.balign 64\\n.hidden {symbol}\\n.global {symbol}\\n"',
            f'    "{symbol}:\\n.incbin {file}\\n.text");',
            f'extern "C" __attribute__((visibility("hidden"))) const char {symbol}[];',
        ]
    listed = "".join(f'{{"{name}", pyg_scale_module_{name}}}, ' for name in modules)
    lines += [
        'extern "C" { extern const Image pyg_scale_cuda_images[]; }',
        f"const Image pyg_scale_cuda_images[] = {{{listed}{{nullptr, nullptr}}}};",
    ]
    return "\n".join(lines) + "\n"


class _Step(NamedTuple):
    """The command that compiles a file, and everything else that its result depends on."""

    command: list[str]
    identity: str
    suffix: str = ".o"


def _cuda_step(found: str, compiler: list[str]) -> _Step:
    command = nvcc.command(found, compiler)
    versions = [_run([*compiler, "--version"]), _run([found, "--version"])]
    return _Step(command, "\0".join([*versions, *command]), ".fatbin")


def compiler_notes(source: Path) -> dict[str, str]:
    """The notes of ptxas on the kernels of each ``csrc/cuda/*.cu``: registers, spilled bytes.

    Compiles files that no build has compiled yet.

    Raises:
        KernelsError: If there is no compiler for CUDA, or it fails.
    """
    compiler, found = _compiler(), nvcc.find_nvcc()
    if found is None:
        raise KernelsError("there is no nvcc: put the CUDA toolkit's bin directory on the PATH")
    step, objects = _cuda_step(found, compiler), private_dir(cache_dir() / "objects")
    return {
        path.name: _compile(step, path, objects, False).with_suffix(_NOTES).read_text()
        for path in sorted(source.glob("cuda/*.cu"))
    }


def _compile(step: _Step, path: Path, objects: Path, force: bool) -> Path:
    """Compile a file, or find its object, whose name identifies everything it was compiled from."""
    digest = _digest(step.identity, path)
    target = objects / f"{path.stem}-{digest}{step.suffix}"
    of_host = step.suffix == ".o"
    notes = None if of_host else target.with_suffix(_NOTES)
    files = [each for each in (target, notes) if each is not None]
    if all(each.exists() for each in files) and not force:
        for each in files:
            require_own(each)
            os.utime(each)  # still in use, see _prune
        return target
    fresh = target.with_suffix(f".{os.getpid()}.tmp")
    try:
        compiles = ["-c"] if of_host else []
        _run([*step.command, *compiles, str(path), "-o", str(fresh)], notes)
        if _digest(step.identity, path) != digest:
            raise KernelsError(f"{path} changed while it was compiled: build again")
        _only_own(fresh)
        os.replace(fresh, target)
    finally:
        fresh.unlink(missing_ok=True)
    return target


def _only_own(file: Path) -> None:
    """Make a file writable by its owner only, whatever the umask."""
    file.chmod(file.stat().st_mode & ~0o022)


def _digest(identity: str, path: Path) -> str:
    """The hash of a source file, of our headers that it includes, and of the compiler."""
    digest = hashlib.sha256(identity.encode())
    parts = [path]
    for part in parts:
        text = part.read_text()
        digest.update(f"\0{part.name}\0{text}".encode())
        for name in _INCLUDE.findall(text):
            header = (part.parent / name).resolve()
            if header.is_file() and header not in parts:
                parts.append(header)
    return digest.hexdigest()[:32]


def _run(command: list[str], notes: Path | None = None) -> str:
    """The output of a command; its messages go to the file ``notes`` if given, else to the user."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_STEP_SECONDS, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        raise KernelsError(
            f"this took more than {_STEP_SECONDS} s: {shlex.join(command)}"
        ) from None
    if done.returncode:
        raise KernelsError(
            f"this failed ({done.returncode}): {shlex.join(command)}\n{done.stderr.strip()}"
        )
    if notes is not None:
        notes.write_text(done.stderr)
    elif done.stderr.strip():
        print(done.stderr.strip(), file=sys.stderr)
    return done.stdout


def _prune(objects: Path) -> None:
    old = time.time() - _KEEP_SECONDS
    for path in objects.iterdir():
        if path.stat().st_mtime < old:
            path.unlink(missing_ok=True)
