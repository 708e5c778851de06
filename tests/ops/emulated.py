"""The device code of ``csrc/cuda/`` compiled for the CPU emulator, as ops of torch.

:func:`load` compiles what nvcc would, with a C++ compiler and ``csrc/emulator/``, and registers the
same bindings as ``torch.ops.pyg_scale_emulated.*`` for tensors on the CPU. :func:`instead_of` puts
them in the place of the compiled CPU ops, gradients and all.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from pyg_scale.ops import build as building
from pyg_scale.ops import cuda_modules, library, sources

FLAGS = (
    *("-std=c++20", "-O1", "-g1", "-fPIC", "-fvisibility=hidden", "-pthread", "-ffp-contract=off"),
    *("-Wall", "-Wextra", "-Wno-unknown-pragmas", "-DPYG_SCALE_EMULATED"),
)
TORCH_FLAGS = ("-DTORCH_STABLE_ONLY", "-DTORCH_TARGET_VERSION=0x020b000000000000")
OF_DEVICE_CODE = ("-x", "c++", "-fsanitize=alignment", "-fno-sanitize-recover=alignment")
LAUNCHING = ("emulator/emulator.cpp", "emulator/driver.cpp", "cuda/driver.cpp")
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
        command = [*compiler, *flags, *more, *(OF_DEVICE_CODE if path.suffix == ".cu" else ())]
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
        kernels: The ``*.cu`` of ``csrc/cuda/``, without their endings.
        sanitized: Whether it runs under ASan and UBSan.
        fault: A macro that plants a fault.
        of: In which file of ``csrc/cuda/``.
    """
    source = sources.source_dir()
    more = SANITIZE if sanitized else ()
    flags = (*FLAGS, "-DPYG_SCALE_TYPE=float") if sanitized else FLAGS
    names = [*LAUNCHING, *(f"cuda/{name}.cu" for name in kernels), f"emulator/{check}"]
    names += [name.relative_to(source).as_posix() for name in source.glob("cuda/*_launch.cpp")]
    objects = []
    if fault:  # first: of functions that several files hold the linker takes the first one
        (faulty,) = (name for name in names if name.startswith(f"cuda/{of}."))
        names.remove(faulty)
        objects += compile_objects([source / faulty], flags, *more, f"-D{fault}")
    return link([*objects, *compile_objects([source / n for n in names], flags, *more)], *more)


def run(path: Path, *names: str) -> subprocess.CompletedProcess[str]:
    """Run a program, or some of its checks."""
    return subprocess.run([path, *names], capture_output=True, text=True, timeout=100)


def libcuda() -> Path:
    """A library to be put in the place of ``libcuda.so.1``; its kernels are the emulated ones."""
    source = sources.source_dir()
    files = [source / "emulator" / "emulator.cpp", *sorted(source.glob("cuda/*.cu"))]
    objects = compile_objects(files)
    objects += compile_objects([source / "emulator" / "driver.cpp"], FLAGS, "-DPYG_SCALE_LIBCUDA")
    return link(objects, "-shared", suffix=".so")


def driven(scratch: Path) -> Path:
    """The ops on CPU tensors, for a driver that is found as on a machine with a GPU.

    The library holds the module ``weight_grad`` and a damaged ``extreme``; it asks for others.
    :func:`define` tells torch of the ops.
    """
    modules = {name: scratch / f"{name}.fatbin" for name in ("extreme", "weight_grad")}
    modules["extreme"].write_bytes(b"damaged\0")
    modules["weight_grad"].write_bytes(b"emulated\0")
    held = scratch / "held.cpp"
    held.write_text(building._held("", "", modules))
    source = sources.source_dir()
    return _with_torch([*compile_objects([held, source / "cuda" / "driver.cpp"]), *_bindings()])


@functools.cache
def load() -> tuple[str, ...]:
    """Compile and load the emulated ops; the names of all that there are."""
    if not library.compiled():
        pytest.skip("the kernels are not compiled")
    source = sources.source_dir()
    files = [*LAUNCHING, *(file.relative_to(source) for file in source.glob("cuda/*.cu"))]
    emulator, *files = files
    objects = compile_objects([source / emulator], FLAGS, "-fvisibility=default")
    objects += compile_objects([source / name for name in files])
    path = _with_torch([*objects, *_bindings()])
    names = define()
    torch.ops.load_library(path)
    loaded = ctypes.CDLL(str(path))
    _counts.append(loaded.pyg_scale_emulator_counts)
    _serve_generated(path, loaded)
    return names


def _serve_generated(path: Path, loaded: ctypes.CDLL) -> None:
    """Compile the generated sources that a library asks for, and link them with its emulator."""
    loaded.pyg_scale_cuda_answer.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t)

    def asked(file: bytes, kind: bytes, capability: int, answer: int) -> int:
        code, said = 1, b"emulated\0"
        try:
            if file.decode() in cuda_modules._generated:
                _load_generated(path, file.decode(), kind.decode())
        except BaseException as error:
            code, said = 2, f"{type(error).__name__}: {error}".encode()
        loaded.pyg_scale_cuda_answer(answer, said, len(said))
        return code

    callback = cuda_modules._CALLBACK(asked)
    loaded.pyg_scale_cuda_compile_with(callback)
    _kept.append(callback)


def _load_generated(emulator: Path, name: str, kind: str) -> None:
    folder = sources.source_dir() / "cuda"
    headers = hashlib.sha256((folder.parent / "emulator" / "emulator.h").read_bytes()).hexdigest()
    more = (f"-I{folder}", f"-DPYG_SCALE_BYTES={kind}")
    # The headers, for the key of the object.
    more += (f"-DPYG_SCALE_HEADERS={headers[:12]}{cuda_modules._sources()[1]}",)
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / f"{name}.cu"
        file.write_text(cuda_modules._generated[name])
        made = link(
            [*compile_objects([file], FLAGS, *more)], "-shared", str(emulator), suffix=".so"
        )
    ctypes.CDLL(str(made))


def counts() -> tuple[int, int, int]:
    """What kernels of this thread read since the last call.

    Returns:
        Loads of features, of all lanes; their bytes; numbers of the columns of graphs.
    """
    found = _counted()
    return found[0], found[1], found[2]


def launches() -> int:
    """Number of kernels that this thread has launched since the last call, or that of counts."""
    return _counted()[3]


def _counted() -> tuple[int, ...]:
    load()
    found = (ctypes.c_int64 * 4)()
    _counts[0](found)
    return tuple(found)


def define() -> tuple[str, ...]:
    """Tell torch of the ops of ``pyg_scale_emulated``, as those of ``pyg_scale``; their names."""
    files = sources.source_dir().glob("cuda/*.cpp")
    names = sorted({name for file in files for name in _implemented(file)})
    definitions = torch.library.Library("pyg_scale_emulated", "DEF")
    for name in names:
        schema = str(getattr(torch.ops.pyg_scale, name).default._schema)
        definitions.define(schema.removeprefix("pyg_scale::"))
    _kept.append(definitions)
    return tuple(names)


def _bindings() -> list[Path]:
    """Objects of what takes tensors and launches."""
    files = [file for file in sources.source_dir().glob("cuda/*.cpp") if file.stem != "driver"]
    include = building._torch_dir() / "include"
    return compile_objects(files, (*FLAGS, *TORCH_FLAGS), f"-isystem{include}")


def _with_torch(objects: Sequence[Path]) -> Path:
    libraries = (f"-L{building._torch_dir() / 'lib'}", *sources.LIBRARIES)
    return link(sorted(objects), "-shared", *libraries, suffix=".so")


_kept: list[Any] = []
_counts: list[Callable[..., None]] = []


def _implemented(file: Path) -> list[str]:
    text = file.read_text()
    return [part.partition('"')[0] for part in text.split('m.impl("')[1:]]


def instead_of() -> contextlib.AbstractContextManager[None]:
    """Within it the ops on CPU tensors are the emulated ones."""
    emulated = torch.ops.pyg_scale_emulated
    return overridden({name: getattr(emulated, name).default for name in load()})


@contextlib.contextmanager
def overridden(ops: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Within it ops on CPU tensors, by name, are others."""
    overriding = torch.library.Library("pyg_scale", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a kernel is overridden
            for name, op in ops.items():
                overriding.impl(name, op, "CPU")
        yield
    finally:
        overriding._destroy()
