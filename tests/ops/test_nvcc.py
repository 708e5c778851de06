"""Compiling for CUDA: with a stand-in for nvcc everywhere, with the real one where it is."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys

import pytest
import torch

from pyg_scale.errors import KernelsError
from pyg_scale.ops import build as building
from pyg_scale.ops import cuda_modules, fused, library, nvcc, nvrtc, sources
from pyg_scale.ops.build import build

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or building.find_compiler() is None, reason="needs a C++ compiler"
)


@pytest.fixture
def with_cuda(checkout, monkeypatch):
    """A checkout with a file for CUDA, and no nvcc; returns what puts one on the PATH."""
    (checkout / "csrc" / "cuda").mkdir()
    (checkout / "csrc" / "cuda" / "five.cu").write_text("kernels: 5\n")
    (checkout / "csrc" / "cuda" / "bind.cpp").write_text(
        "struct Image { const char* file; const char* data; };\n"
        'extern "C" { extern const Image pyg_scale_cuda_images[]; }\n'
        'extern "C" __attribute__((visibility("default"))) const char* pyg_scale_image(int i) '
        "{ return pyg_scale_cuda_images[i].data; }\n"
    )
    monkeypatch.setattr(nvcc.shutil, "which", lambda name: None)
    monkeypatch.setattr(building, "find_compiler", lambda: ["c++"])
    log = checkout / "nvcc.txt"

    def install() -> None:
        script = checkout / "nvcc"
        script.write_text(
            f"""#!/bin/sh
            echo "$@" >> {log}
            case "$1" in
              --version) echo "release 13.0"; exit;;
            esac
            while [ $# -gt 3 ]; do shift; done
            c++ -E -P -x c++ "$1" > "$3"
            printf '\\0' >> "$3"
            """
        )
        script.chmod(0o755)
        monkeypatch.setattr(nvcc.shutil, "which", lambda name: str(script))

    install.log = log  # type: ignore[attr-defined]
    return install


def held(path) -> str:
    """The module that a library holds; of other libraries, and where none is held, nothing."""
    copy = path.with_suffix(f".{path.stat().st_mtime_ns}.so")  # dlopen knows a file by name
    shutil.copy(path, copy)
    try:
        found = ctypes.CDLL(str(copy)).pyg_scale_image
    finally:
        copy.unlink()
    found.restype = ctypes.c_char_p
    return (found(0) or b"").decode().strip()


def test_without_nvcc_the_files_for_cuda_are_left_out(with_cuda):
    path = build()
    assert (sources.built_for(path), held(path)) == ("", "")


def test_with_nvcc_they_are_in_the_same_library(with_cuda, monkeypatch):
    path = build()
    with_cuda()
    assert build() == path  # again: there is more to compile now
    assert (sources.built_for(path), held(path)) == ("80;90", "kernels: 5")
    command = [line for line in with_cuda.log.read_text().splitlines() if "five.cu" in line][-1]
    for code in ("compute_80,code=sm_80", "compute_90,code=sm_90", "compute_90,code=compute_90"):
        assert f"-gencode=arch={code}" in command
    with_cuda.log.unlink()
    monkeypatch.setattr(nvcc.shutil, "which", lambda name: None)
    assert build() == path  # where there is no nvcc, a library that has more is as good
    assert held(path) == "kernels: 5"
    assert not with_cuda.log.exists()


def test_switches(with_cuda, monkeypatch):
    monkeypatch.setenv("PYG_SCALE_CUDA", "1")
    with pytest.raises(KernelsError, match="PYG_SCALE_CUDA=1, but nvcc cannot be found"):
        build()
    with_cuda()
    monkeypatch.setenv("PYG_SCALE_CUDA_ARCH", "86")
    assert sources.built_for(build()) == "86"
    monkeypatch.setenv("PYG_SCALE_CUDA", "0")
    path = build()
    assert (sources.built_for(path), held(path)) == ("", "")
    monkeypatch.setenv("PYG_SCALE_CUDA", "yes")
    with pytest.raises(ValueError, match="PYG_SCALE_CUDA must be one of auto, 0, 1, nvrtc"):
        build()
    monkeypatch.setenv("PYG_SCALE_CUDA", "auto")
    monkeypatch.setenv("PYG_SCALE_CUDA_ARCH", "sm_90")
    with pytest.raises(ValueError, match="PYG_SCALE_CUDA_ARCH must be a list like 80;90"):
        build()


def test_files_for_cuda_are_sources_and_compiled_when_they_change(with_cuda, checkout):
    with_cuda()
    before = sources.source_hash(checkout / "csrc")
    path = build()
    header = checkout / "csrc" / "cuda" / "five.cuh"
    header.write_text("#define FIVE 6\n")
    assert sources.source_hash(checkout / "csrc") != before
    kernels = checkout / "csrc" / "cuda" / "five.cu"
    kernels.write_text('#include "five.cuh"\n' + kernels.read_text().replace("5", "FIVE"))
    assert held(build()) == "kernels: 6"
    header.write_text("#define FIVE 7\n")
    assert held(build()) == "kernels: 7"
    assert path.exists()


@pytest.mark.skipif(not library.compiled(), reason="the kernels are not compiled")
@pytest.mark.parametrize(
    ("switch", "held", "there", "expected"),
    [
        ("auto", "80;90", True, ("nvcc", "")),
        ("auto", "80;90", False, ("nvcc", "")),
        ("1", "", True, ("", "PYG_SCALE_CUDA=1 requires those of nvcc")),
        ("auto", "", True, ("NVRTC", "")),
        ("nvrtc", "80;90", True, ("NVRTC", "")),
        ("auto", "90", True, ("NVRTC", "")),
        ("1", "90", True, ("", "kernels for compute capability 90 (got 80)")),
        ("auto", "", False, ("", "no NVRTC to compile them. Run: pip install nvidia-cuda-nvrtc")),
        ("auto", "", "old", ("", "compiles for compute capability 90 and later (got 80)")),
        ("0", "80;90", True, ("", "PYG_SCALE_CUDA=0 forbids")),
    ],
)
def test_which_kernels_a_device_gets(switch, held, there, expected, monkeypatch):
    compiler = object.__new__(nvrtc.Compiler)
    compiler.path, compiler.version = "libnvrtc.so.13", (13, 0)
    compiler.architectures = (90,) if there == "old" else (75, 80, 90)
    monkeypatch.setenv("PYG_SCALE_CUDA", switch)
    monkeypatch.setattr(cuda_modules, "built_for", lambda path: held)
    monkeypatch.setattr(nvrtc, "find", lambda: compiler if there else None)
    way, reason = library.way_on_cuda(80)
    assert way == expected[0]
    assert expected[1] in reason and bool(reason) == (not way)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(cuda_modules, "module", lambda *what: b"")
    fused._missing.cache_clear()
    monkeypatch.setenv("PYG_SCALE_KERNELS", "auto")
    assert fused._on_cuda(0) is bool(way)
    assert fused.why_not(torch.device("cuda")) == reason
    monkeypatch.setenv("PYG_SCALE_KERNELS", "require")
    if not way:
        with pytest.raises(KernelsError, match="PYG_SCALE_KERNELS=require, but "):
            fused._on_cuda(0)
    fused._missing.cache_clear()


@pytest.mark.parametrize(
    ("held", "serves", "not_"),
    [
        ("", [], [80, 90]),
        ("80;90", [80, 86, 89, 90, 100, 120], [70, 75]),
        ("75;90", [75, 90, 103], [70, 80, 89]),  # Turing's code is of no use to Ampere
        ("90;80", [80, 86, 90, 100], [75]),
        ("80;90a", [80, 86, 90], [100, 120]),
        ("100f", [100, 103], [90, 110, 120]),
    ],
)
def test_which_devices_code_and_ptx_run_on(held, serves, not_):
    assert [each for each in (*serves, *not_) if cuda_modules._serves(held, each)] == serves


@pytest.mark.skipif(not library.compiled(), reason="the kernels are not compiled")
def test_a_compiler_that_fails_is_found_before_the_first_op(monkeypatch):
    def fails(*what):
        raise KernelsError("NVRTC cannot compile first_places.cu. Its log: no")

    monkeypatch.setattr(cuda_modules, "way", lambda path, capability: ("NVRTC", ""))
    monkeypatch.setattr(cuda_modules, "module", fails)
    assert library.why_not_on_cuda(90) == "NVRTC cannot compile first_places.cu. Its log: no"


def test_the_real_library_needs_no_cuda():
    """Nothing of CUDA's is undefined in it but the one weak name of torch's."""
    if not library.compiled():
        pytest.skip("the kernels are not compiled")
    path = library.status()["path"]
    names = subprocess.run(
        ["nm", "--dynamic", "--undefined-only", path], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    undefined = {parts[-1]: parts[-2] for parts in map(str.split, names)}
    of_cuda = {n: kind for n, kind in undefined.items() if n.startswith(("cu", "__cuda", "nv"))}
    assert of_cuda == {}
    assert undefined["aoti_torch_get_current_cuda_stream"] == "w"
    needed = subprocess.run(
        ["readelf", "--dynamic", path], capture_output=True, text=True, check=True
    ).stdout
    assert "libcud" not in needed and "libtorch_cuda" not in needed
    assert torch._C._dispatch_has_kernel_for_dispatch_key("pyg_scale::csr_sum", "CUDA")
