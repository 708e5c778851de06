"""The C++ sources: their folder, the flags to compile them, and the places of their library."""

from __future__ import annotations

import hashlib
import os
import platform
import stat
from itertools import chain
from pathlib import Path

from pyg_scale.errors import KernelsError
from pyg_scale.ops import nvcc

COMMAND = "pyg-scale build"
"""The command that compiles the kernels."""

NAME = "_kernels.abi3.so"
MARK = b"pyg_scale sources: "
"""Precedes the hash of the sources in a library, so that it can be read without loading it."""
CUDA_MARK = b"pyg_scale cuda: "
"""Precedes the architectures for which a library has kernels, such as ``80;90``, if any."""

FLAGS = (
    "-std=c++20",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-fopenmp-simd",
    "-ffp-contract=off",  # contracted multiply-adds round differently on other machines
    "-pthread",
    "-DNDEBUG",
    "-DTORCH_STABLE_ONLY",
    "-DTORCH_TARGET_VERSION=0x020b000000000000",  # 2.11
    "-Wall",
    "-Wextra",
)
LIBRARIES = ("-Wl,--no-as-needed", "-ltorch", "-Wl,--as-needed", "-ltorch_cpu")
"""``libtorch`` is linked for its dependencies: in a CUDA build, ``libtorch_cuda``."""

PATTERNS = ("*.cpp", "*.h", "cuda/*.cpp", "cuda/*.cu", "cuda/*.cuh", "cuda/*.h")
"""Patterns of the sources in their directory. Those in ``cuda`` are compiled if nvcc is found."""

_PACKAGE = Path(__file__).resolve().parent.parent


def source_dir() -> Path:
    """The directory of the C++ sources: in the package if installed, beside it in a checkout.

    Raises:
        KernelsError: If there is none.
    """
    inside, beside = _PACKAGE / "csrc", _PACKAGE.parent / "csrc"
    for candidate in (inside, beside):
        if next(candidate.glob("*.h"), None) or next(candidate.glob("*.cpp"), None):
            return candidate
    raise KernelsError(
        f"the C++ sources are missing: neither {inside} nor {beside} has any; reinstall pyg-scale"
    )


def cache_dir() -> Path:
    """The folder for compiled objects, and for the library if the package is read-only."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "pyg_scale"


def private_dir(folder: Path) -> Path:
    """A directory of the cache that nobody else can write to; made with mode ``0700``.

    Raises:
        KernelsError: If it exists and others can write to it, see :func:`require_own`.
        OSError: If it cannot be made.
    """
    for each in (*reversed(folder.parents), folder):
        if not each.exists():
            each.mkdir(mode=0o700, exist_ok=True)
    require_own(folder)
    return folder


def require_own(path: Path) -> None:
    """Refuse a file or directory of the cache that somebody else may have written.

    The path, and the directories from the cache down to it, must belong to this user or to root,
    and only the owner may write to them: code loaded from there runs with this user's rights.

    Raises:
        KernelsError: If it may not be loaded; names the remedy.
        OSError: If it does not exist.
    """
    top = cache_dir()
    if not path.is_relative_to(top):
        raise ValueError(f"{path} is not in {top}")
    for each in (path, *path.parents):
        for found in (each.lstat(), each.stat()):
            wrong = ""
            if found.st_uid not in (0, os.geteuid()):
                wrong = f"belongs to user {found.st_uid}, not to {os.geteuid()}"
            elif not stat.S_ISLNK(found.st_mode) and found.st_mode & 0o022:
                wrong = f"can be written to by others (its mode is {found.st_mode & 0o777:04o})"
            if wrong:
                raise KernelsError(
                    f"{each} {wrong}, so no compiled code is loaded from there: "
                    f"`chmod -R go-w {top}` if all of it is yours, else remove it; XDG_CACHE_HOME "
                    "selects another folder"
                )
        if each == top:
            return


def locations(source: Path | None = None) -> list[Path]:
    """The possible places of a library of these sources: the package, then the user's cache."""
    digest = source_hash(source or source_dir())[:16]
    return [_PACKAGE / "ops" / NAME, cache_dir() / f"{digest}-{platform.machine()}" / NAME]


def source_hash(source: Path) -> str:
    """The hash of the sources and of the flags, as 64 hexadecimal digits.

    It includes the sources for CUDA, whether or not there is a compiler for them.
    """
    digest = hashlib.sha256("\0".join((*FLAGS, *LIBRARIES, *nvcc.FLAGS)).encode())
    for path in sorted(chain.from_iterable(map(source.glob, PATTERNS))):
        name = path.relative_to(source).as_posix()
        digest.update(f"\0{name}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def built_from(library: Path) -> str | None:
    """The hash of the sources that a library was built from; ``None`` if it has none."""
    found = _marked(library, MARK)
    return None if found is None else found[:64]


def built_for(library: Path) -> str:
    """The architectures for which a library has kernels, such as ``80;90``; empty if none."""
    return _marked(library, CUDA_MARK) or ""


def _marked(library: Path, mark: bytes) -> str | None:
    data = library.read_bytes()
    start = data.find(mark)
    if start < 0:
        return None
    return data[start + len(mark) :][:100].partition(b"\0")[0].decode(errors="replace")
