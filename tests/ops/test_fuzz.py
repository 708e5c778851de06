"""No argument of a compiled op ends the process: see ``tests/ops/fuzz.py``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pyg_scale.ops import build as building
from pyg_scale.ops import library, sources
from tests import preloaded
from tests.ops import emulated, fuzz
from tests.ops.op_calls import CALLS

pytestmark = pytest.mark.skipif(not library.compiled(), reason="the kernels are not compiled")

ROUNDS = 100
MANY_ROUNDS = 1500
MEMORY = 2 << 30
"""Bytes that a process may map: more is refused, and must raise."""
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=2048",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


def test_every_op_has_a_call() -> None:
    schemas = torch._C._jit_get_all_schemas()
    ops = {s.name.partition("::")[2] for s in schemas if s.name.startswith("pyg_scale::")}
    assert {name.partition(", ")[0] for name in CALLS} == ops


@pytest.mark.timeout(300)
def test_calls_return_or_raise() -> None:
    path = library.status()["path"]
    deaths = fuzz.run(preloaded.python(), path, ROUNDS, memory=MEMORY, most=3)
    assert not deaths, "\n\n".join(map(str, deaths))


@pytest.mark.timeout(120)
def test_a_call_that_ends_the_process_is_named(tmp_path: Path) -> None:
    code = "#include <cstdlib>\nstruct End { End() { std::abort(); } } end;\n"
    (tmp_path / "end.cpp").write_text(code)
    objects = emulated.compile_objects([tmp_path / "end.cpp"])
    ending = tmp_path / "end.so"
    command = [*(building.find_compiler() or []), "-shared", "-o", str(ending), str(objects[0])]
    subprocess.run(command, check=True, timeout=100)
    (death,) = fuzz.run(preloaded.python(), ending, 1, most=1)
    assert (death.name, death.number) == (next(iter(CALLS)), 0)
    assert "indptr=int64[7]" in str(death)
    assert "ended with -6" in str(death)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_calls_return_or_raise_under_sanitizers(tmp_path: Path) -> None:
    preloads = [_runtime(name) for name in ("libasan.so", "libubsan.so")]
    environ = {**OPTIONS, "LD_PRELOAD": " ".join(preloads), "OMP_NUM_THREADS": "2"}
    path = sanitized_library(tmp_path)
    deaths = fuzz.run(sys.executable, path, MANY_ROUNDS, environ=environ, memory=2 * MEMORY)
    assert not deaths, "\n\n".join(map(str, deaths))


def sanitized_library(scratch: Path) -> Path:
    """The compiled ops with checks of every access and of all arithmetic."""
    source = sources.source_dir()
    stamp = scratch / "held.cpp"
    stamp.write_text(building._held("", "", {}))
    files = [*source.glob("*.cpp"), *source.glob("cuda/*.cpp"), stamp]
    flags = (*(flag for flag in sources.FLAGS if flag != "-O3"), "-O1", "-g1")
    checks = (*emulated.SANITIZE, "-fsanitize=float-cast-overflow")
    torch_dir = building._torch_dir()
    objects = emulated.compile_objects(
        sorted(files), (*flags, *checks), f"-isystem{torch_dir / 'include'}"
    )
    libraries = (f"-L{torch_dir / 'lib'}", *sources.LIBRARIES)
    return emulated.link(objects, "-shared", *checks, *libraries, suffix=".so")


def _runtime(name: str) -> str:
    """A library of the compiler, to be loaded before all others."""
    compiler = building.find_compiler()
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    path = building._run([*compiler, f"-print-file-name={name}"]).strip()
    if not Path(path).is_absolute():
        pytest.skip(f"the compiler comes without {name}")
    return path
