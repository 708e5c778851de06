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
from pyg_scale.ops import fused, library, nvcc, sources
from pyg_scale.ops.build import build

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or building.find_compiler() is None, reason="needs a C++ compiler"
)


@pytest.fixture
def with_cuda(checkout, monkeypatch):
    """A checkout with a file for CUDA, and no nvcc; returns what puts one on the PATH."""
    (checkout / "csrc" / "cuda").mkdir()
    (checkout / "csrc" / "cuda" / "launch.cu").write_text(
        'extern "C" __attribute__((visibility("default"))) int pyg_scale_launch() { return 5; }\n'
    )
    (checkout / "csrc" / "cuda" / "bind.cpp").write_text('extern "C" int pyg_scale_launch();\n')
    monkeypatch.setattr(nvcc.shutil, "which", lambda name: None)
    monkeypatch.setattr(building, "find_compiler", lambda: ["c++"])
    log = checkout / "nvcc.txt"

    def install() -> None:
        (checkout / "lib").mkdir(exist_ok=True)
        subprocess.run(["ar", "cr", checkout / "lib" / "libcudart_static.a"], check=True)
        script = checkout / "nvcc"
        script.write_text(
            f"""#!/bin/sh
            echo "$@" >> {log}
            case "$1" in
              --version) echo "release 13.0"; exit;;
              --dryrun) echo '#$ LIBRARIES=  "-L{checkout}/stubs" "-L{checkout}/lib"' >&2; exit;;
            esac
            while [ $# -gt 4 ]; do shift; done
            exec c++ -fPIC -fvisibility=hidden -x c++ "$@"
            """
        )
        script.chmod(0o755)
        monkeypatch.setattr(nvcc.shutil, "which", lambda name: str(script))

    install.log = log  # type: ignore[attr-defined]
    return install


def launch(path) -> int:
    copy = path.with_suffix(f".{path.stat().st_mtime_ns}.so")  # dlopen knows a file by name
    shutil.copy(path, copy)
    try:
        return ctypes.CDLL(str(copy)).pyg_scale_launch()
    except AttributeError:
        return 0
    finally:
        copy.unlink()


def test_without_nvcc_the_files_for_cuda_are_left_out(with_cuda):
    path = build()
    assert (sources.built_for(path), launch(path)) == ("", 0)


def test_with_nvcc_they_are_in_the_same_library(with_cuda, monkeypatch):
    path = build()
    with_cuda()
    assert build() == path  # again: there is more to compile now
    assert (sources.built_for(path), launch(path)) == ("80;90", 5)
    command = [line for line in with_cuda.log.read_text().splitlines() if "launch.cu" in line][-1]
    for code in ("compute_80,code=sm_80", "compute_90,code=sm_90", "compute_90,code=compute_90"):
        assert f"-gencode=arch={code}" in command
    with_cuda.log.unlink()
    monkeypatch.setattr(nvcc.shutil, "which", lambda name: None)
    assert build() == path  # where there is no nvcc, a library that has more is as good
    assert launch(path) == 5
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
    assert (sources.built_for(path), launch(path)) == ("", 0)
    monkeypatch.setenv("PYG_SCALE_CUDA", "yes")
    with pytest.raises(ValueError, match="PYG_SCALE_CUDA must be one of auto, 0, 1"):
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
    launcher = checkout / "csrc" / "cuda" / "launch.cu"
    launcher.write_text('#include "five.cuh"\n' + launcher.read_text().replace("5", "FIVE"))
    assert launch(build()) == 6
    header.write_text("#define FIVE 7\n")
    assert launch(build()) == 7
    assert path.exists()


def test_a_toolkit_without_its_runtime_is_an_error(with_cuda, checkout):
    with_cuda()
    (checkout / "lib" / "libcudart_static.a").unlink()
    with pytest.raises(KernelsError, match=r"no libcudart_static\.a.*PYG_SCALE_CUDA=0"):
        build()


def test_what_is_missing_is_said(monkeypatch):
    if not library.compiled():
        pytest.skip("the kernels are not compiled")
    monkeypatch.setattr(library, "built_for", lambda path: "")
    held, reason = library.cuda()
    assert held == ""
    assert "holds no kernels for CUDA" in reason
    assert reason.endswith("run: PYG_SCALE_CUDA=1 pyg-scale build")
    fused._missing.cache_clear()
    monkeypatch.setenv("PYG_SCALE_KERNELS", "auto")
    assert fused._on_cuda(0) is False
    assert fused.why_not(torch.device("cuda")) == reason
    monkeypatch.setenv("PYG_SCALE_KERNELS", "require")
    with pytest.raises(KernelsError, match="=require, but .* holds no kernels for CUDA"):
        fused._on_cuda(0)
    fused._missing.cache_clear()


def test_a_device_that_is_too_old_is_said(monkeypatch):
    monkeypatch.setattr(library, "cuda", lambda: ("80;90", ""))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "T4")
    fused._missing.cache_clear()
    assert "got 75, T4" in fused._missing(0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 0))
    assert fused._missing(1) == ""
    fused._missing.cache_clear()


def test_the_real_library_needs_no_cuda():
    """Nothing of CUDA's is undefined in it but the one weak name of torch's."""
    if not library.compiled() or not library.cuda()[0]:
        pytest.skip("there are no kernels for CUDA in the library")
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
