"""NVRTC, NVIDIA's compiler of device code as a library: found, opened and called.

It comes with torch for CUDA, needs neither a GPU nor a C++ compiler, and is opened on first use.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pyg_scale.errors import KernelsError

FIX = "pip install nvidia-cuda-nvrtc   # for CUDA 12: nvidia-cuda-nvrtc-cu12"
"""The command that installs NVRTC where torch did not."""

_NAME = re.compile(r"libnvrtc\.so\.(\d+)(\.[\d.]+)?$")
_MAJORS = (13, 12)
_WHEELS = ("cu13/lib", "cuda_nvrtc/lib")


class Compiler:
    """An NVRTC that was opened.

    Args:
        path: The path of ``libnvrtc.so.*``, or only its name, for the system to find.

    Attributes:
        path: The path as given.
        version: The version, such as ``(13, 0)``.
        architectures: The compute capabilities that it compiles for, ``90`` for 9.0.

    Raises:
        OSError: If it cannot be opened.
    """

    def __init__(self, path: str) -> None:
        folder = Path(path).parent
        # NVRTC opens its library of built-in functions only by name, where the system looks for it.
        for beside in sorted(folder.glob("libnvrtc-builtins.so.*")) if "/" in path else ():
            ctypes.CDLL(str(beside))
        self.path = path
        self._library = ctypes.CDLL(path)
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor, count = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = (major.value, minor.value)
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        found = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", found)
        self.architectures = tuple(sorted(found))

    def __str__(self) -> str:
        return "NVRTC " + ".".join(map(str, self.version))

    def target(self, capability: int) -> str:
        """The ``--gpu-architecture`` for a device; PTX if the device is later than this compiler.

        Raises:
            KernelsError: If the device is too old for it.
        """
        if capability in self.architectures:
            return f"sm_{capability}"
        older = [known for known in self.architectures if known < capability]
        if not older:
            raise KernelsError(
                f"{self} ({self.path}) compiles for compute capability {self.architectures[0]} and "
                f"later (got {capability}). Set PYG_SCALE_NVRTC to an older NVRTC"
            )
        return f"compute_{older[-1]}"

    def compile(
        self, name: str, source: str, headers: Mapping[str, str], options: Sequence[str]
    ) -> bytes:
        """Compile a file into a module that the driver loads.

        Args:
            name: Name of the file in messages.
            source: Its text.
            headers: The text of all included headers, by name.
            options: ``--gpu-architecture=sm_90`` makes machine code, ``=compute_90`` PTX.

        Raises:
            KernelsError: If it does not compile; has NVRTC's log.
        """
        program = ctypes.c_void_p()
        texts = (ctypes.c_char_p * len(headers))(*map(str.encode, headers.values()))
        names = (ctypes.c_char_p * len(headers))(*map(str.encode, headers))
        self._call(
            *("nvrtcCreateProgram", ctypes.byref(program), source.encode(), name.encode()),
            *(len(headers), texts, names),
        )
        try:
            given = (ctypes.c_char_p * len(options))(*map(str.encode, options))
            code = self._library.nvrtcCompileProgram(program, len(options), given)
            if code:
                log = self._result(program, "nvrtcGetProgramLog").rstrip(b"\0\n").decode()
                raise KernelsError(
                    f"{self} ({self.path}) cannot compile {name} with {' '.join(options)}: "
                    f"{self._error(code)}. Its log:\n{log}\nAnother one may: {FIX}; "
                    "or compile with nvcc: PYG_SCALE_CUDA=1 pyg-scale build"
                )
            virtual = any("=compute_" in option for option in options)
            return self._result(program, "nvrtcGetPTX" if virtual else "nvrtcGetCUBIN")
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _result(self, program: ctypes.c_void_p, name: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"{name}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(name, program, buffer)
        return buffer.raw

    def _call(self, name: str, *args: object) -> None:
        code = getattr(self._library, name)(*args)
        if code:
            raise KernelsError(f"{name} of {self.path} failed: {self._error(code)}")

    def _error(self, code: int) -> str:
        text: bytes = self._library.nvrtcGetErrorString(code)
        return text.decode()


@functools.cache
def find() -> Compiler | None:
    """The first NVRTC that opens: next to torch, in the CUDA toolkit, or on the system's path.

    If ``PYG_SCALE_NVRTC`` names one, only that one is tried.

    Raises:
        KernelsError: If ``PYG_SCALE_NVRTC`` names one that cannot be opened.
    """
    wanted = os.environ.get("PYG_SCALE_NVRTC")
    for path in [wanted] if wanted else _candidates():
        try:
            return Compiler(path)
        except (OSError, AttributeError) as error:
            if wanted:
                raise KernelsError(f"PYG_SCALE_NVRTC={wanted} cannot be opened: {error}") from error
    return None


def _candidates() -> Iterator[str]:
    """Possible paths; first those of torch's own version of CUDA, which the driver supports."""
    spec = importlib.util.find_spec("nvidia")
    homes = [Path(home) for home in (spec.submodule_search_locations or ())] if spec else []
    folders = [home / wheel for home in homes for wheel in _WHEELS]
    torch = importlib.util.find_spec("torch")
    folders += [Path(home) / "lib" for home in (torch and torch.submodule_search_locations) or ()]
    toolkits = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    folders += [Path(home, lib) for home in toolkits if home for lib in ("lib64", "lib")]
    found = [path for folder in folders for path in folder.glob("libnvrtc.so.*")]
    versions = {path: match for path in found if (match := _NAME.search(path.name))}
    own = _own_major()
    yield from map(str, sorted(versions, key=lambda path: int(versions[path][1]) != own))
    yield from (f"libnvrtc.so.{major}" for major in sorted(_MAJORS, key=lambda m: m != own))


def _own_major() -> int:
    import torch

    return int((torch.version.cuda or "0").partition(".")[0])
