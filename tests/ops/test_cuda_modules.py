"""Kernels that NVRTC compiles: the cache, the compiler where there is one, and the driver."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pyg_scale.errors import KernelsError
from pyg_scale.ops import build as building
from pyg_scale.ops import cuda_modules, nvrtc, sources
from tests.ops import emulated

ROOT = Path(__file__).parents[2]
KINDS = ("float", "double", "Bfloat16", "Half")
FILES = ("sum", "extreme", "weight_grad", "attention", "attention_grad")
WITHOUT_TYPES = ("adjacency", "candidates", "draw_neighbors", "first_places", "gather_cached")

needs_nvrtc = pytest.mark.skipif(
    nvrtc.find() is None,
    reason=f"needs NVRTC: {nvrtc.FIX}, or PYG_SCALE_NVRTC=/path/to/libnvrtc.so.13",
)


# The cache ################################################################################


class Counting:
    """In the place of NVRTC."""

    path, version = "libnvrtc.so.13", (13, 0)

    def __init__(self) -> None:
        self.made: list[str] = []
        self.seconds = 0.0

    def target(self, capability):
        return f"sm_{capability}"

    def compile(self, name, source, headers, options):
        self.made.append(" ".join([name, *options[3:]]))
        time.sleep(self.seconds)
        assert source == headers[name]
        return f"{name} {options}".encode()


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    compiler = Counting()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(nvrtc, "find", lambda: compiler)
    monkeypatch.setattr(cuda_modules, "_said", False)
    return compiler


def kept(tmp_path: Path) -> list[Path]:
    return [p for p in (tmp_path / "pyg_scale" / "cuda").iterdir() if p.suffix != ".lock"]


def test_a_module_is_compiled_once(compiler, tmp_path, caplog):
    with caplog.at_level(logging.INFO, "pyg_scale"):
        first = cuda_modules.module("sum", "float", 90)
        assert cuda_modules.module("sum", "float", 90) == first
    assert compiler.made == ["sum.cu -DPYG_SCALE_TYPE=float"]
    said = [r.message for r in caplog.records if "once: they are kept in" in r.message]
    assert len(said) == 1 and "sm_90" in said[0]
    assert len(kept(tmp_path)) == 1


def test_what_it_is_made_of_is_its_key(compiler, monkeypatch):
    cuda_modules.module("sum", "float", 90)
    cuda_modules.module("sum", "Half", 90)
    cuda_modules.module("sum", "float", 80)
    compiler.version = (13, 1)
    cuda_modules.module("sum", "float", 80)
    texts, _ = cuda_modules._sources()
    monkeypatch.setattr(cuda_modules, "_sources", lambda: (texts, "other"))
    cuda_modules.module("sum", "float", 80)
    assert len(compiler.made) == 5


@pytest.mark.parametrize("damage", ["cut", "bits", "empty", "other"])
def test_a_damaged_file_is_compiled_again(compiler, tmp_path, damage, caplog):
    whole = cuda_modules.module("gather_cached", "", 90)
    (path,) = kept(tmp_path)
    data = path.read_bytes()
    flipped = data[:-1] + bytes([data[-1] ^ 1])
    path.write_bytes({"cut": data[:-1], "bits": flipped, "empty": b"", "other": b"x" * 99}[damage])
    assert cuda_modules.module("gather_cached", "", 90) == whole
    assert f"{path} is damaged" in caplog.text
    assert path.read_bytes() == data
    assert len(compiler.made) == 2


def test_of_many_that_want_it_one_compiles(compiler):
    compiler.seconds = 0.2
    found: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: found.append(cuda_modules.module("sum", "float", 90)))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 6 and len(set(found)) == 1
    assert len(compiler.made) == 1


def test_who_waits_too_long_says_for_what(compiler, tmp_path, monkeypatch):
    from filelock import FileLock

    cuda_modules.module("sum", "float", 90)
    (path,) = kept(tmp_path)
    path.unlink()
    monkeypatch.setattr(cuda_modules, "LOCK_SECONDS", 0.1)
    lock = path.with_suffix(".lock")
    with FileLock(lock), pytest.raises(KernelsError, match=f"held {lock} for 0.1 s to compile"):
        cuda_modules.module("sum", "float", 90)


def test_a_compiler_that_fails_leaves_nothing(compiler, tmp_path, monkeypatch):
    def fails(*args):
        raise KernelsError("no")

    monkeypatch.setattr(compiler, "compile", fails)
    with pytest.raises(KernelsError, match="no"):
        cuda_modules.module("sum", "float", 90)
    assert kept(tmp_path) == []


def test_without_a_place_to_keep_them(compiler, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for _ in range(2):
        with pytest.warns(RuntimeWarning, match="cannot be kept in .*XDG_CACHE_HOME"):
            assert cuda_modules.module("sum", "float", 90)
    assert len(compiler.made) == 2


def test_what_others_may_have_written_is_not_loaded(compiler, tmp_path):
    before = os.umask(0)
    try:
        cuda_modules.module("sum", "float", 90)
    finally:
        os.umask(before)
    (place,) = kept(tmp_path)
    assert place.stat().st_mode & 0o777 == 0o600
    assert place.parent.stat().st_mode & 0o777 == 0o700
    for wrong in (place, place.parent, tmp_path / "pyg_scale"):
        mode = wrong.stat().st_mode
        wrong.chmod(mode | 0o002)
        with pytest.raises(KernelsError, match="can be written to by others .*chmod -R go-w"):
            cuda_modules.module("sum", "float", 90)
        wrong.chmod(mode)
    place.unlink()
    place.parent.chmod(0o777)
    with pytest.raises(KernelsError, match="can be written to by others"):
        cuda_modules.module("sum", "float", 90)
    assert len(compiler.made) == 1


def test_what_nobody_used_for_long_goes(compiler, tmp_path):
    cuda_modules.module("sum", "float", 90)
    cuda_modules.module("sum", "float", 80)
    for path in kept(tmp_path):
        os.utime(path, (0, 0))
    cuda_modules.module("sum", "float", 80)  # it is in use
    cuda_modules.module("sum", "Half", 80)
    assert sorted(path.name[:13] for path in kept(tmp_path)) == ["sum-Half-sm_8", "sum-float-sm_"]


# The compiler #############################################################################


@pytest.fixture(scope="module")
def emulated_kernels() -> set[str]:
    names = ctypes.CDLL(str(emulated.libcuda())).pyg_scale_emulated_kernels
    names.restype = ctypes.c_char_p
    return set(names().decode().split())


def kernels_in(module: bytes) -> set[str]:
    """The kernels of a module: each has a section of code of its own."""
    parts = module.split(b".text.")[1:]
    return {part.partition(b"\0")[0].decode() for part in parts}


def test_the_files_of_kernels_are_these():
    listed = {path.stem for path in sources.source_dir().glob("cuda/*.cu")}
    assert listed == {*FILES, *WITHOUT_TYPES}


@needs_nvrtc
@pytest.mark.parametrize("file", [*FILES, *WITHOUT_TYPES])
def test_nvrtc_makes_every_kernel_of_a_type(file, emulated_kernels):
    kind = "" if file in WITHOUT_TYPES else "float"
    found = kernels_in(cuda_modules.module(file, kind, 90))
    assert found and found <= emulated_kernels


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("capability", [80, 90])
def test_nvrtc_makes_every_kernel_that_there_is(capability, emulated_kernels):
    units = [(file, kind) for file in FILES for kind in KINDS]
    units += [(file, "") for file in WITHOUT_TYPES]
    found = [kernels_in(cuda_modules.module(*unit, capability)) for unit in units]
    assert set().union(*found) == emulated_kernels
    assert sum(map(len, found)) == len(emulated_kernels)


@needs_nvrtc
def test_an_error_has_the_log_and_what_to_do():
    compiler = nvrtc.find()
    assert compiler is not None
    with pytest.raises(KernelsError, match=r'(?s)cannot compile it\.cu.*"nowhere".*nvcc: PYG_SCA'):
        compiler.compile("it.cu", "int x = nowhere;", {}, ["--gpu-architecture=sm_90"])
    with pytest.raises(KernelsError, match="compiles for compute capability .* and later"):
        compiler.target(20)
    newest = compiler.architectures[-1]
    assert compiler.target(newest) == f"sm_{newest}"
    assert compiler.target(newest + 200) == f"compute_{newest}"


@needs_nvrtc
def test_a_device_that_is_later_than_the_compiler_gets_ptx(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = cuda_modules.module("draw_neighbors", "", 990)
    assert b".visible .entry draw_neighbors(" in made
    assert made.endswith(b"\0")  # as the driver wants it


def test_one_that_is_named_must_open(monkeypatch):
    nvrtc.find.cache_clear()
    monkeypatch.setenv("PYG_SCALE_NVRTC", "/nowhere/libnvrtc.so.13")
    try:
        with pytest.raises(KernelsError, match="PYG_SCALE_NVRTC=/nowhere.* cannot be opened"):
            nvrtc.find()
    finally:
        nvrtc.find.cache_clear()


# The driver ###############################################################################

INTERFACE = """
#include <cuda.h>
#include <cstdint>
template <typename... Theirs, typename... Ours>
constexpr bool alike(CUresult (*)(Theirs...), void (*)(Ours...)) {
  if constexpr (sizeof...(Theirs) != sizeof...(Ours)) return false;
  else return ((sizeof(Theirs) == sizeof(Ours)) && ...);
}
static_assert(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR == kMajor);
static_assert(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR == kMinor);
static_assert(CU_STREAM_CAPTURE_MODE_RELAXED == kRelaxed);
static_assert(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED == kUnsupported);
static_assert(CUDA_ERROR_CAPTURED_EVENT == kCaptured);
static_assert((CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP) == kPortableAndMapped);
"""


def test_the_driver_is_called_as_its_header_says(tmp_path):
    """Its interface is written out in ``driver.cpp``: where that is compiled, no header is."""
    compiler, tool = building.find_compiler(), shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda", tool and Path(tool).parents[1]]
    folders = [Path(home, "include") for home in homes if home]
    found = next((folder for folder in folders if (folder / "cuda.h").is_file()), None)
    if compiler is None or found is None:
        pytest.skip("needs a C++ compiler and cuda.h")
    text = (sources.source_dir() / "cuda" / "driver.cpp").read_text()
    constants = re.findall(r"constexpr .*\bk[A-Z].*;", text)
    members = re.findall(r"Function<([^>]*)>\s+((?:\w+{\"\w+\"}(?:, )?)+);", text)
    named = [(kinds, name) for kinds, given in members for name in re.findall(r'"(\w+)"', given)]
    assert len(named) == text.count('{"cu') == 20
    header = (found / "cuda.h").read_text()
    lines = []
    for kinds, name in named:
        plain = re.sub(r"_v\d+$", "", name)
        meant = re.search(rf"#define {plain}\s.*\b({plain}_v\d+)\b", header)
        assert name == (meant[1] if meant else plain)
        lines.append(f"static_assert(alike(&{name}, static_cast<void (*)({kinds})>(nullptr)));")
    program = tmp_path / "interface.cpp"
    program.write_text("\n".join([*constants, INTERFACE, *lines]))
    building._run([*compiler, "-std=c++20", f"-I{found}", "-fsyntax-only", str(program)])


SCRIPT = """
import json, sys, threading, torch
from pyg_scale.errors import KernelsError
from pyg_scale.ops import cuda_modules, library
from pyg_scale.ops.aggregate import aggregate_plain
from tests.ops import emulated

path, wanted = sys.argv[1:]
library.load()
emulated.define()
torch.ops.load_library(path)
ops, none = torch.ops.pyg_scale_emulated, (None, None, None)
indptr, indices = torch.tensor([0, 2, 2, 900]), torch.arange(900) % 40
x, weight = torch.randn(40, 8), torch.randn(900, 2)
found = {}

def error(name, call):
    try:
        call()
    except RuntimeError as error:
        found[name] = str(error)

def total(x=x, weight=weight):
    return ops.csr_sum(indptr, indices, None, *none, x, weight, True)

error("nobody asked", total)
cuda_modules.answer_for(path)
seen, compile = [], cuda_modules.module

def fails(*unit):
    raise KernelsError("its log: no")

cuda_modules.way = lambda path, capability: ("", "there is none. Run: this")
error("no way", total)
cuda_modules.way = lambda path, capability: ("nvcc", "")
graph = indptr, indices, None
products = ops.csr_weight_grad(*graph, x, torch.ones(3, 8), None, 1, False)
torch.testing.assert_close(products[:, 0], x[indices].sum(1), rtol=1e-4, atol=1e-5)
error("damaged", lambda: ops.csr_extreme(*graph, *none, x, None, False))
cuda_modules.way = lambda path, capability: ("NVRTC", "")
cuda_modules.module = fails
error("compiler", total)

def module(*unit):
    seen.append(unit)
    return compile(*unit) if wanted == "NVRTC" else b"emulated\\0"

cuda_modules.module = module
near = torch.testing.assert_close
near(total(), aggregate_plain(indptr, indices, None, x, weight, "mean"), rtol=1e-4, atol=1e-5)
threads = [threading.Thread(target=total) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
kind = torch.float32 if wanted == "NVRTC" else torch.float64
features, ends = torch.randn(40, 2, 6, dtype=kind), torch.randn(40, 2, dtype=kind)
edges = indptr, indices, None, *none
out, lse, _ = ops.gat_attention(*edges, features, ends, ends[:3], None, 0.2, 0.0, None, False)
row = torch.arange(3).repeat_interleave(indptr.diff())
logits = torch.nn.functional.leaky_relu(ends[indices] + ends[:3][row], 0.2).exp()
sums = torch.zeros(3, 2, dtype=kind).index_add(0, row, logits)
values = features[indices] * logits.unsqueeze(-1)
means = torch.zeros(3, 2, 6, dtype=kind).index_add(0, row, values)
near(out, means / sums.clamp(min=1e-30).unsqueeze(-1))
rest = torch.randn(9, 5)
ops.map_rows(rest, 1)
near(ops.gather_cached(x[:0, :5], rest, -1 - torch.tensor([3, 8]), None), rest[[3, 8]])
assert ops.unmap_rows(rest, 1)
error("device", lambda: ops.map_rows(rest, 7))
found["seen"] = seen
print(json.dumps(found))
"""


def driven(tmp_path, wanted):
    if wanted == "NVRTC":  # here: there it would find the driver, and ask it for more
        for unit in (("sum", "float"), ("attention", "float"), ("gather_cached", "")):
            cuda_modules.module(*unit, 90)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libcuda.so.1").symlink_to(emulated.libcuda())
    environment = os.environ | {
        "LD_LIBRARY_PATH": str(tmp_path / "lib"),
        "PYTHONPATH": str(ROOT),
        "PYG_SCALE_KERNELS": "auto",
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, emulated.driven(tmp_path), wanted],
        capture_output=True,
        text=True,
        timeout=100,
        env=environment,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("wanted", ["emulated", pytest.param("NVRTC", marks=needs_nvrtc)])
def test_the_driver_gets_what_was_compiled_and_runs_it(tmp_path, wanted):
    emulated.load()  # skips where there is no compiler
    found = driven(tmp_path, wanted)
    assert "csr_sum failed: this library holds no kernels for CUDA" in found["nobody asked"]
    assert "csr_sum failed: there is none. Run: this" in found["no way"]
    assert "csr_sum failed: KernelsError: its log: no" in found["compiler"]
    assert "cuModuleLoadData of extreme; PYG_SCALE_CUDA=nvrtc has it compiled" in found["damaged"]
    assert "invalid device ordinal (cuDeviceGet" in found["device"]
    kind = "float" if wanted == "NVRTC" else "double"
    once = [["sum", "float", 90], ["attention", kind, 90], ["gather_cached", "", 90]]
    assert [unit for i, unit in enumerate(found["seen"]) if unit not in found["seen"][:i]] == once


FAULTS = {
    "PYG_SCALE_FAULT_ARGUMENT_ORDER": ("driver", True, "AddressSanitizer: "),
    "PYG_SCALE_TYPE=double": ("sum", False, "named symbol not found (cuModuleGetFunction sum_wei"),
}


@pytest.mark.slow  # each is compiled
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault):
    file, sanitized, expected = FAULTS[fault]
    names = ("sum", "extreme", "weight_grad", "attention")
    program = emulated.program("check.cpp", names, sanitized=sanitized, fault=fault, of=file)
    done = emulated.run(program, "sum")
    assert done.returncode != 0
    assert expected in done.stdout + done.stderr
