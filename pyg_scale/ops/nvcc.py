"""The CUDA compiler: whether it is used, for which devices, and what a library links against.

Kernels for CUDA go into the same library as the others wherever ``nvcc`` is found, beside a torch
for the CPU too: nothing of torch's CUDA is needed to compile them, and a library that holds them
loads where there is none. ``PYG_SCALE_CUDA`` is ``auto`` (the default: compile them if nvcc is on
the PATH, or is what ``CUDACXX`` names), ``1`` (raise if it is not) or ``0`` (leave them out);
``PYG_SCALE_CUDA_ARCH`` is a list like ``80;90``. The last one is also kept as PTX, which later
devices compile when they load it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from pyg_scale.errors import KernelsError

ARCHITECTURES = "80;90"
"""The devices that kernels are compiled for by default: A100, H100 and H200, and what is later."""

FLAGS = ("-std=c++17", "-O3", "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall", "-DNDEBUG")
"""As in :mod:`pyg_scale.ops.sources`, for nvcc."""

_SWITCHES = ("auto", "0", "1")
_SECONDS = 60


class Toolchain(NamedTuple):
    """How files of CUDA are compiled and linked."""

    command: list[str]
    libraries: list[str]
    architectures: str


def find_nvcc() -> str | None:
    """The CUDA compiler that is to be used; ``None`` if kernels for CUDA are to be left out.

    Raises:
        KernelsError: If ``PYG_SCALE_CUDA=1`` and there is none.
        ValueError: If ``PYG_SCALE_CUDA`` is none of ``auto``, ``0`` and ``1``.
    """
    switch = os.environ.get("PYG_SCALE_CUDA") or "auto"
    if switch not in _SWITCHES:
        raise ValueError(f"PYG_SCALE_CUDA must be one of {', '.join(_SWITCHES)} (got {switch!r})")
    if switch == "0":
        return None
    name = os.environ.get("CUDACXX") or "nvcc"
    found = shutil.which(name)
    if found is None and switch == "1":
        raise KernelsError(
            f"PYG_SCALE_CUDA=1, but {name} cannot be found: put the CUDA toolkit's bin directory "
            "on the PATH, or set CUDACXX; PYG_SCALE_CUDA=auto leaves kernels for CUDA out"
        )
    return found


def wanted(source: Path) -> str | None:
    """What a library of these sources must hold for CUDA.

    Returns:
        The architectures, as :func:`architectures`; ``""`` if there must be none; ``None`` if any
        will do, because nothing can be compiled for CUDA here.

    Raises:
        KernelsError: As :func:`find_nvcc`.
        ValueError: As :func:`find_nvcc` and :func:`architectures`.
    """
    if os.environ.get("PYG_SCALE_CUDA") == "0":
        return ""
    found = find_nvcc()
    return architectures() if found and next(source.glob("cuda/*.cu"), None) else None


def architectures() -> str:
    """The devices to compile for, such as ``80;90``.

    Raises:
        ValueError: If ``PYG_SCALE_CUDA_ARCH`` is not such a list.
    """
    given = os.environ.get("PYG_SCALE_CUDA_ARCH") or ARCHITECTURES
    if not re.fullmatch(r"[1-9]\d{1,2}[af]?(;[1-9]\d{1,2}[af]?)*", given):
        raise ValueError(f"PYG_SCALE_CUDA_ARCH must be a list like {ARCHITECTURES} (got {given!r})")
    return given


def toolchain(nvcc: str, compiler: list[str]) -> Toolchain:
    """The commands of a CUDA compiler, with a C++ compiler for what runs on the host.

    Args:
        nvcc: As :func:`find_nvcc` returns it.
        compiler: The start of a C++ compiler's command.

    Raises:
        KernelsError: If nvcc does not say where its libraries are.
        ValueError: As :func:`architectures`.
    """
    host = [f"-ccbin={compiler[0]}"] if len(compiler) == 1 else []
    listed = architectures()
    names = listed.split(";")
    codes = [f"-gencode=arch=compute_{name},code=sm_{name}" for name in names]
    codes.append(f"-gencode=arch=compute_{names[-1]},code=compute_{names[-1]}")
    # The runtime is linked statically: the library loads where there is no CUDA.
    static = [*_library_dirs(nvcc), "-lcudart_static", "-lrt", "-ldl", "-lpthread"]
    return Toolchain([nvcc, *FLAGS, *host, *codes], static, listed)


def _library_dirs(nvcc: str) -> list[str]:
    with tempfile.TemporaryDirectory() as scratch:
        empty = Path(scratch, "empty.cu")
        empty.touch()
        command = [nvcc, "--dryrun", "-c", str(empty), "-o", str(empty.with_suffix(".o"))]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise KernelsError(f"{nvcc} does not answer: {error}") from error
    found = re.search(r"^#\$ LIBRARIES=(.*)$", done.stderr, re.MULTILINE)
    dirs = re.findall(r"-L([^\"\s]+)", found[1]) if found else []
    kept = [name for name in dirs if (Path(name) / "libcudart_static.a").is_file()]
    if not kept:
        raise KernelsError(
            f"{nvcc} has no libcudart_static.a (looked in {', '.join(dirs) or 'no directory'}): "
            "install the whole CUDA toolkit, or set PYG_SCALE_CUDA=0"
        )
    return [f"-L{name}" for name in kept]
