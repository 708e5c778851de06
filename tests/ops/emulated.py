"""The device code of ``csrc/cuda/`` compiled for the CPU emulator, as ops of torch.

:func:`load` compiles what nvcc would, with a C++ compiler and ``csrc/emulator/``, and registers the
same bindings as ``torch.ops.pyg_scale_emulated.*`` for tensors on the CPU. :func:`instead_of` puts
them in the place of the compiled CPU ops, gradients and all.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import subprocess
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from pyg_scale.ops import build as building
from pyg_scale.ops import library, sources

FLAGS = (
    *("-std=c++20", "-O1", "-g1", "-fPIC", "-fvisibility=hidden", "-pthread", "-ffp-contract=off"),
    *("-Wall", "-Wextra", "-Wno-unknown-pragmas", "-DPYG_SCALE_EMULATED"),
)
TORCH_FLAGS = ("-DTORCH_STABLE_ONLY", "-DTORCH_TARGET_VERSION=0x020b000000000000")
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")


def compile_objects(paths: Sequence[Path], flags: Sequence[str] = FLAGS, *more: str) -> list[Path]:
    """Objects of ``*.cu`` and ``*.cpp`` files, kept like those of ``pyg-scale build``."""
    compiler = building.find_compiler()
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    version = building._run([*compiler, "--version"])
    objects = sources.cache_dir() / "objects"
    objects.mkdir(parents=True, exist_ok=True)

    def one(path: Path) -> Path:
        command = [*compiler, *flags, *more, *(("-x", "c++") if path.suffix == ".cu" else ())]
        step = building._Step(command, "\0".join([version, *command]))
        return building._compile(step, path, objects, False)

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return list(pool.map(one, paths))


def link(objects: Sequence[Path], *more: str, suffix: str = "") -> Path:
    """Objects linked into a file that is kept between runs."""
    names = "\0".join([*(path.name for path in objects), *more])
    path = (
        sources.cache_dir() / f"emulated-{hashlib.sha256(names.encode()).hexdigest()[:24]}{suffix}"
    )
    if not path.exists():
        fresh = path.with_suffix(f".{os.getpid()}.tmp")
        compiler = building.find_compiler() or []
        building._run([*compiler, "-pthread", "-o", str(fresh), *map(str, objects), *more])
        os.replace(fresh, path)
    return path


def program(
    check: str, kernels: Sequence[str], *, sanitized: bool = True, fault: str = "", of: str = ""
) -> Path:
    """A program of ``csrc/emulator/`` with the kernels that it runs.

    Args:
        check: Its file.
        kernels: Files of ``csrc/cuda/``, without their endings.
        sanitized: Whether it runs under ASan and UBSan.
        fault: A macro that plants a fault.
        of: In which of the kernels' files.
    """
    source = sources.source_dir()
    more = SANITIZE if sanitized else ()
    flags = (*FLAGS, "-DPYG_SCALE_FLOAT_ALONE") if sanitized else FLAGS
    objects = []
    if fault:  # first: of functions that several files hold the linker takes the first one
        objects += compile_objects([source / "cuda" / f"{of}.cu"], flags, *more, f"-D{fault}")
    files = [source / "emulator" / name for name in ("emulator.cpp", check)]
    sound = [name for name in ("errors", *kernels) if not (fault and name == of)]
    files += [source / "cuda" / f"{name}.cu" for name in sound]
    return link([*objects, *compile_objects(files, flags, *more)], *more)


def run(path: Path, *names: str) -> subprocess.CompletedProcess[str]:
    """Run a program, or some of its checks."""
    return subprocess.run([path, *names], capture_output=True, text=True, timeout=100)


def device_files() -> list[Path]:
    """What is compiled for the emulator: its scheduler and all of ``csrc/cuda``'s ``*.cu``."""
    source = sources.source_dir()
    return [source / "emulator" / "emulator.cpp", *sorted(source.glob("cuda/*.cu"))]


@functools.cache
def load() -> tuple[str, ...]:
    """Compile and load the emulated ops; the names of all that there are."""
    if not library.compiled():
        pytest.skip("the kernels are not compiled")
    torch_dir = building._torch_dir()
    bindings = sorted(sources.source_dir().glob("cuda/*.cpp"))
    objects = compile_objects(device_files())
    objects += compile_objects(bindings, (*FLAGS, *TORCH_FLAGS), f"-isystem{torch_dir / 'include'}")
    path = link(objects, "-shared", f"-L{torch_dir / 'lib'}", *sources.LIBRARIES, suffix=".so")
    names = sorted({name for file in bindings for name in _implemented(file)})
    definitions = torch.library.Library("pyg_scale_emulated", "DEF")
    for name in names:
        schema = str(getattr(torch.ops.pyg_scale, name).default._schema)
        definitions.define(schema.removeprefix("pyg_scale::"))
    _kept.append(definitions)
    torch.ops.load_library(path)
    return tuple(names)


_kept: list[torch.library.Library] = []


def _implemented(file: Path) -> list[str]:
    text = file.read_text()
    return [part.partition('"')[0] for part in text.split('m.impl("')[1:]]


@contextlib.contextmanager
def instead_of() -> Iterator[None]:
    """Within it the ops on CPU tensors are the emulated ones."""
    overriding = torch.library.Library("pyg_scale", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a kernel is overridden
            for name in load():
                overriding.impl(name, getattr(torch.ops.pyg_scale_emulated, name).default, "CPU")
        yield
    finally:
        overriding._destroy()
