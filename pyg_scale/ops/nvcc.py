"""The choice of the CUDA compiler, and the devices that it compiles for.

Kernels for CUDA go into the same library as the others wherever ``nvcc`` is found, even if torch is
built for the CPU only: compiling them needs no part of torch's CUDA, and a library that has them
also loads without CUDA. ``PYG_SCALE_CUDA`` is ``auto`` (the default: compile them if nvcc is on the
PATH or named by ``CUDACXX``), ``1`` (raise if it is not), ``nvrtc`` (leave them to NVRTC,
:mod:`pyg_scale.ops.cuda_modules`) or ``0`` (leave them out); ``PYG_SCALE_CUDA_ARCH`` is a list like
``80;90``. The last one is also kept as PTX, which later devices compile when they load it.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from pyg_scale.errors import KernelsError

ARCHITECTURES = "80;90"
"""The devices that kernels are compiled for by default: A100, H100, H200 and later ones."""

FLAGS = ("-std=c++17", "-O3", "-DNDEBUG", "-fatbin", "-Xptxas=-v")
"""The flags of nvcc (see :mod:`pyg_scale.ops.sources`): no host code, only a driver's modules."""

_SWITCHES = ("auto", "0", "1", "nvrtc")


def switch() -> str:
    """The value of ``PYG_SCALE_CUDA``.

    Raises:
        ValueError: If it is none of ``auto``, ``0``, ``1`` and ``nvrtc``.
    """
    given = os.environ.get("PYG_SCALE_CUDA") or "auto"
    if given not in _SWITCHES:
        raise ValueError(f"PYG_SCALE_CUDA must be one of {', '.join(_SWITCHES)} (got {given!r})")
    return given


def find_nvcc() -> str | None:
    """The CUDA compiler to use; ``None`` if kernels for CUDA are to be left out.

    Raises:
        KernelsError: If ``PYG_SCALE_CUDA=1`` and there is none.
        ValueError: As :func:`switch`.
    """
    wish = switch()
    if wish in ("0", "nvrtc"):
        return None
    name = os.environ.get("CUDACXX") or "nvcc"
    found = shutil.which(name)
    if found is None and wish == "1":
        raise KernelsError(
            f"PYG_SCALE_CUDA=1, but {name} cannot be found: put the CUDA toolkit's bin directory "
            "on the PATH, or set CUDACXX; PYG_SCALE_CUDA=auto leaves kernels for CUDA to NVRTC"
        )
    return found


def wanted(source: Path) -> str | None:
    """The CUDA architectures that a library of these sources must hold.

    Returns:
        The architectures, as :func:`architectures`; ``""`` if it must have none; ``None`` if any
        will do, because this machine cannot compile for CUDA.

    Raises:
        KernelsError: As :func:`find_nvcc`.
        ValueError: As :func:`find_nvcc` and :func:`architectures`.
    """
    if switch() == "0":
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


def command(nvcc: str, compiler: list[str]) -> list[str]:
    """The start of the command that compiles a file into a module for all devices.

    Args:
        nvcc: As :func:`find_nvcc` returns it.
        compiler: The start of a C++ compiler's command: nvcc preprocesses with it.

    Raises:
        ValueError: As :func:`architectures`.
    """
    host = [f"-ccbin={compiler[0]}"] if len(compiler) == 1 else []
    names = architectures().split(";")
    codes = [f"-gencode=arch=compute_{name},code=sm_{name}" for name in names]
    codes.append(f"-gencode=arch=compute_{names[-1]},code=compute_{names[-1]}")
    return [nvcc, *FLAGS, *host, *codes]
